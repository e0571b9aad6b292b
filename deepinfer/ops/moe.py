"""Mixture of experts: route, compute, combine.

Source: model report, expert section; ``n_routed_experts``, ``num_experts_per_tok``, ``routed_scaling_factor``, ``swiglu_limit``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import (
    ROW_TILE,
    accumulation_dtype,
    linear_bf16,
    matmul_items,
    matmul_rows,
    row_sum,
    sigmoid,
    softplus,
)
from deepinfer.ops.op import op
from deepinfer.ops.quant import PackedWeight, QuantisedRows, RoundedRows, dense, linear_fp8, round_mxfp8

_TILE_WEIGHT_BYTES = 256 << 20
"""Bytes of weights that :func:`_products_in_tiles` gathers at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedPicks:
    """Picks sorted by expert; a pick is a token with one of its chosen experts.

    Attributes:
        order: [num_tokens * top_k] int64, flat pick numbers (token * top_k + choice), sorted by expert, then by token.
        counts: [num_experts] int64 picks per expert.
    """

    order: Tensor
    counts: Tensor


@op(tolerance=(0.0, 1e-5))
def route(
    x: Tensor, gate: Tensor, bias: Tensor, bias_image: Tensor, is_image: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts; the bias steers the choice, not the mix.

    Args:
        x: [num_tokens, hidden] bf16 or fp64.
        gate: [num_experts, hidden] wide.
        bias, bias_image: [num_experts] wide; the second for image positions.
        is_image: [num_tokens] bool.
        top_k: experts per token.
        scale: sum of a token's weights.

    Returns:
        expert_ids: [num_tokens, top_k] int64, best first, equal scores by lower id.
        expert_weights: [num_tokens, top_k] wide.

    If a score or a bias of a token is NaN, its weights are NaN.

    Source: score sqrt(softplus(gate x)); weight = scale * score / (sum of chosen + 1e-20).
    """
    scores = torch.sqrt(softplus(linear_bf16(x, gate)))
    steered = scores + torch.where(is_image.unsqueeze(1), bias_image, bias)
    ordered, expert_ids = torch.sort(steered, dim=-1, descending=True, stable=True)  # a NaN sorts first
    expert_ids = expert_ids[:, :top_k]
    chosen = torch.where(ordered[:, :1].isnan(), torch.nan, scores.gather(1, expert_ids))
    return expert_ids, scale * chosen / (row_sum(chosen) + 1e-20)


@op(tolerance=0.0)
def sort_picks(expert_ids: Tensor, num_experts: int) -> SortedPicks:
    """Sort picks by expert, ties in token order.

    Args:
        expert_ids: [num_tokens, top_k] int64.
        num_experts: number of experts.
    """
    flat = expert_ids.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return SortedPicks(order=order, counts=counts.scatter_add_(0, flat, torch.ones_like(flat)))


def _swiglu(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, ±limit) * weight, rounded to MXFP8.

    The routing weight is applied before the input of the down projection is quantised, as in the original program.
    """
    wide = accumulation_dtype(gate_up)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    gate = gate.clamp_max(limit)
    hidden = gate * sigmoid(gate) * up.clamp(-limit, limit)
    if weight is not None:
        hidden = hidden * weight
    return round_mxfp8(hidden.to(gate_up.dtype))


@op(tolerance=2e-2)
def experts(
    x8: QuantisedRows, expert_weights: Tensor, picks: SortedPicks, w13: PackedWeight, w2: PackedWeight, limit: float
) -> Tensor:
    """Compute every pick with its expert.

    Args:
        x8: [num_tokens, hidden] quantised.
        expert_weights: [num_tokens, top_k] wide.
        picks: picks of the same tokens.
        w13: [num_experts, 2 * inter, hidden] gate rows, then up rows.
        w2: [num_experts, hidden, inter].
        limit: clamp of gate and up.

    Returns:
        [num_tokens, top_k, hidden] in the dtype of activations, weighted.

    Tolerance: if the intermediate value rounds to another code, it changes by up to 6 %.
    """
    x = x8.values()
    num_tokens, top_k = expert_weights.shape
    products = _products_of_hit_experts if x.device.type == "cpu" else _products_in_tiles
    first, second = dense(w13), dense(w2)
    gate_up = products(x.to(first.dtype)[picks.order // top_k], picks, first).to(x.dtype)
    hidden = _swiglu(gate_up, expert_weights.flatten()[picks.order].unsqueeze(1), limit)
    down = products(hidden.to(second.dtype), picks, second).to(x.dtype)
    return torch.empty_like(down).index_copy_(0, picks.order, down).view(num_tokens, top_k, down.shape[1])


def _products_of_hit_experts(rows: Tensor, picks: SortedPicks, matrices: Tensor) -> Tensor:
    """Multiply ``rows`` [num_picks, in_width], sorted by expert, by their experts' matrices; reads the counts on the host."""
    parts, first = [rows.new_empty(0, matrices.shape[1])], 0
    for expert, count in enumerate(picks.counts.tolist()):
        if count:
            parts.append(matmul_rows(rows[first : first + count], matrices[expert]))
            first += count
    return torch.cat(parts)


def _products_in_tiles(rows: Tensor, picks: SortedPicks, matrices: Tensor) -> Tensor:
    """The same as :func:`_products_of_hit_experts` without a host sync; the number of tiles is the worst case.

    The rows of every expert start at a new tile.  So a tile has only one expert, and a batched product computes many tiles.
    """
    num_picks, (num_experts, out_width, in_width) = rows.shape[0], matrices.shape
    num_tiles = num_picks // ROW_TILE + min(num_experts, num_picks)
    tiles_of = (picks.counts + ROW_TILE - 1) // ROW_TILE
    last_tile = tiles_of.cumsum(0)
    first_pick = picks.counts.cumsum(0) - picks.counts
    expert_of_row = torch.searchsorted(picks.counts.cumsum(0), torch.arange(num_picks, device=rows.device), right=True)
    place = (last_tile - tiles_of)[expert_of_row] * ROW_TILE - first_pick[expert_of_row]
    place += torch.arange(num_picks, device=rows.device)
    tiles = rows.new_zeros(num_tiles * ROW_TILE, in_width).index_copy_(0, place, rows).view(num_tiles, ROW_TILE, in_width)
    expert_of_tile = torch.searchsorted(last_tile, torch.arange(num_tiles, device=rows.device), right=True)
    expert_of_tile = expert_of_tile.clamp_max(num_experts - 1)
    out = rows.new_empty(num_tiles, ROW_TILE, out_width)
    at_once = max(1, _TILE_WEIGHT_BYTES // (out_width * in_width * matrices.element_size()))
    for first in range(0, num_tiles, at_once):
        part = slice(first, first + at_once)
        out[part] = matmul_items(tiles[part], matrices[expert_of_tile[part]].transpose(1, 2))
    return out.flatten(0, 1)[place]


@op(tolerance=2e-2)
def shared_expert(x8: QuantisedRows, w13: PackedWeight, w2: PackedWeight, limit: float) -> Tensor:
    """The expert that computes every token.

    Args:
        x8: [num_tokens, hidden] quantised.
        w13: [2 * inter, hidden] gate rows, then up rows.
        w2: [hidden, inter].

    Returns:
        [num_tokens, hidden] in the dtype of activations.
    """
    hidden = _swiglu(linear_fp8.reference(x8, w13), None, limit)
    return linear_fp8.reference(RoundedRows(hidden), w2)


@op(tolerance=4e-3)
def combine(parts: Tensor, shared: Tensor) -> Tensor:
    """Sum a token's experts in the order they were chosen, then the shared expert; one rounding.

    Args:
        parts: [num_tokens, top_k, hidden] weighted.
        shared: [num_tokens, hidden].

    Returns:
        [num_tokens, hidden] in the same dtype.
    """
    total = parts[:, 0].to(accumulation_dtype(parts))
    for choice in range(1, parts.shape[1]):
        total = total + parts[:, choice]
    return (total + shared).to(parts.dtype)
