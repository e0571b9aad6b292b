"""The loop: add -> plan -> launch -> commit, one step ahead of the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from deepinfer.engine.prompt import check_params
from deepinfer.engine.samples import SEPARATOR, Samples
from deepinfer.errors import Overloaded, RequestError, shown
from deepinfer.executor.executor import Executor, Pending
from deepinfer.grammar.compiler import CompiledGrammar, GrammarCompiler
from deepinfer.grammar.matcher import Matcher
from deepinfer.images import Picture
from deepinfer.kv.manager import KVManager
from deepinfer.request import Request, RequestOutput
from deepinfer.scheduler.budget import DraftBudget
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.stats import SchedulerStats
from deepinfer.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiling:
    """A request whose grammar is not ready.

    Attributes:
        request: as the caller gave it.
        parts: ids of its answers.
        future: the grammar.
    """

    request: Request
    parts: Sequence[str]
    future: Future[CompiledGrammar]


class EngineCore:
    """One scheduler and one executor.

    Invariant: both know a request, or neither does.  At most one step is in flight between two calls.  A request with several
    answers is several requests for the scheduler and the executor; callers know it by its own id.

    Attributes:
        scheduler: owner of requests, pages and slots.
        executor: runs the steps.
        is_async: whether step N+1 is planned while step N runs; False waits for every step.
        last_step: the step that was committed last, for measurements.
        compiler: compiles grammars of structured outputs.
        refused: request id -> error, of the requests whose grammar the last step refused.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVManager,
        limits: Limits,
        *,
        budget: DraftBudget | None = None,
        is_async: bool = True,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """Serve with ``executor`` within ``limits``; ``budget`` as for the scheduler.

        Without ``compiler`` there is no structured output.
        """
        self.scheduler = Scheduler(kv, limits, budget)
        self.is_async = is_async
        self.executor = executor
        self.last_step: tuple[StepPlan, StepResult] | None = None
        self._in_flight: tuple[StepPlan, Pending] | None = None
        self._samples = Samples()
        self.compiler = compiler
        self.refused: Mapping[str, RequestError | Overloaded] = {}
        self._compiling: dict[str, _Compiling] = {}

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

    @property
    def waits_for_grammars(self) -> bool:
        """Whether a step has nothing to do before a grammar is ready."""
        is_compiling = sum(self.scheduler.is_unfinished(part) for each in self._compiling.values() for part in each.parts)
        return self._in_flight is None and 0 < is_compiling == self.scheduler.num_unfinished

    def grammar_of(self, request_id: str) -> Future[CompiledGrammar] | None:
        """The grammar of a request that waits for it."""
        compiling = self._compiling.get(request_id)
        return None if compiling is None else compiling.future

    def wait_for_grammars(self, seconds: float) -> None:
        """Sleep until a grammar is ready, at most ``seconds``."""
        wait([each.future for each in self._compiling.values()], seconds, FIRST_COMPLETED)

    def add(self, request: Request, pictures: Sequence[Picture] = (), grammar: CompiledGrammar | None = None) -> None:
        """Take a request in; raises :class:`RequestError` if it can never be served.

        A request with structured output waits until its grammar is compiled, unless ``grammar`` is given.  A grammar that cannot
        be compiled ends the request in a later step: its last record says why, and it is in :attr:`refused`.
        """
        self._enter(request, pictures, None, grammar)

    def fork(self, request_id: str, request: Request, pictures: Sequence[Picture] = ()) -> None:
        """Branch a running request: ``request`` continues its tokens and shares their memory."""
        self._enter(request, pictures, self._samples.parts(request_id)[0], None)

    def _enter(self, request: Request, pictures: Sequence[Picture], parent: str | None, grammar: CompiledGrammar | None) -> None:
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
        wanted = request.params.structured_output
        if wanted is not None and self.compiler is None:
            raise RequestError("so_args asks for structured output, which this engine was started without; leave it out")
        is_ready = wanted is None or grammar is not None
        if grammar is not None:
            _check_golden(request, grammar)
        entered: list[str] = []
        try:
            for part in parts:
                if parent is None:
                    self.scheduler.add(part, is_schedulable=is_ready)
                    parent = part.request_id
                else:
                    self.scheduler.fork(parent, part, is_schedulable=is_ready)
                entered.append(part.request_id)
        except RequestError:
            self.scheduler.abort(entered)
            raise
        for part in parts:
            self.executor.add(part.request_id, part.params, len(part.prompt_token_ids), pictures)
            if grammar is not None:
                self.executor.set_grammar(part.request_id, grammar)
        self._samples.enter(request, parts)
        if not is_ready:
            assert wanted is not None
            assert self.compiler is not None
            future = self.compiler.submit(wanted, request.salt)
            self._compiling[request.request_id] = _Compiling(request=request, parts=entered, future=future)

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests with all their answers; returns how many there were, and how many tokens their answers had."""
        present = [request_id for request_id in dict.fromkeys(request_ids) if self.is_unfinished(request_id)]
        parts = [part for request_id in present for part in self._samples.parts(request_id) if self.scheduler.is_unfinished(part)]
        _, num_tokens = self.scheduler.abort(parts)
        for part in parts:
            self.executor.remove(part)
        for request_id in present:
            self._compiling.pop(request_id, None)
        self._samples.drop(present)
        return len(present), num_tokens

    def step(self) -> list[RequestOutput]:
        """One turn: plan and launch the next step, then commit the one before it.

        Returns:
            Tokens of the committed step; none on the first turn and when idle.

        Raises:
            StepFailed: a step broke; the engine cannot go on.
        """
        self._take_grammars()
        plan = self.scheduler.plan()
        launched = (plan, self.executor.launch(plan)) if plan is not None else None
        before, self._in_flight = self._in_flight, launched
        if not self.is_async:
            before, self._in_flight = launched, None
        return self._commit(before)

    def _take_grammars(self) -> None:
        """Let requests whose grammar is ready run, and end those whose grammar was refused."""
        refused: dict[str, RequestError | Overloaded] = {}
        self.refused = refused
        for request_id, each in [pair for pair in self._compiling.items() if pair[1].future.done()]:
            del self._compiling[request_id]
            parts = [part for part in each.parts if self.scheduler.is_unfinished(part)]
            try:
                grammar = each.future.result()
                _check_golden(each.request, grammar)
            except (RequestError, Overloaded) as error:
                refused[request_id] = error
                for part in parts:
                    self.scheduler.fail(part, str(error))
                continue
            for part in parts:
                self.executor.set_grammar(part, grammar)
                self.scheduler.set_schedulable(part, True)

    def flush(self) -> list[RequestOutput]:
        """Commit the step in flight and launch none."""
        before, self._in_flight = self._in_flight, None
        return self._commit(before)

    def stats(self) -> SchedulerStats:
        """Levels and counters of the scheduler."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Wait for the step in flight and end the threads."""
        self.executor.close()
        if self.compiler is not None:
            self.compiler.close()

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


def _check_golden(request: Request, grammar: CompiledGrammar) -> None:
    """Refuse forced tokens that the grammar does not allow; the error names the first one."""
    golden, args = request.params.golden_token_ids, request.params.structured_output
    if golden is None or args is None:
        return
    position = Matcher(grammar, args).first_refused(golden[: request.params.max_tokens])
    if position is not None:
        raise RequestError(
            f"golden_token_ids has {golden[position]} at position {position}, which the grammar does not allow there; change one "
            "of them"
        )
