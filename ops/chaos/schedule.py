"""Which process meets which fault when: seeded, from a file, or as a spot market did it. Pure.

A schedule is a list of faults in the order of time. As text it is one JSON object a line, so that a storm can be
looked at, changed and run again:

    {"at": 12.5, "kind": "kill", "target": "island-1", "seconds": 2.0}
    {"at": 20, "kind": "throttle", "target": "merger", "seconds": 5, "value": 1.0}
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from archipelago.broker.errors import ConfigError
from archipelago.ops.simulation.failures import Delays

Kind = Literal["kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk", "clock"]
KINDS: dict[str, str] = {
    "kill": "SIGKILL; started again after `seconds`",
    "stop": "SIGSTOP; SIGCONT after `seconds`",
    "partition": "its connections stall without a word and new ones are refused, for `seconds`",
    "reset": "its connections are reset and new ones are refused, for `seconds`",
    "half-open": "its connections go silent for ever, and new ones work at once",
    "throttle": "its link carries `value` Mbit/s each way, for `seconds`",
    "delay": "its link takes `value` seconds longer each way, for `seconds`",
    "disk": "no file of it may grow past `value` bytes, for `seconds`: as when the disk is full",
    "clock": "the Redis' time of day jumps `value` seconds ahead, and back after `seconds` (needs libfaketime)",
}
"""Each kind of fault, and what it does to a process."""
ON_LINKS = frozenset({"partition", "reset", "half-open", "throttle", "delay"})
"""kinds that need a proxy between the process and the Redis"""
VALUES = {"throttle": 1.0, "delay": 0.2, "disk": float(1 << 18), "clock": 3600.0}
"""what a seeded schedule, or a line without a `value`, takes"""
REDIS, MERGER = "redis", "merger"
SECONDS_MAX = 1e6


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with one process, and for how long."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    at: float
    """seconds from the storm's begin"""
    kind: Kind
    target: str
    """`redis`, `merger` or an island's name"""
    seconds: float = 0.0
    """until it is over"""
    value: float = 0.0

    @property
    def until(self) -> float:
        """Seconds from the storm's begin."""
        return round(self.at + self.seconds, 6)  # both are of whole milliseconds, as their sum is then


@dataclass(frozen=True)
class Weather:
    """How faults come to each process: as a Poisson process while it is well, over after an exponentiated Weibull
    delay (Decoupled DiLoCo, Appendix E).
    """

    mean_seconds_between: float
    """mean time that a process is well"""
    kinds: tuple[str, ...] = ("kill", "stop")
    return_seconds: float = 2.0
    """mean"""
    return_shape: float = 2.0
    """k"""
    return_power: float = 4.0
    """α"""


def may_meet(kind: str, target: str) -> bool:
    """Whether there is such a fault: the Redis has no link to itself, and nobody else decides by the time of day."""
    return kind not in ON_LINKS if target == REDIS else kind != "clock"


def poisson(weather: Weather, targets: Sequence[str], seconds: float, seed: int) -> list[Fault]:
    """A storm of so many seconds. What happens to a process does not depend on which others there are."""
    delays = Delays(weather.return_seconds, weather.return_shape, weather.return_power)
    found = [_poisson(weather, target, seconds, delays, _generator(seed, target)) for target in targets]
    return in_order(itertools.chain.from_iterable(found))


def _poisson(
    weather: Weather, target: str, seconds: float, delays: Delays, rng: np.random.Generator
) -> Iterator[Fault]:
    kinds = [kind for kind in weather.kinds if may_meet(kind, target)]
    now = rng.exponential(weather.mean_seconds_between) if kinds else math.inf
    while now < seconds:
        kind = kinds[int(rng.integers(len(kinds)))]
        fault = _fault(round(now, 3), kind, target, round(delays(rng), 3))
        yield fault
        now = fault.until + rng.exponential(weather.mean_seconds_between)


