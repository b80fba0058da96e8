"""Estimate the goodput that other methods would have under the failures of a storm, without running them. Pure.

The estimates favour the other methods: synchronisation takes no time, failures of Redis and the merger do not count,
and an island is up exactly while it was training in the storm, so a restart takes as long as it took there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.report.timelines import DEAD, SERVING, Span, Timelines

#: The pause after each change of size in elastic data-parallel training: the longest stall of a survivor that we
#: measured with torchft.
ELASTIC_PAUSE_SECONDS = 4.8


@dataclass(frozen=True)
class Estimates:
    """The goodput of each method: useful island time over allocated time.

    Attributes:
        data_parallel: A step needs all workers, and a kill loses the steps since the last checkpoint.
        data_parallel_elastic: Training continues with the workers that are up; each change of size costs a pause.
        diloco: A round needs H steps of each worker, and a killed worker begins its round again.
    """

    data_parallel: float
    data_parallel_elastic: float
    diloco: float


def estimate(
    states: Timelines,
    step_seconds: Mapping[str, float],
    begin: float,
    end: float,
    interval: int,
    checkpoint_seconds: float,
) -> Estimates:
    """Estimate the goodput of each method in the window from `begin` to `end`.

    Args:
        states: The timelines of a storm.
        step_seconds: The step duration of each island that counts.
        begin: Begin of the window.
        end: End of the window.
        interval: The sync interval H.
        checkpoint_seconds: Useful seconds between two checkpoints of data-parallel training.
    """
    shortest, longest = min(step_seconds.values()), max(step_seconds.values())
    spans = {island: states[island] for island in step_seconds}
    allocated = (end - begin) * len(spans)
    return Estimates(
        _data_parallel(spans, begin, end, checkpoint_seconds) * len(spans) * shortest / longest / allocated,
        _elastic(spans, step_seconds, begin, end) / allocated,
        _diloco(spans, step_seconds, begin, end, interval) * len(spans) * interval * shortest / allocated,
    )  # fmt: skip


def _data_parallel(states: Timelines, begin: float, end: float, checkpoint_seconds: float) -> float:
    """Return the seconds of steps with all workers that no kill took back."""
    kills = {span.begin for spans in states.values() for span in spans if span.state == DEAD}
    useful = since = 0.0
    for first, last in _pieces(states, begin, end):
        if first in kills:
            useful, since = useful - since, 0.0
        if len(_up(states, first)) == len(states):
            useful += last - first
            since = math.fmod(since + last - first, checkpoint_seconds) if checkpoint_seconds else since + last - first
    return useful


def _elastic(states: Timelines, step_seconds: Mapping[str, float], begin: float, end: float) -> float:
    """Return the useful island seconds. The workers that are up step at the pace of the slowest of them."""
    useful, before, paused_until = 0.0, _up(states, begin), begin
    shortest = min(step_seconds.values())
    for first, last in _pieces(states, begin, end):
        up = _up(states, first)
        if up != before:
            before, paused_until = up, first + ELASTIC_PAUSE_SECONDS
        if up:
            pace = shortest / max(step_seconds[island] for island in up)
            useful += max(0.0, last - max(first, paused_until)) * len(up) * pace
    return useful


def _diloco(states: Timelines, step_seconds: Mapping[str, float], begin: float, end: float, interval: int) -> int:
    """Count the rounds that closed."""
    rounds, now = 0, begin
    while (now := max(_end_of(states[i], now, interval * seconds) for i, seconds in step_seconds.items())) <= end:
        rounds += 1
    return rounds


def _end_of(spans: Sequence[Span], since: float, seconds: float) -> float:
    """Return when an island has trained for `seconds` after `since` without a kill in between, or infinity."""
    missing = seconds
    for span in spans:
        if span.end <= since:
            continue
        if span.state == DEAD:
            missing = seconds
        elif span.state == SERVING:
            begin = max(since, span.begin)
            if span.end - begin >= missing - 1e-9:
                return begin + missing
            missing -= span.end - begin
    return math.inf


def _pieces(states: Timelines, begin: float, end: float) -> list[tuple[float, float]]:
    """Cut the window wherever a state changes."""
    edges = {edge for spans in states.values() for span in spans for edge in (span.begin, span.end)}
    return list(itertools.pairwise(sorted({begin, end} | {edge for edge in edges if begin < edge < end})))


def _up(states: Timelines, at: float) -> frozenset[str]:
    return frozenset(
        i for i, spans in states.items() if any(s.begin <= at < s.end and s.state == SERVING for s in spans)
    )
