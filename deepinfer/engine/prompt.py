"""Converts the prompts of callers into token ids and pictures.

An image is an encoded file that a caller gives; a picture is its decoded pixels.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.config import EngineArgs, ModelConfig
from deepinfer.errors import ContextTooLong, RequestError, shown
from deepinfer.images import Picture, load_image, plan_image, prepare_pixels
from deepinfer.request import SamplingParams, as_bytes, as_whole, as_whole_numbers, is_list
from deepinfer.tokenizer import IMAGE, Tokenizer

MultiModalData = Mapping[str, Any]
"""``{"image_bytes": [file contents…]}``, optionally with ``image_sizes`` (width and height of each image)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: the ids, with every image placeholder expanded to its span.
        pictures: the pictures in the order of the spans.
        image_hashes: position of each span's first token -> content hash of its picture.
    """

    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    image_hashes: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """The images of one prompt.

    Attributes:
        files: encoded files in the order of the placeholders.
        sizes: the caller's (width, height) of each image, or None.
    """

    files: tuple[bytes, ...] = ()
    sizes: tuple[tuple[int, int], ...] | None = None


class PromptReader:
    """Makes prompts from the arguments of an engine's callers.  An error leaves the engine unchanged.

    A prompt that is too long is refused early: text is refused before it is tokenised, and images before they are decoded.
    """

    def __init__(self, args: EngineArgs, config: ModelConfig, tokenizer: Tokenizer) -> None:
        """Read prompts for an engine with these settings."""
        self._args = args
        self._config = config
        self._tokenizer = tokenizer

    def prompts(self, texts: object, prompt_token_ids: object, multi_modal_data: object) -> list[Prompt]:
        """The prompts of a batch.

        Args:
            texts: one text, several texts, or None.
            prompt_token_ids: ids of each prompt, or None.  They are used instead of ``texts`` if both are given.
            multi_modal_data: one mapping for a single prompt, one mapping or None for each prompt, or None.

        Raises:
            RequestError: an argument cannot be used; the message names the prompt by number.
            ContextTooLong: a prompt is too long.
        """
        given = None if texts is None else [texts] if isinstance(texts, str) else _several("prompts", texts, "strings")
        ids = None if prompt_token_ids is None else _several("prompt_token_ids", prompt_token_ids, "lists of token ids")
        if given is None and ids is None:
            raise RequestError("neither prompts nor prompt_token_ids was given; give one of them")
        if given is not None and ids is not None and len(given) != len(ids):
            raise RequestError(
                f"{len(given)} prompts and {len(ids)} prompt_token_ids were given; give equally many, or only one of the two"
            )
        count = len(given if ids is None else ids)  # type: ignore[arg-type]
        extras = self._extras(multi_modal_data, count)
        ready = []
        for number, extra in enumerate(extras):
            try:
                if ids is not None:
                    ready.append(self.of_ids(ids[number], extra))
                elif given is not None:
                    ready.append(self.of_text(given[number], extra))
            except RequestError as error:
                raise type(error)(f"prompt {number}: {error}") from error
        return ready

    def of_ids(self, given: object, multi_modal_data: object = None) -> Prompt:
        """A prompt of token ids, with one placeholder for each image."""
        images = image_files(multi_modal_data)
        return build_prompt(self.ids(given), images.files, self._config, sizes=images.sizes)

    def of_text(self, given: object, multi_modal_data: object = None) -> Prompt:
        """A prompt of text.  If it has images, each spelling of the placeholder in the text is a placeholder."""
        images = image_files(multi_modal_data)
        ids = self.text_ids(given, with_images=bool(images.files))
        return build_prompt(ids, images.files, self._config, sizes=images.sizes)

    def ids(self, given: object) -> list[int]:
        """Token ids as plain integers; checks the vocabulary and the context limit."""
        return checked_ids(self.unchecked_ids(given), self._config)

    def unchecked_ids(self, given: object) -> list[int]:
        """Token ids as plain integers; checks only how many there are."""
        if isinstance(given, str | bytes):
            raise RequestError("token ids were given as text; text goes to prompts, and token ids are integers")
        if isinstance(given, list | tuple):
            self.check_length(len(given))
        # From an iterable without a length, take only as many ids as the engine can use.
        ids = as_whole_numbers("prompt_token_ids", given, things="token ids", low=None, at_most=self._args.max_model_len)
        self.check_length(len(ids))
        return ids

    def text_ids(self, given: object, *, with_images: bool = False) -> list[int]:
        """Ids of a text prompt, begin token first; with ``with_images`` each spelling of the placeholder is a placeholder."""
        if not isinstance(given, str):
            raise RequestError(
                f"a prompt of type {type(given).__name__} was given; prompts are strings, ids go to prompt_token_ids"
            )
        tokenizer = self._tokenizer
        parts = given.split(IMAGE) if with_images else [given]
        least = len(parts) + sum(map(tokenizer.least_tokens, parts))
        if least >= self._args.max_model_len:
            self.check_length(least, f"text of {len(given)} characters, which is at least {least} tokens,")
        ids = [tokenizer.bos_id]
        for number, part in enumerate(parts):
            if number:
                ids.append(tokenizer.special(IMAGE))
            ids += tokenizer.encode(str(part))
        self.check_length(len(ids))
        return ids

    def check_params(self, params: SamplingParams) -> None:
        """:func:`check_params` for this engine."""
        check_params(params, self._config, banned=self._args.banned_token_ids)

    def check_length(self, num_tokens: int, what: str = "") -> None:
        """Refuse a prompt of at least ``num_tokens`` tokens if it is too long; ``what`` describes the prompt in messages.

        Raises:
            ContextTooLong: the prompt has more tokens than the engine can use.
        """
        args, what = self._args, what or f"prompt of {num_tokens} tokens"
        if num_tokens >= args.ignore_len:
            raise ContextTooLong(
                f"{what} is not read, because ignore_len={args.ignore_len}; shorten the prompt or raise ignore_len"
            )
        if num_tokens >= args.max_model_len:
            raise ContextTooLong(
                f"{what} leaves no room for output in the context limit of {args.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )

    @staticmethod
    def _extras(given: object, count: int) -> Sequence[object]:
        if given is None:
            return [None] * count
        extras = [given] if isinstance(given, Mapping) else _several("multi_modal_data", given, "mappings")
        if len(extras) != count:
            raise RequestError(f"{len(extras)} multi_modal_data for {count} prompts were given; give one per prompt, or none")
        return extras


def params_for_each(given: object, count: int) -> list[SamplingParams]:
    """Sampling parameters of ``count`` prompts: one object for all, or one object for each.

    Raises:
        RequestError: ``given`` has another type or length.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    each = _several("sampling_params", given, "SamplingParams")
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling_params for {count} prompts were given; give one for all or one per prompt")
    for number, params in enumerate(each):
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params {number} of type {type(params).__name__} was given; give SamplingParams")
    return each


