"""Token budget, admission and commit.

A step raises every chosen request's ``num_computed_tokens`` towards its ``num_tokens``; a request that catches up gets a new
token.  Prefill, chunked prefill and decode are the same thing with other numbers.

A request is admitted when a state slot is free and pages for its longest possible output are: an admitted request always ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.errors import ContextTooLong, RequestError
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.pages import FreeList
from deepinfer.request import FinishReason, Request, RequestOutput
from deepinfer.step import Chunk, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler may spend.

    Attributes:
        max_model_len: prompt plus output of one request.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step.
        eos_token_id: ends a request that does not ignore it.
        image_token_id: marks image positions.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_id: int
    image_token_id: int


class _Running:
    """An admitted request: what it holds and how far it is."""

    def __init__(self, request: Request, slot: int, page_ids: tuple[int, ...], num_tokens_max: int) -> None:
        self.request = request
        self.slot = slot
        self.page_ids = page_ids
        self.num_tokens_max = num_tokens_max
        self.num_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_image_computed = 0
        self._token_ids = np.empty(num_tokens_max, dtype=np.int32)
        self._token_ids[: self.num_tokens] = request.prompt_token_ids

    def tokens(self, first: int, last: int) -> npt.NDArray[np.int32]:
        return self._token_ids[first:last]

    def append(self, token_id: int) -> None:
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1


class Scheduler:
    """Owns requests, pages and slots.

    Invariant: every page and slot is free or belongs to exactly one running request.
    """

    def __init__(self, layout: KVLayout, limits: Limits, *, num_pages: int, num_slots: int) -> None:
        """``num_pages`` and ``num_slots`` include page 0 and slot 0."""
        self.layout = layout
        self.limits = limits
        self.pages = FreeList(num_pages, "pages")
        self.slots = FreeList(num_slots, "slots")
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Running] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._running)

    def _num_tokens_max(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.limits.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: empty prompt, an id already in use, or a need that the page pool can never meet.
            ContextTooLong: the prompt leaves no room for a token.
        """
        num_prompt, limit = len(request.prompt_token_ids), self.limits.max_model_len
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if request.request_id in self._running or any(r.request_id == request.request_id for r in self._waiting):
            raise RequestError(f"request id {request.request_id!r} is in use; choose another")
        if num_prompt >= limit:
            raise ContextTooLong(
                f"prompt of {num_prompt} tokens leaves no room for output in the context limit of {limit}; "
                "shorten the prompt or raise max_model_len"
            )
        needed, held = self.layout.pages_for(self._num_tokens_max(request)), self.pages.size - 1
        if needed > held:
            raise RequestError(
                f"the request may need {needed} pages of {self.layout.page_tokens} tokens, the pool has {held}; "
                "lower max_tokens, shorten the prompt or give the engine more memory"
            )
        self._waiting.append(request)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.max_num_seqs and self.slots.num_free:
            request = self._waiting[0]
            num_tokens_max = self._num_tokens_max(request)
            needed = self.layout.pages_for(num_tokens_max)
            if needed > self.pages.num_free:
                return
            self._waiting.popleft()
            (slot,) = self.slots.take(1)
            self._running[request.request_id] = _Running(request, slot, self.pages.take(needed), num_tokens_max)

    def plan(self) -> StepPlan | None:
        """Choose the next step: decoding requests first, then prompts in order of arrival; None if there is nothing to do."""
        self._admit()
        budget = self.limits.max_num_batched_tokens
        chunks: list[Chunk] = []
        by_urgency = sorted(self._running.values(), key=lambda each: each.num_tokens - each.num_computed_tokens > 1)
        for each in by_urgency:
            count = min(each.num_tokens - each.num_computed_tokens, budget)
            if count == 0:
                break
            budget -= count
            start, end = each.num_computed_tokens, each.num_computed_tokens + count
            token_ids = each.tokens(start, end)
            chunks.append(
                Chunk(
                    request_id=each.request.request_id,
                    slot=each.slot,
                    start=start,
                    token_ids=token_ids,
                    page_ids=each.page_ids[: self.layout.pages_for(end)],
                    num_image_before=each.num_image_computed,
                    num_logits=int(end == each.num_tokens),
                )
            )
        return StepPlan(chunks=tuple(chunks)) if chunks else None

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take over what a step did; requests aborted meanwhile are passed over."""
        outputs = []
        for chunk in plan.chunks:
            each = self._running.get(chunk.request_id)
            if each is None:
                continue
            each.num_computed_tokens = chunk.start + len(chunk.token_ids)
            each.num_image_computed += int((chunk.token_ids == self.limits.image_token_id).sum())
            sampled = result.sampled.get(chunk.request_id)
            if sampled is None:
                continue
            each.append(sampled.token_id)
            params = each.request.params
            reason = None
            if sampled.token_id == self.limits.eos_token_id and not params.ignore_eos:
                reason = FinishReason.STOP
            elif each.num_tokens == each.num_tokens_max:
                reason = FinishReason.LENGTH
            num_prompt = len(each.request.prompt_token_ids)
            outputs.append(
                RequestOutput(
                    request_id=chunk.request_id,
                    prompt_len=num_prompt,
                    token_id=sampled.token_id,
                    finished=reason is not None,
                    finish_reason=reason,
                    num_output_tokens=each.num_tokens - num_prompt,
                    max_num_batched_tokens=self.limits.max_num_batched_tokens,
                    token_logprobs=sampled.logprob,
                    top_token_ids=sampled.top_token_ids,
                    top_logprobs=sampled.top_logprobs,
                )
            )
            if reason is not None:
                self._release(chunk.request_id)
        return outputs

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running; returns whether it was there."""
        if request_id in self._running:
            self._release(request_id)
            return True
        before = len(self._waiting)
        self._waiting = deque(each for each in self._waiting if each.request_id != request_id)
        return len(self._waiting) < before

    def _release(self, request_id: str) -> None:
        each = self._running.pop(request_id)
        self.pages.give_back(each.page_ids)
        self.slots.give_back((each.slot,))

    def check(self) -> None:
        """Assert the invariant."""
        self.pages.check()
        self.slots.check()
        running = self._running.values()
        assert sum(len(each.page_ids) for each in running) == self.pages.num_held, "pages are held by running requests"
        assert len(running) == self.slots.num_held, "slots are held by running requests"
        for each in running:
            assert 0 <= each.num_computed_tokens < each.num_tokens <= each.num_tokens_max, "a running request has work"
