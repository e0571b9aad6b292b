"""Which states of running requests are saved, and when a saved state can be found."""

from __future__ import annotations

from deepinfer.kv.manager import KVManager
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.request_state import RequestState, Saving


class StateSaver:
    """Chooses positions and slots of saved states.  Changes only the ``saving`` and the stops of a request."""

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        """Save states of ``kv`` within ``limits``."""
        self._kv = kv
        self._limits = limits
        self._page_tokens = kv.layout.page_tokens

    def set_stops(self, state: RequestState) -> None:
        """Set the positions at which chunks of the request's prefill end, so that the states there can be saved."""
        stops, page = set(state.request.checkpoints), self._page_tokens
        if self._limits.save_states:
            stops.add(state.num_prefill_tokens // page * page)
            # A hit of the same prompt ends at this position at the latest.
            state.resend_position = max(0, state.num_prompt_tokens - self._kv.margin) // page * page
            # The request takes one slot, and its last state takes another.
            if self._kv.is_caching and self._kv.num_free_slots > 2:
                stops.add(state.resend_position)
        state.stops = tuple(sorted(stops))

    def in_chunk(self, state: RequestState, end: int, *, is_slot_wanted: bool) -> Saving | None:
        """Save the state at ``end``, where a chunk ends.

        Args:
            is_slot_wanted: whether a waiting request could use a slot.
        """
        slot = None
        if end % self._page_tokens == 0:
            slot = self._slot(state, end, is_slot_wanted=is_slot_wanted)
        return None if slot is None else Saving(slot=slot, position=end, num_in_flight=1)

    def in_round(self, state: RequestState, start: int, reach: int, *, is_slot_wanted: bool) -> Saving | None:
        """Save the state if a round reaches the end of a page between ``start`` + 1 and ``reach`` tokens.

        Only the device knows whether the round does.  It copies only then, so several rounds in flight can share a slot.
        """
        position = reach // self._page_tokens * self._page_tokens
        if state.saving is not None:
            position = state.saving.position
        if not start < position <= reach:
            return None
        if state.saving is None:
            slot = self._slot(state, position, is_slot_wanted=is_slot_wanted)
            if slot is None:
                return None
            state.saving = Saving(slot=slot, position=position)
        state.saving.num_in_flight += 1
        return state.saving

    def commit(self, state: RequestState, saving: Saving, *, start: int, end: int) -> None:
        """Let a saved state be found if this chunk or round copied it.  Give its slot back if nothing in flight can copy it.

        Args:
            start, end: tokens that the device had computed before and after the chunk or round.  The device also counts tokens
                after the end of the request.
        """
        assert state.holding is not None, "a committed request runs"
        saving.num_in_flight -= 1
        # A round in flight that does not save here may pass the position first.  Later rounds then copy nothing.
        is_copied = start < saving.position <= end
        if is_copied and saving.position <= state.num_computed_tokens:
            floor = state.decoder_floor if self._limits.decoder_keep_tokens else None
            self._kv.saved(state.holding, state.chain, saving.position, decoder_floor=floor)
            saving.is_done = True
        elif saving.num_in_flight == 0 and not is_copied and not saving.is_done:
            self._kv.unsaved(state.holding)
        else:
            return
        if state.saving is saving:
            state.saving = None

    def _slot(self, state: RequestState, end: int, *, is_slot_wanted: bool) -> int | None:
        """Slot for the state at a page boundary; None inside a replay, or if a waiting request needs the slot."""
        if not self._limits.save_states or end < state.write_floor:
            return None
        kv = self._kv
        if is_slot_wanted and kv.num_free_slots <= 1:
            return None
        assert state.holding is not None, "a planned request runs"
        key = state.chain.keys[end // self._page_tokens - 1] if end <= state.chain.num_tokens else None
        if end in state.request.checkpoints:
            return kv.save_slot(state.holding, "asked", key=key)
        if end == state.resend_position and (slot := kv.save_slot(state.holding, "resend", key=key)) is not None:
            return slot
        return kv.save_slot(state.holding, "progress", key=key)
