"""Train the text model: ``python -m training.train --data DIR --out DIR --tokens 400e6 --minutes 9 [--resume DIR]``.

The schedule is given by tokens, so a training may be cut into runs: each goes on where the state that it resumes ends.  The
learning rate rises over the first hundredth, stays, and falls to zero over the last part.  Attention is dense at first, while the
indexers learn the attention that they will replace; from a share of the tokens on it reads only what they choose.  Weights,
activations and records are rounded from the first step on.

Experts are balanced twice.  After each step the bias of an expert falls if it had more than its share of the batch, and rises if
it had less.  This balances the mix of the data.  A small loss balances each sequence, so that experts do not divide into some
for one kind of text and some for another.  Sources: L. Wang et al., "Auxiliary-loss-free load balancing strategy for
mixture-of-experts" (2024); DeepSeek-V3 technical report.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.config import ModelConfig
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.tokenizer import Tokenizer
from training.data import Place, Shard, batches, fill, sequences
from training.masters import TEXT_ROOTS, Masters, initial_values
from training.optimiser import Optimiser, Parameters
from training.packing import Packed, alignment
from training.shape import nano_config
from training.state import read_state, write_state
from training.streams import region
from training.twin import Twin

log = logging.getLogger(__name__)

SEED = 20_261_201
_BIAS = "layers.*.ffn.gate.bias"
_WARM_UP_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a training goes.

    Attributes:
        num_tokens: places of all steps together, padding included.
        batch: sequences of a step.
        length: tokens of a sequence.
        rate: the highest learning rate.
        warm_up, decay: shares of the tokens over which the rate rises and falls.
        sparse_from: share of the tokens after which attention is sparse.
        index_queries: tokens of a sequence on which the indexers learn.
        num_anchors: blocks of a sequence that a drafter learns on.
        balance: step of the experts' biases.
        load_loss: weight of the loss of unequal loads within a sequence.
    """

    num_tokens: int
    batch: int = 16
    length: int = 4096
    rate: float = 4e-3
    warm_up: float = 0.01
    decay: float = 0.5
    sparse_from: float = 0.8
    index_queries: int = 32
    num_anchors: int = 128
    balance: float = 1e-3
    load_loss: float = 0.05

    def rate_at(self, share: float) -> float:
        """Learning rate when ``share`` of the tokens is done."""
        return self.rate * min(share / self.warm_up, 1.0, max(0.0, 1 - share) / self.decay)


