"""Who comes first: order of admission, of service and of preemption.

*Admission* goes by priority, then by arrival, and never passes the head of the queue over because something smaller would fit:
the head gets in as soon as running requests leave it room, and a preempted request has its old place.  So within a priority
nobody waits for ever; a lower priority waits as long as higher ones keep coming.

A *branch* has a place in this order too.  It waits for its parent, not in the queue.  Once its parent is planned as far as the
branch needs, the branch reserves a seat, a slot and its pages: nobody who comes after it is admitted to them.  A branch may start
before the head of the queue, because it needs little beside what its parent holds.  That happens to one head ``max_num_seqs``
times at most.

*Service* within a step: tokens that continue an answer go before prompts.  Where the budget cannot serve every answer, those of
higher priority come first, then the shortest, then the oldest.  The shortest that is served does not stay the shortest, so all
advance; and prompts, which would bring new short answers, do not advance meanwhile.  Every answer is bounded, so prompts go on
when some have ended.

*Preemption* makes room for requests that run, never for one that waits.  It takes the last in the order of service: lowest
priority, then longest answer, then youngest.  Room is made for an answer that is continued in the same step; a request that
would have to make room itself first waits for what it has in flight; one whose last token is in flight is waited for; and a step
that preempts admits nobody.  So the tokens that callers see grow in number whatever happens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise

from deepinfer.scheduler.request_state import RequestState


def place(state: RequestState) -> tuple[int, int]:
    """Place in the order of admission."""
    return (-state.request.priority, state.arrival)


class Queue:
    """Rows that wait for memory, in order of admission.

    Invariant: sorted, no state twice.
    """

    def __init__(self) -> None:
        """Empty."""
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Rows in order."""
        return iter(self._states)

    @property
    def head(self) -> RequestState | None:
        """The next to be admitted."""
        return self._states[0] if self._states else None

    def push(self, state: RequestState) -> None:
        """Add a state at its place."""
        insort(self._states, state, key=place)

    def remove(self, state: RequestState) -> None:
        """Take a state out."""
        at = bisect_left(self._states, place(state), key=place)
        assert self._states[at] is state, "the state waits"
        del self._states[at]

    def check(self) -> None:
        """Assert the invariant."""
        places = [place(state) for state in self._states]
        assert all(a < b for a, b in pairwise(places)), "the queue is sorted and holds nobody twice"


def in_order_of_admission(states: Iterable[RequestState]) -> list[RequestState]:
    """Rows as the queue would have them."""
    return sorted(states, key=place)


def in_order_of_service(states: Iterable[RequestState]) -> list[RequestState]:
    """Rows, those to be served first in front."""
    return sorted(states, key=lambda state: state.order)


def victim(states: Iterable[RequestState]) -> RequestState:
    """The state to preempt."""
    return max(states, key=lambda state: state.order)


def parent_of(state: RequestState) -> RequestState:
    """The state that a branch waits for."""
    assert state.parent is not None, "a branch has a parent"
    return state.parent[0]


def num_needed_tokens(state: RequestState) -> int:
    """Tokens that the parent of a branch must have computed."""
    return min(state.num_tokens - 1, parent_of(state).num_prefill_tokens)


def is_due(state: RequestState) -> bool:
    """Whether a branch can start as soon as there is room and nothing of its parent is in flight."""
    parent = parent_of(state)
    return state.is_schedulable and parent.holding is not None and parent.num_planned_tokens >= num_needed_tokens(state)


def is_lost(state: RequestState) -> bool:
    """Whether a branch does better in the queue: its parent is gone, paused before it is far enough, or comes after it."""
    assert state.parent is not None, "a branch has a parent"
    parent, generation = state.parent
    if parent.generation != generation:
        return True
    if parent.holding is None:
        return not parent.is_schedulable or place(parent) > place(state)
    return state.is_schedulable and not parent.is_schedulable and not is_due(state)
