"""The core process: loads a model, turns the loop, answers its client.

Started by :class:`deepinfer.engine.client.AsyncEngineClient` as a program of its own, so that neither the user's main module is
imported twice nor a fork inherits threads.  One thread does everything between two polls: take all messages, turn the loop once,
send what it brought in one message.  Without work it sleeps in the poll.  Beside it there are the executor's thread, threads that
decode images (their requests enter the loop when they are ready), and the watchdog.

It ends: when its client says so or SIGTERM comes (finish or abort, then a last message); when a step fails (no token is better
than a wrong one; the reason goes up the lifeline); when its client's process is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import math
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
import zmq

from deepinfer.config import EngineArgs, ModelConfig
from deepinfer.engine import ipc
from deepinfer.engine.observer import Observer
from deepinfer.errors import ConfigError, EngineError, Overloaded, RequestError, StepFailed, reason, shown
from deepinfer.request import Request, SamplingParams

if TYPE_CHECKING:
    # Importing this module costs no torch: the program that loads a model imports it, a client that only names us does not.
    from deepinfer.engine.loader import Loaded
    from deepinfer.engine.prompt import Prompt
    from deepinfer.images import Picture

logger = logging.getLogger(__name__)

Load = Callable[..., "Loaded"]
_FINISH_ON_SIGTERM_S: Final = 20.0
"""What running requests get after SIGTERM: container managers kill 30 s after it."""
_ORPHAN_GRACE_S: Final = 5.0
"""What a step in progress gets when the client's process is gone."""
_LOCKED_GRACE_S: Final = 10.0
"""By how much the last resort of the watchdog comes later than its limit."""
_LONGEST_S: Final = 1e9
"""As far ahead as a timer is set; timers of the system have a limit, and thirty years are as good as never."""
_LINGER_MS: Final = 1000
_IMAGE_THREADS: Final = 2
_NONE: Final[Mapping[int, bytes]] = {}


class Lifeline:
    """What tells the core that its client is there: a stream, whose other end a fork may have inherited, and a process.

    Attributes:
        fds: one of them is readable once the client is gone.
    """

    def __init__(self, stream_fd: int, client_fd: int | None, folder: Path) -> None:
        """Of descriptors that were passed to this process, ``client_fd`` a pidfd; ``folder`` has the socket's file."""
        self._stream = socket.socket(fileno=stream_fd)
        self.fds = [stream_fd] + ([] if client_fd is None else [client_fd])
        self._folder = folder
        for fd in self.fds:
            os.set_inheritable(fd, False)  # programs that this one starts must not keep them

    def is_cut(self, seconds: float) -> bool:
        """Whether the client goes within so many seconds."""
        return bool(select.select(self.fds, [], [], seconds)[0])

    def say(self, error: Exception) -> None:
        """Last words."""
        with contextlib.suppress(OSError):  # the client may be gone too
            self._stream.sendall(ipc.pack_last_words(error))

    def close(self) -> None:
        """Give the stream back."""
        self._stream.close()

    def bury_client(self) -> None:
        """Remove what the client would have removed."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Watchdog:
    """Watches the time that one step takes; ends the process when that is far too long, or when nobody needs it any more.

    A thread of Python looks about every second.  Should it never get to run, because a step holds the interpreter's lock, a
    thread that needs no lock dumps the stacks and ends the process a little later; the first one keeps putting that off.
    """

    def __init__(self, lifeline: Lifeline, *, warn_s: float, limit_s: float) -> None:
        """Watch steps entered with ``with``: stacks to stderr after ``warn_s``, the end after ``limit_s``."""
        self.warn_s = warn_s
        self.limit_s = limit_s
        self._period_s = min(1.0, warn_s / 4)
        self._last_resort_s = min(limit_s + _LOCKED_GRACE_S, _LONGEST_S)
        self._lifeline = lifeline
        self._since: float | None = None
        self._warned: float | None = None
        self._stopped = False
        threading.Thread(target=self._run, name="deepinfer-watchdog", daemon=True).start()

    def __enter__(self) -> None:
        """A step begins."""
        self._since = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The step is over."""
        self._since = None

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped = True
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped:
            if self._lifeline.is_cut(self._period_s):
                time.sleep(_ORPHAN_GRACE_S)
                if not self._stopped:
                    self._lifeline.bury_client()
                    os._exit(1)
            if not self._stopped:
                self._look(time.monotonic())

    def _look(self, now: float) -> None:
        since = self._since
        if since is None:
            faulthandler.cancel_dump_traceback_later()
            return
        faulthandler.dump_traceback_later(self._last_resort_s, exit=True)
        took = now - since
        if took > self.limit_s:
            limit = f"the limit is step_limit_s={self.limit_s:g}"
            sentence = f"a step has not ended for {took:.1f} s, {limit}; the log has the stacks, start another engine"
            logger.critical("%s", sentence)
            faulthandler.dump_traceback(all_threads=True)
            self._lifeline.say(StepFailed(sentence))
            os._exit(1)
        if took > self.warn_s and self._warned != since:
            self._warned = since
            logger.warning("a step has not ended for %.0f s; stacks of all threads follow", took)
            faulthandler.dump_traceback(all_threads=True)


