"""Checks bounded replay on three levels.

1.  The tables of a step (rows, window keys, ring addresses) equal those of a plain host program with the rule "position i sees
    window keys max(s, i - window + 1) … i", in both modes, for lengths around every edge.
2.  On the model, ``mask`` and ``compact`` give the same log-probabilities for the kept rows, bit for bit.
3.  The distance of replay from the exact run is measured: without a hit and with a bounded decoder, after a hit with replayed
    state, and after a hit with restored state.  On this level a check fails only if it must be exact.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from deepinfer.bench.passes import Runner, chunks_of
from deepinfer.config import EngineArgs, ModelConfig
from deepinfer.engine.loader import load
from deepinfer.kv.layout import KVLayout
from deepinfer.model import attention, flash, inputs
from deepinfer.model.inputs import LayerInputs, ReplayMode, StepInputs
from deepinfer.model.progress import progress_bar
from deepinfer.step import Chunk, StepPlan

_MODES: tuple[ReplayMode, ...] = ("mask", "compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        level: 1, 2 or 3.
        check: what is compared.
        cases: number of comparisons.
        outcome: result of the comparison.
        is_failure: whether a required property does not hold.
    """

    level: int
    check: str
    cases: int
    outcome: str
    is_failure: bool = False


def edge_lengths(keep: int, window: int) -> list[int]:
    """Prompt lengths around every border, to find errors by one."""
    edges = {1, 2, window - 1, window, window + 1, keep - 1, keep, keep + 1, keep + window, 2 * keep + 1}
    return sorted(length for length in edges if length > 0)


# ---------------------------------------------------------------------------------------------------------------------- level 1


def _visible(rows: LayerInputs, window: int, ring_tokens: int) -> list[tuple[int, list[int]]]:
    """(position, positions of its window keys) of every row, read from the tables."""
    before = rows.window_before
    earlier = [span.start - back for span in rows.spans.chunks for back in range(window - 1, 0, -1)]
    assert [each % ring_tokens for each in earlier] == before.positions.flatten().tolist(), "earlier keys end before the step"
    own = rows.positions.tolist()
    seen = []
    for position, keys in zip(own, before.idx.tolist(), strict=True):
        seen.append((position, [(earlier + own)[key] for key in keys if key >= 0]))
    return seen


def _expected(start: int, end: int, floor: int, window: int, mode: ReplayMode) -> list[tuple[int, list[int]]]:
    """(position, positions of its window keys) of every row, by the rule."""
    first = start if mode == "mask" else max(start, floor)
    return [(i, list(range(max(floor, i - window + 1, 0), i + 1))) for i in range(first, end)]


def check_tables(config: ModelConfig, keep: int, device: torch.device) -> list[Finding]:
    """Run level 1; it needs no weights."""
    layout = KVLayout(config)
    window = config.sliding_window
    wrong: list[str] = []
    cases = 0
    rng = np.random.default_rng(0)
    for length in edge_lengths(keep, window):
        floor = max(0, length - keep)
        prompt = np.zeros(length, dtype=np.int32)
        cut_sets = [[], [floor], [floor - 1], [floor + 1], [length - 1], rng.integers(1, length + 1, 3).tolist()]
        for cuts in cut_sets:
            for chunk in chunks_of(prompt, cuts, floor, layout):
                for mode in _MODES:
                    made = StepInputs.build(
                        StepPlan(chunks=(chunk,)), config=config, layout=layout, device=device, replay_mode=mode
                    )
                    cases += 1
                    wrong += _table_problems(made, chunk, floor, window, mode, layout)
    outcome = "equal" if not wrong else f"{len(wrong)} differ, first: {wrong[0]}"
    return [Finding(level=1, check="rows, window keys, ring addresses", cases=cases, outcome=outcome, is_failure=bool(wrong))]


def _table_problems(made: StepInputs, chunk: Chunk, floor: int, window: int, mode: ReplayMode, layout: KVLayout) -> Iterator[str]:
    where = f"chunk [{chunk.start}, {chunk.end}) with floor {floor} in {mode} mode"
    if _visible(made.encoder, window, layout.ring_tokens) != _expected(chunk.start, chunk.end, 0, window, "mask"):
        yield f"encoder keys of {where}"
    expected = _expected(chunk.start, chunk.end, floor, window, mode)
    if _visible(made.decoder, window, layout.ring_tokens) != expected:
        yield f"decoder keys of {where}"
    kept = [position - chunk.start for position, _ in expected]
    if made.decoder_rows is not None and made.decoder_rows.tolist() != kept:
        yield f"decoder rows of {where}"
    ring = [position % layout.ring_tokens for position, _ in expected][-layout.ring_tokens :]
    if made.decoder.window.positions.tolist() != ring:
        yield f"ring addresses of {where}"


# ---------------------------------------------------------------------------------------------------------------------- level 2


