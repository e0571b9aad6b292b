"""Token rules: every row gets the result of reading its request's text, independent of the other requests of the step."""

import random

import numpy as np
import pytest
import torch

from deepinfer.executor.rules import PackedRows, TokenRules
from deepinfer.request import SamplingParams
from tests.devices import no_waits

CPU = torch.device("cpu")
VOCAB, EOS, IMAGE = 23, 1, 22
INF = float("inf")


def make_rules(device=CPU, forbidden=(IMAGE,)):
    return TokenRules(VOCAB, eos_token_id=EOS, forbidden=forbidden, device=device)


class Turn:
    """A request in a step: its text, its drafts, and the number of verified drafts."""

    def __init__(self, name, params, prompt, output, drafts, num_verified):
        self.name, self.params, self.prompt, self.output = name, params, prompt, output
        self.drafts, self.num_verified = drafts, num_verified

    def enter(self, rules):
        rules.add(self.name, self.params, len(self.prompt))
        rules.start(self.name, np.array(self.prompt + self.output, dtype=np.int32))

    def expected(self, logits):
        """(logits, allowed) of each row, computed from the text token by token."""
        params = self.params
        rows = []
        for j in range(self.num_verified + 1):
            output = self.output + [token for token in self.drafts[:j] if token >= 0]
            idx = len(self.output) + j
            golden = params.golden_token_ids or ()
            row, allowed = [], []
            for token, value in enumerate(logits[j].tolist()):
                value += dict(params.bias_pairs).get(token, 0.0)
                if token in self.prompt or token in output:
                    value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
                value -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
                row.append(value)
                is_allowed = token != IMAGE and token not in params.banned_token_ids
                is_allowed &= params.allowed_token_ids is None or token in params.allowed_token_ids
                is_allowed &= token != EOS or idx >= params.first_n_token_no_eos
                allowed.append(token == golden[idx] if idx < len(golden) else is_allowed)
            rows.append((row, allowed))
        return rows


def pack(turns, device=CPU, num_padding=0, noise=None):
    """Packed rows of a step; the owners of padding rows are arbitrary."""
    owners = [i for i, turn in enumerate(turns) for _ in range(turn.num_verified + 1)]
    offsets = [j for turn in turns for j in range(turn.num_verified + 1)]
    positions = [len(t.prompt) + len(t.output) + j for t in turns for j in range(t.num_verified + 1)]
    noise = noise or random.Random(1)
    for _ in range(num_padding):
        owners.append(noise.randrange(len(turns)))
        offsets.append(noise.randrange(0, 9))
        positions.append(noise.randrange(0, 50))
    numbers = torch.tensor([owners, offsets, positions]).to(device)
    drafts = torch.tensor([turn.drafts for turn in turns], dtype=torch.int64).to(device)
    return PackedRows(
        request_ids=[t.name for t in turns], owners=numbers[0], offsets=numbers[1], positions=numbers[2], draft_ids=drafts
    )


def random_turn(rng, name, width=3):
    text = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(low, 7))] for low in (1, 0)]
    given = {
        "repetition_penalty": rng.choice([1.0, 1.0, 1.5, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.25]),
        "frequency_penalty": rng.choice([0.0, 0.0, -0.5]),
        "logit_bias": rng.choice([None, None, {3: 2.5, 7: -100, 11: 0.25}]),
        "banned_token_ids": rng.choice([(), (), (4, 5)]),
        "allowed_token_ids": rng.choice([None, None, range(3, 20), [EOS, 9]]),
        "first_n_token_no_eos": rng.choice([0, 0, 4]),
        "golden_token_ids": rng.choice([None, None, [EOS, 5, IMAGE, 8, 5, 4]]),
    }
    if rng.random() < 0.2:
        given = {}
    drafts = [rng.choice([-1, *range(2, 9)]) for _ in range(width)]
    return Turn(name, SamplingParams(**given), *text, drafts, rng.randrange(width + 1))


