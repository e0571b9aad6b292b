"""Planning and committing, one property in each test."""

import numpy as np
import pytest

from deepinfer.errors import ContextTooLong, RequestError
from deepinfer.request import FinishReason, Request, SamplingParams
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.step import Sampled, StepResult
from tests.scheduler.world import (
    EOS,
    IMAGE,
    LAYOUT,
    PAGE,
    WINDOW,
    WORD,
    World,
    chunks_of,
    names_of,
    plan_of,
    rows_of,
    run_ahead,
    words,
)

MARGIN = WINDOW + 6


def result_of(plan, token_id=WORD):
    names = [chunk.request_id for chunk in plan.chunks if chunk.samples] + [each.request_id for each in plan.rounds]
    one = Sampled(token_ids=(token_id,), logprobs=(-1.0,), top_token_ids=((),), top_logprobs=((),))
    return StepResult(sampled=dict.fromkeys(names, one))


def outputs_of(world, token_id=WORD):
    """All records of a model that always answers the same token."""
    outputs = []
    while (plan := world.scheduler.plan()) is not None:
        outputs += world.scheduler.commit(plan, result_of(plan, token_id))
        world.scheduler.check()
    assert world.scheduler.is_idle
    return outputs


# --------------------------------------------------------------------------------------------------------------- budget


def test_nothing_to_do_is_no_plan():
    world = World()
    assert world.scheduler.is_idle
    assert world.scheduler.plan() is None


def test_long_prompt_is_cut_to_the_budget_and_asks_for_logits_at_its_end():
    world = World(max_num_batched_tokens=8, save_states=False)
    world.add("a", words(19))
    plans = [plan_of(world) for _ in range(3)]
    assert [(each.chunks[0].start, each.chunks[0].end, each.chunks[0].num_logits) for each in plans] == [
        (0, 8, 0),
        (8, 16, 0),
        (16, 19, 1),
    ]


def test_answers_go_before_prompts():
    world = World(max_num_batched_tokens=8, save_states=False)
    world.add("first", words(3))
    plan_of(world)
    world.add("second", words(20))
    world.add("third", words(2))
    assert chunks_of(world) == [("first", 3, 4), ("second", 0, 7)]


def test_short_budget_serves_the_shortest_answers_and_all_advance():
    world = World(max_num_batched_tokens=2, max_num_seqs=3)
    for name in "abc":
        world.add(name, [WORD], 20, ignore_eos=True)
    for name in "ab":  # a prompt gets the budget that answers leave, so "c" starts while these are paused
        plan_of(world)
        world.scheduler.set_schedulable(name, False)
    plan_of(world)
    for name in "ab":
        world.scheduler.set_schedulable(name, True)
    seen = [[name for name, _, _ in chunks_of(world)] for _ in range(18)]
    assert {len(each) for each in seen} == {2}
    told = [len(world.outputs[name]) for name in "abc"]
    assert max(told) - min(told) <= 1


def test_prompt_that_may_not_be_cut_waits_for_a_step_that_holds_it():
    world = World(chunked_prefill=False, max_num_batched_tokens=20, save_states=False)
    world.add("a", words(15))
    world.add("b", words(15, first=30))
    world.add("c", words(2))
    assert chunks_of(world) == [("a", 0, 15)]
    assert chunks_of(world) == [("a", 15, 16), ("b", 0, 15), ("c", 0, 2)]


def test_prompts_of_a_step_keep_to_the_limit_of_summed_keys():
    world = World(max_num_batched_tokens=60, max_sum_keys=30, save_states=False)
    world.add("a", words(40))
    world.add("b", words(20, first=50))
    world.add("c", words(20, first=80))
    assert chunks_of(world) == [("a", 0, 40)], "the first prompt is taken whatever its length"
    assert chunks_of(world) == [("a", 40, 41), ("b", 0, 20), ("c", 0, 10)]


# ------------------------------------------------------------------------------------------------- admission and priority


