"""Memory is right for every random history, and the cheapest hit is taken."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config import named_config
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import NO_HIT, Hit, Holding, KVManager
from deepinfer.kv.prefix import PageChain, Removed

CONFIG = named_config("golden")


def manager_of(*, page_tokens=4, **settings):
    defaults = {"num_pages": 20, "num_slots": 6, "replay_tokens": 4, "margin": 2, "record_events": True}
    return KVManager(KVLayout(CONFIG, page_tokens=page_tokens), **{**defaults, **settings})


def chain_of(tokens, *, page_tokens=4, salt=b"", images=None):
    chain = PageChain(page_tokens, salt)
    chain.extend(np.array(tokens, dtype=np.int32), images or {})
    return chain


# -------------------------------------------------------------------------------------------------------- random histories


SALTS = (b"", b"a", b"b")
WORDS = (0, 0, 0, 0, 1)
PICTURES = (b"cat", b"dog")


@dataclass(eq=False)
class Sim:
    """A request as a scheduler and a device see it.

    Attributes:
        contents: content number of each position.
        copies: position and slot of each copied state that is not reported, oldest first.
        saving_to: slot for a state that may be copied later.
        forks: requests whose state will be copied from this one.
        page_copies: copies to make before the first step.
        is_restored: whether the copies that it starts from are made.
    """

    salt: bytes
    chain: PageChain
    tokens: list[int] = field(default_factory=list)
    images: dict[int, bytes] = field(default_factory=dict)
    contents: list[int] = field(default_factory=list)
    decoder_floor: int | None = None
    holding: Holding | None = None
    num_computed: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    saving_to: int | None = None
    forks: list["Sim"] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    is_restored: bool = False


class History:
    """Runs random operations on a manager and on a device whose pages and slots remember what was written to them last.

    A *content* is a number for everything that a position's memory depends on: tenant, tokens and pictures up to the position.  A
    state is the content before it and the position where the decoder half began.
    """

    def __init__(self, rng, *, page_tokens=4, keep=None, **settings):
        """``keep`` tokens at the end of a prompt run through the decoder half; None for all."""
        self.rng = rng
        self.keep = keep
        self.page_tokens = page_tokens
        self.manager = manager_of(page_tokens=page_tokens, **settings)
        self.max_tokens = page_tokens * (self.manager.num_pages * 2 // 3)
        self.max_live = max(2, self.manager.num_slots * 2 // 3)
        self.seen = Counter()
        self.live, self.past = [], []
        self.numbers, self.content_of_key, self.parent_of = {}, {}, {}
        self.in_page, self.in_slot, self.owners = {}, {}, Counter()

    def operate(self):
        """Do one operation that has an effect, and check everything."""
        common = (self.admit, self.compute, self.compute, self.compute, self.publish, self.append, self.save, self.reserve)
        done = False
        while not done:
            operation = self.rng.choice((*common, *common, self.report, self.give_back, self.fork, self.release))
            if operation == self.admit:
                done = self.admit()
            elif self.live:
                done = operation(self.rng.choice(self.live))
        self.check()

    # Sequences

    def extend(self, sim, tokens, images=None):
        images, first = images or {}, len(sim.tokens)
        for position, token in enumerate(tokens, first):
            before = sim.contents[-1] if sim.contents else sim.salt
            number = self.numbers.setdefault((before, token, images.get(position)), len(self.numbers))
            sim.contents.append(number)
        sim.tokens += tokens
        sim.images.update(images)
        known = len(sim.chain.keys)
        sim.chain.extend(np.array(tokens, dtype=np.int32), images)
        for index, key in enumerate(sim.chain.keys[known:], known):
            content = sim.contents[(index + 1) * self.page_tokens - 1]
            assert self.content_of_key.setdefault(key, content) == content, "two contents have one key"

    def beginning_of(self, sim, count):
        new = Sim(sim.salt, PageChain(self.page_tokens, sim.salt), decoder_floor=sim.decoder_floor)
        self.extend(new, sim.tokens[:count], {at: image for at, image in sim.images.items() if at < count})
        return new

    def sequence(self):
        """Another turn of an earlier request, the same request, its beginning, or a new prompt."""
        rng = self.rng
        if self.past and rng.random() < 0.75:
            before = rng.choice(self.past)
            sim = self.beginning_of(
                before, rng.choice((len(before.tokens), len(before.tokens), rng.randint(1, len(before.tokens))))
            )
            count = rng.choice((0, 1, rng.randrange(3 * self.page_tokens)))
        else:
            salt = rng.choice(SALTS)
            sim = Sim(salt, PageChain(self.page_tokens, salt))
            count = rng.randrange(1, 6 * self.page_tokens)
        count = min(count, self.max_tokens - len(sim.tokens))
        at = len(sim.tokens) + rng.randrange(4 * self.page_tokens)
        images = {at: rng.choice(PICTURES)} if at < len(sim.tokens) + count else {}
        self.extend(sim, rng.choices(WORDS, k=count), images)
        if self.keep is not None and (sim.decoder_floor is None or rng.random() < 0.5):
            sim.decoder_floor = max(0, len(sim.tokens) - self.keep)
        return sim

    def state(self, sim, position):
        return sim.contents[position - 1], sim.decoder_floor

    def is_state(self, found, sim, position):
        content, floor = found
        is_hidden = sim.decoder_floor is not None and position <= sim.decoder_floor
        return content == sim.contents[position - 1] and (is_hidden or floor == sim.decoder_floor)

    # Operations: each returns whether it had an effect

    def admit(self):
        if len(self.live) >= self.max_live and self.rng.random() < 0.9:
            return False
        manager, sim = self.manager, self.sequence()
        before, num_tokens = self.fingerprint(), len(sim.tokens)
        hit = manager.plan_hit(sim.chain, num_tokens, exact=self.rng.random() < 0.3, decoder_floor=sim.decoder_floor)
        assert hit.num_tokens <= max(0, num_tokens - manager.margin)
        asked = self.rng.randint(max(1, hit.num_tokens), num_tokens)
        holding = manager.admit(sim.chain, hit, asked)
        if holding is None:
            assert self.fingerprint() == before
            shared = manager.index.pages(sim.chain.keys[: hit.num_tokens // self.page_tokens])
            num_idle = sum(not self.owners[page] for page in shared)
            has_pages = manager.layout.pages_for(asked) - len(shared) <= manager.num_free_pages - num_idle
            assert not has_pages or manager.num_free_slots == 0, "there was room"
            self.seen["not admitted"] += 1
            return False
        self.seen[hit.kind] += 1
        self.seen.update(["taken over"] if hit.kind == "state" and holding.restore_from is None else [])
        assert holding.num_pages == manager.layout.pages_for(asked)
        sim.holding, sim.num_computed = holding, hit.start
        self.owners.update(holding.page_ids.tolist())
        for index in range(hit.num_tokens // self.page_tokens):
            content = sim.contents[(index + 1) * self.page_tokens - 1]
            assert self.in_page[holding.page_ids[index]] == content, "a shared page holds something else"
        if hit.kind == "state":
            assert hit.saved_slot in (holding.restore_from, holding.slot)
            assert self.is_state(self.in_slot[hit.saved_slot], sim, hit.num_tokens), "a saved state is another one"
            if holding.restore_from is None:
                self.in_slot[holding.slot] = self.state(sim, hit.num_tokens)
        self.live.append(sim)
        self.past = [*self.past[-7:], sim]
        if self.rng.random() < 0.5:
            self.restore(sim)
        return True

    def restore(self, sim):
        """Make the copies that a request starts from, then report them."""
        source = sim.holding.restore_from
        if source is not None:
            assert self.is_state(self.in_slot[source], sim, sim.num_computed), "the source of a state was overwritten"
            self.in_slot[sim.holding.slot] = self.state(sim, sim.num_computed)
        for old, new in sim.page_copies:
            assert self.in_page[old] == sim.contents[sim.num_computed - 1], "the source of a page was overwritten"
            self.in_page[new] = self.in_page[old]
        self.manager.restored(sim.holding)
        sim.is_restored = True

    def compute(self, sim):
        if not sim.is_restored:
            self.restore(sim)
        if sim.num_computed == len(sim.tokens) or any(each in self.live and not each.is_restored for each in sim.forks):
            return False
        end = self.rng.randint(sim.num_computed + 1, len(sim.tokens))
        if self.rng.random() < 0.7:
            end = max(sim.num_computed + 1, end - end % self.page_tokens)
        before, view = self.fingerprint(), sim.holding.page_ids
        held = view.tolist()
        if not self.manager.grow(sim.holding, end):
            assert self.fingerprint() == before
            assert self.manager.layout.pages_for(end) - len(held) > self.manager.num_free_pages, "there was room"
            self.seen["preempted"] += 1
            return self.release(sim)
        pages = sim.holding.page_ids.tolist()
        assert view.tolist() == held == pages[: len(held)], "a view handed out before has changed"
        self.owners.update(pages[len(held) :])
        for position in range(max(sim.num_computed, sim.holding.num_hit_tokens), end):
            page = pages[position // self.page_tokens]
            assert self.owners[page] == 1, "a page in use is written by another request"
            self.in_page[page] = sim.contents[position]
        sim.num_computed = end
        self.in_slot[sim.holding.slot] = self.state(sim, end)
        return True

    def publish(self, sim):
        first, index = sim.holding.num_published, self.manager.index
        before = {key: index.pages([key])[0] for key in sim.chain.keys[first:] if key in index}
        self.manager.publish(sim.holding, sim.chain, self.rng.choice((sim.num_computed, self.rng.randint(0, sim.num_computed))))
        last = sim.holding.num_published
        for key, page in zip(sim.chain.keys[first:last], sim.holding.page_ids[first:last], strict=True):
            if before.get(key, page) != page:
                (found,) = index.pages([key])
                assert found == (before[key] if self.owners[before[key]] else page), "a page that is held is found first"
                self.seen["stepped in" if found == page else "twin"] += 1
        return last > first

    def append(self, sim):
        count = min(self.rng.randint(1, self.page_tokens), self.max_tokens - len(sim.tokens))
        self.extend(sim, self.rng.choices(WORDS, k=count))
        return count > 0

    def save(self, sim):
        position = sim.num_computed
        is_whole = sim.is_restored and position >= max(1, sim.holding.num_hit_tokens)
        if position % self.page_tokens or not is_whole:
            return False
        slot, sim.saving_to = sim.saving_to, None
        if slot is None:
            slot = self.save_slot(sim, self.rng.choice(("asked", "resend", "progress", "progress")), position)
        if slot is None:
            return False
        assert self.in_slot[sim.holding.slot] == self.state(sim, position), "the state of a running request was overwritten"
        self.in_slot[slot] = self.state(sim, position)
        sim.copies.append((position, slot))
        return self.rng.random() < 0.5 or self.report(sim)

    def save_slot(self, sim, kind, position=0):
        key = sim.chain.keys[position // self.page_tokens - 1] if position and self.rng.random() < 0.5 else None
        before, is_there = self.fingerprint(), self.manager.states.find(key) is not None
        own = [state.slot for state in sim.holding.saves.asked if self.manager.states.is_idle(state)]
        slot = self.manager.save_slot(sim.holding, kind, key=key)
        if is_there or slot is None:
            assert slot is None
            assert self.fingerprint() == before
            self.seen["there already"] += is_there
        elif kind == "progress":
            assert slot not in own, "what was asked for gives way to what was not"
        if slot is not None:
            self.seen[kind] += 1
            self.seen["superseded"] += any(slot == other for _, other in sim.copies)
        return slot

    def reserve(self, sim):
        """Ask for a slot before it is known whether a copy will be made."""
        if sim.saving_to is None:
            sim.saving_to = self.save_slot(sim, "progress")
        return sim.saving_to is not None

    def give_back(self, sim):
        if sim.saving_to is None:
            return False
        before = self.manager.num_saved_states
        self.manager.unsaved(sim.holding)
        sim.saving_to = None
        self.seen["unsaved"] += 1
        self.seen["found again"] += self.manager.num_saved_states - before
        return True

    def report(self, sim):
        if not sim.copies:
            return False
        position, slot = sim.copies.pop(0)
        if slot not in [other for _, other in sim.copies]:
            assert self.in_slot[slot] == self.state(sim, position), "a slot was handed out while a state was copied to it"
        self.manager.saved(sim.holding, sim.chain, position, decoder_floor=sim.decoder_floor)
        self.seen["saved"] += 1
        return True

    def fork(self, sim):
        count = sim.num_computed
        is_whole = sim.is_restored and count >= max(1, sim.holding.num_hit_tokens)
        if not is_whole or len(self.live) >= self.max_live:
            return False
        before = self.fingerprint()
        forked = self.manager.fork(sim.holding, count)
        if forked is None:
            assert self.fingerprint() == before
            return False
        child = self.beginning_of(sim, count)
        child.holding, child.page_copies = forked
        child.num_computed = count
        self.owners.update(child.holding.page_ids.tolist())
        num_full = count // self.page_tokens
        assert child.holding.page_ids[:num_full].tolist() == sim.holding.page_ids[:num_full].tolist()
        assert len(child.page_copies) == (count % self.page_tokens > 0) == child.holding.num_pages - num_full
        self.extend(child, self.rng.choices(WORDS, k=min(3, self.max_tokens - count)))
        sim.forks.append(child)
        self.live.append(child)
        self.past = [*self.past[-7:], child]
        self.seen["forked"] += 1
        return True

    def release(self, sim):
        self.live.remove(sim)
        self.owners.subtract(sim.holding.page_ids.tolist())
        if self.rng.random() < 0.7:
            self.manager.publish(sim.holding, sim.chain, sim.num_computed)
        self.manager.release(sim.holding)
        return True

    # What must hold

    def fingerprint(self):
        manager = self.manager
        return (
            manager.num_free_pages,
            manager.num_free_slots,
            manager.num_cached_pages,
            manager.num_saved_states,
            len(manager.index),
        )

    def check(self):
        """The manager's own check, the log against the index, and every page that can be found against the device."""
        manager, index = self.manager, self.manager.index
        manager.check()
        for event in manager.take_events():
            if isinstance(event, Removed):
                for key in event.keys:
                    del self.parent_of[key]
                    assert key not in self.parent_of.values(), "a parent was removed before its child"
            else:
                for key, parent in zip(event.keys, (event.parent, *event.keys), strict=False):
                    assert key not in self.parent_of, "a key was stored twice"
                    assert parent is None or parent in self.parent_of, "a key was stored before its parent"
                    self.parent_of[key] = parent
        assert len(self.parent_of) == len(index)
        for key, page in zip(self.parent_of, index.pages(self.parent_of), strict=True):
            assert self.in_page[page] == self.content_of_key[key], "a page that can be found holds something else"

    def finish(self):
        while self.live:
            self.release(self.live[0])
            self.check()
        manager = self.manager
        assert manager.num_free_pages == manager.num_pages
        assert manager.num_free_slots == manager.num_slots
        assert manager.num_holdings == 0


