"""From logits to tokens: processing, drawing, drafting, verifying, and how many drafts to verify.

Words used throughout:

    decided position   the absolute position of the token a row of logits decides, i.e. position of its input token + 1
    anchor             the last emitted token of a request; its draft k (k = 1, 2, ...) has position ``anchor position + k``
    packed rows        a request that verifies n drafts owns n + 1 consecutive rows of logits: its anchor's, then its drafts'

All randomness is a pure function of (request seed, decided position, stream, draft index, vocabulary id), so nothing is stored
and nothing has to be rolled back.  Streams are independent: if drafts and emitted tokens shared their noise, the ratio test would
be wrong (DSpark paper, verification).

Invariants: a row's result does not depend on the other rows, bit for bit.  Only :func:`lay_out_rounds` compares requests with
each other.  No body waits for the device.  Every row of logits has a finite maximum among the allowed tokens.

Temporaries of the size of the logits are limited: every operator processes so many rows at a time that they stay within
:data:`WORKSPACE_BYTES`.  This is possible because rows are independent.

Logits are processed in fp32.  Probabilities are fp64 if they are compared with a uniform number, subtracted from each other or
combined with noise, because fp32 cannot resolve the mass of a small residual.  fp64 logits stay fp64 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.config import DraftSampling
from deepinfer.ops.arithmetic import accumulation_dtype, linear_bf16, matmul_rows, row_sum, sigmoid
from deepinfer.ops.op import op
from deepinfer.request import GREEDY_TEMPERATURE

LOGPROB_FLOOR: Final = -9999.0
"""Smallest log-probability reported: JSON has no infinity."""

WORKSPACE_BYTES: Final = 256 << 20
"""Largest number of bytes for the temporaries of an operator; a single row may need more."""

_ID_BYTES: Final = 96
"""Bytes of temporaries for each vocabulary id of a row, twice as many in fp64.  Sorting needs most of them."""

DEGENERATE_MASS: Final = 1e-8
"""A residual with less mass is rounding noise; the token is then drawn from the target itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of each row.

    Attributes:
        temperature: [num_rows] fp32, >= 0; below 1e-5 the row is greedy.
        top_k: [num_rows] int64; values below 1 switch the filter off, 1 makes the row greedy.
        top_p: [num_rows] fp32 in (0, 1].
        min_p: [num_rows] fp32 in [0, 1], relative to the best token's probability.
        seeds: [num_rows] int64, the 64 bits of the request's seed.
        filters: False means that top_k, top_p and min_p are off in every row.  This saves a sort of the vocabulary and
            changes no bit.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    filters: bool = True

    @property
    def greedy(self) -> Tensor:
        """[num_rows] bool: rows that take the best token and ignore filters and noise."""
        return (self.temperature < GREEDY_TEMPERATURE) | (self.top_k == 1)

    def take(self, index: Tensor | slice) -> SamplingRows:
        """The parameters of the rows ``index``, a slice or [n] int64, in that order; a row may occur more than once."""
        return SamplingRows(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            filters=self.filters,
        )


# ----------------------------------------------------------------------------------------------------------------------- noise

DRAFT_STREAM: Final = 1
ACCEPT_STREAM: Final = 2
EMIT_STREAM: Final = 3


