"""The shape of the model that is trained.

Every mechanism of the published model is there: window, ratio-2 and ratio-1 stores, reuse and reindex layers, candidate blocks,
Engram in two encoder layers, experts, hyper-connections, three draft stages.

Bytes in the published format, with a vocabulary of 10,240:

    embedding, LM head (bf16)                     13.1 MB
    routed experts, 12 layers x 16 (MXFP4)        12.5 MB
    drafter: 3 stages and Markov head              5.6 MB
    Engram: tables 4.9, projections 0.6 (FP8)      5.5 MB
    attention, indexers, compressors               3.4 MB
    hyper-connections (fp32)                       3.0 MB
    shared experts (FP8)                           1.5 MB
    vision tower (bf16)                            0.8 MB
    norms, routers                                 0.1 MB

A token uses about 15 M parameters.  A context of 4,096 tokens is 32 windows, 32 times ``index_topk`` ratio-1 entries, and 8 times
the entries of the candidate blocks, so all three choices matter at that length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepinfer.config import ModelConfig, engram_primes, named_config
from deepinfer.tokenizer import IMAGE, Tokenizer

NOISE = "<｜dspark_noise｜>"


def nano_config(tokenizer: Tokenizer) -> ModelConfig:
    """The shape of ``nano`` with the vocabulary of ``tokenizer``."""
    return with_vocabulary(
        replace(
            named_config("random"),
            hidden_size=320,
            q_lora_rank=160,
            o_lora_rank=80,
            index_head_dim=64,
            index_topk=128,
            candidate_topk_blocks=64,
            moe_intermediate_size=128,
            n_routed_experts=16,
            num_experts_per_tok=4,
            engram_vocab_size=12288,
            engram_head_dim=32,
            dspark_markov_rank=64,
            dspark_n_routed_experts=4,
        ),
        tokenizer,
    )


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """``config`` with the ids, the classes and the table heights that follow from ``tokenizer``."""
    changed = replace(
        config,
        vocab_size=tokenizer.vocab_size,
        engram_compressed_vocab_size=int(np.max(tokenizer.compression_map())) + 1,
        dspark_noise_token_id=tokenizer.special(NOISE),
        image_token_id=tokenizer.special(IMAGE),
    )
    return replace(changed, engram_num_embeddings=tuple(sum(primes) for primes in engram_primes(changed)))
