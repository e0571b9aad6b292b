"""Several answers to one request: each equals the answer to a separate request; they share the prompt; all memory is freed."""

import asyncio
import functools
import io

import pytest
from PIL import Image

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.samples import Samples
from deepinfer.errors import RequestError
from deepinfer.request import FinishReason, Request, RequestOutput
from deepinfer.tokenizer import IMAGE
from tests.engine.harness import PAGE_TOKENS, build, fresh, request, rng_of, tokens

PROMPT = tokens(rng_of(1, 1), 5 * PAGE_TOKENS + 3)


def sampled(n=4, max_tokens=9, **given):
    return SamplingParams(n=n, max_tokens=max_tokens, seq_seed=11, ignore_eos=True, **given)


def drain(core):
    """Run to the end; returns (request, sample) -> [(token, log-probability)]."""
    outputs = {}
    while not core.is_idle:
        for output in core.step():
            assert core.is_unfinished(output.request_id) or output.finished
            outputs.setdefault((output.request_id, output.sample_idx), []).append((output.token_id, output.token_logprobs))
        core.scheduler.check()
    return outputs


@functools.cache
def alone(params):
    """The same answers, each from a separate request without shared memory."""
    return list(fresh([request(str(i), PROMPT, params.with_sample(i)) for i in range(params.n)]).values())


def assert_nothing_is_left(core):
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages, stats.num_held_slots) == (0, 0, 0, 0)
    assert core.num_unfinished == 0
    assert not core.executor.call(lambda: core.executor.worker._unfinished)
    assert not core._samples.groups()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_each_answer_is_what_it_is_alone_and_the_prompt_is_computed_once(is_async):
    core = build(cache=False, is_async=is_async)
    core.add(request("a", PROMPT, sampled()))
    core.add(request("b", PROMPT[:7], sampled(n=1)))
    assert core.num_unfinished == 2
    outputs = drain(core)
    assert [outputs["a", i] for i in range(4)] == alone(sampled())
    assert len({tuple(outputs["a", i]) for i in range(4)}) == 4
    # The prompt once, at most its last page again for each further answer, and the tokens, with one unnecessary row each.
    most = len(PROMPT) + 3 * PAGE_TOKENS + 7 + 5 * 9 + 5
    assert core.stats().num_computed_tokens <= most
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.parametrize("given", [{"max_num_seqs": 2}, {"budget": 7}], ids=str)
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_answers_that_cannot_branch_are_the_same(given, max_tokens):
    core = build(cache=False, **given)
    core.add(request("a", PROMPT, sampled(max_tokens=max_tokens)))
    outputs = drain(core)
    assert [outputs["a", i] for i in range(4)] == alone(sampled(max_tokens=max_tokens))
    assert_nothing_is_left(core)
    core.close()


def test_a_fork_may_want_several_answers():
    core = build()
    core.add(request("parent", PROMPT, sampled(max_tokens=30)))
    for _ in range(5):
        core.step()
    core.fork("parent", request("child", PROMPT, sampled(n=2, max_tokens=3)))
    assert core.num_unfinished == 2
    outputs = drain(core)
    assert {name: len(each) for name, each in outputs.items() if name[0] == "child"} == {("child", 0): 3, ("child", 1): 3}
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5])
def test_an_abort_takes_all_answers_whenever_it_comes(num_turns):
    core = build(cache=False)
    core.add(request("a", PROMPT, sampled(max_tokens=4)))
    core.add(request("b", PROMPT[:7], sampled(n=2, max_tokens=30)))
    for _ in range(num_turns):
        core.step()
    is_there = core.is_unfinished("a")
    count, num_tokens = core.abort(["a", "a", "unknown"])
    assert count == is_there
    assert num_tokens >= len(PROMPT) * is_there
    assert core.num_unfinished == 1
    outputs = drain(core)
    assert {name for name, _ in outputs} == {"b"}
    assert_nothing_is_left(core)
    core.close()


