"""The client's end of the border: the core process, the ways to it, and how all that is given back.

It belongs to one event loop and one process.  The core must go when its client does, whatever becomes of the client: closed,
forgotten, its loop ended, its process killed.  And no process that the client's program starts may change that: a fork inherits
descriptors, so neither side relies on the lifeline alone, but watches the other's process as well, where the system can (pidfd).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec

import zmq

import deepinfer
from deepinfer.config import EngineArgs
from deepinfer.engine import ipc
from deepinfer.engine.process import command
from deepinfer.errors import ConfigError, EngineError, StepFailed

P = ParamSpec("P")
END_S: Final = 10.0
"""What the core gets for ending after its last request; then it is killed."""
_MAX_PATH: Final = 100
"""Bytes of a socket's path; the system allows 107."""
_LAST_MESSAGES_S: Final = 0.05
"""How long messages may be on their way from a process that has ended."""
_BURST: Final = 64
"""Messages taken in one go; then others in the event loop have their turn."""
_LOOK_S: Final = 0.005


def _watch(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the system has none.

    Raises:
        ProcessLookupError: there is no such process any more.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # before Linux 5.3, or forbidden
        return None


class Link:
    """A core process, the socket and the lifeline to it.

    Invariant: only the loop's thread touches the socket while the loop runs.

    Attributes:
        has_ended: whether the core is gone and its last message was handed on.
        error: why, once it has ended.
    """

    def __init__(self, take: Callable[[ipc.FromCore], None], end: Callable[[], None]) -> None:
        """For the running event loop; ``take`` gets each message, ``end`` is called after the last one.  Both are held weakly."""
        self.has_ended = False
        self._take = weakref.WeakMethod(take)
        self._end = weakref.WeakMethod(end)
        self._pid = os.getpid()
        # Weak: what the loop holds holds this, and the registry of finalizers as well, so the loop would never be garbage.
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._folder = Path(tempfile.mkdtemp(prefix="deepinfer-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._border = self._context.socket(zmq.DEALER)
        self._border.set_hwm(0)
        self._lifeline: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: threading.Thread | None = None
        self._core_pid: int | None = None
        self._watched: list[int] = []  # descriptors of processes
        self._heard: set[int] = set()  # descriptors that the loop reads
        self._words = b""
        self._num_received = 0
        self._is_ending = False
        self._is_released = False
        self._ear: weakref.ref[_Ear] | None = None
        _links.add(self)

    # Where we are.

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that the link belongs to."""
        return os.getpid() != self._pid

    @property
    def is_released(self) -> bool:
        """Whether everything was given back."""
        return self._is_released

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the link's event loop."""
        try:
            return asyncio.get_running_loop() is self._loop()
        except RuntimeError:
            return False

    @property
    def is_heard(self) -> bool:
        """Whether the link's event loop runs, here or in another thread."""
        loop = self._loop()
        return loop is not None and loop.is_running()

    def check_place(self) -> None:
        """Return if the caller is where the link can be used.

        Raises:
            ConfigError: it is a forked child, or runs in another event loop.
        """
        if self.is_forked:
            raise ConfigError(
                f"this client was made in process {self._pid}, and process {os.getpid()} is a fork of it; start one in the child"
            )
        if not self.is_here:
            raise ConfigError(
                "this client belongs to the event loop that started it, and this is another; start a client in this one"
            )

    def call(self, what: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call in the loop's thread, now if it is this one or if no loop runs any more, else soon."""
        loop = self._loop()
        if not self.is_here and loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # it was closed at this moment
                loop.call_soon_threadsafe(functools.partial(what, *args, **kwargs))
                return
        what(*args, **kwargs)

    # Use.

    @property
    def pid(self) -> int:
        """Of the core process; until it has told it, of the program that was started."""
        assert self._process is not None, "there is a process from start() on"
        return self._core_pid or self._process.pid

    @property
    def error(self) -> EngineError:
        """Why the core has ended."""
        assert self._process is not None, "only a process that was started can end"
        words = ipc.unpack_last_words(self._words)
        return words or StepFailed(f"the core process {_how_it_ended(self._process)}; its log may say more, start another engine")

    def start(self, args: EngineArgs, *, progress: bool, program: Sequence[str]) -> None:
        """Run the core process.

        Raises:
            ConfigError: the folder for temporary files, or the program, is not usable.
        """
        path = self._folder / "core"
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(f"{path} is too long for a socket; set TMPDIR to a folder with a path of at most 70 characters")
        self._border.bind(f"ipc://{path}")
        self._lifeline, theirs = socket.socketpair()
        self._lifeline.setblocking(False)
        root = str(Path(deepinfer.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        ourselves = _watch(self._pid)
        passed = [theirs.fileno()] + ([] if ourselves is None else [ourselves])
        try:
            self._process = subprocess.Popen(
                [*program, *command(f"ipc://{path}", theirs.fileno(), ourselves, args, progress=progress)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, "PYTHONPATH": paths},
                process_group=0,  # Ctrl-C in a terminal is for the client, also while the core has yet to learn to ignore it
            )
        except OSError as error:
            raise ConfigError(f"cannot run {program[0]} ({error.strerror}); name a program that exists") from error
        finally:
            theirs.close()
            if ourselves is not None:
                os.close(ourselves)
        # Waits for the process so that nobody else has to, whoever forgets this object; else it becomes a zombie and a warning.
        self._reaper = threading.Thread(target=self._process.wait, name="deepinfer-reaper", daemon=True)
        self._reaper.start()
        ear = _Ear(self)
        self._ear = weakref.ref(ear)
        weakref.finalize(ear, self.release)
        self._listen(self._lifeline.fileno(), self._hear)
        self._listen(self._option(zmq.FD), self._receive)
        self._watch_process(self._process.pid)
        self._receive()

    def is_served_by(self, pid: int) -> None:
        """The core has said what its process is; it differs from the one started behind a wrapper."""
        assert self._process is not None, "it has said so"
        self._core_pid = pid
        if pid != self._process.pid:
            self._watch_process(pid)

    def send(self, message: ipc.Message | None, frames: Sequence[ipc.Frame] = ()) -> None:
        """Send a message, or the frames of one, at once; in the loop's thread.  If the core is gone the message is lost."""
        if self._is_released:
            return
        with contextlib.suppress(zmq.Again):  # the queue has no limit: there is nobody at the other end
            self._border.send_multipart(frames if message is None else ipc.pack(message), zmq.NOBLOCK)
        # The socket's descriptor tells of changes only, and sending may have eaten one.
        loop = self._loop()
        if loop is not None and self._option(zmq.EVENTS) & zmq.POLLIN:
            loop.call_soon(self._receive)

    def _option(self, option: int) -> int:
        value = self._border.getsockopt(option)
        assert isinstance(value, int), "only options that are numbers are asked for"
        return value

    # Ends.

    def hang_up(self) -> None:
        """Cut the lifeline for everybody who inherited it; from any thread."""
        if self._lifeline is not None and not self.is_forked:
            with contextlib.suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_RDWR)

    async def wait(self, seconds: float) -> None:
        """Wait so long for the process to end, and kill it if it does not; from any loop."""
        process = self._process
        if process is None:
            return
        until, is_core_gone = time.monotonic() + seconds, False
        while process.poll() is None:
            if self.has_ended and not is_core_gone:
                is_core_gone, until = True, time.monotonic() + END_S  # a profiler may have something to write
            if time.monotonic() >= until:
                self._kill(process)
            await asyncio.sleep(_LOOK_S)
        while self.is_heard and not self.has_ended and not self._is_released:
            self.call(self._begin_end)
            await asyncio.sleep(_LOOK_S)
        if self._reaper is not None:
            self._reaper.join()

    async def give_back(self) -> None:
        """:meth:`release`, and wait until that is done."""
        self.release()
        while self.is_heard and not self._is_released:
            await asyncio.sleep(_LOOK_S)
        self._release()

    def release(self) -> None:
        """Give everything back without waiting for the process, which ends by itself; from any thread, as often as you like."""
        if not self.is_forked and not self._is_released:
            self.hang_up()
            self.call(self._release)

    def leave_to_parent(self) -> None:
        """We are a fork: keep nothing that could keep the core."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _release(self) -> None:
        if self._is_released or self.is_forked:
            return
        self._is_released = True
        for fd in list(self._heard):
            self._ignore(fd)
        if self._lifeline is not None:
            self._lifeline.close()
        for fd in self._watched:
            os.close(fd)
        self._border.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        if self._core_pid is not None and self._core_pid != process.pid and len(self._watched) > 1:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._watched[-1], signal.SIGKILL)

    # What the loop hears.

    def _listen(self, fd: int, hear: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        loop, ear = self._loop(), self._ear() if self._ear is not None else None
        assert loop is not None and ear is not None, "the caller runs in the loop"  # noqa: PT018
        loop.add_reader(fd, ear, hear, *args)
        self._heard.add(fd)

    def _ignore(self, fd: int) -> None:
        self._heard.discard(fd)
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(fd)

    def _watch_process(self, pid: int) -> None:
        try:
            fd = _watch(pid)
        except ProcessLookupError:
            self._begin_end()
            return
        if fd is not None:
            self._watched.append(fd)
            self._listen(fd, self._see_end, fd)

    def _see_end(self, fd: int) -> None:
        """A process has ended; what it said before may still lie there."""
        self._ignore(fd)
        while self._hear():
            pass
        self._begin_end()

    def _hear(self) -> bool:
        """Something on the lifeline: last words, or its end; whether there may be more."""
        if self._lifeline is None or self._lifeline.fileno() not in self._heard:
            return False
        try:
            data = self._lifeline.recv(65536)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        self._words += data
        if not data:
            self._ignore(self._lifeline.fileno())
            self._begin_end()
        return bool(data)

    def _receive(self) -> None:
        """Hand on the messages that are there."""
        for _ in range(_BURST):
            if self._is_released:
                return
            try:
                frames = self._border.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_received += 1
            take = self._take()
            if take is not None:
                take(ipc.from_core(frames))
        loop = self._loop()
        if loop is not None:
            loop.call_soon(self._receive)

    def _begin_end(self) -> None:
        """The core is gone; messages that it sent before may be on their way."""
        if not self._is_ending and not self._is_released:
            self._is_ending = True
            self._await_last(-1)

    def _await_last(self, num_received: int) -> None:
        if self._is_released:
            return
        self._receive()
        loop = self._loop()
        if num_received != self._num_received and loop is not None:
            loop.call_later(_LAST_MESSAGES_S, self._await_last, self._num_received)
            return
        self.has_ended = True
        end = self._end()
        if end is not None:
            end()


class _Ear:
    """What the event loop calls.  Only the loop holds it, so it dies with the loop, however that ends."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __call__(self, hear: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        hear(*args)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "broke off"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


_links: weakref.WeakSet[Link] = weakref.WeakSet()
"""All of this process, for its forks."""


def _leave_to_parent() -> None:
    for link in _links:
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
