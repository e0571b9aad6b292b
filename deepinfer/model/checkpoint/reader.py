"""Model directory -> tensors: checks all headers against the table, then loads the tensors of one rank.

Invariant: a directory is read only if its headers hold exactly the names, shapes and dtypes of :func:`tensor_table`.  No tensor
is skipped or converted.

Place in the flow: the worker calls :func:`read_checkpoint` once.  The modules of the network take their tensors from the result
by name.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.checkpoint.table import INDEX_NAME, MAX_LISTED, TORCH_DTYPES, TensorSpec, check_ranks, tensor_table
from deepinfer.model.progress import progress_bar

# ------------------------------------------------------------------ headers

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place of one tensor: ``num_bytes`` bytes from ``offset`` on in the file ``shard``."""

    shard: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScan:
    """Result of reading the headers of a model directory.

    Attributes:
        shards: the safetensors files, sorted by name.
        tensors: name without prefix -> place; the first place if a name occurs twice.
        problems: kind of problem -> one text for each case; empty for a sound checkpoint.
    """

    shards: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    problems: dict[str, list[str]] = field(default_factory=dict)

    def describe_problems(self) -> str:
        """One line for each kind of problem: the number of cases, and the first cases."""
        lines = []
        for kind, cases in self.problems.items():
            more = f"; and {len(cases) - MAX_LISTED} more" if len(cases) > MAX_LISTED else ""
            lines.append(f"  {kind} ({len(cases)}): {'; '.join(cases[:MAX_LISTED])}{more}")
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
    """A JSON object as a list of pairs; a dict would hide a repeated name."""


def _stored(shard: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    values = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, span = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _Damaged(f"header entry of {name} is malformed")
    return StoredTensor(shard=shard, offset=data_start + span[0], num_bytes=span[1] - span[0], dtype=dtype, shape=tuple(shape))


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)


def _scan_shard(shard: Path, scan: CheckpointScan) -> None:
    """Add a shard's tensors and the problems of the file to the scan."""
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
    """Compare the index with the shards, if the directory has an index."""
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
    """Read all headers of a model directory and compare them with the table; no tensor data is read.

    Raises:
        CheckpointError: the directory holds no safetensors file.  All other problems are in the result.
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
            raise CheckpointError(
                f"{file.name} ended while its tensors were read; the file changed after its header was read; download it again"
            )
        done += count
        bar.update(count)


def _read_rows(file: FileIO, spec: TensorSpec, ep_rank: int, ep_size: int, bar: tqdm[Any]) -> Tensor:
    """Table rows ep_rank, ep_rank + ep_size, …: [num_local_rows, row_bytes] uint8.

    Cost: reads the whole table, because table rows are shorter than a disk page; memory for the local rows and one chunk.
    """
    num_rows, row_bytes = spec.shape[0], spec.num_bytes // spec.shape[0]
    local = torch.empty(spec.local_shape(ep_rank, ep_size)[0], row_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK_BYTES // (row_bytes * ep_size)) * ep_size  # so that every chunk starts at a multiple of ep_size
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


def read_checkpoint(
    model_dir: Path, config: ModelConfig, *, ep_rank: int = 0, ep_size: int = 1, progress: bool = True
) -> dict[str, Tensor]:
    """Load the tensors of one expert-parallel rank, one after another.

    Args:
        model_dir: directory of safetensors shards, with or without an index; names may have the prefix ``model.``.
        config: the model's configuration.
        ep_rank, ep_size: the rank holds experts [ep_rank * E / ep_size, (ep_rank + 1) * E / ep_size) of every layer, the
            Engram table rows r with r % ep_size == ep_rank (row r at index r // ep_size), and all other tensors.
        progress: show a bar that counts bytes.

    Returns:
        Tensors on the CPU by name, in table order; dtypes of :data:`TORCH_DTYPES`.

    Raises:
        CheckpointError: the headers do not fit the configuration; the message lists every kind of problem.  It is raised
            before any data is read.
        ConfigError: ``ep_size`` does not divide the number of experts, or ``ep_rank`` is not in 0..ep_size - 1.

    Cost: one pass over the rank's bytes in file order; every rank reads whole tables.
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