def signed(word: int) -> int:
    """The int64 that has the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN: Final = signed(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = (signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift of the unsigned 64-bit value; ``>>`` alone copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit words; every input bit changes half of the output bits on average.  int64 products wrap.

    Source: the output function of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13).
    """
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def noise_bits(seeds: Tensor, positions: Tensor, stream: int, draft_idx: int, sub_indices: Tensor) -> Tensor:
    """64 random bits for each key; the same integers on every device.

    A bijection absorbs the fields one after another, so two keys that differ in one field never have the same bits.  Over the
    last field this is the SplitMix64 sequence, which passes BigCrush.

    Args:
        seeds, sub_indices: int64, broadcast against each other and positions.
        positions: any integer type.
        stream: DRAFT_STREAM, ACCEPT_STREAM or EMIT_STREAM.
        draft_idx: k of a draft; 0 in the other streams.  A position can be drafted in several rounds before it is decided.  k
            differs between these rounds, because it is the position minus the anchor position.

    Returns:
        int64 of the broadcast shape.

    Source: SplitMix64, as :func:`_mix`.
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + (positions.long() + 1) * _GOLDEN)
    state = _mix(state + signed((stream + (draft_idx << 8)) * _GOLDEN % (1 << 64)))
    return _mix(state + (sub_indices + 1) * _GOLDEN)


def uniform_noise(bits: Tensor) -> Tensor:
    """fp64 in the open interval (0, 1): 52 bits plus half a step, from 2^-53 to 1 - 2^-53; every value is exact."""
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel_noise(seeds: Tensor, positions: Tensor, stream: int, draft_idx: int, vocab: int) -> Tensor:
    """Standard Gumbel noise, one number for each vocabulary id.

    Args:
        seeds: [n] int64.
        positions: [n] int.

    Returns:
        [n, vocab] fp64 in (-3.7, 36.8).
    """
    ids = torch.arange(vocab, device=seeds.device)
    bits = noise_bits(seeds[:, None], positions[:, None], stream, draft_idx, ids)
    return -torch.log(-torch.log(uniform_noise(bits)))


# ------------------------------------------------------------------------------------------------------------- building blocks


def row_bytes(vocab: int, dtype: torch.dtype) -> int:
    """Bytes of temporaries that an operator needs for a row of logits of ``dtype``."""
    return vocab * _ID_BYTES * (2 if dtype == torch.float64 else 1)


def parts_of(num_rows: int, num_bytes: int) -> list[slice]:
    """Split rows into parts to be processed one at a time, if each row needs ``num_bytes``; at least one part."""
    step = max(1, WORKSPACE_BYTES // max(1, num_bytes))
    return [slice(first, min(first + step, num_rows)) for first in range(0, max(1, num_rows), step)]


def _parts(logits: Tensor) -> list[slice]:
    """:func:`parts_of` for rows of logits [num_rows, vocab]."""
    return parts_of(logits.shape[0], row_bytes(logits.shape[1], logits.dtype))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the results of parts; a single result needs no launch."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cut(table: Tensor | None, index: Tensor | slice) -> Tensor | None:
    """Rows of a bias or a mask; a vector for all rows is returned as it is."""
    return table if table is None or table.dim() == 1 else table[index]


def _log_normaliser(logits: Tensor) -> Tensor:
    """log(sum(exp)) over the last dim, which is kept."""
    best = logits.amax(-1, keepdim=True)
    return best + torch.log(row_sum(torch.exp(logits - best)))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits - _log_normaliser(logits)


def _best(logits: Tensor) -> Tensor:
    """[n, vocab] -> [n] int64, the lowest id among equal maxima (torch.max with a dim returns the first)."""
    return logits.max(-1).indices


def _process(logits: Tensor, rows: SamplingRows, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """The target distribution of every row, as logits: bias, mask, temperature, min-p, top-k, top-p, in this order.

    Each filter works on the renormalised tokens that the filter before has kept.  Among equal logits at a border, lower ids are
    kept, so top-k keeps exactly k.  top-p keeps the shortest best-first list that reaches top_p.  A greedy row is only biased and
    masked.

    Args:
        logits: [num_logits, vocab], any float type.
        rows: parameters of each row of logits.
        bias: [num_logits, vocab] fp32 to add, or None.
        mask: [num_logits, vocab] bool, True = allowed, at least one in each row, or None.

    Returns:
        [num_logits, vocab] fp32 (fp64 for fp64 logits), -inf where removed.

    Source: p = softmax of the row; :func:`_draw` draws from p, and :func:`verify` accepts by p.
    """
    logits = logits.to(accumulation_dtype(logits))
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    greedy = rows.greedy[:, None]
    best = logits.max(-1, keepdim=True).indices
    # A quotient may overflow.  Two infinities would give a NaN later.  Without a finite best token, a removed token could be
    # drawn.
    most = torch.finfo(logits.dtype).max
    logits = (logits / torch.where(greedy, 1.0, rows.temperature[:, None])).clamp_(max=most)
    logits.scatter_(-1, best, logits.gather(-1, best).clamp_(min=-most))
    if not rows.filters:
        return logits
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    weights = torch.exp(ordered.double() - ordered[:, :1].double())
    kept = weights >= rows.min_p[:, None].double()
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept &= (rank < rows.top_k[:, None]) | (rows.top_k[:, None] < 1)
    mass = torch.where(kept, weights, 0.0).cumsum(-1)
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    top_p = rows.top_p[:, None].double()
    kept &= (mass_before < top_p * mass[:, -1:]) | (top_p >= 1)
    kept[:, 0].fill_(True)  # the best token is always kept
    kept_by_id = torch.zeros_like(kept).scatter_(-1, ids, kept)
    return logits.masked_fill(~(kept_by_id | greedy), -torch.inf)


def _draw(processed: Tensor, rows: SamplingRows, positions: Tensor, stream: int = EMIT_STREAM, draft_idx: int = 0) -> Tensor:
    """Draw one token for each row by the Gumbel-max rule; greedy rows take the best token, among equal ones the lowest id.

    *Plain sampling* is this draw from the result of :func:`_process`, with the noise of EMIT_STREAM at the decided position.

    Args:
        processed: [n, vocab] logits or log weights; they need not be normalised.
        positions: [n] int, decided positions.

    Returns:
        [n] int64.

    Source: with Gumbel noise g, argmax_v(log p(v) + g(v)) is a draw from p.
    """
    noise = gumbel_noise(rows.seeds, positions, stream, draft_idx, processed.shape[-1])
    return _best(processed.double() + torch.where(rows.greedy[:, None], 0.0, noise))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """Rows of packed logits and the requests that own them.

    Attributes:
        starts: [num_requests] first row of each request.
        owners: [num_logits] request of each row; any request for padding rows.
        offsets: [num_logits] number of rows of the same request before each row; any number for padding rows.
        tests: [num_requests, width] row that tests draft j (0-based); any row if the draft does not exist.
    """

    starts: Tensor
    owners: Tensor
    offsets: Tensor
    tests: Tensor

    def row(self, offset: Tensor) -> Tensor:
        """[num_requests] row at ``offset`` of each request; any row for a request without rows."""
        return (self.starts + offset).clamp(min=0, max=self.owners.shape[0] - 1)


def _pack(draft_lens: Tensor, width: int, num_logits: int) -> _Packing:
    """Give ``draft_lens`` [num_requests] int64 + 1 rows to each request, in order."""
    ends = (draft_lens + 1).cumsum(0)
    starts = ends - (draft_lens + 1)
    numbers = torch.arange(num_logits, device=ends.device)
    owners = torch.searchsorted(ends, numbers, right=True).clamp_max(draft_lens.shape[0] - 1)
    places = torch.arange(width, device=ends.device)
    return _Packing(
        starts=starts,
        owners=owners,
        offsets=numbers - starts[owners],
        tests=(starts[:, None] + places).clamp(min=0, max=num_logits - 1),
    )


def _emission_weights(logits: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    """Log weights of the token that a round emits after its accepted drafts.

    Args:
        logits: [n, vocab] fp64 processed target row.
        q: [n, vocab] fp64 distribution that the rejected draft was drawn from; any value if no draft was rejected.
        rejected: [n] bool.

    Returns:
        [n, vocab] fp64: log max(p - q, 0) after a rejection.  Without a rejection, and if the residual has almost no mass:
        the logits, so that the draw is the same as in plain sampling.
    """
    residual = (torch.exp(_log_softmax(logits)) - q).clamp_min(0.0)
    usable = rejected & (row_sum(residual)[..., 0] > DEGENERATE_MASS)
    return torch.where(usable[:, None], torch.log(residual), logits)


def _emit(num_accepted: Tensor, tokens: Tensor, draft_ids: Tensor, draft_lens: Tensor) -> Tensor:
    """[num_requests, width + 1] int64: accepted drafts, the emitted token, then -1; only -1 for requests without rows.

    Args:
        num_accepted: [num_requests] int64.
        tokens: [num_requests] int64, the token after the accepted drafts.
        draft_ids: [num_requests, width] int64.
        draft_lens: [num_requests] int64; below 0 the request owns no rows.
    """
    places = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    drafts = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)
    counts = num_accepted[:, None]
    last = torch.where(places == counts, tokens[:, None], -1)
    return torch.where(draft_lens[:, None] < 0, -1, torch.where(places < counts, drafts, last))


def _leading(accept: Tensor) -> Tensor:
    """[num_requests, width] bool -> [num_requests] int64: number of accepted drafts before the first rejected draft."""
    return accept.long().cumprod(-1).sum(-1)


# ------------------------------------------------------------------------------------------------------------------- operators


# 1e-5: a sum of thousands of products in fp32.
@op(tolerance=1e-5)
def logits(x: Tensor, head: Tensor) -> Tensor:
    """Scores of the whole vocabulary.

    Args:
        x: [num_rows, hidden] bf16 or fp64, normed.
        head: [vocab, hidden] in the accumulation dtype of x.

    Returns:
        [num_rows, vocab] fp32 (fp64 for fp64 input); no bias, no scaling, no soft-cap.
    """
    return linear_bf16(x, head)


# 1e-6: a product, a quotient and two differences in fp32.
@op(tolerance=1e-6)
def penalise(
    logits: Tensor, output_counts: Tensor, prompt_seen: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Make tokens that already occur less likely: repetition, then frequency, then presence.

    Logits of a row with neutral values keep their bits, and so do logits of tokens that do not occur.

    Args:
        logits: [n, vocab], any float type; -inf stays -inf, and finite logits stay finite.
        output_counts: [n, vocab] int32, how often each token occurs in the output *at this row*: at the row of draft j, drafts
            up to j count as output.
        prompt_seen: [n, vocab] bool, whether each token occurs in the prompt.
        repetition: [n] fp32 > 0; logits of tokens in prompt or output are divided by it if positive, else multiplied; neutral 1.
        frequency: [n] fp32, subtracted once for each occurrence in the output; neutral 0.
        presence: [n] fp32, subtracted once if the token occurs in the output; neutral 0.

    Returns:
        [n, vocab] fp32 (fp64 for fp64 logits).

    Source: repetition as in CTRL (Keskar et al. 2019, section 4.1), the other two as in the OpenAI API.
    """
    dtype = accumulation_dtype(logits)
    logits = logits.to(dtype)
    repetition, frequency, presence = (each.to(dtype).unsqueeze(1) for each in (repetition, frequency, presence))
    is_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    repeated = torch.where(is_output | prompt_seen, repeated, logits)
    penalised = torch.where(is_output, repeated - output_counts.to(dtype) * frequency - presence, repeated)
    # A product may overflow.  The only allowed token must stay better than the tokens that a mask excludes.
    most = torch.finfo(dtype).max
    return torch.where(logits.isinf(), penalised, penalised.clamp(-most, most))


