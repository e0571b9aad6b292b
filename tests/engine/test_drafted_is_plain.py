"""Speculation changes no token and no log-probability.

With any number of drafts, right or wrong, with fixed or adaptive lengths, and with any schedule, greedy and seeded text equals
the text without drafts, bit for bit.

Every seed gives another random engine: drafts of a round, number of right drafts, adaptive or fixed lengths, planning one step
ahead or not, pool, cache, chunks, times of arrival, steps with or without padding.  Most pools are so small that requests are
preempted.
"""

import pytest

from tests.engine.harness import conversation, drain, fresh, knowing, params, random_engine, rng_of

BLOCKS = [pytest.param(block, marks=[pytest.mark.slow] if block >= 10 else []) for block in range(200)]
"""Each block has ten seeds."""


def skill(rng):
    """The number of right drafts of a round: random, with a limit that is fixed for a run."""
    largest = int(rng.integers(0, 6))
    return lambda seed, position: int(rng.integers(0, largest + 1))


@pytest.mark.parametrize("block", BLOCKS)
def test_drafted_is_plain(block):
    seen = dict.fromkeys(["accepted", "rejected", "preempted", "hit"], 0)
    for seed in range(10 * block, 10 * block + 10):
        rng = rng_of(seed, 20)
        work = conversation(rng, lambda number, count, rng=rng: params(rng, count, ignore_eos=bool(rng.random() < 0.7)))
        expected = fresh(work)
        core = random_engine(
            rng,
            work,
            num_drafts=int(rng.integers(0, 6)),
            is_adaptive=bool(rng.random() < 0.5),
            drafter=knowing(work, expected, skill(rng)),
        )
        assert drain(core, work, rng if rng.random() < 0.4 else None) == expected, f"seed {seed}"
        stats = core.stats()
        seen["accepted"] += sum(stats.num_accepted_drafts)
        seen["rejected"] += sum(stats.num_verified_drafts) - sum(stats.num_accepted_drafts)
        seen["preempted"] += stats.num_preempted
        seen["hit"] += stats.num_hit_tokens
        core.close()
    assert min(seen["accepted"], seen["rejected"]) >= 5 <= 2 * seen["preempted"], (
        f"the histories are too tame to show anything: {seen}"
    )
