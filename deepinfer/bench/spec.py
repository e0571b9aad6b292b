"""Speculation benchmark: acceptance, calibration, step times, and the gain of adaptive lengths for each load.

Rounds are recorded at full length on a running engine, or assumed.  Step times are always measured.  Every output marks numbers
from assumed rounds.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from deepinfer.bench.rounds import (
    BETA_CONCENTRATION,
    NUM_BINS,
    Calibration,
    Gain,
    Rounds,
    accepted_length,
    assumed_rounds,
    calibrations,
    collect,
    conditional_acceptance,
    estimate_gain,
    fit_temperatures,
    reliability,
    rounds_of_step,
    survival_by_position,
    verification_efficiency,
)
from deepinfer.config import DraftSampling, EngineArgs, ModelConfig, load_config
from deepinfer.engine.core import EngineCore
from deepinfer.engine.files import OutputFile
from deepinfer.engine.loader import load, model_directory, time_steps
from deepinfer.errors import ConfigError, RequestError
from deepinfer.model.progress import progress_bar
from deepinfer.ops.sampling import lay_out_rounds
from deepinfer.request import Request, SamplingParams
from deepinfer.scheduler.budget import CostCurve, survivals

CONCURRENCIES = (16, 32, 48, 60, 72, 96)
"""Requests of a step in the published table."""
_FIRST_TEXT_ID, _LAST_TEXT_ID = 3, 259
_PROMPT_TOKENS = 64
_NUM_ASSUMED = 4000
_MIN_ROUNDS = 100
"""With fewer full rounds, a share of them has an error above five percentage points."""

_MIN_DRAWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results.

    Attributes:
        where: device and software.
        source: description of the rounds' origin.
        is_assumed: whether the rounds were drawn at random instead of recorded.
        rounds: full rounds.
        num_recorded: number of rounds of any length.
        acceptance, survival: [num_drafts].
        calibration, calibration_fitted: by position, with recorded confidences and at ``temperatures``.
        temperatures: fitted temperatures.
        curve: step times.
        gains: by concurrency, with recorded confidences.
        layout_ms: by concurrency, the part of the step time that lays out rounds; empty if it was not measured.
    """

    where: str
    source: str
    is_assumed: bool
    rounds: Rounds
    num_recorded: int
    acceptance: tuple[float, ...]
    survival: tuple[float, ...]
    calibration: tuple[Calibration, ...]
    calibration_fitted: tuple[Calibration, ...]
    temperatures: tuple[float, ...]
    curve: CostCurve
    gains: tuple[Gain, ...]
    layout_ms: tuple[float, ...]


def record_rounds(core: EngineCore, requests: Sequence[Request], num_drafts: int) -> Rounds:
    """Run ``requests`` and return their rounds; all are added at the start, so that every slot keeps its request."""
    for each in requests:
        core.add(each)
    steps = []
    total = sum(each.params.max_tokens for each in requests)
    with progress_bar(total, unit="token", desc="recording") as bar:
        while not core.is_idle:
            outputs = core.step()
            bar.update(len(outputs))
            if outputs and core.last_step is not None:
                plan, result = core.last_step
                steps.append(rounds_of_step(plan, result, {each.request_id for each in outputs}, num_drafts))
    return collect(steps, num_drafts)


def _requests(count: int, num_tokens: int, vocab_size: int, temperature: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    last = min(_LAST_TEXT_ID, vocab_size)
    return [
        Request(
            request_id=f"spec-{number}",
            prompt_token_ids=tuple(rng.integers(_FIRST_TEXT_ID, last, _PROMPT_TOKENS).tolist()),
            params=SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seq_seed=seed + number),
        )
        for number in range(count)
    ]


