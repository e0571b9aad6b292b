"""The Sinkhorn passes of hyper-connections, with their gradient: on a GPU two kernels, elsewhere plain torch.

Source: model report, hyper-connection section; ``hc_sinkhorn_iters``, ``hc_eps``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.grids import Context

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA brings no Triton
    triton = None

_BLOCK_TOKENS = 32


def sinkhorn(logits: Tensor, num_rounds: int, eps: float) -> Tensor:
    """A nearly doubly stochastic matrix for every token.

    Args:
        logits: [num_tokens, n, n] fp32 or fp64, [source, target].
        num_rounds: passes over the columns.
        eps: added to the row softmax and to every sum.

    Returns:
        [num_tokens, n, n]: softmax of each row, then columns and rows divided by their sums in turn, columns first and last.
    """
    if logits.is_cuda:
        result: Tensor = _OnGpu.apply(logits, num_rounds, eps)
        return result
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(num_rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


if triton is not None:

    @triton.jit
    def _forward(logits, comb, sums, num_tokens, eps, num_rounds: tl.constexpr, n: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
        """Passes of ``block`` tokens; ``sums`` [2 * num_rounds - 1, num_tokens, n] keeps every divisor for the gradient."""
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        rows, columns = tl.arange(0, n), tl.arange(0, n)
        cells = tokens[:, None, None] * n * n + rows[None, :, None] * n + columns[None, None, :]
        is_token = tokens[:, None, None] < num_tokens
        places = tokens[:, None] * n + rows[None, :]
        is_place = tokens[:, None] < num_tokens
        x = tl.load(logits + cells, mask=is_token, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        x = x / tl.sum(x, axis=2)[:, :, None] + eps
        divisor = tl.sum(x, axis=1) + eps
        tl.store(sums + places, divisor, mask=is_place)
        x = x / divisor[:, None, :]
        for number in range(1, num_rounds):
            divisor = tl.sum(x, axis=2) + eps
            tl.store(sums + (2 * number - 1) * num_tokens * n + places, divisor, mask=is_place)
            x = x / divisor[:, :, None]
            divisor = tl.sum(x, axis=1) + eps
            tl.store(sums + 2 * number * num_tokens * n + places, divisor, mask=is_place)
            x = x / divisor[:, None, :]
        tl.store(comb + cells, x, mask=is_token)

    @triton.jit
    def _backward(comb, gradient, sums, result, num_tokens, eps, num_rounds: tl.constexpr, n: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
        """Undo the passes one by one.  With y = x / s the gradient of x is (g - sum(g y)) / s, and x is y s."""
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        rows, columns = tl.arange(0, n), tl.arange(0, n)
        cells = tokens[:, None, None] * n * n + rows[None, :, None] * n + columns[None, None, :]
        is_token = tokens[:, None, None] < num_tokens
        places = tokens[:, None] * n + rows[None, :]
        is_place = tokens[:, None] < num_tokens
        y = tl.load(comb + cells, mask=is_token, other=0.0)
        g = tl.load(gradient + cells, mask=is_token, other=0.0)
        for back in range(1, num_rounds):
            number = num_rounds - back
            divisor = tl.load(sums + 2 * number * num_tokens * n + places, mask=is_place, other=1.0)
            g = (g - tl.sum(g * y, axis=1)[:, None, :]) / divisor[:, None, :]
            y = y * divisor[:, None, :]
            divisor = tl.load(sums + (2 * number - 1) * num_tokens * n + places, mask=is_place, other=1.0)
            g = (g - tl.sum(g * y, axis=2)[:, :, None]) / divisor[:, :, None]
            y = y * divisor[:, :, None]
        divisor = tl.load(sums + places, mask=is_place, other=1.0)
        g = (g - tl.sum(g * y, axis=1)[:, None, :]) / divisor[:, None, :]
        share = y * divisor[:, None, :] - eps
        g = share * (g - tl.sum(g * share, axis=2)[:, :, None])
        tl.store(result + cells, g, mask=is_token)


class _OnGpu(torch.autograd.Function):
    """The kernels as a function with a gradient."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, num_rounds: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        num_tokens, n, _ = logits.shape
        comb = torch.empty_like(logits)
        sums = logits.new_empty(2 * num_rounds - 1, num_tokens, n)
        grid = (triton.cdiv(num_tokens, _BLOCK_TOKENS),)
        _forward[grid](logits, comb, sums, num_tokens, eps, num_rounds=num_rounds, n=n, block=_BLOCK_TOKENS, num_warps=1)
        ctx.save_for_backward(comb, sums)
        ctx.passes = num_rounds, eps
        return comb

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        comb, sums = ctx.saved_tensors
        num_rounds, eps = ctx.passes
        num_tokens, n, _ = comb.shape
        result = torch.empty_like(comb)
        grid = (triton.cdiv(num_tokens, _BLOCK_TOKENS),)
        arguments = (comb, gradients[0].contiguous(), sums, result, num_tokens, eps)
        _backward[grid](*arguments, num_rounds=num_rounds, n=n, block=_BLOCK_TOKENS, num_warps=1)
        return result, None, None
