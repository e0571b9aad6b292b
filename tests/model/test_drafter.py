"""The draft network equals its formulas, reads only visible keys, and gives a request the same bits in every batch."""

import copy
import dataclasses
import functools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.model.checkpoint.table import tensor_table
from deepinfer.model.drafter import Drafter
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import StepInputs
from deepinfer.model.vision import VisionTower
from deepinfer.ops import attention, norm, quant, sampling
from deepinfer.step import Chunk, StepPlan
from tests.devices import no_waits
from tests.model.tiny import (
    CPU,
    PAGE_TOKENS,
    Batch,
    bound,
    fill_with_garbage,
    measuring,
    model,
    new_cache,
    recording,
    text,
    unquantised,
    unquantised_records,
    weights,
)

# Three of four experts.  The main network takes two, so a confusion of the two numbers fails.
CONFIG = dataclasses.replace(named_config("golden"), dspark_num_experts_per_tok=3)
WINDOW, RING, WIDTH = 8, 14, 5
STAGES = range(3)
TEMPERATURES = (1.0, 0.7, 1.3, 2.0, 0.5)
REQUESTS = [  # slot, anchor position, first position with a context record
    (3, 0, 0),  # no context
    (5, 3, 0),  # shorter than the window
    (1, 8, 0),  # exactly the window
    (6, 9, 2),  # a floor inside the window
    (2, 33, 0),  # twice around the ring
    (4, 40, 37),
    (7, 20, 20),  # a floor after the whole context
]
ANCHORS = [17, 4, 250, 91, 17, 133, 60]


def network_of(device=CPU, *, exact):
    network = copy.copy(model("golden", device, exact=exact))
    network.config = CONFIG
    return network


@functools.cache
def drafter_of(device=CPU, *, exact):
    return Drafter(network_of(device, exact=exact), weights("golden"), temperatures=TEMPERATURES)


def changed(change, *, exact):
    """A drafter with tensors changed by ``change``: name, tensor -> tensor."""
    tensors = {name: change(name, tensor) for name, tensor in weights("golden").items()}
    return Drafter(network_of(exact=exact), tensors)


def sampling_rows(device, numbers):
    """Sampling parameters of requests ``numbers``; some are greedy."""
    values = torch.tensor(numbers, dtype=torch.int64)
    return sampling.SamplingRows(
        temperature=torch.where(values % 3 == 1, 0.0, 0.5 + values / 8).float().to(device),
        top_k=torch.full_like(values, -1).to(device),
        top_p=torch.ones(len(numbers)).to(device),
        min_p=torch.zeros(len(numbers)).to(device),
        seeds=(values * 7919 + 5).to(device),
        filters=False,
    )


def random_aux(number, length):
    generator = torch.Generator().manual_seed(number)
    return 2 * torch.randn(length, 3 * CONFIG.hidden_size, generator=generator, dtype=torch.float64)


def commit(drafter, cache, aux, slot, start):
    """Commit context records in one call; of more rows than the ring holds, only the last are committed."""
    device = aux.device
    positions = torch.arange(start, start + len(aux), device=device)
    slots = torch.where(positions >= start + len(aux) - RING, slot, 0)
    drafter.commit(aux, positions, slots, cache)


def context_records(cache, slot, positions):
    """[num_stages, num_positions, bytes]"""
    rings = [cache.window(CONFIG.num_hidden_layers + stage) for stage in STAGES]
    places = torch.tensor([position % RING for position in positions], dtype=torch.int64, device=rings[0].device)
    return torch.stack([ring[slot, places] for ring in rings])


@functools.cache
def _clean_cache(device, exact, quantised):
    network = network_of(device, exact=exact)
    cache = new_cache(network, num_pages=2, num_slots=9, records=None if quantised else unquantised_records(CONFIG))
    if quantised:
        fill_with_garbage(cache, np.random.default_rng(7))
    with nullcontext() if quantised else unquantised():
        for number, (slot, position, _) in enumerate(REQUESTS):
            aux = random_aux(number, position).to(device, network.dtype)
            if position:
                commit(drafter_of(device, exact=exact), cache, aux, slot, 0)
    return cache


def filled_cache(device=CPU, *, exact, quantised=True):
    """A cache with the context of all requests; all other bytes are random."""
    cache = _clean_cache(device, exact, quantised)
    made = copy.copy(cache)
    made._pages, made._states = cache._pages.clone(), cache._states.clone()
    return made


