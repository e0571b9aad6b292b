"""One unfinished request as the scheduler sees it: its tokens, how far they are computed, what it holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.kv.manager import Holding
from deepinfer.kv.prefix import PageChain
from deepinfer.request import Request


@dataclass(slots=True, kw_only=True)
class Saving:
    """State to be saved when the end of a page is reached, by whichever of some rounds reaches it.

    Attributes:
        slot: to save in.
        position: end of the page.
        num_in_flight: what is in flight and may reach it.
        is_done: whether it was reached, and the state can be found.
    """

    slot: int
    position: int
    num_in_flight: int = 0
    is_done: bool = False


class RequestState:
    """A request between :meth:`Scheduler.add` and its end.

    Three lengths say how far it is, all in tokens: ``num_computed_tokens`` are computed for certain, ``num_planned_tokens`` will
    be at least once the steps in flight are done, ``num_tokens`` are known.  Each of the ``num_sampling`` chunks and rounds in
    flight that sample will bring at least one more; the rounds among them ``num_drafts_in_flight`` more at most.

    Invariant: num_computed_tokens <= num_planned_tokens <= num_tokens + num_sampling <= num_tokens_max.

    Attributes:
        request: as it was given.
        arrival: rank by time of arrival, unique.
        num_prompt_tokens: tokens of its prompt.
        num_tokens_max: tokens it ends with at the latest, prompt included.
        token_ids: [num_tokens_max] int32, the first ``num_tokens`` of them known.
        stop_token_ids: tokens that end it, beside the end token.
        has_images: whether its prompt has image positions.
        decoder_floor: see :class:`~deepinfer.step.Chunk`; the same for life.
        chain: keys of its pages.
        is_schedulable: whether its inputs are ready.
        is_resumed: whether it was preempted before.
        num_overtaken: branches that passed it while it was the head of the queue.
        parent: the state it shall branch from, and that state's generation, or None.
        generation: goes up whenever what is in flight becomes void.
        holding: pages and slot, or None while it does not run.
        slot: of the holding; without meaning while there is none.

    What is computed for certain and what is in flight:
        num_computed_tokens, num_planned_tokens, num_tokens, num_sampling: as above.
        num_drafts_in_flight: drafts that the rounds in flight may accept.
        num_in_flight: chunks and rounds planned and not committed.
        num_images_planned: image positions among the planned tokens.

    Only while it runs:
        num_prefill_tokens: tokens that were known when it was admitted, the last one excepted if it was generated; behind them
            it decodes.
        num_written_tokens: positions that its slot may hold anything of once nothing is in flight, those of rejected drafts
            included.
        num_room_tokens: tokens that its pages can take.
        num_published_tokens: page boundary up to which its pages are in the index.
        stops: positions at which a chunk of the prefill must end.
        resend_position: page boundary at which the same prompt sent again finds a state; 0 for none.
        saving: where the rounds in flight shall save state, or None.
        prompt_logprobs: log-probabilities of the first tokens of its prompt, if it asked for them.
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
        """A request that nothing was computed for."""
        self._image_token_id = image_token_id
        self._has_prompt_logprobs = has_prompt_logprobs
        self.request = request
        self.arrival = arrival
        self.num_prompt_tokens = self.num_tokens = len(request.prompt_token_ids)
        self.num_tokens_max = num_tokens_max
        self.token_ids: npt.NDArray[np.int32] = np.empty(num_tokens_max, dtype=np.int32)
        self.token_ids[: self.num_tokens] = request.prompt_token_ids
        self.has_images = bool((self.token_ids[: self.num_tokens] == image_token_id).any())
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        self.decoder_floor = decoder_floor
        self.chain = PageChain(page_tokens, request.salt)
        self.is_schedulable = True
        self.is_resumed = False
        self.parent: tuple[RequestState, int] | None = None
        self.generation = 0
        self.num_cached_tokens = 0
        self.num_overtaken = 0
        self.slot = 0
        self.vacate()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and committed."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of its prompt are still asked for; an answer that is resumed has told them."""
        return self._has_prompt_logprobs and self.num_tokens == self.num_prompt_tokens

    def num_images(self, start: int, end: int) -> int:
        """Image positions among those from ``start`` to ``end``; answers have none."""
        if not self.has_images or start >= self.num_prompt_tokens:
            return 0
        return int((self.token_ids[start:end] == self._image_token_id).sum())

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the order of service among running requests; the last is the first to be preempted."""
        return (-self.request.priority, self.num_tokens - self.num_prompt_tokens, self.arrival)

    def vacate(self) -> None:
        """Hold nothing and have nothing computed; what is in flight is void."""
        self.generation += 1
        self.holding: Holding | None = None
        self.num_computed_tokens = self.num_planned_tokens = 0
        self.num_sampling = self.num_in_flight = self.num_drafts_in_flight = 0
        self.num_images_planned = 0
        self.num_prefill_tokens = self.num_room_tokens = self.num_published_tokens = self.num_written_tokens = 0
        self.saving: Saving | None = None
        self.prompt_logprobs: list[float | None] = [None]
        self.stops: tuple[int, ...] = ()
        self.resend_position = 0
        self.window_floor = self.write_floor = 0

    def extend_chain(self, num_tokens: int) -> None:
        """Bring the keys up to the first ``num_tokens`` tokens, all known."""
        known = self.chain.num_tokens
        if num_tokens > known:
            image_hashes = {at: content for at, content in self.request.image_hashes.items() if known <= at < num_tokens}
            self.chain.extend(self.token_ids[known:num_tokens], image_hashes)

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.num_computed_tokens <= self.num_planned_tokens, "planned is at least what is computed"
        assert self.num_planned_tokens <= self.num_tokens + self.num_sampling <= self.num_tokens_max, "no plan beyond the tokens"
        assert 0 <= self.num_sampling <= self.num_in_flight, "only what is in flight samples"
        assert self.num_drafts_in_flight >= 0, "drafts in flight are counted"
        assert self.num_drafts_in_flight == 0 or self.num_sampling, "only rounds have drafts"
        assert self.chain.num_tokens <= self.num_tokens, "keys stand for known tokens"
        if self.holding is None:
            assert self.num_planned_tokens == self.num_in_flight == 0, "without memory nothing is computed"
        else:
            assert self.num_planned_tokens <= self.num_room_tokens, "planned tokens have pages"
            assert (self.num_planned_tokens == self.num_computed_tokens) == (self.num_in_flight == 0), (
                "what is planned is in flight"
            )
            assert self.num_computed_tokens < self.num_tokens, "a running request has work"
            assert self.holding.slot == self.slot != 0, "slot 0 belongs to nobody"
