"""Number formats: quantisers, packed weights, cache records, and the products that use them.

Formats (bit layouts in :func:`pack_fp4` and :func:`pack_fp8`):

    E4M3    8-bit float, no infinities, largest 448
    E2M1    4-bit float: sign and {0, .5, 1, 1.5, 2, 3, 4, 6}; two a byte, the even element in the low nibble
    UE8M0   8-bit power of two, byte b is 2^(b-127); byte 255 is not a number

Two numeric regimes share every body.  Production: activations bf16, sums fp32, one rounding at the end.  Exact: activations
fp64 and nothing is rounded but by the quantisers themselves; golden values are checked in it.  The dtype of the activations
decides.

Invariant: a block that holds a NaN is decoded to NaN somewhere, in every format: E2M1 has none, so its scale says it.

Invariant: rows are independent, bit for bit.  A result for one row never depends on which rows stand beside it, so batching,
chunking and padding cannot change anything (docs/decisions/0002).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.op import op

E4M3_MAX = 448.0
E2M1_MAX = 6.0
ROW_TILE = 32
"""Rows of every matrix product; see :func:`matmul_rows`."""
ITEM_TILE = 64
"""Items of every batched product on a GPU; see :func:`matmul_items`."""
_TRIED_TILES = 4
"""Tiles of random numbers that show whether a team of threads changes the bits of a product."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ---------------------------------------------------------------------------------------------------------------- building blocks


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp64 for the exact regime, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for it.

    Never inside a captured graph, which would read the same host memory in every replay, whoever has it then.
    """
    if device.type == "cpu":
        return values
    assert not torch.cuda.is_current_stream_capturing(), "what a graph reads from the host is an input of it"
    return values.pin_memory().to(device, non_blocking=True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let this thread compute with a team of ``count`` on a CPU; other threads keep theirs.  Cost: 1 µs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function out of ``exp``: torch.sigmoid rounds differently in a vector's body and in its tail."""
    return torch.reciprocal(1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), without overflow; composed for the same reason as :func:`sigmoid`."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept, in an order that depends on its width alone.

    torch splits one long row over threads on a CPU, and on a GPU the order of sums follows the number of rows.  On a CPU two
    short sums stay below the split; elsewhere halves are added until one column is left.
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
    """Whether a product of this shape has the same bits with so many threads as with one, on this CPU and with this library.

    A library with more threads than columns to give them splits the sums, and it treats columns left over in another way.
    Where that begins depends on the library, its version, the instructions and the type: [32, 1536] x [1536, 24] in fp32
    differs from three threads on with AVX2, and from two on with AVX-512.  So it is tried, once for each shape.
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
    """x wᵀ, computed 32 rows at a time so that a row's result does not depend on how many rows there are.

    Libraries choose kernels, and with them the order of sums, by the number of rows.  A fixed shape pins the choice.  The
    number of threads is the other thing that they look at on a CPU; see :func:`_keeps_bits`.

    Args:
        x: [num_rows, width]; brought to a multiple of 4 by zeros, because at odd widths a row's bits change with its place.
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
    is_alone = x.device.type == "cpu" and not _keeps_bits(x.shape[1], w.shape[0], x.dtype, torch.get_num_threads())
    with threads(1) if is_alone else nullcontext():
        if x.shape[0] == ROW_TILE:
            return torch.mm(x, wt)[:num_rows]
        out = x.new_empty(x.shape[0], w.shape[0])
        for start in range(0, x.shape[0], ROW_TILE):
            torch.mm(x[start : start + ROW_TILE], wt, out=out[start : start + ROW_TILE])
        return out[:num_rows]


