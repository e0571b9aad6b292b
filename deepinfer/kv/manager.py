"""Memory as the scheduler sees it: pages, slots, and the prefix cache over both.

A request is looked up (:meth:`KVManager.plan_hit`), admitted, grows, publishes the pages it computed, may save its state at page
boundaries, and is released.  Published pages and saved states stay until their memory is needed.

Steps run in order on the device.  Memory that is given back may therefore be handed out at once, even if a step in flight still
writes it.  A plan's own effects are not visible while it is built: :meth:`KVManager.publish`, :meth:`KVManager.saved` and
:meth:`KVManager.restored` are called after the plan that computes or copies is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepinfer.kv.layout import KVLayout
from deepinfer.kv.pages import Pool
from deepinfer.kv.prefix import PageChain, PrefixIndex, Removed, Stored
from deepinfer.kv.states import SavedStates, SaveKind, Saves

_ROLLBACK_TOKENS = 6  # drafts and the token after them, which a verification may rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Part of a request's prompt that the cache holds.

    Attributes:
        num_tokens: H, a page boundary.  Pages before it are shared and not written again.
        kind: "state" continues from a saved state at H; "replay" recomputes [start, H) to rebuild the state; "none" is no hit.
        start: first position to compute.
        saved_slot: slot of the state at H; only for "state".
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
        num_admitted: admissions; a request that is preempted is admitted again.
        num_state_hits, num_replay_hits: admissions with such a hit.
        num_asked_tokens: tokens of the requests that count as queries.
        num_hit_tokens: tokens of these requests in shared pages.
        num_replayed_tokens: tokens in shared pages that were computed again to rebuild a state.
        num_evicted_pages, num_evicted_states: cached pages and saved states that were given up.
    """

    num_admitted: int = 0
    num_state_hits: int = 0
    num_replay_hits: int = 0
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_replayed_tokens: int = 0
    num_evicted_pages: int = 0
    num_evicted_states: int = 0