def periodic(every: float, targets: Sequence[str], away_seconds: float, seconds: float, seed: int) -> list[Fault]:
    """A kill of one of the targets every so many seconds, each a chance choice.

    The first one comes after half of that, so that a window of n times as long has n kills.
    """
    rng = _generator(seed, "periodic")
    times = itertools.takewhile(lambda at: at < seconds, (every * (n + 0.5) for n in itertools.count()))
    return [_fault(at, "kill", targets[int(rng.integers(len(targets)))], away_seconds) for at in times]


def from_spot(text: str, targets: Sequence[str], seconds: float, faster: float) -> list[Fault]:
    """Kills as a spot market did it, played so many times faster: a target for each zone, in the order of their names.

    The text is JSON: `{"ZONE": {"metadata": {"gap_seconds": 600}, "data": [0, 0, 1, …]}, …}`, or one zone without its
    name, with a sample each gap: 1 where the zone's machine was taken away. Raises ConfigError for anything else.
    """
    try:
        found = json.loads(text)
        zones = {"": found} if "data" in found else dict(sorted(found.items()))
        traces = [(float(z["metadata"]["gap_seconds"]), [bool(int(x)) for x in z["data"]]) for z in zones.values()]
        if not traces or not all(gap > 0 for gap, _ in traces):
            raise ValueError("it has no samples")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"that is no spot-market trace ({error!r:.80})",
            'Give JSON: {"ZONE": {"metadata": {"gap_seconds": 600}, "data": [0, 0, 1]}}.',
        ) from None
    pairs = zip(targets, itertools.cycle(traces), strict=False)
    return in_order(f for target, (gap, away) in pairs for f in _from_trace(target, gap / faster, away, seconds))


def _from_trace(target: str, gap: float, away: Sequence[bool], seconds: float) -> Iterator[Fault]:
    at = 0
    for is_away, samples in itertools.groupby(away):
        count = len(list(samples))
        if is_away and at * gap < seconds:
            yield _fault(round(at * gap, 3), "kill", target, round(count * gap, 3))
        at += count


def _fault(at: float, kind: str, target: str, seconds: float) -> Fault:
    return Fault(at, _kind(kind), target, seconds, VALUES.get(kind, 0.0))


def _kind(text: str) -> Kind:
    found: Kind = next(kind for kind in get_args(Kind) if kind == text)
    return found


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """By time; what begins at once in the order of the targets' names."""
    return sorted(faults, key=lambda fault: (fault.at, fault.target, fault.kind))


def to_text(faults: Sequence[Fault]) -> str:
    """One JSON object a line, which `from_text` reads back."""
    return "".join(json.dumps(dataclasses.asdict(fault)) + "\n" for fault in faults)


def from_text(text: str, targets: Sequence[str]) -> list[Fault]:
    """The faults of `to_text`'s lines; empty lines and ones that begin with # are none. Raises ConfigError."""
    numbered = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"]
    return in_order(_from_line(number, line, targets) for number, line in numbered)


_ADAPTER = TypeAdapter(Fault)


def _from_line(number: int, line: str, targets: Sequence[str]) -> Fault:
    try:
        values: Any = json.loads(line)
        fault = _ADAPTER.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _unreadable(number, f"{where}: {first['msg'].lower()}") from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(number, str(error)) from None
    if fault.kind in VALUES and not fault.value:
        fault = dataclasses.replace(fault, value=VALUES[fault.kind])
    if fault.target not in targets:
        raise _unreadable(number, f"there is no {fault.target!r} among {', '.join(targets)}")
    if not may_meet(fault.kind, fault.target):
        raise _unreadable(number, f"there is no {fault.kind} of {fault.target}")
    if not (0 <= fault.at <= SECONDS_MAX and 0 <= fault.seconds <= SECONDS_MAX and fault.value >= 0):
        raise _unreadable(number, "times and values are not negative")
    return fault


def _unreadable(number: int, why: str) -> ConfigError:
    return ConfigError(
        f"line {number} of the schedule cannot be used ({why})",
        'Write {"at": 12.5, "kind": "kill", "target": "island-1", "seconds": 2}; kinds: ' + ", ".join(KINDS) + ".",
    )


def _generator(seed: int, target: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(target.encode())])
