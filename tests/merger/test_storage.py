"""A merger's folder: the restore of a run from it into an empty Redis, bit for bit."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import COPIED, UNCOPIED
from archipelago.broker.redis.transport import connect
from archipelago.merger import record
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests.broker.buckets.faulty_bucket import FaultyFileSystem, no_fault
from tests.failing import failing
from tests.harness.merger_run import CONFIG, MergerRun, bits, finish, take_checkpoint, values
from tests.samples import first_snapshots, plain


def serving(run: MergerRun, path: Path, bucket: BucketFolder | None = None) -> Merger:
    folder = MergerFolder(path, bucket=bucket)
    return run.merger(checkpointer=folder.checkpointer(run.broker.connect("sample"), run.manifest, 1e9, at_once))


def begun(path: Path, *, record: bool = False) -> MergerRun:
    """Run three rounds and take a checkpoint, with one contribution waiting."""
    run = MergerRun(replace(CONFIG, record=record), quorum=2)
    merger = serving(run, path)
    run.play(merger, 1, 2, 3)
    run.live("a", "b")
    run.send("b", 4, values(4))
    merger.turn(0.0)
    take_checkpoint(merger)
    return run


def go_on(run: MergerRun, merger: Merger) -> None:
    """Let the other island answer, and run two more rounds."""
    run.live("a", "b")
    run.send("a", 4, values(5), sequence=3)
    assert merger.turn(0.0)
    run.sequences = type(run.sequences)({"a": 4, "b": 4})
    run.play(merger, 5, 6)


def test_rounds_after_the_checkpoint_are_run_again_and_leave_the_record(tmp_path: Path) -> None:
    """Redis has lost these rounds. While it still has the run, nothing changes."""
    run = begun(tmp_path, record=True)
    merger = serving(run, tmp_path)
    run.live("a", "b")
    run.send("a", 4, values(99))
    assert merger.turn(0.0)
    finish(merger)
    before, rounds = bits(run), sorted(record.read(tmp_path / "record").rounds)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")  # the newest checkpoint is of an earlier round
    with pytest.raises(RunExistsError):
        MergerFolder(tmp_path).bring_back(run.transport)
    assert bits(run) == before
    assert sorted(record.read(tmp_path / "record").rounds) == rounds == [1, 2, 3, 4]

    run.broker.runs.clear()
    MergerFolder(tmp_path).bring_back(run.transport)
    assert RunState.from_json(run.transport.reader.merger_state()).closed == 3
    assert [run.version(p) for p in range(2)] == [2, 1]
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3]
    merger = serving(run, tmp_path)
    go_on(run, merger)
    finish(merger)
    found = record.read(tmp_path / "record").rounds
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [found[n][0] for n in (4, 5, 6)] == run.transport.reader.tape(3)


def test_without_a_checkpoint_of_its_own_no_run_is_created(tmp_path: Path) -> None:
    empty = MemoryBroker().connect("sample")
    assert MergerFolder(tmp_path).bring_back(empty) is None
    for resume in (False, True):
        with failing(UnknownRunError, "broker.unknown-run"):
            MergerFolder(tmp_path).find_or_bring_back(empty, resume=resume)
    assert empty.reader.runs() == []
    begun(tmp_path)
    other = MemoryBroker().connect("other")
    with failing(UnknownRunError, "broker.other-run"):
        MergerFolder(tmp_path).bring_back(other)
    assert other.reader.runs() == []


def test_a_run_is_restored_only_with_resume_and_by_one_process_of_two(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.broker.runs.clear()
    folder = MergerFolder(tmp_path)
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(run.transport, resume=False)
    assert run.transport.reader.runs() == []

    def restore_before(name: str, *_: object) -> None:
        if name == "restore":
            MergerFolder(tmp_path).bring_back(run.transport)

    assert folder.find_or_bring_back(run.faulty(before=restore_before), resume=True) == run.manifest
    assert folder.find_or_bring_back(run.transport, resume=False) == run.manifest  # the run exists now


def test_a_run_of_an_earlier_version_is_not_touched_and_its_checkpoint_is_restored_elsewhere(tmp_path: Path) -> None:
    run = begun(tmp_path)
    folder, transport = MergerFolder(tmp_path), connect(f"fakeredis://{uuid.uuid4().hex}", run.manifest.run)
    folder.bring_back(transport)
    redis, key = transport.connection.redis, transport.connection.keys.manifest
    redis.hdel(key, "format")  # version 0.2 had none
    before = redis.hgetall(key)
    for resume in (False, True):
        with failing(ConfigError, "config.format"):
            folder.find_or_bring_back(transport, resume=resume)
    assert redis.hgetall(key) == before
    elsewhere = connect(f"fakeredis://{uuid.uuid4().hex}", run.manifest.run)
    assert folder.find_or_bring_back(elsewhere, resume=True) == run.manifest


# -- copies in a bucket: another machine continues the run from there, to the same bits --------------------------------


def turn_of_copier(merger: Merger) -> float:
    checkpointer = merger.checkpointer
    assert checkpointer is not None
    assert checkpointer.copier is not None
    return checkpointer.copier.turn()


def away(request: str, path: str) -> None:
    raise ConnectionError("503")


def test_another_machine_continues_from_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(replace(CONFIG, record=True), quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2, 3)
    take_checkpoint(merger)
    assert turn_of_copier(merger) == 0
    kept = MergerFolder(tmp_path / "one").store.load()
    run.broker.runs.clear()  # both the Redis and the first machine are lost
    other = MergerFolder(tmp_path / "two", bucket=bucket)
    with failing(UnknownRunError, "broker.resumable"):
        other.find_or_bring_back(run.transport, resume=False)
    assert other.find_or_bring_back(run.transport, resume=True) == run.manifest
    assert plain(other.store.load()) == plain(kept)
    assert other.missing_in_bucket() == 0
    merger = serving(run, tmp_path / "two", bucket)
    run.play(merger, 4, 5)
    finish(merger)
    assert turn_of_copier(merger) == 0
    third = MergerFolder(tmp_path / "three", bucket=bucket)
    third.fetch()
    assert plain(third.store.load()) == plain(other.store.load()) != plain(kept)


def test_a_bucket_of_another_run_is_not_touched(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2)
    take_checkpoint(merger)
    turn_of_copier(merger)
    kept = bucket.child("checkpoints").names()
    assert kept
    other, new = replace(run.manifest, uid="2" * 32), MemoryBroker().connect("sample")
    new.create(other, first_snapshots(other, 2.0))
    with failing(UnknownRunError, "broker.other-run"):
        MergerFolder(tmp_path / "two", bucket=bucket).find_or_bring_back(new, resume=False)
    assert (bucket.child("checkpoints").names(), new.reader.uid()) == (kept, other.uid)


def test_a_failing_bucket_stops_only_restores(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(CONFIG, quorum=2)
    FaultyFileSystem.fault = staticmethod(away)
    merger = serving(run, tmp_path, bucket)
    for t in (1, 3, 5):
        run.play(merger, t, t + 1)
        take_checkpoint(merger)
        assert turn_of_copier(merger) > 0
    merger.turn(0.0)
    assert merger.state.covered == 6
    assert len(run.notes(UNCOPIED)) == 1  # it is named once
    merger.load()
    merger.turn(0.0)
    assert [note.kind for note in run.transport.reader.notes(10)][-2:] == ["served", UNCOPIED], "it still fails"
    FaultyFileSystem.fault = staticmethod(no_fault)
    assert turn_of_copier(merger) == 0
    merger.turn(0.0)
    assert (len(run.notes(UNCOPIED)), len(run.notes(COPIED))) == (2, 1)
    run.broker.runs.clear()
    FaultyFileSystem.fault = staticmethod(away)
    assert MergerFolder(tmp_path, bucket=bucket).missing_in_bucket() == MergerFolder(tmp_path).store.numbers()[-1]
    assert MergerFolder(tmp_path).missing_in_bucket() == 0, "there is none"
    with failing(BucketError):  # the bucket may hold a newer checkpoint than this disk
        MergerFolder(tmp_path, bucket=bucket).find_or_bring_back(run.transport, resume=True)
    assert run.transport.reader.runs() == []
    FaultyFileSystem.fault = staticmethod(no_fault)
    other = MergerFolder(tmp_path / "other", bucket=bucket)
    other.fetch()
    assert plain(other.store.load()) == plain(MergerFolder(tmp_path).store.load())


def test_a_standby_with_the_same_folder_copies_nothing(bucket: BucketFolder, tmp_path: Path) -> None:
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path, bucket)
    run.play(merger, 1, 2)
    take_checkpoint(merger)
    for serves in (False, True):
        transport = run.broker.connect("sample")
        standby = MergerFolder(tmp_path, bucket=bucket).checkpointer(transport, run.manifest, 1e9)
        if serves:
            standby.load(run.manifest, 2)
        standby.close()
        assert bool(bucket.child("checkpoints").names()) == serves


def test_a_second_machine_numbers_above_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    """A new run of the same name begins with round 1, while the bucket holds later checkpoints of the old run."""
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path / "one", bucket)
    run.play(merger, 1, 2, 3, 4)
    take_checkpoint(merger)
    turn_of_copier(merger)
    run = MergerRun(CONFIG, quorum=2)
    merger = serving(run, tmp_path / "two", bucket)
    turn_of_copier(merger)  # as at the start of the process
    run.play(merger, 1)
    take_checkpoint(merger)
    turn_of_copier(merger)
    other = MergerFolder(tmp_path / "other", bucket=bucket)
    other.fetch()
    image = other.store.load()
    assert image is not None
    assert image.round == 1
