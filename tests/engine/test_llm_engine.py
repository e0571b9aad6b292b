"""The engine whose caller runs the loop: same results as LLM, and right counts at all times."""

import time

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.errors import ConfigError, ContextTooLong, RequestError

LIMITS = {"max_num_seqs": 2, "max_model_len": 128, "tokens_per_block": 16, "device": "cpu"}
PROMPTS = {"a": [0, 5, 6, 7], "b": [0, 9], "c": [0, *range(20, 60)]}


def greedy(max_tokens=5):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    made = LLMEngine.from_engine_args(EngineArgs(model="random", logging_interval_steps=3, **LIMITS), progress=False)
    yield made
    made.close()


def drain(engine):
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
    return tokens


def test_steps_give_what_the_offline_interface_gives(engine):
    llm = LLM("random", progress=False, **LIMITS)
    records = llm.generate_records(prompt_token_ids=list(PROMPTS.values()), sampling_params=greedy(), use_tqdm=False)
    llm.close()
    for request_id, ids in PROMPTS.items():
        assert engine.add_request(1, request_id, greedy(), ids, chunk_checkpoints=[16] if len(ids) > 16 else None)
    assert drain(engine) == {name: [each.token_id for each in one] for name, one in zip(PROMPTS, records, strict=True)}
    assert engine.step() == []


def test_counts_follow_requests(engine):
    assert not engine.has_unfinished_requests()
    for request_id, ids in PROMPTS.items():
        engine.add_request("user", request_id, greedy(), ids)
    assert (engine.get_num_unfinished_requests(), engine.get_num_pendings()) == (3, 3)
    engine.step()
    assert (engine.get_num_unfinished_requests(), engine.get_num_pendings()) == (3, 1)  # two slots for running requests
    assert engine.abort_request("c") == (1, len(PROMPTS["c"]))
    assert engine.abort_request(["a", "b", "unknown"])[0] == 2
    assert engine.get_num_unfinished_requests() == 0
    assert drain(engine) == {}
    assert engine.stats().num_held_pages == 0


def test_flush_brings_what_is_in_flight_and_starts_nothing(engine):
    engine.add_request(1, "f", greedy(2), [0, 5])
    first = engine.step()
    flushed = engine.flush_inflight_reqs()
    assert [each.num_output_tokens for each in first + flushed] == [1]
    assert engine.flush_inflight_reqs() == []
    rest = drain(engine)
    assert len(rest["f"]) == 1


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"prompt_token_ids": []}, RequestError, "prompt is empty"),
        ({"prompt_token_ids": [0.5]}, RequestError, "not a whole number"),
        ({"prompt_token_ids": [5] * 128}, ContextTooLong, "leaves no room"),
        ({"extra": {"trace": 1}}, RequestError, "extra="),
        ({"enqueue": False}, RequestError, "enqueue=False"),
        ({"chunk_checkpoints": [3]}, RequestError, "checkpoint 3"),
        ({"multi_modal_data": {"audio": 1}}, RequestError, "multi_modal_data has audio"),
    ],
)
def test_bad_requests_say_what_is_wrong(engine, given, error, says):
    with pytest.raises(error, match=says):
        engine.add_request(**{"user_id": 1, "request_id": "x", "sampling_params": greedy(), "prompt_token_ids": [0, 5], **given})
    assert not engine.has_unfinished_requests()


def test_ids_outside_the_vocabulary_drop_the_request_and_say_so(engine, caplog):
    assert not engine.add_request("me", "x", greedy(), [0, 999])
    assert "request x of user me is dropped: token id 999" in caplog.text
    assert not engine.has_unfinished_requests()


def test_a_line_is_logged_every_few_steps(engine, caplog):
    caplog.set_level("INFO")
    engine.add_request(1, "logged", greedy(9), [0, 5, 8])
    drain(engine)
    lines = [each.getMessage() for each in caplog.records if "steps/s" in each.getMessage()]
    assert len(lines) >= 3
    for word in ("prompt tokens/s", "output tokens/s", "running", "waiting", "pages", "slots", "hit rate", "preempted"):
        assert word in lines[0]
    assert "running 1, waiting 0" in lines[0]


def test_times_count_from_the_arrival_that_was_given(engine):
    before = engine.metrics().sums["time_to_first_token_seconds"]
    engine.add_request(1, "late", greedy(1), [0, 5], arrival_time=time.time() - 50)
    drain(engine)
    assert 50 <= engine.metrics().sums["time_to_first_token_seconds"] - before < 60


def test_a_closed_engine_says_so():
    made = LLMEngine.from_engine_args(EngineArgs(model="random", load_format="dummy", **LIMITS), progress=False)
    made.close()
    made.close()
    with pytest.raises(ConfigError, match="closed"):
        made.step()
