"""A merger's metrics and curves, and the time that it works."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.messages import RoundMember, TapeEntry
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.observe.merge_load import merge_load
from archipelago.merger import spectra
from archipelago.merger.main import values
from tests import samples
from tests.harness.merger_run import ISOTROPIC, MergerRun, constant
from tests.harness.played import started

BITS = loss_unit(samples.manifest().corpus)


def member(staleness: int) -> RoundMember:
    return RoundMember("a", "x", 0, 0, staleness, 0.5, 1.0, 100, 4, 2.0)


def test_a_merger_tells_of_its_rounds_for_its_curves() -> None:
    run, told = MergerRun(quorum=2), list[TapeEntry]()
    merger = run.idle_merger()
    merger.on_round = told.append
    run.play(started(merger), 1, 2, 3)
    assert told == run.transport.reader.tape(10)
    assert len(told) == 3
    entry = samples.commit([]).tape
    assert values(replace(entry, members=(member(1), member(4))), BITS)["staleness"] == 2.5
    empty = values(replace(entry, members=(), loss=math.nan), BITS)
    assert (math.isnan(empty["staleness"]), math.isnan(empty["loss"]), empty["contributions"]) == (True, True, 0)


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_tape_of_a_merger_that_cannot_keep_up_says_so(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra take as long as an interval of the islands, which stretch theirs, or a quarter of it."""
    run = MergerRun(ISOTROPIC)
    changed = 0

    def with_power(matrix_RC: Vector, *_: object) -> Vector:
        nonlocal changed
        changed += 1
        run.clock.now += 2.0
        return matrix_RC

    monkeypatch.setattr(spectra, "with_power", with_power)
    merger = run.merger()
    merger.wall = lambda: 1e9 + run.clock.now
    interval = run.manifest.config.sync.interval
    for number in range(1, 21):
        run.live("a", "b")
        for island in "ab":
            run.send(island, number, constant(1.0), steps=2 * interval if is_slow else interval)
        run.clock.now += 0.1 if is_slow else 10.0
        assert merger.turn(0.0)
    tape = run.transport.reader.tape(100)
    assert sum(entry.spectra_seconds for entry in tape) == pytest.approx(2.0 * changed)
    assert all(entry.busy_seconds >= entry.merge_seconds >= entry.spectra_seconds for entry in tape)
    load = merge_load(tape, interval)
    assert load is not None and load.is_slow is (load.busy > 0.9) is is_slow
    assert load.spectra == pytest.approx(load.busy) and load.stretch > 0.0
