"""Read and write failure tapes, which real training can follow, and read measured outages.

A tape (the paper's Appendix E.1) is a text file of JSON lines. The first line is the head: `{"tape": 1, "islands": 2,
"step_seconds": 6.0, "seconds": 600.0, "about": {…}}`. Each other line has the state of one island from a moment on, in
the order of time: `{"at": 132.5, "island": 0, "live": 0.75}`. `at` is in seconds, and `live` is the share of the
island's slices that make steps. Its batch shrinks to that share; with 0 it makes no steps. Every island has a line at
0. `about` describes the origin of the tape for people.

Measured outages are a CSV file with the columns `slice,failed_seconds,returned_seconds`: a name, and seconds since the
measurement began.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from archipelago.broker.errors import DataError
from archipelago.ops.simulation.failures import Outcome

VERSION = 1
ISLANDS_MAX, LINES_MAX = 4096, 10_000_000


class Leg(NamedTuple):
    """A part of an island's tape: from `at` on, in seconds, the share `live` of its slices makes steps."""

    at: float
    live: float


@dataclass(frozen=True)
class FailureTape:
    """The legs of each island in the order of time. The first leg of each is at 0."""

    islands: tuple[tuple[Leg, ...], ...]
    step_seconds: float
    seconds: float
    about: Mapping[str, Any] = field(default_factory=dict)

    def goodput_of(self, island: int, until: float | None = None) -> float:
        """Return the share of an island's time that went into steps, weighted by its live slices, up to `until`."""
        end = min(until or self.seconds, self.seconds)
        legs = self.islands[island]
        ends = [min(leg.at, end) for leg in legs[1:]] + [end]
        return sum(leg.live * max(0.0, stop - leg.at) for leg, stop in zip(legs, ends, strict=True)) / end

    def goodput(self, until: float | None = None) -> float:
        """Return the mean goodput of the islands."""
        return sum(self.goodput_of(island, until) for island in range(len(self.islands))) / len(self.islands)


def taped(outcome: Outcome, step_seconds: float, about: Mapping[str, Any] | None = None) -> FailureTape:
    """Return the tape of a simulation."""
    islands = []
    for stretches, slices in zip(outcome.islands, outcome.slices, strict=True):
        legs: list[Leg] = []
        reached = 0.0
        for stretch in stretches:
            if stretch.begin > reached:
                legs.append(Leg(reached, 0.0))
            if not legs or legs[-1].live != stretch.live / slices:
                legs.append(Leg(stretch.begin, stretch.live / slices))
            reached = stretch.end
        if reached < outcome.seconds:
            legs.append(Leg(reached, 0.0))
        islands.append(tuple(legs))
    return FailureTape(tuple(islands), step_seconds, outcome.seconds, about or {})


def write(tape: FailureTape, path: Path) -> None:
    """Write the tape to a file."""
    head = {"tape": VERSION, "islands": len(tape.islands), "step_seconds": tape.step_seconds, "seconds": tape.seconds}
    lines = [json.dumps({**head, "about": dict(tape.about)})]
    legs = sorted((leg.at, number, leg.live) for number, legs in enumerate(tape.islands) for leg in legs)
    lines += [json.dumps({"at": round(at, 3), "island": number, "live": round(live, 6)}) for at, number, live in legs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> FailureTape:
    """Read the tape in a file. Raise DataError for anything else."""
    lines = _text(path, "the tape").splitlines()
    try:
        head = json.loads(lines[0])
        if head["tape"] != VERSION:
            raise ValueError(f"it is of version {head['tape']!r}, not {VERSION}")
        count, step_seconds, seconds = int(head["islands"]), float(head["step_seconds"]), float(head["seconds"])
        if not (1 <= count <= ISLANDS_MAX and 0 < step_seconds < math.inf and 0 < seconds < math.inf):
            raise ValueError("a number in its head is out of range")
        if len(lines) > LINES_MAX:
            raise ValueError(f"it has more than {LINES_MAX:,} lines")
        islands: list[list[Leg]] = [[] for _ in range(count)]
        for line in lines[1:]:
            _add(json.loads(line), islands, seconds)
        if any(not legs or legs[0].at for legs in islands):
            raise ValueError("an island has no line at 0")
        about = dict(head.get("about") or {})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as fault:
        raise DataError(
            f"{path} is no failure tape ({fault or type(fault).__name__})",
            "`archipelago simulate run --tape FILE` writes one.",
            code="tape.invalid",
        ) from None
    return FailureTape(tuple(map(tuple, islands)), step_seconds, seconds, about)


def _add(line: Mapping[str, Any], islands: list[list[Leg]], seconds: float) -> None:
    number, leg = int(line["island"]), Leg(float(line["at"]), float(line["live"]))
    legs = islands[number] if number >= 0 else islands[len(islands)]
    after = legs[-1].at if legs else 0.0
    if not (after <= leg.at <= seconds and 0.0 <= leg.live <= 1.0):
        raise ValueError(f"out of range or out of order: {dict(line)}")
    legs.append(leg)


def outages(path: Path) -> list[list[tuple[float, float]]]:
    """Read (failed, returned) of each slice from a CSV file, and merge overlaps. Raise DataError for anything else."""
    by_slice: dict[str, list[tuple[float, float]]] = {}
    try:
        for row in csv.DictReader(_text(path, "the failure data").splitlines(), strict=True):
            failed, returned = float(row["failed_seconds"]), float(row["returned_seconds"])
            if not 0.0 <= failed <= returned < math.inf:
                raise ValueError(f"{row} is no outage")
            by_slice.setdefault(row["slice"], []).append((failed, returned))
        if not by_slice:
            raise ValueError("no outages")
    except (ValueError, TypeError, LookupError, csv.Error) as fault:
        raise DataError(
            f"{path} cannot be used as failure data ({fault})",
            "Give CSV with the columns slice,failed_seconds,returned_seconds.",
            code="tape.outages",
        ) from None
    return [_merged(sorted(one)) for one in by_slice.values()]


def _merged(sorted_outages: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out = sorted_outages[:1]
    for failed, returned in sorted_outages[1:]:
        if failed <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], returned))
        else:
            out.append((failed, returned))
    return out


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what} {path} cannot be read ({error})", "Check the path.", code="tape.unreadable") from None
