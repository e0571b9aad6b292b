"""Words that all layers share: a request, how it is sampled, what comes back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below it mean greedy decoding."""
MAX_TOP_LOGPROBS = 1000
_INT32_MAX = 2**31 - 1


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INSUFFICIENT = "insufficient_system_resource"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen.  Values out of range raise :class:`RequestError` at once.

    Attributes:
        temperature: >= 0; below 1e-5 the most likely token is taken, ``top_p`` and ``top_k`` do not matter.
        top_p: keep the most likely tokens up to this probability; (0, 1].
        top_k: keep this many tokens; -1 keeps all.
        ignore_eos: go on after the end token.
        max_tokens: tokens to generate at most; 0 counts as 1.
        logprobs: accepted for compatibility; log-probabilities of chosen tokens always come back.
        prompt_logprobs: must be False.
        top_logprobs: how many of the most likely tokens to report beside the chosen one, 0 … 1000.
        first_n_token_no_eos: forbid the end token among the first n generated ones.
        so_args: structured output; must be None.
        golden_token_ids: forced output; must be None.
        seq_seed: the request's only source of randomness, reduced to 64 bits; drawn at random if not given.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    so_args: object | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int = field(default_factory=lambda: secrets.randbits(64))

    def __post_init__(self) -> None:
        """Check every value; normalise max_tokens and seq_seed."""
        _number("temperature", self.temperature, 0, float("inf"), "0 for greedy decoding or a finite positive number")
        if not self.temperature < float("inf"):
            raise RequestError(f"temperature={self.temperature} is not finite; use 0 or a positive number such as 1.0")
        _number("top_p", self.top_p, 0, 1, "a number above 0 and at most 1")
        if self.top_p == 0:
            raise RequestError("top_p=0 keeps no token; use temperature=0 for greedy decoding or a top_p above 0")
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, _INT32_MAX, "-1 (all tokens) or a positive number")
        _integer("max_tokens", self.max_tokens, 0, _INT32_MAX, "a positive number")
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        _integer("first_n_token_no_eos", self.first_n_token_no_eos, 0, _INT32_MAX, "0 or a positive number")
        if isinstance(self.seq_seed, bool) or not isinstance(self.seq_seed, int):
            raise RequestError(f"seq_seed={self.seq_seed!r} is not an integer; give one or leave it out")
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a boolean; use True or False")
        for name, value, what in (
            ("prompt_logprobs", self.prompt_logprobs or None, "log-probabilities of the prompt"),
            ("so_args", self.so_args, "structured outputs"),
            ("golden_token_ids", self.golden_token_ids, "forced outputs"),
        ):
            if value is not None:
                raise RequestError(f"{name} asks for {what}, which this version cannot give; leave it out")
        object.__setattr__(self, "max_tokens", max(1, self.max_tokens))
        object.__setattr__(self, "seq_seed", self.seq_seed & (2**64 - 1))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


def _number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is out of range; use {expected}")


def _integer(name: str, value: object, low: int, high: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is out of range; use {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to do.

    Attributes:
        request_id: unique among unfinished requests, not empty.
        prompt_token_ids: at least one.
        params: how to sample.
        priority: the higher is admitted first and preempted last.
        salt: tenant; requests share cached memory only with requests of the same salt.
        images: position of a picture's first token -> hash of its content.
        checkpoints: positions, multiples of a page, at which a chunk of the prompt must end so that state can be saved there.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    images: Mapping[int, bytes] = field(default_factory=dict, hash=False)
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One generated token of a request, or its end without one.

    Attributes:
        request_id: whose token.
        prompt_len: tokens of the prompt.
        token_id: the token, or None if the request ended without a new one.
        finished: whether this is the request's last record.
        finish_reason: why it ended; None while it goes on.
        num_output_tokens: tokens generated so far, this one included.
        max_num_batched_tokens: the engine's token budget of a step.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache and not computed.
        token_logprobs: log-probability of the token before temperature and truncation, floored at -9999.
        top_token_ids, top_logprobs: the most likely tokens, best first, as many as were asked for.
        prompt_logprobs, nextn_logprobs, sum_smaller_probs: None; not computed.
        draft_tok, accept_tok: drafted and accepted tokens of the step; 0 without speculation.
        confidence_score: of the draft; None without speculation.
    """

    request_id: str
    prompt_len: int
    token_id: int | None
    finished: bool
    finish_reason: FinishReason | None
    num_output_tokens: int
    max_num_batched_tokens: int
    num_cached_tokens: int = 0
    token_logprobs: float | None = None
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    prompt_logprobs: None = None
    nextn_logprobs: None = None
    sum_smaller_probs: None = None
    draft_tok: int = 0
    accept_tok: int = 0
    confidence_score: None = None

    def clone(self) -> RequestOutput:
        """The record itself: records are immutable here and live as long as somebody holds them."""
        return self
