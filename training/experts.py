"""Mixture of experts, written for gradients: one grouped product for all experts.

Arithmetic follows :mod:`deepinfer.ops.moe`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.grids import Context, round_mxfp8
from training.streams import region

_GROUP_ALIGN = 8
"""Rows that a group's size is a multiple of: 16 bytes of bf16, which the gradient of grouped weights asks for."""


class Places(NamedTuple):
    """Where each pick stands when picks are sorted by expert.

    Attributes:
        rows: [num_tokens, top_k] int64 row of each pick.
        picks: [num_rows] int64 flat pick (token * top_k + choice) of each row; 0 for rows that fill a group up.
        is_used: [num_rows] bool.
        ends: [num_experts] int32 row after each expert's last; rows that fill up are the expert's too.
    """

    rows: Tensor
    picks: Tensor
    is_used: Tensor
    ends: Tensor


class _Spread(torch.autograd.Function):
    """Rows of tokens to rows of picks; the gradient is a sum of gathered rows, without atomic additions."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0][rows].sum(1), None, None


class _Gather(torch.autograd.Function):
    """The sum of each token's picks, in the order of choice; the gradient of a row is its token's.

    A row that fills a group up gets a gradient too.  Its weight is zero, so the gradient ends there.
    """

    @staticmethod
    def forward(ctx: Context, parts: Tensor, tokens: Tensor, rows: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.dtype = parts.dtype
        total = parts[rows[:, 0]].to(wide)
        for choice in range(1, rows.shape[1]):
            total = total + parts[rows[:, choice]]
        return total

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradients[0].to(ctx.dtype)[tokens], None, None, None


def spread(x: Tensor, places: Places) -> Tensor:
    """[num_rows, width]: each pick's row of ``x`` [num_tokens, width]."""
    result: Tensor = _Spread.apply(x, places.picks // places.rows.shape[1], places.rows)
    return result


def gather(parts: Tensor, places: Places, wide: torch.dtype) -> Tensor:
    """[num_tokens, width] wide: the sum of each token's rows of ``parts`` [num_rows, width]."""
    result: Tensor = _Gather.apply(parts, places.picks // places.rows.shape[1], places.rows, wide)
    return result


@region
def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts.

    Args:
        x: [num_tokens, hidden].
        gate: [num_experts, hidden].
        bias: [num_experts] wide; steers the choice and has no gradient.

    Returns:
        expert_ids: [num_tokens, top_k] int64, best first.
        weights: [num_tokens, top_k] wide.
        affinities: [num_tokens, num_experts] wide; each row adds up to 1.
    """
    wide = bias.dtype
    values = torch.sqrt(F.softplus(F.linear(x.to(wide), gate.to(wide))))
    expert_ids = torch.topk(values.detach() + bias, top_k, dim=-1).indices
    chosen = values.gather(1, expert_ids)
    affinities = values / (values.sum(-1, keepdim=True) + 1e-20)
    return expert_ids, scale * chosen / (chosen.sum(-1, keepdim=True) + 1e-20), affinities


class Load(NamedTuple):
    """How evenly tokens use the experts.

    Attributes:
        counts: [num_experts] int64 picks of each expert by known tokens.
        loss: [] wide: 1 if every sequence uses all experts equally, more if it prefers some.  Its gradient makes the preferred
            ones less attractive.
    """

    counts: Tensor
    loss: Tensor


@region
def load_of(affinities: Tensor, expert_ids: Tensor, is_known: Tensor) -> Load:
    """The load by sequences.

    Source: DeepSeek-V3 technical report, complementary sequence-wise auxiliary loss.

    Args:
        affinities, expert_ids: of :func:`route`, for batch * length tokens.
        is_known: [batch, length] bool; padding does not count.
    """
    shape = (*is_known.shape, -1)
    known = is_known.unsqueeze(-1)
    num_known = known.sum(1).clamp_min(1)  # [batch, 1]
    top_k, num_experts = expert_ids.shape[1], affinities.shape[1]
    is_picked = torch.zeros_like(affinities, dtype=torch.int64).scatter_(1, expert_ids, 1).view(shape) * known
    picks = is_picked.sum(1)  # [batch, num_experts]
    shares = (affinities.view(shape) * known).sum(1) / num_known
    used = picks * (num_experts / top_k) / num_known
    return Load(picks.sum(0), (used * shares).sum(-1).mean())


@torch.no_grad()
def place(expert_ids: Tensor, num_experts: int) -> Places:
    """Sort picks [num_tokens, top_k] by expert; the number of rows depends on shapes alone."""
    flat = expert_ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    sizes = (counts + _GROUP_ALIGN - 1) // _GROUP_ALIGN * _GROUP_ALIGN
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    sorted_rows = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    num_rows = -(-len(flat) // _GROUP_ALIGN) * _GROUP_ALIGN + num_experts * _GROUP_ALIGN
    rows = torch.empty_like(flat).scatter_(0, order, sorted_rows)
    picks = torch.zeros(num_rows, dtype=torch.int64, device=flat.device).scatter_(0, sorted_rows, order)
    is_used = torch.zeros(num_rows, dtype=torch.bool, device=flat.device).scatter_(0, sorted_rows, True)
    ends = sizes.cumsum(0).int()
    ends[-1:].fill_(num_rows)  # a row that no product writes may hold NaN, and NaN times a weight of 0 is NaN
    return Places(rows.view_as(expert_ids), picks, is_used, ends)


def _products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group's rows times its expert's matrix: [num_rows, out_width].

    Args:
        rows: [num_rows, in_width].
        weights: [num_experts, out_width, in_width].
        ends: [num_experts] int32.
    """
    if rows.is_cuda:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts, first = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts.append(F.linear(rows[first:end], weights[expert]))
        first = end
    return torch.cat(parts)


@region
def swiglu(gate_up: Tensor, weights: Tensor | None, limit: float, wide: torch.dtype) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, ±limit) * weight on the MXFP8 grid; ``weights`` [num_rows, 1] wide."""
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    hidden = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    if weights is not None:
        hidden = hidden * weights
    return round_mxfp8(hidden.to(gate_up.dtype))


@region
def shared_expert(x8: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, wide: torch.dtype) -> Tensor:
    """[num_tokens, hidden] of the expert that every token passes."""
    gate, up = F.linear(x8, w1).to(wide), F.linear(x8, w3).to(wide)
    hidden = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return F.linear(round_mxfp8(hidden.to(x8.dtype)), w2)


def routed(x8: Tensor, expert_ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float) -> Tensor:
    """Run every pick through its expert.

    Args:
        x8: [num_tokens, hidden] on the MXFP8 grid.
        expert_ids, weights: of :func:`route`.
        w1, w3: [num_experts, inter, hidden].
        w2: [num_experts, hidden, inter].

    Returns:
        [num_tokens, hidden] wide, the weighted sum.
    """
    places = place(expert_ids, len(w1))
    row_weights = _Spread.apply(weights.view(-1, 1), places.picks, places.rows.view(-1, 1)) * places.is_used.unsqueeze(1)
    gate_up = _products(spread(x8, places), torch.cat([w1, w3], dim=1), places.ends)
    hidden = swiglu(gate_up, row_weights, limit, weights.dtype)
    return gather(_products(hidden, w2, places.ends), places, weights.dtype)
