"""Which prefixes are stored: keys of pages, and the index from a key to the page with its content.

The key of a page covers everything that its content depends on: all tokens up to the page's end, the pictures among them, the
tenant, and the format of the records.  If a key is found, the whole prefix before it may be used.

Invariant: two keys are equal only if everything that they cover is equal.  The hashed bytes say where each part ends, and roots
and pages have different hash domains, so no salt, token or picture imitates another key.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
FORMAT_VERSION = 1
"""Goes up when the records of a page or the parts of a key change."""
_ROOT, _PAGE = b"root", b"page"
_NO_IMAGES: Mapping[int, bytes] = MappingProxyType({})
_NO_IMAGE = struct.pack("<I", 0)


def _digest(domain: bytes, *parts: bytes | memoryview) -> bytes:
    state = blake2b(digest_size=KEY_BYTES, person=domain)
    for part in parts:
        state.update(part)
    return state.digest()


class PageChain:
    """Keys of the full pages of one token sequence that grows at its end.

    key_{-1} = H_root(format version, page_tokens, salt); key_i = H_page(key_{i-1}, token ids of page i as little-endian int32,
    number of pictures that start in page i, then for each of them: its offset in the page, the length of its content hash, the
    hash).  All fields but the salt, which comes last, have a fixed size or a length before them.

    Invariant: ``len(keys) == num_tokens // page_tokens``.

    Attributes:
        page_tokens: tokens of a page.
        keys: of all full pages, in order; readers must not change them.
        num_tokens: tokens so far.
    """

    def __init__(self, page_tokens: int, salt: bytes = b"") -> None:
        """Start an empty sequence.  Sequences of different ``salt`` share no key."""
        self.page_tokens = page_tokens
        self.keys: list[bytes] = []
        self.num_tokens = 0
        self._root = _digest(_ROOT, struct.pack("<II", FORMAT_VERSION, page_tokens), salt)
        self._tail = bytearray()  # tokens after the last full page
        self._image_hashes: dict[int, bytes] = {}  # pictures that start among them

    def extend(self, token_ids: npt.NDArray[np.int32], image_hashes: Mapping[int, bytes] = _NO_IMAGES) -> None:
        """Append tokens.

        Args:
            token_ids: [num_tokens] int32, all known.
            image_hashes: position in the sequence -> content hash of the picture that starts there; within the appended tokens.

        Cost: one hash for each completed page, about 1 µs for 128 tokens; otherwise a copy of the tokens.
        """
        start, page_bytes = self.num_tokens, 4 * self.page_tokens
        for position, content in image_hashes.items():
            assert start <= position < start + len(token_ids), f"image at {position} is not among the tokens it comes with"
            self._image_hashes[position] = content
        self._tail += np.ascontiguousarray(token_ids, dtype="<i4").data
        self.num_tokens += len(token_ids)
        num_full = len(self._tail) // page_bytes
        if num_full == 0:
            return
        tokens = bytes(self._tail[: num_full * page_bytes])
        del self._tail[: num_full * page_bytes]
        assert np.frombuffer(tokens, dtype="<i4").min() >= 0, "a page with a pending token has no key; extend by known tokens"
        self._append_keys(memoryview(tokens), page_bytes)

    def _append_keys(self, tokens: memoryview, page_bytes: int) -> None:
        key = self.keys[-1] if self.keys else self._root
        for start in range(0, len(tokens), page_bytes):
            hashes = self._hashes_of_page(len(self.keys)) if self._image_hashes else _NO_IMAGE
            key = _digest(_PAGE, key, tokens[start : start + page_bytes], hashes)
            self.keys.append(key)

    def _hashes_of_page(self, index: int) -> bytes:
        first = index * self.page_tokens
        inside = sorted(position for position in self._image_hashes if position < first + self.page_tokens)
        parts = [(position - first, self._image_hashes.pop(position)) for position in inside]
        framed = [struct.pack("<II", offset, len(content)) + content for offset, content in parts]
        return struct.pack("<I", len(framed)) + b"".join(framed)

    def copy(self) -> PageChain:
        """A copy of the sequence, which may continue differently."""
        twin = PageChain(self.page_tokens)
        twin.keys, twin.num_tokens, twin._root = self.keys.copy(), self.num_tokens, self._root
        twin._tail, twin._image_hashes = self._tail.copy(), self._image_hashes.copy()
        return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Pages can be found from now on.

    Attributes:
        keys: each is the parent of the next one.
        parent: key of the page before the first; None at the start of the sequence.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Pages can no longer be found.

    Attributes:
        keys: children before parents.
    """

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    page: int
    parent: bytes | None


