"""Adaptation to the link: thinner codecs on slow links, and compression where it saves time."""

from __future__ import annotations

import pytest

from archipelago.islands.sync.measures import SMALL_BYTES, TRY_EVERY, Uplink


class Played:
    """The measures of a link, and the time."""

    def __init__(self) -> None:
        self.uplink, self.now = Uplink(), 0.0

    def carry(self, seconds: float, size: int = 1_000_000, ways: str = "up", times: int = 1, rest: float = 0.0) -> None:
        """Carry payloads one after the other, and rest after each."""
        for _ in range(times):
            began, self.now = self.now, self.now + seconds
            if "up" in ways:
                self.uplink.sent(size, began, self.now)
            if "down" in ways:
                self.uplink.received(size, began, self.now)
            self.now += rest


def played(rate: float) -> Played:
    """Return the measures of a link with this rate in bytes per second."""
    out = Played()
    out.carry(1e6 / rate, times=20)
    return out


def measured(rate: float) -> Uplink:
    return played(rate).uplink


def test_a_slow_link_uses_the_thin_codec_for_large_payloads() -> None:
    assert Uplink().fits(1 << 30, 1.0), "nothing is measured yet"
    assert Uplink().should_pack()
    uplink = measured(1e6)
    for size, fits in (
        (900_000, True),
        (1_100_000, False),
        (900_000, False),  # Otherwise the codec would alternate.
        (600_000, False),
        (400_000, True),
        (900_000, True),
    ):
        assert uplink.fits(size, 1.0) is fits, size
    assert measured(1.0).fits(SMALL_BYTES - 1, 1e-9)
    assert not measured(1.0).fits(SMALL_BYTES, 1e-9)


def test_a_long_round_trip_does_not_count_as_a_thin_link() -> None:
    """No codec shortens the time that even an empty message takes."""
    link = Played()
    for _ in range(20):
        link.uplink.answered(0.5)
        link.carry(0.51)
    assert link.uplink.fits(10_000_000, 0.2)
    assert not link.uplink.fits(100_000_000, 0.2)


def test_a_busy_processor_is_no_thin_link() -> None:
    """With steps of 1 ms, a loop makes many of them while its threads wait for the processor and the merger works."""
    link = Played()
    for turn in range(40):
        link.uplink.answered(0.004)
        link.carry(0.002 + 0.004 * (turn % 3), 200, "up down", rest=0.02)  # a few round trips for a few bytes
    assert link.uplink.in_words(124.0) == ""
    link.carry(0.1, ways="up down", times=20, rest=3.0)
    assert link.uplink.in_words(124.0) == "", "it rests for most of the time"


def test_the_full_codec_returns_when_the_link_recovers() -> None:
    link = played(1e6)
    assert not link.uplink.fits(10_000_000, 1.0)
    assert link.uplink.in_words(3.0) == "thin link at 8.0 Mbit/s up: fewer bits, interval 3.0x"
    link.carry(1e-3, times=40)
    assert link.uplink.fits(10_000_000, 1.0)
    assert link.uplink.in_words(1.0) == Uplink().in_words(1.0) == ""
    link = played(125_000.0)
    link.carry(2e5 / 500_000, 200_000, "down")
    assert link.uplink.in_words(1.0) == ""
    assert link.uplink.in_words(2.0) == "thin link at 1.0 Mbit/s up, 4.0 Mbit/s down: interval 2.0x"


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_pause_during_one_transfer_is_no_thin_link(before: int) -> None:
    link = Played()
    for seconds in (*[1e-3] * before, 10.0, *[1e-3] * 3):
        link.carry(seconds, ways="up down", rest=1e-2)
        link.uplink.answered(seconds)
    assert link.uplink.fits(1_000_000, 0.1)
    assert link.uplink.in_words(40.0) == ""


def test_compression_is_retried_from_time_to_time_on_a_fast_link() -> None:
    slow, fast = measured(1e5), measured(1e10)
    for uplink in (slow, fast):
        for _ in range(20):
            uplink.packed(1000, 900, 1000 / 500e6)
    assert all(slow.should_pack() for _ in range(100))
    assert sum(fast.should_pack() for _ in range(10 * TRY_EVERY)) == 10
