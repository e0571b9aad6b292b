"""Operators of the vision tower; one picture per call.

Rounding: weights and activations are bf16, and operators compute in fp32.  The results of operators, of linear layers and of RoPE
are rounded once each.  fp64 activations and weights are never rounded.

Invariant: the result of a picture depends only on that picture, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import accumulation_dtype, matmul_rows, rms_norm, sigmoid
from deepinfer.ops.op import op

NORM_EPS: Final = 1e-6
"""Epsilon of the tower's norms; the configuration file does not contain it, and the text model uses another value."""

_BF16_STEP: Final = 2.0**-8
"""Largest relative error of one rounding to bf16, and the unit of the tolerances below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlock:
    """Weights of one pre-norm block.

    Attributes:
        norm1, norm2: [hidden_size] in the accumulation dtype.
        wqkv, wqkv_bias: [3 x hidden_size, hidden_size], [3 x hidden_size]; outputs of q, k, v, each in the order of heads.
        wo, wo_bias: [hidden_size, hidden_size], [hidden_size].
        w1: [2 x intermediate_size, hidden_size]; outputs of the gate, then of up.
        w2: [hidden_size, intermediate_size].
    """

    norm1: Tensor
    wqkv: Tensor
    wqkv_bias: Tensor
    wo: Tensor
    wo_bias: Tensor
    norm2: Tensor
    w1: Tensor
    w2: Tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[num_rows, in_width] -> [num_rows, out_width] in x's dtype: products, sum and bias in fp32, one rounding."""
    wide = accumulation_dtype(x)
    out = matmul_rows(x.to(wide), weight.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


def rope_table(grid_h: int, grid_w: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotation of every patch: half of a head's pairs rotate with the grid row, the other half with the grid column.

    Args:
        grid_h, grid_w: patches down and across.
        head_dim: multiple of 4.
        theta: base of the frequencies f_k = theta^(-4k / head_dim), k < head_dim / 4.

    Returns:
        cos, sin: [grid_h x grid_w, head_dim / 2] fp64; row-major patches; angles row·f_0, row·f_1, ..., col·f_0, col·f_1, ...

    Source: model report, vision section; ``rope_theta`` of ``vision_config``.
    """
    exponents = torch.arange(head_dim // 4, dtype=torch.float64, device=device) * (-4 / head_dim)
    frequencies = torch.pow(theta, exponents)
    down = torch.arange(grid_h, device=device)[:, None] * frequencies
    across = torch.arange(grid_w, device=device)[:, None] * frequencies
    by_row = down[:, None].expand(-1, grid_w, -1)
    by_column = across[None].expand(grid_h, -1, -1)
    angles = torch.cat([by_row, by_column], dim=-1).reshape(grid_h * grid_w, head_dim // 2)
    return torch.cos(angles), torch.sin(angles)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[num_patches, num_heads, head_dim] with dims (m, m + head_dim / 2) rotated by angle m; computed wide, rounded once."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# 0: only moves bytes.
@op(tolerance=0.0)
def patchify(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut a picture into square patches.

    Args:
        pixels: [3, height, width]; both multiples of patch_size.

    Returns:
        [num_patches, 3 x patch_size²]; patches row-major, values in channel, row, column order.

    Source: model report, vision section; ``patch_size``.
    """
    channels, height, width = pixels.shape
    split = pixels.reshape(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return split.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch_size * patch_size)


# One rounding to bf16.
@op(tolerance=_BF16_STEP)
def patch_embed(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Linear map of patches [num_patches, 3 x patch_size²] to [num_patches, hidden_size], same dtype."""
    return _linear(patches, weight, bias)


# Four roundings to bf16 (qkv, RoPE, attention, output); backends may round the probabilities as well.
@op(tolerance=4 * _BF16_STEP)
def vision_attention(x: Tensor, block: VisionBlock, cos: Tensor, sin: Tensor) -> Tensor:
    """wo · attention(norm1(x)) + bias: every patch sees every patch of the picture.

    Args:
        x: [num_patches, hidden_size], one picture.
        block: weights.
        cos, sin: [num_patches, head_dim / 2] of :func:`rope_table`; their width fixes the head size.

    Returns:
        [num_patches, hidden_size] in x's dtype, to be added to x.

    Source: model report, vision section; scale head_dim^-0.5, no sink.  Cost: num_patches² x hidden_size x 4 operations.
    """
    wide = accumulation_dtype(x)
    head_dim = 2 * cos.shape[-1]
    qkv = _linear(rms_norm(x, block.norm1, NORM_EPS), block.wqkv, block.wqkv_bias)
    q, k, v = qkv.view(x.shape[0], 3, -1, head_dim).unbind(1)
    cos, sin = cos.to(wide), sin.to(wide)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    q, k, v = (part.to(wide).transpose(0, 1)[None] for part in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return _linear(mixed[0].transpose(0, 1).flatten(1).to(x.dtype), block.wo, block.wo_bias)


# Three roundings to bf16 (gate and up, their product, output).
@op(tolerance=3 * _BF16_STEP)
def vision_mlp(x: Tensor, block: VisionBlock) -> Tensor:
    """w2 · (silu(gate) * up) of norm2(x); no clamp, no bias.

    Args:
        x: [num_patches, hidden_size].

    Returns:
        [num_patches, hidden_size] in x's dtype, to be added to x.

    Source: model report, vision section.
    """
    gate, up = _linear(rms_norm(x, block.norm2, NORM_EPS), block.w1).to(accumulation_dtype(x)).chunk(2, dim=-1)
    return _linear((gate * sigmoid(gate) * up).to(x.dtype), block.w2)


# 0: only moves bytes.
@op(tolerance=0.0)
def cells(x: Tensor, grid_h: int, grid_w: int, ratio: int) -> Tensor:
    """Join ratio x ratio neighbouring patches into one vector; the grid is filled with zeros below and on the right.

    Args:
        x: [grid_h x grid_w, hidden_size], row-major.

    Returns:
        [num_tokens, hidden_size x ratio²], row-major; index = channel x ratio² + row x ratio + column.

    Source: model report, vision section; ``downsample_ratio``.
    """
    grid = x.view(grid_h, grid_w, -1)
    grid = torch.nn.functional.pad(grid, (0, 0, 0, -grid_w % ratio, 0, -grid_h % ratio))
    split = grid.view(grid.shape[0] // ratio, ratio, grid.shape[1] // ratio, ratio, -1)
    return split.permute(0, 2, 4, 1, 3).reshape(-1, x.shape[-1] * ratio * ratio)


# Three roundings to bf16 (first map, GELU, second map).
@op(tolerance=3 * _BF16_STEP)
def aligner(x: Tensor, w1: Tensor, w1_bias: Tensor, w2: Tensor, w2_bias: Tensor) -> Tensor:
    """Map cells to embeddings of the text model: linear, exact GELU, linear.

    Args:
        x: [num_tokens, vision hidden_size x ratio²].

    Returns:
        [num_tokens, hidden_size] in x's dtype.

    Source: model report, vision section.
    """
    inner = _linear(x, w1, w1_bias).to(accumulation_dtype(x))
    # Composed from erf, which rounds the same at every index; torch's gelu rounds differently in the tail of a vector.
    inner = 0.5 * inner * (1 + torch.erf(inner * 0.5**0.5))
    return _linear(inner.to(x.dtype), w2, w2_bias)
