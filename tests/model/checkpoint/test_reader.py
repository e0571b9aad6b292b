"""Reading a checkpoint: bit-equal round trips, the shards of ranks, and every kind of damage."""

import json
import sys

import pytest

from deepinfer.config import load_config, named_config
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.checkpoint.random_weights import random_tensors
from deepinfer.model.checkpoint.reader import read_checkpoint, scan_checkpoint
from deepinfer.model.checkpoint.table import INDEX_NAME, tensor_table
from deepinfer.model.checkpoint.writer import write_checkpoint
from deepinfer.model.inventory import rank_memory
from tests.model.checkpoint.files import GOLDEN, load, read_shard, rewrite, same_bits, shard_of, write_shard


@pytest.mark.parametrize("name", ["golden", "random"])
def test_round_trip_is_bit_equal(name, tmp_path):
    config = named_config(name)
    tensors = dict(random_tensors(config, 3))
    write_checkpoint(tmp_path / "model", config, tensors.items(), shard_bytes=8 << 20, progress=False)
    assert load_config(tmp_path / "model") == config
    loaded = load(tmp_path / "model", config)
    assert list(loaded) == list(tensor_table(config))
    assert all(same_bits(loaded[each], tensors[each]) for each in tensors)


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
    monkeypatch.setattr("deepinfer.model.checkpoint.reader._CHUNK_BYTES", chunk_bytes)
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


def test_progress_counts_bytes_on_a_terminal_only(golden_dir, capsys, monkeypatch):
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


def test_missing_shard_of_the_index_is_listed(golden_dir):
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
        load(golden_dir, named_config("random"))


def test_directory_without_shards_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        load(tmp_path)


def test_file_that_shrinks_while_it_is_read_is_an_error(golden_dir, monkeypatch):
    sound = scan_checkpoint(golden_dir, GOLDEN)
    path = shard_of(golden_dir, NAME)
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr("deepinfer.model.checkpoint.reader.scan_checkpoint", lambda *_: sound)
    with pytest.raises(CheckpointError, match="ended while its tensors were read"):
        load(golden_dir)