class Holding:
    """Memory of one running request.  Only its manager changes it.

    Invariant: it has one reference to its slot, to each of its pages and to each slot it saves to.  Until
    :meth:`KVManager.restored` it also has one to the slot and to the page that are copied for it.  The first ``num_published``
    pages have keys.

    Attributes:
        slot: state slot.
        num_hit_tokens: pages before this position were found in the cache.
        num_published: pages with keys.
        window_floor: no window key of the request before this position exists.
        restore_from: slot whose state must be copied into ``slot`` before the first step, or None.
        saves: its saved states and unfinished copies.
    """

    __slots__ = (
        "_array",
        "_copied_page",
        "_view",
        "num_hit_tokens",
        "num_published",
        "restore_from",
        "saves",
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
        self.saves = Saves()
        self._array = np.empty(0, dtype=np.int32)
        self._view = self._array
        self._append(page_ids)

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """[num_pages] int32, in order, read-only.  The array does not change when the holding grows or ends."""
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

    Invariant: every reference to a page or slot belongs to a holding.  A page without references is kept exactly if the index
    needs it.

    Attributes:
        layout: byte addresses; here only the page's size counts.
        replay_tokens: recomputed before the end of a replay hit.
        is_replay_exact: whether that rebuilds the state bit for bit.
        margin: tokens at the end of a request that are always computed.
        index: pages that can be found.
        states: slots and saved states.
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
        """Start with all memory free.

        Args:
            num_pages, num_slots: including page 0 and slot 0.
            replay_tokens: even.
            replay_weight: cost of a replayed token; a new one costs 1.
            margin: default: the window plus the tokens that a verification of drafts may rewrite.
            enable_prefix_cache: False publishes, saves and finds nothing.
            record_events: keep a log for :meth:`take_events`.  The caller must then empty the log from time to time.
        """
        assert replay_tokens % 2 == 0, f"replay_tokens={replay_tokens} must be even: entries of ratio 2 pool pairs of tokens"
        assert layout.page_tokens % 2 == 0, (
            f"page_tokens={layout.page_tokens} must be even: entries of ratio 2 pool pairs of tokens"
        )
        self.layout = layout
        self.replay_tokens = replay_tokens
        self.is_replay_exact = is_replay_exact
        self.margin = layout.config.sliding_window + _ROLLBACK_TOKENS if margin is None else margin
        self._counts = CacheCounts()
        self._replay_weight = replay_weight
        self._is_caching = enable_prefix_cache
        self._page_tokens = layout.page_tokens
        self._pages = Pool(num_pages, "pages")
        self.index = PrefixIndex(record_events=record_events)
        self.states = SavedStates(num_slots, self.index)
        self._holdings: set[Holding] = set()

    # What there is

    @property
    def is_caching(self) -> bool:
        """Whether anything is published, saved and found."""
        return self._is_caching

    @property
    def num_pages(self) -> int:
        """Pages without page 0."""
        return self._pages.size - 1

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds, cached pages included."""
        return self._pages.num_available

    @property
    def num_cached_pages(self) -> int:
        """Pages that no request holds and that can be found."""
        return self._pages.num_kept

    @property
    def page_usage(self) -> float:
        """Share of the pages that requests hold, 0 … 1."""
        return self._pages.num_held / max(1, self.num_pages)

    @property
    def num_slots(self) -> int:
        """Slots without slot 0."""
        return self.states.num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that no request uses, those with saved states included."""
        return self.states.num_available_slots

    @property
    def num_saved_states(self) -> int:
        """Saved states."""
        return len(self.states)

    @property
    def counts(self) -> CacheCounts:
        """Sums over all admissions."""
        return replace(self._counts, num_evicted_states=self.states.num_evicted)

    @property
    def num_holdings(self) -> int:
        """Requests with memory."""
        return len(self._holdings)

    def take_events(self) -> list[Stored | Removed]:
        """Pages that were stored or removed since the last call, in order."""
        return self.index.take_events()

    # Looking up

    def plan_hit(self, chain: PageChain, num_tokens: int, *, exact: bool = False, decoder_floor: int | None = None) -> Hit:
        """Choose the hit that leaves least to compute.  Nothing changes.

        The hit is valid until the manager changes.

        Args:
            chain: keys of the request's tokens.
            num_tokens: L, tokens that will be computed in all; the hit leaves at least the last ``margin`` of them.
            exact: take a replay only if it rebuilds the state bit for bit.
            decoder_floor: where the request's decoder half begins; None if that runs over all tokens.  After this position the
                state has windows of the decoder half.  A saved state is then valid only with the same floor, and a replay is not
                valid, because it rebuilds the encoder half only.
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
        saved = self.states.longest(chain.keys[:num_found], page, decoder_floor)
        if saved is not None:
            end, state = saved
            if (num_tokens - end, -end) <= (best_cost, -best.num_tokens):
                best = Hit(num_tokens=end, kind="state", start=end, saved_slot=state.slot, window_floor=state.window_floor)
        return best

    # Holding

    def admit(
        self, chain: PageChain, hit: Hit, num_tokens: int, *, num_reserved_pages: int = 0, is_query: bool = True
    ) -> Holding | None:
        """Give a request the pages of ``hit``, further ones for ``num_tokens`` in all, and a slot.

        The saved state of a hit stays until :meth:`restored`.  If its slot is the last one, the request gets that
        slot, and nothing is copied.  The holding's ``restore_from`` says which.

        Args:
            chain: the chain that the hit was planned with.
            hit: from :meth:`plan_hit`; the manager has not changed since.
            num_tokens: at least the tokens of the hit.
            num_reserved_pages: pages that must stay for other requests.
            is_query: whether its tokens and its hit are counted; False if it was not looked up or is resumed.

        Returns:
            None if there is no room; then nothing changes.
        """
        assert num_tokens >= hit.num_tokens, f"{num_tokens} tokens are fewer than the {hit.num_tokens} of the hit"
        num_shared = hit.num_tokens // self._page_tokens
        assert self.index.find(chain.keys, num_shared) == num_shared, "a page of the hit is gone by now; plan the hit again"
        shared = self.index.pages(chain.keys[:num_shared])
        count = self.layout.pages_for(num_tokens) - num_shared
        num_idle = sum(self._pages.counts[page] == 0 for page in shared)
        if count > self._pages.num_available - num_idle - num_reserved_pages or not self.num_free_slots:
            return None
        state = None
        if hit.saved_slot is not None:
            state = self.states.find(chain.keys[num_shared - 1])
            found = None if state is None else state.slot
            assert found == hit.saved_slot, f"slot {hit.saved_slot} holds another state by now; plan the hit again"
        for page in shared:
            self._pages.hold(page)
        slot, restore_from = (self.states.take(), None) if state is None else self.states.take_after(state)
        holding = Holding(
            slot=slot,
            page_ids=shared + self._take_pages(count),
            hit_tokens=hit.num_tokens,
            num_published=num_shared,
            window_floor=hit.window_floor,
        )
        holding.restore_from = restore_from
        self._holdings.add(holding)
        self._count_admission(hit, chain.num_tokens if is_query and self._is_caching else 0)
        return holding

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Give the request pages for ``num_tokens`` in all.  False if there is no room; then nothing changes."""
        count = self.layout.pages_for(num_tokens) - holding.num_pages
        if count <= 0:
            return True
        if count > self._pages.num_available:
            return False
        holding._append(self._take_pages(count))
        return True

    def restored(self, holding: Holding) -> None:
        """The copies that the request starts from are in a complete plan: their sources are given back."""
        if holding.restore_from is not None:
            self.states.drop(holding.restore_from)
            holding.restore_from = None
        if holding._copied_page is not None:
            self._drop_page(holding._copied_page)
            holding._copied_page = None

    def release(self, holding: Holding) -> None:
        """Take back the memory of a request.  Its published pages and saved states can still be found."""
        self._holdings.remove(holding)
        self.restored(holding)
        self.states.drop(holding.slot)
        for page in reversed(holding.page_ids.tolist()):
            self._drop_page(page)
        self.states.leave(holding.saves)

    def fork(self, holding: Holding, num_tokens: int) -> tuple[Holding, list[tuple[int, int]]] | None:
        """Let a second request continue after the first ``num_tokens`` computed tokens of a request.

        Full pages are shared; a partial last page is copied.  The state must be copied from ``restore_from`` of the new holding.
        The sources of both copies stay until :meth:`restored`.

        Returns:
            The new holding and the (from, to) pages to copy.  None if there is no room; then nothing changes.
        """
        num_full, num_partial = num_tokens // self._page_tokens, int(num_tokens % self._page_tokens > 0)
        assert holding.num_hit_tokens <= num_tokens, "a request can be forked when its replay is over"
        assert holding.restore_from is None, "a request can be forked when its own state was copied, not in the same plan"
        assert num_full + num_partial <= holding.num_pages, f"{num_tokens} tokens are more than the request has pages for"
        if num_partial > self._pages.num_available or not self.num_free_slots:
            return None
        page_ids: list[int] = holding.page_ids[: num_full + num_partial].tolist()
        for page in page_ids:  # the partial one too: its content is still to be copied
            self._pages.hold(page)
        new = self._take_pages(num_partial)
        twin = Holding(
            slot=self.states.take(),
            page_ids=page_ids[:num_full] + new,
            hit_tokens=holding.num_hit_tokens,
            num_published=min(holding.num_published, num_full),
            window_floor=holding.window_floor,
        )
        twin.restore_from = holding.slot
        self.states.hold(holding.slot)
        copies = list(zip(page_ids[num_full:], new, strict=True))
        if copies:
            twin._copied_page = copies[0][0]
        self._holdings.add(twin)
        return twin, copies

    # Publishing

    def publish(self, holding: Holding, chain: PageChain, num_computed_tokens: int) -> None:
        """Let the full pages among the first ``num_computed_tokens`` be found.  Content that can be found already stays.

        Args:
            chain: keys of at least these tokens.
            num_computed_tokens: tokens computed by steps that run before the next plan.
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
        """Choose the slot for a copy of the request's state; see :meth:`SavedStates.choose`.

        Not for positions inside a replay, where the state is still being rebuilt.  Every slot that is given is reported to
        :meth:`saved`, in order.  The slot that was given last may be reported to :meth:`unsaved` instead.

        Args:
            key: of the page before the position if it is known.  An equal state is not saved again.

        Returns:
            None if there is no slot, if the cache is off, or if there is an equal state.
        """
        if not self._is_caching:
            return None
        return self.states.choose(holding.saves, kind, key=key, is_continued=holding.num_hit_tokens > 0)

    def unsaved(self, holding: Holding) -> None:
        """Nothing was copied to the slot that :meth:`save_slot` gave last."""
        self.states.withdraw(holding.saves)

    def saved(self, holding: Holding, chain: PageChain, num_tokens: int, *, decoder_floor: int | None = None) -> None:
        """The oldest copy that is not reported, of the state at ``num_tokens``, is in a complete plan.

        The state can be found as soon as the page before it can, unless a later copy goes to the same slot.

        Args:
            chain: keys of at least these tokens.
            num_tokens: a page boundary.
            decoder_floor: where the request's decoder half begins; None if that runs over all tokens.
        """
        assert num_tokens % self._page_tokens == 0, f"a state at {num_tokens} is not at a page boundary and can never be hit"
        assert num_tokens >= holding.num_hit_tokens, f"the state at {num_tokens} lies inside a replay and is not whole"
        key = chain.keys[num_tokens // self._page_tokens - 1]
        self.states.complete(holding.saves, key, window_floor=holding.window_floor, decoder_floor=decoder_floor)

    # Inside

    def _take_pages(self, count: int) -> list[int]:
        missing = count - self._pages.num_free
        if missing > 0:
            self.states.forget(self.index.remove(self._pages.evict(missing)))
            self._counts = replace(self._counts, num_evicted_pages=self._counts.num_evicted_pages + missing)
        return self._pages.take(count)

    def _drop_page(self, page: int) -> None:
        is_last = self._pages.counts[page] == 1
        self._pages.drop(page, keep=is_last and self.index.retire(page))

    def _count_admission(self, hit: Hit, num_asked: int) -> None:
        before = self._counts
        self._counts = replace(
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
        self.index.check(self._pages.kept, self._pages.counts)
        pages = [0] * self._pages.size
        for holding in self._holdings:
            held = holding.page_ids.tolist()
            assert len(set(held)) == len(held), "a request holds a page twice"
            assert holding.num_published <= len(held), "more pages are published than held"
            for position, page in enumerate(held):
                pages[page] += 1
                has_key = self.index.key_of(page) is not None
                assert has_key or position >= holding.num_published, f"published page {page} has no key"
            if holding._copied_page is not None:
                pages[holding._copied_page] += 1
        assert pages == self._pages.counts, "references to pages are not those of the holdings"
        self.states.check(
            [each.slot for each in self._holdings],
            [each.saves for each in self._holdings],
            [each.restore_from for each in self._holdings if each.restore_from is not None],
        )
