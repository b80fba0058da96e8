"""A merger's metrics and curves, and the time that it works."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.manifest import loss_unit
from archipelago.broker.messages import RoundMember
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.merge_load import merge_load
from archipelago.merger import spectra
from archipelago.merger.main import RoundTelemetry, values
from archipelago.merger.service import Merger
from tests import samples
from tests.harness.merger_run import ISOTROPIC, MergerRun, constant, logged_codes
from tests.harness.played import started

BITS = loss_unit(samples.manifest().corpus)


class KeptCurves(CurveWriter):
    """A curve writer that keeps its points."""

    def __init__(self) -> None:
        super().__init__(None)
        self.points: list[tuple[int, Mapping[str, float]]] = []

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, values))


def member(staleness: int) -> RoundMember:
    return RoundMember("a", "x", 0, 0, staleness, 0.5, 1.0, 100, 4, 2.0)


def listening(merger: Merger, drawn: KeptCurves) -> None:
    """Connect a merger's telemetry, as `merger.main` does."""
    merger.on_round = RoundTelemetry(merger.manifest, drawn).closed


def test_the_rounds_of_a_merger_are_points_of_its_curves() -> None:
    run, drawn = MergerRun(quorum=2), KeptCurves()
    merger = run.idle_merger()
    listening(merger, drawn)
    run.play(started(merger), 1, 2, 3)
    assert drawn.points == [(entry.round, values(entry, BITS)) for entry in run.transport.reader.tape(10)]
    assert len(drawn.points) == 3
    entry = samples.commit([]).tape
    assert values(replace(entry, members=(member(1), member(4))), BITS)["staleness"] == 2.5
    empty = values(replace(entry, members=(), loss=math.nan), BITS)
    assert (math.isnan(empty["staleness"]), math.isnan(empty["loss"]), empty["contributions"]) == (True, True, 0)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_merger_that_cannot_keep_up_says_so_once(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    listening(merger, KeptCurves())
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
    assert logged_codes(caplog) == ["merger.slow"] * is_slow
    load = merge_load(tape, interval)
    assert load is not None and (load.busy > 0.9) is is_slow
    assert load.spectra == pytest.approx(load.busy) and load.stretch > 0.0
