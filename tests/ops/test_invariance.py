"""Every complete backend on each of its devices: a row has the same bits in any batch, and is near the reference.

A backend that is registered for all operators gets all of these tests without a change of this file.
"""

import dataclasses
import itertools

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.ops import norm, op, sampling
from deepinfer.ops.cases import CASES
from tests.model.tiny import bound
from tests.ops.invariance import ABSENT, backends, device_of, parity_faults, row_faults, wide_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GOLDEN = named_config("golden")
NANO = dataclasses.replace(named_config("random"), index_topk=24)


def name_of(case):
    return f"{case.op.name}: {case.name}"


def marks_of(device):
    return [pytest.mark.gpu] if device == CUDA else []


def places():
    """(backend, device, dtype): only the reference runs on both devices and in fp64."""
    for backend in backends():
        is_reference = backend == op.REFERENCE
        for device, dtype in itertools.product([CPU, CUDA], [torch.bfloat16, torch.float64]):
            if is_reference or (device, dtype) == (device_of(backend), torch.bfloat16):
                yield pytest.param(
                    backend, device, dtype, marks=marks_of(device), id=f"{backend}-{device}-{dtype}".replace("torch.", "")
                )


ROW_CASES = [case for case in CASES if case.take]
OTHERS = [pytest.param(each, marks=marks_of(device_of(each))) for each in backends() if each != op.REFERENCE]
each_place = pytest.mark.parametrize(("backend", "device", "dtype"), list(places()))
each_wide_case = pytest.mark.parametrize("case", [case for case in CASES if 1 < case.num_rows <= 10], ids=name_of)
each_row_case = pytest.mark.parametrize("case", ROW_CASES, ids=name_of)


@each_place
@each_row_case
def test_a_row_does_not_depend_on_the_other_rows(case, backend, device, dtype, seed):
    assert row_faults(case, backend, device, dtype, GOLDEN, seed) == []


@pytest.mark.slow
@each_place
@each_row_case
def test_a_row_of_the_larger_model_does_not_depend_on_the_other_rows(case, backend, device, dtype, seed):
    assert row_faults(case, backend, device, dtype, NANO, seed) == []


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_backend_is_as_near_to_the_reference_as_its_operators_promise(case, backend):
    assert parity_faults(case, backend, device_of(backend), torch.bfloat16, GOLDEN) == []


@pytest.mark.parametrize("backend", OTHERS)
@each_wide_case
def test_a_backend_is_as_near_at_the_widths_of_the_full_model(case, backend):
    assert parity_faults(case, backend, device_of(backend), torch.bfloat16, wide_config(case.op)) == []


@pytest.mark.slow
@each_wide_case
def test_the_reference_is_its_own_equal_at_the_widths_of_the_full_model(case):
    assert parity_faults(case, op.REFERENCE, CPU, torch.bfloat16, wide_config(case.op)) == []


@pytest.mark.gpu
def test_a_gpu_machine_has_the_library_of_every_backend():
    assert ABSENT == {}


# ------------------------------------------------------------------------------------------------- the checks find what is wrong


def cases_of(operator):
    return [case for case in CASES if case.op is operator and case.num_rows > 1]


def faults_of(bodies, case):
    """(row faults, parity faults) of a backend with these bodies."""
    with bound(bodies):
        op.bind(op.REFERENCE)
        assert "test" in backends()
        return row_faults(case, "test", CPU, torch.bfloat16, GOLDEN, 0), parity_faults(case, "test", CPU, torch.bfloat16, GOLDEN)


def test_a_sum_whose_order_depends_on_the_size_of_the_batch_is_found_within_tolerance():
    """The statistic of an RMS norm."""

    def body(streams, pre, fn):
        collapsed, raw, square_sum = norm.mhc_pre.reference(streams, pre, fn)
        if streams.shape[0] % 2:
            parts = streams.flatten(1).to(square_sum.dtype).square().split(24, dim=-1)
            square_sum = sum(part.sum(-1) for part in parts).view_as(square_sum)
        return collapsed, raw, square_sum

    found = [faults_of({norm.mhc_pre: body}, case) for case in cases_of(norm.mhc_pre)]
    assert any(rows for rows, _ in found)
    assert not any(parity for _, parity in found)


def test_rows_that_depend_on_their_place_in_the_batch_are_found():
    def body(logits, ids):
        result = sampling.token_logprobs.reference(logits, ids)
        return torch.nextafter(result, result + 1) if len(ids) > 40 else result

    found = [faults_of({sampling.token_logprobs: body}, case) for case in cases_of(sampling.token_logprobs)]
    assert any(rows for rows, _ in found)
    assert not any(parity for _, parity in found), "a last bit is within tolerance"


def test_a_choice_among_equals_that_depends_on_the_batch_is_found():
    def body(logits, k):
        ids, values = sampling.top_logprobs.reference(logits, k)
        if logits.shape[0] == 1:  # equal values in reversed order
            width = logits.shape[1]
            ids, values = sampling.top_logprobs.reference(logits.flip(-1), k)
            ids = width - 1 - ids
        return ids, values

    found = {case.name: faults_of({sampling.top_logprobs: body}, case) for case in cases_of(sampling.top_logprobs)}
    assert found["ties"][0]


def test_a_backend_with_the_same_fault_in_every_row_is_found_only_by_parity():
    found = [
        faults_of({sampling.logits: lambda x, head: sampling.logits.reference(x, head) * 1.001}, case)
        for case in cases_of(sampling.logits)
    ]
    assert all(not rows and parity for rows, parity in found)


def test_the_reference_is_its_own_equal():
    for case in CASES:
        if case.name == CASES[0].name or case.num_rows == 7:
            assert parity_faults(case, op.REFERENCE, CPU, torch.bfloat16, GOLDEN) == [], name_of(case)
