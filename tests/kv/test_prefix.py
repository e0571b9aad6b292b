"""Keys cover everything that a page's content depends on; the index finds one page for a key and reports changes."""

import hashlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kv.prefix import FORMAT_VERSION, KEY_BYTES, PageChain, PrefixIndex, Removed, Stored

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def chain_of(tokens, *, page_tokens=4, salt=b"", images=None):
    chain = PageChain(page_tokens, salt)
    chain.extend(np.array(tokens, dtype=np.int32), images or {})
    return chain


# -------------------------------------------------------------------------------------------------------------------- keys


def hashed(domain, *parts):
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES, person=domain).digest()


def test_keys_are_chained_hashes_of_framed_fields():
    root = hashed(b"root", struct.pack("<II", FORMAT_VERSION, 2), b"tenant")
    first = hashed(b"page", root, struct.pack("<iiI", 1, 256, 0))
    second = hashed(b"page", first, struct.pack("<iiIII", 2, 3, 1, 1, 3), b"cat")
    chain = chain_of([1, 256, 2, 3, 4], page_tokens=2, salt=b"tenant", images={3: b"cat"})
    assert chain.keys == [first, second]


@given(TOKENS, st.integers(1, 7), st.randoms(use_true_random=False))
def test_keys_do_not_depend_on_how_the_tokens_came(tokens, page_tokens, rng):
    images = {position: bytes([rng.randrange(3)]) for position in range(len(tokens)) if rng.random() < 0.2}
    chain, start = PageChain(page_tokens, b"s"), 0
    while start < len(tokens):
        end = rng.randint(start, len(tokens))
        chain.extend(np.array(tokens[start:end], dtype=np.int32), {at: each for at, each in images.items() if start <= at < end})
        start = end
        assert len(chain.keys) == start // page_tokens
    assert chain.num_tokens == len(tokens)
    assert chain.keys == chain_of(tokens, page_tokens=page_tokens, salt=b"s", images=images).keys


@given(TOKENS.filter(len), st.integers(1, 7), st.data())
def test_another_token_or_picture_changes_every_key_from_its_page_on(tokens, page_tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    plain = chain_of(tokens, page_tokens=page_tokens).keys
    cat, dog = (chain_of(tokens, page_tokens=page_tokens, images={at: image}).keys for image in (b"cat", b"dog"))
    for left, right in ((plain, chain_of(other, page_tokens=page_tokens).keys), (plain, cat), (cat, dog)):
        same = [a == b for a, b in zip(left, right, strict=True)]
        assert same == [index < at // page_tokens for index in range(len(plain))]


def test_a_picture_belongs_to_the_page_that_it_starts_in():
    tokens = [9] * 8
    keys = [chain_of(tokens, images={position: b"cat"}).keys for position in range(8)]
    assert len({tuple(each) for each in keys}) == 8
    assert all(each[0] == chain_of(tokens).keys[0] for each in keys[4:])


def test_pictures_are_told_apart_from_each_other_and_from_one_long_one():
    tokens = [9] * 4
    pairs = [{0: b"a", 1: b"b"}, {0: b"b", 1: b"a"}, {0: b"ab"}, {1: b"ab"}, {0: b"a"}, {0: b"", 1: b"ab"}]
    assert len({chain_of(tokens, images=images).keys[0] for images in pairs}) == len(pairs)


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=5, unique=True))
def test_tenants_have_no_key_in_common(salts):
    chains = [chain_of(range(12), salt=salt).keys for salt in salts]
    assert len({key for keys in chains for key in keys}) == 3 * len(salts)


ATOMS = (b"", b"a", b"\0", bytes(4), struct.pack("<i", 7), struct.pack("<ii", 1, 1), b"a" * 16)
"""Bytes that can be read as a salt, as token ids, or as the fields before a picture."""


def crafted(rng, chains):
    """A salt of a few atoms, or a salt that imitates bytes that another chain hashes."""
    parts = rng.choices(ATOMS, k=rng.randrange(3))
    if chains and rng.random() < 0.5:
        chain = rng.choice(chains)
        parts.insert(0, rng.choice([chain._root, *chain.keys]))
    return b"".join(parts)