@region
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target [num_tokens] fp32; 0 where there is none (-100)."""
    return F.cross_entropy(F.linear(hidden.float(), head.float()), targets, ignore_index=-100, reduction="none")


def prefetched(source: Iterator[tuple[Packed, Place]], device: torch.device) -> Iterator[tuple[Packed, Place]]:
    """The batches of ``source`` on the device; a thread makes some ahead."""
    ready: queue.Queue[tuple[Packed, Place]] = queue.Queue(maxsize=8)

    def make() -> None:
        for packed, place in source:
            if device.type == "cuda":
                packed = Packed(packed.token_ids.pin_memory(), packed.positions.pin_memory())
            ready.put((packed, place))

    threading.Thread(target=make, daemon=True).start()
    while True:
        packed, place = ready.get()
        yield Packed(*(each.to(device, non_blocking=True) for each in (packed.token_ids, packed.positions))), place


@functools.cache
def _recording() -> tuple[torch.cuda.Stream, tuple[int, int]]:
    """Stream and memory pool of all programs: the allocator keeps memory apart for each stream and each pool."""
    return torch.cuda.Stream(), torch.cuda.graph_pool_handle()


class Program:
    """A function of tensors on the device that is recorded once and then replayed.

    A step launches some 7,000 small kernels, which takes a host longer than the GPU needs to run them; one replay launches all.
    """

    def __init__(self, body: Callable[..., dict[str, Tensor]]) -> None:
        """``body`` never waits for the device, and does the same kernels in every call with arguments of the same shapes."""
        self._body = body
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: Tensor) -> dict[str, Tensor]:
        """The result of ``body``; from the fourth call on a GPU it lies where the one before lay."""
        if not args[0].is_cuda:
            return self._body(*args)
        self._calls += 1
        side, pool = _recording()
        if self._calls <= _WARM_UP_CALLS:  # on the stream of the recording: what is made on first use belongs to a stream
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = self._body(*args)
            torch.cuda.current_stream().wait_stream(side)
            return result
        if self._graph is None:
            self._inputs = [each.clone() for each in args]
            self._graph = torch.cuda.CUDAGraph()
            gc.collect()  # gradients of an earlier step in a cycle of objects would tie the recording to it
            torch.cuda.empty_cache()
            # Only this thread's calls are watched: the thread that makes batches pins memory meanwhile.
            with torch.cuda.graph(self._graph, stream=side, pool=pool, capture_error_mode="thread_local"):
                self._result = self._body(*self._inputs)
        for kept, given in zip(self._inputs, args, strict=True):
            kept.copy_(given)
        self._graph.replay()
        return self._result


@torch.no_grad()
def balance(biases: Tensor, loads: Tensor, step: float) -> Tensor:
    """Move the biases of experts towards equal loads.

    Args:
        biases: [num_layers, num_experts] fp32, changed in place.
        loads: same shape, picks of each expert.
        step: how far a bias moves.

    Returns:
        [] the largest load over the mean one, averaged over layers.
    """
    mean = loads.float().mean(1, keepdim=True)
    biases.add_(torch.sign(mean - loads), alpha=step)
    return (loads.amax(1) / mean.squeeze(1)).mean()


class TrainedParameters(Parameters, Protocol):
    """Master weights that know the shape of the model whose data they are trained on."""

    config: ModelConfig


class Steps(Protocol):
    """What :func:`train` needs of a training.

    Attributes:
        recipe: how it goes.
        place: of the reader after the last step.
        num_done: places trained on so far.
    """

    recipe: Recipe
    place: Place
    num_done: int

    @property
    def masters(self) -> TrainedParameters:
        """What is trained."""
        ...

    def step(self, packed: Packed) -> dict[str, Tensor]:
        """One step; what it saw, ``loss`` among it, on the device, until the next step."""
        ...


class Trainer:
    """A training between two steps.

    Attributes:
        masters, twin, optimiser: what is trained.
        place: of the reader after the last step.
        num_done: places trained on so far.
    """

    def __init__(
        self, config: ModelConfig, recipe: Recipe, compression: Tensor, dtype: torch.dtype, *, is_eager: bool = False
    ) -> None:
        """Start from first values, on the device of ``compression``; ``is_eager`` steps are not recorded."""
        self.recipe = recipe
        self.masters = Masters(config, TEXT_ROOTS, initial_values(config, SEED)).to(compression.device)
        self.twin = Twin(self.masters, compression, dtype)
        self.optimiser = Optimiser(self.masters)
        self.place = Place()
        self.num_done = 0
        steps = {each: functools.partial(self._compute, each) for each in (False, True)}
        self._programs = steps if is_eager else {each: Program(step) for each, step in steps.items()}
        self._rng = torch.Generator(compression.device).manual_seed(SEED)

    @property
    def share(self) -> float:
        """Of the training that is done."""
        return self.num_done / self.recipe.num_tokens

    @property
    def is_sparse(self) -> bool:
        """Whether attention reads only what the indexers choose."""
        return self.share >= self.recipe.sparse_from

    def step(self, packed: Packed) -> dict[str, Tensor]:
        """One step; what it saw, on the device, until the next step."""
        recipe, device = self.recipe, packed.positions.device
        shape = (packed.batch, recipe.index_queries)
        places = torch.randint(packed.length, shape, generator=self._rng, device=device)
        rate = torch.full((), recipe.rate_at(self.share), device=device)
        seen = self._programs[self.is_sparse](packed.token_ids, packed.positions, places, rate)
        self.num_done += packed.token_ids.numel()
        return seen

    def _compute(self, is_sparse: bool, token_ids: Tensor, positions: Tensor, places: Tensor, rate: Tensor) -> dict[str, Tensor]:
        """One step without a look at the host; ``places`` are of the indexers' loss."""
        packed = Packed(token_ids, positions)
        weights = self.twin.weights()
        outputs = self.twin.run(packed, weights, is_sparse=is_sparse, index_places=places)
        targets = packed.targets.flatten()
        losses = token_losses(outputs.hidden, weights.all["head.weight"][0], targets)
        count = (targets >= 0).sum()
        loss = losses.sum() / count
        assert outputs.index_loss is not None
        (loss + outputs.index_loss + self.recipe.load_loss * outputs.load_loss).backward()
        norm = self.optimiser.step(rate)
        load = balance(self.masters[_BIAS], outputs.loads, self.recipe.balance)
        numbers = {"loss": loss, "index_loss": outputs.index_loss, "norm": norm, "load": load, "targets": count}
        return {name: each.detach() for name, each in numbers.items()}

    def saved(self, *, is_compact: bool) -> dict[str, Any]:
        """The state: a compact one has bf16 weights and no momenta, half of the bytes of the masters alone."""
        dtype = torch.bfloat16 if is_compact else torch.float32
        weights = {kind: value.detach().to(dtype) for kind, value in self.masters.named()}
        weights[_BIAS] = self.masters[_BIAS].detach()
        state = {"weights": weights, "place": asdict(self.place), "num_done": self.num_done, "recipe": asdict(self.recipe)}
        state["rng"] = self._rng.get_state()
        return state if is_compact else state | {"optimiser": self.optimiser.saved()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`saved`."""
        self.masters.restore(state["weights"])
        if "optimiser" in state:
            self.optimiser.restore(state["optimiser"])
        self._rng.set_state(state["rng"])
        self.place, self.num_done = Place(**state["place"]), state["num_done"]


@torch.no_grad()
def evaluate(twin: Twin, shard: Shard, recipe: Recipe, *, num_batches: int) -> dict[int, tuple[float, int]]:
    """Mean loss in nats a token and number of targets on the first batches of a shard, kind -> both; attention is sparse."""
    device, config = twin.masters.device, twin.config
    align, weights = alignment(config), twin.weights()
    rows = sequences(shard, length=recipe.length, align=align, seed=0, epoch=0)
    sums: dict[int, list[float]] = {}
    for first in range(0, min(len(rows) // recipe.batch, num_batches) * recipe.batch, recipe.batch):
        part = rows[first : first + recipe.batch]
        packed, kinds = fill(shard, part, length=recipe.length, align=align, pad_id=config.pad_token_id)
        packed = Packed(packed.token_ids.to(device), packed.positions.to(device))
        hidden = twin.run(packed, weights).hidden
        targets = packed.targets.flatten()
        losses = token_losses(hidden, weights.all["head.weight"][0], targets).double()
        flat = kinds.flatten().to(device).long()
        totals = torch.zeros(256, 2, dtype=torch.float64, device=device)
        totals.index_add_(0, flat, torch.stack([losses, (targets >= 0).double()], dim=1))
        for kind, (total, count) in enumerate(totals.tolist()):
            if count:
                mine = sums.setdefault(kind, [0.0, 0])
                mine[0] += total
                mine[1] += count
    return {kind: (total / count, int(count)) for kind, (total, count) in sorted(sums.items())}


def train(trainer: Steps, shard: Shard, out: Path, deadline: float, *, log_every: int) -> None:
    """Step until the training or the time is over; appends to ``curve.jsonl``.

    Args:
        deadline: of ``time.monotonic()``.
    """
    recipe, config = trainer.recipe, trainer.masters.config
    device = trainer.masters.device
    source = batches(
        shard,
        trainer.place,
        size=recipe.batch,
        length=recipe.length,
        align=alignment(config),
        pad_id=config.pad_token_id,
        seed=SEED,
    )
    since, before = time.monotonic(), trainer.num_done
    with (out / "curve.jsonl").open("a", encoding="utf-8") as curve:
        for number, (packed, place) in enumerate(prefetched(source, device)):
            seen = trainer.step(packed)
            trainer.place = place
            is_over = trainer.num_done >= recipe.num_tokens
            if number % log_every == 0 or is_over:
                numbers = {name: round(float(each), 4) for name, each in seen.items()}
                if not math.isfinite(numbers["loss"]):
                    raise FloatingPointError(f"the loss is {numbers['loss']} after {trainer.num_done} tokens; lower the rate")
                now = time.monotonic()
                speed = (trainer.num_done - before) / (now - since)
                since, before = now, trainer.num_done
                line = {"tokens": trainer.num_done, **numbers, "tokens_per_s": round(speed)}
                curve.write(json.dumps(line) + "\n")
                curve.flush()
                log.info("%s", json.dumps(line))
                if now >= deadline:
                    break
            if is_over:
                break


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="shard folders")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="shard folders to measure at the end")
    parser.add_argument("--out", type=Path, required=True, help="folder for curve and states")
    parser.add_argument("--resume", type=Path, help="folder of a state")
    parser.add_argument("--init", type=Path, help="folder of a checkpoint to start from; the schedule starts anew")
    parser.add_argument("--tokens", type=float, required=True, help="of the whole training")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this run")
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--length", type=int, default=Recipe.length)
    parser.add_argument("--rate", type=float, default=Recipe.rate)
    parser.add_argument("--decay", type=float, default=Recipe.decay)
    parser.add_argument("--sparse-from", type=float, default=Recipe.sparse_from)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="launch every kernel of a step by itself")
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # operands of fp32 products are bf16 numbers, which TF32 holds
    torch._dynamo.config.recompile_limit = 64

    tokenizer = Tokenizer.from_dir(args.tokenizer)
    recipe = Recipe(
        num_tokens=int(args.tokens),
        batch=args.batch,
        length=args.length,
        rate=args.rate,
        decay=args.decay,
        sparse_from=args.sparse_from,
    )
    compression = torch.from_numpy(tokenizer.compression_map().astype(np.int64)).to(device)
    trainer = Trainer(nano_config(tokenizer), recipe, compression, torch.bfloat16, is_eager=args.eager)
    if args.init is not None:
        trainer.masters.read(read_checkpoint(args.init, trainer.masters.config, progress=False))
    if args.resume is not None:
        trainer.restore(read_state(args.resume))
    shard = Shard.read(args.data)
    log.info("%d documents, %d tokens; %d done", len(shard.kinds), len(shard.tokens), trainer.num_done)
    train(trainer, shard, args.out, started + 60 * args.minutes, log_every=args.log_every)

    write_state(args.out / "full", trainer.saved(is_compact=False))
    write_state(args.out / "compact", trainer.saved(is_compact=True))
    if args.held_out:
        found = evaluate(trainer.twin, Shard.read(args.held_out), recipe, num_batches=20)
        (args.out / "held_out.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        log.info("held-out nats a token by kind: %s", found)


if __name__ == "__main__":
    main()
