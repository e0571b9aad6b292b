"""References to pages and to slots, and the order in which unreferenced ones are given up."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import KeysView, Sequence


class Pool:
    """Numbers 1 … size-1 with counted references.  Number 0 is never handed out.

    A number is *free*, or *held* by one or more references, or *kept*: it has no reference, but its content may be used again.
    Kept numbers are given up in the order in which they became kept.

    Invariant: every number is in exactly one of the three states, and it is held if and only if its count is positive.
    """

    def __init__(self, size: int, what: str) -> None:
        """Start with all numbers free; ``size`` includes 0, ``what`` names the numbers in messages."""
        self.size = size
        self._what = what
        self._free = deque(range(1, size))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._counts = [0] * size

    @property
    def num_free(self) -> int:
        """Numbers that :meth:`take` gives without an eviction."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Numbers that :meth:`evict` can set free."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Numbers without references."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Numbers with references."""
        return self.size - 1 - self.num_available

    @property
    def kept(self) -> KeysView[int]:
        """Kept numbers; the first is the next to be evicted."""
        return self._kept.keys()

    @property
    def counts(self) -> Sequence[int]:
        """[size] references to each number."""
        return self._counts

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` free numbers with one reference each; the number that was free longest comes first."""
        assert count <= len(self._free), f"{count} {self._what} asked for, {len(self._free)} are free; evict before taking"
        taken = [self._free.popleft() for _ in range(count)]
        for number in taken:
            self._counts[number] = 1
        return taken

    def hold(self, number: int) -> None:
        """Add a reference to a kept or held number."""
        if self._counts[number] == 0:
            del self._kept[number]
        self._counts[number] += 1

    def drop(self, number: int, *, keep: bool) -> None:
        """Take a reference back; if it was the last, the number becomes kept or free."""
        count = self._counts[number] - 1
        assert count >= 0, f"{self._what} {number} given back more often than it was held"
        self._counts[number] = count
        if count == 0 and keep:
            self._kept[number] = None
        elif count == 0:
            self._free.append(number)

    def free(self, number: int) -> None:
        """Set a kept number free: its content is of no more use."""
        del self._kept[number]
        self._free.append(number)

    def evict(self, count: int) -> list[int]:
        """Set ``count`` kept numbers free; returns them in the order in which they were given up."""
        evicted = [self._kept.popitem(last=False)[0] for _ in range(count)]
        self._free.extend(evicted)
        return evicted

    def check(self) -> None:
        """Assert the invariant."""
        free, kept = set(self._free), set(self._kept)
        held = {number for number, count in enumerate(self._counts) if count}
        assert min(self._counts) >= 0, f"{self._what}: a count of references is negative"
        assert len(free) == len(self._free), f"{self._what}: a free one is listed twice"
        assert not free & kept, f"{self._what} both free and kept: {sorted(free & kept)}"
        assert not (free | kept) & held, f"{self._what} both held and not: {sorted((free | kept) & held)}"
        assert free | kept | held == set(range(1, self.size)), f"{self._what} lost, or 0 handed out"
