"""Checkpoint names -> tensors: one table says what a model directory holds; reading, writing and making weights follow it.

Owns the published file format (safetensors shards, an index, ``config.json``) and the seeded weights of tests.

Invariant: a directory is read only if its headers agree with :func:`tensor_table` name for name, shape for shape, dtype for
dtype; nothing is skipped, guessed or converted.

Place in the flow: the worker calls :func:`read_checkpoint` once; the network's modules take their tensors out of the result by
the names of the table.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.config import QUANT_BLOCK, ModelConfig, config_json
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.progress import progress_bar
from deepinfer.ops.quant import pack_fp4, pack_fp8, pack_table

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
UNIT_SPREAD = math.sqrt(12.0)
"""Spread of a uniform variable of variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One stored tensor.

    Attributes:
        name: in the checkpoint, without the optional ``model.`` prefix.
        shape: as stored; FP4 weights hold two values a byte.
        dtype: the safetensors name.
        storage: what the bytes mean; ``*_scale`` belongs to the weight before it.
        component: the row of the parameter inventory that counts it.
        split: what an expert-parallel rank holds: all of it, all or nothing by expert, or every ep_size-th row.
        expert_id: of a routed expert's tensor.
        num_experts: routed experts in that expert's layer.
        mean, spread: seeded weights are mean + spread * u, u uniform in [-1/2, 1/2).
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
        """Weights in it; a scale holds none."""
        if self.storage.endswith("_scale"):
            return 0
        return math.prod(self.shape) * (2 if self.storage == "fp4" else 1)

    def is_local(self, ep_rank: int, ep_size: int) -> bool:
        """Whether the rank holds anything of it; experts lie on ranks in contiguous runs."""
        return self.split != "expert" or self.expert_id * ep_size // self.num_experts == ep_rank

    def local_shape(self, ep_rank: int, ep_size: int) -> tuple[int, ...]:
        """Shape of the rank's part: rows ep_rank, ep_rank + ep_size, … of a table, else the whole."""
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
    """An unquantised tensor; without ``spread`` a matrix of variance 1 / fan-in (the last dimension, unless given)."""
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
    """Compressor and index keys of layers that write a store; index queries of layers that choose entries."""
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
    """What every layer and every draft layer has; ``draft`` overrides the component."""
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


def _all_specs(config: ModelConfig) -> Iterator[TensorSpec]:
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
    """Every tensor of a checkpoint by name: global ones, layers, draft layers, vision.

    Source: the published checkpoint's tensor inventory.  Means and spreads are our own, for seeded weights: a matrix has
    variance 1 / fan-in, a bias is like the matrix it belongs to, a looked-up vector like ``embed.weight``.

    Cost: 0.4 s and 40 MB for the published model's 96,085 tensors.
    """
    return {spec.name: spec for spec in _all_specs(config)}


# ------------------------------------------------------------------ headers

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies: ``num_bytes`` bytes from ``offset`` in ``shard``."""

    shard: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScan:
    """What the headers of a model directory say.

    Attributes:
        shards: the safetensors files, by name.
        tensors: by name without prefix; of a duplicate the first.
        problems: kind of damage -> one entry a case; empty for a sound checkpoint.
    """

    shards: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    problems: dict[str, list[str]] = field(default_factory=dict)

    def describe_problems(self) -> str:
        """One line per kind of problem: how many, and the first few."""
        lines = []
        for kind, cases in self.problems.items():
            more = f"; and {len(cases) - _LISTED} more" if len(cases) > _LISTED else ""
            lines.append(f"  {kind} ({len(cases)}): {'; '.join(cases[:_LISTED])}{more}")
        return "\n".join(lines)


class _Damaged(Exception):
    """A shard's header cannot be used; the text says why."""


def _read_header(shard: Path) -> tuple[list[tuple[str, Any]], int, int]:
    """(name, entry) pairs of a shard's header, start of its data, size of the file."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise _Damaged(f"a header of {length} bytes is impossible in a file of {size} bytes")
        text = file.read(length)
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise _Damaged("header is not valid JSON") from error
    if not isinstance(pairs, _Pairs):
        raise _Damaged("header is not a JSON object")
    return [(name, entry) for name, entry in pairs if name != "__metadata__"], 8 + length, size


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys as written: a dict would hide a repeated name."""


def _stored(shard: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    values = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, span = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _Damaged(f"header entry of {name} is malformed")
    return StoredTensor(shard=shard, offset=data_start + span[0], num_bytes=span[1] - span[0], dtype=dtype, shape=tuple(shape))


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)


