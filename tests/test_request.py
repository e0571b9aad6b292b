"""Sampling parameters: what is refused, what is kept, and how the answers of one request differ."""

import math
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.request import MAX_SAMPLES, RequestOutput, SamplingParams

EVERYTHING = {
    "n": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": -2,
    "frequency_penalty": 2.0,
    "repetition_penalty": 1.3,
    "logit_bias": {7: -100, 3: 1.5},
    "stop_token_ids": [4, 5],
    "allowed_token_ids": range(3, 20),
    "banned_token_ids": np.array([9, 8]),
    "first_n_token_no_eos": 2,
    "golden_token_ids": [6],
    "prompt_logprobs": True,
    "seq_seed": 99,
}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 0}, "n=0 .* 1 to 128"),
        ({"n": MAX_SAMPLES + 1}, "n=129"),
        ({"n": True}, "n=True"),
        ({"n": 2.0}, "n=2.0"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"min_p": math.nan}, "min_p=nan"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
        ({"presence_penalty": None}, "presence_penalty=None"),
        ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"logit_bias": 3}, "logit_bias=3"),
        ({"logit_bias": "ab"}, "logit_bias='ab'"),
        ({"logit_bias": {"3": 1}}, "logit_bias has '3'"),
        ({"logit_bias": {-1: 1}}, "logit_bias has -1"),
        ({"logit_bias": {3: 101}}, "token 3 is 101"),
        ({"logit_bias": {3: math.nan}}, "token 3 is nan"),
        ({"logit_bias": {3: "1"}}, "token 3 is '1'"),
        ({"logit_bias": [(3, 1), (3, 2)]}, "token 3 twice"),
        ({"logit_bias": [3]}, "no pair"),
        ({"stop_token_ids": 3}, "stop_token_ids=3"),
        ({"stop_token_ids": "34"}, "stop_token_ids='34'"),
        ({"stop_token_ids": [True]}, "stop_token_ids has True"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids has 2147483648"),
        ({"allowed_token_ids": []}, "allows no token"),
        ({"allowed_token_ids": [3], "banned_token_ids": [4, 3]}, "leaves no token"),
        ({"banned_token_ids": [1.5]}, "banned_token_ids has 1.5"),
        ({"golden_token_ids": []}, "forces no token"),
        ({"golden_token_ids": [-1]}, "golden_token_ids has -1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1"),
    ],
)
def test_bad_values_say_what_is_wrong(given, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**given)


def test_everything_is_kept_hashable_and_survives_replacement_and_transport():
    params = SamplingParams(**EVERYTHING)
    assert params.logit_bias == params.bias_pairs == ((3, 1.5), (7, -100.0))
    assert params.banned_token_ids == (9, 8)
    assert {type(each) for each in params.banned_token_ids} == {int}
    assert params.allowed_token_ids == tuple(range(3, 20))
    assert replace(params, n=3) == params
    assert hash(replace(params, n=3)) == hash(params)
    packed = msgspec.msgpack.encode({each.name: getattr(params, each.name) for each in fields(params)})
    assert SamplingParams(**msgspec.msgpack.decode(packed)) == params


def test_neutral_values_ask_for_nothing():
    params = SamplingParams(logit_bias={}, presence_penalty=0, repetition_penalty=1, seq_seed=0)
    assert params == SamplingParams(seq_seed=0)
    assert not any((params.has_penalties, params.needs_history, params.has_filters, params.has_token_mask))


@pytest.mark.parametrize(
    ("given", "true"),
    [
        ({"temperature": 0}, {"is_greedy"}),
        ({"top_k": 1}, {"is_greedy"}),
        ({"temperature": 0, "top_p": 0.5}, {"is_greedy"}),
        ({"top_k": 2}, {"has_filters"}),
        ({"top_p": 0.5}, {"has_filters"}),
        ({"min_p": 0.5}, {"has_filters"}),
        ({"presence_penalty": 1}, {"has_penalties", "needs_history"}),
        ({"frequency_penalty": -1}, {"has_penalties", "needs_history"}),
        ({"repetition_penalty": 0.9}, {"has_penalties", "needs_history"}),
        ({"banned_token_ids": [3]}, {"has_token_mask"}),
        ({"allowed_token_ids": [3]}, {"has_token_mask"}),
    ],
)
def test_properties_follow_from_values(given, true):
    params = SamplingParams(**given)
    names = ("is_greedy", "has_filters", "has_penalties", "needs_history", "has_token_mask")
    assert {name for name in names if getattr(params, name)} == true


def test_samples_differ_by_seed_and_the_first_keeps_it_and_reports_on_the_prompt():
    params = SamplingParams(**{**EVERYTHING, "n": MAX_SAMPLES})
    samples = [params.with_sample(i) for i in range(MAX_SAMPLES)]
    assert samples[0] == replace(params, n=1)
    assert len({each.seq_seed for each in samples}) == MAX_SAMPLES
    assert {replace(each, seq_seed=0) for each in samples[1:]} == {replace(params, n=1, seq_seed=0, prompt_logprobs=False)}
    assert samples == [params.with_sample(i) for i in range(MAX_SAMPLES)]
    other = replace(params, seq_seed=100)
    assert not {other.with_sample(i).seq_seed for i in range(MAX_SAMPLES)} & {each.seq_seed for each in samples}
    assert all(0 <= each.seq_seed < 2**64 for each in samples)


def test_records_carry_prompt_logprobs_and_sample_through_transport():
    record = RequestOutput(
        request_id="a",
        prompt_len=2,
        token_id=3,
        finished=False,
        finish_reason=None,
        num_output_tokens=1,
        max_num_batched_tokens=8,
        prompt_logprobs=(None, -1.5),
        confidence_score=0.25,
        sample_idx=2,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RequestOutput) == record