@pytest.mark.parametrize("number", range(40))
def test_every_row_says_what_its_text_says(number, device):
    rng = random.Random(number)
    turns = [random_turn(rng, f"r{i}") for i in range(rng.randrange(1, 7))]
    rules = make_rules(device)
    for turn in turns:
        turn.enter(rules)
    packed = pack(turns, device, num_padding=rng.randrange(4), noise=rng)
    logits = torch.randn(len(packed.owners), VOCAB, generator=torch.Generator().manual_seed(number)).to(device)
    before = logits.clone()
    got, mask = rules.apply(logits, packed)
    assert torch.equal(logits, before)
    assert bool(mask.any(-1).all())
    mask = mask.expand(got.shape)
    start = 0
    for turn in turns:
        for j, (row, allowed) in enumerate(turn.expected(logits[start : start + turn.num_verified + 1])):
            assert got[start + j].tolist() == pytest.approx(row, abs=1e-5)
            assert mask[start + j].tolist() == allowed
        start += turn.num_verified + 1


@pytest.mark.parametrize("number", range(20))
def test_a_request_is_ruled_alone_as_in_company_bit_for_bit(number):
    rng = random.Random(1000 + number)
    turns = [random_turn(rng, f"r{i}") for i in range(5)]
    rules = make_rules()
    for turn in turns:
        turn.enter(rules)
    packed = pack(turns)
    logits = torch.randn(len(packed.owners), VOCAB, generator=torch.Generator().manual_seed(number))
    whole, mask = rules.apply(logits, packed)
    mask = mask.expand(whole.shape)
    start = 0
    for turn in turns:
        part = slice(start, start + turn.num_verified + 1)
        start = part.stop
        company_free = make_rules()
        turn.enter(company_free)
        alone, own_mask = company_free.apply(logits[part].clone(), pack([turn]))
        assert torch.equal(alone, whole[part])
        assert torch.equal(own_mask.expand(alone.shape), mask[part])


def test_without_rules_logits_and_mask_are_handed_through():
    rules = make_rules()
    rules.add("plain", SamplingParams(temperature=0.5, top_p=0.5), 3)
    rules.add("ruled", SamplingParams(presence_penalty=1, banned_token_ids=[4]), 3)
    rules.start("plain")
    rules.start("ruled")
    turns = [Turn(name, SamplingParams(), [2, 3, 4], [], [5, 6], 2) for name in ("plain", "unknown")]
    logits = torch.randn(6, VOCAB)
    got, mask = rules.apply(logits, pack(turns))
    assert got is logits
    assert mask is rules._allowed
    assert mask.tolist() == [token != IMAGE for token in range(VOCAB)]
    assert len(rules._rules) == 1


def test_a_rule_about_logits_alone_leaves_the_common_mask_and_the_other_way_round():
    for given, has_logits, has_mask in (
        ({"frequency_penalty": 1}, True, False),
        ({"logit_bias": {3: 1}}, True, False),
        ({"banned_token_ids": [3]}, False, True),
        ({"first_n_token_no_eos": 1}, False, True),
        ({"golden_token_ids": [3]}, False, True),
    ):
        rules = make_rules()
        turn = Turn("a", SamplingParams(**given), [2], [], [3], 1)
        turn.enter(rules)
        logits = torch.randn(2, VOCAB)
        got, mask = rules.apply(logits, pack([turn]))
        assert (got is not logits) == has_logits
        assert (mask.ndim == 2) == has_mask


def penalised(rules, output, drafts):
    """The amount that a presence penalty of 1 subtracts from zero logits at each row."""
    turn = Turn("a", SamplingParams(presence_penalty=1), [2], output, drafts, len(drafts))
    got, _ = rules.apply(torch.zeros(len(drafts) + 1, VOCAB), pack([turn]))
    return [sorted(torch.nonzero(row).flatten().tolist()) for row in got]


def test_rows_after_a_draft_count_it_and_the_rows_before_do_not():
    rules = make_rules()
    Turn("a", SamplingParams(presence_penalty=1), [2], [6], [], 0).enter(rules)
    assert penalised(rules, [6], [7, -1, 7, 8]) == [[6], [6, 7], [6, 7], [6, 7], [6, 7, 8]]


def test_rejected_drafts_are_not_counted():
    rules = make_rules()
    Turn("a", SamplingParams(presence_penalty=1), [2], [6], [], 0).enter(rules)
    penalised(rules, [6], [7, 8, 9])
    rules.record(
        ["other", "a"], torch.tensor([[3, 4, 5, 10], [7, 11, -1, -1]])
    )  # draft 7 was accepted; 11 replaces the rejected draft 8
    assert penalised(rules, [6, 7, 11], []) == [[6, 7, 11]]