def test_requests_are_admitted_in_order_of_arrival_as_slots_allow():
    world = World(num_slots=3)
    for name in "abc":
        world.add(name, [WORD])
    assert [name for name, _, _ in chunks_of(world)] == ["a", "b"]
    world.abort("a")
    assert [name for name, _, _ in chunks_of(world)] == ["b", "c"]


def test_request_waits_until_pages_for_its_whole_prompt_are_free_and_no_request_passes_it():
    world = World(num_pages=9, save_states=False)
    world.add("a", words(20), 2, ignore_eos=True)
    world.add("b", words(20, first=40), 2)
    world.add("c", [WORD])
    assert {name for name, _, _ in chunks_of(world)} == {"a"}
    while "a" in world.alive:
        assert {name for name, _, _ in chunks_of(world)} == {"a"}
    assert {name for name, _, _ in chunks_of(world)} == {"b"}


def test_no_more_requests_run_than_the_limit():
    world = World(max_num_seqs=2)
    for number in range(4):
        world.add(str(number), [WORD])
    assert len(plan_of(world).chunks) == 2


def test_higher_priority_is_admitted_first_and_equal_ones_by_arrival():
    world = World(max_num_seqs=3)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        world.add(name, [WORD], priority=priority)
    assert [name for name, _, _ in chunks_of(world)] == ["b", "d", "a"]


def test_request_whose_inputs_are_not_ready_waits_and_lets_others_pass():
    world = World()
    world.add("a", [WORD], is_schedulable=False)
    world.add("b", [WORD], 9, ignore_eos=True)
    assert chunks_of(world) == [("b", 0, 1)]
    assert world.scheduler.set_schedulable("a", True)
    assert chunks_of(world) == [("b", 1, 2), ("a", 0, 1)]
    assert world.scheduler.set_schedulable("b", False)
    assert chunks_of(world) == [("a", 1, 2)]
    assert not world.scheduler.set_schedulable("unknown", True)


def test_two_short_requests_fit_where_their_longest_outputs_would_not():
    world = World(num_pages=9)
    for name in "ab":
        world.add(name, words(6), 20)
    assert [name for name, _, _ in chunks_of(world)] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------ one step ahead


def test_step_ahead_goes_on_from_the_token_that_is_not_known_yet():
    world = World(is_async=True)
    world.add("a", words(3))
    run_ahead(world)
    plan = run_ahead(world)
    (each,) = plan.rounds
    assert plan.chunks == ()
    assert (each.start, each.max_drafts) == (3, 0)
    world.commit()
    assert len(world.outputs["a"]) == 1


def test_third_step_is_not_planned_before_the_first_is_committed():
    world = World(is_async=True)
    world.add("a", words(3))
    run_ahead(world)
    run_ahead(world)
    with pytest.raises(AssertionError, match="commit the oldest step"):
        world.scheduler.plan()


def test_known_end_is_not_planned_past():
    world = World(is_async=True)
    world.add("a", words(3), 1)
    world.add("b", words(70), 9, ignore_eos=True)
    world.drain()
    assert world.worker.num_rows == 3 + 70 + 1


def test_end_token_costs_one_row_of_the_step_ahead():
    world = World(is_async=True)
    world.add("a", words(3), 9)
    first = world.scheduler.plan()
    second = world.scheduler.plan()
    (output,) = world.scheduler.commit(first, result_of(first, EOS))
    assert output.finish_reason == FinishReason.STOP
    assert world.scheduler.is_idle
    assert world.scheduler.plan() is None
    assert world.scheduler.commit(second, result_of(second)) == []
    assert world.kv.num_free_pages == world.kv.num_pages


def test_id_can_be_used_again_while_its_last_step_is_in_flight():
    world = World(is_async=True)
    world.add("a", words(3), 9)
    first, second = world.scheduler.plan(), world.scheduler.plan()
    world.scheduler.commit(first, result_of(first, EOS))
    world.scheduler.add(world.requests["a"])
    third = world.scheduler.plan()
    assert world.scheduler.commit(second, result_of(second)) == []
    (output,) = world.scheduler.commit(third, result_of(third))
    assert output.num_output_tokens == 1


