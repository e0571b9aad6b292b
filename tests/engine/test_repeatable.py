"""A request with a seed gives the same tokens and log-probabilities with any other requests, in every mode of speculation.

In mode ``coupled`` the text does not depend on drafts and their number, so lengths may be adaptive.  In the other two modes the
text depends on the first position of each round and on every draft, including the drafter's state, so lengths are fixed there.
"""

import functools

import numpy as np
import pytest

from deepinfer.request import SamplingParams
from tests.engine.harness import KnowingDrafter, build, conversation, drain, fresh, random_engine, request, rng_of, tokens

NUM_DRAFTS = 5
MODES = ["coupled", "sampled", "argmax"]
FEW = (20, 21, 22, 23)
"""The only tokens of some answers, so that random drafts are often right."""


class Babble:
    """Texts by seed: a random text of few tokens for every seed, so that drafts depend only on seed and position."""

    def get(self, seed):
        return np.random.default_rng(seed % 2**63).choice(FEW, 400).tolist()


def engine(mode, **given):
    """Settings: the network's drafts in modes that draw drafts; in mode ``argmax``, drafts that are right more often."""
    if mode == "argmax":
        given["drafter"] = lambda network: KnowingDrafter(network, Babble(), lambda seed, position: NUM_DRAFTS)
    return {"num_drafts": NUM_DRAFTS, "draft_mode": mode} | given


KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 1.6, "presence_penalty": 0.5},
]


def asked(rng, mode, number, num_prompt, num_answer):
    """A request of each kind in turn; in mode ``argmax`` only few tokens are allowed, so that drafts are often right."""
    few = {"allowed_token_ids": FEW} if mode == "argmax" else {}
    sampling = SamplingParams(
        **KINDS[number % len(KINDS)], **few, max_tokens=num_answer, ignore_eos=True, seq_seed=int(rng.integers(2**63))
    )
    return request(f"r{number}", tokens(rng, num_prompt), sampling)


