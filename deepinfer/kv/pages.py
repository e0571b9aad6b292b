"""Who holds which page, and which slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer.errors import Overloaded


class FreeList:
    """Numbers 1 … size-1 handed out and taken back, first in, first out; 0 belongs to nobody.

    Invariant: a number is free or held, never both, never twice.
    """

    def __init__(self, size: int, what: str) -> None:
        """``size`` numbers including 0; ``what`` names them in errors."""
        self.size = size
        self._what = what
        self._free = deque(range(1, size))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Numbers that :meth:`take` can still give."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Numbers out of the house."""
        return len(self._held)

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out ``count`` numbers, or none.

        Raises:
            Overloaded: fewer are free.
        """
        if count > len(self._free):
            raise Overloaded(
                f"{count} {self._what} asked for, {len(self._free)} of {self.size - 1} are free; wait for a request to end"
            )
        taken = tuple(self._free.popleft() for _ in range(count))
        self._held.update(taken)
        return taken

    def give_back(self, numbers: Iterable[int]) -> None:
        """Take ``numbers`` back; each must be held."""
        for number in numbers:
            self._held.remove(number)
            self._free.append(number)

    def check(self) -> None:
        """Assert the invariant."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a free {self._what} is listed twice"
        assert not free & self._held, f"{self._what} both free and held: {sorted(free & self._held)}"
        assert free | self._held == set(range(1, self.size)), f"{self._what} lost"
