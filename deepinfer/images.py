"""Pictures before the network: decode, plan a size, resample.

Owns the size plan, which fixes how many tokens a picture costs and is a pure function of its width and height: the server
counts tokens with it before anything is decoded, the vision tower lays out its grid by it.  Imports no torch.

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
"""Decoders that untrusted bytes may reach; others of Pillow's run external programs or are rarely exercised."""

MAX_IMAGE_BYTES: Final = 32 << 20
MAX_IMAGE_SIDE: Final = 8192
"""Limits of one picture, as the vendor's API documents them; a decode takes at most 8192² x 3 bytes = 201 MB."""

_BORDER: Final = (127, 127, 127)
_MAX_SAMPLE: Final = 2**16 - 1
"""Formats have no samples of more than 16 bits."""


class Role(IntEnum):
    """What a position of an image span holds; all of them carry the same token id."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Sizes of one picture on its way to tokens.

    Attributes:
        width, height: pixels after resampling.
        patches_w, patches_h: grid of patches, width / patch_size by height / patch_size.
        tokens_w, tokens_h: grid of tokens.
        span_tokens: positions in the sequence: tokens_h rows of tokens_w + 1 (the newline), a start and an end.
        stretch: resample without keeping the aspect ratio (only for a picture wider than ``max_wh_ratio`` allows).
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
    """The plan of pixel sizes that are multiples of the patch."""
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

    Small pictures grow to ``min_pixels``; sides round up to whole patches; what would cost more than ``max_image_tokens``
    shrinks to the largest grid of about the same shape that does not.  Doubles throughout, in the order of operations of the
    source: other orders give other integers.

    Raises:
        RequestError: a side is not positive.

    Source: the published preprocessing; ``min_pixels``, ``max_image_tokens``, ``max_wh_ratio`` of ``vision_config``.
    """
    if width < 1 or height < 1:
        raise RequestError(f"image of {width} x {height} pixels has no content; send a picture of at least 1 x 1")
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

    The size in the header is checked before any pixel is decoded, so a small file cannot claim much memory.  Transparency is
    dropped and EXIF rotation ignored, as Pillow's plain conversion to RGB does and thus the published
    preprocessing.  Of 16-bit samples the upper 8 bits are kept, of grey pictures as of coloured ones.

    Raises:
        RequestError: not one of these formats, damaged, or over a limit.
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
        # Pillow's decoders raise a dozen unrelated types on damaged bytes; whatever it is, the picture is to blame.
        raise RequestError(f"image cannot be decoded ({reason(error)}); send an intact {', '.join(FORMATS)} file") from error
    raise RequestError(f"image of {width} x {height} pixels exceeds the limit of {max_side} a side; scale it down")


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode that the decoders give; Pillow's own conversion clips samples of more than 8 bits."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about the direct way; the colours are the same
    elif image.mode.startswith("I"):  # 16 bits in any order of bytes, which some versions widen to 32
        samples = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(samples, 0, _MAX_SAMPLE) >> 8).astype(np.uint8))
    return image.convert("RGB")


def prepare_pixels(image: Image.Image, plan: ImagePlan) -> NDArray[np.float32]:
    """Resample a picture to its plan and scale it to [-1, 1].

    Bicubic; the aspect ratio is kept and what remains is filled with grey 127 on both sides, unless the plan says stretch.

    Args:
        image: RGB, of the size the plan was made for.

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
