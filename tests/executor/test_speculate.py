"""Rounds on the device: their rows, the decision at each row, and the state for the next round."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.executor.graphs import Graphs
from deepinfer.executor.rules import TokenRules
from deepinfer.executor.slots import SlotTable
from deepinfer.executor.speculate import Context, Speculator
from deepinfer.model.drafter import Drafts
from deepinfer.model.inputs import RingRows
from deepinfer.ops.sampling import SamplingRows, token_logprobs
from deepinfer.request import SamplingParams
from deepinfer.step import Chunk, Round, StepPlan
from tests.model.tiny import rows_of
from tests.ops.plain_sampling import sample

CPU = torch.device("cpu")
VOCAB, EOS, NUM_SLOTS = 7, 1, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=50, seq_seed=1)
PAGE = np.ones(1, dtype=np.int32)


class FakeDrafter:
    """A drafter with given drafts; it records its calls and the context rows that it gets."""

    def __init__(self, ids=None, confidences=None, logits=None):
        self.ids, self.confidences, self.logits = ids, confidences, logits
        self.asked, self.committed = [], []

    def commit(self, aux, positions, slots, cache):
        kept = slots > 0
        self.committed += list(zip(slots[kept].tolist(), positions[kept].tolist(), aux[kept, 0].tolist(), strict=True))

    def draft(self, anchors, anchor_positions, slots, floors, rows, mode, num_drafts, cache, forced=None):
        self.asked += list(zip(slots.tolist(), anchors.tolist(), anchor_positions.tolist(), floors.tolist(), strict=True))
        count = len(slots)
        ids = torch.full((count, num_drafts), 3) if self.ids is None else torch.tensor(self.ids)
        confidences = torch.ones(count, num_drafts) if self.confidences is None else torch.tensor(self.confidences)
        return Drafts(ids=ids, logits=self.logits, confidences=confidences)


class Device:
    """A speculator and its table."""

    def __init__(self, num_drafts=3, mode="coupled", drafter=None, **params):
        self.table = SlotTable(NUM_SLOTS, num_drafts, CPU, draft_vocab=VOCAB if mode == "sampled" else 0)
        self.rules = TokenRules(VOCAB, eos_token_id=EOS, forbidden=(), device=CPU)
        self.drafter = drafter or (FakeDrafter() if num_drafts else None)
        self.speculator = Speculator(
            self.table, self.rules, self.drafter, mode=mode, num_drafts=num_drafts, eos_token_id=EOS, graphs=Graphs(CPU)
        )

    def place(self, slot, *, num_tokens, anchor=2, drafts=(), confidences=(), num_tokens_max=100, params=GREEDY):
        """Put a decoding request into a slot; it has ``num_tokens`` decided tokens, including the anchor."""
        table = self.table
        table.write(slot, params, num_tokens_max)
        table.num_tokens[slot], table.anchor_ids[slot] = num_tokens, anchor
        table.draft_ids[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        table.confidences[slot, : len(confidences)] = torch.tensor(confidences, dtype=torch.float32)

    def lay_out(self, plan):
        return self.speculator.lay_out(self.speculator.round_numbers(plan), len(plan.rounds) + plan.num_drafts)

    def decide(self, rounds, laid, logits, chunks=(), params=None):
        params = params or [GREEDY] * (len(chunks) + len(rounds))
        return self.speculator.decide(chunks, rounds, laid, logits, params)


def round_of(slot, max_drafts=3, **given):
    """A round with a wrong position, because the device must not use the host's position."""
    return Round(request_id=f"r{slot}", slot=slot, start=0, max_drafts=max_drafts, page_ids=PAGE, **given)


def chunk_of(slot, start, count, **given):
    ids = np.full(count, 2, dtype=np.int32)
    return Chunk(request_id=f"r{slot}", slot=slot, start=start, token_ids=ids, page_ids=PAGE, **given)


def plan_of(rounds, num_drafts=None, chunks=()):
    total = sum(each.max_drafts for each in rounds) if num_drafts is None else num_drafts
    return StepPlan(chunks=tuple(chunks), rounds=tuple(rounds), num_drafts=total)


