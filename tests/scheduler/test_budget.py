"""The number of drafts of a step: the best one, within its bounds, and never from the confidences of the drafts themselves."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.ops.sampling import schedule_lengths
from deepinfer.scheduler.budget import CostCurve, DraftBudget, choose_total, survivals

WIDE = 1 << 20
LINEAR = CostCurve([1, 2], [1.0, 1.001])
"""Nearly free rows."""


@st.composite
def curves(draw, *, monotone=True):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True))
    ms = draw(st.lists(st.floats(0.5, 20), min_size=len(sizes), max_size=len(sizes)))
    padded = draw(st.sampled_from(sizes))
    return CostCurve(sizes, sorted(ms) if monotone else ms, max_padded_rows=padded)


@st.composite
def batches(draw, max_requests=4, max_width=3):
    """(confidences [R, width], caps [R])."""
    num, width = draw(st.integers(0, max_requests)), draw(st.integers(1, max_width))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0, float("nan"), float("inf"), -1.0, 2.0]) | st.floats(0, 1)
    conf = draw(st.lists(value, min_size=num * width, max_size=num * width))
    caps = draw(st.lists(st.integers(-1, width + 1), min_size=num, max_size=num))
    return np.array(conf, np.float32).reshape(num, width), np.array(caps, np.int64)


def rates(conf, caps, curve, max_rows, other_rows, other_tokens):
    """Θ of every allowed K, from all ways to spread K drafts over the requests."""
    num, width = conf.shape
    caps = [min(max(int(cap), 0), width) for cap in caps]
    best = {0: 0.0}  # drafts -> most expected tokens beyond the anchors'
    for request in range(num):
        gains, a = [0.0], 1.0
        for c in conf[request]:
            a *= min(max(float(c), 0.0), 1.0) if np.isfinite(c) else 0.0
            gains.append(gains[-1] + a)
        grown = {}
        for used, gain in best.items():
            for length in range(caps[request] + 1):
                grown[used + length] = max(grown.get(used + length, 0.0), gain + gains[length])
        best = grown
    fixed = num + other_rows
    found = {}
    for total, gain in best.items():
        if total == 0 or fixed + total <= max_rows:
            cost = float(curve.cost(np.array([fixed + total]))[0]) if fixed + total else 1.0
            found[total] = (num + other_tokens + gain) / cost
    return found


# ----------------------------------------------------------------------------------------------------------------- the best total


@given(batches(), curves(), st.integers(0, 16), st.integers(0, 5), st.integers(0, 2))
def test_the_total_is_the_best_of_all(batch, curve, max_rows, other_rows, other_tokens):
    conf, caps = batch
    total = choose_total(
        survivals(conf), caps, curve, max_rows=max_rows, num_other_rows=other_rows, num_other_tokens=other_tokens
    )
    every = rates(conf, caps, curve, max_rows, other_rows, other_tokens)
    assert total in every
    assert every[total] >= max(every.values()) * (1 - 1e-9)
    assert all(rate < every[total] * (1 + 1e-9) for smaller, rate in every.items() if smaller < total)


def test_a_bucket_that_pays_is_found_behind_one_that_does_not():
    # From 4 to 5 rows the time doubles.  Four more drafts in the same bucket pay for that; the first draft alone does not.
    curve = CostCurve([4, 12, 16], [1.0, 2.0, 9.0])
    conf = np.full((4, 3), 0.8)
    one = rates(conf, [3] * 4, curve, WIDE, 0, 0)
    assert one[1] < one[0] < one[8]
    assert choose_total(survivals(conf), np.full(4, 3), curve, max_rows=WIDE) == 8


def test_padding_is_not_wasted():
    curve = CostCurve([8, 16, 24], [10.0, 11.0, 60.0])
    conf = np.full((6, 3), 0.6)
    assert choose_total(survivals(conf), np.full(6, 3), curve, max_rows=WIDE) == 10


def test_other_rows_cost_and_other_tokens_count():
    curve = CostCurve([8, 16], [1.0, 2.5])
    conf = np.full((4, 1), 0.9)
    caps = np.ones(4, np.int64)
    assert choose_total(survivals(conf), caps, curve, max_rows=WIDE) == 4
    assert choose_total(survivals(conf), caps, curve, max_rows=WIDE, num_other_rows=2) == 2
    # The prompt's rows reach the next size without drafts, so drafts are free again.
    assert choose_total(survivals(conf), caps, curve, max_rows=WIDE, num_other_rows=6, num_other_tokens=1) == 4


def test_of_equal_totals_the_smallest_wins():
    proportional = CostCurve([1, 2], [1.0, 2.0])
    assert choose_total(np.ones((3, 4)), np.full(3, 4), proportional, max_rows=WIDE) == 0
    flat = CostCurve([64], [5.0])
    assert choose_total(survivals(np.array([[1.0, 0.0], [0.0, 0.0]])), np.full(2, 2), flat, max_rows=WIDE) == 1


def test_ties_fill_the_bucket_that_pays():
    curve = CostCurve([4, 8, 16], [3.0, 3.1, 30.0])
    assert choose_total(np.ones((4, 5)), np.full(4, 5), curve, max_rows=WIDE) == 4


def test_where_rows_cost_nothing_everything_is_verified_that_fits():
    caps = np.array([5, 0, 2])
    survival, flat = np.full((3, 5), 0.1), CostCurve([1, WIDE], [1.0, 1.0])
    assert choose_total(survival, caps, flat, max_rows=WIDE) == 7
    assert choose_total(survival, caps, flat, max_rows=8) == 5
    assert choose_total(survival, caps, flat, max_rows=8, num_other_rows=4) == 1
    assert choose_total(survival, caps, flat, max_rows=2) == 0


@pytest.mark.parametrize("num_requests", [0, 1, 3])
def test_no_caps_means_no_drafts(num_requests):
    caps = np.zeros(num_requests, np.int64)
    assert choose_total(np.ones((num_requests, 5)), caps, LINEAR, max_rows=WIDE) == 0


def test_one_request_stops_where_survival_no_longer_pays():
    curve = CostCurve([1, 2, 3, 4, 5, 6], [10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    conf = np.array([[0.9, 0.8, 0.2, 0.9, 0.9]])
    assert choose_total(survivals(conf), np.array([5]), curve, max_rows=WIDE) == 2


def test_nan_and_infinity_are_hopeless():
    conf = np.array([[np.nan, 1.0], [1.0, np.inf], [-np.inf, 1.0], [1.0, 1.0]], np.float32)
    assert survivals(conf).tolist() == [[0, 0], [1, 0], [0, 0], [1, 1]]
    assert choose_total(survivals(conf), np.full(4, 2), LINEAR, max_rows=WIDE) == 3


@given(batches(max_requests=6, max_width=5), curves())
def test_the_device_spreads_exactly_what_was_chosen(batch, curve):
    conf, caps = batch
    if not len(caps):
        return
    total = choose_total(survivals(conf), caps, curve, max_rows=WIDE)
    lens = schedule_lengths(torch.from_numpy(conf), total, torch.from_numpy(caps)).numpy()
    assert lens.sum() == total
    assert (lens >= 0).all()
    assert (lens <= np.clip(caps, 0, conf.shape[1])).all()
    # The prefixes that the device took are worth what the host computed, up to rounding of products.
    survival = survivals(conf)
    taken = sum(survival[request, :length].sum() for request, length in enumerate(lens))
    offered = np.sort(survival[np.arange(conf.shape[1]) < caps[:, None]])[::-1]
    assert taken == pytest.approx(offered[:total].sum(), abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ confidences by slot

STEEP = CostCurve(range(1, 17), [10.0 + rows for rows in range(1, 17)])
SURE, HOPELESS = [1.0, 1.0], [0.0, 0.0]


def budget_of(*rounds, slot=3):
    """A budget whose ``slot`` has drafted ``rounds`` so far."""
    budget = DraftBudget(8, 2, STEEP)
    budget.reset(slot)
    for confidences in rounds:
        budget.update(np.array([slot]), np.array([confidences], np.float32))
    return budget


def chosen(budget, *, is_ahead, slot=3):
    return budget.choose(np.array([slot]), np.array([2]), np.array([is_ahead]), 0, WIDE)


def test_the_latest_committed_round_counts_while_the_next_is_in_flight():
    assert chosen(budget_of(SURE, HOPELESS), is_ahead=True) == 0
    assert chosen(budget_of(HOPELESS, SURE), is_ahead=True) == 2


def test_a_round_has_no_say_in_how_much_of_itself_is_verified():
    # The round before decides, whatever the confidences of the drafts to be verified are.
    for latest in (SURE, HOPELESS, [0.5, 0.5], [float("nan")] * 2):
        assert chosen(budget_of(SURE, latest), is_ahead=False) == 2
        assert chosen(budget_of(HOPELESS, latest), is_ahead=False) == 0
        assert chosen(budget_of(latest), is_ahead=False) == 2, "a first round has none before it and counts as sure"


def test_each_request_counts_with_its_own_generation():
    budget = DraftBudget(8, 2, STEEP)
    slots = np.array([1, 6])
    budget.update(slots, np.array([SURE, SURE]))
    budget.update(slots[:1], np.array([HOPELESS]))
    # Slot 1 drafted once more than slot 6 and was not in the last step.
    assert budget.choose(slots, np.array([2, 2]), np.array([False, True]), 0, WIDE) == 4
    assert budget.choose(slots, np.array([2, 2]), np.array([True, True]), 0, WIDE) == 2
    assert budget.choose(slots[::-1], np.array([1, 2]), np.array([True, True]), 0, WIDE) == 1


def test_a_recycled_slot_starts_anew():
    for is_ahead in (True, False):
        budget = budget_of(HOPELESS, HOPELESS)
        assert chosen(budget, is_ahead=is_ahead) == 0
        budget.reset(3)
        assert chosen(budget, is_ahead=is_ahead) == 2
    budget = budget_of(HOPELESS, HOPELESS)
    budget.reset(3)
    budget.update(np.array([3]), np.array([HOPELESS]))
    assert chosen(budget, is_ahead=False) == 2, "the round before the first is not the earlier request's"
    assert chosen(budget, is_ahead=True) == 0


def test_an_empty_batch_has_no_drafts():
    budget = DraftBudget(8, 2, STEEP)
    none = np.array([], np.int64)
    budget.update(none, np.empty((0, 2)))
    assert budget.choose(none, none, np.array([], bool), 0, WIDE) == 0
    assert budget.choose(none, none, np.array([], bool), 7, WIDE, 1) == 0


@given(batches(max_requests=5), curves(), st.integers(0, 20), st.integers(0, 4))
def test_a_step_never_has_more_rows_than_allowed(batch, curve, max_rows, other_rows):
    conf, caps = batch
    budget = DraftBudget(8, conf.shape[1], curve)
    slots = np.arange(len(caps))
    budget.update(slots, conf)
    total = budget.choose(slots, caps, np.ones(len(caps), bool), other_rows, max_rows)
    assert 0 <= total <= np.clip(caps, 0, conf.shape[1]).sum()
    assert total == 0 or len(caps) + other_rows + total <= max_rows


# --------------------------------------------------------------------------------------------------------------------- step times


def cost(curve, *rows):
    return curve.cost(np.array(rows)).tolist()


def test_a_step_costs_what_the_size_it_is_rounded_up_to_costs():
    curve = CostCurve([8, 1, 32], [2.0, 1.0, 4.0])
    assert cost(curve, 1, 2, 8, 9, 32) == [1, 2, 2, 4, 4]
    assert cost(curve, 56, 80) == [6, 8]
    assert curve.cost(np.array([[1, 2], [8, 40]])).shape == (2, 2)


def test_beyond_the_largest_padded_size_cost_is_linear():
    curve = CostCurve([8, 16, 32, 64], [1.0, 2.0, 4.0, 12.0], max_padded_rows=16)
    assert cost(curve, 9, 16, 24, 32, 48, 64, 96) == [2.0, 2.0, 3.0, 4.0, 8.0, 12.0, 20.0]


def test_noise_in_the_last_size_does_not_make_the_slope():
    assert cost(CostCurve([10, 20, 39, 40], [1.0, 2.0, 3.9, 4.0]), 60) == [6]
    assert cost(CostCurve([10, 20, 39, 40], [1.0, 2.0, 4.0, 4.0]), 60) == [6]


def test_one_point_makes_a_flat_curve():
    assert cost(CostCurve([8], [3.0]), 1, 8, 100) == [3, 3, 3]


@given(curves(monotone=False), st.lists(st.tuples(st.integers(0, 60), st.floats(0, 1e6)), max_size=200))
def test_cost_never_falls(curve, samples):
    for rows, ms in samples:
        curve.refine(rows, ms)
    values = curve.cost(np.arange(0, 200))
    assert np.isfinite(values).all()
    assert (values > 0).all()
    assert (np.diff(values) >= -1e-9 * values[1:]).all()


def test_dips_are_lifted():
    assert cost(CostCurve([1, 2, 3], [2.0, 1.0, 3.0]), 1, 2, 3) == [2, 2, 3]


@pytest.mark.parametrize(
    ("rows", "ms", "padded"),
    [
        ([], [], None),
        ([1], [1.0, 2.0], None),
        ([1, 1], [1.0, 2.0], None),
        ([0], [1.0], None),
        ([1], [0.0], None),
        ([1], [float("nan")], None),
        ([1, 4], [1.0, 2.0], 3),
    ],
)
def test_points_that_make_no_curve_are_refused(rows, ms, padded):
    with pytest.raises(ValueError, match=r"size|max_padded_rows"):
        CostCurve(rows, ms, max_padded_rows=padded)


def feed(curve, rows, times):
    for ms in times:
        curve.refine(rows, float(ms))


def test_measured_steps_take_over_from_the_profile(seed):
    rng = np.random.default_rng(seed)
    truth = {8: 10.0, 16: 14.0, 32: 30.0}
    curve = CostCurve(list(truth), [5.0, 6.0, 7.0])
    for _ in range(200):
        for rows, ms in truth.items():
            slow = 50.0 if rng.random() < 0.2 else 1.0  # sometimes another process uses the machine
            curve.refine(rows, ms * slow * rng.uniform(0.97, 1.03))
    assert curve.ms == pytest.approx(list(truth.values()), rel=0.03)


def test_a_few_samples_change_nothing():
    curve = CostCurve([8, 16], [1.0, 2.0])
    feed(curve, 8, [100.0] * 10)  # the tenth is held back
    assert cost(curve, 8, 16) == [1, 2]
    feed(curve, 8, [100.0])
    assert cost(curve, 8) == [100]


def test_sizes_without_samples_follow_the_others():
    curve = CostCurve([8, 16, 32], [1.0, 2.0, 4.0])
    feed(curve, 12, [3.0] * 11)  # rounded up to 16
    assert cost(curve, 8, 16, 32) == [1.5, 3, 6]


def test_steps_between_two_sizes_count_for_the_larger():
    curve = CostCurve([8, 16, 32], [1.0, 2.0, 4.0], max_padded_rows=8)
    feed(curve, 24, [6.0] * 11)  # twice what the profile says half way between 16 and 32
    assert cost(curve, 8, 16, 24, 32) == [2, 4, 6, 8]


def test_old_samples_are_forgotten():
    curve = CostCurve([8, 16], [1.0, 2.0])
    feed(curve, 16, [20.0] * 11)
    assert cost(curve, 8, 16) == [10, 20]
    feed(curve, 8, [1.0] * 5010)
    assert cost(curve, 8, 16) == [1, 2]


def test_a_sample_counts_only_once_the_next_has_come():
    curve = CostCurve([8], [1.0])
    feed(curve, 8, [5.0] * 10)
    assert cost(curve, 8) == [1]
    curve.refine(9, 1.0)  # above all sizes: only the sample before counts
    assert cost(curve, 8) == [5]


def test_planning_needs_no_torch():
    code = "import sys, deepinfer.scheduler.budget; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
