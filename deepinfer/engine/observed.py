"""A core whose requests and steps are observed: what all doors to an engine share.

:class:`~deepinfer.engine.driver.Driver` turns it inside a user's program, and the core process turns it for its clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepinfer.engine.observer import Observer
from deepinfer.engine.samples import SEPARATOR
from deepinfer.metrics import Snapshot
from deepinfer.request import Request, RequestOutput

if TYPE_CHECKING:
    # A core imports torch; the core process wants to answer its client before that is loaded.
    from deepinfer.engine.core import EngineCore
    from deepinfer.grammar.compiler import CompiledGrammar
    from deepinfer.images import Picture


class ObservedCore:
    """A core and its observer.  One thread at a time may use it.

    Attributes:
        core: requests must come and go through this object.
    """

    def __init__(self, core: EngineCore, *, log_every: int | None) -> None:
        """Observe ``core``; every ``log_every`` steps there is a line in the log, None for never."""
        self.core = core
        self._observer = Observer(core.stats, log_every=log_every)
        self._launched_s = 0.0  # when the last turn began, which launched the step that this turn commits

    def add(
        self, request: Request, pictures: Sequence[Picture], arrived_s: float, grammar: CompiledGrammar | None = None
    ) -> None:
        """Take in a request that arrived at ``arrived_s`` by the monotonic clock; raises :class:`RequestError` like the core."""
        self.core.add(request, pictures, grammar)
        self._observer.arrived(request, arrived_s)

    def refused(self, error: Exception) -> None:
        """Count a request that was not taken in."""
        self._observer.refused(error)

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Drop requests and ignore unknown ids.  Returns how many there were, and how many tokens they had."""
        counts = self.core.abort(request_ids)
        self._observer.aborted(request_ids)
        return counts

    def step(self) -> list[RequestOutput]:
        """One turn of the core, timed.  Nothing happens if the core is idle."""
        return self._timed(self.core.step)

    def flush(self) -> list[RequestOutput]:
        """Records of the step in flight; no step is launched."""
        return self._timed(self.core.flush)

    def snapshot(self) -> Snapshot:
        """Counters and histograms since the start."""
        if self.core.compiler is not None:
            self._observer.compiled(self.core.compiler.counts(), self.core.compiler.take_durations())
        return self._observer.snapshot()

    def close(self) -> None:
        """Wait for the step in flight and end the core."""
        self.core.close()

    def _timed(self, advance: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        if self.core.is_idle:
            return []
        before = self.core.last_step
        begin = time.monotonic()
        outputs = advance()
        now = time.monotonic()
        launched_s = self._launched_s if self.core.is_async else begin
        self._launched_s = begin
        step = self.core.last_step
        if step is not None and step is not before:
            self._observer.begun((each.request_id.partition(SEPARATOR)[0] for each in step[0].chunks), launched_s)
            if step[1].mask_ms:
                self._observer.masked(step[1].mask_ms / 1e3, step[1].mask_wait_ms / 1e3)
        self._observer.stepped(outputs, now - begin, now)
        return outputs