def choosing(*tokens):
    """Logits whose best token is the given token of each row; every row has different numbers."""
    rows = torch.linspace(0, 1, len(tokens) * VOCAB).view(-1, VOCAB).flip(1).clone()
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 5 + torch.arange(len(tokens), dtype=torch.float32)
    return rows


# -------------------------------------------------------------------------------------------------------------------- laying out


def test_rows_of_rounds_are_consecutive_and_the_others_are_padding():
    laid = rows_of(torch.tensor([20, 7, 40]), torch.tensor([2, 0, 1]), torch.tensor([[2, 3, 4], [5, 6, 0], [1, 2, 3]]), 8)
    assert laid.first_rows.tolist() == [0, 3, 4]
    assert laid.owners.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert laid.offsets.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert laid.token_ids.tolist() == [2, 3, 4, 5, 1, 2, 0, 0]
    assert laid.positions.tolist() == [20, 21, 22, 7, 40, 41, 0, 0]


def test_rounds_stand_where_the_device_knows_them_to_be():
    device = Device()
    device.place(4, num_tokens=21, anchor=5, drafts=[2, 3, 4])
    device.place(2, num_tokens=9, anchor=6, drafts=[4, 4, 0])
    laid = device.lay_out(plan_of([round_of(4), round_of(2, max_drafts=1)]))
    assert (laid.starts.tolist(), laid.lens.tolist()) == ([20, 8], [3, 1])
    assert laid.token_ids.tolist() == [5, 2, 3, 4, 6, 4]


def test_without_drafts_a_round_is_its_anchor():
    device = Device(num_drafts=0)
    device.place(1, num_tokens=5, anchor=6)
    laid = device.lay_out(plan_of([round_of(1, max_drafts=0)]))
    assert (laid.token_ids.tolist(), laid.positions.tolist(), laid.lens.tolist()) == ([6], [4], [0])
    decided = device.decide([round_of(1, max_drafts=0)], laid, choosing(3))
    assert (decided.token_ids.tolist(), decided.num_drafts.tolist(), decided.confidences.shape) == ([[3]], [0], (1, 0))
    assert device.table.num_tokens[1] == 6


