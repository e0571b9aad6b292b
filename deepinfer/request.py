"""Types that all layers share: a request, its sampling parameters, its output."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, TypeVar, get_args

from deepinfer.errors import CONVERSION_ERRORS, RequestError, plain, reason, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

GREEDY_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy decoding."""
MAX_TOP_LOGPROBS = 1000
MAX_PROMPT_TOP = 2**20
"""Most likely tokens that a request may ask for over all tokens of its prompt; the records of so many take 80 MB."""
MAX_SAMPLES = 128
"""Most answers to one prompt."""
MAX_REPETITION_PENALTY = 1000.0
"""The largest penalty; its reciprocal is the smallest.  Other penalties could move logits out of the range of fp32."""
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1

# The device has these values in fp32.  A value is refused if fp32 rounds it to infinity, or to a zero that means something else.
_MAX_FP32: Final = math.nextafter((2 - 2**-24) * 2.0**127, 0)
"""The greatest number that is finite in fp32."""
_ZERO_FP32: Final = 2.0**-150
"""The greatest number that is 0 in fp32."""


def _first_rounded_to(value: float) -> float:
    """The least number that has the same fp32 value as a positive ``value``."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    below, rounded = (struct.unpack("f", struct.pack("I", each))[0] for each in (bits - 1, bits))
    middle = (below + rounded) / 2
    return middle if bits % 2 == 0 else math.nextafter(middle, rounded)


_GREEDY_BORDER: Final = _first_rounded_to(GREEDY_TEMPERATURE)
"""A comparison of doubles with this number agrees with the device's comparison in fp32."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INSUFFICIENT = "insufficient_system_resource"
    GRAMMAR_ERROR = "grammar_error"


