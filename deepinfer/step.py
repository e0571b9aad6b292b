"""The plan and the result of a step: the values between the scheduler and the executor.

A step is one forward pass over any mix of requests.  It has two kinds of rows.  *Chunks* are tokens that the host knows: whole
prefills, parts of prefills, replays after a prefix hit and recomputation after preemption differ only in numbers.  *Rounds* are
decoding: the anchor of a request, which is its last token, and the drafts after the anchor.  Only the device knows the tokens,
the positions and the numbers of verified drafts of rounds, because the step before may still run.  The host knows bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PLACEHOLDER = ""
"""Request id of padding: rounds in slot 0 and page 0, and the chunk of one token by which an idle rank takes part in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Known tokens of one request that a step computes.

    Attributes:
        request_id: request of the tokens.
        slot: state slot of the request.
        start: position of the first token; all tokens before it are computed, or were found in the prefix cache.
        token_ids: [num_tokens] int32, at positions start, start + 1, ….
        page_ids: [num_pages] int32, pages of the request in order, for at least start + num_tokens tokens.
        num_image_before: image positions of the request before ``start``.
        num_logits: number of last tokens that need logits: the number of ``target_ids``, plus one if a token is sampled.
        target_ids: prompt tokens whose log-probabilities the request asks for.  The first tokens with logits predict them.
        anchor_id: the token after the chunk if it is known and decoding continues from it, as after preemption; else None.
        history_ids: all known tokens of the request, in its first chunk, if its sampling depends on earlier tokens; else None.
        window_floor: no window key before this position exists or is visible.
        write_floor: entries of tokens before this position are in shared pages already and must not be written again.
        decoder_floor: the decoder half runs only from this position on, and sees no window key before it.
        lookback_ids: the up to max_ngram - 1 tokens before ``start`` if ``slot`` does not hold them; else None.
        restore_from: slot whose state is copied into ``slot`` before the step, or None.
        save_to: slot that the state of ``slot`` is copied to after the step, or None.
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
        """Prompt tokens whose log-probabilities the request asks for."""
        return 0 if self.target_ids is None else len(self.target_ids)

    @property
    def samples(self) -> bool:
        """Whether the token after the chunk is sampled."""
        return self.num_logits > self.num_targets

    @property
    def drafts(self) -> bool:
        """Whether the token after the chunk is known after the step, so that drafts can follow it."""
        return self.samples or self.anchor_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One request's next round of decoding: it verifies drafts and decides one token more than it accepts.

    Attributes:
        request_id, slot: as in :class:`Chunk`.
        start: least position that the anchor can have.
        max_drafts: most drafts to verify.  The device takes fewer if the request would end earlier, or if other rounds use up the
            step's ``num_drafts``.
        page_ids: [num_pages] int32, for max_drafts tokens after the greatest position that the anchor can have, or for all tokens
            that the request can have.
        window_floor, decoder_floor: as in :class:`Chunk`.
        save_to: slot that the state of ``slot`` is copied to if the round computes the token before ``save_at``, or None.
        save_at: position of the end of a page.
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
        chunks, rounds: each request is at most once in both together; rows of chunks come first.
        num_drafts: drafts to verify in all rounds; the device distributes them.  At most the sum of ``max_drafts``; fewer if only
            the most confident drafts are worth their time.
        page_copies: (from, to) pages that are copied before the step, for requests that diverge inside a page.
    """

    chunks: tuple[Chunk, ...]
    rounds: tuple[Round, ...] = ()
    num_drafts: int = 0
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the step, including rows for drafts that the device may leave unused."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.rounds) + self.num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """New tokens of a request: the accepted drafts and one more.

    Attributes:
        token_ids: the tokens in order.
        logprobs: log-probability of each token, before penalties, temperature and truncation.
        top_token_ids, top_logprobs: for each token, the most likely tokens, best first; ``top_logprobs`` of the request gives
            their number.
        num_drafts: verified drafts.
        confidences: for each verified draft, the predicted probability of its acceptance if all drafts before it are accepted.
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
    """Tokens and measurements of a step.

    Attributes:
        sampled: request id -> its new tokens, for chunks that sample and for rounds.
        prompt_logprobs: request id -> log-probabilities of its chunk's target ids.
        prompt_top: request id -> for each of these target ids, the most likely tokens, best first, and their log-probabilities;
            only for requests with ``top_logprobs``.
        confidences: [num_drafting, num_drafts] float32 of the drafts for the next round.  The requests are those of chunks that
            sample or have an anchor, and of rounds, in the order of the plan.  Empty without drafts.
        duration_ms: device time of the step.
        mask_ms: time that a host thread computed grammar masks for the step; 0 without grammars.
        mask_wait_ms: time that the decision of the step waited for these masks.
        failures: request id -> why the request cannot follow its grammar; its tokens of this step are void.
        num_padding_rows: padding rows that the device computed, so that a captured graph fits.
    """

    sampled: Mapping[str, Sampled]
    prompt_logprobs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    prompt_top: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[float, ...]]]] = field(default_factory=dict)
    confidences: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_CONFIDENCES)
    duration_ms: float = 0.0
    num_padding_rows: int = 0
    mask_ms: float = 0.0
    mask_wait_ms: float = 0.0
    failures: Mapping[str, str] = field(default_factory=dict)