def _several(name: str, given: object, things: str) -> list[Any]:
    """A caller's values for several prompts, in order."""
    if not is_list(given) or isinstance(given, Set):  # a set has no order
        raise RequestError(f"{name} of type {type(given).__name__} was given; give a list of {things}")
    several = list(given)
    if name == "prompt_token_ids" and several and all(as_whole(each) is not None for each in several):
        raise RequestError(
            f"prompt_token_ids is one list that begins with {shown(several[0])}; give a list of lists, one for each prompt"
        )
    return several


def checked_ids(given: object, config: ModelConfig) -> list[int]:
    """Token ids as plain integers; checks that each id is inside the vocabulary."""
    ids = as_whole_numbers("prompt_token_ids", given, things="token ids", low=None)
    if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
        at, wrong = next((at, each) for at, each in enumerate(ids) if not 0 <= each < config.vocab_size)
        raise RequestError(
            f"token id {shown(wrong)} at position {at} is outside the vocabulary of {config.vocab_size}; send smaller ids"
        )
    return ids


def check_params(params: SamplingParams, config: ModelConfig, *, banned: Iterable[int] = ()) -> None:
    """Refuse token ids in sampling parameters that an answer of this model cannot contain.

    Args:
        banned: tokens that the engine bans for all requests.

    Raises:
        RequestError: names the parameter and the id.
    """
    params.check_vocabulary(config.vocab_size)
    if config.image_token_id in (params.golden_token_ids or ()):
        raise RequestError(
            f"golden_token_ids has {config.image_token_id}, the token of images; answers have no images, leave it out"
        )
    wanted = params.structured_output
    if wanted is not None and config.eos_token_id in wanted.named_token_ids:
        raise RequestError(
            f"so_args names the end token {config.eos_token_id} in the trigger or as bound_token_id, but it ends the answer; "
            "use another token"
        )
    if params.has_token_mask:
        forbidden = {config.image_token_id, *banned, *params.banned_token_ids}
        allowed = params.allowed_token_ids
        if len(forbidden) == config.vocab_size if allowed is None else forbidden.issuperset(allowed):
            raise RequestError(
                "allowed_token_ids, banned_token_ids and the tokens that the engine bans leave no token for an answer; allow more"
            )


