"""The loop: add -> plan -> launch -> commit, one step ahead of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer.engine.prompt import check_params
from deepinfer.engine.samples import SEPARATOR, Samples
from deepinfer.errors import RequestError, shown
from deepinfer.executor.executor import Executor, Pending
from deepinfer.images import Picture
from deepinfer.kv.manager import KVManager
from deepinfer.request import Request, RequestOutput
from deepinfer.scheduler.budget import DraftBudget
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.stats import SchedulerStats
from deepinfer.step import StepPlan, StepResult


class EngineCore:
    """One scheduler and one executor.

    Invariant: both know a request, or neither does.  At most one step is in flight between two calls.  A request with several
    answers is several requests for the scheduler and the executor; callers know it by its own id.

    Attributes:
        scheduler: owner of requests, pages and slots.
        executor: runs the steps.
        is_async: whether step N+1 is planned while step N runs; False waits for every step.
        last_step: the step that was committed last, for measurements.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVManager,
        limits: Limits,
        *,
        budget: DraftBudget | None = None,
        is_async: bool = True,
    ) -> None:
        """Serve with ``executor`` within ``limits``; ``budget`` as for the scheduler."""
        self.scheduler = Scheduler(kv, limits, budget)
        self.is_async = is_async
        self.executor = executor
        self.last_step: tuple[StepPlan, StepResult] | None = None
        self._in_flight: tuple[StepPlan, Pending] | None = None
        self._samples = Samples()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and no request is unfinished."""
        return self._in_flight is None and self.scheduler.is_idle

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended; a request with several answers counts once."""
        is_unfinished = self.scheduler.is_unfinished
        answers = [sum(is_unfinished(part) for part in parts) for parts in self._samples.groups()]
        return self.scheduler.num_unfinished - sum(max(0, count - 1) for count in answers)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request with this id has an answer that has not ended."""
        return request_id in self._samples or (SEPARATOR not in request_id and self.scheduler.is_unfinished(request_id))

    def add(self, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Take a request in; raises :class:`RequestError` if it can never be served."""
        self._enter(request, pictures, None)

    def fork(self, request_id: str, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Branch a running request: ``request`` continues its tokens and shares their memory."""
        self._enter(request, pictures, self._samples.parts(request_id)[0])

    def _enter(self, request: Request, pictures: Sequence[Picture], parent: str | None) -> None:
        """Take in all answers of a request, or none.  With ``parent`` all of them branch from it; else from the first answer.

        All doors end here.  A request without a seed gets one, and its parameters are checked against this engine.
        """
        worker = self.executor.worker
        check_params(request.params, worker.config, banned=worker.banned_token_ids)
        keep = self.scheduler.limits.decoder_keep_tokens
        if request.params.prompt_logprobs and keep:
            raise RequestError(
                "prompt_logprobs=True needs the logits of a whole prompt, and with decoder_replay this engine makes those of the "
                f"last {keep} tokens at most; leave prompt_logprobs out, or start the engine with decoder_replay=off"
            )
        for position, token_id in enumerate(request.output_token_ids):
            if token_id >= worker.config.vocab_size or token_id == worker.config.image_token_id:
                raise RequestError(
                    f"output token {position} is {shown(token_id)}, which this model does not generate; give ids below "
                    f"{worker.config.vocab_size} other than the image placeholder {worker.config.image_token_id}"
                )
        request = request.with_seed()
        parts = self._samples.split(request)
        if not request.request_id:
            raise RequestError("the request id is empty; choose another")
        if self.is_unfinished(request.request_id):
            raise RequestError(f"request id {shown(request.request_id)} is in use; choose another")
        entered: list[str] = []
        try:
            for part in parts:
                if parent is None:
                    self.scheduler.add(part)
                    parent = part.request_id
                else:
                    self.scheduler.fork(parent, part)
                entered.append(part.request_id)
        except RequestError:
            self.scheduler.abort(entered)
            raise
        for part in parts:
            self.executor.add(part.request_id, part.params, len(part.prompt_token_ids), pictures)
        self._samples.enter(request, parts)

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests with all their answers; returns how many there were, and how many tokens their answers had."""
        present = [request_id for request_id in dict.fromkeys(request_ids) if self.is_unfinished(request_id)]
        parts = [part for request_id in present for part in self._samples.parts(request_id) if self.scheduler.is_unfinished(part)]
        _, num_tokens = self.scheduler.abort(parts)
        for part in parts:
            self.executor.remove(part)
        self._samples.drop(present)
        return len(present), num_tokens

    def step(self) -> list[RequestOutput]:
        """One turn: plan and launch the next step, then commit the one before it.

        Returns:
            Tokens of the committed step; none on the first turn and when idle.

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
        """Commit the step in flight and launch none."""
        before, self._in_flight = self._in_flight, None
        return self._commit(before)

    def stats(self) -> SchedulerStats:
        """Levels and counters of the scheduler."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Wait for the step in flight and end the executor's thread."""
        self.executor.close()

    def _commit(self, step: tuple[StepPlan, Pending] | None) -> list[RequestOutput]:
        if step is None:
            outputs = self.scheduler.take_outputs()
        else:
            plan, pending = step
            self.last_step = plan, pending.result()
            outputs = self.scheduler.commit(*self.last_step)
        for output in outputs:
            if output.finished:
                self.executor.remove(output.request_id)
        return self._samples.relabel(outputs)
