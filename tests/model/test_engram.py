"""Engram: primes, multipliers, table rows of n-grams, and earlier ids across steps."""

import math
from itertools import accumulate

import numpy as np
import pytest
import torch

from deepinfer.config import engram_primes, named_config
from deepinfer.model.engram import History, engram_multipliers
from deepinfer.model.inputs import StepInputs
from deepinfer.ops.engram import DEAD, engram_gate, engram_gather, engram_rows
from deepinfer.ops.quant import pack_table
from deepinfer.step import Chunk, StepPlan
from tests.model.tiny import fill_with_garbage, model, new_cache, ragged, text_with_images

FULL = named_config("full")
PRIMES = {  # layer -> its primes minus 16 million, per n-gram size
    1: "57 79 81 97 121 129 133 183  189 207 211 253 277 289 307 321  339 381 393 399 403 409 447 463",
    14: "477 487 499 507 511 573 609 627  667 669 693 697 711 729 759 769  781 799 813 819 841 877 879 889",
}
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
COLUMNS = [0, 7, 8, 15, 16, 23]
ROWS = {  # (layer, t) -> table rows of these columns, for the compressed ids below
    (1, 0): [9400104, 114349277, 128026094, 254838319, 261350200, 382122658],
    (1, 1): [13113483, 116656150, 143429944, 253010731, 268025157, 375479977],
    (1, 4): [1904258, 124172280, 129581722, 243361014, 256168399, 370373927],
    (14, 0): [11315085, 116830007, 135395884, 241909330, 269973942, 379075217],
    (14, 1): [5427469, 118965479, 130863393, 245781381, 267283189, 378423476],
    (14, 4): [14384181, 117346364, 142461626, 250321520, 259432591, 372609064],
}
IDS = [10, 200, 3000, 40000, 99091]


def looked_back(ids):
    """[num_tokens, 4] ids at t, t-1, t-2, t-3 of a whole sequence."""
    return torch.tensor([[ids[t - shift] if t >= shift else DEAD for shift in range(4)] for t in range(len(ids))])


def hash_table(config, layer):
    """Multipliers, primes and offsets, as arguments of the operator."""
    primes = engram_primes(config)[config.engram_layer_ids.index(layer)]
    offsets = list(accumulate(primes, initial=0))[:-1]
    shape = (-1, config.engram_n_heads)
    multipliers = torch.tensor(engram_multipliers(layer, config))
    return multipliers, torch.tensor(primes).view(shape), torch.tensor(offsets).view(shape)


@pytest.mark.parametrize("layer", PRIMES)
def test_primes_of_the_full_model(layer):
    primes = engram_primes(FULL)[FULL.engram_layer_ids.index(layer)]
    assert [prime - 16_000_000 for prime in primes] == [int(each) for each in PRIMES[layer].split()]


def test_primes_sum_up_to_the_tables_heights():
    assert [sum(primes) for primes in engram_primes(FULL)] == [384006168, 384016682]


def test_primes_of_the_golden_model():
    expected = ((67, 71, 73, 79, 83, 89), (97, 101, 103, 107, 109, 113))
    assert engram_primes(named_config("golden")) == expected


@pytest.mark.parametrize("layer", MULTIPLIERS)
def test_multipliers_of_the_full_model(layer):
    assert engram_multipliers(layer, FULL) == MULTIPLIERS[layer]


@pytest.mark.parametrize("layer", [1, 14])
def test_products_cannot_overflow(layer):
    assert max(engram_multipliers(layer, FULL)) * (FULL.engram_compressed_vocab_size - 1) < 2**63
    assert all(multiplier % 2 for multiplier in engram_multipliers(layer, FULL))


@pytest.mark.parametrize(("layer", "token"), ROWS)
def test_known_rows(device, layer, token):
    arguments = (looked_back(IDS), *hash_table(FULL, layer))
    rows = engram_rows(*(argument.to(device) for argument in arguments), 2)
    assert rows.shape == (5, 24)
    assert rows[token, COLUMNS].tolist() == ROWS[layer, token]


