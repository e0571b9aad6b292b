"""Test arguments of every operator: sizes, edge cases, and which arguments have rows.

Tests compare a backend with the reference on these cases.  Timings of an operator use the same cases with more rows.  Sizes come
from a model's configuration, so the same cases serve a small model on a CPU and kernels that are built for one shape.

Numbers are drawn on the CPU and then copied, so a seed gives the same arguments on every device.  The reference rounds the
numbers; then the bound backend packs weights and quantises activations.  So two backends get equal values, each in its own
layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepinfer.config import DraftSampling, ModelConfig, VisionConfig, engram_primes
from deepinfer.ops import arithmetic, attention, engram, moe, norm, quant, sampling, vision
from deepinfer.ops.op import Op

Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments of one call."""

NUM_ROWS = {"one row": 1, "odd rows": 7, "a tile and a row": arithmetic.ROW_TILE + 1, "tiles": 3 * arithmetic.ROW_TILE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Source of the numbers of a case.

    Attributes:
        config: configuration with the sizes.
        generator: random generator on the CPU.
        device: device of the arguments.
        dtype: dtype of activations, bf16 or fp64.
    """

    config: ModelConfig
    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums, statistics and unquantised weights."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def vision(self) -> VisionConfig:
        """Sizes of the vision tower."""
        assert self.config.vision is not None, "cases need a configuration with a vision tower"
        return self.config.vision

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers in ``dtype``; without it, in the dtype of activations."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """An unquantised matrix of variance 1 / fan-in, in the accumulation dtype."""
        return self.normal(*shape, dtype=self.wide) / math.sqrt(shape[-1])

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype or self.wide)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def quantised(self, *shape: int) -> quant.QuantisedRows:
        """Quantised activations: numbers on the grid of the reference, in the layout of the bound backend."""
        return quant.quantise(quant.round_mxfp8(self.normal(*shape)))

    def _packed(self, pack: Callable[[Tensor], tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        codes, scale = pack(self.normal(*shape, dtype=torch.float32) / math.sqrt(shape[-1]))
        return codes, scale

    @property
    def gemm_dtype(self) -> torch.dtype:
        """Dtype of dequantised weights."""
        return torch.float64 if self.dtype == torch.float64 else arithmetic.gemm_dtype(self.device)

    def fp8(self, *shape: int) -> quant.PackedWeight:
        """An FP8 matrix."""
        return quant.repack_fp8(*self._packed(quant.pack_fp8, shape), self.gemm_dtype)

    def fp4(self, *shape: int) -> quant.PackedWeight:
        """Stacked MXFP4 matrices."""
        return quant.repack_fp4(*self._packed(quant.pack_fp4, shape), self.gemm_dtype)

    def rotation(self, num_rows: int) -> norm.Rotation:
        """Rotation at random positions."""
        config = self.config
        frequencies = norm.rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
        positions = self.integers(0, config.max_position_embeddings, num_rows)
        return norm.Rotation.at(positions, frequencies.to(self.device, self.wide))

    def mix(self, num_rows: int) -> norm.Mix:
        """A random mix with the magnitudes of a network."""
        n = self.config.hc_mult
        comb = torch.softmax(self.normal(num_rows, n, n, dtype=self.wide), -1)
        return norm.Mix(pre=self.uniform(num_rows, n), post=2 * self.uniform(num_rows, n), comb=comb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to call an operator.

    Attributes:
        op: the operator.
        name: what is special about the case; unique for the operator.
        build: makes the arguments for a number of rows.
        num_rows: number of rows in tests.
        take: makes the arguments for only those rows that an index selects, in the order of the index.  Every tensor of the
            result must hold the same rows of the whole result, bit for bit.  None if rows depend on each other.
    """

    op: Op[..., Any]
    name: str
    build: Callable[[Draw, int], Arguments]
    num_rows: int
    take: Callable[[Arguments, Tensor], Arguments] | None = None


def tensors(value: object) -> list[Tensor]:
    """All tensors in an argument or a result (a tensor, quantised rows, a dict, a tuple or a dataclass), in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, quant.QuantisedRows):
        return [value.values()]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors(each)]
    if dataclasses.is_dataclass(value):
        return [tensor for field in dataclasses.fields(value) for tensor in tensors(getattr(value, field.name))]
    return []


def _pick(value: object, index: Tensor) -> object:
    """Rows of a tensor, or of every tensor of a dataclass."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, quant.QuantisedRows):
        return value.rows(index)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _pick(each, index) for name, each in fields.items()})
    return value


def rows(*names: str) -> Callable[[Arguments, Tensor], Arguments]:
    """A ``Case.take`` that selects rows of the arguments ``names``; the other arguments have no rows."""

    def take(arguments: Arguments, index: Tensor) -> Arguments:
        return arguments | {name: _pick(arguments[name], index) for name in names}

    return take


def _sizes(
    op: Op[..., Any],
    build: Callable[[Draw, int], Arguments],
    take: Callable[[Arguments, Tensor], Arguments] | None = None,
    name: str = "",
) -> Iterator[Case]:
    """A case for every number of rows."""
    for size, num_rows in NUM_ROWS.items():
        yield Case(op=op, name=f"{name}, {size}" if name else size, build=build, num_rows=num_rows, take=take)


# ----------------------------------------------------------------------------------------------------------------------- quant


