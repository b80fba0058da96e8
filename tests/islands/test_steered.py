"""Islands that are drained or expelled, and the notes that islands write when they join and leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from archipelago.broker.control import STEPS
from archipelago.broker.errors import BrokerError, ConfigError, UnreachableError
from archipelago.broker.messages import Note
from archipelago.islands.sync.leaving import leave_cleanly
from archipelago.islands.sync.listener import Receiver
from archipelago.islands.worker import Island
from tests.failing import failing
from tests.harness import tiny
from tests.harness.tiny import TinyRun


def notes(run: TinyRun, who: str) -> list[tuple[str, str]]:
    return [(note.kind, note.text) for note in run.transport.reader.notes(100) if note.who == who]


def steered(run: TinyRun, island: Island, fields: dict[str, str]) -> None:
    """Send the operator's request, and let the island read it."""
    run.transport.reader.steer(fields)
    run.pass_boundary(island)


def requested(action: str) -> tuple[TinyRun, Island]:
    """Return an island that has trained and left on the operator's request."""
    run, island = tiny.played(3)
    steered(run, island, {"island.a": action})
    run.depart(island)
    return run, island


def test_an_island_that_leaves_during_an_outage_counts_only_contributions_that_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for is_sent in (True, False):
        _, island = tiny.played(3)
        monkeypatch.setattr(island.link, "drain", lambda _, link=island.link, sends=is_sent: sends and link.pump())
        leave_cleanly(island)
        assert ("the broker did not take" in caplog.text) is not is_sent


@pytest.mark.parametrize("action", ["drain", "expel"])
def test_an_island_leaves_when_it_reads_the_request_and_an_excluded_name_cannot_join(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, island = tiny.played(3)
    requests = []
    for fields in ({"island.b": action}, {"island.a": action}, {"island.a": ""}):
        steered(run, island, fields)
        requests.append(island.reason)
    reason = {"drain": "drained", "expel": "expelled"}[action]
    assert requests == ["", reason, reason], "the first request is for another island, and the second one holds"
    steps = island.totals.steps
    monkeypatch.setattr(island.link, "drain", lambda seconds: True)  # no thread would send
    assert leave_cleanly(island) == "left"
    assert island.totals.steps == steps
    run.transport.reader.steer({"island.c": action})
    with failing(ConfigError, "control.unwelcome"):
        run.island("c")
    run.transport.reader.steer({"island.c": ""})
    run.play(run.island("c"), 2)


def test_a_drained_island_writes_a_note_and_loses_nothing() -> None:
    run, island = requested("drain")
    assert [kind for kind, _ in notes(run, "a")[1:]] == ["drained"]
    assert run.transport.reader.presences()[0].heartbeat.state == "left"
    counters = run.transport.reader.counters()
    assert counters.merged_tokens == 2 * island.totals.tokens
    assert counters.refused == 0


def test_a_note_is_kept_during_an_outage_and_dropped_when_the_broker_refuses_it() -> None:
    for error, kept in ((UnreachableError("no room for notes"), ["joined"]), (BrokerError("WRONGTYPE"), [])):
        run = TinyRun()
        island = run.island()
        reader = island.link.transport.reader
        write = reader.note

        def fails(note: Note, error: BrokerError = error) -> None:
            raise error

        reader.note = fails  # type: ignore[method-assign]
        run.play(island, 2)
        assert run.transport.reader.presences()[0].heartbeat.steps == 1, "heartbeats continue"
        assert notes(run, "a") == []
        assert bool(island.link.pumps.trouble) == bool(kept)
        assert run.transport.island.leased(island.link.leases.ranges, island.link.who), "the island has leased a shard"
        reader.note = write  # type: ignore[method-assign]
        run.play(island, 1)
        assert [kind for kind, _ in notes(run, "a")] == kept


# -- the length of the run --------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_extended_goes_on() -> None:
    run = TinyRun(tiny.manifest(config=replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, steps=4))))
    island = run.island()
    run.play(island, 4)
    assert island.finished
    steered(run, island, {STEPS: "9"})
    finished = [island.finished]
    run.play(island, 5)
    assert [*finished, island.finished] == [False, True]
    newcomer = run.island("b")
    assert (newcomer.link.heartbeats.run_steps, newcomer.finished) == (9, False)
    for value, steps in (("", 4), ("many", 4), ("0", 4), ("1e3", 4), ("9" * 60, 4)):
        steered(run, island, {STEPS: value})
        assert island.link.heartbeats.run_steps == steps, "an invalid length changes nothing"


def test_an_extended_run_keeps_its_length_when_its_redis_comes_back_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(tiny.manifest(config=replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, steps=4))))
    island, receiver = run.island(), Receiver(run.connect(), run.manifest, run.clock)
    steered(run, island, {STEPS: "9"})
    receiver.pumps.run_once()
    client, reader = island.link.transport.island, receiver._transport.reader
    looks = client.look_around
    monkeypatch.setattr(client, "look_around", lambda *args: looks(*args)._replace(uid=None, requests={}))
    monkeypatch.setattr(reader, "uid", lambda: None)
    monkeypatch.setattr(reader, "control", dict)
    run.play(island, 5)
    receiver.pumps.run_once()
    assert (island.link.heartbeats.run_steps, island.finished, receiver._steps) == (9, False, 9)


def test_an_extended_run_has_the_learning_rate_of_a_run_of_that_length() -> None:
    config = replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, steps=8, warmup_steps=2))
    extended, long = (
        TinyRun(tiny.manifest(config=replace(config, inner=replace(config.inner, steps=steps)))) for steps in (8, 40)
    )
    extended.transport.reader.steer({STEPS: "40"})
    first, second = extended.island(), long.island()
    for _ in range(12):
        extended.play(first, 1)
        long.play(second, 1)
        assert first.learning_rate == second.learning_rate
        for name, values in first.inner.params.items():
            assert np.asarray(values) == pytest.approx(np.asarray(second.inner.params[name]), rel=1e-5, abs=1e-7)
