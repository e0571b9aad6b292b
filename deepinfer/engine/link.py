"""The client's side of the process border: starts the core process, connects to it, and releases its resources.

A link belongs to one event loop and one process.  The core must end when its client ends in any way: the client is closed or
garbage, its loop ends, or its process is killed.  Other processes of the client's program must not prevent that.  A fork inherits
descriptors, so the lifeline alone is not enough: each side also watches the other's process, if the system supports it (pidfd).
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
"""Time limit for the end of the core after its last request; then it is killed."""
_MAX_PATH: Final = 100
"""Most bytes of a socket's path; the system allows 107."""
_LAST_MESSAGES_S: Final = 0.05
"""How long to wait for messages of a process that has ended."""
_BURST: Final = 64
"""Most messages received at once; then other callbacks of the event loop run."""
_LOOK_S: Final = 0.005


def _watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the system does not support it.

    Raises:
        ProcessLookupError: the process does not exist any more.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # before Linux 5.3, or forbidden
        return None


class Link:
    """A core process, with its socket and its lifeline.

    Invariant: only the loop's thread uses the socket while the loop runs.

    Attributes:
        has_ended: whether the core has ended and its last message was delivered.
    """

    def __init__(self, take: Callable[[ipc.FromCore], None], end: Callable[[], None]) -> None:
        """Belong to the running event loop; ``take`` gets each message, then ``end`` is called.  Both are held weakly."""
        self.has_ended = False
        self._take = weakref.WeakMethod(take)
        self._end = weakref.WeakMethod(end)
        self._pid = os.getpid()
        # Weak, because callbacks and finalizers hold this object; with a strong reference the loop would never be garbage.
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
        self._listened: set[int] = set()  # descriptors that the loop reads
        self._words = b""
        self._num_received = 0
        self._is_ending = False
        self._is_released = False
        self._reader: weakref.ref[_Reader] | None = None
        _links.add(self)

    # Process and event loop of the caller.

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the link's process."""
        return os.getpid() != self._pid

    @property
    def is_released(self) -> bool:
        """Whether all resources are released."""
        return self._is_released

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the link's event loop."""
        try:
            return asyncio.get_running_loop() is self._loop()
        except RuntimeError:
            return False

    @property
    def is_loop_running(self) -> bool:
        """Whether the link's event loop runs, here or in another thread."""
        loop = self._loop()
        return loop is not None and loop.is_running()

    def check_place(self) -> None:
        """Check that the caller may use the link.

        Raises:
            ConfigError: the caller is in a forked child, or in another event loop.
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
        """Call ``what`` in the loop's thread: now if the caller is in it or if the loop does not run, else later."""
        loop = self._loop()
        if not self.is_here and loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # the loop was closed just now
                loop.call_soon_threadsafe(functools.partial(what, *args, **kwargs))
                return
        what(*args, **kwargs)

    # Use.

    @property
    def pid(self) -> int:
        """Process id of the core; before the core has reported it, the id of the started program."""
        assert self._process is not None, "start() runs first"
        return self._core_pid or self._process.pid

    @property
    def error(self) -> EngineError:
        """Why the core has ended."""
        assert self._process is not None, "start() runs first"
        words = ipc.unpack_last_words(self._words)
        return words or StepFailed(f"the core process {_how_it_ended(self._process)}; its log may say more, start another engine")

    def start(self, args: EngineArgs, *, progress: bool, program: Sequence[str]) -> None:
        """Start the core process.

        Raises:
            ConfigError: the folder for temporary files or the program is not usable.
        """
        path = self._folder / "core"
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(f"{path} is too long for a socket; set TMPDIR to a folder with a path of at most 70 characters")
        self._border.bind(f"ipc://{path}")
        self._lifeline, core_end = socket.socketpair()
        self._lifeline.setblocking(False)
        root = str(Path(deepinfer.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        client_fd = _watch(self._pid)
        passed = [core_end.fileno()] + ([] if client_fd is None else [client_fd])
        try:
            self._process = subprocess.Popen(
                [*program, *command(f"ipc://{path}", core_end.fileno(), client_fd, args, progress=progress)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, "PYTHONPATH": paths},
                process_group=0,  # Ctrl-C in a terminal goes only to the client, even before the core ignores it
            )
        except OSError as error:
            raise ConfigError(f"cannot run {program[0]} ({error.strerror}); name a program that exists") from error
        finally:
            core_end.close()
            if client_fd is not None:
                os.close(client_fd)
        # This thread waits for the process.  Without it, the process of a forgotten link becomes a zombie and gives a warning.
        self._reaper = threading.Thread(target=self._process.wait, name="deepinfer-reaper", daemon=True)
        self._reaper.start()
        reader = _Reader(self)
        self._reader = weakref.ref(reader)
        weakref.finalize(reader, self.release)
        self._listen(self._lifeline.fileno(), self._read_lifeline)
        self._listen(self._option(zmq.FD), self._receive)
        self._watch_process(self._process.pid)
        self._receive()

    def is_served_by(self, pid: int) -> None:
        """The core has reported its process id; it differs from the started process if that is a wrapper."""
        assert self._process is not None, "only a started core reports"
        self._core_pid = pid
        if pid != self._process.pid:
            self._watch_process(pid)

    def send(self, message: ipc.Message | None, frames: Sequence[ipc.Frame] = ()) -> None:
        """Send a message, or its frames, at once; call this in the loop's thread.  If the core has ended, the message is lost."""
        if self._is_released:
            return
        with contextlib.suppress(zmq.Again):  # the queue has no limit, so this means that the core has ended
            self._border.send_multipart(frames if message is None else ipc.pack(message), zmq.NOBLOCK)
        # The socket's descriptor only signals changes, and sending may have consumed a signal of a new message.
        loop = self._loop()
        if loop is not None and self._option(zmq.EVENTS) & zmq.POLLIN:
            loop.call_soon(self._receive)

    def _option(self, option: int) -> int:
        value = self._border.getsockopt(option)
        assert isinstance(value, int), "the caller asks only for options that are numbers"
        return value

    # Ending.

    def hang_up(self) -> None:
        """Shut the lifeline down, also for forks that inherited it; may be called from any thread."""
        if self._lifeline is not None and not self.is_forked:
            with contextlib.suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_RDWR)

    async def wait(self, seconds: float) -> None:
        """Wait ``seconds`` for the process to end, then kill it; may be called from any loop."""
        process = self._process
        if process is None:
            return
        until, is_core_gone = time.monotonic() + seconds, False
        while process.poll() is None:
            if self.has_ended and not is_core_gone:
                is_core_gone, until = True, time.monotonic() + END_S  # a profiler may still write its results
            if time.monotonic() >= until:
                self._kill(process)
            await asyncio.sleep(_LOOK_S)
        while self.is_loop_running and not self.has_ended and not self._is_released:
            self.call(self._begin_end)
            await asyncio.sleep(_LOOK_S)
        if self._reaper is not None:
            self._reaper.join()

    async def give_back(self) -> None:
        """Call :meth:`release` and wait until it is done."""
        self.release()
        while self.is_loop_running and not self._is_released:
            await asyncio.sleep(_LOOK_S)
        self._release()

    def release(self) -> None:
        """Release all resources; does not wait for the process, which ends by itself.

        It may be called from any thread and more than once.
        """
        if not self.is_forked and not self._is_released:
            self.hang_up()
            self.call(self._release)

    def leave_to_parent(self) -> None:
        """Close the lifeline in a fork, because an open copy could keep the core alive."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _release(self) -> None:
        if self._is_released or self.is_forked:
            return
        self._is_released = True
        for fd in list(self._listened):
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

    # Callbacks of the event loop.

    def _listen(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        loop, reader = self._loop(), self._reader() if self._reader is not None else None
        assert loop is not None and reader is not None, "the caller runs in the loop"  # noqa: PT018
        loop.add_reader(fd, reader, callback, *args)
        self._listened.add(fd)

    def _ignore(self, fd: int) -> None:
        self._listened.discard(fd)
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
        """A process has ended; read the rest of the lifeline first."""
        self._ignore(fd)
        while self._read_lifeline():
            pass
        self._begin_end()

    def _read_lifeline(self) -> bool:
        """Read last words or the end of the stream from the lifeline; returns whether there may be more to read."""
        if self._lifeline is None or self._lifeline.fileno() not in self._listened:
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
        """Receive the waiting messages and pass them to ``take``."""
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
        """The core has ended; wait for messages that it sent before."""
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


class _Reader:
    """The callable that the event loop calls.  Only the loop holds it, so it is freed with the loop; its finalizer releases."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __call__(self, callback: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        callback(*args)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "closed its lifeline"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


_links: weakref.WeakSet[Link] = weakref.WeakSet()
"""All links of this process; its forks close their lifelines."""


def _leave_to_parent() -> None:
    for link in _links:
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
