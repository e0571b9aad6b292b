"""Results that are codes: differences that parity accepts, faults that it finds, and a backend with its own layout."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.model.drafter import Drafter
from deepinfer.ops import arithmetic, attention, norm, op, quant
from deepinfer.ops.cases import CASES
from deepinfer.ops.sampling import SamplingRows
from tests.model.tiny import Batch, bound, model, new_cache, text, weights
from tests.ops.coded import CODED, CodedRows
from tests.ops.codes import code_fault
from tests.ops.invariance import arguments_of, is_same, parity_faults, row_faults, wide_config

CPU = torch.device("cpu")
GOLDEN = named_config("golden")


def faults(case, bodies, config=GOLDEN):
    """Parity faults of a backend with these bodies."""
    with bound(bodies):
        op.bind(op.REFERENCE)
        return parity_faults(case, "test", CPU, torch.bfloat16, config)


def case_of(operator, name="odd rows"):
    (found,) = [case for case in CASES if case.op is operator and case.name == name]
    return found


# ----------------------------------------------------------------------------------------------------------------- reordered sums


def by_halves(x, eps):
    """1 / RMS, with the sum computed by halves."""
    squares = torch.nn.functional.pad(x.square(), (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while squares.shape[-1] > 1:
        squares = squares[..., : squares.shape[-1] // 2] + squares[..., squares.shape[-1] // 2 :]
    return torch.rsqrt(squares / x.shape[-1] + eps)


def in_fp64(x, eps):
    """1 / RMS of a sum in fp64."""
    return torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).to(x.dtype)


NORMED = [
    case_of(norm.mhc_finish),
    case_of(norm.norm8),
    case_of(norm.qkv_norm),
    case_of(norm.context_records),
    case_of(norm.final_norm),
    case_of(attention.compress, "ratio 2, odd rows"),
]


def a_little_off(x, eps):
    """1 / RMS with the error of an approximate root that :data:`~deepinfer.ops.norm._FLIPPED` allows."""
    return arithmetic.row_sum(x.square()).div(x.shape[-1]).add(eps).rsqrt() * (1 + 2.0**-21)


@pytest.mark.parametrize("rms_scale", [by_halves, in_fp64, a_little_off])
@pytest.mark.parametrize("case", NORMED, ids=lambda case: case.op.name)
def test_another_order_of_a_sum_passes_at_the_real_width(case, rms_scale):
    def body(**arguments):
        with mock.patch.object(arithmetic, "rms_scale", rms_scale):
            return case.op.reference(**arguments)

    large = dataclasses.replace(case, num_rows=256)
    assert faults(large, {case.op: body}, wide_config(case.op)) == []
    arguments = arguments_of(large, torch.bfloat16, CPU, wide_config(case.op))
    if case.op is norm.mhc_finish or (rms_scale is a_little_off and case.op is not attention.compress):
        assert not is_same(body(**arguments), case.op.reference(**arguments)), "the order shows"


# ---------------------------------------------------------------------------------------------------------- scales that are wrong


def doubled(values, place):
    """Values with a scale that is one step too large in the block at ``place``."""
    values = values.clone()
    values.view(-1, 32)[place] *= 2
    return values


def one_scale(result, number, change):
    """The outputs of an operator; ``change`` is applied to one of them."""
    outputs = list(result) if isinstance(result, tuple) else [result]
    outputs[number] = change(outputs[number].clone() if isinstance(outputs[number], torch.Tensor) else outputs[number])
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def in_rows(x8):
    return quant.RoundedRows(doubled(x8.values(), 5))


def in_values(q):
    return doubled(q, 5)


def in_byte(place, more):
    """The scale at ``place`` from the end of row 2's record."""

    def change(records):
        records[2, ..., place] += more
        return records

    return change


