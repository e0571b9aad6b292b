"""Keeps a thread that compiles from holding the interpreter's lock.

Python hands the lock over every 5 ms only.  A step of an engine takes the lock thousands of times, so a compiling thread would
delay it by all of its own time.
"""

from __future__ import annotations

import threading
import time
from typing import Final

_WORK_S: Final = 0.001
_REST_S: Final = 0.003
_local = threading.local()


def pace() -> None:
    """Rest after each millisecond of work; call it in every loop and recursion over a user's grammar.

    Cost: 0.2 µs; a small grammar never rests.
    """
    now = time.perf_counter()
    since = getattr(_local, "since", None)
    if since is None or now - since > 1.0:  # another grammar
        _local.since = now
    elif now - since > _WORK_S:
        time.sleep(_REST_S)
        _local.since = time.perf_counter()