def _sampled(logits: Tensor, rows: SamplingRows, positions: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Plain sampling: [num_logits] int64, one token for each row, drawn (:func:`_draw`) from the processed logits."""
    found = []
    for part in _parts(logits):
        own = rows.take(part)
        found.append(_draw(_process(logits[part], own, _cut(bias, part), _cut(mask, part)), own, positions[part]))
    return _joined(found)


# 1e-5: a sum of up to 129280 exponentials in fp32.
@op(tolerance=1e-5)
def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-softmax at the given tokens.

    Args:
        logits: [n, vocab].
        ids: [n] int64; -1 means no token.

    Returns:
        [n] fp32 (fp64 for fp64 logits), at least -9999; -9999 for id -1.
    """
    found = []
    for part in _parts(logits):
        own = logits[part].to(accumulation_dtype(logits))
        found.append(own.gather(-1, ids[part].clamp_min(0)[:, None]) - _log_normaliser(own))
    return torch.where(ids < 0, LOGPROB_FLOOR, _joined(found)[:, 0].clamp_min(LOGPROB_FLOOR))


def is_finite(logits: Tensor) -> Tensor:
    """[n] bool: whether all of a row's logits [n, vocab] are finite numbers.  Cost: one read."""
    lowest, highest = torch.aminmax(logits, dim=-1)
    return torch.isfinite(lowest) & torch.isfinite(highest)


# 1e-5: as token_logprobs; the ids are exact.
@op(tolerance=1e-5)
def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row.

    Args:
        logits: [n, vocab].
        k: at most vocab.

    Returns:
        ids: [n, k] int64, best first, equal logits by lower id.
        logprobs: [n, k] fp32 (fp64 for fp64 logits), at least -9999.
    """
    best_ids, best = [], []
    for part in _parts(logits):
        own = logits[part].to(accumulation_dtype(logits))
        ordered, ids = torch.sort(own, dim=-1, descending=True, stable=True)
        best_ids.append(ids[:, :k].clone())  # a view would keep all sorted ids in memory
        best.append((ordered[:, :k] - _log_normaliser(own)).clamp_min(LOGPROB_FLOOR))
    return _joined(best_ids), _joined(best)


# 0: a token is right or wrong.  A backend must reproduce the noise bit for bit and may differ only where the two best scores,
# or the two sides of an accept test, lie within fp64 rounding of each other.
@op(tolerance=0.0)
def verify(
    target_logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    draft_lens: Tensor,
    rows: SamplingRows,
    anchor_positions: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact speculative sampling: the emitted tokens have the distribution of plain sampling, for any drafts.

    Draft j is accepted with probability min(1, p(x_j) / q(x_j)).  After the first rejection, a token is drawn from
    max(p - q, 0).  Without a rejection, a token is drawn from the request's last row.  A greedy row accepts a draft that
    equals its best token.  A draft that bias, mask or filters exclude has p = 0 and is always rejected; to remove it before
    would change the distribution.

    Args:
        target_logits: [num_logits, vocab] packed rows, not processed; rows after the last request are padding.
        draft_ids: [num_requests, width] int; -1 means no draft: it is not accepted, and the token is drawn from p itself.
        draft_logits: [num_requests, width, vocab] exactly as :func:`markov_step` returned them in mode ``sampled``; None for
            drafts in mode ``argmax``, where q is one-hot.
        draft_lens: [num_requests] int, number of drafts to verify, 0..width; -1 for a padding request, which owns no rows.
        rows: sampling parameters of each *request*.
        anchor_positions: [num_requests] int.
        bias, mask: as in :func:`_process`, packed like target_logits; each row holds if the drafts before it are emitted.

    Returns:
        num_accepted: [num_requests] int64.
        emitted: [num_requests, width + 1] int64: the accepted drafts, one more token, then -1.

    Source: DSpark paper, verification; uniforms of ACCEPT_STREAM, Gumbel noise of EMIT_STREAM.
    """
    draft_ids, draft_lens = draft_ids.long(), draft_lens.long()
    (num_requests, width), (num_logits, vocab) = draft_ids.shape, target_logits.shape
    packing = _pack(draft_lens, width, num_logits)
    by_row, known_ids = rows.take(packing.owners), draft_ids.clamp_min(0)
    parts, best_parts, log_p_parts = _parts(target_logits), [], []
    for part in parts:
        processed = _process(target_logits[part], by_row.take(part), _cut(bias, part), _cut(mask, part))
        best_parts.append(_best(processed))
        if width:  # log p of the draft that the row tests; any number if it tests none
            tested = known_ids[packing.owners[part], packing.offsets[part].clamp(0, width - 1)]
            log_p_parts.append(_log_softmax(processed.double()).gather(1, tested[:, None])[:, 0])
    best = _joined(best_parts)
    log_p = _joined(log_p_parts)[packing.tests] if width else known_ids.double()

    num_rows = 1 + (width if draft_logits is not None else 0)
    accepted_parts, token_parts = [], []
    for part in parts_of(num_requests, num_rows * row_bytes(vocab, torch.float64)):
        own, ids, lens, anchors = rows.take(part), draft_ids[part], draft_lens[part], anchor_positions[part]
        log_q = None
        if draft_logits is not None:
            temperature = torch.where(own.greedy, 1.0, own.temperature)[:, None, None]
            log_q = _log_softmax(draft_logits[part].double() / temperature)
        num_accepted = _num_accepted(ids, lens, log_p[part], log_q, best[packing.tests[part]], own, anchors)
        last = (packing.starts[part] + num_accepted).clamp(min=0, max=num_logits - 1)
        if len(parts) > 1:  # the processed rows of earlier parts were not kept
            weights = _process(target_logits[last], by_row.take(last), _cut(bias, last), _cut(mask, last)).double()
        else:
            weights = processed[last].double()
        if width > 0:
            weights = _emission_weights(weights, *_rejection(ids, lens, num_accepted, log_q, vocab))
        drawn = _draw(weights, own, anchors + 1 + num_accepted)
        accepted_parts.append(num_accepted)
        token_parts.append(torch.where(own.greedy, best[last], drawn))
    num_accepted = _joined(accepted_parts)
    return num_accepted, _emit(num_accepted, _joined(token_parts), draft_ids, draft_lens)


def _num_accepted(
    draft_ids: Tensor,
    draft_lens: Tensor,
    log_p: Tensor,
    log_q: Tensor | None,
    best: Tensor,
    rows: SamplingRows,
    anchor_positions: Tensor,
) -> Tensor:
    """[n] int64: drafts that :func:`verify` accepts.

    Args:
        log_p: [n, width] fp64, of each draft under the target.
        log_q: [n, width, vocab] fp64, log distributions that the drafts were drawn from; None for one-hot.
        best: [n, width] best token of the row that tests each draft.
        draft_ids, draft_lens, rows, anchor_positions: as in :func:`verify`.
    """
    places, known = torch.arange(draft_ids.shape[1], device=draft_ids.device), draft_ids.clamp_min(0)
    if log_q is not None:
        log_p = log_p - log_q.gather(-1, known[..., None])[..., 0]
    bits = noise_bits(rows.seeds[:, None], anchor_positions[:, None] + 1 + places, ACCEPT_STREAM, 0, torch.zeros_like(places))
    passes = torch.log(uniform_noise(bits)) < log_p
    passes = torch.where(rows.greedy[:, None], known == best, passes)
    return _leading(passes & (places < draft_lens[:, None]) & (draft_ids >= 0))


def _rejection(
    draft_ids: Tensor, draft_lens: Tensor, num_accepted: Tensor, log_q: Tensor | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """Distribution [n, vocab] fp64 of the first draft that was not accepted, and whether a draft was rejected [n] bool."""
    failed = num_accepted.clamp_max(draft_ids.shape[1] - 1)[:, None]
    found = draft_ids.gather(-1, failed)
    rejected = (num_accepted < draft_lens) & (found[:, 0] >= 0)
    if log_q is None:
        nothing = torch.zeros(draft_ids.shape[0], vocab, dtype=torch.float64, device=draft_ids.device)
        return nothing.scatter_(-1, found.clamp_min(0), 1.0), rejected
    return torch.exp(log_q.gather(1, failed[..., None].expand(-1, -1, vocab))[:, 0]), rejected


# 0: see verify.
@op(tolerance=0.0)
def verify_coupled(
    target_logits: Tensor,
    draft_ids: Tensor,
    draft_lens: Tensor,
    rows: SamplingRows,
    anchor_positions: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verification with the same text as plain sampling, token by token, not only in distribution.

    Every row draws its token exactly as plain sampling does (:func:`_draw`).  A draft is accepted if and only if it is that
    token.  So the text depends only on seed and target, not on the drafts or their number.  Drafts in mode ``coupled`` are
    accepted most often, a little less often than :func:`verify` accepts.

    Args and returns: as :func:`verify`, without draft logits.

    Source: accept iff draft = argmax_v(log p(v) + g(v)); the draft is argmax_v(log q(v) + g(v)) with the same noise g.
    """
    draft_ids, draft_lens = draft_ids.long(), draft_lens.long()
    width, num_logits = draft_ids.shape[1], target_logits.shape[0]
    packing = _pack(draft_lens, width, num_logits)
    positions = anchor_positions[packing.owners] + 1 + packing.offsets
    tokens = _sampled(target_logits, rows.take(packing.owners), positions, bias, mask)

    places = torch.arange(width, device=draft_ids.device)
    offered = (places < draft_lens[:, None]) & (draft_ids >= 0)
    num_accepted = _leading((draft_ids == tokens[packing.tests]) & offered)
    return num_accepted, _emit(num_accepted, tokens[packing.row(num_accepted)], draft_ids, draft_lens)


# 1e-5: fp32 sums over rank 256 and over width 5376.
@op(tolerance=1e-5)
def markov_step(
    base_logits: Tensor,
    prev: Tensor,
    embed: Tensor,
    head: Tensor,
    hidden: Tensor,
    confidence_weight: Tensor,
    rows: SamplingRows,
    anchor_positions: Tensor,
    draft_idx: int,
    mode: DraftSampling,
    confidence_temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose draft k, and estimate the probability that it is accepted.

    z = U + W2 W1[prev].  For greedy rows and in mode ``argmax`` the draft is the best of z; else it is a draw from
    softmax(z / T).  No filter, bias or mask applies, because exactness does not need them.  The confidence does not depend on
    the draft itself; :func:`lay_out_rounds` relies on this.

    Args:
        base_logits: [num_rows, vocab] base logits of draft k, U.
        prev: [num_rows] int: the anchor for k = 1, else draft k-1.
        embed: [vocab, rank], W1.
        head: [vocab, rank], W2; not copied if it has the accumulation dtype.
        hidden: [num_rows, hidden_size] drafter output for draft k *before* its final norm.
        confidence_weight: [1, hidden_size + rank].
        rows: sampling parameters of each row.
        anchor_positions: [num_rows] int.
        draft_idx: k, from 1.
        mode: see :data:`DraftSampling`.
        confidence_temperature: divisor of the confidence's logit; a value above 1 moves the confidence towards 1/2.

    Returns:
        draft_ids: [num_rows] int64, equal scores by lower id.
        logits: [num_rows, vocab] fp32 (fp64 for fp64 logits): z, before the temperature.  :func:`verify` needs exactly
            these numbers, not rounded.
        confidence: [num_rows] same dtype, in [0, 1]: probability that draft k is accepted if all drafts before it are accepted.

    Source: DSpark paper, Markov head and confidence head; Gumbel noise of DRAFT_STREAM (EMIT_STREAM in mode ``coupled``).
    """
    dtype = accumulation_dtype(base_logits)
    token = embed[prev].to(dtype)
    logits = base_logits.to(dtype) + matmul_rows(token, head.to(dtype))
    features = torch.cat([hidden.to(dtype), token], dim=-1)
    confidence = sigmoid(row_sum(features * confidence_weight.to(dtype))[..., 0] / confidence_temperature)
    if mode == "argmax":
        return _best(logits), logits, confidence
    stream, round_key = (EMIT_STREAM, 0) if mode == "coupled" else (DRAFT_STREAM, draft_idx)
    temperature = torch.where(rows.greedy, 1.0, rows.temperature)[:, None]
    positions = anchor_positions + draft_idx
    drafts = [
        _draw(logits[part].double() / temperature[part], rows.take(part), positions[part], stream, round_key)
        for part in _parts(logits)
    ]
    return _joined(drafts), logits, confidence


def schedule_lengths(confidences: Tensor, budget: Tensor | int, caps: Tensor) -> Tensor:
    """Choose which drafts to verify: those that are most likely to be accepted, up to a budget.

    Draft j of a request survives with probability a_j = c_1 ... c_j.  Among the drafts within the caps, those with the
    ``budget`` largest a_j are verified; equal ones by smaller j, then by smaller request number.  a_j never grows with j, so the
    verified drafts of a request are a prefix.

    Invariant: whether draft k of a request is verified depends only on the request's confidences up to k, i.e. on its drafts
    before k, and on other requests.  So :func:`verify` is exact *if budget and caps do not depend on these confidences or
    drafts*: take the budget from an earlier round, and the caps from decided tokens.

    Args:
        confidences: [num_requests, width] float; NaN and infinities count as 0, other values are clamped to [0, 1].
        budget: total number of drafts, an int or an int tensor of one element; may exceed the sum of the caps.
        caps: [num_requests] int, at most this many drafts of the request; 0 or less for none.

    Returns:
        [num_requests] int64 with sum min(budget, sum(clamp(caps, 0, width))).

    Source: DSpark paper, confidence-scheduled verification.
    """
    width = confidences.shape[1]
    # [width, num_requests]: in this order a stable sort orders equal survivals by j, then by request.
    survival = torch.where(torch.isfinite(confidences), confidences, 0.0).float().clamp(0.0, 1.0).t().contiguous()
    for place in range(1, width):  # not cumprod: its order of products depends on the device
        survival[place] *= survival[place - 1]
    allowed = torch.arange(width, device=caps.device)[:, None] < caps
    order = torch.sort(torch.where(allowed, survival, -1.0).flatten(), descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return ((rank < budget).view_as(allowed) & allowed).sum(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """The rows of a step's rounds, on the device.

    Attributes:
        width: largest number of rows of a round.
        starts: [num_rounds] int64 position of each anchor.
        lens: [num_rounds] int64 number of drafts after each anchor.
        first_rows: [num_rounds] int64 row of each anchor, counted from the first row of all rounds.
        owners: [num_rows] int64 round of each row; num_rounds for padding rows.
        offsets: [num_rows] int64 number of tokens before each row in its round; 0 for padding rows.
        token_ids: [num_rows] int64; 0 for padding rows.
        positions: [num_rows] int64; 0 for padding rows.
    """

    width: int
    starts: Tensor
    lens: Tensor
    first_rows: Tensor
    owners: Tensor
    offsets: Tensor
    token_ids: Tensor
    positions: Tensor


# 0: products are taken left to right in fp32, and everything else is integers.
@op(tolerance=0.0)
def lay_out_rounds(
    confidences: Tensor, budget: Tensor | int, caps: Tensor, starts: Tensor, token_ids: Tensor, num_rows: int
) -> RoundRows:
    """Choose how many drafts each round verifies, and give consecutive rows to the anchors and these drafts.

    Args:
        confidences, budget, caps: as for :func:`schedule_lengths`; with a budget of at least the sum of the caps, all drafts
            within the caps are verified.
        starts: [num_rounds] int64 position of each anchor; num_rounds is at least 1.
        token_ids: [num_rounds, width + 1] int64, anchors and drafts.
        num_rows: total number of rows, at least sum(lens + 1).

    Returns:
        Rows of the rounds in their order, then padding rows.

    Cost: no host sync; one captured graph works for every budget in a tensor.
    """
    lens = schedule_lengths(confidences, budget, caps)
    ends = (lens + 1).cumsum(0)
    first_rows = ends - lens - 1
    rows = torch.arange(num_rows, device=starts.device)
    owners = torch.searchsorted(ends, rows, right=True)
    is_padding = owners == len(starts)
    known = owners.clamp_max(len(starts) - 1)
    offsets = torch.where(is_padding, 0, rows - first_rows[known])
    return RoundRows(
        width=token_ids.shape[1],
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        owners=owners,
        offsets=offsets,
        token_ids=torch.where(is_padding, 0, token_ids[known, offsets]),
        positions=torch.where(is_padding, 0, starts[known] + offsets),
    )
