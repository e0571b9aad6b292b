"""StepInputs: what a step's plan turns into, and what the layers are told."""

import numpy as np
import pytest
import torch

from deepinfer.model.inputs import StepInputs
from deepinfer.ops import engram, moe, norm
from deepinfer.step import Chunk, StepPlan
from tests.model.tiny import Batch, bound, model, new_cache, ragged, recording, text, text_with_images


def random_inputs(rng):
    """A step of three requests at random places; returns it with its layout and chunks."""
    network = model("golden", exact=True)
    layout = new_cache(network, num_pages=1, num_slots=1).layout
    chunks = []
    for slot in (3, 1, 2):
        start, count = int(rng.integers(0, 200)), int(rng.integers(1, 60))
        pages = tuple(map(int, rng.permutation(np.arange(1, 40))[: layout.pages_for(start + count)]))
        ids = text(network, rng, count).token_ids
        chunks.append(Chunk(request_id=str(slot), slot=slot, start=start, token_ids=ids, page_ids=pages))
    plan = StepPlan(chunks=tuple(chunks))
    return StepInputs.build(plan, config=network.config, layout=layout, device=torch.device("cpu")), layout, chunks


@pytest.mark.parametrize("number", range(10))
def test_what_rings_keep_never_collides_and_is_the_latest(number):
    inputs, layout, chunks = random_inputs(np.random.default_rng(number))
    tokens = inputs.encoder
    kinds = (
        (tokens.ring_rows, layout.ring_tokens),
        (tokens.compressor_rows, layout.compressor_ring),
        (inputs.lookback_rows, layout.lookback_ring),
    )
    for kept, length in kinds:
        where = {(int(tokens.requests[row]), int(tokens.positions[row]) % length) for row in kept.tolist()}
        assert len(where) == len(kept)
        expected = []
        for request, chunk in enumerate(chunks):
            end = chunk.start + len(chunk.token_ids)
            expected += [(request, position) for position in range(max(chunk.start, end - length), end)]
        assert list(zip(tokens.requests[kept].tolist(), tokens.positions[kept].tolist(), strict=True)) == expected


@pytest.mark.parametrize("number", range(10))
def test_entries_go_to_their_requests_pages_once_complete(number):
    inputs, layout, chunks = random_inputs(np.random.default_rng(100 + number))
    for ratio, where in inputs.encoder.store_rows.items():
        row = 0
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                page = chunk.page_ids[position // layout.page_tokens] if (position + 1) % ratio == 0 else 0
                assert int(where.pages[row]) == page
                assert int(where.entries[row]) == position // ratio % (layout.page_tokens // ratio)
                assert int(where.first_positions[row]) == position // ratio * ratio
                row += 1
        assert row == len(where.pages)


def test_image_positions_enter_with_their_embeddings_and_every_router_and_gate_knows_them():
    network = model("golden", exact=True)
    prompt = text_with_images(network, np.random.default_rng(1), 60)
    is_image = torch.from_numpy(prompt.token_ids == network.config.image_token_id)
    batch = Batch(network, new_cache(network, num_pages=6, num_slots=2))
    batch.add("a", prompt)
    calls = {}
    with bound(recording([norm.mhc_pre, moe.route, engram.engram_gate], calls)):
        sizes = ragged(np.random.default_rng(2), 60, 9)
        for size in sizes:
            batch.step({"a": size})
    sublayers, layers = 2 * network.config.num_hidden_layers, network.config.num_hidden_layers
    entered = torch.cat([arguments[0] for arguments, _ in calls[norm.mhc_pre][::sublayers]])
    words = torch.from_numpy(prompt.token_ids).long()
    expected = network.embedding[words]
    expected[is_image] = prompt.image_features
    assert torch.equal(entered, expected.unsqueeze(1).expand_as(entered))
    for layer in range(layers):
        assert torch.equal(torch.cat([arguments[4] for arguments, _ in calls[moe.route][layer::layers]]), is_image)
    for place in range(2):
        assert torch.equal(torch.cat([arguments[4] for arguments, _ in calls[engram.engram_gate][place::2]]), is_image)
