"""A thread that does one job after the other: the worker's, and the one that turns an engine inside a user's program.

Three rules hold for it, which a pool of the standard library does not keep:

* An exception may be raised between any two instructions of the main thread, by Ctrl-C or by a user's signal handler.  It never
  leaves a lock behind that the thread needs: jobs go through one queue of the interpreter, and each has a lock of its own.
* A program that ends waits for its own threads first.  Until then jobs are done.
* A thread that is not needed any more ends, also if nobody says so.
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
"""What the jobs in progress get when the interpreter exits; a device that hangs must not keep the process."""


class Job(Generic[T]):
    """A call that a thread makes for somebody else."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._value: T
        self._error: BaseException | None = None
        self._running = threading.Lock()  # held until the job is done
        self._running.acquire()

    def run(self) -> None:
        """Make the call; in the thread."""
        assert self._call is not None, "a job runs once"
        try:
            self._value = self._call()
        except BaseException as error:  # goes to whoever waits
            self._error = error
        self._call = None
        self._running.release()

    def refuse(self, error: Exception) -> None:
        """End the job without the call."""
        self._call, self._error = None, error
        self._running.release()

    def result(self) -> T:
        """Wait for the call; returns or raises what it did.  An exception that interrupts the wait leaves the job alone."""
        with self._running:
            pass
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # the traceback holds this frame, and the job the error


class SerialThread:
    """A thread of its own for jobs, which it does in the order in which they were submitted.

    It ends behind :meth:`end`, when the object is garbage, and when the interpreter exits.  A fork has no such thread.
    """

    def __init__(self, name: str, ended: EngineError) -> None:
        """Start the thread; jobs submitted after its end raise an error like ``ended``."""
        self._thread = _Thread(name, ended)
        self._thread.start()
        # Neither the thread nor this may know the object, or it would never be garbage.
        weakref.finalize(self, self._thread.jobs.put, None).atexit = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_over(self) -> bool:
        """Whether no further job will be done."""
        return self._thread.is_over

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Have ``call(*args, **kwargs)`` made, behind everything submitted before."""
        job = Job(lambda: call(*args, **kwargs))
        self._thread.take(job)
        return job

    def end(self) -> None:
        """Let the thread end behind everything submitted before; may be called again."""
        self._thread.jobs.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()


class _Thread(threading.Thread):
    """The thread itself.

    Attributes:
        jobs: what is to be done, in this order; None ends it.
        is_over: whether it has ended, or ends now.
    """

    def __init__(self, name: str, ended: EngineError) -> None:
        # A daemon, so that the interpreter does not wait for a thread that nobody ends; :func:`_exit` does that, later.
        super().__init__(name=name, daemon=True)
        self.jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self.is_over = False
        self._ended = ended
        self._is_exiting = False

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job  # it may be the last that knows the owner of this thread
        self.is_over = True
        if not self._is_exiting:
            self._refuse()

    def take(self, job: Job[Any]) -> None:
        self.jobs.put(job)
        # Put first, then looked: a job behind the end is seen here or by the thread, whichever comes last.  While the interpreter
        # exits all threads but the main one wait until they go with it, because an error there would be noise and nothing else.
        if self.is_over and (not self._is_exiting or threading.current_thread() is threading.main_thread()):
            self._refuse()

    def exit(self) -> None:
        """End because the interpreter does."""
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
    """End all threads before the interpreter takes itself apart under them; the last first, which may use those before it."""
    for thread in reversed(threading.enumerate()):
        if isinstance(thread, _Thread):
            thread.exit()
