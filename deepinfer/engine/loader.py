"""Builds an engine from a model's name or directory: checks settings and memory, reads weights, measures step times."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config import EngineArgs, ModelConfig, config_json, environment, folder, load_config, load_sampling_defaults
from deepinfer.engine.builtin import NANO_DIRECTORY, random_directory
from deepinfer.engine.core import EngineCore
from deepinfer.engine.ipc import Memory
from deepinfer.engine.step_times import CurveKey, load_curve, measure_curve, save_curve, step_sizes
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.executor.clock import StepClock
from deepinfer.executor.executor import Executor
from deepinfer.executor.graphs import Buckets
from deepinfer.executor.worker import Worker, workspace_bytes
from deepinfer.grammar.compiler import GrammarCompiler
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import KVManager
from deepinfer.model.checkpoint.random_weights import random_tensors
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.drafter import Drafter
from deepinfer.model.flash import Flash
from deepinfer.model.inventory import rank_memory
from deepinfer.model.vision import VisionTower
from deepinfer.ops import cpu
from deepinfer.ops.op import REFERENCE, bind
from deepinfer.scheduler.budget import CostCurve, DraftBudget
from deepinfer.scheduler.limits import Limits
from deepinfer.tokenizer import IMAGE, Tokenizer

_SPARE_PAGES = 64
"""Pages in addition to those that running requests can use; they keep prefixes of ended requests."""
_GIB = 1 << 30
_CPU_KV_BYTES = 2 << 30
"""Most memory for caches on a CPU, because other programs share the memory."""

_CLOCK_CONTEXT = 8192
"""Context tokens of the requests in measured steps, if requests may be that long."""
_CPU_CLOCK_ROWS, _CPU_CLOCK_RUNS = 64, 1
"""Most rows of a measured step on a CPU, and runs of each size, because the start must not take minutes.  Above 64 rows the time
grows in proportion to the rows.  The engine refines the curve while it runs."""
_CLOCK_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to serve.

    Attributes:
        memory: what the model and its caches take.
        sampling_defaults: sampling parameters that the checkpoint recommends.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    core: EngineCore
    memory: Memory
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def model_directory(model: str, *, progress: bool = True) -> Path:
    """The directory that ``model`` names; the first use of ``random`` creates its directory.

    Raises:
        ConfigError: ``model`` is neither a directory nor a known name.
    """
    if model == "nano":
        return NANO_DIRECTORY
    if model == "random":
        return random_directory(progress=progress)
    path = folder("model", model)
    if not os.path.isdir(path):
        raise ConfigError(
            f"model {model!r} is neither a directory nor a known name; give a checkpoint's directory, nano or random"
        )
    return path


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]{0,20}))?", name)
    if asked is None:
        raise ConfigError(f"device {name[:80]!r} is unknown; use auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(asked[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA device(s); "
            "use cpu, or a machine and a build of torch that have it"
        )
    return torch.device(name)


def _pick_backend(device: torch.device) -> str:
    """The kernels of this machine's processor where they can be compiled, else the reference."""
    return cpu.NAME if device.type == "cpu" and cpu.is_available() else REFERENCE


def _num_slots(args: EngineArgs) -> int:
    """State slots, including slot 0: one for each running request, and some that keep the state of ended requests."""
    return int(args.state_slots_ratio * args.max_num_seqs) + 1


