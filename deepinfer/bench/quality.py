"""Quality benchmark: what a model can do, and what each approximation costs it.

All texts are held out: documents that ship with the package, and tasks of fixed seeds on the side that training never has.
Tasks and continuations run on the engine, with drafts.  Likelihoods are passes over the network, with the true tokens as input.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from deepinfer.bench.approximations import (
    Comparison,
    Fit,
    Sample,
    compare_arithmetic,
    compare_choices,
    compare_replay,
)
from deepinfer.bench.passes import Runner
from deepinfer.bench.rounds import (
    Rounds,
    StepRounds,
    accepted_length,
    calibrations,
    collect,
    conditional_acceptance,
    rounds_of_step,
    survival_by_position,
)
from deepinfer.bench.tasks.numbers import sums
from deepinfer.bench.tasks.passages import needle_of
from deepinfer.bench.tasks.sides import HELD_OUT_TASKS, held_out_tasks, is_held_out
from deepinfer.bench.tasks.task import Task
from deepinfer.bench.texts import held_out_texts, whole
from deepinfer.config import EngineArgs, ModelConfig, load_config
from deepinfer.engine.chat import Mark, encode
from deepinfer.engine.core import EngineCore
from deepinfer.engine.files import OutputFile
from deepinfer.engine.loader import load, model_directory
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.flash import Flash
from deepinfer.model.progress import progress_bar
from deepinfer.ops import moe
from deepinfer.request import Request, SamplingParams
from deepinfer.tokenizer import Tokenizer

SEED = 1
"""Of the held-out tasks.  Training draws its tasks with another seed, and never those with a held-out key."""
KEEP = 140
"""Tokens of a prompt that the decoder half computes with bounded replay."""
MAX_TOKENS = 4_096
"""Longest prompt with its answer; the length that ``nano`` was trained with."""
_LONG_NEEDLE, _SMALL_SUM = "needle, 4k tokens", "sum, two digits"
_NEEDLE_CHARS = 16_000
_TEXT_TOKENS = 1_024
"""Documents whose bits per byte are measured are cut to this length, so that more of them can be measured."""
_KIND_TOKENS = 512
"""Tokens of each kind of text for each sample."""
_PROMPT_TOKENS, _CONTINUED_TOKENS = 96, 48
_SPARE_TOKENS = 32
"""An answer may be this much and a half longer than the known one."""
_SHORTEST_LONG, _LONGER = 512, 96
"""Tokens of the texts of the approximations: so many, and so many more for each sample."""
_PREFILL_TOKENS = 2_048
"""Prompt tokens of a step, beside a round of every request."""
_SAMPLED_TASKS, _SAMPLED_TEXTS = 4, 2
"""At temperature 1, only every fourth task and every second text runs: nothing is judged there."""
_CHAT_KINDS = ("dialogue",)
"""Kinds of tasks whose bits per byte are measured as well."""
_LONG_KINDS = ("prose", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Judged answers to the tasks of one kind.

    Attributes:
        count: number of tasks.
        shares: measure -> share of the answers that meet it, among the tasks that have the measure.
    """

    count: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is measured.

    Attributes:
        tasks: kind -> tasks to answer.
        texts: kind -> texts whose bits per byte are measured.
        beginnings: kind -> texts that are continued, to measure speculation.
        long: texts to measure the approximations on, at least 400 tokens each; without them the approximations are not measured.
    """

    tasks: Mapping[str, Sequence[Task]]
    texts: Mapping[str, Sequence[Sample]]
    beginnings: Mapping[str, Sequence[Sample]]
    long: Sequence[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results.

    Attributes:
        where: model, device and software.
        bits: kind of text -> fit.
        tasks: kind of task -> answers, greedy.
        rounds: temperature -> kind of request -> rounds of speculation; empty without a drafter.
        picks: [num_layers, num_experts] int64 picks of each expert on the texts of ``bits``.
        comparisons: what each approximation costs.
    """

    where: str
    bits: Mapping[str, Fit]
    tasks: Mapping[str, Answers]
    rounds: Mapping[float, Mapping[str, Rounds]]
    picks: Tensor
    comparisons: Sequence[Comparison]


# ------------------------------------------------------------------------------------------------------------------------- texts