def in_pieces(rng, tokens, images, page_tokens, salt):
    chain, start = PageChain(page_tokens, salt), 0
    while start < len(tokens):
        end = rng.randint(start + 1, len(tokens))
        chain.extend(np.array(tokens[start:end], np.int32), {at: each for at, each in images.items() if start <= at < end})
        start = end
    return chain


@settings(max_examples=60)
@given(st.integers(0, 2**32).map(random.Random))
def test_keys_are_equal_exactly_if_everything_before_them_is(rng):
    """Histories of sequences that differ in salt, tokens, pictures and page size: no part is mistaken for another part."""
    chains, said, roots = [], {}, set()
    for _ in range(12):
        page_tokens, salt = rng.choice([1, 2, 4]), crafted(rng, chains)
        tokens = rng.choices((0, 1, 7), k=rng.randrange(3 * page_tokens + 1))
        if rng.random() < 0.5:  # the tokens for which an unframed hash would take the salt
            tail = salt[len(salt) % 4 :]
            tokens = np.frombuffer(tail, "<i4").clip(0).tolist() + tokens
        images = {at: rng.choice(ATOMS) for at in range(len(tokens)) if rng.random() < 0.25}
        chain = chain_of(tokens, page_tokens=page_tokens, salt=salt, images=images)
        assert in_pieces(rng, tokens, images, page_tokens, salt).keys == chain.keys
        for index, key in enumerate(chain.keys):
            end = (index + 1) * page_tokens
            meaning = (page_tokens, salt, tuple(tokens[:end]), tuple((at, each) for at, each in images.items() if at < end))
            assert said.setdefault(key, meaning) == meaning, "two meanings have one key"
        chains.append(chain)
        roots.add(chain._root)
    assert len(set(said.values())) == len(said), "one meaning has two keys"
    assert not said.keys() & roots, "a root is no page"


@pytest.mark.parametrize("depth", range(3))
def test_a_salt_that_imitates_a_key_reaches_no_page(depth):
    """Without hash domains, the root of a crafted salt would be another tenant's page, and all later pages would be shared."""
    theirs = chain_of(range(16), salt=b"")
    before = [theirs._root, *theirs.keys][depth]
    page = struct.pack("<4i", *range(4 * depth, 4 * depth + 4))
    for salt in (before, before + page, before + page + struct.pack("<I", 0), struct.pack("<II", FORMAT_VERSION, 4) + before):
        ours = chain_of(range(4 * depth, 16), salt=salt)
        assert set(ours.keys).isdisjoint(theirs.keys)
        assert ours._root not in theirs.keys


def test_a_picture_that_reaches_into_the_next_page_tells_its_pages_apart():
    keys = [chain_of([9] * 12, images={2: image}).keys for image in (b"cat", b"dog", b"ca")]
    assert len({key for each in keys for key in each}) == 9


def test_two_pictures_that_change_places_are_others():
    keys = [chain_of([9] * 8, images=dict(zip((0, 5), order, strict=True))).keys for order in ((b"a", b"b"), (b"b", b"a"))]
    assert set(keys[0]).isdisjoint(keys[1])


def test_another_page_size_is_another_format():
    assert set(chain_of([9] * 8, page_tokens=4).keys).isdisjoint(chain_of([9] * 8, page_tokens=2).keys)


def test_a_copy_goes_its_own_way():
    chain = chain_of(range(6), images={5: b"cat"})
    twin = chain.copy()
    twin.extend(np.array([6, 7], dtype=np.int32))
    assert chain.keys == chain_of(range(4)).keys
    chain.extend(np.array([6, 8], dtype=np.int32))
    assert twin.keys == chain_of(range(8), images={5: b"cat"}).keys
    assert chain.keys == chain_of([*range(7), 8], images={5: b"cat"}).keys


def test_tokens_may_lie_anywhere_in_memory():
    spread = np.arange(16, dtype=np.int32)[::2]
    chain = PageChain(4)
    chain.extend(spread)
    assert chain.keys == chain_of(spread.tolist()).keys


def test_a_pending_token_has_no_key():
    with pytest.raises(AssertionError, match="pending token"):
        chain_of([1, 2, 3, -1])


@pytest.mark.parametrize("position", [-1, 8])
def test_a_picture_comes_with_its_tokens(position):
    with pytest.raises(AssertionError, match="not among the tokens"):
        chain_of(range(8), images={position: b"cat"})


