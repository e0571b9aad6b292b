"""What a step decided, on its way to the host: copied without waiting, read when somebody needs it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.executor.speculate import Decided
from deepinfer.request import SamplingParams
from deepinfer.step import Sampled, StepResult


def to_host(values: Tensor) -> Tensor:
    """Start a copy to the host."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Stopwatch:
    """Time that the device spends between two points of the work it is given."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
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
        """Wait for the end; milliseconds."""
        if self._events is None:
            return self._seconds * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step on its way; :meth:`result` waits for it.

    Attributes:
        request_ids, params: of the requests in ``decided``.
        decided: copies on the host, complete once ``stopwatch`` has stopped; None if nothing was decided.
        prompt_logprobs: request id -> [num_targets] copies on the host.
        confidences: [num_drafting, num_drafts] copy on the host, or None.
        stopwatch: of the step.
        num_padding_rows: as in the result.
    """

    request_ids: Sequence[str]
    params: Sequence[SamplingParams]
    decided: Decided | None
    prompt_logprobs: Mapping[str, Tensor]
    confidences: Tensor | None
    stopwatch: Stopwatch
    num_padding_rows: int

    def result(self) -> StepResult:
        """Wait for the step and read what it did."""
        duration_ms = self.stopwatch.wait_ms()
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
        empty = np.empty((0, 0), dtype=np.float32)
        return StepResult(
            sampled=sampled,
            prompt_logprobs={name: tuple(values.tolist()) for name, values in self.prompt_logprobs.items()},
            confidences=empty if self.confidences is None else self.confidences.numpy(),
            duration_ms=duration_ms,
            num_padding_rows=self.num_padding_rows,
        )


def on_host(decided: Decided, num_requests: int) -> Decided:
    """Start copies of everything that was decided about the first ``num_requests`` to the host."""
    fields = {name: to_host(getattr(decided, name)[:num_requests]) for name in Decided.__slots__}
    return Decided(**fields)
