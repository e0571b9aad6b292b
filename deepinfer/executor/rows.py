"""Per-request device state, by slot: what sampling needs to know and the token that was sampled last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.quant import to_device
from deepinfer.ops.sampling import SamplingRows, signed
from deepinfer.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The rows of a step.

    Attributes:
        sampling: of each row.
        eos_from: [num_rows] int64, first position where the end token may stand.
    """

    sampling: SamplingRows
    eos_from: Tensor


class RowTable:
    """One row per slot.

    Invariant: a slot's row belongs to the request that was written last; rows of free slots mean nothing.

    Attributes:
        last_tokens: [num_slots] int64, sampled last.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Rows for ``num_slots`` slots on ``device``."""
        self._device = device
        self._reals = torch.zeros(num_slots, 2, dtype=torch.float32, device=device)  # temperature, top_p
        self._integers = torch.zeros(num_slots, 3, dtype=torch.int64, device=device)  # top_k, seed, eos_from
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def write(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """Give ``slot`` to a request whose prompt has ``num_prompt`` tokens."""
        eos_from = num_prompt + params.first_n_token_no_eos
        reals = torch.tensor([params.temperature, params.top_p], dtype=torch.float32)
        integers = torch.tensor([params.top_k, signed(params.seq_seed), eos_from], dtype=torch.int64)
        self._reals[slot] = to_device(reals, self._device)
        self._integers[slot] = to_device(integers, self._device)

    def gather(self, slots: Tensor, *, filters: bool) -> Gathered:
        """Rows of ``slots`` [num_rows] int64; ``filters`` as in :class:`SamplingRows`."""
        reals, integers = self._reals[slots], self._integers[slots]
        sampling = SamplingRows(
            temperature=reals[:, 0],
            top_p=reals[:, 1],
            top_k=integers[:, 0],
            seeds=integers[:, 1],
            min_p=torch.zeros_like(reals[:, 0]),
            filters=filters,
        )
        return Gathered(sampling=sampling, eos_from=integers[:, 2])