# ------------------------------------------------------------------------------------------------------------------- index

KEYS = [bytes([number]) * KEY_BYTES for number in range(8)]


def references(*held):
    return [int(page in held) for page in range(10)]


def index_of(*pages, held=()):
    index = PrefixIndex(record_events=True)
    index.publish(pages, KEYS[: len(pages)], None, references(*(held or pages)))
    return index


@pytest.mark.parametrize("stored", range(5))
@pytest.mark.parametrize("limit", range(7))
def test_the_longest_stored_prefix_is_found(stored, limit):
    index = index_of(*range(1, stored + 1))
    assert index.find(KEYS, limit) == min(stored, limit)
    assert index.pages(KEYS[:stored]) == list(range(1, stored + 1))


def test_events_name_what_is_new_and_what_it_continues():
    index = index_of(1, 2)
    index.publish([3, 4], KEYS[2:4], KEYS[1], references(1, 2, 3, 4))
    for page in (4, 3):
        assert index.retire(page)
    assert index.remove([4, 3]) == [KEYS[3], KEYS[2]]
    assert index.take_events() == [
        Stored(keys=(KEYS[0], KEYS[1]), parent=None),
        Stored(keys=(KEYS[2], KEYS[3]), parent=KEYS[1]),
        Removed(keys=(KEYS[3], KEYS[2])),
    ]
    assert index.take_events() == []


def test_content_that_is_stored_already_is_no_event():
    index = index_of(1, 2)
    index.take_events()
    assert index.publish([5, 6, 7], KEYS[:3], None, references(1, 2, 5, 6, 7)) == []
    assert index.pages(KEYS[:3]) == [1, 2, 7]
    assert index.take_events() == [Stored(keys=(KEYS[2],), parent=KEYS[1])]


def test_a_twin_takes_the_place_of_a_page_that_is_left():
    index = index_of(1, 2)
    index.publish([5, 6], KEYS[:2], None, references(1, 2, 5, 6))
    assert not index.retire(2)
    assert not index.retire(1)
    assert index.pages(KEYS[:2]) == [5, 6]
    assert index.key_of(1) is None
    index.check(kept=[], num_references=references(5, 6))


def test_a_twin_that_is_left_is_forgotten():
    index = index_of(1)
    index.publish([5], KEYS[:1], None, references(1, 5))
    assert not index.retire(5)
    assert index.retire(1)
    index.check(kept=[1], num_references=references())


def test_a_held_page_displaces_an_equal_one_without_references():
    index = index_of(1, 2)
    assert index.retire(2)
    assert index.publish([5, 6], KEYS[:2], None, references(1, 5, 6)) == [2]
    assert index.pages(KEYS[:2]) == [1, 6]
    index.check(kept=[], num_references=references(1, 5, 6))


def test_pages_that_a_fork_shares_are_published_once():
    index = index_of(1, 2)
    index.publish([5], KEYS[:1], None, references(1, 2, 5))
    assert index.publish([5, 2], KEYS[:2], None, references(1, 2, 5)) == []
    assert not index.retire(5)
    assert index.retire(1)


def test_a_page_never_published_is_not_needed():
    assert not index_of(1).retire(2)


def test_a_page_has_one_key():
    with pytest.raises(AssertionError, match="second key"):
        index_of(1).publish([1], [KEYS[1]], None, references(1))


@pytest.mark.parametrize(
    ("kept", "held", "message"),
    [
        ([1, 2], (), "would outlive its parent"),
        ([1], (2,), "would outlive its parent"),
        ([2], (), "is free and can be found"),
        ([2, 1, 3], (), "cannot be found"),
    ],
)
def test_the_check_sees_a_wrong_order(kept, held, message):
    index = index_of(1, 2)
    index.check(kept=[2, 1], num_references=references())
    with pytest.raises(AssertionError, match=message):
        index.check(kept=kept, num_references=references(*held))


def test_events_are_kept_only_when_asked_for():
    index = PrefixIndex(record_events=False)
    index.publish([1], KEYS[:1], None, references(1))
    with pytest.raises(AssertionError, match="record_events=True"):
        index.take_events()
