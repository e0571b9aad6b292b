"""The one class that the scheduler talks to about memory: pages, slots, and what is found in them again.

A request is looked up (:meth:`KVManager.plan_hit`), admitted, grows, publishes the pages it has computed, may save its state at
page boundaries, and is released.  What it published and saved stays until the room is needed.

Steps run in order on the device, so memory given back while a step that writes it is in flight may be handed out at once.  One
rule follows for callers: within the making of one plan, what the plan itself brings about is not there yet.  :meth:`publish`,
:meth:`saved` and :meth:`restored` are therefore called when the plan that computes or copies is complete, or later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepinfer.kv.layout import KVLayout
from deepinfer.kv.pages import Pool
from deepinfer.kv.prefix import PageChain, PrefixIndex, Removed, Stored

_ROLLBACK_TOKENS = 6  # drafts and the token behind them, which a verification may rewrite
_RESEND_SHARE = 8  # of the slots that no request holds, one in so many is left to resend states where room is short

SaveKind = Literal["asked", "resend", "progress"]
"""Why a state is saved: a caller asked for it; the same prompt sent again can start from it; or it is as far as a request got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What the cache spares a request.

    Attributes:
        num_tokens: H, a page boundary: pages before it are shared and not written again.
        kind: whether a saved state continues at H, or [start, H) is recomputed to rebuild the state, or there is nothing.
        start: first position to compute.
        saved_slot: holds the state at H; only for "state".
        window_floor: no window key before this position exists.
    """

    num_tokens: int
    kind: Literal["none", "state", "replay"]
    start: int
    saved_slot: int | None
    window_floor: int


NO_HIT = Hit(num_tokens=0, kind="none", start=0, saved_slot=None, window_floor=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Sums over all admissions.

    Attributes:
        num_admitted: requests admitted, each time they were.
        num_state_hits, num_replay_hits: how many of them had a hit.
        num_asked_tokens: tokens of the chains of those that count as queries.
        num_hit_tokens: of these, in shared pages.
        num_replayed_tokens: tokens in shared pages that any of them computed again to rebuild the state.
        num_evicted_pages, num_evicted_states: given up for room.
    """

    num_admitted: int = 0
    num_state_hits: int = 0
    num_replay_hits: int = 0
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_replayed_tokens: int = 0
    num_evicted_pages: int = 0
    num_evicted_states: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Saved:
    """A state at the end of the page ``key``, in ``slot``; ``is_resend`` if nobody but a resend needs it."""

    key: bytes
    slot: int
    window_floor: int
    decoder_floor: int | None
    is_resend: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A copy that is not reported yet.

    Attributes:
        given_up: what the slot held before.
        is_superseded: whether a later copy of the same request goes to the same slot.
    """

    kind: SaveKind
    slot: int
    given_up: _Saved | None = None
    is_superseded: bool = False


@dataclass(slots=True, kw_only=True)
class _Saves:
    """What a request saved, as far as it knows; others may have taken the slots since.

    Attributes:
        progress: the state that its next progress save replaces.
        resend: its resend states.
        asked: its states that were asked for.
        pending: copies that are not reported, oldest first; of those to one slot all but the last are superseded.
    """

    progress: _Saved | None = None
    resend: list[_Saved] = field(default_factory=list)
    asked: list[_Saved] = field(default_factory=list)
    pending: deque[_Pending] = field(default_factory=deque)

    @property
    def slots(self) -> Iterator[int]:
        """Slots that copies go to, each once."""
        return (each.slot for each in self.pending if not each.is_superseded)

    @property
    def states(self) -> list[_Saved]:
        """All of them."""
        return self.asked + self.resend + ([] if self.progress is None else [self.progress])


class Holding:
    """What one request holds.  Changed by its manager only.

    Invariant: has one reference to its slot, to each of its pages, to each slot it saves to, and until :meth:`KVManager.restored`
    to the slot and the page that are copied for it.  The first ``num_published`` pages bear keys.

    Attributes:
        slot: state slot.
        num_hit_tokens: pages before this position were found, not computed.
        num_published: pages that bear keys.
        window_floor: no window key of the request before this position exists.
        restore_from: slot whose state must be copied into ``slot`` before the first step, or None.
    """

    __slots__ = (
        "_array",
        "_copied_page",
        "_saves",
        "_view",
        "num_hit_tokens",
        "num_published",
        "restore_from",
        "slot",
        "window_floor",
    )

    def __init__(self, *, slot: int, page_ids: list[int], hit_tokens: int, num_published: int, window_floor: int) -> None:
        """Made by :class:`KVManager`."""
        self.slot = slot
        self.num_hit_tokens = hit_tokens
        self.num_published = num_published
        self.window_floor = window_floor
        self.restore_from: int | None = None
        self._copied_page: int | None = None
        self._saves = _Saves()
        self._array = np.empty(0, dtype=np.int32)
        self._view = self._array
        self._append(page_ids)

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """[num_pages] int32, in order, read-only.  Stays as it is when the holding grows or ends."""
        return self._view

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return len(self._view)

    def _append(self, page_ids: list[int]) -> None:
        before = len(self._view)
        after = before + len(page_ids)
        if after > len(self._array):
            array = np.empty(max(after, 2 * len(self._array)), dtype=np.int32)
            array[:before] = self._view
            self._array = array
        self._array[before:after] = page_ids
        self._view = self._array[:after]
        self._view.flags.writeable = False


class KVManager:
    """Owns pages, slots and the index of prefixes.

    Invariant: the references to a page or slot are those of the holdings.  Pages are kept exactly if the index needs them, slots
    exactly if they hold a saved state.  A saved state's page can be found, or the request that saved it is still to publish it.

    Attributes:
        layout: byte addresses; here only the page's size counts.
        replay_tokens: recomputed before the end of a replay hit.
        is_replay_exact: whether that rebuilds the state bit for bit.
        margin: tokens at the end of a request that are always computed.
        index: what can be found.
        counts: sums over all admissions.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
        replay_tokens: int = 128,
        is_replay_exact: bool = False,
        replay_weight: float = 1.0,
        margin: int | None = None,
        enable_prefix_cache: bool = True,
        record_events: bool = False,
    ) -> None:
        """All memory free.

        Args:
            num_pages, num_slots: including page 0 and slot 0.
            replay_tokens: even.
            replay_weight: cost of a replayed token; a new one costs 1.
            margin: by default the window plus what a verification of drafts may rewrite.
            enable_prefix_cache: without it nothing is published, saved or found.
            record_events: keep a log for :meth:`take_events`, which must then be called from time to time.
        """
        assert replay_tokens % 2 == 0, f"replay_tokens={replay_tokens} must be even: entries of ratio 2 pool pairs of tokens"
        assert layout.page_tokens % 2 == 0, (
            f"page_tokens={layout.page_tokens} must be even: entries of ratio 2 pool pairs of tokens"
        )
        self.layout = layout
        self.replay_tokens = replay_tokens
        self.is_replay_exact = is_replay_exact
        self.margin = layout.config.sliding_window + _ROLLBACK_TOKENS if margin is None else margin
        self.counts = CacheCounts()
        self._replay_weight = replay_weight
        self._is_caching = enable_prefix_cache
        self._page_tokens = layout.page_tokens
        self._pages = Pool(num_pages, "pages")
        self._slots = Pool(num_slots, "slots")
        self.index = PrefixIndex(record_events=record_events)
        self._saved: dict[bytes, _Saved] = {}
        self._saved_in: dict[int, _Saved] = {}
        self._holdings: set[Holding] = set()

    # What there is

    @property
    def is_caching(self) -> bool:
        """Whether anything is published, saved and found."""
        return self._is_caching

    @property
    def num_pages(self) -> int:
        """Pages that requests can have, page 0 not among them."""
        return self._pages.size - 1

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return self._pages.num_available

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds and that can still be found."""
        return self._pages.num_kept

    @property
    def page_usage(self) -> float:
        """Share of the pages that requests hold, 0 … 1."""
        return self._pages.num_held / max(1, self.num_pages)

    @property
    def num_slots(self) -> int:
        """Slots that requests and saved states can have, slot 0 not among them."""
        return self._slots.size - 1

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds, those with saved states included."""
        return self._slots.num_available

    @property
    def num_saved_states(self) -> int:
        """States saved."""
        return len(self._saved)

    @property
    def slot_usage(self) -> float:
        """Share of the slots that requests hold, 0 … 1."""
        return self._slots.num_held / max(1, self.num_slots)

    @property
    def num_holdings(self) -> int:
        """Requests that hold something."""
        return len(self._holdings)

    def take_events(self) -> list[Stored | Removed]:
        """Pages that became findable or ceased to be, in order, since the last call."""
        return self.index.take_events()

    # Looking up

    def plan_hit(self, chain: PageChain, num_tokens: int, *, exact: bool = False, decoder_floor: int | None = None) -> Hit:
        """Choose the hit that leaves least to compute; changes nothing.

        Good until the next change of the manager.

        Args:
            chain: keys of the request's tokens.
            num_tokens: L, tokens to be computed in the end; the hit leaves the last ``margin`` of them.
            exact: take a replay only if it rebuilds the state bit for bit.
            decoder_floor: where the request's decoder half begins; None if that runs over all tokens.  Behind it the windows of
                the decoder half matter: a state is good there only if saved with the same floor, and a replay, which rebuilds
                the encoder half, is not.
        """
        page = self._page_tokens
        num_found = self.index.find(chain.keys, min(len(chain.keys), max(0, num_tokens - self.margin) // page))
        best, best_cost = NO_HIT, float(num_tokens)
        num_replay = num_found if decoder_floor is None else min(num_found, decoder_floor // page)
        if num_replay * page > self.replay_tokens and (self.is_replay_exact or not exact):
            end = num_replay * page
            start = end - self.replay_tokens
            cost = num_tokens - end + self._replay_weight * self.replay_tokens
            if cost < best_cost:
                best, best_cost = Hit(num_tokens=end, kind="replay", start=start, saved_slot=None, window_floor=start), cost
        saved = self._longest_saved(chain.keys, num_found, decoder_floor)
        if saved is not None:
            end, state = saved
            if (num_tokens - end, -end) <= (best_cost, -best.num_tokens):
                best = Hit(num_tokens=end, kind="state", start=end, saved_slot=state.slot, window_floor=state.window_floor)
        return best

    def _longest_saved(self, keys: list[bytes], num_found: int, decoder_floor: int | None) -> tuple[int, _Saved] | None:
        if not self._saved:
            return None
        for count in range(num_found, 0, -1):
            state = self._saved.get(keys[count - 1])
            if state is None:
                continue
            end = count * self._page_tokens
            if state.decoder_floor == decoder_floor or (decoder_floor is not None and end <= decoder_floor):
                return end, state
        return None

    # Holding

    def admit(
        self, chain: PageChain, hit: Hit, num_tokens: int, *, num_reserved_pages: int = 0, is_query: bool = True
    ) -> Holding | None:
        """Give a request the pages of ``hit``, further ones for ``num_tokens`` in all, and a slot.

        The saved state of a hit stays until :meth:`restored`.  If its slot is the only one to be had, it becomes the request's
        own and nothing is to be copied: ask the holding, not the hit, for ``restore_from``.

        Args:
            chain: the one that the hit was planned with.
            hit: from :meth:`plan_hit`, with nothing changed since.
            num_tokens: at least those of the hit.
            num_reserved_pages: pages that must be left for others.
            is_query: whether its tokens and its hit are counted; False if it was not looked up, or is resumed.

        Returns:
            None if there is no room; then nothing has changed.
        """
        assert num_tokens >= hit.num_tokens, f"{num_tokens} tokens are fewer than the {hit.num_tokens} of the hit"
        num_shared = hit.num_tokens // self._page_tokens
        assert self.index.find(chain.keys, num_shared) == num_shared, "a page of the hit is gone by now; plan the hit again"
        shared = self.index.pages(chain.keys[:num_shared])
        count = self.layout.pages_for(num_tokens) - num_shared
        num_idle = sum(self._pages.counts[page] == 0 for page in shared)
        if count > self._pages.num_available - num_idle - num_reserved_pages or not self._slots.num_available:
            return None
        state = None
        if hit.saved_slot is not None:
            state = self._saved.get(chain.keys[num_shared - 1])
            found = None if state is None else state.slot
            assert found == hit.saved_slot, f"slot {hit.saved_slot} holds another state by now; plan the hit again"
        for page in shared:
            self._pages.hold(page)
        takes_over = state is not None and self._slots.num_available == 1 and self._slots.counts[state.slot] == 0
        if state is not None:
            self._slots.hold(state.slot)
        if state is not None and takes_over:
            self._forget(state)
            slot = state.slot
        else:
            slot = self._take_slot()
        holding = Holding(
            slot=slot,
            page_ids=shared + self._take_pages(count),
            hit_tokens=hit.num_tokens,
            num_published=num_shared,
            window_floor=hit.window_floor,
        )
        if state is not None and not takes_over:
            holding.restore_from = state.slot
        self._holdings.add(holding)
        self._count_admission(hit, chain.num_tokens if is_query and self._is_caching else 0)
        return holding

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Give the request pages for ``num_tokens`` in all; False if there is no room, and then nothing has changed."""
        count = self.layout.pages_for(num_tokens) - holding.num_pages
        if count <= 0:
            return True
        if count > self._pages.num_available:
            return False
        holding._append(self._take_pages(count))
        return True

    def restored(self, holding: Holding) -> None:
        """The copies that the request starts from are in a complete plan: their sources need not be kept for it any longer."""
        if holding.restore_from is not None:
            self._drop_slot(holding.restore_from)
            holding.restore_from = None
        if holding._copied_page is not None:
            self._drop_page(holding._copied_page)
            holding._copied_page = None

    def release(self, holding: Holding) -> None:
        """Take back all that the request holds; what it published and saved can still be found."""
        self._holdings.remove(holding)
        self.restored(holding)
        self._drop_slot(holding.slot)
        for slot in holding._saves.slots:
            self._drop_slot(slot)
        for page in reversed(holding.page_ids.tolist()):
            self._drop_page(page)
        for state in holding._saves.states:
            if self._saved.get(state.key) is state and state.key not in self.index:
                self._forget(state)

    def fork(self, holding: Holding, num_tokens: int) -> tuple[Holding, list[tuple[int, int]]] | None:
        """Let a second request continue the first ``num_tokens`` tokens of one, which are computed.

        Full pages are shared; a partial last page is copied.  The state is to be copied from ``restore_from`` of the new holding;
        sources of both copies stay until :meth:`restored`.

        Returns:
            the new holding and (from, to) pages to copy; None if there is no room, and then nothing has changed.
        """
        num_full, num_partial = num_tokens // self._page_tokens, int(num_tokens % self._page_tokens > 0)
        assert holding.num_hit_tokens <= num_tokens, "a request can be forked when its replay is over"
        assert holding.restore_from is None, "a request can be forked when its own state was copied, not in the same plan"
        assert num_full + num_partial <= holding.num_pages, f"{num_tokens} tokens are more than the request has pages for"
        if num_partial > self._pages.num_available or not self._slots.num_available:
            return None
        page_ids: list[int] = holding.page_ids[: num_full + num_partial].tolist()
        for page in page_ids:  # the partial one too: its content is still to be copied
            self._pages.hold(page)
        new = self._take_pages(num_partial)
        twin = Holding(
            slot=self._take_slot(),
            page_ids=page_ids[:num_full] + new,
            hit_tokens=holding.num_hit_tokens,
            num_published=min(holding.num_published, num_full),
            window_floor=holding.window_floor,
        )
        twin.restore_from = holding.slot
        self._slots.hold(holding.slot)
        copies = list(zip(page_ids[num_full:], new, strict=True))
        if copies:
            twin._copied_page = copies[0][0]
        self._holdings.add(twin)
        return twin, copies

    # Making findable

    def publish(self, holding: Holding, chain: PageChain, num_computed_tokens: int) -> None:
        """Make the full pages among the first ``num_computed_tokens`` findable; content that can be found already stays.

        Args:
            chain: keys of the request's tokens, at least of those.
            num_computed_tokens: computed by steps that run before any step of the next plan.
        """
        first, last = holding.num_published, num_computed_tokens // self._page_tokens
        if last <= first or not self._is_caching:
            return
        assert last <= min(len(chain.keys), holding.num_pages), f"{num_computed_tokens} tokens are more than keys or pages cover"
        parent = chain.keys[first - 1] if first else None
        pages = holding.page_ids[first:last].tolist()
        for page in self.index.publish(pages, chain.keys[first:last], parent, self._pages.counts):
            self._pages.free(page)
        holding.num_published = last

    def save_slot(self, holding: Holding, kind: SaveKind = "progress", *, key: bytes | None = None) -> int | None:
        """Choose the slot for a copy of the request's state; see :meth:`_giving_way` for what is given up.

        Each progress save goes to the slot of the one before, unless somebody copies from that.  Not for positions inside a
        replay, where the state is still being rebuilt.  Every slot that is given is reported to :meth:`saved`, in order; the one
        that was given last may be reported to :meth:`unsaved` instead.

        Args:
            key: of the page before the position, if it is known already: a state that is there is not saved again.

        Returns:
            None if none is to be had, if the cache is off, or if such a state is there.
        """
        if not self._is_caching:
            return None
        saves = holding._saves
        if key is not None and (known := self._saved.get(key)) is not None:
            self._renew(holding, known, kind)
            return None
        if kind == "resend" and not self._has_room_for_resend(holding):
            return None
        pending = _Pending(kind=kind, slot=0)
        if kind == "progress":
            before, saves.progress = saves.progress, None
            for each in saves.pending:
                if each.kind == "progress" and not each.is_superseded:
                    each.is_superseded, pending.slot = True, each.slot
            if before is not None and self._is_idle(before):
                self._slots.hold(before.slot)
                self._forget(before)
                pending.slot, pending.given_up = before.slot, before
        if not pending.slot and self._slots.num_free:
            pending.slot = self._take_slot()
        elif not pending.slot:
            state = self._giving_way(holding, kind)
            if state is None:
                return None
            self._forget(state)
            self.counts = replace(self.counts, num_evicted_states=self.counts.num_evicted_states + 1)
            pending.slot = self._take_slot()
        saves.pending.append(pending)
        return pending.slot

    def unsaved(self, holding: Holding) -> None:
        """Nothing was copied to the slot that :meth:`save_slot` gave last: it is free, or holds again what it held before."""
        saves = holding._saves
        assert saves.pending, "a slot is given back that save_slot did not give"
        last = saves.pending.pop()
        for each in reversed(saves.pending):
            if each.slot == last.slot:
                each.is_superseded = False
                return
        state = last.given_up
        if state is not None and state.key in self.index and state.key not in self._saved:
            self._saved[state.key] = self._saved_in[last.slot] = saves.progress = state
        self._drop_slot(last.slot)

    def saved(self, holding: Holding, chain: PageChain, num_tokens: int, *, decoder_floor: int | None = None) -> None:
        """The oldest copy that is not reported, of the state at ``num_tokens``, is in a complete plan.

        It can be found as soon as the page before it can, unless a later copy goes to the same slot.

        Args:
            chain: keys of the request's tokens, at least of those.
            num_tokens: a page boundary.
            decoder_floor: where the request's decoder half begins; None if that runs over all tokens.
        """
        saves = holding._saves
        assert saves.pending, "a state was copied to a slot that save_slot did not give"
        assert num_tokens % self._page_tokens == 0, f"a state at {num_tokens} is not at a page boundary and can never be hit"
        assert num_tokens >= holding.num_hit_tokens, f"the state at {num_tokens} lies inside a replay and is not whole"
        first = saves.pending.popleft()
        state = _Saved(
            key=chain.keys[num_tokens // self._page_tokens - 1],
            slot=first.slot,
            window_floor=holding.window_floor,
            decoder_floor=decoder_floor,
            is_resend=first.kind == "resend",
        )
        if first.is_superseded:
            next(each for each in saves.pending if each.slot == first.slot).given_up = state
            return
        known = self._saved.get(state.key)
        if known is not None:
            self._renew(holding, known, first.kind)
        else:
            self._saved[state.key] = self._saved_in[first.slot] = state
            if first.kind == "progress":
                saves.progress = state
            elif first.kind == "resend":
                saves.resend.append(state)
            else:
                saves.asked.append(state)
        self._drop_slot(first.slot)

    # Inside

    def _take_pages(self, count: int) -> list[int]:
        missing = count - self._pages.num_free
        if missing > 0:
            for key in self.index.remove(self._pages.evict(missing)):
                if (state := self._saved.get(key)) is not None:
                    self._forget(state)
            self.counts = replace(self.counts, num_evicted_pages=self.counts.num_evicted_pages + missing)
        return self._pages.take(count)

    def _drop_page(self, page: int) -> None:
        is_last = self._pages.counts[page] == 1
        self._pages.drop(page, keep=is_last and self.index.retire(page))

    def _take_slot(self) -> int:
        if not self._slots.num_free:
            (slot,) = self._slots.evict(1)
            self._forget(self._saved_in[slot])
            self.counts = replace(self.counts, num_evicted_states=self.counts.num_evicted_states + 1)
        return self._slots.take(1)[0]

    def _drop_slot(self, slot: int) -> None:
        self._slots.drop(slot, keep=slot in self._saved_in)

    def _is_idle(self, state: _Saved) -> bool:
        """Whether a state can be found and nobody copies from it."""
        return self._saved.get(state.key) is state and self._slots.counts[state.slot] == 0

    def _renew(self, holding: Holding, state: _Saved, kind: SaveKind) -> None:
        """A state that is there would be saved once more: now it is the last to be given up."""
        self._slots.hold(state.slot)
        self._drop_slot(state.slot)
        state.is_resend = state.is_resend and kind == "resend"
        if kind == "asked":
            holding._saves.asked.append(state)
            if holding._saves.progress is state:
                holding._saves.progress = None

    def _resend_share(self) -> int:
        """Resend states that progress states leave their slots where room is short."""
        return self._slots.num_available // _RESEND_SHARE

    def _has_room_for_resend(self, holding: Holding) -> bool:
        """Whether a resend state costs no more than it may.

        Its request needs another slot for its progress.  With few slots, one that continues from a hit, as the turn of a session
        does, must find both without giving up what another session continues from.
        """
        if self._slots.num_available < 2:
            return False
        if not holding.num_hit_tokens or self._resend_share():
            return True
        saves = holding._saves
        has_progress = any(each.kind == "progress" for each in saves.pending)
        has_progress = has_progress or (saves.progress is not None and self._is_idle(saves.progress))
        num_resend = sum(self._saved_in[slot].is_resend for slot in self._slots.kept)
        return self._slots.num_free + num_resend + has_progress >= 2

    def _giving_way(self, holding: Holding, kind: SaveKind) -> _Saved | None:
        """The state to give up for a save, no slot being free.

        Resend states of other requests go first where there are more of them than their share, else the others, each the one
        unused longest.  The request's own resend state comes behind them all, and of what was asked for it gives up nothing but
        for what is asked for.
        """
        saves = holding._saves
        kept = [self._saved_in[slot] for slot in self._slots.kept]
        resend = [state for state in kept if state.is_resend and state not in saves.resend]
        others = [state for state in kept if not state.is_resend and state not in saves.asked]
        num_resend, share = sum(state.is_resend for state in kept), self._resend_share()
        is_over = num_resend >= max(1, share) if kind == "resend" else num_resend > share
        order = resend + others if is_over else others + resend
        order += [state for state in kept if state.is_resend and state in saves.resend]
        if kind == "asked":
            order += [state for state in kept if state in saves.asked]
        return order[0] if order else None

    def _forget(self, state: _Saved) -> None:
        """A state can no longer be found; its slot is free unless somebody holds it."""
        del self._saved[state.key]
        del self._saved_in[state.slot]
        if state.slot in self._slots.kept:
            self._slots.free(state.slot)

    def _count_admission(self, hit: Hit, num_asked: int) -> None:
        before = self.counts
        self.counts = replace(
            before,
            num_admitted=before.num_admitted + 1,
            num_state_hits=before.num_state_hits + (hit.kind == "state"),
            num_replay_hits=before.num_replay_hits + (hit.kind == "replay"),
            num_asked_tokens=before.num_asked_tokens + num_asked,
            num_hit_tokens=before.num_hit_tokens + (hit.num_tokens if num_asked else 0),
            num_replayed_tokens=before.num_replayed_tokens + hit.num_tokens - hit.start,
        )

    def check(self) -> None:
        """Assert the invariants of the manager and all its parts.  Cost: all pages, and all pages of all holdings."""
        self._pages.check()
        self._slots.check()
        self.index.check(self._pages.kept, self._pages.counts)
        pages, slots = [0] * self._pages.size, [0] * self._slots.size
        for holding in self._holdings:
            held = holding.page_ids.tolist()
            assert len(set(held)) == len(held), "a request holds a page twice"
            assert holding.num_published <= len(held), "more pages are published than held"
            for position, page in enumerate(held):
                pages[page] += 1
                has_key = self.index.key_of(page) is not None
                assert has_key or position >= holding.num_published, f"published page {page} has no key"
            for slot in (holding.slot, *holding._saves.slots, holding.restore_from):
                if slot is not None:
                    slots[slot] += 1
            if holding._copied_page is not None:
                pages[holding._copied_page] += 1
        assert pages == self._pages.counts, "references to pages are not those of the holdings"
        assert slots == self._slots.counts, "references to slots are not those of the holdings"
        assert self._saved_in == {state.slot: state for state in self._saved.values()}, "slots and keys of states disagree"
        assert self._slots.kept <= self._saved_in.keys(), "a slot is kept that holds no state"
        pending = {state for holding in self._holdings for state in holding._saves.states}
        for state in self._saved.values():
            assert state.slot in self._slots.kept or slots[state.slot], f"the state in slot {state.slot} is free and can be found"
            assert state.key in self.index or state in pending, "a saved state has no page"
        for holding in self._holdings:
            assert holding.slot not in self._saved_in, f"slot {holding.slot} is written by a request and can be found"
            saves = holding._saves
            assert self._saved_in.keys().isdisjoint(saves.slots), "a slot is copied to and can be found"
            last = {each.slot: each for each in saves.pending}
            assert all(each.is_superseded == (last[each.slot] is not each) for each in saves.pending), "the last copy counts"
