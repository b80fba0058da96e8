"""Adaptation to the link: thinner codecs on slow links."""

from __future__ import annotations

import pytest

from archipelago.islands.sync.measures import Uplink


def carry(uplink: Uplink, seconds: float, size: int = 1_000_000, times: int = 1) -> None:
    """Send payloads one after the other."""
    for _ in range(times):
        uplink.sent(size, seconds)


def measured(rate: float) -> Uplink:
    """Return the measures of a link with this rate in bytes per second."""
    uplink = Uplink()
    carry(uplink, 1e6 / rate, times=20)
    return uplink


def test_a_slow_link_uses_the_thin_codec_for_large_payloads() -> None:
    assert Uplink().fits(1 << 30, 1.0), "nothing is measured yet"
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


def test_a_long_round_trip_does_not_count_as_a_thin_link() -> None:
    """No codec shortens the time that even an empty message takes."""
    uplink = Uplink()
    for _ in range(20):
        uplink.answered(0.5)
        carry(uplink, 0.51)
    assert uplink.fits(10_000_000, 0.2)
    assert not uplink.fits(100_000_000, 0.2)


def test_a_busy_processor_is_no_thin_link() -> None:
    """With steps of 1 ms, a loop makes many of them while its threads wait for the processor and the merger works."""
    uplink = Uplink()
    for turn in range(40):
        uplink.answered(0.004)
        carry(uplink, 0.002 + 0.004 * (turn % 3), 200)  # a few round trips for a few bytes
    assert uplink.fits(1_000_000, 1e-9)
    assert uplink.in_words == ""


def test_the_full_codec_returns_when_the_link_recovers() -> None:
    uplink = measured(1e6)
    assert not uplink.fits(10_000_000, 1.0)
    assert uplink.in_words == "thin link at 8.0 Mbit/s up: fewer bits"
    carry(uplink, 1e-3, times=40)
    assert uplink.fits(10_000_000, 1.0)
    assert uplink.in_words == Uplink().in_words == ""


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_pause_during_one_transfer_is_no_thin_link(before: int) -> None:
    uplink = Uplink()
    for seconds in (*[1e-3] * before, 10.0, *[1e-3] * 3):
        carry(uplink, seconds)
        uplink.answered(seconds)
    assert uplink.fits(1_000_000, 0.1)
    assert uplink.in_words == ""
