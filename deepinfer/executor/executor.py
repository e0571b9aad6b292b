"""A handle over the worker: launch(plan) -> pending result.

The worker has a thread of its own.  It is built there and works there.  Requests that begin and end, steps, and copies of memory
are jobs of this thread, which does them in the order of the calls.  On a CPU the thread computes while the caller plans.  On a
GPU it queues kernels, and only a result waits for the device.

No other thread may compute with torch on a CPU while an engine works.  OpenMP keeps a team of threads for every thread that ever
computed.  With more threads than cores the waiting ones go to sleep, and every operator must wake them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from deepinfer.errors import StepFailed, reason
from deepinfer.executor.results import CopiedOut, Launched
from deepinfer.executor.thread import Job, SerialThread
from deepinfer.executor.worker import Worker
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.images import Picture
from deepinfer.kv.cache import CacheContent
from deepinfer.request import SamplingParams
from deepinfer.step import StepPlan, StepResult

T = TypeVar("T")


class Pending:
    """A launched step."""

    def __init__(self, launched: Job[Launched]) -> None:
        self._launched = launched

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
            StepFailed: the step broke, or its results are not numbers.  The results and the caches are void.
        """
        try:
            return self._launched.result().result()
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(f"a step failed ({type(error).__name__}: {reason(error)}); restart the engine") from error


class PendingCopy:
    """Pages and slots on their way to the host."""

    def __init__(self, copied: Job[CopiedOut]) -> None:
        self._copied = copied

    def result(self) -> CacheContent:
        """Wait for the copy."""
        return self._copied.result().result()


class Executor:
    """Runs a worker.

    Invariant: calls take effect in the order in which they were made.

    Attributes:
        worker: no other thread may touch it while the engine works, but values that never change may be read.
    """

    def __init__(self, build: Callable[[], Worker]) -> None:
        """Build the worker in its thread; raises what ``build`` raises."""
        self._thread = SerialThread("deepinfer-worker", StepFailed("the engine was closed; make another one"))
        self._unchecked: list[Job[None]] = []  # jobs since the last step
        try:
            self.worker = self.call(build)
        except BaseException:
            self._thread.end()  # without waiting: a user who interrupts the loading of a large model wants to go on
            raise

    def call(self, job: Callable[[], T]) -> T:
        """Run ``job`` in the worker's thread, after all earlier calls, and wait for it."""
        return self._thread.submit(job).result()

    def add(self, request_id: str, params: SamplingParams, num_prompt: int, pictures: Sequence[Picture] = ()) -> None:
        """Announce a request.  Steps launched later may contain it."""
        self._unchecked.append(self._thread.submit(self.worker.add, request_id, params, num_prompt, pictures))

    def remove(self, request_id: str) -> None:
        """Forget a request after the steps launched so far."""
        self._unchecked.append(self._thread.submit(self.worker.remove, request_id))

    def set_grammar(self, request_id: str, compiled: CompiledGrammar) -> None:
        """Give an announced request its grammar, before its first step."""
        self._unchecked.append(self._thread.submit(self.worker.set_grammar, request_id, compiled))

    def copy_out(self, page_ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> PendingCopy:
        """Copy pages [n] and slots [m] to the host, as the steps launched so far leave them."""
        return PendingCopy(self._thread.submit(self.worker.copy_out, page_ids, slots))

    def copy_in(self, content: CacheContent, page_ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> None:
        """Copy ``content`` into pages [n] and slots [m].  Steps launched so far do not see it, later ones do."""
        self._unchecked.append(self._thread.submit(self.worker.copy_in, content, page_ids, slots))

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step.  If an earlier :meth:`add`, :meth:`remove` or :meth:`copy_in` failed, this step fails."""
        unchecked, self._unchecked = self._unchecked, []
        return Pending(self._thread.submit(self._launch, unchecked, plan))

    def close(self) -> None:
        """Finish the launched steps and end the thread.  May be called again.  Later calls fail."""
        self._thread.end()
        self._thread.join()

    def _launch(self, unchecked: Sequence[Job[None]], plan: StepPlan) -> Launched:
        for job in unchecked:
            job.result()  # it is done: the thread does one job after the other
        return self.worker.launch(plan)
