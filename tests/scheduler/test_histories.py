"""Random histories: memory is right, nothing is lost, and every request gets its tokens and ends once."""

import random
from collections import Counter

import pytest

from deepinfer.request import FinishReason
from tests.scheduler.world import EOS, IMAGE, PAGE, WINDOW, WORD, World

CHECKS_A_PART = 25_000
NUM_PARTS, NUM_SLOW_PARTS = 8, 80
"""Eight parts make 200,000 operations, each followed by every check; the slow ones make two millions."""


class History:
    """Random requests, aborts, branches, pauses and steps on a random small engine."""

    def __init__(self, seed, **given):
        self.rng = rng = random.Random(seed)
        self.stems = [[rng.choice([WORD, 7, 9, IMAGE]) for _ in range(50)] for _ in range(3)]
        self.num_checks = 0
        max_num_seqs = rng.choice([1, 2, 3, 5, 5])
        settings = {
            "is_async": rng.random() < 0.6,
            "num_pages": rng.choice([19, 19, 20, 22, 26, 60]),  # the longest request needs 18
            "num_slots": max_num_seqs + rng.choice([1, 2, 4, 8]),
            "replay": rng.choice([WINDOW, 2 * WINDOW]),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.choice([1, 2, 5, 11, 16, 40]),
            "max_sum_keys": rng.choice([30, 60, 1 << 30]),
            "stop_preempted_request": rng.random() < 0.2,
            "decoder_keep_tokens": rng.choice([0, 0, 16]),
            "save_states": rng.random() < 0.8,
            "num_drafts": rng.choice([0, 0, 1, 2, 5]),
            "is_adaptive": rng.random() < 0.5,
            "seed": seed,
            "kv": {
                "is_replay_exact": rng.random() < 0.3,
                "enable_prefix_cache": rng.random() < 0.9,
                "replay_weight": rng.choice([0.5, 1.0]),
            },
        }
        if rng.random() < 0.15:
            settings |= {"chunked_prefill": False, "max_num_batched_tokens": 64}
        self.world = World(**(settings | given))

    def run(self, num_operations):
        for _ in range(num_operations):
            roll = self.rng.random()
            if roll < 0.12:
                self.add()
            elif roll < 0.16:
                self.fork()
            elif roll < 0.19:
                self.abort()
            elif roll < 0.27:
                self.pause()
            elif roll < 0.29 and self.world.in_flight:
                self.world.commit()
            else:
                self.world.step()
            self.world.check()
            self.num_checks += 1
        self.num_checks += self.world.drain()

    def add(self):
        world, rng = self.world, self.rng
        if len(world.alive) >= 12:
            return
        if world.requests and rng.random() < 0.4:  # the next turn of a conversation
            before = rng.choice(list(world.requests))
            prompt, salt = world.told(before), world.requests[before].salt
            prompt, stem = (prompt + [WORD] * rng.randint(0, 20))[:60], world.stem_of[before]
        else:
            stem, salt = rng.randrange(len(self.stems)), rng.choice([b"", b"", b"s"])
            prompt = self.stems[stem][: rng.randint(1, 44)] + [rng.choice([WORD, 7]) for _ in range(rng.randint(0, 5))]
        name = f"r{len(world.requests)}"
        world.stem_of[name] = stem
        world.add(
            name,
            prompt,
            rng.choice([rng.randint(1, 14), rng.randint(14, 40)]),
            ignore_eos=rng.random() < 0.5,
            priority=rng.choice([0, 0, 0, 1]),
            salt=salt,
            image_hashes={at: bytes([1, stem]) for at, token_id in enumerate(prompt) if token_id == IMAGE},
            checkpoints=tuple(at for at in range(PAGE, len(prompt) + 1, PAGE) if rng.random() < 0.1),
            is_schedulable=rng.random() < 0.9,
            **self.asked(),
        )

    def asked(self):
        """Optional parameters of some requests that concern planning; a bounded decoder half has no logits of prompts."""
        rng, has_logits = self.rng, not self.world.limits.decoder_keep_tokens
        penalty = {"presence_penalty": 0.5} if rng.random() < 0.2 else {}
        return penalty | ({"prompt_logprobs": True, "top_logprobs": 1} if has_logits and rng.random() < 0.1 else {})

    def fork(self):
        world, rng = self.world, self.rng
        if not world.alive or len(world.alive) >= 14:
            return
        parent = rng.choice(world.alive)
        prompt = world.told(parent)
        is_earlier = rng.random() < 0.3
        prompt = prompt[: rng.randint(1, len(prompt))] if is_earlier else prompt + [WORD] * rng.choice([0, 0, 1, 3])
        prompt = prompt[:60]
        images = {at: content for at, content in world.requests[parent].image_hashes.items() if at < len(prompt)}
        name = f"r{len(world.requests)}"
        world.stem_of[name] = world.stem_of[parent]
        world.add(
            name,
            prompt,
            rng.choice([rng.randint(1, 14), rng.randint(14, 40)]),
            parent=parent,
            ignore_eos=rng.random() < 0.5,
            salt=world.requests[parent].salt,
            image_hashes=images,
            is_schedulable=rng.random() < 0.9,
            **self.asked(),
        )

    def abort(self):
        if self.world.requests:
            self.world.abort(*self.rng.choices(list(self.world.requests), k=self.rng.choice([1, 1, 3])))

    def pause(self):
        if self.world.alive:
            self.world.scheduler.set_schedulable(self.rng.choice(self.world.alive), self.rng.random() < 0.7)


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part >= NUM_PARTS)) for part in range(NUM_SLOW_PARTS)]
)
def test_any_history_keeps_every_promise(part):
    num_checks, number, seen = 0, 0, Counter()
    while num_checks < CHECKS_A_PART:
        history = History(1000 * part + number)
        history.run(150)
        num_checks, number = num_checks + history.num_checks, number + 1
        world, counts, stats = history.world, history.world.kv.counts, history.world.scheduler.stats()
        num_accepted = sum(stats.num_accepted_drafts)
        seen += Counter({"accepted": num_accepted, "rejected": sum(stats.num_verified_drafts) - num_accepted})
        seen += Counter({"saved by rounds": world.num_saved, "unsaved": world.num_unsaved, "cut inside a round": world.num_cut})
        seen += Counter({"preempted": stats.num_preempted, "restarted": world.num_restarts, "branched": world.num_branched})
        seen += Counter({"restarted prompt": world.num_restarted_prompts, "preempting": int(stats.num_preempted > 0)})
        seen += Counter({"state": counts.num_state_hits, "replay": counts.num_replay_hits})
    assert len(seen) == 12
    least = {"cut inside a round": 5, "restarted prompt": 2, "preempted": 100, "restarted": 80}
    tame = {what for what, count in seen.items() if count < least.get(what, 20)}
    assert not tame, f"the histories are too tame to show anything: {seen}"


