"""Counters of a scheduler, and the plain values that they are reported as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer.kv.manager import KVManager
from deepinfer.request import FinishReason
from deepinfer.step import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Levels and counters of a scheduler.

    Attributes:
        num_running, num_waiting: unfinished requests with and without memory.
        num_pages, num_held_pages, num_cached_pages: all pages; pages that requests hold; other pages that can be found.
        num_slots, num_held_slots, num_saved_states: the same for slots.
        num_steps: committed steps.
        num_computed_tokens: rows of the committed steps without rows of rejected drafts.
        num_padding_rows: padding rows of the committed steps.
        num_output_tokens: committed output tokens.
        num_rounds: committed rounds that could verify drafts.
        num_verified_drafts, num_accepted_drafts: [num_drafts] rounds that verified, and accepted, a draft at each position.
        num_asked_tokens: tokens of the requests that were looked up in the prefix cache, each request counted once.
        num_hit_tokens: tokens of these requests that were found.
        num_replayed_tokens: tokens that were found at any admission and computed again to rebuild a state.
        num_preempted: preemptions.
        num_finished: finish reason -> requests that ended for that reason.
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


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts since a scheduler started; see :class:`SchedulerStats`."""

    num_verified_drafts: list[int]
    num_accepted_drafts: list[int]
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_padding_rows: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_preempted: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_tokens(self, sampled: Sampled, num_taken: int, *, is_round: bool) -> None:
        """Count ``num_taken`` tokens of ``sampled``; only a round that could verify drafts is ``is_round``."""
        num_accepted = len(sampled.token_ids) - 1
        self.num_rounds += is_round
        self.num_output_tokens += num_taken
        for position in range(sampled.num_drafts):
            self.num_verified_drafts[position] += 1
            self.num_accepted_drafts[position] += position < num_accepted

    def stats(self, kv: KVManager, *, num_running: int, num_waiting: int) -> SchedulerStats:
        """These counts, and the levels of ``kv``."""
        counts = kv.counts
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_pages=kv.num_pages,
            num_held_pages=kv.num_pages - kv.num_free_pages,
            num_cached_pages=kv.num_cached_pages,
            num_slots=kv.num_slots,
            num_held_slots=kv.num_slots - kv.num_free_slots,
            num_saved_states=kv.num_saved_states,
            num_steps=self.num_steps,
            num_computed_tokens=self.num_computed_tokens,
            num_padding_rows=self.num_padding_rows,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_verified_drafts=tuple(self.num_verified_drafts),
            num_accepted_drafts=tuple(self.num_accepted_drafts),
            num_asked_tokens=counts.num_asked_tokens,
            num_hit_tokens=counts.num_hit_tokens,
            num_replayed_tokens=counts.num_replayed_tokens,
            num_preempted=self.num_preempted,
            num_finished=dict(self.num_finished),
        )
