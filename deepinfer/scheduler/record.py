"""Output tokens of a request, and the records that callers get of them."""

from __future__ import annotations

from deepinfer.request import FinishReason, RequestOutput
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.request_state import RequestState
from deepinfer.step import Sampled


def record(
    state: RequestState,
    sampled: Sampled | None,
    number: int,
    reason: FinishReason | None,
    max_num_batched_tokens: int,
    message: str | None = None,
) -> RequestOutput:
    """Record of the last token of ``state``, or of an end without a token.

    Args:
        sampled: tokens of the step; None for an end without a token.
        number: which of them is the last token of ``state``.
        reason: why the request ends with this record, or None.
        max_num_batched_tokens: token budget of the engine.
        message: why the request ends, if its grammar ends it.
    """
    token_id = logprob = confidence = prompt_logprobs = prompt_top_ids = prompt_top_logprobs = None
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
            if state.request.params.top_logprobs:
                prompt_top_ids, prompt_top_logprobs = zip(*state.prompt_top, strict=True)
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
        prompt_top_token_ids=prompt_top_ids,
        prompt_top_logprobs=prompt_top_logprobs,
        draft_tok=num_drafts,
        accept_tok=num_accepted,
        confidence_score=confidence,
        message=message,
    )


def take_tokens(state: RequestState, sampled: Sampled, limits: Limits) -> list[RequestOutput]:
    """Append sampled tokens up to the first that ends the request; returns their records."""
    params, outputs = state.request.params, []
    for number, token_id in enumerate(sampled.token_ids):
        state.token_ids[state.num_tokens] = token_id
        state.num_tokens += 1
        reason = None
        if (token_id == limits.eos_token_id and not params.ignore_eos) or token_id in state.stop_token_ids:
            reason = FinishReason.STOP
        elif state.num_tokens == state.num_tokens_max:
            reason = FinishReason.LENGTH
        outputs.append(record(state, sampled, number, reason, limits.max_num_batched_tokens))
        if reason is not None:
            break
    return outputs
