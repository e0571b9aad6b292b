"""Measures the HTTP server: CPU time of an event, time until a first token, and a full queue.

Each server is a process of its own, so its CPU time and its memory are its own.  The readers are in the process of the benchmark
and look at their connections every few milliseconds, so no send wakes a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy.typing as npt
from tabulate import tabulate

from deepinfer.bench.texts import held_out_texts
from deepinfer.config import EngineArgs, ServerArgs, load_config
from deepinfer.engine import ipc
from deepinfer.engine.builtin import NANO_DIRECTORY
from deepinfer.engine.client import AsyncEngineClient, EngineStats, Take
from deepinfer.engine.files import OutputFile
from deepinfer.engine.loader import model_directory
from deepinfer.errors import EngineError
from deepinfer.model.progress import progress_bar
from deepinfer.request import FinishReason, RequestOutput, SamplingParams
from deepinfer.server.app import make_app, make_service
from deepinfer.server.serve import make_listener, run_loop
from deepinfer.tokenizer import Tokenizer

_STEP_S: Final = 0.02
"""Time between two tokens of a stream."""
_LOOK_S: Final = 0.003
_BEGIN_S: Final = 60.0
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_PROMPT_TOKENS: Final = (100, 4000)
_NUM_HIGH, _NUM_REFUSED = 20, 100
"""Urgent requests that come after the queue is full, and further requests that find it full."""


# The processes that serve.


class Host(Protocol):
    """A server to measure; it is made in its own process."""

    def open(self) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
        """The ASGI application and the object that answers commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage:
    """What a process has used: CPU seconds since its start, bytes of memory now."""

    cpu_s: float
    memory_bytes: int


def _memory_bytes(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Commands:
    """Answers the commands that every server has."""

    async def usage(self) -> _Usage:
        """What this process has used."""
        return _Usage(cpu_s=time.process_time(), memory_bytes=_memory_bytes("self"))


class _Feeder(_Commands, ABC):
    """Gives one item to each open stream at each step.

    Invariant: a stream is open until it has got the last item.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.num_open = 0

    @abstractmethod
    def give(self, item: Any) -> None:  # noqa: ANN401  (records, or bytes)
        """Give an item to all open streams."""

    async def feed(self, num_streams: int) -> float:
        """Wait for the streams, give all items, and wait for the ends of the streams; returns CPU seconds."""
        while self.num_open < num_streams:
            await asyncio.sleep(_LOOK_S)
        loop, before = asyncio.get_running_loop(), time.process_time()
        at = loop.time()
        for item in self.items:
            self.give(item)
            at += _STEP_S
            await asyncio.sleep(max(0.0, at - loop.time()))
        while self.num_open:
            await asyncio.sleep(_LOOK_S)
        return time.process_time() - before


class _Frames(_Feeder):
    """A bare ASGI application: it sends frames that are ready, and does nothing else."""

    def __init__(self, items: Sequence[bytes]) -> None:
        super().__init__(items)
        self._queues: list[asyncio.Queue[bytes]] = []

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:  # noqa: ANN401
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues.append(queue)
        self.num_open += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in self.items:
            await send({"type": "http.response.body", "body": await queue.get(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self._queues.remove(queue)
        self.num_open -= 1

    def give(self, item: bytes) -> None:
        for queue in self._queues:
            queue.put_nowait(item)


class _Replay(_Feeder):
    """An engine that gives the same tokens to every request, at no cost."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        super().__init__([[_record(each, number, len(token_ids))] for number, each in enumerate(token_ids, 1)])
        self.is_alive = True
        self.facts = ipc.Ready(
            max_model_len=1 << 20,
            max_num_seqs=1024,
            max_num_batched_tokens=2048,
            ignore_len=1 << 20,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_id,
            pid=os.getpid(),
            takes_images=False,
            sampling_defaults={},
            memory=ipc.Memory(device="cpu", weight_bytes=0, cache_bytes=0, num_cache_tokens=0),
        )
        self._takers: list[tuple[Take, asyncio.Event]] = []

    async def follow(self, *_args: Any, take: Take, **_given: Any) -> None:  # noqa: ANN401
        """As the engine's client."""
        ended = asyncio.Event()
        self._takers.append((take, ended))
        self.num_open += 1
        await ended.wait()
        self.num_open -= 1

    def give(self, item: Sequence[RequestOutput]) -> None:
        for take, ended in self._takers:
            if not take(item):
                ended.set()
        self._takers = [each for each in self._takers if not each[1].is_set()]

    async def stats(self) -> EngineStats:
        """This engine counts nothing, so its server has no metrics."""
        raise EngineError("the engine that replays tokens has no statistics; ask a server with a model")


def _record(token_id: int, number: int, count: int) -> RequestOutput:
    is_last = number == count
    return RequestOutput(
        request_id="replayed",
        prompt_len=9,
        token_id=token_id,
        finished=is_last,
        finish_reason=FinishReason.LENGTH if is_last else None,
        num_output_tokens=number,
        max_num_batched_tokens=2048,
    )


class _Timed(_Commands):
    """An engine that notes when requests come and when their first tokens come."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self.facts = client.facts
        self.arrivals: dict[str, float] = {}
        self.firsts: dict[str, float] = {}

    @property
    def is_alive(self) -> bool:
        """As the engine's client."""
        return self._client.is_alive

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
        """As the engine's client."""
        name = request_id.rpartition("-")[0]
        self.arrivals[name] = time.monotonic()

        def note(records: Sequence[RequestOutput]) -> bool:
            self.firsts.setdefault(name, time.monotonic())
            return take(records)

        await self._client.follow(request_id, prompt_token_ids, params, images, take=note, priority=priority, salt=salt)

    async def stats(self) -> EngineStats:
        """As the engine's client."""
        return await self._client.stats()

    async def times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Request id -> time of arrival at the engine, and of the first token."""
        return self.arrivals, self.firsts

    async def core_memory(self) -> int:
        """Bytes of memory of the engine's process."""
        return _memory_bytes(self._client.pid)

    async def halt(self) -> None:
        """Stop the engine's process, so that all requests wait."""
        os.kill(self._client.pid, signal.SIGSTOP)

    async def go_on(self) -> None:
        """Let the engine's process run."""
        os.kill(self._client.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BareHost:
    frames: Sequence[bytes]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Any, Any]]:
        app = _Frames(self.frames)
        yield app, app


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayHost:
    token_ids: Sequence[int]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Any, Any]]:
        tokenizer = Tokenizer.from_dir(NANO_DIRECTORY)
        engine = _Replay(tokenizer, self.token_ids)
        args = ServerArgs(served_model_names=("bench",), max_waiting=100_000, api_keys=())
        yield make_app(make_service(engine, args, load_config(NANO_DIRECTORY), tokenizer)), engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineHost:
    model: str
    device: str
    max_waiting: int

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Any, Any]]:
        folder = model_directory(self.model)
        args = EngineArgs(model=self.model, device=self.device, max_model_len=8192, num_drafts=0, disable_log_stats=True)
        client = await AsyncEngineClient.start(args, progress=False)
        engine = _Timed(client)
        settings = ServerArgs(served_model_names=("bench",), max_waiting=self.max_waiting, api_keys=())
        yield make_app(make_service(engine, settings, load_config(folder), Tokenizer.from_dir(folder))), engine
        await client.close()


