"""Checkpoint names -> shapes, dtypes and split over ranks.

The reader, the writer, the random weights and the inventory use this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer.config import QUANT_BLOCK, ModelConfig
from deepinfer.errors import ConfigError

StoredDtype = Literal["BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"]
Storage = Literal["plain", "fp8", "fp8_scale", "fp4", "fp4_scale", "table", "table_scale"]
Split = Literal["replicated", "expert", "row"]
Component = Literal[
    "embedding",
    "head",
    "norms",
    "attention",
    "compressors",
    "indexers",
    "router",
    "routed experts",
    "shared experts",
    "mHC",
    "Engram projections",
    "Engram tables",
    "DSpark",
    "vision",
]

TORCH_DTYPES: dict[StoredDtype, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
"""Dtype in a header -> dtype of the tensor in memory; scales and packed FP4 stay raw bytes."""

INDEX_NAME = "model.safetensors.index.json"
MAX_LISTED = 5
"""A message names at most this many tensors of one kind."""
UNIT_SPREAD = math.sqrt(12.0)
"""Width of the interval of a uniform variable with variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One stored tensor.

    Attributes:
        name: name in the checkpoint, without the optional prefix ``model.``.
        shape: shape in the checkpoint; an FP4 weight stores two values in a byte.
        dtype: name of the dtype in safetensors.
        storage: meaning of the bytes; a ``*_scale`` tensor scales the weight before it in the table.
        component: component of the parameter inventory that counts this tensor.
        split: part that an expert-parallel rank holds.  ``replicated``: the whole tensor.  ``expert``: the whole tensor if the
            rank holds the expert.  ``row``: every ep_size-th table row.
        expert_id: routed expert that the tensor belongs to; 0 for other tensors.
        num_experts: routed experts in the layer of that expert.
        mean, spread: golden weights are mean + spread * u; u is uniform in [-1/2, 1/2).  Random weights have the same mean and
            variance.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredDtype
    storage: Storage
    component: Component
    split: Split = "replicated"
    expert_id: int = 0
    num_experts: int = 1
    mean: float = 0.0
    spread: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the checkpoint."""
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize

    @property
    def num_parameters(self) -> int:
        """Number of weights; 0 for a scale."""
        if self.storage.endswith("_scale"):
            return 0
        return math.prod(self.shape) * (2 if self.storage == "fp4" else 1)

    def is_local(self, ep_rank: int, ep_size: int) -> bool:
        """Whether the rank holds a part of this tensor; each rank holds a contiguous range of experts."""
        return self.split != "expert" or self.expert_id * ep_size // self.num_experts == ep_rank

    def local_shape(self, ep_rank: int, ep_size: int) -> tuple[int, ...]:
        """Shape of the rank's part: table rows ep_rank, ep_rank + ep_size, …; other tensors are whole."""
        if self.split != "row":
            return self.shape
        return (len(range(ep_rank, self.shape[0], ep_size)), *self.shape[1:])


# ------------------------------------------------------------------ the table


def _plain(
    name: str,
    shape: tuple[int, ...],
    component: Component,
    *,
    mean: float = 0.0,
    spread: float | None = None,
    fan_in: int | None = None,
    dtype: StoredDtype = "BF16",
) -> TensorSpec:
    """An unquantised tensor; without ``spread`` its variance is 1 / fan-in.  Fan-in is the last dimension unless given."""
    if spread is None:
        spread = UNIT_SPREAD / math.sqrt(fan_in or shape[-1])
    return TensorSpec(name=name, shape=shape, dtype=dtype, storage="plain", component=component, mean=mean, spread=spread)


def _gain(name: str, shape: tuple[int, ...], component: Component) -> TensorSpec:
    return _plain(name, shape, component, mean=1.0, spread=0.5)