HISTORIES = {
    "few pages": {},
    "few slots": {"num_slots": 3, "num_pages": 14},
    "small pages": {"page_tokens": 2, "num_pages": 40, "num_slots": 9},
    "exact replay": {"is_replay_exact": True, "replay_tokens": 8, "num_pages": 30},
    "dear replay": {"replay_weight": 1.5, "margin": 7, "num_pages": 25, "num_slots": 12},
    "short decoder": {"keep": 6, "margin": 6, "num_pages": 30, "num_slots": 12},
    "short decoder, exact replay": {"keep": 6, "margin": 6, "is_replay_exact": True, "num_slots": 8},
    "much room": {"num_pages": 120, "num_slots": 20},
}


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", HISTORIES)
def test_nothing_is_lost_or_wrong_in_a_long_history(name, part, seed):
    history = History(random.Random(seed), **HISTORIES[name])
    for _ in range(13_000):
        history.operate()
    history.finish()
    expected = {"none", "state", "replay", "saved", "unsaved", "found again", "forked", "twin", "stepped in"}
    expected |= {"asked", "progress", "superseded", "there already"}
    if name != "few slots":  # one slot beside a request's own is not enough for two states
        expected |= {"resend"}
    if name.startswith("few"):
        expected |= {"not admitted", "taken over", "preempted"}
    assert expected <= history.seen.keys(), f"never seen, so nothing is shown about: {expected - history.seen.keys()}"
    assert history.manager.counts.num_evicted_pages > 100
    assert history.manager.counts.num_evicted_states > 10


