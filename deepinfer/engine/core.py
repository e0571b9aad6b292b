"""The loop: add -> plan -> launch -> commit, one step ahead of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer.executor.executor import Executor, Pending
from deepinfer.executor.worker import Picture
from deepinfer.kv.manager import KVManager
from deepinfer.request import Request, RequestOutput
from deepinfer.scheduler.scheduler import Limits, Scheduler, SchedulerStats
from deepinfer.step import StepPlan


class EngineCore:
    """One scheduler and one executor.

    Invariant: a request is known to both or to neither; at most one step is in flight between two calls.

    Attributes:
        scheduler: owner of requests, pages and slots.
        executor: runs the steps.
        is_async: whether step N+1 is planned while step N runs; otherwise every step is waited for.
    """

    def __init__(self, executor: Executor, kv: KVManager, limits: Limits, *, is_async: bool = True) -> None:
        """Serve with ``executor`` within ``limits``."""
        self.scheduler = Scheduler(kv, limits)
        self.is_async = is_async
        self.executor = executor
        self._in_flight: tuple[StepPlan, Pending] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and no request is unfinished."""
        return self._in_flight is None and self.scheduler.is_idle

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_unfinished

    def add(self, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Take a request in; raises :class:`RequestError` for one that can never be served."""
        self.scheduler.add(request)
        self.executor.add(request.request_id, request.params, len(request.prompt_token_ids), pictures)

    def fork(self, request_id: str, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Branch a running request: ``request`` goes on from its tokens, sharing their memory."""
        self.scheduler.fork(request_id, request)
        self.executor.add(request.request_id, request.params, len(request.prompt_token_ids), pictures)

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests; returns how many were there, and how many tokens they had."""
        present = [request_id for request_id in dict.fromkeys(request_ids) if self.scheduler.is_unfinished(request_id)]
        result = self.scheduler.abort(present)
        for request_id in present:
            self.executor.remove(request_id)
        return result

    def step(self) -> list[RequestOutput]:
        """One turn: plan and launch the next step, then commit the one before it.

        Returns:
            Tokens of the committed step; nothing on the first turn and when idle.

        Raises:
            StepFailed: a step broke; the engine cannot go on.
        """
        plan = self.scheduler.plan()
        launched = (plan, self.executor.launch(plan)) if plan is not None else None
        before, self._in_flight = self._in_flight, launched
        if not self.is_async:
            before, self._in_flight = launched, None
        return self._commit(before)

    def flush(self) -> list[RequestOutput]:
        """Commit what is in flight without launching more."""
        before, self._in_flight = self._in_flight, None
        return self._commit(before)

    def stats(self) -> SchedulerStats:
        """What the scheduler counts."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Wait for what is in flight and end the executor's thread."""
        self.executor.close()

    def _commit(self, step: tuple[StepPlan, Pending] | None) -> list[RequestOutput]:
        if step is None:
            outputs = self.scheduler.take_outputs()
        else:
            plan, pending = step
            outputs = self.scheduler.commit(plan, pending.result())
        for output in outputs:
            if output.finished:
                self.executor.remove(output.request_id)
        return outputs
