"""Masks of one step on the host: what the thread of the grammars gives to the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """What the grammars say about one step, on the host.

    Attributes:
        owners: [num_constrained] indices of the constrained requests among the requests that the step decides.
        bits: [num_constrained, num_drafts + 1, num_words] int32; bit i of row j says whether token i may follow the drafts before
            offset j.
        forced_ids: [num_constrained, 2 * num_drafts + 1] int64, tokens that the grammar forces, -1 after the last.
        forced_offsets: [num_constrained] int64, drafts of the step that must be accepted before ``forced_ids`` begin.
        failures: request id -> why its matcher cannot go on.
        fill_ms: time that the thread computed.
        wait_ms: time that the thread waited for the steps before.
    """

    owners: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]
    forced_ids: npt.NDArray[np.int64]
    forced_offsets: npt.NDArray[np.int64]
    failures: Mapping[str, str]
    fill_ms: float
    wait_ms: float
