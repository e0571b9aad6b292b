"""Streams, norms and rotations, written for gradients: what surrounds every sublayer.

Arithmetic follows :mod:`deepinfer.ops.norm` and :mod:`deepinfer.ops.engram`.  Products and sums run wide (fp32, or fp64 for the
proof), and every result that the model keeps is rounded once to the dtype of activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.arithmetic import accumulation_dtype
from training.grids import round_mxfp8
from training.sinkhorn import sinkhorn

P = ParamSpec("P")
R = TypeVar("R")


def region(body: Callable[P, R]) -> Callable[P, R]:
    """Compile ``body`` for tensors on a GPU; the first argument says where they are.

    Regions are small functions that layers share, so that all layers of a kind use one compiled program.
    """

    @functools.cache
    def compiled() -> Callable[P, R]:
        return torch.compile(body, dynamic=False)

    @functools.wraps(body)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return (compiled() if first.is_cuda else body)(*args, **kwargs)

    return call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim, rounded once to x's dtype; ``weight`` is wide."""
    wide = x.to(weight.dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class Rotation(NamedTuple):
    """Cosines and sines, [num_rows, rope_dim / 2], wide."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor) -> Rotation:
        """Rotation at ``positions`` [num_rows] integers; ``frequencies`` [rope_dim / 2] wide."""
        angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
        return cls(torch.cos(angles), torch.sin(angles))


def rotate(x: Tensor, rotation: Rotation, *, is_inverse: bool = False) -> Tensor:
    """Rotate the last dims in interleaved pairs.

    Args:
        x: [num_rows, width] or [num_rows, num_heads, width].
        rotation: of the rows.
        is_inverse: rotate back.
    """
    cos, sin = rotation
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if is_inverse:
        sin = -sin
    still = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., still:].to(cos.dtype).unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :still], turned.to(x.dtype)], dim=-1)


class Hyper(NamedTuple):
    """Weights around one sublayer.

    Attributes:
        fn: [2n + n^2, n * hidden].
        base: [2n + n^2] wide.
        scale: [3] wide, of pre, post and mixing numbers.
        norm: [hidden] wide.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


class Mix(NamedTuple):
    """How a sublayer is tied into the streams, per token, wide.

    Attributes:
        pre: [num_tokens, n] collapses the streams for the next sublayer.
        post: [num_tokens, n].
        comb: [num_tokens, n, n], [source, target].
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def _write(streams: Tensor, delta: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = accumulation_dtype(streams)
    x, y = streams.to(wide), delta.to(wide)
    n = streams.shape[1]
    copies = []
    for target in range(n):  # n is small: sums of rows fuse into one pass over memory, a batched product does not
        total = post[:, target, None] * y
        for source in range(n):
            total = total + comb[:, source, target, None] * x[:, source]
        copies.append(total.to(streams.dtype))
    return torch.stack(copies, dim=1)


def _collapse(streams: Tensor, weights: Tensor) -> Tensor:
    wide = streams.to(weights.dtype)
    total = weights[:, 0, None] * wide[:, 0]
    for copy in range(1, streams.shape[1]):
        total = total + weights[:, copy, None] * wide[:, copy]
    return total.to(streams.dtype)


def _measure(
    streams: Tensor, pre: Tensor, hyper: Hyper, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = streams.shape[1]
    flat = streams.flatten(1)
    wide = accumulation_dtype(streams)
    raw = F.linear(flat, hyper.fn).to(wide)
    m = raw * torch.rsqrt(flat.to(wide).square().mean(-1, keepdim=True) + rms_eps)
    next_pre = torch.sigmoid(hyper.scale[0] * m[:, :n] + hyper.base[:n]) + hc_eps
    post = 2 * torch.sigmoid(hyper.scale[1] * m[:, n : 2 * n] + hyper.base[n : 2 * n])
    logits = (hyper.scale[2] * m[:, 2 * n :] + hyper.base[2 * n :]).unflatten(1, (n, n))
    x = rms_norm(_collapse(streams, pre), hyper.norm, rms_eps)
    return x, round_mxfp8(x), next_pre, post, logits


_measure_region = region(_measure)


@region
def _write_and_measure(
    streams: Tensor,
    delta: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    hyper: Hyper,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    streams = _write(streams, delta, post, comb)
    return streams, *_measure(streams, pre, hyper, hc_eps, rms_eps)


class Streams:
    """The residual streams on their way through the sublayers.

    Attributes:
        values: [num_tokens, n, hidden]; the last sublayer's output is not in them until :meth:`written`.
    """

    def __init__(self, embedded: Tensor, n: int, *, num_rounds: int, hc_eps: float, rms_eps: float) -> None:
        """``n`` equal copies of ``embedded`` [num_tokens, hidden]; the first sublayer reads copy 0."""
        wide = accumulation_dtype(embedded)
        self.values = embedded.unsqueeze(1).expand(-1, n, -1).contiguous()
        self._pre = torch.eye(n, dtype=wide, device=embedded.device)[:1].expand(len(embedded), -1)
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None
        self._constants = num_rounds, hc_eps, rms_eps

    def written(self) -> Tensor:
        """[num_tokens, n, hidden] with the last sublayer's output."""
        if self._pending is not None:
            self.values = _write_region(self.values, *self._pending)
            self._pending = None
        return self.values

    def enter(self, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """The input of the next sublayer: x [num_tokens, hidden] normed, and the same on the MXFP8 grid."""
        num_rounds, hc_eps, rms_eps = self._constants
        if self._pending is None:
            x, x8, pre, post, logits = _measure_region(self.values, self._pre, hyper, hc_eps, rms_eps)
        else:
            self.values, x, x8, pre, post, logits = _write_and_measure(
                self.values, *self._pending, self._pre, hyper, hc_eps, rms_eps
            )
        self._pre = pre
        self._mix = post, sinkhorn(logits, num_rounds, hc_eps)
        return x, x8

    def leave(self, delta: Tensor) -> None:
        """The output [num_tokens, hidden] of the sublayer that :meth:`enter` began."""
        self._pending = (delta, *self._mix)

    def collapsed(self) -> Tensor:
        """[num_tokens, hidden] with the last sublayer's pre weights."""
        return _collapse_region(self.written(), self._pre)


_write_region = region(_write)
_collapse_region = region(_collapse)


@region
def gated(kv: Tensor, streams: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Streams with Engram's looked-up value, as far as stream and key agree.

    Args:
        kv: [num_tokens, (n + 1) * hidden], a key for each stream, then the value.
        streams: [num_tokens, n, hidden].
        q_weight, k_weight: [n, hidden] wide.
    """
    n, hidden = streams.shape[1:]
    split = kv.to(q_weight.dtype).unflatten(1, (n + 1, hidden))
    keys, value = split[:, :n], split[:, n:]
    x = streams.to(q_weight.dtype)
    scales = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    d = hidden**-0.5 * (x * q_weight * k_weight * keys).sum(-1) * scales
    gate = torch.sigmoid(torch.sign(d) * torch.sqrt(d.abs().clamp_min(1e-6)))
    result: Tensor = (x + gate.unsqueeze(-1) * value).to(streams.dtype)
    return result
