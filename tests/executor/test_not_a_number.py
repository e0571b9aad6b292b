"""Values that are not finite, from any source: no token results from them, and the step fails with a message."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import StepFailed
from deepinfer.executor.executor import Executor
from deepinfer.executor.results import Launched, on_host
from deepinfer.executor.speculate import finite_logprobs
from deepinfer.model.drafter import Drafter
from deepinfer.model.flash import Flash
from deepinfer.ops import quant
from deepinfer.ops.sampling import token_logprobs
from deepinfer.request import SamplingParams
from tests.engine.harness import build, drain, request, rng_of, tokens
from tests.executor.test_speculate import CPU, VOCAB, Device, chunk_of, plan_of, round_of
from tests.model.tiny import in_chunks, model, text_with_images, weights

NAN, INF = float("nan"), float("inf")
SAYS = "not finite numbers, so that no token can be trusted; the weights may be damaged: check the checkpoint's files"
WIDTH = 3


# --------------------------------------------------------------------------------------------------------------- what was decided


def launched(decided, names, params, *, prompt_logprobs=None, confidences=None):
    return Launched(
        request_ids=names,
        params=params,
        decided=None if decided is None else on_host(decided, len(names)),
        prompt_logprobs=prompt_logprobs or {},
        prompt_top={},
        confidences=confidences,
        drafting_ids=names if confidences is not None else [],
        stopwatch=SimpleNamespace(wait_ms=lambda: 1.0),
        num_padding_rows=0,
    )


def decided_by(mode, logits, lens, drafts, params):
    """One prompt, then rounds that verify ``lens`` drafts."""
    device = Device(mode=mode)
    count = len(lens)
    chunks = [chunk_of(count + 1, 0, 4, num_logits=1)]
    for number in range(count):
        device.place(number + 1, num_tokens=10, drafts=drafts[number], params=params[number + 1])
        if mode == "sampled":
            device.table.draft_logits[number + 1] = torch.linspace(-1, 1, WIDTH * VOCAB).view(WIDTH, VOCAB)
    device.table.write(count + 1, params[0], 100)
    names = [f"r{count + 1}"] + [f"r{number + 1}" for number in range(count)]
    for name, each in zip(names, params, strict=True):
        device.rules.add(name, each, 4 if name == names[0] else 9)
        device.rules.start(name, np.array([2] * 9, dtype=np.int32))
    rounds = [round_of(number + 1, max_drafts=lens[number]) for number in range(count)]
    laid = device.lay_out(plan_of(rounds))
    return device.decide(rounds, laid, logits, chunks, params), names


BAD_ROWS = {
    "nan": lambda row, at: row.index_fill(0, at, NAN),
    "inf": lambda row, at: row.index_fill(0, at, INF),
    "-inf": lambda row, at: row.index_fill(0, at, -INF),
    "all nan": lambda row, at: torch.full_like(row, NAN),
    "all -inf": lambda row, at: torch.full_like(row, -INF),
    "both": lambda row, at: row.index_fill(0, at, INF).index_fill(0, (at + 1) % VOCAB, -INF),
}


@settings(max_examples=30)
@given(
    st.sampled_from(["coupled", "sampled", "argmax"]),
    st.lists(st.integers(0, WIDTH), min_size=1, max_size=4),
    st.sets(st.integers(0, 16), max_size=2),
    st.sampled_from(sorted(BAD_ROWS)),
    st.integers(0, 2**30),
)
def test_a_step_fails_exactly_if_a_row_whose_token_is_kept_is_not_finite(mode, lens, bad_rows, how, seed):
    """Rows before the first bad row decide the same tokens, so the clean run shows which rows are kept."""
    rng = np.random.default_rng(seed)
    num_rows = 1 + sum(lens) + len(lens)
    logits = torch.from_numpy(rng.normal(0, 2, (num_rows, VOCAB)).astype(np.float32))
    drafts = [rng.integers(0, VOCAB, WIDTH).tolist() for _ in lens]
    forced = [None, (3, 4, 2)]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            top_k=int(rng.choice([-1, 3])),
            top_p=float(rng.choice([1.0, 0.8])),
            seq_seed=number,
            top_logprobs=int(rng.integers(0, 3)),
            golden_token_ids=forced[int(rng.random() < 0.3)],
            presence_penalty=float(rng.choice([0.0, 0.5])),
            banned_token_ids=[(), (5,)][int(rng.random() < 0.3)],
        )
        for number in range(1 + len(lens))
    ]
    clean, names = decided_by(mode, logits, lens, drafts, params)
    expected = launched(clean, names, params).result()
    bad_rows = {row for row in bad_rows if row < num_rows}
    damaged = logits.clone()
    for row in bad_rows:
        damaged[row] = BAD_ROWS[how](logits[row], torch.tensor([int(rng.integers(VOCAB))]))
    first_rows = [0, *(1 + np.cumsum([0, *(length + 1 for length in lens[:-1])])).tolist()]
    counts = [len(expected.sampled[name].token_ids) for name in names]
    hit = {
        name for name, first, count in zip(names, first_rows, counts, strict=True) if bad_rows & set(range(first, first + count))
    }
    found, _ = decided_by(mode, damaged, lens, drafts, params)
    pending = launched(found, names, params)
    if not hit:
        assert pending.result().sampled == expected.sampled
        return
    with pytest.raises(StepFailed, match=re.escape(SAYS)) as error:
        pending.result()
    assert {name for name in names if repr(name) in str(error.value)} == hit or len(hit) > 3


@pytest.mark.parametrize("bad", sorted(BAD_ROWS))
def test_the_floor_of_log_probabilities_makes_no_number_of_what_is_none(bad):
    logits = torch.linspace(-3, 3, 2 * VOCAB).view(2, VOCAB)
    damaged = logits.clone()
    damaged[1] = BAD_ROWS[bad](logits[1], torch.tensor([2]))
    found = finite_logprobs(damaged, torch.tensor([4, 4]))
    assert found[1].isnan()
    assert torch.equal(found[:1], token_logprobs(logits[:1], torch.tensor([4])))


def test_prompts_and_drafts_that_are_not_numbers_fail_the_step_and_answers_go_by_their_requests_id():
    values = {"fine": torch.tensor([-1.0, -9999.0]), "bad": torch.tensor([-1.0, NAN, -2.0])}
    with pytest.raises(StepFailed, match=f"^logits of the prompt of 'bad' are {SAYS}"):
        launched(None, [], [], prompt_logprobs=values).result()
    names = ["a\x000", "a\x001", "b", "c", "d", "e"]
    confidences = torch.full((6, 2), NAN)
    with pytest.raises(StepFailed, match=f"^drafts of 'a', 'b', 'c' and 2 more are {SAYS}"):
        launched(None, names, [], confidences=confidences).result()


# ------------------------------------------------------------------------------------------------------------ where it comes from


def poisoned(stored, at):
    """Put NaN into a stored tensor: at one place, or everywhere if no place is given."""
    stored = stored.clone()
    flat = stored.view(-1)
    where = slice(None) if at is None else slice(at % len(flat), at % len(flat) + 1)
    if stored.dtype == torch.float8_e4m3fn:
        flat.view(torch.uint8)[where] = 0x7F
    elif stored.dtype == torch.uint8:  # a scale: packed E2M1 has no NaN
        flat[where] = 255
    else:
        flat[where] = NAN
    return stored


def kinds():
    """One name for each kind of tensor of the text model."""
    found = {}
    for name in weights("golden"):
        if not name.startswith(("mtp", "vision", "aligner", "image_")) and not re.search(r"experts\.\d+\.w\d\.weight", name):
            found.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    return [names[len(names) // 2] for names in found.values()]


CHOICES = [
    "layers.3.ffn.gate.bias",
    "layers.5.ffn.gate.bias_vl",
    "layers.4.attn.indexer.wk.weight",
    "layers.6.attn.indexer.k_norm.weight",
    "layers.8.attn.indexer.wq_b.weight",
    "layers.10.attn.indexer.weights_proj.weight",
    "layers.6.attn.compressor.norm.weight",
]
"""Tensors that determine the choice of experts or of cache entries."""


def network_with(name, at=None):
    clean = model("golden", exact=False)
    config = clean.config
    compression = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    return Flash(config, {**weights("golden"), name: poisoned(weights("golden")[name], at)}, compression, device=CPU)


@pytest.mark.parametrize("names", [CHOICES, pytest.param(kinds(), marks=pytest.mark.slow, id="all kinds")])
def test_a_nan_in_any_weight_is_seen_in_the_logits_or_changes_no_bit_of_them(names, seed):
    """A choice of experts or entries by NaN values must not give finite logits that differ from the right ones."""
    clean, rng = model("golden", exact=False), np.random.default_rng(seed)
    prompt = text_with_images(clean, rng, 24)
    expected = in_chunks(clean, prompt, [24])
    num_seen = 0
    for name in names:
        got = in_chunks(network_with(name, int(rng.integers(2**20))), prompt, [24])
        is_finite = got.isfinite().all(1)
        assert torch.equal(got[is_finite], expected[is_finite]), f"a NaN in {name} became a number"
        num_seen += bool((~is_finite).any())
    assert num_seen > len(names) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_format_carries_a_nan(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 64, generator=generator).to(dtype)
    bad = x.clone()
    bad[torch.arange(4), torch.tensor([0, 17, 40, 63])] = NAN
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ways = {
        "round_mxfp8": quant.round_mxfp8,
        "round_mxfp4": quant.round_mxfp4,
        "window": lambda each: quant.decode_window(quant.encode_window(each), 64, wide),
        "main": lambda each: quant.decode_main(quant.encode_main(each), 64, wide),
        "index": lambda each: quant.decode_index(quant.encode_index(each), 64, wide),
    }
    for name, way in ways.items():
        assert way(bad).isnan().any(1).all(), name
        assert way(x).isfinite().all(), name


# ------------------------------------------------------------------------------------------------------------------ in the engine


def serve(core, work):
    """The records before the step that fails."""
    outputs = {}
    with pytest.raises(StepFailed, match=re.escape(SAYS)):
        drain(core, work, outputs=outputs)
    core.close()
    return outputs


def work_of(seed, **given):
    rng = rng_of(seed, 1)
    sampling = [SamplingParams(temperature=t, max_tokens=5, seq_seed=seed, ignore_eos=True, **given) for t in (0.0, 1.0)]
    return [request(f"r{number}", tokens(rng, 30), each) for number, each in enumerate(sampling)]


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [("coupled", "norm", NAN), ("coupled", "head", -INF), ("sampled", "head", INF), ("argmax", "norm", INF)],
)
def test_damaged_weights_give_no_token(mode, name, value):
    core = build(num_drafts=3, draft_mode=mode, budget=16)  # chunks without logits come first
    network = core.executor.worker.model
    kept = getattr(network, name)
    setattr(network, name, kept.clone())
    getattr(network, name).view(-1)[7] = value
    try:
        assert not any(serve(core, work_of(1)).values())
    finally:
        setattr(network, name, kept)


@pytest.mark.parametrize("given", [{"golden_token_ids": (5, 6, 7)}, {"prompt_logprobs": True, "golden_token_ids": (5,)}])
def test_forced_tokens_and_prompts_are_no_exception(given):
    core = build()
    network = core.executor.worker.model
    kept, network.norm = network.norm, network.norm * NAN
    try:
        assert not any(serve(core, work_of(2, **given)).values())
    finally:
        network.norm = kept


DRAFTER = ["mtp.2.norm.weight", "mtp.2.markov_head.head.weight", "mtp.2.confidence_head.proj.weight", "mtp.0.attn.attn_sink"]


@pytest.mark.parametrize("name", DRAFTER)
def test_a_drafter_that_is_not_a_number_fails_the_step_too(name):
    """Without the check its drafts would never be accepted, and the engine would be slow without an error."""
    broken = {**weights("golden"), name: poisoned(weights("golden")[name], None)}
    serve(build(num_drafts=3, drafter=lambda network: Drafter(network, broken)), work_of(3))


def test_records_that_were_damaged_after_a_token_fail_the_next_step():
    core = build(num_drafts=0, is_async=False)
    (one,) = work_of(4)[1:]
    core.add(one)
    while not core.step():
        pass
    cache = core.executor.worker._cache
    core.executor.call(lambda: cache.window(0).fill_(0x7F))
    with pytest.raises(StepFailed, match=re.escape(SAYS)):
        core.step()
    core.close()


def test_the_row_of_a_rejected_draft_fails_no_step():
    """Values after the last kept token do not matter."""
    rows = torch.linspace(0, 1, 2 * VOCAB).view(2, VOCAB).flip(1).clone()
    rows[1] = NAN
    device = Device(num_drafts=1)
    device.place(1, num_tokens=10, drafts=[5])
    rounds = [round_of(1, max_drafts=1)]
    decided = device.decide(rounds, device.lay_out(plan_of(rounds)), rows)
    params = [SamplingParams(temperature=0.0)]
    assert launched(decided, ["r1"], params).result().sampled["r1"].token_ids == (0,)


def test_the_executor_hands_the_sentence_on_as_it_is():
    def fails():
        raise StepFailed("one sentence")

    worker = SimpleNamespace(launch=lambda plan: SimpleNamespace(result=fails))
    executor = Executor(lambda: worker)
    with pytest.raises(StepFailed, match=r"^one sentence$"):
        executor.launch(None).result()
    executor.close()