def _layout_ms(device: torch.device, num_requests: int, num_drafts: int, repeats: int = 20) -> float:
    """Time to distribute a total over the requests and to lay out their rows, including the wait for the device."""
    confidences = torch.rand(num_requests, num_drafts, device=device)
    caps = torch.full((num_requests,), num_drafts, device=device)
    starts, token_ids = torch.zeros_like(caps), caps.new_zeros(num_requests, num_drafts + 1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        lay_out_rounds(confidences, num_requests, caps, starts, token_ids, 2 * num_requests).positions.cpu()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _full(rounds: Rounds) -> Rounds:
    """The full rounds; raises :class:`RequestError` if they are too few."""
    full = rounds.full()
    if len(full) < _MIN_ROUNDS:
        raise RequestError(
            f"{len(full)} rounds of full length are too few, at least {_MIN_ROUNDS} are needed; give more requests or tokens"
        )
    return full


def analyse(
    rounds: Rounds,
    curve: CostCurve,
    concurrencies: Sequence[int],
    *,
    where: str,
    source: str,
    is_assumed: bool,
    layout_ms: Sequence[float] = (),
    seed: int = 0,
) -> Report:
    """Compute the report.

    Args:
        rounds: rounds of any length; only full rounds are used.
        curve: step times.
        concurrencies: loads to estimate the gain for.
        where, source, is_assumed: as in :class:`Report`.
        layout_ms: as in :class:`Report`.
        seed: seed of the estimate's draws.

    Raises:
        RequestError: there are too few full rounds.
    """
    full = _full(rounds)
    temperatures = fit_temperatures(full)
    return Report(
        where=where,
        source=source,
        is_assumed=is_assumed,
        rounds=full,
        num_recorded=len(rounds),
        acceptance=tuple(conditional_acceptance(full).tolist()),
        survival=tuple(survival_by_position(full).tolist()),
        calibration=tuple(calibrations(full)),
        calibration_fitted=tuple(calibrations(full, temperatures)),
        temperatures=temperatures,
        curve=curve,
        gains=tuple(estimate_gain(full, curve, concurrency, seed=seed) for concurrency in concurrencies),
        layout_ms=tuple(layout_ms),
    )


def render(report: Report) -> str:
    """The report as tables; each table from assumed rounds is marked."""
    label = " (ASSUMED)" if report.is_assumed else ""
    full = report.rounds
    length = accepted_length(full)
    positions = [
        [at + 1, f"{a:.3f}", f"{s:.3f}"] for at, (a, s) in enumerate(zip(report.acceptance, report.survival, strict=True))
    ]
    calibration = [
        [
            raw.position,
            f"{raw.predicted:.3f}",
            f"{raw.happened:.3f}",
            f"{raw.error:.2%}",
            f"{raw.brier:.4f}",
            temperature,
            f"{fitted.error:.2%}",
            f"{fitted.brier:.4f}",
        ]
        for raw, fitted, temperature in zip(report.calibration, report.calibration_fitted, report.temperatures, strict=True)
    ]
    times = [[int(rows), f"{ms:.2f}"] for rows, ms in zip(report.curve.sizes, report.curve.ms, strict=True)]
    layout = [
        f"part of the step time that lays out the rounds of {each.concurrency} requests: {ms:.3f} ms"
        for each, ms in zip(report.gains, report.layout_ms, strict=False)
    ]
    gains = [
        [
            each.concurrency,
            f"{each.drafts:.2f}",
            f"{each.fixed_accepted_length:.2f} → {each.accepted_length:.2f}",
            f"{each.fixed_step_ms:.2f}",
            f"{each.step_ms:.2f}",
            f"{each.gain:+.1%}",
        ]
        for each in report.gains
    ]
    return "\n".join(
        [
            report.where,
            f"rounds{label}: {report.source}; {report.num_recorded} rounds, {len(full)} of full length",
            f"accepted length {length:.3f} with the bonus token, {length - 1:.3f} drafts; "
            f"verification efficiency {verification_efficiency(full):.1%}",
            "",
            f"Acceptance{label}",
            tabulate(positions, headers=["position", "conditional acceptance", "survival"], disable_numparse=True),
            "",
            f"Calibration of survival, {NUM_BINS} bins{label}",
            tabulate(
                calibration,
                headers=["position", "predicted", "happened", "ECE", "Brier", "temperature", "ECE fitted", "Brier fitted"],
                disable_numparse=True,
            ),
            f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE={','.join(f'{value:g}' for value in report.temperatures)}{label}",
            "",
            "Step time",
            tabulate(times, headers=["rows", "ms, median"], disable_numparse=True),
            *layout,
            "",
            f"Estimated gain of adaptive lengths over always {full.num_drafts} drafts{label}",
            tabulate(
                gains,
                headers=["requests", "drafts a request", "accepted length", "step ms, fixed", "adaptive", "gain"],
                disable_numparse=True,
            ),
        ]
    )


def as_json(report: Report) -> dict[str, Any]:
    """The report's numbers as plain values; ``is_assumed`` says whether the rounds were drawn."""
    length = accepted_length(report.rounds)
    return {
        "where": report.where,
        "is_assumed": report.is_assumed,
        "rounds": {"source": report.source, "num_recorded": report.num_recorded, "num_full": len(report.rounds)},
        "accepted_length_with_bonus": length,
        "accepted_drafts": length - 1,
        "verification_efficiency": verification_efficiency(report.rounds),
        "conditional_acceptance": [None if np.isnan(each) else each for each in report.acceptance],
        "survival": [None if np.isnan(each) else each for each in report.survival],
        "calibration": [
            {"position": raw.position, "predicted": raw.predicted, "happened": raw.happened, "ece": raw.error, "brier": raw.brier}
            | {"temperature": temperature, "ece_fitted": fitted.error, "brier_fitted": fitted.brier}
            for raw, fitted, temperature in zip(report.calibration, report.calibration_fitted, report.temperatures, strict=True)
        ],
        "step_times": report.curve.to_json(),
        "layout_ms": list(report.layout_ms),
        "gain": [
            {
                "requests": each.concurrency,
                "drafts_per_request": each.drafts,
                "accepted_length": each.accepted_length,
                "accepted_length_fixed": each.fixed_accepted_length,
                "step_ms": each.step_ms,
                "step_ms_fixed": each.fixed_step_ms,
                "gain": each.gain,
            }
            for each in report.gains
        ],
    }


def require_plotting(path: Path) -> None:
    """Raise :class:`ConfigError` if matplotlib is missing or has no format for ``path``; call this before the measurement."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; pip install 'deepinfer[plot]', or leave --plot out"
        ) from error
    known = sorted(FigureCanvasBase.filetypes)
    if _format(path) not in known:
        raise ConfigError(f"--plot {path} has no suffix of a known format; use one of {', '.join(known)}")


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def plot(report: Report, path: Path) -> None:
    """Draw acceptance, reliability, step times and gain into a file; the suffix of ``path`` chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    label = "ASSUMED rounds: " if report.is_assumed else ""
    figure.suptitle(f"{report.where}\n{label}{report.source}", fontsize=9)
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
    positions = range(1, len(report.acceptance) + 1)
    top_left.plot(positions, report.acceptance, marker="o", label="conditional acceptance")
    top_left.plot(positions, report.survival, marker="s", label="survival")
    top_left.set(xlabel="position", xticks=list(positions), ylim=(0, 1), title="acceptance")
    top_left.legend()
    top_right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for slot, predicted in enumerate(survivals(report.rounds.confidences).T):
        count, mean, happened = reliability(predicted, report.rounds.num_accepted > slot)
        top_right.plot(mean, np.where(count < _MIN_DRAWN, np.nan, happened), marker=".", label=f"first {slot + 1}")
    top_right.set(xlabel="predicted survival", ylabel="observed", title=f"reliability, bins of {_MIN_DRAWN} rounds or more")
    top_right.legend()
    bottom_left.plot(report.curve.sizes, report.curve.ms, marker=".")
    bottom_left.set(xlabel="rows of a step", ylabel="ms", ylim=(0, None), title="step time")
    loads = [each.concurrency for each in report.gains]
    bottom_right.plot(loads, [100 * each.gain for each in report.gains], marker="o")
    bottom_right.axhline(0, color="grey", linewidth=0.8)
    bottom_right.set(xlabel="requests", ylabel="%", title="estimated gain of adaptive lengths")
    file = io.BytesIO()
    figure.savefig(file, format=_format(path))
    OutputFile(path).replace(file.getvalue())


def _check_acceptance(acceptance: Sequence[float], config: ModelConfig) -> None:
    if len(acceptance) > config.dspark_block_size or not all(0 <= each <= 1 for each in acceptance) or not acceptance:
        raise RequestError(
            f"acceptance={','.join(f'{each:g}' for each in acceptance)} must be 1 to {config.dspark_block_size} probabilities, "
            "one for each draft of a round"
        )


def run_spec(
    model: str,
    *,
    device: str = "auto",
    num_requests: int = 32,
    num_tokens: int = 128,
    concurrencies: Sequence[int] = CONCURRENCIES,
    temperature: float = 1.0,
    seed: int = 0,
    draft_sampling: DraftSampling = "coupled",
    acceptance: Sequence[float] | None = None,
    context: int = 512,
    repeats: int = 5,
) -> Report:
    """Record or assume rounds, measure step times, and compute the report.

    Args:
        model, device, draft_sampling: as in :class:`EngineArgs`.
        num_requests: requests to record; all run together.
        num_tokens: tokens that each request generates.
        concurrencies: loads to estimate the gain for.
        temperature: sampling temperature of recorded requests.
        seed: seed of prompts, sampling and estimates.
        acceptance: conditional acceptance of each position of assumed rounds; None records rounds.
        context: context tokens of each request in timed steps.
        repeats: timed steps of each size.

    Raises:
        RequestError: ``acceptance`` is not usable, or there are too few full rounds.
    """
    config = load_config(model_directory(model))
    if acceptance is not None:
        _check_acceptance(acceptance, config)
    num_drafts = config.dspark_block_size if acceptance is None else len(acceptance)
    rows_per_request = 1 + num_drafts
    max_rows = max(concurrencies) * rows_per_request
    args = EngineArgs(
        model=model,
        device=device,
        num_drafts=num_drafts,
        adaptive_drafts=False,
        draft_sampling=draft_sampling,
        confidence_temperatures=(1.0,),
        max_num_seqs=max(num_requests, *concurrencies),
        max_model_len=max(context + 2 * rows_per_request, _PROMPT_TOKENS + num_tokens),
        max_num_batched_tokens=max(1024, max_rows, num_requests * rows_per_request),
        enable_prefix_cache=False,
    )
    core = load(args).core
    try:
        if acceptance is None:
            requests = _requests(num_requests, num_tokens, config.vocab_size, temperature, seed)
            rounds = record_rounds(core, requests, num_drafts)
            _full(rounds)  # checked now, because step times take minutes
            source = f"{num_requests} requests of {num_tokens} tokens at temperature {temperature:g}, drafts {draft_sampling}"
        else:
            rounds = assumed_rounds(acceptance, _NUM_ASSUMED, seed)
            text = ", ".join(f"{each:g}" for each in acceptance)
            source = f"acceptance {text}, confidences from Beta({BETA_CONCENTRATION:g} a, {BETA_CONCENTRATION:g} (1 − a))"
        worker = core.executor.worker
        where = worker.model.device
        curve = core.executor.call(
            lambda: time_steps(worker, num_drafts=num_drafts, max_rows=max_rows, context=context, num_runs=repeats, progress=True)
        )
        layout_ms = core.executor.call(lambda: [_layout_ms(where, each, num_drafts) for each in concurrencies])
    finally:
        core.close()
    what = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return analyse(
        rounds,
        curve,
        concurrencies,
        where=f"{model} on {what}; torch {torch.__version__}; {num_drafts} drafts a round, {context} tokens of context",
        source=source,
        is_assumed=acceptance is not None,
        layout_ms=layout_ms,
        seed=seed,
    )


def write_json(report: Report, path: Path) -> None:
    """Write :func:`as_json` into a file."""
    OutputFile(path).replace((json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n").encode())