def sample_of(tokenizer: Tokenizer, segments: Sequence[str]) -> Sample:
    """A document with the bytes of its tokens; special tokens count no bytes."""
    ids = whole(tokenizer, segments)
    special = {tokenizer.bos_id, tokenizer.eos_id, *(tokenizer.special(each) for each in segments if isinstance(each, Mark))}
    num_bytes = [0 if each in special else len(tokenizer.token_bytes(each)) for each in ids]
    return Sample(ids=np.array(ids, np.int32), num_bytes=np.array(num_bytes, np.int64))


def _until(samples: Iterable[Sample], num_tokens: int) -> list[Sample]:
    """The first samples that together have ``num_tokens``, or all."""
    taken: list[Sample] = []
    for each in samples:
        if sum(len(one.ids) for one in taken) >= num_tokens:
            break
        taken.append(each)
    return taken


def _batches(samples: Sequence[Sample], num_tokens: int) -> Iterator[list[Sample]]:
    """The samples in lists of at most ``num_tokens``."""
    batch: list[Sample] = []
    for each in samples:
        if batch and sum(len(one.ids) for one in [*batch, each]) > num_tokens:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def measure_bits(runner: Runner, texts: Mapping[str, Sequence[Sample]]) -> tuple[dict[str, Fit], Tensor]:
    """Fit of each kind of text, and the picks of each expert [num_layers, num_experts] int64 on all of them."""
    config = runner.network.config
    picks = torch.zeros(config.num_hidden_layers, config.n_routed_experts, dtype=torch.int64)
    layers = itertools.cycle(range(config.num_hidden_layers))

    def count(bound: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def route(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
            expert_ids, weights = bound(*arguments)
            picks[next(layers)] += torch.bincount(expert_ids.flatten(), minlength=config.n_routed_experts).cpu()
            return expert_ids, weights

        return route

    fits = {}
    batches = {kind: list(_batches(samples, runner.max_tokens)) for kind, samples in texts.items()}
    with progress_bar(sum(map(len, batches.values())), unit="pass", desc="bits per byte") as bar, moe.route.wrapped(count):
        for kind, parts in batches.items():
            found = []
            for part in parts:
                found += runner.log_likelihoods([each.ids for each in part])
                bar.update()
            fits[kind] = Fit.of(found, [each.num_bytes[1:] for part in parts for each in part])
    return fits, picks


# ------------------------------------------------------------------------------------------------------------------------- tasks


def choose_tasks(tokenizer: Tokenizer, each: int, max_tokens: int) -> dict[str, list[Task]]:
    """Held-out tasks by kind, ``each`` of every kind, and a quarter as many needles in texts of nearly ``max_tokens``.

    Tasks that do not fit into ``max_tokens`` are left out, as in training.
    """
    tasks = held_out_tasks(SEED, each)
    draws = (sums(random.Random(f"{SEED} two digits {number}")) for number in itertools.count())
    small = (task for task in draws if is_held_out(task.key, HELD_OUT_TASKS) and _has_two_digits(task))
    tasks[_SMALL_SUM] = list(itertools.islice(small, each))
    tasks[_LONG_NEEDLE] = [_long_needle(tokenizer, number, max_tokens) for number in range(each // 4)]
    return {
        kind: fitting
        for kind, several in tasks.items()
        if (fitting := [task for task in several if len(whole(tokenizer, task.segments())) <= max_tokens])
    }


def _has_two_digits(task: Task) -> bool:
    """Whether both numbers of a sum have two digits."""
    return all(len(number) == 2 for number in task.key.removeprefix("sum ").split("+"))


def _long_needle(tokenizer: Tokenizer, number: int, max_tokens: int) -> Task:
    """A needle in a text that is as long as ``max_tokens`` allow, less a few per cent."""
    chars = _NEEDLE_CHARS
    while True:
        task = needle_of(random.Random(f"{SEED} long {number}"), chars)
        num_tokens = len(whole(tokenizer, task.segments()))
        if num_tokens <= max_tokens:
            return task
        chars = int(0.97 * chars * max_tokens / num_tokens)


def judge(tasks: Sequence[Task], texts: Sequence[str]) -> Answers:
    """Judge what a model wrote after the prompts of some tasks, special tokens spelled out."""
    met: dict[str, list[bool]] = defaultdict(list)
    for task, text in zip(tasks, texts, strict=True):
        for measure, is_met in task.judge(text).items():
            met[measure].append(is_met)
    return Answers(count=len(tasks), shares={measure: sum(each) / len(each) for measure, each in sorted(met.items())})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A prompt, and how many tokens may follow."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int


def _of_task(tokenizer: Tokenizer, kind: str, task: Task, max_tokens: int) -> _Asked:
    prompt = encode(tokenizer, task.prompt())
    known = len(whole(tokenizer, task.segments())) - len(prompt)
    return _Asked(kind=kind, prompt=tuple(prompt), max_tokens=min(known * 3 // 2 + _SPARE_TOKENS, max_tokens - len(prompt)))


def _of_text(kind: str, text: Sample) -> _Asked:
    """The beginning of a document, at most half of it."""
    prompt = text.ids[: min(_PROMPT_TOKENS, max(1, len(text.ids) // 2))]
    return _Asked(kind=kind, prompt=tuple(prompt.tolist()), max_tokens=_CONTINUED_TOKENS)


def generate(
    core: EngineCore, asked: Sequence[_Asked], temperature: float, num_drafts: int
) -> tuple[list[list[int]], dict[str, Rounds]]:
    """Run all requests together.

    Args:
        core: idle; it runs as many requests at once as there are.
        num_drafts: drafts of a round; 0 without speculation.

    Returns:
        The new tokens of each request, and the rounds by kind; a kind without rounds is left out.
    """
    ids: dict[str, list[int]] = {}
    kinds: dict[str, set[str]] = defaultdict(set)
    for number, each in enumerate(asked):
        request_id = f"quality-{number}"
        ids[request_id] = []
        kinds[each.kind].add(request_id)
        params = SamplingParams(temperature=temperature, max_tokens=each.max_tokens, seq_seed=number)
        core.add(Request(request_id=request_id, prompt_token_ids=each.prompt, params=params))
    steps: dict[str, list[StepRounds]] = defaultdict(list)
    with progress_bar(len(asked), unit="request", desc=f"answers at temperature {temperature:g}") as bar:
        while not core.is_idle:
            outputs = core.step()
            emitted = {output.request_id for output in outputs}
            for output in outputs:
                if output.token_id is not None:
                    ids[output.request_id].append(output.token_id)
                bar.update(output.finished)
            if emitted and num_drafts and core.last_step is not None:
                for kind, own in kinds.items():
                    if own & emitted:
                        steps[kind].append(rounds_of_step(*core.last_step, own & emitted, num_drafts))
    rounds = {kind: collect(several, num_drafts) for kind, several in steps.items()}
    return list(ids.values()), {kind: each for kind, each in rounds.items() if len(each)}


# ------------------------------------------------------------------------------------------------------------------------ report


def _together(rounds: Mapping[str, Rounds]) -> Rounds:
    """The rounds of all kinds."""
    each = list(rounds.values())
    return Rounds(
        num_verified=np.concatenate([one.num_verified for one in each]),
        num_accepted=np.concatenate([one.num_accepted for one in each]),
        confidences=np.concatenate([one.confidences for one in each]),
        earlier=np.concatenate([one.earlier for one in each]),
    )


def _with_mix(rounds: Mapping[str, Rounds]) -> dict[str, Rounds]:
    return {**rounds, "all": _together(rounds)} if rounds else {}


def _errors(rounds: Mapping[str, Rounds]) -> list[float]:
    """Calibration error of the survival of each position, on the full rounds of all kinds."""
    full = _together(rounds).full() if rounds else None
    return [each.error for each in calibrations(full)] if full is not None and len(full) else []


def _load(picks: Tensor) -> tuple[list[float], list[int]]:
    """Of each layer: picks of the busiest expert divided by the mean, and experts that no token used."""
    counts = picks.double()
    return (counts.amax(1) / counts.mean(1)).tolist(), (picks == 0).sum(1).tolist()


def render(report: Report) -> str:
    """The report as tables."""
    table = partial(tabulate, disable_numparse=True)
    bits = [[kind, each.num_bytes, f"{each.bits_per_byte:.3f}", f"{each.perplexity:.2f}"] for kind, each in report.bits.items()]
    tasks = [
        [
            kind,
            each.count,
            *(f"{each.shares[name]:.0%}" if name in each.shares else "" for name in ("right", "valid", "form", "tool")),
        ]
        for kind, each in report.tasks.items()
    ]
    accepted = [
        [
            f"{temperature:g}",
            kind,
            len(each),
            f"{accepted_length(each):.2f}",
            *(_share(one) for one in conditional_acceptance(each)),
        ]
        for temperature, rounds in report.rounds.items()
        for kind, each in _with_mix(rounds).items()
    ]
    num_drafts = max((len(row) - 4 for row in accepted), default=0)
    errors = [[f"{temperature:g}", *map(_share, _errors(rounds))] for temperature, rounds in report.rounds.items()]
    loads, unused = _load(report.picks)
    experts = [[layer, f"{load:.2f}", count] for layer, (load, count) in enumerate(zip(loads, unused, strict=True))]
    comparisons = [
        [
            each.name,
            each.against,
            each.fit.num_tokens,
            f"{each.fit.perplexity:.3f}",
            f"{each.reference.perplexity:.3f}",
            f"{each.cost:+.4f}",
        ]
        for each in report.comparisons
    ]
    positions = [str(number + 1) for number in range(num_drafts)]
    return "\n".join(
        [
            report.where,
            "",
            "Held-out text",
            table(bits, headers=["kind", "bytes", "bits per byte", "perplexity"]),
            "",
            "Held-out tasks, greedy",
            table(tasks, headers=["kind", "tasks", "right", "valid", "form", "tool"]),
            "",
            "Speculation: accepted length with the bonus token, and conditional acceptance of each position",
            table(accepted, headers=["temperature", "kind", "rounds", "accepted length", *positions]),
            "",
            "Calibration error of the survival of each position",
            table(errors, headers=["temperature", *positions]),
            "",
            "Experts",
            table(experts, headers=["layer", "load, max / mean", "never used"]),
            "",
            "Approximations: cost in bits per byte",
            table(comparisons, headers=["measured", "against", "tokens", "perplexity", "of the other", "cost"]),
        ]
    )


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def as_json(report: Report) -> dict[str, Any]:
    """The report's numbers as plain values; a value that cannot be computed is None."""
    loads, unused = _load(report.picks)
    return {
        "bits_per_byte": {
            kind: {"bits_per_byte": each.bits_per_byte, "perplexity": each.perplexity, "bytes": each.num_bytes}
            for kind, each in report.bits.items()
        },
        "tasks": {kind: {"count": each.count, **each.shares} for kind, each in report.tasks.items()},
        "accepted_length": {
            f"{temperature:g}": {
                kind: {
                    "length": accepted_length(each),
                    "rounds": len(each),
                    "conditional_acceptance": _plain(conditional_acceptance(each).tolist()),
                    "survival": _plain(survival_by_position(each).tolist()),
                }
                for kind, each in _with_mix(rounds).items()
            }
            for temperature, rounds in report.rounds.items()
        },
        "calibration_error": {f"{temperature:g}": _errors(rounds) for temperature, rounds in report.rounds.items()},
        "expert_load": {"max_over_mean": loads, "never_used": unused},
        "approximations": [
            {
                "name": each.name,
                "against": each.against,
                "tokens": each.fit.num_tokens,
                "bits_per_byte": each.fit.bits_per_byte,
                "bits_per_byte_of_the_other": each.reference.bits_per_byte,
                "perplexity": each.fit.perplexity,
                "perplexity_of_the_other": each.reference.perplexity,
                "cost": each.cost,
            }
            for each in report.comparisons
        ],
    }


def _plain(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(each) else each for each in values]


def write_json(report: Report, path: Path) -> None:
    """Write :func:`as_json` into a file."""
    OutputFile(path).replace((json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n").encode())


# --------------------------------------------------------------------------------------------------------------------------- run


def _passes(
    network: Flash, exact: Callable[[], Flash], data: Data, max_tokens: int
) -> tuple[dict[str, Fit], Tensor, list[Comparison]]:
    """All passes over the network; runs in the executor's thread."""
    comparisons: list[Comparison] = []
    with torch.inference_mode():
        runner = Runner(network, max_tokens)
        bits, picks = measure_bits(runner, data.texts)
        if data.long:
            with progress_bar(None, unit=" passes", desc="approximations") as bar:
                comparisons += compare_choices(runner, data.long, bar)
                comparisons += compare_replay(runner, data.long, KEEP, bar)
                comparisons.append(compare_arithmetic(runner, Runner(exact(), max_tokens), data.long[:1], bar))
    return bits, picks, comparisons


def _max_tokens(config: ModelConfig) -> int:
    return min(MAX_TOKENS, config.max_position_embeddings)


def choose_data(tokenizer: Tokenizer, samples: int, max_tokens: int) -> Data:
    """Held-out tasks and texts: ``samples`` tasks of each kind; numbers of texts and their lengths grow with it."""
    documents: dict[str, list[Sample]] = defaultdict(list)
    for text in held_out_texts():
        documents[text.kind].append(sample_of(tokenizer, text.segments))
    tasks = choose_tasks(tokenizer, samples, max_tokens)
    chats = {kind: [sample_of(tokenizer, each.segments()) for each in tasks[kind]] for kind in _CHAT_KINDS if kind in tasks}
    length = min(max_tokens, _SHORTEST_LONG + _LONGER * samples)
    return Data(
        tasks=tasks,
        texts={
            kind: _until((each.cut(_TEXT_TOKENS) for each in several), _KIND_TOKENS * samples)
            for kind, several in (documents | chats).items()
        },
        beginnings={kind: several[: -(-samples // 2)] for kind, several in documents.items()},
        long=[
            each.cut(length)
            for kind in _LONG_KINDS
            for each in [one for one in documents[kind] if len(one.ids) >= length][: -(-samples // 8)]
        ],
    )


def measure(model: str, data: Data, *, device: str = "auto") -> Report:
    """Measure everything on ``data``; arguments and errors as for :func:`run_quality`."""
    directory = model_directory(model)
    config = load_config(directory)
    max_tokens = _max_tokens(config)
    num_drafts = config.dspark_block_size if config.num_nextn_predict_layers else 0
    tokenizer = Tokenizer.from_dir(directory)
    asked = [_of_task(tokenizer, kind, task, max_tokens) for kind, several in data.tasks.items() for task in several]
    continued = [_of_text(kind, each) for kind, several in data.beginnings.items() for each in several]
    num_requests = len(asked) + len(continued)
    args = EngineArgs(
        model=model,
        device=device,
        num_drafts=num_drafts,
        adaptive_drafts=False,
        max_num_seqs=num_requests,
        max_model_len=max_tokens,
        max_num_batched_tokens=_PREFILL_TOKENS + (1 + num_drafts) * num_requests,
        enable_prefix_cache=False,
    )
    core = load(args).core
    try:
        network = core.executor.worker.model
        where = network.device

        def exact() -> Flash:
            compression = torch.from_numpy(tokenizer.compression_map())
            return Flash(config, read_checkpoint(directory, config, progress=False), compression, device=where, exact=True)

        bits, picks, comparisons = core.executor.call(lambda: _passes(network, exact, data, max_tokens))
        rounds = {}
        written, rounds[0.0] = generate(core, [*asked, *continued], 0.0, num_drafts)
        _, rounds[1.0] = generate(core, [*asked[::_SAMPLED_TASKS], *continued[::_SAMPLED_TEXTS]], 1.0, num_drafts)
    finally:
        core.close()
    answers = iter(map(tokenizer.decode, written))
    judged = {kind: judge(several, list(itertools.islice(answers, len(several)))) for kind, several in data.tasks.items()}
    what = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return Report(
        where=f"{model} on {what}; torch {torch.__version__}; {len(asked)} tasks, {len(continued)} continued texts",
        bits=bits,
        tasks=judged,
        rounds=rounds if num_drafts else {},
        picks=picks,
        comparisons=comparisons,
    )


def run_quality(model: str, *, device: str = "auto", samples: int = 4) -> Report:
    """Measure everything.

    Args:
        model, device: as in :class:`EngineArgs`.
        samples: tasks of each kind; numbers of texts and their lengths grow with it.

    Raises:
        ConfigError: the model or the device is not usable.
    """
    directory = model_directory(model)
    max_tokens = _max_tokens(load_config(directory))
    return measure(model, choose_data(Tokenizer.from_dir(directory), samples, max_tokens), device=device)
