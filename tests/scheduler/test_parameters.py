"""Parameters of a request that change its plans or its end."""

import time

import pytest

from deepinfer.request import FinishReason, Request, SamplingParams
from deepinfer.step import Sampled, StepResult
from tests.scheduler.world import EOS, PAGE, WORD, World, plan_of, words

STOP = 7


def add(world, prompt, name="a", **params):
    """A request with parameters that a world does not know."""
    request = Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(seq_seed=0, **params))
    world.scheduler.add(request)
    world.requests[name], world.outputs[name] = request, []
    world.sequences[name] = world.worker.add(request)


def outputs_of(world, tokens):
    """Records of the first round, which gives ``tokens``; the prompt gives an ordinary token."""
    outputs = []
    while not any(each.num_output_tokens > 1 for each in outputs):
        plan = world.scheduler.plan()
        sampled = {}
        for name, ids in (
            *((chunk.request_id, [WORD]) for chunk in plan.chunks if chunk.samples),
            *((each.request_id, tokens) for each in plan.rounds),
        ):
            none = ((),) * len(ids)
            logprobs = (-1.0,) * len(ids)
            sampled[name] = Sampled(token_ids=tuple(ids), logprobs=logprobs, top_token_ids=none, top_logprobs=none)
        outputs = world.scheduler.commit(plan, StepResult(sampled=sampled))
    return outputs


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("offset", range(6))
def test_stop_token_ends_a_request_wherever_in_a_round_it_stands(offset, ignore_eos):
    world = World(num_drafts=5)
    add(world, words(3, first=30), max_tokens=20, stop_token_ids=(99, STOP), ignore_eos=ignore_eos)
    outputs = outputs_of(world, [WORD] * offset + [STOP] + [WORD] * (5 - offset))
    assert [each.token_id for each in outputs] == [WORD] * offset + [STOP]
    assert outputs[-1].finish_reason == FinishReason.STOP
    assert world.scheduler.is_idle


def test_a_long_stop_list_costs_a_token_nothing():
    world = World(num_drafts=5)
    add(world, words(3, first=30), max_tokens=60, stop_token_ids=range(1000, 10**6), ignore_eos=True)
    begin = time.process_time()
    world.drain()
    assert len(world.outputs["a"]) == 60
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(("ignore_eos", "count"), [(False, 2), (True, 4)])
def test_end_token_stops_beside_stop_tokens_unless_it_is_ignored(ignore_eos, count):
    world = World(num_drafts=5)
    add(world, words(3, first=30), max_tokens=20, stop_token_ids=(STOP,), ignore_eos=ignore_eos)
    outputs = outputs_of(world, [WORD, EOS, WORD, STOP, WORD])
    assert len(outputs) == count
    assert outputs[-1].finish_reason == FinishReason.STOP


def test_prompt_logprobs_come_with_the_first_record_whatever_the_chunks():
    world = World(num_drafts=2, max_num_batched_tokens=5)
    add(world, words(13), max_tokens=3, prompt_logprobs=True, ignore_eos=True)
    outputs = []
    while (plan := world.scheduler.plan()) is not None:
        assert all(chunk.num_targets == len(chunk.token_ids) - chunk.samples for chunk in plan.chunks)
        assert all(chunk.num_logits == len(chunk.token_ids) for chunk in plan.chunks)
        outputs += world.scheduler.commit(plan, world.worker.run(plan))
    assert outputs[0].prompt_logprobs == (None, *(-float(token_id) for token_id in words(13)[1:]))
    assert [each.prompt_logprobs for each in outputs[1:]] == [None, None]


def test_prompt_whose_logprobs_are_asked_for_is_computed_whole():
    world = World(num_slots=9, max_num_batched_tokens=60)
    for name in "ab":
        add(world, words(40), name, max_tokens=1, prompt_logprobs=name == "b")
        world.drain()
    assert world.cached == {"a": 0, "b": 0}
    assert world.kv.num_cached_pages == 40 // PAGE


def test_bounded_decoder_half_gives_no_prompt_logprobs():
    world = World(num_slots=9, max_num_batched_tokens=60, decoder_keep_tokens=14, save_states=False)
    add(world, words(40), max_tokens=1, prompt_logprobs=True)
    (chunk,) = plan_of(world).chunks
    assert (chunk.num_logits, chunk.target_ids) == (1, None)


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.1])
def test_first_chunk_carries_the_history_where_sampling_looks_back(repetition_penalty):
    world = World(num_drafts=2, max_num_batched_tokens=5)
    add(world, words(12), max_tokens=4, repetition_penalty=repetition_penalty)
    histories = [chunk.history_ids for _ in range(3) for chunk in plan_of(world).chunks]
    if repetition_penalty == 1.0:
        assert histories == [None] * 3
    else:
        assert histories[0].tolist() == words(12)
        assert histories[1:] == [None, None]


@pytest.mark.parametrize("num_more", [-15, -7, -2, -1, 0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_fork_that_asks_for_prompt_logprobs_gets_all_of_them(num_more, is_async):
    """Also log-probabilities of tokens that the parent computed; the world checks the values."""
    world = World(num_slots=9, max_num_batched_tokens=60, is_async=is_async)
    world.add("parent", words(16), 20, ignore_eos=True)
    while len(world.outputs["parent"]) < 2:
        world.step()
    told = world.told("parent")
    prompt = told[:num_more] if num_more < 0 else told + words(num_more, first=50)
    world.add("child", prompt, 2, parent="parent", prompt_logprobs=True, ignore_eos=True)
    world.drain()
    assert len(world.outputs["child"]) == 2
    assert world.num_branched == 0


@pytest.mark.parametrize("num_before", [4, 5, 6])
@pytest.mark.parametrize("is_async", [False, True])
def test_prompt_preempted_before_its_first_token_has_each_of_its_logprobs_once(num_before, is_async):
    """Some chunks are computed or in flight when the request loses its memory; the world checks the values."""
    world = World(num_pages=1 + 2 + 12, max_num_batched_tokens=4, is_async=is_async, kv={"enable_prefix_cache": False})
    world.add("answer", words(num_before), 30, ignore_eos=True, priority=1)
    while not world.outputs["answer"]:
        world.step()
    world.add("long", words(45, first=20), 2, prompt_logprobs=True, ignore_eos=True)
    row, num_planned, num_known = world.scheduler._requests._all["long"], 0, 1
    while not row.is_resumed:
        assert "long" in world.alive, "it lost its memory too late"
        num_planned, num_known = row.num_planned_tokens, len(row.prompt_logprobs)
        world.step()
    assert 0 < num_planned < 45, "it was preempted in the middle of its prompt"
    assert num_known > 1 or is_async
    world.drain()
    assert len(world.outputs["long"]) == 2


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_answer_that_is_resumed_is_counted_whole(penalty, is_async):
    """The history has prompt and answer so far; the world compares the ids."""
    world = World(num_drafts=2, num_pages=9, max_num_batched_tokens=20, is_async=is_async, kv={"enable_prefix_cache": False})
    for name, first in (("a", 2), ("b", 40)):
        world.add(name, words(9, first=first), 18, ignore_eos=True, **{penalty: 1.5})
    world.drain()
    assert world.num_restarts > 0
