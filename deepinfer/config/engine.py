"""Settings of an engine, resolved once and then frozen."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from deepinfer.config.environment import (
    FP32_NORMAL,
    MAX_BACKTRACKING,
    MAX_DRAFTS,
    MAX_LENGTH,
    MAX_SLOTS_RATIO,
    MOST,
    ReplayMode,
    environment,
)
from deepinfer.errors import ConfigError

LoadFormat = Literal["auto", "dummy"]
EngineType = Literal["NORMAL", "PROMPT", "COMPLETION"]
DraftSampling = Literal["coupled", "sampled", "argmax"]
"""How drafts are chosen.

``argmax``: a draft is the best token; it is verified without draft logits.  ``sampled``: a draft is drawn with its own noise; it
is verified with the draft logits.  ``coupled``: a draft is drawn with the same noise as the emitted token; it is verified by
comparing the two tokens.
"""

_MAX_MODEL_LEN = 4096
_SHOWN_LENGTH = 100
_TOKENS_PER_BLOCK = 128
_POOL_SHARE = 0.8
"""The longest request must fit into this share of the pages.  Otherwise it runs alone, and any other request preempts it."""

_MIN_SECONDS = 0.01
"""Smallest time limit of a step: the watchdog looks at most a hundred times a second."""
_WHOLE: dict[str, tuple[int, int, str]] = {
    "max_model_len": (1, MAX_LENGTH, "a positive whole number"),
    "max_num_seqs": (1, 1 << 20, "a positive whole number"),
    "tokens_per_block": (1, 1 << 14, "a positive whole number"),
    "expert_parallel_size": (1, 1 << 20, "a positive whole number"),
    "context_parallel_size": (1, 1 << 20, "a positive whole number"),
    "graph_rows_interval": (1, MOST, "a positive whole number"),
    "graph_requests_interval": (1, MOST, "a positive whole number"),
    "max_num_batched_tokens": (0, MOST, "a positive whole number, or 0 to have it chosen"),
    "data_parallel_size": (0, 1 << 20, "a positive whole number, or 0 to have it chosen"),
    "engram_parallel_size": (0, 1 << 20, "a positive whole number, or 0 to have it chosen"),
    "max_backtracking_tokens": (0, MAX_BACKTRACKING, "a positive whole number, or 0 to have it chosen"),
    "num_drafts": (0, MAX_DRAFTS, "0 (no speculation) or a positive whole number"),
    "engine_rank": (0, 1 << 20, "0 or a positive whole number"),
    "engine_group_rank": (0, 1 << 20, "0 or a positive whole number"),
    "lookahead_tokens": (0, MAX_LENGTH, "0 or a positive whole number"),
    "decoder_replay_keep_tokens": (0, MAX_LENGTH, "0 or a positive whole number"),
    "ignore_len": (1, MOST, "a positive whole number"),
    "max_sum_keys": (1, MOST, "a positive whole number"),
    "logging_interval_steps": (1, MOST, "a positive whole number"),
    "gc_interval_steps": (1, MOST, "a positive whole number"),
    "decode_perf_cache_ttl_s": (0, MOST, "0 or a positive number of seconds"),
}
"""Setting -> (least, greatest), both allowed, and the expected value in words."""

_NUMBER: dict[str, tuple[float, float, str]] = {
    "state_slots_ratio": (1, MAX_SLOTS_RATIO, "1 or more; 1.2 is usual"),
    "step_warn_s": (_MIN_SECONDS, float("inf"), "a number of seconds"),
    "step_limit_s": (_MIN_SECONDS, float("inf"), "a number of seconds"),
}

_ONLY: dict[str, tuple[object, str]] = {
    "expert_parallel_size": (1, "one rank holds all experts"),
    "context_parallel_size": (1, "one rank computes a whole prompt"),
    "data_parallel_size": (1, "an engine has one rank"),
    "engram_parallel_size": (1, "one rank holds the n-gram tables"),
    "engine_rank": (0, "an engine has one rank"),
    "engine_group_rank": (0, "an engine has one rank"),
    "engine_type": ("NORMAL", "one engine does prefill and decode"),
    "lookahead_tokens": (0, "no tokens are reserved ahead"),
    "revision": (None, "models are local directories"),
    "tokenizer_revision": (None, "models are local directories"),
}
"""Setting of the original engine -> its one supported value here, and the reason."""


def folder(what: str, text: str) -> Path:
    """The path ``text``, with ``~`` for a home folder; ``what`` is the setting or variable that gave it.

    Raises:
        ConfigError: ``text`` is not a path.
    """
    try:
        os.fsencode(text)
        path = Path(text).expanduser()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}={_shown(text)} has characters that no path has; name a folder") from None
    except RuntimeError:
        raise ConfigError(f"{what}={_shown(text)} begins at a home folder, which is unknown; set HOME") from None
    if "\0" in text:
        raise ConfigError(f"{what}={_shown(text)} has a zero byte, which no path has; name a folder")
    return path


def cache_dir() -> Path:
    """Where files made on first use are kept: ``DEEPINFER_CACHE_DIR``, else ``deepinfer`` in the user's cache.

    Raises:
        ConfigError: the user has no home folder.  The message names the variable to set.
    """
    chosen = environment().cache_dir
    if chosen:
        return folder("DEEPINFER_CACHE_DIR", chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return folder("XDG_CACHE_HOME", base) / "deepinfer"
    try:
        return folder("the user's cache", "~/.cache") / "deepinfer"
    except ConfigError:
        raise ConfigError(
            "files made on first use have no place: the user has no home folder; set DEEPINFER_CACHE_DIR to a folder"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Settings of an engine; after construction every automatic value is replaced by the value in use.

    Up to ``offline_inference``, names and defaults are those of the original engine.  The default of a setting with an
    environment variable is the value of the variable.

    Attributes:
        model: checkpoint directory, ``nano`` or ``random``.
        served_model_name: name of the model in a server's answers.
        tokenizer: directory of ``tokenizer.json``; None for the model's own.
        trust_remote_code: accepted; code of a checkpoint is never run.
        load_format: ``auto`` reads the checkpoint, ``dummy`` makes random weights of its shape.
        seed: seed of dummy weights, any whole number; only the low 64 bits of a longer one are used.
        max_model_len: prompt plus output tokens of one request; None is 4096.
        data_parallel_size, context_parallel_size, expert_parallel_size, engram_parallel_size: numbers of ranks; 0 for the
            smallest possible number.
        engine_rank, engine_group_rank: rank of this engine.
        gpu_memory_utilization: share of a GPU's memory that weights and caches may use.
        max_num_batched_tokens: largest number of tokens in a step; 0 or None is enough for the longest prompt, at least 4096.
        max_num_seqs: largest number of running requests.
        disable_log_stats: write no log line with rates.
        stop_preempted_request: end a preempted request instead of computing it again.
        engine_type: whether the engine does prefill, decode or both.
        chunked_prefill: split prompts that are longer than a step into chunks.  False requires that every prompt fits into one
            step; None is True if ``max_num_batched_tokens`` is smaller than ``max_model_len``.  Chunks change no result.
        ignore_len: a prompt with at least so many tokens is dropped.
        tokens_per_block: tokens of a KV page; -1 is 128.
        lookahead_tokens: tokens reserved in advance.
        offline_inference: accepted; nothing depends on it.
        revision, tokenizer_revision: revision of a model on a hub.
        device: ``auto`` (a CUDA device if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        enable_prefix_cache: keep pages of finished requests for later requests with the same prefix.
        hit_invariant: after a cache hit, replay enough tokens for the same result as without cache, bit for bit.
        decoder_replay: which rows of a prompt the decoder half computes: all (``off``), or the last
            ``decoder_replay_keep_tokens``; the others are masked (``mask``) or removed (``compact``).
        decoder_replay_keep_tokens: number of these rows; 140 is usual.
        num_drafts: largest number of drafts in a round; 0 turns speculation off.
        adaptive_drafts: choose from confidences and step times how many drafts to verify, instead of all.
        draft_sampling: how drafts are drawn and verified.  ``coupled``: with the noise of the emitted token.  Then the emitted
            token does not depend on the drafts, so a seed gives the same text under any load.  ``sampled``: by exact rejection
            sampling, which accepts more drafts.  A seed then gives the same text only without ``adaptive_drafts``.  ``argmax``:
            the best token is drafted, and verified as a draft of probability 1.  The distribution of the text is the same in
            all three modes.
        confidence_temperatures: scale of draft confidences, one for all positions or one for each; above 1 is less certain.
        max_backtracking_tokens: tokens that a step may take back, at least ``num_drafts`` + 1; 0 for this minimum.
        decode_perf_cache_dir: folder for measured step times; None measures at each start and writes nothing.
        decode_perf_cache_ttl_s: seconds for which measured step times are valid.
        banned_token_ids: tokens that no request samples.
        batch_invariant: accepted; a request's results never depend on the batch.
        asynchronous: plan a step while the step before runs.
        state_slots_ratio: state slots per running request.
        max_sum_keys: largest number of keys, summed over the prompts of a step.
        enforce_eager, draft_enforce_eager: launch every operator of the model, and of the drafter, instead of replaying captured
            CUDA graphs.  The results have the same bits.
        graph_rows_interval, graph_requests_interval: spacing of the buckets of captured graphs.  Rows and requests of a decode
            step are rounded up to multiples of these, and to powers of two below them.
        sync_guard: raise an error if the host waits for the device between launch and commit.
        logging_interval_steps: steps between two log lines.
        gc_interval_steps: steps between two runs of the garbage collector in a core process.
        step_warn_s: if a step takes more seconds, its stacks are logged; at least 0.01.
        step_limit_s: if a step takes more seconds, the core process ends; at least 0.01; infinite for never.
    """

    model: str
    served_model_name: str = "deepinfer-model"
    tokenizer: str | None = None
    trust_remote_code: bool = False
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int = _MAX_MODEL_LEN
    data_parallel_size: int = 0
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    engram_parallel_size: int = 0
    engine_rank: int = 0
    engine_group_rank: int = 0
    gpu_memory_utilization: float = 0.90
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 256
    disable_log_stats: bool = False
    stop_preempted_request: bool = True
    engine_type: EngineType = "NORMAL"
    chunked_prefill: bool | None = None
    ignore_len: int = 128 << 20
    tokens_per_block: int = -1
    lookahead_tokens: int = 0
    offline_inference: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None

    device: str = "auto"
    enable_prefix_cache: bool = True
    hit_invariant: bool = False
    decoder_replay: ReplayMode = field(default_factory=lambda: environment().yoco_prefill_truncation_mode)
    decoder_replay_keep_tokens: int = field(default_factory=lambda: environment().yoco_prefill_keep_tokens)
    num_drafts: int = field(default_factory=lambda: environment().use_nextn_decode)
    adaptive_drafts: bool = field(default_factory=lambda: environment().enable_mtp_varlen)
    draft_sampling: DraftSampling = "coupled"
    confidence_temperatures: tuple[float, ...] = field(default_factory=lambda: environment().dflash_confidence_head_temperature)
    max_backtracking_tokens: int = field(default_factory=lambda: environment().max_backtracking_tokens or 0)
    decode_perf_cache_dir: str | None = field(default_factory=lambda: environment().decode_perf_cache_dir)
    decode_perf_cache_ttl_s: int = field(default_factory=lambda: environment().decode_perf_cache_ttl_sec)
    banned_token_ids: tuple[int, ...] = field(default_factory=lambda: environment().decode_token_blacklist)
    batch_invariant: bool = field(default_factory=lambda: environment().batch_invariant)
    asynchronous: bool = field(default_factory=lambda: environment().zero_overhead_scheduling)
    state_slots_ratio: float = field(default_factory=lambda: environment().num_state_slots_ratio)
    max_sum_keys: int = field(default_factory=lambda: environment().prefill_max_sum_seqlen_k)
    enforce_eager: bool = field(default_factory=lambda: environment().enforce_eager)
    draft_enforce_eager: bool = field(default_factory=lambda: environment().dflash_enforce_eager)
    graph_rows_interval: int = field(default_factory=lambda: environment().cudagraph_batch_size_interval)
    graph_requests_interval: int = field(default_factory=lambda: environment().dflash_cudagraph_batch_size_interval)
    sync_guard: bool = field(default_factory=lambda: not environment().disable_sync_guard)
    logging_interval_steps: int = field(default_factory=lambda: environment().logging_interval_step)
    gc_interval_steps: int = field(default_factory=lambda: environment().gc_interval_step)
    step_warn_s: float = 60.0
    step_limit_s: float = 600.0

    def __post_init__(self) -> None:
        """Check every value, and replace automatic values.

        Raises:
            ConfigError: a value is not allowed.  The message names the setting, its value and the allowed values.
        """
        self._fill_in()
        self._check_values()
        self._check_together()
        for name, (value, why) in _ONLY.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{name}={_shown(getattr(self, name))} is not supported: in this version {why}; use {value!r} or leave it out"
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _fill_in(self) -> None:
        for each in dataclasses.fields(self):
            if getattr(self, each.name) is None and each.default is not None:
                made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
                if made is not dataclasses.MISSING:
                    self._set(each.name, made)
            self._set(each.name, _plain(getattr(self, each.name)))
        if self.tokens_per_block == -1:
            self._set("tokens_per_block", _TOKENS_PER_BLOCK)
        for name, (low, high, expected) in _WHOLE.items():
            _check_whole(name, getattr(self, name), low, high, expected)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={_shown(self.seed)} must be a whole number; change it or leave it out")
        if not -(1 << 63) <= self.seed < 1 << 64:
            self._set("seed", self.seed & ((1 << 64) - 1))
        if self.max_backtracking_tokens == 0:
            self._set("max_backtracking_tokens", self.num_drafts + 1)
        if self.max_num_batched_tokens == 0:
            per_step = self.max_num_seqs * (1 + self.num_drafts)
            self._set("max_num_batched_tokens", max(self.max_model_len, 4096, per_step))
        if self.chunked_prefill is None:
            self._set("chunked_prefill", self.max_num_batched_tokens < self.max_model_len)
        if self.data_parallel_size == 0:
            self._set("data_parallel_size", max(1, self.expert_parallel_size // self.context_parallel_size))
        if self.engram_parallel_size == 0:
            self._set("engram_parallel_size", self.data_parallel_size * self.context_parallel_size)

    def _check_values(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={_shown(self.model)} is not a name; give a checkpoint's directory, nano or random")
        for name, meaning in (("served_model_name", "name"), ("device", "device")):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={_shown(getattr(self, name))} is not a {meaning}; give a string or leave it out")
        for name in ("tokenizer", "decode_perf_cache_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={_shown(value)} is not a path; give a string or leave it out")
            if value is not None:
                folder(name, value)
        if self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for output; use at least 2")
        if self.tokens_per_block % 2:
            raise ConfigError(
                f"tokens_per_block={self.tokens_per_block} would split the pairs that the encoder compresses; use an even number"
            )
        above_0 = math.ulp(0.0)
        _check_number("gpu_memory_utilization", self.gpu_memory_utilization, above_0, 1, "above 0 and at most 1; 0.9 is usual")
        for name, (low, high, expected) in _NUMBER.items():
            limits = f"from {low:g} on" if high == float("inf") else f"from {low:g} to {high:g}"
            _check_number(name, getattr(self, name), low, high, f"{expected}, {limits}")
        for name in ("confidence_temperatures", "banned_token_ids"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"{name}={_shown(getattr(self, name))} is not a tuple of numbers; give one or leave it out")
        low, high = FP32_NORMAL
        for temperature in self.confidence_temperatures:
            expected = f"positive numbers from {low:.2g} to {high:.2g}; 1 changes nothing"
            _check_number("confidence_temperatures", temperature, low, high, expected)
        for token_id in self.banned_token_ids:
            _check_whole("banned_token_ids", token_id, 0, (1 << 31) - 1, "ids of tokens, 0 or more each")
        for name, choices in (
            ("load_format", LoadFormat),
            ("engine_type", EngineType),
            ("decoder_replay", ReplayMode),
            ("draft_sampling", DraftSampling),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in get_args(choices):
                raise ConfigError(f"{name}={_shown(value)} must be one of {', '.join(get_args(choices))}")
        for each in dataclasses.fields(self):
            if each.type in ("bool", "bool | None") and not isinstance(getattr(self, each.name), bool):
                raise ConfigError(f"{each.name}={_shown(getattr(self, each.name))} is not a boolean; use True or False")

    def _check_together(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold one token of each of "
                f"max_num_seqs={self.max_num_seqs} requests; raise the first or lower the second"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold a prompt of "
                f"max_model_len={self.max_model_len} tokens in one piece; raise the first, lower the second or allow "
                "chunked_prefill"
            )
        if self.ignore_len < self.max_model_len:
            raise ConfigError(
                f"ignore_len={self.ignore_len} would drop prompts that max_model_len={self.max_model_len} allows; lower it"
            )
        num_temperatures = len(self.confidence_temperatures)
        if self.num_drafts and num_temperatures not in (1, self.num_drafts):
            raise ConfigError(
                f"confidence_temperatures={self.confidence_temperatures} has {num_temperatures} values; "
                f"give one, or one for each of num_drafts={self.num_drafts} (DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE)"
            )
        if self.max_backtracking_tokens <= self.num_drafts:
            raise ConfigError(
                f"max_backtracking_tokens={self.max_backtracking_tokens} cannot take back num_drafts={self.num_drafts} drafts "
                f"and the token before them; use at least {self.num_drafts + 1} (DEEPINFER_MAX_BACKTRACKING_TOKENS)"
            )
        if self.step_limit_s < self.step_warn_s:
            raise ConfigError(
                f"step_limit_s={self.step_limit_s} ends the process before step_warn_s={self.step_warn_s} warns; raise the first"
            )
        if self.decoder_replay != "off" and not self.decoder_replay_keep_tokens:
            raise ConfigError(
                f"decoder_replay={self.decoder_replay} needs the number of tokens to keep; set decoder_replay_keep_tokens "
                "(DEEPINFER_YOCO_PREFILL_KEEP_TOKENS), 140 is usual"
            )
        ranks = self.data_parallel_size * self.context_parallel_size
        if ranks % self.expert_parallel_size:
            raise ConfigError(
                f"{ranks} ranks (data_parallel_size={self.data_parallel_size} times context_parallel_size="
                f"{self.context_parallel_size}) cannot be grouped by expert_parallel_size={self.expert_parallel_size}; "
                "use a divisor of their number"
            )
        if self.engine_type == "COMPLETION" and (not self.stop_preempted_request or self.context_parallel_size != 1):
            raise ConfigError("engine_type=COMPLETION needs stop_preempted_request=True and context_parallel_size=1")

    @property
    def draft_temperatures(self) -> tuple[float, ...]:
        """:attr:`confidence_temperatures`, one for each of ``num_drafts`` positions."""
        given = self.confidence_temperatures
        return given if len(given) == self.num_drafts else given[:1] * self.num_drafts

    @property
    def max_runtime_len(self) -> int:
        """Largest number of tokens of a request that need pages; asynchronous planning reserves one more than max_model_len."""
        return self.max_model_len + (1 if self.asynchronous else 0)

    def check_pool(self, num_pages: int) -> None:
        """Check that the longest request fits into 80 % of a pool of ``num_pages`` usable pages.

        Raises:
            ConfigError: it does not fit.
        """
        needed, usable = -(-self.max_runtime_len // self.tokens_per_block), int(num_pages * _POOL_SHARE)
        if needed > usable:
            raise ConfigError(
                f"a request of max_model_len={self.max_model_len} may need {needed} pages of {self.tokens_per_block} tokens, "
                f"more than {_POOL_SHARE:.0%} of the {num_pages} that memory allows; lower max_model_len or max_num_seqs, "
                "or give more memory"
            )

    @classmethod
    def from_keywords(cls, **given: Any) -> EngineArgs:  # noqa: ANN401  (the caller's keywords are of any type)
        """Settings by name; None stands for the default.

        Raises:
            ConfigError: a name is unknown, or a value is not allowed.
        """
        known = {each.name for each in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(f"{name} is not a setting of the engine{f'; did you mean {near[0]}?' if near else ''}")
        if "model" not in given:
            raise ConfigError("no model was given; give a checkpoint's directory, nano or random")
        return cls(**{name: value for name, value in given.items() if value is not None or name == "model"})


def _plain(value: object) -> object:
    """A plain Python value: converts scalars and arrays of numpy and torch, paths, and lists (to tuples)."""
    if isinstance(value, bool):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return int(value) if isinstance(value, numbers.Integral) else value


def _shown(value: object) -> str:
    """A value for a message: a long one is cut, and of a value that is not plain only the type is shown."""
    if value is not None and not isinstance(value, bool | int | float | str | bytes | tuple | list | dict):
        return f"<{type(value).__name__}>"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python converts no integer of more than 4300 digits to text
        return "<a value too large to be shown>"
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."


def _check_whole(name: str, value: object, low: int, high: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={_shown(value)} must be {expected}; change it or leave it out")
    if value > high:
        raise ConfigError(f"{name}={_shown(value)} must be {expected}, at most {high}; change it or leave it out")


def _check_number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name}={_shown(value)} must be {expected}")
