"""A thread that runs one job after the other.  The worker has one, and an engine inside a user's program has one.

It keeps three rules that a pool of the standard library does not keep:

* Ctrl-C or a user's signal handler may raise an exception between any two instructions of the main thread.  The exception never
  leaves a lock held that the thread needs: jobs go through one queue of the interpreter, and each job has its own lock.
* A program that ends waits for its other threads first.  The thread runs jobs until then.
* The thread ends when its owner is garbage, even without a call of ``end``.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

from deepinfer.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")
_EXIT_S: Final = 30.0
"""Time limit for the jobs in progress when the interpreter exits, because a hanging device must not keep the process alive."""


class Job(Generic[T]):
    """A call that one thread submits and another thread runs."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._value: T
        self._error: BaseException | None = None
        self._running = threading.Lock()  # held until the job is done
        self._running.acquire()

    def run(self) -> None:
        """Make the call; runs in the thread."""
        assert self._call is not None, "a job runs once"
        try:
            self._value = self._call()
        except BaseException as error:  # result() raises it
            self._error = error
        self._call = None
        self._running.release()

    def refuse(self, error: Exception) -> None:
        """End the job without the call; :meth:`result` raises ``error``."""
        self._call, self._error = None, error
        self._running.release()

    def result(self) -> T:
        """Wait for the call; returns its value or raises its error.  An exception during the wait does not change the job."""
        with self._running:
            pass
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # else a cycle: the traceback holds this frame, and the job holds the error


class SerialThread:
    """A thread that runs jobs in the order in which they are submitted.

    It ends after :meth:`end`, when the object is garbage, and when the interpreter exits.  A forked process does not have it.
    """

    def __init__(self, name: str, ended: EngineError) -> None:
        """Start the thread; jobs submitted after its end raise an error like ``ended``."""
        self._thread = _Thread(name, ended)
        self._thread.start()
        # Neither the thread nor this callback may refer to the object, or it would never be garbage.
        weakref.finalize(self, self._thread.jobs.put, None).atexit = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_over(self) -> bool:
        """Whether the thread runs no further job."""
        return self._thread.is_over

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Run ``call(*args, **kwargs)`` in the thread, after all jobs submitted before."""
        job = Job(lambda: call(*args, **kwargs))
        self._thread.take(job)
        return job

    def end(self) -> None:
        """End the thread after all jobs submitted before; may be called again."""
        self._thread.jobs.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()


class _Thread(threading.Thread):
    """The thread itself.

    Attributes:
        jobs: the submitted jobs in order; None ends the thread.
        is_over: whether the thread has ended or is ending.
    """

    def __init__(self, name: str, ended: EngineError) -> None:
        # A daemon, so that the interpreter does not wait for a thread that runs; :func:`_exit` ends the thread later.
        super().__init__(name=name, daemon=True)
        self.jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self.is_over = False
        self._ended = ended
        self._is_exiting = False

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job  # the job may hold the last reference to the owner of this thread
        self.is_over = True
        if not self._is_exiting:
            self._refuse()

    def take(self, job: Job[Any]) -> None:
        self.jobs.put(job)
        # The job is put before ``is_over`` is read, so a job after the end is refused here or by the thread.  While the
        # interpreter exits, jobs of all threads except the main thread stay unanswered, because an error would only be noise.
        if self.is_over and (not self._is_exiting or threading.current_thread() is threading.main_thread()):
            self._refuse()

    def exit(self) -> None:
        """End the thread because the interpreter exits."""
        self._is_exiting = True
        self.jobs.put(None)
        self.join(_EXIT_S)

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self.jobs.get_nowait()
                if job is not None:
                    job.refuse(type(self._ended)(*self._ended.args))


@atexit.register
def _exit() -> None:
    """End all threads before the interpreter frees its modules; the newest first, because it may use older threads."""
    for thread in reversed(threading.enumerate()):
        if isinstance(thread, _Thread):
            thread.exit()
