"""A merger whose folder is copied to a bucket: another machine continues the run from there, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.errors import UnknownRunError
from archipelago.merger import record
from archipelago.merger.beside import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.failing import failing
from tests.harness.merger_run import CONFIG, MergerRun


def serving(run: MergerRun, path: Path, bucket: BucketFolder) -> Merger:
    folder = MergerFolder(path, bucket=bucket)
    return run.merger(checkpointer=folder.checkpointer(run.broker.connect("sample"), run.manifest, 1e9, at_once))


def turn_of_copier(merger: Merger) -> float:
    checkpointer = merger.retention.checkpointer
    assert checkpointer is not None
    assert checkpointer.copier is not None
    return checkpointer.copier.turn()


def notes(run: MergerRun) -> list[str]:
    return [note.text for note in run.transport.reader.notes(100) if note.kind == "bucket"]


def away(request: str, path: str) -> None:
    raise ConnectionError("503")


def test_another_machine_continues_from_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(replace(CONFIG, record=True), quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2, 3)
    merger.checkpoint()
    assert turn_of_copier(merger) == 0
    kept = MergerFolder(tmp_path / "one").store.load()
    run.broker.runs.clear()  # both the Redis and the first machine are lost
    other = MergerFolder(tmp_path / "two", bucket=bucket)
    with failing(UnknownRunError, "broker.resumable"):
        other.find_or_bring_back(run.transport, resume=False)
    assert other.find_or_bring_back(run.transport, resume=True) == run.manifest
    assert other.store.load() == kept
    assert sorted(record.read(tmp_path / "two" / "record").rounds) == [1, 2, 3]
    merger = serving(run, tmp_path / "two", bucket)
    run.play(merger, 4, 5)
    merger.finish()
    assert turn_of_copier(merger) == 0
    assert sorted(record.read(tmp_path / "two" / "record").rounds) == [1, 2, 3, 4, 5]
    third = MergerFolder(tmp_path / "three", bucket=bucket)
    third.fetch()
    assert third.store.load() == other.store.load() != kept


@pytest.mark.parametrize("may_delete", [True, False])
def test_rounds_that_the_run_has_lost_leave_the_record(bucket: BucketFolder, tmp_path: Path, may_delete: bool) -> None:
    run = MergerRun(replace(CONFIG, record=True), quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2)
    merger.checkpoint()
    turn_of_copier(merger)
    run.play(merger, 3, 4)
    merger.finish()
    newest = MergerFolder(tmp_path / "one").store.numbers()[-1]
    FaultyFileSystem.fault = staticmethod(_fail_at(f"checkpoints/{newest}"))
    assert turn_of_copier(merger) > 0  # the record arrived, and the checkpoint did not
    FaultyFileSystem.fault = staticmethod(lambda request, path: None if may_delete else denied(request, path))
    run.broker.runs.clear()
    assert MergerFolder(tmp_path / "two", bucket=bucket).bring_back(run.transport) is not None
    assert sorted(record.read(tmp_path / "two" / "record").rounds) == [1, 2]
    names = [name for name in bucket.tree() if "rounds-" in name]
    assert len(names) == (1 if may_delete else 2)


def denied(request: str, path: str) -> None:
    if request == "delete":
        raise PermissionError("403")


def _fail_at(part: str) -> Callable[[str, str], None]:
    def fault(request: str, path: str) -> None:
        if request == "put" and part in path:
            raise ConnectionError("reset")

    return fault


def test_a_failing_bucket_stops_neither_rounds_nor_checkpoints(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(CONFIG, quorum=2)
    FaultyFileSystem.fault = staticmethod(away)
    merger = serving(run, tmp_path, bucket)
    for t in (1, 3, 5):
        run.play(merger, t, t + 1)
        merger.checkpoint()
        assert turn_of_copier(merger) > 0
    merger.turn(0.0)
    assert merger.state.covered == 6
    assert len(notes(run)) == 1  # it is named once
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    assert turn_of_copier(merger) == 0
    merger.turn(0.0)
    assert len(notes(run)) == 2
    other = MergerFolder(tmp_path / "other", bucket=bucket)
    other.fetch()
    assert other.store.load() == MergerFolder(tmp_path).store.load()


def test_a_run_is_not_restored_while_the_bucket_is_away(bucket: BucketFolder, tmp_path: Path) -> None:
    """The bucket may hold a newer checkpoint than this disk."""
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path, bucket)
    run.play(merger, 1, 2)
    merger.checkpoint()
    run.broker.runs.clear()
    FaultyFileSystem.fault = staticmethod(away)
    with failing(BucketError):
        MergerFolder(tmp_path, bucket=bucket).find_or_bring_back(run.transport, resume=True)
    assert run.transport.reader.runs() == []
    assert MergerFolder(tmp_path).find_or_bring_back(run.transport, resume=True) == run.manifest


def test_a_damaged_copy_is_skipped_for_an_earlier_one(
    bucket: BucketFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path, bucket)
    for t in (1, 3):
        run.play(merger, t, t + 1)
        merger.checkpoint()
        turn_of_copier(merger)
    first, second = MergerFolder(tmp_path).store.numbers()
    bucket.child("checkpoints").write(f"{second}.json", b"{")
    other = MergerFolder(tmp_path / "other", bucket=bucket)
    other.fetch()
    assert other.store.numbers() == [first]
    assert "bucket.damaged" in [vars(each).get("code") for each in caplog.records]


def test_a_standby_with_the_same_folder_copies_nothing(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path, bucket)
    run.play(merger, 1, 2)
    merger.checkpoint()
    for serves in (False, True):
        transport = run.broker.connect("sample")
        standby = MergerFolder(tmp_path, bucket=bucket).checkpointer(transport, run.manifest, 1e9, at_once)
        standby.start()
        if serves:
            standby.is_due(0.0)
        standby.close()
        assert bool(bucket.child("checkpoints").files()) == serves


def test_a_second_machine_numbers_above_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    """A new run of the same name begins with round 1, while the bucket holds later checkpoints of the old run."""
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2, 3, 4)
    merger.checkpoint()
    turn_of_copier(merger)
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path / "two", bucket)
    turn_of_copier(merger)  # as at the start of the process
    run.play(merger, 1)
    merger.checkpoint()
    turn_of_copier(merger)
    other = MergerFolder(tmp_path / "other", bucket=bucket)
    other.fetch()
    image = other.store.load()
    assert image is not None
    assert image.round == 1
