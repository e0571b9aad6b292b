"""Checkpoints: the table's published totals, bit-equal round trips, EP shards, and every kind of damage."""

import dataclasses
import json
import math
import sys
from collections import Counter

import pytest
import torch
from safetensors import safe_open

from deepinfer.config import config_json, load_config, named_config
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.weights import (
    INDEX_NAME,
    TORCH_DTYPES,
    hashed_tensors,
    hashed_uniform,
    random_tensors,
    rank_memory,
    read_checkpoint,
    scan_checkpoint,
    tensor_table,
    write_checkpoint,
)
from deepinfer.ops.quant import unpack_fp4, unpack_fp8, unpack_table

GOLDEN = named_config("golden")
FULL = named_config("full")
GIB = 1 << 30


def load(model_dir, config=GOLDEN, **ranks):
    return read_checkpoint(model_dir, config, progress=False, **ranks)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Thousands of small tensors: with other processes on the cores, threads that wait for each other cost 50 x the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def golden_tensors():
    return dict(hashed_tensors(GOLDEN))


@pytest.fixture
def golden_dir(tmp_path, golden_tensors):
    """A sound checkpoint in several shards, to be damaged."""
    path = tmp_path / "golden"
    write_checkpoint(path, GOLDEN, golden_tensors.items(), shard_bytes=1 << 20, progress=False)
    return path


