"""What JAX's profile says of a device: how long it waited between programs, and for copies to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from archipelago.ops.simulation.failures import covered

#: An event of a device, from its begin to its end, in nanoseconds.
Span = tuple[float, float]
#: The names of events of CUDA that cross between host and device. A copy within the device is part of a program.
_CROSSING = ("MemcpyH2D", "MemcpyD2H")
#: The shortest time without a program that counts as waiting, in nanoseconds.
GAP_NS = 100_000.0


class DeviceTimes(NamedTuple):
    """Seconds of a profile.

    Attributes:
        copies: All copies between host and device.
        hidden: The part of these that passed beside a program on the same device.
        whole: From the begin of the first program to the end of the last one.
        waits: The part of this in which no program ran for GAP_NS or longer. A program has shorter gaps itself.
    """

    copies: float = 0.0
    hidden: float = 0.0
    whole: float = 0.0
    waits: float = 0.0


def device_times(folder: Path) -> DeviceTimes | None:
    """Return what the newest profile of a folder says, added up over devices; None where it has none, as on a CPU.

    The events are the devices' own, not those of the thread that asked for them, which returns before they begin.
    """
    import jax

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found: list[DeviceTimes] = []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes if files else ():
        if not plane.name.startswith("/device:"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream ") for event in line.events]
        spans = [(event.name.startswith(_CROSSING), (event.start_ns, event.end_ns)) for event in events]
        copies, programs = ([span for is_copy, span in spans if is_copy == wanted] for wanted in (True, False))
        running = joined(programs)
        whole = running[-1][1] - running[0][0] if running else 0.0
        gaps = [later[0] - earlier[1] for earlier, later in pairwise(running)]
        waits = sum(gap for gap in gaps if gap >= GAP_NS)
        hidden = sum(covered(running, begin, end) for begin, end in copies)
        found.append(DeviceTimes(sum(end - begin for begin, end in copies), hidden, whole, waits))
    return DeviceTimes(*(1e-9 * sum(each) for each in zip(*found, strict=True))) if any(map(any, found)) else None


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, those that overlap or touch as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
