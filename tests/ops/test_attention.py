"""Attention operators against loops over single tokens and entries."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops import arithmetic, attention, quant
from deepinfer.ops.attention import CompressorWeights, IndexStore, Span, Spans
from deepinfer.ops.norm import Rotation, rope_frequencies, rotate

HEAD_DIM, INDEX_DIM, INDEX_HEADS, PAGE_ENTRIES = 32, 32, 3, 4
PAGE_IDS = [5, 2, 7, 1, 8, 3, 6, 4]


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def rotation_at(positions):
    return Rotation.at(torch.as_tensor(positions), rope_frequencies(16, 100.0, None))


# ----------------------------------------------------------------------------------------------------------------- choosing


def in_chunks(chunks, positions):
    nothing = torch.empty(0, dtype=torch.int64)
    return Spans(chunks=tuple(chunks), round_pages=(), first_pages=nothing, round_rows=nothing.view(0, 0), positions=positions)


class Indexed:
    """A step of two requests over one store: one chunk starts at position 0, the other later."""

    def __init__(self, rng, ratio, *, coarse):
        self.ratio = ratio
        starts, rows, pages = (0, 11), (9, 6), (3, 5)
        records = quant.encode_index(normal(rng, 9 * PAGE_ENTRIES, INDEX_DIM)).unflatten(0, (9, PAGE_ENTRIES))
        split = INDEX_DIM // 2
        self.store = IndexStore(
            values=records[..., :split].contiguous(),
            scales=records[..., split:].contiguous(),
            ratio=ratio,
            head_dim=INDEX_DIM,
        )
        self.page_ids = torch.tensor(PAGE_IDS)
        self.spans = tuple(
            Span(first_row=first_row, num_rows=num_rows, start=start, first_page=first_page, num_pages=num_pages)
            for first_row, num_rows, start, first_page, num_pages in zip(
                (0, rows[0]), rows, starts, (0, pages[0]), pages, strict=True
            )
        )
        self.q = quant.round_mxfp4(normal(rng, sum(rows), INDEX_HEADS, INDEX_DIM))
        self.weights = normal(rng, sum(rows), INDEX_HEADS)
        if coarse:  # many equal scores: zero heads, and whole numbers
            self.q = self.q.sign() * (torch.arange(INDEX_DIM) < 2)
            self.weights = self.weights.round()

    @property
    def arguments(self):
        positions = torch.tensor([position for _, _, position, _ in self.tokens()])
        return self.q, self.weights, self.store, self.page_ids, in_chunks(self.spans, positions)

    def tokens(self):
        """(row, span, position, scores of all visible entries) of every token."""
        for span in self.spans:
            for offset in range(span.num_rows):
                row, position = span.first_row + offset, span.start + offset
                yield row, span, position, [self.score(row, span, entry) for entry in range((position + 1) // self.ratio)]

    def score(self, row, span, entry):
        page = PAGE_IDS[span.first_page + entry // PAGE_ENTRIES]
        at = page, entry % PAGE_ENTRIES
        key = quant.decode_index(torch.cat([self.store.values[at], self.store.scales[at]]), INDEX_DIM, torch.float64)
        return sum(self.weights[row, head].item() * max(0, (self.q[row, head] @ key).item()) for head in range(INDEX_HEADS))


def best(scores, count, allowed=None):
    """Indices of the highest scores, ascending; equal scores by lower index."""
    candidates = range(len(scores)) if allowed is None else allowed
    return sorted(sorted(candidates, key=lambda index: (-round(scores[index], 9), index))[:count])


def padded(entries, count):
    return entries + [-1] * (count - len(entries))


def best_blocks(scores, count, size):
    blocks = [max(scores[first : first + size]) for first in range(0, len(scores), size)]
    if blocks:
        blocks[-1] = math.inf
    return best(blocks, count)


@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_topk_takes_the_best_visible_entries(ratio, top_k, coarse, seed):
    case = Indexed(np.random.default_rng(seed), ratio, coarse=coarse)
    found = attention.index_topk(*case.arguments, top_k)
    for row, span, _, scores in case.tokens():
        expected = [span.first_page * PAGE_ENTRIES + entry for entry in best(scores, top_k)]
        assert found[row].tolist() == padded(expected, top_k)


@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("top_blocks", "size"), [(1, 4), (3, 4), (2, 3), (30, 2)])
def test_blocks_are_the_best_with_the_newest_always_among_them(ratio, top_blocks, size, coarse, seed):
    case = Indexed(np.random.default_rng(seed), ratio, coarse=coarse)
    rows, blocks = attention.index_blocks(*case.arguments, 5, top_blocks, size)
    assert torch.equal(rows, attention.index_topk(*case.arguments, 5))
    for row, _, _, scores in case.tokens():
        assert blocks[row].tolist() == padded(best_blocks(scores, top_blocks, size), top_blocks)


@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize(("top_blocks", "size"), [(2, 4), (3, 2), (30, 2)])
def test_topk_within_stays_inside_each_tokens_blocks(top_blocks, size, coarse, seed):
    case = Indexed(np.random.default_rng(seed), 1, coarse=coarse)
    _, blocks = attention.index_blocks(*case.arguments, 5, top_blocks, size)
    found = attention.index_topk_within(*case.arguments, 5, blocks, size)
    for row, span, _, scores in case.tokens():
        own = best_blocks(scores, top_blocks, size)
        allowed = [entry for entry in range(len(scores)) if entry // size in own]
        expected = [span.first_page * PAGE_ENTRIES + entry for entry in best(scores, 5, allowed)]
        assert found[row].tolist() == padded(expected, 5)


class Grouped:
    """The same tokens of many requests, as chunks and as rounds.

    Contexts have 0 to 20 tiles of keys.  Some neighbours are scored together, others apart.
    """

    def __init__(self, rng, ratio, *, coarse, width):
        starts = rng.permutation([0, 1, 6, 37, 90, 150, 151, 700, 1100, 1300]).tolist()
        counts = rng.integers(1, width + 1, len(starts)).tolist()
        num_pages = [-(-((start + count) // ratio) // PAGE_ENTRIES) or 1 for start, count in zip(starts, counts, strict=True)]
        total, pool = sum(counts), sum(num_pages) + 1
        records = quant.encode_index(normal(rng, pool * PAGE_ENTRIES, INDEX_DIM)).unflatten(0, (pool, PAGE_ENTRIES))
        split = INDEX_DIM // 2
        store = IndexStore(values=records[..., :split], scales=records[..., split:], ratio=ratio, head_dim=INDEX_DIM)
        q, weights = quant.round_mxfp4(normal(rng, total, INDEX_HEADS, INDEX_DIM)), normal(rng, total, INDEX_HEADS)
        if coarse:
            q, weights = q.sign() * (torch.arange(INDEX_DIM) < 2), weights.round()
        self.shared = q, weights, store, 1 + torch.from_numpy(rng.permutation(pool - 1))
        rows, pages = np.cumsum([0, *counts]).tolist(), np.cumsum([0, *num_pages]).tolist()
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        chunks = [
            Span(first_row=rows[i], num_rows=counts[i], start=starts[i], first_page=pages[i], num_pages=num_pages[i])
            for i in range(len(starts))
        ]
        self.chunks = in_chunks(chunks, positions)
        self.spans = []
        for first in (0, 1, 4):  # some requests are chunks
            places = torch.tensor(rows[first:-1]).unsqueeze(1) + torch.arange(width)
            is_token = torch.arange(width) < torch.tensor(counts[first:]).unsqueeze(1)
            rounds = {
                "round_pages": tuple(num_pages[first:]),
                "first_pages": torch.tensor(pages[first:-1]),
                "round_rows": torch.where(is_token, places, total),
            }
            self.spans.append(Spans(chunks=tuple(chunks[:first]), positions=positions, **rounds))

    def check(self, operator, *args):
        """Every mix of chunks and rounds gives the chunks' result."""
        expected = operator(*self.shared, self.chunks, *args)
        for spans in self.spans:
            found = operator(*self.shared, spans, *args)
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            assert all(torch.equal(one, other) for one, other in pairs)
        return expected


