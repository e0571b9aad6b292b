"""Every operator has cases; on each of them the reference is sound, and its rows do not see each other."""

import dataclasses
import zlib

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.ops import op, sampling
from deepinfer.ops.cases import CASES, Draw, tensors

CPU = torch.device("cpu")
GOLDEN = named_config("golden")
DTYPES = [torch.bfloat16, torch.float64]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}: {case.name}")
each_row_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.take], ids=lambda case: f"{case.op.name}: {case.name}"
)


def arguments_of(case, dtype, device=CPU, config=GOLDEN):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.op.name}: {case.name}".encode()))
    draw = Draw(config=config, generator=generator, device=device, dtype=dtype)
    return case.build(draw, case.num_rows)


def bits(tensor):
    """Comparable by equality, NaN and signs of zero included."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor


def is_same(found, expected):
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs)


def rows_of(result, index):
    return tuple(tensor[index] for tensor in tensors(result))


def test_every_operator_has_cases_under_unique_names():
    names = [(case.op.name, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert {name for name, _ in names} == set(op.registered())


@each_case
def test_a_seed_fixes_the_arguments(case):
    assert is_same(arguments_of(case, torch.bfloat16), arguments_of(case, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_results_are_finite_and_arguments_stay_as_they_are(case, dtype, device):
    arguments = arguments_of(case, dtype, device)
    before = [tensor.clone() for tensor in tensors(arguments)]
    result = case.op.reference(**arguments)
    assert tensors(result)
    for tensor in tensors(result):
        if tensor.is_floating_point():
            values = tensor.double()
            is_removed = (values == -torch.inf) if case.op is sampling.process_logits else torch.zeros_like(values).bool()
            assert (values.isfinite() | is_removed).all()
    assert is_same(tuple(tensors(arguments)), tuple(before))


@pytest.mark.parametrize("dtype", DTYPES)
@each_row_case
def test_a_row_does_not_depend_on_the_rows_beside_it(case, dtype, seed):
    arguments = arguments_of(case, dtype)
    whole = case.op.reference(**arguments)
    generator = torch.Generator().manual_seed(seed)
    num_rows = tensors(whole)[0].shape[0]
    for size in {1, -(-num_rows // 3), num_rows}:
        index = torch.randperm(num_rows, generator=generator)[:size]
        part = case.op.reference(**case.take(arguments, index))
        assert is_same(tuple(tensors(part)), rows_of(whole, index))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@each_row_case
def test_a_row_of_the_larger_model_does_not_depend_on_the_rows_beside_it(case, dtype, seed):
    arguments = arguments_of(case, dtype, config=dataclasses.replace(named_config("nano"), index_topk=24))
    whole = case.op.reference(**arguments)
    num_rows = tensors(whole)[0].shape[0]
    for number in torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:3]:
        index = number.view(1)
        part = case.op.reference(**case.take(arguments, index))
        assert is_same(tuple(tensors(part)), rows_of(whole, index))
