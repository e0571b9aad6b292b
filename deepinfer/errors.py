"""The tree of all exceptions that deepinfer raises on purpose.

    EngineError
    ├── ConfigError      the operator must change a setting or a file; raised before serving starts
    │   └── CheckpointError   the files of a model do not match its configuration
    ├── RequestError     the caller must change the request; becomes HTTP 4xx
    │   └── ContextTooLong
    ├── GrammarFailed    one answer cannot follow its grammar any further; only that answer ends
    ├── Overloaded       no room now, try again; HTTP 429 or 503
    └── StepFailed       a device or a peer failed; the process exits and the router uses other replicas

A message says what was asked, what the limit is and what to do.  ``assert`` is for our own bugs, never for input.
:func:`shown` and :func:`reason` put the caller's values and other libraries' errors into messages.
"""

from __future__ import annotations

import re
from collections.abc import Sized

_MAX_SHOWN = 60
"""Characters of a value in a message."""
_MAX_REASON = 200
CONVERSION_ERRORS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of numpy, torch and a caller's classes if a value cannot be converted.  Errors of a caller's signal handler pass."""
_ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-fA-F]+")


class EngineError(Exception):
    """Root of all errors that deepinfer raises on purpose."""


class ConfigError(EngineError):
    """A setting, a configuration file or a model directory is not usable."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged or belongs to another configuration; the message lists all faults."""


class RequestError(EngineError):
    """A request cannot be served with these arguments."""


class ContextTooLong(RequestError):
    """Prompt plus requested output exceed the context limit."""


class GrammarFailed(EngineError):
    """An answer cannot follow its grammar any further: a limit is exceeded, or no token is allowed."""


class Overloaded(EngineError):
    """There is no room for the request now; the caller may try again later."""


class StepFailed(EngineError):
    """A device or a peer failed during a step; no result of the step may be used."""


def shown(value: object) -> str:
    """A caller's value as text for a message: one short line, without the address of an object."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value) if value.bit_length() <= 256 else f"a whole number of {value.bit_length()} bits"
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return f"{str.__repr__(value[:_MAX_SHOWN])}{_rest(value)}"
    if isinstance(value, bytes):
        return f"{bytes.__repr__(value[:_MAX_SHOWN])}{_rest(value)}"
    name = type(value).__name__[:_MAX_SHOWN]
    if isinstance(value, tuple | list | dict | set | frozenset | range):
        return f"a {name} of {len(value)}"
    item = plain(value)
    return f"an object of type {name}" if type(item) is type(value) else shown(item)


def _rest(value: Sized) -> str:
    return f"… ({len(value)} in all)" if len(value) > _MAX_SHOWN else ""


def plain(value: object) -> object:
    """The Python value of a numpy or torch scalar or of an array without dimensions; any other value unchanged."""
    item = getattr(value, "item", None)
    if getattr(value, "ndim", None) != 0 or not callable(item):
        return value
    try:
        return item()
    except CONVERSION_ERRORS:  # for example a tensor without data
        return value


def reason(error: BaseException) -> str:
    """The text of another library's error for a message: one short line, without the address of an object."""
    text = " ".join(_ADDRESS.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"
