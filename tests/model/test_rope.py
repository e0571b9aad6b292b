"""Rotary positions: frequencies, YaRN's ramp, interleaved pairs."""

import math

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.ops.norm import Rotation, rope_frequencies, rotate

FULL = named_config("full")


def scaled():
    return rope_frequencies(FULL.qk_rope_head_dim, FULL.compress_rope_theta, FULL.rope_scaling)


def complex_pairs(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def test_plain_frequencies_are_powers_of_the_base():
    found = rope_frequencies(64, 10000.0, None)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([10000 ** (-2 * pair / 64) for pair in range(32)], rel=1e-14)


@pytest.mark.parametrize(("pair", "frequency"), [(15, 0.00363554), (20, 2.96978e-4), (25, 5.37231e-6), (31, 5.68053e-7)])
def test_scaled_frequencies_of_the_full_model(pair, frequency):
    assert scaled()[pair].item() == pytest.approx(frequency, rel=2e-6)


def test_scaling_leaves_fast_pairs_and_divides_slow_ones():
    plain = rope_frequencies(64, FULL.compress_rope_theta, None)
    ratio = plain / scaled()
    assert torch.equal(ratio[:16], torch.ones(16, dtype=torch.float64))
    assert torch.allclose(ratio[25:], torch.full((7,), 16.0, dtype=torch.float64), rtol=1e-14)
    assert (ratio[15:26].diff() > 0).all()


@pytest.mark.parametrize("name", ["golden", "random"])
def test_small_models_have_a_ramp_too(name):
    config = named_config(name)
    plain = rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, None)
    ratio = plain / rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(config.rope_scaling.factor)


@pytest.mark.parametrize("num_heads", [None, 3])
def test_a_pair_turns_by_position_times_frequency(num_heads, seed):
    heads = () if num_heads is None else (num_heads,)
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((5, *heads, 24)))
    frequencies, positions = rope_frequencies(16, 100.0, None), torch.tensor([0, 1, 2, 70, 1_000_000])
    found = rotate(x, Rotation.at(positions, frequencies))
    assert torch.equal(found[..., :8], x[..., :8])
    turns = torch.polar(torch.ones(5, 8, dtype=torch.float64), positions.double()[:, None] * frequencies)
    expected = complex_pairs(x[..., 8:]) * turns.view(5, *[1 for _ in heads], 8)
    assert torch.allclose(complex_pairs(found[..., 8:]), expected, rtol=0, atol=1e-12)


def test_inverse_turns_back(seed):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 2, 16)))
    rotation = Rotation.at(torch.tensor([3, 100, 5000, 60000]), rope_frequencies(16, 10000.0, None))
    assert torch.allclose(rotate(rotate(x, rotation), rotation.inverse()), x, rtol=0, atol=1e-13)


def test_products_depend_on_distance_only(seed):
    q, k = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 1, 64)))
    frequencies = scaled()

    def product(at_q, at_k):
        turned = [rotate(x, Rotation.at(torch.tensor([at]), frequencies)) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum().item()

    assert product(17, 5) == pytest.approx(product(1012, 1000), abs=1e-10)
    assert not math.isclose(product(17, 5), product(17, 6), abs_tol=1e-6)


def test_rotation_is_computed_wide_and_rounded_once(seed):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((6, 16))).bfloat16()
    frequencies, positions = rope_frequencies(16, 10000.0, None), torch.arange(6)
    found = rotate(x, Rotation.at(positions, frequencies.float()))
    wide = rotate(x.double(), Rotation.at(positions, frequencies.float().double()))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.float().bfloat16())


def test_rows_picks_positions():
    rotation = Rotation.at(torch.arange(5), rope_frequencies(4, 10.0, None))
    picked = rotation.rows(torch.tensor([3, 1]))
    assert torch.equal(picked.cos, rotation.cos[[3, 1]])
    assert torch.equal(picked.sin, rotation.sin[[3, 1]])
