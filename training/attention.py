"""Attention of one layer, written for gradients: dense under a mask that says which keys each query sees.

Arithmetic follows :mod:`deepinfer.ops.attention` and :mod:`deepinfer.ops.norm`.  The engine gathers the keys that a query reads;
here every query meets all keys of its sequence, and the mask hides the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from training.choice import scores
from training.grids import round_main, round_mxfp4, round_mxfp8
from training.packing import Packed, Sight
from training.streams import Rotation, region, rms_norm, rotate


class Store(NamedTuple):
    """Compressed entries of a layer.

    Attributes:
        ratio: tokens of an entry.
        main: [batch, num_entries, head_dim] on the grid of main entries.
        index_keys: [batch, num_entries, index_head_dim] on the MXFP4 grid.
    """

    ratio: int
    main: Tensor
    index_keys: Tensor


class IndexQuery(NamedTuple):
    """What an indexer asks with.

    Attributes:
        q: [batch, length, index_n_heads, index_head_dim] on the MXFP4 grid.
        weights: [batch, length, index_n_heads] wide.
    """

    q: Tensor
    weights: Tensor


@region
def _queries_and_keys(
    x8: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    rotation: Rotation,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q_latent8 = round_mxfp8(rms_norm(F.linear(x8, wq_a), q_norm, eps))
    keys = window_records(x8, wkv, kv_norm, rotation, eps)
    return rotate(F.linear(q_latent8, wq_b).unflatten(1, (num_heads, -1)), rotation), keys, q_latent8


def project(
    x8: Tensor, weights: Mapping[str, Tensor], rotation: Rotation, num_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and window keys.

    Args:
        x8: [num_tokens, hidden] input on the MXFP8 grid.
        weights: by names behind ``attn.``.
        rotation: of the tokens.

    Returns:
        q: [num_tokens, num_heads, head_dim] rotated.
        keys: [num_tokens, head_dim] window records.
        q_latent8: [num_tokens, q_lora_rank] on the MXFP8 grid.
    """
    wq_a, q_norm, wq_b, wkv, kv_norm = (weights[f"{name}.weight"] for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm"))
    return _queries_and_keys(x8, wq_a, q_norm, wq_b, wkv, kv_norm, rotation, num_heads, eps)


def window_records(x8: Tensor, wkv: Tensor, kv_norm: Tensor, rotation: Rotation, eps: float) -> Tensor:
    """Keys [num_tokens, head_dim] of inputs [num_tokens, hidden], both on the MXFP8 grid."""
    return round_mxfp8(rotate(rms_norm(F.linear(x8, wkv), kv_norm, eps), rotation))


@region
def _latents(
    x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, wk: Tensor, k_norm: Tensor, rotation: Rotation, eps: float
) -> tuple[Tensor, Tensor]:
    """Main entries and index keys before they are rounded; ``rotation`` is that of the first token of each group."""
    wide = norm.dtype
    values = F.linear(x.to(wide), wkv.to(wide))
    if wgate is not None:
        values = values.unflatten(0, (-1, 2))
        shares = torch.softmax(F.linear(x.to(wide), wgate.to(wide)).unflatten(0, (-1, 2)), dim=1)
        values = (shares * values).sum(1)
    latent = rms_norm(values.to(x.dtype), norm, eps)
    # The index keys learn from the indexer's own loss only, and what they are made of does not.
    key = rms_norm(F.linear(latent.detach(), wk), k_norm, eps)
    return rotate(latent, rotation), rotate(key, rotation)


def compress(x: Tensor, weights: Mapping[str, Tensor], ratio: int, rotation: Rotation, batch: int, eps: float) -> Store:
    """The store of a layer from its input ``x`` [batch * length, hidden]; ``weights`` by names behind ``attn.``."""
    latent, key = _latents(
        x,
        weights["compressor.wkv.weight"],
        weights.get("compressor.wgate.weight"),
        weights["compressor.norm.weight"],
        weights["indexer.wk.weight"],
        weights["indexer.k_norm.weight"],
        rotation,
        eps,
    )
    main, index_keys = (each.unflatten(0, (batch, -1)) for each in (round_main(latent), round_mxfp4(key)))
    return Store(ratio, main, index_keys)


@region
def _index_query(
    q_latent8: Tensor, x: Tensor, wq_b: Tensor, weights_proj: Tensor, rotation: Rotation, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    num_heads = weights_proj.shape[0]
    q = rotate(F.linear(q_latent8, wq_b).unflatten(1, (num_heads, -1)), rotation)
    return q, F.linear(x, weights_proj).to(wide) * (q.shape[-1] * num_heads) ** -0.5


def index_query(q_latent8: Tensor, x: Tensor, weights: Mapping[str, Tensor], rotation: Rotation, batch: int) -> IndexQuery:
    """What the layer's indexer asks; its gradients stay in the indexer's own weights."""
    wq_b, weights_proj = weights["indexer.wq_b.weight"], weights["indexer.weights_proj.weight"]
    q, head_weights = _index_query(q_latent8.detach(), x.detach(), wq_b, weights_proj, rotation, rotation.cos.dtype)
    return IndexQuery(round_mxfp4(q).unflatten(0, (batch, -1)), head_weights.unflatten(0, (batch, -1)))


@region
def _attend_on_gpu(q: Tensor, keys: Tensor, sinks: Tensor, blocks: BlockMask) -> Tensor:
    heads, shared = q.transpose(1, 2), keys.unsqueeze(1)
    out, lse = flex_attention(heads, shared, shared, block_mask=blocks, enable_gqa=True, return_lse=True)
    share = torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)  # of the keys; the sink has the rest
    result: Tensor = (out.to(share.dtype) * share).to(q.dtype).transpose(1, 2)
    return result


def attend(q: Tensor, keys: Tensor, sinks: Tensor, is_visible: Tensor) -> Tensor:
    """Attention in plain torch.

    Args:
        q: [batch, num_queries, num_heads, head_dim] rotated.
        keys: [batch, num_keys, head_dim]; keys are their own values.
        sinks: [num_heads] wide.
        is_visible: [batch, num_queries, num_keys] bool.

    Returns:
        [batch, num_queries, num_heads, head_dim], not rotated back.
    """
    wide = sinks.dtype
    table = keys.to(wide)
    shares, total = _shares(q, table, sinks, is_visible)
    return (torch.einsum("bhqk,bkd->bqhd", shares.to(q.dtype).to(wide), table) / total.transpose(1, 2)).to(q.dtype)


def _shares(q: Tensor, table: Tensor, sinks: Tensor, is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised shares [batch, num_heads, num_queries, num_keys] and their sums, which count the sinks."""
    logits = torch.einsum("bqhd,bkd->bhqk", q.to(table.dtype), table) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~is_visible.unsqueeze(1), -torch.inf)
    sink = sinks.view(1, -1, 1, 1)
    largest = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    shares = torch.exp(logits - largest)
    return shares, shares.sum(-1, keepdim=True) + torch.exp(sink - largest)


def mixed(q: Tensor, keys: Tensor, store: Store | None, sinks: Tensor, sight: Sight) -> Tensor:
    """Attention of every token over its window and the entries that ``sight`` opens to it.

    Args:
        q: [batch, length, num_heads, head_dim] rotated.
        keys: [batch, length, head_dim] window records.
        sinks: [num_heads] wide.

    Returns:
        [batch, length, num_heads, head_dim], not rotated back.
    """
    if store is not None:
        keys = torch.cat([keys, store.main], dim=1)
    if q.is_cuda:
        return _attend_on_gpu(q, keys, sinks, sight.blocks)
    return attend(q, keys, sinks, sight.all_rows())


@region
def projected_out(out: Tensor, wo_a: Tensor, wo_b: Tensor, rotation: Rotation, num_groups: int) -> Tensor:
    """[num_tokens, hidden] from the heads' outputs [num_tokens, num_heads, head_dim], which are rotated back first."""
    out = rotate(out, rotation, is_inverse=True)
    grouped = out.unflatten(1, (num_groups, -1)).flatten(2)
    z = torch.einsum("ngi,goi->ngo", grouped, wo_a.unflatten(0, (num_groups, -1)))
    return F.linear(round_mxfp8(z.flatten(1)), wo_b)


def index_loss(
    q: Tensor, keys: Tensor, store: Store, sinks: Tensor, query: IndexQuery, packed: Packed, window: int, places: Tensor
) -> Tensor:
    """How far the indexer's scores are from the attention that they choose for, on some queries.

    The target of a query is the attention that its heads together pay to the visible entries, as shares of 1; the scores become
    shares by a softmax.  The result is the mean over queries of KL(target || scores).  It has gradients for the indexer only.

    Args:
        q, keys, store, sinks: as for :func:`mixed`.
        query: of the indexer that chooses for this layer.
        places: [batch, num_queries] int64 which tokens.
    """
    with torch.no_grad():
        wide = sinks.dtype
        table = torch.cat([keys, store.main], dim=1).to(wide)
        index = places.view(*places.shape, 1, 1).expand(-1, -1, *q.shape[2:])
        is_visible = Sight(packed, store.ratio, window).rows(places)
        shares, total = _shares(q.gather(1, index), table, sinks, is_visible)
        attention = (shares / total).sum(1)[..., packed.length :]
        target = attention / attention.sum(-1, keepdim=True).clamp_min(1e-20)
        is_open = is_visible[..., packed.length :]
        counts = is_open.any(-1) & (packed.positions.gather(1, places) >= 0)
    index = places.view(*places.shape, 1, 1).expand(-1, -1, *query.q.shape[2:])
    weights = query.weights.gather(1, index[..., 0].expand(-1, -1, query.weights.shape[-1]))
    values = scores(query.q.gather(1, index), weights, store.index_keys).masked_fill(~is_open, -1e9)
    divergence = torch.xlogy(target, target).sum(-1) - (target * torch.log_softmax(values, dim=-1)).sum(-1)
    return (divergence * counts).sum() / counts.sum().clamp_min(1)