def picture_hash(picture: Picture) -> bytes:
    """Hash of everything that determines a picture's features: its pixels, their dtype and shape, and the grid of its tokens."""
    plan, pixels = picture.plan, np.ascontiguousarray(picture.pixels)
    dtype = pixels.dtype.str.encode()
    sizes = (plan.width, plan.height, plan.patches_w, plan.patches_h, plan.tokens_w, plan.tokens_h, plan.span_tokens)
    # Each part has a fixed size or a length before it, so pictures of different shapes never give the same bytes to the hash.
    header = struct.pack(f"<II{pixels.ndim}Q7Q", len(dtype), pixels.ndim, *pixels.shape, *sizes)
    state = hashlib.blake2b(header + dtype, digest_size=16, person=b"pixels")
    state.update(pixels.data.cast("B"))
    return state.digest()


def build_prompt(
    token_ids: Sequence[int],
    images: Sequence[bytes],
    config: ModelConfig,
    *,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Prompt:
    """Expand image placeholders and prepare the pixels.

    Args:
        token_ids: ids with one placeholder for each image.
        images: encoded files in the order of the placeholders.
        sizes: required (width, height) of each image, or None.
    """
    placeholders = token_ids.count(config.image_token_id)
    if placeholders != len(images):
        raise RequestError(f"the prompt has {placeholders} image placeholder(s) and {len(images)} image(s); give equally many")
    if not images:
        return Prompt(token_ids=tuple(token_ids))
    if config.vision is None:
        raise RequestError("this model cannot take images; send text only")
    pictures: list[Picture] = []
    ids: list[int] = []
    hashes: dict[int, bytes] = {}
    for each in token_ids:
        if each != config.image_token_id:
            ids.append(each)
            continue
        number = len(pictures)
        image = load_image(images[number])
        if sizes is not None and sizes[number] != image.size:
            raise RequestError(
                f"image_sizes has {sizes[number][0]} x {sizes[number][1]} for image {number}, which has {image.width} x "
                f"{image.height} pixels; give its width and height, or leave image_sizes out"
            )
        plan = plan_image(*image.size, config.vision)
        pixels = prepare_pixels(image, plan)
        pictures.append(Picture(plan=plan, pixels=pixels))
        hashes[len(ids)] = picture_hash(pictures[-1])
        ids += [config.image_token_id] * plan.span_tokens
    return Prompt(token_ids=tuple(ids), pictures=tuple(pictures), image_hashes=hashes)


def image_files(extra: object) -> ImageFiles:
    """The encoded images of one prompt's multi-modal data.

    Raises:
        RequestError: it holds other keys or values.
    """
    if extra is None:
        return ImageFiles()
    if not isinstance(extra, Mapping):
        raise RequestError(f"multi_modal_data of type {type(extra).__name__} was given; give a mapping with image_bytes")
    unknown = sorted(shown(each).strip("'") for each in extra if each not in ("image_bytes", "image_sizes"))
    if unknown:
        raise RequestError(f"multi_modal_data has {', '.join(unknown[:5])}; the known keys are image_bytes and image_sizes")
    given, sizes = extra.get("image_bytes"), extra.get("image_sizes")
    files = (
        () if given is None else tuple(as_bytes("an image", each) for each in _several("image_bytes", given, "files' contents"))
    )
    if sizes is None:
        return ImageFiles(files=files)
    pairs = tuple(_pair(each) for each in _several("image_sizes", sizes, "pairs of width and height"))
    if len(pairs) != len(files):
        raise RequestError(f"{len(pairs)} image_sizes and {len(files)} image_bytes were given; give one size per image, or none")
    return ImageFiles(files=files, sizes=pairs)


def _pair(given: object) -> tuple[int, int]:
    pair = as_whole_numbers("image_sizes", given, things="widths and heights", low=1, at_most=3)
    if len(pair) != 2:
        raise RequestError(f"image_sizes has an entry of {len(pair)} numbers; give the width and the height of each image")
    return pair[0], pair[1]
