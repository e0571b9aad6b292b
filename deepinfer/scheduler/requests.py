"""All unfinished requests, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.errors import RequestError, shown
from deepinfer.kv.manager import Holding, KVManager
from deepinfer.request import Request
from deepinfer.scheduler import policy
from deepinfer.scheduler.branches import Branches
from deepinfer.scheduler.builder import InFlight
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.request_state import RequestState


class Requests:
    """Owns the unfinished requests.

    Invariant: an unfinished request runs, or waits in the queue, or waits to branch, or is not schedulable.  It holds memory
    exactly if it runs.

    Attributes:
        running: request id -> request with memory.
        waiting: requests that wait for memory.
        branches: requests that wait for the request they branch from.
    """

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        """Start without requests."""
        self._kv = kv
        self._limits = limits
        self._all: dict[str, RequestState] = {}
        self._num_arrived = 0
        self.running: dict[str, RequestState] = {}
        self.waiting = policy.Queue()
        self.branches = Branches(kv, limits)

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._all)

    def find(self, request_id: str) -> RequestState | None:
        """The unfinished request with this id."""
        return self._all.get(request_id)

    @property
    def is_slot_wanted(self) -> bool:
        """Whether a waiting request could start if it had a slot."""
        return len(self.waiting) > 0 and len(self.running) < self._limits.max_num_seqs

    def add(self, request: Request, parent_id: str | None, *, is_schedulable: bool) -> None:
        """Take a request in.

        Args:
            parent_id: id of the request that it branches from; None to queue it.
            is_schedulable: whether its inputs are ready.

        Raises:
            RequestError: the id is in use, there is no such parent, or as for :meth:`Limits.check` and :meth:`Branches.add`.
            ContextTooLong: as for :meth:`Limits.check`.
        """
        parent = None if parent_id is None else self._all.get(parent_id)
        if parent_id is not None and parent is None:
            raise RequestError(f"request {shown(parent_id)} is not there to be forked; it has ended, or the id is wrong")
        self._limits.check(request, self._kv)
        if request.request_id in self._all:
            raise RequestError(f"request id {shown(request.request_id)} is in use; choose another")
        keep = self._limits.decoder_keep_tokens
        state = RequestState(
            request,
            arrival=self._num_arrived,
            num_tokens_max=self._limits.num_tokens_max(request),
            decoder_floor=max(0, len(request.prompt_token_ids) - keep) if keep else 0,
            page_tokens=self._kv.layout.page_tokens,
            image_token_id=self._limits.image_token_id,
            # A bounded decoder half makes no logits of the prompt.
            has_prompt_logprobs=request.params.prompt_logprobs and not keep,
        )
        state.is_schedulable = is_schedulable
        self._num_arrived += 1
        if parent is not None:
            self.branches.add(state, parent)
        self._all[request.request_id] = state
        if parent is None and is_schedulable:
            self.waiting.push(state)

    def set_schedulable(self, state: RequestState, is_schedulable: bool) -> None:
        """Say whether the inputs of a request are ready."""
        if state.is_schedulable == is_schedulable:
            return
        state.is_schedulable = is_schedulable
        if state.holding is None and state not in self.branches:
            if is_schedulable:
                self.waiting.push(state)
            else:
                self.waiting.remove(state)

    def run(self, state: RequestState, holding: Holding) -> None:
        """Let a request run on ``holding``; it left the queue or the branches before."""
        state.holding, state.slot = holding, holding.slot
        self.running[state.request.request_id] = state

    def queue_branch(self, state: RequestState) -> None:
        """Let a branch wait like any other request."""
        self.branches.remove(state)
        if state.is_schedulable:
            self.waiting.push(state)

    def preempt(self, state: RequestState) -> None:
        """Take the memory of a running request back and queue it again."""
        self._release(state)
        state.begin_again()
        if state.is_schedulable:
            self.waiting.push(state)

    def end(self, state: RequestState) -> None:
        """Drop a request, wherever it is.  Its steps in flight are void."""
        if state.holding is not None:
            self._release(state)
        elif state in self.branches:
            self.branches.remove(state)
        elif state.is_schedulable:
            self.waiting.remove(state)
        state.vacate()  # branches that wait for it see a new generation
        del self._all[state.request.request_id]

    def _release(self, state: RequestState) -> None:
        assert state.holding is not None, "a running request holds memory"
        self._kv.release(state.holding)
        del self.running[state.request.request_id]

    def check(self, in_flight: Sequence[InFlight]) -> None:
        """Assert the invariants of all requests, of the queue, and of the chunks and rounds in flight."""
        waiting = {state.request.request_id for state in self.waiting}
        branches = {state.request.request_id for state in self.branches}
        self.waiting.check()
        assert len(waiting) == len(self.waiting), "no request waits twice"
        assert waiting.isdisjoint(self.running), "no request waits and runs"
        assert branches.isdisjoint(waiting | self.running.keys()), "a branch neither waits nor runs yet"
        assert self.running.keys() | waiting | branches <= self._all.keys(), "a request that ended is nowhere"
        valid: dict[RequestState, list[InFlight]] = {}
        for entry in in_flight:
            if entry.state.generation == entry.generation:
                valid.setdefault(entry.state, []).append(entry)
        for request_id, state in self._all.items():
            state.check()
            is_running = request_id in self.running
            assert is_running == (state.holding is not None), "memory is held while a request runs"
            is_parked = not is_running and request_id not in waiting and request_id not in branches
            assert not is_parked or not state.is_schedulable, "a request that is ready waits in the queue"
            assert request_id not in waiting or state.is_schedulable, "a request in the queue is ready"
            _check_in_flight(state, valid.pop(state, []))
        assert not valid, "nothing valid is in flight of a request that ended"
        assert len(self.running) == self._kv.num_holdings, "only running requests hold memory"
        assert len(self.running) <= self._limits.max_num_seqs, "at most max_num_seqs requests run"
        slots = {state.slot for state in self.running.values()}
        assert len(slots) == len(self.running), "a slot belongs to one request"


def _check_in_flight(state: RequestState, entries: list[InFlight]) -> None:
    """Assert that the counts of ``state`` are those of its chunks and rounds in flight."""
    assert state.num_in_flight == len(entries), "chunks and rounds in flight are counted"
    assert state.num_sampling == sum(entry.samples for entry in entries), "tokens in flight are counted"
    assert state.num_drafts_in_flight == sum(entry.max_drafts for entry in entries), "drafts in flight are counted"
    ends = [entry.end for entry in entries if entry.end]
    computed = ends[-1] if ends else state.num_computed_tokens
    assert computed + len(entries) - len(ends) == state.num_planned_tokens, "steps in flight compute the planned tokens"
    num_saving = sum(entry.saving is state.saving for entry in entries) if state.saving else 0
    assert state.saving is None or state.saving.num_in_flight == num_saving > 0, "steps in flight save the state"