@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("width", [1, 6, 30])
@pytest.mark.parametrize("ratio", [1, 2])
def test_tokens_of_rounds_choose_what_they_choose_in_chunks(ratio, width, coarse, seed):
    case = Grouped(np.random.default_rng(seed), ratio, coarse=coarse, width=width)
    runs = list(attention._runs(case.spans[0].round_pages, PAGE_ENTRIES))
    assert 1 < len(runs) < len(case.spans[0].round_pages)
    case.check(attention.index_topk, 9)
    _, blocks = case.check(attention.index_blocks, 9, 7, 4)
    case.check(attention.index_topk_within, 9, blocks, 4)


def test_padding_rows_choose_nothing(seed):
    case = Grouped(np.random.default_rng(seed), 1, coarse=False, width=6)
    q, weights, store, page_ids = case.shared
    spans = case.spans[0]
    total = len(spans.positions)
    padded = dataclasses.replace(
        spans,
        positions=torch.cat([spans.positions, torch.zeros(3, dtype=torch.int64)]),
        round_rows=torch.where(spans.round_rows == total, total + 3, spans.round_rows),
    )
    q, weights = (torch.cat([each, torch.full_like(each[:3], 1e3)]) for each in (q, weights))
    found = attention.index_topk(q, weights, store, page_ids, padded, 9)
    assert torch.equal(found[:total], attention.index_topk(*case.shared, spans, 9))
    assert (found[total:] == -1).all()


