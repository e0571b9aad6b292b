"""Counters, gauges and histograms: one table of names and units, and the values.

An engine counts in a :class:`Metrics`.  It holds plain numbers, so it is cheap enough for every token of every step.  A
:class:`Snapshot` is a copy that crosses the process border.  :func:`registry` turns snapshots into Prometheus metrics.

The names are those that dashboards of serving engines expect, with the prefix ``deepinfer_``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX: Final = "deepinfer_"
Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(2**power) for power in range(21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One line of the table.

    Attributes:
        kind: a counter grows, a gauge is a current value, a histogram counts observations by size.
        unit: unit of the values.
        help: meaning of the values.
        label: name of the one label that splits a counter, or "".
        bounds: upper bounds of a histogram's buckets, ascending; one more bucket counts larger values.
    """

    kind: Kind
    unit: str
    help: str
    label: str = ""
    bounds: tuple[float, ...] = ()


def _counter(unit: str, text: str, label: str = "") -> Quantity:
    return Quantity(kind="counter", unit=unit, help=text, label=label)


def _gauge(unit: str, text: str) -> Quantity:
    return Quantity(kind="gauge", unit=unit, help=text)


def _histogram(unit: str, text: str, bounds: tuple[float, ...]) -> Quantity:
    return Quantity(kind="histogram", unit=unit, help=text, bounds=bounds)


QUANTITIES: Final[Mapping[str, Quantity]] = {
    # Current values.
    "num_requests_running": _gauge("requests", "Answers that hold a state slot; a request has n answers."),
    "num_requests_waiting": _gauge("requests", "Answers that wait for room or for their inputs."),
    "kv_cache_usage_perc": _gauge("share", "Pages held by requests, 0 to 1."),
    "state_slot_usage_perc": _gauge("share", "State slots held by requests, 0 to 1."),
    # Steps.
    "steps": _counter("steps", "Steps computed."),
    "step_time_seconds": _histogram("seconds", "Time of one iteration of the engine's loop.", _SECONDS),
    "computed_tokens": _counter("tokens", "Rows of all steps: prompt, output, replayed and recomputed tokens."),
    "padding_rows": _counter("rows", "Padding rows, so that a captured graph fits."),
    "iteration_tokens_total": _histogram("tokens", "New tokens of one step.", _TOKENS),
    "num_preemptions": _counter("times", "Times that an answer lost its pages; it is computed again or ends."),
    # Tokens.
    "prompt_tokens": _counter("tokens", "Prompt tokens of requests that got their first token."),
    "generation_tokens": _counter("tokens", "Tokens generated."),
    "prefix_cache_queries": _counter("tokens", "Prompt tokens that were looked up in the prefix cache, each once."),
    "prefix_cache_hits": _counter("tokens", "Prompt tokens that were found in the prefix cache."),
    "replayed_tokens": _counter("tokens", "Tokens computed again to rebuild windows after a hit."),
    # Speculation.
    "spec_decode_num_drafts": _counter("rounds", "Rounds of a request that could verify drafts."),
    "spec_decode_num_draft_tokens": _counter("tokens", "Drafts verified."),
    "spec_decode_num_accepted_tokens": _counter("tokens", "Drafts accepted."),
    "spec_decode_num_draft_tokens_per_pos": _counter("tokens", "Drafts verified, by place in the round from 0.", "position"),
    "spec_decode_num_accepted_tokens_per_pos": _counter("tokens", "Drafts accepted, by place in the round from 0.", "position"),
    "spec_decode_verified_drafts": _histogram("tokens", "Drafts that one step verified.", _TOKENS),
    # Structured outputs.
    "grammar_compile_seconds": _histogram("seconds", "Time to compile a grammar.", _SECONDS),
    "grammar_cache_hits": _counter("grammars", "Grammars that were compiled already."),
    "grammar_cache_misses": _counter("grammars", "Grammars that had to be compiled."),
    "grammar_timeouts": _counter("grammars", "Grammars whose compilation exceeded its time limit."),
    "grammar_refusals": _counter("grammars", "Requests whose grammar was refused."),
    "grammar_mask_seconds": _histogram("seconds", "Host time to fill the masks of one step with grammars.", _SECONDS),
    "grammar_waiting_steps": _counter("steps", "Steps whose decision waited more than 0.1 ms for masks."),
    # Requests.
    "request_success": _counter("requests", "Requests that ended, by the reason of their last answer.", "finished_reason"),
    "admission_rejections": _counter("requests", "Requests refused on arrival.", "reason"),
    "time_to_first_token_seconds": _histogram(
        "seconds", "From arrival to the first token of any answer, once for each request.", _SECONDS
    ),
    "request_queue_time_seconds": _histogram("seconds", "From arrival to the first step with a part of the prompt.", _SECONDS),
    "request_prefill_time_seconds": _histogram("seconds", "From that step to the first token.", _SECONDS),
    "request_decode_time_seconds": _histogram("seconds", "From the first token to the end of the request.", _SECONDS),
    "inter_token_latency_seconds": _histogram("seconds", "Time between two tokens of an answer.", _SECONDS),
    "request_time_per_output_token_seconds": _histogram("seconds", "Mean time between tokens of an ended answer.", _SECONDS),
    "e2e_request_latency_seconds": _histogram("seconds", "From arrival to the end of an answer.", _SECONDS),
    "request_prompt_tokens": _histogram("tokens", "Prompt tokens of an ended request.", _TOKENS),
    "request_generation_tokens": _histogram("tokens", "Output tokens of an ended request, all answers together.", _TOKENS),
    "request_params_max_tokens": _histogram("tokens", "max_tokens of an arrived request.", _TOKENS),
}
"""Every quantity by its name without prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of all numbers at one time, as plain values.

    Attributes:
        values: name of a counter or gauge -> value of its label ("" if it has none) -> number.
        counts: name of a histogram -> observations in each bucket; the last bucket is above all bounds.
        sums: name of a histogram -> sum of the observed values.
    """

    values: dict[str, dict[str, float]]
    counts: dict[str, list[int]]
    sums: dict[str, float]


