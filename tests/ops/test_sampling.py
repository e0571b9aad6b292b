"""Sampling, verification and draft scheduling: exact distributions, exact ties, and independent rows."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.ops import arithmetic, sampling
from deepinfer.ops.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    EMIT_STREAM,
    SamplingRows,
    gumbel_noise,
    markov_step,
    noise_bits,
    penalise,
    schedule_lengths,
    token_logprobs,
    top_logprobs,
    uniform_noise,
    verify,
    verify_coupled,
)
from tests.ops.plain_sampling import process_logits, sample

INF = math.inf
SMALL_P = 1e-3
"""A test fails if its statistic is less probable; seeds are fixed, so a test that passes once always passes."""


def make_rows(n, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seeds=None, filters=True):
    """Parameters of n rows; a scalar holds for all of them."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(n).clone()

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=torch.arange(n) * 7919 + 1 if seeds is None else column(seeds, torch.int64),
        filters=filters,
    )


def generator(seed):
    return torch.Generator().manual_seed(seed)


def chi_square_p(observed, expected):
    """Probability of a deviation as large as this; both [cells], expected with positive entries."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2, dtype=torch.float64), statistic / 2).item()


# ----------------------------------------------------------------------------------------------------------------------- noise


def python_bits(seed, position, stream, draft_idx, sub):
    """The noise bits, computed with unbounded integers."""
    full, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x &= full
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & full
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & full
        return x ^ (x >> 31)

    state = mix(seed + golden)
    for word in (position + 1, stream + 256 * draft_idx, sub + 1):
        state = mix(state + word * golden)
    return state


@settings(deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**20),
    st.sampled_from([DRAFT_STREAM, ACCEPT_STREAM, EMIT_STREAM]),
    st.integers(0, 7),
    st.integers(0, 129279),
)
def test_noise_equals_the_same_arithmetic_in_unbounded_integers(seed, position, stream, draft_idx, sub):
    signed = seed - 2**64 if seed >= 2**63 else seed
    for dtype in (torch.int64, torch.int32):
        bits = noise_bits(torch.tensor([signed]), torch.tensor([position], dtype=dtype), stream, draft_idx, torch.tensor([sub]))
        assert bits.item() % 2**64 == python_bits(seed, position, stream, draft_idx, sub)


def test_bits_start_the_published_splitmix_sequence():
    # First outputs of SplitMix64 for state 0.
    state = torch.zeros(3, dtype=torch.int64)
    steps = torch.arange(1, 4) * sampling._GOLDEN
    assert [word % 2**64 for word in sampling._mix(state + steps).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_uniforms_stay_inside_the_open_interval():
    low, high = uniform_noise(torch.tensor([0, -1])).tolist()
    assert low == 2.0**-53
    assert high == 1 - 2.0**-53


def test_noise_of_neighbouring_keys_is_uniform_and_unrelated():
    seeds, positions, subs = torch.arange(40), torch.arange(50), torch.arange(60)
    grids = {
        (stream, k): uniform_noise(noise_bits(seeds[:, None, None], positions[:, None], stream, k, subs))
        for stream, k in ((DRAFT_STREAM, 1), (DRAFT_STREAM, 2), (ACCEPT_STREAM, 0), (EMIT_STREAM, 0))
    }
    flats = [grid.flatten() for grid in grids.values()]
    pairs = list(itertools.combinations(flats, 2))
    for dim in range(3):
        grid = grids[EMIT_STREAM, 0]
        steps = grid.shape[dim] - 1
        pairs.append((grid.narrow(dim, 0, steps).flatten(), grid.narrow(dim, 1, steps).flatten()))
    cells = [(flat * 64).long() for flat in flats] + [(one * 8).long() * 8 + (other * 8).long() for one, other in pairs]
    chances = [
        chi_square_p(torch.bincount(cell, minlength=64).double(), torch.full((64,), len(cell) / 64).double()) for cell in cells
    ]
    assert min(chances) > SMALL_P / len(chances)  # the smallest of many statistics is small by chance


def test_gumbel_noise_has_its_distribution():
    noise = gumbel_noise(torch.arange(20), torch.arange(20), EMIT_STREAM, 0, 10000).flatten()
    cells = (torch.exp(-torch.exp(-noise)) * 50).long()
    counts = torch.bincount(cells, minlength=50).double()
    assert chi_square_p(counts, torch.full((50,), 200000 / 50, dtype=torch.float64)) > SMALL_P


# ------------------------------------------------------------------------------------------------------------------ processing


def python_process(logits, temperature, top_k, top_p, min_p):
    """Kept ids of one row, and the scaled logits, one token at a time."""
    greedy = temperature < 1e-5 or top_k == 1
    scaled = list(logits) if greedy else [x / temperature for x in logits]
    order = sorted((i for i in range(len(scaled)) if scaled[i] > -INF), key=lambda i: (-scaled[i], i))
    if greedy:
        return set(order), scaled
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    kept = [i for i in order if weight[i] >= min_p]
    kept = kept[:top_k] if top_k >= 1 else kept
    if top_p < 1:
        total, before, short = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if before >= top_p * total:
                break
            short.append(i)
            before += weight[i]
        kept = short
    return set(kept), scaled


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-4, 4), min_size=7, max_size=7),
            st.lists(st.booleans(), min_size=7, max_size=7),
            st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            st.sampled_from([-1, 0, 1, 2, 3, 7, 50]),
            st.sampled_from([0.01, 0.33, 0.5, 0.77, 1.0]),
            st.sampled_from([0.0, 0.11, 0.6, 1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_filters_keep_what_a_token_by_token_reading_of_the_rules_keeps(cases):
    logits = torch.tensor([case[0] for case in cases], dtype=torch.float32)
    mask = torch.tensor([case[1] for case in cases])
    mask[:, 3] = True  # at least one token is always allowed
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*(case[2:] for case in cases), strict=True))
    rows = make_rows(len(cases), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = process_logits(logits, rows, mask=mask)
    for i, row in enumerate(got.tolist()):
        allowed = [x if ok else -INF for x, ok in zip(logits[i].tolist(), mask[i].tolist(), strict=True)]
        kept, scaled = python_process(allowed, temperature[i], top_k[i], rows.top_p[i].item(), rows.min_p[i].item())
        assert row == [scaled[j] if j in kept else -INF for j in range(7)]


def test_filters_renormalise_in_turn():
    # p = .4 .3 .2 .1: min_p .3 leaves .4 .3 .2; top_k 2 leaves .4 .3, i.e. 4/7 and 3/7; top_p .55 then keeps only
    # the first.  Of the unfiltered tokens it would keep two.
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    alone = process_logits(logits, make_rows(1, top_p=0.55))
    together = process_logits(logits, make_rows(1, top_p=0.55, top_k=2, min_p=0.3))
    assert torch.isfinite(alone[0]).tolist() == [False, True, False, True]
    assert torch.isfinite(together[0]).tolist() == [False, True, False, False]


def test_equal_logits_at_a_border_are_kept_by_lower_id():
    logits = torch.zeros(3, 5)
    rows = make_rows(3, top_k=[2, -1, 4], top_p=[1.0, 0.5, 0.5])
    assert torch.isfinite(process_logits(logits, rows)).int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0],
    ]


def test_bias_comes_before_mask_and_temperature():
    logits, bias = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 0.0, INF]])
    mask = torch.tensor([[True, True, False]])
    assert process_logits(logits, make_rows(1, temperature=0.5), bias, mask).tolist() == [[10.0, 4.0, -INF]]


def test_rows_without_filters_have_the_same_bits_with_filters_false():
    logits = torch.randn(5, 300, generator=generator(1)) * 4
    settings_ = {"temperature": [0.0, 0.3, 0.7, 1.0, 1.9]}
    assert torch.equal(
        process_logits(logits, make_rows(5, **settings_)), process_logits(logits, make_rows(5, **settings_, filters=False))
    )


def test_half_precision_logits_are_processed_wide_and_double_stays_double():
    logits = torch.randn(2, 9, generator=generator(2))
    assert process_logits(logits.bfloat16(), make_rows(2)).dtype == torch.float32
    assert process_logits(logits.double(), make_rows(2)).dtype == torch.float64


# ------------------------------------------------------------------------------------------------------------------- penalties


def python_penalise(logits, prompt, output, repetition, frequency, presence):
    """One row, one token at a time; the rules count in the texts themselves."""
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token)
        value -= presence * (token in output)
        result.append(value)
    return result


TEXT = st.lists(st.integers(0, 5), max_size=9)
PENALTY = st.sampled_from([0.0, 0.25, 1.5, 2.0, -2.0])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([-INF, -3.0, -0.5, 0.0, 0.5, 3.0]), min_size=6, max_size=6),
            TEXT,
            TEXT,
            st.sampled_from([1.0, 1.25, 0.5, 8.0]),
            PENALTY,
            PENALTY,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_penalties_equal_a_reading_of_the_texts_token_by_token(cases):
    logits, prompts, outputs, *penalties = (list(column) for column in zip(*cases, strict=True))
    for dtype in (torch.float32, torch.float64):
        got = penalise(
            torch.tensor(logits, dtype=dtype),
            torch.tensor([[text.count(token) for token in range(6)] for text in outputs], dtype=torch.int32),
            torch.tensor([[token in text for token in range(6)] for text in prompts]),
            *(torch.tensor(values) for values in penalties),
        )
        assert got.dtype == dtype
        for row, case in zip(got.tolist(), cases, strict=True):
            assert row == pytest.approx(python_penalise(*case), abs=1e-6)


def test_neutral_penalties_and_absent_tokens_change_no_bit():
    logits = torch.randn(3, 400, generator=generator(90)) * 20
    logits[:, ::7], logits[:, 1::7] = -INF, -0.0
    counts = torch.randint(0, 3, (3, 400), generator=generator(91), dtype=torch.int32)
    seen = torch.rand(3, 400, generator=generator(92)) < 0.5
    one, zero = torch.ones(3), torch.zeros(3)
    assert torch.equal(penalise(logits, counts, seen, one, zero, zero).view(torch.int32), logits.view(torch.int32))
    got = penalise(logits, counts, seen, one * 1.7, zero + 0.3, zero + 0.9)
    absent = (counts == 0) & ~seen
    assert torch.equal(got.view(torch.int32)[absent], logits.view(torch.int32)[absent])
    assert (got[~absent & logits.isfinite()] != logits[~absent & logits.isfinite()]).float().mean() > 0.8


# ---------------------------------------------------------------------------------------------------------- drawing, log-probs


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}], ids=str
)
def test_draws_have_the_processed_law(params):
    n = 20000
    logits = torch.randn(1, 8, generator=generator(3)) * 1.5
    rows = make_rows(n, seeds=77, **params)
    ids, _ = sample(logits.expand(n, -1), rows, torch.arange(n))
    law = torch.softmax(process_logits(logits, make_rows(1, **params)).double(), -1)[0]
    counts = torch.bincount(ids, minlength=8).double()
    assert counts[law == 0].sum() == 0
    assert chi_square_p(counts[law > 0], n * law[law > 0]) > SMALL_P


def test_a_draw_is_the_best_of_logits_plus_noise_keyed_by_vocabulary_id():
    logits = torch.randn(6, 50, generator=generator(4))
    rows, positions = make_rows(6), torch.arange(6) * 3 + 5
    ids, _ = sample(logits, rows, positions)
    for i in range(6):
        scores = []
        for token in range(50):
            bits = python_bits(rows.seeds[i].item(), positions[i].item(), EMIT_STREAM, 0, token)
            u = ((bits >> 12) + 0.5) / 2**52
            scores.append(logits[i, token].item() - math.log(-math.log(u)))
        assert ids[i].item() == scores.index(max(scores))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1}], ids=str)
def test_greedy_rows_take_the_lowest_of_equal_maxima_whatever_the_other_settings(params):
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]]).repeat(64, 1)
    ids, _ = sample(logits, make_rows(64, top_p=0.01, min_p=0.9, **params), torch.arange(64))
    assert ids.tolist() == [1] * 64


def test_close_logits_do_not_merge_in_a_row_made_greedy_by_top_k():
    # Divided by the temperature the two become equal in fp32, and the lower id would win.
    below = torch.tensor(1.9999001026153564)
    pair = torch.stack([below, torch.nextafter(below, torch.tensor(2.0))])
    assert pair[0] < pair[1]
    assert len(set((pair / 1.9).tolist())) == 1
    ids, _ = sample(pair[None], make_rows(1, top_k=1, temperature=1.9), torch.tensor([9]))
    assert ids.tolist() == [1]


def test_reported_logprob_is_raw_and_floored():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, -INF, -2.0e4]])
    mask = torch.tensor([[True, False, False], [False, False, True]])
    ids, logprobs = sample(logits, make_rows(2, temperature=0.2), torch.tensor([3, 4]), mask=mask)
    assert ids.tolist() == [0, 2]
    assert logprobs[0].item() == pytest.approx(-math.log(1 + math.e + math.e**2), abs=1e-6)
    assert logprobs[1].item() == -9999.0
    assert token_logprobs(logits, torch.tensor([-1, 1])).tolist() == [-9999.0, -9999.0]
    processed = process_logits(logits, make_rows(2, temperature=0.2), mask=mask)
    assert token_logprobs(processed, ids).tolist() == [0.0, 0.0]


def test_top_logprobs_are_sorted_with_ties_by_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, -INF]])
    ids, logprobs = top_logprobs(logits, 5)
    assert ids.tolist() == [[1, 2, 0, 4, 3], [0, 1, 2, 3, 4]]
    assert logprobs[1].tolist() == [pytest.approx(-math.log(4))] * 4 + [-9999.0]
    assert torch.equal(top_logprobs(logits, 2)[1], logprobs[:, :2])
    assert torch.equal(token_logprobs(logits, ids[:, 1]), logprobs[:, 1])


@pytest.mark.parametrize("width", [1, 255, 257, 40000])
def test_a_long_row_is_summed_alone_as_in_a_batch_bit_for_bit(width):
    x = torch.rand(6, width, generator=generator(12))
    whole = arithmetic.row_sum(x)
    assert whole.squeeze(-1).tolist() == pytest.approx(x.double().sum(-1).tolist(), rel=1e-6)
    for i in range(6):
        assert torch.equal(arithmetic.row_sum(x[i : i + 1].clone()), whole[i : i + 1])


# 40000 is more than torch sums in one thread; 37 leaves a vector's tail.
@pytest.mark.parametrize("vocab", [37, 40000])
def test_a_row_is_sampled_alone_as_in_a_batch_bit_for_bit(vocab):
    gen = generator(5)
    logits = torch.randn(7, vocab, generator=gen) * 3
    mask = torch.rand(7, vocab, generator=gen) < 0.9
    rows = make_rows(
        7,
        temperature=[0.0, 0.7, 1.0, 1.3, 1.0, 0.9, 2.0],
        top_k=[-1, 5, -1, 20, 1, -1, -1],
        top_p=[0.9, 0.8, 0.95, 1.0, 0.5, 1.0, 0.9],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.01],
    )
    positions = torch.arange(7) * 11
    whole = (process_logits(logits, rows, mask=mask), *sample(logits, rows, positions, mask=mask), *top_logprobs(logits, 6))
    for start, stop in ((0, 1), (2, 3), (6, 7), (1, 4), (0, 6)):
        part = slice(start, stop)
        some, few = rows.take(torch.arange(start, stop)), logits[part].clone()
        alone = (
            process_logits(few, some, mask=mask[part]),
            *sample(few, some, positions[part], mask=mask[part]),
            *top_logprobs(few, 6),
        )
        for expected, got in zip(whole, alone, strict=True):
            assert torch.equal(expected[part], got)


# ---------------------------------------------------------------------------------------------------------------- verification


def python_verify(p_rows, drafts, q_rows, row):
    """One request by the rules of the paper, with the operator's noise.

    Args:
        p_rows: n + 1 lists of processed probabilities.
        drafts: n ids.
        q_rows: n lists of probabilities, or None.
        row: seed, anchor position, greedy.
    """
    seed, anchor, greedy = row

    def uniform(position, stream, sub):
        return ((python_bits(seed, position, stream, 0, sub) >> 12) + 0.5) / 2**52

    def draw(weights, position):
        scores = [
            math.log(w) - math.log(-math.log(uniform(position, EMIT_STREAM, v))) if w > 0 else -INF for v, w in enumerate(weights)
        ]
        return scores.index(max(scores))

    out = []
    for j, draft in enumerate(drafts):
        p, position = p_rows[j], anchor + 1 + j
        if greedy:
            if draft == p.index(max(p)):
                out.append(draft)
                continue
            return j, [*out, p.index(max(p))]
        if draft < 0:
            return j, [*out, draw(p, position)]
        q = [float(v == draft) for v in range(len(p))] if q_rows is None else q_rows[j]
        if p[draft] > uniform(position, ACCEPT_STREAM, 0) * q[draft]:
            out.append(draft)
            continue
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        return j, [*out, draw(residual if sum(residual) > 1e-8 else p, position)]
    p = p_rows[len(drafts)]
    return len(drafts), [*out, p.index(max(p)) if greedy else draw(p, anchor + 1 + len(drafts))]


def ragged_case(seed, *, vocab=11, width=4, num_requests=60):
    """Requests of every length, greedy requests, missing drafts, filters, masks, padding requests and padding rows."""
    gen = generator(seed)
    lens = torch.randint(-1, width + 1, (num_requests,), generator=gen)
    num_logits = int((lens + 1).sum()) + 5
    draft_logits = torch.randn(num_requests, width, vocab, generator=gen) * 1.5
    draft_ids = (draft_logits + torch.randn(draft_logits.shape, generator=gen)).argmax(-1)
    draft_ids = draft_ids.where(torch.rand(draft_ids.shape, generator=gen) < 0.95, -1)
    target = torch.randn(num_logits, vocab, generator=gen) * 1.5
    # Half of the rows are similar to the drafts, so that some drafts are accepted and some rejected.
    starts = (lens + 1).cumsum(0) - (lens + 1)
    for r, n in enumerate(lens.tolist()):
        for j in range(max(n, 0)):
            if torch.rand((), generator=gen) < 0.6:
                target[starts[r] + j] = draft_logits[r, j] + 0.5 * target[starts[r] + j]
    mask = torch.rand(num_logits, vocab, generator=gen) < 0.85
    mask[:, 0] = True
    rows = make_rows(
        num_requests,
        temperature=torch.tensor([0.0, 0.6, 1.0, 1.0, 1.4])[torch.arange(num_requests) % 5],
        top_k=torch.tensor([-1, -1, 6, 1])[torch.arange(num_requests) % 4],
        top_p=torch.tensor([1.0, 0.9, 1.0])[torch.arange(num_requests) % 3],
    )
    anchors = torch.randint(0, 5000, (num_requests,), generator=gen)
    return target, draft_ids, draft_logits, lens, rows, anchors, mask


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "one-hot"])
def test_verify_equals_the_rule_applied_request_by_request(sampled):
    target, ids, draft_logits, lens, rows, anchors, mask = ragged_case(6)
    target, draft_logits = target.double(), draft_logits.double()
    got = verify(target, ids, draft_logits if sampled else None, lens, rows, anchors, mask=mask)
    start, seen = 0, set()
    for r, n in enumerate(lens.tolist()):
        one = torch.full((n + 1,), r)
        law = torch.softmax(process_logits(target[start : start + n + 1], rows.take(one), mask=mask[start : start + n + 1]), -1)
        start += n + 1
        if n < 0:
            assert got[0][r] == 0
            assert got[1][r].tolist() == [-1] * 5
            continue
        greedy = bool(rows.greedy[r])
        q = torch.softmax(draft_logits[r] / (1 if greedy else rows.temperature[r].double()), -1)
        row = (rows.seeds[r].item(), anchors[r].item(), greedy)
        accepted, tokens = python_verify(law.tolist(), ids[r, :n].tolist(), q.tolist() if sampled else None, row)
        assert got[0][r] == accepted
        assert got[1][r].tolist() == tokens + [-1] * (5 - len(tokens))
        seen.add((accepted, n))
    assert len(seen) > 8  # many pairs (accepted drafts, verified drafts) occurred


def test_padding_rows_and_integer_widths_change_nothing():
    target, ids, draft_logits, lens, rows, anchors, mask = ragged_case(7)
    expected = verify(target, ids, draft_logits, lens, rows, anchors, mask=mask)
    target[-5:], mask[-5:] = torch.nan, False
    got = verify(target, ids.int(), draft_logits, lens.int(), rows, anchors.int(), mask=mask)
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])


@pytest.mark.parametrize("coupled", [True, False])
def test_a_request_is_verified_alone_as_in_a_batch_bit_for_bit(coupled):
    target, ids, draft_logits, lens, rows, anchors, mask = ragged_case(8, vocab=33000, width=2, num_requests=8)

    def run(target, ids, draft_logits, lens, rows, anchors, mask):
        if coupled:
            return verify_coupled(target, ids, lens, rows, anchors, mask=mask)
        return verify(target, ids, draft_logits, lens, rows, anchors, mask=mask)

    counts, emitted = run(target, ids, draft_logits, lens, rows, anchors, mask)
    ends = (lens + 1).cumsum(0)
    for r in range(8):
        one, part = slice(r, r + 1), slice(int(ends[r] - lens[r] - 1), int(ends[r]))
        if part.start == part.stop:
            continue
        alone = run(
            target[part].clone(),
            ids[one],
            draft_logits[one],
            lens[one],
            rows.take(torch.tensor([r])),
            anchors[one],
            mask[part],
        )
        assert torch.equal(alone[0], counts[one])
        assert torch.equal(alone[1], emitted[one])


def test_without_drafts_verification_is_plain_sampling():
    logits = torch.randn(50, 20, generator=generator(9))
    rows = make_rows(50, temperature=torch.tensor([0.0, 1.0])[torch.arange(50) % 2], top_p=0.9)
    anchors = torch.arange(50) * 2
    expected, _ = sample(logits, rows, anchors + 1)
    none = torch.zeros(50, dtype=torch.int64)
    absent = torch.full((50, 2), -1)
    for ids, lens, q in (
        (absent, none, None),
        (absent, none, torch.zeros(50, 2, 20)),
        (absent[:, :0], none, None),
        (absent[:, :1], none, None),
    ):
        counts, emitted = verify(logits, ids, q, lens, rows, anchors)
        assert counts.tolist() == [0] * 50
        assert torch.equal(emitted[:, 0], expected)
        assert bool((emitted[:, 1:] == -1).all())


def test_an_empty_batch_is_no_special_case():
    rows, empty = make_rows(0), torch.zeros(0, dtype=torch.int64)
    for counts, emitted in (
        verify(torch.zeros(0, 5), torch.zeros(0, 3).long(), None, empty, rows, empty),
        verify_coupled(torch.zeros(0, 5), torch.zeros(0, 3).long(), empty, rows, empty),
    ):
        assert counts.shape == (0,)
        assert emitted.shape == (0, 4)
    assert sample(torch.zeros(0, 5), rows, empty)[0].shape == (0,)
    assert schedule_lengths(torch.zeros(0, 3), 4, empty).shape == (0,)


def test_equal_laws_accept_always_and_disjoint_laws_never():
    n, gen = 500, generator(10)
    logits = torch.randn(n, 2, 6, generator=gen)
    ids = (logits[:, :1] + torch.randn(n, 1, 6, generator=gen)).argmax(-1)
    lens, anchors, rows = torch.ones(n, dtype=torch.int64), torch.arange(n), make_rows(n)
    counts, _ = verify(logits.flatten(0, 1), ids, logits[:, :1], lens, rows, anchors)
    assert counts.tolist() == [1] * n
    target = logits.clone()
    target[:, 0].scatter_(1, ids, -INF)
    counts, emitted = verify(target.flatten(0, 1), ids, None, lens, rows, anchors)
    assert counts.tolist() == [0] * n
    assert not bool((emitted[:, :1] == ids).any())


def test_a_residual_without_mass_falls_back_to_the_target():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    q = torch.softmax(logits, -1)
    rejected = torch.tensor([True])
    assert torch.equal(sampling._emission_weights(logits, q + 1e-10, rejected), logits)
    assert torch.equal(sampling._emission_weights(logits, q - 1e-10, rejected), logits)
    moved = sampling._emission_weights(logits, q - torch.tensor([1e-6, 0.0, 0.0]), rejected)
    assert moved[0, 0].item() == pytest.approx(math.log(1e-6), abs=1e-6)
    assert moved[0, 1:].max().item() < math.log(1e-8)


# --------------------------------------------------------------------------------------------------- verification: whole texts


def toy_logits(tokens, seed, vocab=12):
    """Logits after each prefix of a batch of texts: a function of the last two tokens."""
    table = torch.randn(vocab, vocab, vocab, generator=generator(seed)) * 1.5
    return table[tokens[..., :-1], tokens[..., 1:]]


def plain_texts(rows, length):
    """Texts of all rows, one token per step."""
    text = torch.zeros(len(rows.seeds), 2, dtype=torch.int64)
    for position in range(2, length):
        ids, _ = sample(toy_logits(text[:, -2:], 40)[:, 0], rows, torch.full((len(text),), position))
        text = torch.cat([text, ids[:, None]], 1)
    return text


def drafted_text(rows, row, length, lens, coupled):
    """The text of one row, made by rounds of drafts and verification; and the number of rounds."""
    text, some, rounds, vocab = [0, 0], rows.take(torch.tensor([row])), 0, 12
    zeros = torch.zeros(vocab, 1)
    while len(text) < length:
        anchor, draft, q = torch.tensor([len(text) - 1]), list(text[-2:]), []
        for k in range(1, 4):
            base = toy_logits(torch.tensor([draft[-2:]]), 40)[:, 0] + 0.5 * toy_logits(torch.tensor([draft[-2:]]), 41)[:, 0]
            token, used, _ = markov_step(
                base, torch.tensor([draft[-1]]), zeros, zeros, torch.zeros(1, 1), torch.zeros(1, 2), some, anchor, k,
                "coupled" if coupled else "sampled",
            )  # fmt: skip
            draft.append(int(token))
            q.append(used)
        n = lens[rounds % len(lens)]
        target = toy_logits(torch.tensor(draft[: 2 + n]), 40)
        ids = torch.tensor([draft[2:]])
        if coupled:
            _, emitted = verify_coupled(target, ids, torch.tensor([n]), some, anchor)
        else:
            _, emitted = verify(target, ids, torch.stack(q, 1), torch.tensor([n]), some, anchor)
        text += [token for token in emitted[0].tolist() if token >= 0]
        rounds += 1
    return text[:length], rounds


def test_greedy_text_is_the_same_drafted_and_plain():
    rows = make_rows(4, temperature=[0.0, 1e-6, 1.0, 0.0], top_k=[-1, -1, 1, 3])
    plain = plain_texts(rows, 40)
    for row in range(4):
        text, rounds = drafted_text(rows, row, 40, [3, 0, 1, 2], coupled=False)
        assert text == plain[row].tolist()
        assert rounds < 38  # drafts were accepted


@pytest.mark.parametrize("lens", [[3], [1, 3, 0, 2]], ids=str)
def test_coupled_text_is_the_same_drafted_and_plain_at_any_length(lens):
    rows = make_rows(4, temperature=[0.5, 0.8, 1.0, 0.0], top_p=[1.0, 0.9, 1.0, 1.0])
    plain = plain_texts(rows, 40)
    for row in range(4):
        text, rounds = drafted_text(rows, row, 40, lens, coupled=True)
        assert text == plain[row].tolist()
        assert rounds < 38


# -------------------------------------------------------------------------------------------------------------------- drafting


def markov_case(n, seed=50, vocab=300, rank=24, hidden=70, dtype=torch.float32):
    gen = generator(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return {
        "base_logits": normal(n, vocab),
        "prev": torch.randint(0, vocab, (n,), generator=gen),
        "embed": normal(vocab, rank),
        "head": normal(vocab, rank) / 5,
        "hidden": normal(n, hidden),
        "confidence_weight": normal(1, hidden + rank) / 10,
    }


def test_markov_step_follows_its_formulas():
    n = 5
    case = markov_case(n, dtype=torch.float64)
    rows, anchors = make_rows(n, temperature=[0.0, 0.5, 1.0, 2.0, 1.0], top_k=[-1, -1, -1, -1, 1]), torch.arange(n) * 9
    ids, logits, confidence = markov_step(**case, rows=rows, anchor_positions=anchors, draft_idx=3, mode="sampled")
    for i in range(n):
        e = case["embed"][case["prev"][i]]
        z = case["base_logits"][i] + (case["head"] * e).sum(-1)
        assert (logits[i] - z).abs().max() < 1e-12
        logit = (case["confidence_weight"][0] * torch.cat([case["hidden"][i], e])).sum().item()
        assert confidence[i].item() == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-12)
        if rows.greedy[i]:
            assert ids[i] == z.argmax()
            continue
        noise = gumbel_noise(rows.seeds[i : i + 1], anchors[i : i + 1] + 3, DRAFT_STREAM, 3, 300)[0]
        assert ids[i] == (z / rows.temperature[i] + noise).argmax()
    best, same, _ = markov_step(**case, rows=rows, anchor_positions=anchors, draft_idx=3, mode="argmax")
    assert torch.equal(same, logits)
    assert torch.equal(best, logits.argmax(-1))
    coupled, _, _ = markov_step(**case, rows=make_rows(n), anchor_positions=anchors, draft_idx=3, mode="coupled")
    assert torch.equal(coupled, sample(logits, make_rows(n), anchors + 3)[0])


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_confidence_temperature_divides_the_logit_and_nothing_else(temperature):
    case, rows, anchors = markov_case(4, dtype=torch.float64), make_rows(4), torch.arange(4)
    common = {"rows": rows, "anchor_positions": anchors, "draft_idx": 1, "mode": "sampled"}
    plain = markov_step(**case, **common)
    tempered = markov_step(**case, **common, confidence_temperature=temperature)
    assert torch.equal(tempered[0], plain[0])
    assert torch.equal(tempered[1], plain[1])
    assert torch.allclose(torch.logit(tempered[2]), torch.logit(plain[2]) / temperature, rtol=0, atol=1e-12)


def test_drafts_of_one_position_differ_between_rounds_and_from_the_emitted_token():
    n, flat = 200, torch.zeros(200, 1000)
    rows, zeros = make_rows(n), torch.zeros(1000, 1)
    common = (flat, torch.zeros(n).long(), zeros, zeros, torch.zeros(n, 1), torch.zeros(1, 2), rows)
    draws = [markov_step(*common, torch.full((n,), 10 - k), k, "sampled")[0] for k in (1, 2)]
    draws.append(sample(flat, rows, torch.full((n,), 10))[0])
    for one, other in itertools.combinations(draws, 2):
        assert int((one == other).sum()) < 5  # chance level is 0.2


def test_bf16_tables_are_used_in_fp32():
    case = markov_case(3, dtype=torch.bfloat16)
    rows, anchors = make_rows(3), torch.zeros(3, dtype=torch.int64)
    wide = {name: part.float() if part.is_floating_point() else part for name, part in case.items()}
    narrow_out = markov_step(**case, rows=rows, anchor_positions=anchors, draft_idx=1, mode="sampled")
    wide_out = markov_step(**wide, rows=rows, anchor_positions=anchors, draft_idx=1, mode="sampled")
    for one, other in zip(narrow_out, wide_out, strict=True):
        assert one.dtype in (torch.int64, torch.float32)
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["sampled", "coupled", "argmax"])
def test_a_row_is_drafted_alone_as_in_a_batch_bit_for_bit(mode):
    n = 21  # more than one tile of matmul_rows
    case, rows, anchors = markov_case(n, hidden=5120), make_rows(n, temperature=0.8), torch.arange(n) * 5
    whole = markov_step(**case, rows=rows, anchor_positions=anchors, draft_idx=2, mode=mode)
    batched = {"base_logits", "prev", "hidden"}
    for index in ([0], [7], [20], [18, 3], list(range(17))):
        pick = torch.tensor(index)
        some = {name: part[pick] if name in batched else part for name, part in case.items()}
        alone = markov_step(**some, rows=rows.take(pick), anchor_positions=anchors[pick], draft_idx=2, mode=mode)
        for expected, got in zip(whole, alone, strict=True):
            assert torch.equal(expected[pick], got)


# ------------------------------------------------------------------------------------------------------------------ scheduling

CONFIDENCE = st.sampled_from([0.0, 1e-30, 0.25, 0.5, 0.9, 1.0, math.nan, INF, -INF])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(CONFIDENCE, min_size=3, max_size=3), st.integers(-1, 5)), min_size=1, max_size=4),
    st.integers(0, 14),
)
def test_lengths_spend_the_budget_on_the_likeliest_survivors(requests, budget):
    conf = torch.tensor([c for c, _ in requests])
    caps = torch.tensor([cap for _, cap in requests])
    lens = schedule_lengths(conf, budget, caps).tolist()
    candidates = []
    for r, (c, cap) in enumerate(requests):
        survival = 1.0
        for j in range(min(max(cap, 0), 3)):
            survival *= c[j] if math.isfinite(c[j]) else 0.0
            survival = torch.tensor(survival).item()  # products are fp32: ties there are ties
            candidates.append((-survival, j, r))
    chosen = sorted(candidates)[:budget]
    assert lens == [sum(r == owner for _, _, owner in chosen) for r in range(len(requests))]
    assert torch.equal(schedule_lengths(conf, torch.tensor(budget), caps.int()), torch.tensor(lens))


def test_no_assignment_of_the_same_budget_survives_better():
    conf, caps = torch.rand(4, 3, generator=generator(60)), torch.tensor([3, 1, 2, 3])
    worth = [[0.0, *row] for row in conf.cumprod(-1).double().cumsum(-1).tolist()]
    for budget in range(10):
        lens = schedule_lengths(conf, budget, caps).tolist()
        options = itertools.product(*(range(int(cap) + 1) for cap in caps))
        best = max(sum(worth[r][n] for r, n in enumerate(option)) for option in options if sum(option) == budget)
        assert sum(lens) == budget
        assert sum(worth[r][n] for r, n in enumerate(lens)) == pytest.approx(best, abs=1e-12)


def test_equal_survivals_go_to_earlier_drafts_then_earlier_rows():
    conf, caps = torch.ones(3, 2), torch.tensor([2, 2, 2])
    got = [schedule_lengths(conf, budget, caps).tolist() for budget in range(8)]
    assert got == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2], [2, 2, 2]]


def test_whether_a_draft_is_verified_ignores_later_confidences_of_its_request():
    gen = generator(61)
    for budget in range(1, 9):
        conf, caps = torch.rand(3, 3, generator=gen), torch.tensor([3, 3, 3])
        lens = schedule_lengths(conf, budget, caps)
        for k in range(3):
            other = conf.clone()
            other[1, k + 1 :] = torch.rand(2 - k, generator=gen)
            changed = schedule_lengths(other, budget, caps)
            assert (lens[1] > k) == (changed[1] > k)
