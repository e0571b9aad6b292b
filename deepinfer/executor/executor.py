"""A handle over the worker: launch(plan) -> pending result.

The worker lives in a thread of its own: it is built there and works there, in the order of the calls.  On a CPU the thread
computes while the caller plans; on a GPU it queues kernels, and only :meth:`Pending.result` waits for the device.

No other thread may compute with torch on a CPU while an engine works.  OpenMP keeps a team of threads for every thread that ever
did, and once there are more threads than cores the waiting ones go to sleep: every operator then wakes them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from deepinfer.errors import StepFailed, reason
from deepinfer.executor.results import Launched
from deepinfer.executor.thread import Job, SerialThread
from deepinfer.executor.worker import Worker
from deepinfer.images import Picture
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
            StepFailed: the step broke, or its results are not numbers; they and the caches are void.
        """
        try:
            return self._launched.result().result()
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(f"a step failed ({type(error).__name__}: {reason(error)}); restart the engine") from error


class Executor:
    """Runs a worker.

    Invariant: calls take effect in the order in which they were made.

    Attributes:
        worker: nobody else may touch it while the engine works; what never changes may be read.
    """

    def __init__(self, build: Callable[[], Worker]) -> None:
        """Build the worker in its thread; raises what ``build`` raises."""
        self._thread = SerialThread("deepinfer-worker", StepFailed("the engine was closed; make another one"))
        self._errands: list[Job[None]] = []
        try:
            self.worker = self.call(build)
        except BaseException:
            self._thread.end()  # not waited for: whoever interrupts the loading of a large model wants to go on
            raise

    def call(self, job: Callable[[], T]) -> T:
        """Run ``job`` in the worker's thread, behind everything asked before, and wait for it."""
        return self._thread.submit(job).result()

    def add(self, request_id: str, params: SamplingParams, num_prompt: int, pictures: Sequence[Picture] = ()) -> None:
        """Announce a request; it may be launched from now on."""
        self._errands.append(self._thread.submit(self.worker.add, request_id, params, num_prompt, pictures))

    def remove(self, request_id: str) -> None:
        """Forget a request after everything launched so far."""
        self._errands.append(self._thread.submit(self.worker.remove, request_id))

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step.  An announcement that failed since the last one fails this step."""
        errands, self._errands = self._errands, []
        return Pending(self._thread.submit(self._launch, errands, plan))

    def close(self) -> None:
        """Finish what was launched and end the thread; may be called again.  Whatever is asked of it later fails."""
        self._thread.end()
        self._thread.join()

    def _launch(self, errands: Sequence[Job[None]], plan: StepPlan) -> Launched:
        for errand in errands:
            errand.result()  # done: the thread runs one call after the other
        return self.worker.launch(plan)
