"""StepInputs: what the model and its layers receive, as arguments.

Made once a step from its plan.  All host numbers travel to the device in one copy that nobody waits for; everything else is
derived from them there.

The two halves of the network may run over different rows of a step: with bounded replay the decoder half sees only the last
tokens of a prompt.  So each half has :class:`LayerInputs` of its own, and a step that makes no difference shares one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kv.layout import KVLayout
from deepinfer.ops.attention import Span
from deepinfer.ops.quant import to_device
from deepinfer.step import PENDING, Chunk, StepPlan

ReplayMode = Literal["compact", "mask"]
"""How rows in front of a chunk's ``decoder_floor`` are kept out of the decoder half: removed, or computed without window keys."""


_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """Where the tokens of a step write their compressed entries, for one compress ratio.

    Attributes:
        pages, entries: [num_tokens] int64; page 0 for tokens that complete no entry, or whose entry is stored already.
        first_positions: [num_tokens] int64, first token position of each token's entry.
    """

    pages: Tensor
    entries: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Some rows of a step, seen by a layer.  Requests are numbered 0 … num_requests-1 in the order of their rows.

    Attributes:
        positions: [num_tokens] int64.
        requests: [num_tokens] int64, whose token a row is.
        is_image: [num_tokens] bool.
        spans: per request, on the host.
        slots, starts: [num_requests] int64.
        page_ids: [num_step_pages] int64, the requests' pages one behind the other.
        window_rows: [num_tokens, sliding_window] int64: row of each visible window key among [sliding_window - 1 earlier keys of
            each request | this step's keys], -1 where there is none.
        earlier_positions: [num_requests, sliding_window - 1] int64, the positions those earlier keys have (negative: none).
        ring_rows, compressor_rows: [n] int64, rows whose state must outlive the step in each kind of ring.
        store_rows: compress ratio -> addresses.
    """

    positions: Tensor
    requests: Tensor
    is_image: Tensor
    spans: tuple[Span, ...]
    slots: Tensor
    starts: Tensor
    page_ids: Tensor
    window_rows: Tensor
    earlier_positions: Tensor
    ring_rows: Tensor
    compressor_rows: Tensor
    store_rows: Mapping[int, StoreRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, seen by the model.

    Attributes:
        token_ids: [num_tokens] int64.
        image_rows: [num_image_rows] int64 rows whose embedding comes from the vision tower, or None.
        image_embeddings: [num_image_rows, hidden], or None.
        lookback_rows: [n] int64, rows whose compressed ids must outlive the step.
        restored_slots, restored_positions, restored_ids: [n] int64, tokens before the step that a slot must remember first.
        encoder: all rows.
        decoder: the rows of the decoder half; the same object where there is no difference.
        decoder_rows: [num_decoder_rows] int64 which rows of the step those are, or None for all.
        logit_rows: [num_logits] int64 rows of ``decoder`` that need logits.
    """

    token_ids: Tensor
    image_rows: Tensor | None
    image_embeddings: Tensor | None
    lookback_rows: Tensor
    restored_slots: Tensor
    restored_positions: Tensor
    restored_ids: Tensor
    encoder: LayerInputs
    decoder: LayerInputs
    decoder_rows: Tensor | None
    logit_rows: Tensor

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        *,
        config: ModelConfig,
        layout: KVLayout,
        device: torch.device,
        image_features: Mapping[str, Tensor] | None = None,
        last_tokens: Tensor | None = None,
        replay_mode: ReplayMode = "compact",
    ) -> StepInputs:
        """Inputs of ``plan`` on ``device``.

        Args:
            image_features: request id -> [num_image_positions, hidden] embeddings of all its image positions, in order.
            last_tokens: [num_slots] int64, the token that each slot's request sampled last; needed for pending tokens.
            replay_mode: what happens to rows in front of a chunk's decoder floor.
        """
        chunks = plan.chunks
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        is_image = token_ids == config.image_token_id
        host = _Transfer()
        host["token_ids"] = token_ids
        host["image_rows"] = np.flatnonzero(is_image)
        host["lookback_rows"] = _tails(_spans(chunks, layout), layout.lookback_ring)
        before = [(chunk, chunk.lookback_ids) for chunk in chunks if chunk.lookback_ids is not None]
        host["restored_slots"] = [chunk.slot for chunk, ids in before for _ in ids]
        host["restored_positions"] = [chunk.start - len(ids) + number for chunk, ids in before for number in range(len(ids))]
        host["restored_ids"] = [int(token_id) for _, ids in before for token_id in ids]

        encoder = _LayerNumbers(host, "encoder", chunks, is_image, layout, floor=lambda chunk: chunk.window_floor)
        # A floor that lies in front of every window of a chunk neither removes rows nor hides keys.
        reach = config.sliding_window - 1
        differs = any(chunk.decoder_floor > max(chunk.window_floor, chunk.start - reach) for chunk in chunks)
        decoder = encoder
        if differs:
            kept = np.ones(len(token_ids), dtype=bool)
            decoder_chunks: Sequence[Chunk] = chunks
            if replay_mode == "compact":
                kept = np.concatenate([np.arange(chunk.start, chunk.end) >= chunk.decoder_floor for chunk in chunks])
                decoder_chunks = [_from(chunk, chunk.decoder_floor) for chunk in chunks if chunk.end > chunk.decoder_floor]
            host["decoder_rows"] = np.flatnonzero(kept)
            decoder = _LayerNumbers(
                host,
                "decoder",
                decoder_chunks,
                is_image[kept],
                layout,
                floor=lambda chunk: max(chunk.window_floor, chunk.decoder_floor),
            )
        wanted = [
            np.arange(span.first_row + span.num_rows - chunk.num_logits, span.first_row + span.num_rows)
            for span, chunk in zip(decoder.spans, decoder.chunks, strict=True)
        ]
        host["logit_rows"] = np.concatenate(wanted or [_NOTHING])

        there = host.send(device)
        encoder_inputs = encoder.derive(there, config, layout, device)
        ids = there["token_ids"]
        if (token_ids == PENDING).any():
            assert last_tokens is not None, "pending tokens are on the device"
            ids = torch.where(ids == PENDING, last_tokens[encoder_inputs.slots[encoder_inputs.requests]], ids)
        image_embeddings = None
        if is_image.any():
            assert image_features is not None, "image positions have features"
            image_embeddings = _image_embeddings(chunks, is_image, image_features)
        return cls(
            token_ids=ids,
            image_rows=there["image_rows"] if image_embeddings is not None else None,
            image_embeddings=image_embeddings,
            lookback_rows=there["lookback_rows"],
            restored_slots=there["restored_slots"],
            restored_positions=there["restored_positions"],
            restored_ids=there["restored_ids"],
            encoder=encoder_inputs,
            decoder=encoder_inputs if decoder is encoder else decoder.derive(there, config, layout, device),
            decoder_rows=there["decoder_rows"] if differs else None,
            logit_rows=there["logit_rows"],
        )


