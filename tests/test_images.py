"""Size plans, spans, decoding of untrusted bytes, resampling."""

import dataclasses
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from deepinfer.config import VisionConfig, named_config
from deepinfer.errors import RequestError
from deepinfer.images import Role, load_image, plan_image, prepare_pixels, span_roles

FULL = named_config("full").vision


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# Source: the published preprocessing.
@pytest.mark.parametrize(
    ("size", "pixels", "patches", "tokens", "span"),
    [
        ((544, 544), (546, 546), (39, 39), (13, 13), 184),
        ((640, 480), (644, 490), (46, 35), (16, 12), 206),
        ((1024, 768), (1036, 770), (74, 55), (25, 19), 496),
        ((1920, 1080), (1708, 966), (122, 69), (41, 23), 968),
        ((4000, 3000), (1512, 1134), (108, 81), (36, 27), 1001),
        ((50, 3000), (70, 4214), (5, 301), (2, 101), 305),
        ((20, 30000), (42, 21462), (3, 1533), (1, 511), 1024),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_plan_has_the_published_sizes(size, pixels, patches, tokens, span):
    plan = plan_image(*size, FULL)
    assert (plan.width, plan.height) == pixels
    assert (plan.patches_w, plan.patches_h) == patches
    assert (plan.tokens_w, plan.tokens_h) == tokens
    assert plan.span_tokens == span
    assert not plan.stretch


SIZE = st.one_of(st.integers(1, 100), st.integers(1, 2000), st.integers(1, 100000))


@settings(deadline=None)
@given(SIZE, SIZE)
@example(30000, 20)
@example(1, 1)
@example(100000, 1)
@example(1, 100000)
def test_plan_fills_whole_patches_and_never_exceeds_the_limit(width, height):
    for config in (FULL, named_config("golden").vision, named_config("random").vision):
        plan = plan_image(width, height, config)
        assert plan.span_tokens <= config.max_image_tokens
        assert plan.width == plan.patches_w * config.patch_size > 0
        assert plan.height == plan.patches_h * config.patch_size > 0
        assert (plan.tokens_w - 1) * config.downsample_ratio < plan.patches_w <= plan.tokens_w * config.downsample_ratio
        assert (plan.tokens_h - 1) * config.downsample_ratio < plan.patches_h <= plan.tokens_h * config.downsample_ratio
        assert len(span_roles(plan)) == plan.span_tokens


@settings(deadline=None)
@given(st.integers(100, 20000), st.integers(100, 20000))
def test_shrinking_uses_the_room_and_keeps_the_shape(width, height):
    plan = plan_image(width, height, FULL)
    if width * height > 2_500_000 and 0.2 < width / height < 5:  # certainly too many pixels for 1024 tokens
        assert plan.span_tokens > 880
        assert plan.width / plan.height == pytest.approx(width / height, rel=0.06)


@settings(deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(4, 40), st.integers(1, 3))
def test_plan_holds_for_other_configurations(width, height, max_tokens, ratio):
    config = VisionConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=1, intermediate_size=16, patch_size=5, rope_theta=1e4,
        downsample_ratio=ratio, max_image_tokens=max_tokens, min_pixels=100,
    )  # fmt: skip
    plan = plan_image(width, height, config)
    assert plan.span_tokens <= max_tokens
    assert min(plan.tokens_w, plan.tokens_h) >= 1


def test_too_wide_pictures_are_stretched_only_where_the_configuration_limits_the_ratio():
    limited = dataclasses.replace(FULL, max_wh_ratio=2.0)
    wide = plan_image(3000, 600, limited)
    assert wide.stretch
    assert (wide.width, wide.height) == (1204, 602)  # 1200 x 600, in whole patches
    assert not plan_image(1199, 600, limited).stretch
    assert plan_image(1200, 600, limited).stretch
    assert dataclasses.replace(wide, stretch=False) == plan_image(1200, 600, FULL)


def test_span_is_start_lines_with_newlines_end():
    plan = plan_image(50, 40, named_config("golden").vision)
    assert (plan.tokens_w, plan.tokens_h) == (5, 4)
    roles = span_roles(plan)
    assert roles[0] == Role.START
    assert roles[-1] == Role.END
    assert roles[1:-1] == ((Role.IMAGE,) * 5 + (Role.NEWLINE,)) * 4


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_a_picture_without_pixels_is_refused(size):
    with pytest.raises(RequestError, match="no content"):
        plan_image(*size, FULL)


# --------------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_accepted_formats_decode_to_rgb(kind):
    image = load_image(encoded(Image.new("RGB", (7, 5), (10, 200, 30)), kind))
    assert image.mode == "RGB"
    assert image.size == (7, 5)
    assert np.abs(np.asarray(image).astype(int) - [10, 200, 30]).max() <= 4  # lossy formats


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_modes_become_rgb(mode):
    image = Image.new("RGBA", (4, 4), (255, 255, 255, 0)).convert(mode)
    assert np.asarray(load_image(encoded(image, "PNG"))).tolist() == [[[255, 255, 255]] * 4] * 4


def test_a_palette_with_transparency_keeps_its_colours_without_a_warning():
    image = Image.new("P", (2, 1))
    image.putpalette([5, 6, 7, 90, 80, 70])
    image.putpixel((1, 0), 1)
    got = load_image(encoded(image, "PNG", transparency=bytes([0, 128])))
    assert np.asarray(got).tolist() == [[[5, 6, 7], [90, 80, 70]]]


def test_a_moving_picture_gives_its_first_frame():
    frames = [Image.new("RGB", (3, 3), color) for color in ((255, 0, 0), (0, 255, 0))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(load_image(data))[0, 0].tolist() == [255, 0, 0]


def png_of(depth, colour, row, extra=b""):
    """A PNG of one line with samples of ``depth`` bits, encoded without a library."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    width = len(row) * 8 // (depth * channels)
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + body + chunk(b"IEND", b"")


SAMPLES = (0, 1, 255, 256, 32768, 65280, 65535)


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_of_16_bit_samples_the_upper_8_bits_are_kept_grey_or_not(colour, channels):
    row = b"".join(struct.pack(">H", each) * channels for each in SAMPLES)
    got = np.asarray(load_image(png_of(16, colour, row)))
    assert got.tolist() == [[[each >> 8] * 3 for each in SAMPLES]]


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20), st.booleans())
def test_grey_pictures_of_16_bits_look_like_those_of_8(samples, is_transparent):
    transparency = struct.pack(">I", 2) + b"tRNS" + b"\0\0" + struct.pack(">I", zlib.crc32(b"tRNS\0\0"))
    row = b"".join(struct.pack(">H", each) for each in samples)
    fine = load_image(png_of(16, 0, row, transparency if is_transparent else b""))
    coarse = load_image(png_of(8, 0, bytes(each >> 8 for each in samples)))
    assert np.asarray(fine).tolist() == np.asarray(coarse).tolist()


@pytest.mark.parametrize(
    ("depth", "row", "expected"), [(1, b"\xa0", [255, 0, 255, 0]), (2, b"\x1b", [0, 85, 170, 255]), (4, b"\x3f", [51, 255])]
)
def test_samples_of_few_bits_are_scaled(depth, row, expected):
    got = np.asarray(load_image(png_of(depth, 0, row)))[0, :, 0]
    assert got.tolist()[: len(expected)] == expected


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
def test_a_jpeg_of_any_mode_keeps_its_colour(mode):
    image = Image.new("RGB", (8, 8), (200, 30, 60)).convert(mode)
    got = np.asarray(load_image(encoded(image, "JPEG", quality=100))).astype(int)
    assert np.abs(got - np.asarray(image.convert("RGB"))).max() <= 2


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_other_moving_pictures_give_their_first_frame_too(kind):
    frames = [Image.new("RGBA", (4, 4), color) for color in ((255, 0, 0, 255), (0, 255, 0, 128))]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert np.asarray(load_image(data))[0, 0].tolist() == [255, 0, 0]


GOOD = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "PNG")


@pytest.mark.parametrize(
    "data", [b"", b"not an image", GOOD[:60], GOOD[:-2000], GOOD[:100] + bytes(500) + GOOD[600:]], ids=range(5)
)
def test_damaged_bytes_are_the_requests_fault(data):
    with pytest.raises(RequestError, match="cannot be decoded") as caught:
        load_image(data)
    assert "0x" not in str(caught.value)


def assert_is_one_sentence(told):
    assert "0x" not in told
    assert "\n" not in told


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8))
def test_no_damage_raises_anything_but_a_request_error(offset, junk):
    damaged = GOOD[:offset] + junk + GOOD[offset + len(junk) :]
    try:
        image = load_image(damaged, max_side=4096)
    except RequestError as error:
        assert_is_one_sentence(str(error))
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "EPS"])
def test_other_formats_are_refused(kind):
    with pytest.raises(RequestError, match="PNG, JPEG, WEBP, GIF"):
        load_image(encoded(Image.new("RGB", (8, 8)), kind))


def bomb(width, height):
    """A PNG of a few bytes whose header claims width x height pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("size", "message"),
    [((8193, 10), "8193 x 10 pixels exceeds"), ((10, 9000), "10 x 9000"), ((10000, 10000), "8192"), ((60000, 60000), "8192")],
    ids=str,
)
def test_size_is_judged_by_the_header_before_decoding(size, message):
    # The pixel data are missing: a decoder would report a truncated file instead of the size.
    with pytest.raises(RequestError, match=message):
        load_image(bomb(*size))


def test_the_largest_side_is_still_accepted():
    assert load_image(encoded(Image.new("RGB", (8192, 1)), "PNG")).size == (8192, 1)


def test_too_many_bytes_are_refused_with_both_numbers():
    with pytest.raises(RequestError, match=f"{len(GOOD)} bytes exceeds the limit of 100 bytes"):
        load_image(GOOD, max_bytes=100)


# ------------------------------------------------------------------------------------------------------------------ resampling


def test_pixels_are_scaled_and_channels_come_first():
    vision = named_config("golden").vision
    plan = plan_image(24, 24, vision)
    assert (plan.width, plan.height) == (24, 24)
    values = np.arange(24 * 24 * 3, dtype=np.int64).reshape(24, 24, 3) % 256
    got = prepare_pixels(Image.fromarray(values.astype(np.uint8)), plan)
    assert got.dtype == np.float32
    assert got.flags.c_contiguous
    assert np.abs(got - (values / 127.5 - 1).transpose(2, 0, 1)).max() < 1e-6
    assert got.min() == -1
    assert got.max() == 1


def test_border_is_grey_127_and_the_picture_centred():
    plan = plan_image(640, 480, FULL)  # to 644 x 490: the picture becomes 644 x 483
    got = prepare_pixels(Image.new("RGB", (640, 480), (255, 255, 255)), plan)
    assert got.shape == (3, 490, 644)
    grey = np.float32((127 / 255 - 0.5) / 0.5)
    white_rows = np.flatnonzero((got == 1).all(axis=(0, 2)))
    assert (white_rows[0], white_rows[-1]) == (4, 486)
    outside = np.delete(got, white_rows, axis=1)
    assert np.abs(outside - grey).max() < 1e-6


def test_stretched_pictures_have_no_border():
    plan = plan_image(3000, 600, dataclasses.replace(FULL, max_wh_ratio=2.0))
    assert (prepare_pixels(Image.new("RGB", (3000, 600), (255, 255, 255)), plan) == 1).all()


def test_resampling_is_bicubic():
    ramp = Image.fromarray(np.repeat(np.arange(48, dtype=np.uint8) * 5, 48).reshape(48, 48).T.copy()).convert("RGB")
    plan = dataclasses.replace(plan_image(24, 24, named_config("golden").vision), width=24, height=24)
    expected = np.asarray(ramp.resize((24, 24), Image.Resampling.BICUBIC), dtype=np.float64).transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(prepare_pixels(ramp, plan) - expected).max() < 1e-6


@pytest.mark.parametrize("size", [(1, 8192), (8192, 1), (1, 1)])
def test_extreme_shapes_resample_to_their_plan(size):
    plan = plan_image(*size, FULL)
    assert prepare_pixels(Image.new("RGB", size), plan).shape == (3, plan.height, plan.width)


def test_importing_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import deepinfer.images"
    subprocess.run([sys.executable, "-c", code], check=True)
