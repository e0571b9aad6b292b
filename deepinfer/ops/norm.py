"""Hyper-connections, norms and rotations: the operators on the residual streams.

Single-pass mHC: the weights that collapse the streams for a sublayer come from the sublayer before it.  So one pass writes a
sublayer's output into the streams, measures them and collapses them for the next sublayer.  Source: model report,
hyper-connection section; ``hc_mult``, ``hc_sinkhorn_iters``, ``hc_eps``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import RopeScaling
from deepinfer.ops.arithmetic import accumulation_dtype, linear_bf16, matmul_items, rms_norm, row_sum, sigmoid
from deepinfer.ops.op import Codes, op
from deepinfer.ops.quant import QuantisedRows, RoundedRows, encode_window, round_mxfp8

_FLIPPED = 1e-4
"""Share of quantised elements that may differ after an RMS norm.

A sum in another order changes the statistic by 2^-22, and so all elements before they are rounded to bf16.  At most 2^-13 of the
elements then round to another bf16 number.  One in 16 of these lies on the border of two E4M3 codes: the share is 1e-5.  The
larger limit leaves room for kernels with a faster reciprocal root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """Hyper-connection weights of one sublayer; ``wide`` is the accumulation dtype.

    Attributes:
        fn: [2n + n^2, n * hidden] wide, maps the flattened streams (n copies) to the raw numbers.
        base, scale: [2n + n^2] wide, for each raw number; the checkpoint has one scale for each of pre, post and comb.
        norm: [hidden] wide, weight of the RMSNorm before the sublayer.
        num_iterations: Sinkhorn column passes.
        eps: added to pre weights and Sinkhorn sums.
        rms_eps: added to the mean square in norms and stream statistics.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor
    num_iterations: int
    eps: float
    rms_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How one sublayer reads and writes the streams, per token, in the accumulation dtype.

    Attributes:
        pre: [num_tokens, n] weights that collapse the streams for the *next* sublayer.
        post: [num_tokens, n] weights of the sublayer's output in each stream.
        comb: [num_tokens, n, n] weights of source streams in target streams, [source, target].
    """

    pre: Tensor
    post: Tensor
    comb: Tensor

    def rows(self, index: Tensor) -> Mix:
        """The mix of some tokens, ``index`` [num_rows] int64."""
        return Mix(pre=self.pre[index], post=self.post[index], comb=self.comb[index])


@op(tolerance=4e-3)
def mhc_post(streams: Tensor, delta: Tensor, mix: Mix) -> Tensor:
    """Write a sublayer's output into the streams: X'_j = post_j y + sum_i comb_ij X_i.

    Args:
        streams: [num_tokens, n, hidden] bf16 or fp64.
        delta: [num_tokens, hidden], the sublayer's output, same dtype.
        mix: mix of the same sublayer.

    Returns:
        [num_tokens, n, hidden], rounded to the streams' dtype.
    """
    wide = accumulation_dtype(streams)
    left = torch.cat([mix.comb.transpose(1, 2), mix.post.unsqueeze(-1)], dim=-1)
    right = torch.cat([streams, delta.unsqueeze(1)], dim=1).to(wide)
    return matmul_items(left, right).to(streams.dtype)


