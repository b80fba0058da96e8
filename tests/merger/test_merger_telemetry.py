"""A merger's metrics and curves, and the time that it works."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from archipelago.broker.codecs import Vector
from archipelago.broker.manifest import loss_unit
from archipelago.broker.messages import RoundMember
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.metrics import new_registry
from archipelago.merger import merge_rules
from archipelago.merger.service import Merger
from archipelago.merger.telemetry import MergerCollector, RoundTelemetry, values
from tests import samples
from tests.broker.observe.test_metrics import values as exported
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


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    found = exported(registry)
    return {name.removeprefix("archipelago_merger_"): value for (name, bucket), value in found.items() if not bucket}


def member(staleness: int) -> RoundMember:
    return RoundMember("a", "x", 0, 0, staleness, 0.5, 1.0, 100, 4, 2.0)


def test_rounds_are_counted() -> None:
    registry, merger = new_registry(), MergerRun().idle_merger()
    rounds = listening(merger, KeptCurves(), registry)
    assert scraped(registry)["rounds_total"] == 0
    assert "open_seconds" not in scraped(registry), "the gauges are absent before the first round"
    commit = samples.commit([])
    entry = replace(commit.tape, merge_seconds=0.125, bytes_up=7)
    snapshot = replace(commit.snapshot, bytes=30, difference_bytes=4)
    rounds.closed(replace(entry, members=(member(0), member(0), member(5))), snapshot)
    rounds.closed(replace(entry, members=(member(99),), loss=1.5), snapshot)
    assert scraped(registry) == {
        "serving": 0, "epoch": 0, "refused_contributions_total": 0, "round_age_seconds": 0,
        "rounds_total": 2, "merged_contributions_total": 4, "merged_tokens_total": 200, "received_bytes_total": 14,
        "published_bytes_total": 68, "quorum_seconds": 0.1, "grace_seconds": 0.2, "open_seconds": 0.3,
        "merge_seconds": 0.125, "spectra_seconds": 0.0, "busy_seconds": 0.0,
        "loss": pytest.approx(1.5 / math.log(2.0)),
        "staleness_versions_count": 4, "staleness_versions_sum": 104,
    }  # fmt: skip
    assert [value for (_, bucket), value in exported(registry).items() if bucket] == [2, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    empty = replace(entry, members=(), loss=float("nan"))
    rounds.closed(empty, snapshot)
    assert "loss" not in scraped(registry)
    assert values(replace(entry, members=(member(1), member(4))), BITS)["staleness"] == 2.5
    assert (math.isnan(values(empty, BITS)["staleness"]), values(empty, BITS)["contributions"]) == (True, 0)


def listening(merger: Merger, drawn: KeptCurves, registry: CollectorRegistry) -> RoundTelemetry:
    """Connect a merger's telemetry, as `merger.main` does."""
    rounds = RoundTelemetry(merger.manifest, drawn, merger.clock)
    merger.on_round = rounds.closed
    registry.register(MergerCollector([(merger, rounds)]))
    return rounds


def test_the_rounds_of_a_merger_have_metrics_and_curve_points() -> None:
    run = MergerRun(quorum=2)
    merger, drawn, registry = run.idle_merger(), KeptCurves(), new_registry()
    listening(merger, drawn, registry)
    found = scraped(registry)
    assert (found["serving"], found["epoch"], found["rounds_total"]) == (0, 0, 0)
    assert not {"round", "live_islands", "open_seconds", "round_age_seconds"} & set(found), "a standby knows no more"
    run.play(started(merger), 1, 2, 3)
    shown, counters, tape = scraped(registry), run.transport.reader.counters(), run.transport.reader.tape(10)
    assert (shown["serving"], shown["epoch"], shown["round"], shown["rounds_total"]) == (1, merger.epoch, 3, 3)
    assert (shown["live_islands"], shown["merged_contributions_total"]) == (2, counters.merged)
    assert shown["merged_tokens_total"] == counters.merged_tokens / 2
    assert shown["received_bytes_total"] == counters.bytes_up
    assert drawn.points == [(entry.round, values(entry, BITS)) for entry in tape]
    run.clock.now += 4.0
    assert scraped(registry)["round_age_seconds"] == 4.0
    run.send("a", 4, constant(float("nan")))
    merger.turn(0.0)
    assert scraped(registry)["refused_contributions_total"] == run.transport.reader.counters().refused == 1


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

    monkeypatch.setattr(merge_rules, "with_power", with_power)
    merger, registry = run.merger(), new_registry()
    merger.wall = lambda: 1e9 + run.clock.now
    listening(merger, KeptCurves(), registry)
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
    shown = scraped(registry)
    assert (shown["busy_ratio"] > 0.9) is is_slow
    assert shown["spectra_ratio"] == pytest.approx(shown["busy_ratio"])
    assert shown["stretch_ratio"] > 0.0