class Metrics:
    """The numbers of one engine; only one thread may use it.

    Invariant: it holds exactly the names of :data:`QUANTITIES`, each with its kind.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self._values: dict[str, dict[str, float]] = {}
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        for name, quantity in QUANTITIES.items():
            if quantity.kind == "histogram":
                self._counts[name] = [0] * (len(quantity.bounds) + 1)
                self._sums[name] = 0.0
            else:
                self._values[name] = {} if quantity.label else {"": 0.0}

    def add(self, name: str, amount: float = 1, *, label: str = "") -> None:
        """Raise a counter by ``amount`` >= 0."""
        values = self._values[name]
        values[label] = values.get(label, 0.0) + amount

    def put(self, name: str, value: float, *, label: str = "") -> None:
        """Set a gauge, or a counter whose value another object counts."""
        self._values[name][label] = value

    def observe(self, name: str, value: float, *, times: int = 1) -> None:
        """Count ``value`` in a histogram, ``times`` times."""
        self._counts[name][bisect_left(QUANTITIES[name].bounds, value)] += times
        self._sums[name] += value * times

    def snapshot(self) -> Snapshot:
        """A copy of the numbers."""
        return Snapshot(
            values={name: dict(values) for name, values in self._values.items()},
            counts={name: list(counts) for name, counts in self._counts.items()},
            sums=dict(self._sums),
        )

    def check(self) -> None:
        """Assert the invariant."""
        assert self._values.keys() | self._counts.keys() == QUANTITIES.keys(), "names of the table"
        assert self._counts.keys() == self._sums.keys(), "a histogram has a sum"
        for name, counts in self._counts.items():
            assert len(counts) == len(QUANTITIES[name].bounds) + 1, "a bucket above the last bound"
        for name, values in self._values.items():
            assert QUANTITIES[name].label or values.keys() == {""}, "a label where the table has one"


class _EngineCollector(Collector):
    """Snapshots as Prometheus families, with one series for each engine."""

    def __init__(self, read: Callable[[], Mapping[str, Snapshot]], prefix: str, model_name: str | None) -> None:
        self._read = read
        self._prefix = prefix
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        engines = self._read()
        for name, quantity in QUANTITIES.items():
            yield _family(self._prefix + name, name, quantity, engines, self._model_name)


def _family(full_name: str, name: str, quantity: Quantity, engines: Mapping[str, Snapshot], model_name: str | None) -> Metric:
    text = f"{quantity.help}  Unit: {quantity.unit}."
    fixed = {} if model_name is None else {"model_name": model_name}
    labels = ["engine", *fixed, quantity.label] if quantity.label else ["engine", *fixed]
    if quantity.kind == "histogram":
        histogram = HistogramMetricFamily(full_name, text, labels=labels)
        for engine, snapshot in engines.items():
            buckets, below = [], 0
            for bound, count in zip((*map(str, quantity.bounds), "+Inf"), snapshot.counts[name], strict=True):
                below += count
                buckets.append((bound, float(below)))
            histogram.add_metric([engine, *fixed.values()], buckets, snapshot.sums[name])
        return histogram
    make = CounterMetricFamily if quantity.kind == "counter" else GaugeMetricFamily
    family = make(full_name, text, labels=labels)
    for engine, snapshot in engines.items():
        for label, value in snapshot.values[name].items():
            family.add_metric([engine, *fixed.values(), *([label] if quantity.label else [])], value)
    return family


def registry(
    read: Callable[[], Mapping[str, Snapshot]], *, prefix: str = PREFIX, model_name: str | None = None
) -> CollectorRegistry:
    """A new registry, separate from Prometheus' global one.

    Args:
        read: returns engine name -> snapshot; called each time the registry is collected.
        prefix: begins every name; dashboards of other engines expect theirs.
        model_name: value of the label ``model_name`` of every series; None for no such label.
    """
    made = CollectorRegistry()
    made.register(_EngineCollector(read, prefix, model_name))
    return made


def exposition(engines: Mapping[str, Snapshot], *, prefix: str = PREFIX, model_name: str | None = None) -> bytes:
    """The snapshots (engine name -> snapshot) in Prometheus' text format; other arguments as for :func:`registry`."""
    return generate_latest(registry(lambda: engines, prefix=prefix, model_name=model_name))
