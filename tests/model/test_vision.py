"""The vision tower against an independent implementation in loops."""

import dataclasses
import math
import zlib

import pytest
import torch

from deepinfer.config import named_config
from deepinfer.images import Role, plan_image, span_roles
from deepinfer.model.checkpoint.table import tensor_table
from deepinfer.model.vision import VisionTower

CONFIG = named_config("golden")
VISION = CONFIG.vision
SIDE, RATIO, WIDTH, HEADS = VISION.patch_size, VISION.downsample_ratio, VISION.hidden_size, VISION.num_attention_heads


def make_tensors(dtype):
    """Weights that depend on their names only."""
    tensors = {}
    for name, spec in tensor_table(CONFIG).items():
        if not name.startswith(("vision.", "aligner.", "image_")):
            continue
        gen = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(*spec.shape, generator=gen, dtype=torch.float64)
        tensors[name] = (values / math.sqrt(spec.shape[-1]) if len(spec.shape) == 2 else 1 + values / 4).to(dtype)
    return tensors


def make_tower(tensors, *, exact):
    return VisionTower(CONFIG, tensors, exact=exact)


def make_pixels(grid_h, grid_w, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(3, grid_h * SIDE, grid_w * SIDE, generator=gen, dtype=torch.float64) * 2 - 1


def loop_encode(pixels, t):
    """The tower patch by patch and head by head; fp64 vectors, no operator of the package."""
    grid_h, grid_w = pixels.shape[1] // SIDE, pixels.shape[2] // SIDE
    places = [(i, j) for i in range(grid_h) for j in range(grid_w)]

    def norm(v, weight):
        return weight * v / torch.sqrt((v @ v) / len(v) + 1e-6)

    def rotate(v, row, col):
        half = len(v) // 2
        out = v.clone()
        for m in range(half):
            position = row if m < half // 2 else col
            angle = position * VISION.rope_theta ** (-(m % (half // 2)) / (half // 2))
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=v.dtype)
            out[[m, m + half]] = turn @ v[[m, m + half]]
        return out

    x = []
    for i, j in places:
        patch = pixels[:, i * SIDE : (i + 1) * SIDE, j * SIDE : (j + 1) * SIDE]
        x.append(t["vision.patch_embed.proj.weight"] @ patch.flatten() + t["vision.patch_embed.proj.bias"])
    for number in range(VISION.num_hidden_layers):
        w = {name.split(".", 3)[3]: value for name, value in t.items() if name.startswith(f"vision.blocks.{number}.")}
        qkv = [w["attn.wqkv.weight"] @ norm(v, w["norm1.weight"]) + w["attn.wqkv.bias"] for v in x]
        dim = WIDTH // HEADS
        heads = []
        for h in range(HEADS):
            q, k, v = ([row[part * WIDTH + h * dim :][:dim] for row in qkv] for part in range(3))
            q, k = ([rotate(vec, *place) for vec, place in zip(part, places, strict=True)] for part in (q, k))
            weights = [torch.softmax(torch.stack([query @ key for key in k]) / math.sqrt(dim), 0) for query in q]
            heads.append([sum(a * value for a, value in zip(row, v, strict=True)) for row in weights])
        x = [
            old + w["attn.wo.weight"] @ torch.cat(list(new)) + w["attn.wo.bias"]
            for old, new in zip(x, zip(*heads, strict=True), strict=True)
        ]
        for i, old in enumerate(x):
            both = w["mlp.w1.weight"] @ norm(old, w["norm2.weight"])
            gate, up = both[: VISION.intermediate_size], both[VISION.intermediate_size :]
            x[i] = old + w["mlp.w2.weight"] @ (gate * torch.sigmoid(gate) * up)
    x = [norm(v, t["vision.norm.weight"]) for v in x]
    at = dict(zip(places, x, strict=True))
    rows = []
    for i in range(0, grid_h, RATIO):
        for j in range(0, grid_w, RATIO):
            cell = torch.zeros(WIDTH, RATIO, RATIO, dtype=pixels.dtype)
            for y in range(RATIO):
                for z in range(RATIO):
                    if (i + y, j + z) in at:
                        cell[:, y, z] = at[i + y, j + z]
            inner = t["aligner.w1.weight"] @ cell.flatten() + t["aligner.w1.bias"]
            inner = inner * 0.5 * torch.erfc(-inner / math.sqrt(2))
            rows.append(t["aligner.w2.weight"] @ inner + t["aligner.w2.bias"])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def exact():
    return make_tensors(torch.float64)


@pytest.mark.parametrize(("grid_h", "grid_w"), [(4, 5), (3, 3), (1, 7)])
def test_tower_equals_loops_in_exact_arithmetic(exact, grid_h, grid_w):
    pixels = make_pixels(grid_h, grid_w)
    got = make_tower(exact, exact=True).encode(pixels)
    assert got.shape == (-(-grid_h // RATIO) * -(-grid_w // RATIO), CONFIG.hidden_size)
    assert (got - loop_encode(pixels, exact)).abs().max() < 1e-12


def test_bf16_tower_follows_the_exact_one():
    stored = make_tensors(torch.bfloat16)
    pixels = make_pixels(6, 5)
    got = make_tower(stored, exact=False).encode(pixels.float())
    exact = make_tower(stored, exact=True).encode(pixels.bfloat16())
    assert got.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    error = ((got.double() - exact).square().mean() / exact.square().mean()).sqrt()
    assert 0 < error < 4e-3 * 5  # two blocks and the aligner: about a dozen roundings of 2^-9 on average


def test_a_picture_is_encoded_the_same_after_any_other_pictures():
    tower = make_tower(make_tensors(torch.bfloat16), exact=False)
    first = tower.encode(make_pixels(7, 4))
    tower.encode(make_pixels(2, 9, seed=1))
    assert torch.equal(tower.encode(make_pixels(7, 4)), first)


def test_the_span_holds_what_the_roles_say(exact):
    plan = plan_image(50, 40, VISION)
    assert plan.tokens_w != plan.tokens_h
    pixels = make_pixels(plan.patches_h, plan.patches_w)
    tower = make_tower(exact, exact=True)
    span, images = tower.span(pixels, plan.tokens_w), iter(tower.encode(pixels))
    learned = {Role.START: "image_start", Role.NEWLINE: "image_newline", Role.END: "image_end"}
    roles = span_roles(plan)
    assert span.shape == (plan.span_tokens, CONFIG.hidden_size)
    for role, row in zip(roles, span, strict=True):
        assert torch.equal(row, next(images) if role == Role.IMAGE else exact[learned[role]])
    assert next(images, None) is None


def test_a_picture_of_broken_patches_is_our_bug(exact):
    with pytest.raises(AssertionError, match="17 x 16 is not made of 4 px patches"):
        make_tower(exact, exact=True).encode(torch.zeros(3, 16, 17))


def test_weights_go_to_the_device_that_is_asked_for(exact):
    tower = VisionTower(CONFIG, exact, device=torch.device("meta"), exact=True)
    assert {part.device.type for part in (tower.norm, tower.start, tower.blocks[0].wqkv, *tower.aligner)} == {"meta"}


def test_a_model_without_vision_has_no_tower(exact):
    with pytest.raises(AssertionError, match="vision section"):
        VisionTower(dataclasses.replace(CONFIG, vision=None), exact)
