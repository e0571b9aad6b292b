"""Experts computed in tiles, without a host sync, give the bits of the reference."""

import pytest
import torch

from deepinfer.ops import moe


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_tiles_equal_products_of_hit_experts(monkeypatch, num_tokens, dtype, budget):
    monkeypatch.setattr(moe, "_TILE_WEIGHT_BYTES", budget)
    gen = torch.Generator().manual_seed(num_tokens)
    num_experts, top_k = 6, 2
    ids = torch.stack(
        [torch.randperm(num_experts - 1, generator=gen)[:top_k] for _ in range(num_tokens)]
    )  # one expert has no pick
    picks = moe.sort_picks(ids, num_experts)
    rows = torch.randn(num_tokens * top_k, 64, generator=gen).to(dtype)
    dense = torch.randn(num_experts, 96, 64, generator=gen).to(dtype)
    assert torch.equal(moe._products_in_tiles(rows, picks, dense), moe._products_of_hit_experts(rows, picks, dense))
