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
from deepinfer.scheduler.row import Row, Saving
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

    Invariant: an unfinished request runs, or waits in the queue, or waits for a row to branch from, or waits for its inputs; it
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
        self._rows: dict[str, Row] = {}
        self._running: dict[str, Row] = {}
        self._waiting = policy.Queue()
        self._branches: dict[str, Row] = {}
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
        return not self._rows and not self._outputs

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._rows)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether such a request is known and has not ended."""
        return request_id in self._rows

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
        row = self._row(request, is_schedulable)
        self._rows[request.request_id] = row
        if is_schedulable:
            self._waiting.push(row)

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
        parent = self._rows.get(request_id)
        if parent is None:
            raise RequestError(f"request {shown(request_id)} is not there to be forked; it has ended, or the id is wrong")
        self._check_request(request)
        if request.salt != parent.request.salt:
            raise RequestError("a fork of another tenant's request was asked for; use the salt of the request that is forked")
        row = self._row(request, is_schedulable)
        shared = min(row.num_tokens, parent.num_tokens)
        differing = np.flatnonzero(row.token_ids[:shared] != parent.token_ids[:shared])
        if len(differing):
            raise RequestError(
                f"the prompt of the fork differs from the tokens of request {shown(request_id)} at position {differing[0]}; "
                "start it with the tokens of that request"
            )
        theirs = {at: content for at, content in parent.request.images.items() if at < shared}
        if theirs != {at: content for at, content in request.images.items() if at < shared}:
            raise RequestError(f"the fork has other pictures than request {shown(request_id)}; give it the same ones")
        row.parent = (parent, parent.generation)
        self._rows[request.request_id] = self._branches[request.request_id] = row

    def set_schedulable(self, request_id: str, is_schedulable: bool) -> bool:
        """Say whether the inputs of a request are ready: pictures, grammar, memory that arrives from elsewhere.

        A request that is not schedulable stays out of plans; what it holds it keeps, unless it is preempted.

        Returns:
            whether the request was there.
        """
        row = self._rows.get(request_id)
        if row is None:
            return False
        if row.is_schedulable != is_schedulable:
            row.is_schedulable = is_schedulable
            if row.holding is None and request_id not in self._branches:
                if is_schedulable:
                    self._waiting.push(row)
                else:
                    self._waiting.remove(row)
        return True

    def abort(self, request_ids: Iterable[str]) -> tuple[int, int]:
        """Drop requests, waiting, running or in flight; unknown ones are passed over.  No record of them comes any more.

        Returns:
            how many were there, and how many tokens they had, prompts included.
        """
        assert not isinstance(request_ids, str), "several ids are expected, not the letters of one"
        num_requests = num_tokens = 0
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is not None:
                num_requests += 1
                num_tokens += row.num_tokens
                self._end(row, FinishReason.ABORT)
        return num_requests, num_tokens

    def take_outputs(self) -> list[RequestOutput]:
        """Records of requests that ended without a step; the next :meth:`commit` gives them too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _row(self, request: Request, is_schedulable: bool) -> Row:
        num_prompt, keep = len(request.prompt_token_ids), self.limits.decoder_keep_tokens
        row = Row(
            request,
            arrival=self._num_arrived,
            num_tokens_max=min(num_prompt + request.params.max_tokens, self.limits.max_model_len),
            decoder_floor=max(0, num_prompt - keep) if keep else 0,
            page_tokens=self._page_tokens,
            image_token_id=self.limits.image_token_id,
            # With a bounded decoder half there are no logits of the prompt, as documented.
            has_prompt_logprobs=request.params.prompt_logprobs and not keep,
        )
        row.is_schedulable = is_schedulable
        self._num_arrived += 1
        return row

    def _check_request(self, request: Request) -> None:
        num_prompt, limits = len(request.prompt_token_ids), self.limits
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if not request.request_id:
            raise RequestError("the request id is empty; choose another")
        if request.request_id in self._rows:
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

    def _end(self, row: Row, reason: FinishReason) -> None:
        request_id = row.request.request_id
        if row.holding is not None:
            self._vacate(row)
        else:
            if request_id in self._branches:
                del self._branches[request_id]
            elif row.is_schedulable:
                self._waiting.remove(row)
            row.vacate()  # others may wait to branch from it
        del self._rows[request_id]
        self._num_finished[reason] += 1

    def _vacate(self, row: Row) -> None:
        """Take back what a running row holds; its chunks in flight are void."""
        assert row.holding is not None, "a running row holds memory"
        self.kv.release(row.holding)
        del self._running[row.request.request_id]
        row.vacate()

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
        num_prefill = sum(row.num_prefill_tokens - row.num_planned_tokens for row in prefilling)
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

    def _schedulable(self, held: set[Row]) -> tuple[list[Row], list[Row]]:
        """Running rows that can be planned: those that decode, and those with prompt left."""
        decoding, prefilling = [], []
        for row in self._running.values():
            if not row.is_schedulable or row in held:
                continue
            if row.num_planned_tokens < row.num_prefill_tokens:
                prefilling.append(row)
            elif row.num_tokens + row.num_sampling < row.num_tokens_max:
                decoding.append(row)
        return decoding, prefilling

    def _plan_rounds(self, making: PlanBuilder, rows: list[Row], num_prefill: int) -> None:
        """Plan a round of each row that budget and memory allow; ``num_prefill`` tokens of prompts wait to go along."""
        left, caps = making.budget, [self._cap(row) for row in rows]
        is_short = len(rows) + (0 if self._budget else sum(caps)) > left
        if is_short:
            chosen = []
            for row in policy.in_order_of_service(rows):
                left -= 1 if self._budget else 1 + self._cap(row)
                if left < 0:
                    break
                chosen.append(row)
            rows, caps = chosen, [self._cap(row) for row in chosen]
        reaches = [self._reach(row, cap) for row, cap in zip(rows, caps, strict=True)]
        short = {row: reach for row, reach in zip(rows, reaches, strict=True) if reach > row.num_room_tokens}
        if short:
            left_out = {row for row in policy.in_order_of_service(short) if not self._grow(making, row, short[row])}
            kept = [row.holding is not None and row not in left_out for row in rows]
            rows, caps, reaches = list(compress(rows, kept)), list(compress(caps, kept)), list(compress(reaches, kept))
        if not rows:
            return
        making.num_drafts = sum(caps)
        if self._budget is not None and making.num_drafts:
            making.num_drafts = self._budget.choose(
                np.fromiter([row.slot for row in rows], np.int64),
                np.fromiter(caps, np.int64),
                np.fromiter([row.num_in_flight for row in rows], np.int64) > 0,
                num_other_rows=min(num_prefill, max(0, making.budget - len(rows) - making.num_drafts)),
                max_rows=making.budget,
            )
        making.budget -= len(rows) + making.num_drafts
        if is_short:  # prompts would bring new short answers, which come before those left out
            making.budget = 0
        for row, cap, reach in zip(rows, caps, reaches, strict=True):
            making.add_round(row, cap, self._saving(row, row.num_planned_tokens, reach))

    def _cap(self, row: Row) -> int:
        """Drafts that the row's next round may verify; it may accept all of them and gets one token more in any case."""
        return min(self._num_drafts, row.num_tokens_max - (row.num_tokens + row.num_sampling) - 1)

    def _reach(self, row: Row, cap: int) -> int:
        """Tokens that the row's next round needs pages for, if it verifies ``cap`` drafts."""
        return min(row.num_planned_tokens + row.num_drafts_in_flight + 1 + cap, row.num_tokens_max)

    def _saving(self, row: Row, start: int, reach: int) -> Saving | None:
        """Where a round saves state if it reaches the end of a page, which may happen from ``start`` + 1 to ``reach`` tokens.

        The device knows whether it does and copies only then, so rounds in flight at once can share a slot.
        """
        position = reach // self._page_tokens * self._page_tokens
        if row.saving is not None:
            position = row.saving.position
        if not start < position <= reach:
            return None
        if row.saving is None:
            slot = self._save_slot(row, position)
            if slot is None:
                return None
            row.saving = Saving(slot=slot, position=position)
        row.saving.num_in_flight += 1
        return row.saving

    def _grow(self, making: PlanBuilder, row: Row, num_tokens: int) -> bool:
        """Give a row pages for its next round, taking memory from others if need be; False if it has to do without."""
        if row.holding is None:  # preempted in this plan
            return False
        while not self.kv.grow(row.holding, num_tokens):
            chosen = policy.victim(each for each in self._running.values() if each is row or each not in making.started)
            if chosen is row and row.num_in_flight:
                return False  # what is in flight brings it a token first, or preemption could repeat without end
            if chosen.num_tokens + chosen.num_sampling == chosen.num_tokens_max:
                return False  # it ends with what is in flight
            self._preempt(making, chosen)
            if chosen is row:
                return False
        row.num_room_tokens = row.holding.num_pages * self._page_tokens
        return True

    def _preempt(self, making: PlanBuilder, row: Row) -> None:
        making.has_preempted = True
        self._num_preempted += 1
        if self.limits.stop_preempted_request:
            self._end(row, FinishReason.INSUFFICIENT)
            self._outputs.append(record(row, None, 0, FinishReason.INSUFFICIENT, self.limits.max_num_batched_tokens))
            return
        self._vacate(row)
        row.is_resumed = True
        if row.is_schedulable:
            self._waiting.push(row)

    def _plan_prefills(self, making: PlanBuilder, rows: list[Row]) -> None:
        for row in policy.in_order_of_admission(rows):
            if making.budget == 0:
                return
            if row.holding is None:  # preempted in this plan
                continue
            count = self._num_prefill(making, row, row.num_planned_tokens)
            if count:
                self._plan_chunk(making, row, count)

    def _num_prefill(self, making: PlanBuilder, row: Row, start: int) -> int:
        """Tokens of a row's prefill that this step takes from ``start`` on: budget, summed keys, places to stop."""
        stop = next((each for each in row.stops if start < each), row.num_prefill_tokens)
        count = min(stop - start, making.budget)
        room = self.limits.max_sum_keys - making.num_keys
        if making.num_keys and start + count > room:
            count = max(0, room - start)
        if count < stop - start and not self.limits.chunked_prefill and not row.is_resumed:
            return 0
        return count

    def _admit(self, making: PlanBuilder) -> None:
        limits, kv = self.limits, self.kv
        while (row := self._waiting.head) is not None:
            num_seats, num_pages = self._reserved(row) if self._branches else (0, 0)
            is_full = len(self._running) + num_seats >= limits.max_num_seqs or kv.num_free_slots <= num_seats
            if making.budget == 0 or is_full:
                return
            row.extend_chain(row.num_tokens)
            self._set_prefill(row)
            hit, is_looked_up = NO_HIT, not row.wants_prompt_logprobs
            if is_looked_up:
                floor = self._decoder_floor(row)
                hit = kv.plan_hit(row.chain, row.num_prefill_tokens, exact=row.is_resumed, decoder_floor=floor)
            count = self._num_prefill(making, row, hit.start)
            if not count:
                return
            # A resumed answer gets its next token from a round; without room for that it would be preempted again for nothing.
            is_answer = row.num_prefill_tokens < row.num_tokens
            num_tokens = row.num_tokens + (self._cap(row) if is_answer else 0)
            is_query = is_looked_up and not row.is_resumed
            holding = kv.admit(row.chain, hit, num_tokens, num_reserved_pages=num_pages, is_query=is_query)
            if holding is None:
                return
            self._waiting.remove(row)
            if not row.is_resumed:
                row.num_cached_tokens = hit.start
            self._start(making, row, holding, hit.start, count)

    def _set_prefill(self, row: Row) -> None:
        # A token that was generated is the anchor of the round that comes next, as if there had been no break.
        row.num_prefill_tokens = row.num_tokens - int(row.num_output_tokens > 0)
        stops, page = set(row.request.checkpoints), self._page_tokens
        if self.limits.save_states:
            stops.add(row.num_prefill_tokens // page * page)
            # A hit of the same prompt ends here at the latest.
            row.resend_position = max(0, row.num_prompt_tokens - self.kv.margin) // page * page
            if self.kv.is_caching and self.kv.num_free_slots > 2:  # the row takes one, and its last state another
                stops.add(row.resend_position)
        row.stops = tuple(sorted(stops))

    def _start(self, making: PlanBuilder, row: Row, holding: Holding, start: int, count: int) -> None:
        """Let a row run on ``holding``, and plan its first ``count`` tokens from ``start`` on."""
        row.holding, row.slot = holding, holding.slot
        row.num_computed_tokens = row.num_planned_tokens = start
        row.num_room_tokens = holding.num_pages * self._page_tokens
        row.num_written_tokens = start
        row.num_published_tokens = holding.num_published * self._page_tokens
        row.window_floor, row.write_floor = holding.window_floor, holding.num_hit_tokens
        row.num_images_planned = row.num_images(0, start)
        self._running[row.request.request_id] = row
        if self._budget is not None:
            self._budget.reset(row.slot)
        making.fresh.append(holding)
        self._plan_chunk(making, row, count, is_first=True)

    def _plan_branches(self, making: PlanBuilder) -> None:
        """Start the branches that can start; those that are due and cannot yet keep what they need from later ones."""
        kv, due = self.kv, []
        for row in list(self._branches.values()):
            if policy.is_lost(row):
                self._unbranch(row)
            elif policy.is_due(row):
                due.append(row)
        num_waiting = num_reserved_pages = 0
        for row in policy.in_order_of_admission(due):
            parent, num_pages = policy.parent_of(row), self._num_branch_pages(row)
            has_room = len(self._running) + num_waiting < self.limits.max_num_seqs and kv.num_free_slots > num_waiting
            has_room = has_room and num_reserved_pages + num_pages <= kv.num_free_pages and self._may_pass(row)
            if has_room and parent.num_computed_tokens >= policy.num_needed_tokens(row):
                start = min(parent.num_computed_tokens, row.num_tokens - 1)
                if parent.num_in_flight:
                    making.held.add(parent)
                elif not self._can_branch(row, parent, start):
                    self._unbranch(row)
                    continue
                elif self._branch(making, row, parent, start):
                    continue
            num_waiting += 1
            num_reserved_pages += num_pages

    def _num_branch_pages(self, row: Row) -> int:
        """Pages that a branch needs beside those that it shares."""
        shared = min(policy.parent_of(row).num_computed_tokens, row.num_tokens - 1) // self._page_tokens
        return self.kv.layout.pages_for(row.num_tokens) - shared

    def _may_pass(self, row: Row) -> bool:
        """Whether a branch may start before the head of the queue."""
        head = self._waiting.head
        return head is None or policy.place(head) > policy.place(row) or head.num_overtaken < self.limits.max_num_seqs

    def _reserved(self, row: Row) -> tuple[int, int]:
        """Seats, which are slots too, and pages that are kept for branches that come before ``row``."""
        due = [each for each in self._branches.values() if policy.is_due(each) and policy.place(each) < policy.place(row)]
        return len(due), sum(self._num_branch_pages(each) for each in due)

    def _unbranch(self, row: Row) -> None:
        """Make a branch wait like any other request."""
        row.parent = None
        del self._branches[row.request.request_id]
        if row.is_schedulable:
            self._waiting.push(row)

    def _can_branch(self, row: Row, parent: Row, start: int) -> bool:
        """Whether the state and the pages of ``parent`` serve ``row`` from ``start`` on."""
        is_near = parent.num_written_tokens - start <= self._rollback_tokens and start >= parent.write_floor
        if not is_near or row.wants_prompt_logprobs:
            return False
        return bool((row.token_ids[:start] == parent.token_ids[:start]).all())

    def _branch(self, making: PlanBuilder, row: Row, parent: Row, start: int) -> bool:
        """Start a branch, if this step has tokens for it."""
        self._set_prefill(row)
        count = self._num_prefill(making, row, start)
        if not count:
            return False
        assert parent.holding is not None, "a row that others branch from runs"
        forked = self.kv.fork(parent.holding, start)
        if forked is None:
            return False
        holding, copies = forked
        if not self.kv.grow(holding, row.num_tokens):
            self.kv.release(holding)
            return False
        row.parent = None
        del self._branches[row.request.request_id]
        head = self._waiting.head
        if head is not None and policy.place(head) < policy.place(row):
            head.num_overtaken += 1
        making.page_copies += copies
        making.held.add(row)
        making.started.add(row)
        row.num_cached_tokens = start
        if start > row.decoder_floor:  # the decoder half ran over tokens before it, with the parent's floor
            row.decoder_floor = parent.decoder_floor
        self._start(making, row, holding, start, count)
        return True

    def _plan_chunk(self, making: PlanBuilder, row: Row, count: int, *, is_first: bool = False) -> None:
        """Add the next ``count`` tokens of a row to the plan."""
        end, saving = row.num_planned_tokens + count, None
        if end % self._page_tokens == 0 and (slot := self._save_slot(row, end)) is not None:
            saving = Saving(slot=slot, position=end, num_in_flight=1)
        making.add_chunk(row, count, saving, is_first=is_first)

    def _save_slot(self, row: Row, end: int) -> int | None:
        """Slot for the state at a page boundary, unless it is not whole there or a request waits for the slot."""
        if not self.limits.save_states or end < row.write_floor:
            return None
        kv = self.kv
        if self._waiting and kv.num_free_slots <= 1 and len(self._running) < self.limits.max_num_seqs:
            return None
        assert row.holding is not None, "a planned row runs"
        key = row.chain.keys[end // self._page_tokens - 1] if end <= row.chain.num_tokens else None
        if end in row.request.checkpoints:
            return kv.save_slot(row.holding, "asked", key=key)
        if end == row.resend_position and (slot := kv.save_slot(row.holding, "resend", key=key)) is not None:
            return slot
        return kv.save_slot(row.holding, "progress", key=key)

    def _decoder_floor(self, row: Row) -> int | None:
        return row.decoder_floor if self.limits.decoder_keep_tokens else None

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
            row = entry.row
            if row.generation != entry.generation:
                continue
            if entry.drafts:
                slots.append(row.slot)
                numbers.append(number)
            row.num_in_flight -= 1
            before = row.num_computed_tokens
            row.num_written_tokens = max(row.num_written_tokens, entry.end or before + 1 + entry.max_drafts)
            new: list[RequestOutput] = []
            if entry.end:
                row.num_computed_tokens = entry.end
                row.prompt_logprobs += result.prompt_logprobs.get(row.request.request_id, ())
            if entry.samples:
                new = self._take_tokens(row, entry, result.sampled[row.request.request_id])
                outputs += new
            self._num_computed += row.num_computed_tokens - before
            if row.num_computed_tokens >= row.num_published_tokens + self._page_tokens:
                self._publish(row)
            if entry.saving is not None:
                num_new = len(result.sampled[row.request.request_id].token_ids) if entry.max_drafts else 1
                self._save(row, entry.saving, is_copied=before + num_new >= entry.saving.position)
            if new and (reason := new[-1].finish_reason) is not None:
                self._end(row, reason)
        if self._budget is not None:
            if slots:
                self._budget.update(np.fromiter(slots, np.int64), result.confidences[np.fromiter(numbers, np.int64)])
            if plan.rounds and not plan.chunks:
                self._budget.refine(plan.num_rows, result.duration_ms)
        return outputs

    def _publish(self, row: Row) -> None:
        assert row.holding is not None, "a committed row runs"
        boundary = row.num_computed_tokens // self._page_tokens * self._page_tokens
        row.extend_chain(boundary)
        self.kv.publish(row.holding, row.chain, boundary)
        row.num_published_tokens = boundary

    def _save(self, row: Row, saving: Saving, *, is_copied: bool) -> None:
        """Make saved state findable if the end of the page was reached; give its slot back if nothing will reach it any more.

        ``is_copied`` is the device's view, which also counts tokens behind the end of the request.
        """
        assert row.holding is not None, "a committed row runs"
        saving.num_in_flight -= 1
        if saving.position <= row.num_computed_tokens:
            if not saving.is_done:
                self.kv.saved(row.holding, row.chain, saving.position, decoder_floor=self._decoder_floor(row))
                saving.is_done, row.saving = True, None
        elif saving.num_in_flight == 0 and not is_copied:
            self.kv.unsaved(row.holding)
            row.saving = None

    def _take_tokens(self, row: Row, entry: InFlight, sampled: Sampled) -> list[RequestOutput]:
        """Append tokens up to the first that ends the request, and record them."""
        params, eos_token_id = row.request.params, self.limits.eos_token_id
        row.num_sampling -= 1
        row.num_drafts_in_flight -= entry.max_drafts
        num_accepted = len(sampled.token_ids) - 1
        if entry.max_drafts:
            self._num_rounds += 1
        for position in range(sampled.num_drafts):
            self._num_verified[position] += 1
            self._num_accepted[position] += position < num_accepted
        outputs: list[RequestOutput] = []
        for number, token_id in enumerate(sampled.token_ids):
            row.token_ids[row.num_tokens] = token_id
            row.num_tokens += 1
            reason = None
            if (token_id == eos_token_id and not params.ignore_eos) or token_id in row.stop_token_ids:
                reason = FinishReason.STOP
            elif row.num_tokens == row.num_tokens_max:
                reason = FinishReason.LENGTH
            outputs.append(record(row, sampled, number, reason, self.limits.max_num_batched_tokens))
            if reason is not None:
                break
        self._num_sampled += len(outputs)
        if not entry.end:  # the anchor and the accepted drafts but the last token
            row.num_computed_tokens += len(outputs)
            row.num_planned_tokens += len(outputs) - 1
        return outputs

    # Looking in

    def stats(self) -> SchedulerStats:
        """Counters and levels."""
        kv, counts = self.kv, self.kv.counts
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._rows) - len(self._running),
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
        """Assert the invariants of all rows, of the queue, and that memory is held by running requests alone.

        Cost: all rows; the manager has a check of its own.
        """
        waiting = {row.request.request_id for row in self._waiting}
        self._waiting.check()
        assert len(waiting) == len(self._waiting), "nobody waits twice"
        assert waiting.isdisjoint(self._running), "nobody waits and runs"
        assert self._branches.keys().isdisjoint(waiting | self._running.keys()), "a branch neither waits nor runs yet"
        assert self._running.keys() | waiting | self._branches.keys() <= self._rows.keys(), "who ended is nowhere"
        in_flight: dict[Row, list[InFlight]] = {}
        for _, entries in self._in_flight:
            for entry in entries:
                if entry.row.generation == entry.generation:
                    in_flight.setdefault(entry.row, []).append(entry)
        for request_id, row in self._rows.items():
            row.check()
            is_running = request_id in self._running
            assert is_running == (row.holding is not None), "memory is held while a request runs"
            parked = not is_running and request_id not in waiting and request_id not in self._branches
            assert not parked or not row.is_schedulable, "a request that is ready waits in the queue"
            assert request_id not in waiting or row.is_schedulable, "a request in the queue is ready"
            entries = in_flight.pop(row, [])
            assert row.num_in_flight == len(entries), "chunks in flight are counted"
            assert row.num_sampling == sum(entry.samples for entry in entries), "tokens in flight are counted"
            assert row.num_drafts_in_flight == sum(entry.max_drafts for entry in entries), "drafts in flight are counted"
            ends = [entry.end for entry in entries if entry.end]
            num_rounds = len(entries) - len(ends)
            computed = ends[-1] if ends else row.num_computed_tokens
            assert computed + num_rounds == row.num_planned_tokens, "what is in flight goes at least where planning stands"
            num_saving = sum(entry.saving is row.saving for entry in entries) if row.saving else 0
            assert row.saving is None or row.saving.num_in_flight == num_saving > 0, "state is saved by what is in flight"
        assert not in_flight, "nothing valid is in flight of a request that ended"
        assert len(self._running) == self.kv.num_holdings, "memory is held by running requests alone"
        assert len(self._running) <= self.limits.max_num_seqs, "no more run than may"
        slots = {row.slot for row in self._running.values()}
        assert len(slots) == len(self._running), "a slot belongs to one request"
