"""Checkpoint tensors -> arguments of operators: upcast or packed, on the device.

Invariant: each tensor is used once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.ops import arithmetic, quant
from deepinfer.ops.norm import HyperWeights
from deepinfer.ops.quant import PackedWeight


@dataclass(kw_only=True)
class Parameters:
    """Gives a checkpoint's tensors to the modules of the network.

    Attributes:
        tensors: checkpoint name -> tensor as stored.
        device: where the model runs.
        exact: compute in fp64 without rounding (golden values) instead of bf16 activations with fp32 sums.
        taken: names of the tensors that were taken so far.
    """

    tensors: Mapping[str, Tensor]
    device: torch.device
    exact: bool = False
    taken: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return torch.float64 if self.exact else torch.bfloat16

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of sums, statistics and unquantised weights."""
        return torch.float64 if self.exact else torch.float32

    @property
    def gemm_dtype(self) -> torch.dtype:
        """Dtype of dequantised weights."""
        return torch.float64 if self.exact else arithmetic.gemm_dtype(self.device)

    def stored(self, name: str) -> Tensor:
        """A tensor as stored, on the device."""
        assert name not in self.taken, f"{name} is used twice"
        self.taken.add(name)
        return self.tensors[name].to(self.device)

    def ignore(self, name: str) -> None:
        """Mark a tensor as taken although the model does not use it."""
        assert name in self.tensors, f"{name} is not in the checkpoint"
        assert name not in self.taken, f"{name} is used twice"
        self.taken.add(name)

    def wide(self, name: str) -> Tensor:
        """An unquantised tensor, upcast."""
        return self.stored(name).to(self.wide_dtype)

    def activation(self, name: str) -> Tensor:
        """An unquantised tensor in the dtype of activations."""
        return self.stored(name).to(self.dtype)

    def fp8(self, *names: str) -> PackedWeight:
        """FP8 matrices, stacked along their outputs; every matrix except the last must have a multiple of 32 outputs."""
        codes = torch.cat([self.stored(f"{name}.weight").view(torch.uint8) for name in names]).view(torch.float8_e4m3fn)
        scale = torch.cat([self.stored(f"{name}.scale") for name in names])
        return quant.repack_fp8(codes, scale, self.gemm_dtype)

    def experts(self, prefix: str, matrices: tuple[str, ...], num_experts: int) -> PackedWeight:
        """MXFP4 matrices of all experts: [num_experts, sum of outputs, inputs]."""
        names = [[f"{prefix}.{expert}.{matrix}" for matrix in matrices] for expert in range(num_experts)]
        codes = torch.stack([torch.cat([self.stored(f"{name}.weight") for name in each]) for each in names])
        scale = torch.stack([torch.cat([self.stored(f"{name}.scale") for name in each]) for each in names])
        return quant.repack_fp4(codes, scale, self.gemm_dtype)

    def hyper(self, prefix: str, sublayer: str, config: ModelConfig) -> HyperWeights:
        """Hyper-connection weights and norm of ``sublayer`` (``attn`` or ``ffn``) of the block ``prefix``."""
        n = config.hc_mult
        counts = torch.tensor([n, n, n * n], device=self.device)  # raw numbers for each scale of the checkpoint
        return HyperWeights(
            fn=self.wide(f"{prefix}.hc_{sublayer}_fn"),
            base=self.wide(f"{prefix}.hc_{sublayer}_base"),
            scale=self.wide(f"{prefix}.hc_{sublayer}_scale").repeat_interleave(counts),
            norm=self.wide(f"{prefix}.{sublayer}_norm.weight"),
            num_iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            rms_eps=config.rms_norm_eps,
        )