def read_shard(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def shard_of(model_dir, name):
    return model_dir / json.loads((model_dir / INDEX_NAME).read_text())["weight_map"][name]


def rewrite(model_dir, name, change):
    """Change the header of the shard that holds ``name``: ``change(header)``."""
    path = shard_of(model_dir, name)
    header, data = read_shard(path)
    change(header)
    write_shard(path, header, data)
    return path


# ------------------------------------------------------------------ the table


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


@pytest.mark.parametrize(
    ("ep_size", "spares", "expected"),
    [
        (8, 0, (33.6, 6.7, 2.5, 1.5, 23.6, 67.9)),
        (8, 32, (36.4, 6.7, 2.5, 1.5, 23.6, 70.7)),
        # 2.345 for the draft; tables that round it to 2.4 have the same sum of 131.6
        (4, 32, (72.8, 6.7, 2.5, 2.3, 47.2, 131.6)),
        (64, 64, (4.9, 6.7, 2.5, 0.8, 3.0, 17.8)),
        (2, 0, (134.5, 6.7, 2.5, 4.0, 94.4, 242.1)),
    ],
)
def test_memory_of_a_rank_is_the_known_table(ep_size, spares, expected):
    memory = rank_memory(FULL, ep_size, spares)
    parts = (memory.experts, memory.dense, memory.embedding_and_head, memory.draft, memory.engram_tables)
    found = [*parts, memory.total - memory.vision]
    assert [round(each / GIB, 1) for each in found] == list(expected)
    assert memory.vision == 970_536_960


def test_memory_of_one_rank_is_the_checkpoint():
    assert rank_memory(FULL, 1).total == 510_286_023_000


@pytest.mark.parametrize(("ep_size", "spares"), [(5, 0), (8, 1), (0, 0), (256, 0)])
def test_uneven_experts_are_refused(ep_size, spares):
    with pytest.raises(ConfigError, match=f"ep_size={ep_size} does not divide"):
        rank_memory(FULL, ep_size, spares)


# ------------------------------------------------------------------ seeded weights


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


def test_chunks_do_not_show(golden_tensors, monkeypatch):
    monkeypatch.setattr("deepinfer.model.weights._CHUNK_VALUES", 4096)
    assert all(same_bits(golden_tensors[name], tensor) for name, tensor in hashed_tensors(GOLDEN))


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("name", ["golden", "nano"])
def test_round_trip_is_bit_equal(name, tmp_path):
    config = named_config(name)
    tensors = dict(random_tensors(config, 3))
    write_checkpoint(tmp_path / "model", config, tensors.items(), shard_bytes=8 << 20, progress=False)
    assert load_config(tmp_path / "model") == config
    loaded = load(tmp_path / "model", config)
    assert list(loaded) == list(tensor_table(config))
    assert all(same_bits(loaded[each], tensors[each]) for each in tensors)


def test_written_files_have_the_published_form(golden_dir, golden_tensors):
    index = json.loads((golden_dir / INDEX_NAME).read_text())
    shards = sorted(golden_dir.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in tensor_table(GOLDEN).values())
    assert [shard.name for shard in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 3
    assert json.loads((golden_dir / "config.json").read_text()) == config_json(GOLDEN)
    assert not list(golden_dir.parent.glob(".*"))
    table = tensor_table(GOLDEN)
    seen = {}
    for shard in shards:
        header, data = read_shard(shard)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert len(data) <= 1 << 20
        for name, entry in header.items():
            seen[name] = (entry["dtype"], tuple(entry["shape"]))
            assert entry["data_offsets"][0] % TORCH_DTYPES[entry["dtype"]].itemsize == 0
            assert index["weight_map"][name] == shard.name
    assert seen == {name: (spec.dtype, spec.shape) for name, spec in table.items()}


def test_the_format_library_reads_what_we_write(golden_dir, golden_tensors):
    for shard in golden_dir.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no dict)
                tensor = file.get_tensor(name)
                assert torch.equal(tensor.view(torch.uint8), golden_tensors[name].view(torch.uint8)), name


def test_order_of_writing_does_not_matter(tmp_path, golden_dir, golden_tensors):
    write_checkpoint(tmp_path / "back", GOLDEN, reversed(golden_tensors.items()), shard_bytes=1 << 20, progress=False)
    for path in golden_dir.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes()


def test_prefix_and_missing_index_are_accepted(golden_dir, golden_tensors):
    (golden_dir / INDEX_NAME).unlink()
    for shard in golden_dir.glob("*.safetensors"):
        header, data = read_shard(shard)
        write_shard(shard, {name if name == "__metadata__" else f"model.{name}": entry for name, entry in header.items()}, data)
    loaded = load(golden_dir)
    assert all(same_bits(loaded[name], tensor) for name, tensor in golden_tensors.items())


@pytest.mark.parametrize("chunk_bytes", [1 << 26, 1000])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_ep_shards_together_are_the_whole(golden_dir, golden_tensors, ep_size, chunk_bytes, monkeypatch):
    monkeypatch.setattr("deepinfer.model.weights._CHUNK_BYTES", chunk_bytes)
    parts = [load(golden_dir, ep_rank=rank, ep_size=ep_size) for rank in range(ep_size)]
    table = tensor_table(GOLDEN)
    for name, spec in table.items():
        held = [rank for rank, part in enumerate(parts) if name in part]
        if spec.split == "expert":
            assert held == [spec.expert_id * ep_size // spec.num_experts]
            assert same_bits(parts[held[0]][name], golden_tensors[name])
        elif spec.split == "row":
            for rank, part in enumerate(parts):
                assert same_bits(part[name], golden_tensors[name][rank::ep_size].contiguous())
        else:
            assert all(same_bits(part[name], golden_tensors[name]) for part in parts)
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert sizes[0] == rank_memory(GOLDEN, ep_size).total
    assert max(sizes) == sizes[0]


def test_experts_lie_in_contiguous_runs(golden_dir):
    names = load(golden_dir, ep_rank=1, ep_size=4)
    experts = {name.split(".")[4] for name in names if name.startswith("layers.0.ffn.experts.")}
    assert experts == {"2", "3"}


@pytest.mark.parametrize(("ep_rank", "ep_size"), [(2, 2), (-1, 2), (0, 3), (0, 8), (0, 0)])
def test_impossible_ranks_are_refused(golden_dir, ep_rank, ep_size):
    with pytest.raises(ConfigError, match="ep_size"):
        load(golden_dir, ep_rank=ep_rank, ep_size=ep_size)


def test_progress_counts_bytes_where_somebody_watches(golden_dir, capsys, monkeypatch):
    read_checkpoint(golden_dir, GOLDEN, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    read_checkpoint(golden_dir, GOLDEN, progress=True)
    assert "weights: 100%" in capsys.readouterr().err


# ------------------------------------------------------------------ damage

NAME = "layers.3.attn.wkv.weight"


def rename(old, new):
    def change(header):
        header[new] = header.pop(old)

    return change


def set_entry(name, key, value):
    def change(header):
        header[name][key] = value

    return change


def test_missing_and_surplus_tensors_are_listed(golden_dir):
    rewrite(golden_dir, NAME, rename(NAME, "layers.3.attn.wkw.weight"))
    with pytest.raises(CheckpointError) as caught:
        load(golden_dir)
    text = str(caught.value)
    assert f"missing tensor (1): {NAME}" in text
    assert "surplus tensor (1): layers.3.attn.wkw.weight in model-" in text
    assert f"wrong index entry (1): {NAME}" in text
    assert "download the named shards again" in text


def test_duplicate_in_two_shards_is_listed(golden_dir):
    source = shard_of(golden_dir, NAME)
    header, data = read_shard(source)
    start, end = header[NAME]["data_offsets"]
    write_shard(
        golden_dir / "extra.safetensors", {f"model.{NAME}": header[NAME] | {"data_offsets": [0, end - start]}}, data[start:end]
    )
    with pytest.raises(CheckpointError, match="duplicate tensor") as caught:
        load(golden_dir)
    assert f"{NAME} in extra.safetensors and {source.name}" in str(caught.value)


def test_duplicate_in_one_header_is_listed(golden_dir):
    path = shard_of(golden_dir, NAME)
    header, data = read_shard(path)
    entry = json.dumps({NAME: header[NAME] | {"data_offsets": [0, 0]}})[1:-1]
    write_shard(path, (json.dumps(header)[:-1] + "," + entry + "}").encode(), data)
    with pytest.raises(CheckpointError, match=rf"duplicate tensor \(1\): {NAME}"):
        load(golden_dir)


def test_wrong_shape_is_listed(golden_dir):
    rewrite(golden_dir, NAME, set_entry(NAME, "shape", [128, 64]))
    with pytest.raises(CheckpointError, match=r"wrong shape \(1\): .*is \[128, 64\], expected \[64, 128\]"):
        load(golden_dir)


def test_wrong_dtype_is_listed(golden_dir):
    rewrite(golden_dir, NAME, set_entry(NAME, "dtype", "F8_E5M2"))
    with pytest.raises(CheckpointError, match=r"wrong dtype \(1\): .* is F8_E5M2, expected F8_E4M3"):
        load(golden_dir)


def test_truncated_shard_is_listed_and_its_tensors_are_not(golden_dir):
    path = shard_of(golden_dir, NAME)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"truncated shard \(1\): {path.name}: has {size - 100} of {size} bytes") as caught:
        load(golden_dir)
    assert "missing tensor" not in str(caught.value)


def test_surplus_bytes_are_listed(golden_dir):
    path = shard_of(golden_dir, NAME)
    path.write_bytes(path.read_bytes() + b"123")
    with pytest.raises(CheckpointError, match=r"corrupt shard \(1\): .*: 3 bytes belong to no tensor"):
        load(golden_dir)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is impossible in a file"),
        (b"12345", "is impossible in a file"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "is impossible in a file"),
        ((4).to_bytes(8, "little") + b"{]}}", "not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\x00\x01", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "entry of a is malformed"),
        ((12).to_bytes(8, "little") + b'{"a":[1, 2]}', "entry of a is malformed"),
    ],
)
def test_corrupt_header_is_listed_and_missing_tensors_are_capped(golden_dir, content, reason):
    path = shard_of(golden_dir, NAME)
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(golden_dir)
    text = str(caught.value)
    assert f"corrupt shard (1): {path.name}: " in text
    assert reason in text
    assert "more" in text
    assert len(text) < 3000


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [64, -128]},
        {"shape": [True, 128]},
        {"shape": 64},
        {"data_offsets": [8, 4]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 1.5]},
        {"dtype": 3},
        {"dtype": None},
    ],
)
def test_malformed_entry_is_listed(golden_dir, entry):
    rewrite(golden_dir, NAME, lambda header: header[NAME].update(entry))
    with pytest.raises(CheckpointError, match=f"header entry of {NAME} is malformed"):
        load(golden_dir)


