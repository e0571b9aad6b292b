"""One layer's attention: window keys, compressed store, indexer, and the projections around them.

A layer of kind *full* writes a store with its :class:`Compressor` and chooses entries in it.  A *reindex* layer chooses entries
in the store of an earlier layer.  A *reuse* layer uses the store and the entries of earlier layers.  A *window* layer has no
store.  A :class:`Choice` passes the chosen entries to later layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kv.cache import KVCache
from deepinfer.model.inputs import LayerInputs
from deepinfer.model.parameters import Parameters
from deepinfer.ops import attention as ops
from deepinfer.ops.norm import Rotation, qkv_norm
from deepinfer.ops.quant import QuantisedRows, linear_fp8, linear_fp8_grouped, quantise


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotations:
    """Rotations of a step's positions.

    Attributes:
        plain: rotation for window-only layers.
        scaled: rotation for layers with compressed keys.
        entries: compress ratio -> rotation at the first position of each token's entry.
    """

    plain: Rotation
    scaled: Rotation
    entries: dict[int, Rotation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Entries that a layer chose, for itself and later layers.

    Attributes:
        entry_idx: [num_tokens, index_topk] int64 indices of the chosen entries.
        blocks: [num_tokens, candidate_topk_blocks] int64 candidate blocks; None before the candidate layer.
    """

    entry_idx: Tensor
    blocks: Tensor | None = None


class Compressor:
    """Writes a layer's store: one main record and one index key per group of ``ratio`` tokens."""

    def __init__(self, parameters: Parameters, prefix: str, layer: int, config: ModelConfig) -> None:
        """Weights ``{prefix}.compressor.*`` and the key side of ``{prefix}.indexer.*``."""
        self.layer = layer
        self.ratio = config.ratio(layer)
        self.dtype = parameters.dtype
        projections = [parameters.wide(f"{prefix}.compressor.wkv.weight")]
        if self.ratio > 1:
            projections.append(parameters.wide(f"{prefix}.compressor.wgate.weight"))
        self.weights = ops.CompressorWeights(
            kv=torch.cat(projections),
            norm=parameters.wide(f"{prefix}.compressor.norm.weight"),
            index_key=parameters.wide(f"{prefix}.indexer.wk.weight"),
            index_norm=parameters.wide(f"{prefix}.indexer.k_norm.weight"),
            ratio=self.ratio,
            eps=config.rms_norm_eps,
        )

    def __call__(self, x: Tensor, inputs: LayerInputs, cache: KVCache, rotations: Rotations) -> None:
        """Compress x [num_tokens, hidden] and store every entry that this step completes."""
        raw = ops.compress_project(x, self.weights)
        previous = None
        if self.ratio > 1:
            # The older token of a pair is the row before.  For a request's first row it is in the ring of an earlier step.
            ring = cache.compressor(self.layer)
            before = inputs.compressor_before
            previous = before.gather(ring, raw)[before.idx[:, 0]]
            inputs.compressor.write(ring, raw)
        main, index = ops.compress(raw, previous, self.weights, rotations.entries[self.ratio], self.dtype)
        where = inputs.store_rows[self.ratio]
        cache.main(self.layer)[where.pages, where.entries] = main
        store = cache.index(self.layer)
        split = store.values.shape[2]
        store.values[where.pages, where.entries] = index[:, :split]
        store.scales[where.pages, where.entries] = index[:, split:]


