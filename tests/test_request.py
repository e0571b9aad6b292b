"""Sampling parameters: refused values, converted values, and the differences between the answers of one request."""

import io
import math
import time
from dataclasses import asdict, fields, replace
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError, reason, shown
from deepinfer.executor.slots import SlotTable
from deepinfer.request import (
    MAX_PROMPT_TOP,
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
)

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
        ({"logit_bias": [3]}, "is not a pair"),
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


REGEX = {"schema_type": "regex", "schema": "a+"}
TRIGGERED = {**REGEX, "trigger_token_ids": [7, 8, 7]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a+", r"so_args='a\+' is not a mapping"),
        ({**REGEX, "trigger": [1]}, "unknown key 'trigger'; the keys are schema_type, schema, trigger_token_ids"),
        ({**REGEX, 3: 1}, "unknown key 3"),
        ({"schema": "a"}, "has no schema_type"),
        ({"schema_type": "regex"}, "has no schema"),
        ({**REGEX, "schema_type": "xml"}, "schema_type='xml' is unknown; use one of regex, json, ebnf, lark"),
        ({**REGEX, "schema_type": ["json"]}, "schema_type=a list of 1 is unknown"),
        ({**REGEX, "schema": 3}, "schema of type int"),
        ({**REGEX, "schema": None}, "has no schema"),
        ({**REGEX, "schema": " "}, "schema is empty"),
        ({**REGEX, "schema": "\ud800"}, "lone surrogate at character 0"),
        ({"schema_type": "json", "schema": {"const": math.nan}}, "cannot be written as JSON"),
        ({"schema_type": "json", "schema": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({**REGEX, "trigger_token_ids": 7}, "trigger_token_ids=7 is not a list"),
        ({**REGEX, "trigger_token_ids": [-7]}, "trigger_token_ids has -7"),
        ({**TRIGGERED, "bound_token_id": -1}, "bound_token_id=-1"),
        ({**TRIGGERED, "max_free_tokens": 1.5}, "max_free_tokens=1.5"),
        ({**TRIGGERED, "end_needs_trigger": 1}, "end_needs_trigger=1"),
        ({**REGEX, "bound_token_id": 3}, "bound_token_id=3 needs trigger_token_ids"),
        ({**REGEX, "max_free_tokens": 0}, "max_free_tokens=0 needs trigger_token_ids"),
        ({**REGEX, "end_needs_trigger": True, "trigger_token_ids": []}, "end_needs_trigger=True needs trigger_token_ids"),
    ],
)
def test_a_wrong_structured_output_says_what_is_wrong(given, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(so_args=given)


def test_a_grammar_needs_the_end_token_and_ids_of_the_vocabulary():
    with pytest.raises(RequestError, match="ignore_eos=True cannot be combined with so_args"):
        SamplingParams(so_args=REGEX, ignore_eos=True)
    params = SamplingParams(so_args={**TRIGGERED, "bound_token_id": 9})
    params.check_vocabulary(10)
    with pytest.raises(RequestError, match="so_args has 9, outside the vocabulary of 9"):
        params.check_vocabulary(9)


def test_a_structured_output_is_plain_and_survives_transport():
    given = {**TRIGGERED, "bound_token_id": np.int32(9), "max_free_tokens": 20, "end_needs_trigger": True}
    params = SamplingParams(so_args=given)
    kept = params.structured_output
    assert kept == StructuredOutput(
        schema_type="regex",
        schema="a+",
        trigger_token_ids=(7, 8, 7),
        bound_token_id=9,
        max_free_tokens=20,
        end_needs_trigger=True,
    )
    assert replace(params, n=1) == params
    assert hash(replace(params, n=1)) == hash(params)
    packed = msgspec.msgpack.encode({each.name: getattr(params, each.name) for each in fields(params)})
    assert SamplingParams(**msgspec.msgpack.decode(packed)) == params
    assert SamplingParams(**msgspec.json.decode(msgspec.json.encode(asdict(params)))) == params


def test_a_json_schema_may_be_text_or_a_value():
    schema = {"type": "object", "properties": {"ä": {"type": "null"}}}
    value = SamplingParams(so_args={"schema_type": "json", "schema": schema})
    text = '{"type": "object", "properties": {"ä": {"type": "null"}}}'
    assert value == SamplingParams(so_args={"schema_type": "json", "schema": text})
    assert SamplingParams(so_args={"schema_type": "json", "schema": True}).structured_output.schema == "true"


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


def test_the_most_likely_tokens_of_a_long_prompt_are_limited():
    params = SamplingParams(prompt_logprobs=True, top_logprobs=MAX_TOP_LOGPROBS)
    ids = (5,) * (MAX_PROMPT_TOP // MAX_TOP_LOGPROBS + 1)
    Request(request_id="a", prompt_token_ids=ids[1:], params=params)
    Request(request_id="a", prompt_token_ids=ids, params=replace(params, prompt_logprobs=False))
    with pytest.raises(RequestError, match="asks for 1049000 log-probabilities, the limit is 1048576; lower top_logprobs"):
        Request(request_id="a", prompt_token_ids=ids, params=params)


# Values of other types, and values that the device cannot represent.

PLAIN = (int, float, bool, str, bytes, tuple, type(None))
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**5000]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([1j, object(), Fraction(1, 3), Decimal(1), int, lambda: 0, {"a": 1}, {3: 4.5}, [[1]], [(1, 2.5)], range(4)]),
    st.builds(lambda value, kind: kind(value), st.integers(-2, 100), st.sampled_from([np.int64, np.uint8, np.float32, np.bool_])),
    st.builds(torch.tensor, st.one_of(st.integers(0, 50), st.floats(0, 1), st.booleans(), st.lists(st.integers(0, 9)))),
    st.builds(np.array, st.one_of(st.integers(0, 50), st.floats(0, 1), st.booleans(), st.lists(st.integers(0, 9)))),
    st.lists(st.one_of(st.integers(-1, 9), st.floats(), st.booleans(), st.builds(np.int32, st.integers(0, 9))), max_size=3),
)


def is_plain(value):
    return type(value) in PLAIN and (type(value) is not tuple or all(map(is_plain, value)))


def assert_is_a_sentence(error, name=""):
    assert name in str(error)
    assert len(str(error)) < 400
    assert "0x" not in str(error)
    assert "\n" not in str(error)


@settings(max_examples=200)
@example("top_k", torch.tensor([]))
@given(st.sampled_from([each.name for each in fields(SamplingParams)]), JUNK)
def test_a_parameter_of_any_type_is_refused_or_kept_as_plain_values(name, value):
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert_is_a_sentence(error, name)
        return
    assert all(is_plain(getattr(params, each.name)) for each in fields(params)), (name, value)
    assert msgspec.msgpack.encode({each.name: getattr(params, each.name) for each in fields(params)})
    hash(params)


@pytest.mark.parametrize("kind", [int, np.int32, np.uint64, torch.tensor, np.array], ids=lambda kind: kind.__name__)
def test_scalars_of_numpy_and_torch_are_numbers(kind):
    params = SamplingParams(max_tokens=kind(7), top_k=kind(3), n=kind(2), seq_seed=kind(5), temperature=kind(2))
    assert params == SamplingParams(max_tokens=7, top_k=3, n=2, seq_seed=5, temperature=2.0)
    assert {type(params.max_tokens), type(params.top_k), type(params.seq_seed)} == {int}
    assert SamplingParams(max_tokens=5, ignore_eos=np.bool_(True), prompt_logprobs=torch.tensor(True)).ignore_eos is True


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]])
def test_lists_of_any_kind_are_lists(kind):
    params = SamplingParams(stop_token_ids=kind([4, 2]), allowed_token_ids=kind([4, 2]), golden_token_ids=kind([4, 2]))
    assert (params.stop_token_ids, params.allowed_token_ids, params.golden_token_ids) == ((4, 2),) * 3


