"""Shards of token ids: what training reads.

A shard folder has ``tokens.npy`` [num_tokens] uint16, ``starts.npy`` [num_docs + 1] int64, ``kinds.npy`` [num_docs] uint8 and
``meta.json``.  Document ``i`` is ``tokens[starts[i] : starts[i + 1]]``: it begins with the begin token and, unless it was cut,
ends with the end token.  No document has more than :data:`MAX_TOKENS` tokens.  ``kinds`` indexes ``meta["kinds"]``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.bench.tasks import KINDS as TASK_KINDS

log = logging.getLogger(__name__)

KINDS = ("prose", "code", "math", "definition", *TASK_KINDS)
MAX_TOKENS = 4_096


@dataclass(slots=True)
class ShardWriter:
    """Documents of token ids, in memory until they are written.

    Invariant: ``lens`` and ``kinds`` have one entry for each document, and ``tokens`` has the sum of ``lens``.
    """

    tokens: list[npt.NDArray[np.uint16]] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lens)

    def add(self, ids: Sequence[int], kind: str) -> None:
        """Add one document."""
        self.tokens.append(np.asarray(ids, dtype=np.uint16))
        self.lens.append(len(ids))
        self.kinds.append(KINDS.index(kind))

    def extend(self, other: ShardWriter) -> None:
        """Add all documents of another writer."""
        self.tokens += other.tokens
        self.lens += other.lens
        self.kinds += other.kinds

    def write(self, folder: Path, meta: dict[str, Any]) -> None:
        """Write the files of a shard folder; ``meta`` gets the kinds and their token counts."""
        folder.mkdir(parents=True, exist_ok=True)
        tokens = np.concatenate(self.tokens) if self.tokens else np.zeros(0, dtype=np.uint16)
        np.save(folder / "tokens.npy", tokens)
        np.save(folder / "starts.npy", np.cumsum([0, *self.lens], dtype=np.int64))
        np.save(folder / "kinds.npy", np.array(self.kinds, dtype=np.uint8))
        by_kind: Counter[str] = Counter()
        for kind, length in zip(self.kinds, self.lens, strict=True):
            by_kind[KINDS[kind]] += length
        counts = {"kinds": KINDS, "num_tokens": len(tokens), "num_docs": len(self.lens), "tokens_by_kind": by_kind}
        (folder / "meta.json").write_text(json.dumps(counts | meta, indent=1) + "\n", encoding="utf-8")
        log.info("%s: %d tokens in %d documents", folder, len(tokens), len(self.lens))


def pieces(ids: list[int]) -> Iterator[list[int]]:
    """A document in pieces of at most :data:`MAX_TOKENS`; each begins with the begin token, only the last ends."""
    yield ids[:MAX_TOKENS]
    for at in range(MAX_TOKENS, len(ids), MAX_TOKENS - 1):
        yield [ids[0], *ids[at : at + MAX_TOKENS - 1]]


def describe(tokenizer_source: str, vocab_size: int) -> dict[str, Any]:
    """What ``meta.json`` says about the tokenizer."""
    return {"vocab_size": vocab_size, "tokenizer_sha256": hashlib.sha256(tokenizer_source.encode()).hexdigest()}
