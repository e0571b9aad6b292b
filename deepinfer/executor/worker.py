"""One rank: device, model, caches.  Runs plans."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config import DraftSampling, ModelConfig
from deepinfer.executor.grammars import Grammars
from deepinfer.executor.graphs import Buckets, Graphs, PaddedStep
from deepinfer.executor.masks import StepMasks
from deepinfer.executor.pictures import Features, Gallery
from deepinfer.executor.results import CopiedOut, Launched, Stopwatch, on_host, to_host
from deepinfer.executor.rules import TokenRules, rules_bytes
from deepinfer.executor.slots import SlotTable
from deepinfer.executor.speculate import Context, Speculator, finite_logprobs
from deepinfer.executor.team import Team
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.images import Picture
from deepinfer.kv.cache import CacheContent, KVCache
from deepinfer.kv.layout import KVLayout
from deepinfer.model.drafter import Drafter
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import ReplayMode, StepNumbers
from deepinfer.model.vision import VisionTower
from deepinfer.ops.arithmetic import ROW_TILE, to_device
from deepinfer.ops.sampling import WORKSPACE_BYTES, RoundRows, row_bytes, top_logprobs
from deepinfer.request import SamplingParams
from deepinfer.step import PLACEHOLDER, StepPlan

_LOGIT_ROWS = 256
"""Rows of logits made at a time for prompts: 132 MB with the full vocabulary."""


def workspace_bytes(
    vocab_size: int,
    *,
    max_num_seqs: int,
    num_drafts: int,
    num_slots: int,
    draft_mode: DraftSampling = "coupled",
    is_exact: bool = False,
) -> int:
    """Most bytes that a worker takes for choosing tokens, beside weights, caches and the forward pass.

    With V ids, B requests, D drafts, w = 4 bytes a logit (8 in the exact regime) and R = max(B x (D + 1), 256) rows:

    * logits, V x w x (R + 31, which a product pads them by);
    * rules about tokens: :func:`~deepinfer.executor.rules.rules_bytes`;
    * drafting, V x w x B x (D + 2), logits of the block and of one draft; in mode ``sampled`` also B x 3 D, what drafts were
      drawn from, once more as one tensor and once more gathered for the next round, and ``num_slots`` x D that are kept;
    * temporaries of the operators that decide, and of those that draft, which a captured graph keeps for itself: for each the
      least of the bound ``WORKSPACE_BYTES``, or the rows of one request, and of what all rows take.
    """
    size, num_rows = 8 if is_exact else 4, max(max_num_seqs * (num_drafts + 1), _LOGIT_ROWS)
    blocks = max_num_seqs * (num_drafts + 2) if num_drafts else 0
    if draft_mode == "sampled":
        blocks += (3 * max_num_seqs + num_slots) * num_drafts
    logits = vocab_size * size * (num_rows + ROW_TILE - 1 + blocks)
    rules = rules_bytes(vocab_size, num_requests=max_num_seqs, num_rows=num_rows, element_size=size)
    # What a rejected draft was drawn from is fp64 everywhere, and all drafts of a request stay together.
    per_row = row_bytes(vocab_size, torch.float64)
    temporaries = min(max(WORKSPACE_BYTES, per_row * (num_drafts + 1)), num_rows * per_row)
    return logits + rules + temporaries * (2 if num_drafts else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unfinished:
    """An unfinished request as the worker knows it."""

    params: SamplingParams
    num_prompt: int
    num_tokens_max: int
    features: Features | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """Results of a forward pass: rows of the rounds, hidden rows for the LM head, context rows for the drafter."""

    rounds: RoundRows | None
    hidden: Tensor
    context: Context | None


class Worker:
    """Owns the tensors of one rank.

    Invariant: between steps, the content of a slot or page belongs to the request that the planner gave it to.

    Attributes:
        layout: of the caches.
        num_pages, num_slots: of the caches, including page 0 and slot 0.
        team: threads of a step on a CPU.
        banned_token_ids: tokens that no answer has unless a request forces them.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: Flash,
        tower: VisionTower | None,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
        max_model_len: int,
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        draft_mode: DraftSampling = "coupled",
        banned_token_ids: Sequence[int] = (),
        replay_mode: ReplayMode = "compact",
        guard_syncs: bool = True,
        buckets: Buckets | None = None,
        capture_forward: bool = True,
        capture_draft: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Allocate the caches beside ``model`` on its device.

        Args:
            max_model_len: prompt plus output tokens of one request.
            drafter, num_drafts: makes ``num_drafts`` drafts a round; None and 0 decode token by token.
            draft_mode: how drafts are chosen and verified.
            banned_token_ids: never sampled.
            replay_mode: how rows before a decoder floor are kept out of the decoder half.
            guard_syncs: whether a launch that waits for a GPU is an error.
            buckets: sizes that steps of rounds are rounded up to; None rounds nothing and captures nothing.
            capture_forward, capture_draft: whether a GPU replays graphs of the forward pass, and of drafting.
            num_threads: threads that a step on a CPU may compute with.
        """
        self.config = config
        self.model = model
        self.tower = tower
        self._gallery = Gallery(tower) if tower is not None else None
        self.layout = layout
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.banned_token_ids = tuple(banned_token_ids)
        self.replay_mode: ReplayMode = replay_mode
        self._guard_syncs = guard_syncs and model.device.type == "cuda"
        if self._guard_syncs:
            with warnings.catch_warnings():  # torch warns once that this mode is new; a user cannot act on that
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
                torch.cuda.set_sync_debug_mode("default")
        self._cache = KVCache(layout, num_pages=num_pages, num_slots=num_slots, device=model.device)
        self._max_model_len = max_model_len
        device, vocab_size = model.device, config.vocab_size
        self._slots = SlotTable(
            num_slots,
            num_drafts,
            device,
            draft_vocab=vocab_size if draft_mode == "sampled" else 0,
            draft_dtype=torch.float64 if model.exact else torch.float32,
        )
        forbidden = (config.image_token_id, *banned_token_ids)
        self._rules = TokenRules(vocab_size, eos_token_id=config.eos_token_id, forbidden=forbidden, device=device)
        self._buckets = buckets
        self._graphs: Graphs[_Forward] = Graphs(device, enabled=capture_forward and buckets is not None)
        self._speculator = Speculator(
            self._slots,
            self._rules,
            drafter,
            mode=draft_mode,
            num_drafts=num_drafts,
            eos_token_id=config.eos_token_id,
            graphs=Graphs(device, enabled=capture_draft and buckets is not None),
        )
        self._grammars = Grammars(vocab_size, num_drafts)
        self.team = Team(num_threads)
        self._unfinished: dict[str, _Unfinished] = {}
        self._owners: dict[int, str] = {}  # slot -> request whose row it holds

    @torch.inference_mode()
    def add(self, request_id: str, params: SamplingParams, num_prompt: int, pictures: Sequence[Picture] = ()) -> None:
        """Remember an unfinished request.

        Args:
            num_prompt: tokens of its prompt.
            pictures: in the order of their spans in the prompt.  A picture is encoded when a chunk first contains it, and once
                for all requests that are given the same object.
        """
        features = None
        if pictures:
            assert self._gallery is not None, "pictures are accepted only with a vision tower"
            features = self._gallery.take(pictures)
        num_tokens_max = min(num_prompt + params.max_tokens, self._max_model_len)
        self._unfinished[request_id] = _Unfinished(
            params=params, num_prompt=num_prompt, num_tokens_max=num_tokens_max, features=features
        )
        self._rules.add(request_id, params, num_prompt)

    def remove(self, request_id: str) -> None:
        """Forget a request; its id may be used again."""
        features = self._unfinished.pop(request_id).features
        if features is not None and self._gallery is not None:
            self._gallery.give_back(features)
        self._rules.remove(request_id)
        self._grammars.remove(request_id)
        self._owners = {slot: owner for slot, owner in self._owners.items() if owner != request_id}

    def set_grammar(self, request_id: str, compiled: CompiledGrammar) -> None:
        """Give a request its grammar, before its first step."""
        args = self._unfinished[request_id].params.structured_output
        assert args is not None, "only a request with so_args has a grammar"
        self._grammars.add(request_id, compiled, args)

    @torch.inference_mode()
    def copy_out(self, page_ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> CopiedOut:
        """Start a copy of pages and slots to the host, as the steps launched before leave them."""
        stopwatch = Stopwatch(self.model.device)
        content = self._cache.read(self._ids(page_ids), self._ids(slots))
        content = CacheContent(pages=to_host(content.pages), states=to_host(content.states))
        stopwatch.stop()
        return CopiedOut(content=content, stopwatch=stopwatch)

    @torch.inference_mode()
    def copy_in(self, content: CacheContent, page_ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> None:
        """Start a copy from the host into pages and slots, which the steps launched later see."""
        device = self.model.device
        there = CacheContent(pages=to_device(content.pages, device), states=to_device(content.states, device))
        self._cache.write(there, self._ids(page_ids), self._ids(slots))

    def _ids(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return to_device(torch.from_numpy(ids.astype(np.int64)), self.model.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step: copies, forward pass, sampling.  Does not wait for a GPU."""
        if self.model.device.type == "cpu":
            with self.team.step():
                return self._launch(plan)
        if not self._guard_syncs:
            return self._launch(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _launch(self, plan: StepPlan) -> Launched:
        stopwatch = Stopwatch(self.model.device)
        self._cache.copy_pages(plan.page_copies)
        self._cache.copy_slots([(chunk.restore_from, chunk.slot) for chunk in plan.chunks if chunk.restore_from is not None])
        step = self._buckets.pad(plan) if self._buckets is not None else PaddedStep.of(plan)
        features = self._take_chunks(step.plan)
        masks = self._grammars.begin(step.sampling_ids)
        # A CPU has no cores for masks beside the forward pass: a third busy thread costs its products more than the masks take.
        if masks is not None and self.model.device.type == "cpu":
            masks.result()
        ran = self._forward(step, features)
        start = time.perf_counter()
        ready = None if masks is None else masks.result()
        launched = self._decide(step, ran, ready, stopwatch, mask_wait_ms=1e3 * (time.perf_counter() - start))
        self._grammars.launched(launched)
        return launched

    def _forward(self, step: PaddedStep, features: Mapping[str, Tensor]) -> _Forward:
        """Lay out the rounds and run the network; from a graph if the step recurs."""
        numbers = StepNumbers(
            step.plan, step.num_round_rows, config=self.config, layout=self.layout, replay_mode=self.replay_mode
        )

        def forward(packed: Tensor, round_numbers: Tensor) -> _Forward:
            rounds = self._speculator.lay_out(round_numbers, step.num_round_rows)
            inputs = numbers.derive(packed, rounds, features)
            outputs = self.model.run(inputs, self._cache, between_layers=self.team.between_layers)
            context = None if outputs.aux is None else Context.of(outputs.aux, inputs.decoder)
            return _Forward(rounds=rounds, hidden=outputs.hidden, context=context)

        key = numbers.shape if step.recurs else None
        return self._graphs.run(key, forward, numbers.packed, self._speculator.round_numbers(step.plan))

    def _decide(
        self, step: PaddedStep, ran: _Forward, masks: StepMasks | None, stopwatch: Stopwatch, *, mask_wait_ms: float
    ) -> Launched:
        """Choose tokens, make drafts, save states, and start the copies of the results to the host.

        Values that the host computes while the forward pass runs may be used here.
        """
        plan, names = step.plan, step.sampling_ids
        prompt_logprobs, prompt_top, hidden = self._prompt_logprobs(plan, ran.hidden)
        params = [self._unfinished[name].params for name in names]
        decided = None
        if names:
            decided = self._speculator.decide(step.sampling, plan.rounds, ran.rounds, self.model.logits(hidden), params, masks)
        confidences = self._speculator.draft(plan, ran.rounds, decided, ran.context, self._cache, recurs=step.recurs, masks=masks)
        self._cache.copy_slots([(chunk.slot, chunk.save_to) for chunk in plan.chunks if chunk.save_to is not None])
        if decided is not None and any(each.save_to for each in plan.rounds):
            self._cache.copy_slots_on_device(*self._speculator.reached(plan.rounds, decided))
        drafting, draft_ids = step.drafting_ids, None
        if confidences is not None and any(name in self._grammars for name in drafting):
            draft_ids = to_host(self._speculator.draft_ids(step.drafting_slots))
        launched = Launched(
            request_ids=names,
            params=params,
            decided=on_host(decided, len(names)) if decided is not None else None,
            prompt_logprobs={name: to_host(values) for name, values in prompt_logprobs.items()},
            prompt_top={name: (to_host(ids), to_host(values)) for name, (ids, values) in prompt_top.items()},
            confidences=to_host(confidences[: len(drafting)]) if confidences is not None else None,
            draft_ids=draft_ids,
            failures={} if masks is None else masks.failures,
            mask_ms=0.0 if masks is None else masks.fill_ms,
            mask_wait_ms=0.0 if masks is None else mask_wait_ms,
            drafting_ids=drafting,
            stopwatch=stopwatch,
            num_padding_rows=step.num_padding_rows,
        )
        stopwatch.stop()
        return launched

    def _take_chunks(self, plan: StepPlan) -> dict[str, Tensor]:
        """Initialise slots of new requests.  Returns request id -> image features of its chunk."""
        features = {}
        for chunk in plan.chunks:
            if chunk.request_id == PLACEHOLDER:
                continue
            known = self._unfinished[chunk.request_id]
            former = self._owners.get(chunk.slot)
            if former != chunk.request_id:
                if former is not None:
                    self._rules.stop(former)
                self._owners = {slot: owner for slot, owner in self._owners.items() if owner != chunk.request_id}
                self._slots.write(chunk.slot, known.params, known.num_tokens_max)
                self._owners[chunk.slot] = chunk.request_id
                self._rules.start(chunk.request_id)
            if chunk.history_ids is not None:
                self._rules.start(chunk.request_id, chunk.history_ids)
                self._grammars.start(chunk.request_id, chunk.history_ids[known.num_prompt :])
            if known.features is not None:
                count = int(np.count_nonzero(chunk.token_ids == self.config.image_token_id))
                if count:
                    features[chunk.request_id] = known.features.covering(chunk.num_image_before, count)
        return features

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]], Tensor]:
        """What requests asked for about tokens of their prompts, and the remaining rows of ``hidden``.

        Returns:
            logprobs: request id -> [num_targets] log-probabilities of the chunk's target ids.
            top: request id -> [num_targets, top_logprobs] most likely ids and their log-probabilities; if they are asked for.
            hidden: [num_logits - num_targets, hidden] rows that decide tokens.
        """
        logprobs: dict[str, Tensor] = {}
        top: dict[str, tuple[Tensor, Tensor]] = {}
        if not any(chunk.num_targets for chunk in plan.chunks):
            return logprobs, top, hidden
        left, first = [], 0
        for chunk in plan.chunks:
            after = first + chunk.num_targets
            if chunk.target_ids is not None and chunk.num_targets:
                ids = to_device(torch.from_numpy(chunk.target_ids.astype(np.int64)), hidden.device)
                num_top = min(self._unfinished[chunk.request_id].params.top_logprobs, self.config.vocab_size)
                found, best = [], []
                for rows, wanted in zip(hidden[first:after].split(_LOGIT_ROWS), ids.split(_LOGIT_ROWS), strict=True):
                    logits = self.model.logits(rows)
                    found.append(finite_logprobs(logits, wanted))
                    if num_top:
                        best.append(top_logprobs(logits, num_top))
                logprobs[chunk.request_id] = torch.cat(found)
                if num_top:
                    top[chunk.request_id] = torch.cat([each for each, _ in best]), torch.cat([each for _, each in best])
            first += chunk.num_logits
            left.append(hidden[after:first])
        return logprobs, top, torch.cat([*left, hidden[first:]])
