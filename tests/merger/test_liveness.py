"""Rounds wait for islands whose heartbeats arrive and that contribute, and for a few newcomers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from archipelago.broker.config import RunConfig
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.merger.claims import Accounts
from archipelago.merger.liveness import NEWCOMERS_MIN, SILENT_ROUNDS, SILENT_SECONDS, SILENT_SECONDS_MAX, Liveness
from tests import samples


class Watch:
    """A merger that looks at heartbeats each second. Islands that are not `frozen` send one each second."""

    def __init__(self) -> None:
        self.accounts = Accounts(RunConfig(), 2)
        self.liveness = Liveness(self.accounts)
        self.now, self.closed = 0.0, 0

    def look(self, islands: Iterable[str], frozen: Iterable[str] = (), age: float = 0.5, **changes: Any) -> set[str]:
        self.now += 1.0
        beats = [Presence(samples.heartbeat(island, tokens=int(self.now), **changes), 0.5) for island in islands]
        beats += [Presence(samples.heartbeat(island), age) for island in frozen]
        return set(self.liveness.look(beats, self.now, self.closed))

    def contribute(self, *islands: str) -> None:
        for island in islands:
            self.accounts.accept(samples.contribution(island=island), self.closed, self.now, self.now)


def test_a_heartbeat_that_never_changes_counts_for_ten_seconds() -> None:
    watch = Watch()
    found = [watch.look("a", frozen=["x"], age=0.25) for _ in range(int(LIVE_SECONDS) + 5)]
    assert found[0] == {"a", "x"}
    assert found[-1] == {"a"}
    assert Watch().look("a", frozen=["x"], age=-1e9) == {"a"}, "a life cannot be endless"
    watch, ages = Watch(), [0.1, 0.9, 0.2, 0.8] * 10
    again = [watch.look([], frozen=["a"], age=age) for age in ages]
    assert again == [{"a"}] * 40, "it may be written again with the same text"


def test_islands_that_never_contribute_stop_counting() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    idle = [f"x{i:03}" for i in range(1000)]
    assert len(watch.look(["a", "b", *idle])) == 2 + NEWCOMERS_MIN
    for _ in range(SILENT_ROUNDS + 1):
        watch.closed += 1
        watch.contribute("a", "b")
    watch.now += SILENT_SECONDS
    assert watch.look(["a", "b", *idle]) == {"a", "b"}
    assert len(watch.liveness.idle) == 1000


def test_an_island_that_stops_contributing_stops_counting_and_returns() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    for _ in range(SILENT_ROUNDS + 1):
        assert watch.look("ab") == {"a", "b"}
        watch.closed += 1
        watch.contribute("a")
    watch.now += SILENT_SECONDS
    watch.contribute("a")
    assert watch.look("ab") == {"a"}
    watch.contribute("b")
    assert watch.look("ab") == {"a", "b"}


def test_nobody_stops_counting_while_no_round_closes() -> None:
    """A pause, or an outage of all other islands, may take days."""
    watch = Watch()
    watch.contribute("a", "b")
    watch.look("ab")
    for _ in range(10):
        watch.now += 5.0
        assert watch.look("abc") == {"a", "b", "c"}
    watch.now += 1e6
    assert watch.look("abc") == {"a", "b", "c"}


def test_slow_islands_have_more_time() -> None:
    watch = Watch()
    watch.contribute("a")
    for _ in range(600):
        assert "slow" in watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    watch.now += 5.0
    for _ in range(int(SILENT_SECONDS_MAX)):
        watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    assert watch.look(["slow"], step_seconds=1e9) == set()
