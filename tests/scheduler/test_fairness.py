"""No request is overtaken for ever, neither in the queue nor while it waits for a parent, a seat, a slot or pages."""

import random
from collections import Counter

import pytest

from deepinfer.scheduler import policy
from tests.scheduler.world import WORD, World, words

NUM_LATER = 25


def first_turns(world, names):
    """The turn of each request's first token, and the requests that started before it."""
    turns, started = {}, {}
    for turn in range(1, 400):
        world.step()
        world.check()
        for name in names:
            if name not in turns and world.outputs[name]:
                turns[name] = turn
                started[name] = sum(bool(world.outputs[other]) for other in world.outputs if other not in names)
        if len(turns) == len(names):
            return turns, started
    raise AssertionError(f"waits for ever: {set(names) - turns.keys()}")


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("max_tokens", [5, 40])
@pytest.mark.parametrize(
    "given",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 3},
        {"max_num_seqs": 2, "num_slots": 3},
        {"max_num_seqs": 5, "num_slots": 3},
        {"max_num_seqs": 5, "num_slots": 9, "num_pages": 14},
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"max_num_seqs": 2, "max_sum_keys": 12},
        {"max_num_seqs": 2, "num_drafts": 5, "max_num_batched_tokens": 40},
        {"max_num_seqs": 2, "kv": {"enable_prefix_cache": False}},
    ],
    ids=str,
)
def test_all_answers_begin_together_whoever_waits(given, max_tokens, is_async):
    world = World(is_async=is_async, **given)
    answers = [f"answer {number}" for number in range(min(given["max_num_seqs"], given.get("num_slots", 9) - 1, 3))]
    for number, name in enumerate(answers):
        world.add(name, words(9), 30, ignore_eos=True, parent=answers[0] if number else None)
    for number in range(NUM_LATER):
        world.add(f"later {number}", words(9, first=20 + number), max_tokens, ignore_eos=True)
    turns, started = first_turns(world, answers)
    assert max(turns.values()) - turns[answers[0]] <= 6
    assert max(started.values()) <= 2, "at most those that had a seat already"
    world.drain()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("how", ["parent ends", "parent is paused", "parent is aborted", "branch is paused"])
def test_a_reservation_that_cannot_be_used_blocks_no_request(how, is_async):
    world = World(is_async=is_async, max_num_seqs=2)
    world.add("parent", words(9), 6, ignore_eos=True)
    world.add("branch", words(9) + [WORD] * (2 if how == "branch is paused" else 0), 6, ignore_eos=True, parent="parent")
    if how == "branch is paused":
        world.scheduler.set_schedulable("branch", False)
    if how == "parent is paused":
        world.scheduler.set_schedulable("parent", False)
    for number in range(6):
        world.add(f"later {number}", words(9, first=20 + number), 4, ignore_eos=True)
    for turn in range(60):
        world.step()
        if how == "parent is aborted" and turn == 1:
            world.abort("parent")
    ended = {name for name in world.ended if name.startswith("later")}
    assert len(ended) == 6
    assert ("branch" in world.ended) == (how != "branch is paused")
    world.drain()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_forks_do_not_pass_the_head_of_the_queue_for_ever(is_async):
    """Without a limit, a caller that forks a long answer again and again would get every free seat."""
    world = World(is_async=is_async, num_slots=9, max_num_seqs=3, max_num_batched_tokens=40)
    world.add("parent", words(9), 60, ignore_eos=True)
    for turn in range(60):
        if turn == 12:
            world.add("waits", words(9, first=50), 4, ignore_eos=True)
        while turn > 3 and len(world.alive) - ("waits" in world.alive) < 5:
            world.add(f"fork {len(world.requests)}", world.told("parent"), 2, ignore_eos=True, parent="parent")
        world.step()
        world.check()
        if world.outputs.get("waits"):
            break
    assert turn < 40, "the queue had no turn"
    world.drain()


class Watch:
    """Counts for each waiting request how many later requests start before it."""

    def __init__(self, world):
        self.world, self.overtaken, self.stuck, self.known = world, Counter(), Counter(), set()

    def step(self):
        world, scheduler = self.world, self.world.scheduler
        waiting = [state for state in scheduler._requests._all.values() if state.holding is None and state.is_schedulable]
        running = set(scheduler._requests.running.values())
        busy = world.step()
        new = set(scheduler._requests.running.values()) - running
        for state in waiting:
            if state.holding is None and state.request.request_id in scheduler._requests._all:
                self.overtaken[state.request.request_id] += sum(policy.place(each) > policy.place(state) for each in new)
        for state in scheduler._requests._all.values():
            name, place = state.request.request_id, (state.num_tokens, state.num_computed_tokens)
            key = (name, place)
            self.stuck = Counter({each: count for each, count in self.stuck.items() if each[0] != name or each == key})
            self.stuck[key] += state.is_schedulable
        return busy


@pytest.mark.parametrize("part", range(2))
def test_in_any_history_everybody_gets_on_and_few_pass(part):
    most = 0
    for number in range(12):
        rng = random.Random(1000 * part + number)
        seats = rng.choice([2, 3, 4])
        world = World(
            is_async=rng.random() < 0.7,
            max_num_seqs=seats,
            num_slots=seats + rng.choice([1, 2, 5]),
            num_pages=rng.choice([20, 30, 60]),
            max_num_batched_tokens=rng.choice([8, 16, 40]),
            max_sum_keys=rng.choice([30, 1 << 30]),
            num_drafts=rng.choice([0, 2]),
            save_states=rng.random() < 0.7,
            seed=number,
        )
        watch = Watch(world)
        for _ in range(120):
            if len(world.alive) < 3 * seats and rng.random() < 0.6:
                add(world, rng)
            if world.alive and rng.random() < 0.1:
                world.scheduler.set_schedulable(rng.choice(world.alive), rng.random() < 0.8)
            watch.step()
        for name in world.alive:
            world.scheduler.set_schedulable(name, True)
        watch.stuck.clear()
        while watch.step():
            assert max(watch.stuck.values(), default=0) < 150, "a request does not advance"
        world.drain()
        most = max(most, max(watch.overtaken.values(), default=0) - 3 * seats)
    assert most <= 0, "a request was passed by more than three for each seat"


def add(world, rng):
    name, given = f"r{len(world.requests)}", {"ignore_eos": True, "priority": rng.choice([0, 0, 0, 1])}
    count = rng.choice([1, 1, 2, 3])
    prompt = [rng.choice([WORD, 7, 9]) for _ in range(rng.randint(1, 24))]
    for number in range(count):
        parent = None if number == 0 else f"{name}.0"
        world.add(f"{name}.{number}", prompt, rng.randint(1, 12), parent=parent, **given)