class CoreProcess:
    """The loop around a core, and its side of the border.

    Invariant: ``_ids`` and ``_numbers`` are inverse, and name exactly the requests that the core has.
    """

    def __init__(
        self, loaded: Loaded, args: EngineArgs, border: zmq.Socket[bytes], lifeline: Lifeline, watchdog: Watchdog
    ) -> None:
        """Serve ``loaded`` to whoever is at the other end of ``border`` and ``lifeline``."""
        self._core = loaded.core
        self._config = loaded.config
        self._args = args
        self._border = border
        self._observer = Observer(loaded.core.stats, log_every=None if args.disable_log_stats else args.logging_interval_steps)
        self._watchdog = watchdog
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._preparing: dict[int, ipc.Add] = {}
        self._prepared: deque[tuple[int, Future[Prompt]]] = deque()
        self._image_threads: ThreadPoolExecutor | None = None
        self._wake_write, self._wake_read = socket.socketpair()
        self._wake_write.setblocking(False)
        self._deadline: float | None = None
        self._num_turns = 0
        self._lifeline_fds = lifeline.fds
        self._poller = zmq.Poller()
        for each in (border, *self._lifeline_fds, self._wake_read.fileno()):
            self._poller.register(each, zmq.POLLIN)

    def run(self) -> bool:
        """Serve until told to stop; returns whether the client is still there."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._drain(_FINISH_ON_SIGTERM_S))
        gc.collect()
        gc.freeze()
        gc.disable()
        self._send(
            ipc.Ready(
                max_model_len=self._args.max_model_len,
                max_num_seqs=self._args.max_num_seqs,
                max_num_batched_tokens=self._args.max_num_batched_tokens,
                ignore_len=self._args.ignore_len,
                vocab_size=self._config.vocab_size,
                eos_token_id=self._config.eos_token_id,
                pid=os.getpid(),
            )
        )
        while self._take():
            if not self._core.is_idle:
                self._turn()
            elif self._deadline is not None and not self._preparing:
                break
            if self._deadline is not None and time.monotonic() >= self._deadline:
                break
        else:
            self.close()
            return False
        unfinished = [*self._ids, *self._preparing]
        self._abort(unfinished)
        self._send(ipc.Closed(aborted=unfinished))
        self.close()
        return True

    def close(self) -> None:
        """Give everything back."""
        if self._image_threads is not None:
            self._image_threads.shutdown(wait=False, cancel_futures=True)
        with self._watchdog:  # it waits for the step in flight
            self._core.close()
        self._watchdog.stop()
        self._wake_write.close()
        self._wake_read.close()

    def _send(self, message: ipc.Message) -> None:
        self._border.send_multipart(ipc.pack(message))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: it has ended
            self._wake_write.send(b"\0")

    def _drain(self, seconds: float) -> None:
        """Take no more requests and stop after so many seconds, at once if asked for the second time."""
        self._deadline = time.monotonic() + (seconds if self._deadline is None else 0)
        self._wake()

    def _take(self) -> bool:
        """Take in all that is waiting, sleeping if there is no work; False when the client's process is gone."""
        timeout: int | None = None  # milliseconds
        if not self._core.is_idle:
            timeout = 0
        elif self._deadline is not None:
            timeout = math.ceil(1000 * max(0, self._deadline - time.monotonic())) if self._preparing else 0
        ready = dict(self._poller.poll(timeout))
        if any(fd in ready for fd in self._lifeline_fds):
            return False
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        while self._prepared:
            self._enter_prepared(*self._prepared.popleft())
        while True:
            try:
                frames = self._border.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message, bulk = ipc.from_client(frames)
            match message:
                case ipc.Add():
                    self._add(message, bulk)
                case ipc.Abort():
                    count, tokens = self._abort(message.numbers)
                    if message.call:
                        self._send(ipc.Aborted(call=message.call, count=count, tokens=tokens))
                case ipc.AskStats():
                    self._tell_stats(message.call)
                case ipc.Shutdown():
                    self._drain(message.finish_within_s)

    def _turn(self) -> None:
        begin = time.monotonic()
        with self._watchdog:
            outputs = self._core.step()
        now = time.monotonic()
        self._observer.stepped(outputs, now - begin, now)
        records = [each for each in outputs if each.request_id in self._numbers]
        if records:
            self._send(ipc.Outputs(numbers=[self._numbers[each.request_id] for each in records], records=records))
        for each in records:
            if each.finished and each.request_id in self._numbers and not self._core.is_unfinished(each.request_id):
                del self._ids[self._numbers.pop(each.request_id)]
        self._num_turns += 1
        if self._num_turns % self._args.gc_interval_steps == 0:
            gc.collect()

    def _tell_stats(self, call: int) -> None:
        metrics = self._observer.snapshot()
        self._send(ipc.Stats(call=call, scheduler=self._core.stats(), metrics=metrics))

    def _add(self, message: ipc.Add, bulk: Sequence[ipc.Frame]) -> None:
        try:
            if self._deadline is not None:
                raise Overloaded(
                    f"request {shown(message.request_id)} came while the engine shuts down; send it to another engine"
                )
            ids, images = ipc.unpack_ids(bulk[0]), bulk[1:]
            outside = (ids < 0) | (ids >= self._config.vocab_size) | (ids == self._config.image_token_id)
            if not images and not outside.any():
                self._enter(message, ids)
                return
        except (RequestError, Overloaded) as error:
            self._refuse(message.number, error)
            return
        if self._image_threads is None:
            self._image_threads = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix="deepinfer-images")
        self._preparing[message.number] = message
        future = self._image_threads.submit(_prepare, ids.tolist(), images, self._config)
        future.add_done_callback(lambda done: self._hand_over(message.number, done))

    def _hand_over(self, number: int, done: Future[Prompt]) -> None:
        """A prompt is prepared; called in a thread of its own."""
        self._prepared.append((number, done))
        self._wake()

    def _enter_prepared(self, number: int, done: Future[Prompt]) -> None:
        message = self._preparing.pop(number, None)
        if message is None:
            return  # aborted meanwhile
        try:
            prompt = done.result()
            self._enter(message, prompt.token_ids, prompt.pictures, prompt.image_hashes)
        except RequestError as error:
            self._refuse(number, error)

    def _enter(
        self,
        message: ipc.Add,
        token_ids: tuple[int, ...] | npt.NDArray[np.int32],
        pictures: Sequence[Picture] = (),
        image_hashes: Mapping[int, bytes] = _NONE,
    ) -> None:
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=cast("tuple[int, ...]", token_ids),  # which the request makes of an array
            params=SamplingParams(**message.params),
            priority=message.priority,
            salt=message.salt,
            image_hashes=image_hashes,
        )
        self._core.add(request, pictures)
        self._ids[message.number] = message.request_id
        self._numbers[message.request_id] = message.number
        self._observer.arrived(request, message.arrived_s)

    def _refuse(self, number: int, error: EngineError) -> None:
        self._observer.refused(error)
        self._send(ipc.Refused(number=number, kind=type(error).__name__, sentence=str(error)))

    def _abort(self, numbers: Sequence[int]) -> tuple[int, int]:
        preparing = sum(self._preparing.pop(number, None) is not None for number in numbers)
        ids = [self._ids.pop(number) for number in numbers if number in self._ids]
        for request_id in ids:
            del self._numbers[request_id]
        count, tokens = self._core.abort(ids)
        self._observer.aborted(ids)
        return count + preparing, tokens


