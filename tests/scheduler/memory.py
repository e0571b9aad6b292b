"""A worker without a model: it keeps what a device would keep, but of every token only a fingerprint of the prefix up to it.

A chunk is refused if anything that it would read was not written for exactly this prefix, or if it would write what others share.
The next token is a function of the prefix, so whatever the schedule, a request's tokens are the same.
"""

import numpy as np

from deepinfer.step import PENDING, Sampled, StepResult

WORD_IDS = 40
"""Sampled ids are below it, the end token among them."""


def mix(value, other):
    """64-bit mixing of two numbers."""
    value = (value * 0x9E3779B97F4A7C15 + other * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & (2**64 - 1)
    value ^= value >> 29
    value = (value * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return value ^ (value >> 32)


class Sequence:
    """What is true of a request: its tokens, which are decided by its prompt, and a fingerprint of each prefix."""

    def __init__(self, request, num_tokens_max):
        self.request = request
        self.ids = np.empty(num_tokens_max, dtype=np.int32)
        self.prints = np.empty(num_tokens_max, dtype=np.uint64)
        self.length = 0
        self._print = int.from_bytes(request.salt, "little")
        for token_id in request.prompt_token_ids:
            self._append(token_id)
        while self.length < num_tokens_max:
            self._append(self._print % WORD_IDS)

    def _append(self, token_id):
        image = self.request.images.get(self.length)
        self._print = mix(self._print, token_id + 1 if image is None else int.from_bytes(image, "little"))
        self.ids[self.length], self.prints[self.length] = token_id, self._print
        self.length += 1

    def output(self, eos_token_id):
        """Tokens that the request generates."""
        generated = self.ids[len(self.request.prompt_token_ids) :].tolist()
        if eos_token_id in generated and not self.request.params.ignore_eos:
            generated = generated[: generated.index(eos_token_id) + 1]
        return generated


class MemoryWorker:
    """Pages and slots filled with fingerprints."""

    def __init__(self, layout, *, num_pages, num_slots, max_model_len, image_token_id):
        self.layout, self.max_model_len, self.image_token_id = layout, max_model_len, image_token_id
        self.window, self.lookback = layout.config.sliding_window, layout.config.engram_max_ngram_size - 1
        ring = layout.ring_tokens
        self.pages = np.zeros((num_pages, layout.page_tokens), dtype=np.uint64)
        self.ring_positions = np.full((num_slots, ring), -1, dtype=np.int64)
        self.ring_prints = np.zeros((num_slots, ring), dtype=np.uint64)
        self.ring_floors = np.zeros((num_slots, ring), dtype=np.int64)  # decoder floor that a row was computed with
        self.lookback_positions = np.full((num_slots, layout.lookback_ring), -1, dtype=np.int64)
        self.lookback_ids = np.zeros((num_slots, layout.lookback_ring), dtype=np.int32)
        self.last_tokens = np.full(num_slots, PENDING, dtype=np.int32)
        self.sequences = {}
        self.num_rows = 0

    def add(self, request):
        length = min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len)
        self.sequences[request.request_id] = Sequence(request, length)
        return self.sequences[request.request_id]

    def run(self, plan):
        """Check and do one step."""
        for source, target in plan.page_copies:
            self.pages[target] = self.pages[source]
        for chunk in plan.chunks:
            if chunk.restore_from is not None:
                self._copy_slot(chunk.restore_from, chunk.slot)
        for chunk in plan.chunks:
            if chunk.request_id:
                self._check_reads(chunk)
        written = [page for chunk in plan.chunks if chunk.request_id for page in self._write(chunk)]
        assert len(set(written)) == len(written), "two chunks write one page"
        for chunk in plan.chunks:
            if chunk.save_to is not None:
                assert chunk.save_to not in {each.slot for each in plan.chunks}, "state is saved over a running request"
                self._copy_slot(chunk.slot, chunk.save_to)
        return StepResult(sampled={chunk.request_id: self._sample(chunk) for chunk in plan.chunks if chunk.num_logits})

    def _copy_slot(self, source, target):
        assert source != target
        for each in (
            self.ring_positions,
            self.ring_prints,
            self.ring_floors,
            self.lookback_positions,
            self.lookback_ids,
        ):
            each[target] = each[source]

    def _check_reads(self, chunk):
        sequence, start, slot = self.sequences[chunk.request_id], chunk.start, chunk.slot
        known = chunk.token_ids
        if known[-1] == PENDING:
            assert len(known) == 1, "a pending token is alone"
            assert self.last_tokens[slot] == sequence.ids[start], "the pending token was sampled in the step before"
        else:
            assert (known >= 0).all()
            assert (known == sequence.ids[start : chunk.end]).all(), "a chunk carries its request's tokens"
        assert chunk.num_image_before == (sequence.ids[:start] == self.image_token_id).sum()
        assert (self._stored(chunk, max(start, chunk.write_floor)) == sequence.prints[: max(start, chunk.write_floor)]).all(), (
            f"{chunk.request_id}: pages before {start} hold another prefix"
        )
        first = max(chunk.window_floor, start - self.window + 1, 0)
        if start % 2:
            first = min(first, max(start - 1, chunk.window_floor))  # the pending half of a pair
        at = np.arange(first, start)
        if len(at):
            places = at % self.layout.ring_tokens
            assert (self.ring_positions[slot, places] == at).all(), f"{chunk.request_id}: window before {start} is missing"
            assert (self.ring_prints[slot, places] == sequence.prints[at]).all(), "the window holds another prefix"
            floors = self.ring_floors[slot, places][at >= chunk.decoder_floor]
            assert (floors == chunk.decoder_floor).all(), "the decoder half of the window began elsewhere"
        before = np.arange(max(0, start - self.lookback), start)
        if chunk.lookback_ids is not None:
            assert (chunk.lookback_ids == sequence.ids[before]).all(), "look-back ids are the tokens before the chunk"
            self._look_back(slot, before, chunk.lookback_ids)
        places = before % self.layout.lookback_ring
        assert (self.lookback_positions[slot, places] == before).all(), "look-back is missing"
        assert (self.lookback_ids[slot, places] == sequence.ids[before]).all(), "look-back holds other tokens"

    def _stored(self, chunk, end):
        assert len(chunk.page_ids) >= self.layout.pages_for(max(chunk.end, end)), "pages cover the chunk"
        return self.pages[chunk.page_ids[: self.layout.pages_for(end)]].reshape(-1)[:end]

    def _look_back(self, slot, positions, ids):
        self.lookback_positions[slot, positions % self.layout.lookback_ring] = positions
        self.lookback_ids[slot, positions % self.layout.lookback_ring] = ids

    def _write(self, chunk):
        """Returns the pages written to."""
        sequence, slot, size = self.sequences[chunk.request_id], chunk.slot, self.layout.page_tokens
        self.num_rows += len(chunk.token_ids)
        kept = np.arange(max(chunk.start, chunk.end - self.layout.ring_tokens), chunk.end)
        self.ring_positions[slot, kept % self.layout.ring_tokens] = kept
        self.ring_prints[slot, kept % self.layout.ring_tokens] = sequence.prints[kept]
        self.ring_floors[slot, kept % self.layout.ring_tokens] = chunk.decoder_floor
        kept = kept[-self.layout.lookback_ring :]
        self._look_back(slot, kept, sequence.ids[kept])
        new = np.arange(max(chunk.start, chunk.write_floor), chunk.end)
        pages = chunk.page_ids[new // size]
        self.pages[pages, new % size] = sequence.prints[new]
        return set(pages.tolist())

    def _sample(self, chunk):
        sequence = self.sequences[chunk.request_id]
        token_id = int(sequence.ids[chunk.end])
        self.last_tokens[chunk.slot] = token_id
        return Sampled(token_id=token_id, logprob=-1.0)
