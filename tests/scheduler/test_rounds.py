"""Decoding in rounds of drafts: their plans, the tokens and states that are kept, and the memory that is given back."""

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.kv.prefix import PageChain
from deepinfer.request import FinishReason
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.step import Sampled, StepResult
from tests.scheduler.world import EOS, LAYOUT, PAGE, WORD, World, names_of, plan_of, run_ahead, words

DRAFTS = 5
CONFIDENCES = (0.9, 0.8, 0.7, 0.6, 0.5)


def world_of(**given):
    return World(**({"num_drafts": DRAFTS, "max_num_batched_tokens": 60} | given))


def decode(world, *names, prompt=7, max_tokens=30, **given):
    """Requests with their first token."""
    for number, name in enumerate(names):
        world.add(name, words(prompt, first=2 + 30 * number), max_tokens, ignore_eos=True, **given)
    while any(not world.outputs[name] for name in names):
        plan_of(world)
    return world


def result_of(plan, tokens, num_verified=DRAFTS, confidence=0.5):
    """Result of a step in which every round gives ``tokens`` and every chunk the first of them; the last one was not drafted."""
    sampled = {}
    for name, ids, num_drafts in (
        *((chunk.request_id, tokens[:1], 0) for chunk in plan.chunks if chunk.samples),
        *((each.request_id, tokens, num_verified) for each in plan.rounds),
    ):
        sampled[name] = Sampled(
            token_ids=tuple(ids),
            logprobs=tuple(-0.25 * number for number in range(len(ids))),
            top_token_ids=tuple((token_id,) for token_id in ids),
            top_logprobs=((-0.5,),) * len(ids),
            num_drafts=num_drafts,
            confidences=CONFIDENCES[:num_drafts],
        )
    num_drafting = sum(chunk.samples or chunk.anchor_id is not None for chunk in plan.chunks) + len(plan.rounds)
    return StepResult(sampled=sampled, confidences=np.full((num_drafting, DRAFTS), confidence))


def end_at(offset, token_id=EOS):
    """Six tokens; the token at ``offset`` differs."""
    return [WORD] * offset + [token_id] + [7] * (DRAFTS - offset)


def state_found(world, tokens):
    """Position of the saved state that a request with ``tokens`` continues from; 0 if there is none."""
    chain = PageChain(PAGE, b"")
    chain.extend(np.array([*tokens, *[WORD] * (world.kv.margin + PAGE)], dtype=np.int32), {})
    hit = world.kv.plan_hit(chain, chain.num_tokens)
    return hit.start if hit.kind == "state" else 0


def everything_is_free(world):
    return world.kv.num_free_pages == world.kv.num_pages and world.kv.num_free_slots == world.kv.num_slots


# ----------------------------------------------------------------------------------------------------------- what is planned


@pytest.mark.parametrize(("num_left", "cap"), [(1, 0), (2, 1), (3, 2), (5, 4), (6, 5), (7, 5), (40, 5)])
def test_round_verifies_one_draft_fewer_than_tokens_are_left(num_left, cap):
    world = decode(world_of(), "a", max_tokens=1 + num_left)
    plan = plan_of(world)
    (each,) = plan.rounds
    assert (each.start, each.max_drafts) == (7, cap)
    assert (plan.num_drafts, plan.num_rows) == (cap, 1 + cap)


def test_step_verifies_all_drafts_of_its_rounds_where_nothing_says_otherwise():
    world = world_of(accept=lambda count: 0)
    for number, (name, max_tokens) in enumerate({"a": 6, "b": 30, "c": 4}.items()):
        world.add(name, words(7, first=2 + 30 * number), max_tokens, ignore_eos=True)
    for _ in range(3):
        plan = plan_of(world)
    assert {each.request_id: each.max_drafts for each in plan.rounds} == {"a": 4, "b": 5, "c": 2}
    assert (plan.num_drafts, plan.num_rows) == (11, 14)


def test_short_budget_serves_fewer_requests_and_never_fewer_drafts():
    world = World(num_drafts=DRAFTS, max_num_batched_tokens=13, max_num_seqs=3, accept=lambda count: 0)
    decode(world, "a", "b", "c", prompt=2, max_tokens=25)
    seen = []
    for _ in range(12):
        plan = plan_of(world)
        assert [each.max_drafts for each in plan.rounds] == [DRAFTS, DRAFTS]
        seen += names_of(plan)
    assert max(map(seen.count, "abc")) - min(map(seen.count, "abc")) <= 2, "all advance"