@op(tolerance=(4e-3, 1e-5, 1e-5))
def mhc_pre(streams: Tensor, pre: Tensor, fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure the streams and collapse them for the next sublayer.

    Args:
        streams: [num_tokens, n, hidden] bf16 or fp64.
        pre: [num_tokens, n] wide, from the sublayer before; one-hot on copy 0 for the first sublayer.
        fn: [2n + n^2, n * hidden] wide, of the next sublayer.

    Returns:
        collapsed: [num_tokens, hidden] in the streams' dtype.
        raw: [num_tokens, 2n + n^2] wide, fn times the flattened streams.
        square_sum: [num_tokens, 1] wide, sum of squares of the flattened streams.
    """
    wide = streams.to(fn.dtype)
    flat = wide.flatten(1)
    collapsed = matmul_items(pre.unsqueeze(1), wide).squeeze(1).to(streams.dtype)
    return collapsed, linear_bf16(flat, fn), row_sum(flat.square())


@op(tolerance=4e-3)
def mhc_mix(streams: Tensor, delta: Tensor, mix: Mix, fn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`mhc_post` of one sublayer and :func:`mhc_pre` of the next; reads and writes the streams once.

    Returns:
        streams: as :func:`mhc_post`.
        collapsed, raw, square_sum: as :func:`mhc_pre`.
    """
    streams = mhc_post.reference(streams, delta, mix)
    return streams, *mhc_pre.reference(streams, mix.pre, fn)


@op(tolerance=(1e-5, 4e-3, Codes("mxfp8", share=_FLIPPED)))
def mhc_finish(raw: Tensor, square_sum: Tensor, collapsed: Tensor, weights: HyperWeights) -> tuple[Mix, Tensor, QuantisedRows]:
    """Turn raw numbers into a sublayer's mix, and norm its input.

    Args:
        raw, square_sum, collapsed: results of :func:`mhc_pre`.
        weights: weights of the sublayer.

    Returns:
        mix: mix of the sublayer.
        x: [num_tokens, hidden] normed input.
        x8: the same, quantised for FP8 and FP4 linear layers.

    Source: pre = sigmoid + eps; post = 2 sigmoid; comb = a softmax over the targets, then Sinkhorn passes with eps added to every
    sum.  The first and the last pass normalise over the sources.
    """
    n = math.isqrt(raw.shape[1] + 1) - 1
    width = n * collapsed.shape[1]
    m = raw * torch.rsqrt(square_sum / width + weights.rms_eps)
    affine = weights.scale * m + weights.base
    gates = sigmoid(affine[:, : 2 * n])
    pre, post = gates[:, :n] + weights.eps, 2 * gates[:, n:]
    logits = affine[:, 2 * n :].unflatten(1, (n, n))
    shares = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = shares / shares.sum(-1, keepdim=True) + weights.eps
    # With tokens in the last dimension a CPU uses its vector units.  On a GPU the order of sums would then depend on num_tokens.
    is_token_last = comb.device.type == "cpu"
    source, target = (0, 1) if is_token_last else (1, 2)
    if is_token_last:
        comb = comb.permute(1, 2, 0).contiguous()
    comb.div_(comb.sum(source, keepdim=True).add_(weights.eps))
    for _ in range(weights.num_iterations - 1):
        comb.div_(comb.sum(target, keepdim=True).add_(weights.eps))
        comb.div_(comb.sum(source, keepdim=True).add_(weights.eps))
    if is_token_last:
        comb = comb.permute(2, 0, 1)
    x = rms_norm(collapsed, weights.norm, weights.rms_eps)
    return Mix(pre=pre, post=post, comb=comb), x, RoundedRows(round_mxfp8(x))


@op(tolerance=4e-3)
def mhc_collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's streams.

    Args:
        streams: [num_rows, n, hidden] bf16 or fp64.
        weights: [num_rows, n] wide: a sublayer's pre weights, or 1 / n for the plain mean.

    Returns:
        [num_rows, hidden], rounded once to the streams' dtype.
    """
    return matmul_items(weights.unsqueeze(1), streams.to(weights.dtype)).squeeze(1).to(streams.dtype)


@op(tolerance=4e-3)
def final_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Collapse the streams with the last sublayer's pre weights and norm them for the LM head.

    Args:
        streams: [num_rows, n, hidden] bf16 or fp64.
        pre: [num_rows, n] wide.
        weight: [hidden] wide.

    Returns:
        [num_rows, hidden] in the streams' dtype.
    """
    return rms_norm(mhc_collapse.reference(streams, pre), weight, eps)


@op(tolerance=Codes("mxfp8", share=_FLIPPED))
def norm8(x: Tensor, weight: Tensor, eps: float) -> QuantisedRows:
    """RMSNorm, then quantise; for an input that only FP8 linear layers read.

    Args:
        x: [num_rows, width] bf16 or fp64; width a multiple of 32.
        weight: [width] wide.

    Returns:
        [num_rows, width] quantised.
    """
    return RoundedRows(round_mxfp8(rms_norm(x, weight, eps)))


# ----------------------------------------------------------------------------------------------------------------------- rotation


def rope_frequencies(rope_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each rotary pair: [rope_dim / 2] float64.

    With ``scaling``: YaRN's ramp from base^(-2i/rope_dim) to the same divided by the factor, without attention temperature.

    Source: ``rope_theta``, ``compress_rope_theta``, ``rope_scaling``.
    """
    pairs = torch.arange(rope_dim // 2, dtype=torch.float64)
    plain = base ** (-2 * pairs / rope_dim)
    if scaling is None:
        return plain

    def pair_with(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), rope_dim - 1)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of a list of positions, [num_positions, rope_dim / 2], in the accumulation dtype."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor) -> Rotation:
        """Rotation at ``positions`` [num_positions] integers, ``frequencies`` [rope_dim / 2] in the accumulation dtype."""
        angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
        return cls(cos=torch.cos(angles), sin=torch.sin(angles))

    def inverse(self) -> Rotation:
        """The inverse rotation."""
        return Rotation(cos=self.cos, sin=-self.sin)

    def rows(self, index: Tensor) -> Rotation:
        """Rotation of a subset of the positions, ``index`` [num_rows]."""
        return Rotation(cos=self.cos[index], sin=self.sin[index])


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last dims of x in interleaved pairs, computed wide and rounded to x's dtype.

    Args:
        x: [num_tokens, width] or [num_tokens, num_heads, width] bf16 or fp64.
        rotation: rotation at the tokens' positions.

    Returns:
        Same shape and dtype; only the last rope_dim dims change.
    """
    cos, sin = rotation.cos, rotation.sin
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    still = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., still:].to(cos.dtype).unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :still], turned.to(x.dtype)], dim=-1)


