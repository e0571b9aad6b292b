"""Fixtures of the checkpoint's tests."""

import pytest
import torch

from deepinfer.model.checkpoint.random_weights import hashed_tensors
from deepinfer.model.checkpoint.writer import write_checkpoint
from tests.model.checkpoint.files import GOLDEN


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Use one thread: for thousands of small tensors on busy cores, waiting threads cost 50 times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def golden_tensors():
    return dict(hashed_tensors(GOLDEN))


@pytest.fixture
def golden_dir(tmp_path, golden_tensors):
    """A sound checkpoint in several shards; tests damage it."""
    path = tmp_path / "golden"
    write_checkpoint(path, GOLDEN, golden_tensors.items(), shard_bytes=1 << 20, progress=False)
    return path
