"""Token budget, admission, preemption and commit.

A step advances the computed tokens of every chosen request towards its known tokens.  A request that reaches them gets a new
token.  Prefill, chunks of it, replay after a prefix hit and recompute after preemption are the same work with other numbers.
Decoding goes in rounds: each round verifies some drafts and gives at least one token.

:meth:`Scheduler.plan` may run once more before the step before is committed.  It then counts on the fewest tokens that this step
can give and reserves memory for the most.  If a request turns out to have ended, its round in the next step is wasted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import compress

import numpy as np

from deepinfer.kv.manager import NO_HIT, Holding, KVManager
from deepinfer.request import FinishReason, Request, RequestOutput
from deepinfer.scheduler import policy
from deepinfer.scheduler.branches import is_lost, num_needed_tokens, parent_of
from deepinfer.scheduler.budget import DraftBudget
from deepinfer.scheduler.builder import InFlight, PlanBuilder
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.record import record, take_tokens
from deepinfer.scheduler.request_state import RequestState
from deepinfer.scheduler.requests import Requests
from deepinfer.scheduler.saving import StateSaver
from deepinfer.scheduler.stats import Counters, SchedulerStats
from deepinfer.step import StepPlan, StepResult


class Scheduler:
    """Owns requests; the manager owns their memory.

    Invariant: a request ends exactly once.  At most two steps are planned and not committed.

    Attributes:
        kv: pages, slots and the prefix cache.
        limits: what a step and a request may spend.
    """

    def __init__(self, kv: KVManager, limits: Limits, budget: DraftBudget | None = None) -> None:
        """Start without requests.

        Args:
            kv: only this scheduler may change it.
            budget: chooses how many drafts a step verifies; None verifies as many as every round can.
        """
        assert limits.num_drafts < kv.layout.ring_tokens - kv.layout.config.sliding_window, "a slot has room for the drafts"
        assert kv.margin >= limits.decoder_keep_tokens, "a hit leaves all tokens that the decoder half runs over"
        self.kv = kv
        self.limits = limits
        self._page_tokens = kv.layout.page_tokens
        self._lookback_tokens = kv.layout.config.engram_max_ngram_size - 1
        # A round must fit into a step.  Other requests must not decide how many drafts it verifies.
        self._num_drafts = min(limits.num_drafts, limits.max_num_batched_tokens - 1)
        self._budget = budget
        self._saver = StateSaver(kv, limits)
        self._requests = Requests(kv, limits)
        self._in_flight: deque[tuple[StepPlan, list[InFlight]]] = deque()
        self._outputs: list[RequestOutput] = []
        self._counters = Counters(num_verified_drafts=[0] * limits.num_drafts, num_accepted_drafts=[0] * limits.num_drafts)

    @property
    def is_idle(self) -> bool:
        """Whether there is no unfinished request and no record for :meth:`take_outputs`."""
        return len(self._requests) == 0 and not self._outputs

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request with this id has not ended."""
        return self._requests.find(request_id) is not None

    # Requests

    def add(self, request: Request, *, is_schedulable: bool = True) -> None:
        """Queue a request.

        Args:
            is_schedulable: False makes it wait for :meth:`set_schedulable`.

        Raises:
            RequestError: the id is in use, or as for :meth:`Limits.check`.
            ContextTooLong: as for :meth:`Limits.check`.
        """
        self._requests.add(request, None, is_schedulable=is_schedulable)

    def fork(self, request_id: str, request: Request, *, is_schedulable: bool = True) -> None:
        """Queue a request that continues an unfinished request and shares its computed tokens.

        The prompt consists of the first tokens of the other request and of any tokens after them.  The new request starts as soon
        as the other request has computed these tokens and nothing of it is in flight, before requests in the queue.  It is
        admitted like any other request if the other request ends, is preempted or is paused before that.  The same happens if the
        other request is so far ahead that its state cannot be rolled back.

        With bounded decoder replay, tokens that the other request ran through the decoder half keep its decoder floor.

        Raises:
            RequestError: there is no such request, it has another tenant, other tokens or other pictures, or as for :meth:`add`.
            ContextTooLong: as for :meth:`add`.
        """
        self._requests.add(request, request_id, is_schedulable=is_schedulable)

    def set_schedulable(self, request_id: str, is_schedulable: bool) -> bool:
        """Say whether the inputs of a request are ready: pictures, grammar, memory from elsewhere.

        A request that is not schedulable stays out of plans.  It keeps its memory unless it is preempted.

        Returns:
            Whether there is such a request.
        """
        state = self._requests.find(request_id)
        if state is None:
            return False
        self._requests.set_schedulable(state, is_schedulable)
        return True

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests, whether they wait, run or are in flight.  Unknown ids are ignored.  No more records of them come.

        Returns:
            The number of requests that were dropped, and their tokens, prompts included.
        """
        assert not isinstance(request_ids, str), "several ids are expected, not the letters of one"
        num_requests = num_tokens = 0
        for request_id in request_ids:
            state = self._requests.find(request_id)
            if state is not None:
                num_requests += 1
                num_tokens += state.num_tokens
                self._end(state, FinishReason.ABORT)
        return num_requests, num_tokens

    def fail(self, request_id: str, message: str) -> None:
        """End a request that cannot follow its grammar.  Its last record has the reason and ``message``."""
        state = self._requests.find(request_id)
        if state is not None:
            self._outputs.append(self._failed(state, message))

    def take_outputs(self) -> list[RequestOutput]:
        """Records of requests that ended without a step.  The next :meth:`commit` would return them too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _failed(self, state: RequestState, message: str) -> RequestOutput:
        """End a request whose grammar failed; returns its last record."""
        reason = FinishReason.GRAMMAR_ERROR
        self._end(state, reason)
        return record(state, None, 0, reason, self.limits.max_num_batched_tokens, message)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        self._requests.end(state)
        self._counters.num_finished[reason] += 1

    # Planning

    def plan(self, *, placeholder: bool = False) -> StepPlan | None:
        """Choose the next step; :mod:`deepinfer.scheduler.policy` says which requests come first.

        Args:
            placeholder: if there is no work, plan one padding token, for ranks that must step together.

        Returns:
            None if there is no work, or none before the step in flight is committed.  Every plan must be committed, in order.
        """
        assert len(self._in_flight) < 2, "commit the oldest step before another is planned"
        builder = PlanBuilder(self.limits.max_num_batched_tokens, self._lookback_tokens)
        if self._requests.branches:
            self._plan_branches(builder)
        decoding, prefilling = self._schedulable(builder.held)
        num_prefill = sum(state.num_prefill_tokens - state.num_planned_tokens for state in prefilling)
        self._plan_rounds(builder, decoding, num_prefill)
        self._plan_prefills(builder, prefilling)
        if not builder.has_preempted:
            self._admit(builder)
        for holding in builder.fresh:
            self.kv.restored(holding)
        if builder.is_empty:
            if not placeholder:
                return None
            builder.add_padding()
        plan = builder.build()
        self._in_flight.append((plan, builder.entries))
        return plan

    def _schedulable(self, held: set[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
        """Running requests that can be planned: those that decode, and those with prompt left."""
        decoding, prefilling = [], []
        for state in self._requests.running.values():
            if not state.is_schedulable or state in held:
                continue
            if state.num_planned_tokens < state.num_prefill_tokens:
                prefilling.append(state)
            elif state.num_tokens + state.num_sampling < state.num_tokens_max:
                decoding.append(state)
        return decoding, prefilling

    def _plan_rounds(self, builder: PlanBuilder, states: list[RequestState], num_prefill: int) -> None:
        """Plan a round of each request that budget and memory allow; ``num_prefill`` prompt tokens wait for the same step."""
        left, caps = builder.budget, [self._cap(state) for state in states]
        is_short = len(states) + (0 if self._budget else sum(caps)) > left
        if is_short:
            chosen = []
            for state in policy.in_order_of_service(states):
                left -= 1 if self._budget else 1 + self._cap(state)
                if left < 0:
                    break
                chosen.append(state)
            states, caps = chosen, [self._cap(state) for state in chosen]
        reaches = [self._reach(state, cap) for state, cap in zip(states, caps, strict=True)]
        short = {state: reach for state, reach in zip(states, reaches, strict=True) if reach > state.num_room_tokens}
        if short:
            left_out = {state for state in policy.in_order_of_service(short) if not self._grow(builder, state, short[state])}
            kept = [state.holding is not None and state not in left_out for state in states]
            states, caps, reaches = list(compress(states, kept)), list(compress(caps, kept)), list(compress(reaches, kept))
        if not states:
            return
        builder.num_drafts = sum(caps)
        if self._budget is not None and builder.num_drafts:
            builder.num_drafts = self._budget.choose(
                np.fromiter([state.slot for state in states], np.int64),
                np.fromiter(caps, np.int64),
                np.fromiter([state.num_in_flight for state in states], np.int64) > 0,
                num_other_rows=min(num_prefill, max(0, builder.budget - len(states) - builder.num_drafts)),
                max_rows=builder.budget,
            )
        builder.budget -= len(states) + builder.num_drafts
        if is_short:  # prompts would add new short answers, which come before the answers left out
            builder.budget = 0
        is_slot_wanted = self._requests.is_slot_wanted
        for state, cap, reach in zip(states, caps, reaches, strict=True):
            saving = self._saver.in_round(state, state.num_planned_tokens, reach, is_slot_wanted=is_slot_wanted)
            builder.add_round(state, cap, saving)

    def _cap(self, state: RequestState) -> int:
        """Most drafts of the request's next round, which gives one token more than it accepts drafts."""
        return min(self._num_drafts, state.num_tokens_max - (state.num_tokens + state.num_sampling) - 1)

    def _reach(self, state: RequestState, cap: int) -> int:
        """Tokens that the request needs pages for if its next round verifies ``cap`` drafts."""
        return min(state.num_planned_tokens + state.num_drafts_in_flight + 1 + cap, state.num_tokens_max)

    def _grow(self, builder: PlanBuilder, state: RequestState, num_tokens: int) -> bool:
        """Give a request pages for its next round and preempt others if necessary; False if it cannot have them."""
        if state.holding is None:  # preempted in this plan
            return False
        while not self.kv.grow(state.holding, num_tokens):
            chosen = policy.victim(
                each for each in self._requests.running.values() if each is state or each not in builder.started
            )
            if chosen is state and state.num_in_flight:
                return False  # the step in flight gives it a token first, or it could be preempted for ever
            if chosen.num_tokens + chosen.num_sampling == chosen.num_tokens_max:
                return False  # it ends with the step in flight
            self._preempt(builder, chosen)
            if chosen is state:
                return False
        state.num_room_tokens = state.holding.num_pages * self._page_tokens
        return True

    def _preempt(self, builder: PlanBuilder, state: RequestState) -> None:
        builder.has_preempted = True
        self._counters.num_preempted += 1
        if self.limits.stop_preempted_request:
            self._end(state, FinishReason.INSUFFICIENT)
            self._outputs.append(record(state, None, 0, FinishReason.INSUFFICIENT, self.limits.max_num_batched_tokens))
            return
        self._requests.preempt(state)

    def _plan_prefills(self, builder: PlanBuilder, states: list[RequestState]) -> None:
        for state in policy.in_order_of_admission(states):
            if builder.budget == 0:
                return
            if state.holding is None:  # preempted in this plan
                continue
            count = self._num_prefill(builder, state, state.num_planned_tokens)
            if count:
                self._plan_chunk(builder, state, count)

    def _num_prefill(self, builder: PlanBuilder, state: RequestState, start: int) -> int:
        """Tokens of a request's prefill that this step computes from ``start`` on: budget, summed keys, stops."""
        stop = next((each for each in state.stops if start < each), state.num_prefill_tokens)
        count = min(stop - start, builder.budget)
        room = self.limits.max_sum_keys - builder.num_keys
        if builder.num_keys and start + count > room:
            count = max(0, room - start)
        if count < stop - start and not self.limits.chunked_prefill and not state.is_resumed:
            return 0
        return count

    def _admit(self, builder: PlanBuilder) -> None:
        limits, kv, requests = self.limits, self.kv, self._requests
        while (state := requests.waiting.head) is not None:
            num_seats, num_pages = requests.branches.reserved(state) if requests.branches else (0, 0)
            is_full = len(requests.running) + num_seats >= limits.max_num_seqs or kv.num_free_slots <= num_seats
            if builder.budget == 0 or is_full:
                return
            state.extend_chain(state.num_tokens)
            self._set_prefill(state)
            hit, is_looked_up = NO_HIT, not state.wants_prompt_logprobs
            if is_looked_up:
                floor = state.decoder_floor if limits.decoder_keep_tokens else None
                hit = kv.plan_hit(state.chain, state.num_prefill_tokens, exact=state.is_resumed, decoder_floor=floor)
            count = self._num_prefill(builder, state, hit.start)
            if not count:
                return
            # A resumed answer gets its next token from a round.  Without pages for the round it would be preempted again.
            is_answer = state.num_prefill_tokens < state.num_tokens
            num_tokens = state.num_tokens + (self._cap(state) if is_answer else 0)
            is_query = is_looked_up and not state.is_resumed
            holding = kv.admit(state.chain, hit, num_tokens, num_reserved_pages=num_pages, is_query=is_query)
            if holding is None:
                return
            requests.waiting.remove(state)
            if not state.is_resumed:
                state.num_cached_tokens = hit.start
            self._start(builder, state, holding, hit.start, count)

    def _set_prefill(self, state: RequestState) -> None:
        # The last output token is the anchor of the next round, as if there had been no interruption.
        state.num_prefill_tokens = state.num_tokens - int(state.num_output_tokens > 0)
        self._saver.set_stops(state)

    def _start(self, builder: PlanBuilder, state: RequestState, holding: Holding, start: int, count: int) -> None:
        """Let a request run on ``holding``, and plan its first ``count`` tokens from ``start`` on."""
        self._requests.run(state, holding)
        state.num_computed_tokens = state.num_planned_tokens = start
        state.num_room_tokens = holding.num_pages * self._page_tokens
        state.num_written_tokens = start
        state.num_published_tokens = holding.num_published * self._page_tokens
        state.window_floor, state.write_floor = holding.window_floor, holding.num_hit_tokens
        state.num_images_planned = state.num_images(0, start)
        if self._budget is not None:
            self._budget.reset(state.slot)
        builder.fresh.append(holding)
        self._plan_chunk(builder, state, count, is_first=True)

    def _plan_branches(self, builder: PlanBuilder) -> None:
        """Start the branches that can start.  Due branches that cannot start yet keep seats and pages from later branches."""
        kv, branches = self.kv, self._requests.branches
        for state in branches:
            if is_lost(state):
                self._requests.queue_branch(state)
        num_waiting = num_reserved_pages = 0
        for state in branches.due():
            parent, num_pages = parent_of(state), branches.num_pages(state)
            has_room = len(self._requests.running) + num_waiting < self.limits.max_num_seqs and kv.num_free_slots > num_waiting
            has_room = has_room and num_reserved_pages + num_pages <= kv.num_free_pages
            has_room = has_room and branches.may_pass(state, self._requests.waiting.head)
            if has_room and parent.num_computed_tokens >= num_needed_tokens(state):
                start = min(parent.num_computed_tokens, state.num_tokens - 1)
                if parent.num_in_flight:
                    builder.held.add(parent)
                elif not branches.can_start(state, parent, start):
                    self._requests.queue_branch(state)
                    continue
                elif self._branch(builder, state, parent, start):
                    continue
            num_waiting += 1
            num_reserved_pages += num_pages

    def _branch(self, builder: PlanBuilder, state: RequestState, parent: RequestState, start: int) -> bool:
        """Start a branch if this step has tokens for it."""
        self._set_prefill(state)
        count = self._num_prefill(builder, state, start)
        if not count:
            return False
        assert parent.holding is not None, "a request that others branch from runs"
        forked = self.kv.fork(parent.holding, start)
        if forked is None:
            return False
        holding, copies = forked
        if not self.kv.grow(holding, state.num_tokens):
            self.kv.release(holding)
            return False
        self._requests.branches.remove(state)
        head = self._requests.waiting.head
        if head is not None and policy.place(head) < policy.place(state):
            head.num_overtaken += 1
        builder.page_copies += copies
        builder.held.add(state)
        builder.started.add(state)
        state.num_cached_tokens = start
        if start > state.decoder_floor:  # the decoder half ran over tokens before it, with the parent's floor
            state.decoder_floor = parent.decoder_floor
        self._start(builder, state, holding, start, count)
        state.num_written_tokens = parent.num_written_tokens  # its slot is a copy of the parent's slot
        return True

    def _plan_chunk(self, builder: PlanBuilder, state: RequestState, count: int, *, is_first: bool = False) -> None:
        """Add the next ``count`` tokens of a request to the plan."""
        end = state.num_planned_tokens + count
        saving = self._saver.in_chunk(state, end, is_slot_wanted=self._requests.is_slot_wanted)
        builder.add_chunk(state, count, saving, is_first=is_first)

    # Committing

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take over the results of the oldest planned step.  Requests that ended or were preempted meanwhile are ignored."""
        oldest, entries = self._in_flight.popleft()
        assert oldest is plan, "steps are committed in the order in which they were planned"
        outputs = self.take_outputs()
        self._counters.num_steps += 1
        self._counters.num_padding_rows += result.num_padding_rows
        slots: list[int] = []  # of requests with new drafts
        numbers: list[int] = []  # of the rows with their confidences
        number = -1
        for entry in entries:
            number += entry.drafts
            state = entry.state
            if state.generation != entry.generation:
                continue
            if entry.drafts:
                slots.append(state.slot)
                numbers.append(number)
            outputs += self._commit_entry(entry, result)
        if self._budget is not None:
            if slots:
                self._budget.update(np.fromiter(slots, np.int64), result.confidences[np.fromiter(numbers, np.int64)])
            if plan.rounds and not plan.chunks:
                self._budget.refine(plan.num_rows, result.duration_ms)
        return outputs

    def _commit_entry(self, entry: InFlight, result: StepResult) -> list[RequestOutput]:
        """Commit a chunk or a round of a request; returns the records of its new tokens."""
        state, request_id = entry.state, entry.state.request.request_id
        if entry.samples and request_id in result.failures:
            return [self._failed(state, result.failures[request_id])]
        state.num_in_flight -= 1
        before = state.num_computed_tokens
        state.num_written_tokens = max(state.num_written_tokens, entry.end or before + 1 + entry.max_drafts)
        new: list[RequestOutput] = []
        if entry.end:
            state.num_computed_tokens = entry.end
            state.prompt_logprobs += result.prompt_logprobs.get(request_id, ())
            state.prompt_top += result.prompt_top.get(request_id, ())
        if entry.samples:
            sampled = result.sampled[request_id]
            state.num_sampling -= 1
            state.num_drafts_in_flight -= entry.max_drafts
            new = take_tokens(state, sampled, self.limits)
            self._counters.count_tokens(sampled, len(new), is_round=entry.max_drafts > 0)
            if not entry.end:  # a round computes the anchor and the accepted drafts, but not its last token
                state.num_computed_tokens += len(new)
                state.num_planned_tokens += len(new) - 1
        self._counters.num_computed_tokens += state.num_computed_tokens - before
        if state.num_computed_tokens >= state.num_published_tokens + self._page_tokens:
            self._publish(state)
        if entry.saving is not None:
            end = entry.end or before + len(result.sampled[request_id].token_ids)
            self._saver.commit(state, entry.saving, start=before, end=end)
        if new and (reason := new[-1].finish_reason) is not None:
            self._end(state, reason)
        return new

    def _publish(self, state: RequestState) -> None:
        assert state.holding is not None, "a committed request runs"
        boundary = state.num_computed_tokens // self._page_tokens * self._page_tokens
        state.extend_chain(boundary)
        self.kv.publish(state.holding, state.chain, boundary)
        state.num_published_tokens = boundary

    # Looking in

    def stats(self) -> SchedulerStats:
        """Counters and levels."""
        num_running = len(self._requests.running)
        return self._counters.stats(self.kv, num_running=num_running, num_waiting=len(self._requests) - num_running)

    def check(self) -> None:
        """Assert the invariants of all requests and of the steps in flight.

        Cost: all requests; the manager has a check of its own.
        """
        self._requests.check([entry for _, entries in self._in_flight for entry in entries])
