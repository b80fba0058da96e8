"""How the mergers of several shards agree on a checkpoint, without any broker."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import pytest

from archipelago.broker.commits import START
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Call, Event, Marker
from archipelago.broker.transport import ReaderClient
from archipelago.merger.one_cut import EVENTS_AT_ONCE, LOOK_SECONDS, RETRY_SECONDS, Following, Leading
from tests import samples
from tests.failing import failing
from tests.harness.merger_run import logged_codes


class Shard:
    """What a merger reads of another shard."""

    def __init__(self) -> None:
        self.announced: list[Event] = []
        self.round = self.waiting = self.calls = 0
        self.is_away = self.is_gone = False

    def _answer(self, value: Any) -> Any:
        self.calls += 1
        if self.is_away:
            raise UnreachableError("away")
        return value

    def last_event(self) -> str:
        return str(self._answer(f"{len(self.announced)}-0" if self.announced else START))

    def uid(self) -> str | None:
        return cast(str | None, self._answer(None if self.is_gone else "uid"))

    def events(self, after: str, block_seconds: float, count: int) -> list[tuple[str, Event]]:
        assert block_seconds == 0.0
        start = int(after.partition("-")[0])
        found = [(f"{n}-0", event) for n, event in enumerate(self.announced[start : start + count], start + 1)]
        return cast(list[tuple[str, Event]], self._answer(found))

    def tape(self, count: int) -> list[Any]:
        return list(self._answer([samples.commit([], round_number=self.round).tape] if self.round else []))

    def backlog(self) -> int:
        return int(self._answer(self.waiting))


def following(home: Shard) -> Following:
    """Return what follows the markers of shard 0 after a merger has loaded."""
    follower = Following(cast(ReaderClient, home))
    follower.start()
    assert follower.newest(0.0) is None
    return follower


def test_markers_are_followed_once_from_the_load_of_the_merger_on() -> None:
    home = Shard()
    follower = following(home)
    home.announced += [Call(1, 0), Marker(3, 0), Call(2, 0)]
    assert [follower.newest(0.0) for _ in range(2)] == [3, None]
    home.announced += [Marker(4, 0), *[Call(3, 0)] * EVENTS_AT_ONCE, Marker(5, 0)]
    assert follower.newest(0.0) == 5
    home.announced.append(Marker(6, 0))
    follower.start()
    assert follower.newest(0.0) is None, "it was announced before the merger has loaded"
    home.announced.append(Marker(7, 0))
    assert follower.newest(0.0) == 7


def test_markers_are_missed_while_shard_0_is_away_and_it_is_asked_rarely() -> None:
    home = Shard()
    follower = following(home)
    home.is_away = True
    home.announced.append(Marker(3, 0))
    assert follower.newest(1.0) is None
    calls, home.is_away = home.calls, False
    assert follower.newest(1.0 + RETRY_SECONDS / 2) is None
    assert home.calls == calls
    assert follower.newest(1.0 + RETRY_SECONDS) is None, "what was merged meanwhile may be later than the marker"
    home.announced.append(Marker(4, 0))
    assert follower.newest(1.0 + RETRY_SECONDS) == 4


def test_a_shard_waits_for_a_shard_0_that_is_gone_and_not_for_one_that_is_away() -> None:
    home = Shard()
    follower = following(home)
    home.is_gone = True
    with failing(UnreachableError):
        follower.start()
    home.is_away = True
    follower.start()


def leading(other: Shard, parts: Container[int] = (), home: Shard | None = None) -> Leading:
    def missing(number: int) -> list[int]:
        return [] if number in parts else [1]

    return Leading(cast(ReaderClient, home or Shard()), [cast(ReaderClient, other)], missing)


def test_a_checkpoint_is_lacking_until_it_has_all_parts_and_rounds() -> None:
    other, parts = Shard(), set[int]()
    leader = leading(other, parts)
    assert not leader.lacks(0), "before the first round of any shard"
    assert leader.lacks(1)
    other.round = 2
    assert leader.lacks(0)
    leader.begin(5, 0.0)
    assert leader.lacks(1)
    parts.add(5)
    assert not leader.lacks(1)
    other.round = 3
    assert leader.lacks(1)
    other.is_away = True
    leader.begin(6, 0.0)
    parts.add(6)
    other.is_away = False
    assert leader.lacks(1), "the other shard could not be read"


def test_another_checkpoint_waits_for_the_parts_of_the_last_one() -> None:
    parts = set[int]()
    leader = leading(Shard(), parts)
    assert not leader.is_waiting(0.0, 30.0)
    leader.begin(1, 0.0)
    assert leader.is_waiting(30.0, 30.0)
    parts.add(1)
    assert leader.is_waiting(30.0 + LOOK_SECONDS / 2, 30.0), "the parts were looked for a moment ago"
    assert not leader.is_waiting(30.0 + LOOK_SECONDS, 30.0)
    leader.begin(2, 100.0)
    leader.gave_up()
    assert not leader.is_waiting(100.0, 30.0)
    now, waits = 200.0, list[float]()
    for number in range(3, 11):
        leader.begin(number, now)
        began = now
        while leader.is_waiting(now, 1.0):
            now += 0.5
        waits.append(now - began)
        if number == 8:
            parts.add(number)
    assert waits == [2, 4, 8, 8, 8, 8, 2, 4], "the wait ends, and grows until the parts are there"


def test_a_missing_part_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = set[int]()
    leader = leading(Shard(), parts)
    for number, logged in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 2)):
        leader.begin(number, 0.0)
        if number == 3:
            parts.add(number)
        assert logged_codes(caplog) == ["checkpoint.incomplete"] * logged, number
