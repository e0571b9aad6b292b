"""What a step was asked and what it did: the words between planning and devices.

A step is one forward pass over any mix of requests.  Prefill, chunks of it, decode, replay after a prefix hit and recompute after
preemption differ only in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PENDING = -1
"""In a chunk's ``token_ids``: the token that the step before sampled for the same request, known on the device only."""

PLACEHOLDER = ""
"""Request id of a chunk that belongs to nobody: one token on page 0 and slot 0, by which an idle rank takes part in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of one request that a step computes.

    Attributes:
        request_id: whose tokens.
        slot: state slot of the request.
        start: position of the first token; everything before it is computed already, or was found in the prefix cache.
        token_ids: [num_tokens] int32, at positions start, start + 1, …; the last may be :data:`PENDING`.
        page_ids: [num_pages] int32 pages of the request in order, covering at least start + num_tokens tokens.
        num_image_before: image positions of the request before ``start``.
        num_logits: how many of the last tokens need logits.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass.

    Attributes:
        chunks: in the order of their rows; every request at most once.
        page_copies: (from, to) pages copied before the step, for requests that diverge inside a page.
    """

    chunks: tuple[Chunk, ...]
    page_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One new token of a request.

    Attributes:
        token_id: chosen token.
        logprob: its log-probability before temperature and truncation.
        top_token_ids, top_logprobs: the most likely tokens, best first, as many as the request asked for.
    """

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step brought: request id -> its new token, for the chunks that asked for logits."""

    sampled: dict[str, Sampled]
