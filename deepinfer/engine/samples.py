"""Several answers to one request: for the scheduler and the executor each answer is a request of its own.

The first answer is added like any other request; the others branch from it once the prompt is computed, so that they share its
pages.  This is where their ids are made and taken apart again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from deepinfer.errors import RequestError, shown
from deepinfer.request import Request, RequestOutput

SEPARATOR: Final = "\0"
"""Stands between a request's id and the number of an answer; no caller's id has it."""


class Samples:
    """Which answers belong to which request.

    Invariant: it knows exactly the requests with more than one answer that have one without a last record.
    """

    def __init__(self) -> None:
        """No requests."""
        self._open: dict[str, list[str]] = {}  # request -> ids of its answers that have not ended

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def split(self, request: Request) -> list[Request]:
        """One request for each answer of one with a seed; the request itself if it wants only one.

        Raises:
            RequestError: its id cannot be told from the id of an answer.
        """
        if SEPARATOR in request.request_id:
            raise RequestError(f"request id {shown(request.request_id)} has a zero character; choose another")
        if request.params.n == 1:
            return [request]
        return [
            request.sample(sample_idx, f"{request.request_id}{SEPARATOR}{sample_idx}") for sample_idx in range(request.params.n)
        ]

    def enter(self, request: Request, parts: Iterable[Request]) -> None:
        """``request`` was taken in as ``parts``."""
        if request.params.n > 1:
            self._open[request.request_id] = [part.request_id for part in parts]

    def parts(self, request_id: str) -> list[str]:
        """Ids of the answers of a request that have not ended; its own id if it is not known here."""
        return list(self._open.get(request_id, [request_id]))

    def groups(self) -> list[list[str]]:
        """:meth:`parts` of all requests that are known here."""
        return list(self._open.values())

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; records of their answers that are still on the way are nobody's."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def relabel(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Records under the ids that callers know; without those of dropped requests."""
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
