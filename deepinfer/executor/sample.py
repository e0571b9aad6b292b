"""Logits -> tokens, for rows with different parameters; launched without waiting, read back later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.executor.rows import RowTable
from deepinfer.ops.sampling import sample, top_logprobs
from deepinfer.request import SamplingParams
from deepinfer.step import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What sampling knows of the vocabulary.

    Attributes:
        allowed: [vocab_size] bool on the device: ids that an answer may contain.
        is_eos: [vocab_size] bool on the device.
    """

    allowed: Tensor
    is_eos: Tensor

    @classmethod
    def build(cls, vocab_size: int, *, eos_token_id: int, forbidden: Sequence[int], device: torch.device) -> Vocabulary:
        """Masks on ``device``; ``forbidden`` ids are never sampled."""
        allowed = torch.ones(vocab_size, dtype=torch.bool)
        allowed[list(forbidden)] = False
        is_eos = torch.arange(vocab_size) == eos_token_id
        return cls(allowed=allowed.to(device), is_eos=is_eos.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Tokens of a step on their way to the host; :meth:`read` once ``ready`` has passed.

    Attributes:
        ids, logprobs: [num_rows].
        top_ids, top_values: [num_rows, most asked for].
        ready: event after which the host copies are complete, or None where they always are.
    """

    ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_values: Tensor
    ready: torch.cuda.Event | None

    def read(self, params: Sequence[SamplingParams]) -> list[Sampled]:
        """Wait, then one record a row; ``params`` in the order of the rows."""
        if self.ready is not None:
            self.ready.synchronize()
        rows = zip(
            self.ids.tolist(), self.logprobs.tolist(), self.top_ids.tolist(), self.top_values.tolist(), params, strict=True
        )
        return [
            Sampled(
                token_id=token_id,
                logprob=logprob,
                top_token_ids=tuple(top_ids[: each.top_logprobs]),
                top_logprobs=tuple(top_values[: each.top_logprobs]),
            )
            for token_id, logprob, top_ids, top_values, each in rows
        ]


def _to_host(values: Tensor) -> Tensor:
    """Start a copy to the host."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def launch_sampling(
    logits: Tensor, params: Sequence[SamplingParams], slots: Tensor, positions: Tensor, table: RowTable, vocabulary: Vocabulary
) -> SampledRows:
    """Sample one token a row and remember it as the slot's last.

    Args:
        logits: [num_rows, vocab_size] fp32 or fp64.
        params: one a row, on the host.
        slots, positions: [num_rows] int64; position of the token being decided.
    """
    filters = any(not each.is_greedy and (each.top_k != -1 or each.top_p < 1) for each in params)
    rows = table.gather(slots, filters=filters)
    is_held_back = (positions < rows.eos_from).unsqueeze(1)
    mask = vocabulary.allowed & ~(is_held_back & vocabulary.is_eos)
    ids, logprobs = sample(logits, rows.sampling, positions, mask=mask)
    table.last_tokens[slots] = ids
    most = min(max(each.top_logprobs for each in params), logits.shape[1])
    if most:
        top_ids, top_values = top_logprobs(logits, most)
    else:
        top_ids, top_values = ids.new_empty(len(params), 0), logprobs.new_empty(len(params), 0)
    copies = [_to_host(each) for each in (ids, logprobs, top_ids, top_values)]
    ready = None
    if logits.device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record()
    return SampledRows(ids=copies[0], logprobs=copies[1], top_ids=copies[2], top_values=copies[3], ready=ready)
