"""START HERE: the text model written for gradients.

The same network as :class:`deepinfer.model.flash.Flash`, over batches of packed documents instead of a step's rows and a cache.
Weights, activations, index vectors and cache records are rounded as the engine rounds them, and gradients pass straight through.
Two dtypes of activations: bf16 for training, fp64 for the proof that both are one model (``tests/training``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.config import ModelConfig, engram_primes
from deepinfer.model.engram import engram_multipliers
from deepinfer.ops.engram import DEAD, engram_rows
from deepinfer.ops.norm import rope_frequencies
from training import attention, choice, experts
from training.masters import Masters
from training.packing import Packed, Sight
from training.streams import Hyper, Rotation, Streams, gated, rms_norm


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the model computes for a batch of ``num_tokens`` tokens, sequence after sequence.

    Attributes:
        hidden: [num_tokens, hidden] normed for the LM head.
        aux: [num_tokens, num_targets * hidden] means of the streams that enter each layer of ``dspark_target_layer_ids``.
        loads: [num_layers, num_experts] int64 picks of each expert.
        load_loss: [] wide, the mean of :class:`~training.experts.Load` over layers.
        index_loss: [] wide, summed over layers with a store; None if it was not asked for.
        chosen: index source layer -> [batch, length, num_entries] bool entries that each query may read; empty if attention is
            dense.
    """

    hidden: Tensor
    aux: Tensor
    loads: Tensor
    load_loss: Tensor
    index_loss: Tensor | None
    chosen: dict[int, Tensor]


class LayerWeights:
    """Rounded weights of the layers by their names behind ``layers.N.``; experts are stacked."""

    def __init__(self, masters: Masters, dtype: torch.dtype, root: str, num_layers: int, *, is_quantised: bool = True) -> None:
        """Round all masters once, as in :meth:`Masters.rounded`; ``root`` is ``layers`` or ``mtp``."""
        self.all = masters.rounded(dtype, is_quantised=is_quantised)
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        for kind, stack in masters.stacks.items():
            if kind not in self.all or not kind.startswith(f"{root}.*."):
                continue
            name = kind.removeprefix(f"{root}.*.")
            layer_ids = [int(spec.name.split(".")[1]) for spec in stack.specs]
            if ".experts.*." in kind:
                count = layer_ids.count(layer_ids[0])
                layer_ids = layer_ids[::count]
                parts = self.all[kind].unflatten(0, (-1, count)).unbind()
            else:
                parts = stack.split(self.all[kind])
            for layer, part in zip(layer_ids, parts, strict=True):
                self.layers[layer][name] = part

    def hyper(self, layer: int, sublayer: str) -> Hyper:
        """Weights around the sublayer ``attn`` or ``ffn``."""
        own = self.layers[layer]
        fn, base, scale = (own[f"hc_{sublayer}_{name}"] for name in ("fn", "base", "scale"))
        return Hyper(fn, base, scale, own[f"{sublayer}_norm.weight"])

    def attention(self, layer: int) -> dict[str, Tensor]:
        """Weights by their names behind ``layers.N.attn.``."""
        return {name.removeprefix("attn."): each for name, each in self.layers[layer].items() if name.startswith("attn.")}


class Grams:
    """Rows of Engram's tables for each token."""

    def __init__(self, config: ModelConfig, compression: Tensor) -> None:
        """``compression`` [vocab_size] int64 maps token ids to compressed ids."""
        self._config = config
        self._compression = compression
        self._pad_class = int(compression[config.engram_pad_token_id])
        self._constants = {}
        for layer, primes in zip(config.engram_layer_ids, engram_primes(config), strict=True):
            offsets = (0, *itertools.accumulate(primes[:-1]))
            numbers = (engram_multipliers(layer, config), primes, offsets)
            self._constants[layer] = [torch.tensor(each, device=compression.device) for each in numbers]

    def rows(self, packed: Packed, layer: int) -> Tensor:
        """[num_tokens, num_columns] int64 rows of the layer's table."""
        compressed = self._compression[packed.token_ids]
        known = []
        for shift in range(self._config.engram_max_ngram_size):
            earlier = F.pad(compressed, (shift, 0))[:, : packed.length]
            known.append(torch.where(packed.positions >= shift, earlier, DEAD))
        multipliers, primes, offsets = self._constants[layer]
        heads = (-1, self._config.engram_n_heads)
        ids = torch.stack(known, dim=-1).flatten(0, 1)
        return engram_rows.reference(ids, multipliers, primes.unflatten(0, heads), offsets.unflatten(0, heads), self._pad_class)


