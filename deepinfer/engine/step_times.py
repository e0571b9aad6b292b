"""Step times of a machine: an engine measures them at its start and keeps them on disk for later starts.

There is one file for each kind of engine: ``decode-perf-<h>.json`` in the directory ``DEEPINFER_DECODE_PERF_CACHE_DIR``, where h
is the first 16 digits of the SHA-256 of the key as JSON.  It holds::

    {"format": 1, "key": {…}, "measured_at": seconds since 1970, "points": [[rows, ms], …], "max_padded_rows": rows}

The key contains everything that changes the curve: model and configuration, device, drafts of a round, page size, version of
torch, ….

Invariant: a file is complete or absent, even if several engines write it at the same time; a file with another key is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deepinfer.model.progress import progress_bar
from deepinfer.scheduler.budget import CostCurve

logger = logging.getLogger(__name__)

_FORMAT = 1
_TILE = 32
"""Matrix products round the number of rows up to a multiple of this."""
_MAX_STRIDES = 16
CurveKey: TypeAlias = Mapping[str, str | int | float | bool]


def step_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to measure: 8, 16, 32, then at most 16 equal strides of whole tiles, the last one cut at ``max_rows``."""
    stride = _TILE * -(-max_rows // (_MAX_STRIDES * _TILE))
    sizes = {8, 16, _TILE, *range(stride, max_rows, stride)}
    return [*sorted(size for size in sizes if size < max_rows), max_rows]


def measure_curve(
    measure: Callable[[int], float],
    sizes: Sequence[int],
    *,
    max_padded_rows: int | None = None,
    num_runs: int = 5,
    progress: bool = False,
) -> CostCurve:
    """Measure the step times of a machine.

    Args:
        measure: rows -> milliseconds of one step with that many rows.
        sizes: rows of the steps to measure.  Each of the ``num_runs`` passes measures all sizes, so that a slow phase of the
            machine affects all of them.
        max_padded_rows: as in :class:`CostCurve`.
        num_runs: measured runs of each size, after one run to warm up; the median is used.
        progress: show a progress bar.
    """
    times = np.empty((num_runs, len(sizes)))
    with progress_bar((num_runs + 1) * len(sizes), unit="step", desc="step times", shown=progress) as bar:
        for run in range(-1, num_runs):
            for at, rows in enumerate(sizes):
                ms = measure(rows)
                if run >= 0:
                    times[run, at] = ms
                bar.update()
    return CostCurve(sizes, np.median(times, axis=0).tolist(), max_padded_rows=max_padded_rows)


def curve_path(directory: str | Path, key: CurveKey) -> Path:
    """The file of the curve of ``key``; the order of the key's entries does not matter."""
    text = json.dumps(dict(key), sort_keys=True)
    return Path(directory).expanduser() / f"decode-perf-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load_curve(directory: str | Path | None, ttl_s: float, key: CurveKey) -> CostCurve | None:
    """The curve stored for ``key``, or None if there is no valid one.

    Args:
        directory: None for no cache.
        ttl_s: a curve is valid for this many seconds after its measurement.  A measurement in the future is not valid.
        key: the key that was given to :func:`save_curve`.
    """
    if directory is None:
        return None
    path = curve_path(directory, key)
    try:
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT or raw.get("key") != dict(key):
            raise ValueError("it has another format or belongs to another engine")
        if "sizes" in key and json.dumps([point[0] for point in raw["points"]]) != key["sizes"]:
            raise ValueError("its points are not at the sizes that this engine measures")
        age_s = time.time() - float(raw["measured_at"])
        curve = CostCurve.from_json(raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        logger.warning("the step times in %s are not used: %s; they are measured again", path, error)
        return None
    if not 0 <= age_s < ttl_s:
        logger.info("the step times in %s are %.0f s old, %g s is the limit; they are measured again", path, age_s, ttl_s)
        return None
    return curve


def save_curve(directory: str | Path | None, key: CurveKey, curve: CostCurve) -> None:
    """Store ``curve`` for ``key`` and replace an older one; does nothing if ``directory`` is None.

    If the directory cannot be written, this logs a warning, because only the next start takes a few seconds longer.
    """
    if directory is None:
        return
    path = curve_path(directory, key)
    text = json.dumps({"format": _FORMAT, "key": dict(key), "measured_at": time.time(), **curve.to_json()})
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
            scratch = Path(file.name)
            file.write(text)
        os.replace(scratch, path)
    except OSError as error:
        logger.warning("step times could not be stored in %s: %s; the next start measures them again", path, error)
        if scratch is not None:
            scratch.unlink(missing_ok=True)
