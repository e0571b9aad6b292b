"""What a caller gives -> token ids and pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.config import ModelConfig
from deepinfer.errors import RequestError
from deepinfer.executor.worker import Picture
from deepinfer.images import load_image, plan_image, prepare_pixels
from deepinfer.request import SamplingParams
from deepinfer.tokenizer import IMAGE, Tokenizer

MultiModalData = Mapping[str, Any]
"""``{"image_bytes": [file contents…]}``, optionally with ``image_sizes`` (width, height of each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: every image placeholder expanded to its span.
        pictures: in the order of the spans.
        images: position of each span's first token -> hash of its picture.
    """

    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    images: Mapping[int, bytes] = field(default_factory=dict)


def text_ids(text: str, tokenizer: Tokenizer, *, with_images: bool) -> list[int]:
    """Ids of a text prompt, begin token first; ``with_images`` makes the placeholder's spelling a placeholder."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt of type {type(text).__name__} was given; prompts are strings, ids go to prompt_token_ids")
    ids = [tokenizer.bos_id]
    for number, part in enumerate(text.split(IMAGE) if with_images else [text]):
        if number:
            ids.append(tokenizer.special(IMAGE))
        ids += tokenizer.encode(part)
    return ids


def checked_ids(given: Iterable[Any], config: ModelConfig) -> list[int]:
    """Token ids as plain integers, each inside the vocabulary."""
    if isinstance(given, str | bytes):
        raise RequestError("token ids were given as text; text goes to prompts")
    ids = []
    for position, each in enumerate(given):
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise RequestError(f"token id {each!r} at position {position} is not a whole number; give ids as integers")
        if not 0 <= each < config.vocab_size:
            raise RequestError(
                f"token id {each} at position {position} is outside the vocabulary of {config.vocab_size}; send ids below that"
            )
        ids.append(int(each))
    return ids


def check_params(params: SamplingParams, config: ModelConfig) -> None:
    """Refuse token ids in sampling parameters that an answer of this model cannot have.

    Raises:
        RequestError: says which parameter and which id.
    """
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token_id for token_id, _ in params.bias_pairs),
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "golden_token_ids": params.golden_token_ids or (),
    }
    for name, ids in named.items():
        for each in ids:
            if each >= config.vocab_size:
                raise RequestError(f"{name} has {each}, outside the vocabulary of {config.vocab_size}; use ids below that")
    if config.image_token_id in (params.golden_token_ids or ()):
        raise RequestError(f"golden_token_ids has {config.image_token_id}, which stands for pictures; answers have none")
    allowed = range(config.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if params.has_token_mask and not set(allowed) - set(params.banned_token_ids) - {config.image_token_id}:
        raise RequestError("allowed_token_ids and banned_token_ids leave no token that an answer may have; allow more")


def build_prompt(token_ids: Sequence[int], images: Sequence[bytes], config: ModelConfig) -> Prompt:
    """Expand image placeholders and prepare the pixels.

    Args:
        token_ids: one placeholder an image.
        images: encoded files, in the order of the placeholders.
    """
    placeholders = sum(each == config.image_token_id for each in token_ids)
    if placeholders != len(images):
        raise RequestError(
            f"the prompt has {placeholders} image placeholder(s) and {len(images)} image(s) came with it; give equally many"
        )
    if not images:
        return Prompt(token_ids=tuple(token_ids))
    if config.vision is None:
        raise RequestError("this model cannot take images; send text only")
    pictures: list[Picture] = []
    ids: list[int] = []
    hashes: dict[int, bytes] = {}
    remaining = iter(images)
    for each in token_ids:
        if each != config.image_token_id:
            ids.append(each)
            continue
        image = load_image(next(remaining))
        plan = plan_image(*image.size, config.vision)
        pixels = prepare_pixels(image, plan)
        pictures.append(Picture(plan=plan, pixels=pixels))
        hashes[len(ids)] = hashlib.blake2b(pixels.tobytes(), digest_size=16, person=b"pixels").digest()
        ids += [config.image_token_id] * plan.span_tokens
    return Prompt(token_ids=tuple(ids), pictures=tuple(pictures), images=hashes)


def image_files(extra: MultiModalData | None) -> list[bytes]:
    """The encoded images of one prompt's multi-modal data.

    Raises:
        RequestError: it holds something else.
    """
    if extra is None:
        return []
    unknown = sorted(set(extra) - {"image_bytes", "image_sizes"})
    if unknown:
        raise RequestError(f"multi_modal_data has {', '.join(unknown)}; known are image_bytes and image_sizes")
    images = list(extra.get("image_bytes") or [])
    sizes = extra.get("image_sizes")
    if sizes is not None and len(sizes) != len(images):
        raise RequestError(f"{len(sizes)} image_sizes came with {len(images)} image_bytes; give one size per image, or none")
    return images
