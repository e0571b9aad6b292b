"""The kernel of lay_out_rounds gives the bits of the reference: on a GPU, or on a CPU with triton and TRITON_INTERPRET=1."""

import math
import os

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.errors import ConfigError
from deepinfer.ops.cases import CASES, tensors
from deepinfer.ops.sampling import lay_out_rounds
from tests.ops.invariance import arguments_of, is_same

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]

AWKWARD = [0.0, -0.0, 1.0, 0.5, 1e-20, 1e-30, 1e-42, math.nan, math.inf, -math.inf, 1.5, -0.5, 1 - 2**-24]
"""Confidences, and values that are not confidences; some products are subnormal numbers."""


@pytest.fixture(scope="module")
def kernel():
    import deepinfer.ops.hopper  # noqa: F401 - not at the top: it needs triton, which a machine without a GPU may lack

    return lay_out_rounds.implementations["hopper"]


def draw(num_rounds, width, seed):
    gen = torch.Generator().manual_seed(seed)
    caps = torch.randint(-2, width + 3, (num_rounds,), generator=gen)
    starts = torch.randint(2**20, (num_rounds,), generator=gen)
    token_ids = torch.randint(129280, (num_rounds, width + 1), generator=gen)
    return torch.rand(num_rounds, width, generator=gen), caps, starts, token_ids


def check(kernel, confidences, budget, caps, starts, token_ids, num_rows):
    confidences, caps, starts, token_ids = (each.to(DEVICE) for each in (confidences, caps, starts, token_ids))
    budget = budget.to(DEVICE) if isinstance(budget, torch.Tensor) else budget
    arguments = (confidences, budget, caps, starts, token_ids, num_rows)
    found, expected = kernel(*arguments), lay_out_rounds.reference(*arguments)
    assert [each.dtype for each in tensors(found)] == [each.dtype for each in tensors(expected)]
    assert is_same(found, expected)


def check_budgets(kernel, confidences, caps, starts, token_ids):
    num_rounds, width = confidences.shape
    admitted = int(caps.clamp(0, width).sum())
    for budget in (0, 1, admitted // 3, admitted // 2, admitted - 1, admitted, admitted + 1, num_rounds * width + 9, -1, 2**40):
        num_rows = num_rounds + max(0, min(budget, admitted))
        check(kernel, confidences, budget, caps, starts, token_ids, num_rows)
        check(kernel, confidences, torch.tensor([budget]), caps, starts, token_ids, num_rows + 1 + budget % 700)


@pytest.mark.parametrize("case", [each for each in CASES if each.op is lay_out_rounds], ids=lambda case: case.name)
def test_cases_of_the_operator_have_the_bits_of_the_reference(kernel, case):
    arguments = arguments_of(case, torch.bfloat16, DEVICE, named_config("golden"))
    assert is_same(kernel(**arguments), lay_out_rounds.reference(**arguments))


@pytest.mark.parametrize("num_rounds", [1, 3, 17, 64, 255, 256])
def test_any_number_of_rounds_and_any_budget_are_laid_out_as_by_the_reference(kernel, num_rounds, seed):
    check_budgets(kernel, *draw(num_rounds, 5, seed))


@pytest.mark.parametrize(("num_rounds", "width"), [(1, 0), (5, 0), (1, 1), (9, 3), (30, 7), (12, 8), (1024, 7)])
def test_any_width_is_laid_out_as_by_the_reference(kernel, num_rounds, width, seed):
    check_budgets(kernel, *draw(num_rounds, width, seed))


@pytest.mark.parametrize("value", [1.0, 0.7, 0.0, math.nan])
def test_equal_confidences_are_ordered_as_by_the_reference(kernel, value, seed):
    confidences, caps, starts, token_ids = draw(33, 5, seed)
    check_budgets(kernel, torch.full_like(confidences, value), caps, starts, token_ids)
    check_budgets(kernel, torch.full_like(confidences, value), torch.full_like(caps, 5), starts, token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invalid_confidences_are_read_as_by_the_reference(kernel, dtype, seed):
    _, caps, starts, token_ids = draw(65, 5, seed)
    gen = torch.Generator().manual_seed(seed)
    values = torch.tensor(AWKWARD, dtype=dtype)
    confidences = values[torch.randint(len(values), (65, 5), generator=gen)]
    check_budgets(kernel, confidences, caps, starts, token_ids)
    check_budgets(kernel, values[2:6].repeat(65, 2)[:, :5], caps, starts, token_ids)


def test_views_and_narrow_integers_are_read_as_by_the_reference(kernel, seed):
    confidences, caps, starts, token_ids = draw(20, 6, seed)
    views = confidences.t().contiguous().t()[::2], caps[::2], starts[::2], token_ids.t().contiguous().t()[::2]
    check_budgets(kernel, *views)
    check(kernel, confidences, torch.tensor(31, dtype=torch.int32), caps.int(), starts, token_ids, 70)


def test_more_rounds_than_one_block_holds_are_refused(kernel, seed):
    confidences, caps, starts, token_ids = (each.to(DEVICE) for each in draw(1025, 7, seed))
    with pytest.raises(ConfigError, match="1025 rounds of 7 drafts exceed the 1024"):
        kernel(confidences, 100, caps, starts, token_ids, 1125)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_other_numbers_compile_nothing(kernel, seed):
    from deepinfer.ops.hopper.sampling import _lay_out_rounds

    def num_compiled():
        return sum(len(entry[0]) for entry in _lay_out_rounds.device_caches.values())

    arguments = [each.to(DEVICE) for each in draw(16, 5, seed)]
    confidences, caps, starts, token_ids = arguments
    kernel(confidences, 7, caps, starts, token_ids, 96)
    before = num_compiled()
    for budget, num_rounds, num_rows in ((1, 9, 64), (16, 16, 97), (0, 12, 12 + 16), (2**40, 10, 61)):
        some = [each[:num_rounds] for each in (caps, starts, token_ids)]
        kernel(confidences[:num_rounds], budget, *some, num_rows)
    kernel(confidences[1:10], 3, caps[1:10], starts[1:10], token_ids[1:10], 40)  # not aligned
    assert num_compiled() == before
