"""Errors as HTTP answers: one status for each class of error, and the shape that each family of clients expects.

OpenAI's clients read ``{"error": {…}}``, Anthropic's ``{"type": "error", "error": {…}, "request_id": …}``.  Both clients repeat a
request after some statuses; the header ``x-should-retry`` tells them not to repeat a request that must fail again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from deepinfer.errors import ContextTooLong, EngineError, Overloaded, RequestError

Family = Literal["openai", "anthropic"]

_KINDS: Final[dict[int, tuple[str, str]]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("request_too_large", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}
"""Status -> type of the error for OpenAI's and for Anthropic's clients."""
_RETRIED: Final = (429, 503)
"""The same request may succeed later."""


class HttpError(EngineError):
    """A request ends with this status.

    Attributes:
        status: HTTP status.
        param: the field that is wrong, or None.
        code: short name of the cause for programs, or None.
        retry_after_s: seconds after which the client may try again, or None.
        details: what Anthropic's client reads to change the request, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = details


def as_http(error: Exception) -> HttpError:
    """The HTTP error for an exception of a handler; an error that is not ours is a fault of the server."""
    match error:
        case HttpError():
            return error
        case ContextTooLong():
            return HttpError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return HttpError(400, str(error))
        case Overloaded():
            return HttpError(503, str(error), retry_after_s=1)
        case RecursionError():  # only a body can be so deep
            return HttpError(400, "the body is nested too deeply; send a flatter one")
        case EngineError():
            return HttpError(500, str(error), code="engine_failed")
        case _:
            return HttpError(500, "the server failed; its log has the reason under the request id")


def error_value(error: HttpError, family: Family, request_id: str) -> dict[str, Any]:
    """The JSON value of an error."""
    openai, anthropic = _KINDS.get(error.status, _KINDS[500])
    if family == "anthropic":
        told = {"type": anthropic, "message": str(error)} | ({"details": error.details} if error.details is not None else {})
        return {"type": "error", "error": told, "request_id": request_id}
    return {"error": {"message": str(error), "type": openai, "param": error.param, "code": error.code}}


def error_headers(error: HttpError) -> dict[str, str]:
    """Headers of an error's answer."""
    headers = {"content-type": "application/json"}
    if error.status not in _RETRIED:
        headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return headers


def error_body(error: HttpError, family: Family, request_id: str) -> bytes:
    """The body of an error's answer."""
    return msgspec.json.encode(error_value(error, family, request_id))
