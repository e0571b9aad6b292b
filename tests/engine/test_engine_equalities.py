"""No schedule changes a result: tokens and log-probabilities have the bits of a run without other requests, cache and chunks.

Every test covers ten seeds; fifty seeds run by default, two thousand with --slow.
"""

import pytest
import torch

from deepinfer.ops.arithmetic import threads
from tests.engine.harness import build, drain, fresh, params, request, rng_of, tokens, two_turns

BLOCKS = [pytest.param(block, marks=[pytest.mark.slow] if block >= 5 else []) for block in range(200)]


def seeds(block):
    return range(10 * block, 10 * block + 10)


def chunked(rng):
    return build(budget=int(rng.integers(8, 30)), is_async=False, cache=False)


def batched(rng):
    return build(is_async=False, cache=False)


def asynchronous(rng):
    return build(is_async=True, budget=int(rng.integers(20, 80)), max_num_seqs=2)


@pytest.mark.parametrize("block", BLOCKS)
def test_chunked_batched_and_asynchronous_are_alone_and_whole(block):
    """Unrelated requests; all runs are compared with one synchronous run without a cache."""
    for seed in seeds(block):
        rng = rng_of(seed, 1)
        work = [request(f"r{number}", tokens(rng, int(rng.integers(1, 50))), params(rng, 2)) for number in range(3)]
        expected = fresh(work, alone=True)
        for engine in (chunked, batched, asynchronous):
            core = engine(rng)
            arrivals = None if engine is chunked else rng
            assert drain(core, work, arrivals) == expected, f"{engine.__name__}, seed {seed}"
            core.close()


@pytest.mark.parametrize("block", BLOCKS)
def test_preempted_is_not(block):
    num_preempted = 0
    for seed in seeds(block):
        rng = rng_of(seed, 5)
        # With so few tokens, penalties decide every next token: counts of the prompt alone would give another text.
        few = {"frequency_penalty": 2.0, "repetition_penalty": 8.0, "allowed_token_ids": range(20, 24)}
        work = [request(f"r{number}", tokens(rng, 16 * 2 - 2), params(rng, 4, **few if seed % 2 else {})) for number in range(2)]
        core = build(
            num_pages=1 + 5, cache=bool(rng.integers(2)), spare_slots=int(rng.integers(3)), exact_replay=bool(rng.integers(2))
        )
        assert drain(core, work) == fresh(work)
        num_preempted += core.stats().num_preempted
        core.close()
    assert num_preempted >= 5, "the pool is too small for all"


@pytest.mark.parametrize("block", BLOCKS)
def test_cached_with_state_is_fresh(block):
    num_hit = 0
    for seed in seeds(block):
        rng = rng_of(seed, 6)
        core = build(is_async=bool(rng.integers(2)))
        work, got = two_turns(core, rng, int(rng.integers(20, 60)), 2)
        assert got == fresh(work)
        stats = core.stats()
        assert stats.num_replayed_tokens == 0
        num_hit += stats.num_hit_tokens > 0
        core.close()
    assert num_hit >= 8


@pytest.mark.parametrize("block", BLOCKS)
def test_cached_with_invariant_replay_is_fresh(block):
    for seed in seeds(block):
        rng = rng_of(seed, 7)
        keep = int(rng.choice([0, 16]))
        core = build(spare_slots=0, exact_replay=True, keep=keep, is_async=bool(rng.integers(2)))
        work, got = two_turns(core, rng, int(rng.integers(105, 120)), 2)
        assert got == fresh(work, keep=keep)
        stats = core.stats()
        assert stats.num_replayed_tokens > 0
        assert stats.num_hit_tokens > stats.num_replayed_tokens
        core.close()


@pytest.mark.parametrize("block", BLOCKS)
def test_forked_is_separate(block):
    for seed in seeds(block):
        rng = rng_of(seed, 8)
        prompt = tokens(rng, int(rng.integers(1, 60)))
        core = build(is_async=bool(rng.integers(2)))
        parent = request("parent", prompt, params(rng, 5, ignore_eos=True))
        core.add(parent)
        outputs = {"parent": [], "child": []}
        while len(outputs["parent"]) < 2:
            for output in core.step():
                outputs[output.request_id].append((output.token_id, output.token_logprobs))
        # The scheduler has committed exactly the tokens that the caller has got.
        stem = prompt + tuple(token for token, _ in outputs["parent"])
        child = request("child", stem, params(rng, 3))
        core.fork("parent", child)
        drain(core, outputs=outputs)
        assert outputs == fresh([parent, child])
        core.close()


class ChangingTeam:
    """A random number of threads for each layer."""

    def __init__(self, rng):
        self.rng = rng

    def step(self):
        return threads(1)

    def between_layers(self):
        torch.set_num_threads(int(self.rng.choice([1, 2, 3])))


def test_steps_of_any_number_of_threads_are_those_of_one():
    for seed in range(2):
        rng = rng_of(seed, 7)
        work = [request(f"r{number}", tokens(rng, int(rng.integers(1, 90))), params(rng, 4)) for number in range(3)]
        core = build(budget=40, num_drafts=3)
        core.executor.worker.team = ChangingTeam(rng)
        assert drain(core, work, rng) == fresh(work)
        core.close()