def test_page_with_an_unconfirmed_token_cannot_be_found():
    world = World(is_async=True, num_slots=9)
    world.add("a", words(2 * PAGE - 1) + [WORD] * 20, 8, ignore_eos=True)
    while len(world.outputs["a"]) < 3:
        run_ahead(world)
        if len(world.in_flight) == 2:
            world.commit()
    num_computed = world.scheduler._requests._all["a"].num_computed_tokens
    world.abort("a")
    assert world.kv.num_cached_pages == num_computed // PAGE


# --------------------------------------------------------------------------------------------------------------- preemption


def two_that_collide(**given):
    """Two requests grow into the last page; ``b`` has the longer answer."""
    world = World(num_pages=6, kv={"enable_prefix_cache": False}, **given)
    world.add("b", words(4), 14, ignore_eos=True)
    plan_of(world)
    plan_of(world)
    world.add("a", words(7, first=30), 10, ignore_eos=True)
    return world


def until_preempted(world):
    for _ in range(30):
        before = world.scheduler.stats().num_preempted
        plan = plan_of(world)
        if world.scheduler.stats().num_preempted > before:
            return plan
    raise AssertionError("no request was preempted")


def test_longest_answer_is_preempted_and_its_tokens_stay():
    world = two_that_collide()
    told = len(world.outputs["b"])
    plan = until_preempted(world)
    assert names_of(plan) == ["a"]
    assert len(world.outputs["b"]) > told
    world.drain()
    assert world.num_restarts == 1


def test_lowest_priority_is_preempted_first():
    world = World(num_pages=6, kv={"enable_prefix_cache": False})
    world.add("b", words(4), 14, ignore_eos=True, priority=1)
    plan_of(world)
    plan_of(world)
    world.add("a", words(7, first=30), 10, ignore_eos=True)
    assert names_of(until_preempted(world)) == ["b"]
    world.drain()


def test_preempted_request_can_end_instead():
    world = two_that_collide(stop_preempted_request=True)
    until_preempted(world)
    assert world.ended == {"b": FinishReason.INSUFFICIENT}
    world.drain()
    assert world.num_restarts == 0


def test_record_of_a_request_that_ended_without_a_step_is_not_lost():
    world = World(num_pages=4, stop_preempted_request=True, kv={"enable_prefix_cache": False})
    world.add("a", words(3), 9, ignore_eos=True)
    world.add("b", words(8, first=30), 4, ignore_eos=True)
    plan_of(world)
    world.scheduler.set_schedulable("b", False)
    plan_of(world)
    assert world.scheduler.plan() is None, "a cannot grow, and is the one with the longest answer"
    assert not world.scheduler.is_idle or world.alive == ["b"]
    (output,) = world.scheduler.take_outputs()
    assert (output.request_id, output.finish_reason, output.token_id) == ("a", FinishReason.INSUFFICIENT, None)
    assert output.num_output_tokens == 2


def test_step_that_preempts_admits_no_request():
    world = two_that_collide()
    plan_of(world)
    world.add("c", words(8, first=50), 1, priority=1)
    assert names_of(until_preempted(world)) == ["a"]
    assert world.kv.num_free_pages >= 2, "there would be room"
    assert [name for name, _, _ in chunks_of(world)] == ["a", "c"]
    world.drain()


def test_request_whose_last_token_is_in_flight_is_waited_for():
    world = World(is_async=True, num_pages=5, save_states=False, kv={"enable_prefix_cache": False})
    world.add("a", words(7), 4, ignore_eos=True)
    world.add("b", words(5, first=30), 2, ignore_eos=True)
    run_ahead(world)
    run_ahead(world)
    world.commit()
    assert world.scheduler.plan() is None, "a needs the page that b is about to leave"
    world.drain()
    assert world.scheduler.stats().num_preempted == 0


