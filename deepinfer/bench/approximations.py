"""What the approximations of the network cost, measured as likelihood of text.

Each comparison computes the same tokens twice: as the engine does, and with one part replaced.  Operators are replaced while a
measurement runs (:meth:`~deepinfer.ops.op.Op.wrapped`); the network itself has no switch for it.

The replacements need steps that have one chunk, from the first token of a text.  Then the entry index of an entry is its number,
and the keys of the step are all keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.bench.passes import Ids, Runner, chunks_of, targets_of
from deepinfer.ops import attention, norm
from deepinfer.ops.attention import CompressorWeights, IndexStore, Spans
from deepinfer.ops.norm import Rotation
from deepinfer.ops.quant import QuantisedRows

ROWS = 128
"""Tokens after a prompt that measurements of replay predict."""

Rule = Callable[[Tensor, int], Tensor]
"""Chooses entries: (visible [num_tokens, num_entries] bool, number of entries) -> [num_tokens, count] int64, -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A text as token ids.

    Attributes:
        ids: [num_tokens].
        num_bytes: [num_tokens] bytes of text that each token stands for; 0 for a special token, which is not counted.
    """

    ids: Ids
    num_bytes: npt.NDArray[np.int64]

    def cut(self, num_tokens: int) -> Sample:
        """The first tokens."""
        return Sample(ids=self.ids[:num_tokens], num_bytes=self.num_bytes[:num_tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well a network predicts some tokens.

    Attributes:
        nats: negative log-likelihood of all counted tokens.
        num_tokens, num_bytes: tokens that are counted, and the bytes that they stand for.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, likelihoods: Sequence[Tensor], num_bytes: Sequence[npt.NDArray[np.int64]]) -> Fit:
        """Sum up log-likelihoods, [n] for each text, with the bytes [n] of the same tokens."""
        counted = np.concatenate(list(num_bytes))
        nats = -torch.cat(list(likelihoods)).double().cpu().numpy()
        is_text = counted > 0
        return cls(nats=float(nats[is_text].sum()), num_tokens=int(is_text.sum()), num_bytes=int(counted.sum()))

    @property
    def bits_per_byte(self) -> float:
        """Bits that a byte of text needs."""
        return self.nats / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood of a token."""
        return math.exp(self.nats / self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same tokens computed in two ways.

    Attributes:
        name: what is compared.
        against: what it is compared with.
        fit, reference: how well each predicts the tokens.
    """

    name: str
    against: str
    fit: Fit
    reference: Fit

    @property
    def cost(self) -> float:
        """Bits per byte more than the reference; negative if it predicts better."""
        return self.fit.bits_per_byte - self.reference.bits_per_byte


# ----------------------------------------------------------------------------------------------------------------------- choices


def recent(visible: Tensor, count: int) -> Tensor:
    """The newest visible entries."""
    return _highest(torch.arange(visible.shape[1], device=visible.device).expand_as(visible), visible, count)


def at_random(visible: Tensor, count: int) -> Tensor:
    """Visible entries drawn at random; the same shape gives the same draw."""
    generator = torch.Generator(visible.device).manual_seed(visible.shape[0])
    return _highest(torch.rand(visible.shape, generator=generator, device=visible.device), visible, count)


def every(visible: Tensor, _count: int) -> Tensor:
    """All visible entries."""
    return torch.where(visible, torch.arange(visible.shape[1], device=visible.device), -1)


def _highest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The ``count`` visible entries of the highest scores, which are at least 0: ascending, padded with -1."""
    num_entries = visible.shape[1]
    best = torch.topk(scores.masked_fill(~visible, -1), min(count, num_entries), dim=1)
    chosen = torch.where(best.values >= 0, best.indices, num_entries).sort(dim=1).values
    padded = torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=num_entries)
    return padded.masked_fill(padded == num_entries, -1)