@given(st.sampled_from(sorted(HISTORIES)), st.lists(st.integers(0, 2**16), max_size=80))
def test_nothing_is_lost_or_wrong_in_a_short_history(name, steps):
    history = History(random.Random(0), **HISTORIES[name])
    for step in steps:  # a random source each, so that a failing history can be shortened
        history.rng = random.Random(step)
        history.operate()
    history.finish()


# ------------------------------------------------------------------------------------------------------------ choice of hits


def run(manager, tokens, *, saves=(), hit=NO_HIT, **chain_settings):
    """Compute a request, saving states at the positions ``saves``, and publish it; returns its holding and chain."""
    chain = chain_of(tokens, page_tokens=manager.layout.page_tokens, **chain_settings)
    holding = manager.admit(chain, hit, len(tokens))
    assert holding is not None
    manager.restored(holding)
    for position in saves:
        assert manager.save_slot(holding) is not None
        manager.saved(holding, chain, position)
    manager.publish(holding, chain, len(tokens))
    return holding, chain


def finished(manager, tokens, **settings):
    manager.release(run(manager, tokens, **settings)[0])


def kind_of(hit):
    return hit.kind, hit.num_tokens


def test_an_empty_cache_has_no_hit():
    manager = manager_of()
    assert manager.plan_hit(chain_of(range(40)), 40) == NO_HIT


