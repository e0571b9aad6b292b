"""Passes of prompts over a network without an engine: what the checks and the quality benchmark have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kv.cache import KVCache
from deepinfer.kv.layout import KVLayout, RecordSizes
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import ReplayMode, StepInputs
from deepinfer.step import Chunk, StepPlan

Ids = npt.NDArray[np.int32]
_REQUEST = "pass"


def chunks_of(prompt: Ids, cuts: Sequence[int], floor: int, layout: KVLayout) -> Iterator[Chunk]:
    """A prompt on slot 1 and pages 1, 2, …, cut at ``cuts``; logits and rows of the decoder half from ``floor`` on."""
    pages = np.arange(1, layout.pages_for(len(prompt)) + 1, dtype=np.int32)
    inner = sorted({cut for cut in cuts if 0 < cut < len(prompt)})
    for start, end in zip([0, *inner], [*inner, len(prompt)], strict=True):
        yield Chunk(
            request_id=_REQUEST,
            slot=1,
            start=start,
            token_ids=prompt[start:end],
            page_ids=pages[: layout.pages_for(end)],
            num_logits=max(0, end - max(start, floor)),
            decoder_floor=floor,
        )


class Runner:
    """Runs prompts over a network.

    Attributes:
        network: the network.
        layout: of the caches that it makes.
        max_tokens: longest prompt.
    """

    def __init__(self, network: Flash, max_tokens: int) -> None:
        """Prepare passes of at most ``max_tokens`` tokens."""
        self.network = network
        self.layout = KVLayout(network.config, records=RecordSizes.of(network.config, exact=network.exact))
        self.max_tokens = max_tokens

    def cache(self, num_slots: int = 4) -> KVCache:
        """A cache without stored state, for two prompts of full length, or for many that have as many tokens together."""
        pages = 2 * self.layout.pages_for(self.max_tokens) + num_slots
        return KVCache(self.layout, num_pages=pages + 1, num_slots=num_slots, device=self.network.device)

    def run(self, cache: KVCache, chunks: Iterable[Chunk], mode: ReplayMode = "compact") -> Tensor:
        """Run each chunk as a step: log-probabilities [num_logits, vocab_size] of all rows that need logits."""
        return torch.cat([self._step(cache, (chunk,), mode) for chunk in chunks])

    def _step(self, cache: KVCache, chunks: tuple[Chunk, ...], mode: ReplayMode) -> Tensor:
        network = self.network
        made = StepInputs.build(
            StepPlan(chunks=chunks), config=network.config, layout=self.layout, device=network.device, replay_mode=mode
        )
        return torch.log_softmax(network.forward(made, cache), dim=-1)

    def after_hit(self, prompt: Ids, hit: int, floor: int, replay: int | None, rows: int) -> Tensor:
        """Log-probabilities of the last ``rows`` rows after a hit of ``hit`` tokens.

        Args:
            prompt: [num_tokens] ids.
            hit: tokens whose pages are there; a multiple of a page.
            floor: first position of the decoder half.
            replay: tokens that rebuild the state; with None the state is restored.
            rows: number of rows.
        """
        cache, layout = self.cache(), self.layout
        half = layout.pages_for(self.max_tokens)
        self.run(cache, [dataclasses.replace(each, num_logits=0) for each in chunks_of(prompt[:hit], [], 0, layout)])
        shared = hit // layout.page_tokens
        pages = np.concatenate([np.arange(1, shared + 1), np.arange(half + 1, 2 * half + 1 - shared)]).astype(np.int32)
        start = hit if replay is None else hit - replay
        chunk = Chunk(
            request_id=_REQUEST,
            slot=2,
            start=start,
            token_ids=prompt[start:],
            page_ids=pages[: layout.pages_for(len(prompt))],
            num_logits=rows,
            window_floor=start if replay is not None else 0,
            write_floor=hit,
            decoder_floor=floor,
            lookback_ids=prompt[max(0, start - self.network.config.engram_max_ngram_size + 1) : start],
        )
        if replay is None:
            cache.copy_slots([(1, 2)])
        return self.run(cache, [chunk])

    def log_likelihoods(self, texts: Sequence[Ids]) -> list[Tensor]:
        """Log-likelihood of every token of every text, given the tokens before it, in one step.

        Args:
            texts: at least two tokens each, together at most ``max_tokens``.

        Returns:
            For each text [num_tokens - 1] wide, in nats; the first token has none.
        """
        pages = [self.layout.pages_for(len(each)) for each in texts]
        firsts = np.cumsum([1, *pages])
        chunks = tuple(
            Chunk(
                request_id=f"{_REQUEST}-{number}",
                slot=1 + number,
                start=0,
                token_ids=text,
                page_ids=np.arange(first, first + count, dtype=np.int32),
                num_logits=len(text),
            )
            for number, (text, first, count) in enumerate(zip(texts, firsts, pages, strict=False))
        )
        found = self._step(self.cache(len(texts) + 1), chunks, "compact").split([len(each) for each in texts])
        return [targets_of(each[:-1], text[1:]) for each, text in zip(found, texts, strict=True)]


def targets_of(logprobs: Tensor, ids: Ids) -> Tensor:
    """[num_rows] of log-probabilities [num_rows, vocab_size]: the one of each row's id in ``ids`` [num_rows]."""
    index = torch.from_numpy(np.asarray(ids, np.int64)).to(logprobs.device)
    return logprobs.gather(1, index.unsqueeze(1)).squeeze(1)
