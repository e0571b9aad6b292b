"""The engine inside a user's program: one thread turns the core, and its callers wait.

Owns the core on behalf of :class:`deepinfer.engine.llm_engine.LLMEngine`.  The core turns only when a caller asks for it.  Each
call is a job, and the thread finishes a job before it starts the next one.  Therefore any number of threads may call, and Ctrl-C
or an exception of a signal handler interrupts a wait, never the core in the middle of a step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from deepinfer.engine.core import EngineCore
from deepinfer.engine.observed import ObservedCore
from deepinfer.errors import ConfigError, EngineError, RequestError, StepFailed
from deepinfer.executor.thread import SerialThread
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.images import Picture
from deepinfer.metrics import Snapshot
from deepinfer.request import Request, RequestOutput, StructuredOutput

P = ParamSpec("P")
T = TypeVar("T")
_GRAMMAR_WAIT_S = 0.02
"""The longest sleep of a turn that only waits for grammars; other calls wait for it."""
_CLOSED = "this engine was closed; make a new one"


class Driver:
    """A core, and the only thread that touches it.

    Every method may be called from any thread, also by a job of :meth:`run`.  All except ``drop`` and ``close`` raise like
    :meth:`check`.
    """

    def __init__(self, core: EngineCore, *, log_every: int | None) -> None:
        """Drive ``core``, which no other thread may touch from now on; ``log_every`` as for :class:`ObservedCore`."""
        self._observed: ObservedCore | None = ObservedCore(core, log_every=log_every)
        self._thread = SerialThread("deepinfer-turns", ConfigError(_CLOSED))
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: StepFailed | None = None

    @property
    def core(self) -> EngineCore:
        """The core; only jobs may touch it."""
        return self._open.core

    @property
    def _open(self) -> ObservedCore:
        if self._observed is None:
            raise ConfigError(_CLOSED)
        return self._observed

    def check(self) -> None:
        """Return if the engine can be used by this thread now.

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
        """Do a job after all earlier jobs; returns or raises what it does.

        An exception that interrupts the wait does not stop the job.
        """
        self.check()
        if self._thread.is_current:
            return job(*args, **kwargs)

        def checked() -> T:
            self.check()  # an earlier job may have closed or broken the engine
            return job(*args, **kwargs)

        return self._thread.submit(checked).result()

    def add(
        self, request: Request, pictures: Sequence[Picture], arrived_s: float, grammar: CompiledGrammar | None = None
    ) -> None:
        """Take in a request that arrived at ``arrived_s`` by the monotonic clock; raises :class:`RequestError` like the core."""
        self.run(lambda: self._open.add(request, pictures, arrived_s, grammar))

    def compile(self, args: StructuredOutput, salt: bytes = b"") -> CompiledGrammar:
        """Compile a grammar and wait for it in the caller's thread.

        Raises:
            RequestError: the grammar is refused.
        """
        compiler = self.run(lambda: self.core.compiler)
        if compiler is None:
            raise RequestError("so_args asks for structured output, which this engine was started without; leave it out")
        return compiler.submit(args, salt).result()

    def refused(self, error: Exception) -> None:
        """Count a request that was not taken in."""
        self.run(lambda: self._open.refused(error))

    def turn(self) -> list[RequestOutput]:
        """One turn of the core; nothing happens if it is idle.

        Raises:
            StepFailed: a step broke, now or earlier; the engine cannot go on.
        """
        return self.run(lambda: self._advance(self._open.step))

    def flush(self) -> list[RequestOutput]:
        """Records of the step in flight; raises like :meth:`turn`."""
        return self.run(lambda: self._advance(self._open.flush))

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Drop requests and ignore unknown ids.  Returns how many there were, and how many tokens they had."""
        return self.run(lambda: self._open.abort(request_ids))

    def snapshot(self) -> Snapshot:
        """Counters and histograms since the start."""
        return self.run(lambda: self._open.snapshot())

    def drop(self, request_ids: Iterable[str]) -> None:
        """:meth:`abort` for a caller that leaves.  Nothing happens if the requests or the engine have ended.

        It raises nothing in a forked child, after the end of the engine, and when the interpreter exits.
        """
        if os.getpid() == self._pid and not self._thread.is_over:
            with contextlib.suppress(EngineError):
                self.abort(list(request_ids))

    def close(self) -> None:
        """Wait for the step in flight and end the engine.  Raises nothing and may be called again.

        Jobs that wait fail at once.  In a forked child nothing happens: the engine belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        if not self._thread.is_over:  # this may be the second call, after an interrupted first one
            self._thread.submit(self._close)
            self._thread.end()
        if not self._thread.is_current:
            self._thread.join()

    def _advance(self, turn: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        try:
            if self.core.waits_for_grammars:
                self.core.wait_for_grammars(_GRAMMAR_WAIT_S)
            return turn()
        except Exception as error:
            # Whatever the error is, the core may be in the middle of a step.
            if isinstance(error, StepFailed):
                self._failure = error
                raise
            self._failure = StepFailed(f"a step failed ({type(error).__name__}: {error}); restart the engine")
            raise self._failure from error

    def _close(self) -> None:
        if self._observed is not None:
            self._observed.close()
            self._observed = None
