"""StepInputs: how they are made from a step's plan."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import deepinfer.model
from deepinfer.model.inputs import StepInputs
from deepinfer.ops import engram, moe
from deepinfer.step import Chunk, Round, StepPlan
from tests.model.tiny import Batch, bound, measuring, model, new_cache, ragged, recording, rows_of, text, text_with_images


def random_inputs(rng):
    """Inputs of a step of three requests at random positions, its layout and its chunks."""
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


def owners(chunks):
    """[num_tokens] int64 each: the number and the slot of each row's request."""
    lens = torch.tensor([len(chunk.token_ids) for chunk in chunks])
    requests = torch.arange(len(chunks)).repeat_interleave(lens)
    return requests, torch.tensor([chunk.slot for chunk in chunks])[requests]


@pytest.mark.parametrize("number", range(10))
def test_what_rings_keep_never_collides_and_is_the_latest(number):
    inputs, layout, chunks = random_inputs(np.random.default_rng(number))
    tokens = inputs.encoder
    requests, slots = owners(chunks)
    kinds = (
        (tokens.window, layout.ring_tokens),
        (tokens.compressor, layout.compressor_ring),
        (inputs.lookback, layout.lookback_ring),
    )
    for written, length in kinds:
        kept = written.rows
        where = {(int(requests[row]), int(tokens.positions[row]) % length) for row in kept.tolist()}
        assert where == set(zip(requests[kept].tolist(), written.positions.tolist(), strict=True))
        assert torch.equal(written.slots, slots[kept])
        assert len(where) == len(kept)
        expected = []
        for request, chunk in enumerate(chunks):
            end = chunk.start + len(chunk.token_ids)
            expected += [(request, position) for position in range(max(chunk.start, end - length), end)]
        assert list(zip(requests[kept].tolist(), tokens.positions[kept].tolist(), strict=True)) == expected


@pytest.mark.parametrize("number", range(10))
def test_tokens_before_are_found_in_the_ring_or_in_the_step(number):
    """Every entry of a ring and every row holds its slot and position, so a value of another request is recognised."""
    inputs, layout, chunks = random_inputs(np.random.default_rng(200 + number))
    _, slots = owners(chunks)
    tokens, config = inputs.encoder, model("golden", exact=True).config
    kinds = (
        (tokens.window_before, layout.ring_tokens, range(1 - config.sliding_window, 1)),
        (tokens.compressor_before, layout.compressor_ring, range(-1, 0)),
        (inputs.lookback_before, layout.lookback_ring, range(0, -config.engram_max_ngram_size, -1)),
    )
    for before, length, offsets in kinds:
        ring = torch.full((4, length), -9)
        for chunk in chunks:
            for position in range(max(0, chunk.start - length), chunk.start):
                ring[chunk.slot, position % length] = 1000 * chunk.slot + position
        own = 1000 * slots + tokens.positions
        found = before.gather(ring, own)[before.idx].masked_fill(before.idx < 0, -1)
        wanted = tokens.positions.unsqueeze(1) + torch.tensor(list(offsets))
        expected = torch.where(wanted >= 0, 1000 * slots.unsqueeze(1) + wanted, -1)
        assert torch.equal(found, expected)


def test_places_in_rings_are_computed_once_a_step():
    """No layer reduces positions itself, and none takes the row before for the token before."""
    for path in Path(deepinfer.model.__file__).parent.glob("*.py"):
        for spelling in ("ring.shape", "roll("):
            assert spelling not in path.read_text(), f"{path.name}: {spelling}"


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
    calls, measured = {}, []
    with bound(measuring(measured) | recording([moe.route, engram.engram_gate], calls)):
        sizes = ragged(np.random.default_rng(2), 60, 9)
        for size in sizes:
            batch.step({"a": size})
    sublayers, layers = 2 * network.config.num_hidden_layers, network.config.num_hidden_layers
    entered = torch.cat(measured[::sublayers])
    words = torch.from_numpy(prompt.token_ids).long()
    expected = network.embedding[words]
    expected[is_image] = prompt.image_features
    assert torch.equal(entered, expected.unsqueeze(1).expand_as(entered))
    for layer in range(layers):
        assert torch.equal(torch.cat([arguments[4] for arguments, _ in calls[moe.route][layer::layers]]), is_image)
    for place in range(2):
        assert torch.equal(torch.cat([arguments[4] for arguments, _ in calls[engram.engram_gate][place::2]]), is_image)