def requests(mode, salt, *, count=3, longest=9):
    rng = rng_of(salt, 60)
    lengths = [(int(rng.integers(3, 35)), int(rng.integers(longest // 2, longest + 1))) for _ in range(count)]
    return [asked(rng, mode, number, *each) for number, each in enumerate(lengths)]


@functools.cache
def alone(mode, salt, **given):
    """The outputs of the requests, each run alone, without a cache, in one chunk."""
    return fresh(requests(mode, salt, **given), alone=True, **engine(mode))


def run(core, work, rng, names):
    """The outputs of the requests ``names``, and the engine's counts."""
    outputs = drain(core, work, rng)
    stats = core.stats()
    core.close()
    return {name: outputs[name] for name in names}, stats


def rounds_of(core, work):
    """For every token: id, log-probability, confidence of its draft, and the drafts and accepted drafts of its round."""
    records = {}
    for each in work:
        core.add(each)
    while not core.is_idle:
        for output in core.step():
            numbers = output.token_logprobs, output.confidence_score, output.draft_tok, output.accept_tok
            records.setdefault(output.request_id, []).append((output.token_id, *numbers))
    return records


def rounds_alone(work, mode):
    """The same for requests that run alone, each in one chunk."""
    core = build(max_num_seqs=1, spare_slots=0, budget=2000, is_async=False, cache=False, **engine(mode))
    records = [rounds_of(core, [each]) for each in work]
    core.close()
    return {name: rounds for each in records for name, rounds in each.items()}


def others(rng, count):
    return [
        request(
            f"other {number}",
            tokens(rng, int(rng.integers(1, 25))),
            SamplingParams(temperature=1.0, max_tokens=int(rng.integers(1, 5)), seq_seed=int(rng.integers(2**63))),
        )
        for number in range(count)
    ]


EACH_MODE = pytest.mark.parametrize("mode", MODES)
SALTS = [0, *(pytest.param(salt, marks=pytest.mark.slow) for salt in range(1, 8))]


@EACH_MODE
@pytest.mark.parametrize("salt", SALTS)
def test_company_order_slots_and_chunks_do_not_matter(mode, salt):
    """Two to sixteen other requests arrive at random times; prompts are cut into chunks of any size."""
    work, rng = requests(mode, salt), rng_of(salt, 61)
    expected = alone(mode, salt)
    count, budget, most = (16, 60, 17) if salt % 2 == 0 else (int(rng.integers(2, 6)), int(rng.integers(14, 40)), 4)
    mixed = [*work, *others(rng, count)]
    rng.shuffle(mixed)
    core = build(
        num_pages=150,
        max_num_seqs=most,
        budget=budget,
        is_async=bool(rng.integers(2)),
        is_adaptive=mode == "coupled",
        **engine(mode),
    )
    found, stats = run(core, mixed, rng, expected)
    assert found == expected
    assert sum(stats.num_accepted_drafts) > 0
    assert stats.num_preempted == 0


@EACH_MODE
@pytest.mark.parametrize("salt", SALTS)
def test_pieces_shorter_than_a_window_do_not_matter(mode, salt):
    """The first drafts depend on the drafter's context of earlier chunks of the prompt."""
    one = asked(rng_of(salt, 64), mode, salt, 30 + salt, 6)
    core = build(budget=7, is_async=False, cache=False, **engine(mode))
    assert rounds_of(core, [one]) == rounds_alone([one], mode)
    core.close()


@EACH_MODE
@pytest.mark.parametrize("salt", SALTS)
def test_preemption_does_not_matter(mode, salt):
    """A preempted answer continues at the beginning of its last round, with the same drafts."""
    rng = rng_of(salt, 62)
    work = [asked(rng, mode, number, 27, 12) for number in range(3)]
    core = build(
        num_pages=1 + 5,
        max_num_seqs=3,
        spare_slots=int(rng.integers(3)),
        cache=bool(rng.integers(2)),
        exact_replay=True,
        is_async=salt % 2 == 0,
        **engine(mode),
    )
    assert rounds_of(core, work) == rounds_alone(work, mode)
    assert core.stats().num_preempted > 0, "the pool is too large to take anything from anybody"
    core.close()


@EACH_MODE
@pytest.mark.parametrize("salt", SALTS)
def test_a_prefix_that_is_found_does_not_matter(mode, salt):
    """A round saves state when it crosses the end of a page, during an answer."""
    rng, given = rng_of(salt, 63), engine(mode)
    one = asked(rng, mode, salt, 43, 9)
    core = build(is_async=salt % 2 == 0, exact_replay=True, is_adaptive=mode == "coupled", **given)
    got = drain(core, [one])
    stem = one.prompt_token_ids + tuple(token for token, _ in got[one.request_id])
    later = [
        request("more", stem + tokens(rng, 15), asked(rng, mode, 0, 1, 6).params),
        request("half", stem[:48] + tokens(rng, 15), asked(rng, mode, 2, 1, 6).params),
    ]
    got |= drain(core, later)
    stats = core.stats()
    core.close()
    assert got == fresh([one, *later], alone=True, **given)
    assert stats.num_replayed_tokens == 0
    assert stats.num_hit_tokens == 2 * 48


@pytest.mark.parametrize("mode", ["sampled", "argmax"])
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 20))])
def test_no_history_matters(mode, block):
    """Random engines with random work, as for mode ``coupled`` in ``test_drafted_is_plain.py``, but with fixed lengths."""
    seen = dict.fromkeys(["accepted", "rejected", "preempted"], 0)
    for seed in range(3 * block, 3 * block + 3):
        rng = rng_of(seed, 66)
        given = engine(mode, num_drafts=int(rng.integers(2, NUM_DRAFTS + 1)))
        work = conversation(rng, lambda number, count, rng=rng: asked(rng, mode, number, 1, count).params)
        expected = fresh(work, **given)
        for _ in range(2):
            core = random_engine(rng, work, **given)
            found, stats = run(core, work, rng if rng.random() < 0.4 else None, expected)
            assert found == expected, f"seed {seed}"
            seen["accepted"] += sum(stats.num_accepted_drafts)
            seen["rejected"] += sum(stats.num_verified_drafts) - sum(stats.num_accepted_drafts)
            seen["preempted"] += stats.num_preempted
    assert min(seen["accepted"], seen["rejected"]) >= 5 <= 2 * seen["preempted"], (
        f"the histories are too tame to show anything: {seen}"
    )


@pytest.mark.parametrize("salt", SALTS)
def test_greedy_text_is_the_plain_one_in_every_mode(salt):
    work = {mode: [each for each in requests(mode, salt, count=6, longest=7) if each.params.is_greedy] for mode in MODES}
    assert work["coupled"] == work["sampled"]
    for few in (work["coupled"], work["argmax"]):
        expected = fresh(few)
        for mode in MODES:
            if work[mode] == few:
                assert fresh(few, **engine(mode)) == expected


@pytest.mark.parametrize("salt", SALTS)
def test_coupled_text_is_the_plain_one(salt):
    assert alone("coupled", salt) == fresh(requests("coupled", salt))


def test_other_modes_give_texts_of_their_own():
    """Otherwise the tests above would show no more than the tests of mode ``coupled``."""
    assert alone("sampled", 0) != alone("coupled", 0)
    assert alone("argmax", 0) != fresh(requests("argmax", 0))
