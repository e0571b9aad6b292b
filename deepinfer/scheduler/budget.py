"""How many drafts a step verifies: step time by number of rows, confidences of earlier rounds, and the best total.

The host chooses the total only; the device splits it over the requests by the confidences of the drafts themselves
(:func:`deepinfer.ops.sampling.lay_out_rounds`).

Invariant: the total never depends on the confidences of the drafts that it is for.  Draft k of a request is verified iff fewer
than K positions of the batch rank before it.  Behind a given past, and for a given K, that is a matter of this request's drafts
before k and of other requests, so whether a draft is looked at says nothing about which token it is, and verification stays
exact.  A K chosen from the same confidences would break this: c of draft k + 1 is computed from draft k, so draft k would be
verified or not depending on its own token.  K may depend on anything that was there before these drafts were drawn: on older
confidences, decided tokens, and times of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_ENOUGH = 10
"""Measured steps of one size that outweigh the profile; also how often a size's median is taken again."""
_NUM_KEPT = 50
_MAX_AGE = 5000
"""A size not seen for so many measured steps follows the others again: what slowed the machine then is over."""


class CostCurve:
    """Step time as a function of the rows of a step, all of them: anchors, drafts, tokens of prompts.

    One rule: up to ``max_padded_rows`` a step costs what the next size at or above it costs, because the backend rounds rows up
    to a captured graph or a tile; beyond, cost is linear between sizes, and goes on behind the largest with the slope from half
    of it.  A backend that rounds nothing up has the least size as ``max_padded_rows``.

    Invariant: cost never falls as rows grow; a dip in what was measured is lifted to the largest cost before it.

    Attributes:
        sizes: [num_sizes] int64 rows, ascending.
        profile_ms: [num_sizes] times at the start, as they were measured.
        max_padded_rows: the largest size that steps are rounded up to.

    Source: DSpark paper, hardware-aware budget; serving engine's profile of captured sizes.
    """

    def __init__(self, rows: Sequence[int], ms: Sequence[float], *, max_padded_rows: int | None = None) -> None:
        """A curve through measured points, in any order.

        Args:
            rows: positive, all different.
            ms: step time at each.
            max_padded_rows: one of ``rows``; None for the largest.

        Raises:
            ValueError: the points make no curve.
        """
        sizes, times = np.asarray(rows, np.int64), np.asarray(ms, np.float64)
        if sizes.ndim != 1 or sizes.shape != times.shape or not len(sizes) or len(np.unique(sizes)) < len(sizes):
            raise ValueError("a curve needs one time for each of one or more different sizes")
        if not (sizes.min() > 0 and np.isfinite(times).all() and times.min() > 0):
            raise ValueError("sizes and times of a curve are positive")
        order = np.argsort(sizes)
        self.sizes, self.profile_ms = sizes[order], times[order]
        self.max_padded_rows = int(self.sizes[-1]) if max_padded_rows is None else max_padded_rows
        if self.max_padded_rows not in self.sizes:
            raise ValueError(f"max_padded_rows={max_padded_rows} is not among the sizes")
        self._first_linear = int(np.searchsorted(self.sizes, self.max_padded_rows))
        self._samples = np.empty((len(sizes), _NUM_KEPT))
        self._num_samples = np.zeros(len(sizes), np.int64)
        self._last_sample = np.zeros(len(sizes), np.int64)
        self._medians = self.profile_ms.copy()
        self._num_taken = 0
        self._held: tuple[int, float] | None = None
        self._set(self.profile_ms)

    def _set(self, ms: npt.NDArray[np.float64]) -> None:
        self._ms = np.maximum.accumulate(ms)
        padded = self.sizes[: self._first_linear + 1]
        self._padded_ms = np.repeat(self._ms[: len(padded)], np.diff(padded, prepend=-1))  # by number of rows, from 0
        half = int(np.searchsorted(self.sizes, self.sizes[-1] / 2))
        half = min(half, max(0, len(self.sizes) - 2))
        run = self.sizes[-1] - self.sizes[half]
        self._slope = float((self._ms[-1] - self._ms[half]) / run) if run else 0.0

    @property
    def ms(self) -> npt.NDArray[np.float64]:
        """[num_sizes] cost at each size as it is believed now."""
        return self._ms.copy()

    def cost(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Milliseconds of steps of ``rows`` rows (any shape), at least 0 each."""
        found = self._padded_ms[np.minimum(rows, self.max_padded_rows)]
        if rows.size and int(rows.max()) > self.max_padded_rows:
            first, last = self._first_linear, self.sizes[-1]
            line = np.interp(rows, self.sizes[first:], self._ms[first:]) + self._slope * np.maximum(rows - last, 0)
            found = np.where(rows > self.max_padded_rows, line, found)
        return found

    def refine(self, rows: int, ms: float) -> None:
        """Take in the time of a step that ran.

        A size with :data:`NUM_ENOUGH` samples or more costs their median, over the last 50; the others cost their profile times
        the median ratio of sample and profile, so that a machine that became slower as a whole keeps the form of its curve.
        A step between two sizes counts for the larger, scaled as the curve is there; one beyond all sizes is passed over.

        A sample counts from the next call on: the step that drew the drafts to be verified next must not have a say in how many
        of them are.

        Cost: one assignment; every tenth sample of a size a median of 50 and a few operations on all sizes.
        """
        held, self._held = self._held, (rows, ms)
        if held is not None:
            self._take(*held)

    def _take(self, rows: int, ms: float) -> None:
        if not (0 < rows <= self.sizes[-1] and 0 < ms < math.inf):
            return
        size = int(np.searchsorted(self.sizes, rows))
        if rows > self.max_padded_rows:
            ms *= float(self._ms[size] / self.cost(np.array([rows]))[0])
        self._num_taken += 1
        count = int(self._num_samples[size])
        self._samples[size, count % _NUM_KEPT] = ms
        self._num_samples[size] = count + 1
        self._last_sample[size] = self._num_taken
        if (count + 1) % NUM_ENOUGH:
            return
        self._medians[size] = np.median(self._samples[size, : min(count + 1, _NUM_KEPT)])
        known = (self._num_samples >= NUM_ENOUGH) & (self._last_sample > self._num_taken - _MAX_AGE)
        ratio = np.median(self._medians[known] / self.profile_ms[known])
        self._set(np.where(known, self._medians, self.profile_ms * ratio))

    def to_json(self) -> dict[str, Any]:
        """The profile as plain values; what :meth:`refine` learned belongs to this run and stays behind."""
        points = [[int(rows), float(ms)] for rows, ms in zip(self.sizes, self.profile_ms, strict=True)]
        return {"points": points, "max_padded_rows": self.max_padded_rows}

    @classmethod
    def from_json(cls, raw: object) -> CostCurve:
        """The curve that :meth:`to_json` wrote.

        Raises:
            ValueError: it did not write this.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("points"), list) or not raw["points"]:
            raise ValueError("no points")
        if not all(isinstance(point, list) and list(map(type, point)) == [int, float] for point in raw["points"]):
            raise ValueError("points are pairs of rows and milliseconds")
        if not isinstance(raw.get("max_padded_rows"), int):
            raise ValueError("no max_padded_rows")
        rows, ms = zip(*raw["points"], strict=True)
        return cls(rows, ms, max_padded_rows=raw["max_padded_rows"])


