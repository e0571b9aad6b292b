"""Analyses rounds of speculative decoding: acceptance, calibration of the confidences, and the gain of adaptive lengths.

All functions are pure functions of recorded rounds.  A round verifies some drafts of one request.  It emits the accepted drafts
and one more token.  *Accepted length* includes that token; *accepted drafts* does not.

Calibration needs rounds that verified the whole block, at confidence temperatures of 1, because a shortened round does not show
whether the other drafts would be accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.ops.sampling import schedule_lengths
from deepinfer.scheduler.budget import CostCurve, choose_total, survivals
from deepinfer.step import StepPlan, StepResult

NUM_BINS = 15
TEMPERATURE_GRID = tuple(np.logspace(-1, 1, 41).tolist())
BETA_CONCENTRATION = 8.0
"""Assumed confidences of a position with acceptance a have the distribution Beta(8 a, 8 (1 − a)): mean a, standard deviation 0.13
at a = 0.8."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRounds:
    """The rounds of one committed step.

    Attributes:
        slots: [num_rounds] state slots; a slot must keep its request while rounds are recorded.
        num_verified, num_accepted: [num_rounds] drafts.
        confidences: [num_rounds, num_drafts] of the verified drafts; NaN for other drafts.
    """

    slots: Ints
    num_verified: Ints
    num_accepted: Ints
    confidences: Floats


