"""The core process: loads a model, turns the loop, answers its client.

:class:`deepinfer.engine.client.AsyncEngineClient` starts it as a program of its own.  The user's main module is then not imported
twice, and no fork inherits threads.  One thread takes all messages, turns the loop once, and sends the records of the turn in one
message.  Without work it sleeps in the poll.  There are three more kinds of threads: the executor's thread, threads that decode
images, and the watchdog.  A request with images enters the loop when its images are decoded.

The process ends for three reasons.  Its client says so or SIGTERM comes: it finishes or aborts the requests and sends a last
message.  A step fails: no token is better than a wrong one, and the lifeline carries the reason.  The client's process is gone.
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
from deepinfer.engine.observed import ObservedCore
from deepinfer.errors import ConfigError, EngineError, Overloaded, RequestError, StepFailed, reason, shown
from deepinfer.request import Request, SamplingParams

if TYPE_CHECKING:
    # A client imports this module without torch.
    from deepinfer.engine.loader import Loaded
    from deepinfer.engine.prompt import Prompt
    from deepinfer.images import Picture

logger = logging.getLogger(__name__)

Load = Callable[..., "Loaded"]
_FINISH_ON_SIGTERM_S: Final = 20.0
"""Time for running requests after SIGTERM; container managers kill a process 30 s after it."""
_ORPHAN_GRACE_S: Final = 5.0
"""Time for a step in progress after the client's process is gone."""
_LOCKED_GRACE_S: Final = 10.0
"""Time between the watchdog's limit and its last resort."""
_LONGEST_S: Final = 1e9
"""The longest timer.  The system limits timers; thirty years mean never."""
_LINGER_MS: Final = 1000
_IMAGE_THREADS: Final = 2
_NONE: Final[Mapping[int, bytes]] = {}


class Lifeline:
    """Tells the core whether its client exists: a stream, whose other end a fork may have inherited, and a process.

    Attributes:
        fds: one of them is readable once the client is gone.
    """

    def __init__(self, stream_fd: int, client_fd: int | None, folder: Path) -> None:
        """Watch descriptors that this process got; ``client_fd`` is a pidfd.  ``folder`` contains the socket's file."""
        self._stream = socket.socket(fileno=stream_fd)
        self.fds = [stream_fd] + ([] if client_fd is None else [client_fd])
        self._folder = folder
        for fd in self.fds:
            os.set_inheritable(fd, False)  # programs started by this one must not keep them

    def is_cut(self, seconds: float) -> bool:
        """Whether the client ends within ``seconds``."""
        return bool(select.select(self.fds, [], [], seconds)[0])

    def say(self, error: Exception) -> None:
        """Send the client the reason for the end."""
        with contextlib.suppress(OSError):  # the client may be gone too
            self._stream.sendall(ipc.pack_last_words(error))

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def bury_client(self) -> None:
        """Remove the files that the client would have removed."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Watchdog:
    """Ends the process if a step takes far too long, or if the client is gone.

    A Python thread checks about every second.  It cannot run while a step holds the interpreter's lock.  Therefore a timer of
    ``faulthandler``, which needs no lock, dumps the stacks and ends the process a little later.  The thread renews the timer at
    every check.
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
        """Begin a step."""
        self._since = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the step."""
        self._since = None

    def stop(self) -> None:
        """Stop watching."""
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
    """The loop around a core, and the core's end of the connection to its client.

    Invariant: ``_ids`` and ``_numbers`` are inverse, and name exactly the requests that the core has.
    """

    def __init__(
        self, loaded: Loaded, args: EngineArgs, border: zmq.Socket[bytes], lifeline: Lifeline, watchdog: Watchdog
    ) -> None:
        """Serve ``loaded`` to the client at the other end of ``border`` and ``lifeline``."""
        self._observed = ObservedCore(loaded.core, log_every=None if args.disable_log_stats else args.logging_interval_steps)
        self._core = loaded.core
        self._config = loaded.config
        self._sampling_defaults = loaded.sampling_defaults
        self._memory = loaded.memory
        self._args = args
        self._border = border
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
        """Serve until told to stop; returns whether the client still exists."""
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
                takes_images=self._config.vision is not None,
                sampling_defaults=dict(self._sampling_defaults),
                memory=self._memory,
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
        """End the core, the threads and the sockets."""
        if self._image_threads is not None:
            self._image_threads.shutdown(wait=False, cancel_futures=True)
        with self._watchdog:  # it waits for the step in flight
            self._observed.close()
        self._watchdog.stop()
        self._wake_write.close()
        self._wake_read.close()

    def _send(self, message: ipc.Message) -> None:
        self._border.send_multipart(ipc.pack(message))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: the loop is awake already; closed: the loop has ended
            self._wake_write.send(b"\0")

    def _drain(self, seconds: float) -> None:
        """Take no more requests and stop after ``seconds``; a second call stops at once."""
        self._deadline = time.monotonic() + (seconds if self._deadline is None else 0)
        self._wake()

    def _take(self) -> bool:
        """Take in all messages, and sleep if there is no work.  False if the client's process is gone."""
        timeout: int | None = None  # milliseconds
        if not self._core.is_idle:
            timeout = None if self._core.waits_for_grammars and self._deadline is None else 0
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
        with self._watchdog:
            outputs = self._observed.step()
        for request_id, error in self._core.refused.items():
            number = self._numbers.pop(request_id, None)
            if number is not None:
                del self._ids[number]
                self._refuse(number, error)
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
        metrics = self._observed.snapshot()
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
        """A prompt is prepared; an image thread calls this."""
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
        self._observed.add(request, pictures, message.arrived_s)
        self._ids[message.number] = message.request_id
        self._numbers[message.request_id] = message.number
        if (grammar := self._core.grammar_of(message.request_id)) is not None:
            grammar.add_done_callback(lambda _: self._wake())

    def _refuse(self, number: int, error: EngineError) -> None:
        self._observed.refused(error)
        self._send(ipc.Refused(number=number, kind=type(error).__name__, sentence=str(error)))

    def _abort(self, numbers: Sequence[int]) -> tuple[int, int]:
        preparing = sum(self._preparing.pop(number, None) is not None for number in numbers)
        ids = [self._ids.pop(number) for number in numbers if number in self._ids]
        for request_id in ids:
            del self._numbers[request_id]
        count, tokens = self._observed.abort(ids)
        return count + preparing, tokens


