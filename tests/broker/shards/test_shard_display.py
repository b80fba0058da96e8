"""A reader that shows a run while further shards cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.memory.transport import MemoryReader
from archipelago.broker.messages import Counters, Snapshot
from archipelago.broker.shards.reader import DisplayReader
from archipelago.broker.transport import MergerStatus
from tests import samples
from tests.conftest import Until
from tests.failing import failing

MANIFEST = replace(samples.manifest(), shards=2)


class Shard(MemoryReader):
    """The reader of a shard, which can be away, and counts the calls that reach for its server."""

    def __init__(self, merged: int) -> None:
        self.merged, self.calls = merged, 0
        self.error: BrokerError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def _call(self) -> None:
        self.calls += 1
        self.answers.wait()
        if self.error is not None:
            raise self.error

    def counters(self) -> Counters:
        self._call()
        return Counters(merged=self.merged)

    def merger_status(self) -> MergerStatus:
        self._call()
        return MergerStatus(f"m{self.merged}", 3, 4.0, 1.0)

    def is_served(self) -> bool:
        self._call()
        return True

    def control(self) -> dict[str, str]:
        self._call()
        return {}

    def steer(self, changes: Mapping[str, str]) -> None:
        self._call()

    def heads(self) -> list[Snapshot | None]:
        self._call()
        return [None]


class Reading:
    """A reader of two shards. Shard 1 hangs until `answers` is set."""

    def __init__(self) -> None:
        self.home, self.other = Shard(1), Shard(20)
        self.answers = self.other.answers
        self.reader = DisplayReader([self.home, self.other], MANIFEST, 0.2)

    def merged(self) -> int:
        return self.reader.counters().merged


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.answers.set()


@pytest.fixture
def away(reading: Reading) -> Reading:
    """A reader that has found shard 1 away."""
    reading.other.error = UnreachableError("it does not answer")
    assert reading.merged() == 1
    return reading


def test_a_shard_that_is_away_is_left_out_and_named(reading: Reading) -> None:
    assert (reading.merged(), reading.reader.away) == (21, {})
    reading.other.error = UnreachableError("it does not answer")
    assert (reading.merged(), reading.reader.away) == (1, {1: "it does not answer"})
    status = reading.reader.merger_status()
    assert status is not None
    assert (status.holder, status.unreachable, status.unserved) == ("m1 (shard 0)", (1,), ())
    assert (status.epoch, status.lease_seconds) == (3, 4.0)


def test_only_one_call_waits_for_a_shard_that_hangs(reading: Reading, until: Until) -> None:
    reading.answers.clear()
    assert (reading.merged(), reading.reader.away) == (1, {1: "its server has not answered for 0.2 s"})
    for _ in range(5):
        assert (reading.merged(), reading.reader.away) == (1, {1: "its server has not answered yet"})
    assert reading.other.calls == 1, "it was asked again before it had answered"
    reading.answers.set()
    until(lambda: reading.merged() == 21, "the shard is read again")
    assert reading.reader.away == {}


def test_a_shard_that_answers_with_an_error_is_not_away(away: Reading) -> None:
    away.other.error = BrokerError("it does not permit this")
    with failing(BrokerError):
        away.merged()


def test_all_shards_are_asked_at_the_same_time() -> None:
    class Waiting(Shard):
        """A shard that answers when the other one is asked, too."""

        def _call(self) -> None:
            both.wait()

    both = threading.Barrier(2)
    assert DisplayReader([Waiting(1), Waiting(20)], MANIFEST, patience_seconds=60.0).counters().merged == 21


def test_shard_0_writes_and_parameters_need_an_answer(away: Reading) -> None:
    with failing(UnreachableError):
        away.reader.steer({"merging": "paused"})
    with failing(UnreachableError):
        away.reader.heads()
    away.home.error = UnreachableError("shard 0 is away")
    with failing(UnreachableError) as caught:
        away.merged()
    assert caught.value is away.home.error