@contextlib.contextmanager
def choosing(rule: Rule) -> Iterator[None]:
    """Let every layer with an indexer choose its entries by ``rule`` instead."""

    def replace(_bound: Callable[..., Any]) -> Callable[..., Tensor]:
        def body(
            q: Tensor, _weights: Tensor, store: IndexStore, _pages: Tensor, spans: Spans, top_k: int, *_more: object
        ) -> Tensor:
            numbers = torch.arange(q.shape[0] // store.ratio, device=q.device)
            return rule(numbers < ((spans.positions + 1) // store.ratio).unsqueeze(1), top_k)

        return body

    def replace_blocks(bound: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *arguments: (replace(bound)(*arguments), bound(*arguments)[1])

    with (
        attention.index_topk.wrapped(replace),
        attention.index_topk_within.wrapped(replace),
        attention.index_blocks.wrapped(replace_blocks),
    ):
        yield


@contextlib.contextmanager
def unfiltered() -> Iterator[None]:
    """Let the layers after the candidate layer choose among all entries instead of the entries of the candidate blocks."""

    def replace(_bound: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: attention.index_topk(*arguments[:6])

    with attention.index_topk_within.wrapped(replace):
        yield


# ----------------------------------------------------------------------------------------------------------------------- records


class _Keys:
    """Keys of the running step before they become records.

    Attributes:
        window: [num_tokens, head_dim] of the last layer.
        main: [num_entries, head_dim] of the last layer that has a store.
    """

    def __init__(self) -> None:
        self.window = self.main = torch.empty(0)

    def of_window(self, bound: Callable[..., tuple[QuantisedRows, Tensor]]) -> Callable[..., tuple[QuantisedRows, Tensor]]:
        def body(
            qkv: Tensor, q_weight: Tensor, kv_weight: Tensor, rotation: Rotation, eps: float
        ) -> tuple[QuantisedRows, Tensor]:
            self.window = norm.window_keys(qkv[:, q_weight.shape[0] :], kv_weight, rotation, eps)
            return bound(qkv, q_weight, kv_weight, rotation, eps)

        return body

    def of_store(self, bound: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def body(
            raw: Tensor, previous: Tensor | None, weights: CompressorWeights, rotation: Rotation, dtype: torch.dtype
        ) -> tuple[Tensor, Tensor]:
            self.main = attention.entries(raw, previous, weights, rotation, dtype)[0][weights.ratio - 1 :: weights.ratio]
            return bound(raw, previous, weights, rotation, dtype)

        return body

    def attend(self, _bound: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def body(
            q: Tensor,
            rotation: Rotation,
            sinks: Tensor,
            window: Tensor,
            window_idx: Tensor,
            _store: Tensor | None,
            _pages: Tensor,
            entry_idx: Tensor | None,
        ) -> Tensor:
            earlier = self.window.new_zeros(window.shape[0] - self.window.shape[0], self.window.shape[1])  # never visible
            parts, key_idx = [earlier, self.window], window_idx
            if entry_idx is not None:
                parts.append(self.main)
                key_idx = torch.cat([window_idx, torch.where(entry_idx >= 0, entry_idx + window.shape[0], -1)], dim=1)
            table = torch.cat([*parts, self.window.new_zeros(1, self.window.shape[1])])
            return attention.attend(q, rotation, sinks, table.to(sinks.dtype), key_idx)

        return body


@contextlib.contextmanager
def unrounded_records() -> Iterator[None]:
    """Let attention read the keys as they were before they were rounded to FP8 window records and FP4 entries.

    The indexer still scores rounded index keys.
    """
    keys = _Keys()
    with (
        norm.qkv_norm.wrapped(keys.of_window),
        attention.compress.wrapped(keys.of_store),
        attention.sparse_attention.wrapped(keys.attend),
    ):
        yield


# -------------------------------------------------------------------------------------------------------------------- comparisons


def fit_each(runner: Runner, samples: Sequence[Sample], bar: tqdm[Any]) -> Fit:
    """Fit of texts, each in a step of its own."""
    found = []
    for each in samples:
        found += runner.log_likelihoods([each.ids])
        bar.update()
    return Fit.of(found, [each.num_bytes[1:] for each in samples])


def compare_choices(runner: Runner, samples: Sequence[Sample], bar: tqdm[Any]) -> list[Comparison]:
    """Compare the indexer with other choices, the candidate filter with none, and records with keys that are not rounded."""
    usual = fit_each(runner, samples, bar)
    fits = []
    for replaced in (choosing(every), choosing(at_random), choosing(recent), unfiltered(), unrounded_records()):
        with replaced:
            fits.append(fit_each(runner, samples, bar))
    all_entries, drawn, newest, without, unrounded = fits
    return [
        Comparison(name="entries of the indexer", against="all entries", fit=usual, reference=all_entries),
        Comparison(name="random entries", against="all entries", fit=drawn, reference=all_entries),
        Comparison(name="most recent entries", against="all entries", fit=newest, reference=all_entries),
        Comparison(name="candidate filter", against="no filter", fit=usual, reference=without),
        Comparison(name="FP8 and FP4 records", against="keys in bf16", fit=usual, reference=unrounded),
    ]


def compare_arithmetic(runner: Runner, exact: Runner, samples: Sequence[Sample], bar: tqdm[Any]) -> Comparison:
    """Compare bf16 activations and fp32 sums with fp64; both round to the checkpoint's formats."""
    fit, reference = (fit_each(each, samples, bar) for each in (runner, exact))
    return Comparison(name="bf16 with fp32 sums", against="fp64", fit=fit, reference=reference)


def compare_replay(runner: Runner, samples: Sequence[Sample], keep: int, bar: tqdm[Any]) -> list[Comparison]:
    """Compare bounded replay with the exact run, on the last :data:`ROWS` tokens of each text; the tokens before are the prompt.

    Args:
        keep: tokens of a prompt that the decoder half computes.
    """
    window, layout = runner.network.config.sliding_window, runner.layout
    rows = ROWS + 1  # the last row of the prompt predicts the first token

    def after_prompt(ids: Ids, *, is_decoder_bounded: bool, is_encoder_replayed: bool) -> Tensor:
        prompt = len(ids) - ROWS
        floor = prompt - keep if is_decoder_bounded else 0
        if is_encoder_replayed:
            hit = (prompt - max(keep, layout.ring_tokens)) // layout.page_tokens * layout.page_tokens
            found = runner.after_hit(ids, hit, floor, window, rows)
        else:
            chunks = [dataclasses.replace(each, decoder_floor=floor) for each in chunks_of(ids, [], len(ids) - rows, layout)]
            found = runner.run(runner.cache(), chunks)
        bar.update()
        return targets_of(found[:-1], ids[prompt:])

    def fit(*, is_decoder_bounded: bool, is_encoder_replayed: bool) -> Fit:
        likelihoods = [
            after_prompt(each.ids, is_decoder_bounded=is_decoder_bounded, is_encoder_replayed=is_encoder_replayed)
            for each in samples
        ]
        return Fit.of(likelihoods, [each.num_bytes[-ROWS:] for each in samples])

    exact = fit(is_decoder_bounded=False, is_encoder_replayed=False)
    names = {
        f"decoder replay of {keep} tokens": (True, False),
        f"encoder replay of {window} tokens": (False, True),
        "both replays": (True, True),
    }
    return [
        Comparison(
            name=name, against="exact run", fit=fit(is_decoder_bounded=decoder, is_encoder_replayed=encoder), reference=exact
        )
        for name, (decoder, encoder) in names.items()
    ]
