"""What grammars cost and gain in an engine: times of constrained and unconstrained steps, and tokens of a round on long keys."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from deepinfer.config import EngineArgs
from deepinfer.engine.core import EngineCore
from deepinfer.engine.loader import load
from deepinfer.executor.grammars import Grammars
from deepinfer.executor.masks import StepMasks
from deepinfer.model.progress import progress_bar
from deepinfer.request import Request, SamplingParams
from deepinfer.tokenizer import Tokenizer

_WIDE = {"schema_type": "regex", "schema": r"[ -~\n]{1,100000}"}
"""A grammar that needs a mask for each token and leaves almost every choice."""
_KEYS = (
    "the_full_name_of_the_customer_as_it_stands_in_the_contract",
    "the_date_on_which_the_delivery_left_the_warehouse",
    "the_reason_of_the_complaint_in_the_words_of_the_customer",
)
_LONG_KEYS = {
    "schema_type": "json",
    "schema": {
        "type": "object",
        "properties": {key: {"enum": ["known", "unknown"]} for key in _KEYS},
        "required": list(_KEYS),
        "additionalProperties": False,
    },
}


class _WithoutForced(Grammars):
    """Matchers whose forced tokens are not used as drafts."""

    def _fill(self, owners: Sequence[Any]) -> StepMasks:
        masks = super()._fill(owners)
        return dataclasses.replace(masks, forced_ids=np.full_like(masks.forced_ids, -1))


def _requests(tokenizer: Tokenizer, count: int, max_tokens: int, so_args: dict[str, Any] | None) -> list[Request]:
    """Requests that differ in their seeds.  Only answers with long keys may end before ``max_tokens``."""
    prompt = (tokenizer.bos_id, *tokenizer.encode("Fill in the form.\n"))
    banned = [] if so_args is _LONG_KEYS else [tokenizer.eos_id]
    made = []
    for seed in range(count):
        temperature = 0.0 if so_args is _LONG_KEYS else 1.0
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seq_seed=seed, so_args=so_args, banned_token_ids=banned
        )
        made.append(Request(request_id=str(seed), prompt_token_ids=prompt, params=params))
    return made


def _step_ms(core: EngineCore, requests: Sequence[Request]) -> tuple[list[float], list[float]]:
    """Times of the turns in which all requests decode, and of their masks, in ms."""
    for each in requests:
        core.add(each)
    turns: list[float] = []
    masks: list[float] = []
    while not core.is_idle:
        if core.waits_for_grammars:
            core.wait_for_grammars(1.0)
        before = core.last_step
        start = time.perf_counter()
        core.step()
        took = 1e3 * (time.perf_counter() - start)
        step = core.last_step
        if step is not None and step is not before and len(step[0].rounds) == len(requests):
            turns.append(took)
            masks.append(step[1].mask_ms)
    return turns[2:-2], masks[2:-2]


def _tokens_a_round(core: EngineCore, requests: Sequence[Request]) -> float:
    before = core.stats()
    for each in requests:
        core.add(each)
    while not core.is_idle:
        if core.waits_for_grammars:
            core.wait_for_grammars(1.0)
        core.step()
    after = core.stats()
    return (after.num_output_tokens - before.num_output_tokens) / max(1, after.num_rounds - before.num_rounds)


def run_constrained(model: str, *, device: str = "auto", num_requests: int = 64, repeats: int = 3, num_drafts: int = 5) -> str:
    """Measure and render a table.

    Args:
        model, device: as in :class:`EngineArgs`.
        num_requests: requests that decode together.
        repeats: runs of each kind; the kinds alternate.
        num_drafts: drafts of a round, all verified.
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
    loaded = load(args)
    core, tokenizer = loaded.core, loaded.tokenizer
    free = _requests(tokenizer, num_requests, 40, None)
    wide = _requests(tokenizer, num_requests, 40, _WIDE)
    keys = _requests(tokenizer, min(8, num_requests), 200, _LONG_KEYS)
    plain_ms: list[float] = []
    grammar_ms: list[float] = []
    mask_ms: list[float] = []
    rounds: dict[bool, list[float]] = {True: [], False: []}
    with progress_bar(4 * repeats + 1, unit="run", desc="measuring") as bar:
        _step_ms(core, wide)
        bar.update()
        worker = core.executor.worker
        forcing, without = worker._grammars, _WithoutForced(loaded.config.vocab_size, num_drafts)
        for _ in range(repeats):
            plain_ms += _step_ms(core, free)[0]
            bar.update()
            turns, masks = _step_ms(core, wide)
            grammar_ms += turns
            mask_ms += masks
            bar.update()
            for is_forcing, grammars in ((True, forcing), (False, without)):
                worker._grammars = grammars
                rounds[is_forcing].append(_tokens_a_round(core, keys))
                bar.update()
            worker._grammars = forcing
    core.close()
    ratio = statistics.median(grammar_ms) / statistics.median(plain_ms)
    lines = [
        ("step without grammars, ms", statistics.median(plain_ms), _spread(plain_ms)),
        ("step with a grammar for each request, ms", statistics.median(grammar_ms), _spread(grammar_ms)),
        ("the same, ratio", ratio, ""),
        (f"masks of a step, {num_requests} x {num_drafts + 1}, ms", statistics.median(mask_ms), _spread(mask_ms)),
        ("tokens a round on long keys, forced drafts", statistics.median(rounds[True]), _spread(rounds[True])),
        ("tokens a round on long keys, drafter alone", statistics.median(rounds[False]), _spread(rounds[False])),
    ]
    table = tabulate(lines, headers=("what", "median", "median … 99 %"), floatfmt=".2f")
    device_name = torch.cuda.get_device_name(worker.model.device) if worker.model.device.type == "cuda" else "CPU"
    return f"{device_name}; torch {torch.__version__}; {num_requests} requests, {num_drafts} drafts\n\n{table}"


def _spread(values: Sequence[float]) -> str:
    median, last = np.percentile(values, [50, 99])
    return f"{median:.2f} … {last:.2f}"