def draft(drafter, cache, numbers=range(7), *, mode="argmax", num_drafts=WIDTH, requests=REQUESTS):
    device, numbers = drafter._model.device, list(numbers)
    columns = [*zip(*requests, strict=True), ANCHORS[: len(requests)]]
    slots, positions, floors, anchors = (torch.tensor(column, device=device)[numbers] for column in columns)
    return drafter.draft(anchors, positions, slots, floors, sampling_rows(device, numbers), mode, num_drafts, cache)


def block_outputs(drafter, cache, numbers=range(7), **how):
    """Inputs of the Markov loop (hidden and base logits, [num_requests, width, ...]), and the drafts."""
    calls = {}
    with bound(recording([sampling.markov_step], calls)):
        drafts = draft(drafter, cache, numbers, **how)
    steps = [arguments for arguments, _ in calls[sampling.markov_step]]
    return torch.stack([step[4] for step in steps], 1), torch.stack([step[0] for step in steps], 1), drafts


# -------------------------------------------------------------------------------------------------- the formulas, written out


class Written:
    """The draft network in fp64, one token at a time, from the checkpoint's tensors."""

    def __init__(self, tensors, quantised):
        self.tensors = tensors
        self.q8 = quant.round_mxfp8 if quantised else lambda x: x
        self.quantised = quantised
        self.matrix = functools.cache(self._matrix)

    def plain(self, name):
        return self.tensors[name].double()

    def _matrix(self, name):
        codes, scale = self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"]
        unpack = quant.unpack_fp8 if codes.dtype == torch.float8_e4m3fn else quant.unpack_fp4
        return unpack(codes, scale, torch.float64)

    def stored(self, key):
        if not self.quantised:
            return key
        return quant.decode_window(quant.encode_window(key), CONFIG.head_dim, torch.float64)

    @staticmethod
    def norm(x, gain):
        return gain * x / torch.sqrt((x * x).mean() + 1e-20)

    @staticmethod
    def turn(x, position):
        """Interleaved pairs of the last 16 dims, theta 10000."""
        x = x.clone()
        for pair in range(8):
            angle = position * 10000.0 ** (-pair / 8)
            a, b = x[48 + 2 * pair].clone(), x[49 + 2 * pair].clone()
            x[48 + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            x[49 + 2 * pair] = a * math.sin(angle) + b * math.cos(angle)
        return x

    def key(self, prefix, x8, position):
        return self.stored(
            self.turn(self.norm(self.matrix(f"{prefix}.wkv") @ x8, self.plain(f"{prefix}.kv_norm.weight")), position)
        )

    def context(self, stage, aux, position):
        main = self.norm(self.matrix("mtp.0.main_proj") @ self.q8(aux), self.plain("mtp.0.main_norm.weight"))
        return self.key(f"mtp.{stage}.attn", self.q8(main), position)

    def connect(self, prefix, part, streams, pre):
        """Input of a sublayer, and the sublayer's own pre, post and mixing matrix."""
        flat = streams.flatten()
        scale, base = self.plain(f"{prefix}.hc_{part}_scale"), self.plain(f"{prefix}.hc_{part}_base")
        m = self.plain(f"{prefix}.hc_{part}_fn") @ flat / torch.sqrt((flat * flat).mean() + 1e-20)
        own = torch.sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
        mixing = torch.softmax((m[8:] * scale[2] + base[8:]).view(4, 4), dim=1) + 1e-6
        mixing = mixing / (mixing.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            mixing = mixing / (mixing.sum(1, keepdim=True) + 1e-6)
            mixing = mixing / (mixing.sum(0, keepdim=True) + 1e-6)
        x = self.norm(pre @ streams, self.plain(f"{prefix}.{part}_norm.weight"))
        return x, own, post, mixing

    def attend(self, stage, xs, position, context):
        prefix, count = f"mtp.{stage}.attn", len(xs)
        keys = context + [self.key(prefix, self.q8(xs[i]), position + i) for i in range(count)]
        outputs = []
        for i in range(count):
            latent = self.norm(self.matrix(f"{prefix}.wq_a") @ self.q8(xs[i]), self.plain(f"{prefix}.q_norm.weight"))
            queries = (self.matrix(f"{prefix}.wq_b") @ self.q8(latent)).view(4, 64)
            heads = []
            for head in range(4):
                query = self.turn(queries[head], position + i)
                weights = [math.exp(float(query @ key) / 8) for key in keys]
                total = sum(weights) + math.exp(float(self.plain(f"{prefix}.attn_sink")[head]))
                mixed = sum(weight * key for weight, key in zip(weights, keys, strict=True)) / total
                heads.append(self.turn(mixed, -(position + i)))
            groups = torch.cat(heads).view(2, 128)
            wo_a = self.matrix(f"{prefix}.wo_a").view(2, 32, 128)
            z = torch.cat([wo_a[group] @ groups[group] for group in range(2)])
            outputs.append(self.matrix(f"{prefix}.wo_b") @ self.q8(z))
        return outputs

    def swiglu(self, prefix, x8, weight):
        gate, up = self.matrix(f"{prefix}.w1") @ x8, self.matrix(f"{prefix}.w3") @ x8
        gate, up = gate.clamp(max=CONFIG.swiglu_limit), up.clamp(-CONFIG.swiglu_limit, CONFIG.swiglu_limit)
        return self.matrix(f"{prefix}.w2") @ self.q8(gate * torch.sigmoid(gate) * up * weight)

    def mix_experts(self, stage, x):
        prefix, x8 = f"mtp.{stage}.ffn", self.q8(x)
        scores = torch.sqrt(torch.log1p(torch.exp(self.plain(f"{prefix}.gate.weight") @ x)))
        picks = (scores + self.plain(f"{prefix}.gate.bias")).argsort(descending=True)[:3].tolist()
        y = self.swiglu(f"{prefix}.shared_experts", x8, 1.0)
        for expert in picks:
            y = y + self.swiglu(f"{prefix}.experts.{expert}", x8, 1.5 * scores[expert] / sum(scores[picks]))
        return y

    def block(self, anchor, position, aux, floor):
        """hidden [5, hidden] before the final norm; ``aux`` holds positions 0 … position - 1."""
        ids = [anchor] + [CONFIG.dspark_noise_token_id] * 4
        streams = [self.plain("embed.weight")[token].repeat(4, 1) for token in ids]
        pre = [torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)] * 5
        for stage in STAGES:
            context = [self.context(stage, aux[p], p) for p in range(max(floor, position - WINDOW), position)]
            for part in ("attn", "ffn"):
                tied = [self.connect(f"mtp.{stage}", part, streams[i], pre[i]) for i in range(5)]
                xs = [each[0] for each in tied]
                ys = self.attend(stage, xs, position, context) if part == "attn" else [self.mix_experts(stage, x) for x in xs]
                pre = [each[1] for each in tied]
                streams = [
                    torch.outer(post, y) + mixing.T @ before
                    for (_, _, post, mixing), y, before in zip(tied, ys, streams, strict=True)
                ]
        return torch.stack([pre[i] @ streams[i] for i in range(5)])

    def base_logits(self, hidden):
        gain = self.plain("mtp.2.norm.weight")
        return torch.stack([self.plain("head.weight") @ self.norm(row, gain) for row in hidden])

    def markov(self, anchor, position, hidden, base, number, mode):
        """Drafts, their logits and confidences of request ``number``."""
        rows = sampling_rows(CPU, [number])
        ids, logits, confidences, prev = [], [], [], anchor
        for k in range(1, 6):
            token = self.plain("mtp.2.markov_head.embed.weight")[prev]
            z = base[k - 1] + self.plain("mtp.2.markov_head.head.weight") @ token
            score = z
            if mode != "argmax" and number % 3 != 1:
                key = (sampling.EMIT_STREAM, 0) if mode == "coupled" else (sampling.DRAFT_STREAM, k)
                gumbel = sampling.gumbel_noise(rows.seeds, torch.tensor([position + k]), *key, CONFIG.vocab_size)[0]
                score = z / float(rows.temperature[0]) + gumbel
            logit = self.plain("mtp.2.confidence_head.proj.weight")[0] @ torch.cat([hidden[k - 1], token])
            confidences.append(1 / (1 + math.exp(-float(logit) / TEMPERATURES[k - 1])))
            prev = int(score.argmax())
            ids.append(prev)
            logits.append(z)
        return ids, torch.stack(logits), confidences


@functools.cache
def written(quantised):
    """Per request: visible context records, hidden, base logits."""
    network = Written(weights("golden"), quantised)
    results = []
    for number, (_, position, floor) in enumerate(REQUESTS):
        hidden = network.block(ANCHORS[number], position, random_aux(number, position), floor)
        results.append((hidden, network.base_logits(hidden)))
    return network, results


def is_close(found, expected):
    return torch.allclose(found.cpu(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("quantised", [True, False])
def test_context_records_equal_the_formulas(quantised):
    network, _ = written(quantised)
    cache = filled_cache(exact=True, quantised=quantised)
    for number, (slot, end, _) in enumerate(REQUESTS):
        positions, aux = range(max(0, end - RING), end), random_aux(number, end)
        for stage, records in enumerate(context_records(cache, slot, positions)):
            expected = [network.context(stage, aux[position], position) for position in positions]
            if quantised:
                found = quant.decode_window(records, CONFIG.head_dim, torch.float64)
            else:
                found = records.contiguous().view(torch.float64)
            assert all(is_close(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("quantised", [True, False])
def test_outputs_of_the_block_equal_the_formulas(device, quantised):
    drafter, (_, expected) = drafter_of(device, exact=True), written(quantised)
    cache = filled_cache(device, exact=True, quantised=quantised)
    calls = {}
    with nullcontext() if quantised else unquantised(), bound(recording([sampling.markov_step], calls)):
        draft(drafter, cache)
    for number, (hidden, base) in enumerate(expected):
        for k, (arguments, _) in enumerate(calls[sampling.markov_step]):
            assert is_close(arguments[4][number], hidden[k])
            assert is_close(arguments[0][number], base[k])


@pytest.mark.parametrize("mode", ["argmax", "sampled", "coupled"])
def test_drafts_and_confidences_equal_the_formulas(device, mode):
    network, expected = written(True)
    drafts = draft(drafter_of(device, exact=True), filled_cache(device, exact=True), mode=mode)
    assert (drafts.logits is not None) == (mode == "sampled")
    for number, (hidden, base) in enumerate(expected):
        ids, logits, confidences = network.markov(ANCHORS[number], REQUESTS[number][1], hidden, base, number, mode)
        assert drafts.ids[number].tolist() == ids
        assert drafts.confidences[number].tolist() == pytest.approx(confidences, rel=0, abs=1e-9)
        if drafts.logits is not None:
            assert is_close(drafts.logits[number], logits)


def test_production_arithmetic_moves_the_block_as_far_as_the_quantisers_do_and_no_further():
    hidden, _, _ = block_outputs(drafter_of(exact=False), filled_cache(exact=False))
    on, off = (torch.stack([hidden for hidden, _ in written(quantised)[1]]) for quantised in (True, False))
    assert (hidden - on).square().mean().sqrt() < 1.25 * (off - on).square().mean().sqrt()


def test_size_of_the_auxiliary_states_does_not_matter():
    drafter, cache = drafter_of(exact=True), filled_cache(exact=True)
    commit(drafter, cache, random_aux(1, RING), 1, 0)
    commit(drafter, cache, random_aux(1, RING) * 2.0**-9, 2, 0)
    assert torch.equal(context_records(cache, 1, range(RING)), context_records(cache, 2, range(RING)))


def test_bias_for_image_positions_is_ignored():
    drafter = changed(lambda name, tensor: -9 * tensor if name.endswith("bias_vl") else tensor, exact=False)
    cache = filled_cache(exact=False)
    assert torch.equal(block_outputs(drafter, cache)[0], block_outputs(drafter_of(exact=False), cache)[0])


# --------------------------------------------------------------------------------------------------------- who sees what


WRAPPED = 4
"""The request whose context is longer than the ring."""


@pytest.mark.parametrize("floor", [0, 30])
def test_every_output_sees_every_key_of_the_window_and_no_other(floor):
    drafter, (slot, anchor, _) = drafter_of(exact=True), REQUESTS[WRAPPED]
    requests = [*REQUESTS[:WRAPPED], (slot, anchor, floor)]
    cache = filled_cache(exact=True)
    before, _, _ = block_outputs(drafter, cache, [WRAPPED], requests=requests)
    other = quant.encode_window(torch.randn(CONFIG.head_dim, dtype=torch.float64))
    for stage in STAGES:
        ring = cache.window(CONFIG.num_hidden_layers + stage)[slot]
        for position in range(anchor - 9, anchor + 5):
            kept = ring[position % RING].clone()
            ring[position % RING] = other
            after, _, _ = block_outputs(drafter, cache, [WRAPPED], requests=requests)
            ring[position % RING] = kept
            is_visible = max(floor, anchor - WINDOW) <= position < anchor
            assert (after != before).any(-1).tolist() == [[is_visible] * WIDTH]


@pytest.mark.parametrize("slot_in_block", range(WIDTH))
def test_every_output_sees_every_token_of_its_own_block_and_of_no_other(slot_in_block):
    drafter, cache = drafter_of(exact=True), filled_cache(exact=True)
    calls = []

    def first_call_disturbed(streams, delta, mix, fn):
        calls.append(fn)
        if len(calls) == 1:
            streams = streams.clone()
            streams[WIDTH + slot_in_block] += 1.0
        return norm.mhc_mix.reference(streams, delta, mix, fn)

    before, _, _ = block_outputs(drafter, cache, range(3))
    seen = {}
    with bound({norm.mhc_mix: first_call_disturbed} | recording([sampling.markov_step], seen)):
        draft(drafter, cache, range(3))
    after = torch.stack([arguments[4] for arguments, _ in seen[sampling.markov_step]], 1)
    assert (after != before).any(-1).tolist() == [[False] * WIDTH, [True] * WIDTH, [False] * WIDTH]


def test_all_tokens_of_a_block_have_the_same_keys():
    drafter, cache, calls = drafter_of(exact=True), filled_cache(exact=True), {}
    with bound(recording([attention.sparse_attention], calls)):
        draft(drafter, cache)
    assert len(calls[attention.sparse_attention]) == len(STAGES)
    for arguments, _ in calls[attention.sparse_attention]:
        rows = arguments[4].unflatten(0, (-1, WIDTH))
        assert (rows == rows[:, :1]).all()
        counts = (rows[:, 0] >= 0).sum(-1)
        assert counts.tolist() == [min(WINDOW, position - floor) + WIDTH for _, position, floor in REQUESTS]


def test_places_of_the_records_and_other_records_do_not_matter():
    drafter = drafter_of(exact=False)
    expected = draft(drafter, filled_cache(exact=False), mode="sampled")
    cache = new_cache(network_of(exact=False), num_pages=2, num_slots=20)
    fill_with_garbage(cache, np.random.default_rng(8))
    moved = [(19 - slot, position, floor) for slot, position, floor in REQUESTS]
    for number, (slot, position, floor) in enumerate(moved):
        for p in range(max(floor, position - WINDOW), position):  # one row per call, and only visible rows
            commit(drafter, cache, random_aux(number, position)[p : p + 1].bfloat16(), slot, p)
    assert is_same(draft(drafter, cache, mode="sampled", requests=moved), expected)


def is_same(found, expected):
    pairs = [(found.ids, expected.ids), (found.confidences, expected.confidences), (found.logits, expected.logits)]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def test_a_draft_writes_nothing():
    cache = filled_cache(exact=False)
    pages, states = cache._pages.clone(), cache._states.clone()
    draft(drafter_of(exact=False), cache)
    assert torch.equal(cache._pages, pages)
    assert torch.equal(cache._states, states)


def test_rows_of_slot_0_are_dropped():
    drafter, cache = drafter_of(exact=False), filled_cache(exact=False)
    before = [cache.window(layer)[1:].clone() for layer in cache.layout.windows]
    drafter.commit(random_aux(1, 30).bfloat16(), torch.arange(30) // 2, torch.zeros(30, dtype=torch.int64), cache)
    assert all(torch.equal(cache.window(layer)[1:], kept) for layer, kept in zip(cache.layout.windows, before, strict=True))


# ------------------------------------------------------------------------------------------------------------------- heads


def test_without_its_head_the_markov_loop_takes_the_best_of_the_base_logits():
    drafter = changed(lambda name, tensor: tensor * 0 if "markov_head.head" in name else tensor, exact=False)
    _, base, drafts = block_outputs(drafter, filled_cache(exact=False))
    assert torch.equal(drafts.ids, base.argmax(-1))


def test_without_weights_the_confidence_is_one_half():
    drafter = changed(lambda name, tensor: tensor * 0 if "confidence_head" in name else tensor, exact=False)
    assert (draft(drafter, filled_cache(exact=False)).confidences == 0.5).all()


# ----------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("mode", ["argmax", "sampled", "coupled"])
def test_drafted_in_a_batch_is_drafted_alone(mode):
    drafter, cache = drafter_of(exact=False), filled_cache(exact=False)
    expected = draft(drafter, cache, mode=mode)
    for numbers in ([0], [1], [2], [3], [4], [5], [6], [6, 0], [5, 2, 4], [4] * 9 + [1], [*range(7)] * 3):
        found = draft(drafter, cache, numbers, mode=mode)
        logits = None if expected.logits is None else expected.logits[numbers]
        picked = dataclasses.replace(
            expected, ids=expected.ids[numbers], confidences=expected.confidences[numbers], logits=logits
        )
        assert is_same(found, picked)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_fewer_drafts_are_the_first_of_the_whole_block(num_drafts):
    drafter, cache = drafter_of(exact=False), filled_cache(exact=False)
    whole = draft(drafter, cache, mode="sampled")
    expected = [each[:, :num_drafts] for each in (whole.ids, whole.confidences, whole.logits)]
    found = draft(drafter, cache, mode="sampled", num_drafts=num_drafts)
    assert found.ids.shape == (7, num_drafts)
    assert all(torch.equal(*pair) for pair in zip((found.ids, found.confidences, found.logits), expected, strict=True))


def test_no_requests_have_no_drafts():
    drafter, cache = drafter_of(exact=False), filled_cache(exact=False)
    assert draft(drafter, cache, [], mode="sampled").logits.shape == (0, WIDTH, CONFIG.vocab_size)
    drafter.commit(random_aux(0, 0).bfloat16(), torch.arange(0), torch.arange(0), cache)


# ------------------------------------------------------------------------------------------------- what the main network gives


def alone(network, prompt):
    batch = Batch(network, new_cache(network, num_pages=2 + len(prompt) // PAGE_TOKENS, num_slots=2))
    batch.add("r", prompt)
    return batch


def all_records(drafter, batch):
    """Context records of every position that ``batch`` computed: [num_stages, num_positions, bytes]."""
    parts, start = [], 0
    cache = new_cache(batch.network, num_pages=2, num_slots=2)
    for aux in torch.cat(batch.aux["r"]).split(RING):
        commit(drafter, cache, aux, 1, start)
        parts.append(context_records(cache, 1, range(start, start + len(aux))))
        start += len(aux)
    return torch.cat(parts, dim=1)


def test_auxiliary_states_are_the_mean_of_the_streams_that_enter_the_target_layers(device):
    network, measured = network_of(device, exact=True), []
    batch = alone(network, text(network, np.random.default_rng(1), 40))
    with bound(measuring(measured)):
        batch.step({"r": 40})
    entering = measured[::2]
    (aux,) = batch.aux["r"]
    expected = torch.cat([entering[layer].mean(1) for layer in (9, 10, 11)], dim=1)
    assert torch.allclose(aux, expected, rtol=0, atol=1e-12)


def run_after(network, prompt, floor, mode="compact"):
    cache = new_cache(network, num_pages=4, num_slots=2)
    pages = np.arange(1, 4, dtype=np.int32)
    chunk = Chunk(request_id="r", slot=1, start=0, token_ids=prompt.token_ids, page_ids=pages, num_logits=0, decoder_floor=floor)
    inputs = StepInputs.build(StepPlan(chunks=(chunk,)), config=CONFIG, layout=cache.layout, device=CPU, replay_mode=mode)
    return network.run(inputs, cache)


def test_auxiliary_states_are_those_of_the_decoders_rows():
    network = network_of(exact=False)
    prompt = text(network, np.random.default_rng(2), 40)
    compact, masked = (run_after(network, prompt, 24, mode).aux for mode in ("compact", "mask"))
    assert compact.dtype == torch.bfloat16
    assert len(masked) == 40
    assert torch.equal(compact, masked[24:])
    outputs = run_after(network, prompt, 40)
    assert outputs.aux.shape == (0, 3 * CONFIG.hidden_size)
    assert outputs.hidden.shape == (0, CONFIG.hidden_size)


def test_a_model_without_draft_stages_has_no_auxiliary_states():
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0, compress_ratios=CONFIG.compress_ratios[:12])
    network = Flash(config, weights("golden"), torch.arange(256) % 200, device=CPU)
    assert run_after(network, text(network, np.random.default_rng(3), 4), 0).aux is None


@functools.cache
def rings_after(sizes):
    drafter, network, start = drafter_of(exact=False), network_of(exact=False), 0
    batch = alone(network, text(network, np.random.default_rng(4), sum(sizes)))
    for size in sizes:
        batch.step({"r": size})
        commit(drafter, batch.cache, batch.aux["r"][-1], batch.slot("r"), start)
        start += size
    return context_records(batch.cache, batch.slot("r"), range(RING))


@pytest.mark.parametrize("sizes", [(*[7] * 14, 210), (128, 128, 52), (300, 8), (290, *[1] * 18)])
def test_chunks_of_a_prompt_leave_the_rings_of_the_whole(sizes):
    assert torch.equal(rings_after(sizes), rings_after((308,)))


def test_rows_of_verified_drafts_are_those_of_a_prefill():
    drafter, network = drafter_of(exact=False), network_of(exact=False)
    rng = np.random.default_rng(5)
    prompt = text(network, rng, 60)
    whole = alone(network, prompt)
    whole.step({"r": 60})
    expected = all_records(drafter, whole)

    batch, ids = alone(network, prompt), prompt.token_ids.copy()
    slot = batch.slot("r")
    batch.step({"r": 20})
    commit(drafter, batch.cache, batch.aux["r"][-1], slot, 0)
    num_accepted = 0
    while (start := batch.done["r"]) + 6 <= 60:
        confirmed = num_accepted + 1  # the anchor and the right drafts
        prompt.token_ids[start + confirmed : start + 6] = rng.integers(0, 250, 6 - confirmed)
        batch.step({"r": 6})
        prompt.token_ids[:] = ids
        batch.done["r"] = end = start + confirmed
        positions, rejected = torch.arange(start, start + 6), range(end, start + 6)
        before = context_records(batch.cache, slot, rejected)
        drafter.commit(batch.aux["r"][-1], positions, torch.where(positions < end, slot, 0), batch.cache)
        visible = range(end - WINDOW, end)
        assert torch.equal(context_records(batch.cache, slot, visible), expected[:, visible])
        assert torch.equal(context_records(batch.cache, slot, rejected), before)
        num_accepted = (num_accepted + 1) % 6
    assert batch.done["r"] > 50


def test_every_tensor_of_the_checkpoint_is_in_use_once():
    network = model("golden", exact=False)
    tower = VisionTower(network.config, weights("golden"))
    parts = [network.taken, Drafter(network, weights("golden")).taken, tower.taken]
    assert set().union(*parts) == set(tensor_table(network.config))
    assert sum(map(len, parts)) == len(tensor_table(network.config))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["argmax", "sampled", "coupled"])
def test_a_gpu_drafts_a_cpus_tokens_and_waits_for_nothing(mode):
    cuda = torch.device("cuda")
    cache, drafter = filled_cache(cuda, exact=True), drafter_of(cuda, exact=True)
    for slot, end, _ in REQUESTS:
        positions = range(max(0, end - RING), end)
        expected = context_records(filled_cache(exact=True), slot, positions)
        assert torch.equal(context_records(cache, slot, positions).cpu(), expected)
    expected = draft(drafter_of(exact=True), filled_cache(exact=True), mode=mode)
    found = draft(drafter, cache, mode=mode)
    assert torch.equal(found.ids.cpu(), expected.ids)
    assert torch.allclose(found.confidences.cpu(), expected.confidences, rtol=0, atol=1e-9)

    slots, positions, floors, anchors = (torch.tensor(part, device=cuda) for part in (*zip(*REQUESTS, strict=True), ANCHORS))
    rows, aux = sampling_rows(cuda, range(7)), random_aux(0, 7).to(cuda)
    with no_waits(cuda):
        drafter.commit(aux, positions, slots, cache)
        drafter.draft(anchors, positions + 1, slots, floors, rows, mode, WIDTH, cache)