def _prepare(token_ids: list[int], images: Sequence[ipc.Frame], config: ModelConfig) -> Prompt:
    """Runs in an image thread; whatever goes wrong with a picture is the fault of its request alone."""
    from deepinfer.engine.prompt import build_prompt, checked_ids

    try:
        return build_prompt(checked_ids(token_ids, config), [bytes(each) for each in images], config)
    except RequestError:
        raise
    except Exception as error:
        logger.exception("an image could not be prepared")
        raise RequestError(
            f"an image could not be prepared ({type(error).__name__}: {reason(error)}); send another file"
        ) from error


def command(endpoint: str, lifeline_fd: int, client_fd: int | None, args: EngineArgs, *, progress: bool) -> list[str]:
    """Arguments that :func:`main` understands; ``client_fd`` is a pidfd of the client's process, where there are such things.

    The settings go into a file beside the socket: one argument of a program has room for 128 KiB, a list of banned tokens may
    need more.
    """
    path = Path(endpoint.removeprefix("ipc://")).with_name("settings.json")
    path.write_text(json.dumps({**asdict(args), "progress": progress}), encoding="utf-8")
    return [endpoint, str(lifeline_fd), str(-1 if client_fd is None else client_fd), str(path)]


def _load(args: EngineArgs, *, progress: bool) -> Loaded:
    from deepinfer.engine.loader import load

    return load(args, progress=progress)


