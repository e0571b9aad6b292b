"""Straight-through rounding: values move onto the model's number grids, gradients pass as if they had not.

The grids are those of :mod:`deepinfer.ops.quant`; this module adds the gradient and no format of its own.

Place in the flow: :mod:`training.masters` rounds weights, the modules of :mod:`training.twin` round activations and records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepinfer.model.checkpoint.table import Storage
from deepinfer.ops import quant
from deepinfer.ops.arithmetic import accumulation_dtype

Context: TypeAlias = Any
"""What torch hands to a function with a gradient; it has no type for the attributes that such a function keeps in it."""


def _straight_through(rounder: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, x: Tensor) -> Tensor:
            return rounder(x)

        @staticmethod
        def backward(ctx: Context, *gradients: Tensor) -> Tensor:
            return gradients[0]

    def apply(x: Tensor) -> Tensor:
        result: Tensor = Through.apply(x)
        return result

    return apply


def _main_entries(x: Tensor) -> Tensor:
    return quant.decode_main(quant.encode_main(x), x.shape[-1], accumulation_dtype(x)).to(x.dtype)


round_mxfp8 = _straight_through(quant.round_mxfp8)
"""[..., width] onto E4M3 with one power-of-two scale per 32 values: inputs of FP8 and FP4 layers, window records."""

round_mxfp4 = _straight_through(quant.round_mxfp4)
"""[..., width] onto E2M1 with one power-of-two scale per 32 values: index queries and index keys."""

round_main = _straight_through(_main_entries)
"""[..., width] onto E2M1 with one E4M3 scale per 16 values: main entries."""


def stored_values(master: Tensor, storage: Storage, *, is_bf16: bool, dtype: torch.dtype) -> Tensor:
    """The values that a checkpoint stores for a weight.

    Args:
        master: [..., out_width, in_width] fp32 or fp64.
        storage: the weight's format.
        is_bf16: whether a ``plain`` weight is stored as bf16; otherwise it is stored as fp32 and stays as it is.
        dtype: of the result; bf16, fp32 and fp64 hold every quantised value exactly.
    """
    if storage == "fp8":
        return quant.unpack_fp8(*quant.pack_fp8(master), dtype)
    if storage == "fp4":
        return quant.unpack_fp4(*quant.pack_fp4(master), dtype)
    if storage == "table":
        return quant.unpack_table(*quant.pack_table(master), dtype)
    return (master.to(torch.bfloat16) if is_bf16 else master).to(dtype)


class RoundWeight(torch.autograd.Function):
    """:func:`stored_values` with the straight-through gradient."""

    @staticmethod
    def forward(ctx: Context, master: Tensor, storage: Storage, is_bf16: bool, dtype: torch.dtype) -> Tensor:
        """See :func:`stored_values`."""
        ctx.dtype = master.dtype
        return stored_values(master, storage, is_bf16=is_bf16, dtype=dtype)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient in the dtype of the master."""
        return gradients[0].to(ctx.dtype), None, None, None
