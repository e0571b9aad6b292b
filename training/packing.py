"""Documents packed into sequences, and who sees whom in them.

A sequence holds whole documents, one after the other.  Each document begins at a multiple of ``align`` tokens, so that its groups
of two tokens and its candidate blocks are those that it has alone; what is left over is padding.  No token sees another document:
not through the window, not through compressed entries, not through n-grams; positions begin at 0 in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from deepinfer.config import ModelConfig

PADDING = -1
"""Position of a token that belongs to no document."""
_MASK_BLOCK = 128
"""Queries and keys of a block of the attention kernel's mask."""


def alignment(config: ModelConfig) -> int:
    """Tokens whose multiples documents begin at: whole compression groups, and whole candidate blocks of ratio 1."""
    return math.lcm(*(config.ratio(layer) for layer in config.kv_source_layer_ids), config.candidate_block_size)


def pack(lengths: npt.NDArray[np.int64], length: int, align: int) -> list[list[int]]:
    """Put documents into sequences, largest first, each into the fullest sequence that still has room.

    Args:
        lengths: [num_docs] tokens of each document, at most ``length``.
        length: tokens of a sequence; a multiple of ``align``.
        align: documents take a multiple of so many tokens.

    Returns:
        Document numbers of each sequence.
    """
    size = length // align
    rooms: list[list[list[int]]] = [[] for _ in range(size + 1)]  # sequences by the units that are left in them
    is_there = 0  # bit n: rooms[n] is not empty
    sequences: list[list[int]] = []
    units = -(-lengths // align)
    for number in np.argsort(-units, kind="stable").tolist():
        need = int(units[number])
        fitting = is_there >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            sequence = rooms[room].pop()
            if not rooms[room]:
                is_there &= ~(1 << room)
        else:
            sequence, room = [], size
            sequences.append(sequence)
        sequence.append(number)
        rooms[room - need].append(sequence)
        is_there |= 1 << (room - need)
    return sequences


@dataclass(frozen=True)
class Packed:
    """A batch of packed sequences.

    Attributes:
        token_ids: [batch, length] int64.
        positions: [batch, length] int64 position in the document, :data:`PADDING` for padding.
    """

    token_ids: Tensor
    positions: Tensor

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.token_ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.token_ids.shape[1]

    @cached_property
    def counted(self) -> Tensor:
        """[batch, length] int32 number of the document, never falling along a sequence; padding counts to what is before it."""
        return (self.positions == 0).cumsum(1, dtype=torch.int32)

    @cached_property
    def documents(self) -> Tensor:
        """[batch, length] int32 number of the document, -1 for padding."""
        return torch.where(self.positions >= 0, self.counted, -1)

    @cached_property
    def targets(self) -> Tensor:
        """[batch, length] int64 the next token of the same document; -100 where there is none."""
        follows = (self.positions[:, 1:] == self.positions[:, :-1] + 1) & (self.positions[:, :-1] >= 0)
        targets = torch.full_like(self.token_ids, -100)
        targets[:, :-1] = torch.where(follows, self.token_ids[:, 1:], -100)
        return targets


Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices that broadcast -> whether the query sees the key."""


def _visibility(documents: Tensor, ratio: int, window: int) -> Visible:
    """A closure over tensors and numbers only, as the compiler of the attention kernel wants it."""
    length = documents.shape[1]

    def window_only(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (key <= query) & (query - key < window)

    def with_store(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_token = key < length
        newest = torch.where(is_token, key, (key - length) * ratio + ratio - 1)  # the last token that the key knows
        is_open = (documents[batch, query] == documents[batch, newest]) & (newest <= query)
        return is_open & (~is_token | (query - key < window))

    return with_store if ratio else window_only


def _looked_up(table: Tensor) -> Visible:
    """Visibility out of ``table`` [batch, length, num_keys] bool; one load a key is all that the kernel does for it."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[batch, query, key]

    return visible


class Sight:
    """Who sees what in one attention layer: the layer's window, and entries of a store with ``ratio`` tokens each.

    Keys stand in one row: the sequence's ``length`` window keys, then its ``length / ratio`` entries.

    Attributes:
        ratio: 0 for layers without a store.
        num_keys: of a sequence.
        visible: for a query (a token's place) and a key.
    """

    def __init__(self, packed: Packed, ratio: int, window: int, chosen: Tensor | None = None) -> None:
        """With ``chosen`` [batch, length, num_entries] bool a query sees only those of the visible entries."""
        self.ratio = ratio
        self.num_keys = packed.length + (packed.length // ratio if ratio else 0)
        self._packed = packed
        self._window = window
        if chosen is None:
            self.visible = _visibility(packed.documents, ratio, window)
        else:
            self.visible = _looked_up(torch.cat([Sight(packed, 0, window).all_rows(), chosen], dim=-1))

    def rows(self, queries: Tensor) -> Tensor:
        """[batch, num_queries, num_keys] bool: :meth:`visible` for ``queries`` [batch, num_queries]."""
        device = queries.device
        batch = torch.arange(self._packed.batch, device=device).view(-1, 1, 1)
        keys = torch.arange(self.num_keys, device=device).view(1, 1, -1)
        return self.visible(batch, batch, queries.unsqueeze(-1), keys)

    def all_rows(self) -> Tensor:
        """[batch, length, num_keys] bool."""
        places = torch.arange(self._packed.length, device=self._packed.positions.device)
        return self.rows(places.expand(self._packed.batch, -1))

    @cached_property
    def blocks(self) -> BlockMask:
        """The mask of the attention kernel; its blocks follow from the documents' borders, not from single keys."""
        packed, size = self._packed, _MASK_BLOCK
        counted = packed.counted.unflatten(1, (-1, size))
        first, last = counted[..., 0], counted[..., -1]  # documents of each block of tokens
        number = torch.arange(first.shape[1], device=first.device)
        distance = number.unsqueeze(1) - number
        near = (distance >= 0) & (distance <= -(-(self._window - 1) // size))
        shares = (last.unsqueeze(1) >= first.unsqueeze(2)) & (first.unsqueeze(1) <= last.unsqueeze(2))
        parts = [near & shares]
        if self.ratio:
            span = packed.counted.unflatten(1, (-1, size * self.ratio))
            first_of, last_of = span[..., 0], span[..., -1]  # documents of each block of entries
            reaches = number.unsqueeze(1) // self.ratio >= torch.arange(first_of.shape[1], device=first.device)
            parts.append(reaches & (last_of.unsqueeze(1) >= first.unsqueeze(2)) & (first_of.unsqueeze(1) <= last.unsqueeze(2)))
        wanted = torch.cat(parts, dim=-1)
        counts = wanted.sum(-1, dtype=torch.int32).unsqueeze(1)
        indices = torch.argsort(wanted.int(), dim=-1, descending=True, stable=True).int().unsqueeze(1)
        return BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=size, mask_mod=self.visible, seq_lengths=(packed.length, self.num_keys)
        )
