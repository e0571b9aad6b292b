"""Number formats against exact arithmetic on their grids."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops import arithmetic, quant
from deepinfer.ops.norm import HyperWeights, mhc_finish

X = [0, 0.1, -0.2, 0.3, 0.45, -0.6, 0.75, 0.9, -1.05, 1.2, 1.5, -1.8, 2.1, 2.7, -3, 3.3]
Y = X + [x / 2 for x in X]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = sorted({2.0**-9 * m for m in range(8)} | {2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)} - {480.0})
FORMATS = {  # encode, decode, values per scale
    "window": (quant.encode_window, quant.decode_window, 32),
    "main": (quant.encode_main, quant.decode_main, 16),
    "index": (quant.encode_index, quant.decode_index, 32),
}


def random_rows(rng, num_rows, width):
    """Rows with blocks of very different magnitudes; some blocks are all zero."""
    blocks = rng.standard_normal((num_rows, width // 16, 16)) * 2.0 ** rng.integers(-12, 6, (num_rows, width // 16, 1))
    blocks[rng.random((num_rows, width // 16)) < 0.1] = 0
    return torch.from_numpy(blocks.reshape(num_rows, width))


def nearest(value, grid):
    """The grid number nearest to |value|, with the value's sign; among two equally near, the one with the even index."""
    size = min(abs(value), grid[-1])
    index = min(range(len(grid)), key=lambda i: (abs(grid[i] - size), i % 2))
    return math.copysign(grid[index], value)


# ----------------------------------------------------------------------------------------------------------------- known bytes


def test_known_main_entry(device):
    record = quant.encode_main(torch.tensor(X, device=device))
    assert bytes(record.tolist()).hex() == "0019a2334cd5667f" + "31"


def test_known_window_record(device):
    record = quant.encode_window(torch.tensor(Y, device=device))
    assert bytes(record[:16].tolist()).hex() == "0055dd6266ea6c6ef07274f6787bfc7d"
    assert record[32:].tolist() == [120]


def test_known_index_key(device):
    record = quant.encode_index(torch.tensor(Y, device=device))
    assert bytes(record.tolist()).hex() == "001891222ac3545d0008901119a2323b" + "7f"


# ------------------------------------------------------------------------------------------------------------------- grids


def test_every_code_of_four_bits_survives():
    codes = torch.arange(16, dtype=torch.uint8)
    values = quant._unpair(quant._pair(codes), torch.float64)
    assert values.tolist() == E2M1 + [-value for value in E2M1]
    assert torch.signbit(values[8])
    assert torch.equal(quant._to_e2m1(values), codes)


def test_every_code_of_eight_bits_survives():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(quant._to_e4m3(finite.to(dtype)).view(torch.uint8), finite.view(torch.uint8))
    assert sorted(set(finite.float().abs().tolist())) == E4M3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_midpoints_go_to_the_even_code(dtype):
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], dtype=dtype)
    even = torch.tensor([0, 2, 2, 4, 4, 6, 6], dtype=torch.uint8)
    assert torch.equal(quant._to_e2m1(middle), even)
    assert torch.equal(quant._to_e2m1(-middle), even | 8)
    grid = torch.tensor(E4M3, dtype=dtype)
    codes = quant._to_e4m3((grid[1:] + grid[:-1]) / 2).view(torch.uint8)
    assert (codes % 2 == 0).all()
    assert set((codes.int() - torch.arange(len(codes))).tolist()) == {0, 1}


@given(st.floats(-700, 700, allow_nan=False))
def test_codes_are_nearest(value):
    x = torch.tensor([value], dtype=torch.float64)
    assert quant._to_e4m3(x).double().item() == nearest(value, E4M3)
    assert quant._unpair(quant._pair(quant._to_e2m1(x.repeat(2))), torch.float64)[0].item() == nearest(value, E2M1)


@given(st.floats(-(2.0**-5), 2.0**-5))
def test_codes_are_nearest_among_subnormals(value):
    assert quant._to_e4m3(torch.tensor([value], dtype=torch.float64)).double().item() == nearest(value, E4M3)


def test_wide_numbers_are_rounded_once():
    """Numbers slightly above a midpoint of E4M3, by less than fp32 resolves; rounding to fp32 first would give the midpoint."""
    above = torch.tensor([1.0625 + 2.0**-40, -(1.0625 + 2.0**-40)], dtype=torch.float64)
    assert quant._to_e4m3(above).double().tolist() == [1.125, -1.125]


