"""CUDA graphs: steps of rounds are rounded up to few shapes, captured once and then replayed.

A decode step is thousands of small kernels.  A GPU runs them faster than a host can launch them.  The host reads no value of the
device during such a step.  One captured graph therefore serves all steps of its shape: lengths, positions, pages and the numbers
of drafts are data.  :class:`Buckets` makes shapes recur.  :class:`Graphs` captures and replays.

Padding changes no result.  Padding rounds use slot 0 and page 0.  Padding rows come after all other rows.  The number of rows
does not change the order of any sum, so a padded step gives the same bits as a step without padding.  A replay gives the same
bits as an ordinary run.
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

_MAX_PAGE_GROWTH = 8
"""Do not pad a plan if the number of its pages would grow more than 8 times.  Buckets alone cause a factor below 4.  Contexts of
different lengths cause larger factors."""


def bucket(count: int, interval: int) -> int:
    """``count`` rounded up: below ``interval`` to a power of two, otherwise to a multiple of ``interval``."""
    if count >= interval:
        return -(-count // interval) * interval
    return min(1 << max(0, count - 1).bit_length(), interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStep:
    """A step as the device computes it.

    Attributes:
        plan: what to compute.  Padding fills up the pages of its rounds.  Padding rounds use slot 0 and come last.
        num_rounds: rounds that the scheduler planned; the others are padding.
        num_round_rows: rows of all rounds, plus padding rows.
        recurs: whether later steps have the same shape, so that a graph is worth its capture.
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
        """Rows of ``num_round_rows`` that belong to no planned round and no draft."""
        return self.num_round_rows - self.num_rounds - self.plan.num_drafts

    @property
    def sampling(self) -> list[Chunk]:
        """Chunks whose next token is sampled."""
        return [chunk for chunk in self.plan.chunks if chunk.samples]

    @property
    def sampling_ids(self) -> list[str]:
        """Requests that get tokens: first those of chunks that sample, then those of planned rounds."""
        return [chunk.request_id for chunk in self.sampling] + self._round_ids

    @property
    def drafting_ids(self) -> list[str]:
        """Requests that get new drafts, in the order of the drafts."""
        return [chunk.request_id for chunk in self.plan.chunks if chunk.drafts] + self._round_ids

    @property
    def drafting_slots(self) -> list[int]:
        """Slots of :attr:`drafting_ids`."""
        rounds = self.plan.rounds[: self.num_rounds]
        return [chunk.slot for chunk in self.plan.chunks if chunk.drafts] + [each.slot for each in rounds]

    @property
    def _round_ids(self) -> list[str]:
        return [each.request_id for each in self.plan.rounds[: self.num_rounds]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes that steps of rounds are rounded up to.

    All rounds of a step get the same number of pages: the largest number, rounded up to a power of two.

    Attributes:
        rows: interval for numbers of rows, ``DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL``.
        requests: interval for numbers of rounds, ``DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL``.
    """

    rows: int = 8
    requests: int = 8

    def pad(self, plan: StepPlan) -> PaddedStep:
        """The step of ``plan``, rounded up where a graph is worth its capture.

        A plan stays as it is if it has chunks.  It also stays as it is if its contexts have so different lengths that most pages
        would be padding.
        """
        if plan.chunks or not plan.rounds:
            return PaddedStep.of(plan)
        count = bucket(len(plan.rounds), self.requests)
        lens = [len(each.page_ids) for each in plan.rounds]
        num_pages = bucket(max(lens), 1 << 62)
        if count * num_pages > _MAX_PAGE_GROWTH * sum(lens):
            return PaddedStep.of(plan)
        page_ids = np.zeros((count, num_pages), dtype=np.int32)
        rounds = []
        for padded_ids, each in zip(page_ids, plan.rounds, strict=False):
            padded_ids[: len(each.page_ids)] = each.page_ids
            rounds.append(dataclasses.replace(each, page_ids=padded_ids))
        padding = Round(request_id=PLACEHOLDER, slot=0, start=0, max_drafts=0, page_ids=page_ids[-1])
        rounds += [padding] * (count - len(rounds))
        return PaddedStep(
            plan=dataclasses.replace(plan, rounds=tuple(rounds)),
            num_rounds=len(plan.rounds),
            num_round_rows=bucket(count + plan.num_drafts, self.rows),
            recurs=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured(Generic[T]):
    """A graph, the tensors that it reads, and its result."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: T


class Graphs(Generic[T]):
    """Runs functions of device work (bodies), and replays those that recur.

    The first run with a key is an ordinary run; libraries choose their kernels in it.  The second run captures a graph.  Later
    runs replay the graph.

    Invariant: a body depends only on its key and its tensors.  It reads no value on the host and does not wait for the device.
    Tensors that it reads in addition to its arguments keep their addresses.

    Attributes:
        num_captured, num_replays: counts since the start, for tests and logs.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True, max_graphs: int = 64) -> None:
        """Start without graphs.

        Args:
            device: where the bodies run; only a CUDA device has graphs.
            enabled: False runs every body without a graph.
            max_graphs: most graphs kept at a time; the least recently used graph is dropped first.  The graphs' intermediate
                tensors share one memory pool; their inputs and results do not.
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
        """Run ``body(*inputs)`` with the inputs on the device.

        Args:
            key: everything that the body depends on except the inputs' values; None never captures.
            inputs: tensors on the host or on the device.  The copies to the device are asynchronous.

        Returns:
            The result of the body.  Its tensors stay valid until a body with this key runs again.
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
        for target, given in zip(captured.inputs, inputs, strict=True):
            target.copy_(given.pin_memory() if given.device.type == "cpu" else given, non_blocking=True)
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def _capture(self, key: Hashable, body: Callable[..., T], inputs: tuple[Tensor, ...]) -> _Captured[T]:
        if len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        captured_inputs = tuple(torch.zeros_like(each, device=self._device) for each in inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for events during the capture; only the mode "thread_local" allows that.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = body(*captured_inputs)
        except torch.OutOfMemoryError as error:
            raise StepFailed(
                f"no memory is left for one more CUDA graph; {len(self._graphs)} graphs are kept; "
                "lower gpu_memory_utilization, or disable graphs (DEEPINFER_ENFORCE_EAGER=1)"
            ) from error
        captured = _Captured(graph=graph, inputs=captured_inputs, result=result)
        self._graphs[key] = captured
        self.num_captured += 1
        logger.debug("captured CUDA graph %d, %d kept", self.num_captured, len(self._graphs))
        return captured
