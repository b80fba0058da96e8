"""Schedules of faults (target, kind and time), from a seed or a file. Pure.

A schedule is a list of faults, ordered by time. Its text form has one JSON object a line, so that a storm can be
read, edited and run again:

    {"at": 12.5, "kind": "kill", "target": "island-1", "seconds": 2.0}
    {"at": 20, "kind": "throttle", "target": "merger", "seconds": 5, "value": 1.0}

- `kill`: SIGKILL; the process starts again after `seconds`
- `stop`: SIGSTOP; SIGCONT follows after `seconds`
- `partition`: for `seconds`, its connections stall silently and new ones are refused
- `reset`: for `seconds`, its connections are reset and new ones are refused
- `half-open`: its connections go silent permanently; new ones work at once
- `throttle`: for `seconds`, its link carries `value` Mbit/s each way
- `delay`: for `seconds`, its link takes `value` seconds longer each way
- `disk`: for `seconds`, none of its files may grow by more than `value` bytes, as on a full disk
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from pydantic import ConfigDict, ValidationError

from archipelago.broker.errors import ConfigError, fault_in
from archipelago.broker.messages import adapter
from archipelago.ops.simulation.failures import delay

Kind = Literal["kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: The kinds that need a proxy between the process and Redis.
ON_LINKS: frozenset[Kind] = frozenset({"partition", "reset", "half-open", "throttle", "delay"})
#: The `value` of faults from a seed, and of lines of a file that give none.
VALUES = {"throttle": 1.0, "delay": 0.2, "disk": float(1 << 18)}
REDIS, MERGER = "redis", "merger"
SECONDS_MAX = 1e6


def merger_names(shards: int) -> list[str]:
    """Return the names of the merger processes of a storm: as many as the run has shards, which they share."""
    return [MERGER] if shards == 1 else [f"{MERGER}-{number}" for number in range(shards)]


@dataclass(frozen=True)
class Fault:
    """One fault of one process.

    Attributes:
        at: When it begins, in seconds after the start of the storm.
        target: `redis`, `merger` (`merger-0`, … of several) or the name of an island.
        seconds: How long it lasts.
        value: The rate, delay or size that some kinds need.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    at: float
    kind: Kind
    target: str
    seconds: float = 0.0
    value: float = 0.0

    @property
    def until(self) -> float:
        """The time at which it ends, in seconds after the start of the storm, rounded to microseconds."""
        return round(self.at + self.seconds, 6)


def applies_to(kind: str, target: str) -> bool:
    """Return whether that kind of fault applies to a target. Redis has no link to itself."""
    return target != REDIS or kind not in ON_LINKS


def poisson(
    targets: Sequence[str],
    seconds: float,
    seed: int,
    mean_seconds_between: float,
    kinds: Sequence[Kind] = ("kill", "stop"),
    return_seconds: float = 2.0,
) -> list[Fault]:
    """Draw the faults of a storm (Decoupled DiLoCo, Appendix E).

    The faults of each target are a Poisson process while it is up, and do not depend on the other targets. Each lasts
    for an exponentiated Weibull delay.

    Args:
        seed: The same seed gives the same faults.
        mean_seconds_between: Mean time that a process is up before its next fault.
        return_seconds: Mean duration of a fault.
    """
    found = []
    for target in targets:
        rng = _generator(seed, target)
        applicable = [kind for kind in kinds if applies_to(kind, target)]
        now = rng.exponential(mean_seconds_between) if applicable else math.inf
        while (at := round(now, 3)) < seconds:
            kind = applicable[int(rng.integers(len(applicable)))]
            found.append(_fault(at, kind, target, round(delay(return_seconds, rng), 3)))
            now = found[-1].until + rng.exponential(mean_seconds_between)
    return in_order(found)


def periodic(every: float, targets: Sequence[str], away_seconds: float, seconds: float, seed: int) -> list[Fault]:
    """Kill a random target every `every` seconds.

    The first kill comes after half a period, so that a window of n periods has n kills.
    """
    rng = _generator(seed, "periodic")
    times = itertools.takewhile(lambda at: at < seconds, (every * (n + 0.5) for n in itertools.count()))
    return [_fault(at, "kill", targets[int(rng.integers(len(targets)))], away_seconds) for at in times]


def _fault(at: float, kind: Kind, target: str, seconds: float) -> Fault:
    return Fault(at, kind, target, seconds, VALUES.get(kind, 0.0))


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Sort faults by time, then by the name of the target."""
    return sorted(faults, key=lambda fault: (fault.at, fault.target, fault.kind))


def to_text(faults: Sequence[Fault]) -> str:
    """Return one JSON object a line. `from_text` reads it."""
    return "".join(json.dumps(dataclasses.asdict(fault)) + "\n" for fault in faults)


def from_file(path: Path, targets: Sequence[str]) -> list[Fault]:
    """Read a file of `to_text`. Raise ConfigError (`chaos.schedule`) for one that cannot be read or used."""
    try:
        return from_text(path.read_text(encoding="utf-8"), targets)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "Check the path.", code="chaos.schedule") from None


def from_text(text: str, targets: Sequence[str]) -> list[Fault]:
    """Read the lines of `to_text`. Skip empty lines and those that begin with #. Raise ConfigError for others."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and line.strip()[0] != "#":
            try:
                found.append(_from_line(line, targets))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"line {number} of the schedule cannot be used ({error})",
                    'Write {"at": 12.5, "kind": "kill", "target": "island-1", "seconds": 2}; kinds: '
                    + ", ".join(KINDS) + ".",
                    code="chaos.schedule",
                ) from None  # fmt: skip
    return in_order(found)


def _from_line(line: str, targets: Sequence[str]) -> Fault:
    """Return the fault of one line. Raise ValueError if it is none."""
    try:
        fault: Fault = adapter(Fault).validate_python(json.loads(line))
    except ValidationError as error:
        raise ValueError(fault_in(error)) from None
    if fault.target not in targets:
        raise ValueError(f"the target {fault.target!r} is none of {', '.join(targets)}")
    if not applies_to(fault.kind, fault.target):
        raise ValueError(f"the fault {fault.kind} does not apply to {fault.target}")
    if not (0 <= fault.at <= SECONDS_MAX and 0 <= fault.seconds <= SECONDS_MAX and fault.value >= 0):
        raise ValueError(f"times must be from 0 to {SECONDS_MAX:g} and values not negative")
    return dataclasses.replace(fault, value=fault.value or VALUES.get(fault.kind, 0.0))


def _generator(seed: int, target: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(target.encode())])