def _packed(
    prefix: str,
    storage: Literal["fp8", "fp4", "table"],
    shape: tuple[int, int],
    component: Component,
    *,
    spread: float | None = None,
    split: Split = "replicated",
    expert: tuple[int, int] = (0, 1),
) -> Iterator[TensorSpec]:
    """A quantised matrix [out_width, in_width] and its scale; ``expert`` is (id, number of experts)."""
    out_width, in_width = shape
    scale_rows = -(-out_width // QUANT_BLOCK) if storage == "fp8" else out_width
    yield TensorSpec(
        name=f"{prefix}.weight",
        shape=(out_width, in_width // 2) if storage == "fp4" else shape,
        dtype="I8" if storage == "fp4" else "F8_E4M3",
        storage=storage,
        component=component,
        split=split,
        expert_id=expert[0],
        num_experts=expert[1],
        spread=UNIT_SPREAD / math.sqrt(in_width) if spread is None else spread,
    )
    scales: dict[str, Storage] = {"fp8": "fp8_scale", "fp4": "fp4_scale", "table": "table_scale"}
    yield TensorSpec(
        name=f"{prefix}.scale",
        shape=(scale_rows, -(-in_width // QUANT_BLOCK)),
        dtype="F8_E8M0",
        storage=scales[storage],
        component=component,
        split=split,
        expert_id=expert[0],
        num_experts=expert[1],
    )


def _fp8(prefix: str, out_width: int, in_width: int, component: Component) -> Iterator[TensorSpec]:
    return _packed(prefix, "fp8", (out_width, in_width), component)


def _attention(config: ModelConfig, prefix: str, component: Component) -> Iterator[TensorSpec]:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    o_width = config.o_groups * config.o_lora_rank
    yield from _fp8(f"{prefix}.wq_a", config.q_lora_rank, hidden, component)
    yield from _fp8(f"{prefix}.wq_b", heads * head_dim, config.q_lora_rank, component)
    yield from _fp8(f"{prefix}.wkv", head_dim, hidden, component)
    yield from _fp8(f"{prefix}.wo_a", o_width, heads * head_dim // config.o_groups, component)
    yield from _fp8(f"{prefix}.wo_b", hidden, o_width, component)
    yield _gain(f"{prefix}.q_norm.weight", (config.q_lora_rank,), component)
    yield _gain(f"{prefix}.kv_norm.weight", (head_dim,), component)
    yield _plain(f"{prefix}.attn_sink", (heads,), component, spread=UNIT_SPREAD, dtype="F32")


def _global_attention(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Compressor and index keys if the layer writes a store; index queries if the layer chooses entries."""
    prefix, hidden, head_dim = f"layers.{layer}.attn", config.hidden_size, config.head_dim
    if config.kind(layer) == "full":
        yield _plain(f"{prefix}.compressor.wkv.weight", (head_dim, hidden), "compressors")
        if config.ratio(layer) == 2:
            spread = 3 * UNIT_SPREAD / math.sqrt(hidden)
            yield _plain(f"{prefix}.compressor.wgate.weight", (head_dim, hidden), "compressors", spread=spread)
        yield _gain(f"{prefix}.compressor.norm.weight", (head_dim,), "compressors")
        yield _plain(f"{prefix}.indexer.wk.weight", (config.index_head_dim, head_dim), "indexers")
        yield _gain(f"{prefix}.indexer.k_norm.weight", (config.index_head_dim,), "indexers")
    if config.kind(layer) in ("full", "reindex"):
        yield from _fp8(f"{prefix}.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, "indexers")
        yield _plain(f"{prefix}.indexer.weights_proj.weight", (config.index_n_heads, hidden), "indexers")


def _block(config: ModelConfig, prefix: str, num_experts: int, draft: Component | None) -> Iterator[TensorSpec]:
    """Tensors of one layer or draft layer; ``draft`` replaces the component if it is given."""
    hidden, copies = config.hidden_size, config.hc_mult
    mixes = 2 * copies + copies * copies
    yield from _attention(config, f"{prefix}.attn", draft or "attention")
    yield _gain(f"{prefix}.attn_norm.weight", (hidden,), draft or "norms")
    yield _gain(f"{prefix}.ffn_norm.weight", (hidden,), draft or "norms")
    for part in ("attn", "ffn"):
        mhc = draft or "mHC"
        yield _plain(f"{prefix}.hc_{part}_fn", (mixes, copies * hidden), mhc, dtype="F32")
        yield _plain(f"{prefix}.hc_{part}_base", (mixes,), mhc, spread=math.sqrt(3.0), dtype="F32")
        yield _plain(f"{prefix}.hc_{part}_scale", (3,), mhc, mean=1.0, spread=1.0, dtype="F32")
    yield _plain(f"{prefix}.ffn.gate.weight", (num_experts, hidden), draft or "router")
    yield _plain(f"{prefix}.ffn.gate.bias", (num_experts,), draft or "router", spread=0.2, dtype="F32")
    yield _plain(f"{prefix}.ffn.gate.bias_vl", (num_experts,), draft or "router", spread=0.2, dtype="F32")
    inter = config.moe_intermediate_size
    for matrix, out_width, in_width in (("w1", inter, hidden), ("w2", hidden, inter), ("w3", inter, hidden)):
        yield from _fp8(f"{prefix}.ffn.shared_experts.{matrix}", out_width, in_width, draft or "shared experts")
    for expert_id in range(num_experts):
        name, expert = f"{prefix}.ffn.experts.{expert_id}", (expert_id, num_experts)
        for matrix, shape in (("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))):
            yield from _packed(f"{name}.{matrix}", "fp4", shape, draft or "routed experts", split="expert", expert=expert)


def _engram(config: ModelConfig, layer: int, num_rows: int) -> Iterator[TensorSpec]:
    prefix, hidden, copies, dim = f"layers.{layer}.engram", config.hidden_size, config.hc_mult, config.engram_head_dim
    yield from _packed(f"{prefix}.embed", "table", (num_rows, dim), "Engram tables", spread=UNIT_SPREAD, split="row")
    yield from _fp8(f"{prefix}.wkv", (copies + 1) * hidden, config.engram_columns * dim, "Engram projections")
    yield _gain(f"{prefix}.q_weight", (copies, hidden), "Engram projections")
    yield _gain(f"{prefix}.k_weight", (copies, hidden), "Engram projections")


def _drafter(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    last = config.num_nextn_predict_layers - 1
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}"
        yield from _block(config, prefix, config.dspark_n_routed_experts, "DSpark")
        if stage == 0:
            yield from _fp8(f"{prefix}.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden, "DSpark")
            yield _gain(f"{prefix}.main_norm.weight", (hidden,), "DSpark")
        if stage == last:
            yield _gain(f"{prefix}.norm.weight", (hidden,), "DSpark")
            yield _plain(f"{prefix}.markov_head.embed.weight", (vocab, rank), "DSpark", spread=UNIT_SPREAD)
            yield _plain(f"{prefix}.markov_head.head.weight", (vocab, rank), "DSpark")
            yield _plain(f"{prefix}.confidence_head.proj.weight", (1, hidden + rank), "DSpark")


def _affine(prefix: str, out_width: int, in_width: int) -> Iterator[TensorSpec]:
    yield _plain(f"{prefix}.weight", (out_width, in_width), "vision")
    yield _plain(f"{prefix}.bias", (out_width,), "vision", fan_in=in_width)


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    vision = config.vision
    if vision is None:
        return
    width, inter = vision.hidden_size, vision.intermediate_size
    yield from _affine("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield _gain(f"{prefix}.norm1.weight", (width,), "vision")
        yield _gain(f"{prefix}.norm2.weight", (width,), "vision")
        yield from _affine(f"{prefix}.attn.wqkv", 3 * width, width)
        yield from _affine(f"{prefix}.attn.wo", width, width)
        yield _plain(f"{prefix}.mlp.w1.weight", (2 * inter, width), "vision")
        yield _plain(f"{prefix}.mlp.w2.weight", (width, inter), "vision")
    yield _gain("vision.norm.weight", (width,), "vision")
    yield from _affine("aligner.w1", config.hidden_size, width * vision.downsample_ratio**2)
    yield from _affine("aligner.w2", config.hidden_size, config.hidden_size)


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield the tensors of :func:`tensor_table` in order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _plain("embed.weight", (vocab, hidden), "embedding", spread=UNIT_SPREAD)
    yield _plain("head.weight", (vocab, hidden), "head")
    yield _gain("norm.weight", (hidden,), "norms")
    for name in ("image_start", "image_end", "image_newline") if config.vision else ():
        yield _plain(name, (hidden,), "vision", spread=UNIT_SPREAD)
    tables = dict(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True))
    for layer in range(config.num_hidden_layers):
        yield from _block(config, f"layers.{layer}", config.n_routed_experts, None)
        yield from _global_attention(config, layer)
        if layer in tables:
            yield from _engram(config, layer, tables[layer])
    yield from _drafter(config)
    yield from _vision(config)


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint by name, in this order: global tensors, layers, draft layers, vision.

    Source: the published checkpoint's tensor inventory.  Means and spreads are our own choice.  A matrix has variance
    1 / fan-in.  A bias has the variance of its matrix.  A looked-up vector has variance 1.

    Cost: 0.4 s and 40 MB for the published model's 96,085 tensors.
    """
    return {spec.name: spec for spec in tensor_specs(config)}


def check_ranks(config: ModelConfig, ep_size: int, spare_experts: int = 0) -> None:
    """Check that every rank can hold the same number of experts.

    Raises:
        ConfigError: an expert count is not a multiple of ``ep_size``.
    """
    counts = [("n_routed_experts plus spare experts", config.n_routed_experts + spare_experts)]
    if config.num_nextn_predict_layers:
        counts.append(("dspark_n_routed_experts", config.dspark_n_routed_experts))
    for name, count in counts:
        if ep_size < 1 or count % ep_size:
            raise ConfigError(
                f"ep_size={ep_size} does not divide {name} = {count}; choose a divisor or another number of spare experts"
            )