def test_prompts_get_nothing_of_a_step_that_leaves_an_answer_out():
    """Otherwise new short answers, which come first, would block a long one as long as requests arrive."""
    world = World(num_drafts=DRAFTS, max_num_batched_tokens=8, accept=lambda count: 0)
    decode(world, "a", "b", prompt=2)
    for number in range(20):
        world.add(f"new {number}", [40 + number], 3, ignore_eos=True)
        assert set(names_of(plan_of(world))) <= {"a", "b"}
    assert min(len(world.outputs[name]) for name in "ab") >= 10


@pytest.mark.parametrize(("budget", "cap"), [(1, 0), (3, 2), (6, 5)])
def test_more_drafts_than_a_step_holds_are_cut_to_it(budget, cap):
    world = decode(world_of(max_num_batched_tokens=budget), "a", "b", prompt=2)
    for _ in range(3):
        assert [each.max_drafts for each in plan_of(world).rounds] == [cap]
    world.drain()


def test_rounds_take_their_rows_from_prompts():
    world = decode(world_of(max_num_batched_tokens=10, save_states=False), "a")
    world.add("b", words(20, first=50))
    plan = plan_of(world)
    assert names_of(plan) == ["a", "b"]
    assert (plan.num_drafts, plan.chunks[0].end, plan.num_rows) == (5, 4, 10)


# -------------------------------------------------------------------------------------------------------- tokens of a round


@pytest.mark.parametrize("offset", range(DRAFTS + 1))
def test_end_token_drops_what_the_round_brought_behind_it(offset):
    world = world_of()
    world.add("a", words(7), 30)
    while not (plan := world.scheduler.plan()).rounds:
        world.scheduler.commit(plan, result_of(plan, [WORD]))
    outputs = world.scheduler.commit(plan, result_of(plan, end_at(offset)))
    assert [each.token_id for each in outputs] == end_at(offset)[: offset + 1]
    assert [each.finish_reason for each in outputs] == [None] * offset + [FinishReason.STOP]
    assert [each.num_output_tokens for each in outputs] == list(range(2, offset + 3))
    assert world.scheduler.stats().num_output_tokens == offset + 2
    assert world.scheduler.stats().num_computed_tokens == 7 + 1 + offset
    assert world.kv.num_cached_pages == (7 + 1 + offset) // PAGE, "the end token itself was sampled, and never read"
    assert world.scheduler.is_idle
    assert everything_is_free(world)
    world.scheduler.check()
    world.kv.check()


def test_ignored_end_token_ends_no_round():
    world = decode(world_of(), "a")
    plan = world.scheduler.plan()
    outputs = world.scheduler.commit(plan, result_of(plan, [EOS] * 6))
    assert [each.finish_reason for each in outputs] == [None] * 6


def test_records_of_a_round_say_what_was_drafted():
    world = decode(world_of(), "a")
    plan = world.scheduler.plan()
    outputs = world.scheduler.commit(plan, result_of(plan, [11, 12, 13], num_verified=4))
    assert [(each.draft_tok, each.accept_tok) for each in outputs] == [(4, 2), (0, 0), (0, 0)]
    assert [each.confidence_score for each in outputs] == [0.9, 0.8, 0.7]
    assert [each.token_logprobs for each in outputs] == [0.0, -0.25, -0.5]
    assert [each.top_token_ids for each in outputs] == [(11,), (12,), (13,)]
    plan = world.scheduler.plan()
    assert [each.confidence_score for each in world.scheduler.commit(plan, result_of(plan, [WORD] * 6))] == [*CONFIDENCES, None]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("limit", [{"max_model_len": 72}, {"max_model_len": 20}])
def test_length_limit_is_met_wherever_in_a_round_it_falls(is_async, limit):
    for num_accepted in range(DRAFTS + 1):
        for num_tokens in range(1, 15):
            world = world_of(is_async=is_async, accept=lambda count, most=num_accepted: min(count, most), **limit)
            prompt = 7 if limit["max_model_len"] > 20 else 20 - num_tokens
            world.add("a", words(prompt), num_tokens if prompt == 7 else 50, ignore_eos=True)
            world.drain()
            assert len(world.outputs["a"]) == num_tokens
            assert world.ended == {"a": FinishReason.LENGTH}