def matmul_items(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, each item's bits independent of how many items there are.

    On a CPU every item is a product of its own.  A GPU's library chooses by the number of items too, so there it is pinned.

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
    """What dequantised weights are kept in on ``device``.

    Every FP8 and FP4 weight is exact in bf16, so bf16 loses nothing; a CPU without bf16 instructions is many times slower with
    it than with fp32, which gives the same products summed in the same precision.
    """
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


@functools.cache
def _table(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Decoding tables: ``ue8m0`` [256] powers of two, ``e2m1`` [256, 2] both nibbles of a byte."""
    if name == "ue8m0":
        powers = [2.0 ** (byte - 127) for byte in range(255)]
        values = torch.tensor([*powers, torch.nan], dtype=torch.float64).to(dtype)
    else:
        signed = _E2M1 + tuple(-value for value in _E2M1)
        values = torch.tensor([(signed[byte & 15], signed[byte >> 4]) for byte in range(256)], dtype=dtype)
    return to_device(values, device)


def _ceil_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive normal floats: adding all ones below the exponent carries into it unless they are zeros."""
    if x.dtype == torch.float64:
        return ((x.view(torch.int64) + ((1 << 52) - 1)) & -(1 << 52)).view(torch.float64)
    return ((x.view(torch.int32) + ((1 << 23) - 1)) & -(1 << 23)).view(torch.float32)


def _ue8m0_byte(scale: Tensor) -> Tensor:
    """UE8M0 bytes [...] of powers of two [..., 1]; 255 for a NaN."""
    is_double = scale.dtype == torch.float64
    exponent = (scale.view(torch.int64) >> 52) - (1023 - 127) if is_double else scale.view(torch.int32) >> 23
    return exponent.clamp_max(255).to(torch.uint8).squeeze(-1)


def _to_e4m3(x: Tensor) -> Tensor:
    """Round to nearest even on the E4M3 grid; input clamped to ±448."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    if x.dtype == torch.float64:
        # The library converts through fp32, which would round twice; land on the grid (spacing 2^(e-3), e >= -6) here first.
        exponent = ((x.view(torch.int64) >> 52) & 0x7FF).clamp_min(1023 - 6) - 3
        quantum = (exponent << 52).view(torch.float64)
        x = torch.round(x / quantum) * quantum
    return x.to(torch.float8_e4m3fn)


def _to_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0..15) by round to nearest even; input clamped to ±6; the sign of zero is kept.

    Source: midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 go to the even code.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _pair(codes: Tensor) -> Tensor:
    """Pack codes [..., 2n] into bytes [..., n], even element low."""
    pairs = codes.unflatten(-1, (-1, 2))
    result: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return result


def _unpair(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., 2n] of packed E2M1 bytes [..., n]."""
    return _table("e2m1", packed.device, dtype)[packed.long()].flatten(-2)


def _ue8m0(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _table("ue8m0", scale.device, dtype)[scale.long()]


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., width] -> [..., width / size, size] in the accumulation dtype."""
    result: Tensor = x.to(accumulation_dtype(x)).unflatten(-1, (-1, size))
    return result


def _mxfp8(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """E4M3 codes by blocks of ``size``, and their scales [..., blocks, 1]."""
    blocks = _blocks(x, size)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = _ceil_power_of_two(largest * (1 / E4M3_MAX))
    return _to_e4m3(blocks / scale), scale


def _mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes by blocks of 32, and their scales [..., blocks, 1]; the scale of a block with a NaN is NaN."""
    blocks = _blocks(x, 32)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = _ceil_power_of_two(largest / E2M1_MAX)
    scale = torch.where(largest.isnan(), largest, scale)  # no E2M1 code can say it
    return _to_e2m1(blocks / scale), scale


# --------------------------------------------------------------------------------------------------------------------- quantisers


@op(tolerance=0.0)
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to E4M3 with one power-of-two scale per 32 values.

    Args:
        x: [..., width] bf16, fp32 or fp64; width a multiple of 32.

    Returns:
        codes: [..., width] float8_e4m3fn.
        scale: [..., width / 32] uint8, UE8M0.

    Source: scale 2^ceil(log2(max(m, 1e-4) / 448)), code RNE of x / scale.
    """
    codes, scale = _mxfp8(x, 32)
    return codes.flatten(-2), _ue8m0_byte(scale)


@op(tolerance=0.0)
def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantize_mxfp8` with one scale per 128 values: the form that matrix units without block-32 scaling take.

    Args:
        x: [..., width] bf16, fp32 or fp64; width a multiple of 128.

    Returns:
        codes: [..., width] float8_e4m3fn.
        scale: [..., width / 128] uint8, UE8M0.
    """
    codes, scale = _mxfp8(x, 128)
    return codes.flatten(-2), _ue8m0_byte(scale)


@op(tolerance=0.0)
def round_mxfp8(x: Tensor) -> Tensor:
    """Values of :func:`quantize_mxfp8`'s result: what an FP8 or FP4 linear layer sees of its input.

    Args:
        x: [..., width]; width a multiple of 32.

    Returns:
        Same shape and dtype (E4M3 times a power of two is exact in bf16).
    """
    codes, scale = _mxfp8(x, 32)
    return (codes.to(scale.dtype) * scale).flatten(-2).to(x.dtype)


@op(tolerance=0.0)
def round_mxfp4(x: Tensor) -> Tensor:
    """Round rows to E2M1 with one power-of-two scale per 32 values: index queries.

    Args:
        x: [..., width]; width a multiple of 32.

    Returns:
        Same shape and dtype.

    Source: scale 2^ceil(log2(max(m, 6 * 2^-126) / 6)), code RNE of x / scale clamped to ±6.
    """
    codes, scale = _mxfp4(x)
    values = _table("e2m1", x.device, scale.dtype)[codes.long()][..., 0]
    return (values * scale).flatten(-2).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------------ cache records


@op(tolerance=0.0)
def encode_window(x: Tensor) -> Tensor:
    """Window records: E4M3 values, then one UE8M0 scale per 32 of them.

    Args:
        x: [..., head_dim] normed and rotated keys.

    Returns:
        [..., head_dim + head_dim / 32] uint8 (528 bytes for 512 dims).
    """
    codes, scale = _mxfp8(x, 32)
    return torch.cat([codes.flatten(-2).view(torch.uint8), _ue8m0_byte(scale)], dim=-1)


@op(tolerance=0.0)
def decode_window(records: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Keys [..., head_dim] of window records [..., record_bytes], exact in ``dtype`` (fp32 or fp64)."""
    codes = records[..., :head_dim].view(torch.float8_e4m3fn).to(dtype)
    scale = _ue8m0(records[..., head_dim:], dtype)
    result: Tensor = (codes.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return result


@op(tolerance=0.0)
def encode_main(x: Tensor) -> Tensor:
    """Compressed entries: packed E2M1 values, then one E4M3 scale per 16 of them.

    Args:
        x: [..., head_dim] rotated latents.

    Returns:
        [..., head_dim / 2 + head_dim / 16] uint8 (288 bytes for 512 dims).

    Source: scale E4M3 RNE of clamp(m / 6, 2^-9, 448); code RNE of x / decoded scale clamped to ±6.
    """
    blocks = _blocks(x, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = _to_e4m3((largest / E2M1_MAX).clamp_min(2.0**-9))
    codes = _to_e2m1(blocks / scale.to(blocks.dtype))
    return torch.cat([_pair(codes.flatten(-2)), scale.squeeze(-1).view(torch.uint8)], dim=-1)


@op(tolerance=0.0)
def decode_main(records: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Keys [..., head_dim] of compressed entries [..., record_bytes], exact in ``dtype`` (fp32 or fp64)."""
    values = _unpair(records[..., : head_dim // 2], dtype)
    scale = records[..., head_dim // 2 :].view(torch.float8_e4m3fn).to(dtype)
    result: Tensor = (values.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)
    return result


@op(tolerance=0.0)
def encode_index(x: Tensor) -> Tensor:
    """Index keys: packed E2M1 values, then one UE8M0 scale per 32 of them.

    Args:
        x: [..., index_head_dim] normed and rotated index keys.

    Returns:
        [..., index_head_dim / 2 + index_head_dim / 32] uint8 (68 bytes for 128 dims).
    """
    codes, scale = _mxfp4(x)
    return torch.cat([_pair(codes.flatten(-2)), _ue8m0_byte(scale)], dim=-1)


@op(tolerance=0.0)
def decode_index(records: Tensor, index_head_dim: int, dtype: torch.dtype) -> Tensor:
    """Index keys [..., index_head_dim] of their records [..., record_bytes], exact in ``dtype`` (fp32 or fp64)."""
    values = _unpair(records[..., : index_head_dim // 2], dtype)
    scale = _ue8m0(records[..., index_head_dim // 2 :], dtype)
    result: Tensor = (values.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return result


# ----------------------------------------------------------------------------------------------------------------- packed weights


def pack_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix as the checkpoint stores it: E4M3 with one UE8M0 scale per 32 x 32 block.

    Args:
        w: [..., out_width, in_width] float.

    Returns:
        codes: [..., out_width, in_width] float8_e4m3fn.
        scale: [..., ceil(out_width / 32), ceil(in_width / 32)] uint8.

    Source: scale 2^ceil(log2(max|w| / 448)).
    """
    rows, cols = w.shape[-2:]
    padded = torch.nn.functional.pad(w.to(accumulation_dtype(w)), (0, -cols % 32, 0, -rows % 32))
    tiles = padded.unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))
    largest = tiles.abs().amax((-1, -3), keepdim=True).clamp_min(E4M3_MAX * 2.0**-126)
    scale = _ceil_power_of_two(largest / E4M3_MAX)
    codes = _to_e4m3(tiles / scale).flatten(-2).flatten(-3, -2)
    return codes[..., :rows, :cols].contiguous(), _ue8m0_byte(scale).squeeze(-2)


def unpack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that :func:`pack_fp8` stored, exact in ``dtype`` (bf16, fp32 or fp64)."""
    rows, cols = codes.shape[-2:]
    wide = _ue8m0(scale, torch.float32).repeat_interleave(32, -1).repeat_interleave(32, -2)
    return (codes.float() * wide[..., :rows, :cols]).to(dtype)


def pack_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix as MXFP4: packed E2M1 with one UE8M0 scale per 32 inputs of a row.

    Args:
        w: [..., out_width, in_width] float; in_width a multiple of 32.

    Returns:
        packed: [..., out_width, in_width / 2] uint8, even element in the low nibble.
        scale: [..., out_width, in_width / 32] uint8.

    Source: scale 2^ceil(log2(max|w| / 6)).
    """
    codes, scale = _mxfp4(w)
    return _pair(codes.flatten(-2)), _ue8m0_byte(scale)


def unpack_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that :func:`pack_fp4` stored, exact in ``dtype`` (bf16, fp32 or fp64)."""
    values = _unpair(packed, torch.float32).unflatten(-1, (-1, 32))
    result: Tensor = (values * _ue8m0(scale, torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)
    return result


def pack_table(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise lookup rows: E4M3 with one UE8M0 scale per 32 values of a row.

    Args:
        w: [num_rows, width] float; width a multiple of 32.

    Returns:
        codes: [num_rows, width] float8_e4m3fn.
        scale: [num_rows, width / 32] uint8.
    """
    blocks = _blocks(w, 32)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(E4M3_MAX * 2.0**-126)
    scale = _ceil_power_of_two(largest / E4M3_MAX)
    return _to_e4m3(blocks / scale).flatten(-2), _ue8m0_byte(scale)


def unpack_table(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that :func:`pack_table` stored, exact in ``dtype`` (bf16, fp32 or fp64)."""
    values = codes.float().unflatten(-1, (-1, 32))
    result: Tensor = (values * _ue8m0(scale, torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A quantised weight in the reference backend's layout: the checkpoint's bytes, and the values they stand for.

    Attributes:
        codes: as stored (E4M3 or packed E2M1).
        scale: as stored (UE8M0).
        dense: [..., out_width, in_width] the dequantised matrix, exact.
    """

    codes: Tensor
    scale: Tensor
    dense: Tensor


@op(tolerance=0.0)
def repack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Lay out an FP8 matrix [..., out_width, in_width] for :func:`linear_fp8`; runs once at load."""
    return PackedWeight(codes=codes, scale=scale, dense=unpack_fp8(codes, scale, dtype))


@op(tolerance=0.0)
def repack_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Lay out stacked MXFP4 matrices [num_experts, out_width, in_width] for ``moe.experts``; runs once at load."""
    return PackedWeight(codes=codes, scale=scale, dense=unpack_fp4(codes, scale, dtype))


@op(tolerance=0.0)
def unpack(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """The checkpoint's codes and scale out of a packed weight, every bit; the inverse of ``repack_*``."""
    return weight.codes, weight.scale


# ----------------------------------------------------------------------------------------------------------------------- products


@op(tolerance=4e-3)
def linear_fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """FP8 linear layer on activations that are on the MXFP8 grid already.

    Args:
        x: [num_tokens, in_width] bf16 (or fp64), a result of :func:`round_mxfp8`.
        weight: [out_width, in_width].

    Returns:
        [num_tokens, out_width] in x's dtype.

    Tolerance: the rounding of the bf16 result; products of E4M3 values are exact, their sum is fp32.
    """
    return matmul_rows(x.to(weight.dense.dtype), weight.dense).to(x.dtype)


@op(tolerance=4e-3)
def linear_fp8_grouped(x: Tensor, weight: PackedWeight) -> Tensor:
    """One linear layer per group of heads (``wo_a``); its input stays unrounded, as in the original program.

    Args:
        x: [num_tokens, num_groups, in_width] bf16 (or fp64).
        weight: [num_groups * out_width, in_width], group after group.

    Returns:
        [num_tokens, num_groups * out_width] in x's dtype.
    """
    num_groups = x.shape[1]
    parts = weight.dense.unflatten(0, (num_groups, -1))
    x = x.to(weight.dense.dtype)
    return torch.cat([matmul_rows(x[:, g].contiguous(), parts[g]) for g in range(num_groups)], dim=-1).to(x.dtype)


@op(tolerance=1e-5)
def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Linear layer with a bf16 (or fp32) weight, upcast, summed and returned in the accumulation dtype.

    Router, compressor, index head weights, hyper-connection maps, LM head.

    Args:
        x: [num_tokens, in_width] bf16, fp32 or fp64.
        weight: [out_width, in_width] in the accumulation dtype of x.

    Returns:
        [num_tokens, out_width] fp32 (or fp64).
    """
    return matmul_rows(x.to(weight.dtype), weight)
