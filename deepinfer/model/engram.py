"""Engram: values of n-gram tables, looked up by hash and added to the streams before two encoder layers."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import ModelConfig, engram_primes
from deepinfer.kv.cache import KVCache
from deepinfer.model.inputs import StepInputs
from deepinfer.model.parameters import Parameters
from deepinfer.ops import engram as ops
from deepinfer.ops.quant import linear_fp8


def engram_multipliers(layer: int, config: ModelConfig) -> tuple[int, ...]:
    """Odd hash multipliers of an Engram layer, one per n-gram position.

    Source: NumPy's default generator with seed 10007 * layer draws from [0, bound).  With this bound a product with a compressed
    id stays below 2^63.
    """
    bound = max(1, ((2**63 - 1) // config.engram_compressed_vocab_size) // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


class History:
    """Each token's last compressed ids, from the step and from the ring that earlier steps wrote."""

    def __init__(self, compression: Tensor, config: ModelConfig) -> None:
        """``compression`` [vocab_size] int64 maps token ids to compressed ids."""
        self.compression = compression
        self.image_token_id = config.image_token_id

    def __call__(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """[num_tokens, max_ngram] int64 ids at positions t, t-1, …; also writes the ids that later steps need."""
        ring, before = cache.lookback(), inputs.lookback_before
        inputs.restored.write(ring, self._compressed(inputs.restored_ids).int())
        ids = self._compressed(inputs.token_ids).int()
        known = before.gather(ring, ids).long()
        inputs.lookback.write(ring, ids)
        return known[before.idx].masked_fill_(before.idx < 0, ops.DEAD)

    def _compressed(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids == self.image_token_id, ops.DEAD, self.compression[token_ids])


class Engram:
    """One layer's table and gate."""

    def __init__(self, parameters: Parameters, prefix: str, layer: int, pad_class: int, config: ModelConfig) -> None:
        """Weights ``{prefix}.*`` (``layers.N.engram``); ``pad_class`` is the compressed id of the pad token."""
        device = parameters.device
        heads = config.engram_n_heads
        primes = engram_primes(config)[config.engram_layer_ids.index(layer)]
        offsets = (0, *itertools.accumulate(primes[:-1]))
        self.pad_class = pad_class
        self.eps = config.rms_norm_eps
        self.dtype = parameters.dtype
        self.primes = torch.tensor(primes, device=device).unflatten(0, (-1, heads))
        self.offsets = torch.tensor(offsets, device=device).unflatten(0, (-1, heads))
        self.multipliers = torch.tensor(engram_multipliers(layer, config), device=device)
        self.codes = parameters.stored(f"{prefix}.embed.weight")
        self.scale = parameters.stored(f"{prefix}.embed.scale")
        self.wkv = parameters.fp8(f"{prefix}.wkv")
        self.q_weight = parameters.wide(f"{prefix}.q_weight")
        self.k_weight = parameters.wide(f"{prefix}.k_weight")

    def __call__(self, history: Tensor, streams: Tensor, is_image: Tensor) -> Tensor:
        """Streams [num_tokens, n, hidden] with the looked-up values added; ``history`` from :class:`History`."""
        table_idx = ops.engram_rows(history, self.multipliers, self.primes, self.offsets, self.pad_class)
        looked_up = ops.engram_gather(self.codes, self.scale, table_idx, self.dtype)
        return ops.engram_gate(linear_fp8(looked_up, self.wkv), streams, self.q_weight, self.k_weight, is_image, self.eps)
