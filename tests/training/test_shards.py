"""Shards of token ids, and packing them for transport."""

import json
import random

import numpy as np
import pytest

from deepinfer.bench.tasks.sides import make_tasks
from deepinfer.bench.texts import whole
from deepinfer.tokenizer import byte_tokenizer
from training.prepare import TASKS_SEED, pack, prepare_tasks, unpack
from training.shards import KINDS, MAX_TOKENS, ShardWriter, pieces


@pytest.fixture
def source(tmp_path):
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    return (tmp_path / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [1, MAX_TOKENS, MAX_TOKENS + 1, 3 * MAX_TOKENS + 5])
def test_pieces_have_a_begin_token_and_lose_nothing(size):
    ids = list(range(size))
    found = list(pieces(ids))
    assert max(map(len, found)) <= MAX_TOKENS
    assert all(each[0] == 0 for each in found)
    assert [0] + [token for each in found for token in each[1:]] == ids


def test_texts_get_begin_and_end_token_and_conversations_have_them():
    tokenizer = byte_tokenizer()
    task = next(make_tasks(1, range(100)))
    for segments in (["plain text"], task.segments()):
        ids = whole(tokenizer, segments)
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert ids.count(tokenizer.bos_id) == 1


def test_a_written_shard_has_every_document(tmp_path):
    writer = ShardWriter()
    documents = [([0, 5, 6, 1], "code"), ([0, 1], "sum")]
    for ids, kind in documents:
        writer.add(ids, kind)
    writer.write(tmp_path / "shard", {"seed": 3})
    tokens, starts, kinds = (np.load(tmp_path / "shard" / f"{name}.npy") for name in ("tokens", "starts", "kinds"))
    assert (tokens.dtype, starts.dtype, kinds.dtype) == (np.uint16, np.int64, np.uint8)
    read = [(tokens[start:end].tolist(), KINDS[kind]) for start, end, kind in zip(starts, starts[1:], kinds, strict=False)]
    assert read == documents
    meta = json.loads((tmp_path / "shard" / "meta.json").read_text())
    assert meta["tokens_by_kind"] == {"code": 4, "sum": 2}
    assert meta["seed"] == 3


def test_tasks_do_not_depend_on_the_number_of_processes(tmp_path, source):
    for processes in (1, 2):
        prepare_tasks(tmp_path / str(processes), source, num_tokens=1, seed=TASKS_SEED, held_out=True, processes=processes)
    first, second = (np.load(tmp_path / each / "tokens.npy") for each in ("1", "2"))
    np.testing.assert_array_equal(first, second)


def test_a_packed_folder_comes_back_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("training.prepare._PIECE_BYTES", 1_000)
    folder = tmp_path / "shard"
    folder.mkdir()
    content = random.Random("packed").randbytes(5_000)
    (folder / "tokens.npy").write_bytes(content)
    pack(folder, tmp_path / "packed")
    parts = list((tmp_path / "packed").iterdir())
    assert len(parts) > 4
    assert max(each.stat().st_size for each in parts) <= 1_000
    unpack(parts, tmp_path / "out")
    assert (tmp_path / "out" / "shard" / "tokens.npy").read_bytes() == content