def test_larger_numbers_saturate():
    x = torch.tensor([1e9, -1e9, 464.0, 7.0], dtype=torch.float64)
    assert quant._to_e4m3(x).double().tolist() == [448, -448, 448, 7]
    assert quant._to_e2m1(x).tolist() == [7, 15, 7, 7]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sign_of_zero_is_kept(name, dtype):
    encode, decode, _ = FORMATS[name]
    x = torch.tensor([-0.0, 0.0, 3.0, -(2.0**-40)] * 8, dtype=dtype)
    signs = torch.signbit(decode(encode(x), 32, torch.float64))
    assert signs.tolist() == [True, False, False, True] * 8


@given(st.floats(2.0**-100, 2.0**100))
def test_scale_is_the_power_of_two_not_below(value):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([value], dtype=dtype)
        scale = quant._ceil_power_of_two(x)
        mantissa, exponent = math.frexp(x.item())
        expected = exponent - 1 if mantissa == 0.5 else exponent
        assert scale.item() == 2.0**expected
        assert quant._ue8m0_byte(scale).item() == expected + 127


# ----------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_and_encoding_again_changes_no_value(name, seed):
    encode, decode, size = FORMATS[name]
    x = random_rows(np.random.default_rng(seed), 300, 128)
    if name == "main":  # a very small block with a subnormal scale loses its largest code, and then its scale
        is_small = x.unflatten(1, (-1, size)).abs().amax(-1) < 6 * 2.0**-6
        x[is_small.repeat_interleave(size, 1)] = 0
    values = decode(encode(x), 128, torch.float64)
    assert torch.equal(decode(encode(values), 128, torch.float64), values)


@pytest.mark.parametrize("name", FORMATS)
def test_records_follow_the_rule(name, seed):
    encode, decode, size = FORMATS[name]
    x = random_rows(np.random.default_rng(seed), 60, 64)
    found = decode(encode(x), 64, torch.float64).unflatten(1, (-1, size))
    for block, values in zip(x.unflatten(1, (-1, size)).flatten(0, 1), found.flatten(0, 1), strict=True):
        largest = block.abs().max().item()
        if name == "window":
            scale, grid = 2.0 ** math.ceil(math.log2(max(largest, 1e-4) / 448)), E4M3
        elif name == "index":
            scale, grid = 2.0 ** math.ceil(math.log2(max(largest, 6 * 2.0**-126) / 6)), E2M1
        else:
            scale, grid = nearest(max(largest / 6, 2.0**-9), E4M3), E2M1
        assert values.tolist() == [nearest(value / scale, grid) * scale for value in block.tolist()]


@pytest.mark.parametrize("name", FORMATS)
def test_both_precisions_give_the_same_record(name, seed):
    encode, decode, _ = FORMATS[name]
    x = random_rows(np.random.default_rng(seed), 500, 64).bfloat16()
    records = encode(x)
    assert torch.equal(encode(x.float()), records)
    assert torch.equal(encode(x.double()), records)
    assert torch.equal(decode(records, 64, torch.float32).double(), decode(records, 64, torch.float64))


def test_rounding_is_encoding_and_decoding(seed):
    x = random_rows(np.random.default_rng(seed), 100, 64)
    window = quant.decode_window(quant.encode_window(x), 64, torch.float64)
    assert torch.equal(quant.round_mxfp8(x), window)
    index = quant.decode_index(quant.encode_index(x), 64, torch.float64)
    assert torch.equal(quant.round_mxfp4(x), index)
    for rounded in (quant.round_mxfp8, quant.round_mxfp4):
        assert torch.equal(rounded(x.bfloat16()).double(), rounded(x.bfloat16().double()))
        assert torch.equal(rounded(rounded(x)), rounded(x))


@pytest.mark.parametrize("size", [32, 128])
def test_codes_times_scales_are_near(size, seed):
    x = random_rows(np.random.default_rng(seed), 50, 256)
    codes, scale = quant._mxfp8(x, size)
    codes, scale = codes.flatten(-2), quant._ue8m0_byte(scale)
    assert codes.shape == x.shape
    assert scale.shape == (50, 256 // size)
    step = torch.exp2(scale.double() - 127).repeat_interleave(size, 1)
    error = (codes.double() * step - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, step * 2.0**-10)).all()
    largest = x.unflatten(1, (-1, size)).abs().amax(-1).clamp_min(1e-4)
    assert (largest <= 448 * torch.exp2(scale.double() - 127)).all()
    assert (largest > 224 * torch.exp2(scale.double() - 127) * (1 - 1e-12)).all()


def test_main_scale_is_never_zero():
    record = quant.encode_main(torch.full((16,), 1e-9))
    assert record[8:].view(torch.float8_e4m3fn).float().item() == 2.0**-9


