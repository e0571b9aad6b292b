"""Device state of requests by slot: sampling parameters, position, and the drafts of the next round."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import to_device
from deepinfer.ops.sampling import SamplingRows, signed
from deepinfer.request import SamplingParams


class SlotTable:
    """One entry for each slot.

    Invariant: the entry of a slot belongs to the request that :meth:`write` was last called for.  Entries of free slots have no
    meaning.

    Attributes:
        num_tokens_max: [num_slots] int64, most tokens that the request can have.
        stops_at_eos: [num_slots] bool.
        num_tokens: [num_slots] int64, decided tokens, including the anchor.  It keeps growing until the host sees the end.
        anchor_ids: [num_slots] int64, the last decided token.
        has_ended: [num_slots] bool, whether the last step decided an end token.
        draft_ids: [num_slots, num_drafts] int64, drafts after the anchor.
        draft_logits: [num_slots, num_drafts, vocab_size] unrounded logits that the drafts were drawn from, or None if unused.
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
        """Allocate entries for ``num_slots`` slots; ``draft_vocab`` is the vocabulary's size if draft logits are kept, else 0."""
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
        """Give ``slot`` to a request without decided tokens; ``params`` must have a seed."""
        assert params.seq_seed is not None, "admission gives every request a seed"
        reals = torch.tensor([params.temperature, params.top_p, params.min_p], dtype=torch.float32)
        integers = torch.tensor([params.top_k, signed(params.seq_seed), num_tokens_max, int(not params.ignore_eos)])
        self._reals[slot] = to_device(reals, self._device)
        copied = to_device(integers, self._device)
        self._integers[slot] = copied[:2]
        self.num_tokens_max[slot] = copied[2]
        self.stops_at_eos[slot] = copied[3].bool()

    def sampling(self, slots: Tensor, *, filters: bool) -> SamplingRows:
        """Sampling parameters of the requests in ``slots`` [num_requests] int64; ``filters`` as in :class:`SamplingRows`."""
        reals, integers = self._reals[slots], self._integers[slots]
        return SamplingRows(
            temperature=reals[:, 0],
            top_p=reals[:, 1],
            min_p=reals[:, 2],
            top_k=integers[:, 0],
            seeds=integers[:, 1],
            filters=filters,
        )
