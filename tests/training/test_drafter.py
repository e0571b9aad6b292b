"""The drafter that is trained is the drafter that is served."""

import numpy as np
import torch

from deepinfer.config import named_config
from deepinfer.model.drafter import Drafter
from deepinfer.ops.sampling import SamplingRows
from tests.model.tiny import Batch, Prompt, model, new_cache, weights
from training.drafter import Blocks, DrafterTwin
from training.masters import DRAFTER_ROOTS, TEXT_ROOTS, Masters, initial_values
from training.packing import Packed
from training.train import Recipe
from training.train_drafter import DrafterTrainer
from training.twin import Twin

CONFIG = named_config("golden")
COMPRESSION = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
GREEDY = SamplingRows(
    temperature=torch.zeros(1),
    top_k=torch.full((1,), -1),
    top_p=torch.ones(1),
    min_p=torch.zeros(1),
    seeds=torch.zeros(1, dtype=torch.int64),
    filters=False,
)


def served(text, anchor):
    """Drafts after ``text`` and ``anchor``, and their confidences, from the engine."""
    network = model("golden", exact=True)
    drafter = Drafter(network, weights("golden"))
    cache = new_cache(network, num_pages=2 + len(text) // 16, num_slots=2)
    batch = Batch(network, cache)
    batch.add("only", Prompt(text))
    batch.step({"only": len(text)})
    slot, ring = batch.slot("only"), cache.layout.ring_tokens
    positions = torch.arange(len(text))
    slots = torch.where(positions >= len(text) - ring, slot, 0)
    drafter.commit(torch.cat(batch.aux["only"]), positions, slots, cache)
    ids = [torch.tensor([each]) for each in (anchor, len(text), slot, 0)]
    drafts = drafter.draft(*ids, GREEDY, "argmax", CONFIG.dspark_block_size, cache)
    return drafts.ids[0], drafts.confidences[0]


@torch.no_grad()
def test_blocks_have_the_drafts_and_confidences_of_the_engine(seed):
    """In fp64; one text is shorter than the window, one is longer, and both share a sequence."""
    rng = np.random.default_rng(seed)
    width, length = CONFIG.dspark_block_size, 64
    token_ids, positions = torch.full((1, length), 2), torch.full((1, length), -1)
    places, expected = [], []
    for first, count in ((0, 5), (16, 30)):
        text, anchor = rng.integers(0, CONFIG.image_token_id, count), int(rng.integers(0, CONFIG.image_token_id))
        ids, confidences = served(text, anchor)
        whole = torch.cat([torch.from_numpy(text), torch.tensor([anchor]), ids])
        token_ids[0, first : first + len(whole)] = whole
        positions[0, first : first + len(whole)] = torch.arange(len(whole))
        places.append(first + count)
        expected.append((ids, confidences))
    packed = Packed(token_ids, positions)

    def zeros(kind, shape):
        return torch.zeros(shape, dtype=torch.float64)

    text_masters, drafter_masters = (Masters(CONFIG, roots, zeros) for roots in (TEXT_ROOTS, DRAFTER_ROOTS))
    text_masters.read(weights("golden"))
    drafter_masters.read(weights("golden"))
    twin = Twin(text_masters, COMPRESSION, torch.float64)
    rounded = twin.weights()
    drafter = DrafterTwin(drafter_masters, rounded.all["embed.weight"][0], rounded.all["head.weight"][0])
    blocks = Blocks.at(packed, torch.tensor([places]), width)
    drafted = drafter.run(packed, twin.run(packed, rounded).aux, blocks, drafter.weights())
    assert blocks.is_known.all()
    for number, (ids, confidences) in enumerate(expected):
        assert drafted.logits[number].argmax(1).tolist() == ids.tolist()
        assert torch.allclose(drafted.confidences[number].sigmoid(), confidences, rtol=0, atol=1e-9)


def test_the_drafter_learns_what_the_text_model_says(seed):
    """A few steps on one batch raise the drafts that verification would accept."""
    text = Masters(CONFIG, TEXT_ROOTS, initial_values(CONFIG, 0))
    recipe = Recipe(num_tokens=12 * 256, batch=2, length=128, num_anchors=16, warm_up=0.04, decay=0.96)
    trainer = DrafterTrainer(Twin(text, COMPRESSION, torch.float32), recipe)
    rng = np.random.default_rng(seed)
    packed = Packed(torch.from_numpy(rng.integers(0, 250, (2, 128))), torch.arange(128).expand(2, -1))
    seen = [trainer.step(packed) for _ in range(12)]
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert seen[-1]["accepted_length"] > seen[0]["accepted_length"] > 1
