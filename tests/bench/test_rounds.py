"""The analysis of rounds, compared with numbers computed by hand and with data whose true values are known."""

import numpy as np
import pytest

from deepinfer.bench.rounds import (
    TEMPERATURE_GRID,
    Rounds,
    StepRounds,
    accepted_length,
    assumed_rounds,
    brier_score,
    calibration_error,
    calibrations,
    collect,
    conditional_acceptance,
    estimate_gain,
    fit_temperatures,
    reliability,
    scale,
    survival_by_position,
    verification_efficiency,
)
from deepinfer.scheduler.budget import CostCurve


def rounds_of(verified, accepted, confidences=None, earlier=None):
    shape = (len(verified), max(verified))
    confidences = np.full(shape, 0.5) if confidences is None else np.array(confidences, float)
    earlier = np.ones(shape) if earlier is None else np.array(earlier, float)
    return Rounds(num_verified=np.array(verified), num_accepted=np.array(accepted), confidences=confidences, earlier=earlier)


def test_acceptance_counts_only_drafts_that_had_their_chance():
    rounds = rounds_of([2, 2, 2, 1, 0], [2, 1, 0, 1, 0])
    # Position 1: verified in four rounds, accepted in three.  Position 2: reached and verified in two rounds, accepted in one.
    assert conditional_acceptance(rounds).tolist() == [0.75, 0.5]
    assert survival_by_position(rounds).tolist() == [0.75, 0.375]
    assert accepted_length(rounds) == 1 + 4 / 5
    assert verification_efficiency(rounds) == (5 + 4) / (5 + 7)


def test_a_position_never_reached_has_no_acceptance():
    found = conditional_acceptance(rounds_of([3, 3], [1, 0]))
    assert found[:2].tolist() == [0.5, 0.0]
    assert np.isnan(found[2])


def test_full_rounds_are_those_that_verified_the_whole_block():
    full = rounds_of([3, 2, 3], [0, 1, 2], confidences=[[0.1] * 3, [0.2] * 3, [0.3] * 3]).full()
    assert len(full) == 2
    assert full.num_accepted.tolist() == [0, 2]
    assert full.confidences[:, 0].tolist() == [0.1, 0.3]


def test_rounds_know_the_confidences_of_the_round_before():
    def step(slots, verified, accepted, confidences):
        slots, verified, accepted = (np.array(each, np.int64) for each in (slots, verified, accepted))
        confidences = np.array(confidences, np.float64).reshape(-1, 2)
        return StepRounds(slots=slots, num_verified=verified, num_accepted=accepted, confidences=confidences)

    steps = [
        step([4, 7], [2, 2], [1, 0], [[0.5, 0.25], [1, 0]]),
        step([], [], [], []),
        step([7], [1], [1], [[0.75, 0]]),
        step([7, 4], [2, 2], [2, 2], [[0, 0], [0, 0]]),
    ]
    rounds = collect(steps, 2)
    assert rounds.num_verified.tolist() == [2, 2, 1, 2, 2]
    assert rounds.num_accepted.tolist() == [1, 0, 1, 2, 2]
    assert rounds.earlier.tolist() == [[1, 1], [1, 1], [1, 0], [0.75, 0], [0.5, 0.25]]
    assert len(collect([], 5)) == 0
    assert collect([], 5).num_drafts == 5


# -------------------------------------------------------------------------------------------------------------------- calibration


def test_bins_are_of_equal_width_and_hold_both_ends():
    count, predicted, happened = reliability(np.array([0.0, 0.05, 0.5, 1.0]), np.array([False, True, True, True]))
    assert count.tolist() == [2] + [0] * 6 + [1] + [0] * 6 + [1]
    assert predicted[[0, 7, 14]] == pytest.approx([0.025, 0.5, 1.0])
    assert happened[[0, 7, 14]].tolist() == [0.5, 1, 1]
    assert np.isnan(predicted[1])


def test_calibration_error_and_brier_score_by_hand():
    predicted, happened = np.array([0.1, 0.1, 0.9, 0.9]), np.array([False, False, True, False])
    assert calibration_error(predicted, happened) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    assert brier_score(predicted, happened) == pytest.approx((0.01 + 0.01 + 0.01 + 0.81) / 4)
    assert calibration_error(np.array([]), np.array([], bool)) == 0


def test_assumed_rounds_are_what_they_are_said_to_be(seed):
    acceptance = [0.9, 0.6, 1.0, 0.0]
    rounds = assumed_rounds(acceptance, 40_000, seed)
    assert conditional_acceptance(rounds) == pytest.approx(acceptance, abs=0.01)
    assert rounds.confidences.mean(axis=0) == pytest.approx(acceptance, abs=0.01)
    assert rounds.confidences[:, 0].std() == pytest.approx((0.9 * 0.1 / 9) ** 0.5, rel=0.05)
    for each in calibrations(rounds):
        assert each.error < 0.01
        assert each.predicted == pytest.approx(each.happened, abs=0.01)


