"""The next request that can use a saved state finds it: after the same prompt, and at a caller's checkpoints."""

import pytest

from deepinfer import SamplingParams
from tests.engine.harness import PAGE_TOKENS, build, drain, fresh, params, request, rng_of, tokens


def again(each):
    return request(f"{each.request_id} again", each.prompt_token_ids, each.params)


@pytest.mark.parametrize(("is_async", "num_drafts", "budget"), [(True, 5, PAGE_TOKENS), (True, 0, 300), (False, 5, 300)])
def test_a_prompt_sent_again_is_exact_and_replays_nothing(is_async, num_drafts, budget):
    rng = rng_of(12, num_drafts)
    core = build(is_async=is_async, num_drafts=num_drafts, budget=budget, max_num_seqs=4, spare_slots=9)
    lengths = [PAGE_TOKENS + core.scheduler.kv.margin, 4 * PAGE_TOKENS, 90, 93]
    work = [request(str(at), tokens(rng, length), params(rng, 3, ignore_eos=True)) for at, length in enumerate(lengths)]
    got = drain(core, work[:2])
    for each in work[2:]:  # one request alone, then the next while other prompts are sent again
        drain(core, [each], outputs=got)
    before = core.stats()
    resent = drain(core, [again(each) for each in work])
    after = core.stats()
    assert [resent[f"{each.request_id} again"] for each in work] == [got[each.request_id] for each in work]
    most = sum((length - core.scheduler.kv.margin) // PAGE_TOKENS * PAGE_TOKENS for length in lengths)
    assert after.num_hit_tokens - before.num_hit_tokens == most, "each hit goes as far as a hit can"
    assert after.num_replayed_tokens == 0
    assert core.scheduler.kv.counts.num_state_hits == len(work)
    if budget == PAGE_TOKENS:
        assert got == fresh(work)
    core.close()


@pytest.mark.parametrize("keep", [0, 20])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_state_that_was_asked_for_is_found_whatever_the_chunks(is_async, keep):
    rng = rng_of(9, 1)
    prompt = tokens(rng, 3 * PAGE_TOKENS + 8)
    for at in (1, 2):
        core = build(is_async=is_async, budget=PAGE_TOKENS, keep=keep)
        asked = (at * PAGE_TOKENS,)
        drain(core, [request("first", prompt, params(rng, 1), checkpoints=asked)])
        other = request("other", prompt[: asked[0]] + tokens(rng, 30), params(rng, 1))
        got = drain(core, [other])
        counts = core.scheduler.kv.counts
        assert (counts.num_state_hits, counts.num_replay_hits, counts.num_hit_tokens) == (1, 0, asked[0])
        assert got == fresh([other], keep=keep)
        core.close()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("num_tokens", [54, 65])
def test_progress_is_saved_at_the_last_page_whatever_the_chunks(is_async, num_tokens):
    """An earlier error: with steps in flight, every other page was not saved, including the last page."""
    rng = rng_of(9, 2)
    core = build(is_async=is_async, budget=PAGE_TOKENS)
    first = request("first", tokens(rng, num_tokens), params(rng, 1))
    drain(core, [first])
    drain(core, [request("next", first.prompt_token_ids + tokens(rng, 30), params(rng, 1))])
    counts = core.scheduler.kv.counts
    assert (counts.num_state_hits, counts.num_hit_tokens) == (1, num_tokens // PAGE_TOKENS * PAGE_TOKENS)
    core.close()


def test_prompts_too_short_for_a_hit_and_engines_without_a_cache_are_not_cut():
    for given, num_tokens in (({}, PAGE_TOKENS + 13), ({"cache": False}, 90), ({"spare_slots": 0, "max_num_seqs": 2}, 90)):
        core = build(is_async=False, **given)
        drain(core, [request("a", tokens(rng_of(9, 3), num_tokens), SamplingParams(max_tokens=1))])
        assert core.stats().num_steps <= 2
        core.close()
