"""START HERE: DeepSeek-V4.1-Flash from embedding to logits.

The published model (``full``) has forty blocks.  A block is attention, then experts.  Hyper-connections join both to four
residual streams.  The first half of the blocks is the encoder: its layers compress the context at ratio 2.  The first decoder
layer writes the ratio-1 store that all decoder layers read.  Engram adds looked-up n-gram values to the streams before two
encoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kv.cache import KVCache
from deepinfer.model.attention import Attention, Choice, Compressor, Rotations
from deepinfer.model.engram import Engram, History
from deepinfer.model.inputs import LayerInputs, StepInputs
from deepinfer.model.moe import MoE
from deepinfer.model.parameters import Parameters
from deepinfer.ops import norm as ops
from deepinfer.ops.sampling import logits


class Block:
    """One layer's weights."""

    def __init__(self, parameters: Parameters, layer: int, pad_class: int, config: ModelConfig) -> None:
        """Weights ``layers.{layer}.*``."""
        prefix = f"layers.{layer}"
        has_engram = layer in config.engram_layer_ids
        self.engram = Engram(parameters, f"{prefix}.engram", layer, pad_class, config) if has_engram else None
        self.attention_hyper = parameters.hyper(prefix, "attn", config)
        is_source = layer in config.kv_source_layer_ids
        self.compressor = Compressor(parameters, f"{prefix}.attn", layer, config) if is_source else None
        self.attention = Attention(parameters, f"{prefix}.attn", layer, config)
        self.ffn_hyper = parameters.hyper(prefix, "ffn", config)
        self.ffn = MoE(parameters, f"{prefix}.ffn", config, num_experts=config.n_routed_experts, top_k=config.num_experts_per_tok)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Results of a step, apart from what it writes into the cache.

    Attributes:
        hidden: [num_logits, hidden] normed for the LM head, in the order of ``inputs.logit_rows``.
        aux: [num_decoder_rows, num_targets * hidden] input of the drafter, in the order of ``inputs.decoder``: the mean of the
            streams that enter each layer of ``dspark_target_layer_ids``, concatenated.  None for a model without draft stages.

    Both have the dtype of activations.
    """

    hidden: Tensor
    aux: Tensor | None


class Flash:
    """The network.  Holds only weights; all state is in the :class:`KVCache` argument of a call.

    Attributes:
        config: configuration of the model.
        device, dtype: device and dtype of activations.
        exact: whether the network computes in fp64 without rounding.
        embedding: [vocab_size, hidden] in the dtype of activations.
        head: [vocab_size, hidden] LM head, in the accumulation dtype.
        plain_frequencies: [rope_dim / 2] rotary frequencies of layers without compressed keys, in the accumulation dtype.
        taken: names of the checkpoint's tensors that the network uses.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        compression: Tensor,
        *,
        device: torch.device,
        exact: bool = False,
    ) -> None:
        """Take the weights from the tensors of a checkpoint.

        Args:
            tensors: checkpoint name -> tensor as stored; tensors of the drafter and the vision tower are not used.
            compression: [vocab_size] integer map from token ids to Engram's compressed ids.
            exact: compute in fp64 without rounding (golden values) instead of bf16 with fp32 sums.
        """
        parameters = Parameters(tensors=tensors, device=device, exact=exact)
        self.config = config
        self.device = device
        self.dtype = parameters.dtype
        self.exact = exact
        self.embedding = parameters.activation("embed.weight")
        compression = compression.to(device, torch.int64)
        pad_class = int(compression[config.engram_pad_token_id])
        self.history = History(compression, config)
        self.blocks = [Block(parameters, layer, pad_class, config) for layer in range(config.num_hidden_layers)]
        self.norm = parameters.wide("norm.weight")
        self.head = parameters.wide("head.weight")
        wide, rope_dim = parameters.wide_dtype, config.qk_rope_head_dim
        self.plain_frequencies = ops.rope_frequencies(rope_dim, config.rope_theta, None).to(device, wide)
        self._scaled = ops.rope_frequencies(rope_dim, config.compress_rope_theta, config.rope_scaling).to(device, wide)
        self._identity = torch.eye(config.hc_mult, dtype=wide, device=device)
        targets = config.dspark_target_layer_ids if config.num_nextn_predict_layers else ()
        self._targets = {layer: number for number, layer in enumerate(targets)}
        self.taken = parameters.taken

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Run one step; returns logits [num_logits, vocab_size] fp32 (fp64 in the exact regime)."""
        return self.logits(self.run(inputs, cache).hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the whole vocabulary: [num_rows, vocab_size] fp32 (fp64 in the exact regime).

        Args:
            hidden: [num_rows, hidden] normed, as in :class:`Outputs`.
        """
        return logits(hidden, self.head)

    def run(self, inputs: StepInputs, cache: KVCache, *, between_layers: Callable[[], None] = lambda: None) -> Outputs:
        """Run one step up to the LM head.

        Args:
            inputs: inputs of the step.
            cache: read, and extended by the step's tokens.
            between_layers: called before each layer, so that a caller can observe a long step; must not change the inputs.
        """
        config = self.config
        embedded = self.embedding[inputs.token_ids]
        if inputs.image_rows is not None and inputs.image_embeddings is not None:
            embedded[inputs.image_rows] = inputs.image_embeddings.to(embedded.dtype)
        streams = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)
        history = self.history(inputs, cache)

        # The output of a sublayer (delta) is not written into the streams at once.  The next pass over the streams writes it and
        # collapses the streams with the same mix.  Before the first sublayer delta is 0 and the mix takes copy 0.
        delta, mix = torch.zeros_like(embedded), self.nothing_pending(embedded.shape[0])
        now, rotations = inputs.encoder, self.rotations(inputs.encoder)
        aux = streams.new_empty(inputs.decoder.positions.shape[0], len(self._targets), config.hidden_size)
        choice: Choice | None = None
        for layer, block in enumerate(self.blocks):
            between_layers()
            hyper = block.attention_hyper
            if block.engram is None:
                streams, collapsed, raw, square_sum = ops.mhc_mix(streams, delta, mix, hyper.fn)
            else:
                streams = block.engram(history, ops.mhc_post(streams, delta, mix), now.is_image)
                collapsed, raw, square_sum = ops.mhc_pre(streams, mix.pre, hyper.fn)
            mix, x, x8 = ops.mhc_finish(raw, square_sum, collapsed, hyper)
            if block.compressor is not None:  # before the indexer, because a token may choose the entry that it completes
                block.compressor(x, now, cache, rotations)
            if layer == config.num_encoder_layers and inputs.decoder_rows is not None:
                # The entries of all rows are stored now.  Only the decoder rows need the remaining layers.
                if not len(inputs.decoder.positions):
                    break
                kept = inputs.decoder_rows
                streams, x, x8, mix = streams[kept], x[kept], x8.rows(kept), mix.rows(kept)
                now, rotations = inputs.decoder, self.rotations(inputs.decoder)
            if layer in self._targets:
                aux[:, self._targets[layer]] = ops.mhc_collapse(streams, torch.full_like(mix.pre, 1 / config.hc_mult))
            delta, choice = block.attention(x, x8, now, cache, rotations, choice)

            hyper = block.ffn_hyper
            streams, collapsed, raw, square_sum = ops.mhc_mix(streams, delta, mix, hyper.fn)
            mix, x, x8 = ops.mhc_finish(raw, square_sum, collapsed, hyper)
            delta = block.ffn(x, x8, now.is_image)

        rows = inputs.logit_rows
        last = mix.rows(rows)
        streams = ops.mhc_post(streams[rows], delta[rows], last)
        hidden = ops.final_norm(streams, last.pre, self.norm, config.rms_norm_eps)
        return Outputs(hidden=hidden, aux=aux.flatten(1) if self._targets else None)

    def nothing_pending(self, num_tokens: int) -> ops.Mix:
        """A mix that does not change the streams and collapses them to copy 0."""
        comb = self._identity.expand(num_tokens, -1, -1)
        return ops.Mix(pre=comb[:, 0], post=torch.zeros_like(comb[:, 0]), comb=comb)

    def rotations(self, inputs: LayerInputs) -> Rotations:
        """Rotations at the positions of the rows and of their entries."""
        return Rotations(
            plain=ops.Rotation.at(inputs.positions, self.plain_frequencies),
            scaled=ops.Rotation.at(inputs.positions, self._scaled),
            entries={ratio: ops.Rotation.at(rows.first_positions, self._scaled) for ratio, rows in inputs.store_rows.items()},
        )
