"""Slots: those that requests run in, and those that hold saved states.

A *saved state* is a copy of a request's slot at the end of a page.  A later request with the same tokens continues from the copy
and computes nothing before that position.  A slot that holds a saved state and that no request uses is given up when a slot is
needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deepinfer.kv.pages import Pool
from deepinfer.kv.prefix import PrefixIndex

_RESEND_SHARE = 8  # one of so many slots without a request is kept for resend states when slots are short

SaveKind = Literal["asked", "resend", "progress"]
"""Why a state is saved: a caller asks for it; the same prompt sent again can start from it; it is the request's last page."""


@dataclass(slots=True, kw_only=True, eq=False)
class SavedState:
    """A state at the end of a page.

    Attributes:
        key: of that page.
        slot: where the state lies.
        window_floor: no window key before this position exists.
        decoder_floor: where the decoder half of its request began; None if that ran over all tokens.
        is_resend: whether only a resend of its prompt needs the state.
    """

    key: bytes
    slot: int
    window_floor: int
    decoder_floor: int | None
    is_resend: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """A copy to a slot that is not complete yet.

    Attributes:
        kind: why it is made.
        slot: where it goes.
        given_up: the state that the slot held before.
        is_superseded: whether a later copy of the same request goes to the same slot.
    """

    kind: SaveKind
    slot: int
    given_up: SavedState | None = None
    is_superseded: bool = False


@dataclass(slots=True, kw_only=True)
class Saves:
    """What one request saved.  Another request may have taken a slot since.

    Attributes:
        progress: the state that the next progress save replaces.
        resend: its resend states.
        asked: its states that callers asked for.
        copies: copies that are not complete, oldest first.  Of several copies to one slot only the last is not superseded.
    """

    progress: SavedState | None = None
    resend: list[SavedState] = field(default_factory=list)
    asked: list[SavedState] = field(default_factory=list)
    copies: deque[_Copy] = field(default_factory=deque)

    @property
    def slots(self) -> Iterator[int]:
        """Slots that copies go to, each once."""
        return (each.slot for each in self.copies if not each.is_superseded)

    @property
    def states(self) -> list[SavedState]:
        """All states that the request saved."""
        return self.asked + self.resend + ([] if self.progress is None else [self.progress])

    def add(self, state: SavedState, kind: SaveKind) -> None:
        """Remember a state that was saved for ``kind``."""
        if kind == "progress":
            self.progress = state
        elif kind == "resend":
            self.resend.append(state)
        else:
            self.asked.append(state)


