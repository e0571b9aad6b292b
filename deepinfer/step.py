"""What a step was asked and what it did: the words between planning and devices.

A step is one forward pass over any mix of requests.  It has two kinds of rows.  *Chunks* are tokens that the host knows: prefill,
parts of it, replay after a prefix hit and recompute after preemption differ only in numbers.  *Rounds* are decoding: a request's
anchor, which is the last token it got, and the drafts behind it.  Which tokens these are, where they stand and how many drafts
are verified only the device knows, since the step before may still run; the host knows bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PLACEHOLDER = ""
"""Request id of a chunk that belongs to nobody: one token on page 0 and slot 0, by which an idle rank takes part in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Known tokens of one request that a step computes.

    Attributes:
        request_id: whose tokens.
        slot: state slot of the request.
        start: position of the first token; everything before it is computed already, or was found in the prefix cache.
        token_ids: [num_tokens] int32, at positions start, start + 1, ….
        page_ids: [num_pages] int32 pages of the request in order, covering at least start + num_tokens tokens.
        num_image_before: image positions of the request before ``start``.
        num_logits: how many of the last tokens need logits; one more than the ``target_ids`` if a token is to be sampled.
        target_ids: tokens of the prompt whose log-probabilities are asked for: those behind the first rows that need logits.
        anchor_id: the token behind the chunk where it is known already and decoding goes on from it, as after preemption.
        history_ids: all tokens of the request known so far, in the first chunk of a request whose sampling looks back at them.
        window_floor: no window key before this position exists or is visible.
        write_floor: entries of tokens before this position are in shared pages already and must not be written again.
        decoder_floor: the decoder half runs only from this position on, and sees no window key before it.
        lookback_ids: the up to max_ngram - 1 tokens before ``start``, when ``slot`` does not remember them; else None.
        restore_from: slot whose state is copied into ``slot`` before the step, or None.
        save_to: slot that ``slot``'s state is copied to after the step, or None.
    """

    request_id: str
    slot: int
    start: int
    token_ids: npt.NDArray[np.int32]
    page_ids: npt.NDArray[np.int32]
    num_image_before: int = 0
    num_logits: int = 0
    target_ids: npt.NDArray[np.int32] | None = None
    anchor_id: int | None = None
    history_ids: npt.NDArray[np.int32] | None = None
    window_floor: int = 0
    write_floor: int = 0
    decoder_floor: int = 0
    lookback_ids: npt.NDArray[np.int32] | None = None
    restore_from: int | None = None
    save_to: int | None = None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Tokens of the prompt whose log-probabilities are asked for."""
        return 0 if self.target_ids is None else len(self.target_ids)

    @property
    def samples(self) -> bool:
        """Whether the token behind the chunk is sampled."""
        return self.num_logits > self.num_targets

    @property
    def drafts(self) -> bool:
        """Whether the token behind the chunk is known after the step, so that drafts can follow it."""
        return self.samples or self.anchor_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One request's next round of decoding: it verifies some drafts and gets one token more than are accepted.

    Attributes:
        request_id, slot: as of a chunk.
        start: least position that the anchor can have.
        max_drafts: drafts to verify at most; the device takes fewer where the request would end before, or the step's total is
            spent on others.
        page_ids: [num_pages] int32, covering max_drafts tokens behind the greatest position that the anchor can have, or all that
            the request may ever have.
        window_floor, decoder_floor: as of a chunk.
        save_to: slot that ``slot``'s state is copied to if the round computes the token before ``save_at``, or None.
        save_at: end of a page.
    """

    request_id: str
    slot: int
    start: int
    max_drafts: int
    page_ids: npt.NDArray[np.int32]
    window_floor: int = 0
    decoder_floor: int = 0
    save_to: int | None = None
    save_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass.

    Attributes:
        chunks, rounds: every request at most once among both; rows of the chunks come first.
        num_drafts: drafts to verify in all; the device spreads them over the rounds.  As many as the rounds may have at most, or
            fewer where it pays to verify only the most promising ones.
        page_copies: (from, to) pages copied before the step, for requests that diverge inside a page.
    """

    chunks: tuple[Chunk, ...]
    rounds: tuple[Round, ...] = ()
    num_drafts: int = 0
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes, rows in which a draft might have stood included."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.rounds) + self.num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """New tokens of a request: the accepted drafts and one more.

    Attributes:
        token_ids: in order.
        logprobs: log-probability of each, before penalties, temperature and truncation.
        top_token_ids, top_logprobs: for each, the most likely tokens, best first, as many as the request asked for.
        num_drafts: drafts that were verified.
        confidences: of each verified draft, that it would be accepted if those before it were.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_token_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    num_drafts: int = 0
    confidences: tuple[float, ...] = ()


_NO_CONFIDENCES: npt.NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step brought.

    Attributes:
        sampled: request id -> its new tokens, for chunks that sample and for rounds.
        prompt_logprobs: request id -> log-probabilities of its chunk's target ids.
        confidences: [num_drafting, num_drafts] float32 of the drafts made for the next round, one row for each chunk that samples
            or has an anchor and for each round, in the order of the plan; empty where nothing is drafted.
        duration_ms: time that the device spent on the step.
        num_padding_rows: rows of nobody among those that the device computed, so that a captured graph fits.
    """

    sampled: Mapping[str, Sampled]
    prompt_logprobs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    confidences: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_CONFIDENCES)
    duration_ms: float = 0.0
    num_padding_rows: int = 0
