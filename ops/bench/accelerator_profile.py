"""What a profile of JAX says of copies between the host and a GPU: whether they hide behind computation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: The start and the end of an event on a device, in seconds.
Interval = tuple[float, float]
#: The beginnings of the names of copies from and to the host in a profile.
COPIES = ("MemcpyH2D", "MemcpyD2H")


class Copies(NamedTuple):
    """The seconds of all copies, and of those during which the device also computed."""

    all: float
    hidden: float


def hidden_copies(profile: Path) -> Copies | None:
    """Return the copies in the newest profile of a folder; None if no GPU was profiled."""
    from jax.profiler import ProfileData

    newest = max(profile.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    copies: list[Interval] = []
    computation: list[Interval] = []
    for plane in ProfileData.from_file(str(newest)).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():  # other lines repeat these events
                kind = copies if event.name.startswith(COPIES) else computation
                kind.append((event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9))
    return compare(copies, computation) if computation else None


def compare(copies: Sequence[Interval], computation: Sequence[Interval]) -> Copies:
    """Return how long copies took, and how long something was computed meanwhile."""
    edges = [(at, kind, change) for kind, events in enumerate((copies, computation)) for event in events
             for at, change in zip(event, (1, -1), strict=True)]  # fmt: skip
    active, before, copied, hidden = [0, 0], 0.0, 0.0, 0.0
    for at, kind, change in sorted(edges):
        copied += at - before if active[0] else 0.0
        hidden += at - before if all(active) else 0.0
        active[kind] += change
        before = at
    return Copies(copied, hidden)
