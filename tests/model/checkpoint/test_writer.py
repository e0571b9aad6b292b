"""Writing a checkpoint: the published format, and directories that are complete or absent."""

import json

import pytest
import torch
from safetensors import safe_open

from deepinfer.config import config_json
from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint.table import INDEX_NAME, TORCH_DTYPES, tensor_table
from deepinfer.model.checkpoint.writer import write_checkpoint
from tests.model.checkpoint.files import GOLDEN, load, read_shard


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
