"""The shape of a model, as frozen values.

The field names of :class:`ModelConfig` are the keys of the published ``text_config``.

Source: the published ``config.json`` of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

LayerKind = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed keys."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower; field names are the keys of the published ``vision_config``."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one model; it is checked once at load.

    Invariant: an instance made by :func:`parse_config` or :func:`named_config` satisfies every constraint of :func:`check`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    rms_norm_eps: float
    swiglu_limit: float
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None

    @cached_property
    def num_encoder_layers(self) -> int:
        """Index of the first ratio-1 layer, which is the first layer of the decoder half."""
        return self.compress_ratios.index(1)

    @cached_property
    def engram_columns(self) -> int:
        """Hash columns of one engram layer: (max n-gram size - 1) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def ratio(self, layer: int) -> int:
        """Tokens that share one compressed entry of the layer's store; 0 for window-only layers."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose store of compressed entries this layer reads."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose choice of entries this layer uses."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def exact_replay_tokens(self, *, is_decoder_bounded: bool) -> int:
        """Number of tokens to replay before a position so that all windows after it are exact, bit for bit.

        A window that passes n layers depends on n * (sliding_window - 1) earlier tokens.  With a bounded decoder only the
        windows of the encoder half depend on replayed tokens.  The number is even, because entries of ratio 2 pool pairs.
        """
        layers = self.num_encoder_layers if is_decoder_bounded else self.num_hidden_layers
        depth = layers * (self.sliding_window - 1)
        return depth + depth % 2

    def kind(self, layer: int) -> LayerKind:
        """Kind of the layer: which parts of its global attention the layer itself computes."""
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(n: int) -> bool:
    """Miller-Rabin with the first twelve primes as bases: deterministic below 3.3e24."""
    if n < 2:
        return False
    for prime in _WITNESSES:
        if n % prime == 0:
            return n == prime
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    for base in _WITNESSES:
        power = pow(base, (n - 1) >> twos, n)
        if power in (1, n - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True


def engram_primes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Moduli of the hash columns, one tuple per Engram layer, columns in order (n-gram size outer, head inner).

    By the rule, every n-gram size of every layer takes the next primes above ``engram_vocab_size`` - 1 that no earlier column
    has.  So the columns get consecutive primes from ``engram_vocab_size`` on, in order.

    Source: model report, Engram section; each layer's ``engram_num_embeddings`` is their sum.

    Cost: about ln(engram_vocab_size) primality tests for each column.
    """
    primes = filter(_is_prime, itertools.count(config.engram_vocab_size))
    return tuple(tuple(itertools.islice(primes, config.engram_columns)) for _ in config.engram_layer_ids)
