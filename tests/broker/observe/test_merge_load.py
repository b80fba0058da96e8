"""Whether rounds wait for the merger, by the tape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.merge_load import ROUNDS_MIN, SECONDS_MIN, MergeLoad, merge_load
from tests import samples

ROUND = samples.commit([]).tape
H = 24


def tape_of(rounds: int, seconds: float, busy: float, spectra: float = 0.0, steps: int = H) -> list[TapeEntry]:
    """Return rounds that are that many seconds apart, with a slow island that contributes half as many steps."""
    fast = replace(ROUND.members[0], steps=steps)
    entry = replace(ROUND, members=(replace(fast, steps=steps // 2), fast), busy_seconds=busy, spectra_seconds=spectra)
    return [replace(entry, round=n + 1, unix_seconds=1e9 + n * seconds) for n in range(rounds)]


def test_a_merger_is_slow_when_it_never_waits_and_islands_stretch_their_interval() -> None:
    found = merge_load(tape_of(20, 10.0, 9.5, 6.0, 2 * H), H)
    assert found is not None
    assert [found.busy, found.spectra, found.stretch] == pytest.approx([0.95, 0.6, 2.0])
    for busy, steps, is_slow in (
        (9.9, 2 * H, True),
        (9.9, H, False),  # It is busy, but in time.
        (5.0, 2 * H, False),  # The islands or their links are slow.
        (12.0, 2 * H, True),  # A clock was set.
    ):
        found = merge_load(tape_of(20, 10.0, busy, steps=steps), H)
        assert found is not None
        assert (found.is_slow, found.busy <= 1.0) == (is_slow, True), (busy, steps)


def test_few_rounds_say_nothing() -> None:
    assert merge_load([], H) is None
    assert merge_load(tape_of(ROUNDS_MIN - 1, SECONDS_MIN, SECONDS_MIN), H) is None
    assert merge_load(tape_of(40, SECONDS_MIN / 40, 1.0), H) is None, "a short run"
    assert merge_load(tape_of(20, 0.0, 1.0), H) is None, "no times were recorded"
    assert merge_load([replace(entry, members=()) for entry in tape_of(20, 10.0, 1.0)], H) is None


def test_an_outage_and_the_rounds_of_an_earlier_merger_do_not_count() -> None:
    long, usual = tape_of(20, 10.0, 9.9, steps=9 * H)[:10], tape_of(20, 10.0, 9.9)[10:]
    found = merge_load([*long, *usual], H)
    assert found is not None
    assert not found.is_slow
    slow, after = tape_of(20, 10.0, 10.0, steps=2 * H), tape_of(40, 10.0, 1.0)
    tape = [replace(entry, epoch=1) for entry in slow] + [replace(entry, epoch=2) for entry in after[20:]]
    found = merge_load(tape, H)
    assert found is not None
    assert found.busy == pytest.approx(0.1)


def test_the_remedy_is_about_spectra_where_they_are_the_reason() -> None:
    assert "--merge.rest rda" in MergeLoad(0.95, 0.9, 2.0).remedy
    assert "--merge.rest rda" not in MergeLoad(0.95, 0.1, 2.0).remedy
