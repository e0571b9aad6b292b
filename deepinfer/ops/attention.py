"""Attention over two sources of keys: a sliding window of records, and compressed entries that an indexer chooses.

*Entry indices* address the compressed entries of a step.  ``page_ids`` holds the pages of all requests of the step, concatenated.
If the first page of a request has index f in ``page_ids``, its entry e has the entry index f * page_entries + e.  A list of entry
indices is ascending and padded with -1.  If a score is NaN, no entries can be chosen and the list begins with -2.  The index -2
reads a NaN key, so that the result is NaN and not a wrong choice.

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
"""Bytes of keys that :func:`sparse_attention` gathers at a time; they fit into a CPU's last-level cache."""
_SCORE_ROWS = 64
_SCORE_KEYS = 64
"""Shape of every index score product: (token, head) pairs and keys.  It is fixed for batch invariance."""
_SCORE_TILES = 1024
"""Largest number of (request, key tile) pairs in one batched index score product."""
_UNKNOWN = -2
"""First index of a list that could not be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows and pages of one chunk in a step, as host numbers.

    Attributes:
        first_row, num_rows: rows of the chunk.
        start: position of its first token.
        first_page, num_pages: indices of its pages in ``page_ids``.
    """

    first_row: int
    num_rows: int
    start: int
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Rows and pages of each request of a step.

    Attributes:
        chunks: rows and pages of the chunks; the host knows them, and they come first.
        round_pages: [num_rounds] number of pages of each round; only the device knows the rows of a round.
        first_pages: [num_rounds] int64, index of each round's first page in ``page_ids``.
        round_rows: [num_rounds, width] int64, rows of each round's tokens; num_tokens after the last token of a round.
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
        ratio: tokens per entry.
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
    """Project each token for its entry: [num_tokens, head_dim or 2 * head_dim] in the accumulation dtype.

    Args:
        x: [num_tokens, hidden], the attention input.
    """
    return linear_bf16(x, weights.kv)


