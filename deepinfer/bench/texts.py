"""Texts that ``nano`` was not trained on, which ship with the package, and documents as token ids.

``held_out.jsonl.xz`` has one document a line: ``kind``, ``source`` and ``segments``.  A segment is a text, or
``{"special": spelling}`` for a special token.  ``SOURCES.md`` beside it lists the sources
and their licences.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepinfer.engine.chat import Mark, encode
from deepinfer.tokenizer import Tokenizer

HELD_OUT_TEXTS: Final = Path(__file__).parent / "held_out.jsonl.xz"
"""Data of this package; a wheel carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One document.

    Attributes:
        kind: "prose", "code", "math", "definition", or the kind of a generated task.
        source: name of the collection it comes from.
        segments: texts and special tokens (:class:`~deepinfer.engine.chat.Mark`), in order.
    """

    kind: str
    source: str
    segments: tuple[str, ...]


def held_out_texts(path: Path = HELD_OUT_TEXTS) -> Iterator[Text]:
    """The documents of a file, in its order."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            found = json.loads(line)
            segments = tuple(Mark(each["special"]) if isinstance(each, dict) else each for each in found["segments"])
            yield Text(kind=found["kind"], source=found["source"], segments=segments)


def whole(tokenizer: Tokenizer, segments: Sequence[str]) -> list[int]:
    """Ids of a document from begin to end token; conversations have both already."""
    if isinstance(segments[0], Mark):
        return encode(tokenizer, segments)
    return [tokenizer.bos_id, *encode(tokenizer, segments), tokenizer.eos_id]
