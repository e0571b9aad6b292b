"""Pages and slots are free, kept or held after any history."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.kv.pages import Pool


@given(st.integers(1, 12), st.lists(st.integers(0, 4), max_size=60), st.randoms(use_true_random=False))
def test_no_number_is_lost_or_held_by_more_than_its_references(size, operations, rng):
    pool, references, kept = Pool(size, "pages"), [], []
    for operation in operations:
        match operation:
            case 0:
                count = rng.randint(0, pool.num_free)
                taken = pool.take(count)
                assert len(set(taken)) == count
                assert not set(taken) & {*references, *kept}
                references += taken
            case 1 if references or kept:
                number = rng.choice([*references, *kept])
                pool.hold(number)
                references.append(number)
                kept = [each for each in kept if each != number]
            case 2 if references:
                number = references.pop(rng.randrange(len(references)))
                keep = rng.random() < 0.5
                pool.drop(number, keep=keep)
                kept += [number] * (keep and number not in references)
            case 3:
                count = rng.randint(0, len(kept))
                assert pool.evict(count) == kept[:count]
                kept = kept[count:]
            case 4 if kept:
                pool.free(kept.pop(rng.randrange(len(kept))))
        held = Counter(references)
        assert list(pool.kept) == kept
        assert list(pool.counts) == [held[number] for number in range(size)]
        assert (pool.num_held, pool.num_kept) == (len(held), len(kept))
        assert pool.num_available == size - 1 - len(held)
        assert pool.num_free == pool.num_available - len(kept)
        pool.check()


def test_zero_is_never_handed_out():
    assert sorted(Pool(4, "pages").take(3)) == [1, 2, 3]


def test_what_was_free_longest_is_handed_out_first():
    pool = Pool(5, "pages")
    for number in pool.take(2):
        pool.drop(number, keep=False)
    assert pool.take(4) == [3, 4, 1, 2]


def test_what_was_kept_longest_is_given_up_first_and_a_hold_renews():
    pool = Pool(4, "pages")
    for number in pool.take(3):
        pool.drop(number, keep=True)
    pool.hold(1)
    pool.drop(1, keep=True)
    assert list(pool.kept) == [2, 3, 1]
    assert pool.evict(2) == [2, 3]
    assert pool.take(2) == [2, 3]


def test_only_free_numbers_are_taken():
    pool = Pool(4, "pages")
    (number, *_) = pool.take(2)
    pool.drop(number, keep=True)
    with pytest.raises(AssertionError, match="2 pages asked for, 1 are free; evict before taking"):
        pool.take(2)
    pool.check()


def test_giving_back_what_is_not_held_is_our_bug():
    pool = Pool(4, "slots")
    (number,) = pool.take(1)
    pool.drop(number, keep=False)
    with pytest.raises(AssertionError, match="slots 1 given back more often than it was held"):
        pool.drop(number, keep=False)
    with pytest.raises(KeyError):
        pool.hold(number)
    with pytest.raises(KeyError):
        pool.free(number)