def test_stats_count_verified_and_accepted_drafts_by_position():
    world = decode(world_of(), "a", "b", max_tokens=15)
    plan = world.scheduler.plan()
    world.scheduler.commit(plan, result_of(plan, [WORD] * 3, num_verified=4))
    plan = world.scheduler.plan()
    world.scheduler.commit(plan, result_of(plan, [WORD] * 6))
    stats = world.scheduler.stats()
    assert stats.num_rounds == 4
    assert stats.num_verified_drafts == (4, 4, 4, 4, 2)
    assert stats.num_accepted_drafts == (4, 4, 2, 2, 2)


# ------------------------------------------------------------------------------------------------------------ one step ahead


def test_round_ahead_has_bounds_and_pages_for_the_greatest():
    world = world_of(is_async=True, save_states=False)
    world.add("a", words(3), 40, ignore_eos=True)
    run_ahead(world)
    (first,) = run_ahead(world).rounds
    assert (first.start, first.max_drafts) == (3, 5)
    world.commit()
    (second,) = run_ahead(world).rounds
    assert (second.start, second.max_drafts) == (4, 5)
    assert len(second.page_ids) == LAYOUT.pages_for(9 + 1 + 5)


@pytest.mark.parametrize("num_accepted", [0, 1])
def test_round_is_planned_when_only_the_greatest_length_reaches_the_limit(num_accepted):
    world = world_of(is_async=True, save_states=False, accept=lambda count: min(count, num_accepted))
    world.add("a", words(3), 3, ignore_eos=True)
    run_ahead(world)
    assert run_ahead(world).rounds[0].max_drafts == 1
    world.commit()
    (each,) = run_ahead(world).rounds
    assert (each.start, each.max_drafts) == (4, 0)
    world.commit()
    assert len(world.outputs["a"]) == 2 + num_accepted
    world.drain()
    assert len(world.outputs["a"]) == 3


def test_round_is_not_planned_when_the_least_length_reaches_the_limit():
    world = world_of(is_async=True, save_states=False)
    world.add("a", words(3), 2, ignore_eos=True)
    run_ahead(world)
    run_ahead(world)
    world.commit()
    assert world.scheduler.plan() is None
    world.drain()


@pytest.mark.parametrize("offset", range(DRAFTS + 1))
def test_late_stop_drops_the_round_in_flight_and_gives_memory_back(offset):
    world = world_of(is_async=True, max_num_seqs=1)
    world.add("a", words(8), 40)
    world.add("next", words(3, first=50), 40)
    while not (first := world.scheduler.plan()).rounds:
        world.scheduler.commit(first, result_of(first, [WORD]))
    second = world.scheduler.plan()
    assert names_of(second) == ["a"]
    outputs = world.scheduler.commit(first, result_of(first, end_at(offset)))
    assert outputs[-1].finish_reason == FinishReason.STOP
    assert everything_is_free(world)
    third = world.scheduler.plan()
    assert names_of(third) == ["next"]
    before = world.scheduler.stats()
    assert world.scheduler.commit(second, result_of(second, [WORD] * 6)) == []
    after = world.scheduler.stats()
    assert (after.num_output_tokens, after.num_computed_tokens) == (before.num_output_tokens, before.num_computed_tokens)
    assert [each.request_id for each in world.scheduler.commit(third, result_of(third, [WORD]))] == ["next"]
    world.scheduler.check()
    world.kv.check()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_lone_request_that_just_fits_into_the_pool_runs_to_its_end(is_async, num_accepted):
    for num_tokens in range(1, 3 * PAGE):
        num_pages = 1 + LAYOUT.pages_for(9 + num_tokens)
        world = world_of(is_async=is_async, num_pages=num_pages, accept=lambda count: min(count, num_accepted))
        world.add("a", words(9), num_tokens, ignore_eos=True)
        world.drain()
        assert len(world.outputs["a"]) == num_tokens
        assert world.scheduler.stats().num_preempted == 0


# ---------------------------------------------------------------------------------------------------------------- saved state


def test_rounds_in_flight_save_into_one_slot_at_one_position():
    world = world_of(is_async=True, num_drafts=2, num_slots=9, accept=lambda count: 0)
    decode(world, "a", prompt=5)
    (first,) = run_ahead(world).rounds
    (second,) = run_ahead(world).rounds
    assert first.save_to is not None
    assert (first.save_to, first.save_at) == (second.save_to, second.save_at) == (first.save_to, 8)
    world.commit()
    (third,) = run_ahead(world).rounds
    assert (third.save_to, third.save_at) == (first.save_to, 8)
    world.commit()
    world.drain()


