"""The number of threads changes no bit; on busy cores the engine uses one."""

import dataclasses

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.ops import cpu, op
from deepinfer.ops.arithmetic import matmul_rows, threads
from deepinfer.ops.cases import CASES
from tests.ops.invariance import arguments_of, bits, is_same, running

CPU = torch.device("cpu")
NANO = dataclasses.replace(named_config("random"), index_topk=24)
TEAMS = (2, 3, 8)


@pytest.mark.parametrize("backend", [op.REFERENCE, cpu.NAME])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}: {case.name}")
def test_an_operator_gives_the_same_bits_with_any_number_of_threads(case, backend):
    body = case.op.implementations[backend]
    with running(backend):
        arguments = arguments_of(case, torch.bfloat16, CPU, NANO)
        with threads(1):
            expected = body(**arguments)
        for count in TEAMS:
            with threads(count):
                assert is_same(body(**arguments), expected), f"{count} threads"


@pytest.mark.parametrize("width", [384, 1536, 6144])
@pytest.mark.parametrize("out_width", [1, 16, 24, 64, 65, 100, 128, 384])
def test_a_product_gives_the_same_bits_with_any_number_of_threads(width, out_width, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, width, generator=generator) for rows in (33, out_width))
    with threads(1):
        expected = matmul_rows(x, w)
    for count in (*TEAMS, 16):
        with threads(count):
            assert torch.equal(bits(matmul_rows(x, w)), bits(expected)), f"{count} threads"
