"""Arithmetic whose bits do not depend on the batch: products, sums and norms; and the copy of host numbers to a device.

These functions are not operators.  The bodies of the reference use them, and code outside ``ops/`` that has no kernel.

Invariant: rows are independent, bit for bit.  The result of a row does not depend on the other rows or on the number of threads
(docs/decisions/0002).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

ROW_TILE = 32
"""Rows of every matrix product; see :func:`matmul_rows`."""
ITEM_TILE = 64
"""Items of every batched product on a GPU; see :func:`matmul_items`."""
_TRIED_TILES = 4
"""Number of random tiles that test whether the number of threads changes the bits of a product."""


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp64 for the exact regime, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for it.

    Not allowed during the capture of a graph: every replay would read the same host memory, which may hold other data by then.
    """
    if device.type == "cpu":
        return values
    assert not torch.cuda.is_current_stream_capturing(), "copy host numbers to the device before the capture of a graph"
    return values.pin_memory().to(device, non_blocking=True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the calling thread compute with ``count`` CPU threads; other threads keep their number.  Cost: 1 µs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, composed from ``exp``: torch.sigmoid rounds differently in the body and in the tail of a vector."""
    return torch.reciprocal(1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), without overflow; composed for the same reason as :func:`sigmoid`."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept, in an order that depends only on its width.

    On a CPU torch splits one long row over threads.  On a GPU its order of sums depends on the number of rows.  So on a CPU a
    long row is summed in two steps, each too short for the split.  On other devices halves are added until one column is left.
    """
    width = x.shape[-1]
    if x.device.type == "cpu":
        if width > 16384:
            padded = torch.nn.functional.pad(x, (0, -width % 256))
            x = padded.view(*x.shape[:-1], -(-width // 256), 256).sum(-1)
        return x.sum(-1, keepdim=True)
    x = torch.nn.functional.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim, which is kept; x in the accumulation dtype."""
    return torch.rsqrt(row_sum(x.square()) / x.shape[-1] + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), rounded once.

    Args:
        x: [..., width] bf16 or fp64.
        weight: [width] in the accumulation dtype.

    Returns:
        [..., width] in x's dtype.
    """
    wide = x.to(accumulation_dtype(x))
    return (wide * rms_scale(wide, eps) * weight).to(x.dtype)


@functools.cache
def _keeps_bits(width: int, out_width: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether a product of this shape has the same bits with ``num_threads`` threads as with one.

    With too few columns for its threads, a library splits the sums, and it computes left-over columns in another way.  The limit
    depends on the library, its version, the CPU's instructions and the dtype: [32, 1536] x [1536, 24] in fp32 differs from three
    threads on with AVX2, and from two threads on with AVX-512.  So each shape is tested once.
    """
    if num_threads == 1:
        return True
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (_TRIED_TILES * ROW_TILE, out_width))
    found = []
    for count in (1, num_threads):
        with threads(count):
            found.append(torch.cat([torch.mm(tile, w.t()) for tile in x.split(ROW_TILE)]))
    return torch.equal(*found)


def matmul_rows(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ, computed 32 rows at a time, so that a row's result does not depend on the number of rows.

    Libraries choose a kernel, and so the order of sums, by the number of rows.  A fixed shape fixes the choice.  On a CPU they
    also choose by the number of threads; see :func:`_keeps_bits`.

    Args:
        x: [num_rows, width]; widths are padded with zeros to a multiple of 4, because at other widths a row's bits depend on its
            index.
        w: [out_width, width], same dtype.

    Returns:
        [num_rows, out_width], same dtype; bf16 products are summed in fp32 and rounded once.

    Cost: ceil(num_rows / 32) products; up to 31 padding rows, and a copy of x with them.
    """
    num_rows, width = x.shape
    if width % 4:
        w = torch.nn.functional.pad(w, (0, -width % 4))
    if width % 4 or num_rows % ROW_TILE:
        x = torch.nn.functional.pad(x, (0, -width % 4, 0, -num_rows % ROW_TILE))
    wt = w.t()
    is_single_threaded = x.device.type == "cpu" and not _keeps_bits(x.shape[1], w.shape[0], x.dtype, torch.get_num_threads())
    with threads(1) if is_single_threaded else nullcontext():
        if x.shape[0] == ROW_TILE:
            return torch.mm(x, wt)[:num_rows]
        out = x.new_empty(x.shape[0], w.shape[0])
        for start in range(0, x.shape[0], ROW_TILE):
            torch.mm(x[start : start + ROW_TILE], wt, out=out[start : start + ROW_TILE])
        return out[:num_rows]


def matmul_items(a: Tensor, b: Tensor) -> Tensor:
    """Batched product; the bits of an item do not depend on the number of items.

    On a CPU every item is a product of its own.  A GPU library chooses a kernel by the number of items too, so on a GPU that
    number is fixed.

    Args:
        a: [num_items, m, k].
        b: [num_items, k, n], same dtype.

    Returns:
        [num_items, m, n], same dtype.
    """
    if a.device.type == "cpu":
        return torch.bmm(a, b)
    num_items = a.shape[0]
    out = a.new_empty(-(-num_items // ITEM_TILE) * ITEM_TILE, a.shape[1], b.shape[2])
    for first in range(0, num_items, ITEM_TILE):
        count = min(ITEM_TILE, num_items - first)
        tiles = []
        for each in (a, b):  # copied, so that strides are the same in every call
            tile = each.new_zeros(ITEM_TILE, *each.shape[1:])
            tile[:count] = each[first : first + count]
            tiles.append(tile)
        torch.bmm(*tiles, out=out[first : first + ITEM_TILE])
    return out[:num_items]


def gemm_dtype(device: torch.device) -> torch.dtype:
    """Dtype of dequantised weights on ``device``.

    Every FP8 and FP4 weight is exact in bf16.  A CPU without bf16 instructions is many times slower with bf16 than with fp32,
    which gives the same products, summed in the same precision.
    """
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Linear layer with a bf16 (or fp32) weight, upcast, summed and returned in the accumulation dtype.

    Used for router, compressor, index head weights, hyper-connection maps and LM head.

    Args:
        x: [num_tokens, in_width] bf16, fp32 or fp64.
        weight: [out_width, in_width] in the accumulation dtype of x.

    Returns:
        [num_tokens, out_width] fp32 (or fp64).
    """
    return matmul_rows(x.to(weight.dtype), weight)
