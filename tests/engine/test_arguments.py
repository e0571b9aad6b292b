"""Arguments of callers, at the APIs of this process: they are served or refused with a message, and affect no other request."""

import io
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine.ipc import Memory
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.loader import Loaded
from deepinfer.engine.prompt import PromptReader
from deepinfer.errors import ContextTooLong, RequestError
from deepinfer.request import FinishReason
from deepinfer.tokenizer import IMAGE, byte_tokenizer
from tests.engine.harness import build, request

PLACEHOLDER = 270
MEMORY = Memory(device="cpu", weight_bytes=0, cache_bytes=0, num_cache_tokens=0)
STRUCTURED = SamplingParams(so_args={"schema_type": "regex", "schema": "("})


@pytest.fixture(scope="module")
def llm():
    made = LLM("random", device="cpu", progress=False, max_num_seqs=16, max_model_len=512, num_drafts=0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(llm):
    """Another API with the same core; only one of the two is used at a time."""
    return LLMEngine(llm.args, Loaded(config=llm.config, tokenizer=llm.get_tokenizer(), core=llm._core, memory=MEMORY))


def greedy(**given):
    return SamplingParams(**{"temperature": 0, "max_tokens": 2, "ignore_eos": True, **given})


def tokens(llm, prompts, params, **given):
    records = llm.generate_records(prompts, params, use_tqdm=False, **given)
    return [[each.token_id for each in one] for one in records]


def assert_nothing_is_left(core):
    core.scheduler.check()
    assert core.scheduler.is_idle
    assert not core.executor.call(lambda: core.executor.worker._unfinished)


def assert_is_a_sentence(error):
    assert len(str(error)) < 400
    assert "0x" not in str(error)
    assert "\n" not in str(error)


# Randomness.


def test_without_a_seed_every_prompt_call_and_answer_draws_its_own(llm):
    shared = SamplingParams(max_tokens=5, ignore_eos=True)
    answers = tokens(llm, ["x"] * 6, shared) + tokens(llm, ["x"] * 2, shared)
    answers += tokens(llm, "x", SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    answers += [[each.token_id for each in llm.stream("x", shared)]]
    assert len({tuple(each) for each in answers}) == len(answers) == 12


def test_prompts_that_share_parameters_share_no_noise(llm):
    """With one noise vector for all, 40 prompts give 7 different first tokens; with separate noise, about 37 of 270."""
    first = tokens(llm, [f"prompt {number}" for number in range(40)], SamplingParams(max_tokens=1, temperature=1.0))
    assert len({each[0] for each in first}) > 20


def test_a_seed_repeats_its_text_also_for_a_list(llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True, seq_seed=5)
    assert len({tuple(each) for each in tokens(llm, ["x"] * 4, params) + tokens(llm, ["x"], params)}) == 1


def test_the_engine_that_its_caller_turns_draws_seeds_and_forks_do(engine):
    shared, got = SamplingParams(max_tokens=5, ignore_eos=True), {}
    for name in "abc":
        engine.add_request(1, name, shared, [0, 5, 6])
    while engine.has_unfinished_requests():
        for output in engine.step():
            got.setdefault(output.request_id, []).append(output.token_id)
    assert len({tuple(each) for each in got.values()}) == 3
    core = build()
    params, seen = SamplingParams(max_tokens=5, ignore_eos=True), {}
    core.add(request("parent", (5, 6, 7), params))
    for name in "xy":
        core.fork("parent", request(name, (5, 6, 7), params))
    while not core.is_idle:
        for output in core.step():
            seen.setdefault(output.request_id, []).append(output.token_id)
    core.close()
    assert len({tuple(each) for each in seen.values()}) == 3


# Prompts of any type.

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([object(), {"a": "b"}, {0: [5]}, {5}, 1j, int, np.float64(2), torch.tensor(3), torch.ones(2, 2, 2)]),
    st.lists(st.one_of(st.integers(-1, 300), st.floats(), st.booleans(), st.text(max_size=2), st.none()), max_size=3),
    st.lists(st.lists(st.one_of(st.integers(-1, 280), st.booleans(), st.floats()), max_size=3), max_size=2),
    st.just(SamplingParams(max_tokens=1)),
)
NAMES = ["prompts", "sampling_params", "prompt_token_ids", "multi_modal_data"]


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1))
def test_arguments_of_any_type_are_served_or_refused(llm, arguments):
    try:
        prompts = None if "prompt_token_ids" in arguments else "x"
        params = SamplingParams(max_tokens=1)
        llm.generate(**{"prompts": prompts, "sampling_params": params, **arguments}, use_tqdm=False)
    except RequestError as error:
        assert_is_a_sentence(error)
    assert_nothing_is_left(llm._core)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": {"a": 1}}, "prompts of type dict"),
        ({"prompts": b"text"}, "prompts of type bytes"),
        ({"prompts": [["nested"]]}, "a prompt of type list"),
        ({"prompts": ["a", None]}, "prompt 1: a prompt of type NoneType"),
        ({"prompt_token_ids": [0, 5, 6]}, "give a list of lists"),
        ({"prompt_token_ids": np.array([0, 5])}, "give a list of lists"),
        ({"prompt_token_ids": torch.tensor([0, 5])}, "give a list of lists"),
        ({"prompt_token_ids": [[0, True]]}, "has True at position 1, which is not a whole number"),
        ({"prompt_token_ids": [[[0]]]}, "has a list of 1 at position 0"),
        ({"prompt_token_ids": itertools.count}, "prompt_token_ids of type type"),
        ({"prompts": "a", "sampling_params": {"n": 1}}, "sampling_params of type dict"),
        ({"prompts": "a", "sampling_params": [None]}, "sampling_params 0 of type NoneType"),
        ({"prompts": "a", "sampling_params": STRUCTURED}, "the regex cannot be compiled"),
        ({"prompts": "a", "multi_modal_data": "x"}, "multi_modal_data of type str"),
        ({"prompts": IMAGE, "multi_modal_data": {"image_bytes": b"file"}}, "image_bytes of type bytes"),
        ({"prompts": IMAGE, "multi_modal_data": {"image_bytes": ["path"]}}, "an image of type str"),
    ],
)
def test_mistakes_are_told_from_one_another(llm, given, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(**given, use_tqdm=False)
    assert_nothing_is_left(llm._core)


def test_prompts_are_taken_from_what_people_have(llm):
    ids = [0, 120, 9]
    (expected,) = tokens(llm, None, greedy(), prompt_token_ids=[ids])
    arrays = (
        np.array([ids]),
        torch.tensor([ids]),
        [np.array(ids, np.uint8)],
        (tuple(ids),),
        iter([iter(ids)]),
        [map(np.int64, ids)],
    )
    for each in arrays:
        assert tokens(llm, None, greedy(), prompt_token_ids=each) == [expected]
    (text,) = tokens(llm, "abc", greedy())
    for each in (("abc",), iter(["abc"]), np.array(["abc"]), (part for part in ["abc"])):
        assert tokens(llm, each, greedy()) == [text]


ADD = {"user_id": 1, "request_id": "x", "sampling_params": greedy(), "prompt_token_ids": [0, 5] * 100}


@settings(max_examples=75)
@given(
    st.sampled_from([*ADD, "multi_modal_data", "arrival_time", "extra", "enqueue", "chunk_checkpoints"]),
    st.one_of(
        JUNK, st.lists(st.sampled_from([128, 128.0, True, "128", np.int64(128), np.float32(128), torch.tensor(128)]), max_size=2)
    ),
)
def test_whatever_a_request_is_made_of_the_next_step_works(engine, name, value):
    core = engine.driver.core
    try:
        is_taken = engine.add_request(**{**ADD, name: value})
        assert isinstance(is_taken, bool)
    except RequestError as error:
        assert_is_a_sentence(error)
        is_taken = False
    assert core.scheduler.is_idle != is_taken
    ids = [] if not is_taken else [str(value) if name == "request_id" else "x"]
    assert engine.abort_request(ids)[0] == is_taken
    assert_nothing_is_left(core)


@pytest.mark.parametrize(
    "bad", [[128.0], [True], ["128"], "128", 128, [None], torch.tensor([1.5]), np.array([[128]]), [1], [-128]]
)
def test_bad_checkpoints_affect_no_other_request(engine, bad):
    assert engine.add_request(1, "good", greedy(), [0, 7])
    with pytest.raises(RequestError, match="checkpoint"):
        engine.add_request(1, "bad", greedy(), [0, 5] * 100, chunk_checkpoints=bad)
    got = []
    while engine.has_unfinished_requests():
        got += engine.step()
    assert {each.request_id for each in got} == {"good"}


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, torch.tensor, lambda ids: [np.int64(each) for each in ids]])
def test_checkpoints_are_taken_from_what_people_have(engine, kind):
    assert engine.add_request(1, "a", greedy(), [0, 5] * 100, chunk_checkpoints=kind([128]))
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("bad", [5, None, b"x", [5], ["a", None], {"a": 1}, object()])
def test_only_ids_are_aborted(engine, bad):
    with pytest.raises(RequestError, match="request_ids"):
        engine.abort_request(bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1, "now", True, 1j])
