"""The transport of one generation: from the engine's records to an HTTP answer.

The status line goes out with the first event, so an error before it is an ordinary HTTP error.  A task waits for the client's
disconnect during the whole request, because no server library reports it on a send.  A disconnect cancels the generation, which
aborts the request in the engine.

The records of a step are written in the callback that receives them, because waking a task for each token would take a fifth of
the server's time.  Records that come while a client reads slowly are joined into one push and one send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import types
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Receive, Send

from deepinfer.errors import EngineError, Overloaded
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.asked import Asked, Engine, Writer
from deepinfer.server.failures import HttpError, as_http
from deepinfer.server.gate import PRIORITIES, Ticket

if TYPE_CHECKING:
    from deepinfer.server.tracing import RequestTrace  # imports an extra

logger = logging.getLogger(__name__)

EVENT_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_MAX_COLLECTED: Final = 256
"""Records that are collected for one push."""
_KEEP_ALIVE: Final = b": keep-alive\n\n"


class Disconnected(Exception):
    """The client has left."""


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waited: object) -> Generator[Any, Any, None]:
    """What is left of a coroutine that has begun and waits for ``waited``."""
    try:
        while True:
            yield waited
            waited = coroutine.send(None)
    except StopIteration:
        return
    finally:
        coroutine.close()


class _Events:
    """The event stream of one answer: its status line goes out with the first event.

    Attributes:
        has_begun: whether the status line was sent, or is being sent.
        sent_s: time of the last event.
    """

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send: Any = send
        self._headers = {**headers, **EVENT_HEADERS}
        self._opening = asyncio.Lock()
        self._is_open = False
        self.has_begun = False
        self.sent_s = time.monotonic()

    def put(self, events: bytes) -> Awaitable[None] | None:
        """Send events; returns the rest of the work if the client reads slowly.

        Every token comes through here.  The server library sends at once unless the connection is full, so no task is woken.
        """
        self.sent_s = time.monotonic()
        message = {"type": "http.response.body", "body": events, "more_body": True}
        sending = self._send(message) if self._is_open else self._put_first(message)
        try:
            waited = sending.send(None)
        except StopIteration:
            return None
        return _rest(sending, waited)

    async def _put_first(self, message: dict[str, object]) -> None:
        await self._open()
        await self._send(message)

    async def end(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self._open()
        await self._send({"type": "http.response.body", "body": events})

    async def _open(self) -> None:
        async with self._opening:  # a second sender waits for the status line
            if not self.has_begun:
                self.has_begun = True
                await self._send(_start(200, self._headers))
                self._is_open = True


class _Follower:
    """Writes the answers to one prompt.

    While a client reads slowly, records are collected.  Many of them become one push, so a waiting token takes the bytes of its
    text and no more, and the client gets few events when it reads again.

    Invariant: ``_collected`` and ``_late`` are empty unless a send waits.
    """

    def __init__(self, prompt_idx: int, writer: Writer, events: _Events, ticket: Ticket, trace: RequestTrace | None) -> None:
        self._trace = trace
        self._prompt_idx = prompt_idx
        self._writer = writer
        self._events = events
        self._ticket = ticket
        self._collected: list[RequestOutput] = []
        self._late: list[bytes] = []
        self._waiting: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def take(self, records: Sequence[RequestOutput]) -> bool:
        """Write the records of a step, or collect them; returns whether the answers need more."""
        self._ticket.begin()
        if self._trace is not None:
            self._trace.took(records)
        for record in records:
            if record.finished:
                _check(record)
        if self._error is not None:
            raise self._error
        if self._waiting is None:
            self._send(self._writer.push(self._prompt_idx, records))
        else:
            self._collected.extend(records)
            if len(self._collected) < _MAX_COLLECTED:
                return True
            self._push_collected()
        return not self._writer.is_complete(self._prompt_idx)

    def _push_collected(self) -> None:
        if self._collected:
            self._late.append(self._writer.push(self._prompt_idx, self._collected))
            self._collected = []

    def _send(self, made: bytes) -> None:
        rest = self._events.put(made) if made else None
        if rest is not None:
            self._waiting = asyncio.ensure_future(self._catch_up(rest))

    async def _catch_up(self, rest: Awaitable[None]) -> None:
        try:
            await rest
            self._waiting = None
            self._push_collected()
            late, self._late = self._late, []
            self._send(b"".join(late))
        except Exception as error:
            self._error, self._waiting = error, None

    async def finish(self) -> None:
        """Wait until everything is sent; raises the error of a send."""
        while self._waiting is not None:
            await self._waiting
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Send nothing more."""
        if self._waiting is not None:
            self._waiting.cancel()