def test_overlapping_data_is_listed(golden_dir):
    def change(header):
        start, end = header[NAME]["data_offsets"]
        header[NAME]["data_offsets"] = [start - 1, end - 1]

    rewrite(golden_dir, NAME, change)
    with pytest.raises(CheckpointError, match=r"corrupt shard \(1\): .* overlaps or leaves a gap"):
        load(golden_dir)


def test_size_that_contradicts_the_shape_is_listed(golden_dir):
    def change(header):
        header[NAME]["data_offsets"][1] -= 1
        for entry in header.values():
            if (
                "data_offsets" in entry
                and entry is not header[NAME]
                and entry["data_offsets"][0] > header[NAME]["data_offsets"][1]
            ):
                entry["data_offsets"] = [each - 1 for each in entry["data_offsets"]]

    path = rewrite(golden_dir, NAME, change)
    header, data = read_shard(path)
    write_shard(path, header, data[:-1])
    with pytest.raises(CheckpointError, match=rf"wrong size \(\d\): .*{NAME} has 8191 bytes, expected 8192"):
        load(golden_dir)


def test_shard_that_the_index_names_but_is_gone_is_listed(golden_dir):
    path = shard_of(golden_dir, NAME)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"missing shard \(1\): {path.name} with \d+ tensors"):
        load(golden_dir)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000])
