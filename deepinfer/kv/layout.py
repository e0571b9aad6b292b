"""Byte addresses of pages and slots.  Plain arithmetic without torch and without a device.

A request has two kinds of memory.  *Pages* of ``page_tokens`` tokens hold the compressed entries and index keys of every layer
with a store, for the whole context.  One *slot* holds the state of bounded size: window rings, raw compressor rows, and the ids
that Engram looks back on.

    page   for each store, in layer order:  index values | index scales | main records        each region padded to 32 bytes
    slot   windows of the encoder half | windows of the decoder half and the drafter | compressor rings | look-back ring

The first region of a slot has no gaps, because it is the only one worth storing elsewhere.

Page 0 and slot 0 belong to no request.  Writes of padding go there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer.config import ModelConfig

LOOKBACK_BYTES = 4
"""One int32 compressed id for each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSizes:
    """Bytes of one record of each kind.

    Attributes:
        window: one layer's key of one token.
        main: one compressed entry.
        index_values, index_scales: the two parts of an index key, kept apart inside a page.
        compressor_element: one number of a compressor row (of 2 * head_dim).
    """

    window: int
    main: int
    index_values: int
    index_scales: int
    compressor_element: int

    @classmethod
    def of(cls, config: ModelConfig, *, exact: bool = False) -> RecordSizes:
        """Sizes of the model's own records; ``exact`` keeps compressor rows in fp64 instead of fp32."""
        return cls(
            window=config.head_dim + config.head_dim // 32,
            main=config.head_dim // 2 + config.head_dim // 16,
            index_values=config.index_head_dim // 2,
            index_scales=config.index_head_dim // 32,
            compressor_element=8 if exact else 4,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRegion:
    """Where one layer's store lies inside a page.

    Attributes:
        entries: compressed entries of a page.
        values, scales, main: byte offsets of the three parts.
    """

    entries: int
    values: int
    scales: int
    main: int


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


class KVLayout:
    """Byte addresses of everything kept for a request.

    Attributes:
        page_tokens: tokens of a page.
        page_bytes: distance between pages; a multiple of 128 and of the main record.
        stores: layer -> its region in a page.
        ring_tokens: positions a window ring holds; position p lies at p mod ring_tokens.
        windows: layer -> byte offset of its ring in a slot; drafter stage s is layer num_hidden_layers + s.
        compressor_ring: positions a compressor ring holds (a power of two).
        compressors: ratio-2 store layer -> byte offset of its ring.
        lookback_ring: positions the look-back ring holds (a power of two).
        lookback: its byte offset.
        slot_bytes: size of a slot.
        encoder_window_bytes: size of the first region.
    """

    def __init__(
        self, config: ModelConfig, *, page_tokens: int = 128, max_drafts: int = 5, records: RecordSizes | None = None
    ) -> None:
        """Lay out ``config`` so that ``max_drafts`` rejected tokens overwrite nothing that is still needed.

        ``page_tokens`` must be a multiple of every compress ratio.
        """
        self.config = config
        self.records = records or RecordSizes.of(config)
        self.page_tokens = page_tokens
        size = self.records

        offset = 0
        self.stores: dict[int, StoreRegion] = {}
        for layer in config.kv_source_layer_ids:
            entries = page_tokens // config.ratio(layer)
            scales = offset + entries * size.index_values
            main = _align(scales + entries * size.index_scales, 32)
            self.stores[layer] = StoreRegion(entries=entries, values=offset, scales=scales, main=main)
            offset = _align(main + entries * size.main, 32)
        self.page_payload_bytes = offset
        self.page_bytes = _align(offset, math.lcm(128, size.main))

        self.ring_tokens = config.sliding_window + max_drafts + 1
        # A round of drafts rewrites up to max_drafts + 1 positions while one older token is still needed.
        self.compressor_ring = max(8, 1 << (max_drafts + 1).bit_length())
        self.lookback_ring = 1 << (max_drafts + config.engram_max_ngram_size).bit_length()
        ring_bytes = self.ring_tokens * size.window
        num_windows = config.num_hidden_layers + config.num_nextn_predict_layers
        self.windows = {layer: layer * ring_bytes for layer in range(num_windows)}
        self.encoder_window_bytes = config.num_encoder_layers * ring_bytes
        offset = _align(num_windows * ring_bytes, 128)
        self.compressor_row_bytes = 2 * config.head_dim * size.compressor_element
        self.compressors: dict[int, int] = {}
        for layer in config.kv_source_layer_ids:
            if config.ratio(layer) > 1:
                self.compressors[layer] = offset
                offset += self.compressor_ring * self.compressor_row_bytes
        self.lookback = offset
        self.slot_bytes = _align(offset + self.lookback_ring * LOOKBACK_BYTES, 128)

    @property
    def bytes_per_token(self) -> float:
        """Page bytes of one token of context, without padding."""
        size = self.records
        entry = size.main + size.index_values + size.index_scales
        return sum(entry / self.config.ratio(layer) for layer in self.config.kv_source_layer_ids)

    @property
    def window_bytes(self) -> int:
        """Bytes of one layer's window of one request, without room for drafts."""
        return self.config.sliding_window * self.records.window

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` of context need."""
        return -(-num_tokens // self.page_tokens)
