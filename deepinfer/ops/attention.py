"""Attention over two sources of keys: a sliding window of records, and compressed entries that an indexer picks.

Compressed entries of a step are addressed by *step rows*: the pages of all requests of the step stand one behind the other in
``page_ids``; entry e of a request whose first page stands at f is row f * page_entries + e.  A list of rows is ascending and
padded with -1.  A list that could not be chosen because a score is NaN begins with -2, which reads a NaN: a choice among numbers
that are none must not look like a choice.

Source: model report, attention section; ``sliding_window``, ``compress_ratios``, ``index_topk``, ``candidate_*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import accumulation_dtype, linear_bf16, matmul_items, rms_norm, row_sum
from deepinfer.ops.norm import Rotation, rotate
from deepinfer.ops.op import Codes, op
from deepinfer.ops.quant import (
    PackedWeight,
    QuantisedRows,
    decode_index,
    decode_main,
    decode_window,
    encode_index,
    encode_main,
    linear_fp8,
    round_mxfp4,
)

_GATHER_BYTES = 8 << 20
"""Keys gathered at a time in :func:`sparse_attention`: what stays in a CPU's last-level cache."""
_SCORE_ROWS = 64
_SCORE_KEYS = 64
"""Shape of every index score product: query rows (token, head) and keys; fixed, for batch invariance."""
_SCORE_TILES = 1024
"""Most (request, key tile) pairs of one batched index score product."""
_UNKNOWN = -2
"""Entry of a list of rows that could not be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where one chunk stands in a step; plain host numbers.

    Attributes:
        first_row, num_rows: its tokens in the step.
        start: position of the first of them.
        first_page, num_pages: its pages in ``page_ids``.
    """

    first_row: int
    num_rows: int
    start: int
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Whose tokens the rows of a step are.

    Attributes:
        chunks: requests whose rows the host knows; they come first, in order.
        round_pages: [num_rounds] pages of each request whose rows only the device knows: an anchor and drafts.
        first_pages: [num_rounds] int64, where those pages begin in ``page_ids``.
        round_rows: [num_rounds, width] int64, rows of each round's tokens; num_tokens where it has fewer.
        positions: [num_tokens] int64.
    """

    chunks: tuple[Span, ...]
    round_pages: tuple[int, ...]
    first_pages: Tensor
    round_rows: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStore:
    """Views of one layer's index keys in the page pool: all values of a page, then all its scales.

    Attributes:
        values: [num_pages, page_entries, value_bytes] uint8.
        scales: [num_pages, page_entries, scale_bytes] uint8.
        ratio: tokens an entry stands for.
        head_dim: width of a key.
    """

    values: Tensor
    scales: Tensor
    ratio: int
    head_dim: int


# -------------------------------------------------------------------------------------------------------------------- compressor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """Weights of a layer that owns a store, all in the accumulation dtype.

    Attributes:
        kv: [head_dim, hidden] at ratio 1, [2 * head_dim, hidden] (values, then gates) at ratio 2.
        norm: [head_dim].
        index_key: [index_head_dim, head_dim].
        index_norm: [index_head_dim].
        ratio: 1 or 2.
        eps: of both norms.
    """

    kv: Tensor
    norm: Tensor
    index_key: Tensor
    index_norm: Tensor
    ratio: int
    eps: float


@op(tolerance=1e-5)
def compress_project(x: Tensor, weights: CompressorWeights) -> Tensor:
    """What each token brings to its entry: [num_tokens, head_dim or 2 * head_dim] in the accumulation dtype.

    Args:
        x: [num_tokens, hidden], the attention input.
    """
    return linear_bf16(x, weights.kv)


# 1e-3: of a latent's bf16 elements 1e-4 round the other way (see norm).  Where one does, the index key moves by 2^-8 / sqrt(512)
# of its RMS: one in ten of its bf16 elements rounds the other way, and one in 64 of these to another E2M1 code.
@op(tolerance=(Codes("main", share=1e-3), Codes("index", share=1e-3)))
def compress(
    raw: Tensor, previous: Tensor | None, weights: CompressorWeights, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make the entry that each token completes; rows of tokens that complete none are meaningless and must be dropped.

    Args:
        raw: [num_tokens, head_dim or 2 * head_dim] of :func:`compress_project`.
        previous: the same of the token before, at ratio 2.
        rotation: at the first position of each token's entry.
        dtype: of the activations (bf16 or fp64).

    Returns:
        main: [num_tokens, main record bytes] uint8.
        index: [num_tokens, index record bytes] uint8.

    Source: ratio 2 pools two tokens by a softmax per dim over their gates, no positional term; index keys are projected from the
    unrotated latent.
    """
    if previous is None:
        pooled = raw
    else:
        value, gate = raw.chunk(2, dim=-1)
        older_value, older_gate = previous.chunk(2, dim=-1)
        largest = torch.maximum(gate, older_gate)
        older_share, share = torch.exp(older_gate - largest), torch.exp(gate - largest)
        pooled = (older_share * older_value + share * value) / (older_share + share)
    latent = rms_norm(pooled.to(dtype), weights.norm, weights.eps)
    key = rms_norm(linear_bf16(latent, weights.index_key).to(dtype), weights.index_norm, weights.eps)
    return encode_main(rotate(latent, rotation)), encode_index(rotate(key, rotation))