@pytest.mark.parametrize(("left", "length"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_a_round_never_verifies_more_than_the_request_has_room_for(left, length):
    """The host may not know the request's position yet, so it plans too many drafts."""
    device = Device()
    device.place(1, num_tokens=10, num_tokens_max=10 + left, drafts=[2, 3, 4])
    laid = device.lay_out(plan_of([round_of(1)]))
    assert laid.lens.tolist() == [length]
    assert laid.owners.tolist() == [0] * (length + 1) + [1] * (3 - length)


def test_a_total_above_the_limits_of_the_rounds_leaves_padding_rows():
    device = Device()
    device.place(1, num_tokens=10, num_tokens_max=12, confidences=[1.0, 1.0, 1.0])
    device.place(2, num_tokens=10, num_tokens_max=11, confidences=[1.0, 1.0, 1.0])
    laid = device.lay_out(plan_of([round_of(1), round_of(2)], num_drafts=5))
    assert laid.lens.tolist() == [1, 0]
    assert laid.owners.tolist() == [0, 0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("confidences", "num_drafts", "lens"),
    [
        ([[0.9, 0.9, 0.1], [0.8, 0.1, 0.9]], 3, [2, 1]),
        ([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], 3, [2, 1]),  # equal confidences: earlier drafts first, then earlier rounds
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 4, [2, 2]),
        ([[math.nan, 1.0, 1.0], [0.2, 0.2, 0.2]], 3, [0, 3]),  # 0 · 1 · 1 ranks last
        ([[math.inf, 1.0, 1.0], [0.2, math.nan, 1.0]], 1, [0, 1]),
        ([[math.nan] * 3, [math.nan] * 3], 3, [2, 1]),
        ([[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]], 0, [0, 0]),
    ],
)
def test_a_smaller_budget_goes_to_the_likeliest_drafts(confidences, num_drafts, lens):
    device = Device()
    for slot, values in zip((3, 1), confidences, strict=True):
        device.place(slot, num_tokens=10, drafts=[2, 3, 4], confidences=values)
    laid = device.lay_out(plan_of([round_of(3), round_of(1)], num_drafts=num_drafts))
    assert laid.lens.tolist() == lens
    assert (laid.owners < 2).all(), "the budget is spent in full"


def test_padding_rounds_stay_at_the_first_position():
    """Padding rounds need only one page, whatever earlier steps have written into slot 0."""
    device = Device()
    device.place(0, num_tokens=5000, num_tokens_max=9000, confidences=[1.0, 1.0, 1.0])
    device.place(1, num_tokens=21, drafts=[2, 3, 4])
    laid = device.lay_out(plan_of([round_of(1), round_of(0, max_drafts=0), round_of(0, max_drafts=0)]))
    assert (laid.starts.tolist(), laid.lens.tolist()) == ([20, 0, 0], [3, 0, 0])
    assert laid.positions.tolist() == [20, 21, 22, 23, 0, 0]


def test_a_round_with_less_room_leaves_its_share_to_others():
    device = Device()
    device.place(1, num_tokens=10, num_tokens_max=12, confidences=[1.0, 1.0, 1.0])
    device.place(2, num_tokens=10, confidences=[0.1, 0.1, 0.1])
    laid = device.lay_out(plan_of([round_of(1), round_of(2)], num_drafts=3))
    assert laid.lens.tolist() == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------- deciding


def test_prompts_and_rounds_of_any_length_are_decided_together():
    """Two prompts, then rounds with 3, 0 and 1 drafts of which 2, 0 and 1 are right, then padding rows."""
    device = Device()
    device.place(1, num_tokens=21, drafts=[3, 4, 5], confidences=[0.5, 0.6, 0.7])
    device.place(2, num_tokens=9, drafts=[3, 3, 3])
    device.place(3, num_tokens=31, drafts=[6, 5, 5], confidences=[0.25, 0.3, 0.4])
    for slot in (4, 5):
        device.table.write(slot, GREEDY, 100)
    chunks = [chunk_of(4, 0, 6, num_logits=1), chunk_of(5, 16, 3, num_logits=1)]
    rounds = [round_of(1), round_of(2, max_drafts=0), round_of(3, max_drafts=1)]
    laid = device.lay_out(plan_of(rounds, num_drafts=4))
    padded = rows_of(laid.starts, laid.lens, torch.zeros(3, 4, dtype=torch.int64), 9)
    logits = choosing(2, 3, 3, 4, 6, 6, 5, 6, 2, 4, 4)
    decided = device.decide(rounds, padded, logits, chunks)
    assert decided.token_ids.tolist() == [[2, -1, -1, -1], [3, -1, -1, -1], [3, 4, 6, -1], [5, -1, -1, -1], [6, 2, -1, -1]]
    assert decided.num_accepted.tolist() == [0, 0, 2, 0, 1]
    assert decided.num_drafts.tolist() == [0, 0, 3, 0, 1]
    assert decided.starts.tolist() == [5, 18, 20, 8, 30]
    assert decided.confidences[2].tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert decided.confidences[4, 0] == 0.25
    # The number of decided tokens; the last of them is the anchor.
    assert device.table.num_tokens[[4, 5, 1, 2, 3]].tolist() == [7, 20, 24, 10, 33]
    assert device.table.anchor_ids[[4, 5, 1, 2, 3]].tolist() == [2, 3, 6, 5, 2]
    # The log-probabilities of every token come from the row that decided it.
    own = [[0], [1], [2, 3, 4], [6], [7, 8]]
    for number, rows in enumerate(own):
        tokens = decided.token_ids[number, : len(rows)]
        assert torch.equal(decided.logprobs[number, : len(rows)], token_logprobs(logits[rows], tokens))


def test_best_tokens_come_from_the_row_of_each_token_and_as_many_as_the_greediest_wants():
    device = Device()
    device.place(1, num_tokens=21, drafts=[3, 4, 5])
    device.place(2, num_tokens=9, drafts=[6, 3, 3])
    params = [SamplingParams(temperature=0.0, seq_seed=1, top_logprobs=count) for count in (1, 3)]
    rounds = [round_of(1), round_of(2)]
    laid = device.lay_out(plan_of(rounds))
    logits = choosing(3, 4, 2, 2, 6, 5, 2, 2)
    decided = device.decide(rounds, laid, logits, params=params)
    assert decided.num_accepted.tolist() == [2, 1]
    assert decided.top_ids.shape == (2, 4, 3)
    for request, first in ((0, 0), (1, 4)):
        for place in range(int(decided.num_accepted[request]) + 1):
            best = torch.sort(logits[first + place], descending=True, stable=True).indices[:3]
            assert decided.top_ids[request, place].tolist() == best.tolist()
            assert torch.equal(
                decided.top_logprobs[request, place], token_logprobs(logits[[first + place] * 3], best).clamp_min(-9999)
            )


@pytest.mark.parametrize("mode", ["coupled", "argmax", "sampled"])
def test_padding_rows_change_nothing(mode, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, VOCAB, generator=generator)
    drawn_from = torch.randn(NUM_SLOTS, 3, VOCAB, generator=generator)
    found = []
    for num_more in (0, 1, 5):
        device = Device(mode=mode)
        for slot in (1, 2):
            params = SamplingParams(temperature=1.0, seq_seed=slot, ignore_eos=True)
            device.place(slot, num_tokens=12 * slot, drafts=[3, 4, 5], params=params)
        if mode == "sampled":
            device.table.draft_logits.copy_(drawn_from)
        rounds = [round_of(1), round_of(2)]
        lens = torch.tensor([3, 2])
        laid = rows_of(torch.tensor([11, 23]), lens, torch.zeros(2, 4, dtype=torch.int64), 7 + num_more)
        padding = torch.full((num_more, VOCAB), 1e4)
        decided = device.decide(rounds, laid, torch.cat([logits, padding]))
        count = int(decided.num_accepted.sum()) + 2
        found.append((decided.token_ids.tolist(), decided.logprobs[decided.token_ids >= 0].tolist(), count))
        found[-1] += (device.table.num_tokens.tolist(), device.table.anchor_ids.tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("offset", range(4))
def test_an_end_token_anywhere_in_a_round_leaves_no_share_of_the_next(offset):
    device = Device()
    texts = [2, 3, 4, 5]
    texts[offset] = EOS
    device.place(1, num_tokens=21, drafts=texts[:3], params=GREEDY)
    device.place(2, num_tokens=21, drafts=texts[:3], params=SamplingParams(temperature=0.0, seq_seed=1, ignore_eos=True))
    rounds = [round_of(1), round_of(2)]
    plan = plan_of(rounds)
    laid = device.lay_out(plan)
    decided = device.decide(rounds, laid, choosing(*texts, *texts))
    assert device.table.has_ended[[1, 2]].tolist() == [True, False]
    inputs = step_inputs([], laid, rounds)
    confidences = device.speculator.draft(plan, laid, decided, Context.of(torch.zeros(8, 1), inputs), None)
    assert confidences.tolist() == device.table.confidences[[1, 2]].tolist() == [[0.0] * 3, [1.0] * 3]
    assert device.lay_out(plan_of(rounds, num_drafts=3)).lens.tolist() == [0, 3]


def test_residuals_are_drawn_with_noise_of_their_own():
    """The noise that draws a draft and the noise that draws its replacement must be different."""
    device = Device(mode="sampled", num_drafts=1)
    params = SamplingParams(temperature=1.0, seq_seed=11, ignore_eos=True)
    rows = SamplingRows(
        temperature=torch.ones(1), top_k=torch.tensor([-1]), top_p=torch.ones(1), min_p=torch.zeros(1), seeds=torch.tensor([11])
    )
    target = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    target[
        0, 3
    ] = -torch.inf  # the draft is never right; the draft distribution has only this token, so the residual is the target
    for start in range(10, 40):
        device.place(1, num_tokens=start + 1, drafts=[3], params=params)
        device.table.draft_logits[1, 0] = torch.full((VOCAB,), -torch.inf).index_fill_(0, torch.tensor(3), 0.0)
        laid = device.lay_out(plan_of([round_of(1, max_drafts=1)]))
        decided = device.decide([round_of(1, max_drafts=1)], laid, target, params=[params])
        expected, _ = sample(target[:1], rows, torch.tensor([start + 1]))
        assert decided.token_ids[0].tolist() == [int(expected), -1]


# ---------------------------------------------------------------------------------------------------------------------- drafting


def step_inputs(chunks, laid, rounds):
    """The part of a step's inputs that drafting reads."""
    requests = [*chunks, *rounds]
    counts = [len(chunk.token_ids) for chunk in chunks]
    owners = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(counts, dtype=torch.int64))
    positions = torch.tensor([position for chunk in chunks for position in range(chunk.start, chunk.end)], dtype=torch.int64)
    slots = [each.slot for each in requests]
    if laid is not None:
        owners, positions = torch.cat([owners, len(chunks) + laid.owners]), torch.cat([positions, laid.positions])
        slots = [*slots, 0]
    rows = torch.arange(len(positions))
    window = RingRows(rows=rows, slots=torch.tensor(slots)[owners], positions=positions)
    return SimpleNamespace(positions=positions, window=window)


def test_the_drafter_remembers_accepted_tokens_and_never_the_new_anchor():
    """Rounds with 3, 0 and 1 of three drafts right; the mark of every row is its number."""
    device = Device()
    for slot, drafts in ((1, [3, 4, 5]), (2, [6, 6, 6]), (3, [6, 5, 5])):
        device.place(slot, num_tokens=10 * slot + 1, drafts=drafts)
    rounds = [round_of(slot) for slot in (1, 2, 3)]
    chunk = chunk_of(4, 6, 2)  # in the middle of a prompt: no draft
    device.table.write(4, GREEDY, 100)
    plan = plan_of(rounds, chunks=[chunk])
    laid = rows_of(*[torch.tensor(each) for each in ([10, 20, 30], [3, 3, 3])], torch.zeros(3, 4).long(), 15)
    decided = device.decide(rounds, laid, choosing(3, 4, 5, 2, 2, 2, 2, 2, 6, 2, 2, 2, 2, 2, 2))
    assert decided.num_accepted.tolist() == [3, 0, 1]
    aux = torch.arange(17.0).unsqueeze(1)
    device.speculator.draft(plan, laid, decided, Context.of(aux, step_inputs([chunk], laid, rounds)), None)
    expected = [(4, 6, 0.0), (4, 7, 1.0)]
    expected += [(1, 10 + number, 2.0 + number) for number in range(4)]
    expected += [(2, 20, 6.0)]
    expected += [(3, 30, 10.0), (3, 31, 11.0)]
    assert device.drafter.committed == expected
    # The next round's anchor comes directly after the context of the drafter.
    assert [each[:3] for each in device.drafter.asked] == [(1, 2, 14), (2, 2, 21), (3, 2, 32)]
    last = {slot: position for slot, position, _ in device.drafter.committed}
    assert all(position == last[slot] + 1 for slot, _, position, _ in device.drafter.asked)


def test_drafts_follow_prompts_and_resumed_answers():
    device = Device(drafter=FakeDrafter(ids=[[2, 3, 4], [5, 6, 0]], confidences=[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
    for slot in (1, 2, 3):
        device.table.write(slot, GREEDY, 100)
    chunks = [chunk_of(1, 0, 4, num_logits=1), chunk_of(2, 4, 2), chunk_of(3, 8, 3, anchor_id=6, window_floor=5, decoder_floor=7)]
    plan = plan_of([], chunks=chunks)
    decided = device.decide([], None, choosing(5), chunks[:1])
    confidences = device.speculator.draft(plan, None, decided, Context.of(torch.zeros(9, 1), step_inputs(chunks, None, [])), None)
    assert device.drafter.asked == [(1, 5, 4, 0), (3, 6, 11, 7)]
    assert confidences.tolist() == device.table.confidences[[1, 3]].tolist()
    assert device.table.draft_ids[[1, 3]].tolist() == [[2, 3, 4], [5, 6, 0]]
    assert device.table.num_tokens[[1, 3]].tolist() == [5, 12]
    laid = device.lay_out(plan_of([round_of(3), round_of(1)]))
    assert laid.token_ids.tolist() == [6, 5, 6, 0, 5, 2, 3, 4]


def test_a_recycled_slot_has_nothing_of_its_last_request():
    """An old entry with an end, confidences of 0 and a high position does not affect the next request in the slot."""
    device = Device(drafter=FakeDrafter(ids=[[2, 3, 4]], confidences=[[0.9, 0.9, 0.9]]))
    device.place(1, num_tokens=90, drafts=[6, 6, 6], confidences=[0.0, 0.0, 0.0])
    device.table.has_ended[1] = True
    device.place(2, num_tokens=10, confidences=[0.5, 0.5, 0.5])
    chunk = chunk_of(1, 0, 4, num_logits=1)
    device.table.write(1, GREEDY, 100)
    decided = device.decide([], None, choosing(5), [chunk])
    device.speculator.draft(
        plan_of([], chunks=[chunk]), None, decided, Context.of(torch.zeros(4, 1), step_inputs([chunk], None, [])), None
    )
    laid = device.lay_out(plan_of([round_of(1), round_of(2)], num_drafts=3))
    assert (laid.starts.tolist(), laid.lens.tolist()) == ([4, 9], [3, 0])
    assert laid.token_ids.tolist() == [5, 2, 3, 4, 2]
    assert not device.table.has_ended[1]


def test_a_resumed_answer_starts_anew_in_a_slot_whose_last_request_had_ended():
    device = Device()
    device.place(1, num_tokens=90, confidences=[0.0] * 3)
    device.table.has_ended[1] = True
    device.table.write(1, GREEDY, 100)
    chunk = chunk_of(1, 0, 4, anchor_id=5)
    device.speculator.draft(
        plan_of([], chunks=[chunk]), None, None, Context.of(torch.zeros(4, 1), step_inputs([chunk], None, [])), None
    )
    assert device.table.confidences[1].tolist() == [1.0] * 3
    assert not device.table.has_ended[1]


def test_without_a_drafter_nothing_is_drafted_and_resumed_answers_still_find_their_anchor():
    device = Device(num_drafts=0)
    device.table.write(3, GREEDY, 100)
    chunk = chunk_of(3, 8, 3, anchor_id=6)
    assert device.speculator.draft(plan_of([], chunks=[chunk]), None, None, None, None) is None
    assert (int(device.table.num_tokens[3]), int(device.table.anchor_ids[3])) == (12, 6)


@pytest.mark.parametrize(("save_at", "is_reached"), [(20, False), (21, True), (22, True), (23, True), (24, False)])
def test_state_is_saved_exactly_by_the_round_that_computes_the_last_token_of_a_page(save_at, is_reached):
    device = Device()
    device.place(2, num_tokens=21, drafts=[3, 4, 5])  # the round computes positions 20, 21, 22
    each = round_of(2, save_to=5, save_at=save_at)
    laid = device.lay_out(plan_of([each]))
    decided = device.decide([each], laid, choosing(3, 4, 6, 2))
    sources, targets = device.speculator.reached([each], decided)
    assert (sources.tolist(), targets.tolist()) == ([2], [5 if is_reached else 0])


# ------------------------------------------------------------------------------------------------------------------ rows of slots


def test_a_row_says_how_its_request_is_sampled():
    table = SlotTable(NUM_SLOTS, 2, CPU)
    table.write(3, SamplingParams(temperature=0.5, top_k=9, top_p=0.75, min_p=0.25, seq_seed=2**64 - 5, ignore_eos=True), 77)
    rows = table.sampling(torch.tensor([3, 3]), filters=True)
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds)
    assert [each.tolist() for each in columns] == [[0.5] * 2, [9] * 2, [0.75] * 2, [0.25] * 2, [-5] * 2]
    assert (int(table.num_tokens_max[3]), bool(table.stops_at_eos[3])) == (77, False)
    assert table.draft_logits is None


def test_draft_logits_are_kept_only_where_they_are_asked_for():
    assert SlotTable(4, 2, CPU, draft_vocab=VOCAB).draft_logits.shape == (4, 2, VOCAB)
    assert SlotTable(4, 0, CPU, draft_vocab=VOCAB).draft_logits is None