@given(
    st.lists(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0, 2.5]), min_size=7, max_size=7), min_size=1), st.integers(1, 9)
)
def test_best_columns_of_any_scores(scores, count):
    found = attention._best(torch.tensor(scores), count)
    for row, values in zip(found.tolist(), scores, strict=True):
        finite = [index for index, value in enumerate(values) if value > -math.inf]
        assert row == padded(best(values, count, finite), count)


def test_scores_of_many_heads_and_keys_are_the_formula(seed):
    """More than one tile of 64 (token, head) pairs and 64 keys."""
    rng = np.random.default_rng(seed)
    heads, num_tokens, start = 7, 30, 150
    records = quant.encode_index(normal(rng, 20 * 10, INDEX_DIM)).unflatten(0, (20, 10))
    split = INDEX_DIM // 2
    store = IndexStore(values=records[..., :split], scales=records[..., split:], ratio=1, head_dim=INDEX_DIM)
    q, weights = normal(rng, num_tokens, heads, INDEX_DIM), normal(rng, num_tokens, heads)
    span = Span(first_row=0, num_rows=num_tokens, start=start, first_page=0, num_pages=18)
    found = attention._score_chunk(q, weights, store, torch.arange(1, 19), span).scores
    keys = quant.decode_index(records[1:19].flatten(0, 1)[:180], INDEX_DIM, torch.float64)
    expected = (torch.einsum("thd,ed->the", q, keys).clamp_min(0) * weights[..., None]).sum(1)
    positions = start + torch.arange(num_tokens)
    expected[torch.arange(180) > positions[:, None]] = -math.inf
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_query_is_rotated_rounded_and_its_weights_scaled(seed):
    rng = np.random.default_rng(seed)
    latent, x, weights_proj = normal(rng, 5, 64), normal(rng, 5, 96), normal(rng, INDEX_HEADS, 96)
    wq_b = quant.repack_fp8(*quant.pack_fp8(normal(rng, INDEX_HEADS * INDEX_DIM, 64)), torch.float64)
    rotation = rotation_at(range(5))
    q, weights = attention.index_query(quant.RoundedRows(latent), x, wq_b, weights_proj, rotation)
    for head in range(INDEX_HEADS):
        own = latent @ wq_b.dense[head * INDEX_DIM : (head + 1) * INDEX_DIM].T
        assert torch.allclose(q[:, head], quant.round_mxfp4(rotate(own, rotation)), rtol=0, atol=1e-12)
    assert torch.allclose(weights, x @ weights_proj.T / math.sqrt(INDEX_DIM * INDEX_HEADS), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------- compressing


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_follow_the_formula(ratio, seed):
    rng = np.random.default_rng(seed)
    hidden, num_tokens = 96, 6
    weights = CompressorWeights(
        kv=normal(rng, HEAD_DIM * ratio, hidden),
        norm=normal(rng, HEAD_DIM),
        index_key=normal(rng, INDEX_DIM, HEAD_DIM),
        index_norm=normal(rng, INDEX_DIM),
        ratio=ratio,
        eps=1e-20,
    )
    x, older = normal(rng, num_tokens, hidden), normal(rng, num_tokens, hidden)
    rotation = rotation_at(range(num_tokens))
    raw = attention.compress_project(x, weights)
    previous = attention.compress_project(older, weights) if ratio == 2 else None
    main, index = attention.compress(raw, previous, weights, rotation, torch.float64)

    def normed(v, weight):
        return v / v.square().mean(-1, keepdim=True).sqrt() * weight

    pooled = x @ weights.kv[:HEAD_DIM].T
    if ratio == 2:
        values = torch.stack([older @ weights.kv[:HEAD_DIM].T, pooled])
        gates = torch.stack([each @ weights.kv[HEAD_DIM:].T for each in (older, x)])
        pooled = (torch.softmax(gates, 0) * values).sum(0)
    latent = normed(pooled, weights.norm)
    key = normed(latent @ weights.index_key.T, weights.index_norm)
    assert torch.equal(main, quant.encode_main(rotate(latent, rotation)))
    assert torch.equal(index, quant.encode_index(rotate(key, rotation)))


def test_a_group_with_extreme_gates_equals_one_of_its_tokens(seed):
    rng = np.random.default_rng(seed)
    raw, previous = normal(rng, 2, 2 * HEAD_DIM), normal(rng, 2, 2 * HEAD_DIM)
    raw[:, HEAD_DIM:], previous[:, HEAD_DIM:] = torch.tensor([[5000.0], [-5000.0]]), 0
    ones = torch.ones(HEAD_DIM, dtype=torch.float64)
    weights = CompressorWeights(kv=torch.empty(0), norm=ones, index_key=torch.diag(ones), index_norm=ones, ratio=2, eps=1e-20)
    main, _ = attention.compress(raw, previous, weights, rotation_at([0, 0]), torch.float64)
    for row, winner in ((0, raw), (1, previous)):
        value = winner[row : row + 1, :HEAD_DIM]
        expected = quant.encode_main(value / value.square().mean(-1, keepdim=True).sqrt())
        assert torch.equal(main[row : row + 1], expected)


# ----------------------------------------------------------------------------------------------------------------- attending


class Attended:
    """Tokens with window keys and chosen entries; some lists are short."""

    def __init__(self, rng, num_tokens, *, num_entries, dtype=torch.float64, top_k=6, num_window=8):
        self.positions = rng.integers(0, 1000, num_tokens)
        self.q = normal(rng, num_tokens, 4, HEAD_DIM).to(dtype)
        self.sinks = normal(rng, 4).to(arithmetic.accumulation_dtype(self.q))
        self.window = quant.encode_window(normal(rng, 20, HEAD_DIM))
        self.window_idx = torch.from_numpy(rng.integers(0, 20, (num_tokens, num_window)))
        short = rng.integers(1, num_window + 1, num_tokens)
        self.window_idx[torch.arange(num_window) < num_window - torch.from_numpy(short)[:, None]] = -1
        self.store = self.entry_idx = None
        self.page_ids = torch.tensor(PAGE_IDS)
        if num_entries:
            records = quant.encode_main(normal(rng, 9 * PAGE_ENTRIES, HEAD_DIM))
            self.store = records.unflatten(0, (9, PAGE_ENTRIES))
            chosen = [np.sort(rng.choice(num_entries, top_k, replace=False)) for _ in range(num_tokens)]
            self.entry_idx = torch.from_numpy(np.stack(chosen))
            self.entry_idx[torch.arange(top_k) >= torch.from_numpy(rng.integers(0, top_k + 1, num_tokens))[:, None]] = -1
        frequencies = rope_frequencies(16, 100.0, None).to(self.sinks.dtype)
        self.rotation = Rotation.at(torch.from_numpy(self.positions), frequencies)

    def run(self):
        return attention.sparse_attention(
            self.q, self.rotation, self.sinks, self.window, self.window_idx, self.store, self.page_ids, self.entry_idx
        )

    def keys(self, token):
        rows = [row for row in self.window_idx[token].tolist() if row >= 0]
        keys = [quant.decode_window(self.window[row], HEAD_DIM, torch.float64) for row in rows]
        if self.store is not None:
            for row in self.entry_idx[token].tolist():
                if row >= 0:
                    record = self.store[PAGE_IDS[row // PAGE_ENTRIES], row % PAGE_ENTRIES]
                    keys.append(quant.decode_main(record, HEAD_DIM, torch.float64))
        return torch.stack(keys)


@pytest.mark.parametrize("num_entries", [0, 8, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 25])
def test_attention_is_a_softmax_over_window_entries_and_sink(num_tokens, num_entries, seed):
    case = Attended(np.random.default_rng(seed), num_tokens, num_entries=num_entries)
    found = case.run()
    for token in range(num_tokens):
        own = case.rotation.rows(torch.tensor([token]))
        q, keys = rotate(case.q[token : token + 1], own)[0], case.keys(token)
        expected = torch.empty(1, 4, HEAD_DIM, dtype=torch.float64)
        for head in range(4):
            scores = keys @ q[head] / math.sqrt(HEAD_DIM)
            shares = torch.softmax(torch.cat([scores, case.sinks[head : head + 1]]), 0)[:-1]
            expected[0, head] = shares @ keys
        assert torch.allclose(found[token], rotate(expected, own.inverse())[0], rtol=0, atol=1e-12)


def test_memory_at_padded_indices_does_not_matter(seed):
    case = Attended(np.random.default_rng(seed), 6, num_entries=32)
    expected = case.run()
    read = torch.zeros(9 * PAGE_ENTRIES, dtype=torch.bool)
    for row in case.entry_idx.flatten().tolist():
        if row >= 0:
            read[PAGE_IDS[row // PAGE_ENTRIES] * PAGE_ENTRIES + row % PAGE_ENTRIES] = True
    case.store.flatten(0, 1)[~read] = 0x7F  # NaN as a scale
    unread = sorted(set(range(20)) - set(case.window_idx.flatten().tolist()))
    case.window[unread] = 0x7F
    assert torch.equal(case.run(), expected)


def test_huge_scores_neither_overflow_nor_vanish(seed):
    case = Attended(np.random.default_rng(seed), 4, num_entries=8, dtype=torch.bfloat16)
    case.q *= 1e4
    assert case.run().isfinite().all()
    case.sinks.fill_(-1e30)
    assert case.run().isfinite().all()
    case.sinks.fill_(1e30)
    assert torch.equal(case.run(), torch.zeros_like(case.q))


def test_production_attention_is_near_the_exact(seed):
    exact = Attended(np.random.default_rng(seed), 9, num_entries=32)
    rounded = Attended(np.random.default_rng(seed), 9, num_entries=32, dtype=torch.bfloat16)
    exact.q = rounded.q.double()
    error = (rounded.run().double() - exact.run()).square().mean().sqrt()
    assert error < attention.sparse_attention.tolerance * exact.run().square().mean().sqrt()