@pytest.mark.parametrize("seed", range(20))
def test_schedule_changes_no_token(seed):
    """The tokens are the same alone, synchronous, asynchronous, and in a pool so small that requests are preempted."""
    rng = random.Random(seed)
    requests = [
        {"prompt": [rng.choice([WORD, 7, 9]) for _ in range(rng.randint(1, 30))], "max_tokens": rng.randint(1, 40)}
        for _ in range(8)
    ]
    tokens = []
    for settings in (
        {"max_num_seqs": 1, "num_slots": 2, "num_pages": 60},
        {"num_pages": 60, "max_num_batched_tokens": 7},
        {"num_pages": 60, "is_async": True},
        {"num_pages": 22},
        {"num_pages": 22, "is_async": True},
        {"num_pages": 60, "num_drafts": 5, "max_num_batched_tokens": 40},
        {"num_pages": 60, "num_drafts": 2, "is_async": True},
        {"num_pages": 60, "num_drafts": 5, "is_async": True, "is_adaptive": True},
        {"num_pages": 22, "num_drafts": 5},
        {"num_pages": 22, "num_drafts": 2, "is_async": True},
        {"num_pages": 22, "num_drafts": 5, "is_async": True, "is_adaptive": True},
    ):
        world = World(seed=seed, **settings)
        for number, each in enumerate(requests):
            world.add(str(number), each["prompt"], each["max_tokens"])
        world.drain()
        tokens.append(world.outputs)
        is_tight = settings.get("num_pages") == 22
        assert is_tight or not world.scheduler.stats().num_preempted
    assert all(each == tokens[0] for each in tokens)


def test_small_pool_of_the_test_above_preempts():
    world = World(num_pages=22, is_async=True)
    for number in range(4):
        world.add(str(number), [WORD] * (20 + number), 40, ignore_eos=True)
    world.drain()
    assert world.scheduler.stats().num_preempted >= 2
    assert world.num_restarts >= 2


@pytest.mark.parametrize("is_async", [False, True])
def test_thousand_aborts_leave_everything_as_it_was(is_async):
    rng = random.Random(5)
    world = World(is_async=is_async, num_pages=30)
    num_aborted = 0
    while num_aborted < 1000:
        while len(world.alive) < 6:
            world.add(f"r{len(world.requests)}", [rng.choice([WORD, 7]) for _ in range(rng.randint(1, 40))], 20, ignore_eos=True)
        for _ in range(rng.randint(0, 4)):
            world.step()
        name = rng.choice(world.alive)
        world.abort(name)
        num_aborted += 1
        world.check()
    world.abort(*world.alive)
    world.drain()
    assert world.scheduler.stats().num_finished[FinishReason.ABORT] >= 1000


def test_end_token_is_among_what_the_worker_samples():
    world = World()
    for number in range(40):
        world.add(str(number), [number + 2], 30)
    world.drain()
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(world.ended.values())
    assert any(told[-1] == EOS for told in world.outputs.values())