def _scan_shard(shard: Path, scan: CheckpointScan) -> None:
    """Add a shard's tensors to the scan, and what is wrong with the file itself."""
    try:
        pairs, data_start, size = _read_header(shard)
        stored = [(name, _stored(shard, name, entry, data_start)) for name, entry in pairs]
    except (_Damaged, OSError) as error:
        scan.problems.setdefault("corrupt shard", []).append(f"{shard.name}: {error}")
        return
    end = data_start
    for name, each in sorted(stored, key=lambda pair: (pair[1].offset, pair[1].num_bytes)):
        if each.offset != end:
            scan.problems.setdefault("corrupt shard", []).append(f"{shard.name}: data of {name} overlaps or leaves a gap")
            break
        end += each.num_bytes
    else:
        if end > size:
            scan.problems.setdefault("truncated shard", []).append(f"{shard.name}: has {size} of {end} bytes")
        elif end < size:
            scan.problems.setdefault("corrupt shard", []).append(f"{shard.name}: {size - end} bytes belong to no tensor")
    for name, each in stored:
        bare = name.removeprefix("model.")
        if bare in scan.tensors:
            where = f"{bare} in {scan.tensors[bare].shard.name} and {shard.name}"
            scan.problems.setdefault("duplicate tensor", []).append(where)
        else:
            scan.tensors[bare] = each


def _scan_index(model_dir: Path, scan: CheckpointScan) -> None:
    """Compare the index, where there is one, with the shards."""
    path = model_dir / INDEX_NAME
    if not path.exists():
        return
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        places = [(str(name).removeprefix("model."), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        scan.problems.setdefault("corrupt index", []).append(f"{INDEX_NAME} holds no readable weight_map")
        return
    present = {shard.name for shard in scan.shards}
    absent: dict[str, int] = defaultdict(int)
    for name, shard in places:
        if shard not in present:
            absent[shard] += 1
        elif name not in scan.tensors or scan.tensors[name].shard.name != shard:
            scan.problems.setdefault("wrong index entry", []).append(f"{name} is not in {shard}")
    for shard, count in absent.items():
        scan.problems.setdefault("missing shard", []).append(f"{shard} with {count} tensors")


def _compare(name: str, spec: TensorSpec, stored: StoredTensor) -> tuple[str, str] | None:
    if stored.dtype != spec.dtype:
        return "wrong dtype", f"{name} is {stored.dtype}, expected {spec.dtype}"
    if stored.shape != spec.shape:
        return "wrong shape", f"{name} is {list(stored.shape)}, expected {list(spec.shape)}"
    if stored.num_bytes != spec.num_bytes:
        return "wrong size", f"{name} has {stored.num_bytes} bytes, expected {spec.num_bytes}"
    return None


def scan_checkpoint(model_dir: Path, config: ModelConfig) -> CheckpointScan:
    """Read all headers of a model directory and compare them with the table; no tensor data is touched.

    Raises:
        CheckpointError: the directory holds no safetensors file at all.  Other damage is returned, not raised.
    """
    shards = tuple(sorted(model_dir.glob("*.safetensors")))
    if not shards:
        raise CheckpointError(
            f"{model_dir} holds no *.safetensors file; name the directory of a downloaded or written checkpoint"
        )
    scan = CheckpointScan(shards=shards, tensors={})
    for shard in shards:
        _scan_shard(shard, scan)
    _scan_index(model_dir, scan)
    table = tensor_table(config)
    missing = [name for name in table if name not in scan.tensors]
    surplus = [f"{name} in {each.shard.name}" for name, each in scan.tensors.items() if name not in table]
    differing = (_compare(name, spec, scan.tensors[name]) for name, spec in table.items() if name in scan.tensors)
    cases = [("missing tensor", name) for name in missing] + [("surplus tensor", name) for name in surplus]
    for kind, text in itertools.chain(cases, filter(None, differing)):
        scan.problems.setdefault(kind, []).append(text)
    return scan


# ------------------------------------------------------------------ reading

_CHUNK_BYTES = 64 << 20


def _read_into(file: FileIO, buffer: Tensor, bar: tqdm[Any]) -> None:
    """Fill a contiguous uint8 tensor from the file's position."""
    view = buffer.view(-1).numpy().data
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _CHUNK_BYTES])
        if not count:
            raise CheckpointError(f"{file.name} ended while its tensors were read; it was changed meanwhile: download it again")
        done += count
        bar.update(count)


