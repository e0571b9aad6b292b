"""Vision operators against loops over single numbers, and independent rows."""

import math

import pytest
import torch

from deepinfer.ops.vision import (
    VisionBlock,
    aligner,
    cells,
    patch_embed,
    patchify,
    rope_table,
    vision_attention,
    vision_mlp,
)

WIDTH, HEADS, INNER = 16, 2, 24
GRID_H, GRID_W = 3, 4


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(gen, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)


def make_block(gen, dtype=torch.float64):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return VisionBlock(
        norm1=normal(gen, WIDTH, dtype=wide),
        wqkv=normal(gen, 3 * WIDTH, WIDTH, dtype=dtype) / 4,
        wqkv_bias=normal(gen, 3 * WIDTH, dtype=dtype),
        wo=normal(gen, WIDTH, WIDTH, dtype=dtype) / 4,
        wo_bias=normal(gen, WIDTH, dtype=dtype),
        norm2=normal(gen, WIDTH, dtype=wide),
        w1=normal(gen, 2 * INNER, WIDTH, dtype=dtype) / 4,
        w2=normal(gen, WIDTH, INNER, dtype=dtype) / 4,
    )


# ------------------------------------------------------------------------------------------ the same in lists of Python floats


def plain_linear(x, weight, bias=None):
    out = [[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()] for row in x]
    return out if bias is None else [[a + b for a, b in zip(row, bias.tolist(), strict=True)] for row in out]


def plain_norm(x, weight):
    return [
        [g * value / math.sqrt(sum(v * v for v in row) / len(row) + 1e-6) for g, value in zip(weight.tolist(), row, strict=True)]
        for row in x
    ]


def plain_rotate(head, row, col, theta):
    half, quarter = len(head) // 2, len(head) // 4
    out = list(head)
    for m in range(half):
        angle = (row if m < quarter else col) * theta ** (-2 * (m % quarter) / half)
        out[m] = head[m] * math.cos(angle) - head[m + half] * math.sin(angle)
        out[m + half] = head[m + half] * math.cos(angle) + head[m] * math.sin(angle)
    return out


def plain_attention(x, block, grid_w, theta):
    qkv = plain_linear(plain_norm(x, block.norm1), block.wqkv, block.wqkv_bias)
    dim = WIDTH // HEADS
    mixed = [[] for _ in x]
    for h in range(HEADS):
        q, k, v = ([row[part * WIDTH + h * dim : part * WIDTH + (h + 1) * dim] for row in qkv] for part in range(3))
        q, k = ([plain_rotate(vec, i // grid_w, i % grid_w, theta) for i, vec in enumerate(rows)] for rows in (q, k))
        for i, query in enumerate(q):
            scores = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(dim)) for key in k]
            mixed[i] += [sum(s * value[d] for s, value in zip(scores, v, strict=True)) / sum(scores) for d in range(dim)]
    return plain_linear(mixed, block.wo, block.wo_bias)


def plain_mlp(x, block):
    both = plain_linear(plain_norm(x, block.norm2), block.w1)
    inner = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:INNER], row[INNER:], strict=True)] for row in both]
    return plain_linear(inner, block.w2)


def largest_error(got, expected):
    return (got - torch.tensor(expected, dtype=got.dtype)).abs().max().item()


# ----------------------------------------------------------------------------------------------------------------------- tests


def test_patches_are_cut_row_by_row_and_filled_channel_by_channel():
    pixels = torch.arange(3 * 4 * 6).view(3, 4, 6)
    patches = patchify(pixels, 2)
    expected = [
        [int(pixels[c, 2 * i + y, 2 * j + x]) for c in range(3) for y in range(2) for x in range(2)]
        for i in range(2)
        for j in range(3)
    ]
    assert patches.tolist() == expected


def test_cells_pad_below_and_right_and_are_channel_major():
    grid_h, grid_w, width = 4, 5, 2
    x = torch.arange(1, grid_h * grid_w * width + 1).view(-1, width)
    expected = []
    for i in range(2):
        for j in range(2):
            cell = []
            for c in range(width):
                for y in range(3 * i, 3 * i + 3):
                    for z in range(3 * j, 3 * j + 3):
                        cell.append(int(x[y * grid_w + z, c]) if y < grid_h and z < grid_w else 0)
            expected.append(cell)
    assert cells(x, grid_h, grid_w, 3).tolist() == expected


def test_cells_of_whole_multiples_lose_and_add_nothing():
    x = torch.arange(6 * 3 * 2).view(-1, 2)
    assert sorted(cells(x, 6, 3, 3).flatten().tolist()) == list(range(36))


