"""Small models with hashed weights, test backends that record values, and requests that run in any order."""

import functools
import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch

from deepinfer.config import named_config
from deepinfer.kv.cache import KVCache
from deepinfer.kv.layout import KVLayout, RecordSizes
from deepinfer.model.checkpoint.random_weights import hashed_tensors
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import StepInputs
from deepinfer.ops import attention, moe, norm, op, quant
from deepinfer.ops.sampling import lay_out_rounds
from deepinfer.step import Chunk, StepPlan

PAGE_TOKENS = 16
"""Tokens of a page: few, so that short contexts have several pages."""
CPU = torch.device("cpu")


@functools.cache
def weights(name):
    return dict(hashed_tensors(named_config(name)))


def model(name, device=CPU, *, exact):
    """The network ``name`` (golden or nano) with hashed weights, packed by the bound backend.

    Compressed ids are ids modulo the compressed vocabulary.
    """
    return _model(name, device, exact, op.bound())


@functools.cache
def _model(name, device, exact, backend):
    assert backend == op.bound()
    config = named_config(name)
    compression = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    return Flash(config, weights(name), compression, device=device, exact=exact)


def new_cache(network, *, num_pages, num_slots, records=None):
    records = records or RecordSizes.of(network.config, exact=network.dtype == torch.float64)
    layout = KVLayout(network.config, page_tokens=PAGE_TOKENS, records=records)
    return KVCache(layout, num_pages=num_pages, num_slots=num_slots, device=network.device)


def fill_with_garbage(cache, rng):
    """Fill all memory that requests read or write with random bytes, among them every NaN of every format."""
    layout = cache.layout
    views = [cache.lookback()]
    for layer in layout.stores:
        store = cache.index(layer)
        views += [cache.main(layer), store.values, store.scales]
    views += [cache.window(layer) for layer in layout.windows]
    views += [cache.compressor(layer) for layer in layout.compressors]
    for view in views:
        noise = torch.from_numpy(rng.integers(0, 256, view.numel() * view.element_size(), dtype=np.uint8))
        view.copy_(noise.view(view.dtype).view(view.shape))


# ------------------------------------------------------------------------------------------------------------ test backends


@contextmanager
def bound(bodies):
    """Bind a backend that consists of ``bodies`` (operator -> body) and of the bound backend for all other operators."""
    before = op.bound()
    for each in op.registered().values():
        each.implement("test")(bodies.get(each, each.implementations[before]))
    op.bind("test")
    try:
        yield
    finally:
        op.bind(before)
        for each in op.registered().values():
            del each.implementations["test"]


def rows_of(starts, lens, token_ids, num_rows):
    """Rows of rounds that verify ``lens`` drafts; confidences and budget do not reduce them."""
    confidences = torch.zeros(len(starts), token_ids.shape[1] - 1)
    return lay_out_rounds(confidences, token_ids.numel(), lens, starts, token_ids, num_rows)


def recording(operators, calls):
    """Bodies that append (arguments, result) to ``calls[operator]`` and compute the reference."""

    def body_of(operator):
        def body(*args):
            result = operator.reference(*args)
            calls.setdefault(operator, []).append((args, result))
            return result

        return body

    return {operator: body_of(operator) for operator in operators}


def measuring(seen):
    """Bodies that append the streams of each sublayer to ``seen`` and compute the reference."""

    def pre(streams, *others):
        seen.append(streams)
        return norm.mhc_pre.reference(streams, *others)

    def mix(*arguments):
        result = norm.mhc_mix.reference(*arguments)
        seen.append(result[0])
        return result

    return {norm.mhc_pre: pre, norm.mhc_mix: mix}


def _to_bytes(x):
    return x.contiguous().view(torch.uint8)


def _from_bytes(records, width, dtype):
    return records.contiguous().view(torch.float64)


_AS_THEY_ARE = {
    **dict.fromkeys(("round_mxfp8", "round_mxfp4"), lambda x: x),
    **dict.fromkeys(("encode_window", "encode_main", "encode_index"), _to_bytes),
    **dict.fromkeys(("decode_window", "decode_main", "decode_index"), _from_bytes),
}


@contextmanager
def unquantised():
    """Do not quantise activations, queries and cache records; weights stay quantised."""
    with ExitStack() as stack:
        for family, (name, function) in itertools.product((quant, norm, attention, moe), _AS_THEY_ARE.items()):
            if hasattr(family, name):
                stack.enter_context(mock.patch.object(family, name, function))
        yield