def main(arguments: Sequence[str], *, load: Load = _load) -> int:
    """Be a core process; returns the exit code: 0 after a clean end, 2 for settings, 1 for everything else."""
    endpoint, lifeline_fd, client_fd, path = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then shuts us down
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    faulthandler.enable()
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    progress = settings.pop("progress")
    folder = Path(endpoint.removeprefix("ipc://")).parent
    lifeline = Lifeline(int(lifeline_fd), int(client_fd) if int(client_fd) >= 0 else None, folder)
    try:
        args = EngineArgs.from_keywords(**settings)
        watchdog = Watchdog(lifeline, warn_s=args.step_warn_s, limit_s=args.step_limit_s)  # a client may go while we load, too
        has_client = _serve(load(args, progress=progress), args, endpoint, lifeline, watchdog)
    except ConfigError as error:
        logger.error("%s", error)
        lifeline.say(error)
        return 2
    except Exception as error:
        logger.exception("the core process ends")
        lifeline.say(error)
        logging.shutdown()
        os._exit(1)  # a thread in the middle of a broken step may never end, and nothing here is worth waiting for
    if not has_client:
        lifeline.bury_client()
    return 0


def _serve(loaded: Loaded, args: EngineArgs, endpoint: str, lifeline: Lifeline, watchdog: Watchdog) -> bool:
    """Serve until told to stop; returns whether the client is still there.  The last messages are on their way afterwards."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    border = context.socket(zmq.DEALER)
    border.set_hwm(0)
    border.linger = _LINGER_MS
    border.connect(endpoint)
    has_client = CoreProcess(loaded, args, border, lifeline, watchdog).run()
    border.close()
    context.term()
    return has_client


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
