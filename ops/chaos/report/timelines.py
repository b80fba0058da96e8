"""The state of each process over time: training (or serving), stopped, recovering or dead. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.schedule import REDIS

#: The state of an island that trains, and of Redis or a merger that serves.
SERVING = "training"
STOPPED, RECOVERING, DEAD = "stopped", "recovering", "dead"
_MARKS = {"start", "ready", "kill", "died", "stop", "continue"}


@dataclass(frozen=True)
class Span:
    """A period in which a process has one state."""

    begin: float
    end: float
    state: str


Timelines = Mapping[str, Sequence[Span]]


def timelines(storm: StormRecord) -> dict[str, list[Span]]:
    """Return the states of each process, without gaps from its first start to the end of the storm."""
    return {name: _timeline(storm, name) for name in (REDIS, *storm.mergers, *storm.islands)}


def _timeline(storm: StormRecord, process: str) -> list[Span]:
    marks = [(e.at, e.what) for e in storm.events if e.process == process and e.what in _MARKS]
    marks += [(at, "ready") for at in _ready_times(storm, process)]
    out: list[Span] = []
    state, since, before_stop = "", 0.0, ""
    for at, what in [*sorted(marks), (storm.end, "end")]:
        at = min(at, storm.end)
        new = _state_after(what, state, before_stop)
        if new == state:
            continue
        if state and at > since:
            continues = bool(out) and out[-1].state == state
            begin = out.pop().begin if continues else since
            out.append(Span(begin, at, state))
        before_stop = state if new == STOPPED else before_stop
        state, since = new, at
    return out


def _state_after(what: str, state: str, before_stop: str) -> str:
    """Return the state after an event. `before_stop` is the state that a stopped process returns to."""
    match what:
        case "start":
            return RECOVERING
        case "ready" if state == RECOVERING:
            return SERVING
        case "kill" | "died":
            return DEAD
        case "stop" if state not in (DEAD, ""):
            return STOPPED
        case "continue" if state == STOPPED:
            return before_stop
        case "end":
            return ""
    return state


def _ready_times(storm: StormRecord, process: str) -> list[float]:
    """Return when a process became ready: a merger with each round, an island with the first turn of an incarnation.

    Redis has its own `ready` events.
    """
    if process in storm.mergers:
        return sorted(storm.closed_at.values())
    out, known = [], set()
    for turn in storm.turns.get(process, ()):
        if turn.who not in known:
            out.append(turn.at)
            known.add(turn.who)
    return out


def seconds_in(spans: Sequence[Span], state: str, begin: float, end: float) -> float:
    """Return the seconds of a window in which a process had that state."""
    return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans if s.state == state)


def uptime(storm: StormRecord, states: Timelines) -> float:
    """Return the share of the window in which at least one island was training."""
    edges = sorted(
        (max(s.begin, storm.begin), min(s.end, storm.end))
        for island in storm.islands
        for s in states[island]
        if s.state == SERVING and s.end > storm.begin
    )
    covered, reached = 0.0, storm.begin
    for begin, end in edges:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / storm.seconds if storm.seconds else math.nan
