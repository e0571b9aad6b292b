"""Tensors -> model directory in the published file format: safetensors shards, an index, ``config.json``."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.config import ModelConfig, config_json
from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint.table import INDEX_NAME, MAX_LISTED, TORCH_DTYPES, TensorSpec, tensor_table
from deepinfer.model.progress import progress_bar

SHARD_BYTES = 10 << 30


def _plan_shards(table: dict[str, TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in table order up to ``shard_bytes``; a larger tensor gets its own shard."""
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
    """A shard's length-prefixed header, and each tensor's offset in the file."""
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
            more = ", …" if len(missing) > MAX_LISTED else ""
            raise CheckpointError(
                f"{len(missing)} of {len(table)} tensors were not given "
                f"({', '.join(missing[:MAX_LISTED])}{more}); give all of tensor_table"
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

    The files are written to a temporary folder in the same parent folder.  At the end it is renamed to ``model_dir``.  So
    ``model_dir`` is either complete or unchanged.

    Args:
        model_dir: a path that does not exist, or an empty directory.
        config: the model's configuration.
        tensors: every tensor of the table once, in any order, in the dtypes of :data:`TORCH_DTYPES`.
        shard_bytes: upper limit of a shard's data; a larger tensor gets its own shard.
        progress: show a bar that counts bytes.

    Raises:
        CheckpointError: ``model_dir`` holds files, or a tensor is unknown, repeated or missing, or has a wrong shape or dtype.

    Cost: memory for one tensor at a time, if the iterable makes them lazily.
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
        folder.chmod(0o755)  # mkdtemp makes private folders
        folder.rename(model_dir)
    except BaseException:
        shutil.rmtree(folder)
        raise
