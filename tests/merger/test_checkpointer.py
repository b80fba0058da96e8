"""Checkpoints during merging: their content, the trimming of covered entries, and failing disks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago.merger.retention
from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.broker.messages import Evaluation, Marker, Resume
from archipelago.broker.transport import START, Transport
from archipelago.broker.wire import digest, unpack
from archipelago.merger import record
from archipelago.merger.beside import at_once, in_background
from archipelago.merger.checkpointer import RETRY_SECONDS, Checkpointer
from archipelago.merger.record import Recorder
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from tests import samples
from tests.intercept import Intercepted
from tests.harness.merger_run import (
    SIZE,
    Later,
    MergerRun,
    Shelf,
    Unlisted,
    bits,
    constant,
    logged_codes,
    values,
)


def kept_rounds(run: MergerRun) -> list[int]:
    """Return the rounds that have merged entries in the stream."""
    return [
        entry.round
        for entry in run.transport.reader.tape(1000)
        if any(not delivery.fault for delivery in run.transport.merger.read([m.entry for m in entry.members]))
    ]


def serving(run: MergerRun, store: Shelf, recorder: Recorder | None = None, **settings: Any) -> Merger:
    return run.merger(checkpointer=run.checkpointer(store, recorder, **settings))


# -- the content of a checkpoint -------------------------------------------------------------------------------------


def test_a_cut_is_the_run_between_two_rounds() -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = serving(run, store)
    evaluation = Evaluation(1, 4, 100, 1.7e9, 5.0)
    run.transport.reader.record_evaluation(evaluation)
    run.play(merger, 1)
    merger.checkpoint()
    image = store.images[1]
    assert (image.number, image.manifest) == (1, run.manifest)
    assert image.state == run.transport.reader.merger_state()
    assert image.cursors == run.transport.reader.cursors() == {"0": (0, 1), "1": (0, 1)}
    assert list(image.tape) == run.transport.reader.tape(10)
    assert list(image.evaluations) == [evaluation]
    assert list(image.outers) == [run.transport.merger.outer(0), b""]
    assert (image.books.merged, image.books.published) == (2, 2)
    for p, (snapshot, payload) in enumerate(image.snapshots):
        assert snapshot == run.transport.reader.fragment(p)[0]
        assert (len(payload), digest(payload)) == (snapshot.bytes, snapshot.digest)
        assert unpack(payload, SIZE).tolist() == run.parameters(p)


def test_waiting_contributions_are_in_the_checkpoint() -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1)
    run.live("a", "b")
    waiting = run.send("a", 2, values(1)), run.send("b", 3, values(2))
    merger.turn(0.0)
    merger.checkpoint()
    run.send("b", 2, values(3))
    assert merger.turn(0.0)  # one of the two is merged before the checkpoint is written
    later.do_all()
    image = store.images[1]
    assert {c.identity for c, _ in image.pending} == {c.identity for c in waiting}
    assert all(digest(payload) == c.digest for c, payload in image.pending)
    assert RunState.from_json(image.state).closed == 1
    assert [entry.round for entry in image.tape] == [1]


def test_a_checkpoint_holds_nothing_after_its_cut() -> None:
    store, later = Shelf(), Later()
    run, other = MergerRun(quorum=2), MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1, 2, 3)
    merger.checkpoint()
    run.play(merger, 4, 5, 6)
    later.do_all()
    other.play(serving(other, Shelf()), 1, 2, 3)
    image = store.images[3]
    assert list(image.outers) == [other.transport.merger.outer(p) for p in range(2)]
    assert [unpack(payload, SIZE).tolist() for _, payload in image.snapshots] == [other.parameters(p) for p in (0, 1)]
    assert image.cursors == other.transport.reader.cursors()
    assert [entry.digest for entry in image.tape] == [entry.digest for entry in other.transport.reader.tape(9)]


def test_a_checkpoint_is_announced_to_the_islands() -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1, 2)
    merger.checkpoint()
    assert run.events(Marker) == [
        Marker(2, 2)
    ]  # the marker is sent before the write, because later actions of islands are not in the checkpoint
    later.do_all()
    run.play(merger, 3)
    merger.checkpoint()
    assert run.events(Marker) == [Marker(2, 2), Marker(3, 3)]
    kinds = [type(event).__name__ for _, event in run.transport.reader.events(START, 0.0)]
    assert kinds.index("Marker") > kinds.index("Snapshot")


def test_checkpoints_change_no_bit() -> None:
    often, never = MergerRun(quorum=2), MergerRun(quorum=2)
    often.play(serving(often, Shelf(), every=0.0), 1, 2, 3, 4, 5)
    never.play(never.merger(), 1, 2, 3, 4, 5)
    found, expected = bits(often), bits(never)
    assert found == expected


# -- schedule --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_taken_at_each_interval() -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=30.0)
    for number, now, expected in ((1, 0.0, 0), (2, 29.9, 0), (3, 30.0, 1), (4, 59.9, 1), (5, 60.0, 2)):
        run.clock.now = now
        run.play(merger, number)
        assert len(store.images) == expected, now


def test_no_checkpoint_is_taken_without_new_rounds() -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=1.0)
    for _ in range(3):
        merger.turn(0.0)
        run.clock.now += 1.0
    assert store.images == {}
    run.play(merger, 1)
    for _ in range(4):
        run.clock.now += 1.0
        merger.turn(0.0)
    assert list(store.images) == [1]


def test_only_one_checkpoint_is_written_at_a_time() -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=0.0, spawn=later)
    run.play(merger, 1, 2, 3)
    assert len(later.jobs) == 1
    later.do_all()
    merger.turn(0.0)
    assert len(later.jobs) == 1  # the second job starts once the first is done
    assert RunState.from_json(store.images[1].state).closed == 1


def test_a_last_checkpoint_is_taken_on_leaving() -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = serving(run, store)
    merger.finish()
    assert store.images == {}  # nothing has closed yet
    run.play(merger, 1, 2, 3)
    merger.finish()
    assert RunState.from_json(store.images[3].state).closed == 3
    assert run.transport.reader.books().kept == 0
    merger.finish()
    assert list(store.images) == [3]


# -- trimming of covered entries -------------------------------------------------------------------------------------


def test_entries_stay_until_a_finished_checkpoint_covers_them() -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1, 2, 3)
    merger.checkpoint()
    run.play(merger, 4, 5)
    assert kept_rounds(run) == [1, 2, 3, 4, 5]
    later.do_all()
    assert kept_rounds(run) == [1, 2, 3, 4, 5]  # the merger has not noticed yet
    merger.turn(0.0)
    assert kept_rounds(run) == [4, 5]
    assert run.transport.reader.books().kept == 4
    run.play(merger, 6)
    assert RunState.from_json(run.transport.reader.merger_state()).covered == 3
    merger.checkpoint()
    later.do_all()
    merger.turn(0.0)
    assert (kept_rounds(run), run.transport.reader.books().kept) == ([], 0)
    run.balance()


def test_a_new_merger_knows_the_kept_entries() -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = serving(run, store)
    run.play(merger, 1, 2)
    merger.checkpoint()
    run.play(merger, 3, 4)
    again = serving(run, store)
    assert [kept.round for kept in again.retention.kept] == [3, 4]
    assert sum(kept.bytes for kept in again.retention.kept) == sum(len(payload) for _, payload in run.sent[4:])
    again.checkpoint()
    again.turn(0.0)
    assert run.transport.reader.books().kept == 0


def test_without_checkpoints_merged_entries_are_trimmed_at_once() -> None:
    run = MergerRun(quorum=2)
    run.play(serving(run, Shelf()), 1, 2)
    assert run.transport.reader.books().kept == 4
    run.play(run.merger(), 3)  # a merger that takes none follows one that did
    assert (kept_rounds(run), run.transport.reader.books().kept) == ([], 0)
    run.balance()


def test_many_kept_bytes_make_the_next_checkpoint_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Shelf()
    run = MergerRun(quorum=2)
    merger_ = serving(run, store)
    run.play(merger_, 1)
    one_round = sum(len(payload) for _, payload in run.sent)
    monkeypatch.setattr(archipelago.merger.retention, "KEPT_BYTES_MAX", 4 * one_round + 100)
    run.play(merger_, 2)
    assert store.images == {}  # exactly half
    run.play(merger_, 3)
    assert list(store.images) == [3]
    merger_.turn(0.0)
    assert run.transport.reader.books().kept == 0


def test_the_oldest_entries_are_trimmed_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger_ = serving(run, store, spawn=later)
    run.play(merger_, 1)
    one_round = sum(len(payload) for _, payload in run.sent)
    monkeypatch.setattr(archipelago.merger.retention, "KEPT_BYTES_MAX", 3 * one_round + 100)
    run.play(merger_, 2, 3)
    assert kept_rounds(run) == [1, 2, 3]
    assert not caplog.records
    run.play(merger_, 4, 5)
    assert kept_rounds(run) == [3, 4, 5]
    assert "checkpoint.behind" in logged_codes(caplog)
    assert run.transport.reader.books().kept == 6
    run.balance()


# -- failing disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [ConfigError("the disk is full", ""), OSError(28, "no space left")], ids=["store", "os"]
)
def test_a_failed_checkpoint_is_logged_and_retried(fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf([fault])
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=100.0)
    run.play(merger, 1)
    run.clock.now = 100.0
    run.play(merger, 2)
    run.play(merger, 3)
    assert ("checkpoint.failed" in logged_codes(caplog), store.images) == (True, {})
    assert kept_rounds(run) == [1, 2, 3]
    run.clock.now += RETRY_SECONDS - 0.1
    run.play(merger, 4)
    assert store.images == {}
    run.clock.now += 0.1
    run.play(merger, 5)
    merger.turn(0.0)
    assert list(store.images) == [5]
    assert kept_rounds(run) == []
    run.balance()


def test_a_failure_and_its_end_are_each_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only the checkpoint's number differs between attempts, so it counts as the same failure."""
    faults = [ConfigError(f"checkpoint {number} cannot be written", "Free some space.") for number in (1, 2, 3)]
    store = Shelf([*faults, OSError(13, "Permission denied"), faults[0]])
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=0.0)
    caplog.set_level(logging.INFO)
    for number in range(1, 8):
        run.play(merger, number)
        merger.turn(0.0)
        run.clock.now += RETRY_SECONDS
    failed = "checkpoint.failed"
    warned = [record for record in caplog.records if record.levelname != "DEBUG"]
    assert [record.__dict__["code"] for record in warned if "code" in record.__dict__] == [failed] * 3 + [
        "checkpoint.recovered"
    ]
    run.balance()


