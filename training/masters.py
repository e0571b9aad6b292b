"""Master weights: one stacked parameter for all tensors of a kind, and the way to a checkpoint and back.

``layers.3.attn.wq_a.weight`` and its sisters of the other layers are one parameter ``layers.*.attn.wq_a.weight`` [12, out, in].
Stacks make the optimiser's products and the rounding a few large calls instead of thousands of small ones.

Invariant: :meth:`Masters.read` and :meth:`Masters.stored` follow :func:`~deepinfer.model.checkpoint.table.tensor_table`.  Names,
shapes and formats are therefore those of the published checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.checkpoint.table import TORCH_DTYPES, Storage, TensorSpec, tensor_table
from deepinfer.ops import quant
from training.grids import RoundWeight

Initial = Callable[[str, tuple[int, ...]], Tensor]
"""(kind, shape of the stack) -> first values of a stack, fp32."""

_UNPACK = {"fp8": quant.unpack_fp8, "fp4": quant.unpack_fp4, "table": quant.unpack_table}
_PACK = {"fp8": quant.pack_fp8, "fp4": quant.pack_fp4, "table": quant.pack_table}


def kind_of(name: str) -> str:
    """The name of a tensor's stack: numbers of layers, stages and experts become ``*``."""
    return re.sub(r"^(layers|mtp)\.\d+\.", r"\1.*.", re.sub(r"\.experts\.\d+\.", ".experts.*.", name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stacked parameter.

    Attributes:
        kind: its name.
        specs: the tensors of the checkpoint, in the order in which they are stacked.
    """

    kind: str
    specs: tuple[TensorSpec, ...]

    @property
    def storage(self) -> Storage:
        """The format of the tensors."""
        return self.specs[0].storage

    @property
    def is_bf16(self) -> bool:
        """Whether unquantised values are stored as bf16."""
        return self.specs[0].dtype == "BF16"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the values; an FP4 tensor stores two values in a byte."""
        packing = 2 if self.storage == "fp4" else 1
        return tuple((*spec.shape[:-1], spec.shape[-1] * packing) for spec in self.specs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter: the tensors one above the other; tables of different heights share the first dimension."""
        shapes = self.shapes
        if len(set(shapes)) > 1:
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (len(shapes), *shapes[0])

    def split(self, stacked: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the stack, in order."""
        is_ragged = len(set(self.shapes)) > 1
        parts: tuple[Tensor, ...] = stacked.split([shape[0] for shape in self.shapes]) if is_ragged else stacked.unbind()
        return parts


def stacks(config: ModelConfig, roots: tuple[str, ...]) -> dict[str, Stack]:
    """Stacks of all tensors whose names begin with one of ``roots``, by kind, in the order of the table."""
    found: dict[str, list[TensorSpec]] = {}
    for spec in tensor_table(config).values():
        if spec.name.startswith(roots) and not spec.storage.endswith("_scale"):
            found.setdefault(kind_of(spec.name), []).append(spec)
    return {kind: Stack(kind=kind, specs=tuple(specs)) for kind, specs in found.items()}


TEXT_ROOTS = ("embed.", "head.", "norm.", "layers.")
"""Names of the text model."""
DRAFTER_ROOTS = ("mtp.",)
"""Names of the drafter."""
ROUTER_BIAS = ".gate.bias"
"""Kinds that end so are moved by the balance of the load, not by gradients."""


class Masters(nn.Module):
    """Master weights of the text model or of the drafter.

    Attributes:
        config: shape of the model.
        stacks: by kind.
        values: kind -> parameter; dots of the kind are commas, because a module's names have none.
    """

    def __init__(self, config: ModelConfig, roots: tuple[str, ...], initial: Initial) -> None:
        """Make the parameters.

        Args:
            roots: :data:`TEXT_ROOTS` or :data:`DRAFTER_ROOTS`.
            initial: their first values.
        """
        super().__init__()
        self.config = config
        self.stacks = stacks(config, roots)
        self.values = nn.ParameterDict()
        for kind, stack in self.stacks.items():
            if kind.endswith("bias_vl"):
                continue  # the model sees no image here; stored() writes the text's bias for it
            value = initial(kind, stack.shape)
            self.values[kind.replace(".", ",")] = nn.Parameter(value, requires_grad=not kind.endswith(ROUTER_BIAS))

    def __getitem__(self, kind: str) -> Tensor:
        """The parameter of a kind."""
        value: Tensor = self.values[kind.replace(".", ",")]
        return value

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(kind, parameter) of all stacks."""
        for name, value in self.values.items():
            yield name.replace(",", "."), value

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Take values by kind."""
        for kind, value in self.named():
            value.copy_(values[kind])

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of a checkpoint's tensors, which are named and stored as published."""
        for kind, value in self.named():
            stack = self.stacks[kind]
            for part, spec in zip(stack.split(value), stack.specs, strict=True):
                stored = tensors[spec.name]
                if spec.storage in _UNPACK:
                    scale = tensors[spec.name.removesuffix("weight") + "scale"]
                    stored = _UNPACK[spec.storage](stored, scale, part.dtype)
                part.copy_(stored)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all tensors as a checkpoint stores them, on the CPU."""
        for kind, stack in self.stacks.items():
            value = self[kind.removesuffix("_vl")].detach().float()
            for part, spec in zip(stack.split(value), stack.specs, strict=True):
                if spec.storage not in _PACK:
                    values = part.to(torch.bfloat16) if kind.endswith("_fn") else part  # see rounded()
                    yield spec.name, values.to(TORCH_DTYPES[spec.dtype]).cpu()
                    continue
                codes, scale = _PACK[spec.storage](part)
                yield spec.name, codes.cpu()
                yield spec.name.removesuffix("weight") + "scale", scale.cpu()

    def rounded(self, dtype: torch.dtype, *, is_quantised: bool = True) -> dict[str, Tensor]:
        """The values that a checkpoint would store, kind -> stack, with straight-through gradients.

        Args:
            dtype: of activations.  With bf16, maps of hyper-connections are rounded to bf16 too, although a checkpoint stores
                fp32: their products with bf16 streams then run on the matrix units.  :meth:`stored` writes the rounded numbers.
                Vectors stay fp32.
            is_quantised: round FP8 and FP4 weights to their formats, and not only to ``dtype``.
        """
        result = {}
        for kind, value in self.named():
            stack = self.stacks[kind]
            is_vector = len(stack.shape) < 3 and kind not in ("embed.weight", "head.weight") and stack.storage == "plain"
            is_narrow = stack.storage != "plain" or not (is_vector or kind.endswith(("q_weight", "k_weight")))
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            is_bf16 = stack.is_bf16 or (dtype == torch.bfloat16 and kind.endswith("_fn"))
            storage = stack.storage if is_quantised else "plain"
            result[kind] = RoundWeight.apply(value, storage, is_bf16, dtype if is_narrow else wide)
        return result


def initial_values(config: ModelConfig, seed: int) -> Initial:
    """First values for training from scratch.

    Matrices are normal with variance 1 / fan-in; matrices that write into the streams start smaller by sqrt(2 * layers).  Every
    sublayer starts near a plain residual: it reads mostly one of the copies in turn, writes with weight 1 into all, and mixes
    copies little.
    """
    generator = torch.Generator().manual_seed(seed)
    n = config.hc_mult

    def initial(kind: str, shape: tuple[int, ...]) -> Tensor:
        if kind.endswith(("norm.weight", "q_weight", "k_weight")):
            return torch.ones(shape)
        if kind.endswith(("attn_sink", "gate.bias", "confidence_head.proj.weight", "markov_head.head.weight")):
            return torch.zeros(shape)
        if kind.endswith("_scale"):
            return torch.full(shape, 0.1)
        if kind.endswith("_base"):
            layers = torch.arange(shape[0])
            base = torch.zeros(shape)
            base[:, :n] = -1.0
            # The attention mix chooses for the FFN of its own layer, the FFN mix for the attention of the next one.
            base[layers, (2 * layers + kind.endswith("hc_ffn_base")) % n] = 2.0
            base[:, 2 * n :] = (4.0 * torch.eye(n)).flatten()
            return base
        values = torch.randn(shape, generator=generator)
        if kind in ("embed.weight", "head.weight"):
            return values * (1.0 if kind == "embed.weight" else config.hidden_size**-0.5)
        if kind.endswith("engram.embed.weight"):
            return 0.2 * values  # what is looked up before it has learnt anything should not disturb the streams
        values *= shape[-1] ** -0.5
        if kind.endswith(("wo_b.weight", "w2.weight")):
            values /= math.sqrt(2 * config.num_hidden_layers)
        return values

    return initial
