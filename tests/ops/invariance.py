"""What every backend owes on the operators' cases: rows that do not see each other, and the reference's numbers.

Both checks name what is wrong instead of failing, so that a test of the checks themselves can put a fault in.
"""

import importlib
import pkgutil
import zlib
from contextlib import contextmanager

import torch

import deepinfer.ops
from deepinfer.ops import attention, norm, op, quant
from deepinfer.ops.cases import Draw, tensors

ABSENT = {}
"""Backends whose kernel library is not installed: folder -> library.  A machine with a GPU has them all."""

for _module in pkgutil.iter_modules(deepinfer.ops.__path__, "deepinfer.ops."):
    if _module.ispkg:  # a backend is a folder, and registers its bodies when it is imported
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("deepinfer"):
                raise
            ABSENT[_module.name] = error.name


def backends():
    """Names of all backends that have a body for every operator, the reference first."""
    names = set.intersection(*(set(each.implementations) for each in op.registered().values()))
    return sorted(names, key=lambda name: (name != op.REFERENCE, name))


@contextmanager
def running(backend):
    """Every operator runs ``backend``."""
    op.bind(backend)
    try:
        yield
    finally:
        op.bind(op.REFERENCE)


def arguments_of(case, dtype, device, config):
    """The case's arguments, weights packed by the bound backend; the case's name is the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.op.name}: {case.name}".encode()))
    draw = Draw(config=config, generator=generator, device=device, dtype=dtype)
    return case.build(draw, case.num_rows)


def bits(tensor):
    """Comparable by equality, NaN and signs of zero included."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor


def is_same(found, expected):
    """Whether two results are equal bit for bit."""
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs)


def indices(num_rows, generator):
    """Which rows of a batch to compute again: alone first and last, a part, all in another order, and more than all."""
    yield torch.zeros(1, dtype=torch.int64)
    yield torch.tensor([num_rows - 1])
    for size in (-(-num_rows // 3), num_rows):
        yield torch.randperm(num_rows, generator=generator)[:size]
    yield torch.randint(num_rows, (2 * num_rows + 1,), generator=generator)


def row_faults(case, backend, device, dtype, config, seed):
    """Rows of a case that ``backend`` computes otherwise in other company, whatever the operator's tolerance; empty if none.

    Returns:
        (how many rows were computed together, the first that differs) each.
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


_RECORDS = {
    attention.compress: (quant.decode_main, quant.decode_index),
    norm.qkv_norm: (None, quant.decode_window),
    norm.context_records: (quant.decode_window,),
    quant.encode_window: (quant.decode_window,),
    quant.encode_main: (quant.decode_main,),
    quant.encode_index: (quant.decode_index,),
}
"""Results that are records: numbers are compared, not codes."""
_MAIN_WIDTH = {quant.decode_main: 16 / 9, quant.decode_index: 32 / 17, quant.decode_window: 32 / 33}
"""Numbers a byte of each kind of record."""


def _numbers(case, result):
    """The tensors of a result as a backend's promise speaks of them."""
    if case.op in (quant.repack_fp8, quant.repack_fp4):
        return tensors(quant.unpack(result))  # every backend has a layout of its own
    found = tensors(result)
    for number, decode in enumerate(_RECORDS.get(case.op, ())):
        if decode is not None:
            width = round(found[number].shape[-1] * _MAIN_WIDTH[decode])
            found[number] = decode.reference(found[number], width, torch.float64)
    return found


def distance(found, expected):
    """Largest difference of two tensors, relative to the RMS of a row; infinite where whole numbers or shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    a, b = (each.double().reshape(len(each), -1) if each.dim() > 1 else each.double().view(1, -1) for each in (found, expected))
    is_infinite = b.isinf()
    if not torch.equal(a[is_infinite], b[is_infinite]):
        return float("inf")
    a, b = a.masked_fill(is_infinite, 0.0), b.masked_fill(is_infinite, 0.0)
    rms = b.square().mean(1, keepdim=True).sqrt()
    return float(((a - b).abs() / rms.clamp_min(1e-30)).nan_to_num(nan=float("inf")).max())


def parity_faults(case, backend, device, dtype, config):
    """How far ``backend`` is from the reference where it is further than the operator's tolerance: (result, distance) each."""
    with running(op.REFERENCE):
        expected = _numbers(case, case.op.reference(**arguments_of(case, dtype, device, config)))
    with running(backend):
        found = _numbers(case, case.op.implementations[backend](**arguments_of(case, dtype, device, config)))
    distances = [distance(one, other) for one, other in zip(found, expected, strict=True)]
    return [(number, each) for number, each in enumerate(distances) if each > case.op.tolerance]
