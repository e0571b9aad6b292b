"""The engine from another process: generate, abort, stats.

Owns the streams of those who wait for the core process; the process and the way to it are :class:`deepinfer.engine.link.Link`'s.
Lives in one event loop; nothing here blocks it.  Whatever ends the core ends every wait with :class:`StepFailed` at once, and so
does every later call: no token is better than a wrong one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
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
"""As long as a wait ever is: timers of the system take no more than some centuries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine counts.

    Attributes:
        scheduler: requests, pages, slots, hits as of now.
        metrics: counters and histograms since the start.
    """

    scheduler: SchedulerStats
    metrics: Snapshot


class _Stream:
    """Records of one request on their way to its caller.

    Invariant: nothing follows the finished records of all answers or an error.

    Attributes:
        last: of each answer, or None while there is none.
    """

    def __init__(self, number: int, request_id: str, prompt_len: int, num_samples: int) -> None:
        self.number = number
        self.request_id = request_id
        self.prompt_len = prompt_len
        self.last: list[RequestOutput | None] = [None] * num_samples
        self._waiting: deque[RequestOutput] = deque()
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def put(self, record: RequestOutput) -> None:
        self.last[record.sample_idx] = record
        self._waiting.append(record)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        self._error = self._error or error
        self._news.set()

    async def take(self) -> deque[RequestOutput]:
        """All records that are there, waiting for the first; raises when there are none to come."""
        while not self._waiting:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            self._news.clear()
            await self._news.wait()
        records, self._waiting = self._waiting, deque()
        return records


class AsyncEngineClient:
    """An engine in a process of its own.

    Example::

        client = await AsyncEngineClient.start(EngineArgs(model="nano"))
        async for output in client.generate("a", [0, 5, 6], SamplingParams(max_tokens=8)):
            print(output.token_id)
        await client.close()

    It belongs to the event loop that started it: in another one, and in a forked child, every method but :meth:`close` raises
    :class:`ConfigError`.  The core process ends with its client, also if that is forgotten or its loop ends.

    Invariant: ``_streams`` holds exactly the requests that the core may still send records for and somebody waits for.
    """

    def __init__(self) -> None:
        """Use :meth:`start`."""
        self._link = Link(self._handle, self._bury)
        weakref.finalize(self, self._link.release)
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._open_ids: dict[str, int] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._failure: EngineError | None = None
        self._is_closing = False
        self._facts: ipc.Ready | None = None
        self._news = asyncio.Event()  # of the start: facts or a failure

    @classmethod
    async def start(cls, args: EngineArgs, *, progress: bool = True, program: Sequence[str] = CORE_PROGRAM) -> AsyncEngineClient:
        """Start a core process and wait until it has loaded its model.

        Args:
            args: settings of the engine.
            progress: whether loading shows bars on stderr.
            program: what to run as the core process; put ``numactl`` or a profiler in front, which must stay until the core ends.

        Raises:
            ConfigError: settings, files or memory do not allow it.
            StepFailed: the process ended while it loaded.
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
        """What the core said about itself when it was ready."""
        assert self._facts is not None, "start() returns when they are there"
        return self._facts

    @property
    def is_alive(self) -> bool:
        """Whether the core answers; never in a forked child."""
        return self._failure is None and not self._is_closing and not self._link.is_released and not self._link.is_forked

    @property
    def pid(self) -> int:
        """Of the core process."""
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
        """Generate for one prompt; the request is sent with the first ``anext``.

        The records of ``n`` answers come mixed; the iterator ends when all of them have.
        Closing the iterator, or cancelling the task in it, ends the request.  A caller that is slow delays nobody else.

        Args:
            request_id: unique among open requests of this client.
            prompt_token_ids: [num_tokens] integers, one image placeholder an image.
            params: how to sample; without a seed the request draws its own.
            images: encoded files in the order of the placeholders.
            priority: the higher is admitted first and preempted last.
            salt: tenant; only requests of the same one share cached memory.

        Raises:
            RequestError: the request cannot be served; others are not touched.
            Overloaded: the engine takes no requests now.
            StepFailed: the core process has ended.
            ConfigError: this is another event loop than the client's, or a forked child.
        """
        self._check()
        number = next(self._numbers)
        frames = _pack_request(number, request_id, prompt_token_ids, params, images, priority, salt, facts=self.facts)
        if request_id in self._open_ids:
            raise RequestError(f"request id {shown(request_id)} is in use; choose another")
        self._link.send(None, frames)
        stream = self._streams[number] = _Stream(number, request_id, len(frames[1]) // ipc.ID_BYTES, params.n)
        self._open_ids[request_id] = number
        num_open = params.n
        try:
            while num_open:
                self._link.check_place()
                try:
                    records = await stream.take()
                except EngineError:
                    num_open = 0
                    raise
                for record in records:
                    self._link.check_place()
                    num_open -= record.finished
                    yield record
        finally:
            self._forget(stream)
            if num_open and self.is_alive:
                self._link.call(self._link.send, ipc.Abort(call=0, numbers=[stream.number]))

    async def abort(self, request_ids: str | Iterable[str]) -> tuple[int, int]:
        """End requests; whoever iterates over one gets a last record with the reason ``abort``.

        Returns:
            How many of them the engine still had, and how many tokens they had.

        Raises:
            RequestError: it is neither an id nor several.
        """
        known = dict.fromkeys(as_names("request_ids", request_ids))
        numbers = [self._open_ids[each] for each in known if each in self._open_ids]
        aborted = await self._call(ipc.Abort, numbers=numbers)
        for number in numbers:
            self._finish_aborted(number)
        return aborted.count, aborted.tokens

    async def stats(self) -> EngineStats:
        """Counts as of the core's next turn."""
        told = await self._call(ipc.AskStats)
        return EngineStats(scheduler=told.scheduler, metrics=told.metrics)

    async def close(self, *, finish_within_s: float = 0.0) -> None:
        """Let open requests finish for at most so many seconds, abort the rest, end the process; later calls raise.

        May be called from any event loop.  If the client's own does not run any more, nobody is there to take what would still
        come, and the process ends at once.  In a forked child nothing happens: the process is its parent's.

        Raises:
            RequestError: ``finish_within_s`` is no number of seconds; infinity lets all of them finish.
        """
        seconds = as_number("finish_within_s", finish_within_s, 0, math.inf, "0 or a positive number of seconds")
        finish_within_s = min(seconds, _FOREVER_S)
        if self._link.is_forked:
            return
        if self._link.is_heard:
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
        """Wait so many seconds for the process to end, kill it if it does not, and give everything back; from any loop."""
        await self._link.wait(seconds)
        self._link.call(self._fail, StepFailed("the engine was closed"))
        await self._link.give_back()

    def _bury(self) -> None:
        """The process has ended, and what it sent before is here: fail whoever still waits."""
        self._fail(self._link.error)

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            self._news.set()
            for stream in self._streams.values():
                stream.fail(error)
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(error)
        self._calls.clear()

    # Requests.

    def _check(self) -> None:
        """Return if the core can be asked for something, here and now."""
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
        """A last record for every answer of a request that was aborted, unless it ended before."""
        stream = self._streams.get(number)
        if stream is None:
            return
        for sample_idx, last in enumerate(stream.last):
            if last is None or not last.finished:
                stream.put(
                    RequestOutput(
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
                )

    # Messages.

    async def _call(self, kind: type[ipc.Abort] | type[ipc.AskStats], **given: Any) -> Any:  # noqa: ANN401  (the kind's answer)
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
                for number, record in zip(message.numbers, message.records, strict=True):
                    if number in self._streams:
                        self._streams[number].put(record)
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
    """Frames of a request, every value of the type that the core relies on and of a size that it can deal with.

    Raises:
        RequestError: a value has another type, or cannot be used by an engine of these ``facts``.
        ContextTooLong: the prompt is too long.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params of type {type(params).__name__} were given; make SamplingParams of them")
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
        raise RequestError(f"request_id={shown(request_id)} cannot be sent, being no valid Unicode; choose another") from error


def _pack_ids(given: Any, facts: ipc.Ready) -> bytes:  # noqa: ANN401  (whatever the caller gives)
    """The frame of a prompt that an engine of these ``facts`` may serve."""
    most = facts.max_model_len
    is_array = isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"
    if not is_array and not (isinstance(given, list | tuple) and len(given) >= most):
        given = as_whole_numbers("prompt_token_ids", given, things="token ids", low=-(2**31), at_most=most)
    if len(given) >= most:
        limit = f"ignore_len={facts.ignore_len}" if len(given) >= facts.ignore_len else f"the context limit of {most}"
        raise ContextTooLong(
            f"prompt of {len(given)} tokens leaves no room for output in {limit}; shorten the prompt or raise it"
        )
    if len(given) == 0:
        raise RequestError("the prompt is empty; give at least one token")
    try:
        return ipc.pack_ids(given)
    except ValueError as error:
        raise RequestError(f"prompt_token_ids are not usable ({error}); give token ids as integers") from error


def _changed(params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """The values of ``params`` that are not defaults; of forced tokens no more than an answer can have."""
    values = {each.name: (getattr(params, each.name), each.default) for each in fields(params)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    if params.golden_token_ids is not None:
        changed["golden_token_ids"] = params.golden_token_ids[: min(params.max_tokens, max_model_len)]
    return changed
