"""A reader that shows a run while further shards cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.memory.transport import MemoryReader
from archipelago.broker.messages import Counters, Snapshot
from archipelago.broker.shards.reader import RETRY_SECONDS, DisplayReader
from archipelago.broker.transport import MergerStatus
from tests import samples
from tests.failing import failing

MANIFEST = replace(samples.manifest(), shards=2)


class Shard(MemoryReader):
    """The reader of a shard, which can be away, and counts the calls that reach for its server."""

    def __init__(self, merged: int) -> None:
        self.merged, self.calls = merged, 0
        self.error: BrokerError | None = None

    def _call(self) -> None:
        self.calls += 1
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
    """A reader of two shards on a clock of the test. While shard 1 hangs, attempts wait until the test runs them."""

    def __init__(self) -> None:
        self.now, self.hangs = 100.0, False
        self.home, self.other = Shard(1), Shard(20)
        self.attempts: list[Callable[[], None]] = []
        self.reader = DisplayReader([self.home, self.other], MANIFEST, lambda: self.now, self._aside, 0.0)

    def _aside(self, attempt: Callable[[], None]) -> None:
        if self.hangs:
            self.attempts.append(attempt)
        else:
            attempt()

    def answer(self) -> None:
        """Let shard 1 answer what it was asked."""
        self.hangs = False
        for attempt in self.attempts:
            attempt()
        self.attempts.clear()

    def merged(self) -> int:
        return self.reader.counters().merged


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def away(reading: Reading) -> Reading:
    """A reader that has found shard 1 away."""
    reading.other.error = UnreachableError("it does not answer")
    assert reading.merged() == 1
    reading.hangs = True
    return reading


def test_a_shard_that_is_away_is_left_out_and_named(reading: Reading) -> None:
    assert (reading.merged(), reading.reader.away) == (21, {})
    reading.other.error = UnreachableError("it does not answer")
    assert (reading.merged(), reading.reader.away) == (1, {1: "it does not answer"})
    status = reading.reader.merger_status()
    assert status is not None
    assert (status.holder, status.unreachable, status.unserved) == ("m1 (shard 0)", (1,), ())
    assert (status.epoch, status.lease_seconds) == (3, 4.0)


def test_only_one_call_waits_for_a_shard_that_is_away(away: Reading) -> None:
    calls = away.other.calls
    for _ in range(3):
        away.now += RETRY_SECONDS
        assert [away.merged() for _ in range(5)] == [1] * 5
        assert away.other.calls == calls, "a call waited for the shard"
        (attempt,) = away.attempts
        away.attempts.clear()
        attempt()
        calls += 1
    away.now += 0.9 * RETRY_SECONDS
    away.merged()
    assert away.attempts == [], "the shard was asked again too early"


def test_no_call_waits_until_a_shard_that_hangs_answers(reading: Reading) -> None:
    reading.hangs = True
    assert (reading.merged(), reading.reader.away) == (1, {1: "its server has not answered for 0 s"})
    reading.now += 10 * RETRY_SECONDS
    assert reading.merged() == 1
    assert len(reading.attempts) == 1, "it was asked again before it had answered"
    reading.answer()
    assert (reading.merged(), reading.reader.away) == (21, {})
    reading.hangs, reading.other.error = True, UnreachableError("it timed out")
    reading.merged()
    reading.answer()
    assert (reading.merged(), reading.reader.away) == (1, {1: "it timed out"})


@pytest.mark.parametrize("error", [None, BrokerError("it does not permit this")])
def test_a_shard_that_answers_again_is_read_again(away: Reading, error: BrokerError | None) -> None:
    away.other.error = error
    away.now += RETRY_SECONDS
    assert away.merged() == 1, "the call that asks again does not wait"
    away.answer()
    if error:  # A shard that answers with an error is not away.
        with failing(BrokerError):
            away.merged()
    else:
        assert (away.merged(), away.reader.away) == (21, {})


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