@pytest.mark.parametrize("num_accepted", range(4))
def test_state_is_found_as_soon_as_the_end_of_a_page_is_computed(num_accepted):
    """If a round does not reach the position, the state before can be found again."""
    world = world_of(num_drafts=3, num_slots=9, accept=lambda count: min(count, num_accepted))
    decode(world, "a", prompt=9)
    seen = set()
    while "a" in world.alive:
        told = world.told("a")
        assert state_found(world, told) == (len(told) - 1) // PAGE * PAGE
        plan = world.scheduler.plan()
        result = world.worker.run(plan)
        if plan.rounds[0].save_to is not None:
            assert state_found(world, world.told("a")) == 0, "its slot may be written by now"
            reached = len(told) - 1 + len(result.sampled["a"].token_ids) >= plan.rounds[0].save_at
            seen.add(reached)
        world.in_flight.append((plan, result))
        world.commit()
        world.check()
    assert True in seen
    assert num_accepted == 3 or False in seen


def test_state_of_rounds_ahead_is_found_when_one_reached_the_end_of_the_page_and_not_before():
    world = world_of(is_async=True, num_drafts=1, num_slots=9, accept=lambda count: 0)
    decode(world, "a", prompt=9, max_tokens=40)
    run_ahead(world)
    found = []
    for _ in range(20):
        run_ahead(world)
        world.commit()
        computed = len(world.told("a")) - 1
        found.append(state_found(world, world.told("a")))
        assert found[-1] in (0, computed // PAGE * PAGE)
        assert found[-1] or computed % PAGE, "the end of a page was just computed"
    assert set(found) > {0}
    world.scheduler.set_schedulable("a", False)
    while world.in_flight:
        world.commit()
    computed = len(world.told("a")) - 1
    assert computed % PAGE
    assert state_found(world, world.told("a")) == computed // PAGE * PAGE, "nothing will reach the next end of a page"
    world.scheduler.set_schedulable("a", True)
    world.drain()


def test_position_that_an_older_round_passed_after_its_own_is_not_taken_for_saved():
    """Position 8 is saved while a round for 8 is in flight; that round reaches 12, and the next round starts there."""
    world = world_of(is_async=True, num_drafts=2, num_slots=9, accept=lambda count: count)
    decode(world, "a", prompt=6)
    (first,), (second,) = run_ahead(world).rounds, run_ahead(world).rounds
    assert first.save_at == second.save_at == 8
    world.commit()
    (third,) = run_ahead(world).rounds
    assert third.save_at == 12
    assert world.worker.anchors[third.slot] == 15, "it started at 12"
    world.commit()
    world.commit()
    assert state_found(world, world.told("a")) == 8, "the slot still holds the state before"
    world.add("b", world.told("a") + [WORD] * world.kv.margin)
    world.drain()


def test_position_that_a_round_without_a_slot_passed_is_not_taken_for_saved():
    world = world_of(is_async=True, num_drafts=1, num_slots=3, accept=lambda count: count)
    decode(world, "a", "b", prompt=6)
    first, _ = run_ahead(world).rounds
    assert first.save_to is None
    world.abort("b")
    (second,) = run_ahead(world).rounds
    assert second.save_to is not None
    assert second.save_at == 8
    assert world.worker.anchors[second.slot] == 10, "it started at 8"
    world.commit()
    world.commit()
    assert state_found(world, world.told("a")) == 0
    world.add("c", world.told("a") + [WORD] * world.kv.margin)
    world.drain()


def test_rounds_go_on_saving_at_one_position_after_a_chunk_before_them_saved():
    """The second round has a greater reach, but it still saves at 12, because the first may stop before 12."""
    accepted = iter([0, 3])
    world = world_of(is_async=True, num_drafts=3, num_slots=9, accept=lambda count: min(count, next(accepted, 0)))
    world.add("a", words(8), 30, ignore_eos=True)
    (chunk,), (first,) = run_ahead(world).chunks, run_ahead(world).rounds
    assert chunk.save_to is not None
    assert first.save_at == 12
    world.commit()
    (second,) = run_ahead(world).rounds
    assert (second.save_to, second.save_at) == (first.save_to, 12)
    world.commit()
    world.commit()
    assert state_found(world, world.told("a")) == 12
    world.drain()


@pytest.mark.parametrize("offset", range(DRAFTS + 1))
def test_state_copied_behind_a_stop_is_never_found(offset):
    """The device does not know about stops and always copies the state at the end of the page."""
    world = world_of(num_slots=9)
    world.add("a", words(5), 30)
    while not (plan := world.scheduler.plan()).rounds:
        world.scheduler.commit(plan, result_of(plan, [WORD]))
    assert plan.rounds[0].save_at == 8
    world.scheduler.commit(plan, result_of(plan, end_at(offset)))
    told = [*words(5), WORD, *end_at(offset)]
    is_reached = 5 + 1 + offset >= 8
    assert state_found(world, told) == 8 * is_reached
    assert world.kv.num_saved_states == is_reached
    assert everything_is_free(world)
    world.kv.check()


# ----------------------------------------------------------------------------------------------------------------- preemption


def until_preempted(world, name):
    """Step until a request loses its memory; returns whether a round of it was in flight then."""
    for _ in range(60):
        has_round = any(each.request_id == name for plan, _ in world.in_flight for each in plan.rounds)
        was_running = world.scheduler._requests._all[name].holding is not None
        plan = world.scheduler.plan()
        if was_running and world.scheduler._requests._all[name].holding is None:
            if plan is not None:
                world.in_flight.append((plan, world.worker.run(plan)))
            return has_round
        world._check_plan(plan)
        world.in_flight.append((plan, world.worker.run(plan)))
        if len(world.in_flight) == 2 or not world.is_async:
            world.commit()
        world.check()
    raise AssertionError(f"{name} was not preempted")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_drafts", [2, DRAFTS])
def test_preempted_answer_goes_on_behind_its_last_token(is_async, num_drafts):
    settings = {"num_pages": 10, "kv": {"enable_prefix_cache": False}, "accept": lambda count: min(1, count)}
    with_rounds = set()
    for prompt in range(8, 16):
        world = world_of(is_async=is_async, num_drafts=num_drafts, **settings)
        world.add("b", words(4), 28, ignore_eos=True)
        for _ in range(3):
            world.step()
        world.add("a", words(prompt, first=40), 12, ignore_eos=True)
        with_rounds.add(until_preempted(world, "b"))
        check_resumption(world, "b")
        world.drain()
        assert world.ended == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert with_rounds >= {is_async}


def check_resumption(world, name):
    told = world.told(name)
    while world.in_flight:
        world.commit()
        assert world.told(name) == told, "what was in flight is void"
    end, anchor_id = 0, None
    while anchor_id is None:
        plan = plan_of(world)
        assert world.told(name) == told, "a recompute tells nothing twice"
        assert name not in {each.request_id for each in plan.rounds}
        for chunk in plan.chunks:
            if chunk.request_id == name:
                assert chunk.start in (0, end)
                assert chunk.num_logits == 0
                end, anchor_id = chunk.end, chunk.anchor_id
    assert (end, anchor_id) == (len(told) - 1, told[-1])


def test_preempted_answer_is_not_admitted_before_there_is_room_for_its_next_round():
    """Otherwise it would be computed again and again and lose its memory each time before its next token."""
    world = world_of(num_pages=7, kv={"enable_prefix_cache": False}, accept=lambda count: 0)
    world.add("b", words(4, first=30), 2, ignore_eos=True)
    world.step()
    world.scheduler.set_schedulable("b", False)
    world.add("a", words(8), 14, ignore_eos=True)
    for _ in range(40):
        world.step()
        world.check()
    assert world.scheduler.stats().num_preempted == 1
    assert world.worker.num_rows < 100
    world.scheduler.set_schedulable("b", True)
    world.drain()


# ---------------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_accepted", [0, 3, 5])
def test_fork_of_an_answer_that_grows_in_rounds_starts_from_its_state(is_async, num_accepted):
    world = world_of(is_async=is_async, num_slots=9, accept=lambda count: min(count, num_accepted))
    world.add("parent", words(9), 40, ignore_eos=True)
    while len(world.outputs["parent"]) < 8:
        world.step()
    while world.in_flight:
        world.commit()
    told = world.told("parent")
    world.add("child", told, 9, parent="parent", ignore_eos=True)
    plan = run_ahead(world)
    (chunk,), (parent,) = plan.chunks, plan.rounds
    assert (chunk.start, chunk.end, chunk.restore_from) == (len(told) - 1, len(told), parent.slot)
    world.drain()
    first = len(told) - 9
    assert world.outputs["child"] == world.outputs["parent"][first : first + 9]


@pytest.mark.parametrize("is_async", [False, True])
def test_fork_of_an_answer_in_the_middle_of_decoding_gets_the_right_text(is_async):
    for seed in range(20):
        world = world_of(is_async=is_async, num_slots=9, seed=seed)
        world.add("parent", words(9), 40, ignore_eos=True)
        while len(world.outputs["parent"]) < 6:
            world.step()
        for number in range(3):
            world.add(f"child {number}", world.told("parent")[: 13 + number], 9, parent="parent", ignore_eos=True)
            world.step()
        world.drain()
        for number in range(3):
            assert world.outputs[f"child {number}"] == world.outputs["parent"][4 + number : 13 + number]


@pytest.mark.parametrize("num_back", range(8))
def test_fork_goes_back_as_far_as_the_slot_remembers(num_back):
    """A slot has room for six tokens more than the window.  The last round wrote five rejected drafts."""
    world = world_of(num_slots=9, kv={"enable_prefix_cache": False}, accept=lambda count: 0)
    decode(world, "parent", prompt=9, max_tokens=40)
    for _ in range(8):
        plan_of(world)
    told = world.told("parent")
    world.add("child", told[: len(told) - num_back], 9, parent="parent", ignore_eos=True)
    starts = {chunk.request_id: chunk.start for chunk in plan_of(world).chunks}
    assert starts == {"child": len(told) - 1 - num_back if num_back <= 1 else 0}
    world.drain()


@pytest.mark.parametrize("num_back", range(8))
def test_fork_of_a_fork_goes_back_as_far_as_the_copied_slot_remembers(num_back):
    """The slot of the first fork is a copy that holds the rejected drafts of its parent too."""
    world = world_of(num_slots=9, kv={"enable_prefix_cache": False}, accept=lambda count: 0)
    decode(world, "parent", prompt=9, max_tokens=40)
    for _ in range(8):
        plan_of(world)
    told = world.told("parent")
    world.add("child", told, 9, parent="parent", ignore_eos=True)
    assert [chunk.start for chunk in plan_of(world).chunks] == [len(told) - 1]
    world.add("grandchild", told[: len(told) - num_back], 9, parent="child", ignore_eos=True)
    starts = {chunk.request_id: chunk.start for chunk in plan_of(world).chunks}
    assert starts == {"grandchild": len(told) - 1 - num_back if num_back <= 1 else 0}
    world.drain()


# ------------------------------------------------------------------------------------------------------------------- adaptive


class RecordingBudget:
    """Chooses a given number of drafts and records its arguments."""

    def __init__(self, total=0):
        self.total, self.resets, self.updates, self.choices, self.times = total, [], [], [], []

    def reset(self, slot):
        self.resets.append(slot)

    def update(self, slots, confidences):
        assert len(slots) == len(confidences) == len(set(slots.tolist()))
        self.updates.append(dict(zip(slots.tolist(), confidences[:, 0].tolist(), strict=True)))

    def refine(self, num_rows, ms):
        self.times.append((num_rows, ms))

    def choose(self, slots, caps, is_ahead, *, num_other_rows, max_rows):
        self.choices.append((slots.tolist(), caps.tolist(), is_ahead.tolist(), num_other_rows, max_rows))
        return min(self.total, int(caps.sum()))


def recorded(total=0, **given):
    """A world whose scheduler has a recording budget."""
    world = world_of(**given)
    budget = RecordingBudget(total)
    world.scheduler = Scheduler(world.kv, world.limits, budget)
    return world, budget


@pytest.mark.parametrize("total", [0, 1, 4, 10])
def test_step_verifies_as_many_drafts_as_the_budget_says(total):
    world, budget = recorded(total, accept=lambda count: 0)
    decode(world, "a", "b", max_tokens=20)
    plan = plan_of(world)
    assert plan.num_drafts == total
    assert plan.num_rows == 2 + total
    assert [each.max_drafts for each in plan.rounds] == [5, 5], "the device may spread them as it likes"
    slots, caps, _, num_other_rows, max_rows = budget.choices[-1]
    assert slots == [each.slot for each in plan.rounds]
    assert (caps, num_other_rows, max_rows) == ([5, 5], 0, 60)
    world.drain()


def test_prompts_get_what_the_budget_leaves_and_do_not_displace_drafts():
    world, budget = recorded(4, max_num_batched_tokens=16, save_states=False)
    decode(world, "a")
    world.add("b", words(40, first=50))
    assert plan_of(world).chunks[0].end == 16 - 1 - 4
    plan = plan_of(world)
    assert (plan.num_drafts, plan.num_rows) == (4, 16)
    _, caps, _, num_other_rows, max_rows = budget.choices[-1]
    assert num_other_rows == max_rows - 1 - sum(caps), "a prompt takes the rows that drafts may leave"
    world.drain()


def test_short_budget_serves_every_answer_with_fewer_drafts():
    world, budget = recorded(10, max_num_batched_tokens=4, max_num_seqs=3, num_drafts=2)
    budget.total = 1
    decode(world, "a", "b", "c", prompt=2)
    plan = plan_of(world)
    assert (len(plan.rounds), plan.num_rows) == (3, 4)
    world.drain()


def test_confidences_of_a_dead_request_do_not_go_to_the_next_one_in_its_slot():
    world, budget = recorded(is_async=True, max_num_seqs=1, num_slots=2, save_states=False)
    decode(world, "dead", prompt=3)
    run_ahead(world)
    slot = world.scheduler._requests._all["dead"].slot
    world.abort("dead")
    world.add("heir", words(3, first=50), 9, ignore_eos=True)
    run_ahead(world)
    assert world.scheduler._requests._all["heir"].slot == slot
    assert budget.resets == [slot, slot]
    budget.updates.clear()
    plan, result = world.in_flight[0]
    world.commit()
    assert plan.rounds[0].slot == slot
    assert budget.updates == []
    _, result = world.in_flight[0]
    world.commit()
    assert budget.updates == [{slot: result.confidences[0, 0]}]
    world.drain()


def test_confidences_go_to_the_slots_that_drafted():
    world, budget = recorded(max_num_batched_tokens=20, save_states=False)
    decode(world, "a", "b", prompt=3)
    world.add("long", words(30, first=90), 5)
    world.add("late", words(2, first=130), 5)
    for _ in range(4):
        budget.updates.clear()
        plan = world.scheduler.plan()
        result = world.worker.run(plan)
        drafting = [chunk.slot for chunk in plan.chunks if chunk.samples] + [each.slot for each in plan.rounds]
        world.scheduler.commit(plan, result)
        assert budget.updates == [dict(zip(drafting, result.confidences[:, 0].tolist(), strict=True))]


def test_request_is_ahead_exactly_if_something_of_it_is_in_flight():
    world, budget = recorded(is_async=True, save_states=False)
    decode(world, "a", "b", prompt=3)
    run_ahead(world)
    assert budget.choices[-1][2] == [False, False]
    world.scheduler.set_schedulable("a", False)
    run_ahead(world)
    assert budget.choices[-1][2] == [True]
    world.commit()
    world.scheduler.set_schedulable("a", True)
    plan = run_ahead(world)
    assert dict(zip(names_of(plan), budget.choices[-1][2], strict=True)) == {"a": False, "b": True}
    world.commit()
    world.drain()


@pytest.mark.parametrize("is_async", [False, True])
def test_only_steps_of_rounds_alone_are_taken_for_step_times(is_async):
    """A prompt token costs less than a row of a round, so the times of steps with prompts would bend the curve."""
    world, budget = recorded(2, is_async=is_async, max_num_batched_tokens=12, save_states=False, accept=lambda count: 0)
    decode(world, "a", prompt=3, max_tokens=40)
    budget.times.clear()
    world.add("long", words(20, first=50), 2, ignore_eos=True)
    expected, seen = [], set()
    for number in range(12):
        plan = world.scheduler.plan()
        result = replace(world.worker.run(plan), duration_ms=float(number))
        world.in_flight.append((plan, result))
        kind = (bool(plan.chunks), bool(plan.rounds))
        seen.add(kind)
        if kind == (False, True):
            expected.append((plan.num_rows, float(number)))
        if len(world.in_flight) > is_async:
            world.commit()
    while world.in_flight:
        world.commit()
    assert seen == {(True, True), (False, True)}
    assert budget.times == expected
    world.drain()


def test_a_step_without_rounds_says_nothing_about_step_times():
    world, budget = recorded(max_num_batched_tokens=5)
    world.add("long", words(20), 1)
    world.drain()
    plan = world.scheduler.plan(placeholder=True)
    world.scheduler.commit(plan, world.worker.run(plan))
    assert budget.times == []
