"""Train the drafter on a frozen text model: ``python -m training.train_drafter --text DIR --data DIR --out DIR --tokens 60e6``.

A block has an anchor that is drawn from the text, and is compared with what the text model says of the same places.  The loss of
draft k has three parts: 0.1 of the cross-entropy of the true token, 0.9 of the distance between both distributions, and the
cross-entropy of the confidence.  The label of a confidence is the share of the two distributions that is common, which is the
probability that verification accepts the draft.  Later drafts count less, by exp(-(k - 1) / 4).

Source: DSpark paper, training.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.tokenizer import Tokenizer
from training.data import Place, Shard
from training.drafter import Blocks, DrafterTwin
from training.export import masters_of
from training.masters import DRAFTER_ROOTS, TEXT_ROOTS, Masters, initial_values
from training.optimiser import Optimiser
from training.packing import Packed
from training.shape import nano_config
from training.state import write_state
from training.streams import region
from training.train import SEED, Program, Recipe, balance, train
from training.twin import Twin

log = logging.getLogger(__name__)

_BIAS = "mtp.*.ffn.gate.bias"
_DECAY = 4.0
_SHARE_TOKEN, _SHARE_DISTANCE = 0.1, 0.9


def draft_masters(text: Masters, seed: int) -> Masters:
    """First values of the drafter: what a stage has in common with a layer is that of the text model's last layers."""
    config = text.config
    masters = Masters(config, DRAFTER_ROOTS, initial_values(config, seed)).to(text.device)
    known = dict(text.named())
    with torch.no_grad():
        for kind, value in masters.named():
            source = known.get(kind.replace("mtp.", "layers.", 1))
            if source is not None and source.shape[1:] == value.shape[1:] and len(source) == config.num_hidden_layers:
                value.copy_(source[-len(value) :])
    return masters


@region
def _losses(logits: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[num_rows] cross-entropy of the labels, and distance (0 to 2) of the two distributions, both from logits."""
    log_shares = torch.log_softmax(logits, dim=-1)
    distance = (log_shares.exp() - torch.softmax(targets, dim=-1)).abs().sum(-1)
    return -log_shares.gather(1, labels.unsqueeze(1)).squeeze(1), distance


class DrafterTrainer:
    """A training of the drafter between two steps; attributes as in :class:`~training.train.Steps`."""

    def __init__(self, text: Twin, recipe: Recipe, *, is_eager: bool = False) -> None:
        """Start on the text model ``text``; ``is_eager`` steps are not recorded."""
        self.recipe = recipe
        self.masters = draft_masters(text.masters, SEED)
        self.place = Place()
        self.num_done = 0
        with torch.no_grad():
            self._text_weights = text.weights()
        self._text = text
        self._head = self._text_weights.all["head.weight"][0]
        self._twin = DrafterTwin(self.masters, self._text_weights.all["embed.weight"][0], self._head)
        self._optimiser = Optimiser(self.masters, weight_decay=0.0)
        self._program = self._compute if is_eager else Program(self._compute)
        self._rng = torch.Generator(text.masters.device).manual_seed(SEED)

    def step(self, packed: Packed) -> dict[str, Tensor]:
        """See :class:`~training.train.Steps`."""
        recipe, device = self.recipe, packed.positions.device
        places = torch.randint(packed.length, (packed.batch, recipe.num_anchors), generator=self._rng, device=device)
        rate = torch.full((), recipe.rate_at(self.num_done / recipe.num_tokens), device=device)
        seen = self._program(packed.token_ids, packed.positions, places, rate)
        self.num_done += packed.token_ids.numel()
        return seen

    def _compute(self, token_ids: Tensor, positions: Tensor, places: Tensor, rate: Tensor) -> dict[str, Tensor]:
        packed = Packed(token_ids, positions)
        with torch.no_grad():
            outputs = self._text.run(packed, self._text_weights)
        width = self.masters.config.dspark_block_size
        blocks = Blocks.at(packed, places, width)
        drafted = self._twin.run(packed, outputs.aux, blocks, self._twin.weights())
        steps = torch.arange(width, device=places.device)
        rows = (blocks.anchors.unsqueeze(1) + steps).flatten().clamp_max(len(outputs.hidden) - 1)
        with torch.no_grad():
            targets = F.linear(outputs.hidden[rows].to(drafted.logits.dtype), self._head.to(drafted.logits.dtype))
        token, distance = _losses(drafted.logits.flatten(0, 1), targets, blocks.token_ids[:, 1:].flatten())
        accepted = (1 - distance / 2).detach().clamp(0, 1)
        confidence = F.binary_cross_entropy_with_logits(drafted.confidences.flatten(), accepted, reduction="none")
        weights = (torch.exp(-steps / _DECAY) * blocks.is_known).flatten()
        each = _SHARE_TOKEN * token + _SHARE_DISTANCE * distance + confidence
        loss = (each * weights).sum() / weights.sum()
        loss.backward()
        norm = self._optimiser.step(rate)
        load = balance(self.masters[_BIAS], drafted.loads, self.recipe.balance)
        is_whole = blocks.is_known.all(1)
        chances = accepted.unflatten(0, (-1, width)).cumprod(1).sum(1)
        accepted_length = 1 + (chances * is_whole).sum() / is_whole.sum()
        numbers = {"loss": loss, "norm": norm, "load": load, "accepted_length": accepted_length}
        return {name: number.detach() for name, number in numbers.items()}

    def saved(self, *, is_compact: bool) -> dict[str, Any]:
        """The state, as of :meth:`training.train.Trainer.saved`, without momenta."""
        dtype = torch.bfloat16 if is_compact else torch.float32
        weights = {kind: value.detach().to(dtype) for kind, value in self.masters.named()}
        weights[_BIAS] = self.masters[_BIAS].detach()
        return {"weights": weights, "place": asdict(self.place), "num_done": self.num_done, "recipe": asdict(self.recipe)}


def main() -> None:
    """Run the command."""
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="state of the text model, or a checkpoint")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="shard folders")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for curve and states")
    parser.add_argument("--tokens", type=float, required=True, help="of the training")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it stops")
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--length", type=int, default=Recipe.length)
    parser.add_argument("--anchors", type=int, default=Recipe.num_anchors, help="blocks of a sequence")
    parser.add_argument("--rate", type=float, default=Recipe.rate)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="launch every kernel of a step by itself")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64

    tokenizer = Tokenizer.from_dir(args.tokenizer)
    config = nano_config(tokenizer)
    compression = torch.from_numpy(tokenizer.compression_map().astype(np.int64)).to(device)
    masters = masters_of(config, TEXT_ROOTS, args.text)
    recipe = Recipe(
        num_tokens=int(args.tokens),
        batch=args.batch,
        length=args.length,
        rate=args.rate,
        warm_up=0.04,
        decay=0.96,
        num_anchors=args.anchors,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # a CPU is many times slower with bf16
    trainer = DrafterTrainer(Twin(masters.to(device), compression, dtype), recipe, is_eager=args.eager)
    shard = Shard.read(args.data)
    train(trainer, shard, args.out, started + 60 * args.minutes, log_every=args.log_every)
    write_state(args.out / "full", trainer.saved(is_compact=False))
    write_state(args.out / "compact", trainer.saved(is_compact=True))
    log.info("%s", json.dumps({"tokens": trainer.num_done}))


if __name__ == "__main__":
    main()
