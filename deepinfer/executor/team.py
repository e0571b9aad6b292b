"""Chooses the number of threads for each step on a CPU.

A step is thousands of short operators.  All threads share each operator and wait for each other at its end; a waiting thread
spins.  On idle cores the speedup is up to the number of cores.  On cores that other processes use, every operator waits for the
slowest thread, and the spinning threads take cores from other threads.

Invariant: the number of threads changes no bit of a result (``tests/ops/test_threads.py``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import torch

from deepinfer.ops.arithmetic import threads

BUSY_SHARE: Final = 0.15
"""Cores count as busy if threads that could run spend more than this share of the time without a core.  Idle cores show less than
0.01, four busy loops on two cores more than 0.6."""
LOOK_AFTER_S: Final = 0.1
FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 60.0

Waits: TypeAlias = dict[int, tuple[int, int]]
"""Thread id -> nanoseconds that the thread ran, and that it could run but had no core."""


def own_waits() -> Waits:
    """Run and wait times of this thread; empty if the system does not report them.  Cost: 5 µs."""
    return _waits([threading.get_native_id()])


def all_waits() -> Waits:
    """Run and wait times of all threads of this process; empty if the system does not report them.  Cost: 5 µs a thread."""
    with suppress(OSError):
        return _waits(int(name) for name in os.listdir("/proc/self/task"))
    return {}


def _waits(thread_ids: Iterable[int]) -> Waits:
    found = {}
    for thread_id in thread_ids:
        # The thread may have ended.
        with suppress(OSError, ValueError), open(f"/proc/self/task/{thread_id}/schedstat") as file:
            run_ns, wait_ns, _ = map(int, file.read().split())
            found[thread_id] = run_ns, wait_ns
    return found


def waiting_share(before: Waits, after: Waits) -> float:
    """Wait time divided by run time plus wait time, 0 … 1; 0 if both are empty."""
    ran = waited = 0
    for thread_id, (run_ns, wait_ns) in after.items():
        first_run_ns, first_wait_ns = before.get(thread_id, (0, 0))
        ran += run_ns - first_run_ns
        waited += wait_ns - first_wait_ns
    return waited / max(1, ran + waited)


class Team:
    """Chooses one thread or all threads for each step of one worker; only the worker's thread uses it.

    A step gets all threads unless the cores are busy.  The cores count as busy in two cases:

    * The worker's thread waited for a core since the last step.
    * The threads of the process waited for cores while all of them computed.  The rest of that step then runs with one thread.
      All threads are tried again after a pause, which doubles each time.  The pause is necessary: if fewer processes are busy
      than there are cores, one thread never waits and shows nothing.

    Attributes:
        size: threads of a step on idle cores.
    """

    def __init__(
        self,
        size: int,
        *,
        own: Callable[[], Waits] = own_waits,
        everyone: Callable[[], Waits] = all_waits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Choose between one thread and ``size`` threads; the other arguments observe the system."""
        self.size = size
        self._observe_own, self._observe_all, self._now = own, everyone, now
        self._own: Waits = {}
        self._all: Waits | None = None  # times at the last look; None while only one thread computes
        self._looked_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._try_again_at = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Set the number of threads for the body, which computes a step.  Cost: 10 µs; 0.1 ms for a step of all threads."""
        if self.size == 1 or self._is_busy():
            with threads(1):
                yield
            return
        self._all, self._looked_at = self._observe_all(), self._now()
        try:
            with threads(self.size):
                yield
                self._look()
                if self._all is not None:
                    self._pause_s = FIRST_PAUSE_S
        finally:
            self._all = None

    def between_layers(self) -> None:
        """Continue with one thread if the cores have become busy.

        On busy cores a long step of all threads can take many times as long.  A step took 79 s instead of 1 s while the threads
        of another program were spinning.  Cost: 0.1 ms, at most every 100 ms.
        """
        if self._all is not None and self._now() - self._looked_at > LOOK_AFTER_S:
            self._look()

    def _look(self) -> None:
        """Switch to one thread if the threads waited since the last look."""
        if self._all is None:
            return
        before, self._all, self._looked_at = self._all, self._observe_all(), self._now()
        if waiting_share(before, self._all) > BUSY_SHARE:
            self._all = None
            self._try_again_at = self._looked_at + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            torch.set_num_threads(1)  # until :meth:`step` restores the thread's own number

    def _is_busy(self) -> bool:
        before, self._own = self._own, self._observe_own()
        return waiting_share(before, self._own) > BUSY_SHARE or self._now() < self._try_again_at
