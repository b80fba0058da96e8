"""The beginnings and ends of a run's problems, for its history. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from archipelago.ops.watch.advice import Problem
from archipelago.ops.watch.health import Event
from archipelago.ops.watch.remedies import NOTHING

EVENTS_KEPT = 200


class ProblemLog:
    """The beginnings and ends of problems, as events, in bounded memory."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Problem] = {}
        self._events: list[Event] = []

    def update(self, found: Iterable[Problem], unix_seconds: float, live: Container[str] = ()) -> None:
        """Compare the present problems with those of the last call. Those that the merger notes have events already.

        Args:
            found: The present problems.
            unix_seconds: The reader's wall clock.
            live: The names of the live islands.
        """
        now = {(each.code, each.who): each for each in found if each.code not in _NOTED}
        for key, problem in now.items():
            if key not in self._open:
                began = unix_seconds - problem.seconds
                kind = problem.code.partition(".")[2]
                self._events.append(Event(began, problem.who, kind, problem.text, problem.remedy))
        for key, problem in self._open.items():
            if key not in now:
                self._events.append(_end_of(problem, unix_seconds, live))
        self._open = now
        del self._events[:-EVENTS_KEPT]

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, oldest first."""
        return tuple(self._events)


_NOTED = frozenset(["island.refused", "island.lowered", "run.paused"])
_ENDS = {
    "island.silent": "It has left, or is silent for so long that it counts as gone.",
    "merger.missing": "A merger serves again.",
    "merger.slow": "Rounds no longer wait for the merger.",
    "run.no-islands": "An island is live again.",
    "run.stalled": "Rounds close again.",
    "shard.unreachable": "All shards can be reached again.",
}


def _end_of(problem: Problem, unix_seconds: float, live: Container[str]) -> Event:
    if problem.code == "island.silent" and problem.who in live:
        return Event(unix_seconds, problem.who, "came back", "It sends heartbeats again.", NOTHING)
    return Event(unix_seconds, problem.who, "over", _ENDS.get(problem.code, f"Over: {problem.text}"), NOTHING)
