"""What JAX's profile says about copies between host and accelerator: how much of their time passed beside a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: An event of a device, from its begin to its end, in nanoseconds.
Span = tuple[float, float]
#: The names of events of CUDA that cross between host and device. A copy within the device is part of a program.
_CROSSING = ("MemcpyH2D", "MemcpyD2H")


class Copies(NamedTuple):
    """The copies of a profile: their seconds, and how many of these passed beside a program on the same device."""

    seconds: float
    hidden_seconds: float


def copies_in(folder: Path) -> Copies | None:
    """Return the copies in the newest profile of a folder; None where it has none, as on a CPU.

    They are the device's own events, not those of the thread that asked for them, which returns before a copy begins.
    """
    import jax

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    seconds = hidden_seconds = 0.0
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes if files else ():
        if not plane.name.startswith("/device:"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream ") for event in line.events]
        spans = [(event.name.startswith(_CROSSING), (event.start_ns, event.end_ns)) for event in events]
        copies, programs = ([span for is_copy, span in spans if is_copy == wanted] for wanted in (True, False))
        seconds += 1e-9 * sum(end - begin for begin, end in copies)
        hidden_seconds += 1e-9 * overlap(copies, programs)
    return Copies(seconds, hidden_seconds) if seconds else None


def overlap(copies: Sequence[Span], programs: Sequence[Span]) -> float:
    """Return how long the copies passed while at least one program ran, in the unit of the spans."""
    joined: list[list[float]] = []
    for begin, end in sorted(programs):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return sum(max(0.0, min(to, end) - max(since, begin)) for since, to in copies for begin, end in joined)
