"""A dense transformer to compare with: ``python -m training.dense --data DIR --tokenizer DIR --out DIR --tokens 400e6``.

Its layers have as many weights as a token of ``nano`` uses of a layer.  Data, order of the batches, optimiser and schedule are
those of :mod:`training.train`.  Attention sees the whole document.  Weights and activations are bf16, not 8 or 4 bits.
At the end the program measures bits per byte on the texts that ``deepinfer bench quality`` measures.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from deepinfer.bench.approximations import Fit, Sample
from deepinfer.bench.quality import MAX_TOKENS, choose_data
from deepinfer.config import ModelConfig
from deepinfer.ops.norm import rope_frequencies
from deepinfer.tokenizer import Tokenizer
from training.data import Place, Shard
from training.optimiser import Optimiser
from training.packing import PADDING, Packed, Sight
from training.shape import nano_config
from training.state import write_state
from training.streams import Rotation, region, rms_norm, rotate
from training.train import SEED, Program, Recipe, token_losses, train

log = logging.getLogger(__name__)

HEAD_DIM = 64
INNER_WIDTH = 640
"""With the attention, 1.02 million weights a layer; a token of ``nano`` uses 1.01 million a layer, hyper-connections included."""
_ROPE_THETA = 10_000.0
_EPS = 1e-6


class Layer(NamedTuple):
    """Weights of one layer.

    Attributes:
        attn_norm, ffn_norm: [hidden] fp32.
        qkv: [3 * hidden, hidden].
        out: [hidden, hidden].
        gate_up: [2 * INNER_WIDTH, hidden].
        down: [hidden, INNER_WIDTH].
    """

    attn_norm: Tensor
    ffn_norm: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class DenseMasters(nn.Module):
    """Master weights: what the optimiser and the loop need of :class:`~training.masters.Masters`.

    Attributes:
        config: of ``nano``; hidden size, number of layers and vocabulary apply here too.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        """Make the parameters; matrices are normal with variance 1 / fan-in, smaller if they write into the residual stream."""
        super().__init__()
        self.config = config
        hidden, layers = config.hidden_size, config.num_hidden_layers
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int, scale: float = 1.0, count: int = layers) -> nn.Parameter:
            return nn.Parameter(torch.randn(count, rows, columns, generator=generator) * scale * columns**-0.5)

        writes = (2 * layers) ** -0.5
        self.values = nn.ParameterDict(
            {
                "embed,weight": matrix(config.vocab_size, hidden, hidden**0.5, count=1),
                "head,weight": matrix(config.vocab_size, hidden, count=1),
                "norm,weight": nn.Parameter(torch.ones(1, hidden)),
                "layers,*,attn_norm,weight": nn.Parameter(torch.ones(layers, hidden)),
                "layers,*,ffn_norm,weight": nn.Parameter(torch.ones(layers, hidden)),
                "layers,*,qkv,weight": matrix(3 * hidden, hidden),
                "layers,*,out,weight": matrix(hidden, hidden, writes),
                "layers,*,gate_up,weight": matrix(2 * INNER_WIDTH, hidden),
                "layers,*,down,weight": matrix(hidden, INNER_WIDTH, writes),
            }
        )

    def __getitem__(self, kind: str) -> Tensor:
        """The parameter of a kind."""
        value: Tensor = self.values[kind.replace(".", ",")]
        return value

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(kind, parameter) of all stacks."""
        for name, value in self.values.items():
            yield name.replace(",", "."), value

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def layers(self, dtype: torch.dtype) -> list[Layer]:
        """Weights of the layers; matrices in ``dtype``."""
        norms = [self[f"layers.*.{name}.weight"].unbind() for name in ("attn_norm", "ffn_norm")]
        matrices = [self[f"layers.*.{name}.weight"].to(dtype).unbind() for name in ("qkv", "out", "gate_up", "down")]
        return [Layer(*each) for each in zip(*norms, *matrices, strict=True)]


def _attended(q: Tensor, k: Tensor, v: Tensor, sight: Sight | BlockMask) -> Tensor:
    """Attention [batch, num_heads, length, HEAD_DIM]; on a GPU, inside a compiled region, ``sight`` is a block mask."""
    if isinstance(sight, BlockMask):
        result: Tensor = flex_attention(q, k, v, block_mask=sight)
        return result
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sight.all_rows().unsqueeze(1))


@region
def _layer(x: Tensor, weights: Layer, rotation: Rotation, sight: Sight | BlockMask, batch: int) -> Tensor:
    q, k, v = F.linear(rms_norm(x, weights.attn_norm, _EPS), weights.qkv).unflatten(1, (3, -1, HEAD_DIM)).unbind(1)
    q, k = (rotate(each, rotation) for each in (q, k))
    q, k, v = (each.unflatten(0, (batch, -1)).transpose(1, 2) for each in (q, k, v))
    x = x + F.linear(_attended(q, k, v, sight).transpose(1, 2).flatten(2).flatten(0, 1), weights.out)
    gate, up = F.linear(rms_norm(x, weights.ffn_norm, _EPS), weights.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, weights.down)


@functools.cache
def _frequencies(device: torch.device) -> Tensor:
    """[HEAD_DIM / 2] fp32; made once, because a recorded step takes nothing from the host."""
    return rope_frequencies(HEAD_DIM, _ROPE_THETA, None).to(device, torch.float32)


def hidden_states(masters: DenseMasters, packed: Packed, dtype: torch.dtype) -> Tensor:
    """[num_tokens, hidden] normed for the LM head; the length of ``packed`` is a multiple of 128 on a GPU."""
    x = F.embedding(packed.token_ids.flatten(), masters["embed.weight"][0].to(dtype))
    positions = packed.positions.clamp_min(0).flatten()
    rotation = Rotation.at(positions, _frequencies(x.device))
    sight = Sight(packed, 0, packed.length)
    for weights in masters.layers(dtype):
        x = _layer(x, weights, rotation, sight.blocks if x.is_cuda else sight, packed.batch)
    return rms_norm(x, masters["norm.weight"][0], _EPS)


class DenseTrainer:
    """A training of the dense transformer; attributes as in :class:`~training.train.Steps`."""

    def __init__(self, config: ModelConfig, recipe: Recipe, device: torch.device, dtype: torch.dtype, *, is_eager: bool) -> None:
        """Start from first values; ``is_eager`` steps are not recorded."""
        self.recipe = recipe
        self.masters = DenseMasters(config, SEED).to(device)
        self.place = Place()
        self.num_done = 0
        self._dtype = dtype
        self._optimiser = Optimiser(self.masters)
        self._program = self._compute if is_eager else Program(self._compute)

    def step(self, packed: Packed) -> dict[str, Tensor]:
        """See :class:`~training.train.Steps`."""
        rate = torch.full((), self.recipe.rate_at(self.num_done / self.recipe.num_tokens), device=packed.positions.device)
        seen = self._program(packed.token_ids, packed.positions, rate)
        self.num_done += packed.token_ids.numel()
        return seen

    def _compute(self, token_ids: Tensor, positions: Tensor, rate: Tensor) -> dict[str, Tensor]:
        packed = Packed(token_ids, positions)
        targets = packed.targets.flatten()
        hidden = hidden_states(self.masters, packed, self._dtype)
        losses = token_losses(hidden, self.masters["head.weight"][0].to(self._dtype), targets)
        loss = losses.sum() / (targets >= 0).sum()
        loss.backward()
        norm = self._optimiser.step(rate)
        return {"loss": loss.detach(), "norm": norm}

    def saved(self) -> dict[str, Any]:
        """bf16 weights, and how far the training is."""
        weights = {kind: value.detach().to(torch.bfloat16) for kind, value in self.masters.named()}
        return {"weights": weights, "place": asdict(self.place), "num_done": self.num_done, "recipe": asdict(self.recipe)}


@torch.no_grad()
def measure(masters: DenseMasters, samples: list[Sample], dtype: torch.dtype) -> Fit:
    """How well the model predicts some texts, each a sequence of its own."""
    found = []
    for sample in samples:
        count = len(sample.ids)
        length = count + -count % 128
        token_ids = torch.full((1, length), masters.config.pad_token_id)
        positions = torch.full((1, length), PADDING)
        token_ids[0, :count] = torch.from_numpy(sample.ids.astype(np.int64))
        positions[0, :count] = torch.arange(count)
        packed = Packed(token_ids.to(masters.device), positions.to(masters.device))
        targets = packed.targets.flatten()[: count - 1]
        found.append(
            -token_losses(hidden_states(masters, packed, dtype)[: count - 1], masters["head.weight"][0].to(dtype), targets)
        )
    return Fit.of(found, [each.num_bytes[1:] for each in samples])


def main() -> None:
    """Run the command."""
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="shard folders")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for curve, state and results")
    parser.add_argument("--tokens", type=float, required=True, help="of the training")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it stops")
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--length", type=int, default=Recipe.length)
    parser.add_argument("--rate", type=float, default=Recipe.rate)
    parser.add_argument("--samples", type=int, default=16, help="size of the measurement, as in `deepinfer bench quality`")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="launch every kernel of a step by itself")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64

    tokenizer = Tokenizer.from_dir(args.tokenizer)
    recipe = Recipe(num_tokens=int(args.tokens), batch=args.batch, length=args.length, rate=args.rate)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # a CPU is many times slower with bf16
    trainer = DenseTrainer(nano_config(tokenizer), recipe, device, dtype, is_eager=args.eager)
    log.info("%.1f M weights in the layers", sum(v.numel() for k, v in trainer.masters.named() if k.startswith("layers")) / 1e6)
    train(trainer, Shard.read(args.data), args.out, started + 60 * args.minutes, log_every=args.log_every)
    write_state(args.out / "compact", trainer.saved())
    texts = choose_data(tokenizer, args.samples, MAX_TOKENS).texts
    bits = {kind: measure(trainer.masters, list(several), dtype).bits_per_byte for kind, several in texts.items()}
    result = {"tokens": trainer.num_done, "bits_per_byte": bits}
    (args.out / "bits.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    log.info("%s", json.dumps(result))


if __name__ == "__main__":
    main()
