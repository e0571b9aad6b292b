"""An engine in another process: generate, abort, stats.

Owns the streams of records of open requests.  :class:`deepinfer.engine.link.Link` owns the core process and the connection.  A
client lives in one event loop and never blocks it.  When the core ends for any reason, every wait and every later call raises
:class:`StepFailed`, because no token is better than a wrong token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer.config import EngineArgs
from deepinfer.engine import ipc
from deepinfer.engine.link import END_S, Link
from deepinfer.errors import ContextTooLong, EngineError, RequestError, StepFailed, shown
from deepinfer.metrics import Snapshot
from deepinfer.request import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    as_bytes,
    as_names,
    as_number,
    as_priority,
    as_text,
    as_whole_numbers,
    is_list,
)
from deepinfer.scheduler.stats import SchedulerStats

CORE_PROGRAM: Final = (sys.executable, "-P", "-m", "deepinfer.engine.process")
_FOREVER_S: Final = 1e9
"""Longest wait; the timers of the system do not accept infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of an engine.

    Attributes:
        scheduler: current requests, pages, slots, and hits.
        metrics: counters and histograms since the start.
    """

    scheduler: SchedulerStats
    metrics: Snapshot


Take = Callable[[Sequence[RequestOutput]], bool]
"""Gets the records of a step; returns whether it wants more."""


class _Stream:
    """One open request.

    Invariant: no record follows an error, the finished records of all answers, or the taker's word that it wants no more.

    Attributes:
        num_open: answers that the core has not ended.
        is_ended: whether no more records come.
        error: why the request ended, if it failed.
        news: set at the end; the taker may set it too.
        last: the last record of each answer, or None before its first record.
    """

    def __init__(self, number: int, request_id: str, prompt_len: int, num_samples: int, take: Take) -> None:
        self.number = number
        self.request_id = request_id
        self.prompt_len = prompt_len
        self.num_open = num_samples
        self.is_ended = False
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.last: list[RequestOutput | None] = [None] * num_samples
        self._take = take

    def put(self, records: Sequence[RequestOutput]) -> None:
        """Give records to the taker; its error ends the request."""
        if self.is_ended:
            return
        for record in records:
            self.last[record.sample_idx] = record
            if record.finished:
                self.num_open -= 1
        try:
            wants_more = self._take(records)
        except Exception as error:
            self._end(error)
            return
        if not (wants_more and self.num_open):
            self._end(None)

    def fail(self, error: EngineError) -> None:
        """The core has ended the request with an error."""
        if not self.is_ended:
            self.num_open = 0
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.is_ended, self.error = True, error
        self.news.set()


class AsyncEngineClient:
    """An engine in its own process.

    Example::

        client = await AsyncEngineClient.start(EngineArgs(model="nano"))
        async for output in client.generate("a", [0, 5, 6], SamplingParams(max_tokens=8)):
            print(output.token_id)
        await client.close()

    It belongs to the event loop that started it.  In another loop and in a forked child, every method except :meth:`close` raises
    :class:`ConfigError`.  The core process ends with its client, even if the client is garbage or its loop ends.

    Invariant: ``_streams`` holds exactly the requests with an open iterator for which the core may still send records.
    """

    def __init__(self) -> None:
        """Do not call this; use :meth:`start`."""
        self._link = Link(self._handle, self._core_ended)
        weakref.finalize(self, self._link.release)
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._open_ids: dict[str, int] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._failure: EngineError | None = None
        self._is_closing = False
        self._facts: ipc.Ready | None = None
        self._news = asyncio.Event()  # set when the start has given facts or a failure

    @classmethod
    async def start(cls, args: EngineArgs, *, progress: bool = True, program: Sequence[str] = CORE_PROGRAM) -> AsyncEngineClient:
        """Start a core process and wait until it has loaded its model.

        Args:
            args: settings of the engine.
            progress: whether to show progress bars on stderr while the model loads.
            program: command line of the core process.  It may begin with ``numactl`` or a profiler, which must run until the core
                ends.

        Raises:
            ConfigError: settings or files are not usable, or the memory is too small.
            StepFailed: the process ended while it loaded the model.
        """
        client = cls()
        try:
            client._link.start(args, progress=progress, program=program)
            await client._news.wait()
            client._check()
        except BaseException:
            await client._end(0)
            raise
        return client

    @property
    def facts(self) -> ipc.Ready:
        """The core's facts about itself, which it sends when it is ready."""
        assert self._facts is not None, "start() returns after they have arrived"
        return self._facts

    @property
    def is_alive(self) -> bool:
        """Whether the core answers requests; False in a forked child."""
        return self._failure is None and not self._is_closing and not self._link.is_released and not self._link.is_forked

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._link.pid

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        images: Sequence[bytes] = (),
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncIterator[RequestOutput]:
        """The records of :meth:`steps` one by one, with the same arguments and errors."""
        steps = self.steps(request_id, prompt_token_ids, params, images, priority=priority, salt=salt)
        async with contextlib.aclosing(steps):
            async for records in steps:
                for record in records:
                    self._link.check_place()
                    yield record

    async def steps(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        images: Sequence[bytes] = (),
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncGenerator[Sequence[RequestOutput], None]:
        """Generate answers for one prompt; the first ``anext`` sends the request.

        Each item has all records that have arrived since the item before: those of one step, or of more steps if the caller is
        slow.  The records of ``n`` answers are interleaved; the iterator ends when all answers have ended.  Closing the iterator,
        or cancelling the task that waits in it, ends the request.  A slow caller does not delay other requests.

        Args:
            request_id: unique among open requests of this client.
            prompt_token_ids: [num_tokens] integers, with one placeholder for each image.
            params: sampling parameters; without a seed the request draws a random seed.
            images: encoded files in the order of the placeholders.
            priority: requests of higher priority are admitted first and preempted last.
            salt: tenant; requests share cached memory only with requests of the same salt.

        Raises:
            RequestError: the request cannot be served; other requests are not affected.
            Overloaded: the engine takes no requests now.
            StepFailed: the core process has ended.
            ConfigError: the caller is in another event loop than the client, or in a forked child.
        """
        waiting: list[RequestOutput] = []

        def take(records: Sequence[RequestOutput]) -> bool:
            waiting.extend(records)
            stream.news.set()
            return True

        with self._open(request_id, prompt_token_ids, params, images, priority, salt, take) as stream:
            while waiting or not stream.is_ended:
                self._link.check_place()
                await stream.news.wait()
                self._link.check_place()
                if not stream.is_ended:
                    stream.news.clear()
                if waiting:
                    records, waiting = waiting, []
                    yield records
            if stream.error is not None:
                raise stream.error

    async def follow(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        images: Sequence[bytes] = (),
        *,
        take: Take,
        priority: int = 0,
        salt: bytes = b"",
    ) -> None:
        """Generate answers for one prompt; ``take`` gets the records of each step when they arrive.

        It returns when all answers have ended, or when ``take`` returns False, which ends the request.  Cancelling ends the
        request too.  ``take`` runs in the callback of the event loop that receives the step, so no task is woken for a token.
        It must not wait, because it delays other requests.  Other arguments are those of :meth:`steps`.

        Raises:
            Exception: an error of ``take``, or an error that :meth:`steps` raises.
        """
        with self._open(request_id, prompt_token_ids, params, images, priority, salt, take) as stream:
            await stream.news.wait()
            if stream.error is not None:
                raise stream.error

    @contextlib.contextmanager
    def _open(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        images: Sequence[bytes],
        priority: int,
        salt: bytes,
        take: Take,
    ) -> Iterator[_Stream]:
        """Send a request; at the end of the context, abort it if it has not ended."""
        self._check()
        number = next(self._numbers)
        frames = _pack_request(number, request_id, prompt_token_ids, params, images, priority, salt, facts=self.facts)
        if request_id in self._open_ids:
            raise RequestError(f"request id {shown(request_id)} is in use; choose another")
        self._link.send(None, frames)
        stream = self._streams[number] = _Stream(number, request_id, len(frames[1]) // ipc.ID_BYTES, params.n, take)
        self._open_ids[request_id] = number
        try:
            yield stream
        finally:
            self._forget(stream)
            if stream.num_open and self.is_alive:
                self._link.call(self._link.send, ipc.Abort(call=0, numbers=[stream.number]))

    async def abort(self, request_ids: str | Iterable[str]) -> tuple[int, int]:
        """End requests; each iterator over one of them gets a last record with the reason ``abort``.

        Returns:
            The number of these requests that were open in the engine, and the number of their tokens.

        Raises:
            RequestError: ``request_ids`` is neither an id nor a list of ids.
        """
        known = dict.fromkeys(as_names("request_ids", request_ids))
        numbers = [self._open_ids[each] for each in known if each in self._open_ids]
        aborted = await self._call(ipc.Abort, numbers=numbers)
        for number in numbers:
            self._finish_aborted(number)
        return aborted.count, aborted.tokens

    async def stats(self) -> EngineStats:
        """The engine's counts at the next iteration of its loop."""
        told = await self._call(ipc.AskStats)
        return EngineStats(scheduler=told.scheduler, metrics=told.metrics)

    async def close(self, *, finish_within_s: float = 0.0) -> None:
        """Let open requests finish for at most ``finish_within_s`` seconds, abort the rest, end the process.

        Later calls of other methods raise.  This method may be called from any event loop.  If the client's own loop does not run
        any more, no caller can get records, so the process ends at once.  In a forked child this does nothing, because the
        process belongs to the parent.

        Args:
            finish_within_s: seconds; infinity lets all requests finish.

        Raises:
            RequestError: ``finish_within_s`` is not a number of seconds.
        """
        seconds = as_number("finish_within_s", finish_within_s, 0, math.inf, "0 or a positive number of seconds")
        finish_within_s = min(seconds, _FOREVER_S)
        if self._link.is_forked:
            return
        if self._link.is_loop_running:
            self._link.call(self._begin_closing, finish_within_s)
        else:
            self._is_closing = True
            self._link.hang_up()
        await self._end(finish_within_s + END_S)

    # Starting and ending.

    def _begin_closing(self, finish_within_s: float) -> None:
        if not self._is_closing and self._failure is None:
            self._link.send(ipc.Shutdown(finish_within_s=finish_within_s))
        self._is_closing = True

    async def _end(self, seconds: float) -> None:
        """Wait ``seconds`` for the process to end, kill it if it does not, and release everything; callable from any loop."""
        await self._link.wait(seconds)
        self._link.call(self._fail, StepFailed("the engine was closed"))
        await self._link.give_back()

    def _core_ended(self) -> None:
        """The process has ended and all its messages have arrived: fail all open streams and calls."""
        self._fail(self._link.error)

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits in it
            self._news.set()
            for stream in self._streams.values():
                stream.fail(type(error)(*error.args))
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(error)
        self._calls.clear()

    # Requests.

    def _check(self) -> None:
        """Check that the caller may use the core now."""
        self._link.check_place()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._is_closing:
            raise StepFailed("the engine was closed")

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        if self._open_ids.get(stream.request_id) == stream.number:
            del self._open_ids[stream.request_id]

    def _finish_aborted(self, number: int) -> None:
        """Put a last record for each unfinished answer of an aborted request."""
        stream = self._streams.get(number)
        if stream is None:
            return
        for sample_idx, last in enumerate(stream.last):
            if last is None or not last.finished:
                record = RequestOutput(
                    request_id=stream.request_id,
                    prompt_len=last.prompt_len if last is not None else stream.prompt_len,
                    token_id=None,
                    finished=True,
                    finish_reason=FinishReason.ABORT,
                    num_output_tokens=last.num_output_tokens if last is not None else 0,
                    max_num_batched_tokens=self.facts.max_num_batched_tokens,
                    num_cached_tokens=last.num_cached_tokens if last is not None else 0,
                    sample_idx=sample_idx,
                )
                stream.put([record])

    # Messages.

    async def _call(self, kind: type[ipc.Abort] | type[ipc.AskStats], **given: Any) -> Any:  # noqa: ANN401  (the answer's type depends on ``kind``)
        self._check()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(kind(call=number, **given))
            return await answer
        finally:
            self._calls.pop(number, None)

    def _handle(self, message: ipc.FromCore) -> None:
        match message:
            case ipc.Outputs():
                by_number: dict[int, list[RequestOutput]] = {}
                for number, record in zip(message.numbers, message.records, strict=True):
                    by_number.setdefault(number, []).append(record)
                for number, records in by_number.items():
                    if number in self._streams:
                        self._streams[number].put(records)
            case ipc.Refused():
                if message.number in self._streams:
                    self._streams[message.number].fail(ipc.error_of(message.kind, message.sentence))
            case ipc.Aborted() | ipc.Stats():
                call = self._calls.get(message.call)
                if call is not None and not call.done():
                    call.set_result(message)
            case ipc.Ready():
                self._facts = message
                self._link.is_served_by(message.pid)
                self._news.set()
            case ipc.Closed():
                for number in message.aborted:
                    self._finish_aborted(number)
                self._is_closing = True


def _pack_request(
    number: int,
    request_id: object,
    prompt_token_ids: object,
    params: object,
    images: object,
    priority: object,
    salt: object,
    *,
    facts: ipc.Ready,
) -> list[ipc.Frame]:
    """Frames of a request; checks that every value has the type and a size that the core can use.

    Raises:
        RequestError: a value has another type, or an engine with these ``facts`` cannot use it.
        ContextTooLong: the prompt is too long.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params of type {type(params).__name__} were given; give SamplingParams")
    params.check_vocabulary(facts.vocab_size)
    if not is_list(images):
        raise RequestError(f"images of type {type(images).__name__} were given; give a list of encoded files")
    message = ipc.Add(
        number=number,
        request_id=as_text("request_id", request_id),
        params=_changed(params, facts.max_model_len),
        priority=as_priority(priority),
        salt=as_bytes("salt", salt),
        arrived_s=time.monotonic(),
    )
    files = [as_bytes("an image", each) for each in images]
    ids = _pack_ids(prompt_token_ids, facts)
    try:
        return ipc.pack(message, [ids, *files])
    except UnicodeEncodeError as error:
        raise RequestError(
            f"request_id={shown(request_id)} cannot be sent, because it is not valid Unicode; choose another"
        ) from error


def _pack_ids(given: Any, facts: ipc.Ready) -> bytes:  # noqa: ANN401  (any value of a caller)
    """The frame of a prompt that an engine with these ``facts`` can serve."""
    limit = facts.max_model_len
    is_array = isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"
    if not is_array and not (isinstance(given, list | tuple) and len(given) >= limit):
        given = as_whole_numbers("prompt_token_ids", given, things="token ids", low=-(2**31), at_most=limit)
    if len(given) >= limit:
        setting = f"ignore_len={facts.ignore_len}" if len(given) >= facts.ignore_len else f"the context limit of {limit}"
        raise ContextTooLong(
            f"prompt of {len(given)} tokens leaves no room for output in {setting}; shorten the prompt or raise it"
        )
    if len(given) == 0:
        raise RequestError("the prompt is empty; give at least one token")
    try:
        return ipc.pack_ids(given)
    except ValueError as error:
        raise RequestError(f"prompt_token_ids are not usable ({error}); give token ids as integers") from error


def _changed(params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """The values of ``params`` that are not defaults; forced tokens are cut to the length of the longest answer."""
    values = {each.name: (getattr(params, each.name), each.default) for each in fields(params)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    if params.golden_token_ids is not None:
        changed["golden_token_ids"] = params.golden_token_ids[: min(params.max_tokens, max_model_len)]
    return changed