def _free_bytes() -> float:
    """Bytes that this machine can give now without swapping; infinite if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return math.inf


def _check_memory(args: EngineArgs, config: ModelConfig) -> None:
    """Check that weights and state slots fit into memory, before any memory is taken.

    Raises:
        ConfigError: they do not fit; the message has the needed and the available bytes.
    """
    device = _pick_device(args.device)
    available = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _free_bytes()
    weights = rank_memory(config, 1).total
    if weights > available:
        raise ConfigError(
            f"the weights of model={args.model} have {weights / _GIB:.1f} GiB, {device} has {available / _GIB:.1f} GiB; "
            "use a machine with more memory or a smaller model"
        )
    budget = available * args.gpu_memory_utilization if device.type == "cuda" else _CPU_KV_BYTES
    layout, num_slots = _layout(args, config), _num_slots(args)
    if num_slots * layout.slot_bytes + layout.page_bytes > budget:
        raise ConfigError(
            f"{num_slots} state slots of {layout.slot_bytes} bytes (max_num_seqs={args.max_num_seqs}, "
            f"state_slots_ratio={args.state_slots_ratio:g}, max_backtracking_tokens={args.max_backtracking_tokens}) and a page "
            f"of {layout.page_bytes} bytes need more than the {budget / _GIB:.1f} GiB that caches may take; lower one of them"
        )


def _num_pages(args: EngineArgs, config: ModelConfig, layout: KVLayout, num_slots: int, device: torch.device) -> int:
    """Number of pages that the memory budget allows, including page 0.

    It is at most the number that ``max_num_seqs`` + 1 requests of full length can use, plus spare pages.

    The budget of a GPU is its share of memory minus the weights.  The state slots and the workspace for choosing tokens
    (:func:`workspace_bytes`) are subtracted from it.  The budget of a CPU is not a limit of the machine.  There the workspace
    gets at most half of the budget, and leaves pages for two requests of full length.

    Raises:
        ConfigError: the memory for pages is too small for the longest request.
    """
    workspace = workspace_bytes(
        config.vocab_size,
        max_num_seqs=args.max_num_seqs,
        num_drafts=args.num_drafts,
        num_slots=num_slots,
        draft_mode=args.draft_sampling,
    )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - args.gpu_memory_utilization))
    else:
        budget = _CPU_KV_BYTES
    slots, per_request = num_slots * layout.slot_bytes, layout.pages_for(args.max_runtime_len)
    if device.type == "cpu":
        first = slots + (1 + 2 * per_request) * layout.page_bytes
        workspace = max(0, min(workspace, budget // 2, budget - first))
    if budget < workspace + slots + layout.page_bytes:
        raise ConfigError(
            f"no memory is left for pages: the weights leave {budget / 2**30:.1f} GiB, choosing tokens takes "
            f"{workspace / 2**30:.1f} GiB and {num_slots} state slots take {slots / 2**30:.1f} GiB; lower "
            f"max_num_seqs={args.max_num_seqs} or num_drafts={args.num_drafts}"
            + (f", or raise gpu_memory_utilization={args.gpu_memory_utilization}" if device.type == "cuda" else "")
        )
    affordable = (budget - workspace - slots) // layout.page_bytes
    num_pages = min(affordable, 1 + (args.max_num_seqs + 1) * per_request + _SPARE_PAGES)
    args.check_pool(max(0, num_pages - 1))
    return num_pages


def _build_worker(
    args: EngineArgs, config: ModelConfig, compression: Tensor, model_dir: Path, *, num_threads: int, progress: bool
) -> Worker:
    """Read the weights and allocate the caches."""
    device = _pick_device(args.device)
    if args.load_format == "dummy":
        tensors = dict(random_tensors(config, args.seed))
    else:
        tensors = read_checkpoint(model_dir, config, progress=progress)
    model = Flash(config, tensors, compression, device=device)
    tower = VisionTower(config, tensors, device=device) if config.vision is not None else None
    drafter = None
    if args.num_drafts:
        temperatures = args.draft_temperatures + (1.0,) * (config.dspark_block_size - args.num_drafts)
        drafter = Drafter(model, tensors, temperatures=temperatures)
    layout = _layout(args, config)
    num_slots = _num_slots(args)
    return Worker(
        config,
        model,
        tower,
        layout,
        num_pages=_num_pages(args, config, layout, num_slots, device),
        num_slots=num_slots,
        max_model_len=args.max_model_len,
        drafter=drafter,
        num_drafts=args.num_drafts,
        draft_mode=args.draft_sampling,
        banned_token_ids=args.banned_token_ids,
        replay_mode="mask" if args.decoder_replay == "mask" else "compact",
        guard_syncs=args.sync_guard,
        buckets=Buckets(rows=args.graph_rows_interval, requests=args.graph_requests_interval)
        if _captures(args, device)
        else None,
        capture_forward=not args.enforce_eager,
        capture_draft=not args.draft_enforce_eager,
        num_threads=num_threads,
    )


def _captures(args: EngineArgs, device: torch.device) -> bool:
    """Whether the worker uses CUDA graphs."""
    return device.type == "cuda" and not (args.enforce_eager and args.draft_enforce_eager)


def _layout(args: EngineArgs, config: ModelConfig) -> KVLayout:
    """The layout of pages and slots, with room for the drafts that a round may reject."""
    return KVLayout(config, page_tokens=args.tokens_per_block, max_drafts=args.max_backtracking_tokens - 1)


def _compiler(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler:
    """The compiler of grammars; it prepares the vocabulary when the first grammar comes."""
    settings = environment()
    return GrammarCompiler(
        functools.cache(lambda: Vocabulary(tokenizer, vocab_size)),
        timeout_s=settings.xgrammar_timeout,
        num_threads=settings.so_builder_cpus,
        cache_bytes=0 if settings.xgrammar_disable_cache else settings.xgrammar_cache_limit_bytes,
        is_debug=settings.xgrammar_debug,
    )


def _build_core(args: EngineArgs, config: ModelConfig, executor: Executor, tokenizer: Tokenizer, *, progress: bool) -> EngineCore:
    worker = executor.worker
    keep = _decoder_keep(args)
    exact_replay = config.exact_replay_tokens(is_decoder_bounded=keep > 0)
    kv = KVManager(
        worker.layout,
        num_pages=worker.num_pages,
        num_slots=worker.num_slots,
        replay_tokens=exact_replay if args.hit_invariant else config.sliding_window,
        is_replay_exact=args.hit_invariant,
        replay_weight=config.num_encoder_layers / config.num_hidden_layers if keep else 1.0,
        margin=max(worker.layout.ring_tokens, keep),
        enable_prefix_cache=args.enable_prefix_cache,
    )
    limits = Limits(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        eos_token_id=config.eos_token_id,
        image_token_id=config.image_token_id,
        chunked_prefill=bool(args.chunked_prefill),
        stop_preempted_request=args.stop_preempted_request,
        max_sum_keys=args.max_sum_keys,
        decoder_keep_tokens=keep,
        save_states=args.enable_prefix_cache,
        num_drafts=args.num_drafts,
    )
    budget = None
    if args.num_drafts and args.adaptive_drafts:
        budget = DraftBudget(worker.num_slots, args.num_drafts, _step_times(args, config, executor, progress=progress))
    compiler = _compiler(tokenizer, config.vocab_size)
    return EngineCore(executor, kv, limits, budget=budget, is_async=args.asynchronous, compiler=compiler)


def time_steps(
    worker: Worker, *, num_drafts: int, max_rows: int, context: int, num_runs: int = 5, progress: bool = False
) -> CostCurve:
    """Measure the step times of a worker without requests; call this in the worker's thread.

    Args:
        num_drafts: drafts of a round; the worker has slots for rounds of ``max_rows`` rows.
        max_rows: rows of the largest step.
        context: context tokens of each request; at least 1, and at least 2 + 2 ``num_drafts`` less than the longest request.
        num_runs, progress: as for :func:`measure_curve`.

    Cost: ``num_runs`` + 1 times two steps of every size of :func:`step_sizes`.
    """
    sizes = step_sizes(max_rows)
    clock = StepClock(worker, num_drafts=num_drafts, max_rows=max_rows, context=context)
    try:
        # Graphs round rows up by less than an interval; the interpolation between sizes includes that padding.
        return measure_curve(clock.measure_ms, sizes, max_padded_rows=sizes[0], num_runs=num_runs, progress=progress)
    finally:
        clock.close()


def _step_times(args: EngineArgs, config: ModelConfig, executor: Executor, *, progress: bool) -> CostCurve:
    """Time of a step by its rows: read from disk, or measured now and written to disk."""
    worker = executor.worker
    device = worker.model.device
    is_cpu = device.type == "cpu"
    rows_per_request = 1 + args.num_drafts
    context = max(1, min(_CLOCK_CONTEXT, args.max_model_len - 2 * rows_per_request))
    max_rows = args.max_num_seqs * rows_per_request
    num_runs = _CLOCK_RUNS
    if is_cpu:
        max_rows, num_runs = min(max_rows, _CPU_CLOCK_ROWS), _CPU_CLOCK_RUNS
    key: CurveKey = {
        "model": json.dumps(config_json(config), sort_keys=True),
        "device": f"{torch.get_num_threads()} threads" if is_cpu else torch.cuda.get_device_name(device),
        "machine": platform.node(),
        "torch": torch.__version__,
        "backend": _pick_backend(device),
        "num_drafts": args.num_drafts,
        "draft_sampling": args.draft_sampling,
        "graphs": f"{_captures(args, device)} {args.enforce_eager} {args.draft_enforce_eager} "
        f"{args.graph_rows_interval} {args.graph_requests_interval}",
        "page_tokens": args.tokens_per_block,
        "context": context,
        "sizes": json.dumps(step_sizes(max_rows)),
    }
    curve = load_curve(args.decode_perf_cache_dir, args.decode_perf_cache_ttl_s, key)
    if curve is None:
        num_drafts = args.num_drafts
        curve = executor.call(
            lambda: time_steps(
                worker, num_drafts=num_drafts, max_rows=max_rows, context=context, num_runs=num_runs, progress=progress
            )
        )
        save_curve(args.decode_perf_cache_dir, key, curve)
    return curve


def _decoder_keep(args: EngineArgs) -> int:
    """Last tokens of a prompt that the decoder half computes; 0 for all tokens."""
    return args.decoder_replay_keep_tokens if args.decoder_replay != "off" else 0


def load(args: EngineArgs, *, progress: bool = True) -> Loaded:
    """Read a model and build its engine.

    Raises:
        ConfigError: settings or files are not usable, or the memory is too small.
    """
    model_dir = model_directory(args.model, progress=progress)
    config = load_config(model_dir)
    tokenizer = Tokenizer.from_dir(Path(args.tokenizer).expanduser() if args.tokenizer else model_dir)
    compression = tokenizer.compression_map()
    _check_fit(args, config, tokenizer, int(compression.max()) + 1)
    _check_memory(args, config)
    bind(_pick_backend(_pick_device(args.device)))
    classes, num_threads = (
        torch.from_numpy(compression),
        torch.get_num_threads(),
    )  # before others change it: the caller may have set it
    try:
        executor = Executor(lambda: _build_worker(args, config, classes, model_dir, num_threads=num_threads, progress=progress))
        core = _build_core(args, config, executor, tokenizer, progress=progress)
    except (MemoryError, RuntimeError) as error:
        if not _is_lack_of_memory(error):
            raise
        raise ConfigError(
            f"there is too little memory for model={args.model} and its caches; free some, raise the limit of this process "
            "(ulimit -v), or lower max_num_seqs and max_model_len"
        ) from error
    worker = executor.worker
    memory = Memory(
        device=str(worker.model.device),
        weight_bytes=rank_memory(config, 1).total,
        cache_bytes=worker.num_pages * worker.layout.page_bytes + worker.num_slots * worker.layout.slot_bytes,
        num_cache_tokens=(worker.num_pages - 1) * args.tokens_per_block,  # page 0 is for padding
    )
    defaults = load_sampling_defaults(model_dir)
    return Loaded(config=config, tokenizer=tokenizer, core=core, memory=memory, sampling_defaults=defaults)


def _is_lack_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether the system or the device gave no memory; torch's CPU allocator raises a plain RuntimeError in that case."""
    words = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "can't start new thread")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)