def test_an_urgent_checkpoint_waits_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Shelf([OSError("no")] * 100)
    run = MergerRun(quorum=2)
    merger_ = serving(run, store)
    monkeypatch.setattr(archipelago.merger.retention, "KEPT_BYTES_MAX", 0)
    for number in range(1, 9):
        run.play(merger_, number)
    assert len(store.faults) == 100  # no entries are kept, so nothing is urgent
    monkeypatch.setattr(archipelago.merger.retention, "KEPT_BYTES_MAX", 400)
    for number in range(9, 17):
        run.play(merger_, number)
        merger_.turn(0.0)
    assert len(store.faults) == 99
    run.clock.now += RETRY_SECONDS
    run.play(merger_, 17)
    assert len(store.faults) == 98


def test_a_folder_that_cannot_be_listed_does_not_end_the_merger(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Unlisted(), every=0.0)
    run.play(merger, 1, 2)
    assert logged_codes(caplog).count("checkpoint.failed") == 1
    assert run.events(Marker) == []
    run.clock.now += RETRY_SECONDS
    run.play(merger, 3)
    assert logged_codes(caplog).count("checkpoint.failed") == 1  # logged once
    merger.finish()
    assert kept_rounds(run) == [1, 2, 3]


def test_a_record_that_cannot_be_written_keeps_the_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "record")
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), recorder, every=0.0)
    (tmp_path / "record").rename(tmp_path / "away")
    (tmp_path / "record").write_text("no folder")
    run.play(merger, 1, 2)
    assert "checkpoint.failed" in logged_codes(caplog)
    assert kept_rounds(run) == [1, 2]
    (tmp_path / "record").unlink()
    (tmp_path / "away").rename(tmp_path / "record")
    run.clock.now += RETRY_SECONDS
    run.play(merger, 3)
    merger.turn(0.0)
    assert kept_rounds(run) == []
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3]