class PrefixIndex:
    """Key -> the page with its content.

    Two requests that compute the same content at the same time each hold a page of it.  The page written first is found.  The
    other page, its *twin*, takes its place when the last holder leaves the first page.  The page that is found is therefore held
    as long as a request holds a page with that content.  A request that holds a page with a key holds a page for each key before
    it: parents are left after children.

    Invariant: a key's parent is in the index and is given up after the key.  A page has at most one key.  All pages of a key with
    twins are held.
    """

    def __init__(self, *, record_events: bool) -> None:
        """Start empty; ``record_events`` keeps a log for :meth:`take_events`."""
        self._entries: dict[bytes, _Entry] = {}
        self._key_of: dict[int, bytes] = {}
        self._twins: dict[bytes, list[int]] = {}
        self._events: list[Stored | Removed] | None = [] if record_events else None

    def __len__(self) -> int:
        """Keys that can be found."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether ``key`` can be found."""
        return key in self._entries

    def find(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first ``limit`` keys of a chain are stored.  If a key is stored, all keys before it are."""
        return bisect_left(range(limit), True, key=lambda i: keys[i] not in self._entries)

    def pages(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of stored keys."""
        entries = self._entries
        return [entries[key].page for key in keys]

    def publish(
        self, pages: Sequence[int], keys: Sequence[bytes], parent: bytes | None, num_references: Sequence[int]
    ) -> list[int]:
        """Let consecutive pages of a chain be found; a request holds them.

        Args:
            parent: the key before them, which is stored; None at the start of the sequence.
            num_references: [number of pages] references to each page.

        Returns:
            Pages that no request holds and that the index no longer needs, because one of ``pages`` took their place.
        """
        stored: list[bytes] = []
        displaced: list[int] = []
        for page, key in zip(pages, keys, strict=True):
            known = self._key_of.get(page)
            assert known in (None, key), f"page {page} is published under a second key; its content cannot have changed"
            entry = self._entries.get(key)
            if entry is None:  # then no key after it is stored either
                self._entries[key] = _Entry(page, parent)
                stored.append(key)
            elif known is None and num_references[entry.page]:
                self._twins.setdefault(key, []).append(page)
            elif known is None:
                self._entries[key] = _Entry(page, entry.parent)
                displaced.append(entry.page)
                del self._key_of[entry.page]
            self._key_of[page] = parent = key
        if stored and self._events is not None:
            self._events.append(Stored(keys=tuple(stored), parent=self._entries[stored[0]].parent))
        return displaced

    def retire(self, page: int) -> bool:
        """The last holder leaves ``page``; returns whether the index still needs the page."""
        key = self._key_of.get(page)
        if key is None:
            return False
        entry, twins = self._entries[key], self._twins.get(key)
        if entry.page == page:
            if twins is None:
                return True
            self._entries[key] = _Entry(twins.pop(0), entry.parent)
        else:
            assert twins is not None, f"page {page} has a key but is not listed under it"
            twins.remove(page)
        if not twins:
            del self._twins[key]
        del self._key_of[page]
        return False

    def remove(self, pages: Sequence[int]) -> list[bytes]:
        """Forget ``pages``, which no request holds, children before parents; returns their keys in order."""
        keys = [self._key_of.pop(page) for page in pages]
        for key in keys:
            del self._entries[key]
        if keys and self._events is not None:
            self._events.append(Removed(keys=tuple(keys)))
        return keys

    def take_events(self) -> list[Stored | Removed]:
        """Pages stored and removed since the last call, in order."""
        assert self._events is not None, "events are not recorded; construct with record_events=True"
        events, self._events = self._events, []
        return events

    def key_of(self, page: int) -> bytes | None:
        """Key of the content of ``page``."""
        return self._key_of.get(page)

    def check(self, kept: Iterable[int], num_references: Sequence[int]) -> None:
        """Assert the invariant against the pool: its ``kept`` pages, next to go first, and [size] references of each page."""
        listed = {entry.page: key for key, entry in self._entries.items()}
        order = {page: position for position, page in enumerate(kept)}
        assert order.keys() <= listed.keys(), "a kept page cannot be found"
        for key, twins in self._twins.items():
            assert twins, "a list of twins is empty"
            assert all(num_references[page] for page in (self._entries[key].page, *twins)), "a page with twins is not held"
            for page in twins:
                assert page not in listed, f"page {page} is listed twice"
                listed[page] = key
        assert listed == self._key_of, "keys of pages and pages of keys disagree"
        never = len(order)
        for entry in self._entries.values():
            assert num_references[entry.page] or entry.page in order, f"page {entry.page} is free and can be found"
            if entry.parent is not None:
                assert entry.parent in self._entries, "a page outlived its parent"
                parent = self._entries[entry.parent].page
                before, after = order.get(entry.page, never), order.get(parent, never)
                assert before < after or after == never, f"page {entry.page} would outlive its parent {parent}"