class Indexer:
    """Chooses entries of the store that the layer reads."""

    def __init__(self, parameters: Parameters, prefix: str, layer: int, config: ModelConfig) -> None:
        """Weights of the query side of ``{prefix}.indexer.*``."""
        self.config = config
        self.source = config.kv_source(layer)
        self.is_candidate_source = layer == config.candidate_source_layer_id
        self.is_within = layer > config.candidate_source_layer_id
        self.wq_b = parameters.fp8(f"{prefix}.indexer.wq_b")
        self.weights_proj = parameters.wide(f"{prefix}.indexer.weights_proj.weight")

    def __call__(
        self, q_latent8: QuantisedRows, x: Tensor, inputs: LayerInputs, cache: KVCache, rotation: Rotation, below: Choice | None
    ) -> Choice:
        """Choose for every token; layers after the candidate layer take its blocks from ``below``, the last earlier choice."""
        config = self.config
        q, head_weights = ops.index_query(q_latent8, x, self.wq_b, self.weights_proj, rotation)
        store = cache.index(self.source)
        where = (store, inputs.page_ids, inputs.spans, config.index_topk)
        if self.is_candidate_source:
            entry_idx, blocks = ops.index_blocks(
                q, head_weights, *where, config.candidate_topk_blocks, config.candidate_block_size
            )
            return Choice(entry_idx=entry_idx, blocks=blocks)
        if self.is_within:
            candidates = below.blocks if below is not None else None
            assert candidates is not None, "the candidate layer runs before this layer"
            entry_idx = ops.index_topk_within(q, head_weights, *where, candidates, config.candidate_block_size)
            return Choice(entry_idx=entry_idx, blocks=candidates)
        return Choice(entry_idx=ops.index_topk(q, head_weights, *where))


class Attention:
    """Attention of one layer."""

    def __init__(self, parameters: Parameters, prefix: str, layer: int, config: ModelConfig) -> None:
        """Weights ``{prefix}.*`` (``layers.N.attn``)."""
        self.config = config
        self.layer = layer
        self.has_store = config.ratio(layer) > 0
        self.wqkv = parameters.fp8(f"{prefix}.wq_a", f"{prefix}.wkv")
        self.q_norm = parameters.wide(f"{prefix}.q_norm.weight")
        self.kv_norm = parameters.wide(f"{prefix}.kv_norm.weight")
        self.wq_b = parameters.fp8(f"{prefix}.wq_b")
        self.sinks = parameters.wide(f"{prefix}.attn_sink")
        self.wo_a = parameters.fp8(f"{prefix}.wo_a")
        self.wo_b = parameters.fp8(f"{prefix}.wo_b")
        kind = config.kind(layer)
        self.indexer = Indexer(parameters, prefix, layer, config) if kind in ("full", "reindex") else None

    def __call__(
        self, x: Tensor, x8: QuantisedRows, inputs: LayerInputs, cache: KVCache, rotations: Rotations, below: Choice | None
    ) -> tuple[Tensor, Choice | None]:
        """Attend.

        Args:
            x: [num_tokens, hidden] normed input.
            x8: the same, quantised.
            below: last choice of an earlier layer, or None.

        Returns:
            y: [num_tokens, hidden].
            choice: argument ``below`` of the next layer.
        """
        config = self.config
        rotation = rotations.scaled if self.has_store else rotations.plain
        q_latent8, records = qkv_norm(linear_fp8(x8, self.wqkv), self.q_norm, self.kv_norm, rotation, config.rms_norm_eps)
        choice = below
        if self.indexer is not None:
            choice = self.indexer(q_latent8, x, inputs, cache, rotation, below)
        store = entry_idx = None
        if self.has_store:
            assert choice is not None, "this or an earlier layer chose entries"
            store, entry_idx = cache.main(config.kv_source(self.layer)), choice.entry_idx
        q = linear_fp8(q_latent8, self.wq_b).unflatten(1, (config.num_attention_heads, config.head_dim))
        ring, before = cache.window(self.layer), inputs.window_before
        window = before.gather(ring, records)
        inputs.window.write(ring, records)
        out = ops.sparse_attention(q, rotation, self.sinks, window, before.idx, store, inputs.page_ids, entry_idx)
        z = linear_fp8_grouped(out.unflatten(1, (config.o_groups, -1)).flatten(2), self.wo_a)
        return linear_fp8(quantise(z), self.wo_b), choice
