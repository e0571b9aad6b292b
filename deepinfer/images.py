"""Images become pictures: decode, plan a size, resample.

An image is an encoded file of a caller; a picture is its decoded pixels.  This module owns the size plan, which fixes the number
of tokens of a picture.  The plan depends only on width and height.  The prompt reader counts tokens with the plan; the vision
tower uses its grid.  Imports no torch.

Invariant: ``plan_image(...).span_tokens <= max_image_tokens`` for every size.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from deepinfer.config import VisionConfig
from deepinfer.errors import RequestError, reason

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Decoders for untrusted bytes.  Other decoders of Pillow run external programs or are rarely tested."""

MAX_IMAGE_BYTES: Final = 32 << 20
MAX_IMAGE_SIDE: Final = 8192
"""Limits of one image, as the vendor's API documents them; a decoded picture takes at most 8192² x 3 bytes = 201 MB."""

_BORDER: Final = (127, 127, 127)
_MAX_SAMPLE: Final = 2**16 - 1
"""The formats have samples of at most 16 bits."""


class Role(IntEnum):
    """Content of a position in an image span; all positions have the same token id."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Sizes of one picture in pixels, patches and tokens.

    Attributes:
        width, height: pixels after resampling.
        patches_w, patches_h: grid of patches, width / patch_size by height / patch_size.
        tokens_w, tokens_h: grid of tokens.
        span_tokens: positions in the sequence: tokens_h lines of tokens_w + 1 (the newline), a start and an end.
        stretch: resample without keeping the aspect ratio (only for a picture that is wider than ``max_wh_ratio`` allows).
    """

    width: int
    height: int
    patches_w: int
    patches_h: int
    tokens_w: int
    tokens_h: int
    span_tokens: int
    stretch: bool


def _grid(width: int, height: int, config: VisionConfig, *, stretch: bool) -> ImagePlan:
    """The plan for a width and a height that are multiples of the patch size."""
    patches_w, patches_h = width // config.patch_size, height // config.patch_size
    tokens_w, tokens_h = -(-patches_w // config.downsample_ratio), -(-patches_h // config.downsample_ratio)
    return ImagePlan(
        width=width,
        height=height,
        patches_w=patches_w,
        patches_h=patches_h,
        tokens_w=tokens_w,
        tokens_h=tokens_h,
        span_tokens=tokens_h * (tokens_w + 1) + 2,
        stretch=stretch,
    )


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """Choose the size at which a picture of ``width`` x ``height`` pixels enters the tower.

    Small pictures grow to ``min_pixels``.  Sides round up to whole patches.  A picture that would need more than
    ``max_image_tokens`` shrinks to the largest grid of about the same shape that fits.  All numbers are doubles, in the source's
    order of operations, because another order gives other integers.

    Raises:
        RequestError: a side is not positive.

    Source: the published preprocessing; ``min_pixels``, ``max_image_tokens``, ``max_wh_ratio`` of ``vision_config``.
    """
    if width < 1 or height < 1:
        raise RequestError(f"image of {width} x {height} pixels has no content; send an image of at least 1 x 1")
    patch, cell = config.patch_size, config.patch_size * config.downsample_ratio
    w: float = width
    h: float = height
    stretch = config.max_wh_ratio is not None and w >= h * config.max_wh_ratio
    if config.max_wh_ratio is not None:
        w = min(w, h * config.max_wh_ratio)
    if w * h < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (w * h))
        w, h = int(w * grow), int(h * grow)
    plan = _grid(math.ceil(w / patch) * patch, math.ceil(h / patch) * patch, config, stretch=stretch)
    if plan.span_tokens <= config.max_image_tokens:
        return plan

    room = config.max_image_tokens - 2
    ratio = h / w
    columns = math.sqrt(room / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return _grid(cell, room // 2 * cell, config, stretch=stretch)
    if rows < 1:
        return _grid((room - 1) * cell, cell, config, stretch=stretch)
    shrink = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    return _grid(math.floor(w * shrink / patch) * patch, math.floor(h * shrink / patch) * patch, config, stretch=stretch)


def span_roles(plan: ImagePlan) -> tuple[Role, ...]:
    """Roles of the ``plan.span_tokens`` positions of a picture, in sequence order; IMAGE positions are in reading order.

    Source: model report, vision section.
    """
    line = (Role.IMAGE,) * plan.tokens_w + (Role.NEWLINE,)
    return (Role.START, *line * plan.tokens_h, Role.END)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image of a request, ready for the vision tower.

    Attributes:
        plan: its size in pixels and tokens.
        pixels: [3, height, width] float32 in [-1, 1].
    """

    plan: ImagePlan
    pixels: NDArray[np.float32]


def load_image(data: bytes, *, max_bytes: int = MAX_IMAGE_BYTES, max_side: int = MAX_IMAGE_SIDE) -> Image.Image:
    """Decode a PNG, JPEG, WebP or GIF (its first frame) to RGB.

    The size in the header is checked before any pixel is decoded, so a small file cannot take much memory.  Transparency and EXIF
    rotation are ignored, as in Pillow's conversion to RGB, which the published preprocessing uses.  Samples of 16 bits keep their
    upper 8 bits, in grey and in coloured images.

    Raises:
        RequestError: the image has another format, is damaged, or exceeds a limit.
    """
    if len(data) > max_bytes:
        raise RequestError(f"image of {len(data)} bytes exceeds the limit of {max_bytes} bytes; send a smaller file")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if max(width, height) <= max_side:
            return _to_rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(f"image has too many pixels; at most {max_side} a side are accepted, scale it down") from error
    except UnidentifiedImageError as error:
        raise RequestError(
            f"image of {len(data)} bytes cannot be decoded, because it is none of {', '.join(FORMATS)}; send one of these"
        ) from error
    except Exception as error:
        # Pillow's decoders raise a dozen unrelated types for damaged bytes; all of them mean that the image is damaged.
        raise RequestError(f"image cannot be decoded ({reason(error)}); send an intact {', '.join(FORMATS)} file") from error
    raise RequestError(f"image of {width} x {height} pixels exceeds the limit of {max_side} a side; scale it down")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode of the decoders to RGB; Pillow's own conversion clips samples of more than 8 bits."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about a direct conversion; the colours are the same
    elif image.mode.startswith("I"):  # 16 bits in any byte order; some versions of Pillow widen them to 32
        samples = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(samples, 0, _MAX_SAMPLE) >> 8).astype(np.uint8))
    return image.convert("RGB")


def prepare_pixels(image: Image.Image, plan: ImagePlan) -> NDArray[np.float32]:
    """Resample a picture to its plan and scale it to [-1, 1].

    The resampling is bicubic.  It keeps the aspect ratio and fills both sides with grey 127, unless ``plan.stretch``.

    Args:
        image: RGB, of the size that the plan was made for.

    Returns:
        [3, plan.height, plan.width] float32, channels first; (x / 255 - 0.5) / 0.5.

    Source: the published preprocessing.
    """
    size = (plan.width, plan.height)
    if plan.stretch:
        resized = image.resize(size, Image.Resampling.BICUBIC)
    else:
        resized = ImageOps.pad(image, size, method=Image.Resampling.BICUBIC, color=_BORDER, centering=(0.5, 0.5))
    channels_last = np.asarray(resized, dtype=np.float32) / np.float32(255)
    return np.ascontiguousarray(((channels_last - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1))
