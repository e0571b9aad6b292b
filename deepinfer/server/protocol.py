"""What each field of each protocol means here: honoured, harmless, or refused by name.

Nothing is silently ignored.  A *harmless* field changes no token of the answer: labels, hints for caches, options of billing.  A
*refused* field is accepted only with a neutral value.  Any other field is unknown, and its name is in the error.

Source: the signatures of the packages ``openai`` and ``anthropic``, and the fields that agents were seen to send.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final, Literal

from deepinfer.errors import RequestError, shown
from deepinfer.request import SamplingParams, as_flag, as_whole_number, is_list
from deepinfer.server.bodies import Body, ChatBody, CompletionsBody, MessagesBody, ResponsesBody, Sampling
from deepinfer.server.failures import HttpError

Api = Literal["chat", "completions", "responses", "messages"]

BODIES: Final[Mapping[Api, type[Body]]] = {
    "chat": ChatBody,
    "completions": CompletionsBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
}
"""Protocol -> the fields of its bodies and their types."""
HONOURED: Final[Mapping[Api, frozenset[str]]] = {api: frozenset(body.__struct_fields__) for api, body in BODIES.items()}
"""Fields that have their effect."""
_SAMPLING: Final = frozenset(Sampling.__struct_fields__)
"""Fields that go into the sampling parameters; recipe does not see them."""

_MAX_BIASES: Final = 1000

HARMLESS: Final[Mapping[Api, frozenset[str]]] = {
    "chat": frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "verbosity", "skip_special_tokens", "include_reasoning", "cache_control",
        }
    ),
    "completions": frozenset({"user", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"}),
    "responses": frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "include", "client_metadata", "stream_options",
        }
    ),
    "messages": frozenset(
        {
            "metadata", "service_tier", "context_management", "cache_control", "betas", "user_profile_id", "workspace_id",
            "billing_policy", "diagnostics",
        }
    ),
}  # fmt: skip
"""Fields that change no token."""

REFUSED: Final[Mapping[Api, Mapping[str, tuple[object, ...]]]] = {
    "chat": {
        "audio": (), "modalities": (["text"],), "prediction": (), "functions": ([],), "function_call": ("none", "auto"),
        "web_search_options": (), "moderation": (),
    },
    "completions": {"suffix": ("",), "best_of": (1,)},
    "responses": {
        "background": (False,), "conversation": (), "previous_response_id": (), "prompt": (), "truncation": ("disabled",),
        "max_tool_calls": (), "context_management": ([],), "moderation": (), "multi_agent": (), "access_programs": (),
        "background_options": (), "image": (),
    },
    "messages": {
        "container": (), "mcp_servers": ([],), "inference_geo": ("global",), "speed": ("standard",), "fallbacks": ([],),
        "fallback_credit_token": (), "compaction": (), "thread": (),
    },
}  # fmt: skip
"""Fields without effect here -> values that ask for nothing; None always asks for nothing."""

_NO_THREADS: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Anthropic's tool runner asks the server to keep the conversation; after this refusal it sends the whole conversation itself."""


def check_known(names: Container[str], body: Mapping[str, Any]) -> None:
    """Refuse a body with a field that is not in ``names``.

    Raises:
        HttpError: 400 that names the first such field.
    """
    for name in body:
        if name not in names:
            raise HttpError(400, f"the field {shown(name)} is unknown here; leave it out", param=name, code="unknown_parameter")


def check_fields(api: Api, body: Mapping[str, Any]) -> None:
    """Refuse a body with a field that has no effect here.

    Raises:
        HttpError: 400 that names the first such field.
    """
    check_known(HONOURED[api] | HARMLESS[api] | REFUSED[api].keys(), body)
    for name, value in body.items():
        if name not in REFUSED[api]:
            continue
        if value is not None and value not in REFUSED[api][name]:
            raise HttpError(
                400,
                f"{name}={shown(value)} is not supported by this server; leave it out",
                param=name,
                code="unsupported_value",
                details=_NO_THREADS if name == "thread" else None,
            )


def take_sampling(body: dict[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Remove the sampling fields from a body and return them as keywords of :class:`SamplingParams`.

    Args:
        defaults: values of the checkpoint for fields that the body does not have.

    Raises:
        RequestError: ``logit_bias`` is not a mapping from token ids to numbers.
    """
    given = {name: body.pop(name) for name in list(body) if name in _SAMPLING}
    found: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if "seed" in found:
        found["seq_seed"] = found.pop("seed")
    if "min_tokens" in found:
        found["first_n_token_no_eos"] = found.pop("min_tokens")
    if found.get("top_k") == 0:
        found["top_k"] = -1
    if "logit_bias" in found:
        found["logit_bias"] = _bias(found["logit_bias"])
    return found


def _bias(given: object) -> dict[int, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias={shown(given)} is not a mapping; give an object from token ids to numbers")
    if len(given) > _MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} entries, the limit is {_MAX_BIASES}; name fewer tokens")
    try:
        return {int(token_id): value for token_id, value in given.items()}
    except ValueError:
        wrong = next(each for each in given if not each.lstrip("-").isdecimal())
        raise RequestError(f"logit_bias names {shown(wrong)}, which is not a token id; use whole numbers as keys") from None


def make_params(sampling: Mapping[str, Any], **others: Any) -> SamplingParams:  # noqa: ANN401  (values of any type)
    """Sampling parameters; the message of an error has the names of the protocols.

    Raises:
        HttpError: 400 for a value out of range.
    """
    try:
        return SamplingParams(**sampling, **others)
    except RequestError as error:
        message = str(error).replace("seq_seed", "seed").replace("first_n_token_no_eos", "min_tokens")
        name = message.partition("=")[0].partition(" ")[0]
        raise HttpError(400, message, param=name if name in _SAMPLING else None, code="invalid_value") from error


def as_count(name: str, given: object, low: int, high: int) -> int:
    """A whole number of a body; raises :class:`RequestError`."""
    return as_whole_number(name, given, low, high, f"a whole number from {low} to {high}")


def as_switch(name: str, given: object, *, default: bool) -> bool:
    """A boolean of a body, ``default`` for null; raises :class:`RequestError`."""
    return default if given is None else as_flag(name, given)


def stop_strings(given: object) -> tuple[str, ...]:
    """The stop strings of a body: null, a string, or a list of at most 16 strings.

    Raises:
        RequestError: the value is another one.
    """
    several = () if given is None else (given,) if isinstance(given, str) else given
    if not is_list(several):
        raise RequestError(f"stop={shown(given)} is neither a string nor a list; give strings")
    found = tuple(several)
    if len(found) > 16 or not all(isinstance(each, str) and 0 < len(each) <= 1024 for each in found):
        raise RequestError("stop has an unusable entry; give at most 16 strings of 1 to 1024 characters")
    return found


def usage_options(body: dict[str, Any], *, is_stream: bool) -> bool:
    """Remove ``stream_options`` from a body; returns whether the stream ends with a chunk of usage.

    Raises:
        RequestError: the options are given without a stream, or are not an object of booleans.
    """
    options = body.pop("stream_options", None)
    if options is None:
        return False
    if not is_stream:
        raise RequestError("stream_options needs stream=true; set it, or leave stream_options out")
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options={shown(options)} is not an object; give include_usage")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise RequestError(f"stream_options has the unknown field {shown(name)}; leave it out")
        as_flag(f"stream_options.{name}", value)
    return bool(options.get("include_usage"))
