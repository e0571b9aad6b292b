"""Random weights for tests and for the small model: from a seed, or from a hash of names and indices."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from deepinfer.config import QUANT_BLOCK, ModelConfig
from deepinfer.model.checkpoint.table import TORCH_DTYPES, UNIT_SPREAD, TensorSpec, tensor_specs
from deepinfer.ops.quant import pack_fp4, pack_fp8, pack_table

_CHUNK_VALUES = 1 << 22

Values = Callable[[int, int], Tensor]
"""(first flat index, count) -> [count] fp32 values of a tensor; calls come in ascending order."""


def _encode(spec: TensorSpec, values: Values) -> tuple[Tensor, ...]:
    """Encode a tensor as stored, in chunks of whole quantisation blocks; returns (plain,) or (codes, scale)."""
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
    for spec in tensor_specs(config):
        if spec.num_parameters:
            names = (spec.name,) if spec.storage == "plain" else (spec.name, spec.name.removesuffix("weight") + "scale")
            yield from zip(names, _encode(spec, values_of(spec)), strict=True)


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with random weights, encoded as stored: normal, with the means and variances of the table.

    A tensor depends only on (seed, name, shape), not on the other tensors or their order.
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

    u_i = h(((i + 1) * 2654435761 + crc32(name)) mod 2^32) / 2^32 - 1/2, h is a bijection of 32-bit words: twice
    xor-shift and multiply, then one xor-shift.
    """
    mask = 0xFFFFFFFF
    # int64 products may wrap.  Only their low 32 bits are used, and these are right.
    x = (torch.arange(start + 1, start + count + 1) * 2654435761 + zlib.crc32(name.encode("ascii"))) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return (x ^ (x >> 16)).double() / 2.0**32 - 0.5


def hashed_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with golden weights, encoded as stored; no random generator is used.

    w = mean + spread * :func:`hashed_uniform`, rounded to fp32 before it is stored.
    """

    def value(spec: TensorSpec, start: int, count: int) -> Tensor:
        return (spec.mean + spec.spread * hashed_uniform(spec.name, count, start)).float()

    return _seeded(config, lambda spec: partial(value, spec))
