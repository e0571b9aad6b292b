"""The loop: add -> plan -> run -> commit."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.executor.worker import Picture, Worker
from deepinfer.request import Request, RequestOutput
from deepinfer.scheduler.scheduler import Limits, Scheduler


class EngineCore:
    """One scheduler and one worker.

    Invariant: a request is known to both or to neither.
    """

    def __init__(self, worker: Worker, limits: Limits) -> None:
        """Serve with ``worker`` within ``limits``."""
        self._worker = worker
        self.limits = limits
        self.scheduler = Scheduler(worker.layout, limits, num_pages=worker.num_pages, num_slots=worker.num_slots)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.is_idle

    def add(self, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Take a request in; raises :class:`RequestError` for one that can never be served."""
        self.scheduler.add(request)
        try:
            self._worker.add(request.request_id, request.params, len(request.prompt_token_ids), pictures)
        except BaseException:
            self.scheduler.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """Drop a request; returns whether it was there."""
        found = self.scheduler.abort(request_id)
        if found:
            self._worker.remove(request_id)
        return found

    def step(self) -> list[RequestOutput]:
        """Run one step and return the tokens it brought; nothing when idle."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        outputs = self.scheduler.commit(plan, self._worker.run(plan))
        for output in outputs:
            if output.finished:
                self._worker.remove(output.request_id)
        return outputs