def test_a_replay_starts_before_the_pages_end():
    manager = manager_of()
    finished(manager, range(40))
    assert manager.plan_hit(chain_of(range(40)), 40) == Hit(
        num_tokens=36, kind="replay", start=32, saved_slot=None, window_floor=32
    )


def test_a_state_needs_no_replay():
    manager = manager_of()
    finished(manager, range(40), saves=[36])
    hit = manager.plan_hit(chain_of(range(40)), 40)
    assert (hit.kind, hit.num_tokens, hit.start, hit.window_floor) == ("state", 36, 36, 0)
    assert hit.saved_slot is not None


@pytest.mark.parametrize(("num_tokens", "end"), [(37, 32), (38, 36), (41, 36), (42, 40), (100, 40)])
def test_the_last_tokens_are_always_computed(num_tokens, end):
    manager = manager_of()
    finished(manager, range(40))
    assert kind_of(manager.plan_hit(chain_of(range(40)), num_tokens)) == ("replay", end)


def test_the_default_margin_covers_the_window_and_the_drafts():
    assert KVManager(KVLayout(CONFIG), num_pages=2, num_slots=2).margin == CONFIG.sliding_window + 6
    assert KVManager(KVLayout(named_config("full")), num_pages=2, num_slots=2).margin == 134


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize(("num_pages", "kind"), [(1, "none"), (2, "none"), (3, "replay")])
def test_a_replay_of_the_whole_hit_is_useless(num_pages, kind, weight):
    manager = manager_of(replay_tokens=8, replay_weight=weight)
    finished(manager, range(4 * num_pages))
    assert manager.plan_hit(chain_of(range(40)), 40).kind == kind


@pytest.mark.parametrize(
    ("weight", "saved", "chosen"),
    [
        (1.0, 24, ("replay", 32)),  # 4 + 4 against 12 tokens
        (1.0, 28, ("replay", 32)),  # 4 + 4 against 8: equal, the longer hit
        (1.5, 28, ("state", 28)),  # 4 + 6 against 8
        (0.5, 28, ("replay", 32)),  # 4 + 2 against 8
        (0.0, 32, ("state", 32)),  # equal cost: no replay
        (9.0, None, ("none", 0)),  # 4 + 36 against 36
        (8.0, None, ("none", 0)),  # 4 + 32 against 36: equal, no gain
        (7.9, None, ("replay", 32)),
    ],
)
def test_the_hit_that_leaves_least_to_compute_is_taken(weight, saved, chosen):
    manager = manager_of(replay_weight=weight)
    finished(manager, range(32), saves=[] if saved is None else [saved])
    assert kind_of(manager.plan_hit(chain_of(range(36)), 36)) == chosen


def test_a_missing_state_never_voids_pages():
    manager = manager_of(num_pages=40, num_slots=3)
    sessions = [list(range(start, start + 40)) for start in (0, 1000)]
    for tokens in sessions:
        finished(manager, tokens, saves=[36])
    finished(manager, range(500, 504))
    finished(manager, range(600, 604), saves=[4])
    hits = [manager.plan_hit(chain_of(tokens), 40) for tokens in sessions]
    assert kind_of(hits[0]) == ("replay", 36)
    assert hits[1].num_tokens == 36


