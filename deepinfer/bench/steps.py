"""Step benchmark: prefill of one prompt, decode of one request and of many requests, and the time by op family.

The floor of a step is a lower bound of its time.  It is the larger of (weight bytes that the step must read / memory bandwidth)
and (operations in its matrix products / matrix rate).  Bandwidth and rate are measured in the same run on the same device with
plain library calls.  The bytes are those of the bound backend's layout.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.bench.peer import measure_peer
from deepinfer.config import EngineArgs, ModelConfig
from deepinfer.engine.loader import load
from deepinfer.executor.clock import StepClock
from deepinfer.executor.team import Team
from deepinfer.executor.worker import Worker
from deepinfer.model.progress import progress_bar
from deepinfer.ops import arithmetic, cpu
from deepinfer.ops.op import bind, bound, registered
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, StepPlan

_PAGE_SLACK = 64
"""Tokens after the prompt that a measured request has room for."""
_MANY = 16
"""Requests that decode together."""
_BUSY_REPEATS = 3
"""Most timed steps of a scenario while busy loops run, because these steps take long."""
_SETTLE_S = 0.5
"""Time until the system has distributed the busy loops over the cores."""
_BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that computes until its parent ends."""


@dataclass(slots=True, kw_only=True)
class FamilyClock:
    """Exclusive time of each op family: the time of an operator does not include the operators that it calls."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_calls: int = 0
    _inner: list[float] = field(default_factory=list)

    def wrap(self, family: str, body: Callable[..., Any], synchronize: Callable[[], None]) -> Callable[..., Any]:
        """``body`` with a timer."""

        @functools.wraps(body)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._inner.append(0.0)
            self.num_calls += 1
            start = time.perf_counter()
            result = body(*args, **kwargs)
            synchronize()
            spent = time.perf_counter() - start
            self.seconds[family] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent
            return result

        return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Results of one scenario.

    Attributes:
        name: name of the scenario.
        tokens: tokens of a step.
        step_seconds: time of every timed step.
        floor_seconds: see the module's docstring.
        num_bytes: weight bytes that a step must read.
        num_operators, num_calls: calls of operators and of torch in one step.
        families: op family -> seconds of one step, from a separate step with timers; "other" is the time outside operators.
    """

    name: str
    tokens: int
    step_seconds: tuple[float, ...]
    floor_seconds: float
    num_bytes: float
    num_operators: int
    num_calls: int
    families: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of this device in this run.

    Attributes:
        bytes_per_second: rate of reading a large tensor.
        flop_per_second: rate of a large matrix product in the dtype of the weights; a multiply-add counts as 2.
    """

    bytes_per_second: float
    flop_per_second: float


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _best(run: Callable[[], object], synchronize: Callable[[], None], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the memory rate with a sum over 256 MiB, and the matrix rate with a product of 2048 x 2048 matrices."""
    synchronize = _synchronizer(device)
    big = torch.ones(64 << 20, dtype=torch.float32, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(2048, 2048, generator=generator, device=device).to(arithmetic.gemm_dtype(device))
    memory, matrix = _best(big.sum, synchronize), _best(lambda: left @ left, synchronize)
    return Ceilings(bytes_per_second=big.numel() * 4 / memory, flop_per_second=2 * 2048**3 / matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Numbers of weights in matrix products.

    Attributes:
        quantised: FP8 weights of all layers.
        wide: unquantised weights of all layers: hyper-connections, routers, compressors, head weights of indexers.
        expert: FP4 weights of one routed expert.
        head: weights of the LM head.
    """

    quantised: int
    wide: int
    expert: int
    head: int

    @classmethod
    def of(cls, config: ModelConfig) -> _Weights:
        d, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        expert = 3 * d * config.moe_intermediate_size
        attention = d * (config.q_lora_rank + width) + config.q_lora_rank * heads * width
        attention += config.o_lora_rank * heads * width + config.o_groups * config.o_lora_rank * d
        n = config.hc_mult
        wide = config.num_hidden_layers * (config.n_routed_experts * d + 2 * (2 * n + n * n) * n * d)
        quantised = config.num_hidden_layers * (attention + expert)
        quantised += len(config.engram_layer_ids) * config.engram_columns * config.engram_head_dim * (n + 1) * d
        quantised += len(config.index_source_layer_ids) * config.index_n_heads * config.index_head_dim * config.q_lora_rank
        wide += len(config.index_source_layer_ids) * config.index_n_heads * d
        for layer in config.kv_source_layer_ids:
            wide += config.ratio(layer) * width * d + config.index_head_dim * width
        return cls(quantised=quantised, wide=wide, expert=expert, head=config.vocab_size * d)


def _step_bytes(config: ModelConfig, tokens: int, device: torch.device) -> float:
    """Weight bytes that a step must read, in the layout of the bound backend."""
    weights = _Weights.of(config)
    picks = tokens * config.num_experts_per_tok * config.num_hidden_layers
    experts_hit = min(picks, config.n_routed_experts * config.num_hidden_layers)
    dense = arithmetic.gemm_dtype(device).itemsize
    fp8, fp4 = (1, 17 / 32) if bound() == cpu.NAME else (dense, dense)  # FP4 has a byte of scale for 32 weights
    return fp8 * weights.quantised + 4 * weights.wide + fp4 * experts_hit * weights.expert + 4 * weights.head


def _floor(config: ModelConfig, tokens: int, num_logits: int, num_bytes: float, ceilings: Ceilings) -> float:
    weights = _Weights.of(config)
    picks = tokens * config.num_experts_per_tok * config.num_hidden_layers
    flop = 2 * (tokens * (weights.quantised + weights.wide) + picks * weights.expert + num_logits * weights.head)
    return max(flop / ceilings.flop_per_second, num_bytes / ceilings.bytes_per_second)


class _Calls(TorchDispatchMode):
    """Counts calls of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Requests:
    """Plans for ``count`` requests of the same length, each with its own pages."""

    def __init__(self, worker: Worker, count: int, prompt_tokens: int, seed: int) -> None:
        self.worker = worker
        self.rng = np.random.default_rng(seed)
        self.count = count
        self.length = 0
        self.pages = worker.layout.pages_for(prompt_tokens + _PAGE_SLACK)
        for number in range(count):
            worker.add(f"bench-{number}", SamplingParams(temperature=0, seq_seed=0), prompt_tokens)

    def plan(self, tokens: int) -> StepPlan:
        first_text_id, last_text_id = 3, 259
        chunks = [
            Chunk(
                request_id=f"bench-{number}",
                slot=number + 1,
                start=self.length,
                token_ids=self.rng.integers(first_text_id, last_text_id, tokens).astype(np.int32),
                page_ids=np.arange(1 + number * self.pages, 1 + (number + 1) * self.pages, dtype=np.int32),
                num_logits=1,
            )
            for number in range(self.count)
        ]
        self.length += tokens
        return StepPlan(chunks=tuple(chunks))

    def close(self) -> None:
        for number in range(self.count):
            self.worker.remove(f"bench-{number}")


def _plans(worker: Worker, count: int, context: int, tokens: int, repeats: int) -> Iterator[StepPlan]:
    """Plans to time: prefill of ``tokens`` without context, or ``tokens`` after a context that is computed first."""
    if context == 0:
        for repeat in range(repeats):
            requests = _Requests(worker, count, tokens, repeat)
            yield requests.plan(tokens)
            requests.close()
        return
    requests = _Requests(worker, count, context, 0)
    worker.launch(requests.plan(context)).result()
    for _ in range(repeats):
        yield requests.plan(tokens)
    requests.close()


@contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def run_steps(
    model: str,
    *,
    device: str = "auto",
    prompt_tokens: int = 2048,
    repeats: int = 7,
    num_drafts: int = 0,
    num_busy: int = 0,
    with_peer: bool = False,
) -> str:
    """Measure and render a table.

    Args:
        model: as in :class:`EngineArgs`.
        device: as in :class:`EngineArgs`.
        prompt_tokens: length of the prefill, and of the context of the decode of one request.
        repeats: timed steps of each scenario.
        num_drafts: drafts of a round; 0 measures the network alone, which the floors and the shares describe.
        num_busy: other processes that compute during a second measurement; 0 leaves it out.
        with_peer: also measure transformers' model of the same widths.
    """
    args = EngineArgs(
        model=model,
        device=device,
        max_num_seqs=_MANY,
        max_model_len=prompt_tokens + 2 * _PAGE_SLACK,
        max_num_batched_tokens=max(prompt_tokens, _MANY * (1 + num_drafts)),
        num_drafts=num_drafts,
        adaptive_drafts=False,
    )
    core = load(args).core
    results, ceilings = core.executor.call(lambda: _measure(core.executor.worker, prompt_tokens, repeats))
    table = _render(results, ceilings, core.executor.worker.model.device)
    if with_peer:
        table += "\n\n" + core.executor.call(lambda: _compare(core.executor.worker, results, prompt_tokens, repeats))
    if num_busy:
        table += "\n\n" + core.executor.call(
            lambda: _measure_busy(core.executor.worker, results, prompt_tokens, min(repeats, _BUSY_REPEATS), num_busy)
        )
    if num_drafts:
        table += "\n\n" + core.executor.call(lambda: _measure_rounds(core.executor.worker, prompt_tokens, repeats, num_drafts))
    else:
        table += "\n\nno drafts, to measure the network alone; --num-drafts adds rounds of speculation"
    core.close()
    return table


def _scenarios(prompt_tokens: int) -> list[tuple[str, int, int, int]]:
    """(name, requests, context, tokens of each request in a step) of each scenario."""
    many_context = prompt_tokens // 4
    return [
        (f"prefill, 1 prompt of {prompt_tokens}", 1, 0, prompt_tokens),
        (f"decode, 1 request at {prompt_tokens}", 1, prompt_tokens, 1),
        (f"decode, {_MANY} requests at {many_context}", _MANY, many_context, 1),
    ]


def _measure(worker: Worker, prompt_tokens: int, repeats: int) -> tuple[list[Measurement], Ceilings]:
    where = worker.model.device
    synchronize = _synchronizer(where)
    ceilings = measure_ceilings(where)
    clock, backend = FamilyClock(), bound()
    for name, each in registered().items():
        each.implementations["timed"] = clock.wrap(name.split(".")[0], each.implementations[backend], synchronize)

    results, scenarios = [], _scenarios(prompt_tokens)
    with progress_bar(len(scenarios) * (repeats + 2), unit="step", desc="measuring") as bar:
        for name, count, context, tokens in scenarios:
            seconds = []
            for number, plan in enumerate(_plans(worker, count, context, tokens, repeats + 1)):
                start = time.perf_counter()
                worker.launch(plan).result()
                synchronize()
                if number:  # the first step warms up
                    seconds.append(time.perf_counter() - start)
                bar.update()
            bind("timed")
            for plan in _plans(worker, count, context, tokens, 1):
                clock.seconds.clear()
                clock.num_calls = 0
                start = time.perf_counter()
                worker.launch(plan).result()
                total = time.perf_counter() - start
            bind(backend)
            for plan in _plans(worker, count, context, tokens, 1):
                with _Calls() as calls:
                    worker.launch(plan).result()
            bar.update()
            num_bytes = _step_bytes(worker.config, count * tokens, where)
            families = {**clock.seconds, "other": total - sum(clock.seconds.values())}
            results.append(
                Measurement(
                    name=name,
                    tokens=count * tokens,
                    step_seconds=tuple(seconds),
                    floor_seconds=_floor(worker.config, count * tokens, count, num_bytes, ceilings),
                    num_bytes=num_bytes,
                    num_operators=clock.num_calls,
                    num_calls=calls.count,
                    families=families,
                )
            )
    return results, ceilings


def _measure_busy(worker: Worker, alone: list[Measurement], prompt_tokens: int, repeats: int, num_busy: int) -> str:
    """Measure steps while busy loops run, in turn with the threads of the engine and with one; ``alone`` is without loops."""
    synchronize, chosen = _synchronizer(worker.model.device), worker.team
    scenarios, lines = _scenarios(prompt_tokens), []
    num_steps = len(scenarios) * 2 * (repeats + 1)
    with _busy_loops(num_busy), progress_bar(num_steps, unit="step", desc="measuring, cores busy") as bar:
        for (name, count, context, tokens), quiet in zip(scenarios, alone, strict=True):
            seconds: dict[Team, list[float]] = {chosen: [], Team(1): []}
            for number, plan in enumerate(_plans(worker, count, context, tokens, 2 * (repeats + 1))):
                worker.team = list(seconds)[number % 2]
                start = time.perf_counter()
                worker.launch(plan).result()
                synchronize()
                if number >= 2:  # the first step of each kind warms up
                    seconds[worker.team].append(time.perf_counter() - start)
                bar.update()
            ours, single = (statistics.median(each) for each in seconds.values())
            rates = [count * tokens / each for each in (statistics.median(quiet.step_seconds), ours, single)]
            low, high = min(seconds[chosen]), max(seconds[chosen])
            spread = f"{low * 1e3:.0f} … {high * 1e3:.0f}"
            lines.append([name, *(f"{rate:,.1f}" for rate in rates), f"{single / ours:.2f}", spread])
    worker.team = chosen
    headers = ["tokens/s", "alone", "cores busy", "cores busy, one thread", "of one thread's rate", "step ms, cores busy"]
    return f"While {num_busy} busy loops run:\n\n{tabulate(lines, headers=headers)}"


def _measure_rounds(worker: Worker, context: int, repeats: int, num_drafts: int) -> str:
    """Measure steps of full rounds and their time of drafting, which is the difference of equal steps with and without drafts."""
    rows_per_request, lines = 1 + num_drafts, []
    clock = StepClock(worker, num_drafts=num_drafts, max_rows=_MANY * rows_per_request, context=context)
    with progress_bar(2 * (repeats + 1), unit="step", desc="measuring rounds") as bar:
        for count in (1, _MANY):
            whole, drafting = [], []
            for number in range(repeats + 1):
                measured = clock.measure_ms(count * rows_per_request), clock.measure_draft_ms(count)
                if number:  # the first step warms up
                    whole.append(measured[0])
                    drafting.append(measured[1])
                bar.update()
            median, draft = statistics.median(whole), statistics.median(drafting)
            lines.append(
                [
                    f"rounds of {num_drafts} drafts, {count} requests at {context}",
                    f"{median:.1f}",
                    f"{min(whole):.1f} … {max(whole):.1f}",
                    f"{draft:.1f}",
                    f"{draft / median:.1%}",
                ]
            )
    clock.close()
    title = f"With {num_drafts} drafts: every step above also makes drafts for each request that samples."
    headers = ["scenario", "step ms, median", "min … max", "drafting ms", "share of drafting"]
    return f"{title}\n\n{tabulate(lines, headers=headers)}"


def _compare(worker: Worker, results: list[Measurement], prompt_tokens: int, repeats: int) -> str:
    """Time the peer, and say how many times as fast the engine is."""
    found = measure_peer(worker.config, _scenarios(prompt_tokens), worker.model.device, repeats)
    lines = []
    for ours, theirs in zip(results, found, strict=True):
        rate = ours.tokens / statistics.median(ours.step_seconds)
        low, high = min(theirs.seconds), max(theirs.seconds)
        spread = f"{low * 1e3:.1f} … {high * 1e3:.1f}"
        lines.append(
            [ours.name, f"{rate:,.0f}", f"{theirs.tokens_per_second:,.0f}", spread, f"{rate / theirs.tokens_per_second:.2f}"]
        )
    headers = ["tokens/s", "this engine", "transformers", "its step, ms", "times as fast"]
    return f"transformers' DeepSeek-V4 of the same widths, bf16, same threads:\n\n{tabulate(lines, headers=headers)}"


def _render(results: list[Measurement], ceilings: Ceilings, device: torch.device) -> str:
    names = sorted({family for each in results for family in each.families} - {"other"})
    lines = []
    for each in results:
        median = statistics.median(each.step_seconds)
        low, high = min(each.step_seconds), max(each.step_seconds)
        lines.append(
            [
                each.name,
                f"{each.tokens / median:,.0f}",
                f"{median * 1e3:.1f}",
                f"{low * 1e3:.1f} … {high * 1e3:.1f}",
                f"{each.num_operators:,}",
                f"{each.num_calls:,}",
                f"{each.num_bytes / 1e6:.1f}",
                f"{each.floor_seconds * 1e3:.2f}",
                f"{each.floor_seconds / median:.1%}",
            ]
        )
    shares = [
        [each.name, *(f"{each.families.get(name, 0) / sum(each.families.values()):.0%}" for name in [*names, "other"])]
        for each in results
    ]
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    headers = [
        "scenario",
        "tokens/s",
        "step ms, median",
        "min … max",
        "operators",
        "torch calls",
        "MB",
        "floor ms",
        "share of floor",
    ]
    return "\n".join(
        [
            f"{what}; backend {bound()}; torch {torch.__version__}; reading {ceilings.bytes_per_second / 1e9:.1f} GB/s, "
            f"{arithmetic.gemm_dtype(device)} products {ceilings.flop_per_second / 1e9:,.0f} GFLOP/s",
            "",
            tabulate(lines, headers=headers),
            "",
            tabulate(shares, headers=["time by op family", *names, "other"]),
        ]
    )
