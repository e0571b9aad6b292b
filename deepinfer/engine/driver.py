"""The engine inside a user's program: one thread turns the core, and whoever asks it for something waits.

Owns the core and its observer on behalf of :class:`deepinfer.LLM` and :class:`deepinfer.engine.llm_engine.LLMEngine`.  Nothing
turns unless somebody asks.  What is asked is a job, which the thread does whole before it looks at the next one.  So any number
of threads may ask, and Ctrl-C or an exception of a signal handler interrupts a wait, never the core in the middle of a step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from deepinfer.engine.core import EngineCore
from deepinfer.engine.observer import Observer
from deepinfer.errors import ConfigError, EngineError, StepFailed
from deepinfer.executor.thread import SerialThread
from deepinfer.images import Picture
from deepinfer.metrics import Snapshot
from deepinfer.request import Request, RequestOutput

P = ParamSpec("P")
T = TypeVar("T")
_CLOSED = "this engine was closed; make a new one"


class Driver:
    """A core, and the only thread that touches it.

    Every method may be called from any thread, also by a job of :meth:`run`.  All but ``drop`` and ``close`` raise like
    :meth:`check`.

    Attributes:
        core: only jobs may touch it.
    """

    def __init__(self, core: EngineCore, *, log_every: int | None) -> None:
        """Drive ``core``, which nobody else touches from now on; ``log_every`` as for the observer."""
        self.core = core
        self._observer = Observer(core.stats, log_every=log_every)
        self._thread = SerialThread("deepinfer-turns", ConfigError(_CLOSED))
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: StepFailed | None = None

    def check(self) -> None:
        """Return if the engine can be used here and now.

        Raises:
            ConfigError: it was closed, or this is a forked child of the process that made it.
            StepFailed: a step broke earlier.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this engine was made in process {self._pid}, and process {os.getpid()} is a fork without its threads; "
                "make one in the child"
            )
        if self._is_closed:
            raise ConfigError(_CLOSED)
        if self._failure is not None:
            raise StepFailed(*self._failure.args)

    def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job as a whole, behind those asked for before; returns or raises what it does.

        An exception that interrupts the wait does not undo the job: the thread does it all the same.
        """
        self.check()
        if self._thread.is_current:
            return job(*args, **kwargs)

        def checked() -> T:
            self.check()  # what came before may have closed or broken the engine
            return job(*args, **kwargs)

        return self._thread.submit(checked).result()

    def add(self, request: Request, pictures: Sequence[Picture], arrived_s: float) -> None:
        """Take in a request that came at ``arrived_s`` by the monotonic clock; raises :class:`RequestError` like the core."""
        self.run(self._add, request, pictures, arrived_s)

    def refused(self, error: Exception) -> None:
        """Count a request that was not taken in."""
        self.run(lambda: self._observer.refused(error))

    def turn(self) -> list[RequestOutput]:
        """One turn of the core; nothing happens if it is idle.

        Raises:
            StepFailed: a step broke, now or earlier; the engine cannot go on.
        """
        return self.run(lambda: self._timed(self.core.step))

    def flush(self) -> list[RequestOutput]:
        """Records of the step in flight; raises like :meth:`turn`."""
        return self.run(lambda: self._timed(self.core.flush))

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Drop requests; those unknown are passed over.  Returns how many there were, and how many tokens they had."""
        return self.run(self._abort, request_ids)

    def snapshot(self) -> Snapshot:
        """Counters and histograms since the start."""
        return self.run(lambda: self._observer.snapshot())

    def drop(self, request_ids: Iterable[str]) -> None:
        """:meth:`abort` for whoever leaves: where there is nothing to drop any more, nothing happens.

        It must be quiet in a forked child, after the end of the engine, and when the interpreter exits.
        """
        if os.getpid() == self._pid and not self._thread.is_over:
            with contextlib.suppress(EngineError):
                self.run(self._abort, list(request_ids))

    def close(self) -> None:
        """Wait for the step in flight and give everything back; raises nothing and may be called again.

        Jobs that wait fail at once.  In a forked child nothing happens: the engine is its parent's.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        if not self._thread.is_over:  # may be so for the second time, if the first was interrupted
            self._thread.submit(self._close)
            self._thread.end()
        if not self._thread.is_current:
            self._thread.join()

    def _add(self, request: Request, pictures: Sequence[Picture], arrived_s: float) -> None:
        self.core.add(request, pictures)
        self._observer.arrived(request, arrived_s)

    def _abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        counts = self.core.abort(request_ids)
        self._observer.aborted(request_ids)
        return counts

    def _timed(self, advance: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        if self.core.is_idle:
            return []
        try:
            begin = time.monotonic()
            outputs = advance()
            now = time.monotonic()
            self._observer.stepped(outputs, now - begin, now)
        except Exception as error:
            # Whatever it was, the core may stand in the middle of a step.
            if isinstance(error, StepFailed):
                self._failure = error
                raise
            self._failure = StepFailed(f"a step failed ({type(error).__name__}: {error}); restart the engine")
            raise self._failure from error
        return outputs

    def _close(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
            del self.core, self._observer
