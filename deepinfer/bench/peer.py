"""The steps of ``bench steps`` with transformers' model of DeepSeek-V4 at the same widths, as a peer of the same run.

The peer has random weights in bf16, no n-gram tables and no drafter, and it rounds nothing to 8 or 4 bits.  It compresses four
tokens to an entry; ``nano`` compresses one or two.  So it is a yardstick of speed for a network of about this size, not the same
network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepinfer.config import ModelConfig
from deepinfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStep:
    """Times of one scenario.

    Attributes:
        tokens: tokens of a step.
        seconds: time of every timed step.
    """

    tokens: int
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """From the median time."""
        return self.tokens / statistics.median(self.seconds)


def measure_peer(
    config: ModelConfig, scenarios: list[tuple[str, int, int, int]], device: torch.device, repeats: int
) -> list[PeerStep]:
    """Time the peer.

    Args:
        config: whose widths the peer has.
        scenarios: (name, requests, context, tokens of each request in a step) each.

    Raises:
        ConfigError: transformers is not installed, or it has no DeepSeek-V4.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ConfigError(
            "--peer needs transformers with DeepSeek-V4; install the extra: pip install 'deepinfer[bench]'"
        ) from error
    kinds = [
        "compressed_sparse_attention" if config.ratio(layer) else "sliding_attention" for layer in range(config.num_hidden_layers)
    ]
    shape = DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        layer_types=kinds,
        mlp_layer_types=["moe"] * config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=1,
        head_dim=config.head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        n_routed_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        sliding_window=config.sliding_window,
        index_head_dim=config.index_head_dim,
        index_n_heads=config.index_n_heads,
        index_topk=config.index_topk,
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.hc_sinkhorn_iters,
        num_nextn_predict_layers=0,
        max_position_embeddings=config.max_position_embeddings,
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        model = DeepseekV4ForCausalLM(shape).to(device, torch.bfloat16).eval()
        return [_time(model, config, device, repeats, count, context, tokens) for _, count, context, tokens in scenarios]


def _time(
    model: torch.nn.Module, config: ModelConfig, device: torch.device, repeats: int, count: int, context: int, tokens: int
) -> PeerStep:
    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, config.vocab_size, (count, length), device=device)

    if context:
        past = model(input_ids=ids(context), use_cache=True, logits_to_keep=1).past_key_values
        step: Callable[[], object] = lambda: model(input_ids=ids(tokens), use_cache=True, cache=past)  # noqa: E731
    else:
        step = lambda: model(input_ids=ids(tokens), use_cache=True, logits_to_keep=1)  # noqa: E731
    seconds = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first step warms up
            seconds.append(time.perf_counter() - start)
    return PeerStep(tokens=count * tokens, seconds=tuple(seconds))