def _serve(pipe: Connection, host: Host) -> None:
    """The main function of a server's process."""
    run_loop(_answer_commands(pipe, host))


async def _answer_commands(pipe: Connection, host: Host) -> None:
    commands: asyncio.Queue[tuple[str, tuple[Any, ...]] | None] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    async with host.open() as (app, answerer):
        listener = make_listener(app, "127.0.0.1", 0)
        serving = asyncio.ensure_future(listener.serve())
        while not listener.started:
            await asyncio.sleep(_LOOK_S)
        pipe.send(listener.servers[0].sockets[0].getsockname()[1])
        while (command := await commands.get()) is not None:
            name, given = command
            pipe.send(await getattr(answerer, name)(*given))
        listener.should_exit = True
        await serving


class _Server:
    """A server's process, seen from the benchmark."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.port: int = pipe.recv()

    def begin(self, name: str, *given: object) -> None:
        """Send a command."""
        self._pipe.send((name, given))

    def result(self) -> Any:  # noqa: ANN401  (each command has its own)
        """The answer to the last command."""
        return self._pipe.recv()

    def ask(self, name: str, *given: object) -> Any:  # noqa: ANN401
        """The answer to a command."""
        self.begin(name, *given)
        return self.result()


@contextlib.contextmanager
def _running(host: Host) -> Iterator[_Server]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, host))
    process.start()
    theirs.close()
    try:
        yield _Server(ours)
        ours.send(None)
        process.join(_BEGIN_S)
    finally:
        process.kill()
        process.join()


# The readers.


def _request(path: str, body: dict[str, Any], **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + data


def _connect(port: int, request: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(request)
    connection.setblocking(False)
    return connection


def _read_all(connections: Sequence[socket.socket]) -> list[bytes]:
    """Read until all connections are closed."""
    received: list[list[bytes]] = [[] for _ in connections]
    still_open = set(range(len(connections)))
    while still_open:
        time.sleep(_LOOK_S)
        for number in list(still_open):
            with contextlib.suppress(BlockingIOError):
                data = connections[number].recv(1 << 18)
                received[number].append(data)
                if not data:
                    still_open.discard(number)
                    connections[number].close()
    return [b"".join(each) for each in received]


def _frames_of(answer: bytes) -> list[bytes]:
    """The events of an answer in chunks."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return [each + b"\n\n" for each in body.split(b"\n\n") if each]


