"""Byte addresses of everything kept for a request."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config import named_config
from deepinfer.kv.layout import LOOKBACK_BYTES, KVLayout, RecordSizes

FULL = named_config("full")


def regions_of_a_page(layout):
    """(offset, size) of every part of a page."""
    size = layout.records
    for store in layout.stores.values():
        yield store.values, store.entries * size.index_values
        yield store.scales, store.entries * size.index_scales
        yield store.main, store.entries * size.main


def regions_of_a_slot(layout):
    """(offset, size) of every ring of a slot."""
    for offset in layout.windows.values():
        yield offset, layout.ring_tokens * layout.records.window
    for offset in layout.compressors.values():
        yield offset, layout.compressor_ring * layout.compressor_row_bytes
    yield layout.lookback, layout.lookback_ring * LOOKBACK_BYTES


def is_disjoint(regions, limit):
    ordered = sorted(region for region in regions if region[1])
    gaps = [after - (offset + size) for (offset, size), (after, _) in itertools.pairwise([*ordered, (limit, 0)])]
    return ordered[0][0] >= 0 and min(gaps) >= 0


def test_records_of_the_full_model():
    records = RecordSizes.of(FULL)
    assert records.window == 528
    assert records.main == 288
    assert records.index_values + records.index_scales == 68
    assert KVLayout(FULL).compressor_row_bytes == 4096


def test_a_token_of_context_takes_890_bytes():
    assert KVLayout(FULL).bytes_per_token == 890


def test_window_of_a_layer():
    assert KVLayout(FULL).window_bytes == 528 * 128


def test_page_of_128_tokens():
    layout = KVLayout(FULL, page_tokens=128)
    assert layout.page_payload_bytes == 890 * 128 == 113_920
    assert layout.page_bytes == 114_048


def test_slot_with_five_drafts():
    layout = KVLayout(FULL, max_drafts=5)
    assert layout.ring_tokens == 134
    assert layout.encoder_window_bytes == 1_415_040
    assert layout.compressor_ring == 8
    assert len(layout.windows) == 43


def test_encoder_windows_come_first_and_without_gaps():
    layout = KVLayout(FULL)
    ring_bytes = layout.ring_tokens * layout.records.window
    assert [layout.windows[layer] for layer in range(FULL.num_encoder_layers + 1)] == [
        layer * ring_bytes for layer in range(FULL.num_encoder_layers + 1)
    ]
    assert layout.windows[FULL.num_encoder_layers] == layout.encoder_window_bytes


def test_exact_records_differ_in_compressor_rows_only():
    plain, exact = RecordSizes.of(FULL), RecordSizes.of(FULL, exact=True)
    assert exact == dataclasses.replace(plain, compressor_element=8)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2), (1 << 20, 8192)])
def test_pages_for_tokens(num_tokens, pages):
    assert KVLayout(FULL).pages_for(num_tokens) == pages


@given(
    name=st.sampled_from(["golden", "random", "full"]),
    half_page=st.integers(1, 200),
    max_drafts=st.integers(0, 20),
    wide=st.booleans(),
    sliding_window=st.integers(1, 300),
)
def test_regions_never_overlap(name, half_page, max_drafts, wide, sliding_window):
    config = dataclasses.replace(named_config(name), sliding_window=sliding_window)
    width = 8 * config.head_dim
    raw = RecordSizes(window=width, main=width, index_values=8 * config.index_head_dim, index_scales=0, compressor_element=8)
    layout = KVLayout(config, page_tokens=2 * half_page, max_drafts=max_drafts, records=raw if wide else None)
    assert is_disjoint(regions_of_a_page(layout), layout.page_payload_bytes)
    assert layout.page_payload_bytes <= layout.page_bytes
    assert layout.page_bytes % 128 == layout.page_bytes % layout.records.main == 0
    assert is_disjoint(regions_of_a_slot(layout), layout.slot_bytes)


@given(st.integers(0, 40))
def test_typed_regions_are_aligned(max_drafts):
    for exact in (False, True):
        layout = KVLayout(FULL, max_drafts=max_drafts, records=RecordSizes.of(FULL, exact=exact))
        element = layout.records.compressor_element
        offsets = [*layout.compressors.values(), layout.slot_bytes, layout.compressor_row_bytes]
        assert all(offset % element == 0 for offset in offsets)
        assert layout.lookback % LOOKBACK_BYTES == 0


@given(st.integers(0, 40))
def test_rings_hold_what_is_looked_back_on_and_every_position_that_drafts_rewrite(max_drafts):
    layout = KVLayout(FULL, max_drafts=max_drafts)
    rewritten = max_drafts + 1
    assert layout.ring_tokens >= FULL.sliding_window - 1 + rewritten
    assert layout.compressor_ring >= 1 + rewritten
    assert layout.lookback_ring >= FULL.engram_max_ngram_size - 1 + rewritten
    for ring in (layout.compressor_ring, layout.lookback_ring):
        assert ring & (ring - 1) == 0


def test_only_stores_that_pool_tokens_have_compressor_rings():
    assert list(KVLayout(FULL).compressors) == [2, 8, 14]
    assert [store.entries for store in KVLayout(FULL).stores.values()] == [64, 64, 64, 128]


def test_larger_pages_of_any_ratio_hold_as_many_tokens():
    for half_page, layer in itertools.product((1, 8, 64), FULL.kv_source_layer_ids):
        layout = KVLayout(FULL, page_tokens=2 * half_page)
        assert layout.stores[layer].entries * FULL.ratio(layer) == 2 * half_page
