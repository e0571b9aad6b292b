"""Random weights: the known hash, the formula, and independence of order and chunks."""

import dataclasses
import math

import pytest
import torch

from deepinfer.model.checkpoint.random_weights import hashed_tensors, hashed_uniform, random_tensors
from deepinfer.model.checkpoint.table import TORCH_DTYPES, tensor_table
from deepinfer.ops.quant import unpack_fp4, unpack_fp8, unpack_table
from tests.model.checkpoint.files import GOLDEN, same_bits


def test_hash_gives_the_known_values():
    assert hashed_uniform("embed.weight", 3).tolist() == pytest.approx([0.117426910, 0.476378218, 0.294420770], abs=1e-9)
    ids = ((hashed_uniform("ids", 80) + 0.5) * 256).long().tolist()
    assert ids[:6] == [231, 81, 220, 242, 33, 127]
    assert ids[-2:] == [231, 75]
    assert GOLDEN.image_token_id not in ids


def test_hash_can_start_anywhere():
    assert torch.equal(hashed_uniform("head.weight", 1000)[700:], hashed_uniform("head.weight", 300, start=700))
    huge = 98_308_273_000  # beyond 2^32: products wrap in int64
    x = ((huge + 1) * 2654435761 + 2**32) % 2**32
    assert x == ((huge % 2**32 + 1) * 2654435761) % 2**32
    assert torch.equal(hashed_uniform("x", 4, start=huge), hashed_uniform("x", 4, start=huge % 2**32))


def test_golden_weights_follow_the_formula(golden_tensors):
    table = tensor_table(GOLDEN)

    def u(name):
        return hashed_uniform(name, table[name].num_parameters)

    def expected(name, factor, offset=0.0):
        return (offset + factor * u(name)).float()

    root12 = math.sqrt(12)
    for name, factor, offset in (
        ("embed.weight", root12, 0),
        ("head.weight", root12 / math.sqrt(128), 0),
        ("norm.weight", 0.5, 1),
        ("layers.2.attn.compressor.wkv.weight", root12 / math.sqrt(128), 0),
        ("layers.2.attn.compressor.wgate.weight", 3 * root12 / math.sqrt(128), 0),
        ("layers.1.engram.q_weight", 0.5, 1),
        ("layers.0.attn.attn_sink", root12, 0),
        ("layers.3.hc_attn_fn", root12 / math.sqrt(512), 0),
        ("layers.3.hc_ffn_base", math.sqrt(3), 0),
        ("layers.3.hc_ffn_scale", 1, 1),
        ("layers.11.ffn.gate.bias", 0.2, 0),
        ("mtp.2.confidence_head.proj.weight", root12 / math.sqrt(160), 0),
        ("vision.patch_embed.proj.bias", root12 / math.sqrt(48), 0),
        ("vision.blocks.1.attn.wqkv.bias", root12 / math.sqrt(64), 0),
    ):
        stored = golden_tensors[name]
        value = expected(name, factor, offset).view(stored.shape)
        assert torch.equal(stored, value.to(stored.dtype)), name
    for name, unpack, shape, tolerance in (
        ("layers.0.attn.wo_a", unpack_fp8, (64, 128), 2**-4),
        ("layers.9.ffn.experts.7.w2", unpack_fp4, (128, 64), 0.25),
        ("layers.4.engram.embed", unpack_table, (630, 32), 2**-4),
    ):
        factor = root12 if unpack is unpack_table else root12 / math.sqrt(shape[1])
        dense = unpack(golden_tensors[name + ".weight"], golden_tensors[name + ".scale"], torch.float32)
        value = expected(name + ".weight", factor).view(shape)
        assert (dense - value).abs().max() <= tolerance * value.abs().max(), name


def test_random_weights_depend_on_seed_and_name_only():
    first = dict(random_tensors(GOLDEN, 7))
    again = dict(random_tensors(dataclasses.replace(GOLDEN, vision=None), 7))
    assert all(same_bits(first[name], tensor) for name, tensor in again.items())
    other = dict(random_tensors(GOLDEN, 8))
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.attn.wkv.weight"].float(), first["layers.1.attn.wkv.weight"].float())


def test_random_weights_have_the_magnitudes_of_the_golden_ones(golden_tensors):
    table = tensor_table(GOLDEN)
    for name, tensor in random_tensors(GOLDEN, 1):
        if table[name].storage == "plain" and tensor.numel() >= 4096:
            golden = golden_tensors[name].double()
            assert tensor.double().std().item() == pytest.approx(golden.std().item(), rel=0.1), name
            assert tensor.double().mean().item() == pytest.approx(golden.mean().item(), abs=0.1 * golden.std().item()), name


@pytest.mark.parametrize("make", [hashed_tensors, lambda config: random_tensors(config, 0)], ids=["hashed", "random"])
def test_seeded_weights_are_the_whole_table_in_order(make):
    table = tensor_table(GOLDEN)
    tensors = list(make(GOLDEN))
    assert [name for name, _ in tensors] == list(table)
    for name, tensor in tensors:
        assert (tuple(tensor.shape), tensor.dtype) == (table[name].shape, TORCH_DTYPES[table[name].dtype]), name


def test_weights_do_not_depend_on_the_size_of_chunks(golden_tensors, monkeypatch):
    monkeypatch.setattr("deepinfer.model.checkpoint.random_weights._CHUNK_VALUES", 4096)
    assert all(same_bits(golden_tensors[name], tensor) for name, tensor in hashed_tensors(GOLDEN))
