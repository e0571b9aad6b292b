"""Mixture of experts: choose, compute, bring together.

Source: model report, expert section; ``n_routed_experts``, ``num_experts_per_tok``, ``routed_scaling_factor``, ``swiglu_limit``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.op import op
from deepinfer.ops.quant import (
    PackedWeight,
    accumulation_dtype,
    linear_bf16,
    linear_fp8,
    matmul_rows,
    round_mxfp8,
    sigmoid,
    softplus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Picks sorted by expert.

    Attributes:
        order: [num_tokens * top_k] int64, flat pick numbers (token * top_k + choice), by expert, then by token.
        counts: [num_experts] int64 picks per expert.
    """

    order: Tensor
    counts: Tensor


@op(tolerance=1e-5)
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

    Source: score sqrt(softplus(gate x)); weight = scale * score / (sum of chosen + 1e-20).
    """
    scores = torch.sqrt(softplus(linear_bf16(x, gate)))
    steered = scores + torch.where(is_image.unsqueeze(1), bias_image, bias)
    expert_ids = torch.sort(steered, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, expert_ids)
    return expert_ids, scale * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


@op(tolerance=0.0)
def plan(expert_ids: Tensor, num_experts: int) -> ExpertPlan:
    """Sort picks by expert, ties in token order.

    Args:
        expert_ids: [num_tokens, top_k] int64.
        num_experts: experts there are.
    """
    flat = expert_ids.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return ExpertPlan(order=order, counts=counts.scatter_add_(0, flat, torch.ones_like(flat)))


def _swiglu(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, ±limit) * weight on the MXFP8 grid.

    The routing weight multiplies before the quantiser of the down projection, as in the original program.
    """
    wide = accumulation_dtype(gate_up)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    gate = gate.clamp_max(limit)
    hidden = gate * sigmoid(gate) * up.clamp(-limit, limit)
    if weight is not None:
        hidden = hidden * weight
    return round_mxfp8(hidden.to(gate_up.dtype))


@op(tolerance=2e-2)
def experts(x8: Tensor, expert_weights: Tensor, picks: ExpertPlan, w13: PackedWeight, w2: PackedWeight, limit: float) -> Tensor:
    """Run every pick through its expert.

    Args:
        x8: [num_tokens, hidden] on the MXFP8 grid.
        expert_weights: [num_tokens, top_k] wide.
        picks: of the same tokens.
        w13: [num_experts, 2 * inter, hidden] gate rows, then up rows.
        w2: [num_experts, hidden, inter].
        limit: clamp of gate and up.

    Returns:
        [num_tokens, top_k, hidden] in x8's dtype, weighted.

    Tolerance: one flipped rounding of the intermediate value moves it by up to 6 %.
    """
    num_tokens, top_k = expert_weights.shape
    dense13, dense2 = w13.dense, w2.dense
    rows = x8.to(dense13.dtype)[picks.order // top_k]
    hit: list[tuple[int, slice]] = []
    first = 0
    for expert, count in enumerate(picks.counts.tolist()):
        if count:
            hit.append((expert, slice(first, first + count)))
            first += count
    gate_up = torch.cat([matmul_rows(rows[part], dense13[expert]) for expert, part in hit]).to(x8.dtype)
    hidden = _swiglu(gate_up, expert_weights.flatten()[picks.order].unsqueeze(1), limit).to(dense2.dtype)
    down = torch.cat([matmul_rows(hidden[part], dense2[expert]) for expert, part in hit]).to(x8.dtype)
    result: Tensor = torch.empty_like(down).index_copy_(0, picks.order, down).unflatten(0, (num_tokens, top_k))
    return result


@op(tolerance=2e-2)
def shared_expert(x8: Tensor, w13: PackedWeight, w2: PackedWeight, limit: float) -> Tensor:
    """The expert that every token passes.

    Args:
        x8: [num_tokens, hidden] on the MXFP8 grid.
        w13: [2 * inter, hidden] gate rows, then up rows.
        w2: [hidden, inter].

    Returns:
        [num_tokens, hidden] in x8's dtype.
    """
    return linear_fp8(_swiglu(linear_fp8(x8, w13), None, limit), w2)


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
