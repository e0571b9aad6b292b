"""Requests that wait to branch from a running request.

A branch shares the computed tokens of its *parent*.  It starts when its parent has computed the tokens it needs and none of the
parent's steps is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfer.errors import RequestError, shown
from deepinfer.kv.manager import KVManager
from deepinfer.scheduler import policy
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.request_state import RequestState


class Branches:
    """Owns the branches that have not started.

    Invariant: each has a parent, has no memory and is not in the queue.
    """

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        """Start without branches; they will share memory of ``kv``."""
        self._kv = kv
        self._page_tokens = kv.layout.page_tokens
        # A slot still holds the state of a few tokens earlier, because drafts may be rejected.
        self._rollback_tokens = kv.layout.ring_tokens - kv.layout.config.sliding_window
        self._max_overtaken = limits.max_num_seqs
        self._waiting: dict[str, RequestState] = {}

    def __bool__(self) -> bool:
        """Whether a branch waits."""
        return bool(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        """All branches that wait; changes meanwhile are allowed."""
        return iter(list(self._waiting.values()))

    def __contains__(self, state: RequestState) -> bool:
        """Whether ``state`` waits here."""
        return state.request.request_id in self._waiting

    def add(self, state: RequestState, parent: RequestState) -> None:
        """Let ``state`` wait for ``parent``.

        Raises:
            RequestError: another tenant, other tokens or other pictures than those of ``parent``.
        """
        name = shown(parent.request.request_id)
        if state.request.salt != parent.request.salt:
            raise RequestError("a fork of another tenant's request was asked for; use the salt of the request that is forked")
        shared = min(state.num_tokens, parent.num_tokens)
        differing = np.flatnonzero(state.token_ids[:shared] != parent.token_ids[:shared])
        if len(differing):
            raise RequestError(
                f"the prompt of the fork differs from the tokens of request {name} at position {differing[0]}; "
                "start it with the tokens of that request"
            )
        theirs = {at: content for at, content in parent.request.image_hashes.items() if at < shared}
        if theirs != {at: content for at, content in state.request.image_hashes.items() if at < shared}:
            raise RequestError(f"the fork has other pictures than request {name}; give it the same ones")
        state.parent = (parent, parent.generation)
        self._waiting[state.request.request_id] = state

    def remove(self, state: RequestState) -> None:
        """Stop waiting: the branch starts, ends or goes to the queue."""
        state.parent = None
        del self._waiting[state.request.request_id]

    def due(self) -> list[RequestState]:
        """Branches that start as soon as there is room and nothing of their parents is in flight, in order of admission."""
        return policy.in_order_of_admission(each for each in self._waiting.values() if _is_due(each))

    def num_pages(self, state: RequestState) -> int:
        """Pages that a branch needs beside those that it shares."""
        shared = min(parent_of(state).num_computed_tokens, state.num_tokens - 1) // self._page_tokens
        return self._kv.layout.pages_for(state.num_tokens) - shared

    def reserved(self, state: RequestState) -> tuple[int, int]:
        """Seats and pages that are kept for due branches that come before ``state``; a seat includes a slot."""
        due = [each for each in self.due() if policy.place(each) < policy.place(state)]
        return len(due), sum(self.num_pages(each) for each in due)

    def may_pass(self, state: RequestState, head: RequestState | None) -> bool:
        """Whether a branch may start before the head of the queue."""
        return head is None or policy.place(head) > policy.place(state) or head.num_overtaken < self._max_overtaken

    def can_start(self, state: RequestState, parent: RequestState, start: int) -> bool:
        """Whether the state and the pages of ``parent`` serve ``state`` from position ``start`` on."""
        is_near = parent.num_written_tokens - start <= self._rollback_tokens and start >= parent.write_floor
        if not is_near or state.wants_prompt_logprobs:
            return False
        return bool((state.token_ids[:start] == parent.token_ids[:start]).all())


def parent_of(state: RequestState) -> RequestState:
    """The request that a branch waits for."""
    assert state.parent is not None, "a branch has a parent"
    return state.parent[0]


def num_needed_tokens(state: RequestState) -> int:
    """Tokens that the parent of a branch must have computed."""
    return min(state.num_tokens - 1, parent_of(state).num_prefill_tokens)


def is_lost(state: RequestState) -> bool:
    """Whether a branch does better in the queue: its parent ended, is paused too early, or comes after it."""
    assert state.parent is not None, "a branch has a parent"
    parent, generation = state.parent
    if parent.generation != generation:
        return True
    if parent.holding is None:
        return not parent.is_schedulable or policy.place(parent) > policy.place(state)
    return state.is_schedulable and not parent.is_schedulable and not _is_due(state)


def _is_due(state: RequestState) -> bool:
    parent = parent_of(state)
    return state.is_schedulable and parent.holding is not None and parent.num_planned_tokens >= num_needed_tokens(state)