def _prepare(token_ids: list[int], images: Sequence[ipc.Frame], config: ModelConfig) -> Prompt:
    """Prepare a prompt in an image thread.  A picture that fails ends its own request only."""
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
    """Arguments for :func:`main`; ``client_fd`` is a pidfd of the client's process, on systems that have pidfds.

    The settings go into a file beside the socket.  One argument of a program has at most 128 KiB, and a list of banned tokens may
    need more.
    """
    path = Path(endpoint.removeprefix("ipc://")).with_name("settings.json")
    path.write_text(json.dumps({**asdict(args), "progress": progress}), encoding="utf-8")
    return [endpoint, str(lifeline_fd), str(-1 if client_fd is None else client_fd), str(path)]


def _load(args: EngineArgs, *, progress: bool) -> Loaded:
    from deepinfer.engine.loader import load

    return load(args, progress=progress)


def main(arguments: Sequence[str], *, load: Load = _load) -> int:
    """Run a core process.  Returns the exit code: 0 after a clean end, 2 for wrong settings, 1 for any other failure."""
    endpoint, lifeline_fd, client_fd, path = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then ends this process
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    faulthandler.enable()
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    progress = settings.pop("progress")
    folder = Path(endpoint.removeprefix("ipc://")).parent
    lifeline = Lifeline(int(lifeline_fd), int(client_fd) if int(client_fd) >= 0 else None, folder)
    try:
        args = EngineArgs.from_keywords(**settings)
        watchdog = Watchdog(lifeline, warn_s=args.step_warn_s, limit_s=args.step_limit_s)  # a client may also end during loading
        has_client = _serve(load(args, progress=progress), args, endpoint, lifeline, watchdog)
    except ConfigError as error:
        logger.error("%s", error)
        lifeline.say(error)
        return 2
    except Exception as error:
        logger.exception("the core process ends")
        lifeline.say(error)
        logging.shutdown()
        os._exit(1)  # a thread inside a broken step may never end
    if not has_client:
        lifeline.bury_client()
    return 0


def _serve(loaded: Loaded, args: EngineArgs, endpoint: str, lifeline: Lifeline, watchdog: Watchdog) -> bool:
    """Serve until told to stop; returns whether the client still exists.  The last messages are then sent or on their way."""
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
