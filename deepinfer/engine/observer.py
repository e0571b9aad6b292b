"""Observes requests and steps: updates the metrics and writes the log line.

Owns the times of each request: its arrival, and its first and last token.  The engine's loop calls it.  It returns
nothing to the loop; it marks only the first record of each request with the time that the request has waited.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from deepinfer.grammar.compiler import CompilerCounts
from deepinfer.metrics import Metrics, Snapshot
from deepinfer.request import FinishReason, Request, RequestOutput
from deepinfer.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)
_WAIT_S = 1e-4
"""A decision that waits longer for masks is counted as waiting."""


@dataclass(slots=True, kw_only=True)
class _RequestTimes:
    """An unfinished request; times in seconds of one clock.

    Attributes:
        arrived: time of arrival.
        begun: start of the first step with a part of the prompt.
        first: time of the first token of any answer.
        firsts, lasts: answer -> time of its first and of its last token.
        num_output: tokens of ended answers.
        num_open: unfinished answers.
    """

    arrived: float
    num_prompt: int
    num_open: int
    begun: float | None = None
    first: float | None = None
    firsts: dict[int, float] = field(default_factory=dict)
    lasts: dict[int, float] = field(default_factory=dict)
    num_output: int = 0


@dataclass(slots=True, kw_only=True)
class _Window:
    """Counts since the last log line."""

    steps: int = 0
    busy_s: float = 0.0
    output_tokens: int = 0
    aborted: int = 0
    first_tokens: int = 0  # requests that got their first token
    prompt_ends: int = 0  # answers that got their first token; the last row of the prompt gave it
    first_token_s: float = 0.0  # sum of the requests' times to their first token


class Observer:
    """The observer of one engine.

    Invariant: it holds exactly the requests that have arrived and have not ended.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], *, log_every: int | None) -> None:
        """``stats`` returns the scheduler's counts; one log line is written every ``log_every`` steps, or never with None."""
        self.metrics = Metrics()
        self._stats = stats
        self._log_every = log_every
        self._times: dict[str, _RequestTimes] = {}
        self._window = _Window()
        self._before = stats()

    def arrived(self, request: Request, now: float) -> None:
        """The engine has admitted a request."""
        self._times[request.request_id] = _RequestTimes(
            arrived=now, num_prompt=len(request.prompt_token_ids), num_open=request.params.n
        )
        self.metrics.observe("request_params_max_tokens", request.params.max_tokens)

    def refused(self, error: Exception) -> None:
        """The engine has refused a request."""
        self.metrics.add("admission_rejections", label=type(error).__name__)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Requests were aborted; unknown ids are ignored."""
        for request_id in request_ids:
            if self._times.pop(request_id, None) is not None:
                self.metrics.add("request_success", label=FinishReason.ABORT)
                self._window.aborted += 1

    def begun(self, request_ids: Iterable[str], now: float) -> None:
        """A step that began at ``now`` computes parts of the prompts of requests."""
        for request_id in request_ids:
            times = self._times.get(request_id)
            if times is not None and times.begun is None:
                times.begun = now
                self.metrics.observe("request_queue_time_seconds", now - times.arrived)

    def stepped(self, outputs: list[RequestOutput], seconds: float, now: float) -> None:
        """An iteration of the loop took ``seconds`` and gave ``outputs``; a request's first record gets its time in the queue.

        Cost: 0.1 ms for 256 outputs; equal latencies are counted together, because most tokens of one step have the same latency.
        """
        metrics, window = self.metrics, self._window
        latencies: Counter[float] = Counter()
        num_tokens = num_verified = 0
        for place, output in enumerate(outputs):
            times = self._times.get(output.request_id)
            if times is None:
                continue
            if output.token_id is not None:
                num_tokens += 1
                num_verified += output.draft_tok
                last = times.lasts.get(output.sample_idx)
                if last is not None:
                    latencies[now - last] += 1
                else:
                    times.firsts[output.sample_idx] = now
                    window.prompt_ends += 1
                    if times.first is None:
                        self._first_token(times, now)
                        if times.begun is not None:
                            outputs[place] = replace(output, queue_s=times.begun - times.arrived)
                times.lasts[output.sample_idx] = now
            if output.finished:
                self._finished(output, times, now)
        for latency, count in latencies.items():
            metrics.observe("inter_token_latency_seconds", latency, times=count)
        metrics.add("generation_tokens", num_tokens)
        metrics.observe("step_time_seconds", seconds)
        metrics.observe("iteration_tokens_total", num_tokens)
        if num_verified:
            metrics.observe("spec_decode_verified_drafts", num_verified)
        window.output_tokens += num_tokens
        window.steps += 1
        window.busy_s += seconds
        if self._log_every is not None and window.steps >= self._log_every:
            self._log()

    def masked(self, seconds: float, waited_s: float) -> None:
        """The masks of a step took ``seconds``, and its decision waited ``waited_s`` for them."""
        self.metrics.observe("grammar_mask_seconds", seconds)
        self.metrics.add("grammar_waiting_steps", int(waited_s > _WAIT_S))

    def compiled(self, counts: CompilerCounts, durations_s: Sequence[float]) -> None:
        """Take over the counts of the grammar compiler, and the times of the grammars compiled since the last call."""
        self.metrics.put("grammar_cache_hits", counts.num_hits)
        self.metrics.put("grammar_cache_misses", counts.num_misses)
        self.metrics.put("grammar_timeouts", counts.num_timeouts)
        self.metrics.put("grammar_refusals", counts.num_refused)
        for each in durations_s:
            self.metrics.observe("grammar_compile_seconds", each)

    def snapshot(self) -> Snapshot:
        """All current numbers."""
        self._take_over(self._stats())
        return self.metrics.snapshot()

    def _first_token(self, times: _RequestTimes, now: float) -> None:
        times.first = now
        self.metrics.observe("time_to_first_token_seconds", now - times.arrived)
        if times.begun is not None:
            self.metrics.observe("request_prefill_time_seconds", now - times.begun)
        self.metrics.add("prompt_tokens", times.num_prompt)
        self._window.first_tokens += 1
        self._window.first_token_s += now - times.arrived

    def _finished(self, output: RequestOutput, times: _RequestTimes, now: float) -> None:
        """An answer has ended; the request ends with its last answer."""
        metrics = self.metrics
        times.num_output += output.num_output_tokens
        times.num_open -= 1
        first = times.firsts.get(output.sample_idx)
        if first is not None and output.num_output_tokens > 1:
            metrics.observe("request_time_per_output_token_seconds", (now - first) / (output.num_output_tokens - 1))
        metrics.observe("e2e_request_latency_seconds", now - times.arrived)
        if times.num_open:
            return
        del self._times[output.request_id]
        if times.first is not None:
            metrics.observe("request_decode_time_seconds", now - times.first)
        metrics.add("request_success", label=output.finish_reason or "")
        metrics.observe("request_prompt_tokens", times.num_prompt)
        metrics.observe("request_generation_tokens", times.num_output)

    def _take_over(self, stats: SchedulerStats) -> None:
        """Copy the scheduler's counts into the metrics."""
        metrics = self.metrics
        metrics.put("num_requests_running", stats.num_running)
        metrics.put("num_requests_waiting", stats.num_waiting)
        metrics.put("kv_cache_usage_perc", stats.num_held_pages / max(1, stats.num_pages))
        metrics.put("state_slot_usage_perc", stats.num_held_slots / max(1, stats.num_slots))
        metrics.put("steps", stats.num_steps)
        metrics.put("computed_tokens", stats.num_computed_tokens)
        metrics.put("padding_rows", stats.num_padding_rows)
        metrics.put("num_preemptions", stats.num_preempted)
        metrics.put("prefix_cache_queries", stats.num_asked_tokens)
        metrics.put("prefix_cache_hits", stats.num_hit_tokens)
        metrics.put("replayed_tokens", stats.num_replayed_tokens)
        metrics.put("spec_decode_num_drafts", stats.num_rounds)
        for name, by_position in (("draft", stats.num_verified_drafts), ("accepted", stats.num_accepted_drafts)):
            metrics.put(f"spec_decode_num_{name}_tokens", sum(by_position))
            for position, count in enumerate(by_position):
                metrics.put(f"spec_decode_num_{name}_tokens_per_pos", count, label=str(position))

    def _log(self) -> None:
        """Write one line about the steps since the last line; rates are per second of steps, without idle time."""
        window, self._window = self._window, _Window()
        stats, before = self._stats(), self._before
        self._before = stats
        asked = stats.num_asked_tokens - before.num_asked_tokens
        hits = stats.num_hit_tokens - before.num_hit_tokens
        # A row of a prompt gives no token, except the last row, which gives one token; every other row gives one token.
        rows, tokens = stats.num_computed_tokens - before.num_computed_tokens, stats.num_output_tokens - before.num_output_tokens
        logger.info(
            "step %d: %.1f steps/s, %.0f prompt tokens/s, %.0f output tokens/s; running %d, waiting %d; "
            "pages %.1f %%, slots %.1f %%, hit rate %.1f %%; first token after %.2f s; preempted %d, aborted %d%s",
            stats.num_steps,
            window.steps / window.busy_s,
            (rows - tokens + window.prompt_ends) / window.busy_s,
            window.output_tokens / window.busy_s,
            stats.num_running,
            stats.num_waiting,
            100 * stats.num_held_pages / max(1, stats.num_pages),
            100 * stats.num_held_slots / max(1, stats.num_slots),
            100 * hits / max(1, asked),
            window.first_token_s / max(1, window.first_tokens),
            stats.num_preempted - before.num_preempted,
            window.aborted,
            _speculation(stats, before),
        )


def _speculation(stats: SchedulerStats, before: SchedulerStats) -> str:
    """The part of the log line about rounds since ``before``; "" without rounds."""
    num_rounds = stats.num_rounds - before.num_rounds
    if not num_rounds:
        return ""
    verified, accepted = (
        [after - before for after, before in zip(*pair, strict=True)]
        for pair in (
            (stats.num_verified_drafts, before.num_verified_drafts),
            (stats.num_accepted_drafts, before.num_accepted_drafts),
        )
    )
    shares = " ".join(f"{100 * each / num_rounds:.0f}" for each in accepted)
    return (
        f"; accepted length {1 + sum(accepted) / num_rounds:.2f} of {1 + sum(verified) / num_rounds:.2f} verified, "
        f"drafts accepted by position {shares} % of rounds"
    )
