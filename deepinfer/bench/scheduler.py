"""Scheduler benchmark: the time to plan and commit steps of many long requests, and to look a long prompt up in the cache.

Nothing runs on a device: results are made up, so what is timed is the bookkeeping of one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from tabulate import tabulate

from deepinfer.config import named_config
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import KVManager
from deepinfer.kv.prefix import PageChain
from deepinfer.request import Request, SamplingParams
from deepinfer.scheduler.scheduler import Limits, Scheduler
from deepinfer.step import Sampled, StepPlan, StepResult

_EOS, _WORD = 1, 7
_HEADERS = ["work", "median µs", "min … max"]


def run_scheduler(*, num_requests: int = 256, num_context: int = 131072, num_prompt: int = 100_000, num_steps: int = 200) -> str:
    """Measure and render a table.

    Args:
        num_requests: decoding at once.
        num_context: tokens that each of them has when measuring begins.
        num_prompt: tokens of the prompt that is looked up.
        num_steps: timed steps of each kind.
    """
    rows = []
    for is_async in (False, True):
        times, num_crossings = _decode_times(num_requests, num_context, num_steps, is_async=is_async)
        name = f"plan + commit, {num_requests} requests at {num_context}, {'one step ahead' if is_async else 'step by step'}"
        rows.append(_line(f"{name}, {num_crossings} page ends", times))
    rows += _lookup_lines(num_prompt)
    return tabulate(rows, headers=_HEADERS)


def _line(name: str, seconds: Sequence[float]) -> list[str]:
    scale = 1e6
    return [name, f"{statistics.median(seconds) * scale:,.0f}", f"{min(seconds) * scale:,.0f} … {max(seconds) * scale:,.0f}"]


def _decode_times(num_requests: int, num_context: int, num_steps: int, *, is_async: bool) -> tuple[list[float], int]:
    """Seconds of each steady step, and how many requests reached the end of a page meanwhile."""
    layout = KVLayout(named_config("full"))
    num_tokens = num_context + num_steps + 16
    kv = KVManager(
        layout,
        num_pages=num_requests * layout.pages_for(num_tokens) + 1,
        num_slots=int(1.2 * num_requests) + 1,
    )
    limits = Limits(
        max_model_len=num_tokens + 1,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * num_context,
        eos_token_id=_EOS,
        image_token_id=named_config("full").image_token_id,
    )
    scheduler = Scheduler(kv, limits)
    rng = np.random.default_rng(0)
    for number in range(num_requests):  # prompts end at different places in a page, as they do in practice
        prompt = rng.integers(3, 1000, num_context - int(rng.integers(layout.page_tokens))).tolist()
        params = SamplingParams(max_tokens=num_tokens, temperature=0, seq_seed=0)
        scheduler.add(Request(request_id=f"bench-{number}", prompt_token_ids=tuple(prompt), params=params))
    while True:  # prefill
        plan = scheduler.plan()
        assert plan is not None, "requests are unfinished"
        scheduler.commit(plan, _result(plan))
        if len(plan.chunks) == num_requests and all(len(chunk.token_ids) == 1 for chunk in plan.chunks):
            break

    seconds, num_crossings = [], 0
    ahead: StepPlan | None = scheduler.plan() if is_async else None
    for _ in range(num_steps):
        result = _result(ahead) if ahead is not None else None
        start = time.perf_counter()
        plan = scheduler.plan()
        spent = time.perf_counter() - start
        assert plan is not None, "requests are unfinished"
        assert len(plan.chunks) == num_requests, "every request decodes in every step"
        done = ahead if ahead is not None else plan
        result = result or _result(plan)
        start = time.perf_counter()
        outputs = scheduler.commit(done, result)
        seconds.append(spent + time.perf_counter() - start)
        assert len(outputs) == num_requests, "every request got a token"
        num_crossings += sum(chunk.end % layout.page_tokens == 0 for chunk in plan.chunks)
        ahead = plan if is_async else None
    return seconds, num_crossings


def _result(plan: StepPlan) -> StepResult:
    sampled = Sampled(token_id=_WORD, logprob=-1.0)
    return StepResult(sampled={chunk.request_id: sampled for chunk in plan.chunks if chunk.num_logits})


def _lookup_lines(num_prompt: int) -> list[list[str]]:
    layout = KVLayout(named_config("full"))
    kv = KVManager(layout, num_pages=layout.pages_for(num_prompt) + 2, num_slots=3)
    token_ids = np.random.default_rng(0).integers(3, 1000, num_prompt).astype(np.int32)

    def keys() -> PageChain:
        chain = PageChain(layout.page_tokens)
        chain.extend(token_ids)
        return chain

    chain = keys()
    holding = kv.admit(chain, kv.plan_hit(chain, num_prompt), num_prompt)
    assert holding is not None, "an empty pool has room"
    kv.publish(holding, chain, num_prompt)
    kv.release(holding)
    hit = kv.plan_hit(keys(), num_prompt)
    expected = (num_prompt - kv.margin) // layout.page_tokens * layout.page_tokens
    assert hit.num_tokens == expected, f"a hit of {hit.num_tokens} tokens was found, {expected} are stored"
    return [
        _line(f"keys of a prompt of {num_prompt}", _times(keys)),
        _line(f"hit of {hit.num_tokens} tokens, keys known", _times(lambda: kv.plan_hit(chain, num_prompt))),
        _line("hit of the same, keys included", _times(lambda: kv.plan_hit(keys(), num_prompt))),
    ]


def _times(work: Callable[[], object], repeats: int = 50) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds
