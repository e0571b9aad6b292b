"""Batching benchmark: requests that run together against requests that run one after another, on the same engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from tabulate import tabulate

from deepinfer.config import EngineArgs
from deepinfer.engine.core import EngineCore
from deepinfer.engine.loader import load
from deepinfer.model.progress import progress_bar
from deepinfer.request import Request, SamplingParams

_FIRST_TEXT_ID, _LAST_TEXT_ID = 3, 259


def _requests(count: int, seed: int, name: str) -> list[Request]:
    """Greedy requests with prompts of 16 to 256 tokens and outputs of 16 to 64 tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            request_id=f"{name}-{number}",
            prompt_token_ids=tuple(rng.integers(_FIRST_TEXT_ID, _LAST_TEXT_ID, int(rng.integers(16, 257))).tolist()),
            params=SamplingParams(temperature=0, max_tokens=int(rng.integers(16, 65)), ignore_eos=True, seq_seed=0),
        )
        for number in range(count)
    ]


def _run(core: EngineCore, requests: Sequence[Request]) -> tuple[float, int]:
    """Run ``requests``, all added at the start; returns seconds and output tokens."""
    start, tokens = time.perf_counter(), 0
    for each in requests:
        core.add(each)
    while not core.is_idle:
        tokens += len(core.step())
    return time.perf_counter() - start, tokens


def run_batching(model: str, *, device: str = "auto", num_requests: int = 64, repeats: int = 3, num_drafts: int = 0) -> str:
    """Measure and render a table.

    Args:
        model: as in :class:`EngineArgs`.
        device: as in :class:`EngineArgs`.
        num_requests: requests that run together.
        repeats: measurements of each kind.  The two kinds alternate, so that a slow phase of the machine affects both.
        num_drafts: drafts of a round, all verified; 0 measures batching alone.
    """
    args = EngineArgs(
        model=model,
        device=device,
        max_num_seqs=num_requests,
        max_model_len=512,
        enable_prefix_cache=False,
        num_drafts=num_drafts,
        adaptive_drafts=False,
    )
    core = load(args).core
    one_by_one = max(1, num_requests // 8)
    rates: dict[str, list[float]] = {"together": [], "one after another": []}
    with progress_bar(2 * repeats + 1, unit="run", desc="measuring") as bar:
        _run(core, _requests(2, 99, "warm"))
        bar.update()
        for repeat in range(repeats):
            seconds, tokens = _run(core, _requests(num_requests, repeat, f"together-{repeat}"))
            rates["together"].append(tokens / seconds)
            bar.update()
            seconds = tokens = 0
            for each in _requests(num_requests, repeat, f"alone-{repeat}")[:one_by_one]:
                more_seconds, more_tokens = _run(core, [each])
                seconds, tokens = seconds + more_seconds, tokens + more_tokens
            rates["one after another"].append(tokens / seconds)
            bar.update()
    core.close()
    gains = [both / alone for both, alone in zip(rates["together"], rates["one after another"], strict=True)]
    lines = [
        [f"{num_requests} requests {name}", f"{statistics.median(each):.1f}", f"{min(each):.1f} … {max(each):.1f}"]
        for name, each in rates.items()
    ]
    lines.append(["gain", f"{statistics.median(gains):.2f}", f"{min(gains):.2f} … {max(gains):.2f}"])
    where = core.executor.worker.model.device
    what = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"{what}; torch {torch.__version__}; one after another measured on {one_by_one} of the requests; "
    title += f"{num_drafts} drafts a round" if num_drafts else "no drafts, to measure batching alone"
    return f"{title}\n\n{tabulate(lines, headers=['', 'output tokens/s, median', 'min … max'])}"