def test_corrupt_index_is_listed(golden_dir, content):
    (golden_dir / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=r"corrupt index \(1\)"):
        load(golden_dir)


def test_all_kinds_are_reported_together(golden_dir):
    rewrite(golden_dir, NAME, set_entry(NAME, "dtype", "I8"))
    rewrite(golden_dir, "embed.weight", rename("embed.weight", "embedding.weight"))
    rewrite(golden_dir, "aligner.w1.bias", set_entry("aligner.w1.bias", "shape", [128, 1]))
    kinds = set(scan_checkpoint(golden_dir, GOLDEN).problems)
    assert kinds == {"wrong dtype", "missing tensor", "surplus tensor", "wrong shape", "wrong index entry"}


def test_checkpoint_of_another_configuration_is_refused(golden_dir):
    with pytest.raises(CheckpointError, match="wrong shape"):
        load(golden_dir, named_config("nano"))


def test_directory_without_shards_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        load(tmp_path)


def test_file_that_shrinks_while_it_is_read_is_an_error(golden_dir, monkeypatch):
    sound = scan_checkpoint(golden_dir, GOLDEN)
    path = shard_of(golden_dir, NAME)
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr("deepinfer.model.weights.scan_checkpoint", lambda *_: sound)
    with pytest.raises(CheckpointError, match="ended while its tensors were read"):
        load(golden_dir)


# ------------------------------------------------------------------ refusing to write


def writing(path, tensors):
    write_checkpoint(path, GOLDEN, tensors, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[:-1], "1 of 1175 tensors were not given"),
        (lambda items: [*items, items[0]], "embed.weight was given twice"),
        (lambda items: [*items, ("extra", torch.zeros(1))], "extra does not belong"),
        (lambda items: [("embed.weight", items[0][1].T.contiguous()), *items[1:]], r"embed.weight is .*expected"),
        (lambda items: [("embed.weight", items[0][1].float()), *items[1:]], r"torch.float32 .*expected torch.bfloat16"),
    ],
    ids=["missing", "twice", "unknown", "shape", "dtype"],
)
def test_wrong_tensors_are_refused_and_leave_nothing(tmp_path, golden_tensors, change, message):
    with pytest.raises(CheckpointError, match=message):
        writing(tmp_path / "model", change(list(golden_tensors.items())))
    assert list(tmp_path.iterdir()) == []


def test_crash_of_the_producer_leaves_nothing(tmp_path, golden_tensors):
    def failing():
        yield next(iter(golden_tensors.items()))
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        writing(tmp_path / "model", failing())
    assert list(tmp_path.iterdir()) == []


def test_occupied_directory_is_refused_and_kept(tmp_path, golden_tensors):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        writing(tmp_path / "model", golden_tensors.items())
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_empty_directory_is_filled(tmp_path, golden_tensors):
    (tmp_path / "deep" / "model").mkdir(parents=True)
    writing(tmp_path / "deep" / "model", golden_tensors.items())
    assert len(load(tmp_path / "deep" / "model")) == 1175
