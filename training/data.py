"""Shards -> batches of packed sequences, in an order that a seed fixes.

A shard is a folder with ``tokens.npy`` [num_tokens] uint16, ``starts.npy`` [num_docs + 1] int64 and ``kinds.npy`` [num_docs]
uint8; document ``i`` is ``tokens[starts[i] : starts[i + 1]]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from training.packing import PADDING, Packed, pack

_PACKED_TOGETHER = 16384
"""Documents that are packed at a time: many, so that little room is lost, and few, so that an epoch mixes well."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Documents.

    Attributes:
        tokens: [num_tokens] uint16.
        starts: [num_docs + 1] int64.
        kinds: [num_docs] uint8.
    """

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]

    @classmethod
    def read(cls, folders: list[Path]) -> Shard:
        """The documents of all folders."""
        columns = [[np.load(folder / f"{name}.npy") for folder in folders] for name in ("tokens", "starts", "kinds")]
        lengths = np.concatenate([np.diff(each) for each in columns[1]])
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(tokens=np.concatenate(columns[0]), starts=starts, kinds=np.concatenate(columns[2]))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a reader stands: ``next_sequence`` of the epoch ``epoch``."""

    epoch: int = 0
    next_sequence: int = 0


def sequences(shard: Shard, *, length: int, align: int, seed: int, epoch: int) -> list[list[int]]:
    """Documents of each sequence of an epoch; documents longer than ``length`` are cut there."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(shard.kinds))
    lengths = np.minimum(np.diff(shard.starts), length)
    found: list[list[int]] = []
    for first in range(0, len(order), _PACKED_TOGETHER):
        part = order[first : first + _PACKED_TOGETHER]
        found += [part[each].tolist() for each in map(np.array, pack(lengths[part], length, align))]
    return [found[number] for number in rng.permutation(len(found))]


def fill(shard: Shard, rows: list[list[int]], *, length: int, align: int, pad_id: int) -> tuple[Packed, torch.Tensor]:
    """The batch of some sequences, on the CPU, and the kind of each token's document [batch, length] uint8."""
    token_ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    positions = np.full((len(rows), length), PADDING, dtype=np.int64)
    kinds = np.zeros((len(rows), length), dtype=np.uint8)
    for row, documents in enumerate(rows):
        first = 0
        for number in documents:
            start = int(shard.starts[number])
            count = min(int(shard.starts[number + 1]) - start, length)
            place = slice(first, first + count)
            token_ids[row, place] = shard.tokens[start : start + count]
            positions[row, place] = np.arange(count)
            kinds[row, place] = shard.kinds[number]
            first += -(-count // align) * align
    return Packed(torch.from_numpy(token_ids), torch.from_numpy(positions)), torch.from_numpy(kinds)


def batches(
    shard: Shard, place: Place, *, size: int, length: int, align: int, pad_id: int, seed: int
) -> Iterator[tuple[Packed, Place]]:
    """Batches of ``size`` sequences from ``place`` on, without an end, each with the place after it."""
    epoch, first = place.epoch, place.next_sequence
    while True:
        rows = sequences(shard, length=length, align=align, seed=seed, epoch=epoch)
        while first + size <= len(rows):
            batch, _ = fill(shard, rows[first : first + size], length=length, align=align, pad_id=pad_id)
            first += size
            yield batch, Place(epoch=epoch, next_sequence=first)
        epoch, first = epoch + 1, 0