def unquantised_records(config):
    """Sizes of records that hold fp64 numbers."""
    width = config.head_dim * 8
    return RecordSizes(window=width, main=width, index_values=config.index_head_dim * 8, index_scales=0, compressor_element=8)


# ----------------------------------------------------------------------------------------------------------------- requests


class Prompt:
    """Token ids and the embeddings of their image positions."""

    def __init__(self, token_ids, image_features=None):
        self.token_ids = np.asarray(token_ids, dtype=np.int32)
        self.image_features = image_features

    def __len__(self):
        return len(self.token_ids)


def text(network, rng, length):
    """Random text; no image positions."""
    config = network.config
    ids = rng.integers(0, config.vocab_size - 1, length)
    return Prompt(np.where(ids == config.image_token_id, 0, ids))


def text_with_images(network, rng, length):
    """Random text in which spans of random lengths are images."""
    ids = text(network, rng, length).token_ids
    end = 0
    while end < length:
        first = end + int(rng.integers(0, 12))
        end = first + int(rng.integers(1, 12))
        ids[first:end] = network.config.image_token_id
    count = int((ids == network.config.image_token_id).sum())
    features = torch.from_numpy(rng.standard_normal((count, network.config.hidden_size)))
    return Prompt(ids, features.to(network.device, network.dtype))


class Batch:
    """Requests on one cache; each step computes a given number of tokens of each."""

    def __init__(self, network, cache, rng=None):
        """With ``rng``, pages and slots are taken in random order; else in order."""
        self.network = network
        self.cache = cache
        shuffled = np.arange if rng is None else lambda first, last: rng.permutation(np.arange(first, last))
        self._pages = list(shuffled(1, cache.num_pages))
        self._slots = list(shuffled(1, cache.num_slots))
        self._held = {}
        self.done = {}
        self.logits = {}
        self.aux = {}

    def add(self, name, prompt):
        pages = [self._pages.pop(0) for _ in range(self.cache.layout.pages_for(len(prompt)))]
        self._held[name] = prompt, self._slots.pop(0), pages
        self.done[name] = 0
        self.logits[name] = []
        self.aux[name] = []

    def remove(self, name):
        """Release a request's memory, not cleared; returns the logits of all its positions.  ``aux`` is kept, step by step."""
        _, slot, pages = self._held.pop(name)
        self._pages += pages
        self._slots.append(slot)
        del self.done[name]
        return torch.cat(self.logits.pop(name))

    def slot(self, name):
        return int(self._held[name][1])

    def left(self, name):
        return len(self._held[name][0]) - self.done[name]

    def step(self, counts):
        """Compute the next tokens: request -> number of tokens, in the order of their rows."""
        image_token_id = self.network.config.image_token_id
        chunks, features = [], {}
        for name, count in counts.items():
            prompt, slot, pages = self._held[name]
            start, end = self.done[name], self.done[name] + count
            chunks.append(
                Chunk(
                    request_id=name,
                    slot=int(slot),
                    start=start,
                    token_ids=prompt.token_ids[start:end],
                    page_ids=tuple(map(int, pages[: self.cache.layout.pages_for(end)])),
                    num_image_before=int((prompt.token_ids[:start] == image_token_id).sum()),
                    num_logits=count,
                )
            )
            features[name] = prompt.image_features
            self.done[name] = end
        inputs = StepInputs.build(
            StepPlan(chunks=tuple(chunks)),
            config=self.network.config,
            layout=self.cache.layout,
            device=self.network.device,
            image_features=features,
        )
        outputs = self.network.run(inputs, self.cache)
        logits, sizes = self.network.logits(outputs.hidden), list(counts.values())
        for name, part, aux in zip(counts, logits.split(sizes), outputs.aux.split(sizes), strict=True):
            self.logits[name].append(part)
            self.aux[name].append(aux)


def whole(network, prompt):
    """Logits of all positions [num_tokens, vocab_size], in one step, alone, on clean memory."""
    return in_chunks(network, prompt, [len(prompt)])


def in_chunks(network, prompt, sizes):
    """The same in steps of ``sizes`` tokens."""
    batch = Batch(network, new_cache(network, num_pages=2 + len(prompt) // PAGE_TOKENS, num_slots=2))
    batch.add("alone", prompt)
    for size in sizes:
        batch.step({"alone": size})
    return batch.remove("alone")


def ragged(rng, length, largest):
    """Random chunk sizes that sum up to ``length``."""
    sizes = []
    while length:
        sizes.append(min(length, int(rng.integers(1, largest + 1))))
        length -= sizes[-1]
    return sizes
