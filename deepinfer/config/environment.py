"""The ``DEEPINFER_*`` variables: one table.  The environment is read once, when a setting is first needed.

The table has every variable of the original engine, with name, default, meaning and use:

* ``used``: the variable is a setting; :class:`Environment` has it as a field.
* ``harmless``: the variable tunes something that this engine does not have, or that changes no result.  Any valid value is
  accepted and has no effect.
* ``refused``: a value other than the default needs something that this engine does not have; it is an error.

An unknown variable is probably a typing error; it gives a warning with the nearest known name.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from deepinfer.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "DEEPINFER_"
_SHOWN_LENGTH = 100
MOST: Final = (1 << 63) - 1
"""Limit of whole numbers without another limit; messages to a core process have integers of 64 bits."""
MAX_LENGTH: Final = 1 << 30
"""Limit of a sequence, in tokens; positions are int32."""
MAX_DRAFTS: Final = 1 << 10
MAX_BACKTRACKING: Final = 1 << 16
MAX_SLOTS_RATIO: Final = 1 << 20
MAX_BUILDERS: Final = 1 << 10
FP32_NORMAL: Final = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""Smallest and largest normal number of fp32; confidences are divided by their temperature in fp32."""
ReplayMode = Literal["off", "mask", "compact"]
Use = Literal["used", "harmless", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables that are used, by their names without prefix, in lower case.

    Attributes:
        cache_dir: folder for files made on first use; None for ``deepinfer`` in the user's cache.
        hf_model_dir: checkpoint directory that the examples serve; None for ``nano``.
        api_key: keys of ``deepinfer serve``; () lets everybody in.
        admin_token: key of the admin API of ``deepinfer serve``, or None.
        use_nextn_decode: largest number of drafts in a round; 0 turns speculation off.
        enable_mtp_varlen: choose by confidence how many drafts to verify.
        max_backtracking_tokens: tokens that a step may take back; None for one more than the largest number of drafts.
        dflash_confidence_head_temperature: scale of draft confidences, one for all positions or one for each.
        decode_perf_cache_dir: folder for measured step times; None stores none.
        decode_perf_cache_ttl_sec: seconds for which measured step times are valid.
        decode_token_blacklist: tokens that are never sampled.
        batch_invariant: results do not depend on the batch; in this engine they never do.
        prefill_max_sum_seqlen_k: largest number of keys, summed over the prompts of a step.
        num_state_slots_ratio: state slots per running request.
        zero_overhead_scheduling: plan a step while the step before runs.
        yoco_prefill_truncation_mode: which rows of a prompt the decoder half computes.
        yoco_prefill_keep_tokens: number of last tokens of a prompt that the decoder half computes.
        disable_sync_guard: the host may wait for the device between launch and commit.
        enforce_eager, dflash_enforce_eager: no captured graphs for the model, or for the drafter.
        cudagraph_batch_size_interval, dflash_cudagraph_batch_size_interval: spacing of captured sizes, in rows and in requests.
        xgrammar_timeout: seconds for compiling a grammar.
        xgrammar_disable_cache: compile every grammar again.
        xgrammar_cache_limit_bytes: size of the cache of compiled grammars.
        xgrammar_debug: log every grammar that is compiled.
        so_builder_cpus: threads that compile grammars.
        logging_interval_step: steps between two log lines.
        gc_interval_step: steps between two runs of the garbage collector, which does not run in between.
    """

    cache_dir: str | None
    hf_model_dir: str | None
    api_key: tuple[str, ...]
    admin_token: str | None
    use_nextn_decode: int
    enable_mtp_varlen: bool
    max_backtracking_tokens: int | None
    dflash_confidence_head_temperature: tuple[float, ...]
    decode_perf_cache_dir: str | None
    decode_perf_cache_ttl_sec: int
    decode_token_blacklist: tuple[int, ...]
    batch_invariant: bool
    prefill_max_sum_seqlen_k: int
    num_state_slots_ratio: float
    zero_overhead_scheduling: bool
    yoco_prefill_truncation_mode: ReplayMode
    yoco_prefill_keep_tokens: int
    disable_sync_guard: bool
    enforce_eager: bool
    dflash_enforce_eager: bool
    cudagraph_batch_size_interval: int
    dflash_cudagraph_batch_size_interval: int
    xgrammar_timeout: float
    xgrammar_disable_cache: bool
    xgrammar_cache_limit_bytes: int
    xgrammar_debug: bool
    so_builder_cpus: int
    logging_interval_step: int
    gc_interval_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable of the table.

    Attributes:
        name: name with its prefix.
        parse: text -> value; the text of its ``ValueError`` is the expected value.
        default: value if the variable is unset or empty.
        use: what the engine does with the variable.
        meaning: meaning in one line.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    use: Use
    meaning: str


def _text(text: str) -> str:
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ValueError("0 or 1")
    return text.lower() in ("1", "true")


def _whole(low: int, high: int = MOST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # not a number, or thousands of digits
            value = low - 1
        if value > high:
            raise ValueError(f"a whole number from {low} to {high}")
        if value < low:
            raise ValueError(f"a whole number from {low} on")
        return value

    return parse


def _real(low: float, high: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value > high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        if not low <= value < math.inf:
            raise ValueError(f"a number from {low:g} on")
        return value

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text.lower()

    return parse


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(_whole(0, (1 << 31) - 1)(each) for each in text.split(","))
    except ValueError:
        raise ValueError("token ids separated by commas") from None


def _temperatures(text: str) -> tuple[float, ...]:
    low, high = FP32_NORMAL
    try:
        return tuple(_real(low, high)(each) for each in text.split(","))
    except ValueError:
        raise ValueError(f"one positive number from {low:.2g} to {high:.2g}, or several separated by commas") from None


def _table(*rows: tuple[str, Callable[[str], Any], Any, Use, str]) -> dict[str, Variable]:
    return {
        PREFIX + name: Variable(name=PREFIX + name, parse=parse, default=default, use=use, meaning=meaning)
        for name, parse, default, use, meaning in rows
    }


VARIABLES = _table(
    # Folders and devices.
    ("CACHE_DIR", _text, None, "used", "folder for files made on first use"),
    ("HF_MODEL_DIR", _text, None, "used", "checkpoint directory that the examples serve"),
    ("API_KEY", _names, (), "used", "keys of the server, separated by commas"),
    ("ADMIN_TOKEN", _text, None, "used", "key of the server's admin API"),
    ("TEST_SLOW", _flag, False, "harmless", "run the slow tests too; read by the tests"),
    ("ACCELERATOR", _choice("nvidia", "ascend"), "nvidia", "refused", "family of devices"),
    ("JIT_CACHE_DIR", _text, None, "harmless", "root of kernel caches"),
    # Parallelism; this engine has one rank.
    ("NCCL_NUM_SMS", _whole(1), 32, "harmless", "thread blocks of collectives"),
    ("USERBUFFER_COMM_SMS", _whole(0), 0, "harmless", "multiprocessors of dispatch and combine; 0 chooses"),
    ("GLOO_TIMEOUT", _whole(1), 14400, "harmless", "seconds until a CPU process group gives up"),
    ("REARRANGE_P2P_GROUPS", _whole(1), 1, "harmless", "buckets of an expert weight exchange"),
    ("OVERRIDE_NUM_EXTRA_EXPERTS", _whole(0), 0, "refused", "smallest number of redundant experts"),
    ("EXPERT_COUNT_WINDOW_SIZE", _whole(1), 100, "harmless", "steps of expert load history"),
    ("EXPERT_REARRANGEMENT_STEP_INTERVAL", _whole(0), 0, "refused", "steps between rearrangements of experts; 0 is never"),
    ("REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", _flag, False, "harmless", "count prefill, rearrange at the next decode step"),
    ("MOE_LB_STAT_INTERVAL", _whole(1), 128, "harmless", "steps between flushes of expert load"),
    ("FORCE_IMBALANCE_RATIO", _real(0), 0.0, "refused", "simulate skewed routing"),
    ("FORCE_LOAD_BALANCE", _flag, False, "refused", "route at random"),
    ("SHOW_EPLB_DETAIL", _flag, False, "harmless", "a table at each rearrangement"),
    # Scheduling and memory.
    ("ZERO_OVERHEAD_SCHEDULING", _flag, True, "used", "plan a step while the step before runs"),
    ("PREFILL_MAX_SUM_SEQLEN_K", _whole(1), 2**30, "used", "largest number of keys, summed over the prompts of a step"),
    ("NUM_STATE_SLOTS_RATIO", _real(1, MAX_SLOTS_RATIO), 1.2, "used", "state slots per running request"),
    ("PREFILL_ATTEMPT_INTERVAL", _whole(1), 70, "harmless", "decode steps between votes of all ranks on a prefill"),
    ("PREFILL_ANY_ATTEMPT_INTERVAL", _whole(1), 100, "harmless", "decode steps until one rank's vote is enough"),
    ("INDEX_ATTN_MEMORY_LIMIT", _whole(1), 10 << 30, "harmless", "bytes of the indexer's workspace"),
    ("PREFILL_STORE_EXTRA_STATE", _flag, False, "refused", "longer rings on a prefill engine"),
    ("PREFILL_STORE_EXTRA_SIZE", _whole(1), 128, "harmless", "additional tokens of the longer rings"),
    (
        "YOCO_PREFILL_TRUNCATION_MODE",
        _choice("off", "mask", "compact"),
        "off",
        "used",
        "decoder half only for the end of a prompt",
    ),
    ("YOCO_PREFILL_KEEP_TOKENS", _whole(0, MAX_LENGTH), 0, "used", "tokens of a prompt's end for the decoder half"),
    ("BATCH_INVARIANT", _flag, False, "used", "results do not depend on the batch; here they never do"),
    ("DISABLE_SYNC_GUARD", _flag, False, "used", "the host may wait for the device between launch and commit"),
    ("ENFORCE_EAGER", _flag, False, "used", "no captured graphs"),
    ("DFLASH_ENFORCE_EAGER", _flag, False, "used", "no captured graphs for the drafter"),
    ("CUDAGRAPH_BATCH_SIZE_INTERVAL", _whole(1), 8, "used", "spacing of captured sizes, in rows"),
    ("DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL", _whole(1), 8, "used", "spacing of the drafter's captured sizes, in requests"),
    # Speculation.
    ("USE_NEXTN_DECODE", _whole(0, MAX_DRAFTS), 5, "used", "largest number of drafts in a round; 0 turns speculation off"),
    ("ENABLE_MTP_VARLEN", _flag, False, "used", "choose by confidence how many drafts to verify"),
    ("MAX_BACKTRACKING_TOKENS", _whole(1, MAX_BACKTRACKING), None, "used", "tokens that a step may take back"),
    ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", _temperatures, (1.0,), "used", "scale of draft confidences"),
    ("DECODE_PERF_CACHE_DIR", _text, None, "used", "folder for measured step times"),
    ("DECODE_PERF_CACHE_TTL_SEC", _whole(0), 3600, "used", "seconds for which measured step times are valid"),
    # The model and sampling.
    ("ENGRAM_PAD_TOKEN", _whole(0), 2, "refused", "token of n-grams before the first token"),
    ("ENGRAM_FORCE_GPU_STORAGE", _flag, False, "harmless", "n-gram tables in device memory"),
    ("SAMPLER_FORCE_TOPK", _whole(0), 0, "refused", "restrict sampling to the best tokens; 0 is off"),
    ("DECODE_TOKEN_BLACKLIST", _ids, (), "used", "tokens that are never sampled"),
    ("COMPUTE_SUM_SMALLER_PROBS", _flag, False, "refused", "return the mass of less likely tokens"),
    # Grammars.  The original's names have its library's name; the values hold for the library of this engine.
    ("XGRAMMAR_TIMEOUT", _real(0), 20.0, "used", "seconds for compiling a grammar"),
    ("XGRAMMAR_DISABLE_CACHE", _flag, False, "used", "compile every grammar again"),
    ("XGRAMMAR_CACHE_LIMIT_BYTES", _whole(0), 10 << 30, "used", "size of the grammar cache"),
    ("XGRAMMAR_DEBUG", _flag, False, "used", "log grammars"),
    ("SO_BUILDER_CPUS", _whole(1, MAX_BUILDERS), 4, "used", "threads that compile grammars"),
    # Images.
    ("USE_MULTIMODAL_POOL", _flag, True, "harmless", "pinned host memory for images"),
    ("MULTIMODAL_POOL_SIZE_GB", _real(0), 8.0, "harmless", "size of that memory"),
    ("MULTI_MODAL_BUFFER_SIZE", _whole(1), 512, "harmless", "queue of prepared images"),
    ("MULTI_MODAL_WORKER_TIMEOUT", _whole(1), 1800, "harmless", "seconds until preparing an image is given up"),
    # Operation.
    ("LOGGING_INTERVAL_STEP", _whole(1), 100, "used", "steps between two log lines"),
    ("GC_INTERVAL_STEP", _whole(1), 1000, "used", "steps between two runs of the garbage collector"),
    ("NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", _whole(1), 1000, "harmless", "steps between samples of the collectives' memory"),
    ("RINGBUFFER_WARNING_INTERVAL", _whole(1), 60, "harmless", "seconds between warnings of a full ring"),
    ("PROFILE_HTTP_ENABLE", _flag, False, "refused", "serve /profile"),
    ("PROFILE_HTTP_PORT_BASE", _whole(1, 65535), 6070, "harmless", "port of /profile"),
    ("TORCH_PROFILER_DIR", _text, None, "harmless", "folder for profiles"),
    ("PROFILE_TORCH_CUDA_MEMORY", _flag, False, "refused", "record device allocations"),
    ("ENABLE_MEMORY_TRACING", _flag, False, "refused", "trace memory"),
)
"""Every variable by its full name."""


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Check all ``DEEPINFER_*`` of ``variables`` and return those that are used.

    An empty value counts as unset.

    Raises:
        ConfigError: a value cannot be read or is not supported.  The message names the variable.
    """
    given = {name: text.strip() for name, text in variables.items() if name.startswith(PREFIX) and text.strip()}
    for name in sorted(given.keys() - VARIABLES.keys()):
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.75)
        logger.warning(
            "the environment variable %s is unknown and has no effect%s", name, f"; did you mean {near[0]}?" if near else ""
        )
    values = {name: _value(row, given.get(name)) for name, row in VARIABLES.items()}
    return Environment(
        **{name.removeprefix(PREFIX).lower(): values[name] for name, row in VARIABLES.items() if row.use == "used"}
    )


def _value(row: Variable, text: str | None) -> Any:  # noqa: ANN401  (the type depends on the variable)
    if text is None:
        return row.default
    try:
        value = row.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{row.name}={text[:_SHOWN_LENGTH]!r} is not usable; set it to {error}, or unset it ({row.meaning})"
        ) from None
    if row.use == "refused" and value != row.default:
        default = int(row.default) if isinstance(row.default, bool) else row.default
        usual = f"set it to {default} or unset it" if default not in (None, ()) else "unset it"
        raise ConfigError(f"{row.name}={text[:_SHOWN_LENGTH]} is not supported by this version ({row.meaning}); {usual}")
    return value


def has_otlp_endpoint() -> bool:
    """Whether a standard variable of OpenTelemetry names a collector for spans; its package reads the address itself."""
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("ENDPOINT", "TRACES_ENDPOINT"))


@functools.cache
def environment() -> Environment:
    """This process's variables, read at the first call."""
    return read_environment(os.environ)
