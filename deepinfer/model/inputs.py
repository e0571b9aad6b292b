"""StepInputs: the arguments of the model and of its layers.

They are made once for each step from its plan.  :class:`StepNumbers` puts all numbers that the host knows into one buffer.  One
asynchronous copy brings the buffer to the device.  All other tensors are derived from it on the device.

The two halves of the network may process different rows of a step: with bounded replay the decoder half processes only the last
tokens of a prompt.  So each half has its own :class:`LayerInputs`.  If nothing differs, both halves share one object.

Rows of chunks come first; the host knows them.  Rows of rounds follow.  Only the device knows the positions of these rows and how
many of them each round has (:class:`~deepinfer.ops.sampling.RoundRows`).  The host knows only their total number.  The last of
them are padding rows, which belong to page 0 and slot 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kv.layout import KVLayout
from deepinfer.ops.arithmetic import to_device
from deepinfer.ops.attention import Span, Spans
from deepinfer.ops.sampling import RoundRows
from deepinfer.step import Chunk, Round, StepPlan

ReplayMode = Literal["compact", "mask"]
"""What the decoder half does with rows before a chunk's ``decoder_floor``: remove them, or compute them without window keys."""

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """Where the tokens of a step write their compressed entries, for one compress ratio.

    Attributes:
        pages, entries: [num_tokens] int64, page and index in the page; page 0 for a token that completes no entry, or whose entry
            is stored already.
        first_positions: [num_tokens] int64, position of the first token of each token's entry.
    """

    pages: Tensor
    entries: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRows:
    """Where the tokens of a step write values for later steps, for one kind of ring.

    No two tokens write to the same place, except in slot 0, which no request reads.

    Order: a step gathers the values of earlier tokens (:meth:`PreviousTokens.gather`) before it writes its own, because a long
    chunk overwrites values that its first tokens read.  A kernel may do both in this order.

    Attributes:
        rows: [n] int64, rows of the step.
        slots: [n] int64, slots of their requests.
        positions: [n] int64, positions of their tokens, modulo the ring's length.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor

    def write(self, ring: Tensor, values: Tensor) -> None:
        """Write some of ``values`` [num_tokens, ...] into ``ring`` [num_slots, length, ...], same dtype."""
        ring[self.slots, self.positions] = values[self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousTokens:
    """Where the tokens of a step find the tokens before them, for one kind of ring.

    :meth:`gather` makes one list: [``reach`` earlier tokens of each request, from the ring | the step's own tokens].

    Attributes:
        slots: [num_requests, 1] int64.
        positions: [num_requests, reach] int64, positions of the last tokens before each request's first token in the step,
            modulo the ring's length.
        idx: [num_tokens, count] int64 indices into the list; -1 if the token does not exist or is not visible.
    """

    slots: Tensor
    positions: Tensor
    idx: Tensor

    def gather(self, ring: Tensor, own: Tensor) -> Tensor:
        """The list that ``idx`` points into: [num_requests * reach + num_tokens, ...].

        Args:
            ring: [num_slots, length, ...]; :meth:`RingRows.write` of this step comes later.
            own: [num_tokens, ...] values of the step's tokens, same dtype.
        """
        return torch.cat([ring[self.slots, self.positions].flatten(0, 1), own])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Inputs of a layer for some rows of a step.

    Requests are numbered 0 … num_requests - 1 in the order of their rows: chunks, then rounds.  With rounds, one extra entry
    (slot 0, page 0) owns the padding rows.

    Attributes:
        positions: [num_tokens] int64.
        is_image: [num_tokens] bool.
        spans: rows and pages of each request.
        page_ids: [num_step_pages] int64, pages of all requests, concatenated.
        window, compressor: where window keys and projections of the compressor are written.
        window_before: where each token finds its window keys.  ``idx`` is [num_tokens, sliding_window], the token itself last;
            reach is sliding_window - 1.
        compressor_before: where each token finds the token before it.  ``idx`` is [num_tokens, 1]; reach is 1.
        store_rows: compress ratio -> where entries are written.
    """

    positions: Tensor
    is_image: Tensor
    spans: Spans
    page_ids: Tensor
    window: RingRows
    window_before: PreviousTokens
    compressor: RingRows
    compressor_before: PreviousTokens
    store_rows: Mapping[int, StoreRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of the model for one step.

    Attributes:
        token_ids: [num_tokens] int64.
        image_rows: [num_image_rows] int64, rows whose embedding comes from the vision tower, or None.
        image_embeddings: [num_image_rows, hidden], or None.
        restored: where tokens before the step are first written into the ring of compressed ids, because their slot does not
            hold them.  Its ``rows`` are indices into ``restored_ids``.
        restored_ids: [n] int64, token ids of these tokens.
        lookback: where the step's compressed ids are written.
        lookback_before: where each token finds its last ids.  ``idx`` is [num_tokens, engram_max_ngram_size], the token itself
            first; reach is engram_max_ngram_size - 1.
        encoder: inputs for all rows.
        decoder: inputs for the rows of the decoder half; the same object if nothing differs.
        decoder_rows: [num_decoder_rows] int64, rows of the step that the decoder half processes; None if nothing differs.
        logit_rows: [num_logits] int64, rows of ``decoder`` that need logits.
    """

    token_ids: Tensor
    image_rows: Tensor | None
    image_embeddings: Tensor | None
    restored: RingRows
    restored_ids: Tensor
    lookback: RingRows
    lookback_before: PreviousTokens
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
        rounds: RoundRows | None = None,
        replay_mode: ReplayMode = "compact",
    ) -> StepInputs:
        """Make the inputs of ``plan`` on ``device``, by :class:`StepNumbers`."""
        num_round_rows = 0 if rounds is None else len(rounds.positions)
        numbers = StepNumbers(plan, num_round_rows, config=config, layout=layout, replay_mode=replay_mode)
        return numbers.derive(to_device(numbers.packed, device), rounds, image_features)


class StepNumbers:
    """The host's part of :class:`StepInputs`: all its numbers in one buffer, and the shape of the step.

    Invariant: the operations of :meth:`derive` depend only on ``shape``.  Two plans of the same shape run the same program on
    different numbers.

    Attributes:
        packed: [n] int64 on the host.
        shape: hashable.
    """

    def __init__(
        self, plan: StepPlan, num_round_rows: int, *, config: ModelConfig, layout: KVLayout, replay_mode: ReplayMode = "compact"
    ) -> None:
        """Number the rows of ``plan``.

        Args:
            num_round_rows: number of rows for rounds, padding rows included.
            replay_mode: what the decoder half does with rows before a chunk's decoder floor.
        """
        chunks = plan.chunks
        self._config, self._layout, self._chunks, self._has_rounds = config, layout, chunks, bool(plan.rounds)
        token_ids = np.concatenate([np.empty(0, dtype=np.int32), *(chunk.token_ids for chunk in chunks)])
        self._is_image = is_image = token_ids == config.image_token_id
        host = _Transfer()
        host["token_ids"] = token_ids
        host["image_rows"] = np.flatnonzero(is_image)
        host["lookback_rows"] = _tails(_spans(chunks, layout), layout.lookback_ring, num_round_rows)
        before = [(chunk, chunk.lookback_ids) for chunk in chunks if chunk.lookback_ids is not None]
        host["restored_slots"] = [chunk.slot for chunk, ids in before for _ in ids]
        host["restored_positions"] = [chunk.start - len(ids) + number for chunk, ids in before for number in range(len(ids))]
        host["restored_ids"] = [int(token_id) for _, ids in before for token_id in ids]

        others = (plan.rounds, num_round_rows)
        self._encoder = _LayerNumbers(host, "encoder", chunks, *others, is_image, layout, floor=lambda each: each.window_floor)
        # A floor before every window of a chunk removes no rows and hides no keys.
        reach = config.sliding_window - 1
        requests: tuple[Chunk | Round, ...] = (*chunks, *plan.rounds)
        differs = any(each.decoder_floor > max(each.window_floor, each.start - reach) for each in requests)
        self._decoder = decoder = self._encoder
        if differs:
            kept = np.ones(len(token_ids), dtype=bool)
            decoder_chunks: Sequence[Chunk] = chunks
            if replay_mode == "compact":
                positions = [np.arange(chunk.start, chunk.end) >= chunk.decoder_floor for chunk in chunks]
                kept = np.concatenate([kept[:0], *positions])
                decoder_chunks = [_from(chunk, chunk.decoder_floor) for chunk in chunks if chunk.end > chunk.decoder_floor]
            host["decoder_rows"] = np.append(np.flatnonzero(kept), np.arange(len(kept), len(kept) + num_round_rows))
            self._decoder = decoder = _LayerNumbers(
                host,
                "decoder",
                decoder_chunks,
                *others,
                is_image[kept],
                layout,
                floor=lambda each: max(each.window_floor, each.decoder_floor),
            )
        wanted = [
            np.arange(span.first_row + span.num_rows - chunk.num_logits, span.first_row + span.num_rows)
            for span, chunk in zip(decoder.chunk_spans, decoder.chunks, strict=True)
        ]
        wanted.append(np.arange(decoder.num_chunk_rows, decoder.num_chunk_rows + num_round_rows))
        host["logit_rows"] = np.concatenate(wanted)

        self.packed, self._lens = host.pack()
        self.shape: Hashable = (tuple(self._lens.items()), self._encoder.shape, decoder.shape)

    def derive(
        self, packed: Tensor, rounds: RoundRows | None = None, image_features: Mapping[str, Tensor] | None = None
    ) -> StepInputs:
        """Make the inputs on the device of ``packed``.

        Args:
            packed: a copy of :attr:`packed` on the device of the model.
            rounds: rows of the plan's rounds; None for a plan without rounds.
            image_features: request id -> [num_image_positions, hidden] embeddings of all its image positions, in order.
        """
        assert (rounds is None) != self._has_rounds, "pass the rows of rounds if and only if the plan has rounds"
        on_device = dict(zip(self._lens, packed.split(list(self._lens.values())), strict=True))
        config, layout = self._config, self._layout
        tokens = self._encoder.tokens(on_device, rounds)
        encoder = decoder = self._encoder.derive(on_device, tokens, rounds, config, layout)
        is_same = self._decoder is self._encoder
        if not is_same:
            decoder = self._decoder.derive(on_device, self._decoder.tokens(on_device, rounds), rounds, config, layout)
        ids = on_device["token_ids"]
        if rounds is not None:
            ids = torch.cat([ids, rounds.token_ids])
        image_embeddings = None
        if self._is_image.any():
            assert image_features is not None, "image positions need image_features"
            image_embeddings = _image_embeddings(self._chunks, self._is_image, image_features)
        return StepInputs(
            token_ids=ids,
            image_rows=on_device["image_rows"] if image_embeddings is not None else None,
            image_embeddings=image_embeddings,
            restored=RingRows(
                rows=torch.arange(len(on_device["restored_ids"]), device=packed.device),
                slots=on_device["restored_slots"],
                positions=on_device["restored_positions"] % layout.lookback_ring,
            ),
            restored_ids=on_device["restored_ids"],
            lookback=tokens.kept(on_device["lookback_rows"], layout.lookback_ring),
            lookback_before=tokens.before(range(0, -config.engram_max_ngram_size, -1), layout.lookback_ring),
            encoder=encoder,
            decoder=decoder,
            decoder_rows=None if is_same else on_device["decoder_rows"],
            logit_rows=on_device["logit_rows"],
        )


class _Transfer(dict[str, npt.ArrayLike]):
    """Named lists of integers that are copied to the device together."""

    def pack(self) -> tuple[Tensor, dict[str, int]]:
        """All lists concatenated in one buffer [n] int64, and the length of each list by name."""
        arrays = {name: np.asarray(values, dtype=np.int64) for name, values in self.items()}
        return torch.from_numpy(np.concatenate(list(arrays.values()))), {name: len(array) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Positions and requests of some rows of a step, on the device.

    Attributes:
        positions, requests: [num_tokens] int64, position and request number of each row.
        slots, starts, first_rows: [num_requests] int64, slot, first position and first row of each request.
    """

    positions: Tensor
    requests: Tensor
    slots: Tensor
    starts: Tensor
    first_rows: Tensor

    def kept(self, rows: Tensor, length: int) -> RingRows:
        """Where the values of ``rows`` [n] int64 are written into rings of ``length`` entries."""
        return RingRows(rows=rows, slots=self.slots[self.requests[rows]], positions=self.positions[rows] % length)

    def before(self, offsets: range, length: int, floors: Tensor | None = None) -> PreviousTokens:
        """Where each token finds the tokens at ``offsets`` from it (0 is itself), with rings of ``length`` entries.

        Args:
            floors: [num_requests] int64, first position that is visible to a request's tokens; None for 0.
        """
        reach, device = -min(offsets), self.positions.device
        start, first = (each[self.requests].unsqueeze(1) for each in (self.starts, self.first_rows))
        wanted = self.positions.unsqueeze(1) + torch.arange(offsets.start, offsets.stop, offsets.step, device=device)
        own = len(self.slots) * reach + first + wanted - start
        earlier = self.requests.unsqueeze(1) * reach + wanted - start + reach
        floor = 0 if floors is None else floors[self.requests].unsqueeze(1)
        return PreviousTokens(
            slots=self.slots.unsqueeze(1),
            positions=(self.starts.unsqueeze(1) + torch.arange(-reach, 0, device=device)) % length,
            idx=torch.where(wanted >= start, own, earlier).masked_fill_(wanted < floor, -1),
        )


class _LayerNumbers:
    """The host's part of :class:`LayerInputs`: adds its numbers to a transfer, and derives the inputs from their copy."""

    def __init__(
        self,
        host: _Transfer,
        name: str,
        chunks: Sequence[Chunk],
        rounds: Sequence[Round],
        num_round_rows: int,
        is_image: npt.NDArray[np.bool_],
        layout: KVLayout,
        *,
        floor: Callable[[Chunk | Round], int],
    ) -> None:
        self.chunks = tuple(chunks)
        self.chunk_spans = spans = _spans(self.chunks, layout)
        self.num_chunk_rows = len(is_image)
        num_pages = spans[-1].first_page + spans[-1].num_pages if spans else 0
        self.round_pages = tuple(len(each.page_ids) for each in rounds)
        self._name = name
        requests: tuple[Chunk | Round, ...] = (*self.chunks, *rounds)
        padding = [0] if rounds else []
        padding_page = [[0]] if rounds else []
        round_ends = num_pages + np.cumsum([0, *self.round_pages])
        columns: dict[str, list[npt.ArrayLike]] = {
            "positions": [np.arange(chunk.start, chunk.end) for chunk in self.chunks],
            "requests": [np.full(span.num_rows, number) for number, span in enumerate(spans)],
            "is_image": [is_image, np.zeros(num_round_rows)],
            "slots": [[each.slot for each in requests], padding],
            "starts": [[chunk.start for chunk in self.chunks]],
            "first_rows": [[span.first_row for span in spans]],
            "first_pages": [[span.first_page for span in spans], round_ends if rounds else []],
            "window_floors": [[floor(each) for each in requests], padding],
            "write_floors": [[chunk.write_floor for chunk in self.chunks], [0] * len(rounds), padding],
            "page_ids": [*(each.page_ids for each in requests), *padding_page],
            "ring_rows": [_tails(spans, layout.ring_tokens, num_round_rows)],
            "compressor_rows": [_tails(spans, layout.compressor_ring, num_round_rows)],
        }
        for column, parts in columns.items():
            host[f"{name}.{column}"] = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts] or [_NOTHING])

    @property
    def shape(self) -> Hashable:
        """Shape of these rows: the operations of :meth:`derive` depend only on it."""
        return self.chunk_spans, self.round_pages, self.num_chunk_rows

    def _column(self, on_device: Mapping[str, Tensor], name: str) -> Tensor:
        return on_device[f"{self._name}.{name}"]

    def tokens(self, on_device: Mapping[str, Tensor], rounds: RoundRows | None) -> _Tokens:
        """Positions and requests of the rows, with the rows of rounds."""
        names = ("positions", "requests", "slots", "starts", "first_rows")
        positions, requests, slots, starts, first_rows = (self._column(on_device, name) for name in names)
        if rounds is not None:
            padding = starts.new_zeros(1)
            positions = torch.cat([positions, rounds.positions])
            requests = torch.cat([requests, len(self.chunks) + rounds.owners])
            starts = torch.cat([starts, rounds.starts, padding])
            first_rows = torch.cat([first_rows, self.num_chunk_rows + rounds.first_rows, padding])
        return _Tokens(positions=positions, requests=requests, slots=slots, starts=starts, first_rows=first_rows)

    def derive(
        self, on_device: Mapping[str, Tensor], tokens: _Tokens, rounds: RoundRows | None, config: ModelConfig, layout: KVLayout
    ) -> LayerInputs:
        """Make the inputs of these rows; ``tokens`` is the result of :meth:`tokens`."""
        column = partial(self._column, on_device)
        positions, requests, page_ids = tokens.positions, tokens.requests, column("page_ids")
        round_rows = positions.new_empty(0, 0)
        if rounds is not None:
            places = torch.arange(rounds.width, device=positions.device)
            round_rows = self.num_chunk_rows + rounds.first_rows.unsqueeze(1) + places
            round_rows = torch.where(places <= rounds.lens.unsqueeze(1), round_rows, len(positions))

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
            is_image=column("is_image").bool(),
            spans=Spans(
                chunks=self.chunk_spans,
                round_pages=self.round_pages,
                first_pages=column("first_pages")[len(self.chunks) : len(self.chunks) + len(self.round_pages)],
                round_rows=round_rows,
                positions=positions,
            ),
            page_ids=page_ids,
            window=tokens.kept(column("ring_rows"), layout.ring_tokens),
            window_before=tokens.before(range(1 - config.sliding_window, 1), layout.ring_tokens, column("window_floors")),
            compressor=tokens.kept(column("compressor_rows"), layout.compressor_ring),
            compressor_before=tokens.before(range(-1, 0), layout.compressor_ring),
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


