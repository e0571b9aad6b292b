"""Draft, verify, accept.  Only this module knows that a token can be rejected.

A round verifies the drafts of the step before, accepts the right ones, decides one more token, and makes new drafts.  The device
knows the position of a request here before the host knows it.

A rejected draft needs no undo: all state is addressed by position, reads are bounded by position, and the next round overwrites
the state of rejected drafts.  The drafter's context is an exception: it is written after the decision, from accepted tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer.config import DraftSampling
from deepinfer.executor.graphs import Graphs
from deepinfer.executor.masks import StepMasks
from deepinfer.executor.rules import GrammarMasks, PackedRows, TokenRules
from deepinfer.executor.slots import SlotTable
from deepinfer.kv.cache import KVCache
from deepinfer.model.drafter import Drafter
from deepinfer.model.inputs import LayerInputs
from deepinfer.ops.arithmetic import to_device
from deepinfer.ops.sampling import (
    RoundRows,
    is_finite,
    lay_out_rounds,
    token_logprobs,
    top_logprobs,
    verify,
    verify_coupled,
)
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, Round, StepPlan


def finite_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities, NaN in rows with a logit that is not finite, because each log-probability depends on all logits.

    Args and returns: as :func:`~deepinfer.ops.sampling.token_logprobs`.
    """
    return torch.where(is_finite(logits), token_logprobs(logits, ids), torch.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Tokens that a step decided, on the device.

    The requests are those of chunks that sample, then those of rounds, in the order of the plan.

    Attributes:
        starts: [num_requests] int64, position of each anchor.
        num_drafts, num_accepted: [num_requests] int64, verified drafts and accepted drafts.
        token_ids: [num_requests, num_drafts + 1] int64, -1 after the last token.
        logprobs: [num_requests, num_drafts + 1], from the model's unchanged logits; NaN if one logit of the row is not finite;
            arbitrary after the last token.
        top_ids, top_logprobs: [num_requests, num_drafts + 1, k] best tokens; arbitrary after the last token.
        confidences: [num_requests, num_drafts] fp32 of the verified drafts.
        is_dead: [num_requests] bool, whether a token was decided in a row where rules and grammar leave no token.
    """

    starts: Tensor
    num_drafts: Tensor
    num_accepted: Tensor
    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    confidences: Tensor
    is_dead: Tensor

    def rounds(self, num_rounds: int) -> tuple[Tensor, Tensor]:
        """Anchor positions and accepted drafts of the rounds: [num_rounds] int64 each."""
        first = len(self.starts) - num_rounds
        return self.starts[first:], self.num_accepted[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Rows of a step that the drafter may keep as context: rows of chunks, then all rows of rounds.

    Attributes:
        aux: [num_rows, width] of :class:`~deepinfer.model.flash.Outputs`.
        positions: [num_rows] int64.
        slots: [num_rows] int64; 0 drops a row.
    """

    aux: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, aux: Tensor, inputs: LayerInputs) -> Context:
        """The rows of the decoder half's ``inputs`` that fit into a window ring; ``aux`` has all rows of ``inputs``."""
        kept = inputs.window
        return cls(aux=aux[kept.rows], positions=inputs.positions[kept.rows], slots=kept.slots)


