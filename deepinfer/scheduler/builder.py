"""A plan while it is built.

The scheduler decides how many tokens each request computes in a step.  This module writes the chunks and rounds of the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.kv.manager import Holding
from deepinfer.scheduler.request_state import RequestState, Saving
from deepinfer.step import PLACEHOLDER, Chunk, Round, StepPlan

_DUMMY_IDS = np.zeros(1, dtype=np.int32)
_DUMMY_IDS.flags.writeable = False


class InFlight(NamedTuple):
    """A chunk or a round in flight.

    Attributes:
        state, generation: the request, and its generation when the step was planned.
        end: position after a chunk; 0 for a round.
        samples: whether it gives output tokens.
        drafts: whether drafts are made after it.
        max_drafts: most drafts of a round.
        saving: where state is saved, or None.
    """

    state: RequestState
    generation: int
    end: int
    samples: bool
    drafts: bool
    max_drafts: int = 0
    saving: Saving | None = None


class PlanBuilder:
    """Chunks and rounds of a step.  Adding one advances the planned tokens of its request.

    Attributes:
        budget: tokens left.
        num_keys: keys that the prompts of the step see.
        num_drafts: drafts that the rounds verify in all.
        page_copies: as in the plan.
        fresh: holdings that begin in this plan; their copies are in the plan.
        held: requests not to be planned, because a branch waits for their commit or because they just started.
        started: branches that are in the plan already.
        has_preempted: whether a request lost its memory for this plan.
    """

    __slots__ = (
        "_chunks",
        "_in_chunks",
        "_in_rounds",
        "_lookback_tokens",
        "_rounds",
        "budget",
        "fresh",
        "has_preempted",
        "held",
        "num_drafts",
        "num_keys",
        "page_copies",
        "started",
    )

    def __init__(self, budget: int, lookback_tokens: int) -> None:
        """Start with nothing planned.

        Args:
            budget: tokens of the step.
            lookback_tokens: tokens before a request's first chunk that its n-grams look back on.
        """
        self._lookback_tokens = lookback_tokens
        self._chunks: list[Chunk] = []
        self._rounds: list[Round] = []
        self._in_chunks: list[InFlight] = []
        self._in_rounds: list[InFlight] = []
        self.budget = budget
        self.num_keys = 0
        self.num_drafts = 0
        self.page_copies: list[tuple[int, int]] = []
        self.fresh: list[Holding] = []
        self.held: set[RequestState] = set()
        self.started: set[RequestState] = set()
        self.has_preempted = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._chunks and not self._rounds

    @property
    def entries(self) -> list[InFlight]:
        """Chunks and rounds of the plan, in its order."""
        return self._in_chunks + self._in_rounds

    def build(self) -> StepPlan:
        """The plan."""
        return StepPlan(
            chunks=tuple(self._chunks),
            rounds=tuple(self._rounds),
            num_drafts=self.num_drafts,
            page_copies=tuple(self.page_copies),
        )

    def add_padding(self) -> None:
        """Add one token that belongs to no request."""
        self._chunks.append(Chunk(request_id=PLACEHOLDER, slot=0, start=0, token_ids=_DUMMY_IDS, page_ids=_DUMMY_IDS))

    def add_round(self, state: RequestState, cap: int, saving: Saving | None) -> None:
        """Add a round of a request.

        Args:
            cap: most drafts that it verifies.
            saving: where it saves state if it reaches that position.
        """
        assert state.holding is not None, "a planned request runs"
        start = state.num_planned_tokens
        assert start == state.num_tokens + state.num_sampling - 1, "a round starts at the token that was sampled last"
        self._rounds.append(
            Round(
                request_id=state.request.request_id,
                slot=state.slot,
                start=start,
                max_drafts=cap,
                page_ids=state.holding.page_ids,
                window_floor=state.window_floor,
                decoder_floor=state.decoder_floor,
                save_to=saving.slot if saving else None,
                save_at=saving.position if saving else 0,
            )
        )
        self._in_rounds.append(
            InFlight(state=state, generation=state.generation, end=0, samples=True, drafts=True, max_drafts=cap, saving=saving)
        )
        state.num_planned_tokens = start + 1
        state.num_drafts_in_flight += cap
        state.num_sampling += 1
        state.num_in_flight += 1

    def add_chunk(self, state: RequestState, count: int, saving: Saving | None, *, is_first: bool) -> None:
        """Add the next ``count`` tokens of a request.

        Args:
            saving: where its state is saved after them.
            is_first: whether the request starts with them.
        """
        assert state.holding is not None, "a planned request runs"
        start = state.num_planned_tokens
        end = start + count
        samples, is_last = end == state.num_tokens, end == state.num_prefill_tokens
        target_ids = lookback_ids = history_ids = None
        if state.wants_prompt_logprobs:
            target_ids = state.token_ids[start + 1 : min(end + 1, state.num_prompt_tokens)]
        if is_first and start:
            lookback_ids = state.token_ids[max(0, start - self._lookback_tokens) : start]
        if is_first and state.request.params.needs_history:
            history_ids = state.token_ids[: state.num_tokens]
        self._chunks.append(
            Chunk(
                request_id=state.request.request_id,
                slot=state.slot,
                start=start,
                token_ids=state.token_ids[start:end],
                page_ids=state.holding.page_ids,
                num_image_before=state.num_images_planned,
                num_logits=int(samples) + (0 if target_ids is None else len(target_ids)),
                target_ids=target_ids,
                anchor_id=int(state.token_ids[end]) if is_last and not samples else None,
                history_ids=history_ids,
                window_floor=state.window_floor,
                write_floor=state.write_floor,
                decoder_floor=state.decoder_floor,
                lookback_ids=lookback_ids,
                restore_from=state.holding.restore_from if is_first else None,
                save_to=saving.slot if saving else None,
            )
        )
        self._in_chunks.append(
            InFlight(state=state, generation=state.generation, end=end, samples=samples, drafts=is_last, saving=saving)
        )
        self.budget -= count
        self.num_keys += end
        state.num_images_planned += state.num_images(start, end)
        state.num_planned_tokens = end
        state.num_sampling += int(samples)
        state.num_in_flight += 1
