"""What JAX's profile says of a device: how long it waited between programs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

#: The names of events of CUDA that cross between host and device. A copy within the device is part of a program.
_CROSSING = ("MemcpyH2D", "MemcpyD2H")
#: The shortest time without a program that counts as waiting, in nanoseconds.
GAP_NS = 100_000.0


class DeviceTimes(NamedTuple):
    """Seconds of a profile.

    Attributes:
        whole: From the begin of the first program to the end of the last one.
        waits: The part of this in which no program ran for GAP_NS or longer. A program has shorter gaps itself.
    """

    whole: float
    waits: float


def device_times(folder: Path) -> DeviceTimes | None:
    """Return what the newest profile of a folder says, added up over devices; None where it has none, as on a CPU.

    The events are the devices' own, not those of the thread that asked for them, which returns before they begin.
    """
    import jax

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    whole, waits = 0.0, 0.0
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes if files else ():
        if not plane.name.startswith("/device:"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream ") for event in line.events]
        programs = sorted((event.start_ns, event.end_ns) for event in events if not event.name.startswith(_CROSSING))
        reached = began = programs[0][0] if programs else 0.0
        for begin, end in programs:
            waits += begin - reached if begin - reached >= GAP_NS else 0.0
            reached = max(reached, end)
        whole += reached - began
    return DeviceTimes(1e-9 * whole, 1e-9 * waits) if whole else None
