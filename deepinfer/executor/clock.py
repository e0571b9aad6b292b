"""Measures the time of steps of rounds on a worker without requests.  The engine and the benchmarks use it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.executor.worker import Worker
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, Round, StepPlan

_TEXT_ID = 3
"""Token id of all tokens; its value does not matter."""


class StepClock:
    """Measures steps of any number of rows: rounds of full length, and one shorter round if rows are left.

    Only the time has a meaning.  Each request pretends to have ``context`` tokens, which are never computed.  Requests share
    pages if there are too few.  Slots and pages hold arbitrary values afterwards; no later request reads them.  The plan fixes
    the number of drafts of each round, so the device has no choice between drafts.
    """

    def __init__(self, worker: Worker, *, num_drafts: int, max_rows: int, context: int) -> None:
        """Add enough requests for ``max_rows`` rows to a worker without requests; they get slots 1, 2, …."""
        self._worker = worker
        self._num_drafts = num_drafts
        self._context = context
        self._num_requests = -(-max_rows // (1 + num_drafts))
        assert self._num_requests < worker.num_slots, "every request has a slot"
        params = SamplingParams(temperature=1.0, max_tokens=2 * num_drafts + 2, ignore_eos=True, seq_seed=0)
        for number in range(self._num_requests):
            worker.add(self._name(number), params, context)

    def measure_ms(self, num_rows: int) -> float:
        """Device time of one step of ``num_rows`` rows that verifies drafts, decides tokens and makes new drafts."""
        num_requests = -(-num_rows // (1 + self._num_drafts))
        self._run(self._before(num_requests, drafts=True))
        num_drafts = num_rows - num_requests
        rounds = []
        for number in range(num_requests):
            max_drafts = min(self._num_drafts, num_drafts - number * self._num_drafts)
            rounds.append(
                Round(
                    request_id=self._name(number),
                    slot=number + 1,
                    start=self._context,
                    max_drafts=max_drafts,
                    page_ids=self._pages(number),
                )
            )
        return self._run(StepPlan(chunks=(), rounds=tuple(rounds), num_drafts=num_drafts))

    def measure_draft_ms(self, num_requests: int) -> float:
        """Time that drafting adds to a step with one token for each of ``num_requests``; noise can make it negative."""
        return self._run(self._before(num_requests, drafts=True)) - self._run(self._before(num_requests, drafts=False))

    def _run(self, plan: StepPlan) -> float:
        assert len(plan.chunks) + len(plan.rounds) <= self._num_requests, (
            "the step has at most as many requests as max_rows needs"
        )
        return self._worker.launch(plan).result().duration_ms

    def close(self) -> None:
        """Remove the requests from the worker."""
        for number in range(self._num_requests):
            self._worker.remove(self._name(number))

    def _before(self, num_requests: int, *, drafts: bool) -> StepPlan:
        """A step that computes the last context token of each request, and makes drafts if ``drafts``."""
        ids = np.full(1, _TEXT_ID, dtype=np.int32)
        return StepPlan(
            chunks=tuple(
                Chunk(
                    request_id=self._name(number),
                    slot=number + 1,
                    start=self._context - 1,
                    token_ids=ids,
                    page_ids=self._pages(number),
                    anchor_id=_TEXT_ID if drafts else None,
                )
                for number in range(num_requests)
            )
        )

    def _name(self, number: int) -> str:
        return f"clock {number}"

    def _pages(self, number: int) -> npt.NDArray[np.int32]:
        count, available = self._worker.layout.pages_for(self._context + 1 + self._num_drafts), self._worker.num_pages - 1
        return ((np.arange(number * count, (number + 1) * count) % available) + 1).astype(np.int32)