def test_lists_name_every_token_once_in_their_order_and_forced_ones_as_given():
    ids = [5, 3, 5, 9, 3]
    params = SamplingParams(stop_token_ids=ids, banned_token_ids=ids, golden_token_ids=ids)
    assert params.stop_token_ids == params.banned_token_ids == (5, 3, 9)
    assert params.golden_token_ids == tuple(ids)


def test_a_list_of_a_million_ids_is_checked_in_linear_time_and_not_again_for_each_answer():
    ids = list(range(10**6))
    begin = time.process_time()
    params = SamplingParams(stop_token_ids=ids, banned_token_ids=ids, n=128, seq_seed=1)
    assert time.process_time() - begin < 3
    begin = time.process_time()
    samples = [params.with_seed().with_sample(number) for number in range(128)]
    assert time.process_time() - begin < 0.1
    assert samples[5].stop_token_ids is params.stop_token_ids


@pytest.mark.parametrize(
    "given",
    [{"temperature": 1e39}, {"temperature": 3.4028236e38}, {"temperature": 10**400}, {"top_p": 1e-46}, {"top_p": 5e-324}],
    ids=str,
)
def test_what_is_infinite_or_nothing_in_fp32_is_refused(given):
    with pytest.raises(RequestError, match=f"{next(iter(given))}=.* 32 bits"):
        SamplingParams(**given)