def test_an_outage_during_a_checkpoint_only_fails_that_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    class FailingTape(Intercepted):
        def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name == "tape":
                raise UnreachableError("connection refused")
            return method(*args, **kwargs)

    store = Shelf()
    run = MergerRun(quorum=2)
    faulty = FailingTape(run.broker.connect("sample"))
    merger = run.merger(checkpointer=Checkpointer(faulty, store, None, 0.0, at_once))
    run.play(merger, 1, 2)
    assert "checkpoint.failed" in logged_codes(caplog)
    assert kept_rounds(run) == [1, 2]


@pytest.mark.parametrize("written", ["before", "after"])
def test_a_checkpoint_in_progress_is_ignored_after_a_reload(written: str) -> None:
    """Redis was restarted without its last rounds, so the checkpoint holds rounds that no longer exist."""
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1, 2)
    stored = run.broker.runs["sample"]
    earlier = dict(stored.fragments), dict(stored.outer), stored.state, list(stored.tape), set(stored.kept)
    run.play(merger, 3)
    merger.checkpoint()
    if written == "before":
        later.do_all()
    stored.fragments, stored.outer, stored.state, stored.tape, stored.kept = earlier
    later.do_all()
    merger.load()
    assert merger.state.closed == 2
    merger.turn(0.0)
    assert merger.state.covered == 0
    assert kept_rounds(run)[:2] == [1, 2]


