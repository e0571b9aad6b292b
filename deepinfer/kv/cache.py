"""Device tensors of pages and slots: two byte buffers and typed views into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kv.layout import KVLayout
from deepinfer.ops.attention import IndexStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContent:
    """Bytes of some pages and slots, outside the cache.

    Attributes:
        pages: [num_pages, page_bytes] uint8.
        states: [num_slots, slot_bytes] uint8.
    """

    pages: Tensor
    states: Tensor


class KVCache:
    """All KV memory of one rank.

    Buffers start as zeros, so that a read before the first write gives finite numbers.

    Attributes:
        layout: byte addresses.
        num_pages, num_slots: including page 0 and slot 0.
    """

    def __init__(self, layout: KVLayout, *, num_pages: int, num_slots: int, device: torch.device) -> None:
        """Allocate num_pages * page_bytes + num_slots * slot_bytes on ``device``."""
        self.layout = layout
        self.num_pages = num_pages
        self.num_slots = num_slots
        self._pages = torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8, device=device)
        self._states = torch.zeros(num_slots * layout.slot_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return self._pages.numel() + self._states.numel()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to) each, in order."""
        for source, target in pairs:
            self._rows(self._pages, self.layout.page_bytes)[target] = self._rows(self._pages, self.layout.page_bytes)[source]

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, (from, to) each, in order."""
        for source, target in pairs:
            self._rows(self._states, self.layout.slot_bytes)[target] = self._rows(self._states, self.layout.slot_bytes)[source]

    def copy_slots_on_device(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole slots that only the device knows: [n] int64 each; a target may be named twice only if it is slot 0."""
        rows = self._rows(self._states, self.layout.slot_bytes)
        rows[targets] = rows[sources]

    def read(self, page_ids: Tensor, slots: Tensor) -> CacheContent:
        """Gather whole pages and slots into new tensors on the device; [n] and [m] int64 on the device."""
        pages = self._rows(self._pages, self.layout.page_bytes)[page_ids]
        return CacheContent(pages=pages, states=self._rows(self._states, self.layout.slot_bytes)[slots])

    def write(self, content: CacheContent, page_ids: Tensor, slots: Tensor) -> None:
        """Overwrite whole pages and slots, all different, with ``content`` on the device; [n] and [m] int64 on the device."""
        self._rows(self._pages, self.layout.page_bytes).index_copy_(0, page_ids, content.pages)
        self._rows(self._states, self.layout.slot_bytes).index_copy_(0, slots, content.states)

    @staticmethod
    def _rows(buffer: Tensor, row_bytes: int) -> Tensor:
        return buffer.view(-1, row_bytes)

    def _page_view(self, entries: int, record: int, offset: int) -> Tensor:
        return self._pages.as_strided((self.num_pages, entries, record), (self.layout.page_bytes, record, 1), offset)

    def main(self, layer: int) -> Tensor:
        """Compressed entries of a store: [num_pages, page_entries, main record bytes] uint8."""
        region = self.layout.stores[layer]
        return self._page_view(region.entries, self.layout.records.main, region.main)

    def index(self, layer: int) -> IndexStore:
        """Index keys of a store."""
        region, size = self.layout.stores[layer], self.layout.records
        return IndexStore(
            values=self._page_view(region.entries, size.index_values, region.values),
            scales=self._page_view(region.entries, size.index_scales, region.scales),
            ratio=self.layout.config.ratio(layer),
            head_dim=self.layout.config.index_head_dim,
        )

    def window(self, layer: int) -> Tensor:
        """Window rings of a layer: [num_slots, ring_tokens, window record bytes] uint8."""
        layout, record = self.layout, self.layout.records.window
        shape = (self.num_slots, layout.ring_tokens, record)
        return self._states.as_strided(shape, (layout.slot_bytes, record, 1), layout.windows[layer])

    def compressor(self, layer: int) -> Tensor:
        """Raw compressor rows of a ratio-2 store: [num_slots, compressor_ring, 2 * head_dim] fp32 (fp64 in the exact regime)."""
        layout = self.layout
        element = layout.records.compressor_element
        typed = self._states.view(torch.float64 if element == 8 else torch.float32)
        width = layout.compressor_row_bytes // element
        shape = (self.num_slots, layout.compressor_ring, width)
        return typed.as_strided(shape, (layout.slot_bytes // element, width, 1), layout.compressors[layer] // element)

    def lookback(self) -> Tensor:
        """Compressed ids of the last positions: [num_slots, lookback_ring] int32."""
        layout = self.layout
        typed = self._states.view(torch.int32)
        return typed.as_strided((self.num_slots, layout.lookback_ring), (layout.slot_bytes // 4, 1), layout.lookback // 4)