def test_scaling_keeps_certainty_and_moves_the_rest():
    assert scale(np.array([0.0, 0.5, 1.0]), [3.0, 3.0, 3.0]).tolist() == [0, 0.5, 1]
    assert scale(np.array([[0.9, 0.9]]), [1.0, 2.0])[0] == pytest.approx([0.9, 0.75])


@pytest.mark.parametrize("distortion", [(0.5012, 1.5849, 1.0), (1.9953, 1.9953, 1.9953)])
def test_a_known_distortion_is_undone(seed, distortion):
    true = assumed_rounds([0.85, 0.75, 0.7], 60_000, seed)
    distorted = Rounds(
        num_verified=true.num_verified,
        num_accepted=true.num_accepted,
        confidences=scale(true.confidences, 1 / np.array(distortion)),
        earlier=true.earlier,
    )
    fitted = fit_temperatures(distorted)
    steps = np.log(np.array(fitted) / distortion) / np.log(TEMPERATURE_GRID[1] / TEMPERATURE_GRID[0])
    assert np.abs(steps).max() <= 1.01, f"{fitted} is more than one step of the grid from {distortion}"
    before, after = calibrations(distorted), calibrations(distorted, fitted)
    assert max(each.error for each in after) < 0.015 < max(each.error for each in before)


def test_confidences_that_are_right_are_left_alone():
    certain = rounds_of([2] * 4, [2] * 4, confidences=np.ones((4, 2)))
    assert fit_temperatures(certain) == (1.0, 1.0)


# --------------------------------------------------------------------------------------------------------------------------- gain


def test_gain_of_equal_rounds_is_what_a_direct_calculation_gives():
    # Every round accepts one of three drafts, and its confidences predict it.  If rows are expensive, one draft each is best.
    confidences = [[1.0, 0.0, 0.0]] * 3
    rounds = rounds_of([3] * 3, [1] * 3, confidences=confidences, earlier=confidences)
    curve = CostCurve(range(1, 41), [10.0 + rows for rows in range(1, 41)])
    found = estimate_gain(rounds, curve, 10, num_steps=5)
    assert (found.drafts, found.accepted_length, found.fixed_accepted_length) == (1, 2, 2)
    assert (found.step_ms, found.fixed_step_ms) == (30, 50)
    assert found.gain == pytest.approx(50 / 30 - 1)


def test_lengths_follow_the_rounds_own_confidences():
    # The total comes from the earlier rounds, which predicted one draft each.  The device gives both drafts to the request whose
    # current confidences are high.
    rounds = rounds_of([2, 2], [2, 0], confidences=[[1.0, 1.0], [0.1, 0.1]], earlier=[[0.9, 0.1], [0.9, 0.1]])
    curve = CostCurve([1, 2, 4, 6], [1.0, 1.2, 1.3, 9.0])
    found = estimate_gain(rounds, curve, 2, num_steps=4000)
    assert found.drafts == 1
    # Two rounds are drawn at random: both are good (1 + 1 of 2 drafts), one is good (2 drafts), or none is good (0 drafts).
    assert found.accepted_length == pytest.approx(1 + (0.25 * 2 + 0.5 * 2) / 2, abs=0.03)
    assert found.fixed_accepted_length == pytest.approx(1 + (0.25 * 4 + 0.5 * 2) / 2, abs=0.03)


def test_where_rows_are_free_adaptive_is_fixed():
    rounds = assumed_rounds([0.8, 0.7, 0.6], 200)
    found = estimate_gain(rounds, CostCurve([1000], [5.0]), 16, num_steps=50)
    assert found.drafts == 3
    assert found.accepted_length == found.fixed_accepted_length
    assert found.gain == 0


def test_gain_is_repeatable_and_grows_with_load():
    rounds = assumed_rounds([0.6, 0.55, 0.5, 0.5, 0.5], 500)
    curve = CostCurve([64, 128, 256, 576], [10.0, 10.5, 13.0, 25.0], max_padded_rows=64)
    gains = [estimate_gain(rounds, curve, concurrency, num_steps=60) for concurrency in (8, 48, 96)]
    assert gains == [estimate_gain(rounds, curve, concurrency, num_steps=60) for concurrency in (8, 48, 96)]
    assert gains[0].gain < gains[1].gain < gains[2].gain
    assert gains[2].drafts < gains[0].drafts == 5


def test_temperatures_reach_the_choice():
    rounds = assumed_rounds([0.6, 0.5], 500)
    curve = CostCurve(range(1, 31), [5.0 + rows for rows in range(1, 31)])
    sure = estimate_gain(rounds, curve, 10, temperatures=[0.1, 0.1], num_steps=40)
    assert sure.drafts > estimate_gain(rounds, curve, 10, num_steps=40).drafts