@pytest.mark.parametrize("layer", [1, 14])
def test_rows_follow_the_rule_with_dead_positions_anywhere(layer, seed):
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, 99092, (200, 4)))
    ids[torch.from_numpy(rng.random((200, 4)) < 0.3)] = DEAD
    multipliers, primes, offsets = hash_table(FULL, layer)
    found = engram_rows(ids, multipliers, primes, offsets, 2)
    for row, numbers in zip(found.tolist(), ids.tolist(), strict=True):
        expected, running, is_dead = [], 0, False
        for shift, number in enumerate(numbers):
            is_dead |= number == DEAD
            running ^= (2 if is_dead else number) * int(multipliers[shift])
            if shift:
                pairs = zip(primes[shift - 1].tolist(), offsets[shift - 1].tolist(), strict=True)
                expected += [running % prime + offset for prime, offset in pairs]
        assert row == expected


def test_one_dead_position_hides_all_before_it():
    table = hash_table(FULL, 1)
    after = torch.tensor([[5, DEAD, 7, 8], [5, DEAD, DEAD, 99]])
    rows = engram_rows(after, *table, 2)
    assert torch.equal(rows[0], rows[1])


def test_gathered_rows_are_the_tables_values_in_column_order(seed):
    rng = np.random.default_rng(seed)
    codes, scale = pack_table(torch.from_numpy(rng.standard_normal((30, 64))))
    rows = torch.from_numpy(rng.integers(0, 30, (7, 6)))
    found = engram_gather(codes, scale, rows, torch.float64)
    values = codes.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    expected = torch.stack([torch.cat([values[row] for row in each]) for each in rows.tolist()])
    assert torch.equal(found.values(), expected)


def test_gate_follows_the_formula_and_is_shut_at_images(seed):
    rng = np.random.default_rng(seed)
    num_tokens, copies, width = 5, 4, 32
    kv = rng.standard_normal((num_tokens, (copies + 1) * width))
    streams = rng.standard_normal((num_tokens, copies, width))
    streams[4] = 0
    q_weight, k_weight = rng.standard_normal((2, copies, width))
    is_image = np.array([False, True, False, False, False])
    arguments = [torch.from_numpy(each) for each in (kv, streams, q_weight, k_weight, is_image)]
    found = engram_gate(*arguments, 1e-20)
    for token in range(num_tokens):
        value = kv[token, copies * width :]
        for copy in range(copies):
            x, key = streams[token, copy], kv[token, copy * width : (copy + 1) * width]
            rms = [math.sqrt((each**2).mean() + 1e-20) for each in (x, key)]
            d = (x * q_weight[copy] * k_weight[copy] * key).sum() / math.sqrt(width) / rms[0] / rms[1]
            gate = 0 if is_image[token] else 1 / (1 + math.exp(-np.sign(d) * math.sqrt(max(abs(d), 1e-6))))
            assert found[token, copy].numpy() == pytest.approx(x + gate * value, rel=0, abs=1e-12)


def test_history_across_chunks_is_the_history_of_the_whole(device):
    network = model("golden", device, exact=True)
    config, cache = network.config, new_cache(network, num_pages=20, num_slots=3)
    compression = torch.arange(config.vocab_size, device=device) * 3 % 200
    history = History(compression, config)
    for number in range(20):
        rng = np.random.default_rng(number)
        fill_with_garbage(cache, rng)
        prompt = text_with_images(network, rng, 40)
        ids = [DEAD if token == config.image_token_id else int(token) * 3 % 200 for token in prompt.token_ids]
        found, start = [], 0
        for size in ragged(rng, 40, 9):
            tokens = prompt.token_ids[start : start + size]
            chunk = Chunk(
                request_id="a",
                slot=2,
                start=start,
                token_ids=tokens,
                page_ids=(3, 1, 2)[: cache.layout.pages_for(start + size)],
                num_image_before=int((prompt.token_ids[:start] == config.image_token_id).sum()),
            )
            plan = StepPlan(chunks=(chunk,))
            inputs = StepInputs.build(
                plan, config=config, layout=cache.layout, device=device, image_features={"a": prompt.image_features}
            )
            found.append(history(inputs, cache).cpu())
            start += size
        assert torch.equal(torch.cat(found), looked_back(ids))