def test_what_fp32_can_hold_is_accepted():
    SamplingParams(temperature=3.4028235e38, top_p=1e-45, min_p=5e-324, presence_penalty=5e-324)
    SamplingParams(temperature=5e-324, top_p=np.nextafter(1, 0), repetition_penalty=np.float32(0.001))


@given(st.one_of(st.floats(0, 1), st.integers(-2000, 2000).map(lambda steps: 1e-5 + steps * 2.0**-69), st.floats(9e-6, 1.1e-5)))
@example(1e-5)
@example(float(np.float32(1e-5)))
@example(float(np.nextafter(np.float32(1e-5), np.float32(0))))
@example(9.999999747378752e-06)
def test_host_and_device_agree_about_what_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, seq_seed=1)
    table = SlotTable(2, 0, torch.device("cpu"))
    table.write(1, params, 10)
    assert table.sampling(torch.tensor([1]), filters=False).greedy.item() == params.is_greedy


REQUEST = {"request_id": "a", "prompt_token_ids": (3, 4), "params": SamplingParams()}


@settings(max_examples=300)
@given(st.sampled_from([each.name for each in fields(Request)]), JUNK)
def test_a_field_of_a_request_of_any_type_is_refused_or_kept_as_plain_values(name, value):
    try:
        request = Request(**{**REQUEST, name: value})
    except RequestError as error:
        assert_is_a_sentence(error)
        return
    for each in ("request_id", "prompt_token_ids", "priority", "salt", "checkpoints"):
        assert is_plain(getattr(request, each)), (name, value)
    assert -(2**63) <= request.priority < 2**63


def test_requests_take_what_people_have():
    request = Request(
        request_id=np.str_("a"),
        prompt_token_ids=np.array([3, 4], dtype=np.uint16),
        params=SamplingParams(),
        priority=np.int64(-3),
        salt=bytearray(b"t"),
        checkpoints=torch.tensor([128, 256, 128]),
    )
    assert (request.prompt_token_ids, request.priority, request.salt, request.checkpoints) == ((3, 4), -3, b"t", (128, 256))


def test_without_a_seed_every_request_draws_its_own_and_its_answers_derive_from_it():
    shared = SamplingParams(n=3)
    assert shared.seq_seed is None
    requests = [Request(**{**REQUEST, "params": shared}).with_seed() for _ in range(50)]
    seeds = [each.sample(number, "x").params.seq_seed for each in requests for number in range(3)]
    assert len(set(seeds)) == 150
    seeded = Request(**{**REQUEST, "params": SamplingParams(n=3, seq_seed=7)})
    assert seeded.with_seed() is seeded
    assert seeded.sample(0, "x").params.seq_seed == 7


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, "x" * 10**6, b"x" * 10**6, [0] * 10**6, 10**9999, np.float32(1), np.longdouble(1), torch.ones(3), type],
    ids=range(10),
)
def test_messages_show_values_shortly_and_without_addresses(value):
    assert len(shown(value)) < 130
    assert "0x" not in shown(value)


def test_what_other_libraries_say_is_told_shortly_and_without_addresses():
    for what in (object(), io.BytesIO(), [object()], "x" * 10**6, "two\nlines"):
        told = reason(ValueError(f"cannot use {what!r}\n{what}"))
        assert len(told) < 210
        assert "0x" not in told
        assert "\n" not in told
    assert reason(KeyError()) == "KeyError"
