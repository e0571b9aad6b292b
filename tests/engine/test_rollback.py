"""A rejected draft leaves no trace in the text, and none in the memory that later steps may read.

The answers here are forced, so they are known before, and the test can choose how many drafts are right.  The comparison is one
prefill of prompt and answer: the same tokens without drafts.
"""

import numpy as np
import pytest
import torch

from deepinfer.request import SamplingParams
from tests.engine.harness import KnowingDrafter, build, drain, fresh, knowing, request, rng_of, tokens

NUM_DRAFTS = 5


def forced(name, rng, num_prompt, num_answer):
    """A request whose answer is random text."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_answer, golden_token_ids=tokens(rng, num_answer), seq_seed=int(rng.integers(2**62))
    )
    return request(name, tokens(rng, num_prompt), params)


def whole(each):
    """Prompt and answer of a forced request."""
    return each.prompt_token_ids + tuple(each.params.golden_token_ids)


def in_turn(pattern):
    """The number of right drafts: each round of a request uses the next number of the request's entry in ``pattern``."""
    turns = {}

    def num_right(seed, position):
        turns[seed] = turns.get(seed, -1) + 1
        return pattern[seed][turns[seed] % len(pattern[seed])]

    return num_right


def counted(counts):
    """A drafter with ``counts``: request -> number of right drafts of each round."""
    texts = {each.params.seq_seed: whole(each) for each in counts}
    num_right = in_turn({each.params.seq_seed: list(pattern) for each, pattern in counts.items()})
    return lambda network: KnowingDrafter(network, texts, num_right)


class Watched:
    """An engine that records the slot, the pages, the log-probabilities and the rounds of each request."""

    def __init__(self, **given):
        self.core = build(cache=False, spare_slots=0, is_async=False, num_drafts=NUM_DRAFTS, **given)
        self.slots, self.pages, self.logprobs, self.rounds = {}, {}, {}, {}

    def run(self, work, num_rounds=None):
        """Run to the end, or until every request has had ``num_rounds`` rounds; the memory keeps its state of that time."""
        for each in work:
            self.core.add(each)
        while not self.core.is_idle and (not self.rounds or len(min(self.rounds.values(), key=len)) != num_rounds):
            outputs = self.core.step()
            plan, result = self.core.last_step
            for each in (*plan.chunks, *plan.rounds):
                self.slots[each.request_id], self.pages[each.request_id] = each.slot, each.page_ids
            for each in plan.rounds:
                self.rounds.setdefault(each.request_id, []).append(result.sampled[each.request_id])
            for output in outputs:
                known = output.prompt_logprobs or ()
                self.logprobs.setdefault(output.request_id, []).extend([*known, output.token_logprobs])
        self.core.close()
        return self

    def memory(self, name, num_computed):
        return memory(self.core.executor.worker._cache, self.slots[name], self.pages[name], num_computed)


def memory(cache, slot, page_ids, num_computed):
    """Name -> all values that later steps may read of a request with ``num_computed`` tokens.

    The drafter's rings are compared completely, because only accepted tokens may be written into them.
    """
    layout, config = cache.layout, cache.layout.config
    window = np.arange(max(0, num_computed - config.sliding_window), num_computed)
    ring = np.arange(max(0, num_computed - layout.ring_tokens), num_computed)
    held = {}
    for layer in layout.windows:
        positions = window if layer < config.num_hidden_layers else ring
        held[f"window {layer}"] = cache.window(layer)[slot][positions % layout.ring_tokens]
    for layer in layout.compressors:
        held[f"pending {layer}"] = cache.compressor(layer)[slot][(num_computed - 1) % layout.compressor_ring]
    last_ids = np.arange(num_computed - config.engram_max_ngram_size + 1, num_computed)
    held["look-back"] = cache.lookback()[slot][last_ids % layout.lookback_ring]
    for layer in layout.stores:
        store, ratio = cache.index(layer), config.ratio(layer)
        entries = num_computed // ratio
        for what, view in (("main", cache.main(layer)), ("keys", store.values), ("scales", store.scales)):
            held[f"{what} {layer}"] = view[page_ids.astype(np.int64)].flatten(0, 1)[:entries]
    return {name: each.clone() for name, each in held.items()}


def plain(work, num_tokens):
    """A run with the same tokens as prompts: one prompt for each request."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True, ignore_eos=True, seq_seed=0)
    return Watched(budget=100).run(
        [request(each.request_id, whole(each)[: num_tokens[each.request_id]], params) for each in work]
    )


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))])
def test_rejected_drafts_leave_no_trace(number):
    """Right drafts: 0 to 5 in turn, always 0, and other patterns, so that rounds end at all offsets in pages, pairs and rings.

    All drafts of the last round are wrong, and no later step has overwritten their state when memory is compared.
    """
    rng, num_rounds = rng_of(number, 40), 91
    patterns = [(0, 1, 2, 3, 4, 5), (0,), (0, 5), (1, 0, 0, 3)]
    counts = {forced(f"r{place}", rng, (13, 24, 15, 2)[place] + number, 330): pattern for place, pattern in enumerate(patterns)}
    drafted = Watched(drafter=counted(counts)).run(counts, num_rounds)
    num_tokens = {}
    for each, pattern in counts.items():
        rounds = drafted.rounds[each.request_id]
        expected = [(pattern[turn % len(pattern)], NUM_DRAFTS) for turn in range(num_rounds)]
        assert [(len(one.token_ids) - 1, one.num_drafts) for one in rounds] == expected
        assert expected[-1][0] == 0
        num_tokens[each.request_id] = len(each.prompt_token_ids) + 1 + sum(right + 1 for right, _ in expected)
    assert num_tokens["r0"] > 300
    # The last decided token is an anchor, which no step has computed.
    computed = {name: count - 1 for name, count in num_tokens.items()}
    known = plain(counts, computed)
    for each in counts:
        name, num_prompt = each.request_id, len(each.prompt_token_ids)
        assert drafted.logprobs[name][:-1] == known.logprobs[name][num_prompt:-1]
        found, expected = (engine.memory(name, computed[name]) for engine in (drafted, known))
        assert [what for what in expected if not torch.equal(found[what], expected[what])] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_greedy_text_of_a_thousand_tokens_is_the_plain_one(number):
    rng = rng_of(number, 41)
    one = request(
        "one", tokens(rng, 9 + number), SamplingParams(temperature=0.0, max_tokens=1010, ignore_eos=True, seq_seed=number)
    )
    expected = fresh([one], max_model_len=1100)
    seed = one.params.seq_seed
    pattern = {seed: [(0, 1, 2, 3, 4, 5), (0,), (5,), (4, 0, 1)][number]}
    core = build(num_drafts=NUM_DRAFTS, max_model_len=1100, cache=False, drafter=knowing([one], expected, in_turn(pattern)))
    assert drain(core, [one]) == expected
    core.close()
