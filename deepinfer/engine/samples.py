"""Several answers to one request.  Scheduler and executor treat each answer as a separate request.

The first answer is added like any other request.  The other answers branch from it when the prompt is computed, so that they
share its pages.  This module makes the ids of answers and splits them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from deepinfer.errors import RequestError, shown
from deepinfer.request import Request, RequestOutput

SEPARATOR: Final = "\0"
"""Separates a request's id and the number of an answer; no caller's id contains it."""


class Samples:
    """Maps requests with more than one answer to their answers.

    Invariant: it holds exactly the requests with n > 1 that still have an unfinished answer.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._open: dict[str, list[str]] = {}  # request -> ids of its unfinished answers

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def split(self, request: Request) -> list[Request]:
        """One request for each answer; the request itself if it has only one answer.  ``request`` must have a seed.

        Raises:
            RequestError: the request's id contains the separator.
        """
        if SEPARATOR in request.request_id:
            raise RequestError(f"request id {shown(request.request_id)} has a zero character; choose another")
        if request.params.n == 1:
            return [request]
        return [
            request.sample(sample_idx, f"{request.request_id}{SEPARATOR}{sample_idx}") for sample_idx in range(request.params.n)
        ]

    def enter(self, request: Request, parts: Iterable[Request]) -> None:
        """Record that ``request`` was admitted as ``parts``."""
        if request.params.n > 1:
            self._open[request.request_id] = [part.request_id for part in parts]

    def parts(self, request_id: str) -> list[str]:
        """Ids of the unfinished answers of a request; the given id itself if the request is not held here."""
        return list(self._open.get(request_id, [request_id]))

    def groups(self) -> list[list[str]]:
        """:meth:`parts` of all requests that are held here."""
        return list(self._open.values())

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; :meth:`relabel` discards later records of their answers."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def relabel(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Replace the ids of answers by the callers' ids; remove records of dropped requests."""
        return [named for output in outputs if (named := self._relabel(output)) is not None]

    def _relabel(self, output: RequestOutput) -> RequestOutput | None:
        request_id, separator, number = output.request_id.partition(SEPARATOR)
        if not separator:
            return output
        parts = self._open.get(request_id)
        if parts is None or output.request_id not in parts:
            return None
        if output.finished:
            parts.remove(output.request_id)
            if not parts:
                del self._open[request_id]
        return replace(output, request_id=request_id, sample_idx=int(number))
