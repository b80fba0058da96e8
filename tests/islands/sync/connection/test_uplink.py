"""Adaptation to the link: thinner codecs on slow links, and compression where it saves time."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from archipelago.islands.sync.connection.uplink import BUSY_SHARE, SMALL_BYTES, TRY_EVERY, Uplink

SECONDS = st.floats(0.0, 1e3)
SIZES = st.integers(0, 1 << 30)


def measured(rate: float) -> Uplink:
    """Return the measures of a link with this rate in bytes per second."""
    uplink = Uplink()
    for _ in range(20):
        uplink.sent(1_000_000, 1e6 / rate)
    return uplink


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
    uplink = Uplink()
    for _ in range(20):
        uplink.answered(0.5)
        uplink.sent(1_000_000, 0.51)
    assert uplink.fits(10_000_000, 0.2)
    assert not uplink.fits(100_000_000, 0.2)


def test_the_full_codec_returns_when_the_link_recovers() -> None:
    uplink = measured(1e6)
    assert not uplink.fits(10_000_000, 1.0)
    assert uplink.in_words(3.0, 2.0) == "thin link at 8.0 Mbit/s up: fewer bits, interval 3.0x"
    for _ in range(40):
        uplink.sent(1_000_000, 1e-3)
    assert uplink.fits(10_000_000, 1.0)
    assert uplink.in_words(1.0, 2.0) == Uplink().in_words(1.0, 0.0) == ""
    uplink = measured(125_000.0)
    uplink.received(1000, 1000 / 500_000)
    assert uplink.in_words(1.0, 1.0) == ""
    assert uplink.in_words(2.0, 1.0) == "thin link at 1.0 Mbit/s up, 4.0 Mbit/s down: interval 2.0x"


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_pause_during_one_transfer_is_no_thin_link(before: int) -> None:
    uplink = Uplink()
    for seconds in (*[1e-3] * before, 10.0, *[1e-3] * 3):
        uplink.sent(1_000_000, seconds)
        uplink.received(1_000_000, seconds)
        uplink.answered(seconds)
    assert uplink.fits(1_000_000, 0.1)
    assert uplink.busy_share(1_000_000, 1_000_000, 0.1) < BUSY_SHARE
    assert uplink.in_words(40.0, uplink.busy_share(1_000_000, 1_000_000, 0.1)) == ""


def test_a_link_that_becomes_slow_is_noticed_with_the_second_transfer() -> None:
    uplink = measured(1e9)
    for _ in range(2):
        assert uplink.fits(1_000_000, 0.1)
        uplink.sent(1_000_000, 10.0)
    assert not uplink.fits(1_000_000, 0.1)
    assert uplink.in_words(2.0, uplink.busy_share(1_000_000, 0, 1.0))


def test_compression_is_retried_from_time_to_time_on_a_fast_link() -> None:
    slow, fast = measured(1e5), measured(1e10)
    for uplink in (slow, fast):
        for _ in range(20):
            uplink.packed(1000, 900, 1000 / 500e6)
    assert all(slow.should_pack() for _ in range(100))
    assert sum(fast.should_pack() for _ in range(10 * TRY_EVERY)) == 10
