"""A worker without a model: instead of keys it keeps a fingerprint of the prefix for every token.

It fails if a chunk or a round would read memory that was not written for exactly this prefix, or write memory that others share.
The next token is a function of the prefix, so a request's tokens do not depend on the schedule.  The number of accepted drafts is
random unless a test sets it.  Rejected drafts leave wrong fingerprints.
"""

import random
from dataclasses import dataclass

import numpy as np

from deepinfer.step import Sampled, StepResult

WORD_IDS = 40
"""Sampled ids, the end token included, are smaller."""


def mix(value, other):
    """64-bit mixing of two numbers."""
    value = (value * 0x9E3779B97F4A7C15 + other * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & (2**64 - 1)
    value ^= value >> 29
    value = (value * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return value ^ (value >> 32)


class Sequence:
    """The true tokens of a request, which its prompt decides, and a fingerprint of each prefix."""

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
        image = self.request.image_hashes.get(self.length)
        self._print = mix(self._print, token_id + 1 if image is None else int.from_bytes(image, "little"))
        self.ids[self.length], self.prints[self.length] = token_id, self._print
        self.length += 1

    def output(self, eos_token_id):
        """Output tokens of the request."""
        generated = self.ids[len(self.request.prompt_token_ids) :].tolist()
        if eos_token_id in generated and not self.request.params.ignore_eos:
            generated = generated[: generated.index(eos_token_id) + 1]
        return generated


class MemoryWorker:
    """Pages and slots filled with fingerprints."""

    def __init__(self, layout, *, num_pages, num_slots, max_model_len, image_token_id, num_drafts=0, accept=None, seed=0):
        self.layout, self.max_model_len, self.image_token_id = layout, max_model_len, image_token_id
        self.num_drafts, self.rng = num_drafts, random.Random(seed)
        self.accept = accept or (lambda count: self.rng.choice([0, self.rng.randint(0, count), count]))
        self.window, self.lookback = layout.config.sliding_window, layout.config.engram_max_ngram_size - 1
        ring = layout.ring_tokens
        self.pages = np.zeros((num_pages, layout.page_tokens), dtype=np.uint64)
        self.ring_positions = np.full((num_slots, ring), -1, dtype=np.int64)
        self.ring_prints = np.zeros((num_slots, ring), dtype=np.uint64)
        self.ring_floors = np.zeros((num_slots, ring), dtype=np.int64)  # decoder floor that a row was computed with
        self.lookback_positions = np.full((num_slots, layout.lookback_ring), -1, dtype=np.int64)
        self.lookback_ids = np.zeros((num_slots, layout.lookback_ring), dtype=np.int32)
        self.anchors = np.full(num_slots, -1, dtype=np.int64)  # position of the last token of a slot's request
        self.owners = [None] * num_slots
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
        spans = [_Span.of_chunk(chunk) for chunk in plan.chunks if chunk.request_id]
        spans += self._rounds(plan)
        for chunk in plan.chunks:
            if chunk.request_id:
                self._check_tokens(chunk)
        for span in spans:
            self._check_reads(span)
        written = [page for span in spans for page in self._write(span)]
        assert len(set(written)) == len(written), "two chunks write one page"
        for each in (*plan.chunks, *plan.rounds):
            assert each.save_to is None or each.save_to not in {span.slot for span in spans}, "state is saved over a request"
        sampled = {}
        for chunk in plan.chunks:
            if chunk.save_to is not None:
                self._copy_slot(chunk.slot, chunk.save_to)
            if chunk.samples or chunk.anchor_id is not None:
                self.anchors[chunk.slot], self.owners[chunk.slot] = chunk.end, chunk.request_id
            if chunk.samples:
                sampled[chunk.request_id] = self._sampled(chunk.request_id, chunk.end, chunk.end + 1, 0)
        for each, span in zip(plan.rounds, spans[len(spans) - len(plan.rounds) :], strict=True):
            end = span.start + 1 + span.num_accepted
            if each.save_to is not None and span.start < each.save_at <= end:
                self._copy_slot(each.slot, each.save_to)
            self.anchors[each.slot] = end
            sampled[each.request_id] = self._sampled(each.request_id, span.start + 1, end + 1, span.end - span.start - 1)
        num_drafting = sum(chunk.samples or chunk.anchor_id is not None for chunk in plan.chunks) + len(plan.rounds)
        confidences = np.array([[self.rng.random() for _ in range(self.num_drafts)] for _ in range(num_drafting)])
        targets = {
            chunk.request_id: tuple(-float(each) for each in chunk.target_ids)
            for chunk in plan.chunks
            if chunk.target_ids is not None
        }
        top = {name: [((-int(each),), (each,)) for each in values] for name, values in targets.items()}
        return StepResult(sampled=sampled, prompt_logprobs=targets, prompt_top=top, confidences=confidences, duration_ms=1.0)

    def _rounds(self, plan):
        """Position, verified drafts and accepted drafts of each round."""
        spans = []
        left = plan.num_drafts
        assert left <= sum(each.max_drafts for each in plan.rounds)
        for number, each in enumerate(plan.rounds):
            assert self.owners[each.slot] == each.request_id, "a round goes on where its request stopped"
            start = int(self.anchors[each.slot])
            assert each.start <= start, "the anchor is within its bounds"
            sequence = self.sequences[each.request_id]
            room = max(0, sequence.length - start - 2)
            others = sum(other.max_drafts for other in plan.rounds[number + 1 :])
            count = min(each.max_drafts, self.rng.randint(max(0, left - others), min(left, each.max_drafts)))
            left -= count
            count = min(count, room)
            spans.append(_Span.of_round(each, start, count, self.accept(count)))
        return spans

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

    def _check_tokens(self, chunk):
        sequence, start = self.sequences[chunk.request_id], chunk.start
        assert (chunk.token_ids >= 0).all()
        assert (chunk.token_ids == sequence.ids[start : chunk.end]).all(), "a chunk carries its request's tokens"
        assert chunk.num_image_before == (sequence.ids[:start] == self.image_token_id).sum()
        assert chunk.anchor_id is None or chunk.anchor_id == sequence.ids[chunk.end]
        assert chunk.history_ids is None or (chunk.history_ids == sequence.ids[: len(chunk.history_ids)]).all()
        if chunk.target_ids is not None:
            first = chunk.end - chunk.num_logits + 1
            assert (chunk.target_ids == sequence.ids[first : first + len(chunk.target_ids)]).all()
        before = np.arange(max(0, start - self.lookback), start)
        if chunk.lookback_ids is not None:
            assert (chunk.lookback_ids == sequence.ids[before]).all(), "look-back ids are the tokens before the chunk"
            self._look_back(chunk.slot, before, chunk.lookback_ids)

    def _check_reads(self, span):
        sequence, start, slot = self.sequences[span.request_id], span.start, span.slot
        known = max(start, span.write_floor)
        assert (self._stored(span, known) == sequence.prints[:known]).all(), (
            f"{span.request_id}: pages before {start} hold another prefix"
        )
        first = max(span.window_floor, start - self.window + 1, 0)
        if start % 2:
            first = min(first, max(start - 1, span.window_floor))  # the pending half of a pair
        at = np.arange(first, start)
        if len(at):
            places = at % self.layout.ring_tokens
            assert (self.ring_positions[slot, places] == at).all(), f"{span.request_id}: window before {start} is missing"
            assert (self.ring_prints[slot, places] == sequence.prints[at]).all(), "the window holds another prefix"
            floors = self.ring_floors[slot, places][at >= span.decoder_floor]
            assert (floors == span.decoder_floor).all(), "the decoder half of the window began elsewhere"
        before = np.arange(max(0, start - self.lookback), start)
        places = before % self.layout.lookback_ring
        assert (self.lookback_positions[slot, places] == before).all(), "look-back is missing"
        assert (self.lookback_ids[slot, places] == sequence.ids[before]).all(), "look-back holds other tokens"

    def _stored(self, span, end):
        assert len(span.page_ids) >= self.layout.pages_for(max(span.end, end)), "pages cover the chunk"
        return self.pages[span.page_ids[: self.layout.pages_for(end)]].reshape(-1)[:end]

    def _look_back(self, slot, positions, ids):
        self.lookback_positions[slot, positions % self.layout.lookback_ring] = positions
        self.lookback_ids[slot, positions % self.layout.lookback_ring] = ids

    def _write(self, span):
        """Returns the pages written to."""
        sequence, slot, size = self.sequences[span.request_id], span.slot, self.layout.page_tokens
        self.num_rows += span.end - span.start
        at = np.arange(span.start, span.end)
        ids, prints = sequence.ids[at].copy(), sequence.prints[at].copy()
        if span.num_accepted is not None:  # rejected drafts belong to another text
            ids[1 + span.num_accepted :] = self.rng.randrange(1 << 20)
            prints[1 + span.num_accepted :] = self.rng.getrandbits(60)
        kept = slice(max(0, len(at) - self.layout.ring_tokens), None)
        self.ring_positions[slot, at[kept] % self.layout.ring_tokens] = at[kept]
        self.ring_prints[slot, at[kept] % self.layout.ring_tokens] = prints[kept]
        self.ring_floors[slot, at[kept] % self.layout.ring_tokens] = span.decoder_floor
        kept = slice(max(0, len(at) - self.layout.lookback_ring), None)
        self._look_back(slot, at[kept], ids[kept])
        new = at >= span.write_floor
        pages = span.page_ids[at[new] // size]
        self.pages[pages, at[new] % size] = prints[new]
        return set(pages.tolist())

    def _sampled(self, name, start, end, num_drafts):
        """Tokens ``start`` … ``end`` - 1."""
        count = end - start
        return Sampled(
            token_ids=tuple(self.sequences[name].ids[start:end].tolist()),
            logprobs=(-1.0,) * count,
            top_token_ids=((),) * count,
            top_logprobs=((),) * count,
            num_drafts=num_drafts,
            confidences=(0.5,) * num_drafts,
        )


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Rows of a chunk, or of a round whose position is known."""

    request_id: str
    slot: int
    start: int
    end: int
    page_ids: np.ndarray
    window_floor: int
    write_floor: int
    decoder_floor: int
    num_accepted: int | None = None

    @classmethod
    def of_chunk(cls, chunk):
        names = ("request_id", "slot", "start", "end", "page_ids", "window_floor", "write_floor", "decoder_floor")
        return cls(**{name: getattr(chunk, name) for name in names})

    @classmethod
    def of_round(cls, each, start, count, accepted):
        names = ("request_id", "slot", "page_ids", "window_floor", "decoder_floor")
        same = {name: getattr(each, name) for name in names}
        return cls(start=start, end=start + 1 + count, write_floor=0, num_accepted=accepted, **same)
