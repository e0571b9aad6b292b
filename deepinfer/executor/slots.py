"""Per-request device state, by slot: how it is sampled, where it stands, and the drafts of its next round."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import to_device
from deepinfer.ops.sampling import SamplingRows, signed
from deepinfer.request import SamplingParams


class SlotTable:
    """One row per slot.

    Invariant: a slot's row belongs to the request that was written last; rows of free slots mean nothing.

    Attributes:
        num_tokens_max: [num_slots] int64, tokens that the request ends with at the latest.
        stops_at_eos: [num_slots] bool.
        num_tokens: [num_slots] int64, tokens decided, the anchor included; counts on while the host has not seen an end.
        anchor_ids: [num_slots] int64, the token decided last.
        has_ended: [num_slots] bool, whether the end token was among the last tokens.
        draft_ids: [num_slots, num_drafts] int64, drafts behind the anchor.
        draft_logits: [num_slots, num_drafts, vocab_size] they were drawn from, unrounded, or None where nobody asks.
        confidences: [num_slots, num_drafts] fp32 of the drafts.
    """

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        device: torch.device,
        *,
        draft_vocab: int = 0,
        draft_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Rows for ``num_slots`` slots on ``device``; ``draft_vocab`` is the vocabulary's size where draft logits are kept."""
        self._device = device
        self._reals = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._integers = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)  # top_k, seed
        self.num_tokens_max = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.stops_at_eos = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.anchor_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.has_ended = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.draft_ids = torch.zeros(num_slots, num_drafts, dtype=torch.int64, device=device)
        self.confidences = torch.zeros(num_slots, num_drafts, dtype=torch.float32, device=device)
        self.draft_logits: Tensor | None = None
        if draft_vocab and num_drafts:
            self.draft_logits = torch.zeros(num_slots, num_drafts, draft_vocab, dtype=draft_dtype, device=device)

    def write(self, slot: int, params: SamplingParams, num_tokens_max: int) -> None:
        """Give ``slot`` to a request that nothing was decided for yet, and whose parameters have a seed."""
        assert params.seq_seed is not None, "a request got its seed when it was taken in"
        reals = torch.tensor([params.temperature, params.top_p, params.min_p], dtype=torch.float32)
        integers = torch.tensor([params.top_k, signed(params.seq_seed), num_tokens_max, int(not params.ignore_eos)])
        self._reals[slot] = to_device(reals, self._device)
        there = to_device(integers, self._device)
        self._integers[slot] = there[:2]
        self.num_tokens_max[slot] = there[2]
        self.stops_at_eos[slot] = there[3].bool()

    def sampling(self, slots: Tensor, *, filters: bool) -> SamplingRows:
        """How the requests of ``slots`` [num_rows] int64 are sampled; ``filters`` as in :class:`SamplingRows`."""
        reals, integers = self._reals[slots], self._integers[slots]
        return SamplingRows(
            temperature=reals[:, 0],
            top_p=reals[:, 1],
            min_p=reals[:, 2],
            top_k=integers[:, 0],
            seeds=integers[:, 1],
            filters=filters,
        )
