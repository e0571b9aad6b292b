"""The range of every number in ``config.json``.

Ranges are much wider than published shapes.  A value outside its range is a typing error or a shape that no machine can hold.
Without ranges, an error would come late: a table of 10^12 tensors, 10^9 hash columns, an id that int32 cannot hold.
"""

from __future__ import annotations

from typing import Final

_WIDTH: Final = (1, 1 << 16)
_HEADS: Final = (1, 1 << 10)
_HEAD_DIM: Final = (1, 1 << 12)
_EXPERTS: Final = (1, 1 << 12)
_CHOSEN: Final = (1, 1 << 20)
_TOKEN_ID: Final = (0, (1 << 24) - 1)
_EPS: Final = (1e-37, 1.0)  # a normal number in fp32
_THETA: Final = (1.01, 1e12)  # the code divides by its logarithm
_FACTOR: Final = (1e-6, 1e6)

RANGES: Final[dict[str, tuple[int, int] | tuple[float, float]]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": _WIDTH,
    "num_hidden_layers": (1, 512),
    "num_attention_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "q_lora_rank": _WIDTH,
    "o_groups": _HEADS,
    "o_lora_rank": _WIDTH,
    "sliding_window": (2, 1 << 16),
    "index_n_heads": _HEADS,
    "index_head_dim": _HEAD_DIM,
    "index_topk": _CHOSEN,
    "candidate_source_layer_id": (0, 511),
    "candidate_topk_blocks": _CHOSEN,
    "candidate_block_size": _CHOSEN,
    "rope_theta": _THETA,
    "compress_rope_theta": _THETA,
    "factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "original_max_position_embeddings": (1, 1 << 30),
    "max_position_embeddings": (1, 1 << 30),  # positions and lengths are int32
    "rms_norm_eps": _EPS,
    "swiglu_limit": (1e-6, 1e30),
    "moe_intermediate_size": _WIDTH,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "routed_scaling_factor": _FACTOR,
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "hc_eps": _EPS,
    "engram_max_ngram_size": (2, 16),
    "engram_n_heads": (1, 256),
    "engram_head_dim": _HEAD_DIM,
    "engram_vocab_size": (1, (1 << 31) - 1),
    "engram_compressed_vocab_size": (1, 1 << 24),
    "engram_pad_token_id": _TOKEN_ID,
    "num_nextn_predict_layers": (0, 64),
    "dspark_block_size": (1, 64),
    "dspark_noise_token_id": _TOKEN_ID,
    "dspark_markov_rank": _WIDTH,
    "dspark_n_routed_experts": _EXPERTS,
    "dspark_num_experts_per_tok": _EXPERTS,
    "bos_token_id": _TOKEN_ID,
    "eos_token_id": _TOKEN_ID,
    "pad_token_id": _TOKEN_ID,
    "image_token_id": _TOKEN_ID,
    "vision_config.num_hidden_layers": (1, 512),
    "vision_config.hidden_size": _WIDTH,
    "vision_config.num_attention_heads": _HEADS,
    "vision_config.intermediate_size": _WIDTH,
    "vision_config.patch_size": (1, 256),
    "vision_config.rope_theta": _THETA,
    "vision_config.downsample_ratio": (1, 32),
    "vision_config.max_image_tokens": (4, 1 << 16),  # at least START, one IMAGE, NEWLINE and END
    "vision_config.min_pixels": (1, 1 << 26),  # a picture has at most 8192 x 8192 pixels
    "vision_config.max_wh_ratio": (1.0, 1e6),
}
"""Key -> (least, greatest), both allowed; keys of ``vision_config`` have this prefix, others are the last part of the path."""

MAX_EXPERTS: Final = 1 << 16
"""Limit of routed experts in all layers, draft layers included.  The published model has 15,744, with six tensors each."""
MAX_ENGRAM_COLUMNS: Final = 1 << 12
"""Limit of hash columns in all Engram layers; each column needs its own prime.  The published model has 48."""
