"""The draft network: drafts a block of next tokens at once from outputs of the main network.

The main network's streams at every decided position become one *context record* per draft stage (:meth:`Drafter.commit`).  A
draft (:meth:`Drafter.draft`) runs one block of ``width`` tokens per request through the stages.  The first token of a block is
the anchor: the last emitted token, which has no context record yet.  The other tokens are noise tokens.  All tokens of a block
see the same keys: the context before the anchor, and the whole block.  A low-rank Markov head turns the outputs of the block into
tokens, left to right.

Invariants: a request's results do not depend on the other requests, bit for bit.  A draft writes nothing into the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import QUANT_BLOCK, DraftSampling, ModelConfig
from deepinfer.kv.cache import KVCache
from deepinfer.model.attention import Attention
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import LayerInputs, PreviousTokens, RingRows
from deepinfer.model.moe import MoE
from deepinfer.model.parameters import Parameters
from deepinfer.ops import norm as ops
from deepinfer.ops.attention import Spans
from deepinfer.ops.quant import PackedWeight, linear_fp8, quantise, repack_fp8, unpack
from deepinfer.ops.sampling import SamplingRows, is_finite, markov_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts of all requests; draft k = 1, 2, ... is at index k - 1.

    Attributes:
        ids: [num_requests, num_drafts] int64.
        logits: [num_requests, num_drafts, vocab_size] fp32 (fp64 in the exact regime), logits that the drafts were drawn from,
            in mode ``sampled``; None in the other modes, whose verification does not need them.
        confidences: [num_requests, num_drafts] same dtype, in [0, 1]: probability that draft k is accepted if all drafts
            before it are accepted; NaN if a logit that the draft was drawn from is not finite.
    """

    ids: Tensor
    logits: Tensor | None
    confidences: Tensor


class Stage:
    """One draft layer's weights."""

    def __init__(self, parameters: Parameters, stage: int, config: ModelConfig) -> None:
        """Weights ``mtp.{stage}.*`` that every stage has."""
        prefix = f"mtp.{stage}"
        self.layer = config.num_hidden_layers + stage
        self.attention_hyper = parameters.hyper(prefix, "attn", config)
        self.attention = Attention(parameters, f"{prefix}.attn", self.layer, config)
        self.ffn_hyper = parameters.hyper(prefix, "ffn", config)
        self.ffn = MoE(
            parameters,
            f"{prefix}.ffn",
            config,
            num_experts=config.dspark_n_routed_experts,
            top_k=config.dspark_num_experts_per_tok,
            has_image_bias=False,
        )


