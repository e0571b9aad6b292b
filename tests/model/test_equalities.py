"""The same prompt, computed in many ways: whole, in chunks, token by token, alone, in a batch, on clean and on used memory.

In fp64 the results agree up to rounding.  In production arithmetic they agree bit for bit.
"""

import numpy as np
import pytest
import torch

from tests.model.tiny import (
    PAGE_TOKENS,
    Batch,
    fill_with_garbage,
    in_chunks,
    model,
    new_cache,
    ragged,
    text,
    text_with_images,
    whole,
)


def is_equal(network, found, expected):
    if network.dtype == torch.float64:
        return torch.allclose(found, expected, rtol=0, atol=1e-12)
    return torch.equal(found, expected)


def random_prompt(network, rng, longest):
    make = text_with_images if rng.random() < 0.5 else text
    return make(network, rng, int(rng.integers(1, longest + 1)))


def run_crowd(network, rng, *, num_requests, num_slots, longest, largest):
    """Run random prompts in random batches on used memory; returns (prompt, logits) of each.

    Requests start and end at random, so requests reuse pages and slots of earlier ones.  A step takes some of the running
    requests, in random order, each with one token or with a random chunk.
    """
    waiting = [(number, random_prompt(network, rng, longest)) for number in range(num_requests)]
    num_pages = 1 + (num_slots - 1) * -(-longest // PAGE_TOKENS)
    cache = new_cache(network, num_pages=num_pages, num_slots=num_slots)
    fill_with_garbage(cache, rng)
    batch, prompts, finished = Batch(network, cache, rng), dict(waiting), []
    while waiting or batch.done:
        while waiting and len(batch.done) < num_slots - 1:
            batch.add(*waiting.pop())
        present = rng.permutation(list(batch.done))
        chosen = present[: int(rng.integers(1, len(present) + 1))]
        sizes = [1 if rng.random() < 0.4 else int(rng.integers(1, largest + 1)) for _ in chosen]
        batch.step({int(name): min(size, batch.left(name)) for name, size in zip(chosen, sizes, strict=True)})
        finished += [(prompts[name], batch.remove(name)) for name in list(batch.done) if not batch.left(name)]
    return finished


def check_crowd(network, rng, **shape):
    for prompt, logits in run_crowd(network, rng, **shape):
        assert is_equal(network, logits, whole(network, prompt))


GOLDEN_CROWD = {"num_requests": 4, "num_slots": 4, "longest": 60, "largest": 24}


@pytest.mark.parametrize("number", range(48))
def test_company_memory_and_chunks_do_not_matter(number):
    check_crowd(model("golden", exact=False), np.random.default_rng(number), **GOLDEN_CROWD)


@pytest.mark.parametrize("number", range(16))
def test_company_memory_and_chunks_do_not_matter_in_fp64(device, number):
    check_crowd(model("golden", device, exact=True), np.random.default_rng(1000 + number), **GOLDEN_CROWD)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("block", range(20))
def test_company_memory_and_chunks_do_not_matter_many_times(block, exact):
    for number in range(10):
        rng = np.random.default_rng([2000, block, number])
        check_crowd(model("golden", exact=exact), rng, num_requests=5, num_slots=5, longest=120, largest=40)


@pytest.mark.parametrize("make", [text, text_with_images])
@pytest.mark.parametrize("exact", [False, True])
def test_token_by_token_is_the_whole(device, exact, make):
    network = model("golden", device, exact=exact)
    prompt = make(network, np.random.default_rng(1), 80)
    assert is_equal(network, in_chunks(network, prompt, [1] * 80), whole(network, prompt))


@pytest.mark.parametrize("exact", [False, True])
def test_every_cut_in_two_is_the_whole(exact):
    network = model("golden", exact=exact)
    prompt = text_with_images(network, np.random.default_rng(2), 50)
    expected = whole(network, prompt)
    for cut in range(1, 50):
        assert is_equal(network, in_chunks(network, prompt, [cut, 50 - cut]), expected)


# ------------------------------------------------------------------------ the larger model, where window and limits all bite


NANO_TOKENS = 1100
"""Tokens of a long prompt: more entries at ratio 1 than the 64 chosen and the 32 x 8 candidates; eight windows of 128."""


@pytest.fixture(scope="module", params=[text, text_with_images], ids=lambda make: make.__name__)
def long_prompt(request):
    return request.param(model("random", exact=False), np.random.default_rng(3), NANO_TOKENS)


@pytest.fixture(scope="module")
def long_whole(long_prompt):
    return whole(model("random", exact=False), long_prompt)


@pytest.mark.parametrize("largest", [100, 300])
def test_long_prompt_in_ragged_chunks_is_the_whole(long_prompt, long_whole, largest):
    network = model("random", exact=False)
    sizes = ragged(np.random.default_rng(largest), NANO_TOKENS, largest)
    assert torch.equal(in_chunks(network, long_prompt, sizes), long_whole)


def test_long_prompt_ends_token_by_token_in_company(long_prompt, long_whole):
    network, rng = model("random", exact=False), np.random.default_rng(4)
    other = text(network, rng, 700)
    cache = new_cache(network, num_pages=130, num_slots=3)
    fill_with_garbage(cache, rng)
    batch = Batch(network, cache, rng)
    batch.add("other", other)
    batch.add("long", long_prompt)
    batch.step({"other": 130})
    batch.step({"long": 900, "other": 129})
    batch.step({"other": 200, "long": 185})
    for _ in range(15):
        batch.step({"long": 1, "other": int(rng.integers(1, 16))})
    assert torch.equal(batch.remove("long"), long_whole)


def test_long_prompt_in_ragged_chunks_is_the_whole_in_fp64(device):
    network, rng = model("random", device, exact=True), np.random.default_rng(5)
    prompt = text_with_images(network, rng, NANO_TOKENS)
    found = in_chunks(network, prompt, ragged(rng, NANO_TOKENS, 500))
    assert is_equal(network, found, whole(network, prompt))


@pytest.mark.slow
def test_long_prompt_token_by_token_is_the_whole(long_prompt, long_whole):
    assert torch.equal(in_chunks(model("random", exact=False), long_prompt, [1] * NANO_TOKENS), long_whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_long_company_does_not_matter(number):
    shape = {"num_requests": 4, "num_slots": 4, "longest": 1500, "largest": 400}
    check_crowd(model("random", exact=False), np.random.default_rng([6, number]), **shape)


@pytest.mark.gpu
def test_device_chooses_the_cpus_tokens():
    """Greedy text of 40 tokens after a prompt of 200, in fp64."""
    chosen = {}
    for device in ("cpu", "cuda"):
        network = model("random", torch.device(device), exact=True)
        prompt = text(network, np.random.default_rng(7), 240)
        batch = Batch(network, new_cache(network, num_pages=20, num_slots=2))
        batch.add("only", prompt)
        batch.step({"only": 200})
        for position in range(200, 240):
            prompt.token_ids[position] = int(batch.logits["only"][-1][-1, :270].argmax())
            batch.step({"only": 1})
        chosen[device] = prompt.token_ids[200:].tolist()
    assert chosen["cuda"] == chosen["cpu"]
    assert len(set(chosen["cpu"])) > 3
