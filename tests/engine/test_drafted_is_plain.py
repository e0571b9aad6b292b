"""Speculation changes no token and no log-probability: with any number of drafts, right or wrong, fixed or adaptive lengths, and
under any schedule, the text is the plain one, bit for bit, greedy and seeded.

Every seed is another random engine: drafts of a round, how many of them are right, adaptive lengths or not, one step ahead or
not, pool, cache, chunks, moments of arrival, steps padded as for graphs or not.
"""

import pytest

from deepinfer.executor.graphs import Tiers
from tests.engine.harness import build, drain, fresh, knowing, params, request, rng_of, tokens

BLOCKS = [pytest.param(block, marks=[pytest.mark.slow] if block >= 20 else []) for block in range(200)]
"""Ten seeds each."""


def conversation(rng):
    """Requests of which some begin with what others give, so that the cache is hit."""
    stem = tokens(rng, int(rng.integers(24, 40)))
    work = []
    for number in range(int(rng.integers(2, 4))):
        prompt = stem[: int(rng.integers(1, len(stem)))] if rng.random() < 0.3 else stem + tokens(rng, int(rng.integers(1, 10)))
        work.append(request(f"r{number}", prompt, params(rng, int(rng.integers(3, 9)), ignore_eos=bool(rng.random() < 0.7))))
    return work


def random_engine(rng, drafter, work):
    longest = max(len(each.prompt_token_ids) + each.params.max_tokens for each in work)
    num_drafts = int(rng.integers(0, 6))
    is_tight = rng.random() < 0.4
    return build(
        num_pages=2 + int(longest // 16 + 1) + int(rng.integers(0, 2)) if is_tight else 120,
        max_num_seqs=int(rng.integers(2, 5)),
        spare_slots=int(rng.integers(0, 3)),
        budget=int(rng.integers(16, 80)),
        is_async=bool(rng.random() < 0.7),
        cache=bool(rng.random() < 0.8),
        exact_replay=True,
        num_drafts=num_drafts,
        is_adaptive=bool(rng.random() < 0.5),
        drafter=drafter,
        tiers=Tiers(rows=int(rng.integers(1, 12)), requests=int(rng.integers(1, 6))) if rng.random() < 0.5 else None,
    )


def skill(rng):
    """How many drafts of a round are right: at random, up to a number that is fixed for a run."""
    largest = int(rng.integers(0, 6))
    return lambda seed, position: int(rng.integers(0, largest + 1))


@pytest.mark.parametrize("block", BLOCKS)
def test_drafted_is_plain(block):
    seen = dict.fromkeys(["accepted", "rejected", "preempted", "hit"], 0)
    for seed in range(10 * block, 10 * block + 10):
        rng = rng_of(seed, 20)
        work = conversation(rng)
        expected = fresh(work)
        core = random_engine(rng, knowing(work, expected, skill(rng)), work)
        assert drain(core, work, rng) == expected, f"seed {seed}"
        stats = core.stats()
        seen["accepted"] += sum(stats.num_accepted_drafts)
        seen["rejected"] += sum(stats.num_verified_drafts) - sum(stats.num_accepted_drafts)
        seen["preempted"] += stats.num_preempted
        seen["hit"] += stats.num_hit_tokens
        core.close()
    assert min(seen["accepted"], seen["rejected"]) >= 5, f"the histories are too tame to show anything: {seen}"
