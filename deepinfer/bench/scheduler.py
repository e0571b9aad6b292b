"""Scheduler benchmark: the time to plan and commit steps of many long requests, to look up a long prompt in the cache, and to
choose how many drafts a step verifies.

No model runs: the results of steps are invented, so the benchmark measures only bookkeeping on one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tabulate import tabulate

from deepinfer.config import named_config
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import KVManager
from deepinfer.kv.prefix import PageChain
from deepinfer.request import Request, SamplingParams
from deepinfer.scheduler.budget import CostCurve, DraftBudget
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.step import Sampled, StepPlan, StepResult

_EOS, _WORD = 1, 7
_TARGET_US = 300
"""Most host time that adaptive lengths may add to a step of 256 requests, in µs."""
_HEADERS = ["work", "median µs", "min … max"]


def run_scheduler(*, num_requests: int = 256, num_context: int = 131072, num_prompt: int = 100_000, num_steps: int = 200) -> str:
    """Measure and render a table.

    Args:
        num_requests: requests that decode together.
        num_context: tokens of each request when the measurement begins.
        num_prompt: tokens of the prompt that is looked up.
        num_steps: timed steps of each kind.
    """
    lines = []
    for is_async, num_drafts, kinds in ((False, 0, (False,)), (True, 0, (False,)), (True, 5, (False, True))):
        decoding = [
            _decode(num_requests, num_context, num_steps, is_async=is_async, num_drafts=num_drafts, is_adaptive=is_adaptive)
            for is_adaptive in kinds
        ]
        # The kinds alternate, so that a slow phase of the machine affects both.
        steps = list(zip(*decoding, strict=True))
        for is_adaptive, taken in zip(kinds, zip(*steps, strict=True), strict=True):
            times, crossings = zip(*taken, strict=True)
            how = "one step ahead" if is_async else "step by step"
            drafts = f"{num_drafts} drafts, {'adaptive' if is_adaptive else 'all verified'}" if num_drafts else "no drafts"
            name = f"plan + commit, {num_requests} requests at {num_context}, {how}, {drafts}, {sum(crossings)} page ends"
            lines.append(_line(name, times))
        if len(kinds) > 1:
            more = [adaptive[0] - fixed[0] for fixed, adaptive in steps]
            lines.append(_line(f"the same, adaptive minus all verified, {num_requests} requests", more))
    lines += _lookup_lines(num_prompt)
    lines += _draft_lines(num_requests)
    return tabulate(lines, headers=_HEADERS)


def _line(name: str, seconds: Sequence[float]) -> list[str]:
    scale = 1e6
    return [name, f"{statistics.median(seconds) * scale:,.0f}", f"{min(seconds) * scale:,.0f} … {max(seconds) * scale:,.0f}"]


def _decode(
    num_requests: int, num_context: int, num_steps: int, *, is_async: bool, num_drafts: int, is_adaptive: bool
) -> Iterator[tuple[float, int]]:
    """Yield for each decode step its seconds and the number of requests that reached the end of a page."""
    layout = KVLayout(named_config("full"))
    num_tokens = num_context + (num_steps + 16) * (1 + num_drafts)
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
        num_drafts=num_drafts,
    )
    sizes = [1 << power for power in range(14)]
    curve = CostCurve(sizes, [10 + size / 50 for size in sizes])
    scheduler = Scheduler(kv, limits, DraftBudget(kv.num_slots + 1, num_drafts, curve) if is_adaptive else None)
    rng = np.random.default_rng(0)
    names = {f"bench-{number}" for number in range(num_requests)}
    for number in range(num_requests):  # prompts end at different offsets of a page, as real prompts do
        prompt = rng.integers(3, 250, num_context - int(rng.integers(layout.page_tokens))).tolist()
        params = SamplingParams(max_tokens=num_tokens, temperature=0, seq_seed=0)
        scheduler.add(Request(request_id=f"bench-{number}", prompt_token_ids=tuple(prompt), params=params))
    while True:  # prefill
        plan = scheduler.plan()
        assert plan is not None, "requests are unfinished"
        scheduler.commit(plan, _result(plan, num_drafts, rng))
        if len(plan.rounds) == num_requests:
            break

    ahead: StepPlan | None = scheduler.plan() if is_async else None
    for _ in range(num_steps):
        result = _result(ahead, num_drafts, rng) if ahead is not None else None
        start = time.perf_counter()
        plan = scheduler.plan()
        spent = time.perf_counter() - start
        assert plan is not None, "requests are unfinished"
        assert len(plan.rounds) == num_requests, "every request decodes in every step"
        done = ahead if ahead is not None else plan
        result = result or _result(plan, num_drafts, rng)
        start = time.perf_counter()
        outputs = scheduler.commit(done, result)
        spent += time.perf_counter() - start
        assert {output.request_id for output in outputs} == names, "every request got a token"
        ahead = plan if is_async else None
        yield spent, sum(output.num_output_tokens % layout.page_tokens == 0 for output in outputs)


def _result(plan: StepPlan, num_drafts: int, rng: np.random.Generator) -> StepResult:
    """An invented result: every round accepts half of its drafts."""
    names = [(chunk.request_id, 0) for chunk in plan.chunks if chunk.samples]
    names += [(each.request_id, each.max_drafts) for each in plan.rounds]
    count = 1 + num_drafts // 2
    return StepResult(
        sampled={
            name: Sampled(
                token_ids=(_WORD,) * (count if max_drafts else 1),
                logprobs=(-1.0,) * count,
                top_token_ids=((),) * count,
                top_logprobs=((),) * count,
                num_drafts=max_drafts,
                confidences=(0.5,) * max_drafts,
            )
            for name, max_drafts in names
        },
        confidences=rng.random((len(names), num_drafts), dtype=np.float32),
        duration_ms=20.0,
    )


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


def _draft_lines(num_requests: int, num_drafts: int = 5) -> list[list[str]]:
    """Measure the choice of the number of drafts, on a curve of 200 sizes where it is best to verify only some drafts."""
    rng = np.random.default_rng(0)
    max_rows = num_requests * (1 + num_drafts)
    sizes = sorted({1 + at * max_rows // 200 for at in range(200)} | {max_rows})
    curve = CostCurve(sizes, [10 + 0.02 * rows for rows in sizes])
    budget = DraftBudget(2 * num_requests, num_drafts, curve)
    slots = rng.permutation(2 * num_requests)[:num_requests]
    confidences = rng.beta(3, 1, (num_requests, num_drafts)).astype(np.float32)
    caps, is_ahead = np.full(num_requests, num_drafts), rng.random(num_requests) < 0.9
    budget.update(slots, confidences)
    what = f"{num_requests} requests of {num_drafts} drafts"
    parts = {
        f"update confidences, {what}": _times(lambda: budget.update(slots, confidences), 500),
        f"choose a total, {what}": _times(lambda: budget.choose(slots, caps, is_ahead, 0, max_rows), 500),
        "refine the curve with the time of a step": _times(lambda: curve.refine(max_rows // 2, 20.0), 500),
    }
    together = sum(statistics.median(each) for each in parts.values()) * 1e6
    return [
        *(_line(name, times) for name, times in parts.items()),
        [f"choose, update and refine together, {what}", f"{together:,.0f}", f"target: at most {_TARGET_US}"],
    ]


def _times(work: Callable[[], object], repeats: int = 50) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds
