"""Numbers of pages and slots are free or held, whatever is taken and given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import Overloaded
from deepinfer.kv.pages import FreeList


@given(st.integers(1, 20), st.lists(st.integers(0, 6), max_size=40), st.randoms(use_true_random=False))
def test_no_number_is_lost_or_held_twice(size, counts, rng):
    pages, held = FreeList(size, "pages"), []
    for count in counts:
        if count > pages.num_free:
            with pytest.raises(Overloaded):
                pages.take(count)
            if held:
                pages.give_back(held.pop(rng.randrange(len(held))))
        else:
            held.append(pages.take(count))
            assert len(held[-1]) == count
        out = [page for taken in held for page in taken]
        assert len(out) == len(set(out)) == pages.num_held
        assert set(out) <= set(range(1, size))
        assert pages.num_free + len(out) == size - 1
        pages.check()


def test_zero_is_never_handed_out():
    pages = FreeList(4, "pages")
    assert sorted(pages.take(3)) == [1, 2, 3]


def test_what_was_free_longest_is_handed_out_first():
    pages = FreeList(5, "pages")
    first = pages.take(2)
    pages.give_back(first)
    assert pages.take(4) == (3, 4, 1, 2)


def test_too_large_a_take_says_so_and_changes_nothing():
    pages = FreeList(5, "pages")
    pages.take(3)
    with pytest.raises(Overloaded, match=r"^2 pages asked for, 1 of 4 are free; wait for a request to end$"):
        pages.take(2)
    assert pages.num_free == 1
    pages.check()


@pytest.mark.parametrize("wrong", [(0,), (4,), (1, 1)])
def test_giving_back_what_is_not_held_is_our_bug(wrong):
    pages = FreeList(5, "pages")
    pages.take(2)
    with pytest.raises(KeyError):
        pages.give_back(wrong)
