"""A request finds only cache entries of the same tenant, the same tokens and the same pictures."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deepinfer.config import named_config
from deepinfer.engine.prompt import build_prompt, picture_hash
from deepinfer.images import ImagePlan, Picture
from deepinfer.kv.prefix import PageChain
from tests.engine.harness import PAGE_TOKENS, build, drain, fresh, params, request, rng_of, tokens

FULL = named_config("full")


def png(width, height, color=(9, 90, 200)):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def keys_of(*files):
    """Keys of a prompt that begins with these pictures."""
    prompt = build_prompt([FULL.image_token_id] * len(files) + [5] * 128, files, FULL)
    chain = PageChain(128)
    chain.extend(np.array(prompt.token_ids, np.int32), prompt.image_hashes)
    return chain.keys


@pytest.mark.parametrize(("width", "height"), [(756, 546), (546, 1092), (588, 714)])
def test_pictures_of_equal_bytes_and_other_shapes_share_no_page(width, height):
    wide, tall = png(width, height), png(height, width)
    prompts = [build_prompt([FULL.image_token_id], [each], FULL) for each in (wide, tall)]
    assert prompts[0].pictures[0].pixels.tobytes() == prompts[1].pictures[0].pixels.tobytes()
    assert set(keys_of(wide)).isdisjoint(keys_of(tall))
    assert set(keys_of(wide, tall)).isdisjoint(keys_of(tall, wide))
    assert keys_of(wide, tall) == keys_of(wide, tall)
    assert keys_of(wide, tall)[0] == keys_of(wide, wide)[0]


GRID = st.integers(1, 6)


@given(GRID, GRID, GRID, GRID, st.sampled_from([np.float32, np.int32, np.float16]), st.sampled_from([np.float32, np.int32]))
def test_picture_hashes_are_equal_exactly_if_shape_type_grid_and_pixels_are(w, h, other_w, other_h, dtype, other_dtype):
    def picture(width, height, dtype, columns):
        plan = ImagePlan(
            width=width,
            height=height,
            patches_w=width,
            patches_h=height,
            tokens_w=columns,
            tokens_h=1,
            span_tokens=4,
            stretch=False,
        )
        return Picture(plan=plan, pixels=np.zeros((3, height, width), dtype))

    sizes = [(w, h, dtype, 1), (other_w, other_h, other_dtype, 1), (h, w, dtype, 1), (w, h, dtype, 2)]
    for a in sizes:
        for b in sizes:
            assert (picture_hash(picture(*a)) == picture_hash(picture(*b))) == (a == b)


@pytest.mark.parametrize("exact_replay", [False, True], ids=["usual", "hit_invariant"])
def test_a_tenant_with_a_crafted_salt_finds_nothing_of_another(exact_replay):
    """The salts equal, or begin with, the values that were hashed for another tenant's keys."""
    rng = rng_of(3, 1)
    prompt = tokens(rng, 9 * PAGE_TOKENS)
    core = build(exact_replay=exact_replay, num_pages=300)
    drain(core, [request("theirs", prompt, params(rng, 1))])
    chain = PageChain(PAGE_TOKENS)
    chain.extend(np.array(prompt, np.int32))
    pages = [np.array(prompt[at : at + PAGE_TOKENS], "<i4").tobytes() for at in (0, PAGE_TOKENS)]
    salts = [chain._root, chain._root + pages[0], chain.keys[0] + pages[1]]
    work = [request(str(at), prompt[at * PAGE_TOKENS :], params(rng, 1), salt=salt) for at, salt in enumerate(salts)]
    got = drain(core, work)
    assert core.stats().num_hit_tokens == 0, "another tenant's pages were found"
    assert got == fresh(work)
    core.close()
