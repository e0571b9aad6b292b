"""Every operator has a caller outside ``ops/``, and its reference calls no bound operator."""

import ast
import itertools
from pathlib import Path

import pytest
import torch

import deepinfer
from deepinfer.config import named_config
from deepinfer.ops import op
from deepinfer.ops.cases import CASES
from tests.model.tiny import bound
from tests.ops.invariance import arguments_of, is_same, outputs_of, tolerances_of

CPU = torch.device("cpu")
GOLDEN = named_config("golden")
PACKAGE = Path(deepinfer.__file__).parent
OPERATORS = set(op.registered())


def refusing(operator):
    def body(*_, **__):
        raise AssertionError(f"{operator.name} was called through its binding")

    return body


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}: {case.name}")
def test_a_reference_calls_no_bound_operator(case):
    arguments = arguments_of(case, torch.bfloat16, CPU, GOLDEN)
    with bound({each: refusing(each) for each in op.registered().values()}):
        found = case.op.reference(**arguments)
    assert is_same(found, case.op.reference(**arguments))


def called(source):
    """Names ``family.function`` that a module imports from ``deepinfer.ops`` and uses."""
    tree = ast.parse(source)
    functions, families = {}, {}  # local name -> full name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepinfer.ops"):
            family = node.module.removeprefix("deepinfer.ops").removeprefix(".")
            for each in node.names:
                local = each.asname or each.name
                if family:
                    functions[local] = f"{family}.{each.name}"
                else:
                    families[local] = each.name
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in functions:
            found.add(functions[node.id])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in families:
            found.add(f"{families[node.value.id]}.{node.attr}")
    return found


def test_every_operator_has_a_caller_outside_ops():
    outside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "ops" not in path.parents]
    used = set(itertools.chain.from_iterable(called(path.read_text()) for path in outside))
    assert OPERATORS - used == set()


def test_operators_state_a_tolerance_for_each_output():
    for case in CASES:
        if case.num_rows == 7:
            count = len(outputs_of(case.op.reference(**arguments_of(case, torch.bfloat16, CPU, GOLDEN))))
            assert len(tolerances_of(case.op, count)) == count


def test_calls_are_found_by_function_and_by_family():
    source = (
        "from deepinfer.ops import norm as ops\nfrom deepinfer.ops.quant import linear_fp8, pack_fp8\nlinear_fp8(ops.norm8(1))"
    )
    assert called(source) == {"quant.linear_fp8", "norm.norm8"}