@pytest.mark.parametrize("is_replay_exact", [False, True])
def test_an_exact_hit_is_a_state_or_an_exact_replay(is_replay_exact):
    manager = manager_of(is_replay_exact=is_replay_exact)
    finished(manager, range(40), saves=[16])
    assert kind_of(manager.plan_hit(chain_of(range(40)), 40, exact=True)) == (
        ("replay", 36) if is_replay_exact else ("state", 16)
    )
    other = manager_of(is_replay_exact=is_replay_exact)
    finished(other, range(40))
    assert other.plan_hit(chain_of(range(40)), 40, exact=True).kind == ("replay" if is_replay_exact else "none")


def test_behind_the_decoder_floor_only_a_state_of_the_same_floor_is_right():
    manager = manager_of(is_replay_exact=True)
    holding, chain = run(manager, range(40))
    assert manager.save_slot(holding) is not None
    manager.saved(holding, chain, 36, decoder_floor=22)
    manager.release(holding)
    assert kind_of(manager.plan_hit(chain, 40, decoder_floor=22)) == ("state", 36)
    assert kind_of(manager.plan_hit(chain, 40, decoder_floor=36)) == ("state", 36)
    assert kind_of(manager.plan_hit(chain, 40, decoder_floor=23)) == ("replay", 20)
    assert kind_of(manager.plan_hit(chain, 40, decoder_floor=0)) == ("none", 0)
    assert kind_of(manager.plan_hit(chain, 40)) == ("replay", 36)


def test_the_floor_of_a_replay_goes_with_the_states_saved_after_it():
    manager = manager_of()
    finished(manager, range(24))
    hit = manager.plan_hit(chain_of(range(40)), 40)
    assert (hit.kind, hit.window_floor) == ("replay", 20)
    finished(manager, range(40), hit=hit, saves=[32])
    again = manager.plan_hit(chain_of(range(36)), 36)
    assert (again.kind, again.num_tokens, again.window_floor) == ("state", 32, 20)
    holding, _ = run(manager, range(36), hit=again)
    forked, _ = manager.fork(holding, 36)
    assert (holding.window_floor, holding.num_hit_tokens) == (forked.window_floor, forked.num_hit_tokens) == (20, 32)


def test_tenants_share_nothing():
    manager = manager_of()
    finished(manager, range(40), saves=[36], salt=b"a")
    assert manager.plan_hit(chain_of(range(40), salt=b"b"), 40) == NO_HIT
    assert kind_of(manager.plan_hit(chain_of(range(40), salt=b"a"), 40)) == ("state", 36)


def test_another_picture_shares_only_what_lies_before_it():
    manager = manager_of()
    finished(manager, [7] * 40, images={21: b"cat"})
    assert kind_of(manager.plan_hit(chain_of([7] * 40, images={21: b"cat"}), 40)) == ("replay", 36)
    assert kind_of(manager.plan_hit(chain_of([7] * 40, images={21: b"dog"}), 40)) == ("replay", 20)


def test_without_a_cache_nothing_is_found_or_saved():
    manager = manager_of(enable_prefix_cache=False)
    holding, chain = run(manager, range(40))
    assert manager.save_slot(holding) is None
    manager.release(holding)
    assert manager.plan_hit(chain, 40) == NO_HIT
    assert manager.num_cached_pages == 0
    manager.check()


# ------------------------------------------------------------------------------------------------------------------ memory


def test_no_room_changes_nothing():
    manager = manager_of(num_pages=5, num_slots=3)
    holding, _ = run(manager, range(12))
    assert manager.admit(chain_of(range(50, 60)), NO_HIT, 8) is None
    assert not manager.grow(holding, 17)
    assert holding.num_pages == 3
    assert manager.grow(holding, 16)
    assert manager.num_free_pages == 0
    assert manager.fork(holding, 13) is None
    assert manager.fork(holding, 12) is not None
    manager.check()


def test_pages_of_the_hit_itself_are_not_room():
    manager = manager_of(num_pages=6, num_slots=3)
    finished(manager, range(12))
    chain = chain_of(range(30))
    hit = manager.plan_hit(chain, 30)
    assert kind_of(hit) == ("replay", 12)
    assert manager.admit(chain, hit, 21) is None
    assert manager.admit(chain, hit, 20) is not None


def test_children_go_before_parents_and_old_prefixes_before_new():
    manager = manager_of(num_pages=7)
    old, new = chain_of(range(12)), chain_of(range(100, 112))
    finished(manager, range(12))
    finished(manager, range(100, 112))
    manager.take_events()
    holding, _ = run(manager, range(200, 216))
    assert manager.take_events()[0] == Removed(keys=(old.keys[2], old.keys[1], old.keys[0], new.keys[2]))
    manager.release(holding)
    manager.check()


def test_a_hit_renews_a_prefix():
    manager = manager_of(num_pages=7)
    finished(manager, range(12))
    finished(manager, range(100, 112))
    chain = chain_of(range(14))
    finished(manager, range(12), hit=manager.plan_hit(chain, 14))
    manager.take_events()
    finished(manager, range(200, 208))
    (removed,) = [event for event in manager.take_events() if isinstance(event, Removed)]
    assert removed.keys == (*reversed(chain_of(range(100, 112)).keys[1:]),)