class Generation:
    """One generation and its answer."""

    def __init__(
        self,
        engine: Engine,
        asked: Asked,
        *,
        request_id: str,
        priority: str,
        salt: bytes,
        ticket: Ticket,
        keep_alive_s: float,
        trace: RequestTrace | None,
    ) -> None:
        self._trace = trace
        self._engine = engine
        self._asked = asked
        self._request_id = request_id
        self._priority = priority
        self._salt = salt
        self._ticket = ticket
        self._keep_alive_s = keep_alive_s

    async def run(self, receive: Receive, send: Send, headers: dict[str, str], deadline_s: float) -> None:
        """Generate and send the answer.

        Raises:
            Disconnected: the client left; the request is aborted.
            Exception: the request failed before the first byte of its answer; nothing was sent.
        """
        work = asyncio.ensure_future(self._work(send, headers, deadline_s))
        watch = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            is_left = not work.done()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if is_left:
                    await work
        if is_left:
            raise Disconnected
        work.result()

    async def _work(self, send: Send, headers: dict[str, str], deadline_s: float) -> None:
        writer, events = self._asked.writer, _Events(send, headers)
        alive = asyncio.ensure_future(self._keep_alive(events)) if writer.is_stream else None
        try:
            async with asyncio.timeout(None if deadline_s == float("inf") else deadline_s):
                await self._follow_all(events)
                body = writer.finish()
                if writer.is_stream:
                    await events.end(body)
                else:
                    await send_whole(send, 200, {**headers, "content-type": "application/json"}, body)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = HttpError(408, f"the request was not finished within its deadline of {deadline_s:g} s; allow more time")
            if not events.has_begun:
                raise error from None
            if self._trace is not None:
                self._trace.failed(error)
            if not isinstance(error, EngineError):
                logger.exception("request %s failed", self._request_id)
            await events.end(writer.fail(as_http(error), self._request_id))
        finally:
            if alive is not None:
                alive.cancel()
            writer.close()

    async def _follow_all(self, events: _Events) -> None:
        """Write the answers to all prompts."""
        try:
            async with asyncio.TaskGroup() as group:
                for prompt_idx in range(len(self._asked.prompts)):
                    group.create_task(self._follow(prompt_idx, events))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _follow(self, prompt_idx: int, events: _Events) -> None:
        """Write the answers to one prompt."""
        follower = _Follower(prompt_idx, self._asked.writer, events, self._ticket, self._trace)
        try:
            await self._engine.follow(
                f"{self._request_id}-{prompt_idx}",
                self._asked.prompts[prompt_idx],
                self._asked.params,
                self._asked.images,
                take=follower.take,
                priority=PRIORITIES[self._priority],
                salt=self._salt,
            )
            await follower.finish()
        finally:
            follower.close()

    async def _keep_alive(self, events: _Events) -> None:
        """Send a comment whenever nothing was sent for a while; clients skip comments."""
        while True:
            rest_s = events.sent_s + self._keep_alive_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            elif (rest := events.put(_KEEP_ALIVE)) is not None:
                await rest


def _check(record: RequestOutput) -> None:
    """Raise the error that an answer's last record reports."""
    match record.finish_reason:
        case FinishReason.GRAMMAR_ERROR:
            raise HttpError(400, record.message or "the answer cannot follow its grammar", code="grammar_error")
        case FinishReason.ABORT:
            raise Overloaded("the request was aborted, because the server shuts down; send it to another server")
        case FinishReason.INSUFFICIENT:
            raise Overloaded("the request was preempted, because memory was short; try again later")
        case FinishReason.PROMPT_LENGTH_EXCEEDED:
            raise HttpError(400, "the prompt is too long for the engine; shorten it", code="context_length_exceeded")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: dict[str, str]) -> dict[str, object]:
    pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def send_whole(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    """Send a complete answer."""
    await send(_start(status, {**headers, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})
