"""Mixture of experts of one layer: router, routed experts, shared expert."""

from __future__ import annotations

from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.model.parameters import Parameters
from deepinfer.ops import moe as ops
from deepinfer.ops.quant import QuantisedRows


class MoE:
    """Feed-forward half of a layer."""

    def __init__(
        self,
        parameters: Parameters,
        prefix: str,
        config: ModelConfig,
        *,
        num_experts: int,
        top_k: int,
        has_image_bias: bool = True,
    ) -> None:
        """Weights ``{prefix}.*`` (``layers.N.ffn``): ``num_experts`` routed experts, of which a token takes ``top_k``.

        Without ``has_image_bias`` the checkpoint's bias for image positions is not used; all positions use the other bias.
        """
        self.config = config
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = parameters.wide(f"{prefix}.gate.weight")
        self.bias = parameters.wide(f"{prefix}.gate.bias")
        if has_image_bias:
            self.bias_image = parameters.wide(f"{prefix}.gate.bias_vl")
        else:
            parameters.ignore(f"{prefix}.gate.bias_vl")
            self.bias_image = self.bias
        self.w13 = parameters.experts(f"{prefix}.experts", ("w1", "w3"), num_experts)
        self.w2 = parameters.experts(f"{prefix}.experts", ("w2",), num_experts)
        self.shared_w13 = parameters.fp8(f"{prefix}.shared_experts.w1", f"{prefix}.shared_experts.w3")
        self.shared_w2 = parameters.fp8(f"{prefix}.shared_experts.w2")

    def __call__(self, x: Tensor, x8: QuantisedRows, is_image: Tensor) -> Tensor:
        """Route and compute.

        Args:
            x: [num_tokens, hidden] normed input.
            x8: the same, quantised.
            is_image: [num_tokens] bool.

        Returns:
            [num_tokens, hidden].
        """
        config = self.config
        expert_ids, expert_weights = ops.route(
            x, self.gate, self.bias, self.bias_image, is_image, self.top_k, config.routed_scaling_factor
        )
        picks = ops.sort_picks(expert_ids, self.num_experts)
        parts = ops.experts(x8, expert_weights, picks, self.w13, self.w2, config.swiglu_limit)
        return ops.combine(parts, ops.shared_expert(x8, self.shared_w13, self.shared_w2, config.swiglu_limit))
