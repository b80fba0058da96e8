"""The way back from a folder into a Redis that lost everything: the run goes on to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import RunExistsError, UnknownRunError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Contribution
from archipelago.merger import record
from archipelago.merger.checkpointer import at_once
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests.failing import failing
from tests.merger.simulated_broker import CONFIG, SimulatedBroker, bits, values


def serving(simulated: SimulatedBroker, path: Path) -> Merger:
    folder = MergerFolder(path)
    return simulated.merger(
        checkpointer=folder.checkpointer(simulated.broker.connect("sample"), simulated.manifest, 1e9, at_once)
    )


def begun(path: Path, *, record: bool = False) -> SimulatedBroker:
    """Three rounds in a checkpoint, and one contribution that waits."""
    simulated = SimulatedBroker(replace(CONFIG, record=record), quorum=2)
    merger = serving(simulated, path)
    simulated.play(merger, 1, 2, 3)
    simulated.live("a", "b")
    send_waiting(simulated)
    merger.turn(0.0)
    merger.checkpoint()
    return simulated


def send_waiting(simulated: SimulatedBroker) -> Contribution:
    return simulated.send("b", 4, values(4))


def further(path: Path, *, record: bool = False) -> tuple[SimulatedBroker, Merger]:
    """The same, and then a round that no checkpoint holds; with the merger that closed it."""
    simulated = begun(path, record=record)
    merger = serving(simulated, path)
    simulated.live("a", "b")
    simulated.send("a", 4, values(99))
    merger.turn(0.0)
    assert merger.state.closed == 4
    return simulated, merger


def emptied(simulated: SimulatedBroker) -> None:
    """The Redis dies and comes back with nothing."""
    simulated.broker.runs.clear()


def go_on(simulated: SimulatedBroker, merger: Merger) -> None:
    """The island whose contribution did not wait answers, then two more rounds."""
    simulated.live("a", "b")
    simulated.send("a", 4, values(5), sequence=3)
    assert merger.turn(0.0)
    simulated.sequences = type(simulated.sequences)({"a": 4, "b": 4})
    simulated.play(merger, 5, 6)


def test_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    undisturbed = begun(tmp_path / "undisturbed")
    go_on(undisturbed, serving(undisturbed, tmp_path / "undisturbed"))

    simulated = begun(tmp_path / "folder")
    (pending,) = [c for c, _ in simulated.sent if c.round == 4]
    serving(simulated, tmp_path / "folder")
    emptied(simulated)
    image = MergerFolder(tmp_path / "folder").bring_back(simulated.transport)
    assert image is not None
    assert [c for c, _ in image.pending] == [pending]
    go_on(simulated, serving(simulated, tmp_path / "folder"))
    found, expected = bits(simulated), bits(undisturbed)
    assert found[1:] == expected[1:]
    # An entry's place in the stream is new, and nothing else of what was decided.
    without_entries = [
        [(*rest, [replace(m, entry="") for m in members], gain) for *rest, members, gain in tape]
        for tape in (found[0], expected[0])
    ]
    assert without_entries[0] == without_entries[1]


def test_the_books_balance_after_it(tmp_path: Path) -> None:
    simulated = begun(tmp_path)
    emptied(simulated)
    MergerFolder(tmp_path).bring_back(simulated.transport)
    books, pending = simulated.transport.reader.books(), simulated.transport.reader.pending()
    assert (books.published, books.merged, books.refused, books.kept) == (7, 6, 0, 0)
    assert (pending.contributions, pending.tokens) == (1, 100)
    assert books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens
    go_on(simulated, serving(simulated, tmp_path))
    simulated.balance()


def test_rounds_after_the_checkpoint_are_run_again(tmp_path: Path) -> None:
    """Rounds after the checkpoint are gone with the Redis; the run goes on from the checkpoint's."""
    simulated, _ = further(tmp_path)
    emptied(simulated)
    MergerFolder(tmp_path).bring_back(simulated.transport)
    assert RunState.from_json(simulated.transport.reader.merger_state()).closed == 3
    assert [simulated.version(p) for p in range(2)] == [2, 1]


def test_a_run_that_is_there_is_not_touched(tmp_path: Path) -> None:
    simulated, merger = further(tmp_path, record=True)
    merger.finish()
    before, rounds = bits(simulated), sorted(record.read(tmp_path / "record").rounds)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")  # the newest is one of an earlier round
    with pytest.raises(RunExistsError):
        MergerFolder(tmp_path).bring_back(simulated.transport)
    assert bits(simulated) == before
    assert sorted(record.read(tmp_path / "record").rounds) == rounds == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_named(tmp_path: Path) -> None:
    begun(tmp_path)
    empty = MemoryBroker().connect("other")
    with failing(UnknownRunError, "broker.other-run"):
        MergerFolder(tmp_path).bring_back(empty)
    assert empty.reader.runs() == []


def test_without_a_checkpoint_nothing_is_made(tmp_path: Path) -> None:
    empty = MemoryBroker().connect("sample")
    assert MergerFolder(tmp_path).bring_back(empty) is None
    assert empty.reader.runs() == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_never_there_is_unknown(tmp_path: Path, resume: bool) -> None:
    empty = MemoryBroker().connect("sample")
    with failing(UnknownRunError, "broker.unknown-run"):
        MergerFolder(tmp_path).find_or_bring_back(empty, resume=resume)


def test_it_is_brought_back_only_when_that_is_asked_for(tmp_path: Path) -> None:
    simulated = begun(tmp_path)
    emptied(simulated)
    folder = MergerFolder(tmp_path)
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(simulated.transport, resume=False)
    assert simulated.transport.reader.runs() == []
    assert folder.find_or_bring_back(simulated.transport, resume=True) == simulated.manifest
    assert folder.find_or_bring_back(simulated.transport, resume=False) == simulated.manifest  # it is there now


def test_a_second_process_finds_the_run_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = begun(tmp_path)
    emptied(simulated)
    folder, other = MergerFolder(tmp_path), MergerFolder(tmp_path)
    load = folder.store.load
    monkeypatch.setattr(folder.store, "load", lambda: (other.bring_back(simulated.transport), load())[1])
    assert folder.find_or_bring_back(simulated.transport, resume=True) == simulated.manifest


def test_the_record_goes_back_with_the_run(tmp_path: Path) -> None:
    simulated, merger = further(tmp_path, record=True)
    merger.finish()
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3, 4]
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")
    emptied(simulated)
    MergerFolder(tmp_path).bring_back(simulated.transport)
    assert sorted(record.read(tmp_path / "record").rounds) == [1, 2, 3]
    merger = serving(simulated, tmp_path)
    go_on(simulated, merger)
    merger.finish()
    found = record.read(tmp_path / "record").rounds
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [found[n][0] for n in (4, 5, 6)] == simulated.transport.reader.tape(3)


def test_a_record_is_kept_where_the_config_says_so(tmp_path: Path) -> None:
    for name, wanted in (("with", True), ("without", False)):
        begun(tmp_path / name, record=wanted)
        assert (tmp_path / name / "record").exists() == wanted