def test_ids_cannot_collide():
    core = build()
    for params in (sampled(), sampled(n=1)):
        with pytest.raises(RequestError, match="zero character"):
            core.add(request("a\0001", PROMPT, params))
        with pytest.raises(RequestError, match="id is empty"):
            core.add(request("", PROMPT, params))
    core.add(request("a", PROMPT, sampled()))
    core.add(request("b", PROMPT, sampled(n=1)))
    for name in "ab":
        for params in (sampled(), sampled(n=1)):
            with pytest.raises(RequestError, match="in use"):
                core.add(request(name, PROMPT, params))
    assert core.abort(["a\0000"]) == (0, 0)
    assert core.num_unfinished == 2
    core.abort(["a", "b"])
    drain(core)
    assert_nothing_is_left(core)
    core.close()


def test_a_request_that_is_refused_leaves_no_answer_behind():
    core = build(max_model_len=50)
    with pytest.raises(RequestError, match="leaves no room"):
        core.add(request("a", PROMPT, sampled()))
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"logit_bias": {3: 1, 272: 1}}, "logit_bias has 272, outside the vocabulary of 272"),
        ({"stop_token_ids": [300]}, "stop_token_ids has 300"),
        ({"allowed_token_ids": [5, 300]}, "allowed_token_ids has 300"),
        ({"banned_token_ids": [300]}, "banned_token_ids has 300"),
        ({"golden_token_ids": [5, 300]}, "golden_token_ids has 300"),
        ({"golden_token_ids": [270]}, "golden_token_ids has 270, the token of images"),
        ({"allowed_token_ids": [270]}, "leave no token"),
        ({"banned_token_ids": range(272)}, "leave no token"),
    ],
)
def test_ids_the_model_does_not_have_are_refused(llm, given, says):
    assert (llm.config.vocab_size, llm.config.image_token_id) == (272, 270)
    for n in (1, 3):
        with pytest.raises(RequestError, match=says):
            llm.generate("x", SamplingParams(n=n, **given), use_tqdm=False)
    assert_nothing_is_left(llm._core)


# The mapping alone.


def record(request_id, *, finished=False):
    return RequestOutput(
        request_id=request_id,
        prompt_len=3,
        token_id=5,
        finished=finished,
        finish_reason=FinishReason.LENGTH if finished else None,
        num_output_tokens=1,
        max_num_batched_tokens=8,
    )


def test_records_come_under_the_callers_ids_and_dropped_ones_do_not_come():
    samples = Samples()
    for name in ("a", "b"):
        asked = Request(request_id=name, prompt_token_ids=(1,), params=sampled(n=2))
        parts = samples.split(asked)
        assert [part.params for part in parts] == [asked.params.with_sample(0), asked.params.with_sample(1)]
        samples.enter(asked, parts)
    names = [part for group in samples.groups() for part in group]
    samples.drop(["b", "unknown"])
    outputs = samples.relabel([record("plain", finished=True), *(record(each, finished=each[-1] == "1") for each in names)])
    assert [(each.request_id, each.sample_idx) for each in outputs] == [("plain", 0), ("a", 0), ("a", 1)]
    assert samples.parts("a") == names[:1]
    assert samples.relabel([record(names[1])]) == []
    samples.relabel([record(names[0], finished=True)])
    assert "a" not in samples


# Results for callers.


@pytest.fixture(scope="module")
def llm():
    made = LLM("random", device="cpu", progress=False, max_num_seqs=4, max_model_len=256, tokens_per_block=16)
    yield made
    made.close()


def ids_of(records):
    return [each.token_id for each in records]


def test_answers_stand_side_by_side_in_the_order_of_prompts(llm):
    params = [sampled(n=3, max_tokens=5), sampled(n=1, max_tokens=4), sampled(n=2, max_tokens=3)]
    prompts = ["one", "another", "the last one"]
    got = llm.generate_records(prompts, params, use_tqdm=False)
    assert [len(each) for each in got] == [5, 5, 5, 4, 3, 3]
    assert [each[0].sample_idx for each in got] == [0, 1, 2, 0, 0, 1]
    singles = [(prompt, each.with_sample(i)) for prompt, each in zip(prompts, params, strict=True) for i in range(each.n)]
    expected = llm.generate_records([p for p, _ in singles], [each for _, each in singles], use_tqdm=False)
    assert [ids_of(each) for each in got] == [ids_of(each) for each in expected]
    assert len(llm.generate(prompts, params, use_tqdm=False)) == 6
    streamed = list(llm.stream("one", params[0]))
    assert [ids_of(each for each in streamed if each.sample_idx == i) for i in range(3)] == [ids_of(each) for each in got[:3]]
    stream = llm.stream("one", params[0])
    next(stream)
    stream.close()
    assert_nothing_is_left(llm._core)