def _read_rows(file: FileIO, spec: TensorSpec, ep_rank: int, ep_size: int, bar: tqdm[Any]) -> Tensor:
    """Rows ep_rank, ep_rank + ep_size, … as [local_rows, row_bytes] uint8.

    Cost: reads the whole table, since rows are shorter than a disk page; memory for the local rows and one chunk.
    """
    num_rows, row_bytes = spec.shape[0], spec.num_bytes // spec.shape[0]
    local = torch.empty(spec.local_shape(ep_rank, ep_size)[0], row_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK_BYTES // (row_bytes * ep_size)) * ep_size  # a multiple: every chunk starts at the same residue
    for start in range(0, num_rows, step):
        chunk = torch.empty(min(step, num_rows - start), row_bytes, dtype=torch.uint8)
        _read_into(file, chunk, bar)
        picked = chunk[ep_rank::ep_size]
        local[start // ep_size : start // ep_size + len(picked)] = picked
    return local


def _read_tensor(file: FileIO, spec: TensorSpec, offset: int, ep_rank: int, ep_size: int, bar: tqdm[Any]) -> Tensor:
    file.seek(offset)
    if spec.split == "row" and ep_size > 1:
        raw = _read_rows(file, spec, ep_rank, ep_size, bar)
    else:
        raw = torch.empty(spec.num_bytes, dtype=torch.uint8)
        _read_into(file, raw, bar)
    return raw.view(-1).view(TORCH_DTYPES[spec.dtype]).view(spec.local_shape(ep_rank, ep_size))


def check_ranks(config: ModelConfig, ep_size: int, spare_experts: int = 0) -> None:
    """Verify that experts spread evenly over ranks.

    Raises:
        ConfigError: an expert count is no multiple of ``ep_size``.
    """
    counts = [("n_routed_experts plus spare experts", config.n_routed_experts + spare_experts)]
    if config.num_nextn_predict_layers:
        counts.append(("dspark_n_routed_experts", config.dspark_n_routed_experts))
    for name, count in counts:
        if ep_size < 1 or count % ep_size:
            raise ConfigError(f"ep_size={ep_size} does not divide {name} = {count}; choose a divisor or another number of spares")


def read_checkpoint(
    model_dir: Path, config: ModelConfig, *, ep_rank: int = 0, ep_size: int = 1, progress: bool = True
) -> dict[str, Tensor]:
    """Load what one expert-parallel rank holds, tensor by tensor.

    Args:
        model_dir: directory of safetensors shards, with or without an index; names may carry the prefix ``model.``.
        config: the model's configuration.
        ep_rank, ep_size: the rank holds experts [ep_rank * E / ep_size, (ep_rank + 1) * E / ep_size) of every layer, the rows
            of Engram tables whose number is ep_rank modulo ep_size (row r at place r // ep_size), and everything else.
        progress: show a bar that counts bytes.

    Returns:
        Tensors on the CPU by name, in table order; dtypes of :data:`TORCH_DTYPES`.

    Raises:
        CheckpointError: the headers do not fit the configuration; lists everything that is wrong, before any data is read.
        ConfigError: ``ep_size`` does not divide the experts, or ``ep_rank`` is outside it.

    Cost: one pass over the rank's bytes in file order; tables are read whole by every rank.
    """
    check_ranks(config, ep_size)
    if not 0 <= ep_rank < ep_size:
        raise ConfigError(f"ep_rank={ep_rank} does not exist among ep_size={ep_size} ranks; expected 0..{ep_size - 1}")
    scan = scan_checkpoint(model_dir, config)
    if scan.problems:
        raise CheckpointError(
            f"checkpoint {model_dir} does not fit its configuration:\n{scan.describe_problems()}\n"
            "download the named shards again, or use the config.json that belongs to them"
        )
    table = {name: spec for name, spec in tensor_table(config).items() if spec.is_local(ep_rank, ep_size)}
    by_shard: dict[Path, list[TensorSpec]] = defaultdict(list)
    for name, spec in table.items():
        by_shard[scan.tensors[name].shard].append(spec)
    loaded: dict[str, Tensor] = {}
    total = sum(spec.num_bytes for spec in table.values())
    with progress_bar(total, unit="B", desc="weights", shown=progress) as bar:
        for shard, specs in sorted(by_shard.items()):
            with shard.open("rb", buffering=0) as file:
                for spec in sorted(specs, key=lambda each: scan.tensors[each.name].offset):
                    loaded[spec.name] = _read_tensor(file, spec, scan.tensors[spec.name].offset, ep_rank, ep_size, bar)
    return {name: loaded[name] for name in table}


# ------------------------------------------------------------------ writing

SHARD_BYTES = 10 << 30


def _plan_shards(table: dict[str, TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in table order up to ``shard_bytes``; a larger tensor has a shard of its own."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in table.values():
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    # Wide dtypes first, so that every tensor is aligned to its item size.
    return [sorted(shard, key=lambda spec: -TORCH_DTYPES[spec.dtype].itemsize) for shard in shards]


def _header(shard: list[TensorSpec]) -> tuple[bytes, list[int]]:
    """A shard's length-prefixed header, and each tensor's place in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = list(itertools.accumulate((spec.num_bytes for spec in shard), initial=0))
    for spec, start, end in zip(shard, offsets, offsets[1:], strict=False):
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in offsets[:-1]]


def _checked(spec: TensorSpec | None, name: str, tensor: Tensor, written: set[str]) -> TensorSpec:
    if spec is None:
        raise CheckpointError(f"tensor {name} does not belong to this configuration; write only the names of tensor_table")
    if name in written:
        raise CheckpointError(f"tensor {name} was given twice; give every tensor once")
    wanted = TORCH_DTYPES[spec.dtype]
    if tuple(tensor.shape) != spec.shape or tensor.dtype != wanted:
        raise CheckpointError(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}; "
            f"expected {wanted} {list(spec.shape)}; convert it before writing"
        )
    return spec


def _fill_shards(
    folder: Path, table: dict[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, progress: bool
) -> dict[str, str]:
    """Write all shards into ``folder``; returns tensor name -> shard name."""
    shards = _plan_shards(table, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places: dict[str, tuple[int, int]] = {}
    written: set[str] = set()
    total = sum(spec.num_bytes for spec in table.values())
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in names]
        for number, shard in enumerate(shards):
            header, offsets = _header(shard)
            files[number].write(header)
            places.update({spec.name: (number, offset) for spec, offset in zip(shard, offsets, strict=True)})
        bar = stack.enter_context(progress_bar(total, unit="B", desc="writing", shown=progress))
        for name, tensor in tensors:
            spec = _checked(table.get(name), name, tensor, written)
            number, offset = places[name]
            files[number].seek(offset)
            files[number].write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            written.add(name)
            bar.update(spec.num_bytes)
        missing = [name for name in table if name not in written]
        if missing:
            more = ", …" if len(missing) > _LISTED else ""
            raise CheckpointError(
                f"{len(missing)} of {len(table)} tensors were not given "
                f"({', '.join(missing[:_LISTED])}{more}); give all of tensor_table"
            )
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    return {name: names[places[name][0]] for name in table}


def write_checkpoint(
    model_dir: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write a model directory in the published format: shards, index and ``config.json``.

    The directory appears complete or not at all: everything goes to a temporary folder beside it, which is renamed at the end.

    Args:
        model_dir: must not exist or be empty.
        config: the model's configuration.
        tensors: every tensor of the table once, in any order, in the dtypes of :data:`TORCH_DTYPES`.
        shard_bytes: upper limit of a shard's data; a larger tensor has a shard of its own.
        progress: show a bar that counts bytes.

    Raises:
        CheckpointError: ``model_dir`` holds files, or a tensor is unknown, repeated, missing or of another shape or dtype.

    Cost: memory for one tensor; the iterable may produce them lazily.
    """
    if model_dir.exists() and (not model_dir.is_dir() or any(model_dir.iterdir())):
        raise CheckpointError(f"{model_dir} exists already and is not an empty directory; remove it or choose another")
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    table = tensor_table(config)
    folder = Path(tempfile.mkdtemp(prefix=f".{model_dir.name}.", suffix=".partial", dir=model_dir.parent))
    try:
        weight_map = _fill_shards(folder, table, tensors, shard_bytes, progress)
        index = {"metadata": {"total_size": sum(spec.num_bytes for spec in table.values())}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)  # mkdtemp's folders are private
        folder.rename(model_dir)
    except BaseException:
        shutil.rmtree(folder)
        raise


# ------------------------------------------------------------------ seeded weights

_CHUNK_VALUES = 1 << 22

Values = Callable[[int, int], Tensor]
"""(first flat index, count) -> [count] fp32 values of a tensor; asked for in ascending order."""


def _encode(spec: TensorSpec, values: Values) -> tuple[Tensor, ...]:
    """A tensor in its stored format, made in chunks of whole quantisation blocks: (plain,) or (codes, scale)."""
    width = spec.num_parameters // spec.shape[0]
    step = max(1, _CHUNK_VALUES // (width * QUANT_BLOCK)) * QUANT_BLOCK
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, spec.shape[0], step):
        rows = min(step, spec.shape[0] - start)
        dense = values(start * width, rows * width).view(rows, width)
        if spec.storage == "plain":
            parts.append((dense.to(TORCH_DTYPES[spec.dtype]),))
        else:
            parts.append({"fp8": pack_fp8, "fp4": pack_fp4, "table": pack_table}[spec.storage](dense))
    whole = (torch.cat(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True))
    first, *scale = whole
    return (first.view(spec.shape), *scale)


def _seeded(config: ModelConfig, values_of: Callable[[TensorSpec], Values]) -> Iterator[tuple[str, Tensor]]:
    for spec in _all_specs(config):
        if spec.num_parameters:
            names = (spec.name,) if spec.storage == "plain" else (spec.name, spec.name.removesuffix("weight") + "scale")
            yield from zip(names, _encode(spec, values_of(spec)), strict=True)


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights of every tensor, encoded as stored; normal, with the means and variances of the table.

    A tensor depends on (seed, name, shape) alone, so that taking some of them or another order changes nothing.
    """

    def values_of(spec: TensorSpec) -> Values:
        # torch's CPU generator uses 32 bits of a seed, so seed and name are mixed into 32 bits here.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{spec.name}".encode()))

        def values(start: int, count: int) -> Tensor:
            return torch.randn(count, generator=generator).mul_(spec.spread / UNIT_SPREAD).add_(spec.mean)

        return values

    return _seeded(config, values_of)


def hashed_uniform(name: str, count: int, start: int = 0) -> Tensor:
    """Values u of flat indices start, …, start + count - 1 of the tensor ``name``: [count] fp64 in [-1/2, 1/2).

    u_i = h(((i + 1) * 2654435761 + crc32(name)) mod 2^32) / 2^32 - 1/2, h a bijection of 32-bit words: two xor-shift-multiply
    rounds and a last xor-shift.
    """
    mask = 0xFFFFFFFF
    # int64 products may wrap; their low 32 bits, all that is kept, are right nevertheless.
    x = (torch.arange(start + 1, start + count + 1) * 2654435761 + zlib.crc32(name.encode("ascii"))) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return (x ^ (x >> 16)).double() / 2.0**32 - 0.5


def hashed_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The golden weights of every tensor, encoded as stored; no random generator is involved.

    w = mean + spread * :func:`hashed_uniform`, rounded to fp32 before it is stored.
    """

    def value(spec: TensorSpec, start: int, count: int) -> Tensor:
        return (spec.mean + spec.spread * hashed_uniform(spec.name, count, start)).float()

    return _seeded(config, lambda spec: partial(value, spec))


# ------------------------------------------------------------------ memory of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of weights on one expert-parallel rank (rank 0, which holds the most table rows)."""

    experts: int
    dense: int
    embedding_and_head: int
    draft: int
    engram_tables: int
    vision: int

    @property
    def total(self) -> int:
        """All of it; ranks that serve no images save ``vision``."""
        return self.experts + self.dense + self.embedding_and_head + self.draft + self.engram_tables + self.vision


_GROUPS: dict[Component, str] = {
    "embedding": "embedding_and_head",
    "head": "embedding_and_head",
    "routed experts": "experts",
    "Engram tables": "engram_tables",
    "DSpark": "draft",
    "vision": "vision",
}


@lru_cache(maxsize=4)  # reports ask for many rank counts of one model
def _one_expert_each(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The table with the first expert of every layer only: a layer's experts are alike."""
    return tuple(spec for spec in _all_specs(config) if spec.expert_id == 0)


def rank_memory(config: ModelConfig, ep_size: int, spare_experts: int = 0) -> RankMemory:
    """Bytes of weights one rank holds.

    Args:
        config: the model's configuration.
        ep_size: ranks that share experts and table rows.
        spare_experts: copies of routed experts per layer over all ranks; draft layers have none.

    Raises:
        ConfigError: the experts do not spread evenly.
    """
    check_ranks(config, ep_size, spare_experts)
    groups: dict[str, int] = dict.fromkeys(("experts", "dense", *_GROUPS.values()), 0)
    for spec in _one_expert_each(config):
        group = _GROUPS.get(spec.component, "dense")
        spares = spare_experts if group == "experts" else 0
        copies = (spec.num_experts + spares) // ep_size if spec.split == "expert" else 1
        groups[group] += copies * (spec.num_bytes // spec.shape[0]) * spec.local_shape(0, ep_size)[0]
    return RankMemory(**groups)