def test_what_is_recorded_is_what_a_restart_counts():
    rng = random.Random(5)
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5)
    prompt, output = [2, 3, 3], []
    recorded, restarted = make_rules(), make_rules()
    for rules in (recorded, restarted):
        Turn("a", params, prompt, [], [], 0).enter(rules)
    for _ in range(6):
        emitted = [rng.randrange(2, 9) for _ in range(rng.randrange(1, 4))]
        recorded.record(["a"], torch.tensor([emitted + [-1] * (4 - len(emitted))]))
        output += emitted
        restarted.start("a", np.array(prompt + output, dtype=np.int32))
        turn = Turn("a", params, prompt, output, [4, 4], 2)
        logits = torch.randn(3, VOCAB)
        one, other = (rules.apply(logits, pack([turn]))[0] for rules in (recorded, restarted))
        assert torch.equal(one, other)
        for row, (expected, _) in zip(one.tolist(), turn.expected(logits), strict=True):
            assert row == pytest.approx(expected, abs=1e-5)


def test_rows_of_the_tables_are_used_again_and_carry_nothing_over():
    rules = make_rules()
    everything = SamplingParams(presence_penalty=1, logit_bias={3: 1}, banned_token_ids=[4])
    for _ in range(3):
        turns = [Turn(f"r{i}", everything, [5, 6], [7, 7], [8], 1) for i in range(9)]
        for turn in turns:
            turn.enter(rules)
        for turn in turns:
            rules.remove(turn.name)
    rules.remove("unknown")
    for table in (rules._biases, rules._histories, rules._masks):
        assert len(table.tensors[0]) == len(table._free) == len(set(table._free)) == 16
    clean = Turn("new", SamplingParams(presence_penalty=1, logit_bias={9: 1}, banned_token_ids=[10]), [2], [], [3], 1)
    clean.enter(rules)
    logits = torch.randn(2, VOCAB)
    got, mask = rules.apply(logits, pack([clean]))
    for j, (row, allowed) in enumerate(clean.expected(logits)):
        assert got[j].tolist() == pytest.approx(row, abs=1e-5)
        assert mask[j].tolist() == allowed


@pytest.mark.parametrize(
    ("given", "forbidden", "left"),
    [
        ({"allowed_token_ids": [EOS], "first_n_token_no_eos": 3}, [IMAGE], [EOS]),
        ({"allowed_token_ids": [5, 6]}, [5, 6], [EOS]),
        ({"banned_token_ids": [0, *range(2, IMAGE)], "first_n_token_no_eos": 3}, [IMAGE], [EOS]),
        ({"golden_token_ids": [IMAGE]}, [IMAGE], [IMAGE]),
        ({"golden_token_ids": [5], "banned_token_ids": [5], "logit_bias": {5: -100}}, [IMAGE], [5]),
    ],
)
def test_something_is_always_allowed(given, forbidden, left):
    rules = make_rules(forbidden=forbidden)
    turn = Turn("a", SamplingParams(**given), [2], [], [], 0)
    turn.enter(rules)
    _, mask = rules.apply(torch.zeros(1, VOCAB), pack([turn]))
    assert torch.nonzero(mask.view(-1)).flatten().tolist() == left


def test_double_logits_stay_double_and_half_precision_ones_are_ruled_wide():
    rules = make_rules()
    turn = Turn("a", SamplingParams(presence_penalty=1), [2], [3], [4], 1)
    turn.enter(rules)
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        assert rules.apply(torch.zeros(2, VOCAB, dtype=dtype), pack([turn]))[0].dtype == expected


def test_nothing_waits_for_the_device(device):
    rng = random.Random(3)
    turns = [random_turn(rng, f"r{i}") for i in range(12)]
    rules, packed = make_rules(device), pack(turns, device, num_padding=3)
    logits = torch.randn(len(packed.owners), VOCAB, device=device)
    emitted = torch.full((len(turns), 4), 5, device=device)
    with no_waits(device):
        for turn in turns:
            turn.enter(rules)
        for _ in range(2):
            rules.apply(logits, packed)
            rules.record(packed.request_ids, emitted)
        for turn in turns:
            rules.remove(turn.name)