def test_the_only_slot_is_taken_over_with_the_state_in_it():
    manager = manager_of(num_slots=2)
    chain = chain_of(range(40))
    holding = manager.admit(chain, NO_HIT, 40)
    assert manager.save_slot(holding) is None
    manager.release(holding)
    manager = manager_of(num_slots=3)
    first, _ = run(manager, range(40), saves=[36])
    hit = manager.plan_hit(chain, 40)
    second = manager.admit(chain, hit, 40)
    assert second.slot == hit.saved_slot
    assert second.restore_from is None
    assert manager.num_saved_states == 0
    manager.check()
    assert manager.admit(chain, NO_HIT, 4) is None
    manager.release(first)
    manager.release(second)
    manager.check()


def test_a_state_stays_until_the_copy_from_it_is_planned():
    manager = manager_of(num_slots=4)
    saver, chain = run(manager, range(40), saves=[36])
    holding = manager.admit(chain, manager.plan_hit(chain, 40), 40)
    source = holding.restore_from
    assert source is not None
    assert manager.admit(chain_of(range(4)), NO_HIT, 4) is None, "the last slot is the source of a copy"
    assert manager.save_slot(saver) is None
    manager.restored(holding)
    assert manager.save_slot(saver) == source
    manager.check()


def test_the_source_of_a_fork_outlives_its_owner():
    manager = manager_of(num_slots=4, num_pages=8)
    parent, chain = run(manager, range(10))
    child, copies = manager.fork(parent, 10)
    assert child.page_ids[:2].tolist() == parent.page_ids[:2].tolist()
    assert copies == [(parent.page_ids[2], child.page_ids[2])]
    assert (parent.num_published, child.num_published) == (2, 2)
    assert child.restore_from == parent.slot
    old_slot, old_page = parent.slot, int(parent.page_ids[2])
    manager.release(parent)
    other = manager.admit(chain_of(range(50, 60)), NO_HIT, 8)
    assert other.slot != old_slot
    assert old_page not in other.page_ids
    manager.check()
    assert not manager.grow(other, 16)
    manager.restored(child)
    assert manager.grow(other, 16)
    assert child.restore_from is None
    manager.publish(child, chain, 10)
    manager.check()


def test_a_request_has_one_saved_state_and_it_outlives_the_request():
    manager = manager_of(num_slots=6)
    holding, chain = run(manager, range(40), saves=[12, 24, 36])
    assert manager.num_saved_states == 1
    manager.release(holding)
    assert manager.num_saved_states == 1
    assert kind_of(manager.plan_hit(chain, 40)) == ("state", 36)
    assert manager.num_free_slots == manager.num_slots


def test_a_copy_of_progress_goes_over_the_one_before_that_is_not_reported_yet():
    manager = manager_of()
    holding, chain = run(manager, range(40))
    slot = manager.save_slot(holding)
    assert slot is not None
    assert manager.save_slot(holding) == slot
    manager.saved(holding, chain, 12)
    assert manager.num_saved_states == 0, "the slot holds another state by now"
    manager.check()
    manager.saved(holding, chain, 16)
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("state", 16)
    assert manager.save_slot(holding) == slot
    manager.release(holding)
    assert manager.num_free_slots == manager.num_slots
    assert manager.num_saved_states == 0
    manager.check()


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_copy_that_was_not_made_leaves_the_one_before_it(is_reported):
    manager = manager_of()
    holding, chain = run(manager, range(40))
    for _ in range(2):
        manager.save_slot(holding)
    if is_reported:
        manager.saved(holding, chain, 12)
    manager.unsaved(holding)
    manager.check()
    if not is_reported:
        manager.saved(holding, chain, 12)
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("state", 12)
    manager.release(holding)
    assert manager.num_free_slots == manager.num_slots
    manager.check()


