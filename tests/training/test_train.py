"""A training goes on where it stopped, learns, and ends as a checkpoint that the engine reads."""

import time

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.drafter import Drafter
from deepinfer.model.flash import Flash
from tests.model.tiny import Prompt, whole
from training.data import Place, Shard, batches
from training.export import export, masters_of
from training.masters import TEXT_ROOTS
from training.optimiser import orthogonal
from training.packing import alignment
from training.state import read_state, write_state
from training.train import Recipe, Trainer, train
from training.train_drafter import draft_masters

CONFIG = named_config("golden")
COMPRESSION = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
RECIPE = Recipe(num_tokens=12 * 256, batch=2, length=128, index_queries=8, sparse_from=0.5)


@pytest.fixture
def shard(seed):
    """Documents of words, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(3, 250, 4) for _ in range(4)]
    documents = [np.concatenate([[0], *(words[each] for each in rng.integers(0, 4, 12)), [1]]) for _ in range(60)]
    starts = np.cumsum([0, *map(len, documents)])
    return Shard(tokens=np.concatenate(documents).astype(np.uint16), starts=starts, kinds=np.zeros(60, np.uint8))


def trainer():
    return Trainer(CONFIG, RECIPE, COMPRESSION, torch.bfloat16)


def test_a_resumed_training_reads_on_and_learns(shard, tmp_path):
    first = trainer()
    options = {"size": 2, "length": 128, "align": alignment(CONFIG), "pad_id": 2, "seed": 0}
    source = batches(shard, Place(), **options)
    losses = []
    for _ in range(5):
        packed, first.place = next(source)
        losses.append(float(first.step(packed)["loss"]))
    write_state(tmp_path / "state", first.saved(is_compact=False), part_bytes=1 << 20)
    second = trainer()
    second.restore(read_state(tmp_path / "state"))
    assert len(list((tmp_path / "state").iterdir())) > 1
    for _ in range(2):
        packed, _ = next(source)
        again, _ = next(batches(shard, second.place, **options))
        assert torch.equal(packed.token_ids, again.token_ids)
        assert float(first.step(packed)["loss"]) == float(second.step(again)["loss"])
        second.place = Place(epoch=second.place.epoch, next_sequence=second.place.next_sequence + 2)
    assert losses[-1] < losses[0] - 0.5


def test_the_engine_reads_what_was_trained(shard, tmp_path):
    trained = trainer()
    train(trained, shard, tmp_path, time.monotonic() + 60, log_every=5)
    assert trained.share >= 1
    assert len((tmp_path / "curve.jsonl").read_text().splitlines()) >= 3
    export(tmp_path / "model", CONFIG, [trained.masters, draft_masters(trained.masters, 0)])
    tensors = read_checkpoint(tmp_path / "model", CONFIG, progress=False)
    engine = Flash(CONFIG, tensors, COMPRESSION, device=torch.device("cpu"))
    drafter = Drafter(engine, tensors)
    assert engine.taken | drafter.taken == {
        name for name in tensors if name.startswith(("embed", "head", "norm", "layers", "mtp"))
    }
    again = masters_of(CONFIG, TEXT_ROOTS, tmp_path / "model")
    rounded = {kind: each.float() for kind, each in trained.masters.rounded(torch.bfloat16).items()}
    for kind, value in again.named():  # the stored values, whatever codes and scales say them
        assert torch.equal(value, rounded[kind]), kind
    batch, _ = next(batches(shard, Place(), size=1, length=64, align=alignment(CONFIG), pad_id=2, seed=1))
    with torch.no_grad():
        weights = trained.twin.weights()
        ours = trained.twin.logits(trained.twin.run(batch, weights).hidden, weights)
    count = int(batch.positions[0].max()) + 1
    served = whole(engine, Prompt(batch.token_ids[0, :count].numpy()))
    assert (ours[:count].argmax(1) == served.argmax(1)).float().mean() > 0.9


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_muon_moves_along_all_directions_alike(seed, shape):
    torch.manual_seed(seed)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert values.min() > 0.4
    assert values.max() < 1.4
