"""Copies the results of a step to the host: asynchronously at launch, waited for in :meth:`Launched.result`.

Invariant: no token leaves this module if its logits are not finite.  In that case its log-probability or confidence is NaN.  The
host reads these values anyway, and looks for NaN before it returns a result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import StepFailed
from deepinfer.executor.speculate import Decided
from deepinfer.kv.cache import CacheContent
from deepinfer.request import SamplingParams
from deepinfer.step import Sampled, StepResult

_DEAD_END = (
    "the grammar and the token rules of the request (banned, allowed and forced tokens, a held-back end) leave no token to go on "
    "with; relax one of them"
)
_MAX_NAMED = 3
"""Most requests that an error names."""


def to_host(values: Tensor) -> Tensor:
    """Start an asynchronous copy to the host; returns the copy."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Stopwatch:
    """Device time between two points in the device's work."""

    def __init__(self, device: torch.device) -> None:
        """Mark the start."""
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        else:
            self._start = time.perf_counter()

    def stop(self) -> None:
        """Mark the end."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._start

    def wait_ms(self) -> float:
        """Wait for the end; returns milliseconds."""
        if self._events is None:
            return self._seconds * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedOut:
    """Pages and slots on their way to the host.

    Attributes:
        content: on the host; complete after ``stopwatch``.
        stopwatch: of the copy.
    """

    content: CacheContent
    stopwatch: Stopwatch

    def result(self) -> CacheContent:
        """Wait for the copy."""
        self.stopwatch.wait_ms()
        return self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launched step; :meth:`result` waits for it.

    Attributes:
        request_ids, params: ids and parameters of the requests in ``decided``.
        decided: copies on the host, complete when ``stopwatch`` has reached its end; None if the step decides nothing.
        prompt_logprobs: request id -> [num_targets] copies on the host.
        prompt_top: request id -> [num_targets, top_logprobs] host copies of the most likely ids and their log-probabilities.
        confidences: [num_drafting, num_drafts] copy on the host, or None.
        draft_ids: [num_drafting, num_drafts] int64 copy on the host of the new drafts; None unless a grammar needs them.
        failures: request id -> why the request cannot follow its grammar.
        mask_ms, mask_wait_ms: as in the result.
        drafting_ids: ids of the requests in ``confidences``.
        stopwatch: measures the step.
        num_padding_rows: as in :class:`~deepinfer.step.StepResult`.
    """

    request_ids: Sequence[str]
    params: Sequence[SamplingParams]
    decided: Decided | None
    prompt_logprobs: Mapping[str, Tensor]
    prompt_top: Mapping[str, tuple[Tensor, Tensor]]
    confidences: Tensor | None
    drafting_ids: Sequence[str]
    stopwatch: Stopwatch
    num_padding_rows: int
    draft_ids: Tensor | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    mask_ms: float = 0.0
    mask_wait_ms: float = 0.0

    def wait(self) -> None:
        """Wait for the copies."""
        self.stopwatch.wait_ms()

    def tokens_of(self, request_id: str) -> list[int]:
        """Output tokens of a request; none if the step decided nothing for it.  Only after :meth:`wait`."""
        if self.decided is None or request_id not in self.request_ids:
            return []
        idx = self.request_ids.index(request_id)
        ids: list[int] = self.decided.token_ids[idx].tolist()
        return ids[: int(self.decided.num_accepted[idx]) + 1]

    def drafts_of(self, request_id: str) -> list[int]:
        """New drafts of a request; none if the step made none.  Only after :meth:`wait`."""
        if self.draft_ids is None or request_id not in self.drafting_ids:
            return []
        ids: list[int] = self.draft_ids[self.drafting_ids.index(request_id)].tolist()
        return ids

    def result(self) -> StepResult:
        """Wait for the step and read its results.

        Raises:
            StepFailed: a result is not a finite number.
        """
        duration_ms = self.stopwatch.wait_ms()
        self._check()
        sampled = {}
        if self.decided is not None:
            decided = self.decided
            columns = zip(
                self.request_ids,
                self.params,
                decided.num_accepted.tolist(),
                decided.num_drafts.tolist(),
                decided.token_ids.tolist(),
                decided.logprobs.tolist(),
                decided.top_ids.tolist(),
                decided.top_logprobs.tolist(),
                decided.confidences.tolist(),
                strict=True,
            )
            for name, params, num_accepted, num_drafts, ids, logprobs, top_ids, top_values, confidences in columns:
                count, most = num_accepted + 1, params.top_logprobs
                sampled[name] = Sampled(
                    token_ids=tuple(ids[:count]),
                    logprobs=tuple(logprobs[:count]),
                    top_token_ids=tuple(tuple(each[:most]) for each in top_ids[:count]),
                    top_logprobs=tuple(tuple(each[:most]) for each in top_values[:count]),
                    num_drafts=num_drafts,
                    confidences=tuple(confidences[:num_drafts]),
                )
        failures = dict(self.failures)
        if self.decided is not None:
            failures |= dict.fromkeys(compress(self.request_ids, self.decided.is_dead.tolist()), _DEAD_END)
        empty = np.empty((0, 0), dtype=np.float32)
        return StepResult(
            sampled=sampled,
            prompt_logprobs={name: tuple(values.tolist()) for name, values in self.prompt_logprobs.items()},
            prompt_top={
                name: [(tuple(some), tuple(best)) for some, best in zip(ids.tolist(), values.tolist(), strict=True)]
                for name, (ids, values) in self.prompt_top.items()
            },
            confidences=empty if self.confidences is None else self.confidences.numpy(),
            duration_ms=duration_ms,
            num_padding_rows=self.num_padding_rows,
            mask_ms=self.mask_ms,
            mask_wait_ms=self.mask_wait_ms,
            failures=failures,
        )

    def _check(self) -> None:
        """Raise :class:`StepFailed` if a token, a prompt's log-probability or a draft comes from logits that are not finite."""
        for what, names in self._not_numbers():
            # The id of an answer is the id of its request, a zero character and a number.
            callers = list(dict.fromkeys(name.partition("\0")[0] for name in names))
            more = f" and {len(callers) - _MAX_NAMED} more" if len(callers) > _MAX_NAMED else ""
            raise StepFailed(
                f"{what} of {', '.join(map(repr, callers[:_MAX_NAMED]))}{more} are not finite numbers, so that no token can be "
                "trusted; the weights may be damaged: check the checkpoint's files and start another engine"
            )

    def _not_numbers(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each kind of result that contains NaN, with the ids of its requests."""
        if self.decided is not None:
            decided = self.decided
            is_emitted = torch.arange(decided.logprobs.shape[1]) <= decided.num_accepted.unsqueeze(1)
            yield from _named("logits", self.request_ids, (decided.logprobs.isnan() & is_emitted).any(1))
        if self.prompt_logprobs:
            is_nan = torch.stack([values.isnan().any() for values in self.prompt_logprobs.values()])
            yield from _named("logits of the prompt", list(self.prompt_logprobs), is_nan)
        if self.confidences is not None:
            yield from _named("drafts", self.drafting_ids, self.confidences.isnan().any(1))


def _named(what: str, names: Sequence[str], is_nan: Tensor) -> Iterator[tuple[str, list[str]]]:
    """Yield ``what`` with the ``names`` where ``is_nan`` [num_names] bool is True; yield nothing if all are False."""
    if is_nan.any():
        yield what, [name for name, is_bad in zip(names, is_nan.tolist(), strict=True) if is_bad]


def on_host(decided: Decided, num_requests: int) -> Decided:
    """Start asynchronous copies of the decisions about the first ``num_requests`` requests to the host."""
    fields = {name: to_host(getattr(decided, name)[:num_requests]) for name in Decided.__slots__}
    return Decided(**fields)