# ---------------------------------------------------------------------------------------------------------------------- rounds


class Rounds:
    """The same tokens in two steps: one of chunks and rounds, one of only chunks."""

    def __init__(self, rng, *, num_chunks, lens, has_floors=False, width=5):
        self.network = model("golden", exact=True)
        self.config = self.network.config
        self.layout = new_cache(self.network, num_pages=1, num_slots=1).layout
        pages, slots = rng.permutation(np.arange(1, 60)).astype(np.int32), rng.permutation(np.arange(1, 9))
        self.chunks, self.same, self.rounds, ids = [], [], [], torch.zeros(len(lens), width + 1, dtype=torch.int64)
        for number in range(num_chunks + len(lens)):
            start = int(rng.integers(0, 90))
            is_round = number >= num_chunks
            count = 1 + lens[number - num_chunks] if is_round else int(rng.integers(1, 30))
            num_pages = self.layout.pages_for(start + count)
            floors = {"window_floor": int(rng.integers(0, start + 1)), "decoder_floor": int(rng.integers(0, start + 1))}
            given = {"request_id": f"r{number}", "slot": int(slots[number]), "page_ids": pages[:num_pages]}
            given |= floors if has_floors else {}
            pages = pages[num_pages:]
            token_ids = text(self.network, rng, count).token_ids
            chunk = Chunk(start=start, token_ids=token_ids, num_logits=count if is_round else number % 2, **given)
            self.same.append(chunk)
            if is_round:
                ids[number - num_chunks, :count] = torch.from_numpy(token_ids)
                slack = int(rng.integers(0, 7))  # the host knows only bounds
                self.rounds.append(Round(start=max(0, start - slack), max_drafts=width, **given))
            else:
                self.chunks.append(chunk)
        self.starts = torch.tensor([chunk.start for chunk in self.same[num_chunks:]])
        self.lens, self.ids = torch.tensor(lens), ids

    def plain(self):
        return self._build(StepPlan(chunks=tuple(self.same)), None)

    def inputs(self, num_more=0, num_drafts=None):
        num_rows = int(self.lens.sum()) + len(self.lens) + num_more
        laid = rows_of(self.starts, self.lens, self.ids, num_rows)
        return self._build(StepPlan(chunks=tuple(self.chunks), rounds=tuple(self.rounds), num_drafts=5 * len(self.lens)), laid)

    def _build(self, plan, rounds):
        return StepInputs.build(
            plan, config=self.config, layout=self.layout, device=torch.device("cpu"), rounds=rounds, replay_mode="mask"
        )


def check_written(found, expected, num_rows):
    """The same rows are written to the same places; padding rows are written to slot 0."""
    is_own = found.rows < num_rows
    for name in ("rows", "slots", "positions"):
        assert torch.equal(getattr(found, name)[is_own], getattr(expected, name)), name
    assert (found.slots[~is_own] == 0).all()


def check_before(found, expected, num_rows, reach):
    """The same tokens are found before each of the first ``num_rows``."""
    num_requests = len(expected.slots)
    for name in ("slots", "positions"):
        assert torch.equal(getattr(found, name)[:num_requests], getattr(expected, name)), name
    assert (found.slots[num_requests:] == 0).all()
    # The list holds the earlier tokens of all requests, then the step's own; ``found`` has one request more, for padding.
    shifted = torch.where(found.idx >= (num_requests + 1) * reach, found.idx - reach, found.idx)
    assert torch.equal(shifted[:num_rows], expected.idx)


