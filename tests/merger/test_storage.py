"""The restore of a run from a merger's folder into an empty Redis, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import RunExistsError, UnknownRunError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Contribution
from archipelago.merger import record
from archipelago.merger.beside import at_once
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests.failing import failing
from tests.harness.merger_run import CONFIG, MergerRun, bits, values


def serving(run: MergerRun, path: Path) -> Merger:
    folder = MergerFolder(path)
    return run.merger(checkpointer=folder.checkpointer(run.broker.connect("sample"), run.manifest, 1e9, at_once))


def begun(path: Path, *, record: bool = False) -> MergerRun:
    """Run three rounds and take a checkpoint, with one contribution waiting."""
    run = MergerRun(replace(CONFIG, record=record), quorum=2)
    merger = serving(run, path)
    run.play(merger, 1, 2, 3)
    run.live("a", "b")
    send_waiting(run)
    merger.turn(0.0)
    merger.checkpoint()
    return run


def send_waiting(run: MergerRun) -> Contribution:
    return run.send("b", 4, values(4))


def further(path: Path, *, record: bool = False) -> tuple[MergerRun, Merger]:
    """Do the same, and then close a round that is in no checkpoint. Also return the merger."""
    run = begun(path, record=record)
    merger = serving(run, path)
    run.live("a", "b")
    run.send("a", 4, values(99))
    merger.turn(0.0)
    assert merger.state.closed == 4
    return run, merger


def emptied(run: MergerRun) -> None:
    """Replace the Redis by an empty one."""
    run.broker.runs.clear()


def go_on(run: MergerRun, merger: Merger) -> None:
    """Let the other island answer, and run two more rounds."""
    run.live("a", "b")
    run.send("a", 4, values(5), sequence=3)
    assert merger.turn(0.0)
    run.sequences = type(run.sequences)({"a": 4, "b": 4})
    run.play(merger, 5, 6)


def test_a_restored_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = begun(tmp_path / "undisturbed")
    go_on(undisturbed, serving(undisturbed, tmp_path / "undisturbed"))

    run = begun(tmp_path / "folder")
    (pending,) = [c for c, _ in run.sent if c.round == 4]
    serving(run, tmp_path / "folder")
    emptied(run)
    image = MergerFolder(tmp_path / "folder").bring_back(run.transport)
    assert image is not None
    assert [c for c, _ in image.pending] == [pending]
    go_on(run, serving(run, tmp_path / "folder"))
    found, expected = bits(run), bits(undisturbed)
    assert found[1:] == expected[1:]
    # Only the stream IDs of entries are new. All decisions are the same.
    without_entries = [
        [(*rest, [replace(m, entry="") for m in members], gain) for *rest, members, gain in tape]
        for tape in (found[0], expected[0])
    ]
    assert without_entries[0] == without_entries[1]


def test_the_books_balance_after_a_restore(tmp_path: Path) -> None:
    run = begun(tmp_path)
    emptied(run)
    MergerFolder(tmp_path).bring_back(run.transport)
    books, pending = run.transport.reader.books(), run.transport.reader.pending()
    assert (books.published, books.merged, books.refused, books.kept) == (7, 6, 0, 0)
    assert (pending.contributions, pending.tokens) == (1, 100)
    assert books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens
    go_on(run, serving(run, tmp_path))
    run.balance()


def test_rounds_after_the_checkpoint_are_run_again(tmp_path: Path) -> None:
    """Rounds after the checkpoint are lost with the Redis, and the run continues from the checkpoint."""
    run, _ = further(tmp_path)
    emptied(run)
    MergerFolder(tmp_path).bring_back(run.transport)
    assert RunState.from_json(run.transport.reader.merger_state()).closed == 3
    assert [run.version(p) for p in range(2)] == [2, 1]


def test_an_existing_run_is_not_changed(tmp_path: Path) -> None:
    run, merger = further(tmp_path, record=True)
    merger.finish()
    before, rounds = bits(run), sorted(record.read(tmp_path / "record").rounds)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")  # the newest checkpoint is of an earlier round
    with pytest.raises(RunExistsError):
        MergerFolder(tmp_path).bring_back(run.transport)
    assert bits(run) == before
    assert sorted(record.read(tmp_path / "record").rounds) == rounds == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    empty = MemoryBroker().connect("other")
    with failing(UnknownRunError, "broker.other-run"):
        MergerFolder(tmp_path).bring_back(empty)
    assert empty.reader.runs() == []


def test_without_a_checkpoint_no_run_is_created(tmp_path: Path) -> None:
    empty = MemoryBroker().connect("sample")
    assert MergerFolder(tmp_path).bring_back(empty) is None
    assert empty.reader.runs() == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_checkpoints_is_unknown(tmp_path: Path, resume: bool) -> None:
    empty = MemoryBroker().connect("sample")
    with failing(UnknownRunError, "broker.unknown-run"):
        MergerFolder(tmp_path).find_or_bring_back(empty, resume=resume)


def test_a_run_is_restored_only_with_resume(tmp_path: Path) -> None:
    run = begun(tmp_path)
    emptied(run)
    folder = MergerFolder(tmp_path)
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(run.transport, resume=False)
    assert run.transport.reader.runs() == []
    assert folder.find_or_bring_back(run.transport, resume=True) == run.manifest
    assert folder.find_or_bring_back(run.transport, resume=False) == run.manifest  # the run exists now


def test_a_second_process_finds_the_run_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path)
    emptied(run)
    folder, other = MergerFolder(tmp_path), MergerFolder(tmp_path)
    load = folder.store.load
    monkeypatch.setattr(folder.store, "load", lambda: (other.bring_back(run.transport), load())[1])
    assert folder.find_or_bring_back(run.transport, resume=True) == run.manifest


def test_the_record_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    run, merger = further(tmp_path, record=True)
    merger.finish()
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3, 4]
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")
    emptied(run)
    MergerFolder(tmp_path).bring_back(run.transport)
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3]
    merger = serving(run, tmp_path)
    go_on(run, merger)
    merger.finish()
    found = record.read(tmp_path / "record").rounds
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [found[n][0] for n in (4, 5, 6)] == run.transport.reader.tape(3)


def test_a_record_is_written_only_if_the_config_asks_for_it(tmp_path: Path) -> None:
    for name, wanted in (("with", True), ("without", False)):
        begun(tmp_path / name, record=wanted)
        assert (tmp_path / name / "record").exists() == wanted