def saved_as(manager, holding, chain, kind, position):
    slot = manager.save_slot(holding, kind, key=chain.keys[position // 4 - 1])
    if slot is not None:
        manager.saved(holding, chain, position)
        manager.check()
    return slot


def states_of(manager, chain):
    return [4 * (at + 1) for at, key in enumerate(chain.keys) if manager.states.find(key)]


@pytest.mark.parametrize("num_slots", [4, 5, 6, 9])
def test_what_was_asked_for_and_what_a_resend_needs_outlive_the_requests_own_progress(num_slots):
    manager = manager_of(num_slots=num_slots)
    holding, chain = run(manager, range(40))
    saved_as(manager, holding, chain, "progress", 4)
    saved_as(manager, holding, chain, "asked", 8)
    for kind, position in (("progress", 12), ("resend", 32), ("progress", 36), ("progress", 40)):
        saved_as(manager, holding, chain, kind, position)
    assert states_of(manager, chain) == ([8, 40] if num_slots == 4 else [8, 32, 40])


def test_progress_never_takes_the_slot_of_what_its_request_asked_for():
    manager = manager_of(num_slots=3)
    holding, chain = run(manager, range(40))
    assert saved_as(manager, holding, chain, "asked", 8) is not None
    assert saved_as(manager, holding, chain, "progress", 12) is None
    assert saved_as(manager, holding, chain, "resend", 16) is None
    assert states_of(manager, chain) == [8]
    assert saved_as(manager, holding, chain, "asked", 20) is not None
    manager.release(holding)
    other, _ = run(manager, range(100, 140))
    assert saved_as(manager, other, chain_of(range(100, 140)), "progress", 12) is not None, "another request may"
    assert states_of(manager, chain) == []


def test_a_state_that_is_there_is_not_saved_again():
    manager = manager_of(num_slots=4)
    _, chain = run(manager, range(40), saves=[12])
    second, _ = run(manager, range(12), saves=[])
    for kind in ("progress", "resend", "asked"):
        assert manager.save_slot(second, kind, key=chain.keys[2]) is None
    assert manager.num_free_slots == manager.num_slots - 2
    assert states_of(manager, chain) == [12]


def test_a_resend_state_of_a_session_pushes_no_other_session_out():
    """Two sessions need three slots beside the running one for the states that they continue from."""
    manager = manager_of(num_slots=5, num_pages=80)
    texts = {name: list(range(start, start + 20)) for name, start in (("a", 0), ("b", 1000))}
    for turn in range(6):
        for text in texts.values():
            chain = chain_of(text)
            hit = manager.plan_hit(chain, len(text))
            assert (hit.kind, hit.num_tokens) == (("state", len(text) - 8) if turn else ("none", 0))
            holding = manager.admit(chain, hit, len(text))
            manager.restored(holding)
            manager.publish(holding, chain, len(text))
            saved_as(manager, holding, chain, "resend", len(text) - 4)
            saved_as(manager, holding, chain, "progress", len(text))
            manager.release(holding)
            text += range(text[-1] + 1, text[-1] + 9)


@pytest.mark.parametrize(("num_slots", "num_left"), [(4, 1), (9, 1), (18, 2), (34, 4)])
def test_resend_states_keep_a_share_of_slots_that_are_all_in_use(num_slots, num_left):
    manager = manager_of(num_slots=num_slots, num_pages=600)
    for number in range(40):
        text = range(100 * number, 100 * number + 20)
        holding, chain = run(manager, text)
        saved_as(manager, holding, chain, "resend", 16)
        saved_as(manager, holding, chain, "progress", 20)
        manager.release(holding)
        assert states_of(manager, chain) == [16, 20], "the last one can be sent again"
    assert sum(state.is_resend for state in manager.states._by_key.values()) == num_left


def test_a_slot_that_nothing_was_copied_to_holds_the_state_before_again():
    manager = manager_of()
    holding, chain = run(manager, range(40), saves=[12])
    slot = manager.save_slot(holding)
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("none", 0), "it may be overwritten"
    manager.check()
    manager.unsaved(holding)
    manager.check()
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("state", 12)
    assert manager.save_slot(holding) == slot, "it is given up again for the next one"
    manager.saved(holding, chain, 24)
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("state", 24)
    manager.release(holding)
    assert manager.num_free_slots == manager.num_slots
    manager.check()


def test_a_slot_that_nothing_was_copied_to_is_free():
    manager = manager_of()
    holding, chain = run(manager, range(40))
    before = manager.num_free_slots
    assert manager.save_slot(holding) is not None
    assert manager.num_free_slots == before - 1
    manager.unsaved(holding)
    assert manager.num_free_slots == before
    assert manager.num_saved_states == 0
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("none", 0)
    manager.check()


def test_a_state_that_another_request_saved_meanwhile_stays_the_one_that_is_found():
    manager = manager_of(num_pages=40)
    first, chain = run(manager, range(40), saves=[12])
    slot = manager.save_slot(first)
    second, _ = run(manager, range(40), saves=[12])
    manager.unsaved(first)
    hit = manager.plan_hit(chain, 40, exact=True)
    assert kind_of(hit) == ("state", 12)
    assert hit.saved_slot != slot
    assert manager.num_saved_states == 1
    manager.check()
    manager.release(first)
    manager.release(second)
    assert manager.num_saved_states == 1
    manager.check()


def test_a_state_that_is_being_copied_from_is_not_given_up():
    manager = manager_of()
    first, chain = run(manager, range(40), saves=[12])
    second = manager.admit(chain, manager.plan_hit(chain, 40, exact=True), 40)
    assert manager.save_slot(first) != second.restore_from
    manager.unsaved(first)
    assert kind_of(manager.plan_hit(chain, 40, exact=True)) == ("state", 12)
    manager.check()


def test_a_request_that_ends_before_it_is_known_what_was_copied_leaves_no_state():
    manager = manager_of()
    holding, _ = run(manager, range(40), saves=[12])
    assert manager.save_slot(holding) is not None
    manager.release(holding)
    assert manager.num_saved_states == 0
    assert manager.num_free_slots == manager.num_slots
    manager.check()


def test_the_state_unused_longest_gives_way():
    manager = manager_of(num_slots=4, num_pages=60)
    a, b, c = (list(range(start, start + 40)) for start in (0, 100, 200))
    finished(manager, a, saves=[36])
    finished(manager, b, saves=[36])
    finished(manager, a, hit=manager.plan_hit(chain_of(a), 40))
    finished(manager, c, saves=[36])
    assert [manager.plan_hit(chain_of(tokens), 40).kind for tokens in (a, b, c)] == ["state", "replay", "state"]


def test_a_state_saved_again_is_unused_no_longer():
    manager = manager_of(num_slots=5, num_pages=60)
    a, b, c, d = (list(range(start, start + 40)) for start in (0, 100, 200, 300))
    finished(manager, a, saves=[36])
    finished(manager, b, saves=[36])
    finished(manager, a, saves=[36])
    finished(manager, c, saves=[36])
    holding, _ = run(manager, d)
    assert manager.save_slot(holding) is not None
    assert [manager.plan_hit(chain_of(tokens), 40).kind for tokens in (a, b, c)] == ["state", "replay", "state"]
    assert manager.num_saved_states == 2
    manager.check()


def test_a_state_whose_page_never_came_is_dropped():
    manager = manager_of()
    chain = chain_of(range(40))
    holding = manager.admit(chain, NO_HIT, 40)
    assert manager.save_slot(holding) is not None
    manager.saved(holding, chain, 36)
    assert manager.plan_hit(chain, 40) == NO_HIT
    manager.check()
    manager.release(holding)
    assert manager.num_saved_states == 0
    manager.check()


def test_a_state_goes_with_the_page_before_it():
    manager = manager_of(num_pages=12)
    finished(manager, range(40), saves=[40])
    assert manager.num_saved_states == 1
    finished(manager, range(100, 108))
    assert manager.num_saved_states == 0
    manager.check()


def test_of_two_equal_pages_one_is_found_and_the_other_takes_its_place():
    manager = manager_of()
    first, chain = run(manager, range(8))
    second, _ = run(manager, range(12))
    assert manager.index.pages(chain.keys) == first.page_ids.tolist()
    assert set(first.page_ids.tolist()).isdisjoint(second.page_ids.tolist())
    manager.release(first)
    assert manager.index.pages(chain.keys) == second.page_ids[:2].tolist()
    assert manager.num_cached_pages == 0
    manager.release(second)
    assert manager.num_cached_pages == 3
    assert [type(event).__name__ for event in manager.take_events()] == ["Stored", "Stored"]
    manager.check()


def test_a_page_table_is_never_changed_under_its_reader():
    manager = manager_of(num_pages=40)
    holding = manager.admit(chain_of(range(4)), NO_HIT, 4)
    views = []
    for num_tokens in range(4, 120, 4):
        assert manager.grow(holding, num_tokens)
        views.append((holding.page_ids, holding.page_ids.tolist()))
    assert all(view.tolist() == pages for view, pages in views)
    assert holding.page_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        holding.page_ids[0] = 1


def test_counts_add_up():
    manager = manager_of(num_pages=60)
    finished(manager, range(40), saves=[24])
    for tokens in (list(range(40)), list(range(28)), list(range(100, 120))):
        finished(manager, tokens, hit=manager.plan_hit(chain_of(tokens), len(tokens)))
    counts = manager.counts
    assert (counts.num_admitted, counts.num_replay_hits, counts.num_state_hits) == (4, 1, 1)
    assert (counts.num_asked_tokens, counts.num_hit_tokens, counts.num_replayed_tokens) == (128, 36 + 24, 4)
    assert manager.page_usage == manager.states.usage == 0


REPLAY = Hit(num_tokens=8, kind="replay", start=4, saved_slot=None, window_floor=4)
STATE = Hit(num_tokens=8, kind="state", start=8, saved_slot=3, window_floor=0)
LONGER = chain_of(range(60))


def forked_twice(manager, holding):
    child, _ = manager.fork(holding, 20)
    manager.fork(child, 20)


def saved_at(manager, holding, chain, position):
    manager.save_slot(holding)
    manager.saved(holding, chain, position)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda manager, holding, chain: manager.saved(holding, chain, 4), "was not chosen"),
        (lambda manager, holding, chain: manager.unsaved(holding), "was not chosen"),
        (lambda manager, holding, chain: saved_at(manager, holding, chain, 6), "page boundary"),
        (lambda manager, holding, chain: saved_at(manager, manager.admit(chain, REPLAY, 20), chain, 4), "inside a replay"),
        (lambda manager, holding, chain: manager.publish(holding, chain, 24), "more than keys or pages"),
        (lambda manager, holding, chain: manager.publish(holding, LONGER, 24), "more than keys or pages"),
        (lambda manager, holding, chain: manager.fork(holding, 24), "more than the request has pages for"),
        (lambda manager, holding, chain: manager.fork(manager.admit(chain, REPLAY, 20), 7), "when its replay is over"),
        (lambda manager, holding, chain: forked_twice(manager, holding), "not in the same plan"),
        (lambda manager, holding, chain: manager.admit(chain, REPLAY, 4), "fewer than the 8"),
        (lambda manager, holding, chain: manager.admit(chain, STATE, 20), "another state by now"),
        (lambda manager, holding, chain: manager.admit(chain_of([5] * 20), REPLAY, 20), "is gone by now"),
        (lambda manager, holding, chain: manager_of(replay_tokens=5), "replay_tokens=5 must be even"),
        (
            lambda manager, holding, chain: manager_of(enable_prefix_cache=False, record_events=False).take_events(),
            "record_events",
        ),
    ],
)
def test_wrong_use_is_named(wrong, message):
    manager = manager_of()
    holding, chain = run(manager, range(20))
    with pytest.raises(AssertionError, match=message):
        wrong(manager, holding, chain)


def test_planning_a_hit_of_100k_tokens_takes_less_than_50_ms():
    tokens = np.random.default_rng(0).integers(0, 129_280, 100_000).astype(np.int32)
    manager = manager_of(page_tokens=128, num_pages=2000, replay_tokens=128, margin=134)
    finished(manager, tokens, saves=[99_840])
    seconds = []
    for _ in range(5):
        start = time.process_time()
        hit = manager.plan_hit(chain_of(tokens, page_tokens=128), len(tokens))
        seconds.append(time.process_time() - start)
        assert kind_of(hit) == ("state", 99_840)
    assert min(seconds) < 0.05