SchemaType = Literal["regex", "json", "ebnf", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The grammar that an answer follows, and where it begins; made by :meth:`read`.

    Without a trigger the grammar holds from the first token.  With a trigger the answer is free until the output contains the
    trigger in full.  The grammar holds for all tokens after the trigger.  The end token is allowed in constrained text exactly
    where the grammar accepts.

    Attributes:
        schema_type: language of ``schema``.  A ``regex`` has the syntax of Rust's ``regex`` and matches the whole text.
        schema: the grammar; a JSON schema is kept as its text.
        trigger_token_ids: the trigger, a sequence of token ids; () for none.
        bound_token_id: once this token is produced in free text, the next tokens are the trigger; None for none.
        max_free_tokens: after this many tokens of free text, the next tokens are the bound token, if there is one, and the
            trigger; None for no limit.
        end_needs_trigger: forbid the end token in free text.
    """

    schema_type: SchemaType
    schema: str
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None
    max_free_tokens: int | None = None
    end_needs_trigger: bool = False

    @classmethod
    def read(cls, given: object) -> StructuredOutput:
        """Check a caller's mapping from names to values, and convert it.

        Raises:
            RequestError: a key is unknown or missing, a value has the wrong type, or two values contradict each other.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(f'so_args={shown(given)} is not a mapping; give {{"schema_type": …, "schema": …}}')
        names = [each.name for each in fields(cls)]
        unknown = [key for key in given if not isinstance(key, str) or key not in names]
        if unknown:
            raise RequestError(f"so_args has the unknown key {shown(unknown[0])}; the keys are {', '.join(names)}")
        for name in ("schema_type", "schema"):
            if given.get(name) is None:
                raise RequestError(f"so_args has no {name}; give it")
        kind, types = given["schema_type"], get_args(SchemaType)
        if not isinstance(kind, str) or kind not in types:
            raise RequestError(f"so_args: schema_type={shown(kind)} is unknown; use one of {', '.join(types)}")
        trigger = given.get("trigger_token_ids")
        trigger_ids = () if trigger is None else _token_ids("so_args: trigger_token_ids", trigger, once=False)
        bound, budget = given.get("bound_token_id"), given.get("max_free_tokens")
        if bound is not None:
            bound = as_whole_number("so_args: bound_token_id", bound, 0, _INT32_MAX, "a token id")
        if budget is not None:
            budget = as_whole_number("so_args: max_free_tokens", budget, 0, _INT32_MAX, "0 or a positive number")
        needs_trigger = as_flag("so_args: end_needs_trigger", given.get("end_needs_trigger", False))
        if not trigger_ids:
            for name, value in (
                ("bound_token_id", bound),
                ("max_free_tokens", budget),
                ("end_needs_trigger", needs_trigger or None),
            ):
                if value is not None:
                    raise RequestError(f"so_args: {name}={shown(value)} needs trigger_token_ids; give them, or leave {name} out")
        return cls(
            schema_type=kind,  # type: ignore[arg-type]
            schema=_schema_text(kind, given["schema"]),
            trigger_token_ids=trigger_ids,
            bound_token_id=bound,
            max_free_tokens=budget,
            end_needs_trigger=needs_trigger,
        )

    @property
    def named_token_ids(self) -> tuple[int, ...]:
        """The trigger and the bound token."""
        return self.trigger_token_ids if self.bound_token_id is None else (*self.trigger_token_ids, self.bound_token_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen.  Values out of range raise :class:`RequestError` at once.

    The rules change the logits in this order: ``logit_bias``; ``repetition_penalty``, ``frequency_penalty``,
    ``presence_penalty``; ``allowed_token_ids``, ``banned_token_ids`` and ``first_n_token_no_eos``; ``golden_token_ids``, which
    overrule all others; ``temperature``; ``min_p``; ``top_k``; ``top_p``.  Log-probabilities are those of the logits before all
    rules.

    Scalars and flat arrays of numpy and torch are converted to Python values; a boolean is not a number.  Lists are kept as
    tuples, with each id once except in ``golden_token_ids``.  The bias is kept as pairs sorted by id.  An object therefore never
    changes and can be hashed.

    Attributes:
        n: answers to the prompt, 1 … 128; they share its memory, and differ only by their seeds (:meth:`with_sample`).
        temperature: >= 0 and finite in fp32; below 1e-5 the most likely token is chosen, and ``top_p``, ``top_k`` and ``min_p``
            have no effect.
        top_p: keep the most likely tokens up to this probability; (0, 1], and above 0 in fp32.
        top_k: keep this many tokens; -1 keeps all, 1 chooses the most likely token.
        min_p: keep the tokens whose probability is at least this share of the greatest probability; [0, 1].
        presence_penalty: subtracted from the logits of tokens that the output contains; -2 … 2.
        frequency_penalty: subtracted from the logits of tokens, once for each time that the output contains them; -2 … 2.
        repetition_penalty: for tokens that the prompt or the output contains, positive logits are divided by it, and other logits
            are multiplied by it; 0.001 … 1000, 1 for none.
        logit_bias: token id -> number that is added to its logit, -100 … 100; a mapping or pairs.
        stop_token_ids: tokens that end the output like the end token, even with ``ignore_eos``.
        allowed_token_ids: the output contains only these tokens; not empty.
        banned_token_ids: the output contains none of these tokens.
        ignore_eos: continue after the end token.
        max_tokens: most tokens to generate; 0 counts as 1.
        logprobs: accepted for compatibility; log-probabilities of chosen tokens are always reported.
        prompt_logprobs: report the log-probability of every prompt token; an engine with a bounded decoder half cannot do this.
        top_logprobs: number of most likely tokens to report in addition to the chosen one, 0 … 1000; with ``prompt_logprobs``
            also for every prompt token.
        first_n_token_no_eos: forbid the end token among the first n generated tokens, unless no other token is allowed.
        so_args: structured output: a mapping of the values of :class:`StructuredOutput`.  The grammar rules out tokens in
            addition to ``allowed_token_ids`` and ``banned_token_ids``.  ``ignore_eos`` cannot be combined with it.
        golden_token_ids: the output begins with these tokens, regardless of the model and the other rules; not empty.
        seq_seed: the request's only source of randomness, reduced to 64 bits.  The same prompt with the same seed gives the same
            text.  With None every request draws its own seed when an engine admits it, even if requests share this object.
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
    so_args: StructuredOutput | Mapping[str, object] | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value and convert it to a plain Python value."""
        put = object.__setattr__
        put(self, "n", as_whole_number("n", self.n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"))
        high = _INT32_MAX
        put(self, "max_tokens", max(1, as_whole_number("max_tokens", self.max_tokens, 0, high, "a positive number")))
        put(
            self,
            "top_logprobs",
            as_whole_number("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}"),
        )
        expected = "0 or a positive number"
        put(self, "first_n_token_no_eos", as_whole_number("first_n_token_no_eos", self.first_n_token_no_eos, 0, high, expected))
        if type(self.top_k) is not int or self.top_k != -1:
            top_k = as_whole_number("top_k", self.top_k, -1, high, "-1 (all tokens) or a positive number")
            if top_k == 0:
                raise RequestError("top_k=0 is out of range; use -1 (all tokens) or a positive number")
            put(self, "top_k", top_k)
        put(
            self,
            "presence_penalty",
            as_number("presence_penalty", self.presence_penalty, -2, 2, "a number from -2 to 2, 0 for none"),
        )
        put(
            self,
            "frequency_penalty",
            as_number("frequency_penalty", self.frequency_penalty, -2, 2, "a number from -2 to 2, 0 for none"),
        )
        least, greatest = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        expected = f"a number from {least:g} to {greatest:g}, 1 for none"
        put(self, "repetition_penalty", as_number("repetition_penalty", self.repetition_penalty, least, greatest, expected))
        self._set_shape()
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            put(self, name, as_flag(name, getattr(self, name)))
        if self.so_args is not None:
            put(self, "so_args", StructuredOutput.read(self.so_args))
            if self.ignore_eos:
                raise RequestError(
                    "ignore_eos=True cannot be combined with so_args: a grammar ends with the end token; leave one out"
                )
        if self.seq_seed is not None:
            put(self, "seq_seed", _seed(self.seq_seed))
        self._set_lists()

    def _set_shape(self) -> None:
        """Check and convert temperature and filters."""
        put = object.__setattr__
        expected = "0 for greedy decoding or a finite positive number"
        temperature = as_number("temperature", self.temperature, 0, math.inf, expected)
        if temperature > _MAX_FP32:
            raise RequestError(
                f"temperature={shown(self.temperature)} is not finite in the engine's 32 bits; "
                "use 0 or a positive number such as 1.0"
            )
        top_p = as_number("top_p", self.top_p, 0, 1, "a number above 0 and at most 1")
        if top_p <= _ZERO_FP32:
            raise RequestError(
                f"top_p={shown(self.top_p)} keeps no token, because it is 0 in the engine's 32 bits; "
                "use temperature=0 for greedy decoding or a top_p above 0"
            )
        put(self, "temperature", temperature)
        put(self, "top_p", top_p)
        put(self, "min_p", as_number("min_p", self.min_p, 0, 1, "a number from 0 (off) to 1"))

    def _set_lists(self) -> None:
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        for name, meaning in (("allowed_token_ids", "allows no token"), ("golden_token_ids", "forces no token")):
            given = getattr(self, name)
            if given is None:
                continue
            ids = _token_ids(name, given, once=name != "golden_token_ids")
            if not ids:
                raise RequestError(f"{name} is empty, which {meaning}; name at least one token id, or leave it out")
            object.__setattr__(self, name, ids)
        if self.allowed_token_ids is not None and self.banned_token_ids and not _left(self):
            raise RequestError(
                "banned_token_ids contains all of allowed_token_ids, which leaves no token; ban fewer or allow more"
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias) or None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < _GREEDY_BORDER or self.top_k == 1

    @property
    def has_filters(self) -> bool:
        """Whether filters remove unlikely tokens before a draw."""
        return not self.is_greedy and (self.top_k != -1 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether a rule or a grammar, and not only the model, depends on the tokens before."""
        return self.has_penalties or self.so_args is not None

    @property
    def has_token_mask(self) -> bool:
        """Whether some tokens are forbidden at all positions."""
        return self.allowed_token_ids is not None or bool(self.banned_token_ids)

    @property
    def structured_output(self) -> StructuredOutput | None:
        """``so_args`` in the form that it is kept in."""
        return self.so_args  # type: ignore[return-value]

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs with ascending ids."""
        return tuple(self.logit_bias) if self.logit_bias is not None else ()  # type: ignore[arg-type]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids >= ``vocab_size``.

        Raises:
            RequestError: names the parameter and the id.
        """
        named: dict[str, Sequence[int]] = {
            "logit_bias": [token_id for token_id, _ in self.bias_pairs],
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
            "golden_token_ids": self.golden_token_ids or (),
            "so_args": self.structured_output.named_token_ids if self.structured_output else (),
        }
        for name, ids in named.items():
            if max(ids, default=0) >= vocab_size:
                first = next(each for each in ids if each >= vocab_size)
                raise RequestError(f"{name} has {first}, outside the vocabulary of {vocab_size}; use ids below {vocab_size}")

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed: their own seed, or a random one."""
        return self if self.seq_seed is not None else _with(self, seq_seed=secrets.randbits(64))

    def with_sample(self, sample_idx: int) -> SamplingParams:
        """Parameters of one of the ``n`` answers, with ``n=1`` and a seed.

        Answer 0 keeps the seed.  The seed of another answer is a hash of the seed and the index.  Only answer 0 reports on the
        prompt.
        """
        if not 0 <= sample_idx < self.n or self.seq_seed is None:
            raise AssertionError(f"sample {sample_idx} of {self.n} was asked for, with the seed {self.seq_seed}")
        seed = self.seq_seed
        if sample_idx:
            words = seed.to_bytes(8, "little") + sample_idx.to_bytes(8, "little")
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"sample").digest(), "little")
        return _with(self, n=1, seq_seed=seed, prompt_logprobs=self.prompt_logprobs and sample_idx == 0)


def _with(made: T, **values: object) -> T:
    """A copy of a frozen object with other ``values`` in some fields; the values must be valid, because nothing checks them."""
    copy = object.__new__(type(made))
    for name in made.__slots__:  # type: ignore[attr-defined]
        object.__setattr__(copy, name, values[name] if name in values else getattr(made, name))
    return copy


# Conversion of callers' values to plain Python values.


def as_number(name: str, given: object, low: float, high: float, expected: str) -> float:
    """A caller's number from ``low`` to ``high``; raises :class:`RequestError` with the text ``expected``."""
    value = _real(given)
    if value is None or not low <= value <= high:
        raise RequestError(f"{name}={shown(given)} is out of range; use {expected}")
    return value


def as_whole_number(name: str, given: object, low: int, high: int, expected: str) -> int:
    """A caller's whole number from ``low`` to ``high``; raises :class:`RequestError` with the text ``expected``."""
    value = given if type(given) is int else as_whole(given)
    if value is None or not low <= value <= high:
        raise RequestError(f"{name}={shown(given)} is out of range; use {expected}")
    return value


def as_flag(name: str, given: object) -> bool:
    """A caller's boolean; raises :class:`RequestError`."""
    value = plain(given)
    if not isinstance(value, bool):
        raise RequestError(f"{name}={shown(given)} is not a boolean; use True or False")
    return value


def as_text(name: str, given: object) -> str:
    """A caller's string; raises :class:`RequestError`."""
    if not isinstance(given, str):
        raise RequestError(f"{name} of type {type(given).__name__} was given; give it as str")
    return str(given)


def as_bytes(name: str, given: object) -> bytes:
    """A caller's bytes, bytearray or memoryview as bytes; raises :class:`RequestError`."""
    if not isinstance(given, bytes | bytearray | memoryview):
        raise RequestError(f"{name} of type {type(given).__name__} was given; give it as bytes")
    return bytes(given)


def as_names(name: str, given: object) -> list[str]:
    """A caller's request ids, or a single id; raises :class:`RequestError`."""
    if isinstance(given, str):
        return [str(given)]
    if not is_list(given):
        raise RequestError(f"{name}={shown(given)} is neither a request id nor a list of them; give strings")
    return [as_text(f"an id in {name}", each) for each in given]


def is_list(given: object) -> TypeGuard[Iterable[Any]]:
    """Whether a caller's value is iterable, and is neither text nor a mapping."""
    is_other = isinstance(given, str | bytes | bytearray | memoryview | Mapping)
    return isinstance(given, Iterable) and not is_other and getattr(given, "ndim", 1) != 0


def as_whole_numbers(
    name: str, given: object, *, things: str, low: int | None = 0, high: int = _INT32_MAX, at_most: int | None = None
) -> list[int]:
    """A caller's list of whole numbers: any iterable of them, or a flat array of numpy or torch.

    Args:
        things: name of the numbers in messages.
        low, high: range of the numbers; ``low`` None allows all numbers.
        at_most: most numbers to take from an iterable of unknown length.

    Raises:
        RequestError: the value is not such a list; names the first wrong element.

    Cost: 50 ns for each int in a list, 20 ns for each element of an array, 0.3 µs for each other object.
    """
    dtype = getattr(getattr(given, "dtype", None), "kind", "")
    numbers: list[Any]
    if isinstance(given, list | tuple):
        numbers = list(given)
    elif isinstance(getattr(given, "ndim", None), int) and callable(getattr(given, "tolist", None)) and not _is_text(given):
        if given.ndim != 1:  # type: ignore[attr-defined]
            raise RequestError(f"{name} is an array of {given.ndim} dimensions; give {things} as integers in one list")  # type: ignore[attr-defined]
        try:
            numbers = given.tolist()  # type: ignore[attr-defined]
        except CONVERSION_ERRORS as error:  # for example an array without data
            raise RequestError(f"{name} cannot be read ({reason(error)}); give {things} as integers in a list") from error
        if numbers and dtype and dtype not in "iu":
            numbers = list(given)  # type: ignore[call-overload]
    elif not isinstance(given, Iterable) or isinstance(given, Mapping) or _is_text(given):
        raise RequestError(f"{name}={shown(given)} is not a list; give {things} as integers in a list")
    else:
        numbers = list(given if at_most is None else islice(given, at_most))
    kinds = {int} if dtype and dtype in "iu" else set(map(type, numbers))
    if not kinds <= {int}:
        numbers = [_element(name, position, each, things) for position, each in enumerate(numbers)]
    if numbers and low is not None and not (low <= min(numbers) and max(numbers) <= high):
        at, wrong = next((at, each) for at, each in enumerate(numbers) if not low <= each <= high)
        what = "negative" if wrong < 0 else "more than 32 bits" if high == _INT32_MAX else "too large"
        raise RequestError(f"{name} has {shown(wrong)} at position {at}, which is {what}; give {things} from {low} to {high}")
    return numbers


def _is_text(given: object) -> bool:
    return isinstance(given, str | bytes | bytearray) or (isinstance(given, memoryview) and given.itemsize == 1)


def _real(given: object) -> float | None:
    """The number in a value as a double, infinite if it is too large for a double; None if the value is not a number."""
    value = given if type(given) is float else plain(given)
    if isinstance(value, bool) or not isinstance(value, float | int | Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if operator.gt(value, 0) else -math.inf


def as_whole(given: object) -> int | None:
    """The whole number in a caller's value; None if it is not a whole number."""
    if type(given) is int:
        return given
    value = plain(given)
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return None
    if isinstance(value, int | Integral) or hasattr(type(value), "__index__"):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except CONVERSION_ERRORS:
            return None
    return None


def _element(name: str, position: int, given: object, things: str) -> int:
    value = given if type(given) is int else as_whole(given)
    if value is None:
        raise RequestError(
            f"{name} has {shown(given)} at position {position}, which is not a whole number; give {things} as integers"
        )
    return value


def _token_ids(name: str, given: object, *, once: bool = True) -> tuple[int, ...]:
    if type(given) is tuple and not given:
        return ()
    ids = as_whole_numbers(name, given, things="token ids")
    return tuple(dict.fromkeys(ids) if once else ids)


def _schema_text(kind: str, given: object) -> str:
    """The text of a grammar.  A JSON schema may be a JSON value; text is kept as it is, and the compiler reads it."""
    if kind == "json" and not isinstance(given, str):
        try:
            text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"so_args: schema cannot be written as JSON ({reason(error)}); give text or JSON values"
            ) from error
    else:
        text = as_text("so_args: schema", given)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"so_args: schema holds a lone surrogate at character {error.start}; send valid Unicode") from error
    if not text.strip():
        raise RequestError("so_args: schema is empty; give a grammar")
    return text


def _left(params: SamplingParams) -> set[int]:
    """Tokens of ``allowed_token_ids`` that are not banned."""
    return set(params.allowed_token_ids or ()).difference(params.banned_token_ids)


def _seed(given: object) -> int:
    value = as_whole(given)
    if value is None:
        raise RequestError(f"seq_seed={shown(given)} is not an integer; give one or leave it out")
    return value & (2**64 - 1)


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    expected = "give a mapping from token ids to numbers from -100 to 100"
    given = given.items() if isinstance(given, Mapping) else given
    if not is_list(given):
        raise RequestError(f"logit_bias={shown(given)} is not a mapping; {expected}")
    pairs = list(given)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias has {shown(pair)}, which is not a pair; {expected}")
    ids = as_whole_numbers("logit_bias", [pair[0] for pair in pairs], things="token ids")
    bias: dict[int, float] = {}
    for token_id, (_, each) in zip(ids, pairs, strict=True):
        value = _real(each)
        if value is None or not -100 <= value <= 100:
            raise RequestError(f"logit_bias of token {token_id} is {shown(each)}; {expected}")
        if token_id in bias:
            raise RequestError(f"logit_bias names token {token_id} twice; name every token once")
        bias[token_id] = float(value)
    return tuple(sorted(bias.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to generate answers for.  All APIs make one; invalid values raise :class:`RequestError`.

    Attributes:
        request_id: unique among unfinished requests, not empty.
        prompt_token_ids: at least one.
        params: sampling parameters.
        priority: requests of higher priority are admitted first and preempted last; 64 bits.
        salt: tenant; requests share cached memory only with requests of the same salt.
        image_hashes: position of a picture's first token -> hash of the picture's content.
        checkpoints: positions where a chunk of the prompt must end so that state can be saved; multiples of the page size.
        output_token_ids: output tokens that the request begins with, generated elsewhere.  They count as generated: towards
            ``max_tokens``, in penalties and in the random stream.  With the seed of the request that generated them, the next
            tokens are the same as there.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    image_hashes: Mapping[int, bytes] = field(default_factory=dict, hash=False)
    checkpoints: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every value and convert it to a plain Python value; the scheduler checks the limits of the engine."""
        put = object.__setattr__
        put(self, "request_id", as_text("request_id", self.request_id))
        put(self, "prompt_token_ids", tuple(as_whole_numbers("prompt_token_ids", self.prompt_token_ids, things="token ids")))
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"sampling parameters of type {type(self.params).__name__} were given; give SamplingParams")
        put(self, "priority", as_priority(self.priority))
        put(self, "salt", as_bytes("salt", self.salt))
        if not isinstance(self.image_hashes, Mapping):
            raise RequestError(
                f"image_hashes of type {type(self.image_hashes).__name__} were given; give a mapping from positions to hashes"
            )
        given = as_whole_numbers("checkpoints", self.checkpoints, things="positions", low=None)
        put(self, "checkpoints", tuple(dict.fromkeys(given)))
        output = tuple(as_whole_numbers("output_token_ids", self.output_token_ids, things="token ids"))
        put(self, "output_token_ids", output)
        if output and self.params.n > 1:
            raise RequestError(
                f"a request with n={self.params.n} answers cannot begin with output tokens, which belong to one answer; "
                "make one request for each answer"
            )
        if output and self.params.prompt_logprobs:
            raise RequestError(
                "prompt_logprobs=True is reported with the first output token, which a request that begins with output tokens "
                "does not generate; leave prompt_logprobs or output_token_ids out"
            )
        num_prompt, num_top = len(self.prompt_token_ids), self.params.top_logprobs
        if self.params.prompt_logprobs and num_prompt * num_top > MAX_PROMPT_TOP:
            raise RequestError(
                f"prompt_logprobs=True with top_logprobs={num_top} for a prompt of {num_prompt} tokens asks for "
                f"{num_prompt * num_top} log-probabilities, the limit is {MAX_PROMPT_TOP}; lower top_logprobs"
            )

    def with_seed(self) -> Request:
        """This request with a seed in its parameters."""
        params = self.params.with_seed()
        return self if params is self.params else _with(self, params=params)

    def sample(self, sample_idx: int, request_id: str) -> Request:
        """The request for one of the ``n`` answers, with its own id."""
        return _with(self, request_id=request_id, params=self.params.with_sample(sample_idx))


def as_priority(given: object) -> int:
    """A caller's priority as a plain number of 64 bits; raises :class:`RequestError`."""
    value = as_whole(given)
    if value is None:
        raise RequestError(f"priority of type {type(given).__name__} was given; give it as int")
    if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise RequestError(f"priority={shown(given)} cannot be sent, because it needs more than 64 bits; use a smaller number")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One generated token of an answer, or the end of an answer without a token.

    Attributes:
        request_id: request of the token.
        sample_idx: index of the answer, 0 … n - 1; all other fields describe this answer.
        prompt_len: tokens of the prompt.
        token_id: the token, or None if the answer ended without a new token.
        finished: whether this is the answer's last record; a request ends when all its answers have ended.
        finish_reason: why the answer ended; None before its end.
        num_output_tokens: tokens generated so far, including this one.
        max_num_batched_tokens: the engine's token budget of a step.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache and not computed.
        token_logprobs: log-probability of the token before temperature and truncation, at least -9999.
        top_token_ids, top_logprobs: the most likely tokens, best first; ``params.top_logprobs`` gives their number.
        prompt_logprobs: only on the first record of answer 0, if the request asks for it; entry i is the log-probability of
            prompt token i after the tokens before it, entry 0 is None.
        prompt_top_token_ids, prompt_top_logprobs: with ``prompt_logprobs``, and only if ``params.top_logprobs`` is not 0; entry i
            has the most likely tokens at prompt token i, best first, entry 0 is empty.
        nextn_logprobs, sum_smaller_probs: None; not computed.
        draft_tok, accept_tok: drafted and accepted tokens of the step; 0 without speculation.
        message: why the request ended, for the finish reason "grammar_error"; otherwise None.
        queue_s: only on the first record of a request with an observed engine; seconds from its arrival to the start of the first
            step that computes a part of its prompt.
        confidence_score: the drafter's predicted probability that this token's draft is accepted; None without a draft.
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
    prompt_top_token_ids: tuple[tuple[int, ...], ...] | None = None
    prompt_top_logprobs: tuple[tuple[float, ...], ...] | None = None
    nextn_logprobs: None = None
    sum_smaller_probs: None = None
    draft_tok: int = 0
    accept_tok: int = 0
    confidence_score: float | None = None
    sample_idx: int = 0
    message: str | None = None
    queue_s: float | None = field(default=None, compare=False)

    def clone(self) -> RequestOutput:
        """Return the record itself, because records are immutable."""
        return self