class SavedStates:
    """Owns the slots and knows the saved states.

    Invariant: a slot is kept exactly if it holds a saved state and no request uses it.  One key has one saved state.  The page of
    a saved state can be found, or the request that saved the state still has to publish the page.

    Attributes:
        num_evicted: states given up because a slot was needed.
    """

    def __init__(self, num_slots: int, index: PrefixIndex) -> None:
        """Start with all slots free.

        Args:
            num_slots: including slot 0, which holds nothing.
            index: pages that can be found; only read here.
        """
        self._slots = Pool(num_slots, "slots")
        self._index = index
        self._by_key: dict[bytes, SavedState] = {}
        self._by_slot: dict[int, SavedState] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        """Number of saved states."""
        return len(self._by_key)

    @property
    def num_slots(self) -> int:
        """Slots without slot 0."""
        return self._slots.size - 1

    @property
    def num_available_slots(self) -> int:
        """Slots that no request uses, those with saved states included."""
        return self._slots.num_available

    @property
    def usage(self) -> float:
        """Share of the slots that requests use, 0 … 1."""
        return self._slots.num_held / max(1, self.num_slots)

    def find(self, key: bytes) -> SavedState | None:
        """The state saved at the end of the page ``key``."""
        return self._by_key.get(key)

    def longest(self, keys: Sequence[bytes], page_tokens: int, decoder_floor: int | None) -> tuple[int, SavedState] | None:
        """The state that spares a request most tokens.

        Args:
            keys: of the pages that the request can share.
            page_tokens: tokens of a page.
            decoder_floor: where the request's decoder half begins, or None.  A state after that position must have the same one.

        Returns:
            The position of the state and the state, or None.
        """
        if not self._by_key:
            return None
        for count in range(len(keys), 0, -1):
            state = self._by_key.get(keys[count - 1])
            if state is None:
                continue
            end = count * page_tokens
            if state.decoder_floor == decoder_floor or (decoder_floor is not None and end <= decoder_floor):
                return end, state
        return None

    # Slots of requests

    def take(self) -> int:
        """Give a request a slot, which gives up the state that is unused longest if no slot is free."""
        if not self._slots.num_free:
            (slot,) = self._slots.evict(1)
            self._forget(self._by_slot[slot])
            self.num_evicted += 1
        return self._slots.take(1)[0]

    def take_after(self, state: SavedState) -> tuple[int, int | None]:
        """Give a request a slot to continue from ``state``.

        Returns:
            The slot, and the slot to copy the state from, which is held.  The second is None if ``state`` lies in the only slot
            that is left: that slot becomes the request's own, and the saved state ends.
        """
        is_last = self._slots.num_available == 1 and self._slots.counts[state.slot] == 0
        self._slots.hold(state.slot)
        if is_last:
            self._forget(state)
            return state.slot, None
        return self.take(), state.slot

    def hold(self, slot: int) -> None:
        """Keep what is in ``slot`` until :meth:`drop`."""
        self._slots.hold(slot)

    def drop(self, slot: int) -> None:
        """Give a reference back; a slot with a saved state stays kept."""
        self._slots.drop(slot, keep=slot in self._by_slot)

    # Saving

    def choose(self, saves: Saves, kind: SaveKind, *, key: bytes | None, is_continued: bool) -> int | None:
        """Choose the slot for a copy of a request's state.

        Each progress save goes to the slot of the progress save before it, unless a request copies from that slot.  If no slot is
        free, :meth:`_next_to_give_up` says which state is lost.

        Args:
            saves: of the request; the copy is added.
            kind: why the state is saved.
            key: of the page before the position if it is known.  An equal state is not saved again.
            is_continued: whether the request continues from a hit.

        Returns:
            None if there is no slot, or an equal state.
        """
        if key is not None and (known := self._by_key.get(key)) is not None:
            self._renew(saves, known, kind)
            return None
        if kind == "resend" and not self._has_room_for_resend(saves, is_continued=is_continued):
            return None
        copy = _Copy(kind=kind, slot=0)
        if kind == "progress":
            before, saves.progress = saves.progress, None
            for each in saves.copies:
                if each.kind == "progress" and not each.is_superseded:
                    each.is_superseded, copy.slot = True, each.slot
            if before is not None and self.is_idle(before):
                self._slots.hold(before.slot)
                self._forget(before)
                copy.slot, copy.given_up = before.slot, before
        if not copy.slot and not self._slots.num_free:
            state = self._next_to_give_up(saves, kind)
            if state is None:
                return None
            self._forget(state)
            self.num_evicted += 1
        copy.slot = copy.slot or self.take()
        saves.copies.append(copy)
        return copy.slot

    def withdraw(self, saves: Saves) -> None:
        """The last chosen copy was not made: its slot is free, or holds again what it held before."""
        assert saves.copies, "a slot is given back that was not chosen"
        last = saves.copies.pop()
        for each in reversed(saves.copies):
            if each.slot == last.slot:
                each.is_superseded = False
                return
        state = last.given_up
        if state is not None and state.key in self._index and state.key not in self._by_key:
            self._by_key[state.key] = self._by_slot[last.slot] = saves.progress = state
        self.drop(last.slot)

    def complete(self, saves: Saves, key: bytes, *, window_floor: int, decoder_floor: int | None) -> None:
        """The oldest copy is made: it holds the state at the end of the page ``key``, unless a later copy overwrites it."""
        assert saves.copies, "a state was copied to a slot that was not chosen"
        first = saves.copies.popleft()
        state = SavedState(
            key=key,
            slot=first.slot,
            window_floor=window_floor,
            decoder_floor=decoder_floor,
            is_resend=first.kind == "resend",
        )
        if first.is_superseded:
            next(each for each in saves.copies if each.slot == first.slot).given_up = state
            return
        known = self._by_key.get(key)
        if known is not None:
            self._renew(saves, known, first.kind)
        else:
            self._by_key[key] = self._by_slot[first.slot] = state
            saves.add(state, first.kind)
        self.drop(first.slot)

    def leave(self, saves: Saves) -> None:
        """A request ends: its unfinished copies are void, and so are its states whose pages were never published."""
        for slot in saves.slots:
            self.drop(slot)
        for state in saves.states:
            if self._by_key.get(state.key) is state and state.key not in self._index:
                self._forget(state)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Pages were given up: their states can no longer be used."""
        for key in keys:
            if (state := self._by_key.get(key)) is not None:
                self._forget(state)

    def is_idle(self, state: SavedState) -> bool:
        """Whether a state can be found and no request copies from it."""
        return self._by_key.get(state.key) is state and self._slots.counts[state.slot] == 0

    # Inside

    def _forget(self, state: SavedState) -> None:
        """A state can no longer be found; its slot is free unless it is held."""
        del self._by_key[state.key]
        del self._by_slot[state.slot]
        if state.slot in self._slots.kept:
            self._slots.free(state.slot)

    def _renew(self, saves: Saves, state: SavedState, kind: SaveKind) -> None:
        """A request would save an equal state: the state that exists becomes the last to be given up."""
        self._slots.hold(state.slot)
        self.drop(state.slot)
        state.is_resend = state.is_resend and kind == "resend"
        if kind == "asked":
            saves.asked.append(state)
            if saves.progress is state:
                saves.progress = None

    def _resend_share(self) -> int:
        """Resend states that progress states do not displace."""
        return self._slots.num_available // _RESEND_SHARE

    def _has_room_for_resend(self, saves: Saves, *, is_continued: bool) -> bool:
        """Whether a resend state costs no more than it may.

        Its request needs another slot for its progress.  A request that continues from a hit is often the next turn of a session.
        With few slots, it must find both slots without giving up what another session continues from.
        """
        if self._slots.num_available < 2:
            return False
        if not is_continued or self._resend_share():
            return True
        has_progress = any(each.kind == "progress" for each in saves.copies)
        has_progress = has_progress or (saves.progress is not None and self.is_idle(saves.progress))
        num_resend = sum(self._by_slot[slot].is_resend for slot in self._slots.kept)
        return self._slots.num_free + num_resend + has_progress >= 2

    def _next_to_give_up(self, saves: Saves, kind: SaveKind) -> SavedState | None:
        """The state that a save displaces while no slot is free.

        If there are more resend states than their share, resend states of other requests go first, then other states.  Otherwise
        other states go first.  Within each group the state that is unused longest goes first.  The request's own resend states
        go last.  A state that a caller asked for goes only for another one that the caller asks for.
        """
        kept = [self._by_slot[slot] for slot in self._slots.kept]
        resend = [state for state in kept if state.is_resend and state not in saves.resend]
        others = [state for state in kept if not state.is_resend and state not in saves.asked]
        num_resend, share = sum(state.is_resend for state in kept), self._resend_share()
        is_over = num_resend >= max(1, share) if kind == "resend" else num_resend > share
        order = resend + others if is_over else others + resend
        order += [state for state in kept if state.is_resend and state in saves.resend]
        if kind == "asked":
            order += [state for state in kept if state in saves.asked]
        return order[0] if order else None

    def check(self, running: Sequence[int], all_saves: Sequence[Saves], copied: Iterable[int]) -> None:
        """Assert the invariants.

        Args:
            running: slots that requests run in.
            all_saves: of all requests.
            copied: slots that requests still have to be copied from.
        """
        self._slots.check()
        counts = [0] * self._slots.size
        for slot in (*running, *copied, *(slot for saves in all_saves for slot in saves.slots)):
            counts[slot] += 1
        assert counts == self._slots.counts, "references to slots are not those of the requests"
        assert self._by_slot == {state.slot: state for state in self._by_key.values()}, "slots and keys of states disagree"
        assert self._slots.kept <= self._by_slot.keys(), "a slot is kept that holds no state"
        unpublished = {state for saves in all_saves for state in saves.states}
        for state in self._by_key.values():
            assert state.slot in self._slots.kept or counts[state.slot], f"slot {state.slot} is free and its state can be found"
            assert state.key in self._index or state in unpublished, "a saved state has no page"
        assert self._by_slot.keys().isdisjoint(running), "a slot is written by a request and can be found"
        for saves in all_saves:
            assert self._by_slot.keys().isdisjoint(saves.slots), "a slot is copied to and can be found"
            last = {each.slot: each for each in saves.copies}
            assert all(each.is_superseded == (last[each.slot] is not each) for each in saves.copies), "the last copy counts"
