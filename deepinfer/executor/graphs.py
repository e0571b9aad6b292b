"""CUDA graphs: steps of rounds rounded up to few shapes, captured once, replayed from then on.

A decode step is thousands of small kernels, which a GPU runs faster than a host can launch them.  Nothing in such a step looks at
a number on the host, so that one captured program serves all steps of its shape: lengths, positions, pages, and how many drafts
each round verifies are data.  :class:`Buckets` makes shapes recur; :class:`Graphs` captures and replays.

Padding is inert: rounds of nobody stand in slot 0 and page 0, and rows of nobody behind all others.  No sum changes its order
with the number of rows, so a padded step gives the same bits as one that is not, and a replay the same as a fresh run.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import StepFailed
from deepinfer.ops.arithmetic import to_device
from deepinfer.step import PLACEHOLDER, Chunk, Round, StepPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_FILLING = 8
"""Pages of a padded plan for each one before.  Buckets alone make less than 4; more comes from contexts of different lengths."""


def bucket(count: int, interval: int) -> int:
    """``count`` rounded up: to a power of two below ``interval``, to a multiple of it from there on."""
    if count >= interval:
        return -(-count // interval) * interval
    return min(1 << max(0, count - 1).bit_length(), interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStep:
    """A step as the device computes it.

    Attributes:
        plan: what to compute; its rounds may have more pages than planned, and padding rounds in slot 0 come last.
        num_rounds: rounds that were planned; the others are padding.
        num_round_rows: rows of all rounds, and padding rows after them.
        recurs: whether steps of this shape come again, so that a graph pays.
    """

    plan: StepPlan
    num_rounds: int
    num_round_rows: int
    recurs: bool

    @classmethod
    def of(cls, plan: StepPlan) -> PaddedStep:
        """A plan without padding."""
        return cls(plan=plan, num_rounds=len(plan.rounds), num_round_rows=len(plan.rounds) + plan.num_drafts, recurs=False)

    @property
    def num_padding_rows(self) -> int:
        """Rows that no round of the plan takes."""
        return self.num_round_rows - self.num_rounds - self.plan.num_drafts

    @property
    def sampling(self) -> list[Chunk]:
        """Chunks behind which a token is sampled."""
        return [chunk for chunk in self.plan.chunks if chunk.samples]

    @property
    def sampling_ids(self) -> list[str]:
        """Requests that get tokens: those of chunks that sample, then those of the plan's rounds."""
        return [chunk.request_id for chunk in self.sampling] + self._round_ids

    @property
    def drafting_ids(self) -> list[str]:
        """Requests that drafts are made for, in the order of the drafts."""
        return [chunk.request_id for chunk in self.plan.chunks if chunk.drafts] + self._round_ids

    @property
    def _round_ids(self) -> list[str]:
        return [each.request_id for each in self.plan.rounds[: self.num_rounds]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes that steps of rounds are rounded up to.

    Pages of a round are rounded up to a power of two for all rounds of a step.

    Attributes:
        rows: interval of rows, ``DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL``.
        requests: interval of rounds, ``DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL``.
    """

    rows: int = 8
    requests: int = 8

    def pad(self, plan: StepPlan) -> PaddedStep:
        """The step of ``plan``, rounded up unless that does not pay.

        It does not pay if the plan has chunks, or contexts so different that most of the pages would be padding.
        """
        if plan.chunks or not plan.rounds:
            return PaddedStep.of(plan)
        count = bucket(len(plan.rounds), self.requests)
        lens = [len(each.page_ids) for each in plan.rounds]
        num_pages = bucket(max(lens), 1 << 62)
        if count * num_pages > _MAX_FILLING * sum(lens):
            return PaddedStep.of(plan)
        page_ids = np.zeros((count, num_pages), dtype=np.int32)
        rounds = []
        for row, each in zip(page_ids, plan.rounds, strict=False):
            row[: len(each.page_ids)] = each.page_ids
            rounds.append(dataclasses.replace(each, page_ids=row))
        nobody = Round(request_id=PLACEHOLDER, slot=0, start=0, max_drafts=0, page_ids=page_ids[-1])
        rounds += [nobody] * (count - len(rounds))
        return PaddedStep(
            plan=dataclasses.replace(plan, rounds=tuple(rounds)),
            num_rounds=len(plan.rounds),
            num_round_rows=bucket(count + plan.num_drafts, self.rows),
            recurs=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured(Generic[T]):
    """A graph with what it reads and what it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: T


class Graphs(Generic[T]):
    """Runs bodies of device work, and replays those that come again.

    A key's first run is an ordinary one, which also makes libraries choose their kernels; the second is captured; all others are
    replays.

    Invariant: a body does what its key and its tensors say, and nothing else: it neither reads the host's numbers nor waits for
    the device, and tensors that it reads beside its arguments keep their addresses.

    Attributes:
        num_captured, num_replays: since the start, for tests and logs.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True, max_graphs: int = 64) -> None:
        """Nothing captured yet.

        Args:
            device: of the work; only a CUDA device has graphs.
            enabled: False runs every body as it is.
            max_graphs: kept at a time; the one not used for longest goes first.  Their intermediate tensors share one pool, their
                inputs and results do not.
        """
        self._device = device
        self._enabled = enabled and device.type == "cuda"
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, _Captured[T]] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._stream = torch.cuda.Stream(device) if self._enabled else None
        self.num_captured = self.num_replays = 0

    def run(self, key: Hashable | None, body: Callable[..., T], *inputs: Tensor) -> T:
        """Do ``body(*inputs)`` with the inputs on the device.

        Args:
            key: what the body depends on apart from the inputs' values; None never captures.
            inputs: on the host or on the device.  Copies to the device are not waited for.

        Returns:
            What the body returns.  Its tensors hold until a body with this key runs again.
        """
        if key is None or not self._enabled:
            return body(*(to_device(each, self._device) if each.device.type == "cpu" else each for each in inputs))
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen.add(key)
                return self.run(None, body, *inputs)
            captured = self._capture(key, body, inputs)
        self._graphs.move_to_end(key)
        for there, given in zip(captured.inputs, inputs, strict=True):
            there.copy_(given.pin_memory() if given.device.type == "cpu" else given, non_blocking=True)
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def _capture(self, key: Hashable, body: Callable[..., T], inputs: tuple[Tensor, ...]) -> _Captured[T]:
        if len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        there = tuple(torch.zeros_like(each, device=self._device) for each in inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for events meanwhile, which only this mode allows.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = body(*there)
        except torch.OutOfMemoryError as error:
            raise StepFailed(
                f"no memory is left for a CUDA graph beside the {len(self._graphs)} that there are; "
                "lower gpu_memory_utilization, or do without graphs (DEEPINFER_ENFORCE_EAGER=1)"
            ) from error
        captured = _Captured(graph=graph, inputs=there, result=result)
        self._graphs[key] = captured
        self.num_captured += 1
        logger.debug("captured CUDA graph %d, %d kept", self.num_captured, len(self._graphs))
        return captured