def test_rope_turns_half_of_the_pairs_by_row_and_half_by_column():
    cos, sin = rope_table(5, 7, 64, 10000.0, torch.device("cpu"))
    assert cos.shape == sin.shape == (35, 32)
    for row, col in ((0, 0), (4, 6), (2, 5)):
        for k in range(16):
            frequency = 10000 ** (-2 * k / 32)
            for m, angle in ((k, row * frequency), (16 + k, col * frequency)):
                assert cos[row * 7 + col, m].item() == pytest.approx(math.cos(angle), abs=1e-14)
                assert sin[row * 7 + col, m].item() == pytest.approx(math.sin(angle), abs=1e-14)


def test_attention_equals_loops_over_single_numbers():
    gen = generator(1)
    block, x = make_block(gen), normal(gen, GRID_H * GRID_W, WIDTH)
    cos, sin = rope_table(GRID_H, GRID_W, WIDTH // HEADS, 100.0, x.device)
    assert largest_error(vision_attention(x, block, cos, sin), plain_attention(x.tolist(), block, GRID_W, 100.0)) < 1e-12


def test_mlp_equals_loops_over_single_numbers():
    gen = generator(2)
    block, x = make_block(gen), normal(gen, 5, WIDTH)
    assert largest_error(vision_mlp(x, block), plain_mlp(x.tolist(), block)) < 1e-12


def test_mlp_does_not_clamp():
    gen = generator(3)
    block, x = make_block(gen), normal(gen, 2, WIDTH) * 1e-4 + 40
    big = VisionBlock(**{name: getattr(block, name) for name in block.__slots__ if name != "w1"}, w1=block.w1 * 100)
    assert largest_error(vision_mlp(x, big) / 1e4, [[v / 1e4 for v in row] for row in plain_mlp(x.tolist(), big)]) < 1e-10


def test_embedding_and_aligner_equal_loops_over_single_numbers():
    gen = generator(4)
    x, w1, b1, w2, b2 = (normal(gen, *shape) for shape in ((5, 18), (8, 18), (8,), (7, 8), (7,)))
    inner = plain_linear(x.tolist(), w1, b1)
    assert largest_error(patch_embed(x, w1, b1), inner) < 1e-12
    gelu = [[v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in row] for row in inner]
    assert largest_error(aligner(x, w1, b1, w2, b2), plain_linear(gelu, w2, b2)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_patch_is_computed_alone_as_among_others_bit_for_bit(dtype):
    gen = generator(5)
    num_patches, width = 37, 588  # more than two tiles of matmul_rows, not a multiple; the published patch
    block = make_block(gen, dtype)
    x, patches = normal(gen, num_patches, WIDTH, dtype=dtype), normal(gen, num_patches, width, dtype=dtype)
    inner = 38  # not a multiple of vectors of 4 or 8 numbers
    w1, b1, w2, b2 = (normal(gen, *shape, dtype=dtype) for shape in ((inner, width), (inner,), (13, inner), (13,)))
    w1 = w1 / width**0.5  # small values, for which GELU is not linear
    runs = (
        (x, lambda rows: vision_mlp(rows, block)),
        (patches, lambda rows: patch_embed(rows, w1, b1)),
        (patches, lambda rows: aligner(rows, w1, b1, w2, b2)),
    )
    for rows, run in runs:
        whole = run(rows)
        assert whole.dtype == dtype
        for index in (*([i] for i in range(num_patches)), [5, 4], list(range(20, 37))):
            assert torch.equal(run(rows[index].clone()), whole[index])


def test_bf16_stays_within_the_declared_tolerance_of_exact_arithmetic():
    gen = generator(6)
    narrow = make_block(gen, torch.bfloat16)
    exact = VisionBlock(**{name: getattr(narrow, name).double() for name in narrow.__slots__})
    x = normal(gen, GRID_H * GRID_W, WIDTH, dtype=torch.bfloat16)
    cos, sin = rope_table(GRID_H, GRID_W, WIDTH // HEADS, 100.0, x.device)
    for operator, extra in ((vision_attention, (cos, sin)), (vision_mlp, ())):
        got, expected = operator(x, narrow, *extra), operator(x.double(), exact, *extra)
        assert got.dtype == torch.bfloat16
        scale = expected.square().mean(-1, keepdim=True).sqrt()
        error = ((got.double() - expected) / scale).abs().max().item()
        assert 0 < error < 2 * operator.tolerance  # the input of each rounding has the errors of earlier roundings
