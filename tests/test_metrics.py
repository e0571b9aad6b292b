"""The table of quantities, and the counted values as Prometheus reads them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from deepinfer.metrics import PREFIX, QUANTITIES, Metrics, exposition, registry


def samples(text):
    return {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(text.decode())
        for each in family.samples
    }


def test_every_quantity_is_described_by_a_name_that_dashboards_accept():
    for name, quantity in QUANTITIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z]", name)
        assert quantity.unit
        assert quantity.help.endswith(".")
        assert list(quantity.bounds) == sorted(set(quantity.bounds))
        assert bool(quantity.bounds) == (quantity.kind == "histogram")


def test_all_quantities_are_exposed_from_the_start():
    text = exposition({"0": Metrics().snapshot()}).decode()
    for name, quantity in QUANTITIES.items():
        assert f"# HELP {PREFIX}{name}" in text
        assert f"Unit: {quantity.unit}." in text


def test_counts_are_read_back_as_they_were_made():
    metrics = Metrics()
    metrics.add("generation_tokens", 5)
    metrics.add("generation_tokens", 2)
    metrics.add("request_success", label="stop")
    metrics.put("kv_cache_usage_perc", 0.25)
    metrics.observe("step_time_seconds", 0.003, times=4)
    metrics.observe("step_time_seconds", 1000)
    metrics.check()
    read = samples(exposition({"7": metrics.snapshot()}))
    engine = ("engine", "7")
    assert read[f"{PREFIX}generation_tokens_total", engine] == 7
    assert read[f"{PREFIX}request_success_total", engine, ("finished_reason", "stop")] == 1
    assert read[f"{PREFIX}kv_cache_usage_perc", engine] == 0.25
    bucket = f"{PREFIX}step_time_seconds_bucket"
    assert [read[bucket, engine, ("le", bound)] for bound in ("0.0025", "0.005", "300.0", "+Inf")] == [0, 4, 4, 5]
    assert read[f"{PREFIX}step_time_seconds_count", engine] == 5
    assert read[f"{PREFIX}step_time_seconds_sum", engine] == pytest.approx(1000.012)


@given(st.lists(st.floats(0, 1e7), max_size=40))
def test_a_histogram_counts_every_observation_once_below_its_bound(values):
    metrics = Metrics()
    for value in values:
        metrics.observe("request_prompt_tokens", value)
    metrics.check()
    counts, bounds = metrics.snapshot().counts["request_prompt_tokens"], QUANTITIES["request_prompt_tokens"].bounds
    assert sum(counts) == len(values)
    assert [sum(counts[: n + 1]) for n in range(len(bounds))] == [sum(v <= bound for v in values) for bound in bounds]


def test_a_snapshot_does_not_move():
    metrics = Metrics()
    before = metrics.snapshot()
    metrics.add("steps")
    metrics.observe("step_time_seconds", 1)
    assert before == Metrics().snapshot()


def test_engines_stand_side_by_side_in_a_registry_of_their_own():
    first, second = Metrics(), Metrics()
    first.add("steps", 3)
    made = registry(lambda: {"0": first.snapshot(), "1": second.snapshot()})
    assert made.get_sample_value(f"{PREFIX}steps_total", {"engine": "0"}) == 3
    assert made.get_sample_value(f"{PREFIX}steps_total", {"engine": "1"}) == 0
    assert REGISTRY.get_sample_value(f"{PREFIX}steps_total", {"engine": "0"}) is None


def test_names_that_are_not_in_the_table_are_our_own_mistake():
    with pytest.raises(KeyError):
        Metrics().add("stepps")
    with pytest.raises(KeyError):
        Metrics().observe("steps", 1)
