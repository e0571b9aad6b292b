"""Token budget, admission, preemption and commit.

A step raises every chosen request's computed tokens towards those it has; a request that catches up gets a new token.  Prefill,
chunks of it, replay after a prefix hit and recompute after preemption are the same thing with other numbers; decoding goes in
rounds, each of which verifies some drafts and brings at least one token.

:meth:`Scheduler.plan` may run once more before the step before is committed.  It then counts on the least that this step will
bring and makes room for the most; an answer that turns out to have ended costs the rows of one round in the step under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

import numpy as np

from deepinfer.errors import ContextTooLong, RequestError, shown
from deepinfer.kv.manager import NO_HIT, Holding, KVManager
from deepinfer.request import FinishReason, Request, RequestOutput
from deepinfer.scheduler import policy
from deepinfer.scheduler.budget import DraftBudget
from deepinfer.scheduler.builder import InFlight, PlanBuilder
from deepinfer.scheduler.record import record
from deepinfer.scheduler.request_state import RequestState, Saving
from deepinfer.scheduler.stats import SchedulerStats
from deepinfer.step import Sampled, StepPlan, StepResult

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler may spend.

    Attributes:
        max_model_len: prompt plus output tokens of one request.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step.
        eos_token_id: ends a request that does not ignore it.
        image_token_id: marks image positions.
        chunked_prefill: whether a prompt may be cut to the budget of a step; otherwise every prompt must fit into one.
        stop_preempted_request: end a preempted request instead of computing it again.
        max_sum_keys: most keys, summed over the prompts of a step; its first prompt is taken whatever its length.
        decoder_keep_tokens: last tokens of a prompt that the decoder half runs over; 0 for all.
        save_states: save a request's state at page boundaries, and end a chunk at the last one of its prompt.
        num_drafts: most drafts that a round verifies.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_id: int
    image_token_id: int
    chunked_prefill: bool = True
    stop_preempted_request: bool = False
    max_sum_keys: int = NO_LIMIT
    decoder_keep_tokens: int = 0
    save_states: bool = True
    num_drafts: int = 0


class Scheduler:
    """Owns requests; what they hold is the manager's.

    Invariant: an unfinished request runs, or waits in the queue, or waits for a state to branch from, or waits for its inputs; it
    holds memory exactly if it runs.  A request ends exactly once.  At most two steps are planned and not committed.

    Attributes:
        kv: pages, slots and what can be found in them.
        limits: what may be spent.
    """

    def __init__(self, kv: KVManager, limits: Limits, budget: DraftBudget | None = None) -> None:
        """Nothing to do.

        Args:
            kv: must not be changed by anybody else.
            budget: chooses how many drafts a step verifies; without it every round verifies all it can.
        """
        assert limits.num_drafts < kv.layout.ring_tokens - kv.layout.config.sliding_window, "a slot has room for the drafts"
        assert kv.margin >= limits.decoder_keep_tokens, "a hit leaves all tokens that the decoder half runs over"
        self.kv = kv
        self.limits = limits
        self._page_tokens = kv.layout.page_tokens
        self._lookback_tokens = kv.layout.config.engram_max_ngram_size - 1
        # A slot still holds the state of a few tokens earlier, for drafts that are rejected.
        self._rollback_tokens = kv.layout.ring_tokens - kv.layout.config.sliding_window
        # A round must fit into a step, and always verifies as many drafts: what else runs must not decide it.
        self._num_drafts = min(limits.num_drafts, limits.max_num_batched_tokens - 1)
        self._budget = budget
        self._requests: dict[str, RequestState] = {}
        self._running: dict[str, RequestState] = {}
        self._waiting = policy.Queue()
        self._branches: dict[str, RequestState] = {}
        self._in_flight: deque[tuple[StepPlan, list[InFlight]]] = deque()
        self._num_rounds = 0
        self._num_verified, self._num_accepted = [0] * limits.num_drafts, [0] * limits.num_drafts
        self._outputs: list[RequestOutput] = []
        self._num_arrived = self._num_steps = self._num_computed = self._num_padding = self._num_sampled = 0
        self._num_preempted = 0
        self._num_finished = dict.fromkeys(FinishReason, 0)

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished and no record waits in :meth:`take_outputs`."""
        return not self._requests and not self._outputs

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether such a request is known and has not ended."""
        return request_id in self._requests

    # Requests come and go

    def add(self, request: Request, *, is_schedulable: bool = True) -> None:
        """Queue a request.

        Args:
            is_schedulable: False makes it wait for :meth:`set_schedulable`.

        Raises:
            RequestError: empty prompt or id, an id already in use, checkpoints that are none, or a need that can never be met.
            ContextTooLong: the prompt leaves no room for a token, or does not fit into a step and may not be cut.
        """
        self._check_request(request)
        state = self._new_state(request, is_schedulable)
        self._requests[request.request_id] = state
        if is_schedulable:
            self._waiting.push(state)

    def fork(self, request_id: str, request: Request, *, is_schedulable: bool = True) -> None:
        """Queue a request that continues an unfinished one, sharing what is computed of it.

        Its prompt is the first tokens of the other one, and any tokens behind them.  It starts when these are computed, as soon
        as nothing of the other request is in flight, before what waits in the queue.  If the other one ends, is preempted or is
        paused before, or is already more than the few tokens further that a state can be rolled back, the new request is admitted
        like others.

        With bounded decoder replay, tokens that the other request ran through the decoder half keep its decoder floor.

        Raises:
            RequestError: no such request, another tenant, other tokens or pictures, or as for :meth:`add`.
            ContextTooLong: as for :meth:`add`.
        """
        parent = self._requests.get(request_id)
        if parent is None:
            raise RequestError(f"request {shown(request_id)} is not there to be forked; it has ended, or the id is wrong")
        self._check_request(request)
        if request.salt != parent.request.salt:
            raise RequestError("a fork of another tenant's request was asked for; use the salt of the request that is forked")
        state = self._new_state(request, is_schedulable)
        shared = min(state.num_tokens, parent.num_tokens)
        differing = np.flatnonzero(state.token_ids[:shared] != parent.token_ids[:shared])
        if len(differing):
            raise RequestError(
                f"the prompt of the fork differs from the tokens of request {shown(request_id)} at position {differing[0]}; "
                "start it with the tokens of that request"
            )
        theirs = {at: content for at, content in parent.request.image_hashes.items() if at < shared}
        if theirs != {at: content for at, content in request.image_hashes.items() if at < shared}:
            raise RequestError(f"the fork has other pictures than request {shown(request_id)}; give it the same ones")
        state.parent = (parent, parent.generation)
        self._requests[request.request_id] = self._branches[request.request_id] = state

    def set_schedulable(self, request_id: str, is_schedulable: bool) -> bool:
        """Say whether the inputs of a request are ready: pictures, grammar, memory that arrives from elsewhere.

        A request that is not schedulable stays out of plans; what it holds it keeps, unless it is preempted.

        Returns:
            whether the request was there.
        """
        state = self._requests.get(request_id)
        if state is None:
            return False
        if state.is_schedulable != is_schedulable:
            state.is_schedulable = is_schedulable
            if state.holding is None and request_id not in self._branches:
                if is_schedulable:
                    self._waiting.push(state)
                else:
                    self._waiting.remove(state)
        return True

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests, waiting, running or in flight; unknown ones are passed over.  No record of them comes any more.

        Returns:
            how many were there, and how many tokens they had, prompts included.
        """
        assert not isinstance(request_ids, str), "several ids are expected, not the letters of one"
        num_requests = num_tokens = 0
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                num_requests += 1
                num_tokens += state.num_tokens
                self._end(state, FinishReason.ABORT)
        return num_requests, num_tokens

    def take_outputs(self) -> list[RequestOutput]:
        """Records of requests that ended without a step; the next :meth:`commit` gives them too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _new_state(self, request: Request, is_schedulable: bool) -> RequestState:
        num_prompt, keep = len(request.prompt_token_ids), self.limits.decoder_keep_tokens
        state = RequestState(
            request,
            arrival=self._num_arrived,
            num_tokens_max=min(num_prompt + request.params.max_tokens, self.limits.max_model_len),
            decoder_floor=max(0, num_prompt - keep) if keep else 0,
            page_tokens=self._page_tokens,
            image_token_id=self.limits.image_token_id,
            # With a bounded decoder half there are no logits of the prompt, as documented.
            has_prompt_logprobs=request.params.prompt_logprobs and not keep,
        )
        state.is_schedulable = is_schedulable
        self._num_arrived += 1
        return state

    def _check_request(self, request: Request) -> None:
        num_prompt, limits = len(request.prompt_token_ids), self.limits
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if not request.request_id:
            raise RequestError("the request id is empty; choose another")
        if request.request_id in self._requests:
            raise RequestError(f"request id {shown(request.request_id)} is in use; choose another")
        if num_prompt >= limits.max_model_len:
            raise ContextTooLong(
                f"prompt of {num_prompt} tokens leaves no room for output in the context limit of {limits.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        if not limits.chunked_prefill and num_prompt > limits.max_num_batched_tokens:
            raise ContextTooLong(
                f"prompt of {num_prompt} tokens exceeds the {limits.max_num_batched_tokens} of a step and may not be cut; "
                "shorten the prompt, raise max_num_batched_tokens or turn chunked_prefill on"
            )
        for position in request.checkpoints:
            if position % self._page_tokens or not 0 < position <= num_prompt:
                raise RequestError(
                    f"checkpoint {position} is not a multiple of {self._page_tokens} inside the prompt of {num_prompt} tokens; "
                    "state can be saved at ends of pages only"
                )
        needed = self.kv.layout.pages_for(min(num_prompt + request.params.max_tokens, limits.max_model_len))
        if needed > self.kv.num_pages:
            raise RequestError(
                f"the request may need {needed} pages of {self._page_tokens} tokens, the pool has {self.kv.num_pages}; "
                "lower max_tokens, shorten the prompt or give the engine more memory"
            )

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        request_id = state.request.request_id
        if state.holding is not None:
            self._vacate(state)
        else:
            if request_id in self._branches:
                del self._branches[request_id]
            elif state.is_schedulable:
                self._waiting.remove(state)
            state.vacate()  # others may wait to branch from it
        del self._requests[request_id]
        self._num_finished[reason] += 1

    def _vacate(self, state: RequestState) -> None:
        """Take back what a running state holds; its chunks in flight are void."""
        assert state.holding is not None, "a running state holds memory"
        self.kv.release(state.holding)
        del self._running[state.request.request_id]
        state.vacate()

    # Planning

    def plan(self, *, placeholder: bool = False) -> StepPlan | None:
        """Choose the next step; see :mod:`deepinfer.scheduler.policy` for who comes first.

        Args:
            placeholder: where there is nothing to do, plan one token of nobody, for ranks that must step together.

        Returns:
            None if there is nothing to do, or nothing before the step in flight is committed.  Every plan must be committed, in
            order.
        """
        assert len(self._in_flight) < 2, "commit the oldest step before another is planned"
        making = PlanBuilder(self.limits.max_num_batched_tokens, self._lookback_tokens)
        if self._branches:
            self._plan_branches(making)
        decoding, prefilling = self._schedulable(making.held)
        num_prefill = sum(state.num_prefill_tokens - state.num_planned_tokens for state in prefilling)
        self._plan_rounds(making, decoding, num_prefill)
        self._plan_prefills(making, prefilling)
        if not making.has_preempted:
            self._admit(making)
        for holding in making.fresh:
            self.kv.restored(holding)
        if making.is_empty:
            if not placeholder:
                return None
            making.add_nobody()
        plan = making.build()
        self._in_flight.append((plan, making.entries))
        return plan

    def _schedulable(self, held: set[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
        """Running states that can be planned: those that decode, and those with prompt left."""
        decoding, prefilling = [], []
        for state in self._running.values():
            if not state.is_schedulable or state in held:
                continue
            if state.num_planned_tokens < state.num_prefill_tokens:
                prefilling.append(state)
            elif state.num_tokens + state.num_sampling < state.num_tokens_max:
                decoding.append(state)
        return decoding, prefilling

    def _plan_rounds(self, making: PlanBuilder, states: list[RequestState], num_prefill: int) -> None:
        """Plan a round of each state that budget and memory allow; ``num_prefill`` tokens of prompts wait to go along."""
        left, caps = making.budget, [self._cap(state) for state in states]
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
            left_out = {state for state in policy.in_order_of_service(short) if not self._grow(making, state, short[state])}
            kept = [state.holding is not None and state not in left_out for state in states]
            states, caps, reaches = list(compress(states, kept)), list(compress(caps, kept)), list(compress(reaches, kept))
        if not states:
            return
        making.num_drafts = sum(caps)
        if self._budget is not None and making.num_drafts:
            making.num_drafts = self._budget.choose(
                np.fromiter([state.slot for state in states], np.int64),
                np.fromiter(caps, np.int64),
                np.fromiter([state.num_in_flight for state in states], np.int64) > 0,
                num_other_rows=min(num_prefill, max(0, making.budget - len(states) - making.num_drafts)),
                max_rows=making.budget,
            )
        making.budget -= len(states) + making.num_drafts
        if is_short:  # prompts would bring new short answers, which come before those left out
            making.budget = 0
        for state, cap, reach in zip(states, caps, reaches, strict=True):
            making.add_round(state, cap, self._saving(state, state.num_planned_tokens, reach))

    def _cap(self, state: RequestState) -> int:
        """Drafts that the state's next round may verify; it may accept all of them and gets one token more in any case."""
        return min(self._num_drafts, state.num_tokens_max - (state.num_tokens + state.num_sampling) - 1)

    def _reach(self, state: RequestState, cap: int) -> int:
        """Tokens that the state's next round needs pages for, if it verifies ``cap`` drafts."""
        return min(state.num_planned_tokens + state.num_drafts_in_flight + 1 + cap, state.num_tokens_max)

    def _saving(self, state: RequestState, start: int, reach: int) -> Saving | None:
        """Where a round saves state if it reaches the end of a page, which may happen from ``start`` + 1 to ``reach`` tokens.

        The device knows whether it does and copies only then, so rounds in flight at once can share a slot.
        """
        position = reach // self._page_tokens * self._page_tokens
        if state.saving is not None:
            position = state.saving.position
        if not start < position <= reach:
            return None
        if state.saving is None:
            slot = self._save_slot(state, position)
            if slot is None:
                return None
            state.saving = Saving(slot=slot, position=position)
        state.saving.num_in_flight += 1
        return state.saving

    def _grow(self, making: PlanBuilder, state: RequestState, num_tokens: int) -> bool:
        """Give a state pages for its next round, taking memory from others if need be; False if it has to do without."""
        if state.holding is None:  # preempted in this plan
            return False
        while not self.kv.grow(state.holding, num_tokens):
            chosen = policy.victim(each for each in self._running.values() if each is state or each not in making.started)
            if chosen is state and state.num_in_flight:
                return False  # what is in flight brings it a token first, or preemption could repeat without end
            if chosen.num_tokens + chosen.num_sampling == chosen.num_tokens_max:
                return False  # it ends with what is in flight
            self._preempt(making, chosen)
            if chosen is state:
                return False
        state.num_room_tokens = state.holding.num_pages * self._page_tokens
        return True

    def _preempt(self, making: PlanBuilder, state: RequestState) -> None:
        making.has_preempted = True
        self._num_preempted += 1
        if self.limits.stop_preempted_request:
            self._end(state, FinishReason.INSUFFICIENT)
            self._outputs.append(record(state, None, 0, FinishReason.INSUFFICIENT, self.limits.max_num_batched_tokens))
            return
        self._vacate(state)
        state.is_resumed = True
        if state.is_schedulable:
            self._waiting.push(state)

    def _plan_prefills(self, making: PlanBuilder, states: list[RequestState]) -> None:
        for state in policy.in_order_of_admission(states):
            if making.budget == 0:
                return
            if state.holding is None:  # preempted in this plan
                continue
            count = self._num_prefill(making, state, state.num_planned_tokens)
            if count:
                self._plan_chunk(making, state, count)

    def _num_prefill(self, making: PlanBuilder, state: RequestState, start: int) -> int:
        """Tokens of a state's prefill that this step takes from ``start`` on: budget, summed keys, places to stop."""
        stop = next((each for each in state.stops if start < each), state.num_prefill_tokens)
        count = min(stop - start, making.budget)
        room = self.limits.max_sum_keys - making.num_keys
        if making.num_keys and start + count > room:
            count = max(0, room - start)
        if count < stop - start and not self.limits.chunked_prefill and not state.is_resumed:
            return 0
        return count

    def _admit(self, making: PlanBuilder) -> None:
        limits, kv = self.limits, self.kv
        while (state := self._waiting.head) is not None:
            num_seats, num_pages = self._reserved(state) if self._branches else (0, 0)
            is_full = len(self._running) + num_seats >= limits.max_num_seqs or kv.num_free_slots <= num_seats
            if making.budget == 0 or is_full:
                return
            state.extend_chain(state.num_tokens)
            self._set_prefill(state)
            hit, is_looked_up = NO_HIT, not state.wants_prompt_logprobs
            if is_looked_up:
                floor = self._decoder_floor(state)
                hit = kv.plan_hit(state.chain, state.num_prefill_tokens, exact=state.is_resumed, decoder_floor=floor)
            count = self._num_prefill(making, state, hit.start)
            if not count:
                return
            # A resumed answer gets its next token from a round; without room for that it would be preempted again for nothing.
            is_answer = state.num_prefill_tokens < state.num_tokens
            num_tokens = state.num_tokens + (self._cap(state) if is_answer else 0)
            is_query = is_looked_up and not state.is_resumed
            holding = kv.admit(state.chain, hit, num_tokens, num_reserved_pages=num_pages, is_query=is_query)
            if holding is None:
                return
            self._waiting.remove(state)
            if not state.is_resumed:
                state.num_cached_tokens = hit.start
            self._start(making, state, holding, hit.start, count)

    def _set_prefill(self, state: RequestState) -> None:
        # A token that was generated is the anchor of the round that comes next, as if there had been no break.
        state.num_prefill_tokens = state.num_tokens - int(state.num_output_tokens > 0)
        stops, page = set(state.request.checkpoints), self._page_tokens
        if self.limits.save_states:
            stops.add(state.num_prefill_tokens // page * page)
            # A hit of the same prompt ends here at the latest.
            state.resend_position = max(0, state.num_prompt_tokens - self.kv.margin) // page * page
            if self.kv.is_caching and self.kv.num_free_slots > 2:  # the state takes one, and its last state another
                stops.add(state.resend_position)
        state.stops = tuple(sorted(stops))

    def _start(self, making: PlanBuilder, state: RequestState, holding: Holding, start: int, count: int) -> None:
        """Let a state run on ``holding``, and plan its first ``count`` tokens from ``start`` on."""
        state.holding, state.slot = holding, holding.slot
        state.num_computed_tokens = state.num_planned_tokens = start
        state.num_room_tokens = holding.num_pages * self._page_tokens
        state.num_written_tokens = start
        state.num_published_tokens = holding.num_published * self._page_tokens
        state.window_floor, state.write_floor = holding.window_floor, holding.num_hit_tokens
        state.num_images_planned = state.num_images(0, start)
        self._running[state.request.request_id] = state
        if self._budget is not None:
            self._budget.reset(state.slot)
        making.fresh.append(holding)
        self._plan_chunk(making, state, count, is_first=True)

    def _plan_branches(self, making: PlanBuilder) -> None:
        """Start the branches that can start; those that are due and cannot yet keep what they need from later ones."""
        kv, due = self.kv, []
        for state in list(self._branches.values()):
            if policy.is_lost(state):
                self._unbranch(state)
            elif policy.is_due(state):
                due.append(state)
        num_waiting = num_reserved_pages = 0
        for state in policy.in_order_of_admission(due):
            parent, num_pages = policy.parent_of(state), self._num_branch_pages(state)
            has_room = len(self._running) + num_waiting < self.limits.max_num_seqs and kv.num_free_slots > num_waiting
            has_room = has_room and num_reserved_pages + num_pages <= kv.num_free_pages and self._may_pass(state)
            if has_room and parent.num_computed_tokens >= policy.num_needed_tokens(state):
                start = min(parent.num_computed_tokens, state.num_tokens - 1)
                if parent.num_in_flight:
                    making.held.add(parent)
                elif not self._can_branch(state, parent, start):
                    self._unbranch(state)
                    continue
                elif self._branch(making, state, parent, start):
                    continue
            num_waiting += 1
            num_reserved_pages += num_pages

    def _num_branch_pages(self, state: RequestState) -> int:
        """Pages that a branch needs beside those that it shares."""
        shared = min(policy.parent_of(state).num_computed_tokens, state.num_tokens - 1) // self._page_tokens
        return self.kv.layout.pages_for(state.num_tokens) - shared

    def _may_pass(self, state: RequestState) -> bool:
        """Whether a branch may start before the head of the queue."""
        head = self._waiting.head
        return head is None or policy.place(head) > policy.place(state) or head.num_overtaken < self.limits.max_num_seqs

    def _reserved(self, state: RequestState) -> tuple[int, int]:
        """Seats, which are slots too, and pages that are kept for branches that come before ``state``."""
        due = [each for each in self._branches.values() if policy.is_due(each) and policy.place(each) < policy.place(state)]
        return len(due), sum(self._num_branch_pages(each) for each in due)

    def _unbranch(self, state: RequestState) -> None:
        """Make a branch wait like any other request."""
        state.parent = None
        del self._branches[state.request.request_id]
        if state.is_schedulable:
            self._waiting.push(state)

    def _can_branch(self, state: RequestState, parent: RequestState, start: int) -> bool:
        """Whether the state and the pages of ``parent`` serve ``state`` from ``start`` on."""
        is_near = parent.num_written_tokens - start <= self._rollback_tokens and start >= parent.write_floor
        if not is_near or state.wants_prompt_logprobs:
            return False
        return bool((state.token_ids[:start] == parent.token_ids[:start]).all())

    def _branch(self, making: PlanBuilder, state: RequestState, parent: RequestState, start: int) -> bool:
        """Start a branch, if this step has tokens for it."""
        self._set_prefill(state)
        count = self._num_prefill(making, state, start)
        if not count:
            return False
        assert parent.holding is not None, "a state that others branch from runs"
        forked = self.kv.fork(parent.holding, start)
        if forked is None:
            return False
        holding, copies = forked
        if not self.kv.grow(holding, state.num_tokens):
            self.kv.release(holding)
            return False
        state.parent = None
        del self._branches[state.request.request_id]
        head = self._waiting.head
        if head is not None and policy.place(head) < policy.place(state):
            head.num_overtaken += 1
        making.page_copies += copies
        making.held.add(state)
        making.started.add(state)
        state.num_cached_tokens = start
        if start > state.decoder_floor:  # the decoder half ran over tokens before it, with the parent's floor
            state.decoder_floor = parent.decoder_floor
        self._start(making, state, holding, start, count)
        return True

    def _plan_chunk(self, making: PlanBuilder, state: RequestState, count: int, *, is_first: bool = False) -> None:
        """Add the next ``count`` tokens of a state to the plan."""
        end, saving = state.num_planned_tokens + count, None
        if end % self._page_tokens == 0 and (slot := self._save_slot(state, end)) is not None:
            saving = Saving(slot=slot, position=end, num_in_flight=1)
        making.add_chunk(state, count, saving, is_first=is_first)

    def _save_slot(self, state: RequestState, end: int) -> int | None:
        """Slot for the state at a page boundary, unless it is not whole there or a request waits for the slot."""
        if not self.limits.save_states or end < state.write_floor:
            return None
        kv = self.kv
        if self._waiting and kv.num_free_slots <= 1 and len(self._running) < self.limits.max_num_seqs:
            return None
        assert state.holding is not None, "a planned state runs"
        key = state.chain.keys[end // self._page_tokens - 1] if end <= state.chain.num_tokens else None
        if end in state.request.checkpoints:
            return kv.save_slot(state.holding, "asked", key=key)
        if end == state.resend_position and (slot := kv.save_slot(state.holding, "resend", key=key)) is not None:
            return slot
        return kv.save_slot(state.holding, "progress", key=key)

    def _decoder_floor(self, state: RequestState) -> int | None:
        return state.decoder_floor if self.limits.decoder_keep_tokens else None

    # Committing

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take over what the oldest planned step did; requests that ended or were preempted meanwhile are passed over."""
        oldest, entries = self._in_flight.popleft()
        assert oldest is plan, "steps are committed in the order in which they were planned"
        outputs = self.take_outputs()
        self._num_steps += 1
        self._num_padding += result.num_padding_rows
        slots: list[int] = []  # that drafts were made for, and where their confidences stand
        numbers: list[int] = []
        number = -1
        for entry in entries:
            number += entry.drafts
            state = entry.state
            if state.generation != entry.generation:
                continue
            if entry.drafts:
                slots.append(state.slot)
                numbers.append(number)
            state.num_in_flight -= 1
            before = state.num_computed_tokens
            state.num_written_tokens = max(state.num_written_tokens, entry.end or before + 1 + entry.max_drafts)
            new: list[RequestOutput] = []
            if entry.end:
                state.num_computed_tokens = entry.end
                state.prompt_logprobs += result.prompt_logprobs.get(state.request.request_id, ())
            if entry.samples:
                new = self._take_tokens(state, entry, result.sampled[state.request.request_id])
                outputs += new
            self._num_computed += state.num_computed_tokens - before
            if state.num_computed_tokens >= state.num_published_tokens + self._page_tokens:
                self._publish(state)
            if entry.saving is not None:
                num_new = len(result.sampled[state.request.request_id].token_ids) if entry.max_drafts else 1
                self._save(state, entry.saving, is_copied=before + num_new >= entry.saving.position)
            if new and (reason := new[-1].finish_reason) is not None:
                self._end(state, reason)
        if self._budget is not None:
            if slots:
                self._budget.update(np.fromiter(slots, np.int64), result.confidences[np.fromiter(numbers, np.int64)])
            if plan.rounds and not plan.chunks:
                self._budget.refine(plan.num_rows, result.duration_ms)
        return outputs

    def _publish(self, state: RequestState) -> None:
        assert state.holding is not None, "a committed state runs"
        boundary = state.num_computed_tokens // self._page_tokens * self._page_tokens
        state.extend_chain(boundary)
        self.kv.publish(state.holding, state.chain, boundary)
        state.num_published_tokens = boundary

    def _save(self, state: RequestState, saving: Saving, *, is_copied: bool) -> None:
        """Make saved state findable if the end of the page was reached; give its slot back if nothing will reach it any more.

        ``is_copied`` is the device's view, which also counts tokens behind the end of the request.
        """
        assert state.holding is not None, "a committed state runs"
        saving.num_in_flight -= 1
        if saving.position <= state.num_computed_tokens:
            if not saving.is_done:
                self.kv.saved(state.holding, state.chain, saving.position, decoder_floor=self._decoder_floor(state))
                saving.is_done, state.saving = True, None
        elif saving.num_in_flight == 0 and not is_copied:
            self.kv.unsaved(state.holding)
            state.saving = None

    def _take_tokens(self, state: RequestState, entry: InFlight, sampled: Sampled) -> list[RequestOutput]:
        """Append tokens up to the first that ends the request, and record them."""
        params, eos_token_id = state.request.params, self.limits.eos_token_id
        state.num_sampling -= 1
        state.num_drafts_in_flight -= entry.max_drafts
        num_accepted = len(sampled.token_ids) - 1
        if entry.max_drafts:
            self._num_rounds += 1
        for position in range(sampled.num_drafts):
            self._num_verified[position] += 1
            self._num_accepted[position] += position < num_accepted
        outputs: list[RequestOutput] = []
        for number, token_id in enumerate(sampled.token_ids):
            state.token_ids[state.num_tokens] = token_id
            state.num_tokens += 1
            reason = None
            if (token_id == eos_token_id and not params.ignore_eos) or token_id in state.stop_token_ids:
                reason = FinishReason.STOP
            elif state.num_tokens == state.num_tokens_max:
                reason = FinishReason.LENGTH
            outputs.append(record(state, sampled, number, reason, self.limits.max_num_batched_tokens))
            if reason is not None:
                break
        self._num_sampled += len(outputs)
        if not entry.end:  # the anchor and the accepted drafts but the last token
            state.num_computed_tokens += len(outputs)
            state.num_planned_tokens += len(outputs) - 1
        return outputs

    # Looking in

    def stats(self) -> SchedulerStats:
        """Counters and levels."""
        kv, counts = self.kv, self.kv.counts
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_pages=kv.num_pages,
            num_held_pages=kv.num_pages - kv.num_free_pages,
            num_cached_pages=kv.num_cached_pages,
            num_slots=kv.num_slots,
            num_held_slots=kv.num_slots - kv.num_free_slots,
            num_saved_states=kv.num_saved_states,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_padding_rows=self._num_padding,
            num_output_tokens=self._num_sampled,
            num_rounds=self._num_rounds,
            num_verified_drafts=tuple(self._num_verified),
            num_accepted_drafts=tuple(self._num_accepted),
            num_asked_tokens=counts.num_asked_tokens,
            num_hit_tokens=counts.num_hit_tokens,
            num_replayed_tokens=counts.num_replayed_tokens,
            num_preempted=self._num_preempted,
            num_finished=dict(self._num_finished),
        )

    def check(self) -> None:
        """Assert the invariants of all states, of the queue, and that memory is held by running requests alone.

        Cost: all states; the manager has a check of its own.
        """
        waiting = {state.request.request_id for state in self._waiting}
        self._waiting.check()
        assert len(waiting) == len(self._waiting), "nobody waits twice"
        assert waiting.isdisjoint(self._running), "nobody waits and runs"
        assert self._branches.keys().isdisjoint(waiting | self._running.keys()), "a branch neither waits nor runs yet"
        assert self._running.keys() | waiting | self._branches.keys() <= self._requests.keys(), "who ended is nowhere"
        in_flight: dict[RequestState, list[InFlight]] = {}
        for _, entries in self._in_flight:
            for entry in entries:
                if entry.state.generation == entry.generation:
                    in_flight.setdefault(entry.state, []).append(entry)
        for request_id, state in self._requests.items():
            state.check()
            is_running = request_id in self._running
            assert is_running == (state.holding is not None), "memory is held while a request runs"
            parked = not is_running and request_id not in waiting and request_id not in self._branches
            assert not parked or not state.is_schedulable, "a request that is ready waits in the queue"
            assert request_id not in waiting or state.is_schedulable, "a request in the queue is ready"
            entries = in_flight.pop(state, [])
            assert state.num_in_flight == len(entries), "chunks in flight are counted"
            assert state.num_sampling == sum(entry.samples for entry in entries), "tokens in flight are counted"
            assert state.num_drafts_in_flight == sum(entry.max_drafts for entry in entries), "drafts in flight are counted"
            ends = [entry.end for entry in entries if entry.end]
            num_rounds = len(entries) - len(ends)
            computed = ends[-1] if ends else state.num_computed_tokens
            assert computed + num_rounds == state.num_planned_tokens, "what is in flight goes at least where planning stands"
            num_saving = sum(entry.saving is state.saving for entry in entries) if state.saving else 0
            assert state.saving is None or state.saving.num_in_flight == num_saving > 0, "state is saved by what is in flight"
        assert not in_flight, "nothing valid is in flight of a request that ended"
        assert len(self._running) == self.kv.num_holdings, "memory is held by running requests alone"
        assert len(self._running) <= self.limits.max_num_seqs, "no more run than may"
        slots = {state.slot for state in self._running.values()}
        assert len(slots) == len(self._running), "a slot belongs to one request"
