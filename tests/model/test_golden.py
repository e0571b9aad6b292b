"""The 12-layer model with hashed weights gives its known numbers, in fp64, with the activations' quantisers on and off."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.model.checkpoint.random_weights import hashed_uniform
from deepinfer.model.engram import engram_multipliers
from deepinfer.ops import attention, engram, moe, quant
from tests.model.tiny import (
    PAGE_TOKENS,
    Batch,
    Prompt,
    bound,
    in_chunks,
    measuring,
    model,
    new_cache,
    recording,
    unquantised,
    unquantised_records,
)

CONFIG = named_config("golden")
IDS = np.floor((hashed_uniform("ids", 80).numpy() + 0.5) * 256).astype(np.int32)
LAST = 79

LOGITS = {  # (quantisers on, token) -> best token, logits of tokens 0..3
    (False, 0): (123, [-1.708300399, 0.375596510, -0.391022027, -1.283690256]),
    (False, 7): (21, [-0.528542784, -0.211764723, -0.428004840, -0.114519855]),
    (False, 40): (128, [-1.204147081, -0.160804659, -1.265010094, 0.838922877]),
    (False, 79): (94, [-0.821542881, -1.202366852, -1.461583993, 0.289975063]),
    (True, 0): (123, [-1.537516891, 0.561536577, -0.257733706, -1.141349073]),
    (True, 7): (21, [-0.415540929, -0.130703338, -0.567887254, 0.208508988]),
    (True, 40): (99, [-1.169719742, -0.340679273, -1.221310230, 0.882815908]),
    (True, 79): (10, [-0.227507067, -0.509154037, -2.042150082, 0.263619366]),
}
SQUARES = {False: 21246.013067, True: 21183.110093}
STREAMS = [  # layer -> mean square of the streams entering its attention; two numbers of the last token's first stream
    (0.995146651, [-1.328125, 1.3359375]),
    (1.705485449, [-1.685084508, 2.027777839]),
    (2.035759916, [-0.764963040, 2.104288053]),
    (2.393089292, [-0.185608264, 1.936931982]),
    (2.996406890, [-0.030799782, 1.005369161]),
    (3.404425879, [0.730179578, 1.898160090]),
    (3.740317081, [0.407759386, 1.956991372]),
    (4.173040471, [-1.092220534, 1.489367103]),
    (4.494257104, [-1.172000421, 1.058960575]),
    (4.866888366, [0.003234783, 1.123327157]),
    (5.217942255, [0.320141075, 1.862124179]),
    (5.594279661, [0.912344695, 1.672094054]),
]
CHOICES = {
    2: [0, 1, 7, 17, 22, 24, 25, 36],
    4: [5, 6, 13, 17, 18, 22, 34, 36],
    6: [9, 10, 13, 16, 37, 63, 76, 79],
    8: [9, 10, 12, 14, 16, 18, 19, 39],
    10: [15, 16, 37, 60, 61, 63, 76, 79],
}
CANDIDATE_BLOCKS = [2, 3, 4, 9, 15, 19]
EXPERTS = [[3, 4], [2, 1], [0, 4], [1, 3], [6, 4], [4, 6], [0, 3], [3, 2], [4, 1], [7, 1], [2, 5], [1, 0]]
ENGRAM_ROWS_5 = {1: [21, 109, 205, 220, 364, 420], 4: [12, 128, 240, 360, 430, 534]}


def printed(values, digits=9):
    """Equal to ``values`` in the printed digits."""
    return pytest.approx(values, rel=0, abs=0.501 * 10.0**-digits)


@dataclass
class Trace:
    """All recorded values of one run of the 80 tokens."""

    logits: torch.Tensor
    calls: dict
    streams: list
    cache: object

    def results(self, operator):
        return [result for _, result in self.calls[operator]]

    def choices(self):
        """Layer -> [num_tokens, index_topk] chosen entries; with one request, entry indices are entry numbers."""
        rows = self.results(attention.index_topk)
        rows += [rows for rows, _ in self.results(attention.index_blocks)]
        rows += self.results(attention.index_topk_within)
        return dict(zip(CONFIG.index_source_layer_ids, rows, strict=True))

    def candidates(self):
        ((_, blocks),) = self.results(attention.index_blocks)
        return blocks


@functools.cache
def trace(device, quantised):
    network = model("golden", device, exact=True)
    records = None if quantised else unquantised_records(CONFIG)
    cache = new_cache(network, num_pages=6, num_slots=2, records=records)
    seen = (
        attention.index_topk,
        attention.index_blocks,
        attention.index_topk_within,
        engram.engram_rows,
        moe.route,
    )
    calls, streams = {}, []
    batch = Batch(network, cache)
    batch.add("golden", Prompt(IDS))
    with nullcontext() if quantised else unquantised(), bound(measuring(streams) | recording(seen, calls)):
        batch.step({"golden": len(IDS)})
    return Trace(batch.remove("golden"), calls, streams, cache)


def test_ids_and_hashed_numbers_are_the_known_ones():
    assert hashed_uniform("embed.weight", 3).tolist() == printed([0.11742691, 0.47637822, 0.29442077], digits=8)
    assert [*IDS[:6], *IDS[-2:]] == [231, 81, 220, 242, 33, 127, 231, 75]


def test_hash_multipliers():
    layer_1 = (37968138307073165, 2397965009193117, 17816579247344819, 36657766217135125)
    assert engram_multipliers(1, CONFIG) == layer_1
    layer_4 = (40756647926798403, 2496024435749251, 36492340522650395, 9391376401103339)
    assert engram_multipliers(4, CONFIG) == layer_4


@pytest.mark.parametrize(("quantised", "token"), LOGITS)
def test_logits(device, quantised, token):
    row = trace(device, quantised).logits[token]
    best, first = LOGITS[quantised, token]
    assert int(row.argmax()) == best
    assert row[:4].tolist() == printed(first)


@pytest.mark.parametrize("quantised", SQUARES)
def test_sum_of_squares_of_all_logits(device, quantised):
    assert trace(device, quantised).logits.square().sum().item() == printed(SQUARES[quantised], digits=6)


@pytest.mark.parametrize("layer", range(12))
def test_streams_entering_a_layers_attention(device, layer):
    streams = trace(device, True).streams[2 * layer]
    mean_square, last = STREAMS[layer]
    assert streams.square().mean().item() == printed(mean_square)
    assert streams[LAST, 0, :2].tolist() == printed(last)


@pytest.mark.parametrize("layer", CHOICES)
def test_chosen_entries(device, layer):
    assert trace(device, True).choices()[layer][LAST].tolist() == CHOICES[layer]


def test_candidate_blocks(device):
    assert trace(device, True).candidates()[LAST].tolist() == CANDIDATE_BLOCKS


@pytest.mark.parametrize(("layer", "dropped"), [(2, 1024), (4, 1024), (6, 2628), (8, 2628), (10, 2628)])
def test_number_of_entries_that_top_k_drops(device, layer, dropped):
    visible = sum((token + 1) // CONFIG.ratio(layer) for token in range(80))
    assert visible - int((trace(device, True).choices()[layer] >= 0).sum()) == dropped


def test_number_of_entries_that_the_candidate_filter_drops(device):
    blocks = trace(device, True).candidates().tolist()
    size = CONFIG.candidate_block_size
    allowed = sum(max(0, min(size, token + 1 - size * block)) for token in range(80) for block in blocks[token] if block >= 0)
    assert 80 * 81 // 2 - allowed == 1680


def test_chosen_experts(device):
    routes = trace(device, True).results(moe.route)
    assert [ids[LAST].tolist() for ids, _ in routes] == EXPERTS


def test_engram_rows(device):
    results = trace(device, True).results(engram.engram_rows)
    rows = dict(zip(CONFIG.engram_layer_ids, results, strict=True))
    assert {layer: rows[layer][5].tolist() for layer in rows} == ENGRAM_ROWS_5


def test_cache_samples(device):
    cache = trace(device, True).cache
    main = quant.decode_main(cache.main(2)[1, 0], CONFIG.head_dim, torch.float64)
    assert main[:4].tolist() == [0.6875, -0.171875, 1.375, -1.375]
    store = cache.index(6)
    where = 1 + LAST // PAGE_TOKENS, LAST % PAGE_TOKENS
    record = torch.cat([store.values[where], store.scales[where]])
    assert quant.decode_index(record, CONFIG.index_head_dim, torch.float64)[:4].tolist() == [2, -0.75, 0.25, -0.25]
    ring = cache.window(0)
    window = quant.decode_window(ring[1, LAST % ring.shape[1]], CONFIG.head_dim, torch.float64)
    assert window[60:64].tolist() == [0.9375, -1.5, 0.46875, 0.3125]


def test_token_by_token_gives_the_known_logits_too(device):
    logits = in_chunks(model("golden", device, exact=True), Prompt(IDS), [1] * 80)
    assert logits.square().sum().item() == printed(SQUARES[True], digits=6)
    assert logits[LAST, :4].tolist() == printed(LOGITS[True, LAST][1])


def test_production_arithmetic_moves_streams_as_far_as_the_quantisers_do_and_no_further():
    """A quantiser turns a small error into an error of one step, so bf16 cannot be nearer."""
    network, measured = model("golden", exact=False), []
    batch = Batch(network, new_cache(network, num_pages=6, num_slots=2))
    batch.add("golden", Prompt(IDS))
    with bound(measuring(measured)):
        batch.step({"golden": len(IDS)})
    cpu = torch.device("cpu")

    runs = (measured, trace(cpu, True).streams, trace(cpu, False).streams)
    produced, on, off = (torch.stack(streams).double() for streams in runs)
    moved = (produced - on).square().mean((1, 2, 3)).sqrt()
    assert moved[0] == 0
    assert (moved[1:] < 1.25 * (off - on).square().mean((1, 2, 3)).sqrt()[1:]).all()
