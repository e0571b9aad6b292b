"""A worker, in an engine or alone: limits that only the worker knows, slots that change their request, and state of drafts."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.model.drafter import Drafter
from deepinfer.ops.sampling import verify
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, Round, StepPlan
from tests.engine.harness import PAGE_TOKENS, build, fresh, knowing, request, rng_of, tokens
from tests.model.tiny import bound, weights

NUM_DRAFTS = 5


# ------------------------------------------------------------------------------------------------------- the end of a request

END = 4 * PAGE_TOKENS


@functools.cache
def beside_one_another():
    """Requests that reach ``END`` at every position of a round, every second one with a neighbour, and their expected results."""
    rng, work = rng_of(0, 70), []
    for number, count in enumerate(range(END - 14, END - 8)):
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seq_seed=number)
        work.append(request(f"long {count}", tokens(rng, count), params))
        if number % 2:
            work.append(request(f"other {count}", tokens(rng, 3 * number), replace(params, max_tokens=12, seq_seed=-number)))
    return work, fresh(work)


@pytest.mark.parametrize("limit", ["max_model_len", "max_tokens"])
def test_drafts_that_are_right_beyond_the_last_token_are_not_verified(limit):
    """Plan one step ahead, so that the host plans more drafts than the request has room for.

    The last token is at the end of a page.  The next page belongs to a neighbour and must not change.
    """
    work, expected = beside_one_another()
    ends = {each.request_id: min(END, len(each.prompt_token_ids) + each.params.max_tokens) for each in work}
    if limit == "max_tokens":
        given = [replace(each.params, max_tokens=ends[each.request_id] - len(each.prompt_token_ids)) for each in work]
        work = [replace(each, params=params) for each, params in zip(work, given, strict=True)]
    core = build(
        max_num_seqs=len(work),
        max_model_len=END if limit == "max_model_len" else 400,
        budget=500,
        num_drafts=NUM_DRAFTS,
        drafter=knowing(work, expected, lambda seed, position: NUM_DRAFTS),
    )
    num_tokens = {each.request_id: len(each.prompt_token_ids) for each in work}
    found = {each.request_id: [] for each in work}
    for each in work:
        core.add(each)
    num_cut = 0
    while not core.is_idle:
        core.last_step = None
        for output in core.step():
            found[output.request_id].append((output.token_id, output.token_logprobs))
        plan, result = core.last_step or (StepPlan(chunks=()), None)
        for each in plan.rounds:
            name, num_drafts = each.request_id, result.sampled[each.request_id].num_drafts
            assert num_drafts == 0 or num_tokens[name] + num_drafts < ends[name], f"{name} was verified after its end"
            num_cut += num_drafts < each.max_drafts
        for name, sampled in ({} if result is None else result.sampled).items():
            num_tokens[name] += len(sampled.token_ids)
    core.close()
    wanted = {each.request_id: ends[each.request_id] - len(each.prompt_token_ids) for each in work}
    assert found == {name: expected[name][:count] for name, count in wanted.items()}
    assert num_cut >= 5, "the host knew the lengths"


# ------------------------------------------------------------------------------------------------------ slots that change hands

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 3, "frequency_penalty": 2.0, "logit_bias": dict.fromkeys(range(20, 24), 6.0)},
    {"temperature": 1.6, "repetition_penalty": 4.0, "allowed_token_ids": range(30, 40)},
    {"temperature": 0.7, "top_p": 0.5, "min_p": 0.02},
]
NUM_PAGES = 3


class Moved:
    """Requests on a worker; each has its own pages, and sometimes a slot."""

    def __init__(self, num_drafts):
        self.core = build(num_drafts=num_drafts, max_num_seqs=len(KINDS), spare_slots=0, cache=False)
        self.num_drafts, rng = num_drafts, rng_of(0, 71)
        self.params = [SamplingParams(**kind, max_tokens=25, ignore_eos=True, seq_seed=7 - n) for n, kind in enumerate(KINDS)]
        self.prompts = [tokens(rng, 3 + number) for number in range(len(KINDS))]
        self.outputs = [[] for _ in KINDS]
        for number, params in enumerate(self.params):
            self.core.executor.add(str(number), params, len(self.prompts[number]))
        self.slots = {}  # slot -> request

    def step(self, entering=()):
        """A plan with rounds of requests that have slots, and chunks of requests ``entering`` slots: (slot, request)."""
        for slot, number in entering:
            self.slots = {other: there for other, there in self.slots.items() if there != number} | {slot: number}
        fresh_slots = {slot for slot, _ in entering}
        chunks = [self._chunk(slot, number) for slot, number in entering]
        rounds = [self._round(slot, number) for slot, number in self.slots.items() if slot not in fresh_slots]
        plan = StepPlan(chunks=tuple(chunks), rounds=tuple(rounds), num_drafts=sum(each.max_drafts for each in rounds))
        for name, sampled in self.core.executor.launch(plan).result().sampled.items():
            self.outputs[int(name)] += zip(sampled.token_ids, sampled.logprobs, strict=True)

    def _told(self, number):
        return np.array([*self.prompts[number], *(token for token, _ in self.outputs[number])], dtype=np.int32)

    def _pages(self, number):
        return np.arange(1 + NUM_PAGES * number, 1 + NUM_PAGES * (number + 1), dtype=np.int32)

    def _chunk(self, slot, number):
        told, is_answer = self._told(number), bool(self.outputs[number])
        return Chunk(
            request_id=str(number),
            slot=slot,
            start=0,
            token_ids=told[: len(told) - is_answer],
            page_ids=self._pages(number),
            num_logits=int(not is_answer),
            anchor_id=int(told[-1]) if is_answer else None,
            history_ids=told if self.params[number].needs_history else None,
        )

    def _round(self, slot, number):
        start = len(self._told(number)) - 1
        return Round(request_id=str(number), slot=slot, start=start, max_drafts=self.num_drafts, page_ids=self._pages(number))


@functools.cache
def never_moved():
    moved = Moved(0)
    moved.step([(number + 1, number) for number in range(len(KINDS))])
    for _ in range(12):
        moved.step()
    moved.core.close()
    return moved.outputs


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_request_keeps_its_parameters_and_its_counts_in_whatever_slot_it_goes_on(num_drafts):
    """Requests repeatedly lose their slots to other requests and continue later in free slots."""
    moved, rng = Moved(num_drafts), rng_of(num_drafts, 72)
    entries = [(1, 0), (1, 1), (2, 0), (1, 2), (1, 0), (2, 1), (1, 3), (3, 0)]
    entries += [(int(rng.integers(1, 4)), int(rng.integers(len(KINDS)))) for _ in range(6)]
    for entry in entries:
        moved.step([entry])
    moved.core.close()
    assert min(map(len, moved.outputs)) >= 2
    assert sum(map(len, moved.outputs)) >= 12
    for found, expected in zip(moved.outputs, never_moved(), strict=True):
        assert found == expected[: len(found)]


# ------------------------------------------------------------------------------------------------------------------ saved state

NAME = "one"


def ran(core, plans):
    """Results of the steps: the sampled tokens with their numbers, and the confidences of new drafts."""
    results = [core.executor.launch(plan).result() for plan in plans]
    return [(each.sampled.get(NAME), each.confidences.tolist()) for each in results]


@pytest.mark.parametrize("mode", ["coupled", "sampled", "argmax"])
@pytest.mark.parametrize("samples", [False, True])
def test_a_state_that_a_prompt_saved_has_all_that_drafts_look_at(mode, samples):
    """The state saved after a chunk's step includes the drafter's context of the chunk.

    The request that continues from the state makes drafts so early that they depend on this context.
    """
    rng, end = rng_of(samples, 74), PAGE_TOKENS
    prompt = np.array(tokens(rng, end + 2), dtype=np.int32)
    own, shared = np.array([1, 2], dtype=np.int32), np.array([1, 3], dtype=np.int32)
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seq_seed=5)

    def part(slot, start, stop, page_ids, **given):
        return Chunk(request_id=NAME, slot=slot, start=start, token_ids=prompt[start:stop], page_ids=page_ids, **given)

    def round_plan(slot, page_ids):
        each = Round(request_id=NAME, slot=slot, start=len(prompt), max_drafts=NUM_DRAFTS, page_ids=page_ids)
        return StepPlan(chunks=(), rounds=(each,), num_drafts=NUM_DRAFTS)

    core = build(num_drafts=NUM_DRAFTS, draft_mode=mode, max_num_seqs=3, spare_slots=1)
    core.executor.add(NAME, params, len(prompt))
    whole = part(3, 0, len(prompt), own, num_logits=1)
    expected = ran(core, [StepPlan(chunks=(whole,)), round_plan(3, own)])
    core.executor.remove(NAME)
    core.executor.add(NAME, params, len(prompt))
    first = part(1, 0, end, shared, save_to=4, num_logits=int(samples))
    second = part(2, end, len(prompt), shared, restore_from=4, lookback_ids=prompt[end - 3 : end], num_logits=1)
    _, *found = ran(core, [StepPlan(chunks=(first,)), StepPlan(chunks=(second,)), round_plan(2, shared)])
    core.close()
    assert found == expected
    assert expected[1][0].num_drafts == NUM_DRAFTS


# ------------------------------------------------------------------------------------------------------------- logits of drafts


class Noting(Drafter):
    """A drafter that records for each slot the logits that its drafts were drawn from."""

    def __init__(self, network):
        super().__init__(network, weights("golden"))
        self.logits = {}

    def draft(self, anchors, anchor_positions, slots, *rest):
        drafts = super().draft(anchors, anchor_positions, slots, *rest)
        self.logits |= dict(zip(slots.tolist(), drafts.logits.clone(), strict=True))
        return drafts


@pytest.mark.parametrize("exact", [False, True])
def test_verification_gets_the_very_logits_that_the_drafts_were_drawn_from(exact):
    """Both regimes: rounded logits would change the distribution of the text, and no test of equal texts would show it."""
    made, seen = [], []

    def noting(network):
        made.append(Noting(network))
        return made[-1]

    def watched(logits, draft_ids, draft_logits, *rest, **given):
        seen.append((draft_logits.clone(), dict(made[-1].logits)))
        return verify.reference(logits, draft_ids, draft_logits, *rest, **given)

    core = build(exact=exact, num_drafts=3, draft_mode="sampled", is_async=False, drafter=noting)
    rng = rng_of(0, 73)
    for number in range(3):
        params = SamplingParams(temperature=1.0, max_tokens=4 + 2 * number, ignore_eos=True, seq_seed=number)
        core.add(request(f"r{number}", tokens(rng, 5 + number), params))
    num_rounds = 0
    with bound({verify: watched}):
        while not core.is_idle:
            core.step()
            plan, _ = core.last_step
            first = sum(chunk.samples for chunk in plan.chunks)
            for number, each in enumerate(plan.rounds, first):
                kept, drawn = seen[-1][0][number], seen[-1][1][each.slot]
                assert kept.dtype == drawn.dtype == (torch.float64 if exact else torch.float32)
                assert torch.equal(kept, drawn)
                assert len(kept.unique()) > kept.numel() // 2, "there is something to round"
                num_rounds += 1
    core.close()
    assert num_rounds > 6