def entries(
    raw: Tensor, previous: Tensor | None, weights: CompressorWeights, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The entry that each token completes, before it becomes records; arguments as for :func:`compress`.

    Returns:
        main: [num_tokens, head_dim] in ``dtype``.
        index: [num_tokens, index_head_dim] in ``dtype``.

    Source: ratio 2 pools two tokens by a softmax per dim over their gates, without positional term; index keys are projected
    from the unrotated latent.
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
    return rotate(latent, rotation), rotate(key, rotation)


# 1e-3: 1e-4 of a latent's bf16 elements round to another number (see norm).  One such element changes the index key by
# 2^-8 / sqrt(512) of its RMS.  Then one in ten of the key's bf16 elements rounds to another number, and one in 64 of these has
# another E2M1 code.
@op(tolerance=(Codes("main", share=1e-3), Codes("index", share=1e-3)))
def compress(
    raw: Tensor, previous: Tensor | None, weights: CompressorWeights, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make the entry that each token completes.  For a token that completes no entry the result is meaningless: drop it.

    Args:
        raw: [num_tokens, head_dim or 2 * head_dim], result of :func:`compress_project`.
        previous: the same for the token before, at ratio 2; else None.
        rotation: rotation at the first position of each token's entry.
        dtype: dtype of the activations (bf16 or fp64).

    Returns:
        main: [num_tokens, main record bytes] uint8.
        index: [num_tokens, index record bytes] uint8.
    """
    main, index = entries(raw, previous, weights, rotation, dtype)
    return encode_main(main), encode_index(index)


# ----------------------------------------------------------------------------------------------------------------------- indexer


# 1e-3: with a sum in another order, at most one of 100 elements rounds to another bf16 number, and one in 64 of these has another
# E2M1 code.  2^-5: the head weights are rounded to bf16, and 2^-5 RMS is the step of bf16 for a weight of 4 to 8 RMS.
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
        rotation: rotation at the tokens' positions.

    Returns:
        q: [num_tokens, index_n_heads, index_head_dim] on the MXFP4 grid, in x's dtype.
        head_weights: [num_tokens, index_n_heads] wide, multiplied by the softmax scale.
    """
    num_heads = weights_proj.shape[0]
    q = linear_fp8.reference(q_latent8, wq_b).unflatten(1, (num_heads, -1))
    head_weights = linear_bf16(x, weights_proj).to(x.dtype).to(weights_proj.dtype)
    return round_mxfp4(rotate(q, rotation)), head_weights * (q.shape[-1] * num_heads) ** -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Scores of some tokens of a step.

    Attributes:
        rows: [num_rows] int64 rows of the tokens, or a slice of rows; num_tokens where there is no token.
        scores: [num_rows, num_entries] wide; -inf for entries that are not visible.  The columns are the entries of the token's
            own request.
        visible: [num_rows, 1] int64 number of entries that each token sees.
        first_entries: [num_rows, 1] int64 entry index of the first entry of each token's request.
    """

    rows: slice | Tensor
    scores: Tensor
    visible: Tensor
    first_entries: Tensor

    def entry_idx(self, entries: Tensor) -> Tensor:
        """Entry indices of entry numbers [num_rows, count]; -1 and -2 are kept."""
        return torch.where(entries >= 0, entries + self.first_entries, entries)


def _scored(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, spans: Spans) -> Iterator[_Scored]:
    """Scores of all tokens of a step: one chunk at a time, many rounds at a time."""
    for span in spans.chunks:
        yield _score_chunk(q, head_weights, store, page_ids, span)
    if spans.round_pages:
        q, head_weights = (torch.cat([each, each.new_zeros(1, *each.shape[1:])]) for each in (q, head_weights))
        for first, last in _runs(spans.round_pages, store.values.shape[1]):
            yield _score_rounds(q, head_weights, store, page_ids, spans, slice(first, last))


def _runs(round_pages: Sequence[int], page_entries: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of neighbouring rounds that are scored together, as long as padding to the longest is cheap."""
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
    """Scores of some rounds; the products have the same shape as in :func:`_score_chunk`.

    The last row of ``q`` and ``head_weights`` is zero.  It is used for tokens that a round does not have.
    """
    num_heads, head_dim = q.shape[1:]
    page_entries, wide = store.values.shape[1], head_weights.dtype
    rows, first_pages = spans.round_rows[which], spans.first_pages[which].unsqueeze(1)
    count, width = rows.shape
    num_pages = max(spans.round_pages[which])
    num_entries = num_pages * page_entries
    # A round with fewer pages also reads pages of the next rounds, but their entries are not visible to it.
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
    """Scores of one chunk; each tile of tokens is multiplied with the keys that the tile's last token sees."""
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
    """Columns of the ``count`` highest scores of each row: ascending, padded with -1; equal scores by lower column; never -inf.

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
        values = torch.topk(scores, count, dim=1).values  # a NaN sorts first
        largest, last = values[:, :1], values[:, -1:]
        above = scores > last
        level = (scores == last) & finite
        room = count - above.sum(1, keepdim=True, dtype=torch.int32)
        chosen = above | (level & (level.cumsum(1, dtype=torch.int32) <= room))
    place = torch.where(chosen, chosen.cumsum(1, dtype=torch.int32) - 1, count).long()
    columns = torch.arange(num_columns, device=scores.device).expand(num_rows, -1)
    best = torch.full((num_rows, count + 1), -1, device=scores.device).scatter_(1, place, columns)[:, :count]
    best[:, :1].masked_fill_(largest.isnan(), _UNKNOWN)
    return best


def _none(q: Tensor, count: int) -> Tensor:
    """[num_tokens + 1, count] int64 of -1; the last row receives the results of tokens that do not exist."""
    return torch.full((q.shape[0] + 1, count), -1, device=q.device)


@op(tolerance=0.0)
def index_topk(q: Tensor, head_weights: Tensor, store: IndexStore, page_ids: Tensor, spans: Spans, top_k: int) -> Tensor:
    """Choose each token's entries: the ``top_k`` visible entries with the highest scores.

    score(t, j) = sum over heads of weight * max(0, q . key), for entries j < (position + 1) // ratio.

    Args:
        q: [num_tokens, index_n_heads, index_head_dim] on the MXFP4 grid.
        head_weights: [num_tokens, index_n_heads] wide.
        store: index keys, including those of this step.
        page_ids: [num_step_pages] int64.
        spans: rows and pages of each request.
        top_k: entries per token.

    Returns:
        [num_tokens, top_k] int64 entry indices.

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
    """Choose entries as :func:`index_topk` does, and from the same scores the candidate blocks for later layers.

    A block's score is the highest score of its visible entries.  The block of the newest visible entry is always chosen.

    Args:
        top_blocks: candidate blocks per token.
        block_size: number of consecutive entries in a block.

    Returns:
        entry_idx: [num_tokens, top_k] int64 entry indices.
        blocks: [num_tokens, top_blocks] int64 block numbers within the request, ascending, padded with -1.
    """
    chosen, blocks = _none(q, top_k), _none(q, top_blocks)
    for part in _scored(q, head_weights, store, page_ids, spans):
        chosen[part.rows] = part.entry_idx(_best(part.scores, top_k))
        padded = torch.nn.functional.pad(part.scores, (0, -part.scores.shape[1] % block_size), value=-torch.inf)
        block_scores = padded.unflatten(1, (-1, block_size)).amax(-1)
        newest = (part.visible - 1) // block_size
        is_newest = torch.arange(block_scores.shape[1], device=q.device) == newest
        # No -2 here: ``entry_idx`` already marks a token whose entries cannot be chosen.
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
    """Choose entries as :func:`index_topk` does, but only in each token's candidate blocks.

    Args:
        blocks: [num_tokens, top_blocks] int64, result of :func:`index_blocks` for the same tokens.

    Returns:
        [num_tokens, top_k] int64 entry indices.
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
    """Decode every key that a step reads into one table, and find the indices of each token's keys in it.

    The last key is zero.  The padding -1 selects it, so a masked key is finite whatever the caches hold.  The key before it is
    NaN; -2 selects it.

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
        else:  # long contexts: decode only the entries that are read
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
        rotation: rotation at the tokens' positions.
        sinks: [num_heads] wide; a logit that only enlarges the denominator.
        window: [num_window_keys, window record bytes] uint8.
        window_idx: [num_tokens, count] int64 indices into ``window``, ascending positions, -1 for no key; count is
            ``sliding_window``, in a draft plus the width of a block.
        store: [num_pages, page_entries, main record bytes] uint8, or None in window-only layers.
        page_ids: [num_step_pages] int64.
        entry_idx: [num_tokens, top_k] int64 entry indices, or None.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype, rotated back at the tokens' positions.

    Source: scale head_dim^-0.5; a key is its own value, so values carry rotated dims and the output is rotated back;
    probabilities are rounded to the activations' dtype for the product with the values, their sum is not.
    Tolerance: bf16 rounding of probabilities and result.
    """
    wide = accumulation_dtype(q)
    return attend(q, rotation, sinks, *_key_table(window, window_idx, store, page_ids, entry_idx, q.shape[-1], wide))


def attend(q: Tensor, rotation: Rotation, sinks: Tensor, table: Tensor, key_idx: Tensor) -> Tensor:
    """The arithmetic of :func:`sparse_attention` over decoded keys.

    Args:
        q, rotation, sinks: as for :func:`sparse_attention`.
        table: [num_keys, head_dim] wide; the last key is zero.
        key_idx: [num_tokens, count] int64 indices into ``table``, -1 for no key.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype, rotated back.
    """
    num_tokens, _, head_dim = q.shape
    wide = table.dtype
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
