"""Copies of pages and slots take their place among the steps: out after the steps before, in before the steps after."""

import numpy as np
import pytest
import torch

from deepinfer.errors import StepFailed
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, StepPlan
from tests.engine.harness import build, rng_of, tokens

NUM_TOKENS, CUT = 40, 23


def ids(*given):
    return np.array(given, dtype=np.int32)


def chunk(name, text, start, end, *, slot, pages):
    return StepPlan(
        chunks=(
            Chunk(
                request_id=name,
                slot=slot,
                start=start,
                token_ids=ids(*text[start:end]),
                page_ids=ids(*pages),
                num_logits=int(end == len(text)),
                lookback_ids=ids(*text[max(0, start - 2) : start]) if start else None,
            ),
        )
    )


def next_token(executor, name, text, start, **where):
    sampled = executor.launch(chunk(name, text, start, len(text), **where)).result().sampled[name]
    return sampled.token_ids, sampled.logprobs


@pytest.mark.parametrize("seed", range(3))
def test_a_request_goes_on_from_a_copy_whatever_runs_meanwhile(device, seed):
    rng = rng_of(seed, 90)
    text, other = tokens(rng, NUM_TOKENS), tokens(rng, NUM_TOKENS)
    cores = [build(device=device, cache=False) for _ in range(2)]
    here, there = (core.executor for core in cores)
    params = SamplingParams(temperature=1.0, seq_seed=seed)
    for executor in (here, there):
        for name in ("one", "other"):
            executor.add(name, params, NUM_TOKENS)
    # Nothing is waited for between these calls: each must see the memory as the calls before it leave it.
    here.launch(chunk("one", text, 0, CUT, slot=1, pages=(1, 2)))
    copied = here.copy_out(ids(1, 2), ids(1))
    here.launch(chunk("other", other, 0, NUM_TOKENS, slot=1, pages=(1, 2, 3)))
    content = copied.result()
    assert content.pages.device.type == content.states.device.type == "cpu"
    there.launch(chunk("other", other, 0, NUM_TOKENS, slot=4, pages=(7, 5, 6)))
    there.copy_in(content, ids(7, 5), ids(4))
    found = next_token(there, "one", text, CUT, slot=4, pages=(7, 5, 6))
    expected = next_token(here, "one", text, 0, slot=2, pages=(4, 5, 6))
    assert found == expected
    for core in cores:
        core.close()


def test_a_copy_that_fails_fails_the_next_step():
    core = build(cache=False)
    executor = core.executor
    executor.add("one", SamplingParams(seq_seed=0), NUM_TOKENS)
    content = executor.copy_out(ids(1), ids(1)).result()
    executor.copy_in(content, ids(1, 2), ids(1))
    with pytest.raises(StepFailed, match="a step failed"):
        executor.launch(chunk("one", tokens(rng_of(0, 91), NUM_TOKENS), 0, NUM_TOKENS, slot=1, pages=(1, 2, 3))).result()
    core.close()


def test_a_copy_has_all_bytes_and_writes_no_other():
    core = build(cache=False)
    cache = core.executor.worker._cache
    draw = torch.Generator().manual_seed(0)
    cache._pages.random_(generator=draw)
    cache._states.random_(generator=draw)
    before = cache._pages.clone(), cache._states.clone()
    content = core.executor.copy_out(ids(3, 1), ids(2)).result()
    core.executor.copy_in(content, ids(5, 6), ids(4))
    core.executor.call(lambda: None)
    pages, states = cache._pages.view(cache.num_pages, -1), cache._states.view(cache.num_slots, -1)
    assert torch.equal(pages[[5, 6]], before[0].view_as(pages)[[3, 1]])
    assert torch.equal(states[4], before[1].view_as(states)[2])
    kept = [page for page in range(cache.num_pages) if page not in (5, 6)]
    assert torch.equal(pages[kept], before[0].view_as(pages)[kept])
    core.close()
