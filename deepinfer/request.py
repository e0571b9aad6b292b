"""Words that all layers share: a request, how it is sampled, what comes back."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING

from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below it mean greedy decoding."""
MAX_TOP_LOGPROBS = 1000
MAX_SAMPLES = 128
"""Answers to one prompt."""
MAX_REPETITION_PENALTY = 1000.0
"""Also its reciprocal is the smallest: beyond them logits leave the range of fp32."""
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

    Logits go through these rules in this order: ``logit_bias``; ``repetition_penalty``, ``frequency_penalty``,
    ``presence_penalty``; ``allowed_token_ids``, ``banned_token_ids`` and ``first_n_token_no_eos``; ``golden_token_ids``, which
    win over all others; ``temperature``; ``min_p``; ``top_k``; ``top_p``.  Log-probabilities are reported of the logits before
    all of them.

    Lists are kept as tuples and the bias as pairs sorted by id, so an object never changes and can be hashed.

    Attributes:
        n: answers to the prompt, 1 … 128; they share its memory, and differ by their seeds alone (:meth:`with_sample`).
        temperature: >= 0; below 1e-5 the most likely token is taken, ``top_p``, ``top_k`` and ``min_p`` do not matter.
        top_p: keep the most likely tokens up to this probability; (0, 1].
        top_k: keep this many tokens; -1 keeps all, 1 takes the most likely token.
        min_p: keep the tokens at least this likely in relation to the most likely one; [0, 1].
        presence_penalty: taken off the logits of tokens that the output has already; -2 … 2.
        frequency_penalty: taken off the logits of tokens once for each time that the output has them; -2 … 2.
        repetition_penalty: positive logits are divided by it and others multiplied with it, for tokens that prompt or output
            have already; 0.001 … 1000, 1 for none.
        logit_bias: token id -> what is added to its logit, -100 … 100; a mapping or pairs.
        stop_token_ids: end the output like the end token does, whether or not that is ignored.
        allowed_token_ids: the output has no others; not empty.
        banned_token_ids: the output has none of these.
        ignore_eos: go on after the end token.
        max_tokens: tokens to generate at most; 0 counts as 1.
        logprobs: accepted for compatibility; log-probabilities of chosen tokens always come back.
        prompt_logprobs: report the log-probability of every prompt token.
        top_logprobs: how many of the most likely tokens to report beside the chosen one, 0 … 1000.
        first_n_token_no_eos: forbid the end token among the first n generated ones, unless nothing else is allowed.
        so_args: structured output; must be None.
        golden_token_ids: the output begins with these, whatever the model and the other rules say; not empty.
        seq_seed: the request's only source of randomness, reduced to 64 bits; drawn at random if not given.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
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
        """Check every value; normalise max_tokens, seq_seed, lists and the bias."""
        _integer("n", self.n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        _number("temperature", self.temperature, 0, float("inf"), "0 for greedy decoding or a finite positive number")
        if not self.temperature < float("inf"):
            raise RequestError(f"temperature={self.temperature} is not finite; use 0 or a positive number such as 1.0")
        _number("top_p", self.top_p, 0, 1, "a number above 0 and at most 1")
        if self.top_p == 0:
            raise RequestError("top_p=0 keeps no token; use temperature=0 for greedy decoding or a top_p above 0")
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, _INT32_MAX, "-1 (all tokens) or a positive number")
        _number("min_p", self.min_p, 0, 1, "a number from 0 (off) to 1")
        _number("presence_penalty", self.presence_penalty, -2, 2, "a number from -2 to 2, 0 for none")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "a number from -2 to 2, 0 for none")
        low, high = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _number("repetition_penalty", self.repetition_penalty, low, high, f"a number from {low:g} to {high:g}, 1 for none")
        _integer("max_tokens", self.max_tokens, 0, _INT32_MAX, "a positive number")
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        _integer("first_n_token_no_eos", self.first_n_token_no_eos, 0, _INT32_MAX, "0 or a positive number")
        if isinstance(self.seq_seed, bool) or not isinstance(self.seq_seed, int):
            raise RequestError(f"seq_seed={self.seq_seed!r} is not an integer; give one or leave it out")
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a boolean; use True or False")
        if self.so_args is not None:
            raise RequestError("so_args asks for structured outputs, which this version cannot give; leave it out")
        self._set_lists()
        object.__setattr__(self, "max_tokens", max(1, self.max_tokens))
        object.__setattr__(self, "seq_seed", self.seq_seed & (2**64 - 1))

    def _set_lists(self) -> None:
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        for name, meaning in (("allowed_token_ids", "allows no token"), ("golden_token_ids", "forces no token")):
            given = getattr(self, name)
            if given is None:
                continue
            ids = _token_ids(name, given)
            if not ids:
                raise RequestError(f"{name} is empty and so {meaning}; name at least one, or leave it out")
            object.__setattr__(self, name, ids)
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise RequestError("banned_token_ids has all of allowed_token_ids, which leaves no token; ban fewer or allow more")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias) or None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_filters(self) -> bool:
        """Whether improbable tokens are cut off before a draw."""
        return not self.is_greedy and (self.top_k != -1 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that are there already count against themselves."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on which tokens there are already, beyond the model's own view of them."""
        return self.has_penalties

    @property
    def has_token_mask(self) -> bool:
        """Whether some tokens are ruled out at all positions alike."""
        return self.allowed_token_ids is not None or bool(self.banned_token_ids)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` by ascending id."""
        return tuple(self.logit_bias) if self.logit_bias is not None else ()  # type: ignore[arg-type]

    def with_sample(self, sample_idx: int) -> SamplingParams:
        """Parameters of one of the ``n`` answers alone.

        The first keeps the seed, the others' are hashes of it and the index; the first alone reports on the prompt.
        """
        if not 0 <= sample_idx < self.n:
            raise AssertionError(f"sample {sample_idx} of {self.n} was asked for")
        seed = self.seq_seed
        if sample_idx:
            words = seed.to_bytes(8, "little") + sample_idx.to_bytes(8, "little")
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"sample").digest(), "little")
        return replace(self, n=1, seq_seed=seed, prompt_logprobs=self.prompt_logprobs and sample_idx == 0)


def _number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is out of range; use {expected}")


def _integer(name: str, value: object, low: int, high: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is out of range; use {expected}")


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise RequestError(f"{name}={given!r} is not a list of token ids; give it as a list of integers")
    ids = []
    for each in given:
        if isinstance(each, bool) or not isinstance(each, Integral) or not 0 <= int(each) <= _INT32_MAX:
            raise RequestError(f"{name} has {each!r}, which is no token id; give ids as integers from 0 on")
        ids.append(int(each))
    return tuple(ids)


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    wanted = "give a mapping from token ids to numbers from -100 to 100"
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes):
        raise RequestError(f"logit_bias={given!r} is no mapping; {wanted}")
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias has {pair!r}, which is no pair; {wanted}")
        (token_id,) = _token_ids("logit_bias", pair[:1])
        value = pair[1]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias of token {token_id} is {value!r}; {wanted}")
        if token_id in bias:
            raise RequestError(f"logit_bias names token {token_id} twice; name every token once")
        bias[token_id] = float(value)
    return tuple(sorted(bias.items()))


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
    """One generated token of an answer, or its end without one.

    Attributes:
        request_id: whose token.
        sample_idx: which of the request's ``n`` answers; everything below is said of this one.
        prompt_len: tokens of the prompt.
        token_id: the token, or None if the request ended without a new one.
        finished: whether this is the answer's last record; a request has ended when all its answers have.
        finish_reason: why it ended; None while it goes on.
        num_output_tokens: tokens generated so far, this one included.
        max_num_batched_tokens: the engine's token budget of a step.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache and not computed.
        token_logprobs: log-probability of the token before temperature and truncation, floored at -9999.
        top_token_ids, top_logprobs: the most likely tokens, best first, as many as were asked for.
        prompt_logprobs: on the first answer's first record, if asked for: entry i is the log-probability of prompt token i
            given the ones before it, entry 0 is None; otherwise None.
        nextn_logprobs, sum_smaller_probs: None; not computed.
        draft_tok, accept_tok: drafted and accepted tokens of the step; 0 without speculation.
        confidence_score: how likely the drafter found it that this token's draft is accepted; None without one.
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
    prompt_logprobs: tuple[float | None, ...] | None = None
    nextn_logprobs: None = None
    sum_smaller_probs: None = None
    draft_tok: int = 0
    accept_tok: int = 0
    confidence_score: float | None = None
    sample_idx: int = 0

    def clone(self) -> RequestOutput:
        """The record itself: records are immutable here and live as long as somebody holds them."""
        return self
