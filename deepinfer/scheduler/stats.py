"""What a scheduler has and did, as plain values for whoever counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What a scheduler has and did.

    Attributes:
        num_running, num_waiting: unfinished requests with and without memory.
        num_pages, num_held_pages, num_cached_pages: pages in all; held by requests; unheld, with content that can be found.
        num_slots, num_held_slots, num_saved_states: the same for slots.
        num_steps: committed.
        num_computed_tokens: rows of the committed steps, those of rejected drafts excepted.
        num_padding_rows: rows of the committed steps that were nobody's.
        num_output_tokens: committed.
        num_rounds: committed rounds that could have verified drafts.
        num_verified_drafts, num_accepted_drafts: [num_drafts] rounds that verified, and accepted, a draft at each position.
        num_asked_tokens: tokens of the requests that were looked up in the prefix cache, once each.
        num_hit_tokens: of these, found there.
        num_replayed_tokens: tokens that were found, at whatever admission, and computed again to rebuild state.
        num_preempted: times that a request lost its memory.
        num_finished: reason -> requests that ended for it.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_held_pages: int
    num_cached_pages: int
    num_slots: int
    num_held_slots: int
    num_saved_states: int
    num_steps: int
    num_computed_tokens: int
    num_padding_rows: int
    num_output_tokens: int
    num_rounds: int
    num_verified_drafts: tuple[int, ...]
    num_accepted_drafts: tuple[int, ...]
    num_asked_tokens: int
    num_hit_tokens: int
    num_replayed_tokens: int
    num_preempted: int
    num_finished: Mapping[FinishReason, int]