class Drafter:
    """The draft network.  Holds only weights; context records are window records of layer ``num_hidden_layers`` + stage.

    Attributes:
        width: tokens of a block, fixed by training; also the largest number of drafts.
        taken: names of the checkpoint's tensors that the drafter uses.
    """

    def __init__(self, model: Flash, tensors: Mapping[str, Tensor], *, temperatures: tuple[float, ...] | None = None) -> None:
        """Take the weights from the tensors of a checkpoint.

        Args:
            model: the main network; the drafter uses its embedding, LM head, rotations, device and dtypes.
            tensors: checkpoint name -> tensor as stored; tensors outside ``mtp.*`` are not used.
            temperatures: confidence temperature of each of the ``width`` drafts; None for 1.
        """
        config = model.config
        assert config.num_nextn_predict_layers > 0, "a drafter is built only for a configuration with draft stages"
        self.width = config.dspark_block_size
        self._temperatures = temperatures or (1.0,) * self.width
        assert len(self._temperatures) == self.width, "one confidence temperature for each draft"
        self._model = model
        parameters = Parameters(tensors=tensors, device=model.device, exact=model.exact)
        self.main_proj = parameters.fp8("mtp.0.main_proj")
        self.main_norm = parameters.wide("mtp.0.main_norm.weight")
        self.stages = [Stage(parameters, stage, config) for stage in range(config.num_nextn_predict_layers)]
        self.wkv = _key_projections(self.stages, config.q_lora_rank, parameters.gemm_dtype)
        self.kv_norms = torch.stack([stage.attention.kv_norm for stage in self.stages])
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        self.norm = parameters.wide(f"{last}.norm.weight")
        self.markov_embed = parameters.stored(f"{last}.markov_head.embed.weight")
        self.markov_head = parameters.wide(f"{last}.markov_head.head.weight")
        self.confidence = parameters.wide(f"{last}.confidence_head.proj.weight")
        self.taken = parameters.taken

    def commit(self, aux: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> None:
        """Write the context records of decided positions.

        Args:
            aux: [num_rows, num_targets * hidden] of :class:`~deepinfer.model.flash.Outputs`.
            positions: [num_rows] int64 of those rows.
            slots: [num_rows] int64, slots of their requests; slot 0 drops a row.  No two other rows may have the same slot and
                positions that are equal modulo ``ring_tokens``.
            cache: the window rings of the draft stages are written.

        Cost: two FP8 products, one write for each stage; no host sync.
        """
        model, eps = self._model, self._model.config.rms_norm_eps
        main8 = ops.norm8(linear_fp8(quantise(aux), self.main_proj), self.main_norm, eps)
        rotation = ops.Rotation.at(positions, model.plain_frequencies)
        records = ops.context_records(linear_fp8(main8, self.wkv), self.kv_norms, rotation, eps)
        rows = torch.arange(len(positions), device=positions.device)
        where = RingRows(rows=rows, slots=slots, positions=positions % cache.layout.ring_tokens)
        for number, stage in enumerate(self.stages):
            where.write(cache.window(stage.layer), records[:, number])

    def draft(
        self,
        anchors: Tensor,
        anchor_positions: Tensor,
        slots: Tensor,
        floors: Tensor,
        rows: SamplingRows,
        mode: DraftSampling,
        num_drafts: int,
        cache: KVCache,
        forced: Tensor | None = None,
    ) -> Drafts:
        """Draft the tokens after each request's anchor.

        Args:
            anchors: [num_requests] int64 token ids.
            anchor_positions: [num_requests] int64.
            slots: [num_requests] int64.
            floors: [num_requests] int64, first position of each request with a valid context record.
            rows: sampling parameters of each request.
            mode: how drafts are chosen.
            num_drafts: number of drafts, 1 to ``width``.  A block always has ``width`` tokens, as in training.
            cache: only read.
            forced: [num_requests, num_drafts] int64, tokens that replace drafts, -1 for none.  Such a draft has confidence 1, and
                the logits it was drawn from are one-hot.

        Source: DSpark paper, draft backbone and Markov head.  Cost: no host sync.
        """
        assert 1 <= num_drafts <= self.width, f"num_drafts={num_drafts} is not in 1..{self.width}"
        hidden, base_logits = self._run_block(anchors, anchor_positions, slots, floors, num_drafts, cache)
        prev, ids, logits, confidences = anchors, [], [], []
        for number, temperature in enumerate(self._temperatures[:num_drafts]):
            prev, used, confidence = markov_step(
                base_logits[:, number],
                prev,
                self.markov_embed,
                self.markov_head,
                hidden[:, number],
                self.confidence,
                rows,
                anchor_positions,
                number + 1,
                mode,
                temperature,
            )
            confidence = torch.where(is_finite(used), confidence, torch.nan)
            if forced is not None:
                token_ids = forced[:, number]
                is_forced = token_ids >= 0
                prev = torch.where(is_forced, token_ids, prev)
                confidence = torch.where(is_forced & ~confidence.isnan(), 1.0, confidence)
                if mode == "sampled":
                    one_hot = torch.full_like(used, -torch.inf).scatter_(1, token_ids.clamp_min(0).unsqueeze(1), 0.0)
                    used = torch.where(is_forced.unsqueeze(1), one_hot, used)
            ids.append(prev)
            confidences.append(confidence)
            if mode == "sampled":
                logits.append(used)
        return Drafts(
            ids=torch.stack(ids, dim=1),
            logits=torch.stack(logits, dim=1) if logits else None,
            confidences=torch.stack(confidences, dim=1),
        )

    def _run_block(
        self, anchors: Tensor, anchor_positions: Tensor, slots: Tensor, floors: Tensor, num_drafts: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """The first outputs of each block: hidden [num_requests, num_drafts, hidden] before the final norm, base logits."""
        model, config = self._model, self._model.config
        token_ids = torch.full((anchors.shape[0], self.width), config.dspark_noise_token_id, device=model.device)
        token_ids[:, 0] = anchors
        inputs = self._block_inputs(anchor_positions, slots, floors, cache.layout.ring_tokens)
        rotations = model.rotations(inputs)
        embedded = model.embedding[token_ids.flatten()]
        streams = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)

        # As in Flash: the next pass over the streams writes a sublayer's output (delta) into them.
        delta, mix = torch.zeros_like(embedded), model.nothing_pending(embedded.shape[0])
        for stage in self.stages:
            hyper = stage.attention_hyper
            streams, collapsed, raw, square_sum = ops.mhc_mix(streams, delta, mix, hyper.fn)
            mix, x, x8 = ops.mhc_finish(raw, square_sum, collapsed, hyper)
            delta, _ = stage.attention(x, x8, inputs, cache, rotations, None)

            hyper = stage.ffn_hyper
            streams, collapsed, raw, square_sum = ops.mhc_mix(streams, delta, mix, hyper.fn)
            mix, x, x8 = ops.mhc_finish(raw, square_sum, collapsed, hyper)
            delta = stage.ffn(x, x8, inputs.is_image)

        used = torch.arange(token_ids.numel(), device=model.device).view_as(token_ids)[:, :num_drafts].flatten()
        last = mix.rows(used)
        streams = ops.mhc_post(streams[used], delta[used], last)
        hidden = ops.mhc_collapse(streams, last.pre)
        base_logits = model.logits(ops.final_norm(streams, last.pre, self.norm, config.rms_norm_eps))
        shape = (anchors.shape[0], num_drafts)
        return hidden.unflatten(0, shape), base_logits.unflatten(0, shape)

    def _block_inputs(self, anchor_positions: Tensor, slots: Tensor, floors: Tensor, ring_tokens: int) -> LayerInputs:
        """Inputs of the draft stages for the blocks of all requests.

        ``window_before.idx`` [num_requests * width, sliding_window + width] is the same for all tokens of a block: the
        ``sliding_window`` positions before the anchor, then the block itself.  Nothing is written or stored, because the tokens
        of a block exist only during the draft.
        """
        device, reach = self._model.device, self._model.config.sliding_window
        num_requests = anchor_positions.shape[0]
        offsets = torch.arange(self.width, device=device)
        requests = torch.arange(num_requests, device=device).unsqueeze(1)
        context = anchor_positions.unsqueeze(1) + torch.arange(-reach, 0, device=device)
        context_idx = requests * reach + torch.arange(reach, device=device)
        context_idx = context_idx.masked_fill_(context < floors.clamp_min(0).unsqueeze(1), -1)
        block_idx = num_requests * reach + requests * self.width + offsets
        keys = torch.cat([context_idx, block_idx], dim=1)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        nowhere = RingRows(rows=nothing, slots=nothing, positions=nothing)
        return LayerInputs(
            positions=(anchor_positions.unsqueeze(1) + offsets).flatten(),
            is_image=torch.zeros(num_requests * self.width, dtype=torch.bool, device=device),
            spans=Spans(chunks=(), round_pages=(), first_pages=nothing, round_rows=nothing.view(0, 0), positions=nothing),
            page_ids=nothing,
            window=nowhere,
            window_before=PreviousTokens(
                slots=slots.unsqueeze(1),
                positions=context % ring_tokens,
                idx=keys.unsqueeze(1).expand(-1, self.width, -1).flatten(0, 1),
            ),
            compressor=nowhere,
            compressor_before=PreviousTokens(slots=nothing.view(0, 1), positions=nothing.view(0, 1), idx=nothing.view(0, 1)),
            store_rows={},
        )


def _key_projections(stages: list[Stage], first: int, dtype: torch.dtype) -> PackedWeight:
    """Stack the outputs from ``first`` on of each stage's ``wqkv``, so that one product makes the keys of all stages."""
    parts = [unpack(stage.attention.wqkv) for stage in stages]
    codes = torch.cat([codes[first:].view(torch.uint8) for codes, _ in parts]).view(torch.float8_e4m3fn)
    return repack_fp8(codes, torch.cat([scale[first // QUANT_BLOCK :] for _, scale in parts]), dtype)
