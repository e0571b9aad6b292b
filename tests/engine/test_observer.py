"""The counts of rounds, and the log line about rounds."""

from dataclasses import replace

import pytest

from deepinfer.engine.observer import Observer
from deepinfer.executor.graphs import Buckets
from deepinfer.metrics import exposition
from deepinfer.request import FinishReason, Request, RequestOutput, SamplingParams
from tests.engine.fake_core import FakeCore
from tests.engine.harness import build, drain, request

QUIET = FakeCore(None).stats()


class Stats:
    """Scheduler counts that a test sets."""

    def __init__(self):
        self.now = replace(QUIET, num_verified_drafts=(0, 0, 0), num_accepted_drafts=(0, 0, 0))

    def __call__(self):
        return self.now

    def set(self, num_rounds, verified, accepted):
        self.now = replace(self.now, num_rounds=num_rounds, num_verified_drafts=verified, num_accepted_drafts=accepted)


def output(name, number, **given):
    return RequestOutput(
        request_id=name,
        prompt_len=1,
        token_id=7,
        finished=False,
        finish_reason=None,
        num_output_tokens=number,
        max_num_batched_tokens=64,
        **given,
    )


def test_rounds_and_drafts_are_counted_by_the_names_that_dashboards_know():
    stats = Stats()
    observer = Observer(stats, log_every=None)
    stats.set(10, (10, 8, 5), (7, 4, 1))
    values = observer.snapshot().values
    assert values["spec_decode_num_drafts"] == {"": 10}
    assert values["spec_decode_num_draft_tokens"] == {"": 23}
    assert values["spec_decode_num_accepted_tokens"] == {"": 12}
    assert values["spec_decode_num_draft_tokens_per_pos"] == {"0": 10, "1": 8, "2": 5}
    assert values["spec_decode_num_accepted_tokens_per_pos"] == {"0": 7, "1": 4, "2": 1}
    text = exposition({"0": observer.snapshot()}).decode()
    assert 'deepinfer_spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0' in text


def test_verified_drafts_are_summed_over_a_step():
    observer = Observer(Stats(), log_every=None)
    for name in ("a", "b"):
        observer.arrived(Request(request_id=name, prompt_token_ids=(0,), params=SamplingParams()), 0.0)
    observer.stepped([output("a", 1), output("b", 1)], 0.1, 1.0)
    observer.stepped([output("a", 2, draft_tok=3, accept_tok=1), output("a", 3), output("b", 2, draft_tok=2)], 0.1, 2.0)
    counted = observer.snapshot()
    assert (sum(counted.counts["spec_decode_verified_drafts"]), counted.sums["spec_decode_verified_drafts"]) == (1, 5)
    assert counted.values["generation_tokens"][""] == 5


def test_of_several_answers_one_brings_the_first_token_and_each_has_its_latencies():
    observer = Observer(Stats(), log_every=None)
    observer.arrived(Request(request_id="a", prompt_token_ids=(0,) * 5, params=SamplingParams(n=3)), 0.0)

    def told(sample_idx, number, finished=False):
        each = output("a", number, sample_idx=sample_idx)
        return replace(each, finished=finished, finish_reason=FinishReason.LENGTH if finished else None)

    for now, outputs in (
        (1.0, [told(0, 1)]),
        (3.0, [told(0, 2), told(1, 1), told(2, 1)]),
        (7.0, [told(0, 3, True), told(1, 2)]),
        (15.0, [told(1, 3, True), told(2, 2), told(2, 3), told(2, 4, True)]),
    ):
        observer.stepped(outputs, 0.1, now)
    seen = observer.snapshot()
    counts = {name: sum(each) for name, each in seen.counts.items()}
    assert (counts["time_to_first_token_seconds"], seen.sums["time_to_first_token_seconds"]) == (1, 1.0)
    assert (seen.values["prompt_tokens"][""], seen.values["generation_tokens"][""]) == (5, 10)
    assert (counts["inter_token_latency_seconds"], seen.sums["inter_token_latency_seconds"]) == (7, 2 + 4 + 4 + 8 + 12)
    assert (counts["e2e_request_latency_seconds"], seen.sums["e2e_request_latency_seconds"]) == (3, 7 + 15 + 15)
    assert counts["request_time_per_output_token_seconds"] == 3
    assert seen.sums["request_time_per_output_token_seconds"] == 6 / 2 + 12 / 2 + 12 / 3
    assert seen.values["request_success"] == {"length": 1}
    for name, total in (("request_prompt_tokens", 5), ("request_generation_tokens", 10)):
        assert (counts[name], seen.sums[name]) == (1, total)


def test_the_rate_of_prompt_tokens_counts_the_last_row_of_every_answer(caplog):
    caplog.set_level("INFO")
    stats = Stats()
    observer = Observer(stats, log_every=1)
    observer.arrived(Request(request_id="a", prompt_token_ids=(0,) * 5, params=SamplingParams(n=3)), 0.0)
    stats.now = replace(stats.now, num_computed_tokens=stats.now.num_computed_tokens + 7, num_output_tokens=3)
    observer.stepped([output("a", 1, sample_idx=each) for each in range(3)], 0.5, 1.0)
    assert "14 prompt tokens/s, 6 output tokens/s" in caplog.records[0].getMessage()


@pytest.mark.parametrize(("buckets", "padding"), [(None, 0), (Buckets(), 1), (Buckets(rows=1, requests=1), 0)])
def test_padding_rows_are_counted(buckets, padding):
    """Three answers run together.  Each has three tokens; two of them come from rounds, which are padded to four requests."""
    core = build(buckets=buckets, is_async=False)
    drain(core, [request(f"r{number}", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True)) for number in range(3)])
    assert core.stats().num_padding_rows == 2 * padding
    observer = Observer(core.stats, log_every=None)
    assert observer.snapshot().values["padding_rows"] == {"": 2 * padding}
    core.close()


def test_the_log_line_tells_accepted_lengths_where_there_are_rounds(caplog):
    caplog.set_level("INFO")
    stats = Stats()
    stats.set(100, (100, 100, 100), (0, 0, 0))
    observer = Observer(stats, log_every=1)
    observer.stepped([], 0.1, 1.0)
    stats.set(110, (110, 108, 105), (7, 4, 1))
    observer.stepped([], 0.1, 2.0)
    plain, drafted = (each.getMessage() for each in caplog.records)
    assert "accepted length" not in plain
    assert drafted.endswith("aborted 0; accepted length 2.20 of 3.30 verified, drafts accepted by position 70 40 10 % of rounds")


def test_the_first_record_has_the_time_in_the_queue():
    """It ends with the first step of the prompt; prefill and decode follow."""
    observer = Observer(Stats(), log_every=None)
    observer.arrived(request("a", (5, 6), SamplingParams(n=2)), 1.0)
    observer.begun(["a", "unknown"], 3.0)
    observer.begun(["a"], 4.0)  # the second chunk of the prompt
    outputs = [output("a", 1), output("a", 1, sample_idx=1)]
    observer.stepped(outputs, 0.1, 5.0)
    assert [each.queue_s for each in outputs] == [2.0, None]
    ends = [replace(output("a", 2, sample_idx=each), finished=True, finish_reason=FinishReason.LENGTH) for each in range(2)]
    observer.stepped(ends, 0.1, 9.0)
    assert [each.queue_s for each in ends] == [None, None]
    sums = observer.snapshot().sums
    assert sums["request_queue_time_seconds"] == 2.0
    assert sums["request_prefill_time_seconds"] == 2.0
    assert sums["request_decode_time_seconds"] == 4.0