def png(color):
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(buffer, "PNG")
    return buffer.getvalue()


def test_pictures_reach_every_answer(llm):
    prompt = f"look: {IMAGE} done"
    answers = {}
    for color in ("red", "blue"):
        data = [{"image_bytes": [png(color)]}]
        three = sampled(n=3, max_tokens=4, top_logprobs=1)
        answers[color] = llm.generate_records([prompt], three, use_tqdm=False, multi_modal_data=data)
        for i, got in enumerate(answers[color]):
            (single,) = llm.generate_records([prompt], three.with_sample(i), use_tqdm=False, multi_modal_data=data)
            assert [each.top_logprobs for each in single] == [each.top_logprobs for each in got]
    assert {each[0].top_logprobs for each in answers["red"]}.isdisjoint(each[0].top_logprobs for each in answers["blue"])
    assert_nothing_is_left(llm._core)


def test_the_engine_counts_requests_not_answers():
    engine = LLMEngine.from_engine_args(
        EngineArgs(model="random", device="cpu", max_num_seqs=4, max_model_len=64), progress=False
    )
    engine.add_request(1, "a", sampled(n=3, max_tokens=4), [0, 5, 6])
    assert engine.get_num_unfinished_requests() == 1
    records = []
    while engine.has_unfinished_requests():
        records += engine.step()
    assert sorted(each.sample_idx for each in records if each.finished) == [0, 1, 2]
    metrics = engine.metrics()
    assert metrics.values["request_success"]["length"] == 1
    assert metrics.sums["request_generation_tokens"] == metrics.values["generation_tokens"][""] == 12
    assert engine.abort_request("a") == (0, 0)
    engine.close()


async def through_the_process(params):
    args = EngineArgs(model="random", device="cpu", max_num_seqs=4, max_model_len=256, tokens_per_block=16)
    client = await AsyncEngineClient.start(args, progress=False)
    try:
        whole = [each async for each in client.generate("a", [0, 70, 71, 72], params)]
        again = client.generate("a", [0, 70, 71, 72], SamplingParams(n=3, max_tokens=200, ignore_eos=True))
        await anext(again)
        counts = await client.abort(["a"])
        aborted = [each async for each in again]
        with pytest.raises(RequestError, match="stop_token_ids has 999"):
            await anext(client.generate("c", [0, 70], SamplingParams(n=2, stop_token_ids=[999])))
        for _ in range(100):
            stats = (await client.stats()).scheduler
            if not stats.num_running:
                break
            await asyncio.sleep(0.02)
        return whole, counts, aborted, stats
    finally:
        await client.close()


def test_an_iterator_over_the_process_ends_when_all_answers_have(llm):
    params = sampled(
        n=3, max_tokens=6, logit_bias={5: -1.5}, allowed_token_ids=None, banned_token_ids=[9], presence_penalty=0.5, min_p=0.01
    )
    whole, counts, aborted, stats = asyncio.run(through_the_process(params))
    assert [each.sample_idx for each in whole if each.finished and each.num_output_tokens == 6] == [0, 1, 2]
    expected = llm.generate_records(prompt_token_ids=[[0, 70, 71, 72]], sampling_params=params, use_tqdm=False)
    assert [ids_of(each for each in whole if each.sample_idx == i) for i in range(3)] == [ids_of(each) for each in expected]
    assert counts[0] == 1
    ends = [each for each in aborted if each.finished]
    assert sorted(each.sample_idx for each in ends) == [0, 1, 2]
    assert {each.finish_reason for each in ends} == {FinishReason.ABORT}
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages, stats.num_held_slots) == (0, 0, 0, 0)