def test_a_checkpoint_in_progress_fails_when_redis_has_gone_back_to_the_first_round() -> None:
    store, later = Shelf(), Later()
    run = MergerRun(quorum=2)
    merger = serving(run, store, spawn=later)
    run.play(merger, 1)
    merger.checkpoint()
    run.broker.runs["sample"].tape.clear()
    later.do_all()
    assert store.images == {}


# -- the record ------------------------------------------------------------------------------------------------------


class Watching(Intercepted):
    """A transport that calls `before` with the entries that are about to be trimmed."""

    def __init__(self, inner: Transport, before: Callable[[Sequence[str]], None]) -> None:
        super().__init__(inner)
        self._before = before

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "trim":
            self._before(args[1])
        return method(*args, **kwargs)


def test_every_round_is_recorded_before_its_entries_are_trimmed(tmp_path: Path) -> None:
    run = MergerRun(quorum=2)
    recorder, trimmed = Recorder(tmp_path), list[str]()

    def recorded(entries: Sequence[str]) -> None:
        found = {d.entry for _, deliveries in record.read(tmp_path).rounds.values() for d in deliveries}
        assert set(entries) <= found
        trimmed.extend(entries)

    transport = Watching(run.broker.connect("sample"), recorded)
    merger = Merger(
        transport,
        run.clock,
        "m",
        live_poll_seconds=0.0,
        checkpointer=run.checkpointer(Shelf(), recorder, every=0.0),
    )
    assert merger.acquire()
    merger.load()
    for index, number in enumerate(range(1, 8)):
        run.transport.island.record_actions(samples.actions(index))
        run.play(merger, number)
    merger.finish()
    assert len(trimmed) == len(set(trimmed)) == 14
    found = record.read(tmp_path)
    assert [entry for entry, _ in found.rounds.values()] == run.transport.reader.tape(100)
    assert [(d.contribution, d.payload) for _, ds in found.rounds.values() for d in ds] == run.sent
    assert [actions.index for actions in found.actions] == list(range(7))
    assert run.transport.merger.actions(START) == []


def test_only_actions_that_are_on_disk_are_trimmed(tmp_path: Path) -> None:
    later = Later()
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), Recorder(tmp_path), spawn=later)
    run.transport.island.record_actions(samples.actions(0))
    run.play(merger, 1)
    merger.checkpoint()
    later.do_all()
    run.transport.island.record_actions(samples.actions(1))
    merger.turn(0.0)
    assert [actions.index for _, actions in run.transport.merger.actions(START)] == [1]
    assert [actions.index for actions in record.read(tmp_path).actions] == [0]


