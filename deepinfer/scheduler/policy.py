"""Who comes first: order of admission, of service and of preemption.

*Admission* goes by priority, then by arrival.  It never passes over the head of the queue because a smaller request would fit.
The head is admitted as soon as running requests leave it room, and a preempted request keeps its place.  Within a priority every
request is therefore admitted some time.  A lower priority waits as long as requests of higher ones arrive.

A *branch* has a place in this order too, but it waits for its parent and not in the queue.  Once its parent is planned as far as
the branch needs, the branch reserves a seat, a slot and its pages: no later request is admitted to them.  A branch may start
before the head of the queue, because it needs little memory beside its parent's.  One head is overtaken at most ``max_num_seqs``
times.

*Service* within a step: decoding goes before prompts.  If the token budget cannot serve all decoding requests, higher priorities
come first, then the shortest answers, then the oldest requests.  The shortest answer grows when it is served, so all answers
grow.  Prompts do not advance meanwhile, because they would add new short answers.  Every answer is bounded, so prompts advance
after some answers end.

*Preemption* frees memory for running requests, never for a waiting one.  It takes the last request in the order of service:
lowest priority, then longest answer, then youngest.  Four rules ensure that answers grow in the end.  Memory is freed only for a
request that continues in the same step.  A request that is itself the victim first waits for its steps in flight.  A request
whose last token is in flight is waited for.  A step that preempts admits no request.
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
    """Requests that wait for memory, in order of admission.

    Invariant: sorted; no request is in it twice.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Requests in order."""
        return iter(self._states)

    @property
    def head(self) -> RequestState | None:
        """The next to be admitted."""
        return self._states[0] if self._states else None

    def push(self, state: RequestState) -> None:
        """Add a request at its place."""
        insort(self._states, state, key=place)

    def remove(self, state: RequestState) -> None:
        """Take a request out."""
        at = bisect_left(self._states, place(state), key=place)
        assert self._states[at] is state, "the request is in the queue"
        del self._states[at]

    def check(self) -> None:
        """Assert the invariant."""
        places = [place(state) for state in self._states]
        assert all(a < b for a, b in pairwise(places)), "the queue is sorted and has no request twice"


def in_order_of_admission(states: Iterable[RequestState]) -> list[RequestState]:
    """Requests in the order of the queue."""
    return sorted(states, key=place)


def in_order_of_service(states: Iterable[RequestState]) -> list[RequestState]:
    """Requests, those to be served first at the front."""
    return sorted(states, key=lambda state: state.order)


def victim(states: Iterable[RequestState]) -> RequestState:
    """The request to preempt."""
    return max(states, key=lambda state: state.order)
