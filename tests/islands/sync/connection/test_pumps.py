"""Tests of pumps: what they retry, and what ends an island."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.islands.sync.connection.pumps import REFUSALS_MAX, REFUSED, Pump, Pumps


def pumps_of(errors: Iterator[Exception | None]) -> Pumps:
    """Return pumps with one pump, whose calls raise these errors."""

    def work() -> None:
        error = next(errors)
        if error is not None:
            raise error

    return Pumps([Pump("events", work)], threading.Condition())


REFUSAL = BrokerError("it refuses access", code=REFUSED)


def test_an_island_leaves_when_its_credentials_are_refused_again_and_again() -> None:
    pumps = pumps_of(iter([REFUSAL] * REFUSALS_MAX))
    for _ in range(REFUSALS_MAX):
        assert pumps.failure is None
        pumps.run_once()
    assert pumps.failure is REFUSAL


def test_a_refusal_that_ends_and_an_outage_are_retried() -> None:
    most: list[Exception | None] = [REFUSAL] * (REFUSALS_MAX - 1)
    outage = UnreachableError("it is away")
    pumps = pumps_of(iter([*most, None, *most, outage, *most, *[outage] * 50]))
    for _ in range(3 * len(most) + 52):
        pumps.run_once()
    assert pumps.failure is None
    assert pumps.trouble == outage.what