def rounds_of_step(plan: StepPlan, result: StepResult, request_ids: Collection[str], num_drafts: int) -> StepRounds:
    """The rounds of ``request_ids`` in a step that were allowed to verify drafts.

    A request that has ended may have one more round in flight; that round does not count.

    Args:
        plan, result: the step.
        request_ids: requests that got tokens from the step.
        num_drafts: drafts of a block.
    """
    rounds = [each for each in plan.rounds if each.max_drafts and each.request_id in request_ids]
    sampled = [result.sampled[each.request_id] for each in rounds]
    confidences = np.full((len(rounds), num_drafts), np.nan)
    for target, each in zip(confidences, sampled, strict=True):
        target[: each.num_drafts] = each.confidences
    return StepRounds(
        slots=np.array([each.slot for each in rounds], np.int64),
        num_verified=np.array([each.num_drafts for each in sampled], np.int64),
        num_accepted=np.array([len(each.token_ids) - 1 for each in sampled], np.int64),
        confidences=confidences,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Recorded rounds, in any order.

    Attributes:
        num_verified, num_accepted: [num_rounds].
        confidences: [num_rounds, num_drafts], of the drafts of the round.
        earlier: [num_rounds, num_drafts], of the drafts of the request's previous round; 1 for its first round.
    """

    num_verified: Ints
    num_accepted: Ints
    confidences: Floats
    earlier: Floats

    def __len__(self) -> int:
        """Number of rounds."""
        return len(self.num_verified)

    @property
    def num_drafts(self) -> int:
        """Drafts of a block."""
        return int(self.confidences.shape[1])

    def full(self) -> Rounds:
        """The rounds that verified the whole block."""
        kept = self.num_verified == self.num_drafts
        return Rounds(
            num_verified=self.num_verified[kept],
            num_accepted=self.num_accepted[kept],
            confidences=self.confidences[kept],
            earlier=self.earlier[kept],
        )


def collect(steps: Iterable[StepRounds], num_drafts: int) -> Rounds:
    """The rounds of ``steps``, which must be in the order in which they ran."""
    verified, accepted, confidences, earlier = [], [], [np.empty((0, num_drafts))], [np.empty((0, num_drafts))]
    latest: dict[int, Floats] = {}
    first = np.ones(num_drafts)
    for step in steps:
        slots = step.slots.tolist()
        if slots:
            earlier.append(np.stack([latest.get(slot, first) for slot in slots]))
        latest.update(zip(slots, step.confidences, strict=True))
        verified.append(step.num_verified)
        accepted.append(step.num_accepted)
        confidences.append(step.confidences)
    nothing = np.empty(0, np.int64)
    return Rounds(
        num_verified=np.concatenate([nothing, *verified]),
        num_accepted=np.concatenate([nothing, *accepted]),
        confidences=np.concatenate(confidences),
        earlier=np.concatenate(earlier),
    )


def assumed_rounds(acceptance: Sequence[float], num_rounds: int, seed: int = 0) -> Rounds:
    """Draw rounds at random instead of recording them; they are independent and perfectly calibrated.

    Args:
        acceptance: conditional acceptance of each position, in [0, 1].
        num_rounds: number of rounds to draw.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    mean = np.asarray(acceptance, np.float64)
    inner = (mean > 0) & (mean < 1)
    safe = np.where(inner, mean, 0.5)

    def draw() -> Floats:
        drawn = rng.beta(BETA_CONCENTRATION * safe, BETA_CONCENTRATION * (1 - safe), (num_rounds, len(mean)))
        return np.where(inner, drawn, mean)

    confidences, earlier = draw(), draw()
    accepted = np.cumprod(rng.random(confidences.shape) < confidences, axis=1).sum(axis=1)
    return Rounds(
        num_verified=np.full(num_rounds, len(mean), np.int64),
        num_accepted=accepted.astype(np.int64),
        confidences=confidences,
        earlier=earlier,
    )


# --------------------------------------------------------------------------------------------------------------------- acceptance


def conditional_acceptance(rounds: Rounds) -> Floats:
    """[num_drafts]: for each k the share of accepted drafts among verified drafts k with all drafts before accepted; else NaN."""
    positions = np.arange(1, rounds.num_drafts + 1)
    verified, accepted = rounds.num_verified[:, None], rounds.num_accepted[:, None]
    tried = ((verified >= positions) & (accepted >= positions - 1)).sum(axis=0)
    passed = (accepted >= positions).sum(axis=0)
    share = passed / np.maximum(tried, 1)
    share[tried == 0] = np.nan
    return np.asarray(share, np.float64)


def survival_by_position(rounds: Rounds) -> Floats:
    """[num_drafts]: for each k the probability that the first k drafts are all accepted, from conditional acceptance."""
    return np.asarray(np.cumprod(conditional_acceptance(rounds)), np.float64)


def accepted_length(rounds: Rounds) -> float:
    """Mean number of emitted tokens of a round, including the correction or bonus token."""
    return 1 + float(rounds.num_accepted.mean())


def verification_efficiency(rounds: Rounds) -> float:
    """Emitted tokens divided by rows of rounds, including anchors."""
    return float((1 + rounds.num_accepted).sum() / (1 + rounds.num_verified).sum())


# -------------------------------------------------------------------------------------------------------------------- calibration


def reliability(predicted: Floats, happened: npt.NDArray[np.bool_]) -> tuple[Ints, Floats, Floats]:
    """Compare predictions with outcomes in bins of equal width.

    Args:
        predicted: [n] in [0, 1].
        happened: [n].

    Returns:
        count, mean prediction and mean outcome of each of :data:`NUM_BINS` bins, by ascending prediction; the means of an empty
        bin are NaN.
    """
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    count = np.bincount(bins, minlength=NUM_BINS)
    divisor = np.where(count, count, np.nan)
    mean_predicted = np.bincount(bins, predicted, NUM_BINS) / divisor
    return count, mean_predicted, np.bincount(bins, happened, NUM_BINS) / divisor


def calibration_error(predicted: Floats, happened: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error: mean difference of prediction and outcome over the bins, weighted by count; 0 for n = 0."""
    count, mean_predicted, mean_happened = reliability(predicted, happened)
    return float(np.nansum(count * np.abs(mean_predicted - mean_happened)) / max(1, count.sum()))


def brier_score(predicted: Floats, happened: npt.NDArray[np.bool_]) -> float:
    """Mean squared difference of prediction and outcome."""
    return float(np.mean((predicted - happened) ** 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Quality of the predictions of "the first k drafts are all accepted".

    Attributes:
        position: k, from 1.
        predicted, happened: mean prediction and mean outcome.
        error: expected calibration error.
        brier: Brier score.
    """

    position: int
    predicted: float
    happened: float
    error: float
    brier: float


def calibrations(rounds: Rounds, temperatures: Sequence[float] | None = None) -> list[Calibration]:
    """Calibration of full rounds at each position; ``temperatures`` scale the confidences first."""
    confidences = rounds.confidences if temperatures is None else scale(rounds.confidences, temperatures)
    found = []
    for slot, predicted in enumerate(survivals(confidences).T):
        happened = rounds.num_accepted > slot
        found.append(
            Calibration(
                position=slot + 1,
                predicted=float(predicted.mean()),
                happened=float(happened.mean()),
                error=calibration_error(predicted, happened),
                brier=brier_score(predicted, happened),
            )
        )
    return found


def scale(confidences: Floats, temperatures: Sequence[float] | Floats) -> Floats:
    """σ(logit(c) / T); 0 and 1 do not change.

    Args:
        confidences: [..., num_drafts] in [0, 1].
        temperatures: [num_drafts], or a shape that broadcasts with ``confidences``.
    """
    with np.errstate(divide="ignore", over="ignore"):
        logits = np.log(confidences) - np.log1p(-confidences)
        return 1 / (1 + np.exp(-logits / np.asarray(temperatures, np.float64)))


def fit_temperatures(rounds: Rounds) -> tuple[float, ...]:
    """Choose temperatures that calibrate the survivals, one position after the other.

    The temperatures of earlier positions are fixed first.  A position then gets the value of :data:`TEMPERATURE_GRID` with the
    least calibration error of the survival up to it.  Of equal values it gets the nearest to 1.

    Args:
        rounds: full rounds, recorded at temperatures of 1.

    Source: DSpark paper, sequential temperature scaling.
    """
    grid = sorted(TEMPERATURE_GRID, key=lambda value: abs(np.log(value)))
    survival = np.ones(len(rounds))
    chosen = []
    for slot in range(rounds.num_drafts):
        happened = rounds.num_accepted > slot
        scaled = [survival * scale(rounds.confidences[:, slot : slot + 1], [value])[:, 0] for value in grid]
        best = min(range(len(grid)), key=lambda at: calibration_error(scaled[at], happened))
        survival = scaled[best]
        chosen.append(round(grid[best], 4))
    return tuple(chosen)


# --------------------------------------------------------------------------------------------------------------------------- gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Estimate of decoding with adaptive lengths, and with fixed lengths that always verify the whole block.

    Attributes:
        concurrency: requests of a step.
        drafts: verified drafts per request and step, adaptive.
        accepted_length, fixed_accepted_length: tokens per request and step, adaptive and fixed.
        step_ms, fixed_step_ms: mean step time, adaptive and fixed.
    """

    concurrency: int
    drafts: float
    accepted_length: float
    fixed_accepted_length: float
    step_ms: float
    fixed_step_ms: float

    @property
    def gain(self) -> float:
        """Relative increase of tokens per second by adaptive lengths; negative for a loss."""
        return self.accepted_length / self.step_ms / (self.fixed_accepted_length / self.fixed_step_ms) - 1


def estimate_gain(
    rounds: Rounds,
    curve: CostCurve,
    concurrency: int,
    *,
    num_steps: int = 300,
    temperatures: Sequence[float] | None = None,
    seed: int = 0,
) -> Gain:
    """Simulate steps from recorded rounds, and count tokens and time with adaptive and with fixed lengths.

    A simulated step draws ``concurrency`` rounds.  As in the engine, the confidences of the previous rounds give the step's total
    of drafts, and the confidences of the rounds give their lengths.  A round emits one token, plus its accepted drafts up to its
    length.

    Args:
        rounds: full rounds.
        curve: step times.
        concurrency: requests of a step.
        num_steps: simulated steps.
        temperatures: scale the confidences first; None does not scale.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    own, earlier, width = rounds.confidences, rounds.earlier, rounds.num_drafts
    if temperatures is not None:
        own, earlier = scale(own, temperatures), scale(earlier, temperatures)
    before = survivals(earlier)
    caps = np.full(concurrency, width)
    caps_on_device = torch.from_numpy(caps)
    totals, emitted, fixed_emitted = np.empty(num_steps, np.int64), 0, 0
    for step in range(num_steps):
        drawn = rng.integers(len(rounds), size=concurrency)
        totals[step] = choose_total(before[drawn], caps, curve, max_rows=_UNLIMITED)
        lens = schedule_lengths(torch.from_numpy(own[drawn]), int(totals[step]), caps_on_device).numpy()
        accepted = rounds.num_accepted[drawn]
        emitted += int(np.minimum(accepted, lens).sum()) + concurrency
        fixed_emitted += int(accepted.sum()) + concurrency
    return Gain(
        concurrency=concurrency,
        drafts=float(totals.mean()) / concurrency,
        accepted_length=emitted / (num_steps * concurrency),
        fixed_accepted_length=fixed_emitted / (num_steps * concurrency),
        step_ms=float(curve.cost(concurrency + totals).mean()),
        fixed_step_ms=float(curve.cost(np.array([concurrency * (1 + width)]))[0]),
    )