WRONG = [
    (case_of(quant.quantise), 0, in_rows),
    (case_of(norm.norm8), 0, in_rows),
    (case_of(norm.mhc_finish), 2, in_rows),
    (case_of(norm.qkv_norm), 0, in_rows),
    (case_of(norm.qkv_norm), 1, in_byte(-1, 1)),
    (case_of(norm.qkv_norm), 1, in_byte(-2, -1)),
    (case_of(norm.context_records), 0, in_byte(-1, 1)),
    (case_of(attention.compress, "ratio 1, odd rows"), 0, in_byte(-1, 8)),
    (case_of(attention.compress, "ratio 1, odd rows"), 1, in_byte(-1, 1)),
    (case_of(attention.index_query), 0, in_values),
]


@pytest.mark.parametrize(("case", "number", "change"), WRONG)
def test_a_scale_that_is_off_by_one_is_found(case, number, change):
    found = faults(case, {case.op: lambda **arguments: one_scale(case.op.reference(**arguments), number, change)})
    assert [each for each, _ in found] == [number]


def test_a_scale_that_is_always_one_step_too_large_is_found_in_records():
    """A larger scale changes only small elements of E4M3 records, so the values are nearly the same."""
    rounding = quant._mxfp8

    def one_more(x, size):
        _, scale = rounding(x, size)
        scale = 2 * scale
        return quant._to_e4m3(quant._blocks(x, size) / scale), scale

    def body(**arguments):
        with mock.patch.object(quant, "_mxfp8", one_more):
            return norm.qkv_norm.reference(**arguments)

    (fault,) = faults(case_of(norm.qkv_norm), {norm.qkv_norm: body})
    assert fault[0] == 1
    assert "scales are wrong" in fault[1]


# ------------------------------------------------------------------------------------------------------------------- single codes

ENCODERS = {"window": quant.encode_window, "main": quant.encode_main, "index": quant.encode_index}
SCALE_BLOCKS = {"window": 32, "main": 16, "index": 32}


def records_of(name, seed, num_rows=8, width=256):
    return ENCODERS[name](torch.from_numpy(np.random.default_rng(seed).standard_normal((num_rows, width))))


def moved(name, records, steps, count):
    """Move ``count`` elements by ``steps`` codes, towards zero or away from it, if the format has such a code."""
    records = records.clone()
    codes = records[:, : 256 if name == "window" else 128]
    low = codes & (0x7F if name == "window" else 0x07)
    places = torch.nonzero((low >= 1) & (low <= (0x70 if name == "window" else 0x04)))[:count]
    assert len(places) == count
    codes[places[:, 0], places[:, 1]] += steps
    return records


@pytest.mark.parametrize("name", ENCODERS)
def test_a_few_elements_may_differ_by_one_code(name, seed):
    records = records_of(name, seed)
    tolerance = op.Codes(name, share=4 / records_of(name, seed).shape[0] / 256)
    assert code_fault(records, records, dataclasses.replace(tolerance, share=0.0)) is None
    assert code_fault(moved(name, records, 1, 4), records, tolerance) is None
    assert "differ" in code_fault(moved(name, records, 1, 5), records, tolerance)
    assert "differ" in code_fault(moved(name, records, 1, 1), records, dataclasses.replace(tolerance, share=0.0))
    assert "more than one code" in code_fault(moved(name, records, 2, 1), records, tolerance)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_scale_on_the_border_may_be_either(name, seed):
    largest = {"window": 448.0, "main": 6 * 1.0625, "index": 6.0}[name]  # 1.0625 is a midpoint of E4M3
    x = torch.from_numpy(np.random.default_rng(seed).uniform(-5, 5, (8, 256)))
    x[3, 17] = -largest
    below, above = ENCODERS[name](x * (1 - 1e-9)), ENCODERS[name](x * (1 + 1e-9))
    assert not torch.equal(below, above)
    for found, expected in ((below, above), (above, below)):
        assert code_fault(found, expected, op.Codes(name, share=32 / x.numel())) is None


