"""Bodies of the operators: they allocate results and pass addresses to ``kernels.c``.

fp64 arguments, the exact regime, go to the reference: exactness needs no speed.  Operators that a library already computes fast,
those of sampling and of the vision tower, have the reference's body here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from deepinfer.ops import attention, engram, moe, norm, quant, sampling, vision
from deepinfer.ops.cpu.library import library
from deepinfer.ops.op import Op
from deepinfer.ops.quant import PackedWeight, QuantisedRows, RoundedRows

P = ParamSpec("P")
R = TypeVar("R")
NAME = "cpu"


def _body(operator: Op[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a body for bf16; fp64 goes to the reference."""

    def register(fast: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fast)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0] if args else next(iter(kwargs.values()))
            tensor = first.rounded if isinstance(first, RoundedRows) else first
            assert isinstance(tensor, Tensor)
            assert tensor.is_cpu, "the backend cpu is bound, and the model lies on another device"
            return operator.reference(*args, **kwargs) if tensor.dtype == torch.float64 else fast(*args, **kwargs)

        return operator.implement(NAME)(run)

    return register


def _at(tensor: Tensor | None) -> int:
    """Address of a contiguous tensor; 0 for none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """``x`` with elements of a row beside each other; rows may have any distance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _values(x8: QuantisedRows) -> Tensor:
    return x8.values().contiguous()


# ------------------------------------------------------------------------------------------------------------------------ weights


@quant.repack_fp8.implement(NAME)
def _repack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    return (
        quant.repack_fp8.reference(codes, scale, dtype)
        if dtype == torch.float64
        else PackedWeight(codes=codes.contiguous(), scale=scale.contiguous())
    )


@quant.repack_fp4.implement(NAME)
def _repack_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
    return (
        quant.repack_fp4.reference(codes, scale, dtype)
        if dtype == torch.float64
        else PackedWeight(codes=codes.contiguous(), scale=scale.contiguous())
    )