def test_an_arrival_is_a_time(engine, bad):
    with pytest.raises(RequestError, match="arrival_time"):
        engine.add_request(**ADD, arrival_time=bad)
    assert engine.add_request(**ADD, arrival_time=np.float64(time.time()))
    assert engine.abort_request("x")[0] == 1


# Pictures.


def png(width=60, height=40):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "sizes", [[(60, 40)], ((60, 40),), np.array([[60, 40]]), [[np.int64(60), torch.tensor(40)]], torch.tensor([[60, 40]])]
)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_pictures_come_in_any_bytes_with_their_sizes(llm, kind, sizes):
    reader = llm._engine.reader
    plain = reader.of_text(IMAGE, {"image_bytes": [png()]})
    given = reader.of_text(IMAGE, {"image_bytes": [kind(png())], "image_sizes": sizes})
    assert (given.token_ids, given.image_hashes) == (plain.token_ids, plain.image_hashes)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([(40, 60)], "40 x 60 for image 0, which has 60 x 40 pixels"),
        ([60, 40], "image_sizes=60 is not a list"),
        ([(60,)], "an entry of 1 numbers"),
        ([(60, 40, 3)], "an entry of 3 numbers"),
        ([(60.0, 40)], "has 60.0"),
        ([(0, 40)], "image_sizes has 0"),
        (["60x40"], "is not a list"),
        (60, "image_sizes of type int"),
        ([], "0 image_sizes"),
        ([(60, 40)] * 2, "2 image_sizes"),
    ],
)
def test_sizes_that_no_picture_has_are_refused(llm, engine, sizes, says):
    data = {"image_bytes": [png()], "image_sizes": sizes}
    with pytest.raises(RequestError, match=says):
        llm.generate(IMAGE, multi_modal_data=data, use_tqdm=False)
    with pytest.raises(RequestError, match=says):
        engine.add_request(1, "x", greedy(), [0, PLACEHOLDER], multi_modal_data=data)
    assert_nothing_is_left(llm._core)