def _edges(draw: Draw, width: int) -> Tensor:
    """Edge cases of quantisers: zeros of both signs, ties, scales at a power of two, very small and very large values."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -2.5, -0.0, 0.0], dtype=torch.float64)
    base = torch.cat([ties, torch.linspace(-448, 448, width, dtype=torch.float64)])[:width]
    powers = torch.exp2(torch.arange(width, dtype=torch.float64) % 40 - 20)
    zeros = torch.zeros(width, dtype=torch.float64)
    edges = [zeros, -zeros, base, base / 64, powers, -powers, base * 2.0**-60, base * 2.0**60, zeros + 448, zeros + 6]
    return torch.stack(edges).to(draw.device, draw.dtype)


def _quantiser_cases() -> Iterator[Case]:
    def plain(draw: Draw, num_rows: int) -> Arguments:
        return {"x": draw.normal(num_rows, draw.config.hidden_size)}

    def strided(draw: Draw, num_rows: int) -> Arguments:
        width = draw.config.hidden_size
        return {"x": draw.normal(num_rows, 2 * width)[:, width:]}

    def edges(draw: Draw, _: int) -> Arguments:
        return {"x": _edges(draw, draw.config.hidden_size)}

    yield from _sizes(quant.quantise, plain, rows("x"))
    yield Case(op=quant.quantise, name="part of wider rows", build=strided, num_rows=7, take=rows("x"))
    yield Case(op=quant.quantise, name="edges", build=edges, num_rows=10, take=rows("x"))


def _weight_cases() -> Iterator[Case]:
    def fp8(draw: Draw, _: int, *shape: int) -> Arguments:
        codes, scale = quant.pack_fp8(draw.normal(*shape, dtype=torch.float32))
        return {"codes": codes, "scale": scale, "dtype": draw.gemm_dtype}

    def fp4(draw: Draw, _: int, *shape: int) -> Arguments:
        codes, scale = quant.pack_fp4(draw.normal(*shape, dtype=torch.float32))
        return {"codes": codes, "scale": scale, "dtype": draw.gemm_dtype}

    yield Case(op=quant.repack_fp8, name="whole blocks", build=lambda draw, _: fp8(draw, _, 96, 64), num_rows=96)
    yield Case(op=quant.repack_fp8, name="cut blocks", build=lambda draw, _: fp8(draw, _, 40, 96), num_rows=40)
    yield Case(op=quant.repack_fp4, name="stack", build=lambda draw, _: fp4(draw, _, 3, 64, 96), num_rows=64)
    yield Case(op=quant.unpack, name="fp8", build=lambda draw, _: {"weight": draw.fp8(96, 64)}, num_rows=96)
    yield Case(op=quant.unpack, name="fp4", build=lambda draw, _: {"weight": draw.fp4(3, 64, 96)}, num_rows=64)


def _product_cases() -> Iterator[Case]:
    def fp8(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        weight = draw.fp8(config.q_lora_rank + config.head_dim, config.hidden_size)
        return {"x8": draw.quantised(num_rows, config.hidden_size), "weight": weight}

    def grouped(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        in_width = config.num_attention_heads // config.o_groups * config.head_dim
        weight = draw.fp8(config.o_groups * config.o_lora_rank, in_width)
        return {"x": draw.normal(num_rows, config.o_groups, in_width), "weight": weight}

    yield from _sizes(quant.linear_fp8, fp8, rows("x8"))
    yield from _sizes(quant.linear_fp8_grouped, grouped, rows("x"))


def _quant_cases() -> Iterator[Case]:
    yield from _quantiser_cases()
    yield from _weight_cases()
    yield from _product_cases()


# ------------------------------------------------------------------------------------------------------------------------ norm


def _hyper(draw: Draw) -> norm.HyperWeights:
    config = draw.config
    width = config.hc_mult * (2 + config.hc_mult)
    return norm.HyperWeights(
        fn=draw.weight(width, config.hc_mult * config.hidden_size),
        base=draw.normal(width, dtype=draw.wide),
        scale=1 + 0.3 * draw.normal(width, dtype=draw.wide),
        norm=1 + 0.3 * draw.normal(config.hidden_size, dtype=draw.wide),
        num_iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        rms_eps=config.rms_norm_eps,
    )


def _norm_cases() -> Iterator[Case]:
    def streams(draw: Draw, num_rows: int) -> Tensor:
        return draw.normal(num_rows, draw.config.hc_mult, draw.config.hidden_size)

    def post(draw: Draw, num_rows: int) -> Arguments:
        delta = draw.normal(num_rows, draw.config.hidden_size)
        return {"streams": streams(draw, num_rows), "delta": delta, "mix": draw.mix(num_rows)}

    def pre(draw: Draw, num_rows: int) -> Arguments:
        return {"streams": streams(draw, num_rows), "pre": draw.mix(num_rows).pre, "fn": _hyper(draw).fn}

    def first(draw: Draw, num_rows: int) -> Arguments:
        one_hot = torch.eye(draw.config.hc_mult, dtype=draw.wide, device=draw.device)[0]
        embedded = draw.normal(num_rows, 1, draw.config.hidden_size).expand(-1, draw.config.hc_mult, -1)
        return {"streams": embedded, "pre": one_hot.expand(num_rows, -1), "fn": _hyper(draw).fn}

    def mix(draw: Draw, num_rows: int) -> Arguments:
        return post(draw, num_rows) | {"fn": _hyper(draw).fn}

    def finish(draw: Draw, num_rows: int, size: float = 1.0) -> Arguments:
        weights, x = _hyper(draw), streams(draw, num_rows) * size
        collapsed, raw, square_sum = norm.mhc_pre.reference(x, draw.mix(num_rows).pre, weights.fn)
        return {"raw": raw, "square_sum": square_sum, "collapsed": collapsed, "weights": weights}

    def final(draw: Draw, num_rows: int) -> Arguments:
        weight, eps = _hyper(draw).norm, draw.config.rms_norm_eps
        return {"streams": streams(draw, num_rows), "pre": draw.mix(num_rows).pre, "weight": weight, "eps": eps}

    def collapse(draw: Draw, num_rows: int, is_mean: bool) -> Arguments:
        pre = draw.mix(num_rows).pre
        return {"streams": streams(draw, num_rows), "weights": torch.full_like(pre, 1 / pre.shape[1]) if is_mean else pre}

    def norm8(draw: Draw, num_rows: int) -> Arguments:
        x = draw.normal(num_rows, draw.config.hidden_size)
        return {"x": x, "weight": _hyper(draw).norm, "eps": draw.config.rms_norm_eps}

    def context(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        stages = config.num_nextn_predict_layers
        return {
            "kv": draw.normal(num_rows, stages * config.head_dim),
            "weights": draw.normal(stages, config.head_dim, dtype=draw.wide),
            "rotation": draw.rotation(num_rows),
            "eps": config.rms_norm_eps,
        }

    def qkv(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        return {
            "qkv": draw.normal(num_rows, config.q_lora_rank + config.head_dim),
            "q_weight": draw.normal(config.q_lora_rank, dtype=draw.wide),
            "kv_weight": draw.normal(config.head_dim, dtype=draw.wide),
            "rotation": draw.rotation(num_rows),
            "eps": config.rms_norm_eps,
        }

    by_token = rows("streams", "delta", "mix")
    yield from _sizes(norm.mhc_post, post, by_token)
    yield from _sizes(norm.mhc_pre, pre, rows("streams", "pre"))
    yield Case(op=norm.mhc_pre, name="embedding in equal copies", build=first, num_rows=7, take=rows("streams", "pre"))
    yield from _sizes(norm.mhc_mix, mix, by_token)
    measured = rows("raw", "square_sum", "collapsed")
    yield from _sizes(norm.mhc_finish, finish, measured)
    yield Case(op=norm.mhc_finish, name="all zero", build=partial(finish, size=0.0), num_rows=3, take=measured)
    yield Case(op=norm.mhc_finish, name="far below one", build=partial(finish, size=2.0**-30), num_rows=3, take=measured)
    yield from _sizes(norm.mhc_collapse, partial(collapse, is_mean=False), rows("streams", "weights"))
    yield from _sizes(norm.mhc_collapse, partial(collapse, is_mean=True), rows("streams", "weights"), "mean")
    yield from _sizes(norm.final_norm, final, rows("streams", "pre"))
    yield from _sizes(norm.norm8, norm8, rows("x"))
    yield from _sizes(norm.qkv_norm, qkv, rows("qkv", "rotation"))
    yield from _sizes(norm.context_records, context, rows("kv", "rotation"))


# ------------------------------------------------------------------------------------------------------------------- attention


def _compressor(draw: Draw, ratio: int) -> attention.CompressorWeights:
    config = draw.config
    return attention.CompressorWeights(
        kv=draw.weight(ratio * config.head_dim, config.hidden_size),
        norm=draw.normal(config.head_dim, dtype=draw.wide),
        index_key=draw.weight(config.index_head_dim, config.head_dim),
        index_norm=draw.normal(config.index_head_dim, dtype=draw.wide),
        ratio=ratio,
        eps=config.rms_norm_eps,
    )


def _compressor_cases() -> Iterator[Case]:
    def project(draw: Draw, num_rows: int, ratio: int) -> Arguments:
        return {"x": draw.normal(num_rows, draw.config.hidden_size), "weights": _compressor(draw, ratio)}

    def compress(draw: Draw, num_rows: int, ratio: int) -> Arguments:
        width = ratio * draw.config.head_dim
        return {
            "raw": draw.normal(num_rows, width, dtype=draw.wide),
            "previous": draw.normal(num_rows, width, dtype=draw.wide) if ratio > 1 else None,
            "weights": _compressor(draw, ratio),
            "rotation": draw.rotation(num_rows),
            "dtype": draw.dtype,
        }

    for ratio in (1, 2):
        name = f"ratio {ratio}"
        yield from _sizes(attention.compress_project, partial(project, ratio=ratio), rows("x"), name)
        yield from _sizes(attention.compress, partial(compress, ratio=ratio), rows("raw", "previous", "rotation"), name)


def _spans(num_rows: int, page_tokens: int, far: int, device: torch.device) -> attention.Spans:
    """A step of up to three requests: a chunk from position 0, a chunk from an odd position, and a round after a long context."""
    in_round = min(2, num_rows)
    first, second = (num_rows - in_round) // 2, num_rows - in_round - (num_rows - in_round) // 2
    counts = [(0, first), (page_tokens + 1, second)]
    chunks: list[attention.Span] = []
    first_row = first_page = 0
    for start, count in counts:
        if count:
            num_pages = -(-(start + count) // page_tokens)
            chunks.append(
                attention.Span(first_row=first_row, num_rows=count, start=start, first_page=first_page, num_pages=num_pages)
            )
            first_row, first_page = first_row + count, first_page + num_pages
    positions = [start + number for start, count in (*counts, (far, in_round)) for number in range(count)]
    return attention.Spans(
        chunks=tuple(chunks),
        round_pages=(-(-(far + in_round) // page_tokens),),
        first_pages=torch.tensor([first_page], device=device),
        round_rows=torch.tensor([[*range(first_row, num_rows), num_rows]], device=device),
        positions=torch.tensor(positions, device=device),
    )


def _one_round_each(arguments: Arguments, index: Tensor) -> Arguments:
    """``Case.take`` of the operators that choose entries: every token becomes a round of its own with the same pages."""
    spans: attention.Spans = arguments["spans"]
    owners = [(span.first_page, span.num_pages) for span in spans.chunks for _ in range(span.num_rows)]
    owners += [(int(spans.first_pages[0]), spans.round_pages[0])] * (len(spans.positions) - len(owners))
    own = [owners[row] for row in index.tolist()]
    alone = attention.Spans(
        chunks=(),
        round_pages=tuple(num_pages for _, num_pages in own),
        first_pages=torch.tensor([first_page for first_page, _ in own], device=index.device),
        round_rows=torch.arange(len(own), device=index.device).unsqueeze(1),
        positions=spans.positions[index],
    )
    picked = {name: arguments[name][index] for name in ("q", "head_weights", "blocks") if name in arguments}
    return arguments | picked | {"spans": alone}


def _index(draw: Draw, num_rows: int, *, ratio: int, has_ties: bool) -> Arguments:
    """Arguments of all operators that choose entries: a store in shuffled pages, with more entries than are chosen."""
    config = draw.config
    page_tokens = config.sliding_window
    page_entries = page_tokens // ratio
    far = ratio * (2 * config.candidate_topk_blocks * config.candidate_block_size + config.index_topk + 3)
    spans = _spans(num_rows, page_tokens, far, draw.device)
    num_pages = int(spans.first_pages[-1]) + spans.round_pages[-1]
    q = draw.normal(num_rows, config.index_n_heads, config.index_head_dim)
    head_weights = draw.normal(num_rows, config.index_n_heads, dtype=draw.wide)
    if has_ties:
        q[..., 2:] = 0
        head_weights = head_weights.round()
    records = quant.encode_index(draw.normal((num_pages + 1) * page_entries, config.index_head_dim))
    split = config.index_head_dim // 2
    # In the pool the values of a page come before its scales, so neither part is contiguous.
    by_page = records.unflatten(0, (num_pages + 1, page_entries))
    pool = torch.cat([by_page[..., :split].flatten(1), by_page[..., split:].flatten(1)], dim=1)
    border = page_entries * split
    return {
        "q": quant.round_mxfp4(q),
        "head_weights": head_weights,
        "store": attention.IndexStore(
            values=pool[:, :border].unflatten(1, (page_entries, split)),
            scales=pool[:, border:].unflatten(1, (page_entries, config.index_head_dim // 32)),
            ratio=ratio,
            head_dim=config.index_head_dim,
        ),
        "page_ids": 1 + torch.randperm(num_pages, generator=draw.generator).to(draw.device),
        "spans": spans,
        "top_k": config.index_topk,
    }


def _index_cases() -> Iterator[Case]:
    def query(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        return {
            "q_latent8": draw.quantised(num_rows, config.q_lora_rank),
            "x": draw.normal(num_rows, config.hidden_size),
            "wq_b": draw.fp8(config.index_n_heads * config.index_head_dim, config.q_lora_rank),
            "weights_proj": draw.weight(config.index_n_heads, config.hidden_size),
            "rotation": draw.rotation(num_rows),
        }

    def topk(draw: Draw, num_rows: int, ratio: int, has_ties: bool) -> Arguments:
        return _index(draw, num_rows, ratio=ratio, has_ties=has_ties)

    def blocks(draw: Draw, num_rows: int, has_ties: bool) -> Arguments:
        sizes = {"top_blocks": draw.config.candidate_topk_blocks, "block_size": draw.config.candidate_block_size}
        return _index(draw, num_rows, ratio=1, has_ties=has_ties) | sizes

    def within(draw: Draw, num_rows: int, has_ties: bool) -> Arguments:
        arguments = blocks(draw, num_rows, has_ties)
        chosen = attention.index_blocks.reference(**arguments)[1]
        del arguments["top_blocks"]
        other_query = quant.round_mxfp4(arguments["q"].flip(-1))  # a later layer has another query
        return arguments | {"blocks": chosen, "q": other_query}

    yield from _sizes(attention.index_query, query, rows("q_latent8", "x", "rotation"))
    for has_ties in (False, True):
        name = "ties" if has_ties else "distinct"
        for ratio in (1, 2):
            build = partial(topk, ratio=ratio, has_ties=has_ties)
            yield from _sizes(attention.index_topk, build, _one_round_each, f"ratio {ratio}, {name}")
        yield from _sizes(attention.index_blocks, partial(blocks, has_ties=has_ties), _one_round_each, name)
        yield from _sizes(attention.index_topk_within, partial(within, has_ties=has_ties), _one_round_each, name)


def _attention_cases() -> Iterator[Case]:
    def attend(draw: Draw, num_rows: int, num_pages: int, is_full: bool) -> Arguments:
        """``num_pages`` pages of entries (0: a window-only layer); lists are full, or have random lengths, 0 included."""
        config = draw.config
        page_entries, reach = config.sliding_window, config.sliding_window
        record_pool = quant.encode_main(draw.normal((num_pages + 1) * page_entries, config.head_dim))
        pool = torch.nn.functional.pad(record_pool.unflatten(0, (num_pages + 1, page_entries)).flatten(1), (0, 64))
        store = pool[:, :-64].unflatten(1, (page_entries, -1)) if num_pages else None
        num_keys = reach - 1 + num_rows
        newest = reach - 1 + torch.arange(num_rows).unsqueeze(1)
        window_idx = (newest + torch.arange(1 - reach, 1)).to(draw.device)
        num_entries, top_k = num_pages * page_entries, config.index_topk
        lengths = torch.full((num_rows,), min(top_k, num_entries), device=draw.device)
        if not is_full:
            lengths = torch.minimum(lengths, draw.integers(0, top_k + 1, num_rows))
            is_seen = torch.arange(reach, device=draw.device) >= reach - draw.integers(1, reach + 1, num_rows).unsqueeze(1)
            window_idx = torch.where(is_seen, window_idx, -1)
        entry_idx = None
        if num_pages:
            order = torch.rand(num_rows, num_entries, generator=draw.generator).argsort(1)[:, :top_k].to(draw.device)
            order = torch.nn.functional.pad(order, (0, top_k - order.shape[1]))
            is_listed = torch.arange(top_k, device=draw.device) < lengths.unsqueeze(1)
            ascending = torch.where(is_listed, order, num_entries).sort(1).values
            entry_idx = torch.where(ascending < num_entries, ascending, -1)
        return {
            "q": draw.normal(num_rows, config.num_attention_heads, config.head_dim),
            "rotation": draw.rotation(num_rows),
            "sinks": draw.normal(config.num_attention_heads, dtype=draw.wide),
            "window": quant.encode_window(draw.normal(num_keys, config.head_dim)),
            "window_idx": window_idx,
            "store": store,
            "page_ids": 1 + torch.randperm(num_pages, generator=draw.generator).to(draw.device),
            "entry_idx": entry_idx,
        }

    def draft(draw: Draw, num_rows: int) -> Arguments:
        """Draft blocks: every token sees its block's context, of random length, and all tokens of its block."""
        config, width = draw.config, draw.config.dspark_block_size
        reach = config.sliding_window
        num_blocks = -(-num_rows // width)
        block = torch.arange(num_rows, device=draw.device).unsqueeze(1) // width
        context = torch.arange(reach, device=draw.device).expand(num_rows, -1)
        context = torch.where(context >= draw.integers(0, reach + 1, num_blocks)[block], context, -1)
        own = reach + block * width + torch.arange(width, device=draw.device)
        arguments = attend(draw, num_rows, 0, True)
        window = quant.encode_window(draw.normal(reach + num_blocks * width, config.head_dim))
        return arguments | {"window": window, "window_idx": torch.cat([context, own], dim=1)}

    take = rows("q", "rotation", "window_idx", "entry_idx")
    yield from _sizes(attention.sparse_attention, draft, take, "draft blocks")
    for name, num_pages in (("window only", 0), ("short context", 1), ("long context", 12)):
        for is_full in (True, False):
            build = partial(attend, num_pages=num_pages, is_full=is_full)
            yield from _sizes(attention.sparse_attention, build, take, f"{name}, {'full' if is_full else 'short'} lists")


# ---------------------------------------------------------------------------------------------------------------------- engram


def _engram_cases() -> Iterator[Case]:
    def hashed(draw: Draw, num_rows: int, dead_share: float) -> Arguments:
        config = draw.config
        classes, length = config.engram_compressed_vocab_size, config.engram_max_ngram_size
        primes = engram_primes(config)[0]
        offsets = list(itertools.accumulate(primes, initial=0))[:-1]
        ids = draw.integers(0, classes, num_rows, length)
        return {
            "ids": torch.where(draw.uniform(num_rows, length) < dead_share, engram.DEAD, ids),
            "multipliers": 2 * draw.integers(0, (2**63 - 1) // classes // 2, length) + 1,
            "primes": torch.tensor(primes, device=draw.device).unflatten(0, (length - 1, -1)),
            "offsets": torch.tensor(offsets, device=draw.device).unflatten(0, (length - 1, -1)),
            "pad_class": config.engram_pad_token_id,
        }

    def gather(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        codes, scale = quant.pack_table(draw.normal(1000, config.engram_head_dim, dtype=torch.float32))
        looked_up = draw.integers(0, 1000, num_rows, config.engram_columns)
        return {"codes": codes, "scale": scale, "rows": looked_up, "dtype": draw.dtype}

    def gate(draw: Draw, num_rows: int, size: float = 1.0) -> Arguments:
        config = draw.config
        n, hidden = config.hc_mult, config.hidden_size
        return {
            "kv": draw.normal(num_rows, (n + 1) * hidden) * size,
            "streams": draw.normal(num_rows, n, hidden),
            "q_weight": draw.normal(n, hidden, dtype=draw.wide),
            "k_weight": draw.normal(n, hidden, dtype=draw.wide),
            "is_image": draw.uniform(num_rows) < 0.3,
            "eps": config.rms_norm_eps,
        }

    yield from _sizes(engram.engram_rows, partial(hashed, dead_share=0.2), rows("ids"))
    yield Case(op=engram.engram_rows, name="all dead", build=partial(hashed, dead_share=2.0), num_rows=3, take=rows("ids"))
    yield from _sizes(engram.engram_gather, gather, rows("rows"))
    yield from _sizes(engram.engram_gate, gate, rows("kv", "streams", "is_image"))
    zero = partial(gate, size=0.0)
    yield Case(op=engram.engram_gate, name="zero keys", build=zero, num_rows=5, take=rows("kv", "streams", "is_image"))


# ------------------------------------------------------------------------------------------------------------------------- moe


def _take_picks(arguments: Arguments, index: Tensor) -> Arguments:
    """``Case.take`` of the experts: sorts the picks of the selected tokens again."""
    picks: moe.SortedPicks = arguments["picks"]
    num_experts = picks.counts.shape[0]
    by_expert = torch.repeat_interleave(torch.arange(num_experts, device=picks.counts.device), picks.counts)
    expert_ids = torch.empty_like(picks.order).index_copy_(0, picks.order, by_expert)
    own = expert_ids.view(arguments["expert_weights"].shape)[index]
    return rows("x8", "expert_weights")(arguments, index) | {"picks": moe.sort_picks.reference(own, num_experts)}


def _moe_cases() -> Iterator[Case]:
    def route(draw: Draw, num_rows: int, has_ties: bool = False) -> Arguments:
        config = draw.config
        gate = draw.weight(config.n_routed_experts, config.hidden_size)
        bias = draw.normal(config.n_routed_experts, dtype=draw.wide) / 5
        if has_ties:
            gate, bias = gate[:1].expand_as(gate).contiguous(), bias.round()
        return {
            "x": draw.normal(num_rows, config.hidden_size),
            "gate": gate,
            "bias": bias,
            "bias_image": draw.normal(config.n_routed_experts, dtype=draw.wide) / 5,
            "is_image": draw.uniform(num_rows) < 0.3,
            "top_k": config.num_experts_per_tok,
            "scale": config.routed_scaling_factor,
        }

    def expert_ids(draw: Draw, num_rows: int, is_skewed: bool) -> Tensor:
        """Distinct experts for each token; only the first few experts if ``is_skewed``."""
        config = draw.config
        num_hit = config.num_experts_per_tok + 1 if is_skewed else config.n_routed_experts
        priorities = torch.rand(num_rows, num_hit, generator=draw.generator)
        return priorities.argsort(1)[:, : config.num_experts_per_tok].to(draw.device)

    def picks(draw: Draw, num_rows: int, is_skewed: bool = False) -> Arguments:
        return {"expert_ids": expert_ids(draw, num_rows, is_skewed), "num_experts": draw.config.n_routed_experts}

    def experts(draw: Draw, num_rows: int, is_skewed: bool = False) -> Arguments:
        config = draw.config
        hidden, inter, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        return {
            "x8": draw.quantised(num_rows, hidden),
            "expert_weights": draw.uniform(num_rows, config.num_experts_per_tok),
            "picks": moe.sort_picks.reference(expert_ids(draw, num_rows, is_skewed), count),
            "w13": draw.fp4(count, 2 * inter, hidden),
            "w2": draw.fp4(count, hidden, inter),
            "limit": config.swiglu_limit,
        }

    def shared(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        weights = {"w13": draw.fp8(2 * inter, hidden), "w2": draw.fp8(hidden, inter)}
        return {"x8": draw.quantised(num_rows, hidden), **weights, "limit": config.swiglu_limit}

    def combine(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        parts = draw.normal(num_rows, config.num_experts_per_tok, config.hidden_size)
        return {"parts": parts, "shared": draw.normal(num_rows, config.hidden_size)}

    yield from _sizes(moe.route, route, rows("x", "is_image"))
    ties = partial(route, has_ties=True)
    yield Case(op=moe.route, name="ties", build=ties, num_rows=7, take=rows("x", "is_image"))
    yield from _sizes(moe.sort_picks, picks)
    yield from _sizes(moe.experts, experts, _take_picks)
    yield Case(op=moe.sort_picks, name="few experts", build=partial(picks, is_skewed=True), num_rows=40)
    yield Case(op=moe.experts, name="few experts", build=partial(experts, is_skewed=True), num_rows=40, take=_take_picks)
    yield from _sizes(moe.shared_expert, shared, rows("x8"))
    yield from _sizes(moe.combine, combine, rows("parts", "shared"))


# -------------------------------------------------------------------------------------------------------------------- sampling


def _sampling_rows(draw: Draw, num_rows: int, *, filters: bool) -> sampling.SamplingRows:
    """Rows of each kind in turn: temperatures 0, 0.7, 1 and 1.6; with ``filters`` also top-k, top-p and min-p."""
    kind = torch.arange(num_rows, device=draw.device)
    off = torch.zeros(num_rows, device=draw.device)
    return sampling.SamplingRows(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.6], device=draw.device)[kind % 4],
        top_k=torch.where(kind % 3 == 1, 5, -1) if filters else off.long(),
        top_p=torch.where(kind % 5 == 2, 0.8, 1.0) if filters else off + 1,
        min_p=torch.where(kind % 7 == 3, 0.05, 0.0) if filters else off,
        seeds=draw.integers(-(2**63), 2**63 - 1, num_rows),
        filters=filters,
    )


def _take_requests(arguments: Arguments, index: Tensor) -> Arguments:
    """``Case.take`` of verification: selects requests with their packed rows of logits."""
    lens = arguments["draft_lens"]
    ends = (lens + 1).cumsum(0)
    packed = [torch.arange(int(ends[each] - lens[each] - 1), int(ends[each])) for each in index.tolist()]
    per_request = ("draft_ids", "draft_logits", "draft_lens", "rows", "anchor_positions")
    picked = rows(*(name for name in per_request if name in arguments))(arguments, index)
    logits = arguments["target_logits"]
    return picked | {"target_logits": logits[torch.cat(packed).to(logits.device)]}


def _sampling_cases() -> Iterator[Case]:
    def scores(draw: Draw, num_rows: int, has_ties: bool = False) -> Tensor:
        values = 3 * draw.normal(num_rows, draw.config.vocab_size, dtype=draw.wide)
        return values.round() if has_ties else values

    def head(draw: Draw, num_rows: int) -> Arguments:
        config = draw.config
        return {"x": draw.normal(num_rows, config.hidden_size), "head": draw.weight(config.vocab_size, config.hidden_size)}

    def penalise(draw: Draw, num_rows: int) -> Arguments:
        vocab = draw.config.vocab_size
        kind = torch.arange(num_rows, device=draw.device)
        return {
            "logits": scores(draw, num_rows),
            "output_counts": draw.integers(-6, 4, num_rows, vocab).clamp_min(0).int(),
            "prompt_seen": draw.uniform(num_rows, vocab) < 0.3,
            "repetition": torch.tensor([1.0, 1.3, 0.8], device=draw.device)[kind % 3],
            "frequency": torch.tensor([0.0, 0.4, -0.7, 2.0], device=draw.device)[kind % 4],
            "presence": torch.tensor([0.0, 0.9, -1.1, 0.0, 0.3], device=draw.device)[kind % 5],
        }

    def logprobs(draw: Draw, num_rows: int) -> Arguments:
        return {"logits": scores(draw, num_rows), "ids": draw.integers(-1, draw.config.vocab_size, num_rows)}

    def top(draw: Draw, num_rows: int, has_ties: bool = False) -> Arguments:
        return {"logits": scores(draw, num_rows, has_ties), "k": 20}

    def verify(draw: Draw, num_rows: int, has_logits: bool | None = None) -> Arguments:
        """``num_rows`` requests; without the argument ``draft_logits`` if ``has_logits`` is None."""
        config = draw.config
        width = config.dspark_block_size
        lens = draw.integers(0, width + 1, num_rows)
        target = scores(draw, int(lens.sum()) + num_rows)
        starts = (lens + 1).cumsum(0) - lens - 1
        tested = (starts.unsqueeze(1) + torch.arange(width, device=draw.device)).clamp_max(target.shape[0] - 1)
        likely = target.argmax(-1)[tested]
        drafts = torch.where(draw.uniform(num_rows, width) < 0.7, likely, draw.integers(-1, config.vocab_size, num_rows, width))
        arguments = {
            "target_logits": target,
            "draft_ids": drafts,
            "draft_lens": lens,
            "rows": _sampling_rows(draw, num_rows, filters=True),
            "anchor_positions": draw.integers(0, 2**20, num_rows),
        }
        if has_logits is None:
            return arguments
        noise = draw.normal(num_rows, width, config.vocab_size, dtype=draw.wide)
        return arguments | {"draft_logits": target[tested] + noise if has_logits else None}

    def markov(draw: Draw, num_rows: int, mode: DraftSampling) -> Arguments:
        config = draw.config
        rank = config.dspark_markov_rank
        return {
            "base_logits": scores(draw, num_rows),
            "prev": draw.integers(0, config.vocab_size, num_rows),
            "embed": draw.normal(config.vocab_size, rank),
            "head": draw.weight(config.vocab_size, rank).to(draw.dtype),
            "hidden": draw.normal(num_rows, config.hidden_size),
            "confidence_weight": draw.weight(1, config.hidden_size + rank).to(draw.dtype),
            "rows": _sampling_rows(draw, num_rows, filters=False),
            "anchor_positions": draw.integers(0, 2**20, num_rows),
            "draft_idx": 3,
            "mode": mode,
            "confidence_temperature": 1.3,
        }

    def rounds(draw: Draw, num_rows: int, has_ties: bool = False, budget: int = 2) -> Arguments:
        """A budget of ``budget`` drafts per round; some rounds have smaller caps, and some rows are padding."""
        width = draw.config.dspark_block_size
        confidences = draw.uniform(num_rows, width, dtype=torch.float32)
        return {
            "confidences": confidences.round() if has_ties else confidences,
            "budget": budget * num_rows,
            "caps": draw.integers(-1, width + 2, num_rows),
            "starts": draw.integers(0, 2**20, num_rows),
            "token_ids": draw.integers(0, draw.config.vocab_size, num_rows, width + 1),
            "num_rows": (budget + 1) * num_rows + 3,
        }

    yield from _sizes(sampling.logits, head, rows("x"))
    penalised = rows("logits", "output_counts", "prompt_seen", "repetition", "frequency", "presence")
    yield from _sizes(sampling.penalise, penalise, penalised)
    yield from _sizes(sampling.token_logprobs, logprobs, rows("logits", "ids"))
    yield from _sizes(sampling.top_logprobs, top, rows("logits"))
    yield Case(op=sampling.top_logprobs, name="ties", build=partial(top, has_ties=True), num_rows=7, take=rows("logits"))
    for has_logits, name in ((True, "drawn drafts"), (False, "best drafts")):
        yield from _sizes(sampling.verify, partial(verify, has_logits=has_logits), _take_requests, name)
    yield from _sizes(sampling.verify_coupled, verify, _take_requests)
    modes: tuple[DraftSampling, ...] = ("argmax", "sampled", "coupled")
    for mode in modes:
        take = rows("base_logits", "prev", "hidden", "rows", "anchor_positions")
        yield from _sizes(sampling.markov_step, partial(markov, mode=mode), take, mode)
    yield from _sizes(sampling.lay_out_rounds, rounds)
    yield Case(op=sampling.lay_out_rounds, name="ties", build=partial(rounds, has_ties=True), num_rows=17)
    yield Case(op=sampling.lay_out_rounds, name="all that the caps admit", build=partial(rounds, budget=9), num_rows=17)
    yield Case(op=sampling.lay_out_rounds, name="anchors alone", build=partial(rounds, budget=0), num_rows=17)


# ---------------------------------------------------------------------------------------------------------------------- vision


def _grid(num_rows: int) -> tuple[int, int]:
    """Grid of at least ``num_rows`` patches; not square if it has several."""
    down = max(1, math.isqrt(num_rows) - 1)
    return down, -(-num_rows // down)


def _vision_block(draw: Draw) -> vision.VisionBlock:
    width, inner = draw.vision.hidden_size, draw.vision.intermediate_size
    return vision.VisionBlock(
        norm1=draw.normal(width, dtype=draw.wide),
        wqkv=draw.weight(3 * width, width).to(draw.dtype),
        wqkv_bias=draw.normal(3 * width),
        wo=draw.weight(width, width).to(draw.dtype),
        wo_bias=draw.normal(width),
        norm2=draw.normal(width, dtype=draw.wide),
        w1=draw.weight(2 * inner, width).to(draw.dtype),
        w2=draw.weight(width, inner).to(draw.dtype),
    )


def _vision_cases() -> Iterator[Case]:
    def patchify(draw: Draw, num_rows: int) -> Arguments:
        down, across = _grid(num_rows)
        size = draw.vision.patch_size
        return {"pixels": draw.normal(3, down * size, across * size), "patch_size": size}

    def embed(draw: Draw, num_rows: int) -> Arguments:
        width, values = draw.vision.hidden_size, 3 * draw.vision.patch_size**2
        weight = draw.weight(width, values).to(draw.dtype)
        return {"patches": draw.normal(num_rows, values), "weight": weight, "bias": draw.normal(width)}

    def attend(draw: Draw, num_rows: int) -> Arguments:
        down, across = _grid(num_rows)
        head_dim = draw.vision.hidden_size // draw.vision.num_attention_heads
        cos, sin = vision.rope_table(down, across, head_dim, draw.vision.rope_theta, draw.device)
        x = draw.normal(down * across, draw.vision.hidden_size)
        return {"x": x, "block": _vision_block(draw), "cos": cos, "sin": sin}

    def mlp(draw: Draw, num_rows: int) -> Arguments:
        return {"x": draw.normal(num_rows, draw.vision.hidden_size), "block": _vision_block(draw)}

    def cells(draw: Draw, num_rows: int) -> Arguments:
        down, across = _grid(num_rows)
        x = draw.normal(down * across, draw.vision.hidden_size)
        return {"x": x, "grid_h": down, "grid_w": across, "ratio": draw.vision.downsample_ratio}

    def align(draw: Draw, num_rows: int) -> Arguments:
        hidden, values = draw.config.hidden_size, draw.vision.hidden_size * draw.vision.downsample_ratio**2
        return {
            "x": draw.normal(num_rows, values),
            "w1": draw.weight(hidden, values).to(draw.dtype),
            "w1_bias": draw.normal(hidden),
            "w2": draw.weight(hidden, hidden).to(draw.dtype),
            "w2_bias": draw.normal(hidden),
        }

    yield from _sizes(vision.patchify, patchify)
    yield from _sizes(vision.patch_embed, embed, rows("patches"))
    yield from _sizes(vision.vision_attention, attend)
    yield from _sizes(vision.vision_mlp, mlp, rows("x"))
    yield from _sizes(vision.cells, cells)
    yield from _sizes(vision.aligner, align, rows("x"))


CASES: tuple[Case, ...] = (
    *_quant_cases(),
    *_norm_cases(),
    *_compressor_cases(),
    *_index_cases(),
    *_attention_cases(),
    *_engram_cases(),
    *_moe_cases(),
    *_sampling_cases(),
    *_vision_cases(),
)
"""Every operator has at least one case."""
