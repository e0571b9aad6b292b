"""The models that every installation has: ``nano``, which is trained, and ``random``, which is not.

Both are checkpoints in the published format and are read like any other checkpoint.  The files of ``nano`` are data of this
package.  ``random`` is written to the user's cache on first use, and again if its files are damaged.  ``manifest.json`` beside
its files has their sizes and checksums, and is written last.

Invariant: the files in the directory of :func:`random_directory` are as they were written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from deepinfer.config import ModelConfig, cache_dir, config_json, named_config
from deepinfer.errors import ConfigError
from deepinfer.model.checkpoint.random_weights import random_tensors
from deepinfer.model.checkpoint.writer import write_checkpoint
from deepinfer.tokenizer import Tokenizer, byte_tokenizer

RANDOM_SEED = 20261017
NANO_DIRECTORY: Final = Path(__file__).parent.parent / "nano"
"""Data of this package; a wheel carries it."""
_MANIFEST = "manifest.json"
_FORMAT = 2
_CHUNK_BYTES = 1 << 20


def random_directory(*, progress: bool = True) -> Path:
    """The checkpoint of ``random``; writes it if it is missing or damaged.

    Raises:
        ConfigError: the cache folder cannot be written; names it and the variable that chooses another.

    Cost: one pass over its 20 MB; some seconds to make it.
    """
    config, tokenizer = named_config("random"), byte_tokenizer()
    identity = json.dumps(
        [config_json(config), RANDOM_SEED, tokenizer.vocab_size, random_tensors.__doc__, _FORMAT], sort_keys=True
    )
    path = cache_dir() / f"random-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path) as is_alone:
            if is_alone:
                for left in path.parent.glob(f".{path.name}.*.making"):  # of makers that were killed
                    shutil.rmtree(left, ignore_errors=True)
                if _is_whole(path):  # made meanwhile by the one we waited for
                    return path
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".making") as scratch:
                made = Path(scratch) / "made"
                # It computes, so it gets a thread that ends: see executor.py for what a second computing thread costs.
                with ThreadPoolExecutor(max_workers=1) as maker:
                    maker.submit(_make, made, config, tokenizer, progress=progress).result()
                _put(made, path, Path(scratch) / "damaged")
    except OSError as error:
        raise ConfigError(
            f"random cannot be made in {path.parent}: {error.strerror or error}; mend that folder, or set DEEPINFER_CACHE_DIR to "
            "another with 100 MB of room"
        ) from error
    return path


def _make(folder: Path, config: ModelConfig, tokenizer: Tokenizer, *, progress: bool) -> None:
    write_checkpoint(folder, config, random_tensors(config, RANDOM_SEED), progress=progress)
    tokenizer.save(folder / "tokenizer.json")
    sums = {each.name: _size_and_sum(each) for each in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def _put(made: Path, path: Path, damaged: Path) -> None:
    """Move what was made to its place: it is there whole or not at all; what was there is thrown away with the scratch folder."""
    while not _is_whole(path):
        with contextlib.suppress(FileNotFoundError):
            path.rename(damaged)
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            damaged = damaged.with_name(f"{damaged.name}-")  # another maker was first: whole, or to be moved away as well
        else:
            return


def _is_whole(path: Path) -> bool:
    """Whether the files of ``path`` are those of its manifest."""
    try:
        sums = json.loads((path / _MANIFEST).read_bytes())
        return bool(sums) and all(_size_and_sum(path / name) == found for name, found in sums.items())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False


def _size_and_sum(path: Path) -> list[int]:
    size = total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            total = zlib.crc32(chunk, total)
    return [size, total]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Wait until nobody else makes ``path``; False where the file system has no locks, and others may."""
    with (path.parent / f".{path.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
