"""How numbers, bytes, times and tables look in the terminal and in pages. All verbs format with these."""

from __future__ import annotations

import math
import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from archipelago.broker.observe.losses import rounded

if TYPE_CHECKING:  # Importing rich takes a noticeable part of a verb's start.
    from rich.table import Table


def new_table(*heads: str, numbers: Container[str] = (), **options: Any) -> Table:
    """Return an empty table without lines. The columns whose heads are in `numbers` are on the right."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="dim", **options)
    for head in heads:
        made.add_column(head, justify="right" if head in numbers else "left")
    return made


def size(count: float) -> str:
    """Format a number of bytes, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def number(value: float, digits: int = 3) -> str:
    """Format a number (`rounded`), or return a dash for NaN."""
    return "–" if math.isnan(value) else rounded(value, digits)


def ago(seconds: float) -> str:
    """Format a time span in one unit, such as 5 s, 12 min or 3 h."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def seconds_text(seconds: float) -> str:
    """Format a time span with 3 significant digits, in units from ms to days."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def clock(unix_seconds: float) -> str:
    """Format a moment as local time, with the date if that is not today's."""
    at, now = time.localtime(unix_seconds), time.localtime()
    return time.strftime("%H:%M:%S" if at[:3] == now[:3] else "%b %d %H:%M", at)
