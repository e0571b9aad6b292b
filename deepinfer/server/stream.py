"""The transport of one generation: from the engine's records to an HTTP answer.

The status line goes out with the first event, so an error before it is an ordinary HTTP error.  A task waits for the client's
disconnect during the whole request, because no server library reports it on a send.  A disconnect cancels the generation, which
aborts the request in the engine.  Records that come while a client reads slowly are joined into one push and one send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from starlette.types import Receive, Send

from deepinfer.errors import EngineError, Overloaded
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.asked import Asked, Engine
from deepinfer.server.failures import HttpError, as_http
from deepinfer.server.gate import PRIORITIES, Ticket

logger = logging.getLogger(__name__)

EVENT_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_KEEP_ALIVE: Final = b": keep-alive\n\n"


class Disconnected(Exception):
    """The client has left."""


class Generation:
    """One generation and its answer.

    Attributes:
        num_tokens: output tokens so far, for the log.
    """

    def __init__(
        self, engine: Engine, asked: Asked, *, request_id: str, priority: str, salt: bytes, ticket: Ticket, keep_alive_s: float
    ) -> None:
        self._engine = engine
        self._asked = asked
        self._request_id = request_id
        self._priority = priority
        self._salt = salt
        self._ticket = ticket
        self._keep_alive_s = keep_alive_s
        self._has_begun = False
        self._sent_s = time.monotonic()
        self.num_tokens = 0

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
        writer = self._asked.writer
        alive = asyncio.ensure_future(self._keep_alive(send, headers)) if writer.is_stream else None
        try:
            async with asyncio.timeout(None if deadline_s == float("inf") else deadline_s):
                await self._generate(send, headers)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = HttpError(408, f"the request was not finished within its deadline of {deadline_s:g} s; allow more time")
            if not self._has_begun:
                raise error from None
            if not isinstance(error, EngineError):
                logger.exception("request %s failed", self._request_id)
            failure = as_http(error)
            with contextlib.suppress(RuntimeError):  # the writer's processor is closed already
                await self._send(send, headers, writer.fail(failure, self._request_id))
            await send({"type": "http.response.body", "body": b""})
        finally:
            if alive is not None:
                alive.cancel()
            writer.close()

    async def _generate(self, send: Send, headers: dict[str, str]) -> None:
        writer = self._asked.writer
        async with contextlib.aclosing(self._batches()) as batches:
            async for prompt_idx, records in batches:
                self._ticket.begin()
                _check(records)
                self.num_tokens += sum(record.token_id is not None for record in records)
                events = writer.push(prompt_idx, records)
                if events:
                    await self._send(send, headers, events)
                if writer.is_complete:
                    break
        body = writer.finish()
        if writer.is_stream:
            await self._send(send, headers, body)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send_whole(send, 200, {**headers, "content-type": "application/json"}, body)

    async def _batches(self) -> AsyncGenerator[tuple[int, Sequence[RequestOutput]], None]:
        """The records of all prompts, each step with the index of its prompt."""
        prompts = self._asked.prompts
        if len(prompts) == 1:
            async with contextlib.aclosing(self._steps(0)) as steps:
                async for records in steps:
                    yield 0, records
            return
        news: asyncio.Queue[tuple[int, Sequence[RequestOutput]] | Exception | None] = asyncio.Queue()

        async def read(prompt_idx: int) -> None:
            try:
                async with contextlib.aclosing(self._steps(prompt_idx)) as steps:
                    async for records in steps:
                        news.put_nowait((prompt_idx, records))
            except Exception as error:
                news.put_nowait(error)
            else:
                news.put_nowait(None)

        readers = [asyncio.ensure_future(read(prompt_idx)) for prompt_idx in range(len(prompts))]
        num_open = len(readers)
        try:
            while num_open:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _steps(self, prompt_idx: int) -> AsyncGenerator[Sequence[RequestOutput], None]:
        return self._engine.steps(
            f"{self._request_id}-{prompt_idx}",
            self._asked.prompts[prompt_idx],
            self._asked.params,
            self._asked.images,
            priority=PRIORITIES[self._priority],
            salt=self._salt,
        )

    async def _send(self, send: Send, headers: dict[str, str], events: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send(_start(200, {**headers, **EVENT_HEADERS}))
        self._sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _keep_alive(self, send: Send, headers: dict[str, str]) -> None:
        """Send a comment whenever nothing was sent for a while; clients skip comments."""
        while True:
            rest_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._send(send, headers, _KEEP_ALIVE)


def _check(records: Sequence[RequestOutput]) -> None:
    """Raise the error that a record reports."""
    for record in records:
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
