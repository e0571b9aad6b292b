"""The drafter written for gradients: blocks of tokens that may follow, on the frozen text model.

The same network as :class:`deepinfer.model.drafter.Drafter`.  There a request's context rows lie in a ring; here the keys of a
block are gathered from the rows of its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.norm import rope_frequencies
from training import attention
from training.grids import round_mxfp8
from training.masters import Masters
from training.packing import Packed
from training.streams import Rotation, Streams, region, rms_norm
from training.twin import LayerWeights, feed_forward


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Which blocks are drafted.

    Attributes:
        anchors: [num_blocks] int64 row of each block's anchor among all tokens of a batch, sequence after sequence.
        token_ids: [num_blocks, width + 1] int64 the anchor and the tokens that follow it.
        is_known: [num_blocks, width] bool whether the token that a draft is compared with belongs to the document.
    """

    anchors: Tensor
    token_ids: Tensor
    is_known: Tensor

    @classmethod
    def at(cls, packed: Packed, places: Tensor, width: int) -> Blocks:
        """Blocks of ``width`` drafts whose anchors are the tokens ``places`` [batch, num_blocks] int64 of each sequence."""
        steps = torch.arange(width + 1, device=places.device)
        wanted = places.unsqueeze(-1) + steps
        inside = wanted.clamp_max(packed.length - 1)
        rows = torch.arange(packed.batch, device=places.device).view(-1, 1, 1)
        positions = packed.positions[rows, inside]
        is_known = (positions == positions[..., :1] + steps) & (positions[..., :1] >= 0) & (wanted < packed.length)
        anchors = places + packed.length * rows.squeeze(-1)
        token_ids = packed.token_ids[rows, inside]
        return cls(anchors=anchors.flatten(), token_ids=token_ids.flatten(0, 1), is_known=is_known[..., 1:].flatten(0, 1))


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What the drafter says of each draft, wide.

    Attributes:
        logits: [num_blocks, width, vocab_size] with the Markov bias of the token before.
        confidences: [num_blocks, width] logits of the probability that the draft is accepted if those before it are.
        loads: [num_stages, num_experts] int64 picks of each expert.
    """

    logits: Tensor
    confidences: Tensor
    loads: Tensor


class DrafterTwin:
    """The draft network.

    Attributes:
        masters: its weights.
    """

    def __init__(self, masters: Masters, embedding: Tensor, head: Tensor) -> None:
        """``embedding`` and ``head`` [vocab_size, hidden] of the frozen text model, rounded; they say dtype and device too."""
        self.masters = masters
        self._embedding, self._head = embedding, head
        config = masters.config
        self._wide = torch.float64 if embedding.dtype == torch.float64 else torch.float32
        frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
        self._frequencies = frequencies.to(embedding.device, self._wide)

    def weights(self) -> LayerWeights:
        """The rounded weights; one call serves all passes until the masters change."""
        return LayerWeights(self.masters, self._embedding.dtype, "mtp", self.masters.config.num_nextn_predict_layers)

    def run(self, packed: Packed, aux: Tensor, blocks: Blocks, weights: LayerWeights) -> Drafted:
        """Draft every block; draft k gets the true token k - 1 for its Markov bias.

        Args:
            aux: [num_tokens, num_targets * hidden] of :class:`~training.twin.Outputs`.
        """
        config = self.masters.config
        width, reach, eps = config.dspark_block_size, config.sliding_window, config.rms_norm_eps
        num_blocks, device = len(blocks.anchors), aux.device
        positions = packed.positions.flatten().clamp_min(0)
        records = self._records(aux, Rotation.at(positions, self._frequencies), weights)
        before = torch.arange(-reach, 0, device=device)
        is_there = positions[blocks.anchors].unsqueeze(1) + before >= 0
        rows = torch.where(is_there, blocks.anchors.unsqueeze(1) + before, 0)
        is_visible = torch.cat([is_there, is_there.new_ones(num_blocks, width)], dim=1).unsqueeze(1).expand(-1, width, -1)

        token_ids = torch.full((num_blocks, width), config.dspark_noise_token_id, device=device)
        token_ids[:, 0] = blocks.token_ids[:, 0]
        steps = torch.arange(width, device=device)
        rotation = Rotation.at((positions[blocks.anchors].unsqueeze(1) + steps).flatten(), self._frequencies)
        embedded = F.embedding(token_ids.flatten(), self._embedding)
        streams = Streams(embedded, config.hc_mult, num_rounds=config.hc_sinkhorn_iters, hc_eps=config.hc_eps, rms_eps=eps)
        loads = []
        for stage, record in enumerate(records):
            own, attn = weights.layers[stage], weights.attention(stage)
            _, x8 = streams.enter(weights.hyper(stage, "attn"))
            q, keys, _ = attention.project(x8, attn, rotation, config.num_attention_heads, eps)
            table = torch.cat([record[rows], keys.unflatten(0, (num_blocks, -1))], dim=1)
            out = attention.attend(q.unflatten(0, (num_blocks, -1)), table, attn["attn_sink"], is_visible).flatten(0, 1)
            streams.leave(attention.projected_out(out, attn["wo_a.weight"], attn["wo_b.weight"], rotation, config.o_groups))
            x, x8 = streams.enter(weights.hyper(stage, "ffn"))
            delta, load = feed_forward(x, x8, own, config.dspark_num_experts_per_tok, config, blocks.is_known)
            streams.leave(delta)
            loads.append(load.counts)

        last = weights.layers[-1]
        hidden = streams.collapsed()
        embed, bias = (last[f"markov_head.{name}.weight"] for name in ("embed", "head"))
        previous = F.embedding(blocks.token_ids[:, :-1].flatten(), embed)
        normed = rms_norm(hidden, last["norm.weight"], eps)
        logits = _logits(normed, self._head, previous, bias, self._wide)
        features = torch.cat([hidden, previous], dim=1).to(self._wide)
        confidences = (features * last["confidence_head.proj.weight"].to(self._wide)).sum(1)
        shape = (num_blocks, width)
        return Drafted(logits=logits.unflatten(0, shape), confidences=confidences.unflatten(0, shape), loads=torch.stack(loads))

    def _records(self, aux: Tensor, rotation: Rotation, weights: LayerWeights) -> list[Tensor]:
        """Context rows [num_tokens, head_dim] of each stage."""
        eps, first = self.masters.config.rms_norm_eps, weights.layers[0]
        main8 = round_mxfp8(rms_norm(F.linear(round_mxfp8(aux), first["main_proj.weight"]), first["main_norm.weight"], eps))
        return [
            attention.window_records(main8, own["attn.wkv.weight"], own["attn.kv_norm.weight"], rotation, eps)
            for own in weights.layers
        ]


@region
def _logits(normed: Tensor, head: Tensor, previous: Tensor, bias: Tensor, wide: torch.dtype) -> Tensor:
    """[num_rows, vocab_size] wide: of the hidden states, and of the tokens before through the Markov head."""
    return F.linear(normed.to(wide), head.to(wide)) + F.linear(previous.to(wide), bias.to(wide))