def test_a_restart_after_the_last_checkpoint_records_every_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No commit after the last checkpoint stored which rounds it covers."""
    run, store = MergerRun(quorum=2), Shelf()
    merger = serving(run, store, Recorder(tmp_path))
    run.play(merger, 1, 2, 3)
    merger.finish()
    assert RunState.from_json(run.transport.reader.merger_state()).covered == 0
    merger = serving(run, store, Recorder(tmp_path))
    run.play(merger, 4, 5)
    merger.finish()
    assert sorted(record.read(tmp_path).rounds) == [1, 2, 3, 4, 5]
    assert not caplog.records


def test_a_round_without_its_contributions_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), Recorder(tmp_path))
    run.play(merger, 1, 2, 3)
    merger.transport.merger.trim(merger.epoch, [run.transport.reader.tape(2)[0].members[0].entry])
    merger.finish()
    assert "record.gone" in logged_codes(caplog)
    assert sorted(record.read(tmp_path).rounds) == [1, 3]


def test_a_redis_that_lost_rounds_cuts_the_record_back(tmp_path: Path) -> None:
    run, store = MergerRun(quorum=2), Shelf()
    merger = serving(run, store, Recorder(tmp_path))
    run.play(merger, 1, 2)
    merger.checkpoint()
    merger.turn(0.0)
    stored = run.broker.runs["sample"]
    earlier = dict(stored.fragments), dict(stored.outer), stored.state, list(stored.tape)
    run.play(merger, 3)
    merger.checkpoint()
    stored.fragments, stored.outer, stored.state, stored.tape = earlier
    merger = serving(run, store, Recorder(tmp_path))
    run.live("a")
    run.live("b", state="left")
    run.send("a", 3, constant(0.5))
    merger.turn(0.0)
    merger.finish()
    found = record.read(tmp_path).rounds
    assert sorted(found) == [1, 2, 3]
    assert len(found[3][1]) == 1


def test_without_record_no_record_is_written(tmp_path: Path) -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), None)
    run.transport.island.record_actions(samples.actions())
    run.play(merger, 1)
    merger.finish()
    assert list(tmp_path.iterdir()) == []
    assert len(run.transport.merger.actions(START)) == 1  # no record read them


# -- concurrency -----------------------------------------------------------------------------------------------------


def test_rounds_close_while_a_checkpoint_is_written(until: Any) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Shelf):
        def save(self, image: Any) -> None:
            entered.set()
            go.wait()
            super().save(image)

    store = Slow()
    run = MergerRun(quorum=2)
    merger = serving(run, store, every=0.0, spawn=in_background("checkpoint"))
    try:
        run.play(merger, 1)
        until(entered.is_set, "the checkpoint to begin")
        run.play(merger, 2, 3)
        assert store.images == {}
    finally:
        go.set()
    until(lambda: merger.turn(0.0) or run.transport.reader.books().kept == 4, "the merger to notice the checkpoint")
    assert kept_rounds(run) == [2, 3]
    merger.finish()
    assert kept_rounds(run) == []


def test_a_restart_announces_the_last_closed_round() -> None:
    run, store = MergerRun(quorum=2), Shelf()
    run.play(serving(run, store), 1, 2)
    serving(run, store)
    assert [resume.round for resume in run.events(Resume)] == [0, 2]


def test_an_image_restores_the_run_into_an_empty_broker() -> None:
    store = Shelf()
    run, other = MergerRun(quorum=2), MergerRun(quorum=2)
    merger = serving(run, store)
    run.play(merger, 1, 2, 3)
    run.live("a", "b")
    run.send("a", 4, values(9))
    merger.turn(0.0)
    merger.checkpoint()
    del other.broker.runs["sample"]
    other.transport.restore(store.images[3])
    assert [other.transport.merger.outer(p) for p in range(2)] == [run.transport.merger.outer(p) for p in range(2)]
    assert other.digests() == run.digests()
    books = replace(run.transport.reader.books(), kept=0, bytes_up=0, bytes_down=0)
    assert replace(other.transport.reader.books(), bytes_up=0, bytes_down=0) == books
    assert other.transport.reader.backlog() == run.transport.reader.backlog() == 1
    assert np.isfinite(other.parameters(0)).all()
