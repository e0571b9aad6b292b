"""Logits -> tokens, for rows with different parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.ops.sampling import SamplingRows, sample, top_logprobs
from deepinfer.request import SamplingParams
from deepinfer.step import Sampled


def _signed(seed: int) -> int:
    """The 64 bits of a seed as a signed integer, which is what tensors hold."""
    return seed - 2**64 if seed >= 2**63 else seed


def sample_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    num_outputs: Sequence[int],
    *,
    eos_token_id: int,
    forbidden: Sequence[int],
) -> list[Sampled]:
    """Sample one token a row.

    Args:
        logits: [num_rows, vocab_size] fp32 or fp64.
        params: one a row.
        positions: of the tokens being decided.
        num_outputs: tokens each request has generated before.
        eos_token_id: forbidden while ``first_n_token_no_eos`` says so.
        forbidden: ids that no answer may contain.

    Cost: one device-to-host copy of the results.
    """
    device = logits.device
    rows = SamplingRows(
        temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([each.top_k for each in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([each.top_p for each in params], dtype=torch.float32, device=device),
        min_p=torch.zeros(len(params), dtype=torch.float32, device=device),
        seeds=torch.tensor([_signed(each.seq_seed) for each in params], dtype=torch.int64, device=device),
        filters=any(not each.is_greedy and (each.top_k != -1 or each.top_p < 1) for each in params),
    )
    mask = torch.ones(logits.shape, dtype=torch.bool, device=device)
    mask[:, list(forbidden)] = False
    held_back = [count < each.first_n_token_no_eos for each, count in zip(params, num_outputs, strict=True)]
    mask[:, eos_token_id] = ~torch.tensor(held_back, device=device)
    ids, logprobs = sample(logits, rows, torch.tensor(positions, device=device), mask=mask)

    most = min(max(each.top_logprobs for each in params), logits.shape[1])
    top_ids: list[list[int]] = [[] for _ in params]
    top_values: list[list[float]] = [[] for _ in params]
    if most:
        best_ids, best_values = top_logprobs(logits, most)
        top_ids, top_values = best_ids.tolist(), best_values.tolist()
    return [
        Sampled(
            token_id=token_id,
            logprob=logprob,
            top_token_ids=tuple(row_ids[: each.top_logprobs]),
            top_logprobs=tuple(row_values[: each.top_logprobs]),
        )
        for token_id, logprob, row_ids, row_values, each in zip(
            ids.tolist(), logprobs.tolist(), top_ids, top_values, params, strict=True
        )
    ]
