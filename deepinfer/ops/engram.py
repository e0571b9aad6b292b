"""Engram: table rows of hashed n-grams, looked up per token and added to the streams with a gate.

Source: model report, Engram section; ``engram_*`` keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.arithmetic import rms_scale, row_sum, sigmoid
from deepinfer.ops.op import Codes, op
from deepinfer.ops.quant import QuantisedRows, RoundedRows, unpack_table

DEAD = -1
"""Compressed id of a position without a token, and of an image position."""


@op(tolerance=0.0)
def engram_rows(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_class: int) -> Tensor:
    """Table rows of each token's n-grams.

    Args:
        ids: [num_tokens, max_ngram] int64 compressed ids at positions t, t-1, …; :data:`DEAD` where there is no text token.
        multipliers: [max_ngram] int64, odd; products cannot overflow.
        primes, offsets: [max_ngram - 1, num_heads] int64.
        pad_class: compressed id that is used from the first dead position on.

    Returns:
        [num_tokens, (max_ngram - 1) * num_heads] int64.

    Source: running xor of id * multiplier over the shifts, modulo a prime per (n, head).
    """
    dead = (ids == DEAD).cumsum(1) > 0
    mixed = torch.where(dead, pad_class, ids) * multipliers
    running = mixed[:, 0]
    columns = []
    for shift in range(1, ids.shape[1]):
        running = running ^ mixed[:, shift]
        columns.append(running.unsqueeze(1) % primes[shift - 1] + offsets[shift - 1])
    return torch.cat(columns, dim=1)


# Share 0: the table's codes are copied.
@op(tolerance=Codes("mxfp8", share=0.0))
def engram_gather(codes: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> QuantisedRows:
    """Concatenate each token's table rows.

    Args:
        codes: [num_table_rows, dim] float8_e4m3fn.
        scale: [num_table_rows, dim / 32] uint8 UE8M0.
        rows: [num_tokens, num_columns] int64, indices of table rows.
        dtype: dtype of the activations.

    Returns:
        [num_tokens, num_columns * dim] quantised.  No value is rounded again, because a table's scales are never
        above those of the quantiser.
    """
    flat = rows.flatten()
    picked = unpack_table(codes.view(torch.uint8)[flat].view(codes.dtype), scale[flat], dtype)
    return RoundedRows(picked.view(rows.shape[0], -1))


@op(tolerance=4e-3)
def engram_gate(kv: Tensor, streams: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float) -> Tensor:
    """Add the looked-up value to every stream, times a gate that measures how well stream and key agree.

    Args:
        kv: [num_tokens, (n + 1) * hidden] bf16 or fp64: a key per stream, then the value.
        streams: [num_tokens, n, hidden], same dtype.
        q_weight, k_weight: [n, hidden] wide.
        is_image: [num_tokens] bool; the gate of image positions is 0.
        eps: added to both mean squares.

    Returns:
        [num_tokens, n, hidden], rounded to the streams' dtype.

    Source: gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6))); d is the scaled product of the normed stream and key.
    """
    num_streams, hidden = streams.shape[1:]
    wide = q_weight.dtype
    split = kv.to(wide).unflatten(1, (num_streams + 1, hidden))
    keys, value = split[:, :num_streams], split[:, num_streams:]
    x = streams.to(wide)
    product = row_sum(x * q_weight * k_weight * keys)
    d = (hidden**-0.5 * product * rms_scale(x, eps) * rms_scale(keys, eps)).squeeze(-1)
    gate = sigmoid(torch.sign(d) * torch.sqrt(d.abs().clamp_min(1e-6)))
    gate = torch.where(is_image.unsqueeze(1), 0, gate)
    result: Tensor = (x + gate.unsqueeze(-1) * value).to(streams.dtype)
    return result
