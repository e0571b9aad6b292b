"""Master weights -> a checkpoint in the published format:
``python -m training.export --state DIR --tokenizer DIR --out DIR [--drafter DIR]``.

Parts that nobody has trained, the vision tower and a drafter without a state, get seeded weights, and the command says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.model.checkpoint.random_weights import random_tensors
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.checkpoint.writer import write_checkpoint
from deepinfer.tokenizer import BOS, EOS, PAD, Tokenizer
from training.masters import DRAFTER_ROOTS, TEXT_ROOTS, Masters, initial_values
from training.shape import nano_config
from training.state import read_state

log = logging.getLogger(__name__)

SHARD_BYTES = 15 << 20
SEED = 20_261_017
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
"""What other programs read beside ``tokenizer.json``: load generators and evaluation tools load the folder with transformers."""


def export(folder: Path, config: ModelConfig, trained: list[Masters]) -> None:
    """Write the checkpoint of ``config`` to ``folder``: trained masters, and seeded weights for all other tensors.

    Raises:
        CheckpointError: the folder holds files.
    """
    names: set[str] = set()

    def known() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in itertools.chain.from_iterable(masters.stored() for masters in trained):
            names.add(name)
            yield name, tensor

    def others() -> Iterator[tuple[str, Tensor]]:
        missing = [(name, tensor) for name, tensor in random_tensors(config, SEED) if name not in names]
        roots = sorted({name.split(".")[0] for name, _ in missing})
        log.info("seeded weights for %s", ", ".join(roots) or "nothing")
        yield from missing

    write_checkpoint(folder, config, itertools.chain(known(), others()), shard_bytes=SHARD_BYTES, progress=False)


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``."""
    tokenizer.save(folder / "tokenizer.json")
    text = json.dumps(_TOKENIZER_CONFIG, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def masters_of(config: ModelConfig, roots: tuple[str, ...], folder: Path) -> Masters:
    """The masters of a training's state, or of a checkpoint with the same shape."""
    masters = Masters(config, roots, initial_values(config, 0))
    if (folder / "config.json").exists():
        masters.read(read_checkpoint(folder, config, progress=False))
    else:
        masters.restore(read_state(folder)["weights"])
    return masters


def main() -> None:
    """Run the command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state of the text model, or a checkpoint")
    parser.add_argument("--drafter", type=Path, help="state of the drafter, or a checkpoint")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; absent or empty")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_dir(args.tokenizer)
    config = nano_config(tokenizer)
    trained = [masters_of(config, TEXT_ROOTS, args.state)]
    if args.drafter is not None:
        trained.append(masters_of(config, DRAFTER_ROOTS, args.drafter))
    export(args.out, config, trained)
    save_tokenizer(args.out, tokenizer)
    size = sum(each.stat().st_size for each in args.out.iterdir())
    log.info("%s: %.1f MB in %d files", args.out, size / 1e6, len(list(args.out.iterdir())))


if __name__ == "__main__":
    main()
