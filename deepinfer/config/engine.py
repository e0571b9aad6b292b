"""Settings of an engine, resolved once and then frozen."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from deepinfer.errors import ConfigError

LoadFormat = Literal["auto", "dummy"]

_NOT_YET: dict[str, object] = {
    "trust_remote_code": False,
    "expert_parallel_size": 1,
    "context_parallel_size": 1,
    "data_parallel_size": 1,
    "revision": None,
    "tokenizer_revision": None,
}
"""Settings of the original engine that have one supported value here."""

_ACCEPTED = ("disable_log_stats", "stop_preempted_request", "offline_inference", "served_model_name")
"""Settings of the original engine that have nothing to act on: no statistics log, no preemption, no server."""


def cache_dir() -> Path:
    """Where files made on first use are kept: ``DEEPINFER_CACHE_DIR``, else ``deepinfer`` in the user's cache."""
    chosen = os.environ.get("DEEPINFER_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "deepinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What an engine is started with.

    Attributes:
        model: checkpoint directory, or ``nano``.
        tokenizer: directory of ``tokenizer.json``; None for the model's own.
        device: ``auto`` (a CUDA device if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        load_format: ``auto`` reads the checkpoint, ``dummy`` makes random weights of its shape.
        seed: of dummy weights.
        max_model_len: prompt plus output tokens of one request.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
        tokens_per_block: tokens of a KV page.
        gpu_memory_utilization: share of a GPU's memory that weights and caches may use.
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    tokens_per_block: int = 128
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: names the setting, its value and what it may be.
        """
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tokens_per_block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a positive whole number; change it or leave it out")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for output; use at least 2")
        if self.tokens_per_block % 2:
            raise ConfigError(
                f"tokens_per_block={self.tokens_per_block} would split the pairs that the encoder compresses; use an even number"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold one token of each of "
                f"max_num_seqs={self.max_num_seqs} requests; raise the first or lower the second"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1; 0.9 is usual")
        if self.load_format not in get_args(LoadFormat):
            raise ConfigError(f"load_format={self.load_format!r} must be one of {', '.join(get_args(LoadFormat))}")

    @classmethod
    def from_keywords(cls, **given: Any) -> EngineArgs:  # noqa: ANN401  (the caller's keywords are of any type)
        """Settings by the original engine's names; unknown ones, and values that cannot be honoured, are errors.

        Raises:
            ConfigError: as above.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        taken = {}
        for name, value in given.items():
            if name in known:
                if value is not None:
                    taken[name] = value
            elif name in _NOT_YET:
                if value not in (_NOT_YET[name], None) and (name, value) != ("data_parallel_size", 0):
                    raise ConfigError(
                        f"{name}={value!r} is not supported; this version runs with {name}={_NOT_YET[name]!r}, leave it out"
                    )
            elif name not in _ACCEPTED:
                near = difflib.get_close_matches(name, [*known, *_NOT_YET, *_ACCEPTED], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{name} is not a setting of the engine{hint}")
        return cls(**taken)