def test_branch_that_just_started_is_not_preempted_in_the_same_plan():
    """Its chunk is in the plan already, so two requests would write its pages."""
    world = World(num_pages=7, num_slots=9, max_num_batched_tokens=60, kv={"enable_prefix_cache": False})
    world.add("parent", words(7), 12, ignore_eos=True, priority=1)
    world.add("a", words(7, first=30), 12, ignore_eos=True, priority=1)
    for _ in range(3):
        plan_of(world)  # each then has two full pages; both need another page next, and so does the child
    world.add("child", world.told("parent"), 2, ignore_eos=True, parent="parent", priority=-1)
    plan = plan_of(world)
    assert "child" in {chunk.request_id for chunk in plan.chunks}
    assert world.scheduler._requests._all["child"].holding is not None
    assert world.scheduler.stats().num_preempted == 1
    world.drain()


def test_request_that_would_preempt_itself_gets_what_is_in_flight_first():
    """Otherwise it would compute its tokens again and again, one step ahead, and never return one."""
    world = World(is_async=True, num_pages=5, kv={"enable_prefix_cache": False})
    world.add("b", words(4, first=30), 2, ignore_eos=True)
    world.step()
    world.scheduler.set_schedulable("b", False)
    world.add("a", words(8), 6, ignore_eos=True)
    for _ in range(40):
        world.step()
        world.check()
    assert len(world.outputs["a"]) >= 1, "what was sampled in flight is told before the request is preempted"
    assert world.scheduler.stats().num_preempted <= 1, "and it is not admitted before there is room for what it has"
    world.drain()


def test_state_with_another_decoder_floor_does_not_resume_a_preempted_request():
    """A request with the same tokens and a longer prompt saved a state whose decoder half began later."""
    keep = MARGIN + 2
    world = World(num_pages=15, num_slots=9, decoder_keep_tokens=keep, max_num_batched_tokens=60)
    world.add("a", words(17), 39, ignore_eos=True)
    while len(world.told("a")) < 34:
        plan_of(world)
    world.add("other", world.told("a")[:30], 1)
    while "other" not in world.ended:
        plan_of(world)
    while len(world.told("a")) < 28 + keep:
        plan_of(world)
    world.add("c", words(3), 20, ignore_eos=True)
    until_preempted(world)
    row = world.scheduler._requests._all["a"]
    assert row.holding is None
    for floor, expected in ((row.decoder_floor, 0), (30 - keep, 28)):
        assert world.kv.plan_hit(row.chain, row.num_tokens, exact=True, decoder_floor=floor).start == expected
    while row.holding is None:
        chunks = plan_of(world).chunks
    assert [chunk.start for chunk in chunks if chunk.request_id == "a"] == [0]
    world.drain()


# ---------------------------------------------------------------------------------------------------------------- prefix cache


def test_state_hit_continues_where_state_was_saved():
    world = World(num_slots=9, max_num_batched_tokens=60)
    world.add("a", words(24), 1)
    world.drain()
    world.add("b", words(24) + words(20, first=50), 1)
    (chunk,) = plan_of(world).chunks
    assert chunk.start == chunk.write_floor == 24
    assert chunk.window_floor == 0
    assert chunk.restore_from is not None
    assert chunk.lookback_ids.tolist() == words(24)[-3:]
    assert world.scheduler.stats().num_hit_tokens == 24


def test_replay_hit_computes_the_window_again_and_writes_no_shared_page():
    world = World(num_slots=9, save_states=False, max_num_batched_tokens=60)
    world.add("a", words(40), 1)
    world.drain()
    world.add("b", words(40), 3)
    (chunk,) = plan_of(world).chunks
    hit = (40 - MARGIN) // PAGE * PAGE
    assert (chunk.start, chunk.window_floor, chunk.write_floor) == (hit - WINDOW, hit - WINDOW, hit)
    assert chunk.restore_from is None
    assert chunk.lookback_ids.tolist() == words(40)[hit - WINDOW - 3 : hit - WINDOW]
    (each,) = plan_of(world).rounds
    assert (each.start, each.window_floor) == (40, hit - WINDOW)
    world.drain()