# ----------------------------------------------------------------------------------------------------------------------- indexer


# 1e-3: a sum in another order rounds to another bf16 number in one of 100 elements at most, and one in 64 of these to another
# E2M1 code.  2^-5: the head weights are rounded to bf16, and that is its step for a weight of 4 to 8 RMS.
@op(tolerance=(Codes("mxfp4", share=1e-3), 2.0**-5))
def index_query(
    q_latent8: QuantisedRows, x: Tensor, wq_b: PackedWeight, weights_proj: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Index queries and head weights.

    Args:
        q_latent8: [num_tokens, q_lora_rank] quantised.
        x: [num_tokens, hidden], the attention input.
        wq_b: [index_n_heads * index_head_dim, q_lora_rank].
        weights_proj: [index_n_heads, hidden] wide.
        rotation: at the tokens' positions.

    Returns:
        q: [num_tokens, index_n_heads, index_head_dim] on the MXFP4 grid, in x's dtype.
        head_weights: [num_tokens, index_n_heads] wide, the softmax scale folded in.
    """
    num_heads = weights_proj.shape[0]
    q = linear_fp8.reference(q_latent8, wq_b).unflatten(1, (num_heads, -1))
    head_weights = linear_bf16(x, weights_proj).to(x.dtype).to(weights_proj.dtype)
    return round_mxfp4(rotate(q, rotation)), head_weights * (q.shape[-1] * num_heads) ** -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Scores of some tokens of a step.

    Attributes:
        rows: [num_rows] int64 which tokens, or a slice of them; num_tokens stands for none.
        scores: [num_rows, num_entries] wide; -inf where an entry is not visible yet.  Every row's columns are the entries of its
            own request.
        visible: [num_rows, 1] int64 entries that each token sees.
        first_entries: [num_rows, 1] int64 step row of each token's first entry.
    """

    rows: slice | Tensor
    scores: Tensor
    visible: Tensor
    first_entries: Tensor

    def entry_idx(self, entries: Tensor) -> Tensor:
        """Step rows of entry numbers [num_rows, count]; -1 and -2 stay."""
        return torch.where(entries >= 0, entries + self.first_entries, entries)


def _scored(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, spans: Spans) -> Iterator[_Scored]:
    """Scores of all tokens of a step: a chunk at a time, rounds many at a time."""
    for span in spans.chunks:
        yield _score_chunk(q, head_weights, store, page_ids, span)
    if spans.round_pages:
        q, head_weights = (torch.cat([each, each.new_zeros(1, *each.shape[1:])]) for each in (q, head_weights))
        for first, last in _runs(spans.round_pages, store.values.shape[1]):
            yield _score_rounds(q, head_weights, store, page_ids, spans, slice(first, last))


def _runs(round_pages: Sequence[int], page_entries: int) -> Iterator[tuple[int, int]]:
    """Rounds that are scored together, first and behind the last: neighbours, as long as padding to the longest is cheap."""
    first = longest = 0
    for number, num_pages in enumerate(round_pages):
        tiles = -(-num_pages * page_entries // _SCORE_KEYS)
        grown = max(longest, tiles)
        if number > first and not (grown * (number + 1 - first) <= _SCORE_TILES and grown <= 4 * min(tiles, longest)):
            yield first, number
            first, grown = number, tiles
        longest = grown
    yield first, len(round_pages)


def _key_tiles(store: IndexStore, pages: Tensor, num_entries: int, wide: torch.dtype) -> Tensor:
    """Index keys of pages [..., num_pages] in tiles: [..., num_tiles, head_dim, _SCORE_KEYS]."""
    records = torch.cat([store.values[pages], store.scales[pages]], dim=-1).flatten(-3, -2)[..., :num_entries, :]
    keys = decode_index(records, store.head_dim, wide)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -num_entries % _SCORE_KEYS))
    tiles: Tensor = keys.unflatten(-2, (-1, _SCORE_KEYS)).transpose(-1, -2)
    return tiles