@quant.unpack.implement(NAME)
def _unpack(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    return weight.codes, weight.scale


# ----------------------------------------------------------------------------------------------------------------------- products


def _fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [num_rows, in_width] times the weight: [num_rows, out_width]."""
    out = x.new_empty(x.shape[0], weight.codes.shape[0])
    codes, scale = _at(weight.codes), _at(weight.scale)
    library().linear_fp8(x.data_ptr(), x.stride(0), x.shape[0], codes, scale, *weight.codes.shape, _at(out))
    return out


def _fp32(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = _rows(x), weight.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    library().linear_fp32(x.data_ptr(), x.stride(0), x.shape[0], _at(weight), *weight.shape, _at(out))
    return out


@_body(quant.quantise)
def _quantise(x: Tensor) -> QuantisedRows:
    x = _rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library().quantise(x.data_ptr(), x.stride(0), *x.shape, _at(out))
    return RoundedRows(out)


@_body(quant.linear_fp8)
def _linear_fp8(x8: QuantisedRows, weight: PackedWeight) -> Tensor:
    return _fp8(_values(x8), weight)


@_body(quant.linear_fp8_grouped)
def _linear_fp8_grouped(x: Tensor, weight: PackedWeight) -> Tensor:
    x, (outputs, inputs) = _rows(x), weight.codes.shape
    num_rows, num_groups, _ = x.shape
    out = x.new_empty(num_rows, outputs)
    library().linear_fp8_grouped(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        num_rows,
        num_groups,
        _at(weight.codes),
        _at(weight.scale),
        outputs // num_groups,
        inputs,
        _at(out),
    )
    return out


@_body(sampling.logits)
def _logits(x: Tensor, head: Tensor) -> Tensor:
    return _fp32(x, head)


# ------------------------------------------------------------------------------------------------- hyper-connections, norms, keys


def _measured(streams: Tensor, delta: Tensor | None, mix: norm.Mix | None, pre: Tensor, fn: Tensor) -> tuple[Tensor, ...]:
    num_rows, n, hidden = streams.shape
    streams, pre = streams.contiguous(), pre.contiguous()
    delta = None if delta is None else delta.contiguous()
    written = torch.empty_like(streams) if mix else None
    collapsed = streams.new_empty(num_rows, hidden)
    raw, square_sum = (streams.new_empty(num_rows, width, dtype=torch.float32) for width in (2 * n + n * n, 1))
    post, comb = (mix.post.contiguous(), mix.comb.contiguous()) if mix else (None, None)
    library().mhc_mix(
        _at(streams),
        _at(delta),
        _at(pre),
        _at(post),
        _at(comb),
        _at(fn.contiguous()),
        num_rows,
        n,
        hidden,
        _at(written),
        _at(collapsed),
        _at(raw),
        _at(square_sum),
    )
    measured = (collapsed, raw, square_sum)
    return measured if written is None else (written, *measured)


@_body(norm.mhc_post)
def _mhc_post(streams: Tensor, delta: Tensor, mix: norm.Mix) -> Tensor:
    streams, delta, post, comb = (each.contiguous() for each in (streams, delta, mix.post, mix.comb))
    out = torch.empty_like(streams)
    library().mhc_post(_at(streams), _at(delta), _at(post), _at(comb), *streams.shape, _at(out))
    return out


@_body(norm.mhc_pre)
def _mhc_pre(streams: Tensor, pre: Tensor, fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    collapsed, raw, square_sum = _measured(streams, None, None, pre, fn)
    return collapsed, raw, square_sum


@_body(norm.mhc_mix)
def _mhc_mix(streams: Tensor, delta: Tensor, mix: norm.Mix, fn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    written, collapsed, raw, square_sum = _measured(streams, delta, mix, mix.pre, fn)
    return written, collapsed, raw, square_sum


@_body(norm.mhc_finish)
def _mhc_finish(
    raw: Tensor, square_sum: Tensor, collapsed: Tensor, weights: norm.HyperWeights
) -> tuple[norm.Mix, Tensor, QuantisedRows]:
    raw, square_sum, collapsed = (each.contiguous() for each in (raw, square_sum, collapsed))
    num_rows, hidden = collapsed.shape
    n = weights.fn.shape[1] // hidden
    pre, post = raw.new_empty(num_rows, n), raw.new_empty(num_rows, n)
    comb = raw.new_empty(num_rows, n, n)
    x, x8 = torch.empty_like(collapsed), torch.empty_like(collapsed)
    library().mhc_finish(
        _at(raw),
        _at(square_sum),
        _at(collapsed),
        _at(weights.base),
        _at(weights.scale),
        _at(weights.norm),
        weights.num_iterations,
        weights.eps,
        weights.rms_eps,
        num_rows,
        n,
        hidden,
        _at(pre),
        _at(post),
        _at(comb),
        _at(x),
        _at(x8),
    )
    return norm.Mix(pre=pre, post=post, comb=comb), x, RoundedRows(x8)


@_body(norm.mhc_collapse)
def _mhc_collapse(streams: Tensor, weights: Tensor) -> Tensor:
    streams, weights = streams.contiguous(), weights.contiguous()
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    library().mhc_collapse(_at(streams), _at(weights), *streams.shape, _at(out))
    return out


@_body(norm.final_norm)
def _final_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    streams, pre = streams.contiguous(), pre.contiguous()
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    library().final_norm(_at(streams), _at(pre), *streams.shape, _at(weight.contiguous()), eps, _at(out))
    return out


@_body(norm.norm8)
def _norm8(x: Tensor, weight: Tensor, eps: float) -> QuantisedRows:
    x = _rows(x)
    out = x.new_empty(x.shape)
    library().norm8(x.data_ptr(), x.stride(0), *x.shape, _at(weight.contiguous()), eps, _at(out))
    return RoundedRows(out)


def _window_records(kv: Tensor, weight: Tensor, rotation: norm.Rotation, eps: float, out: Tensor) -> None:
    """Fill ``out`` [num_tokens, record bytes], whose rows may have any distance, from ``kv`` [num_tokens, head_dim]."""
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    library().window_records(
        kv.data_ptr(),
        kv.stride(0),
        *kv.shape,
        _at(weight.contiguous()),
        eps,
        _at(cos),
        _at(sin),
        cos.shape[1],
        out.data_ptr(),
        out.stride(0),
    )


@_body(norm.qkv_norm)
def _qkv_norm(
    qkv: Tensor, q_weight: Tensor, kv_weight: Tensor, rotation: norm.Rotation, eps: float
) -> tuple[QuantisedRows, Tensor]:
    qkv, rank = _rows(qkv), q_weight.shape[0]
    width = qkv.shape[1] - rank
    records = qkv.new_empty(qkv.shape[0], width + width // 32, dtype=torch.uint8)
    _window_records(qkv[:, rank:], kv_weight, rotation, eps, records)
    latent = qkv.new_empty(qkv.shape[0], rank)
    library().norm8(qkv.data_ptr(), qkv.stride(0), qkv.shape[0], rank, _at(q_weight.contiguous()), eps, _at(latent))
    return RoundedRows(latent), records


@_body(norm.context_records)
def _context_records(kv: Tensor, weights: Tensor, rotation: norm.Rotation, eps: float) -> Tensor:
    kv, (num_stages, width) = _rows(kv), weights.shape
    records = kv.new_empty(kv.shape[0], num_stages, width + width // 32, dtype=torch.uint8)
    for stage in range(num_stages):
        _window_records(kv[:, stage * width : (stage + 1) * width], weights[stage], rotation, eps, records[:, stage])
    return records


# ------------------------------------------------------------------------------------------------------------------------- engram


@engram.engram_gather.implement(NAME)
def _engram_gather(codes: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> QuantisedRows:
    if dtype == torch.float64:
        return engram.engram_gather.reference(codes, scale, rows, dtype)
    codes, scale, rows = codes.contiguous(), scale.contiguous(), rows.contiguous()
    out = torch.empty(rows.shape[0], rows.shape[1] * codes.shape[1], dtype=dtype)
    library().engram_gather(_at(codes), _at(scale), _at(rows), rows.numel(), codes.shape[1], _at(out))
    return RoundedRows(out)


@_body(engram.engram_gate)
def _engram_gate(kv: Tensor, streams: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float) -> Tensor:
    kv, streams, is_image = kv.contiguous(), streams.contiguous(), is_image.contiguous()
    out = torch.empty_like(streams)
    library().engram_gate(
        _at(kv),
        _at(streams),
        _at(q_weight.contiguous()),
        _at(k_weight.contiguous()),
        _at(is_image),
        eps,
        *streams.shape,
        _at(out),
    )
    return out


# ------------------------------------------------------------------------------------------------------------------------ experts


@_body(moe.route)
def _route(
    x: Tensor, gate: Tensor, bias: Tensor, bias_image: Tensor, is_image: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    x = _rows(x)
    gate, bias, bias_image, is_image = (each.contiguous() for each in (gate, bias, bias_image, is_image))
    expert_ids = x.new_empty(x.shape[0], top_k, dtype=torch.int64)
    weights = x.new_empty(x.shape[0], top_k, dtype=torch.float32)
    library().route(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        _at(gate),
        _at(bias),
        _at(bias_image),
        _at(is_image),
        gate.shape[0],
        top_k,
        scale,
        _at(expert_ids),
        _at(weights),
    )
    return expert_ids, weights


@_body(moe.sort_picks)
def _sort_picks(expert_ids: Tensor, num_experts: int) -> moe.SortedPicks:
    expert_ids = expert_ids.contiguous()
    order, counts = expert_ids.new_empty(expert_ids.numel()), expert_ids.new_empty(num_experts)
    library().sort_picks(_at(expert_ids), expert_ids.numel(), num_experts, _at(order), _at(counts))
    return moe.SortedPicks(order=order, counts=counts)


@_body(moe.experts)
def _experts(
    x8: QuantisedRows, expert_weights: Tensor, picks: moe.SortedPicks, w13: PackedWeight, w2: PackedWeight, limit: float
) -> Tensor:
    x, expert_weights = _values(x8), expert_weights.contiguous()
    num_tokens, top_k = expert_weights.shape
    num_experts, hidden = w2.codes.shape[:2]
    out = x.new_empty(num_tokens, top_k, hidden)
    library().experts(
        _at(x),
        _at(expert_weights),
        _at(picks.order),
        _at(picks.counts),
        num_experts,
        top_k,
        _at(w13.codes),
        _at(w13.scale),
        _at(w2.codes),
        _at(w2.scale),
        hidden,
        w13.codes.shape[1] // 2,
        limit,
        _at(out),
    )
    return out


@_body(moe.shared_expert)
def _shared_expert(x8: QuantisedRows, w13: PackedWeight, w2: PackedWeight, limit: float) -> Tensor:
    x = _values(x8)
    hidden, inter = w2.codes.shape
    out = x.new_empty(x.shape[0], hidden)
    library().shared_expert(
        _at(x), x.shape[0], _at(w13.codes), _at(w13.scale), _at(w2.codes), _at(w2.scale), hidden, inter, limit, _at(out)
    )
    return out


@_body(moe.combine)
def _combine(parts: Tensor, shared: Tensor) -> Tensor:
    parts, shared = parts.contiguous(), shared.contiguous()
    out = torch.empty_like(shared)
    library().combine(_at(parts), _at(shared), *parts.shape, _at(out))
    return out


# ---------------------------------------------------------------------------------------------------------------------- attention


@_body(attention.compress_project)
def _compress_project(x: Tensor, weights: attention.CompressorWeights) -> Tensor:
    return _fp32(x, weights.kv)


@_body(attention.compress)
def _compress(
    raw: Tensor, previous: Tensor | None, weights: attention.CompressorWeights, rotation: norm.Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    raw = raw.contiguous()
    previous = None if previous is None else previous.contiguous()
    (index_width, width), cos, sin = weights.index_key.shape, rotation.cos.contiguous(), rotation.sin.contiguous()
    main = raw.new_empty(raw.shape[0], width // 2 + width // 16, dtype=torch.uint8)
    index = raw.new_empty(raw.shape[0], index_width // 2 + index_width // 32, dtype=torch.uint8)
    library().compress(
        _at(raw),
        _at(previous),
        raw.shape[0],
        width,
        _at(weights.norm),
        _at(weights.index_key),
        _at(weights.index_norm),
        index_width,
        weights.eps,
        _at(cos),
        _at(sin),
        cos.shape[1],
        _at(main),
        _at(index),
    )
    return main, index


@_body(attention.index_query)
def _index_query(
    q_latent8: QuantisedRows, x: Tensor, wq_b: PackedWeight, weights_proj: Tensor, rotation: norm.Rotation
) -> tuple[Tensor, Tensor]:
    num_heads, latent = weights_proj.shape[0], _values(q_latent8)
    q = _fp8(latent, wq_b)
    cos, sin, width = rotation.cos.contiguous(), rotation.sin.contiguous(), q.shape[1] // num_heads
    library().index_grid(_at(q), q.shape[0], num_heads, width, _at(cos), _at(sin), cos.shape[1])
    head_weights = _fp32(x, weights_proj).to(x.dtype).to(torch.float32) * (width * num_heads) ** -0.5
    return q.view(-1, num_heads, width), head_weights


def _choose(
    q: Tensor,
    head_weights: Tensor,
    store: attention.IndexStore,
    page_ids: Tensor,
    spans: attention.Spans,
    top_k: int,
    top_blocks: int = 0,
    block_size: int = 0,
    own_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Entries of each token, and blocks [num_tokens, top_blocks]."""
    q, head_weights, page_ids = q.contiguous(), head_weights.contiguous(), page_ids.contiguous()
    own_blocks = None if own_blocks is None else own_blocks.contiguous()
    num_tokens, num_heads, width = q.shape
    firsts, counts, rows = [], [], []
    for span in spans.chunks:
        firsts.append(span.first_page)
        counts.append(span.num_rows)
        rows.append(torch.arange(span.first_row, span.first_row + span.num_rows))
    if spans.round_pages:
        is_there = spans.round_rows < num_tokens
        firsts += spans.first_pages.tolist()
        counts += is_there.sum(1).tolist()
        rows.append(spans.round_rows[is_there])
    listed = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    visible = (spans.positions[listed] + 1) // store.ratio
    first_page, first_row = torch.tensor(firsts, dtype=torch.int64), torch.tensor([0, *counts]).cumsum(0)
    chosen = torch.full((num_tokens, top_k), -1)
    blocks = torch.full((num_tokens, top_blocks), -1)
    library().index_choose(
        _at(q),
        _at(head_weights),
        num_heads,
        width,
        store.values.data_ptr(),
        store.scales.data_ptr(),
        store.values.stride(0),
        store.scales.stride(0),
        _at(page_ids),
        store.values.shape[1],
        _at(first_page),
        _at(first_row),
        _at(listed),
        _at(visible),
        len(firsts),
        top_k,
        top_blocks,
        block_size,
        _at(own_blocks),
        0 if own_blocks is None else own_blocks.shape[1],
        _at(chosen),
        _at(blocks),
    )
    return chosen, blocks


@_body(attention.index_topk)
def _index_topk(
    q: Tensor, head_weights: Tensor, store: attention.IndexStore, page_ids: Tensor, spans: attention.Spans, top_k: int
) -> Tensor:
    return _choose(q, head_weights, store, page_ids, spans, top_k)[0]


@_body(attention.index_blocks)
def _index_blocks(
    q: Tensor,
    head_weights: Tensor,
    store: attention.IndexStore,
    page_ids: Tensor,
    spans: attention.Spans,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    return _choose(q, head_weights, store, page_ids, spans, top_k, top_blocks, block_size)


@_body(attention.index_topk_within)
def _index_topk_within(
    q: Tensor,
    head_weights: Tensor,
    store: attention.IndexStore,
    page_ids: Tensor,
    spans: attention.Spans,
    top_k: int,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    return _choose(q, head_weights, store, page_ids, spans, top_k, 0, block_size, blocks)[0]


@_body(attention.sparse_attention)
def _sparse_attention(
    q: Tensor,
    rotation: norm.Rotation,
    sinks: Tensor,
    window: Tensor,
    window_idx: Tensor,
    store: Tensor | None,
    page_ids: Tensor,
    entry_idx: Tensor | None,
) -> Tensor:
    q, window, window_idx, page_ids = (each.contiguous() for each in (q, window, window_idx, page_ids))
    entry_idx = None if entry_idx is None else entry_idx.contiguous()
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    out = torch.empty_like(q)
    library().sparse_attention(
        _at(q),
        *q.shape,
        _at(cos),
        _at(sin),
        cos.shape[1],
        _at(sinks.contiguous()),
        _at(window),
        window.shape[0],
        _at(window_idx),
        window_idx.shape[1],
        0 if store is None else store.data_ptr(),
        0 if store is None else store.stride(0),
        1 if store is None else store.shape[1],
        _at(page_ids),
        page_ids.shape[0],
        _at(entry_idx),
        0 if entry_idx is None else entry_idx.shape[1],
        _at(out),
    )
    return out


# ------------------------------------------------------------------------------------------- the reference's bodies as they are

_AS_THEY_ARE: tuple[Op[..., Any], ...] = (
    engram.engram_rows,
    sampling.penalise,
    sampling.token_logprobs,
    sampling.top_logprobs,
    sampling.verify,
    sampling.verify_coupled,
    sampling.markov_step,
    sampling.lay_out_rounds,
    vision.patchify,
    vision.patch_embed,
    vision.vision_attention,
    vision.vision_mlp,
    vision.cells,
    vision.aligner,
)
for _operator in _AS_THEY_ARE:
    _operator.implement(NAME)(_operator.reference)