def _check_fit(args: EngineArgs, config: ModelConfig, tokenizer: Tokenizer, num_classes: int) -> None:
    """Check that settings, configuration and tokenizer fit together."""
    keep, window = _decoder_keep(args), _layout(args, config).ring_tokens
    if keep and keep < window:
        raise ConfigError(
            f"decoder_replay_keep_tokens={keep} is less than the {window} tokens of a window with room for drafts; "
            f"use at least {window}, 140 is usual"
        )
    if args.max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={args.max_model_len} exceeds the model's {config.max_position_embeddings} positions; lower it"
        )
    if args.num_drafts > config.dspark_block_size or (args.num_drafts and not config.num_nextn_predict_layers):
        limit = config.dspark_block_size if config.num_nextn_predict_layers else 0
        raise ConfigError(
            f"num_drafts={args.num_drafts} is more than the {limit} drafts that the model was trained to make at once; "
            f"use 0 to {limit} (DEEPINFER_USE_NEXTN_DECODE)"
        )
    for token_id in args.banned_token_ids:
        if token_id >= config.vocab_size:
            raise ConfigError(
                f"banned_token_ids has {token_id}, but the vocabulary ends at {config.vocab_size - 1}; "
                "leave it out (DEEPINFER_DECODE_TOKEN_BLACKLIST)"
            )
    if len({*args.banned_token_ids, config.image_token_id}) == config.vocab_size:
        raise ConfigError(
            f"banned_token_ids has all {config.vocab_size - 1} tokens that could be sampled, which leaves none; "
            "ban fewer (DEEPINFER_DECODE_TOKEN_BLACKLIST)"
        )
    if num_classes != config.engram_compressed_vocab_size or tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids in {num_classes} Engram classes, config.json says "
            f"{config.vocab_size} in {config.engram_compressed_vocab_size}; use the tokenizer.json that came with the checkpoint"
        )
    if tokenizer.special(IMAGE) != config.image_token_id:
        raise CheckpointError(
            f"the tokenizer's image placeholder has id {tokenizer.special(IMAGE)}, config.json says {config.image_token_id}; "
            "use the tokenizer.json that came with the checkpoint"
        )