def test_tokens_that_were_not_computed_are_reported():
    world = World(num_slots=9, save_states=False, max_num_batched_tokens=60)
    for _ in range(2):
        world.scheduler.add(Request(request_id="a", prompt_token_ids=tuple(words(40)), params=SamplingParams(max_tokens=1)))
        outputs = outputs_of(world)
    hit = (40 - MARGIN) // PAGE * PAGE
    assert outputs[0].num_cached_tokens == hit - WINDOW
    stats = world.scheduler.stats()
    assert (stats.num_hit_tokens, stats.num_replayed_tokens) == (hit, WINDOW)


def queries(world):
    stats = world.scheduler.stats()
    assert stats.num_hit_tokens <= stats.num_asked_tokens
    return stats.num_asked_tokens, stats.num_hit_tokens


def test_only_what_is_looked_up_is_a_query():
    world = World(num_slots=9, max_num_batched_tokens=60)
    world.add("a", words(40), 1)
    world.drain()
    assert queries(world) == (40, 0)
    world.add("asks for log-probabilities", words(40), 1, prompt_logprobs=True)
    world.drain()
    assert queries(world) == (40, 0), "its prompt is computed, found or not"
    world.add("b", words(40), 3, ignore_eos=True)
    world.add("answer 1 of b", words(40), 3, ignore_eos=True, parent="b")
    world.drain()
    assert queries(world) == (80, (40 - MARGIN) // PAGE * PAGE), "a branch is not looked up"
    off = World(kv={"enable_prefix_cache": False})
    off.add("a", words(40), 1)
    off.drain()
    assert queries(off) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_resumed_request_is_no_second_query(is_async):
    world = World(num_pages=22, is_async=is_async, num_slots=9)
    for number in range(4):
        world.add(str(number), [WORD] * (20 + number), 40, ignore_eos=True)
    world.drain()
    assert world.scheduler.stats().num_preempted >= 2
    assert queries(world)[0] == sum(20 + number for number in range(4))


@pytest.mark.parametrize("given", [{"salt": b"other"}, {"image_hashes": {3: b"other"}}])
def test_other_tenants_and_other_pictures_share_nothing(given):
    prompt = [*words(3), IMAGE, *words(30, first=50)]
    world = World(num_slots=9, max_num_batched_tokens=60)
    world.add("a", prompt, 1, image_hashes={3: b"picture"})
    world.drain()
    world.add("b", prompt, 1, **({"image_hashes": {3: b"picture"}} | given))
    assert [start for _, start, _ in chunks_of(world)] == [0]
    world.drain()
    world.add("c", prompt, 1, image_hashes={3: b"picture"})
    assert [start for _, start, _ in chunks_of(world)] != [0]
    world.drain()


def test_chunk_ends_at_the_last_page_of_the_prompt_and_at_checkpoints_to_save_state():
    world = World(num_slots=9, max_num_batched_tokens=60)
    world.add("a", words(23), 2, ignore_eos=True, checkpoints=(8,))
    plans = [plan_of(world) for _ in range(3)]
    assert [(each.chunks[0].start, each.chunks[0].end) for each in plans] == [(0, 8), (8, 20), (20, 23)]
    assert [each.chunks[0].save_to is not None for each in plans] == [True, True, False]
    world.drain()


def test_state_is_not_saved_where_a_waiting_request_needs_the_slot():
    world = World(num_slots=3, max_num_seqs=2, max_num_batched_tokens=8)
    world.add("a", words(8), 9, ignore_eos=True)
    world.add("b", words(8, first=30), 9, ignore_eos=True)
    (chunk,) = plan_of(world).chunks
    assert (chunk.end, chunk.save_to) == (8, None)
    assert [name for name, _, _ in chunks_of(world)] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------------------ forks


def parent_at(world, num_output, prompt=None):
    world.add("parent", prompt or words(18), 20, ignore_eos=True)
    while len(world.outputs["parent"]) < num_output:
        plan_of(world)
    return world


def test_fork_shares_full_pages_copies_the_last_and_starts_from_the_state():
    world = parent_at(World(num_slots=9, max_num_batched_tokens=60), 4)
    world.add("child", world.told("parent"), 6, parent="parent")
    plan = plan_of(world)
    (chunk,), (parent,) = plan.chunks, plan.rounds
    assert (chunk.request_id, chunk.start, chunk.end) == ("child", 21, 22)
    assert chunk.restore_from == parent.slot
    assert (chunk.page_ids[:5] == parent.page_ids[:5]).all()
    assert plan.page_copies == ((parent.page_ids[5], chunk.page_ids[5]),)
    world.drain()
    assert world.outputs["child"] == world.outputs["parent"][4 : 4 + len(world.outputs["child"])]


def test_fork_waits_until_nothing_of_its_parent_is_in_flight():
    world = World(is_async=True, num_slots=9, max_num_batched_tokens=60, save_states=False)
    world.add("parent", words(17), 20, ignore_eos=True)
    run_ahead(world)
    run_ahead(world)
    world.commit()
    world.add("child", world.told("parent"), 6, parent="parent")
    assert world.scheduler.plan() is None, "the parent stands still"
    world.commit()
    plan = run_ahead(world)
    assert [chunk.request_id for chunk in plan.chunks] == ["child"]
    assert rows_of(plan) == [("parent", 18, 19), ("child", 17, 18)], "rolled back by the token that was in flight"
    world.drain()


def test_fork_of_a_waiting_request_starts_when_the_prompt_is_computed():
    world = World(num_slots=9, max_num_batched_tokens=10, save_states=False)
    world.add("parent", words(18), 9, ignore_eos=True)
    world.add("child", words(18), 9, ignore_eos=True, parent="parent")
    assert chunks_of(world) == [("parent", 0, 10)]
    assert chunks_of(world) == [("parent", 10, 18)]
    assert chunks_of(world) == [("parent", 18, 19), ("child", 17, 18)]
    world.drain()
    assert world.outputs["child"] == world.outputs["parent"]


@pytest.mark.parametrize("how", ["abort", "run away"])
def test_fork_whose_parent_is_gone_is_admitted_like_any_other(how):
    world = parent_at(World(num_slots=9, max_num_batched_tokens=60, kv={"enable_prefix_cache": False}), 12)
    prompt = world.told("parent")[:20]
    world.add("child", prompt, 3, parent="parent")
    if how == "abort":
        world.abort("parent")
    assert ("child", 0, 20) in chunks_of(world)
    world.drain()


def test_fork_into_a_replay_is_admitted_like_any_other():
    """The state is not whole there, and shared pages end later."""
    world = World(num_slots=9, save_states=False, max_num_batched_tokens=1)
    world.add("a", words(40), 1)
    world.drain()
    world.add("parent", words(40), 9, ignore_eos=True)
    hit = (40 - MARGIN) // PAGE * PAGE
    while world.scheduler._requests._all["parent"].num_computed_tokens < hit - 1:
        plan_of(world)
    world.add("child", words(hit - 1), 3, ignore_eos=True, parent="parent")
    for _ in range(3):
        plan_of(world)
    assert world.num_branched == 0
    world.drain()


def test_fork_keeps_the_decoder_floor_that_its_state_was_made_with():
    world = parent_at(World(num_slots=9, decoder_keep_tokens=MARGIN + 2, max_num_batched_tokens=60), 6)
    world.add("child", world.told("parent"), 6, parent="parent")
    plan = plan_of(world)
    (child,), (parent,) = plan.chunks, plan.rounds
    assert child.decoder_floor == parent.decoder_floor == 2
    world.drain()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"parent": "unknown"}, "request 'unknown' is not there to be forked"),
        ({"prompt": [*words(5), WORD, WORD]}, "differs from the tokens of request 'parent' at position 5"),
        ({"salt": b"other"}, "another tenant"),
        ({"image_hashes": {2: b"x"}}, "other pictures"),
    ],
)
def test_fork_that_does_not_continue_its_parent_is_refused(given, says):
    world = parent_at(World(), 2)
    with pytest.raises(RequestError, match=says):
        world.add("child", **({"prompt": world.told("parent"), "parent": "parent"} | given))
    assert world.scheduler.num_unfinished == 1


