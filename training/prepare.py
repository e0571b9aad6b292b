"""Command line of the data preparation: text shards, shards of generated tasks, and packing them for transport.

Held-out texts are chosen by the hash of their content, held-out tasks by the hash of what is asked (:attr:`Task.key`), so no
content is on both sides.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import logging
import multiprocessing
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer.bench.tasks import KINDS as TASK_KINDS
from deepinfer.bench.tasks import make_task
from deepinfer.bench.tasks.sides import make_tasks
from deepinfer.bench.texts import whole
from deepinfer.tokenizer import Tokenizer
from training.shards import MAX_TOKENS, ShardWriter, describe

log = logging.getLogger(__name__)

TASKS_SEED = 20_261_201

_CHUNK_TASKS = 2_000
_PIECE_BYTES = 60 << 20


@dataclass(frozen=True, slots=True)
class _TaskMaker:
    """Makes the shard of a range of tasks in a process of its own."""

    tokenizer_source: str
    seed: int
    held_out: bool

    def __call__(self, numbers: range) -> ShardWriter:
        tokenizer = _tokenizer(self.tokenizer_source)
        shard = ShardWriter()
        for task in make_tasks(self.seed, numbers, held_out=self.held_out):
            ids = whole(tokenizer, task.segments())
            if len(ids) <= MAX_TOKENS:
                shard.add(ids, task.kind)
        return ShardWriter([np.concatenate(shard.tokens)] if shard.tokens else [], shard.lens, shard.kinds)


_tokenizer = functools.lru_cache(maxsize=1)(Tokenizer)


def prepare_tasks(out: Path, source: str, *, num_tokens: int, seed: int, held_out: bool, processes: int) -> None:
    """Write a shard folder of generated tasks with at least ``num_tokens`` tokens, less than one chunk more.

    The result depends on the tokenizer, the seed and the number only, not on the processes.
    """
    maker = _TaskMaker(source, seed, held_out)
    chunks = (range(at, at + _CHUNK_TASKS) for at in itertools.count(0, _CHUNK_TASKS))
    shard = ShardWriter()
    # A forked process could inherit the tokenizer's thread pool, which hangs.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while shard.num_tokens < num_tokens:
            for made in pool.map(maker, list(itertools.islice(chunks, processes * 4)), chunksize=1):
                if shard.num_tokens < num_tokens:
                    shard.extend(made)
            log.info("%d of %d tokens", shard.num_tokens, num_tokens)
    shard.write(out, describe(source, Tokenizer(source).vocab_size) | {"seed": seed, "held_out": held_out})


def pack(folder: Path, out: Path) -> None:
    """Write a folder as ``NAME.tar.xz.00`` and so on, none larger than 60 MiB."""
    out.mkdir(parents=True, exist_ok=True)
    whole_file = out / f"{folder.name}.tar.xz"
    with tarfile.open(whole_file, "w:xz", preset=4) as archive:
        archive.add(folder, arcname=folder.name)
    with whole_file.open("rb") as file:
        for number in itertools.count():
            if not (piece := file.read(_PIECE_BYTES)):
                break
            (out / f"{whole_file.name}.{number:02d}").write_bytes(piece)
    whole_file.unlink()


def unpack(parts: Sequence[Path], out: Path) -> None:
    """Write the folder that :func:`pack` packed into ``out``; ``parts`` in any order."""
    content = b"".join(each.read_bytes() for each in sorted(parts))
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(out)


def write_samples(path: Path, tokenizer: Tokenizer, *, each: int) -> None:
    """Write the text of some generated tasks of every kind, decoded from their tokens, for proofreading."""
    found: dict[str, list[str]] = {kind: [] for kind in TASK_KINDS}
    numbers = itertools.count()
    while min(map(len, found.values())) < each:
        task = make_task(random.Random(f"samples {next(numbers)}"))
        if len(found[task.kind]) < each:
            found[task.kind].append(tokenizer.decode(whole(tokenizer, task.segments())))
    texts = [f"{'=' * 20} {kind}\n\n{text}\n" for kind, several in found.items() for text in several]
    path.write_text("\n".join(texts), encoding="utf-8")


def main() -> None:
    """Run one command of the data preparation."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m training.prepare", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="fetch the sources; make the tokenizer and the text shards")
    text.add_argument("--out", type=Path, required=True)
    text.add_argument("--cache", type=Path, required=True, help="folder of downloaded packages")
    text.add_argument("--gsm8k", type=Path, help="folder of gsm8k_train.jsonl.xz")
    tasks = commands.add_parser("tasks", help="make shards of generated tasks")
    tasks.add_argument("--out", type=Path, required=True)
    tasks.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    tasks.add_argument("--tokens", type=int, required=True)
    tasks.add_argument("--seed", type=int, default=TASKS_SEED)
    tasks.add_argument("--held-out", action="store_true", help="only tasks that training never has")
    tasks.add_argument("--processes", type=int, default=1)
    samples = commands.add_parser("samples", help="write some generated tasks of every kind as text")
    samples.add_argument("--out", type=Path, required=True, help="file to write")
    samples.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    samples.add_argument("--each", type=int, default=6, help="tasks of every kind")
    packing = commands.add_parser("pack", help="pack a shard folder into pieces of at most 60 MiB")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--out", type=Path, required=True)
    unpacking = commands.add_parser("unpack", help="unpack the pieces of a shard folder")
    unpacking.add_argument("parts", type=Path, nargs="+")
    unpacking.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    match args.command:
        case "text":
            from training.sources import Corpus  # these need packages that the machine that makes tasks may lack
            from training.texts import prepare_text

            prepare_text(args.out, Corpus(cache=args.cache, gsm8k=args.gsm8k))
        case "tasks":
            source = (args.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
            prepare_tasks(
                args.out, source, num_tokens=args.tokens, seed=args.seed, held_out=args.held_out, processes=args.processes
            )
        case "samples":
            write_samples(args.out, Tokenizer.from_dir(args.tokenizer), each=args.each)
        case "pack":
            pack(args.folder, args.out)
        case "unpack":
            unpack(args.parts, args.out)


if __name__ == "__main__":
    main()
