"""What a merger shows of itself: each round that it commits, once, and what it refuses."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.errors import UnknownRunError, UnreachableError
from archipelago.broker.observe.curves import Scalars
from archipelago.broker.observe.metrics import registry_of
from archipelago.broker.redis.transport import connect
from archipelago.merger import main
from archipelago.merger.service import Merger
from archipelago.merger.telemetry import Telemetry, values
from tests import samples
from tests.broker.observe.test_curves import events
from tests.merger.simulated_broker import Faulty, SimulatedBroker, constant


class Drawn(Scalars):
    """Keeps what is put."""

    def __init__(self) -> None:
        super().__init__([])
        self.points: list[tuple[int, Mapping[str, float]]] = []

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, values))


def scraped(telemetry: Telemetry) -> dict[str, float]:
    text = generate_latest(registry_of(telemetry.families)).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name.removeprefix("archipelago_merger_"): s.value for s in found if not s.name.endswith("_bucket")}


def test_rounds_are_counted_and_drawn() -> None:
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger()
    drawn = Drawn()
    telemetry = Telemetry(merger, drawn)
    simulated.play(merger, 1, 2, 3)
    shown = scraped(telemetry)
    books = simulated.transport.books()
    assert (shown["serving"], shown["epoch"], shown["round"], shown["rounds_total"]) == (1, merger.epoch, 3, 3)
    assert shown["live_islands"] == 2
    assert shown["merged_contributions_total"] == books.merged == 6
    assert shown["merged_tokens_total"] == books.merged_tokens / 2
    assert shown["received_bytes_total"] == books.bytes_up
    assert shown["staleness_versions_count"] == 6
    tape = simulated.transport.tape(10)
    assert [step for step, _ in drawn.points] == [entry.round for entry in tape] == [1, 2, 3]
    for (_, point), entry in zip(drawn.points, tape, strict=True):
        assert point == values(entry)
        assert point["contributions"] == 2
        assert point["loss"] == entry.loss
        assert point["open_seconds"] == entry.open_seconds
    simulated.clock.now += 4.0
    assert scraped(telemetry)["round_age_seconds"] == 4.0


def test_refusals_are_counted() -> None:
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger()
    telemetry = Telemetry(merger, Drawn())
    simulated.live("a", "b")
    simulated.send("a", 1, constant(float("nan")))
    merger.turn(0.0)
    assert scraped(telemetry)["refused_contributions_total"] == simulated.transport.books().refused == 1
    assert scraped(telemetry)["merged_contributions_total"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_whose_commit_broke_is_not_counted(when: str) -> None:
    """Nobody knows whether it arrived: the merger begins anew from what Redis has."""
    simulated = SimulatedBroker(quorum=2)
    merger = Merger(Faulty(simulated.broker, "sample", [("commit", 0, when)]), simulated.clock, live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()
    telemetry = Telemetry(merger, Drawn())
    with pytest.raises(UnreachableError, match="the connection broke"):
        simulated.play(merger, 1)
    assert scraped(telemetry)["rounds_total"] == 0


def test_the_curves_of_a_run_that_is_deleted_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, manifest = f"fakeredis://{uuid.uuid4().hex}", samples.manifest("demo")
    transport = connect(url, "demo")
    transport.create(manifest, samples.first_snapshots(manifest))

    def deleted(merger: Merger, stopped: object) -> None:
        commit = samples.commit([])
        merger.on_round(commit.tape, commit.snapshot)
        raise UnknownRunError("there is no run 'demo' any more")

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("stop_on_signals", "keep_compiled", "keep_freed_memory"):
        monkeypatch.setattr(main, name, lambda: None)
    monkeypatch.setattr("archipelago.merger.service.serve", deleted)
    with pytest.raises(UnknownRunError):
        main.main(main.MergerOptions(url=url, run="demo", folder=tmp_path))
    transport.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in events(file) if event.summary.value] == [samples.commit([]).tape.round]


def test_staleness_is_a_mean_and_absent_where_nobody_was_merged() -> None:
    entry = samples.commit([]).tape
    two = (replace(entry.members[0], staleness=1), replace(entry.members[0], staleness=4))
    assert values(replace(entry, members=two))["staleness"] == 2.5
    nobody = values(replace(entry, members=()))
    assert nobody["staleness"] != nobody["staleness"]
    assert nobody["contributions"] == 0