@op(tolerance=(Codes("mxfp8", share=_FLIPPED), Codes("window", share=_FLIPPED)))
def qkv_norm(qkv: Tensor, q_weight: Tensor, kv_weight: Tensor, rotation: Rotation, eps: float) -> tuple[QuantisedRows, Tensor]:
    """Split the fused query/key projection, norm both parts, and make the window record.

    Args:
        qkv: [num_tokens, q_lora_rank + head_dim] bf16 or fp64.
        q_weight: [q_lora_rank] wide.
        kv_weight: [head_dim] wide.
        rotation: rotation at the tokens' positions.

    Returns:
        q_latent8: [num_tokens, q_lora_rank] quantised; every consumer is an FP8 linear layer.
        records: [num_tokens, window record bytes] uint8.
    """
    rank = q_weight.shape[0]
    return norm8.reference(qkv[:, :rank], q_weight, eps), encode_window(window_keys(qkv[:, rank:], kv_weight, rotation, eps))


@op(tolerance=Codes("window", share=_FLIPPED))
def context_records(kv: Tensor, weights: Tensor, rotation: Rotation, eps: float) -> Tensor:
    """Window records of every draft stage from one fused key projection.

    Args:
        kv: [num_tokens, num_stages * head_dim] bf16 or fp64.
        weights: [num_stages, head_dim] wide, the stages' key norms.
        rotation: rotation at the tokens' positions.

    Returns:
        [num_tokens, num_stages, window record bytes] uint8.

    Source: DSpark paper, draft context: RoPE(norm(wkv x)).  Each stage has its own wkv and norm; x is the same for all stages.
    """
    parts = kv.chunk(weights.shape[0], dim=1)
    keys = [window_keys(part, weight, rotation, eps) for part, weight in zip(parts, weights, strict=True)]
    return torch.stack([encode_window(each) for each in keys], dim=1)


def window_keys(kv: Tensor, weight: Tensor, rotation: Rotation, eps: float) -> Tensor:
    """Keys of the window before they become records: [num_tokens, head_dim] in kv's dtype.

    Args:
        kv: [num_tokens, head_dim] bf16 or fp64, projected.
        weight: [head_dim] wide.
        rotation: rotation at the tokens' positions.
    """
    return rotate(rms_norm(kv, weight, eps), rotation)