# The measurements.


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCost:
    """CPU time of an event of a stream.

    Attributes:
        num_streams, num_events: streams at once, and events of each.
        bare_us, server_us: microseconds of CPU for an event of a bare application and of the server, one for each run.
    """

    num_streams: int
    num_events: int
    bare_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median cost of the server's events relative to bare events of the same run."""
        return statistics.median(server / bare for server, bare in zip(self.server_us, self.bare_us, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Time until a first token: at the client, and the server's part of it; milliseconds, one for each request."""

    num_prompt_tokens: int
    total_ms: list[float]
    added_ms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """A full queue.

    Attributes:
        num_waiting: requests that waited.
        statuses: HTTP status -> requests that came to the full queue.
        server_bytes, core_bytes: memory that one waiting request takes in the server and in the engine's process.
        num_overtaken: most requests that came later and had their first token in an earlier step than a request of their class.
        num_before_high: waiting requests that had their first token before the last urgent request.
        seconds: time to serve all.
    """

    num_waiting: int
    statuses: dict[str, int]
    server_bytes: float
    core_bytes: float
    num_overtaken: int
    num_before_high: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All measurements of the server."""

    model: str
    events: EventCost
    first_tokens: list[FirstTokens]
    queue: QueueReport


def _measure_events(token_ids: Sequence[int], num_streams: int, repeats: int) -> EventCost:
    body = {"model": "bench", "stream": True, "max_tokens": len(token_ids), "thinking": {"type": "disabled"}}
    request = _request(_CHAT, body | {"messages": [{"role": "user", "content": "Hello"}]})

    def run(server: _Server) -> tuple[float, bytes]:
        connections = [_connect(server.port, request) for _ in range(num_streams)]
        server.begin("feed", num_streams)
        answers = _read_all(connections)
        num_events = sum(each.count(b"\n\n\r\n") for each in answers)  # chunks, each with one event or more
        return 1e6 * server.result() / num_events, answers[0]

    with _running(_ReplayHost(token_ids=token_ids)) as server:
        frames = _frames_of(run(server)[1])
        cost = EventCost(num_streams=num_streams, num_events=len(frames))
        with _running(_BareHost(frames=frames)) as bare, progress_bar(repeats, unit="run", desc="events") as bar:
            run(bare)
            for _ in range(repeats):
                cost.server_us.append(run(server)[0])
                cost.bare_us.append(run(bare)[0])
                bar.update()
    return cost


def _measure_first_tokens(server: _Server, repeats: int) -> list[FirstTokens]:
    found = []
    for num_tokens in _PROMPT_TOKENS:
        totals, names = [], [f"first-{num_tokens}-{number}" for number in range(repeats)]
        for name in names:
            # ``random`` has a token for each byte.
            message = {"role": "user", "content": "x" * num_tokens}
            body = {"model": "bench", "stream": True, "max_tokens": 2, "messages": [message], "ignore_eos": True}
            begin = time.monotonic()
            with _connect(server.port, _request(_CHAT, body, x_request_id=name)) as connection:
                connection.setblocking(True)
                received = b""
                while b"data: " not in received:
                    received += connection.recv(1 << 16)
                totals.append(time.monotonic() - begin)
        arrivals, firsts = server.ask("times")
        engine = [firsts[name] - arrivals[name] for name in names]
        found.append(
            FirstTokens(
                num_prompt_tokens=num_tokens,
                total_ms=[1e3 * each for each in totals],
                added_ms=[1e3 * (total - each) for total, each in zip(totals, engine, strict=True)],
            )
        )
    return found


def _measure_queue(server: _Server, num_waiting: int) -> QueueReport:
    body = {"model": "bench", "max_tokens": 1, "prompt": [5, 6]}  # short, because the engine is not measured
    before = server.ask("usage").memory_bytes, server.ask("core_memory")
    server.ask("halt")
    names = [f"normal-{number:06d}" for number in range(num_waiting)]
    connections = [_connect(server.port, _request(_COMPLETIONS, body, x_request_id=each)) for each in names]
    _wait_for_arrivals(server, "normal-", num_waiting)
    waiting = server.ask("usage").memory_bytes
    refused = _read_all([_connect(server.port, _request(_COMPLETIONS, body)) for _ in range(_NUM_REFUSED)])
    high = [f"high-{number}" for number in range(_NUM_HIGH)]
    connections += [_connect(server.port, _request(_COMPLETIONS, body, x_request_id=each, x_priority="high")) for each in high]
    _wait_for_arrivals(server, "high-", _NUM_HIGH)
    begin = time.monotonic()
    server.ask("go_on")
    answers = _read_all(connections)
    seconds = time.monotonic() - begin
    after = server.ask("core_memory")
    assert all(each.startswith(b"HTTP/1.1 200") for each in answers), "a waiting request was not served"
    statuses: dict[str, int] = {}
    for each in refused:
        told = each.split()[1].decode() + (" with retry-after" if b"retry-after: " in each else "")
        statuses[told] = statuses.get(told, 0) + 1
    arrivals, firsts = server.ask("times")
    last_high = max(firsts[each] for each in high)
    return QueueReport(
        num_waiting=num_waiting,
        statuses=statuses,
        server_bytes=(waiting - before[0]) / num_waiting,
        core_bytes=(after - before[1]) / num_waiting,
        num_overtaken=_most_overtaken([firsts[each] for each in sorted(names, key=arrivals.__getitem__)]),
        num_before_high=sum(firsts[each] < last_high for each in names),
        seconds=seconds,
    )


def _wait_for_arrivals(server: _Server, prefix: str, count: int) -> None:
    until = time.monotonic() + _BEGIN_S
    while sum(each.startswith(prefix) for each in server.ask("times")[0]) < count:
        assert time.monotonic() < until, "the server does not take the requests"
        time.sleep(0.1)


def _most_overtaken(firsts: Sequence[float]) -> int:
    """The most requests that overtook one; ``firsts`` are times of first tokens in the order of arrival.

    Tokens of one step come within a few milliseconds and do not overtake each other.
    """
    return max(sum(later < each - 0.01 for later in firsts[number:]) for number, each in enumerate(firsts))


def run_serve(
    model: str, *, device: str = "auto", num_streams: int = 200, num_tokens: int = 300, num_waiting: int = 2000, repeats: int = 5
) -> Report:
    """Measure the server.

    Args:
        model, device: the real engine, as in :class:`EngineArgs`.
        num_streams: streams of the cost of events.
        num_tokens: tokens of each of them; they are held-out prose, at one token each 20 ms.
        num_waiting: requests of the full queue.
        repeats: runs of the cost of events, and requests for first tokens.
    """
    tokenizer = Tokenizer.from_dir(NANO_DIRECTORY)
    prose = "\n\n".join(str(each) for text in held_out_texts() if text.kind == "prose" for each in text.segments)
    events = _measure_events(tokenizer.encode(prose[: 10 * num_tokens])[:num_tokens], num_streams, repeats)
    with _running(_EngineHost(model=model, device=device, max_waiting=num_waiting)) as server:
        first_tokens = _measure_first_tokens(server, repeats)
        queue = _measure_queue(server, num_waiting)
    return Report(model=model, events=events, first_tokens=first_tokens, queue=queue)


def render(report: Report) -> str:
    """The report as tables."""
    events, queue = report.events, report.queue
    lines: list[list[object]] = [
        [name, f"{statistics.median(each):.1f}", f"{min(each):.1f} … {max(each):.1f}"]
        for name, each in (("bare application", events.bare_us), ("deepinfer", events.server_us))
    ]
    lines.append(["ratio", f"{events.ratio:.2f}", ""])
    title = f"{events.num_streams} streams of {events.num_events} events, one each {1e3 * _STEP_S:.0f} ms"
    parts = [title, tabulate(lines, headers=["CPU of an event, µs", "median", "min … max"], disable_numparse=True)]
    lines = [
        [
            each.num_prompt_tokens,
            f"{statistics.median(each.total_ms):.1f}",
            f"{statistics.median(each.added_ms):.1f}",
            f"{min(each.added_ms):.1f} … {max(each.added_ms):.1f}",
        ]
        for each in report.first_tokens
    ]
    headers = ["prompt tokens", "first token after ms", "of it by the server", "min … max"]
    parts += [f"first token of {report.model}", tabulate(lines, headers=headers, disable_numparse=True)]
    told = ", ".join(f"{count} x {status}" for status, count in queue.statuses.items())
    lines = [
        ["requests that waited", queue.num_waiting],
        ["answers to further requests", told],
        ["memory of the server for each, kB", f"{queue.server_bytes / 1e3:.1f}"],
        ["memory of the engine for each, kB", f"{queue.core_bytes / 1e3:.1f}"],
        ["most requests that overtook one of their class", queue.num_overtaken],
        ["requests before the last of 20 urgent ones", queue.num_before_high],
        ["all served within s", f"{queue.seconds:.1f}"],
    ]
    parts += ["full queue", tabulate(lines, disable_numparse=True, tablefmt="plain")]
    return "\n\n".join(parts)


def write_json(report: Report, path: Path) -> None:
    """Write a report into a file."""
    values = asdict(report)
    values["events"]["ratio"] = report.events.ratio
    OutputFile(path).replace((json.dumps(values, indent=2) + "\n").encode())
