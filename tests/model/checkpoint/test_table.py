"""The checkpoint's table: the published totals and shapes."""

import dataclasses
from collections import Counter

from deepinfer.config import named_config
from deepinfer.model.checkpoint.table import tensor_table
from tests.model.checkpoint.files import GOLDEN

FULL = named_config("full")


def test_published_table_has_the_published_totals():
    table = tensor_table(FULL)
    assert len(table) == 96_085
    assert sum(spec.num_bytes for spec in table.values()) == 510_286_023_000
    counts = Counter(spec.dtype for spec in table.values())
    assert counts == {"F8_E8M0": 47_589, "I8": 47_232, "BF16": 520, "F32": 387, "F8_E4M3": 357}


def test_shapes_are_the_published_ones():
    table = tensor_table(FULL)
    for name, dtype, shape in (
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.wo_b.scale", "F8_E8M0", (160, 256)),
        ("layers.7.hc_attn_fn", "F32", (24, 20480)),
        ("layers.5.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.5.ffn.experts.0.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.1.engram.embed.scale", "F8_E8M0", (384006168, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("image_newline", "BF16", (5120,)),
    ):
        assert (table[name].dtype, table[name].shape) == (dtype, shape), name
    assert "layers.20.attn.compressor.wgate.weight" not in table
    assert "layers.24.attn.indexer.wk.weight" not in table
    assert "layers.3.attn.indexer.wq_b.weight" not in table
    assert "mtp.3.attn_norm.weight" not in table


def test_model_without_images_or_drafter_has_no_such_tensors():
    ratios = GOLDEN.compress_ratios[: GOLDEN.num_hidden_layers]
    table = tensor_table(dataclasses.replace(GOLDEN, vision=None, num_nextn_predict_layers=0, compress_ratios=ratios))
    assert {spec.component for spec in table.values()}.isdisjoint({"vision", "DSpark"})
