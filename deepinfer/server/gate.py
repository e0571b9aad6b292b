"""Admission: how many requests wait, and whether the server takes more.

A request waits from its arrival to its first token.  Requests of one priority class share one bounded queue, so a flood of one
class does not lock the others out.  The engine orders the requests; the gate only counts them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from deepinfer.server.failures import HttpError

PRIORITIES: Final = {"high": 1, "normal": 0, "low": -1}
"""Priority class -> the engine's priority."""
_RETRY_AFTER_S: Final = 2


class Ticket:
    """One open request."""

    def __init__(self, gate: Gate, priority: str) -> None:
        self._gate = gate
        self._priority = priority
        self._is_waiting = True

    def begin(self) -> None:
        """The first token has come, or the request has ended."""
        if self._is_waiting:
            self._is_waiting = False
            self._gate.num_waiting[self._priority] -= 1


class Gate:
    """Counts open requests.

    Invariant: ``num_waiting`` of a class is at most ``max_waiting``, and the sum of all classes is at most ``num_open``.

    Attributes:
        is_draining: whether new requests are refused.
        num_waiting: priority class -> requests without a first token.
        num_open: requests that have not ended.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.num_waiting: Counter[str] = Counter()
        self.num_open = 0

    @contextmanager
    def enter(self, priority: str) -> Iterator[Ticket]:
        """Admit a request for the time of the context.

        Raises:
            HttpError: 400 for an unknown class, 503 while the server drains, 429 if the queue of the class is full.
        """
        if priority not in PRIORITIES:
            raise HttpError(
                400, f"x-priority={priority[:60]!r} is unknown; use one of {', '.join(PRIORITIES)}", param="x-priority"
            )
        if self.is_draining:
            raise HttpError(503, "the server shuts down; send the request to another server", retry_after_s=_RETRY_AFTER_S)
        if self.num_waiting[priority] >= self._max_waiting:
            raise HttpError(
                429,
                f"{self._max_waiting} requests of priority {priority} wait already, which is the limit; try again later",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )
        ticket = Ticket(self, priority)
        self.num_waiting[priority] += 1
        self.num_open += 1
        self._idle.clear()
        try:
            yield ticket
        finally:
            ticket.begin()
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()
