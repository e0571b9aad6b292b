"""Kernels of :mod:`deepinfer.ops.sampling`: the layout of a step's rounds.

All sizes are small (a few thousand drafts), so the time is latency.  Therefore the kernel is one launch of one thread block, and
it never reads what it has written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.ops import sampling
from deepinfer.ops.sampling import RoundRows

_MAX_ENTRIES = 8192
"""Limit of rounds times places, both rounded up to powers of two: a block of 512 threads holds so many in registers."""

_SURVIVAL_BITS = 30
"""The bits of a float in [0, 1], read as an integer, are below 2^30 and have the same order."""


@triton.jit(
    do_not_specialize=["confidences", "budget", "caps", "starts", "token_ids", "out", "num_rounds", "num_rows"],
)
def _lay_out_rounds(
    confidences: tl.tensor,
    budget: tl.tensor,
    caps: tl.tensor,
    starts: tl.tensor,
    token_ids: tl.tensor,
    out: tl.tensor,
    num_rounds: tl.tensor,
    num_rows: tl.tensor,
    IS_BUDGET_TENSOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    PLACES: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    PADDING_BLOCK: tl.constexpr,
) -> None:
    """One block computes everything; ``out`` is lens, first rows, owners, offsets, token ids and positions, concatenated."""
    numbers = tl.arange(0, ROUNDS)
    rounds, places = numbers[:, None], tl.arange(0, PLACES)[None, :]
    is_round = rounds < num_rounds
    cap = tl.load(caps + rounds, mask=is_round, other=0)
    start = tl.load(starts + rounds, mask=is_round, other=0)
    ids = tl.load(token_ids + rounds * (WIDTH + 1) + places, mask=is_round & (places <= WIDTH), other=0)
    if IS_BUDGET_TENSOR:
        budget = tl.load(budget)

    # Each place gets the product of the confidences up to it, from left to right.
    survival = tl.full([ROUNDS, PLACES], 1.0, tl.float32)
    for place in tl.static_range(WIDTH):
        confidence = tl.load(confidences + rounds * WIDTH + place, mask=is_round, other=0.0)
        confidence = tl.where((confidence > 0) & (confidence < float("inf")), confidence, 0.0).to(tl.float32)
        survival = tl.where(place <= places, survival * tl.minimum(confidence, 1.0), survival)

    # No two keys are equal: the low bits of a key are the rank among equal survivals.
    rank = ROUNDS * PLACES - 1 - (places * ROUNDS + rounds)
    key = (survival.to(tl.int32, bitcast=True).to(tl.int64) << INDEX_BITS) | rank
    allowed = is_round & (places < WIDTH) & (places < cap)
    key = tl.where(allowed, key, -1)

    # Find a threshold that exactly ``budget`` keys reach, bit by bit from the highest bit.  Any such threshold is right, so most
    # bits are not needed.
    budget = tl.maximum(budget, 0)
    threshold, bit = tl.full([], 0, tl.int64), tl.full([], 1 << (KEY_BITS - 1), tl.int64)
    count = tl.sum(allowed.to(tl.int32))
    while (count > budget) & (bit > 0):
        reached = tl.sum((key >= (threshold | bit)).to(tl.int32))
        is_enough = reached >= budget
        threshold = tl.where(is_enough, threshold | bit, threshold)
        count = tl.where(is_enough, reached, count)
        bit = bit >> 1

    lens = tl.sum((key >= threshold).to(tl.int32), 1)
    sizes = tl.where(numbers < num_rounds, lens + 1, 0)
    first = tl.cumsum(sizes, 0) - sizes
    tl.store(out + numbers, lens.to(tl.int64), mask=numbers < num_rounds)
    tl.store(out + num_rounds + numbers, first.to(tl.int64), mask=numbers < num_rounds)

    owners = out + 2 * num_rounds
    offsets, tokens, positions = owners + num_rows, owners + 2 * num_rows, owners + 3 * num_rows
    row = first[:, None] + places
    is_own = is_round & (places <= lens[:, None]) & (row < num_rows)
    tl.store(owners + row, rounds.to(tl.int64), mask=is_own)
    tl.store(offsets + row, places.to(tl.int64), mask=is_own)
    tl.store(tokens + row, ids, mask=is_own)
    tl.store(positions + row, start + places, mask=is_own)
    begin, zeros = tl.sum(sizes, 0), tl.zeros([PADDING_BLOCK], tl.int64)
    while begin < num_rows:
        padding = begin + tl.arange(0, PADDING_BLOCK)
        tl.store(owners + padding, zeros + num_rounds, mask=padding < num_rows)
        tl.store(offsets + padding, zeros, mask=padding < num_rows)
        tl.store(tokens + padding, zeros, mask=padding < num_rows)
        tl.store(positions + padding, zeros, mask=padding < num_rows)
        begin += PADDING_BLOCK


@sampling.lay_out_rounds.implement("hopper")
def lay_out_rounds(
    confidences: Tensor, budget: Tensor | int, caps: Tensor, starts: Tensor, token_ids: Tensor, num_rows: int
) -> RoundRows:
    """One kernel in one thread block.  It is compiled for each width and each power of two of rounds, not for each number.

    The chosen drafts are those whose key (survival, smaller place, smaller round) reaches a threshold.  Bisection over the bits
    of the keys finds the threshold.  Each step of it is a count.  If survivals differ, it takes about as many steps as the number
    of drafts has bits; with 1024 rounds of 7 it takes at most 43.  Sorting would take as many steps that exchange data.

    Raises:
        ConfigError: the registers of a block cannot hold so many rounds.

    Cost: one launch, no host sync; each number is read once and written once.
    """
    num_rounds, width = confidences.shape
    num_padded, places = triton.next_power_of_2(num_rounds), triton.next_power_of_2(width + 1)
    entries = num_padded * places
    if entries > _MAX_ENTRIES:
        raise ConfigError(
            f"{num_rounds} rounds of {width} drafts exceed the {_MAX_ENTRIES // places} that one step can lay out; "
            "lower the number of sequences that run at once"
        )
    out = torch.empty(2 * num_rounds + 4 * num_rows, dtype=torch.int64, device=starts.device)
    is_tensor = isinstance(budget, Tensor)
    index_bits = entries.bit_length() - 1
    _lay_out_rounds[(1,)](
        confidences.contiguous(),
        budget if is_tensor else min(int(budget), entries),
        caps.contiguous(),
        starts.contiguous(),
        token_ids.contiguous(),
        out,
        num_rounds,
        num_rows,
        IS_BUDGET_TENSOR=is_tensor,
        WIDTH=width,
        ROUNDS=num_padded,
        PLACES=places,
        INDEX_BITS=index_bits,
        KEY_BITS=_SURVIVAL_BITS + index_bits,
        PADDING_BLOCK=512,
        num_warps=min(max(entries // 256, 4), 16),
    )
    lens, first_rows, owners, offsets, ids, positions = out.split([num_rounds] * 2 + [num_rows] * 4)
    return RoundRows(
        width=token_ids.shape[1],
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        owners=owners,
        offsets=offsets,
        token_ids=ids,
        positions=positions,
    )
