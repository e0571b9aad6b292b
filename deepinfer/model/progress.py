"""Progress bars of long operations; shown only on a terminal, never in logs."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int | None, *, unit: str, desc: str, shown: bool = True) -> tqdm[Any]:
    """A bar on stderr that counts up to ``total``; a context manager.  Bytes (unit ``B``) are shown with prefixes.

    A bar redraws its line with carriage returns, which would fill a log.  So it is disabled unless stderr is a terminal.
    """
    is_watched = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    is_bytes = unit == "B"
    return tqdm(
        total=total,
        unit=unit,
        desc=desc,
        unit_scale=is_bytes,
        unit_divisor=1024 if is_bytes else 1000,
        disable=not (shown and is_watched),
    )