class _Transfer(dict[str, npt.ArrayLike]):
    """Named lists of integers that cross to the device together."""

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """The same names as int64 tensors: views of one buffer.  Cost: one copy, not waited for."""
        arrays = {name: np.asarray(values, dtype=np.int64) for name, values in self.items()}
        packed = to_device(torch.from_numpy(np.concatenate(list(arrays.values()))), device)
        parts = packed.split([len(array) for array in arrays.values()])
        return dict(zip(arrays, parts, strict=True))


class _LayerNumbers:
    """The host's part of :class:`LayerInputs`: puts its numbers into a transfer, then derives the rest from what arrived."""

    def __init__(
        self,
        host: _Transfer,
        name: str,
        chunks: Sequence[Chunk],
        is_image: npt.NDArray[np.bool_],
        layout: KVLayout,
        *,
        floor: Callable[[Chunk], int],
    ) -> None:
        self.chunks = tuple(chunks)
        self.spans = _spans(self.chunks, layout)
        self._name = name
        spans = self.spans
        columns: dict[str, list[npt.ArrayLike]] = {
            "positions": [np.arange(chunk.start, chunk.end) for chunk in self.chunks],
            "requests": [np.full(span.num_rows, number) for number, span in enumerate(spans)],
            "is_image": [is_image],
            "slots": [[chunk.slot for chunk in self.chunks]],
            "starts": [[chunk.start for chunk in self.chunks]],
            "first_rows": [[span.first_row for span in spans]],
            "first_pages": [[span.first_page for span in spans]],
            "window_floors": [[floor(chunk) for chunk in self.chunks]],
            "write_floors": [[chunk.write_floor for chunk in self.chunks]],
            "page_ids": [chunk.page_ids for chunk in self.chunks],
            "ring_rows": [_tails(spans, layout.ring_tokens)],
            "compressor_rows": [_tails(spans, layout.compressor_ring)],
        }
        for column, parts in columns.items():
            host[f"{name}.{column}"] = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts] or [_NOTHING])

    def derive(self, there: Mapping[str, Tensor], config: ModelConfig, layout: KVLayout, device: torch.device) -> LayerInputs:
        def column(name: str) -> Tensor:
            return there[f"{self._name}.{name}"]

        positions, requests, starts, page_ids = (column(name) for name in ("positions", "requests", "starts", "page_ids"))
        # Window keys: the earlier ones of each request, then the step's own.
        reach = config.sliding_window - 1
        start, first, floor = (column(name)[requests].unsqueeze(1) for name in ("starts", "first_rows", "window_floors"))
        key_positions = positions.unsqueeze(1) + torch.arange(-reach, 1, device=device)
        own = len(self.spans) * reach + first + key_positions - start
        earlier = requests.unsqueeze(1) * reach + key_positions - start + reach
        window_rows = torch.where(key_positions >= start, own, earlier).masked_fill_(key_positions < floor, -1)

        store_rows = {}
        first_pages, write_floors = column("first_pages")[requests], column("write_floors")[requests]
        for ratio in sorted({config.ratio(layer) for layer in config.kv_source_layer_ids}):
            page_entries = layout.page_tokens // ratio
            numbers = positions // ratio
            pages = page_ids[first_pages + numbers // page_entries]
            writes = ((positions + 1) % ratio == 0) & (positions >= write_floors)
            store_rows[ratio] = StoreRows(
                pages=torch.where(writes, pages, 0), entries=numbers % page_entries, first_positions=numbers * ratio
            )
        return LayerInputs(
            positions=positions,
            requests=requests,
            is_image=column("is_image").bool(),
            spans=self.spans,
            slots=column("slots"),
            starts=starts,
            page_ids=page_ids,
            window_rows=window_rows,
            earlier_positions=starts.unsqueeze(1) + torch.arange(-reach, 0, device=device),
            ring_rows=column("ring_rows"),
            compressor_rows=column("compressor_rows"),
            store_rows=store_rows,
        )


def _spans(chunks: Sequence[Chunk], layout: KVLayout) -> tuple[Span, ...]:
    spans: list[Span] = []
    first_row = first_page = 0
    for chunk in chunks:
        num_rows, num_pages = len(chunk.token_ids), len(chunk.page_ids)
        assert num_rows > 0, "a chunk has tokens"
        assert num_pages >= layout.pages_for(chunk.end), "pages cover the chunk"
        spans.append(Span(first_row=first_row, num_rows=num_rows, start=chunk.start, first_page=first_page, num_pages=num_pages))
        first_row += num_rows
        first_page += num_pages
    return tuple(spans)


def _tails(spans: Sequence[Span], length: int) -> npt.NDArray[np.int64]:
    """Rows of the last ``length`` tokens of each request: what a ring of that length keeps."""
    ends = [(span.first_row + span.num_rows, min(length, span.num_rows)) for span in spans]
    return np.concatenate([np.arange(end - count, end) for end, count in ends] or [_NOTHING])


def _from(chunk: Chunk, floor: int) -> Chunk:
    """The part of a chunk at and behind ``floor``."""
    skipped = max(0, floor - chunk.start)
    return dataclasses.replace(chunk, start=chunk.start + skipped, token_ids=chunk.token_ids[skipped:])


def _image_embeddings(chunks: Sequence[Chunk], is_image: npt.NDArray[np.bool_], features: Mapping[str, Tensor]) -> Tensor:
    """[num_image_rows, hidden]: the part of each request's features that its chunk shows."""
    parts, row = [], 0
    for chunk in chunks:
        count = int(is_image[row : row + len(chunk.token_ids)].sum())
        row += len(chunk.token_ids)
        if count:
            parts.append(features[chunk.request_id][chunk.num_image_before : chunk.num_image_before + count])
    return torch.cat(parts)