# Prompts that are too long.


class Unread(list):
    """Ids that the engine must not read."""

    def __iter__(self):
        raise AssertionError("the ids were read")


def reader(**given):
    args = EngineArgs(model="random", **{"max_model_len": 512, "ignore_len": 1000, **given})
    config = SimpleNamespace(vocab_size=272, image_token_id=PLACEHOLDER, vision=None)
    return PromptReader(args, config, byte_tokenizer())


@pytest.mark.parametrize(
    ("count", "says"), [(1000, "ignore_len=1000"), (2000, "ignore_len=1000"), (999, "limit of 512"), (512, "limit of 512")]
)
def test_prompts_that_are_too_long_are_not_looked_at(count, says):
    broken = {"image_bytes": [b"no picture"]}
    for ids in (Unread([PLACEHOLDER] * count), [PLACEHOLDER] * count, np.full(count, PLACEHOLDER)):
        with pytest.raises(ContextTooLong, match=says):
            reader().of_ids(ids, broken)
    with pytest.raises(ContextTooLong, match=says):
        reader().of_text("x" * (count - 1), broken)
    with pytest.raises(ContextTooLong, match=says):
        reader().of_text(IMAGE * (count - 1), broken)
    with pytest.raises(RequestError, match="0 image placeholder"):
        reader().of_text("x" * 510, broken)


def test_ids_without_an_end_are_refused():
    with pytest.raises(ContextTooLong, match="limit of 512"):
        reader().of_ids(itertools.count())


def test_ten_megabytes_of_text_are_refused_in_no_time(llm):
    text = "word " * 2_000_000
    for each in (text, text[:-3] + "\ud800", "é" * 5_000_000):
        begin = time.process_time()
        with pytest.raises(ContextTooLong, match="at least 10000001 tokens"):
            llm.prompt_ids(each)
        assert time.process_time() - begin < 0.5
    with pytest.raises(ContextTooLong):
        llm.generate(["short", text], use_tqdm=False)
    with pytest.raises(ContextTooLong):
        next(llm.stream(text))


# The content of the text, and unsupported parameters.


def test_the_stop_token_that_ended_an_answer_is_not_in_its_text(llm):
    (records,) = llm.generate_records("spell", greedy(golden_token_ids=[70, 71, 72, 73], max_tokens=4), use_tqdm=False)
    spelled = llm.text(records)
    for stop in (71, 73):
        params = greedy(golden_token_ids=[70, 71, 72, 73], max_tokens=4, stop_token_ids=[stop])
        (text,) = llm.generate("spell", params, use_tqdm=False)
        (stopped,) = llm.generate_records("spell", params, use_tqdm=False)
        assert [each.token_id for each in stopped] == list(range(70, stop + 1))
        assert stopped[-1].finish_reason == FinishReason.STOP
        assert text == llm.text(stopped) == spelled[: stop - 70]
    eos = llm.config.eos_token_id
    assert llm.generate("x", greedy(golden_token_ids=[70, eos], ignore_eos=False), use_tqdm=False) == [spelled[:1]]


def test_logprobs_of_prompts_are_refused_where_the_decoder_half_is_bounded():
    core = build(keep=140)
    for n in (1, 3):
        with pytest.raises(RequestError, match="decoder_replay=off"):
            core.add(request("a", (5, 6, 7), SamplingParams(prompt_logprobs=True, n=n)))
    assert_nothing_is_left(core)
    core.add(request("b", (5, 6, 7), SamplingParams(max_tokens=1)))
    while not core.is_idle:
        core.step()
    core.close()


def test_lists_as_long_as_the_vocabulary_cost_an_answer_nothing(llm):
    """The engine keeps only as many forced tokens as an answer can have."""
    params = greedy(
        max_tokens=3, golden_token_ids=[70] * 10**6, stop_token_ids=range(80, 260), logit_bias=dict.fromkeys(range(260), 1)
    )
    assert tokens(llm, "x", params) == [[70, 70, 70]]
