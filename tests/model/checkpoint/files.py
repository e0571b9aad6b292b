"""Load checkpoints and change their headers, for the tests of this folder."""

import json

import torch

from deepinfer.config import named_config
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.checkpoint.table import INDEX_NAME

GOLDEN = named_config("golden")


def load(model_dir, config=GOLDEN, **ranks):
    return read_checkpoint(model_dir, config, progress=False, **ranks)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


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
    """Call ``change(header)`` on the header of the shard that holds ``name``, and write it back."""
    path = shard_of(model_dir, name)
    header, data = read_shard(path)
    change(header)
    write_shard(path, header, data)
    return path