def check_modes(runner: Runner, text: npt.NDArray[np.int32], keep: int, bar: tqdm[Any]) -> list[Finding]:
    """Run level 2."""
    window = runner.network.config.sliding_window
    differing, cases = [], 0
    for length in edge_lengths(keep, window):
        prompt, floor = text[:length], max(0, length - keep)
        for cuts in ([], [length - 1], [floor - 3, floor + 3]):
            results = [runner.run(runner.cache(), chunks_of(prompt, cuts, floor, runner.layout), mode) for mode in _MODES]
            cases += 1
            bar.update()
            if not torch.equal(*results):
                differing.append(f"{length} tokens cut at {cuts}")
    outcome = "bit-equal" if not differing else f"{len(differing)} differ, first: {differing[0]}"
    return [Finding(level=2, check="mask = compact, kept rows", cases=cases, outcome=outcome, is_failure=bool(differing))]


# ---------------------------------------------------------------------------------------------------------------------- level 3


def measure_replay(runner: Runner, text: npt.NDArray[np.int32], keep: int, bar: tqdm[Any]) -> list[Finding]:
    """Run level 3."""
    config, page = runner.network.config, runner.layout.page_tokens
    window = config.sliding_window
    rows = 64
    length = min(runner.max_tokens, len(text) // 2)
    samples = [text[:length], text[len(text) - length :]]
    hit = (length - max(keep, runner.layout.ring_tokens)) // page * page
    exact_depth = config.exact_replay_tokens(is_decoder_bounded=False)
    kinds: list[tuple[str, int | None, int, bool]] = [  # name, replay, decoder floor, must be exact
        ("state hit", None, 0, True),
        (f"replay hit, {window} tokens", window, 0, False),
        (f"replay hit, {window} tokens, decoder keeps {keep}", window, length - keep, False),
    ]
    if exact_depth < hit:
        kinds.append((f"replay hit, {exact_depth} tokens (hit-invariant)", exact_depth, 0, True))
    references = []
    for prompt in samples:
        exact = [dataclasses.replace(each, decoder_floor=0) for each in chunks_of(prompt, [], length - rows, runner.layout)]
        references.append(runner.run(runner.cache(), exact))
    bar.update(len(samples))
    findings = []
    cold = []
    for prompt in samples:
        chunks = [dataclasses.replace(each, num_logits=rows) for each in chunks_of(prompt, [], length - keep, runner.layout)]
        cold.append(runner.run(runner.cache(), chunks))
        bar.update()
    findings.append(_compare(f"cold, decoder keeps {keep}", cold, references, must_be_equal=False))
    for name, replay, floor, must_be_equal in kinds:
        got = []
        for prompt in samples:
            got.append(runner.after_hit(prompt, hit, floor, replay, rows))
            bar.update()
        findings.append(_compare(name, got, references, must_be_equal=must_be_equal))
    return findings


def _compare(name: str, got: Sequence[Tensor], expected: Sequence[Tensor], *, must_be_equal: bool) -> Finding:
    ours, exact = torch.cat(list(got)).double(), torch.cat(list(expected)).double()
    is_equal = torch.equal(ours, exact)
    agree = (ours.argmax(-1) == exact.argmax(-1)).double().mean().item()
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    outcome = (
        "bit-equal"
        if is_equal
        else (f"top-1 agreement {agree:.1%}, KL mean {divergence.mean().item():.2e}, max {divergence.max().item():.2e}")
    )
    return Finding(
        level=3, check=f"{name} against exact", cases=ours.shape[0], outcome=outcome, is_failure=must_be_equal and not is_equal
    )


# ---------------------------------------------------------------------------------------------------------------------- report


@torch.inference_mode()
def _all_levels(runner: Runner, text: npt.NDArray[np.int32], keep: int) -> list[Finding]:
    findings = check_tables(runner.network.config, keep, runner.network.device)
    with progress_bar(None, unit=" runs", desc="checking replay") as bar:
        findings += check_modes(runner, text, keep, bar)
        findings += measure_replay(runner, text, keep, bar)
    return findings


def check_replay(model: str, *, device: str = "auto", keep: int = 140, max_tokens: int = 2048) -> tuple[str, bool]:
    """Run all levels.

    Args:
        model: as in :class:`EngineArgs`.
        device: as in :class:`EngineArgs`.
        keep: tokens that the decoder half keeps.
        max_tokens: length of the texts of level 3.

    Returns:
        A table, and whether all required properties hold.
    """
    loaded = load(EngineArgs(model=model, device=device, max_num_seqs=1, max_model_len=max_tokens + 1, chunked_prefill=True))
    network = loaded.core.executor.worker.model
    source = "".join(inspect.getsource(module) for module in (flash, attention, inputs))
    text = np.asarray(loaded.tokenizer.encode(source), dtype=np.int32)
    runner = Runner(network, max_tokens)
    findings = loaded.core.executor.call(lambda: _all_levels(runner, text, keep))
    loaded.core.close()
    lines = [[each.level, each.check, each.cases, each.outcome, "FAIL" if each.is_failure else "ok"] for each in findings]
    is_ok = not any(each.is_failure for each in findings)
    return tabulate(lines, headers=["level", "check", "cases", "outcome", ""]), is_ok