def check_layer(found, expected, num_more, reach):
    """``found`` has the rows of ``expected``, then ``num_more`` padding rows."""
    num_rows = len(expected.positions)
    assert len(found.positions) == num_rows + num_more
    for name in ("positions", "is_image"):
        assert torch.equal(getattr(found, name)[:num_rows], getattr(expected, name)), name
    for name in ("window", "compressor"):
        check_written(getattr(found, name), getattr(expected, name), num_rows)
    check_before(found.window_before, expected.window_before, num_rows, reach)
    check_before(found.compressor_before, expected.compressor_before, num_rows, 1)
    for ratio, rows in expected.store_rows.items():
        for name in ("pages", "entries", "first_positions"):
            assert torch.equal(getattr(found.store_rows[ratio], name)[:num_rows], getattr(rows, name)), (ratio, name)
        assert (found.store_rows[ratio].pages[num_rows:] == 0).all()


@pytest.mark.parametrize("has_floors", [False, True], ids=["", "floors"])
@pytest.mark.parametrize("num_chunks", [0, 2])
@pytest.mark.parametrize(("lens", "num_more"), [([3, 0, 5], 0), ([3, 0, 5], 4), ([0], 0), ([0, 0], 3), ([5, 5, 5, 5], 0)])
def test_tokens_of_rounds_are_laid_out_like_those_of_chunks(lens, num_more, num_chunks, has_floors, seed):
    case = Rounds(np.random.default_rng(seed), num_chunks=num_chunks, lens=lens, has_floors=has_floors)
    found, expected, reach = case.inputs(num_more), case.plain(), case.config.sliding_window - 1
    num_rows = len(expected.token_ids)
    assert torch.equal(found.token_ids[:num_rows], expected.token_ids)
    check_written(found.lookback, expected.lookback, num_rows)
    check_before(found.lookback_before, expected.lookback_before, num_rows, case.config.engram_max_ngram_size - 1)
    assert torch.equal(found.logit_rows[: len(expected.logit_rows)], expected.logit_rows)
    assert len(found.logit_rows) == len(expected.logit_rows) + num_more
    check_layer(found.encoder, expected.encoder, num_more, reach)
    check_layer(found.decoder, expected.decoder, num_more, reach)
    rows = found.encoder.spans.round_rows
    for number, length in enumerate(lens):
        first = num_rows - sum(lens[number:]) - len(lens[number:])
        own = list(range(first, first + length + 1))
        assert rows[number].tolist() == own + [num_rows + num_more] * (6 - len(own))


def test_decoder_half_computes_rounds_without_the_prompts(seed):
    case = Rounds(np.random.default_rng(seed), num_chunks=2, lens=[1, 2])
    case.chunks = [dataclasses.replace(chunk, decoder_floor=chunk.end) for chunk in case.chunks]
    num_chunk_rows = sum(len(chunk.token_ids) for chunk in case.chunks)
    laid = rows_of(case.starts, case.lens, case.ids, 6)
    plan = StepPlan(chunks=tuple(case.chunks), rounds=tuple(case.rounds), num_drafts=4)
    found = StepInputs.build(plan, config=case.config, layout=case.layout, device=torch.device("cpu"), rounds=laid)
    assert found.decoder_rows.tolist() == list(range(num_chunk_rows, num_chunk_rows + 6))
    assert found.decoder.window.slots.tolist() == [case.rounds[0].slot] * 2 + [case.rounds[1].slot] * 3 + [0]
    assert found.logit_rows.tolist() == list(range(6))


def test_padding_rows_change_no_result_and_write_only_to_slot_and_page_0(seed):
    case = Rounds(np.random.default_rng(seed), num_chunks=1, lens=[3, 0])
    network = model("golden", exact=False)
    results, memories = [], []
    for num_more in (0, 4):
        cache = new_cache(network, num_pages=60, num_slots=10)
        outputs = network.run(case.inputs(num_more), cache)
        count = outputs.hidden.shape[0] - num_more
        results.append((outputs.hidden[:count], outputs.aux[: len(case.plain().token_ids)]))
        memories.append((cache._pages.view(60, -1)[1:], cache._states.view(10, -1)[1:]))
    for one, other in zip((*results[0], *memories[0]), (*results[1], *memories[1]), strict=True):
        assert torch.equal(one, other)
