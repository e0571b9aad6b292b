"""Checks of results that consist of codes, by :class:`deepinfer.ops.op.Codes`.

All numbers are fp64, so differences and steps are exact.
"""

import math

import torch

from deepinfer.ops import quant

E2M1 = torch.tensor(quant._E2M1, dtype=torch.float64)
UE8M0_BLOCK, E4M3_BLOCK, COARSE_BLOCK = 32, 16, 128


def code_fault(found, expected, tolerance):
    """The fault of a result that consists of codes, in words; None without a fault.

    Args:
        found, expected: values of quantised activations (format ``mxfp8``) or of index queries (``mxfp4``), else records.
    """
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    check = {"mxfp8": _activations, "mxfp4": _queries, "window": _window, "index": _index, "main": _main}[tolerance.format]
    return check(found, expected, tolerance.share)


def _blocks(x, size):
    """[..., width] -> [..., blocks, size] fp64, padded with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _exponent(x):
    """floor(log2 x) of positive numbers."""
    return torch.frexp(x).exponent - 1


def _power_above(x):
    """The smallest power of two above x; any value for 0."""
    return torch.exp2(torch.frexp(x).exponent.double())


def _e4m3_step(a, b, scale):
    """The step of E4M3 above the smaller of two numbers; at least the smallest step of the scale."""
    low = torch.minimum(a.abs(), b.abs())
    step = torch.where(low > 0, torch.exp2(_exponent(low) - 3.0), 0.0)
    return torch.maximum(step, scale * 2.0**-9)


def _e2m1_step(a, b, scale):
    """The step of E2M1 above the smaller of two numbers on a grid of ``scale``."""
    low = torch.minimum(a.abs(), b.abs()) / scale
    return torch.where(low < 2, 0.5, torch.where(low < 4, 1.0, 2.0)) * scale


def _few(what, differs, share):
    """A fault if more than a share of the elements differs."""
    count, total = int(differs.sum()), differs.numel()
    return f"{count} of {total} {what} differ" if count > math.ceil(share * total) else None


def _verdict(a, b, step, counted, share):
    """A fault if an element differs by more than a step, or if too many of the counted elements differ.

    NaN equals NaN and differs from every number.
    """
    differs = (a != b) & ~(a.isnan() & b.isnan())
    too_far = differs & ~((a - b).abs() <= step)
    if too_far.any():
        return f"{int(too_far.sum())} of {a.numel()} elements differ by more than one code"
    return _few("elements", differs & counted, share)


def _activations(found, expected, share):
    a, b = _blocks(found, COARSE_BLOCK), _blocks(expected, COARSE_BLOCK)
    largest = b.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, _power_above(largest / quant.E4M3_MAX), 0.0).clamp_min(2.0**-22)
    # With one scale for 128 elements these elements have subnormal codes, or are 0.
    is_small = torch.minimum(a.abs(), b.abs()) < scale * 2.0**-6
    return _verdict(a, b, _e4m3_step(a, b, scale), ~is_small, share)


def _queries(found, expected, share):
    a, b = _blocks(found, UE8M0_BLOCK), _blocks(expected, UE8M0_BLOCK)
    # The largest code of a block is 3, 4 or 6.  A largest value of 3 steps may also be 6 half steps; the other values decide.
    largest = b.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, _power_above(largest / quant.E2M1_MAX), 1.0)
    is_on_grid = torch.isin((b / scale).abs(), E2M1.to(b.device)).all(-1, keepdim=True)
    scale = torch.where(is_on_grid, scale, scale / 2)
    return _verdict(a, b, _e2m1_step(a, b, scale), torch.ones_like(a, dtype=torch.bool), share)


def _powers(found, expected, a, b, largest_code):
    """Scales of two records with UE8M0 scales: (smaller, larger) [..., blocks, 1], or a fault.

    Two scales differ by a factor of 2 at most, and only if the largest element lies on the border, i.e. is the largest number of
    the smaller scale.
    """
    low, high = torch.minimum(found, expected), torch.maximum(found, expected)
    is_border = (a.abs().amax(-1) == largest_code * low) & (b.abs().amax(-1) == largest_code * low) & (high == 2 * low)
    wrong = (low != high) & ~is_border
    fault = f"{int(wrong.sum())} of {wrong.numel()} scales are wrong" if wrong.any() else None
    return low.unsqueeze(-1), high.unsqueeze(-1), fault


def _window(found, expected, share):
    head_dim = found.shape[-1] * UE8M0_BLOCK // (UE8M0_BLOCK + 1)
    a, b = (_blocks(quant.decode_window(each, head_dim, torch.float64), UE8M0_BLOCK) for each in (found, expected))
    scales = (quant._ue8m0(each[..., head_dim:], torch.float64) for each in (found, expected))
    _, high, fault = _powers(*scales, a, b, quant.E4M3_MAX)
    return fault or _verdict(a, b, _e4m3_step(a, b, high), torch.ones_like(a, dtype=torch.bool), share)


def _index(found, expected, share):
    width = found.shape[-1] * 2 * UE8M0_BLOCK // (UE8M0_BLOCK + 2)
    a, b = (_blocks(quant.decode_index(each, width, torch.float64), UE8M0_BLOCK) for each in (found, expected))
    scales = (quant._ue8m0(each[..., width // 2 :], torch.float64) for each in (found, expected))
    low, _, fault = _powers(*scales, a, b, quant.E2M1_MAX)
    return fault or _verdict(a, b, _e2m1_step(a, b, low), torch.ones_like(a, dtype=torch.bool), share)


def _main(found, expected, share):
    """E4M3 scales: a scale may differ by one code; its elements have the same codes or differ by one."""
    width = found.shape[-1] * 2 * E4M3_BLOCK // (E4M3_BLOCK + 2)
    scales, codes = (
        [each[..., part].long() for each in (found, expected)] for part in (slice(width // 2, None), slice(width // 2))
    )
    if ((scales[0] - scales[1]).abs() > 1).any():
        return "a scale differs by more than one code"
    unpaired = [torch.stack([each & 15, each >> 4], dim=-1).flatten(-2) for each in codes]
    a, b = (torch.where(each >= 8, 8 - each, each).double() for each in unpaired)  # codes, ordered by value
    return _few("scales", scales[0] != scales[1], share) or _verdict(
        a, b, torch.ones_like(a), torch.ones_like(a, dtype=torch.bool), share
    )
