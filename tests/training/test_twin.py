"""The model that is trained is the model that is served: the same numbers from the same weights."""

import functools

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.model.flash import Flash
from tests.model.tiny import Prompt, model, weights, whole
from training.masters import TEXT_ROOTS, Masters, initial_values
from training.packing import Packed, alignment
from training.twin import Twin

CONFIG = named_config("golden")
COMPRESSION = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
LENGTHS = (77, 1, 90, 4)


@functools.cache
def twin(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = Masters(CONFIG, TEXT_ROOTS, lambda kind, shape: torch.zeros(shape, dtype=wide))
    masters.read(weights("golden"))
    return Twin(masters, COMPRESSION, dtype)


def packed(texts, length):
    """A batch of one sequence with all texts, and the place of each."""
    ids, positions = torch.full((1, length), CONFIG.pad_token_id), torch.full((1, length), -1)
    first, places = 0, []
    for each in texts:
        place = slice(first, first + len(each))
        ids[0, place] = torch.as_tensor(each)
        positions[0, place] = torch.arange(len(each))
        places.append(place)
        first += -(-len(each) // alignment(CONFIG)) * alignment(CONFIG)
    return Packed(ids, positions), places


@torch.no_grad()
def trained_logits(dtype, batch):
    own = twin(dtype).weights()
    outputs = twin(dtype).run(batch, own)
    return twin(dtype).logits(outputs.hidden, own), outputs


@pytest.fixture
def texts(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.image_token_id, length) for length in LENGTHS]


def test_packed_documents_have_the_logits_of_the_engine(texts):
    """In fp64 both do the same arithmetic but for the order of sums; every layer kind and every quantiser is on the way."""
    batch, places = packed(texts, 192)
    logits, outputs = trained_logits(torch.float64, batch)
    for text, place in zip(texts, places, strict=True):
        assert torch.allclose(logits[place], whole(model("golden", exact=True), Prompt(text)), rtol=0, atol=1e-9)
    counts = {layer: int(chosen[0, places[2]].sum(-1).max()) for layer, chosen in outputs.chosen.items()}
    assert counts == dict.fromkeys(CONFIG.index_source_layer_ids, CONFIG.index_topk)  # and the choice was one


def test_weights_reach_the_engine_as_the_twin_rounds_them(texts):
    """First values, written as a checkpoint stores them.

    In bf16 two orders of a sum differ by one rounding in few elements, and each such element may flip a code behind it.
    """
    masters = Masters(CONFIG, TEXT_ROOTS, initial_values(CONFIG, 0))
    trained = Twin(masters, COMPRESSION, torch.bfloat16)
    engine = Flash(CONFIG, dict(masters.stored()), COMPRESSION, device=torch.device("cpu"))
    batch, places = packed(texts, 192)
    with torch.no_grad():
        own = trained.weights()
        logits = trained.logits(trained.run(batch, own).hidden, own)
    served = torch.cat([whole(engine, Prompt(text)) for text in texts])
    ours = torch.cat([logits[place] for place in places])
    errors = (ours - served).square().mean(1).sqrt() / served.square().mean(1).sqrt()
    assert errors.mean() < 0.12
    assert (ours.argmax(1) == served.argmax(1)).float().mean() > 0.8


def test_gradients_reach_every_weight_but_the_bias(texts):
    masters = Masters(CONFIG, TEXT_ROOTS, initial_values(CONFIG, 0))
    trained = Twin(masters, COMPRESSION, torch.bfloat16)
    batch, _ = packed(texts, 192)
    own = trained.weights()
    places = torch.arange(0, 192, 5).view(1, -1)
    outputs = trained.run(batch, own, index_places=places)
    (trained.logits(outputs.hidden, own).logsumexp(1).sum() + outputs.index_loss).backward()
    without = [
        kind for kind, value in masters.named() if value.grad is None or not value.grad.isfinite().all() or not value.grad.any()
    ]
    assert without == ["layers.*.ffn.gate.bias"]


def test_the_loss_of_the_index_teaches_the_indexer_alone(texts):
    masters = Masters(CONFIG, TEXT_ROOTS, initial_values(CONFIG, 0))
    trained = Twin(masters, COMPRESSION, torch.bfloat16)
    batch, _ = packed(texts, 192)
    outputs = trained.run(batch, trained.weights(), index_places=torch.arange(0, 192, 5).view(1, -1))
    outputs.index_loss.backward()
    taught = {kind.split(".")[3] for kind, value in masters.named() if value.grad is not None and value.grad.any()}
    assert taught == {"indexer"}