# ------------------------------------------------------------------------------------------------------------------- endings


def test_end_token_stops():
    world = World()
    world.add("a", words(3))
    (output,) = outputs_of(world, EOS)
    assert (output.token_id, output.finish_reason, output.num_output_tokens) == (EOS, FinishReason.STOP, 1)


def test_ignored_end_token_does_not_stop():
    world = World()
    world.add("a", words(3), ignore_eos=True)
    assert [output.finish_reason for output in outputs_of(world, EOS)] == [None, None, None, FinishReason.LENGTH]


def test_end_token_at_the_length_limit_counts_as_stop():
    world = World()
    world.add("a", words(3), 1)
    (output,) = outputs_of(world, EOS)
    assert output.finish_reason == FinishReason.STOP


def test_context_limit_ends_by_length():
    world = World()
    world.add("a", words(70), 10)
    outputs = outputs_of(world)
    assert len(outputs) == 2
    assert outputs[-1].finish_reason == FinishReason.LENGTH


def test_output_repeats_what_was_sampled():
    world = World()
    world.add("a", words(3))
    plan = world.scheduler.plan()
    sampled = Sampled(token_ids=(9,), logprobs=(-0.5,), top_token_ids=((9, 8),), top_logprobs=((-0.5, -2.0),))
    (output,) = world.scheduler.commit(plan, StepResult(sampled={"a": sampled}))
    assert (output.token_id, output.token_logprobs) == (9, -0.5)
    assert (output.top_token_ids, output.top_logprobs) == ((9, 8), (-0.5, -2.0))
    assert output.max_num_batched_tokens == 16


