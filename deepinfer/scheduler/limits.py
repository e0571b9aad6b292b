"""What a scheduler may spend, and which requests fit into that."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import ContextTooLong, RequestError, shown
from deepinfer.kv.manager import KVManager
from deepinfer.request import Request

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler may spend.

    Attributes:
        max_model_len: prompt plus output tokens of one request.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step.
        eos_token_id: ends a request that does not ignore it.
        image_token_id: marks image positions.
        chunked_prefill: whether a prompt may be cut to the token budget of a step; False requires that every prompt fits into one
            step.
        stop_preempted_request: end a preempted request instead of computing it again.
        max_sum_keys: most keys, summed over the prompts of a step.  The first prompt of a step is exempt.
        decoder_keep_tokens: last tokens of a prompt that the decoder half runs over; 0 for all.
        save_states: save a request's state at page boundaries, and end a chunk at the last page boundary of its prompt.
        num_drafts: most drafts that a round verifies.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_id: int
    image_token_id: int
    chunked_prefill: bool = True
    stop_preempted_request: bool = False
    max_sum_keys: int = NO_LIMIT
    decoder_keep_tokens: int = 0
    save_states: bool = True
    num_drafts: int = 0

    def num_tokens_max(self, request: Request) -> int:
        """Tokens that a request ends with at the latest, prompt included."""
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len)

    def check(self, request: Request, kv: KVManager) -> None:
        """Check that ``request`` can be served alone with the memory of ``kv``.

        Raises:
            RequestError: the prompt or the id is empty, a checkpoint is not a page boundary of the prompt, the request has ended
                already, or it needs more pages than there are.
            ContextTooLong: the prompt leaves no room for a token, or does not fit into a step and may not be cut.
        """
        num_prompt, page_tokens = len(request.prompt_token_ids), kv.layout.page_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if not request.request_id:
            raise RequestError("the request id is empty; choose another")
        if num_prompt >= self.max_model_len:
            raise ContextTooLong(
                f"prompt of {num_prompt} tokens leaves no room for output in the context limit of {self.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        if not self.chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise ContextTooLong(
                f"prompt of {num_prompt} tokens exceeds the {self.max_num_batched_tokens} of a step and may not be cut; "
                "shorten the prompt, raise max_num_batched_tokens or turn chunked_prefill on"
            )
        for position in request.checkpoints:
            if position % page_tokens or not 0 < position <= num_prompt:
                raise RequestError(
                    f"checkpoint {position} is not a multiple of {page_tokens} inside the prompt of {num_prompt} tokens; "
                    "state can be saved at ends of pages only"
                )
        self._check_output(request)
        needed = kv.layout.pages_for(self.num_tokens_max(request))
        if needed > kv.num_pages:
            raise RequestError(
                f"the request may need {needed} pages of {page_tokens} tokens, the pool has {kv.num_pages}; "
                "lower max_tokens, shorten the prompt or give the engine more memory"
            )

    def _check_output(self, request: Request) -> None:
        """Check that the output tokens that a request begins with leave something to generate."""
        output, params = request.output_token_ids, request.params
        left = self.num_tokens_max(request) - len(request.prompt_token_ids) - len(output)
        if left < 1:
            raise RequestError(
                f"the request begins with {len(output)} output tokens, and max_tokens={params.max_tokens} with the context limit "
                f"of {self.max_model_len} leaves none to generate; give fewer, or raise max_tokens"
            )
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {self.eos_token_id})
        for position, token_id in enumerate(output):
            if token_id in ends:
                raise RequestError(
                    f"output token {position} is {shown(token_id)}, which ends the request; give the tokens before it"
                )