class Twin:
    """The network.

    Attributes:
        config: its shape.
        masters: its weights.
        dtype: of activations.
    """

    def __init__(self, masters: Masters, compression: Tensor, dtype: torch.dtype) -> None:
        """``compression`` [vocab_size] int64 maps token ids to Engram's compressed ids; it says the device too."""
        self.config = config = masters.config
        self.masters = masters
        self.dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._grams = Grams(config, compression)
        rope, device = config.qk_rope_head_dim, compression.device
        self._plain = rope_frequencies(rope, config.rope_theta, None).to(device, self._wide)
        self._scaled = rope_frequencies(rope, config.compress_rope_theta, config.rope_scaling).to(device, self._wide)

    def weights(self, *, is_quantised: bool = True) -> LayerWeights:
        """The rounded weights; one call serves all passes until the masters change."""
        return LayerWeights(self.masters, self.dtype, "layers", self.config.num_hidden_layers, is_quantised=is_quantised)

    def logits(self, hidden: Tensor, weights: LayerWeights) -> Tensor:
        """[num_tokens, vocab_size] wide."""
        return F.linear(hidden.to(self._wide), weights.all["head.weight"][0].to(self._wide))

    def run(
        self, packed: Packed, weights: LayerWeights, *, is_sparse: bool = True, index_places: Tensor | None = None
    ) -> Outputs:
        """The pass up to the LM head.

        Args:
            packed: the batch; its length is a multiple of 128 on a GPU.
            weights: of :meth:`weights`.
            is_sparse: let a query read the entries that the indexer chooses; otherwise all visible ones.
            index_places: [batch, num_queries] int64, tokens on which the indexers are compared with the attention.
        """
        config, batch = self.config, packed.batch
        eps = config.rms_norm_eps
        embedded = F.embedding(packed.token_ids.flatten(), weights.all["embed.weight"][0])
        streams = Streams(embedded, config.hc_mult, num_rounds=config.hc_sinkhorn_iters, hc_eps=config.hc_eps, rms_eps=eps)
        positions = packed.positions.clamp_min(0).flatten()
        plain, scaled = Rotation.at(positions, self._plain), Rotation.at(positions, self._scaled)

        aux: list[Tensor] = []
        loads: list[experts.Load] = []
        losses: list[Tensor] = []
        chosen: dict[int, Tensor] = {}
        candidates: Tensor | None = None
        sight = Sight(packed, 0, config.sliding_window)
        store: attention.Store | None = None
        query: attention.IndexQuery | None = None
        for layer in range(config.num_hidden_layers):
            own = weights.layers[layer]
            if layer in config.engram_layer_ids:
                streams.values = self._remember(packed, layer, streams.written(), weights)
            x, x8 = streams.enter(weights.hyper(layer, "attn"))
            if layer in config.dspark_target_layer_ids:
                aux.append(streams.values.to(self._wide).mean(1).to(self.dtype))

            attn = weights.attention(layer)
            ratio = config.ratio(layer)
            rotation = scaled if ratio else plain
            q, keys, q_latent8 = attention.project(x8, attn, rotation, config.num_attention_heads, eps)
            if layer in config.kv_source_layer_ids:
                first = Rotation(*(each.unflatten(0, (-1, ratio))[:, 0] for each in scaled))
                store = attention.compress(x, attn, ratio, first, batch, eps)
            if layer in config.index_source_layer_ids:
                assert store is not None
                query = attention.index_query(q_latent8, x, attn, rotation, batch)
                entries = None
                if is_sparse:
                    entries, candidates = self._choose(query, store, packed, layer, candidates)
                    chosen[layer] = entries
                sight = Sight(packed, ratio, config.sliding_window, entries)
            q, keys = q.unflatten(0, (batch, -1)), keys.unflatten(0, (batch, -1))
            read = store if ratio else None
            sinks = attn["attn_sink"]
            out = attention.mixed(q, keys, read, sinks, sight).flatten(0, 1)
            if read is not None and index_places is not None:
                assert query is not None
                losses.append(attention.index_loss(q, keys, read, sinks, query, packed, config.sliding_window, index_places))
            streams.leave(attention.projected_out(out, attn["wo_a.weight"], attn["wo_b.weight"], rotation, config.o_groups))

            x, x8 = streams.enter(weights.hyper(layer, "ffn"))
            delta, load = feed_forward(x, x8, own, config.num_experts_per_tok, config, packed.positions >= 0)
            streams.leave(delta)
            loads.append(load)

        return Outputs(
            hidden=rms_norm(streams.collapsed(), weights.all["norm.weight"][0], eps),
            aux=torch.cat(aux, dim=1) if aux else embedded[:, :0],
            loads=torch.stack([each.counts for each in loads]),
            load_loss=torch.stack([each.loss for each in loads]).mean(),
            index_loss=torch.stack(losses).sum() if losses else None,
            chosen=chosen,
        )

    def _remember(self, packed: Packed, layer: int, streams: Tensor, weights: LayerWeights) -> Tensor:
        """Streams [num_tokens, n, hidden] with what Engram looks up for the layer."""
        own = weights.layers[layer]
        values = F.embedding(self._grams.rows(packed, layer), own["engram.embed.weight"]).flatten(1)
        kv = F.linear(values, own["engram.wkv.weight"])
        return gated(kv, streams, own["engram.q_weight"], own["engram.k_weight"], self.config.rms_norm_eps)

    def _choose(
        self, query: attention.IndexQuery, store: attention.Store, packed: Packed, layer: int, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Entries that each query reads, and the candidates from the candidate layer on."""
        config = self.config
        values = choice.visible_scores(query.q, query.weights, store.index_keys, packed, store.ratio)
        if layer == config.candidate_source_layer_id:
            sizes = (config.candidate_topk_blocks, config.candidate_block_size)
            candidates = choice.candidates(values, store.ratio, *sizes)
        elif candidates is not None:
            values = values.masked_fill(~candidates, -torch.inf)
        return choice.best(values, config.index_topk), candidates


def feed_forward(
    x: Tensor, x8: Tensor, own: dict[str, Tensor], top_k: int, config: ModelConfig, is_known: Tensor
) -> tuple[Tensor, experts.Load]:
    """The mixture of experts of one layer or draft stage.

    Args:
        x, x8: [num_tokens, hidden] normed input, and the same on the MXFP8 grid.
        own: the layer's weights.
        is_known: [batch, length] bool which of the tokens count for the load.

    Returns:
        [num_tokens, hidden], and the load of the experts.
    """
    limit = config.swiglu_limit
    bias = own["ffn.gate.bias"]
    expert_ids, shares, affinities = experts.route(x, own["ffn.gate.weight"], bias, top_k, config.routed_scaling_factor)
    w1, w3, w2 = (own[f"ffn.experts.*.{name}.weight"] for name in ("w1", "w3", "w2"))
    total = experts.routed(x8, expert_ids, shares, w1, w3, w2, limit)
    w1, w3, w2 = (own[f"ffn.shared_experts.{name}.weight"] for name in ("w1", "w3", "w2"))
    load = experts.load_of(affinities, expert_ids, is_known)
    return (total + experts.shared_expert(x8, w1, w3, w2, limit, bias.dtype)).to(x.dtype), load