def _tails(spans: Sequence[Span], length: int, num_round_rows: int) -> npt.NDArray[np.int64]:
    """Rows that a ring of ``length`` entries keeps: the last ``length`` tokens of each chunk, and all rows of rounds."""
    ends = [(span.first_row + span.num_rows, min(length, span.num_rows)) for span in spans]
    num_chunk_rows = ends[-1][0] if ends else 0
    rounds = np.arange(num_chunk_rows, num_chunk_rows + num_round_rows)
    return np.concatenate([*(np.arange(end - count, end) for end, count in ends), rounds])


def _from(chunk: Chunk, floor: int) -> Chunk:
    """The part of a chunk from position ``floor`` on."""
    skipped = max(0, floor - chunk.start)
    return dataclasses.replace(chunk, start=chunk.start + skipped, token_ids=chunk.token_ids[skipped:])


def _image_embeddings(chunks: Sequence[Chunk], is_image: npt.NDArray[np.bool_], features: Mapping[str, Tensor]) -> Tensor:
    """[num_image_rows, hidden]: of each request's features those at the image positions of its chunk."""
    parts, row = [], 0
    for chunk in chunks:
        count = int(is_image[row : row + len(chunk.token_ids)].sum())
        row += len(chunk.token_ids)
        if count:
            parts.append(features[chunk.request_id][chunk.num_image_before : chunk.num_image_before + count])
    return torch.cat(parts)