@pytest.mark.parametrize("name", ENCODERS)
def test_an_off_by_one_scale_is_found_for_any_share(name, seed):
    records = records_of(name, seed)
    for more in (1, -1) if name != "main" else (8, -8, 2):
        wrong = records.clone()
        wrong[5, -3] += more
        assert code_fault(wrong, records, op.Codes(name, share=1.0)) is not None


def test_main_scales_that_are_all_off_by_one_code_are_found(seed):
    records = records_of("main", seed)
    wrong = records.clone()
    wrong[:, 128:] += 1
    assert "scales differ" in code_fault(wrong, records, op.Codes("main", share=1e-3))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_activations_with_a_scale_for_more_elements_pass(size, seed):
    """Blocks of very different magnitudes: small ones lose some or all of their bits."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, 12, 32)) * 2.0 ** rng.integers(-20, 6, (40, 12, 1))
    x = torch.from_numpy(x.reshape(40, 384))
    codes, scale = quant._mxfp8(x, size)
    found = (codes.double() * scale).flatten(1)
    assert code_fault(found, quant.round_mxfp8(x), op.Codes("mxfp8", share=0.0)) is None
    if size > 32:
        assert not torch.equal(found, quant.round_mxfp8(x))


def test_activations_that_are_flushed_to_zero_too_early_are_found(seed):
    x = quant.round_mxfp8(torch.from_numpy(np.random.default_rng(seed).standard_normal((40, 384))))
    assert code_fault(torch.where(x.abs() < 2.0**-9, 0.0, x), x, op.Codes("mxfp8", share=1.0)) is not None


# ------------------------------------------------------------------------------------------------ a backend of codes and scales


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}: {case.name}")
def test_a_backend_of_codes_and_coarse_scales_passes_parity(case):
    assert faults(case, CODED) == []


@pytest.mark.parametrize("operator", CODED, ids=lambda operator: operator.name)
def test_it_passes_at_the_real_widths(operator):
    assert faults(case_of(operator), CODED, wide_config(operator)) == []


@pytest.mark.parametrize("operator", CODED, ids=lambda operator: operator.name)
def test_its_rows_are_independent(operator, seed):
    with bound(CODED):
        op.bind(op.REFERENCE)
        assert row_faults(case_of(operator), "test", CPU, torch.bfloat16, GOLDEN, seed) == []


def run(network, drafter, prompt):
    """Logits of a prompt in three steps, and the logits of the drafts after it."""
    cache = new_cache(network, num_pages=6, num_slots=2)
    batch = Batch(network, cache)
    batch.add("a", prompt)
    for count in (40, 1, 19):
        batch.step({"a": count})
    end, ring = len(prompt), cache.layout.ring_tokens
    positions = torch.arange(end - ring, end)
    drafter.commit(torch.cat(batch.aux["a"])[-ring:], positions, torch.full_like(positions, 1), cache)
    one = torch.ones(1)
    rows = SamplingRows(temperature=0 * one, top_k=-one.long(), top_p=one, min_p=0 * one, seeds=one.long(), filters=False)
    drafts = drafter.draft(
        torch.tensor([5]), torch.tensor([end]), torch.tensor([1]), torch.tensor([0]), rows, "sampled", 5, cache
    )
    return torch.cat([batch.remove("a"), drafts.logits[0]]).double()


def test_the_network_and_the_drafter_run_on_it_and_stay_near():
    network, taken = model("golden", exact=False), []

    def linear_fp8(x8, weight):
        taken.append(x8)
        return CODED[quant.linear_fp8](x8, weight)

    drafter, prompt = Drafter(network, weights("golden")), text(network, np.random.default_rng(3), 60)
    plain = run(network, drafter, prompt)
    with bound(CODED | {quant.linear_fp8: linear_fp8}):
        coded = run(network, drafter, prompt)
    assert len(taken) > network.config.num_hidden_layers
    assert all(isinstance(each, CodedRows) for each in taken)
    assert ((plain - coded).square().mean(1) < 1e-4 * plain.square().mean(1)).all()