class Speculator:
    """Keeps the slot table up to date in each round.

    Invariant: the entry of a slot in ``table`` is the state of its request after the last launched step.

    Attributes:
        num_drafts: most drafts of a round; 0 decodes without a drafter.
    """

    def __init__(
        self,
        table: SlotTable,
        rules: TokenRules,
        drafter: Drafter | None,
        *,
        mode: DraftSampling,
        num_drafts: int,
        eos_token_id: int,
        graphs: Graphs[Tensor | None],
    ) -> None:
        """Decide with ``table`` and ``rules``; make drafts with ``drafter`` unless it is None.

        Args:
            graphs: capture and replay drafting after steps of rounds.
        """
        assert (drafter is None) == (num_drafts == 0), "drafts come from a drafter"
        self.num_drafts = num_drafts
        self._table = table
        self._rules = rules
        self._drafter = drafter
        self._mode = mode
        self._eos_token_id = eos_token_id
        self._graphs = graphs
        self._device = table.num_tokens.device

    def _column(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)

    def round_numbers(self, plan: StepPlan) -> Tensor:
        """Make the input of :meth:`lay_out` on the host: [2 * num_rounds + 1] int64 slots, draft limits, all drafts."""
        slots, caps = [each.slot for each in plan.rounds], [each.max_drafts for each in plan.rounds]
        return torch.tensor([*slots, *caps, plan.num_drafts], dtype=torch.int64)

    def lay_out(self, numbers: Tensor, num_rows: int) -> RoundRows | None:
        """Choose the positions and the drafts of a plan's rounds; None without rounds.

        Args:
            numbers: result of :meth:`round_numbers`, on the device.
            num_rows: rows of all rounds; at least one for each round and for each draft to verify.
        """
        slots, caps = numbers[:-1].view(2, -1).unbind(0)
        if not len(slots):
            return None
        table = self._table
        # Padding rounds use slot 0, whose entry has no meaning.
        num_tokens = table.num_tokens[slots].masked_fill_(slots == 0, 1)
        # A round always decides one token more than it accepts.
        caps = torch.minimum(caps, table.num_tokens_max[slots] - num_tokens - 1)
        token_ids = torch.cat([table.anchor_ids[slots].unsqueeze(1), table.draft_ids[slots]], dim=1)
        return lay_out_rounds(table.confidences[slots], numbers[-1:], caps, num_tokens - 1, token_ids, num_rows)

    def decide(
        self,
        chunks: Sequence[Chunk],
        plan_rounds: Sequence[Round],
        rounds: RoundRows | None,
        logits: Tensor,
        params: Sequence[SamplingParams],
        masks: StepMasks | None = None,
    ) -> Decided:
        """Sample the next tokens of chunks, verify the drafts of rounds, and update the slot table.

        Args:
            chunks: chunks that sample.
            plan_rounds, rounds: the rounds of the plan, and the result of :meth:`lay_out`.
            logits: [len(chunks) + rows of rounds, vocab_size].
            params: parameters of the chunks' requests, then of the rounds' requests.
            masks: tokens that the grammars of some of these requests allow.
        """
        table, num_chunks = self._table, len(chunks)
        requests: tuple[Chunk | Round, ...] = (*chunks, *plan_rounds)
        slots, ends = self._column([each.slot for each in requests]), self._column([chunk.end for chunk in chunks])
        zeros = torch.zeros_like(ends)
        starts, lens, owners, offsets, positions = ends - 1, zeros, torch.arange(num_chunks, device=self._device), zeros, ends
        if rounds is not None:
            starts, lens = torch.cat([starts, rounds.starts]), torch.cat([lens, rounds.lens])
            owners = torch.cat([owners, (num_chunks + rounds.owners).clamp_max(len(requests) - 1)])
            offsets, positions = torch.cat([offsets, rounds.offsets]), torch.cat([positions, rounds.positions + 1])
        token_idx = torch.arange(self.num_drafts + 1, device=self._device)
        draft_ids = table.draft_ids[slots].masked_fill_(token_idx[:-1] >= lens.unsqueeze(1), -1)
        confidences = table.confidences[slots]

        request_ids = [each.request_id for each in requests]
        packed = PackedRows(request_ids=request_ids, owners=owners, offsets=offsets, positions=positions, draft_ids=draft_ids)
        grammar = None if masks is None else self._grammar_masks(masks)
        adjusted, mask = self._rules.apply(logits, packed, grammar)
        rows = table.sampling(slots, filters=any(each.has_filters for each in params))
        if self._mode == "coupled":
            num_accepted, token_ids = verify_coupled(adjusted, draft_ids, lens, rows, starts, mask=mask)
        else:
            drawn_from = table.draft_logits[slots] if table.draft_logits is not None else None
            num_accepted, token_ids = verify(adjusted, draft_ids, drawn_from, lens, rows, starts, mask=mask)

        table.num_tokens[slots] = starts + num_accepted + 2
        table.anchor_ids[slots] = token_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        table.has_ended[slots] = table.stops_at_eos[slots] & (token_ids == self._eos_token_id).any(1)
        self._rules.record(request_ids, token_ids)

        # [num_requests, num_drafts + 1]: the row of logits that decided each token; rows are packed, token_ids is not.
        row_idx = ((lens + 1).cumsum(0) - lens - 1).unsqueeze(1) + token_idx
        row_idx = row_idx.clamp_max(len(owners) - 1)
        max_top = min(max(each.top_logprobs for each in params), logits.shape[1])
        if max_top:
            top_ids, top_values = (each[row_idx] for each in top_logprobs(logits, max_top))
        else:
            top_ids, top_values = token_ids.new_empty(*token_ids.shape, 0), logits.new_empty(*token_ids.shape, 0)
        return Decided(
            starts=starts,
            num_drafts=lens,
            num_accepted=num_accepted,
            token_ids=token_ids,
            logprobs=finite_logprobs(logits, token_ids[owners, offsets])[row_idx],
            top_ids=top_ids,
            top_logprobs=top_values,
            confidences=confidences,
            is_dead=self._is_dead(grammar, num_accepted),
        )

    def _grammar_masks(self, masks: StepMasks) -> GrammarMasks:
        bits = to_device(torch.from_numpy(masks.bits), self._device)
        is_dead = torch.zeros(bits.shape[:2], dtype=torch.bool, device=self._device)
        return GrammarMasks(owners=to_device(torch.from_numpy(masks.owners), self._device), bits=bits, is_dead=is_dead)

    def _is_dead(self, grammar: GrammarMasks | None, num_accepted: Tensor) -> Tensor:
        """[num_requests] bool: whether one of the rows up to the last accepted draft is dead."""
        found = torch.zeros_like(num_accepted, dtype=torch.bool)
        if grammar is not None:
            offsets = torch.arange(grammar.is_dead.shape[1], device=self._device)
            is_used = offsets <= num_accepted[grammar.owners].unsqueeze(1)
            found[grammar.owners] = (grammar.is_dead & is_used).any(1)
        return found

    def _forced(self, masks: StepMasks | None, decided: Decided | None, drafting: int, skipped: Sequence[int]) -> Tensor | None:
        """Drafts that the grammars force: [drafting, num_drafts] int64, -1 where the drafter chooses; None without grammars.

        Args:
            drafting: number of requests that get drafts.
            skipped: indices among them of requests that the step does not decide.
        """
        if masks is None or decided is None:
            return None
        forced = torch.full((drafting, self.num_drafts), -1, dtype=torch.int64, device=self._device)
        owners, offsets = (to_device(torch.from_numpy(each), self._device) for each in (masks.owners, masks.forced_offsets))
        table = to_device(torch.from_numpy(masks.forced_ids), self._device)
        num_accepted = decided.num_accepted[owners]
        # Draft k follows num_accepted drafts and the token that was decided after them.
        idx = (num_accepted - offsets).unsqueeze(1) + torch.arange(1, self.num_drafts + 1, device=self._device)
        ids = table.gather(1, idx.clamp(0, table.shape[1] - 1))
        ids = torch.where((idx >= 0) & (idx < table.shape[1]) & (num_accepted >= offsets).unsqueeze(1), ids, -1)
        places = [place for place in range(drafting) if place not in set(skipped)]
        forced[self._column(places)[owners]] = ids
        return forced

    def draft(
        self,
        plan: StepPlan,
        rounds: RoundRows | None,
        decided: Decided | None,
        context: Context | None,
        cache: KVCache,
        *,
        recurs: bool = False,
        masks: StepMasks | None = None,
    ) -> Tensor | None:
        """Write the accepted tokens into the drafter's context, and make drafts for every request that goes on.

        Args:
            plan, rounds, decided: the plan, and the results of :meth:`lay_out` and :meth:`decide`.
            context: rows of the step for the drafter.
            recurs: whether later steps have the same numbers of requests and rows, so that a graph is worth its capture.
            masks: as for :meth:`decide`; tokens that a grammar forces take the place of drafts.

        Returns:
            [num_drafting, num_drafts] fp32 confidences in the order of :attr:`StepResult.confidences`, NaN where a draft's logits
            are not finite; None without drafts.
        """
        table = self._table
        primed = [chunk for chunk in plan.chunks if chunk.anchor_id is not None]
        if primed:
            numbers = [(chunk.slot, chunk.end + 1, chunk.anchor_id or 0) for chunk in primed]
            slots, num_tokens, anchor_ids = self._column([value for each in numbers for value in each]).view(-1, 3).unbind(1)
            table.num_tokens[slots], table.anchor_ids[slots] = num_tokens, anchor_ids
            table.has_ended.index_fill_(0, slots, False)  # an assignment of a number would wait for the device
        if self._drafter is None or context is None:
            return None
        owners = context.slots
        if rounds is not None:
            assert decided is not None, "rounds were decided"
            _, num_accepted = decided.rounds(len(rounds.starts))
            accepted = num_accepted[rounds.owners.clamp_max(len(num_accepted) - 1)]
            first = len(owners) - len(rounds.offsets)
            owners = torch.cat([owners[:first], owners[first:].masked_fill(rounds.offsets > accepted, 0)])
        drafting: list[Chunk | Round] = [chunk for chunk in plan.chunks if chunk.drafts]
        drafting += plan.rounds
        slots_drafting = [each.slot for each in drafting]
        floors = [max(each.window_floor, each.decoder_floor) for each in drafting]
        skipped = [place for place, each in enumerate(drafting) if isinstance(each, Chunk) and not each.samples]
        forced = self._forced(masks, decided, len(drafting), skipped)
        key = (len(drafting), len(owners), forced is not None) if recurs else None
        inputs = torch.tensor([slots_drafting, floors], dtype=torch.int64), context.aux, context.positions, owners
        return self._graphs.run(key, partial(self._remember_and_draft, cache), *inputs, *(() if forced is None else (forced,)))

    def draft_ids(self, slots: Sequence[int]) -> Tensor:
        """The last drafts of the requests in ``slots``: [len(slots), num_drafts] int64 on the device."""
        return self._table.draft_ids[self._column(slots)]

    def _remember_and_draft(
        self, cache: KVCache, numbers: Tensor, aux: Tensor, positions: Tensor, owners: Tensor, forced: Tensor | None = None
    ) -> Tensor | None:
        """Write context rows, then draft; returns None without requests to draft for.

        Args:
            numbers: [2, num_drafting] int64 slots and floors of the requests to draft for.
            aux, positions, owners: the context rows, as arguments of :meth:`Drafter.commit`.
            forced: as for :meth:`Drafter.draft`.
        """
        assert self._drafter is not None, "only an engine with a drafter has context rows"
        self._drafter.commit(aux, positions, owners, cache)
        table, (slots, floors) = self._table, numbers.unbind(0)
        if not len(slots):
            return None
        drafts = self._drafter.draft(
            table.anchor_ids[slots],
            table.num_tokens[slots] - 1,
            slots,
            floors,
            table.sampling(slots, filters=False),
            self._mode,
            self.num_drafts,
            cache,
            forced,
        )
        # NaN stays NaN, so that the host sees it; the ranking of drafts treats it as 0.
        # A request that has ended gets no drafts of the next step, even if its round is planned already.
        confidences = drafts.confidences.float().masked_fill_(table.has_ended[slots].unsqueeze(1), 0.0)
        table.draft_ids[slots], table.confidences[slots] = drafts.ids, confidences
        if table.draft_logits is not None and drafts.logits is not None:
            table.draft_logits[slots] = drafts.logits
        return confidences

    def reached(self, rounds: Sequence[Round], decided: Decided) -> tuple[Tensor, Tensor]:
        """(from, to) slots [n] int64 of rounds that save state; a round that did not reach ``save_at`` copies to slot 0."""
        numbers = [(number, each.slot, each.save_to or 0, each.save_at) for number, each in enumerate(rounds) if each.save_to]
        round_idx, slots, targets, positions = self._column([value for each in numbers for value in each]).view(-1, 4).unbind(1)
        starts, num_accepted = (each[round_idx] for each in decided.rounds(len(rounds)))
        is_reached = (starts < positions) & (positions <= starts + 1 + num_accepted)
        return slots, torch.where(is_reached, targets, 0)