def survivals(confidences: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Products c_1 … c_j along the last axis; NaN and infinities count as 0, other values are clamped to [0, 1]."""
    values = np.asarray(confidences, np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    np.maximum(values, 0.0, out=values)
    np.minimum(values, 1.0, out=values)
    for slot in range(1, values.shape[-1]):  # a column at a time: three times as fast as cumprod along short rows
        values[..., slot] *= values[..., slot - 1]
    return values


def choose_total(
    survival: npt.NDArray[np.float64],
    caps: npt.NDArray[np.integer[Any]],
    curve: CostCurve,
    *,
    max_rows: int,
    num_other_rows: int = 0,
    num_other_tokens: int = 0,
) -> int:
    """The number of drafts K with the most expected tokens a millisecond.

    Θ(K) = (R + num_other_tokens + sum of the K largest survivals) / cost(R + K + num_other_rows), over *all* K: a real curve
    has steps, and behind one that does not pay the next bucket may.  Survival never grows along a row, so the K largest are
    prefixes.  Of equal Θ the smallest K wins: the same rate for less work, and confidences err on the bright side where
    requests are new.

    Args:
        survival: [R, width] float64 in [0, 1], not increasing along a row.
        caps: [R] int, at most this many drafts of each request; below 0 counts as 0.
        curve: step times.
        max_rows: rows of the step at most.
        num_other_rows: rows that are neither an anchor nor a draft of these requests.
        num_other_tokens: tokens that those rows will bring.

    Returns:
        K in 0 … sum of caps with R + K + num_other_rows <= max_rows, or 0 where there is no such K.

    Source: DSpark paper, confidence-scheduled verification.  Cost: one sort of R · width numbers.
    """
    num_requests, width = survival.shape
    num_fixed = num_requests + num_other_rows
    offered: npt.NDArray[np.float64] = survival[np.arange(width) < caps[:, None]]
    most: int = min(len(offered), max_rows - num_fixed)
    if most <= 0:
        return 0
    offered.sort()
    tokens = np.empty(most + 1)
    tokens[0] = num_requests + num_other_tokens
    tokens[1:] = offered[::-1][:most]
    rate = tokens.cumsum() / curve.cost(np.arange(num_fixed, num_fixed + most + 1))
    return int(rate.argmax())


class DraftBudget:
    """Confidences of the last two rounds of each state slot, and the number of drafts they make worth verifying.

    Two generations are kept because the latest may be those of the very drafts to be verified (the module says why they must
    not be used).  That is so when the step that drew the drafts is committed: always without asynchronous planning, and with
    it for a request that sat a step out.  A request that has no older round counts with confidences of 1.

    Attributes:
        curve: step times.
    """

    def __init__(self, num_slots: int, num_drafts: int, curve: CostCurve) -> None:
        """Nothing is known of any slot.

        Args:
            num_slots: slots 0 … num_slots - 1.
            num_drafts: drafts of a round at most.
            curve: step times.
        """
        self.curve = curve
        self._survival = np.ones((2, num_slots, num_drafts))
        self._latest = np.zeros(num_slots, np.int64)

    def reset(self, slot: int) -> None:
        """A new request has ``slot``; nothing of the one before counts.  Its steps in flight must not be handed to update."""
        self._survival[:, slot] = 1.0

    def update(self, slots: npt.NDArray[np.integer[Any]], confidences: npt.NDArray[np.floating[Any]]) -> None:
        """Take in the confidences of the drafts that a committed step drew.

        Args:
            slots: [R] all different.
            confidences: [R, num_drafts].
        """
        latest = self._latest[slots] ^ 1
        self._latest[slots] = latest
        self._survival[latest, slots] = survivals(confidences)

    def refine(self, num_rows: int, ms: float) -> None:
        """Take in how long a step took."""
        self.curve.refine(num_rows, ms)

    def choose(
        self,
        slots: npt.NDArray[np.integer[Any]],
        caps: npt.NDArray[np.integer[Any]],
        is_ahead: npt.NDArray[np.bool_],
        num_other_rows: int,
        max_rows: int,
        num_other_tokens: int = 0,
    ) -> int:
        """How many drafts the next step verifies over all of its decoding requests.

        Args:
            slots: [R] of the requests that decode.
            caps: [R] drafts of each at most, from decided tokens only.
            is_ahead: [R] whether the drafts to be verified come from a step that is not committed yet.  If so the latest
                confidences are of an earlier round; if not they are those of these drafts, and the round before counts.
            num_other_rows, max_rows, num_other_tokens: as in :func:`choose_total`.

        Returns:
            K as of :func:`choose_total`.

        Cost: below 0.1 ms for 256 requests of 5 drafts.
        """
        generation = self._latest[slots] ^ np.logical_not(is_ahead)
        return choose_total(
            self._survival[generation, slots],
            caps,
            self.curve,
            max_rows=max_rows,
            num_other_rows=num_other_rows,
            num_other_tokens=num_other_tokens,
        )
