"""Expert operators against one pick at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops import moe, quant

HIDDEN, INTER, EXPERTS, TOP_K, LIMIT = 64, 32, 5, 2, 0.7


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def silu_product(gate_up, weight):
    gate, up = gate_up.chunk(2)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return quant.round_mxfp8(gate / (1 + torch.exp(-gate)) * up * weight)


def packed(rng, *shape, pack=quant.pack_fp4, repack=quant.repack_fp4):
    return repack(*pack(normal(rng, *shape) / math.sqrt(shape[-1]) * 2), torch.float64)


def router(rng):
    return normal(rng, EXPERTS, HIDDEN) / 8, normal(rng, EXPERTS) / 5, normal(rng, EXPERTS)


# ------------------------------------------------------------------------------------------------------------------ router


def test_route_follows_the_formula(seed):
    rng = np.random.default_rng(seed)
    x, is_image = normal(rng, 40, HIDDEN), torch.from_numpy(rng.random(40) < 0.4)
    gate, bias, bias_image = router(rng)
    ids, weights = moe.route(x, gate, bias, bias_image, is_image, TOP_K, 1.5)
    for token in range(40):
        scores = [math.sqrt(math.log1p(math.exp((x[token] @ gate[expert]).item()))) for expert in range(EXPERTS)]
        steer = (bias_image if is_image[token] else bias).tolist()
        order = sorted(range(EXPERTS), key=lambda expert: -(scores[expert] + steer[expert]))[:TOP_K]
        assert ids[token].tolist() == order
        total = sum(scores[expert] for expert in order)
        assert weights[token].tolist() == pytest.approx([1.5 * scores[expert] / total for expert in order], abs=1e-12)


def test_equal_scores_go_to_the_lower_expert():
    x, zeros = torch.ones(3, HIDDEN, dtype=torch.float64), torch.zeros(EXPERTS, dtype=torch.float64)
    bias = zeros.clone()
    bias[4] = 1
    is_image = torch.tensor([False, True, False])
    ids, weights = moe.route(x, zeros.unsqueeze(1).expand(-1, HIDDEN), bias, zeros, is_image, 3, 1.5)
    assert ids.tolist() == [[4, 0, 1], [0, 1, 2], [4, 0, 1]]
    assert torch.allclose(weights, torch.full_like(weights, 0.5))


def test_bias_steers_the_choice_and_not_the_weights(seed):
    rng = np.random.default_rng(seed)
    x, no_image = normal(rng, 10, HIDDEN), torch.zeros(10, dtype=torch.bool)
    gate, bias, bias_image = router(rng)
    ids, weights = moe.route(x, gate, bias, bias_image, no_image, TOP_K, 1.5)
    same_ids, same_weights = moe.route(x, gate, bias + 100, bias_image, no_image, TOP_K, 1.5)
    assert torch.equal(same_ids, ids)
    assert torch.equal(same_weights, weights)


@pytest.mark.parametrize("size", [-500.0, 500.0])
def test_scores_of_extreme_logits_are_finite(size):
    gate = torch.zeros(EXPERTS, HIDDEN)
    gate[1] = size
    zeros, x = torch.zeros(EXPERTS), torch.ones(1, HIDDEN).bfloat16()
    ids, weights = moe.route(x, gate, zeros, zeros, torch.tensor([False]), EXPERTS, 1.5)
    assert ids[0, 0 if size > 0 else -1] == 1
    assert weights.isfinite().all()
    assert weights.sum().item() == pytest.approx(1.5)


# -------------------------------------------------------------------------------------------------------------------- plan


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=30))
def test_picks_are_sorted_by_expert_then_by_token(ids):
    plan = moe.sort_picks(torch.tensor(ids), 8)
    flat = [expert for row in ids for expert in row]
    assert plan.order.tolist() == sorted(range(len(flat)), key=lambda pick: (flat[pick], pick))
    assert plan.counts.tolist() == [flat.count(expert) for expert in range(8)]


# ----------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_every_pick_is_computed_by_its_expert(num_tokens, seed):
    rng = np.random.default_rng(seed)
    x8 = quant.round_mxfp8(normal(rng, num_tokens, HIDDEN))
    w13, w2 = packed(rng, EXPERTS, 2 * INTER, HIDDEN), packed(rng, EXPERTS, HIDDEN, INTER)
    ids = torch.from_numpy(rng.choice([0, 1, 3, 4], (num_tokens, TOP_K)))  # expert 2 has no pick
    weights = normal(rng, num_tokens, TOP_K).abs()
    found = moe.experts(quant.RoundedRows(x8), weights, moe.sort_picks(ids, EXPERTS), w13, w2, LIMIT)
    for token in range(num_tokens):
        for choice in range(TOP_K):
            expert = ids[token, choice]
            hidden = silu_product(w13.dense[expert] @ x8[token], weights[token, choice])
            assert torch.allclose(found[token, choice], w2.dense[expert] @ hidden, rtol=0, atol=1e-12)


def test_clamps_change_values_on_both_sides(seed):
    """Without this, the comparison above would not find a missing clamp."""
    rng = np.random.default_rng(seed)
    x8, w13 = quant.round_mxfp8(normal(rng, 9, HIDDEN)), packed(rng, 2 * INTER, HIDDEN)
    gate, up = (x8 @ w13.dense.T).chunk(2, dim=1)
    assert (gate > LIMIT).any()
    assert (up > LIMIT).any()
    assert (up < -LIMIT).any()


def test_routing_weight_multiplies_before_the_quantiser(seed):
    """A weight that is a power of two commutes with a quantiser with block scales; another weight does not."""
    rng = np.random.default_rng(seed)
    x8 = quant.quantise(normal(rng, 4, HIDDEN))
    w13, w2 = packed(rng, 1, 2 * INTER, HIDDEN), packed(rng, 1, HIDDEN, INTER)
    picks = moe.sort_picks(torch.zeros(4, 1, dtype=torch.int64), 1)

    def run(weight):
        return moe.experts(x8, torch.full((4, 1), weight, dtype=torch.float64), picks, w13, w2, LIMIT)

    assert torch.allclose(run(0.5), run(1.0) * 0.5, rtol=0, atol=1e-12)
    assert not torch.allclose(run(0.7), run(1.0) * 0.7, rtol=0, atol=1e-4)


def test_shared_expert_has_weight_one(seed):
    rng = np.random.default_rng(seed)
    x8 = quant.round_mxfp8(normal(rng, 5, HIDDEN))
    formats = {"pack": quant.pack_fp8, "repack": quant.repack_fp8}
    w13, w2 = packed(rng, 2 * INTER, HIDDEN, **formats), packed(rng, HIDDEN, INTER, **formats)
    found = moe.shared_expert(quant.RoundedRows(x8), w13, w2, LIMIT)
    for token in range(5):
        assert torch.allclose(found[token], w2.dense @ silu_product(w13.dense @ x8[token], 1), rtol=0, atol=1e-12)


def test_combine_sums_in_single_precision_and_rounds_once():
    parts = torch.tensor([[[1.0], [2.0**-8], [2.0**-8]]]).bfloat16()
    shared = torch.tensor([[2.0**-9]]).bfloat16()
    total = moe.combine(parts, shared)
    assert total.dtype == torch.bfloat16
    assert total.item() == 1 + 2.0**-7  # 1.00977 rounded once; rounding after every addition gives 1


def test_combine_adds_every_part(seed):
    rng = np.random.default_rng(seed)
    parts, shared = normal(rng, 6, 3, HIDDEN), normal(rng, 6, HIDDEN)
    assert torch.allclose(moe.combine(parts, shared), parts.sum(1) + shared, rtol=0, atol=1e-12)
