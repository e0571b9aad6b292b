"""A client of Chat Completions for ``deepinfer chat --url``.  It needs nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.errors import EngineError, RequestError, StepFailed, reason, shown

_SILENCE_S: Final = 120.0
"""Longest wait for the next byte; a server sends signs of life more often."""

_FIELDS: Final[Mapping[str, str]] = {"first_n_token_no_eos": "min_tokens", "stop_token_id": "stop_token_ids"}
"""Option of the command line -> field of Chat Completions with another name."""
_LOCAL: Final = (
    "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_drafts", "adaptive_drafts", "draft_sampling",
    "allowed_token_id", "banned_token_id", "ebnf",
)  # fmt: skip
"""Options that a request cannot carry."""


def request_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Chat Completions for options of ``deepinfer chat``.

    Raises:
        RequestError: a request cannot carry an option.
    """
    for name in _LOCAL:
        if name in options:
            told = f"--{name.replace('_', '-')} has no effect with --url"
            raise RequestError(f"{told}; leave it out, or set it where the server starts")
    fields = {_FIELDS.get(name, name): value for name, value in options.items()}
    schema, regex = fields.pop("json_schema", None), fields.pop("regex", None)
    if schema is not None and regex is not None:
        raise RequestError("--json-schema and --regex exclude each other; give one of them")
    if regex is not None:
        fields["response_format"] = {"type": "regex", "regex": regex}
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _schema(schema)}}
    return fields


def _schema(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"--json-schema is not JSON ({error}); give a schema as JSON") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer.

    Attributes:
        number: index of the answer.
        reasoning, content: text that the part adds.
        finish_reason: why the answer ended, or None.
    """

    number: int
    reasoning: str
    content: str
    finish_reason: str | None


class ChatServer:
    """A server at an address.

    Attributes:
        usage: the token counts of the last answer; {} if it did not end.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """Use the server at ``url``, which may end in ``/v1``.

        Raises:
            RequestError: ``url`` is not the address of a server.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"--url {shown(url)} is not an address; write for example http://127.0.0.1:8000")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        self.usage: Mapping[str, Any] = {}

    def model(self) -> str:
        """Name of the server's first model; errors as for :meth:`answer`."""
        with self._open("/v1/models", None) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def answer(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Send a request of Chat Completions and return its answer in parts, as they come.

        Raises:
            RequestError: the server refuses the request.
            StepFailed: the server cannot be reached, or fails.
        """
        self.usage = {}
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("/v1/chat/completions", sent) as answer:
            for line in self._lines(answer):
                if line.startswith(b"data: {"):
                    yield from self._pieces(json.loads(line[6:]))

    def _pieces(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        if event.get("error"):
            raise StepFailed(f"the server ended the answer: {event['error']['message']}")
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            yield Piece(
                number=choice["index"],
                reasoning=delta.get("reasoning_content") or "",
                content=delta.get("content") or "",
                finish_reason=choice["finish_reason"],
            )

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from answer
        except (OSError, http.client.HTTPException) as error:
            raise StepFailed(f"the connection to {self._url} broke ({reason(error)}); try again") from error

    @contextlib.contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            answer = urllib.request.urlopen(request, timeout=_SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error.code, error.read()) from error
        except (OSError, http.client.HTTPException) as error:
            raise StepFailed(
                f"{self._url} cannot be reached ({reason(error)}); start deepinfer serve there, or give another --url"
            ) from error
        with answer:
            yield answer


def _refused(status: int, body: bytes) -> EngineError:
    """The error of an answer with a status above 399."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answers with status {status}; check the address"
    return RequestError(message) if status < 500 else StepFailed(message)
