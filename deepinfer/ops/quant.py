"""Number formats: quantisers, packed weights, cache records, and the products that use them.

Formats (bit layouts in :func:`pack_fp4` and :func:`pack_fp8`):

    E4M3    8-bit float, no infinities, largest 448
    E2M1    4-bit float: sign and {0, .5, 1, 1.5, 2, 3, 4, 6}; two in a byte, the even element in the low nibble
    UE8M0   8-bit power of two, byte b is 2^(b-127); byte 255 is not a number

Every body serves two numeric regimes.  Production: activations are bf16, sums are fp32, and a result is rounded once.  Exact:
activations are fp64 and only the quantisers round; golden values are checked in this regime.  The dtype of the activations
selects the regime.

Invariant: in every format, a block with a NaN decodes to at least one NaN.  E2M1 has no NaN, so the scale of such a block is NaN.

Invariant: rows are independent, bit for bit.  The result of a row does not depend on the other rows, so batching, chunking and
padding change nothing (docs/decisions/0002).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import accumulation_dtype, matmul_rows, to_device
from deepinfer.ops.op import Codes, op

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    """2^ceil(log2 x) of positive normal floats: adding a mantissa of ones carries into the exponent unless the mantissa is 0."""
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
        # The library converts through fp32, which would round twice.  So round to the grid (spacing 2^(e-3), e >= -6) first.
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
    scale = torch.where(largest.isnan(), largest, scale)  # E2M1 has no code for NaN
    return _to_e2m1(blocks / scale), scale


# --------------------------------------------------------------------------------------------------------------------- quantisers


def round_mxfp8(x: Tensor) -> Tensor:
    """Round rows to E4M3 with one power-of-two scale per 32 values, as FP8 and FP4 linear layers read their input.

    Args:
        x: [..., width] bf16, fp32 or fp64; width a multiple of 32.

    Returns:
        Same shape and dtype (E4M3 times a power of two is exact in bf16).

    Source: scale 2^ceil(log2(max(m, 1e-4) / 448)), code RNE of x / scale.
    """
    codes, scale = _mxfp8(x, 32)
    return (codes.to(scale.dtype) * scale).flatten(-2).to(x.dtype)


def round_mxfp4(x: Tensor) -> Tensor:
    """Round rows to E2M1 with one power-of-two scale per 32 values, the format of index queries.

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


def encode_window(x: Tensor) -> Tensor:
    """Window records: E4M3 values, then one UE8M0 scale per 32 of them.

    Args:
        x: [..., head_dim] normed and rotated keys.

    Returns:
        [..., head_dim + head_dim / 32] uint8 (528 bytes for 512 dims).
    """
    codes, scale = _mxfp8(x, 32)
    return torch.cat([codes.flatten(-2).view(torch.uint8), _ue8m0_byte(scale)], dim=-1)


