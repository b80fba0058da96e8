"""Islands that are drained or expelled, and the notes that islands write when they join and leave."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from archipelago.broker.control import STEPS
from archipelago.broker.errors import BrokerError, ConfigError, DivergedError, UnreachableError
from archipelago.broker.messages import Note, Refusal
from archipelago.broker.transport import START
from archipelago.islands.inner import InnerSteps
from archipelago.islands.worker import Island, train
from tests.failing import failing
from tests.harness import tiny
from tests.harness.tiny import TinyRun
from tests.islands.test_worker import diverging


def notes(run: TinyRun, who: str) -> list[tuple[str, str]]:
    return [(note.kind, note.text) for note in run.transport.reader.notes(100) if note.who == who]


def leave(run: TinyRun, island: Island) -> None:
    """Let an island leave as `train` does, and the merger process its contributions."""
    island.leave(flush_seconds=0.0)
    island.link.pump()
    run.merger.turn(0.0)


@pytest.mark.parametrize("action", ["drain", "expel"])
def test_an_island_leaves_after_the_heartbeat_that_reads_the_request(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun()
    island = run.island()
    run.play(island, 3)
    run.transport.reader.steer({"island.b": action})
    run.pass_boundary(island)
    requests = [island.must_leave]
    run.transport.reader.steer({"island.a": action})
    run.pass_boundary(island)
    requests.append(island.must_leave)
    run.transport.reader.steer({"island.a": ""})
    run.pass_boundary(island)
    requests.append(island.must_leave)
    assert requests == [
        False,
        True,
        True,
    ]  # the first request is for another island, and the second holds after its withdrawal
    steps = island.totals.steps
    monkeypatch.setattr(island.link, "drain", lambda seconds: True)  # no thread would send
    assert train(island, lambda: False) == "left"
    assert island.totals.steps == steps


def test_a_drained_island_writes_a_note_and_loses_nothing() -> None:
    run = TinyRun()
    island = run.island()
    run.play(island, 3)
    run.transport.reader.steer({"island.a": "drain"})
    run.pass_boundary(island)
    leave(run, island)
    assert [(kind, text.partition(": ")[2]) for kind, text in notes(run, "a")[1:]] == [
        ("drained", "drained by the operator")
    ]
    assert run.transport.reader.presences()[0].heartbeat.state == "left"
    books = run.transport.reader.books()
    assert books.merged_tokens == 2 * island.totals.tokens
    assert books.refused == 0


def test_an_expelled_island_is_refused_and_writes_a_note() -> None:
    run = TinyRun()
    island = run.island()
    run.play(island, 3)
    run.transport.reader.steer({"island.a": "expel"})
    run.pass_boundary(island)
    leave(run, island)
    assert notes(run, "a")[-1] == ("expelled", f"after {island.totals.steps} steps: expelled by the operator")
    refusals = [event for _, event in run.transport.reader.events(START, 0.0, 999) if isinstance(event, Refusal)]
    assert refusals
    assert {refusal.reason for refusal in refusals} == {"expelled by the operator"}


@pytest.mark.parametrize("action", ["drain", "expel"])
def test_an_excluded_name_cannot_join_until_it_is_admitted(action: str) -> None:
    run = TinyRun()
    run.transport.reader.steer({"island.a": action})
    with failing(ConfigError, "control.unwelcome"):
        run.island()
    run.island("b")
    run.transport.reader.steer({"island.a": ""})
    run.play(run.island(), 2)


def test_an_island_writes_notes_when_it_joins_and_leaves() -> None:
    run = TinyRun()
    island = run.island()
    run.play(island, 2)
    ((kind, text),) = notes(run, "a")
    assert kind == "joined"
    assert text.startswith("after round 0 on ")
    assert text.endswith("optimiser state: fresh")
    leave(run, island)
    assert notes(run, "a")[1:] == [("left", "after 2 steps: it was stopped")]
    assert run.transport.reader.notes(1)[0].unix_seconds > 0.0


def test_a_note_is_kept_during_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    island = run.island()
    write = island.link.transport.reader.note

    def full(note: Note) -> None:
        raise UnreachableError("no room for notes")

    monkeypatch.setattr(island.link.transport.reader, "note", full)
    run.play(island, 2)
    assert run.transport.reader.presences()[0].heartbeat.steps == 1, "heartbeats continue"
    assert notes(run, "a") == []
    monkeypatch.setattr(island.link.transport.reader, "note", write)
    run.play(island, 1)
    assert [kind for kind, _ in notes(run, "a")] == ["joined"]


def test_a_note_that_the_broker_refuses_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    island = run.island()
    write = island.link.transport.reader.note

    def refuse(note: Note) -> None:
        raise BrokerError("WRONGTYPE")

    monkeypatch.setattr(island.link.transport.reader, "note", refuse)
    run.play(island, 1)
    run.pass_boundary(island)
    assert not island.link.trouble
    assert island.link.drain(0.0), "the heartbeat with the note was sent"
    assert run.transport.island.leased(island.link.leases.shards, island.link.who), "the island has leased a shard"
    monkeypatch.setattr(island.link.transport.reader, "note", write)
    leave(run, island)
    assert [kind for kind, _ in notes(run, "a")] == ["left"]


def test_a_diverged_island_writes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    island = run.island("sick")
    monkeypatch.setattr(island.link, "drain", lambda seconds: True)  # no thread would send
    island.steps = cast(InnerSteps, diverging)

    def turn() -> bool:
        island.link.pump()
        run.merger.turn(0.0)
        return False

    with pytest.raises(DivergedError):
        train(island, turn)
    island.link.pump()
    kind, _ = notes(run, "sick")[-1]
    assert kind == "diverged"
    assert run.transport.reader.presences()[0].heartbeat.state == "left"


# -- the length of the run --------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_extended_goes_on() -> None:
    run = TinyRun(tiny.manifest(config=replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, steps=4))))
    island = run.island()
    run.play(island, 4)
    finished = [island.finished]
    run.transport.reader.steer({STEPS: "9"})
    run.pass_boundary(island)
    finished.append(island.finished)
    run.play(island, 5)
    finished.append(island.finished)
    assert finished == [True, False, True]
    newcomer = run.island("b")
    assert (newcomer.link.run_steps, newcomer.finished) == (9, False)
    run.transport.reader.steer({STEPS: ""})
    run.pass_boundary(island)
    assert island.link.run_steps == 4


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


@pytest.mark.parametrize("value", ["many", "0", "1e3", "9" * 60])
def test_an_invalid_length_changes_nothing(value: str) -> None:
    run = TinyRun()
    island = run.island()
    before = island.link.run_steps
    run.transport.reader.steer({STEPS: value})
    run.pass_boundary(island)
    assert island.link.run_steps == before
