"""How a worker that starts waits for its Redis."""

from __future__ import annotations

import logging

import pytest

from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, UnreachableError
from archipelago.broker.process import PAUSE_SECONDS, AwaitedRun, Patience
from tests.failing import failing


class Outage:
    """Time, and a server that answers from `ends_at` on."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.now, self.asked = ends_at, 100.0, 0

    def answer(self) -> str:
        self.asked += 1
        if self.now < self.ends_at:
            raise UnreachableError("redis://away does not answer (refused)", "Is it running?")
        return "PONG"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, seconds: float, stops_at: float = 1e9) -> Patience:
        return Patience(seconds, lambda: self.now >= stops_at, lambda: self.now, self.sleep)


def test_it_is_asked_again_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(ends_at=103.0)
    with caplog.at_level(logging.WARNING):
        assert outage.patience(30.0)(outage.answer) == "PONG"
    assert outage.now == 103.0
    (said,) = caplog.messages  # once, with what went wrong and what to look at
    assert said == "redis://away does not answer (refused). Is it running? Trying again for 30 s."


@pytest.mark.parametrize(("seconds", "tries"), [(0.0, 1), (3.0, 1 + 3 / PAUSE_SECONDS)])
def test_in_the_end_the_error_is_what_it_was(seconds: float, tries: int) -> None:
    outage = Outage(ends_at=1e9)
    with failing(UnreachableError):
        outage.patience(seconds)(outage.answer)
    assert (outage.asked, outage.now) == (tries, 100.0 + seconds)


def test_each_outage_has_the_whole_of_it() -> None:
    outage = Outage(ends_at=102.0)
    awaited = outage.patience(3.0)
    awaited(outage.answer)
    outage.ends_at = outage.now + 2.5
    assert awaited(outage.answer) == "PONG"


def test_a_signal_ends_the_waiting() -> None:
    outage = Outage(ends_at=1e9)
    with pytest.raises(UnreachableError):
        outage.patience(30.0, stops_at=101.0)(outage.answer)
    assert outage.now == 101.0


@pytest.mark.parametrize("error", [UnknownRunError("no run"), BrokerError("wrong password")])
def test_what_no_waiting_mends_is_said_at_once(error: BrokerError) -> None:
    outage = Outage(ends_at=0.0)

    def answer() -> None:
        raise error

    with pytest.raises(type(error)):
        outage.patience(30.0)(answer)
    assert outage.now == 100.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_wait_is_a_number_of_seconds(seconds: float) -> None:
    with failing(ConfigError, "config.wait-seconds"):
        AwaitedRun(wait_seconds=seconds).patience(lambda: False)
