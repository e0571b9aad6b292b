"""Documents of the corpus -> tokenizer, text shards and the held-out sample."""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer.bench.tasks.passages import needle_in
from deepinfer.bench.tasks.sides import is_held_out, make_tasks
from deepinfer.bench.tasks.text import copy_of
from deepinfer.bench.texts import Text, whole
from deepinfer.engine.chat import Mark
from deepinfer.tokenizer import Tokenizer
from training.prepare import TASKS_SEED
from training.readers import is_prose
from training.shards import ShardWriter, describe, pieces
from training.sources import GSM8K_LICENCE, SOURCES, WORDNET_LICENCE, Corpus
from training.tokenizer import count_tokens, cut

log = logging.getLogger(__name__)

HELD_OUT_TEXT = 1 / 200
_COUNTED_TASKS = 30_000
_COUNTED_EVERY = 3
_SAMPLE_CHARS = 600_000
_COPIED_CHARS = 600
_COPIED_SHARE = 0.6
_SEARCHED_CHARS = 1_000
_SEARCHED_SHARE = 0.25


def prepare_text(out: Path, corpus: Corpus) -> None:
    """Make the tokenizer and the text shards: ``tokenizer.json``, ``text``, ``text_held_out`` and the sample that ships.

    The vocabulary is cut for the texts and for some tasks together.
    """
    out.mkdir(parents=True, exist_ok=True)
    documents = list(corpus.documents())
    held = [is_held_out("".join(each.segments), HELD_OUT_TEXT) for each in documents]
    sample = [each for each, is_held in zip(documents, held, strict=True) if is_held]
    for number, each in enumerate(list(documents)):
        quotes = list(quotations(each))
        documents += quotes
        held += [held[number]] * len(quotes)
    tasks = [task.segments() for task in make_tasks(TASKS_SEED, range(_COUNTED_TASKS))]
    every = (segment for segments in [*(each.segments for each in documents[::_COUNTED_EVERY]), *tasks] for segment in segments)
    source = cut(count_tokens(each for each in every if not isinstance(each, Mark)))
    (out / "tokenizer.json").write_text(source, encoding="utf-8")
    log.info("tokenizer: %d bytes", len(source.encode()))
    tokenizer = Tokenizer(source)
    train, held_out = ShardWriter(), ShardWriter()
    order = sorted(zip(documents, held, strict=True), key=lambda pair: _digest("".join(pair[0].segments)))
    for number, (each, is_held) in enumerate(order):
        for piece in pieces(whole(tokenizer, each.segments)):
            (held_out if is_held else train).add(piece, each.kind)
        if number % 10_000 == 0:
            log.info("%d of %d texts", number, len(order))
    meta = describe(source, tokenizer.vocab_size) | {"sources": _licences(corpus)}
    train.write(out / "text", meta)
    held_out.write(out / "text_held_out", meta)
    write_sample(out / "held_out.jsonl.xz", sorted(sample, key=lambda each: _digest("".join(each.segments))))


def _digest(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def _licences(corpus: Corpus) -> list[dict[str, Any]]:
    """Name, packages, licence and bytes of every source that gave text."""
    extra = {"wordnet-base": WORDNET_LICENCE, "gsm8k": GSM8K_LICENCE}
    known = {each.name: (list(each.packages), each.licence) for each in SOURCES}
    return [
        {"name": name, "packages": packages, "licence": licence, "bytes": size}
        for name, size in corpus.num_bytes.items()
        for packages, licence in [known.get(name, ([name], extra.get(name, "")))]
    ]


def quotations(document: Text) -> Iterator[Text]:
    """Conversations about real prose: a paragraph to copy, or a fact to find among its sentences.

    The generated tasks use few words; these teach copying and finding with the whole vocabulary.
    """
    if document.kind != "prose":
        return
    text = document.segments[0]
    rng = random.Random(f"quotation {_digest(text).hex()}")
    tasks = []
    paragraphs = [each for each in text.split("\n\n") if len(each) <= _COPIED_CHARS and is_prose(each)]
    if paragraphs and rng.random() < _COPIED_SHARE:
        tasks.append(copy_of(rng, rng.choice(paragraphs)))
    if len(text) > _SEARCHED_CHARS and rng.random() < _SEARCHED_SHARE:
        sentences = re.split(r"(?<=[.!?])\s+", text[: rng.randint(_SEARCHED_CHARS, len(text))])
        tasks.append(needle_in(rng, sentences))
    for task in tasks:
        yield Text(kind=task.kind, source=document.source, segments=tuple(task.segments()))


def write_sample(path: Path, documents: list[Text]) -> None:
    """Write held-out documents, some of each kind, as lines of JSON; a special token is ``{"special": spelling}``."""
    sizes: Counter[str] = Counter()
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for each in documents:
            if sizes[each.kind] < _SAMPLE_CHARS:
                sizes[each.kind] += sum(map(len, each.segments))
                segments = [{"special": str(part)} if isinstance(part, Mark) else part for part in each.segments]
                file.write(
                    json.dumps({"kind": each.kind, "source": each.source, "segments": segments}, ensure_ascii=False) + "\n"
                )
