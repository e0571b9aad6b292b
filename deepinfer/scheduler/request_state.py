"""One unfinished request as the scheduler sees it: its tokens, how many of them are computed, and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.kv.manager import Holding
from deepinfer.kv.prefix import PageChain
from deepinfer.request import Request


@dataclass(slots=True, kw_only=True)
class Saving:
    """A state that some rounds in flight save if they reach the end of a page.

    Attributes:
        slot: where the state is saved.
        position: end of the page.
        num_in_flight: rounds or chunks in flight that may reach the position.
        is_done: whether the position was reached and the state can be found.
    """

    slot: int
    position: int
    num_in_flight: int = 0
    is_done: bool = False


class RequestState:
    """A request between :meth:`Scheduler.add` and its end.

    Three lengths in tokens say how far the request is.  ``num_computed_tokens`` tokens are computed for certain.  After the steps
    in flight, at least ``num_planned_tokens`` tokens are computed.  ``num_tokens`` tokens are known.  ``num_sampling`` chunks and
    rounds in flight sample, and each adds at least one token.  The rounds among them add up to ``num_drafts_in_flight`` tokens
    more.

    Invariant: num_computed_tokens <= num_planned_tokens <= num_tokens + num_sampling <= num_tokens_max.

    Attributes:
        request: the request as it was given.
        arrival: rank by time of arrival, unique.
        num_prompt_tokens: tokens of the prompt.
        num_tokens_max: tokens at the latest end, prompt included.
        token_ids: [num_tokens_max] int32; the first ``num_tokens`` are known.
        stop_token_ids: tokens that end the request, beside the end token.
        has_images: whether the prompt has image positions.
        decoder_floor: see :class:`~deepinfer.step.Chunk`; it never changes.
        chain: keys of the request's pages.
        is_schedulable: whether the inputs are ready.
        is_resumed: whether the request was preempted, or began with output tokens.  Its state must then be rebuilt bit for bit.
        num_overtaken: branches that passed the request while it was the head of the queue.
        parent: the request to branch from and the generation of that request, or None.
        generation: goes up whenever the steps in flight become void.
        holding: pages and slot, or None while the request does not run.
        slot: of the holding; without meaning if there is none.

    Steps in flight:
        num_computed_tokens, num_planned_tokens, num_tokens, num_sampling: as above.
        num_drafts_in_flight: drafts that the rounds in flight may accept.
        num_in_flight: chunks and rounds that are planned and not committed.
        num_images_planned: image positions among the planned tokens.

    Only while the request runs:
        num_prefill_tokens: tokens that were known at admission, without the last one if that is an output token.  After them the
            request decodes.
        num_written_tokens: positions that its slot may hold after the steps in flight, positions of rejected drafts included.
        num_room_tokens: tokens that its pages can take.
        num_published_tokens: page boundary up to which its pages can be found.
        stops: positions at which a chunk of the prefill must end.
        resend_position: page boundary at which the same prompt, sent again, finds a state; 0 for none.
        saving: where the rounds in flight save state, or None.
        prompt_logprobs: log-probabilities of the first tokens of the prompt, if the request asked for them.
        prompt_top: for each of these tokens, the most likely tokens and their log-probabilities, if the request asked for them.
        window_floor, write_floor: see :class:`~deepinfer.step.Chunk`.

    For records:
        num_cached_tokens: tokens that the first admission did not have to compute.
    """

    __slots__ = (
        "_has_prompt_logprobs",
        "_image_token_id",
        "arrival",
        "chain",
        "decoder_floor",
        "generation",
        "has_images",
        "holding",
        "is_resumed",
        "is_schedulable",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_images_planned",
        "num_in_flight",
        "num_overtaken",
        "num_planned_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_published_tokens",
        "num_room_tokens",
        "num_sampling",
        "num_tokens",
        "num_tokens_max",
        "num_written_tokens",
        "parent",
        "prompt_logprobs",
        "prompt_top",
        "request",
        "resend_position",
        "saving",
        "slot",
        "stop_token_ids",
        "stops",
        "token_ids",
        "window_floor",
        "write_floor",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        num_tokens_max: int,
        decoder_floor: int,
        page_tokens: int,
        image_token_id: int,
        has_prompt_logprobs: bool,
    ) -> None:
        """Start with nothing computed.  Output tokens that the request begins with count as generated."""
        self._image_token_id = image_token_id
        self._has_prompt_logprobs = has_prompt_logprobs
        self.request = request
        self.arrival = arrival
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(request.output_token_ids)
        self.num_tokens_max = num_tokens_max
        self.token_ids: npt.NDArray[np.int32] = np.empty(num_tokens_max, dtype=np.int32)
        self.token_ids[: self.num_tokens] = request.prompt_token_ids + request.output_token_ids
        self.has_images = bool((self.token_ids[: self.num_prompt_tokens] == image_token_id).any())
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        self.decoder_floor = decoder_floor
        self.chain = PageChain(page_tokens, request.salt)
        self.is_schedulable = True
        self.is_resumed = bool(request.output_token_ids)
        self.parent: tuple[RequestState, int] | None = None
        self.generation = 0
        self.num_cached_tokens = 0
        self.num_overtaken = 0
        self.slot = 0
        self.vacate()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt are still to be reported.  The first output token reports them."""
        return self._has_prompt_logprobs and self.num_tokens == self.num_prompt_tokens

    def num_images(self, start: int, end: int) -> int:
        """Image positions from ``start`` to ``end``; output tokens have none."""
        if not self.has_images or start >= self.num_prompt_tokens:
            return 0
        return int((self.token_ids[start:end] == self._image_token_id).sum())

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the order of service among running requests; the last is the first to be preempted."""
        return (-self.request.priority, self.num_tokens - self.num_prompt_tokens, self.arrival)

    def begin_again(self) -> None:
        """Go on as a new request would that begins with the output tokens so far."""
        self.vacate()
        self.is_resumed = True

    def vacate(self) -> None:
        """Hold no memory and have nothing computed.  The steps in flight are void."""
        self.generation += 1
        self.holding: Holding | None = None
        self.num_computed_tokens = self.num_planned_tokens = 0
        self.num_sampling = self.num_in_flight = self.num_drafts_in_flight = 0
        self.num_images_planned = 0
        self.num_prefill_tokens = self.num_room_tokens = self.num_published_tokens = self.num_written_tokens = 0
        self.saving: Saving | None = None
        self.prompt_logprobs: list[float | None] = [None]
        self.prompt_top: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())]
        self.stops: tuple[int, ...] = ()
        self.resend_position = 0
        self.window_floor = self.write_floor = 0

    def extend_chain(self, num_tokens: int) -> None:
        """Extend the keys to the first ``num_tokens`` tokens, which are known."""
        known = self.chain.num_tokens
        if num_tokens > known:
            image_hashes = {at: content for at, content in self.request.image_hashes.items() if known <= at < num_tokens}
            self.chain.extend(self.token_ids[known:num_tokens], image_hashes)

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.num_computed_tokens <= self.num_planned_tokens, "computed tokens are planned tokens"
        assert self.num_planned_tokens <= self.num_tokens + self.num_sampling <= self.num_tokens_max, "plans end at the tokens"
        assert 0 <= self.num_sampling <= self.num_in_flight, "only steps in flight sample"
        assert self.num_drafts_in_flight >= 0, "drafts in flight are counted"
        assert self.num_drafts_in_flight == 0 or self.num_sampling, "only rounds have drafts"
        assert self.chain.num_tokens <= self.num_tokens, "keys are of known tokens"
        if self.holding is None:
            assert self.num_planned_tokens == self.num_in_flight == 0, "without memory nothing is computed"
        else:
            assert self.num_planned_tokens <= self.num_room_tokens, "planned tokens have pages"
            assert (self.num_planned_tokens == self.num_computed_tokens) == (self.num_in_flight == 0), (
                "planned tokens are in flight"
            )
            assert self.num_computed_tokens < self.num_tokens, "a running request has work"
            assert self.holding.slot == self.slot != 0, "slot 0 belongs to no request"
