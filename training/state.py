"""Training states on disk, in parts that are small enough to be moved one by one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

PART_BYTES = 15 << 20


def write_state(folder: Path, state: dict[str, Any], *, part_bytes: int = PART_BYTES) -> None:
    """Write ``state`` (tensors, numbers and strings in nested dicts) as files ``state-00``, ``state-01``, ... of ``folder``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    whole = buffer.getbuffer()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("state-*"):
        old.unlink()
    for number, first in enumerate(range(0, len(whole), part_bytes)):
        (folder / f"state-{number:02d}").write_bytes(whole[first : first + part_bytes])


def read_state(folder: Path) -> dict[str, Any]:
    """The state that :func:`write_state` wrote, on the CPU.

    Raises:
        FileNotFoundError: the folder has no state.
    """
    parts = sorted(folder.glob("state-*"))
    if not parts:
        raise FileNotFoundError(f"{folder} has no training state; give the folder that a run wrote")
    whole = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    state: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=True)
    return state