# ----------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (64, 96), (70, 45), (1, 33)])
def test_fp8_weights_have_a_scale_per_tile_and_decode_to_the_nearest(rows, cols, seed):
    w = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, cols)))
    codes, scale = quant.pack_fp8(w)
    assert scale.shape == (-(-rows // 32), -(-cols // 32))
    values = quant.unpack_fp8(codes, scale, torch.float64)
    for (row, col), value in np.ndenumerate(w.numpy()):
        tile = w[row // 32 * 32 :, col // 32 * 32 :][:32, :32].abs().max().item()
        step = 2.0 ** math.ceil(math.log2(tile / 448))
        assert values[row, col].item() == nearest(value / step, E4M3) * step


@pytest.mark.parametrize("pack", [quant.pack_fp8, quant.pack_fp4, quant.pack_table], ids=lambda pack: pack.__name__)
def test_packing_what_was_unpacked_gives_the_same_values(pack, seed):
    unpack = {quant.pack_fp8: quant.unpack_fp8, quant.pack_fp4: quant.unpack_fp4, quant.pack_table: quant.unpack_table}[pack]
    w = torch.from_numpy(np.random.default_rng(seed).standard_normal((64, 64)))
    values = unpack(*pack(w), torch.float64)
    assert (values - w).abs().max() < 0.5
    assert torch.equal(unpack(*pack(values), torch.float64), values)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(unpack(*pack(w), dtype).double(), values)


def test_weight_formats_of_all_zeros():
    zeros = torch.zeros(32, 32)
    for pack, unpack in ((quant.pack_fp8, quant.unpack_fp8), (quant.pack_fp4, quant.unpack_fp4)):
        assert torch.equal(unpack(*pack(zeros), torch.float32), zeros)


@pytest.mark.parametrize(("pack", "repack"), [(quant.pack_fp8, quant.repack_fp8), (quant.pack_fp4, quant.repack_fp4)])
def test_repacked_weight_gives_every_bit_back(pack, repack, seed):
    w = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, 64, 96)))
    codes, scale = pack(w)
    codes_back, scale_back = quant.unpack(repack(codes, scale, torch.float32))
    assert torch.equal(codes_back.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale_back, scale)


# ---------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 40])
def test_products_are_sums_of_products(num_rows, seed):
    rng = np.random.default_rng(seed)
    x, w = torch.from_numpy(rng.standard_normal((num_rows, 96))), torch.from_numpy(rng.standard_normal((40, 96)))
    assert torch.allclose(arithmetic.matmul_rows(x, w), (x[:, None] * w).sum(-1), rtol=0, atol=1e-12)
    weight = quant.repack_fp8(*quant.pack_fp8(w), torch.float64)
    assert torch.allclose(quant.linear_fp8(quant.RoundedRows(x), weight), (x[:, None] * weight.dense).sum(-1), rtol=0, atol=1e-12)


def test_grouped_product_keeps_groups_apart(seed):
    rng = np.random.default_rng(seed)
    x, w = torch.from_numpy(rng.standard_normal((5, 2, 64))), torch.from_numpy(rng.standard_normal((64, 64)))
    weight = quant.repack_fp8(*quant.pack_fp8(w), torch.float64)
    found = quant.linear_fp8_grouped(x, weight)
    for group in range(2):
        rows = slice(32 * group, 32 * group + 32)
        assert torch.allclose(found[:, rows], x[:, group] @ weight.dense[rows].T, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- hyper-connections

SINKHORN = [  # of the logits i * j / 2
    [0.497673, 0.305542, 0.144329, 0.052456],
    [0.305539, 0.309270, 0.240861, 0.144329],
    [0.144328, 0.240859, 0.309270, 0.305541],
    [0.052459, 0.144328, 0.305539, 0.497673],
]


def test_known_stream_mixing():
    logits = torch.tensor([[i * j / 2 for j in range(4)] for i in range(4)], dtype=torch.float64)
    weights = HyperWeights(
        fn=torch.empty(0),
        base=torch.cat([torch.zeros(8, dtype=torch.float64), logits.flatten()]),
        scale=torch.zeros(24, dtype=torch.float64),
        norm=torch.ones(32, dtype=torch.float64),
        num_iterations=20,
        eps=1e-6,
        rms_eps=1e-20,
    )
    ones = torch.ones(1, 1, dtype=torch.float64)
    mix, _, _ = mhc_finish(torch.zeros(1, 24, dtype=torch.float64), ones, ones.expand(1, 32), weights)
    assert np.abs(mix.comb[0].numpy() - SINKHORN).max() < 5.1e-7
    assert mix.pre.tolist() == [[0.5 + 1e-6] * 4]
    assert mix.post.tolist() == [[1.0] * 4]