@pytest.mark.parametrize("state", ["waiting", "paused", "running", "in flight", "branch"])
def test_abort_at_any_time_returns_everything_and_says_how_much_there_was(state):
    world = World()
    world.add("a", words(3), is_schedulable=state != "paused")
    ids, expected = ["a", "unknown"], (1, 3)
    if state == "running":
        plan_of(world)
        expected = (1, 4)
    elif state == "in flight":
        plan = world.scheduler.plan()
    elif state == "branch":
        world.add("b", words(3), parent="a")
        ids, expected = ["b", "a"], (2, 6)
    assert world.scheduler.abort(ids) == expected
    assert world.scheduler.abort(ids) == (0, 0)
    assert world.scheduler.is_idle
    assert world.kv.num_free_pages == world.kv.num_pages
    assert world.kv.num_free_slots == world.kv.num_slots
    world.scheduler.check()
    if state == "in flight":
        assert world.scheduler.commit(plan, result_of(plan)) == []
    assert world.scheduler.plan() is None


def test_placeholder_is_planned_only_where_there_is_nothing_to_do():
    world = World()
    plan = world.scheduler.plan(placeholder=True)
    (chunk,) = plan.chunks
    assert (chunk.request_id, chunk.slot, chunk.start, chunk.end, chunk.num_logits) == ("", 0, 0, 1, 0)
    assert chunk.page_ids.tolist() == [0]
    assert world.worker.run(plan).sampled == {}
    assert world.scheduler.commit(plan, StepResult(sampled={})) == []
    world.add("a", words(3))
    assert [chunk.request_id for chunk in world.scheduler.plan(placeholder=True).chunks] == ["a"]


