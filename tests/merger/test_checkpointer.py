"""Checkpoints during merging: what they hold, when they are taken, what they cover, and failing disks."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

import archipelago.merger.committing
from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.broker.messages import UNCOPIED, Marker
from archipelago.broker.transport import Transport
from archipelago.merger import record
from archipelago.merger.checkpoint_cut import LOOK_SECONDS, Parts
from archipelago.merger.checkpointer import OTHERS_SECONDS, RETRY_SECONDS, Checkpointer
from archipelago.merger.committing import ENTRY_BYTES
from archipelago.merger.executor import at_once
from archipelago.merger.record import Recorder
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.ops.watch.advice import problems
from tests import samples
from tests.harness.merger_run import (
    Later,
    MergerRun,
    Shelf,
    finish,
    logged_codes,
    take_checkpoint,
    values,
)
from tests.intercept import EVERY


def serving(
    run: MergerRun, store: Shelf, recorder: Recorder | None = None, transport: Transport | None = None, **settings: Any
) -> Merger:
    return run.merger(checkpointer=run.checkpointer(store, recorder, **settings), transport=transport)


# -- the content of a checkpoint -------------------------------------------------------------------------------------


def test_what_was_damaged_while_it_waited_is_in_no_checkpoint() -> None:
    """A merger that restores the run signs what waits, and must not sign damage."""
    store, run = Shelf(), MergerRun(quorum=2)
    merger = serving(run, store)
    run.play(merger, 1)
    run.live("a", "b")
    run.send("a", 2, values(2))
    for expected in (1, 0):
        merger.turn(0.0)
        take_checkpoint(merger)
        assert len(store.images[max(store.images)].pending) == expected
        run.stored.updates = {n: replace(e, payload=b"damaged") for n, e in run.stored.updates.items()}


def test_a_checkpoint_of_several_shards_waits_for_mergers_that_may_still_load() -> None:
    """After an outage in which one fell due, the others would skip what is announced before they have loaded."""
    run = MergerRun()
    checkpointer = run.checkpointer(Shelf(), None, every=30.0)
    checkpointer.leading = Mock(**{"is_waiting.return_value": False})
    checkpointer.load(run.manifest, 1)
    assert [checkpointer.is_due(now) for now in (0.0, 29.0, 30.0)] == [False, False, True]
    checkpointer.load(run.manifest, 1)
    assert [checkpointer.is_due(now) for now in (40.0, 39.0 + OTHERS_SECONDS)] == [False, False]
    assert checkpointer.is_due(40.0 + OTHERS_SECONDS)


def test_at_the_end_no_other_checkpoint_is_taken_while_an_answer_is_on_its_way() -> None:
    store, run = Shelf(), MergerRun(quorum=2)
    merger = serving(run, store, every=30.0)
    run.play(merger, 1)
    checkpointer = merger.checkpointer
    assert checkpointer is not None
    parts = Parts([run.transport.reader], lambda number: [])
    parts.lacks = Mock(side_effect=UnreachableError("it has not answered yet"))  # type: ignore[method-assign]
    parts.has_backlog = Mock(return_value=False)  # type: ignore[method-assign]
    checkpointer.parts = parts
    for is_last, expected in ((True, 0), (False, 1)):
        checkpointer.take_if_due(merger.state, "", 31.0, is_last=is_last, is_crowded=False)
        assert len(store.images) == expected


def test_a_shard_has_ended_only_with_the_others_at_which_it_looks_rarely() -> None:
    store, run = Shelf(), MergerRun(quorum=2)
    merger = serving(run, store)
    checkpointer = merger.checkpointer
    assert checkpointer is not None
    parts = Parts([run.transport.reader], lambda number: [])
    parts.lacks = Mock(side_effect=[True, False])  # type: ignore[method-assign]
    parts.has_backlog = Mock(side_effect=[True, False, False])  # type: ignore[method-assign]
    checkpointer.parts = parts
    times = [0.0, 0.5 * LOOK_SECONDS, LOOK_SECONDS, 1.5 * LOOK_SECONDS, 2 * LOOK_SECONDS]
    assert [checkpointer.has_all(merger.state, now) for now in times] == [False, False, False, False, True]


def test_operators_are_told_of_a_bucket_that_fails_at_the_end() -> None:
    run = MergerRun(quorum=2)
    merger, why = serving(run, Shelf()), "checkpoints stay on the disk only: 503"
    assert merger.checkpointer is not None
    merger.checkpointer.copier = copier = MagicMock()
    copier.news.return_value = [(UNCOPIED, why)]
    merger.close()
    assert run.notes(UNCOPIED) == [], "a merger serves, which copies newer ones"
    merger.transport.merger.release(merger.epoch)
    merger.close()
    assert run.notes(UNCOPIED) == [why]
    run.broker.runs.clear()
    merger.close()
    assert not run.broker.runs, "nothing is written of a run that was deleted"


# -- schedule --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_taken_at_each_interval_with_new_rounds() -> None:
    store, run = Shelf(), MergerRun(quorum=2)
    merger = serving(run, store, every=30.0)
    for now in (0.0, 31.0):
        run.clock.now = now
        merger.turn(0.0)
    assert store.images == {}, "no round has closed"
    for number, now, expected in ((1, 60.0, 1), (2, 89.9, 1), (3, 90.0, 2), (4, 119.9, 2), (5, 120.0, 3)):
        run.clock.now = now
        run.play(merger, number)
        assert len(store.images) == expected, now
    for _ in range(3):
        run.clock.now += 30.0
        merger.turn(0.0)
    assert len(store.images) == 3
    assert [bool(full.own) for full in store.images[1].fragments] == [True, False], "fragment 1 has no outer state yet"


# -- trimming of covered entries -------------------------------------------------------------------------------------


def test_the_oldest_entries_are_trimmed_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), spawn=Later())
    run.play(merger, 1)
    one_round = sum(ENTRY_BYTES + len(payload) for _, payload in run.sent)
    monkeypatch.setattr(archipelago.merger.committing, "KEPT_BYTES_MAX", 3 * one_round + 100)
    run.play(merger, 2, 3)
    assert (run.kept_rounds(), caplog.records) == ([1, 2, 3], [])
    run.play(merger, 4, 5)
    assert (run.kept_rounds(), len(run.stored.kept)) == ([3, 4, 5], 6)
    assert "checkpoint.behind" in logged_codes(caplog)
    run.balance()


# -- failing disks ---------------------------------------------------------------------------------------------------


def test_a_failed_checkpoint_is_retried_after_some_time(caplog: pytest.LogCaptureFixture) -> None:
    store, run = Shelf([OSError(28, "no space left")]), MergerRun(quorum=2)
    merger = serving(run, store, every=100.0)
    run.play(merger, 1)
    run.clock.now = 100.0
    run.play(merger, 2, 3)
    assert ("checkpoint.failed" in logged_codes(caplog), store.images) == (True, {})
    assert run.kept_rounds() == [1, 2, 3]
    run.clock.now += RETRY_SECONDS - 0.1
    run.play(merger, 4)
    assert store.images == {}
    run.clock.now += 0.1
    run.play(merger, 5)
    merger.turn(0.0)
    assert (list(store.images), run.kept_rounds()) == ([5], [])
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
    codes = [vars(record).get("code") for record in caplog.records if record.levelname != "DEBUG"]
    assert [code for code in codes if code] == ["checkpoint.failed"] * 3 + ["checkpoint.recovered"]
    assert (len(run.notes("unsaved")), run.notes("checkpoint")) == (3, ["checkpoints are written again: 6"])


def test_status_shows_that_checkpoints_fail_until_they_are_written_again() -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf([ConfigError("the disk is full", "Free some space.")]), every=0.0)
    found = []
    for number in range(1, 4):
        run.play(merger, number)
        for _ in range(2):
            merger.turn(0.0)
        found.append([each.code for each in problems(samples.view_of(run.transport))])
        run.clock.now += RETRY_SECONDS
    assert [("checkpoint.failed" in codes) for codes in found] == [True, False, False]


class Unlisted(Shelf):
    """A folder that cannot be read."""

    def next_number(self) -> int:
        raise ConfigError("the checkpoints cannot be listed", "May this user read the folder?")


def test_neither_an_unreadable_folder_nor_an_outage_ends_the_merger(caplog: pytest.LogCaptureFixture) -> None:
    for is_outage in (False, True):
        caplog.clear()
        run = MergerRun(quorum=2)
        away = Checkpointer(run.faulty(("tape", EVERY, "before")), Shelf(), None, 0.0, at_once)
        merger = run.merger(checkpointer=away) if is_outage else serving(run, Unlisted(), every=0.0)
        run.play(merger, 1, 2)
        run.clock.now += RETRY_SECONDS
        run.play(merger, 3)
        assert logged_codes(caplog).count("checkpoint.failed") == 1, is_outage
        assert bool(run.events(Marker)) == is_outage
        finish(merger)
        assert run.kept_rounds() == [1, 2, 3]


# -- the record ------------------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_written_keeps_the_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun(quorum=2)
    merger = serving(run, Shelf(), Recorder(tmp_path / "record"), every=0.0)
    (tmp_path / "record").rename(tmp_path / "away")
    (tmp_path / "record").write_text("no folder")
    run.play(merger, 1, 2)
    assert "checkpoint.failed" in logged_codes(caplog)
    assert run.kept_rounds() == [1, 2]
    (tmp_path / "record").unlink()
    (tmp_path / "away").rename(tmp_path / "record")
    run.clock.now += RETRY_SECONDS
    run.play(merger, 3)
    merger.turn(0.0)
    assert run.kept_rounds() == []
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3]


def test_the_record_misses_only_rounds_whose_contributions_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No commit after the last checkpoint stored which rounds it covers."""
    run, store = MergerRun(quorum=2), Shelf()
    merger = serving(run, store, Recorder(tmp_path))
    run.play(merger, 1, 2, 3)
    finish(merger)
    assert RunState.from_json(run.transport.reader.merger_state()).covered == 0
    merger = serving(run, store, Recorder(tmp_path))
    run.play(merger, 4, 5)
    finish(merger)
    assert (sorted(record.read(tmp_path).rounds), caplog.records) == ([1, 2, 3, 4, 5], [])
    run.play(merger, 6, 7)
    merger.transport.merger.trim(merger.epoch, [run.transport.reader.tape(2)[0].members[0].entry])
    finish(merger)
    assert "record.gone" in logged_codes(caplog)
    assert sorted(record.read(tmp_path).rounds) == [1, 2, 3, 4, 5, 7]
    caplog.clear()
    run.play(merger, 8)
    run.broker.runs[run.manifest.run].tape.clear()
    run.play(merger, 9)
    finish(merger)
    assert "lacks 1 rounds after round 7" in caplog.text
    assert sorted(record.read(tmp_path).rounds) == [1, 2, 3, 4, 5, 7, 9]
