"""What a caller is told of one token."""

from __future__ import annotations

from deepinfer.request import FinishReason, RequestOutput
from deepinfer.scheduler.request_state import RequestState
from deepinfer.step import Sampled


def record(
    state: RequestState, sampled: Sampled | None, number: int, reason: FinishReason | None, max_num_batched_tokens: int
) -> RequestOutput:
    """Record of the token ``number`` of ``sampled``, which is the last that ``state`` knows, or of an end without one.

    Args:
        reason: why the request ends with it, or None.
        max_num_batched_tokens: of the engine.
    """
    token_id = logprob = confidence = prompt_logprobs = None
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    num_drafts = num_accepted = 0
    if sampled is not None:
        token_id, logprob = sampled.token_ids[number], sampled.logprobs[number]
        top_token_ids, top_logprobs = sampled.top_token_ids[number], sampled.top_logprobs[number]
        if number < len(sampled.confidences):
            confidence = sampled.confidences[number]
        if number == 0:
            num_drafts, num_accepted = sampled.num_drafts, len(sampled.token_ids) - 1
        if state.num_output_tokens == 1 and state.request.params.prompt_logprobs:
            prompt_logprobs = tuple(state.prompt_logprobs)
    return RequestOutput(
        request_id=state.request.request_id,
        prompt_len=state.num_prompt_tokens,
        token_id=token_id,
        finished=reason is not None,
        finish_reason=reason,
        num_output_tokens=state.num_output_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        num_cached_tokens=state.num_cached_tokens,
        token_logprobs=logprob,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        draft_tok=num_drafts,
        accept_tok=num_accepted,
        confidence_score=confidence,
    )
