"""Every operator has cases; the reference gives finite results on them and changes no argument."""

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.ops import op
from deepinfer.ops.cases import CASES, tensors
from tests.ops.invariance import arguments_of, is_same

CPU = torch.device("cpu")
GOLDEN = named_config("golden")
DTYPES = [torch.bfloat16, torch.float64]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}: {case.name}")


def test_every_operator_has_cases_under_unique_names():
    names = [(case.op.name, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert {name for name, _ in names} == set(op.registered())


@each_case
def test_a_seed_fixes_the_arguments(case):
    assert is_same(arguments_of(case, torch.bfloat16, CPU, GOLDEN), arguments_of(case, torch.bfloat16, CPU, GOLDEN))


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_results_are_finite_and_arguments_stay_as_they_are(case, dtype, device):
    arguments = arguments_of(case, dtype, device, GOLDEN)
    before = [tensor.clone() for tensor in tensors(arguments)]
    result = case.op.reference(**arguments)
    assert tensors(result)
    for tensor in tensors(result):
        if tensor.is_floating_point():
            assert tensor.double().isfinite().all()
    assert is_same(tuple(tensors(arguments)), tuple(before))
