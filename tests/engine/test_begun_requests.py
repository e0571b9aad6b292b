"""A request that begins with output tokens goes on as the request that generated them: same tokens, same log-probabilities."""

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.request import Request, SamplingParams
from tests.engine.harness import build, conversation, drain, fresh, knowing, params, random_engine, request, rng_of, tokens


@pytest.mark.parametrize("block", range(4))
def test_begun_is_whole(block):
    num_begun = num_hit = 0
    for seed in range(5 * block, 5 * block + 5):
        rng = rng_of(seed, 31)
        work = conversation(
            rng,
            lambda number, count, rng=rng: params(
                rng, count, ignore_eos=True, repetition_penalty=float(rng.choice([1.0, 1.3])), presence_penalty=0.5 * (number % 2)
            ),
        )
        whole = fresh(work)
        begun = []
        for each in work:
            count = int(rng.integers(0, each.params.max_tokens))
            begun.append(replace(each, output_token_ids=tuple(token for token, _ in whole[each.request_id][:count])))
            num_begun += count > 0
        core = random_engine(
            rng, work, num_drafts=int(rng.integers(0, 6)), drafter=knowing(work, whole, lambda seed, position: position % 4)
        )
        # Another engine's pages may hold the same tokens: exact hits continue, all others are computed.
        drain(core, [replace(each, request_id=f"before {each.request_id}") for each in work[:2]])
        found = drain(core, begun, rng if rng.random() < 0.4 else None)
        for each in begun:
            assert found[each.request_id] == whole[each.request_id][len(each.output_token_ids) :], f"seed {seed}"
        num_hit += core.stats().num_replayed_tokens > 0
        core.close()
    assert num_begun > 5


def test_output_tokens_count_towards_the_limits_and_in_records():
    rng = rng_of(0, 32)
    prompt, output = tokens(rng, 20), tokens(rng, 3)
    core = build()
    core.add(request("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True, seq_seed=1), output_token_ids=output))
    records = []
    while not core.is_idle:
        records += core.step()
    assert [each.num_output_tokens for each in records] == [4, 5]
    assert [each.prompt_len for each in records] == [20, 20]
    assert records[-1].finished
    core.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"output_token_ids": (5,) * 4}, "begins with 4 output tokens, and max_tokens=4"),
        ({"output_token_ids": (5, 1, 6)}, "output token 1 is 1, which ends the request"),
        ({"output_token_ids": (5, 300)}, "300"),
        ({"output_token_ids": (5, 7), "params": SamplingParams(max_tokens=4, stop_token_ids=[7])}, "output token 1 is 7"),
    ],
)
def test_output_tokens_that_leave_nothing_to_do_are_refused(given, sentence):
    core = build()
    with pytest.raises(RequestError, match=sentence):
        core.add(Request(**{"request_id": "a", "prompt_token_ids": (3, 4), "params": SamplingParams(max_tokens=4)} | given))
    assert core.is_idle
    core.close()


@pytest.mark.parametrize(("given", "sentence"), [({"n": 2}, "n=2 answers"), ({"prompt_logprobs": True}, "prompt_logprobs=True")])
def test_what_output_tokens_cannot_be_combined_with_is_named(given, sentence):
    with pytest.raises(RequestError, match=sentence):
        Request(request_id="a", prompt_token_ids=(3, 4), params=SamplingParams(**given), output_token_ids=np.array([5], np.int32))