def _weigh(dots: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * max(0, dot) over the heads, one head after the other.

    Args:
        dots: [..., num_heads, num_tokens, _SCORE_KEYS], changed in place.
        weights: [..., num_heads, num_tokens, 1].
    """
    dots.clamp_min_(0)
    total = dots[..., 0, :, :] * weights[..., 0, :, :]
    for head in range(1, dots.shape[-3]):
        total += dots[..., head, :, :] * weights[..., head, :, :]
    return total


def _score_rounds(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, spans: Spans, which: slice) -> _Scored:
    """Scores of some rounds; the products have the shape that :func:`_score_chunk` gives them.

    ``q`` and ``head_weights`` have a row of zeros behind the last token, for tokens that a round lacks.
    """
    num_heads, head_dim = q.shape[1:]
    page_entries, wide = store.values.shape[1], head_weights.dtype
    rows, first_pages = spans.round_rows[which], spans.first_pages[which].unsqueeze(1)
    count, width = rows.shape
    num_pages = max(spans.round_pages[which])
    num_entries = num_pages * page_entries
    # A round with fewer pages sees others' behind its own, and none of their entries.
    pages = (first_pages + torch.arange(num_pages, device=q.device)).clamp_max(page_ids.shape[0] - 1)
    key_tiles = _key_tiles(store, page_ids[pages], num_entries, wide)
    num_tiles = key_tiles.shape[1]
    flat_keys = key_tiles.flatten(0, 1)

    tile_tokens = max(1, _SCORE_ROWS // num_heads)
    scores = []
    for first in range(0, width, tile_tokens):
        part = rows[:, first : first + tile_tokens]
        missing = tile_tokens - part.shape[1]
        tile = torch.nn.functional.pad(q[part].to(wide), (0, 0, 0, 0, 0, missing)).transpose(1, 2)
        weights = torch.nn.functional.pad(head_weights[part], (0, 0, 0, missing)).transpose(1, 2).unsqueeze(-1)
        by_head = tile.reshape(count, 1, num_heads * tile_tokens, head_dim).expand(-1, num_tiles, -1, -1)
        dots = matmul_items(by_head.flatten(0, 1), flat_keys).view(count, num_tiles, num_heads, tile_tokens, -1)
        scores.append(_weigh(dots, weights.unsqueeze(1)).transpose(1, 2).flatten(2)[:, : part.shape[1], :num_entries])
    flat = rows.flatten()
    positions = torch.cat([spans.positions, spans.positions.new_full((1,), -1)])[flat]
    visible = ((positions + 1) // store.ratio).unsqueeze(1)
    return _Scored(
        rows=flat,
        scores=torch.cat(scores, dim=1)
        .flatten(0, 1)
        .masked_fill_(torch.arange(num_entries, device=q.device) >= visible, -torch.inf),
        visible=visible,
        first_entries=(first_pages * page_entries).expand(-1, width).reshape(-1, 1),
    )


def _score_chunk(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, span: Span) -> _Scored:
    """Scores of one chunk, a tile of tokens at a time against the keys that its last token sees."""
    num_heads, head_dim = q.shape[1:]
    wide = head_weights.dtype
    num_entries = (span.start + span.num_rows) // store.ratio
    page_entries = store.values.shape[1]
    pages = page_ids[span.first_page : span.first_page + -(-num_entries // page_entries)]
    key_tiles = _key_tiles(store, pages, num_entries, wide)

    tile_tokens = max(1, _SCORE_ROWS // num_heads)
    scores = torch.full((span.num_rows, num_entries), -torch.inf, dtype=wide, device=q.device)
    for first in range(0, span.num_rows, tile_tokens):
        count = min(tile_tokens, span.num_rows - first)
        seen = (span.start + first + count) // store.ratio
        if seen == 0:
            continue
        rows = slice(span.first_row + first, span.first_row + first + count)
        missing = tile_tokens - count
        tile = torch.nn.functional.pad(q[rows].to(wide), (0, 0, 0, 0, 0, missing))
        weights = torch.nn.functional.pad(head_weights[rows], (0, 0, 0, missing)).t().unsqueeze(-1)
        by_head = tile.transpose(0, 1).reshape(1, num_heads * tile_tokens, head_dim)
        tiles = -(-seen // _SCORE_KEYS)
        dots = matmul_items(by_head.expand(tiles, -1, -1), key_tiles[:tiles]).unflatten(1, (num_heads, tile_tokens))
        scores[first : first + count, :seen] = _weigh(dots, weights).transpose(0, 1).flatten(1)[:count, :seen]
    positions = torch.arange(span.start, span.start + span.num_rows, device=q.device)
    visible = ((positions + 1) // store.ratio).unsqueeze(1)
    return _Scored(
        rows=slice(span.first_row, span.first_row + span.num_rows),
        scores=scores.masked_fill_(torch.arange(num_entries, device=q.device) >= visible, -torch.inf),
        visible=visible,
        first_entries=torch.full_like(visible, span.first_page * page_entries),
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """Columns of the ``count`` highest scores of each row: ascending, -1 padded; equal scores by lower column; never -inf.

    Args:
        scores: [num_rows, num_columns].

    Returns:
        [num_rows, count] int64; -2 in the first column of a row that has a NaN.
    """
    num_rows, num_columns = scores.shape
    if not num_columns:
        return torch.full((num_rows, count), -1, device=scores.device)
    finite = scores > -torch.inf
    if num_columns <= count:
        chosen, largest = finite, scores.amax(1, keepdim=True)
    else:
        values = torch.topk(scores, count, dim=1).values  # a NaN comes first
        largest, last = values[:, :1], values[:, -1:]
        above = scores > last
        level = (scores == last) & finite
        room = count - above.sum(1, keepdim=True, dtype=torch.int32)
        chosen = above | (level & (level.cumsum(1, dtype=torch.int32) <= room))
    slot = torch.where(chosen, chosen.cumsum(1, dtype=torch.int32) - 1, count).long()
    columns = torch.arange(num_columns, device=scores.device).expand(num_rows, -1)
    best = torch.full((num_rows, count + 1), -1, device=scores.device).scatter_(1, slot, columns)[:, :count]
    best[:, :1].masked_fill_(largest.isnan(), _UNKNOWN)
    return best


def _none(q: Tensor, count: int) -> Tensor:
    """[num_tokens + 1, count] int64: nothing chosen for any token; the last row takes what belongs to none."""
    return torch.full((q.shape[0] + 1, count), -1, device=q.device)


@op(tolerance=0.0)
def index_topk(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, spans: Spans, top_k: int) -> Tensor:
    """Choose each token's entries: the ``top_k`` of highest score among those it may see.

    score(t, j) = sum over heads of weight * max(0, q . key), for entries j < (position + 1) // ratio.

    Args:
        q: [num_tokens, index_n_heads, index_head_dim] on the MXFP4 grid.
        head_weights: [num_tokens, index_n_heads] wide.
        store: index keys, this step's included.
        page_ids: [num_step_pages] int64.
        spans: whose tokens the rows are.
        top_k: entries per token.

    Returns:
        [num_tokens, top_k] int64 step rows.

    Tolerance: exact given the scores; a backend may differ only among scores closer than its own rounding.
    """
    chosen = _none(q, top_k)
    for part in _scored(q, head_weights, store, page_ids, spans):
        chosen[part.rows] = part.entry_idx(_best(part.scores, top_k))
    return chosen[:-1]


@op(tolerance=0.0)
def index_blocks(
    q: Tensor,
    head_weights: Tensor,
    store: IndexStore,
    page_ids: Tensor,
    spans: Spans,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """:func:`index_topk`, and from the same scores the candidate blocks that later layers choose within.

    A block's score is the best of its visible entries; the block of the newest visible entry is always among the best.

    Args:
        top_blocks: candidate blocks per token.
        block_size: consecutive entries a block.

    Returns:
        rows: [num_tokens, top_k] int64 step rows.
        blocks: [num_tokens, top_blocks] int64 block numbers within the request, ascending, -1 padded.
    """
    chosen, blocks = _none(q, top_k), _none(q, top_blocks)
    for part in _scored(q, head_weights, store, page_ids, spans):
        chosen[part.rows] = part.entry_idx(_best(part.scores, top_k))
        padded = torch.nn.functional.pad(part.scores, (0, -part.scores.shape[1] % block_size), value=-torch.inf)
        block_scores = padded.unflatten(1, (-1, block_size)).amax(-1)
        newest = (part.visible - 1) // block_size
        is_newest = torch.arange(block_scores.shape[1], device=q.device) == newest
        # Without a mark: what cannot be chosen here is marked in ``rows``.
        blocks[part.rows] = _best(block_scores.masked_fill(is_newest, torch.inf), top_blocks).clamp_min(-1)
    return chosen[:-1], blocks[:-1]


@op(tolerance=0.0)
def index_topk_within(
    q: Tensor,
    head_weights: Tensor,
    store: IndexStore,
    page_ids: Tensor,
    spans: Spans,
    top_k: int,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    """:func:`index_topk` among the entries of each token's candidate blocks.

    Args:
        blocks: [num_tokens, top_blocks] int64 of :func:`index_blocks`, for the same tokens.

    Returns:
        [num_tokens, top_k] int64 step rows.
    """
    chosen = _none(q, top_k)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, 1), value=-1)
    for part in _scored(q, head_weights, store, page_ids, spans):
        num_rows, num_entries = part.scores.shape
        num_blocks = -(-num_entries // block_size)
        own = blocks[part.rows]
        allowed = torch.zeros(num_rows, num_blocks + 1, dtype=torch.bool, device=q.device)
        allowed.scatter_(1, torch.where(own >= 0, own, num_blocks), True)
        entries = allowed[:, :num_blocks].repeat_interleave(block_size, dim=1)[:, :num_entries]
        chosen[part.rows] = part.entry_idx(_best(part.scores.masked_fill(~entries, -torch.inf), top_k))
    return chosen[:-1]


# --------------------------------------------------------------------------------------------------------------------- attention


def _key_table(
    window: Tensor,
    window_idx: Tensor,
    store: Tensor | None,
    page_ids: Tensor,
    entry_idx: Tensor | None,
    head_dim: int,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Every key that a step may read, decoded, and the indices of each token's keys in it.

    The last row is zero: list padding (-1) lands there, so that a masked key is a finite zero whatever the caches hold.  The row
    before it is NaN, for lists that could not be chosen (-2).

    Returns:
        table: [num_keys + 2, head_dim] wide.
        key_idx: [num_tokens, num_window_keys (+ top_k)] int64.
    """
    parts = [decode_window(window, head_dim, wide)]
    key_idx = window_idx
    if store is not None and entry_idx is not None:
        page_entries = store.shape[1]
        if page_ids.shape[0] * page_entries <= entry_idx.numel():
            parts.append(decode_main(store[page_ids].flatten(0, 1), head_dim, wide))
            table_idx = entry_idx
        else:  # long contexts: decode what is read instead of all there is
            flat = entry_idx.flatten().clamp_min(0)
            parts.append(decode_main(store[page_ids[flat // page_entries], flat % page_entries], head_dim, wide))
            table_idx = torch.arange(flat.shape[0], device=flat.device).view_as(entry_idx)
        shifted = torch.where(entry_idx >= 0, table_idx + window.shape[0], entry_idx)
        key_idx = torch.cat([window_idx, shifted], dim=1)
    parts += [parts[0].new_full((1, head_dim), torch.nan), parts[0].new_zeros(1, head_dim)]
    return torch.cat(parts), key_idx


@op(tolerance=1e-2)
def sparse_attention(
    q: Tensor,
    rotation: Rotation,
    sinks: Tensor,
    window: Tensor,
    window_idx: Tensor,
    store: Tensor | None,
    page_ids: Tensor,
    entry_idx: Tensor | None,
) -> Tensor:
    """Attention of each token's heads over its window and its chosen entries, joined in one softmax.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16 or fp64, not rotated yet.
        rotation: at the tokens' positions.
        sinks: [num_heads] wide; a logit that only enlarges the denominator.
        window: [num_window_keys, window record bytes] uint8.
        window_idx: [num_tokens, num_window_keys] int64 into ``window``, ascending positions, -1 where there is none;
            ``sliding_window`` of them, and a draft block's own on top.
        store: [num_pages, page_entries, main record bytes] uint8, or None in window-only layers.
        page_ids: [num_step_pages] int64.
        entry_idx: [num_tokens, top_k] int64 indices of entries in the step, or None.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype, rotated back at the tokens' positions.

    Source: scale head_dim^-0.5; a key is its own value, so values carry rotated dims and the output is rotated back;
    probabilities are rounded to the activations' dtype for the product with the values, their sum is not.
    Tolerance: bf16 rounding of probabilities and result.
    """
    num_tokens, _, head_dim = q.shape
    wide = accumulation_dtype(q)
    table, key_idx = _key_table(window, window_idx, store, page_ids, entry_idx, head_dim, wide)
    hidden = (key_idx == -1).unsqueeze(1)
    turned = rotate(q, rotation).to(wide)
    sink = sinks.view(1, -1, 1)
    out = torch.empty_like(q)
    step = max(1, _GATHER_BYTES // (key_idx.shape[1] * head_dim * table.element_size()))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        keys = table[key_idx[part]]
        scores = matmul_items(turned[part], keys.transpose(1, 2)).mul_(head_dim**-0.5)
        scores.masked_fill_(hidden[part], -torch.inf)
        largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
        shares = torch.exp(scores - largest)
        total = row_sum(shares) + torch.exp(sink - largest)
        out[part] = matmul_items(shares.to(q.dtype).to(wide), keys).div_(total).to(q.dtype)
    return rotate(out, rotation.inverse())
