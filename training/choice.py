"""Which compressed entries a query reads: scores of the indexer, the best of them, and candidate blocks.

On a GPU two kernels do this for all queries of a batch: one computes scores, one finds the value of the k-th best.

Source: model report, indexer; the arithmetic is that of :mod:`deepinfer.ops.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.packing import Packed

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA brings no Triton
    triton = None

_QUERIES, _ENTRIES = 64, 128
"""Scores of one program."""


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """score(t, j) = sum over heads of weight * max(0, q . key), with gradients.

    Args:
        q: [batch, num_queries, num_heads, index_head_dim].
        weights: [batch, num_queries, num_heads] wide.
        keys: [batch, num_entries, index_head_dim].

    Returns:
        [batch, num_queries, num_entries] in the dtype of ``weights``.
    """
    dots = torch.relu(torch.einsum("bqhd,bed->bqhe", q.to(weights.dtype), keys.to(weights.dtype)))
    return torch.einsum("bqhe,bqh->bqe", dots, weights)


@torch.no_grad()
def visible_scores(q: Tensor, weights: Tensor, keys: Tensor, packed: Packed, ratio: int) -> Tensor:
    """:func:`scores` of every token of a batch, -inf where it does not see the entry; no gradients."""
    if q.is_cuda:
        return _scores_on_gpu(q, weights, keys, packed, ratio)
    newest = torch.arange(keys.shape[1], device=q.device) * ratio + ratio - 1
    places = torch.arange(packed.length, device=q.device).view(-1, 1)
    same = packed.documents.unsqueeze(2) == packed.documents[:, newest].unsqueeze(1)
    return scores(q, weights, keys).masked_fill(~(same & (newest <= places)), -torch.inf)


@torch.no_grad()
def best(values: Tensor, count: int) -> Tensor:
    """The ``count`` highest of each row, never -inf; equal values by lower column.

    Args:
        values: [..., num_columns] wide.

    Returns:
        [..., num_columns] bool.
    """
    finite = values > -torch.inf
    if values.shape[-1] <= count:
        return finite
    if values.is_cuda:
        return _best_on_gpu(values, count)
    last = torch.topk(values, count, dim=-1).values[..., -1:]
    above = values > last
    level = (values == last) & finite
    room = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


@torch.no_grad()
def candidates(values: Tensor, ratio: int, count: int, size: int) -> Tensor:
    """Entries of the ``count`` best blocks of each row; the block of the newest visible entry is always among them.

    Args:
        values: [batch, length, num_entries] scores of every token, -inf where an entry is not visible.
        ratio: tokens of an entry.
        count: blocks.
        size: entries of a block; documents begin at multiples of a block.

    Returns:
        [batch, length, num_entries] bool, visible or not.
    """
    blocks = values.unflatten(-1, (-1, size)).amax(-1)
    newest = (torch.arange(values.shape[1], device=values.device).unsqueeze(1) + 1) // ratio - 1
    is_newest = torch.arange(blocks.shape[-1], device=values.device) == newest // size
    return best(blocks.masked_fill(is_newest, torch.inf), count).repeat_interleave(size, dim=-1)


if triton is not None:

    @triton.jit
    def _score(  # noqa: ANN202
        q,  # noqa: ANN001
        weights,  # noqa: ANN001
        keys,  # noqa: ANN001
        documents,  # noqa: ANN001
        values,  # noqa: ANN001
        length,  # noqa: ANN001
        num_entries,  # noqa: ANN001
        ratio: tl.constexpr,
        num_heads: tl.constexpr,
        width: tl.constexpr,
        block_queries: tl.constexpr,
        block_entries: tl.constexpr,
    ):
        """Scores of a tile of queries and entries; a tile that lies after its queries is not computed."""
        batch = tl.program_id(2).to(tl.int64)
        queries = tl.program_id(0) * block_queries + tl.arange(0, block_queries)
        entries = tl.program_id(1) * block_entries + tl.arange(0, block_entries)
        dims = tl.arange(0, width)
        newest = entries * ratio + ratio - 1
        is_query, is_entry = queries < length, entries < num_entries
        total = tl.zeros((block_queries, block_entries), dtype=tl.float32)
        is_open = tl.zeros((block_queries, block_entries), dtype=tl.int1)
        if tl.program_id(1) * block_entries * ratio < (tl.program_id(0) + 1) * block_queries:
            own = tl.load(documents + batch * length + queries, mask=is_query, other=-2)
            theirs = tl.load(documents + batch * length + newest, mask=is_entry, other=-3)
            is_open = (own[:, None] == theirs[None, :]) & (newest[None, :] <= queries[:, None])
            key = tl.load(
                keys + (batch * num_entries + entries[:, None]) * width + dims[None, :], mask=is_entry[:, None], other=0.0
            )
            for head in range(num_heads):
                row = (batch * length + queries) * num_heads + head
                query = tl.load(q + row[:, None] * width + dims[None, :], mask=is_query[:, None], other=0.0)
                weight = tl.load(weights + row, mask=is_query, other=0.0)
                total += weight[:, None] * tl.maximum(tl.dot(query, tl.trans(key)), 0.0)
        where = (batch * length + queries[:, None]) * num_entries + entries[None, :]
        tl.store(values + where, tl.where(is_open, total, float("-inf")), mask=is_query[:, None] & is_entry[None, :])

    @triton.jit
    def _mark_best(values, chosen, num_columns, count, width: tl.constexpr):  # noqa: ANN001, ANN202
        """Find the ``count``-th highest value of a row by halving the range of its bits; mark it and what is higher."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, width)
        is_column = columns < num_columns
        x = tl.load(values + row * num_columns + columns, mask=is_column, other=float("-inf"))
        bits = x.to(tl.int32, bitcast=True)
        keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # ordered as the numbers are
        low, high = tl.min(keys, axis=0), tl.max(keys, axis=0) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            is_enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= count
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        level = keys == low
        room = count - tl.sum((keys > low).to(tl.int32), axis=0)
        is_best = (keys > low) | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
        tl.store(chosen + row * num_columns + columns, (is_best & (x > float("-inf"))).to(tl.int8), mask=is_column)


def _scores_on_gpu(q: Tensor, weights: Tensor, keys: Tensor, packed: Packed, ratio: int) -> Tensor:
    num_heads, width = q.shape[-2:]
    num_entries = keys.shape[1]
    values = torch.empty(packed.batch, packed.length, num_entries, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(packed.length, _QUERIES), triton.cdiv(num_entries, _ENTRIES), packed.batch)
    inputs = (q.contiguous(), weights.contiguous(), keys.contiguous(), packed.documents, values, packed.length, num_entries)
    _score[grid](
        *inputs, ratio=ratio, num_heads=num_heads, width=width, block_queries=_QUERIES, block_entries=_ENTRIES, num_warps=4
    )
    return values


def _best_on_gpu(values: Tensor, count: int) -> Tensor:
    values = values.contiguous()
    num_columns = values.shape[-1]
    chosen = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    rows = values.numel() // num_columns
    width = triton.next_power_of_2(num_columns)
    _mark_best[(rows,)](values, chosen.view(torch.int8), num_columns, count, width=width, num_warps=4)
    return chosen