def test_stats_say_what_there_is():
    world = World(num_pages=30, num_slots=6, max_num_seqs=1)
    world.add("a", words(9), 2, ignore_eos=True)
    world.add("b", words(9))
    plan_of(world)
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_pages, stats.num_held_pages, stats.num_slots, stats.num_held_slots) == (29, 3, 5, 1)
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_output_tokens) == (1, 8, 0)
    world.abort("b")
    world.drain()
    stats = world.scheduler.stats()
    assert stats.num_finished[FinishReason.LENGTH] == stats.num_finished[FinishReason.ABORT] == 1
    assert (stats.num_computed_tokens, stats.num_output_tokens, stats.num_cached_pages) == (10, 2, 2)


# ------------------------------------------------------------------------------------------------------------------ refusals


def refuse(error, sentence, request=None, **limits):
    world = World(**limits)
    with pytest.raises(error, match=sentence):
        world.scheduler.add(request)
    assert world.scheduler.is_idle


def request_of(prompt, max_tokens=4, name="a", **given):
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=max_tokens), **given)


def test_empty_prompt_and_empty_id_are_refused():
    refuse(RequestError, r"^the prompt is empty; give at least one token$", request_of(()))
    refuse(RequestError, r"^the request id is empty; choose another$", request_of([WORD], name=""))


@pytest.mark.parametrize("is_running", [False, True])
def test_second_request_of_an_id_is_refused(is_running):
    world = World()
    world.add("a", words(3))
    if is_running:
        plan_of(world)
    with pytest.raises(RequestError, match=r"^request id 'a' is in use; choose another$"):
        world.scheduler.add(request_of([WORD]))


def test_prompt_that_fills_the_context_is_refused():
    sentence = (
        r"^prompt of 72 tokens leaves no room for output in the context limit of 72; shorten the prompt or raise max_model_len$"
    )
    refuse(ContextTooLong, sentence, request_of([WORD] * 72))
    World().scheduler.add(request_of([WORD] * 71))


def test_prompt_longer_than_a_step_is_refused_where_it_may_not_be_cut():
    sentence = (
        r"^prompt of 17 tokens exceeds the 16 of a step and may not be cut; "
        r"shorten the prompt, raise max_num_batched_tokens or turn chunked_prefill on$"
    )
    refuse(ContextTooLong, sentence, request_of([WORD] * 17), chunked_prefill=False)
    World(chunked_prefill=False).scheduler.add(request_of([WORD] * 16))


def test_request_that_no_pool_of_this_size_could_hold_is_refused():
    sentence = (
        r"^the request may need 5 pages of 4 tokens, the pool has 4; "
        r"lower max_tokens, shorten the prompt or give the engine more memory$"
    )
    refuse(RequestError, sentence, request_of([WORD] * 10, 7), num_pages=5)
    World(num_pages=5).scheduler.add(request_of([WORD] * 10, 6))


@pytest.mark.parametrize("position", [0, 6, 12])
def test_checkpoint_that_is_no_end_of_a_page_of_the_prompt_is_refused(position):
    sentence = (
        rf"^checkpoint {position} is not a multiple of 4 inside the prompt of 10 tokens; state can be saved at ends of pages"
    )
    refuse(RequestError, sentence, request_of([WORD] * 10, checkpoints=(position,)))


def test_margin_that_is_shorter_than_the_decoder_half_runs_over_is_a_bug():
    limits = World().limits
    with pytest.raises(AssertionError, match="decoder half"):
        Scheduler(
            World().kv,
            Limits(
                max_model_len=limits.max_model_len,
                max_num_seqs=1,
                max_num_batched_tokens=16,
                eos_token_id=EOS,
                image_token_id=IMAGE,
                decoder_keep_tokens=MARGIN + 1,
            ),
        )


def test_arrays_in_plans_are_what_the_contract_says():
    world = World()
    world.add("a", words(9))
    (chunk,) = plan_of(world).chunks
    assert chunk.token_ids.dtype == chunk.page_ids.dtype == np.int32
    assert len(chunk.page_ids) >= LAYOUT.pages_for(chunk.end)