def decode_window(records: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Keys [..., head_dim] of window records [..., record_bytes], exact in ``dtype`` (fp32 or fp64)."""
    codes = records[..., :head_dim].view(torch.float8_e4m3fn).to(dtype)
    scale = _ue8m0(records[..., head_dim:], dtype)
    result: Tensor = (codes.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return result


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


def decode_main(records: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Keys [..., head_dim] of compressed entries [..., record_bytes], exact in ``dtype`` (fp32 or fp64)."""
    values = _unpair(records[..., : head_dim // 2], dtype)
    scale = records[..., head_dim // 2 :].view(torch.float8_e4m3fn).to(dtype)
    result: Tensor = (values.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)
    return result


def encode_index(x: Tensor) -> Tensor:
    """Index keys: packed E2M1 values, then one UE8M0 scale per 32 of them.

    Args:
        x: [..., index_head_dim] normed and rotated index keys.

    Returns:
        [..., index_head_dim / 2 + index_head_dim / 32] uint8 (68 bytes for 128 dims).
    """
    codes, scale = _mxfp4(x)
    return torch.cat([_pair(codes.flatten(-2)), _ue8m0_byte(scale)], dim=-1)


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
    """A quantised weight; a backend may add more in its own layout.

    Attributes:
        codes: as stored (E4M3 or packed E2M1).
        scale: as stored (UE8M0).
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight(PackedWeight):
    """A weight of the reference: the checkpoint's bytes, and the values that they encode.

    Attributes:
        dense: [..., out_width, in_width] the dequantised matrix, exact.
    """

    dense: Tensor


def dense(weight: PackedWeight) -> Tensor:
    """The dequantised matrix of a weight that the reference has packed."""
    assert isinstance(weight, DenseWeight), "the weight was packed while another backend was bound"
    return weight.dense


@op(tolerance=0.0)
def repack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Lay out an FP8 matrix [..., out_width, in_width] for :func:`linear_fp8`; runs once at load."""
    return DenseWeight(codes=codes, scale=scale, dense=unpack_fp8(codes, scale, dtype))


@op(tolerance=0.0)
def repack_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Lay out stacked MXFP4 matrices [num_experts, out_width, in_width] for ``moe.experts``; runs once at load."""
    return DenseWeight(codes=codes, scale=scale, dense=unpack_fp4(codes, scale, dtype))


@op(tolerance=0.0)
def unpack(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes and scale of a packed weight, bit for bit as in the checkpoint; the inverse of ``repack_*``."""
    return weight.codes, weight.scale


# ----------------------------------------------------------------------------------------------------------------------- products


@runtime_checkable
class QuantisedRows(Protocol):
    """Quantised activations: rows of E4M3 numbers with power-of-two scales, as FP8 and FP4 linear layers read them.

    The layout belongs to the backend.  The reference keeps the numbers (:class:`RoundedRows`); another backend may keep codes and
    one scale per 128 of them.  Operators make and read these values.  Code outside ``ops/`` selects rows and passes values on,
    but does not read them.
    """

    def rows(self, index: Tensor) -> QuantisedRows:
        """The activations of some tokens, ``index`` [num_rows] int64, in that order."""
        ...

    def values(self) -> Tensor:
        """[num_tokens, width] the numbers that the codes encode, exact, in the dtype of activations.

        For bodies of the reference and for checks of a backend.
        """
        ...


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Quantised activations of the reference.

    Attributes:
        rounded: [num_tokens, width] bf16 or fp64, a result of :func:`round_mxfp8`.
    """

    rounded: Tensor

    def rows(self, index: Tensor) -> RoundedRows:
        """See :class:`QuantisedRows`."""
        return RoundedRows(self.rounded[index])

    def values(self) -> Tensor:
        """See :class:`QuantisedRows`."""
        return self.rounded


# Share 0: nothing is computed before the rounding.
@op(tolerance=Codes("mxfp8", share=0.0))
def quantise(x: Tensor) -> QuantisedRows:
    """Quantise an input that no other operator has quantised.

    Args:
        x: [num_tokens, width] bf16 (or fp64); width a multiple of 32.

    Returns:
        [num_tokens, width] quantised.
    """
    return RoundedRows(round_mxfp8(x))


@op(tolerance=4e-3)
def linear_fp8(x8: QuantisedRows, weight: PackedWeight) -> Tensor:
    """FP8 linear layer.

    Args:
        x8: [num_tokens, in_width] quantised.
        weight: [out_width, in_width].

    Returns:
        [num_tokens, out_width] bf16 (or fp64), the dtype of activations.

    Tolerance: products of E4M3 values are exact, their sum is fp32.
    """
    x = x8.values()
    matrix = dense(weight)
    return matmul_rows(x.to(matrix.dtype), matrix).to(x.dtype)


@op(tolerance=4e-3)
def linear_fp8_grouped(x: Tensor, weight: PackedWeight) -> Tensor:
    """One linear layer per group of heads (``wo_a``); its input is not quantised, as in the original program.

    Args:
        x: [num_tokens, num_groups, in_width] bf16 (or fp64).
        weight: [num_groups * out_width, in_width], group after group.

    Returns:
        [num_tokens, num_groups * out_width] in x's dtype.
    """
    num_groups = x.shape[1]
    parts = dense(weight).unflatten(0, (num_groups, -1))
    x = x.to(parts.dtype)
    return torch.cat([matmul_rows(x[:, g].contiguous(), parts[g]) for g in range(num_groups)], dim=-1).to(x.dtype)
