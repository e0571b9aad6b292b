"""Bounded replay and restored state: which rows each half computes, and which results equal a fresh run, bit for bit."""

import numpy as np
import pytest
import torch

from deepinfer.model.inputs import StepInputs
from deepinfer.step import Chunk, StepPlan
from tests.model.tiny import PAGE_TOKENS, fill_with_garbage, model, new_cache, ragged, text, whole

KEEP = 16
"""Number of decoder rows to keep; at least the window of 8 and 6 tokens that a step may take back."""
REACH = 7
"""Number of earlier keys in a window of 8."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 20 else []) for seed in range(60)]


class Run:
    """One request on a given cache."""

    def __init__(self, network, cache, prompt, *, slot, pages, mode="compact", **floors):
        self.network, self.cache, self.ids = network, cache, prompt.token_ids
        self.slot, self.pages, self.mode, self.floors = slot, np.asarray(pages, dtype=np.int32), mode, floors
        self.logits = []

    def step(self, start, end, *, num_logits=0, **extra):
        chunk = Chunk(
            request_id="r",
            slot=self.slot,
            start=start,
            token_ids=self.ids[start:end],
            page_ids=self.pages[: self.cache.layout.pages_for(end)],
            num_logits=num_logits,
            **self.floors,
            **extra,
        )
        return forward(self.network, self.cache, chunk, mode=self.mode)

    def chunks(self, start, sizes, *, logits_from, **first):
        """Logits of the positions from ``logits_from`` on, computed in chunks of ``sizes`` tokens."""
        parts, extra = [], first
        for size in sizes:
            end = start + size
            parts.append(self.step(start, end, num_logits=max(0, end - max(start, logits_from)), **extra))
            start, extra = end, {}
        return torch.cat(parts)


def forward(network, cache, *chunks, mode="compact"):
    inputs = StepInputs.build(
        StepPlan(chunks=chunks),
        config=network.config,
        layout=cache.layout,
        device=network.device,
        replay_mode=mode,
    )
    return network.forward(inputs, cache)


def cache_of(network, seed):
    cache = new_cache(network, num_pages=40, num_slots=5)
    fill_with_garbage(cache, np.random.default_rng(seed))
    return cache


@pytest.mark.parametrize("seed", SEEDS)
def test_mask_and_compact_agree_on_kept_rows(seed):
    rng = np.random.default_rng(seed)
    network = model("golden", exact=False)
    length = int(rng.choice([1, KEEP - 1, KEEP, KEEP + 1, 2 * KEEP, int(rng.integers(1, 120))]))
    prompt, floor = text(network, rng, length), max(0, length - KEEP)
    sizes = ragged(rng, length, 50)
    pages = rng.permutation(np.arange(1, 40))
    results = []
    for mode in ("mask", "compact"):
        run = Run(network, cache_of(network, seed), prompt, slot=2, pages=pages, mode=mode, decoder_floor=floor)
        results.append(run.chunks(0, sizes, logits_from=floor))
    assert torch.equal(*results)
    assert len(results[0]) == length - floor


@pytest.mark.parametrize("seed", range(20))
def test_bounded_decoder_is_exact_while_the_prompt_is_short_and_not_beyond(seed):
    rng = np.random.default_rng(seed)
    network = model("golden", exact=False)
    for length, is_equal in ((KEEP, True), (KEEP + 40, False)):
        prompt = text(network, rng, length)
        run = Run(network, cache_of(network, seed), prompt, slot=1, pages=range(1, 8), decoder_floor=max(0, length - KEEP))
        bounded = run.chunks(0, [length], logits_from=max(0, length - KEEP))
        assert torch.equal(bounded, whole(network, prompt)[-KEEP:]) == is_equal


def prefix_run(network, cache, prompt, hit, rng, **floors):
    """Computes the first ``hit`` tokens on slot 1 and pages 1, 2, …; returns those pages."""
    pages = np.arange(1, 40)
    Run(network, cache, prompt, slot=1, pages=pages, **floors).chunks(0, ragged(rng, hit, 40), logits_from=hit)
    return pages[: hit // PAGE_TOKENS]


def hit_and_length(rng, least):
    hit = PAGE_TOKENS * int(rng.integers(-(-least // PAGE_TOKENS), 9))
    return hit, hit + KEEP + int(rng.integers(1, 30))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_deep_replay_after_a_hit_is_the_fresh_run(seed, bounded):
    """Windows replayed over (layers x reach) tokens are exact, so a hit without state changes no bit."""
    rng = np.random.default_rng(seed)
    network = model("golden", exact=False)
    config = network.config
    depth = REACH * (config.num_encoder_layers if bounded else config.num_hidden_layers)
    hit, length = hit_and_length(rng, depth)
    prompt = text(network, rng, length)
    decoder_floor = length - KEEP if bounded else 0
    fresh = Run(network, cache_of(network, seed), prompt, slot=1, pages=range(1, 40), decoder_floor=decoder_floor)
    expected = fresh.chunks(0, [length], logits_from=max(hit, decoder_floor))

    cache = cache_of(network, seed + 1)
    shared = prefix_run(network, cache, prompt, hit, rng)
    before = cache._pages.clone()
    start = hit - depth
    warm = Run(
        network,
        cache,
        prompt,
        slot=3,
        pages=[*shared, *range(20, 40)],
        window_floor=start,
        write_floor=hit,
        decoder_floor=decoder_floor,
    )
    lookback = prompt.token_ids[max(0, start - 3) : start]
    got = warm.chunks(start, ragged(rng, length - start, 60), logits_from=max(hit, decoder_floor), lookback_ids=lookback)
    assert torch.equal(got, expected)
    size = cache.layout.page_bytes
    assert torch.equal(cache._pages[size * 1 : size * (len(shared) + 1)], before[size * 1 : size * (len(shared) + 1)])


def test_shallow_replay_differs_and_still_leaves_shared_pages_alone():
    rng = np.random.default_rng(0)
    network = model("golden", exact=False)
    prompt, hit, depth = text(network, rng, 150), 96, 8
    cache = cache_of(network, 0)
    shared = prefix_run(network, cache, prompt, hit, rng)
    before = cache._pages.clone()
    floors = {"window_floor": hit - depth, "write_floor": hit}
    warm = Run(network, cache, prompt, slot=3, pages=[*shared, *range(20, 40)], **floors)
    got = warm.chunks(
        hit - depth, [150 - hit + depth], logits_from=hit, lookback_ids=prompt.token_ids[hit - depth - 3 : hit - depth]
    )
    assert not torch.equal(got, whole(network, prompt)[hit:])
    size = cache.layout.page_bytes
    assert torch.equal(cache._pages[size : size * (len(shared) + 1)], before[size : size * (len(shared) + 1)])


@pytest.mark.parametrize("seed", SEEDS)
def test_restored_state_after_a_hit_is_the_fresh_run(seed):
    rng = np.random.default_rng(seed)
    network = model("golden", exact=False)
    hit, length = hit_and_length(rng, PAGE_TOKENS)
    prompt = text(network, rng, length)
    cache = cache_of(network, seed)
    shared = prefix_run(network, cache, prompt, hit, rng)
    cache.copy_slots([(1, 4)])
    Run(network, cache, text(network, rng, 40), slot=1, pages=range(30, 34)).chunks(
        0, [40], logits_from=40
    )  # later tokens change the slot
    cache.copy_slots([(4, 2)])
    warm = Run(network, cache, prompt, slot=2, pages=[*shared, *range(20, 40)], write_floor=hit)
    got = warm.chunks(hit, ragged(rng, length - hit, 30), logits_from=hit)
    assert torch.equal(got, whole(network, prompt)[hit:])


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_copies_of_a_page_and_a_slot_are_independent(seed):
    rng = np.random.default_rng(seed)
    network = model("golden", exact=False)
    stem = int(rng.integers(1, 60))
    one, two = text(network, rng, stem + 20), text(network, rng, stem + 20)
    two.token_ids[:stem] = one.token_ids[:stem]
    cache = cache_of(network, seed)
    first = Run(network, cache, one, slot=1, pages=range(1, 7))
    first.chunks(0, [stem], logits_from=stem)
    full = stem // PAGE_TOKENS
    cache.copy_pages([(full + 1, 11)])
    cache.copy_slots([(1, 2)])
    second = Run(network, cache, two, slot=2, pages=[*range(1, full + 1), 11, *range(20, 26)])
    parts = {first: [], second: []}
    for offset in range(20):
        for run in (first, second):
            parts[run].append(run.step(stem + offset, stem + offset + 1, num_logits=1))
    for run, prompt in ((first, one), (second, two)):
        assert torch.equal(torch.cat(parts[run]), whole(network, prompt)[stem:])
