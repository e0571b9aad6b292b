"""Checks of every backend on the operators' cases: rows are independent, and results are near the reference.

Both checks return the faults instead of failing, so that tests of the checks themselves can insert a fault.
"""

import dataclasses
import importlib
import pkgutil
import zlib
from contextlib import contextmanager

import torch

import deepinfer.ops
from deepinfer.config import named_config
from deepinfer.ops import moe, op, quant
from deepinfer.ops.cases import Draw, tensors
from tests.ops.codes import code_fault

ABSENT = {}
"""Backends whose kernel library is not installed: folder -> library.  A machine with a GPU has them all."""

for _module in pkgutil.iter_modules(deepinfer.ops.__path__, "deepinfer.ops."):
    if _module.ispkg:  # a backend is a folder; its import registers its bodies
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("deepinfer"):
                raise
            ABSENT[_module.name] = error.name


def device_of(backend):
    """Where a backend other than the reference runs."""
    return torch.device("cpu" if backend == "cpu" else "cuda")


def backends():
    """Names of all backends that have a body for every operator, the reference first."""
    names = set.intersection(*(set(each.implementations) for each in op.registered().values()))
    return sorted(names, key=lambda name: (name != op.REFERENCE, name))


@contextmanager
def running(backend):
    """Bind every operator to ``backend`` for a while."""
    before = op.bound()
    op.bind(backend)
    try:
        yield
    finally:
        op.bind(before)


def arguments_of(case, dtype, device, config):
    """The case's arguments, with weights packed by the bound backend; the case's name is the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.op.name}: {case.name}".encode()))
    draw = Draw(config=config, generator=generator, device=device, dtype=dtype)
    return case.build(draw, case.num_rows)


def bits(tensor):
    """The bits of a tensor as integers, so that NaN and signs of zero compare."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor


def is_same(found, expected):
    """Whether two results are equal bit for bit."""
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs)


def indices(num_rows, generator):
    """Rows of a batch to compute again: the first alone, the last alone, a part, all in another order, and more than all."""
    yield torch.zeros(1, dtype=torch.int64)
    yield torch.tensor([num_rows - 1])
    for size in (-(-num_rows // 3), num_rows):
        yield torch.randperm(num_rows, generator=generator)[:size]
    yield torch.randint(num_rows, (2 * num_rows + 1,), generator=generator)


def row_faults(case, backend, device, dtype, config, seed):
    """Rows of a case that ``backend`` computes differently in another batch, for any tolerance; empty without a fault.

    Returns:
        For each fault: (number of rows that were computed together, first row that differs).
    """
    body, generator, faults = case.op.implementations[backend], torch.Generator().manual_seed(seed), []
    with running(backend):
        arguments = arguments_of(case, dtype, device, config)
        whole = tensors(body(**arguments))
        for index in indices(whole[0].shape[0], generator):
            there = index.to(device)
            part = tensors(body(**case.take(arguments, there)))
            differs = torch.zeros(len(index), dtype=torch.bool)
            for found, expected in zip(part, whole, strict=True):
                differs |= (bits(found) != bits(expected[there])).view(len(index), -1).any(1).cpu()
            if differs.any():
                faults.append((len(index), int(index[differs][0])))
    return faults


def distance(found, expected):
    """Largest difference of two tensors relative to the RMS of a row, without one step of their dtype.

    It is 0 only for equal tensors, and infinite if whole numbers or shapes differ.
    """
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    step = torch.finfo(expected.dtype).eps
    a, b = (each.double().reshape(len(each), -1) if each.dim() > 1 else each.double().view(1, -1) for each in (found, expected))
    is_infinite = b.isinf()
    if not torch.equal(a[is_infinite], b[is_infinite]):
        return float("inf")
    a, b = a.masked_fill(is_infinite, 0.0), b.masked_fill(is_infinite, 0.0)
    low = torch.minimum(a.abs(), b.abs())
    beyond = (a - b).abs() - torch.where(low > 0, torch.exp2(torch.frexp(low).exponent - 1.0), 0.0) * step
    rms = b.square().mean(1, keepdim=True).sqrt()
    return float((beyond / rms.clamp_min(1e-30)).nan_to_num(nan=float("inf")).clamp_min(1e-30).max())


def wide_config(operator):
    """The widths of the full model; few heads, experts, tokens and blocks, so that a case of ``operator`` is small."""
    full = named_config("full")
    few = {"vocab_size": 2048, "num_attention_heads": 16, "o_groups": 2, "candidate_topk_blocks": 128}
    if operator in (moe.experts, moe.shared_expert):
        few |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    vision = dataclasses.replace(full.vision, hidden_size=512, num_attention_heads=8)
    return dataclasses.replace(full, vision=vision, **few)


def outputs_of(result):
    """The outputs of an operator as a list."""
    return list(result) if isinstance(result, tuple) else [result]


def tolerances_of(operator, count):
    """The tolerance of each of ``count`` outputs."""
    given = operator.tolerance
    assert not isinstance(given, tuple) or len(given) == count, f"{operator.name} has {count} outputs"
    return given if isinstance(given, tuple) else (given,) * count


def _result(case, backend, device, dtype, config):
    """Outputs of ``backend``; binds it for the call."""
    with running(backend):
        found = case.op.implementations[backend](**arguments_of(case, dtype, device, config))
        if case.op in (quant.repack_fp8, quant.repack_fp4):
            found = quant.unpack(found)  # every backend has its own layout
    return outputs_of(found)


def parity_faults(case, backend, device, dtype, config):
    """Outputs of ``backend`` outside the operator's tolerance: (number of the output, fault in words) each."""
    expected, found = (_result(case, each, device, dtype, config) for each in (op.REFERENCE, backend))
    faults = []
    tolerances = tolerances_of(case.op, len(expected))
    for number, (one, other, tolerance) in enumerate(zip(found, expected, tolerances, strict=True)):
        pairs = list(zip(tensors(one), tensors(other), strict=True))
        if isinstance(tolerance, op.Codes):
            ((codes, expected_codes),) = pairs
            fault = code_fault(codes, expected_codes, tolerance)
        else:
            furthest = max(distance(*pair) for pair in pairs)
            fault = f"{furthest:.2g} of the RMS" if furthest > tolerance else None
        if fault is not None:
            faults.append((number, fault))
    return faults
