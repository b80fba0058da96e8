"""How the mergers of a run with several shards take one checkpoint together, and restore it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.commits import START, Image
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError, UnreachableError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Call, Event, Marker
from archipelago.broker.shards.transport import of_shard, restore, whole
from archipelago.broker.transport import ReaderClient
from archipelago.merger.checkpoint_cut import (
    EVENTS_AT_ONCE,
    LOOK_SECONDS,
    PATIENCE,
    RETRY_SECONDS,
    Following,
    Leading,
    Parts,
)
from archipelago.merger.executor import at_once
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.failing import failing
from tests.harness.merger_run import logged_codes


class Shard:
    """What a merger reads of another shard."""

    def __init__(self) -> None:
        self.announced: list[Event] = []
        self.round = self.waiting = self.calls = 0
        self.is_away = False

    def _answer(self, value: Any) -> Any:
        self.calls += 1
        if self.is_away:
            raise UnreachableError("away")
        return value

    def last_event(self) -> str:
        return str(self._answer(f"{len(self.announced)}-0" if self.announced else START))

    def events(self, after: str, block_seconds: float, count: int) -> list[tuple[str, Event]]:
        assert block_seconds == 0.0
        start = int(after.partition("-")[0])
        found = [(f"{n}-0", event) for n, event in enumerate(self.announced[start : start + count], start + 1)]
        return cast(list[tuple[str, Event]], self._answer(found))

    def tape(self, count: int) -> list[Any]:
        return list(self._answer([samples.commit([], round_number=self.round).tape] if self.round else []))

    def backlog(self) -> int:
        return int(self._answer(self.waiting))


def following(home: Shard) -> Following:
    """Return what follows the markers of shard 0 after a merger has loaded."""
    follower = Following(cast(ReaderClient, home))
    follower.start()
    assert follower.newest(0.0) is None
    return follower


def test_markers_are_followed_once_from_the_load_of_the_merger_on() -> None:
    home = Shard()
    follower = following(home)
    home.announced += [Call(1, 0), Marker(3, 0), Call(2, 0)]
    assert [follower.newest(0.0) for _ in range(2)] == [3, None]
    home.announced += [Marker(4, 0), *[Call(3, 0)] * EVENTS_AT_ONCE, Marker(5, 0)]
    assert follower.newest(0.0) == 5
    home.announced.append(Marker(6, 0))
    follower.start()
    assert follower.newest(0.0) is None, "it was announced before the merger has loaded"
    home.announced.append(Marker(7, 0))
    assert follower.newest(0.0) == 7


def test_markers_are_missed_while_shard_0_is_away_and_it_is_asked_rarely() -> None:
    home = Shard()
    follower = following(home)
    home.is_away = True
    home.announced.append(Marker(3, 0))
    assert follower.newest(1.0) is None
    calls, home.is_away = home.calls, False
    assert follower.newest(1.0 + RETRY_SECONDS / 2) is None
    assert home.calls == calls
    assert follower.newest(1.0 + RETRY_SECONDS) is None, "what was merged meanwhile may be later than the marker"
    home.announced.append(Marker(4, 0))
    assert follower.newest(1.0 + RETRY_SECONDS) == 4


def parts_of(shards: Sequence[Shard], written: Container[int] = ()) -> Parts:
    def missing(number: int) -> list[int]:
        return [] if number in written else [1]

    return Parts([cast(ReaderClient, shard) for shard in shards], missing)


def leading(parts: Parts, home: Shard | None = None) -> Leading:
    return Leading(cast(ReaderClient, home or Shard()), parts)


def test_a_checkpoint_is_lacking_until_it_has_all_parts_and_rounds() -> None:
    home, other, written = Shard(), Shard(), set[int]()
    parts = parts_of([home, other], written)
    assert not parts.lacks(), "before the first round of any shard"
    home.round = 1
    assert parts.lacks(), "nothing was announced"
    home.announced.append(Marker(5, 1))
    assert parts.lacks(), "the other shard has not announced it"
    other.announced.append(Marker(5, 0))
    assert parts.lacks(), "its parts are not written"
    written.add(5)
    assert not parts.lacks()
    assert not parts_of([home, other], written).lacks(), "as another merger sees it, which takes a shard over"
    other.round = 3
    assert parts.lacks(), "a round has closed since"
    home.announced += [Marker(6, 1), Call(2, 0)]
    other.announced += [Marker(6, 3), *[Call(3, 0)] * EVENTS_AT_ONCE]
    written.add(6)
    assert not parts.lacks()
    other.is_away = True
    with failing(UnreachableError):
        parts.lacks()


def test_a_checkpoint_that_was_complete_is_not_looked_for_again() -> None:
    """A listing of a bucket may take so long that it is never there when it is asked for."""
    written = {5}
    parts = parts_of([Shard()], written)
    assert not parts.missing(5)
    written.clear()
    assert not parts.missing(5)
    assert parts.missing(6)


def test_another_checkpoint_waits_for_the_parts_of_the_last_one() -> None:
    written = set[int]()
    leader = leading(parts_of([Shard()], written))
    assert not leader.is_waiting(0.0, 30.0)
    leader.begin(1, 0.0)
    assert leader.is_waiting(30.0, 30.0)
    written.add(1)
    assert leader.is_waiting(30.0 + LOOK_SECONDS / 2, 30.0), "the parts were looked for a moment ago"
    assert not leader.is_waiting(30.0 + LOOK_SECONDS, 30.0)
    leader.begin(2, 100.0)
    leader.gave_up()
    assert not leader.is_waiting(100.0, 30.0)
    now, waits = 200.0, list[float]()
    for number in (3, 4):
        leader.begin(number, now)
        began = now
        while leader.is_waiting(now, 1.0):
            now += 0.5
        waits.append(now - began)
    assert waits == [PATIENCE, PATIENCE], "the wait ends, although parts are missing"


def test_a_checkpoint_of_an_earlier_time_is_not_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Another process has served the shard since, and kept only newer ones."""
    leader = leading(parts_of([Shard()]))
    leader.begin(1, 0.0)
    leader.start()
    leader.begin(9, 0.0)
    assert logged_codes(caplog) == []
    leader.begin(10, 0.0)
    assert logged_codes(caplog) == ["checkpoint.incomplete"]


def test_a_number_that_was_announced_is_not_used_again() -> None:
    home = Shard()
    leader = leading(parts_of([home]), home)
    leader.start()
    assert leader.announced == 0
    home.announced += [Marker(9, 0), *[Call(3, 0)] * EVENTS_AT_ONCE]
    leader.start()
    assert leader.announced == 9
    leader.begin(12, 0.0)
    home.announced.clear()  # a Redis that died may have lost them
    leader.start()
    assert leader.announced == 12


def test_the_end_waits_for_what_other_shards_have_to_merge() -> None:
    other = Shard()
    parts = parts_of([Shard(), other])
    for other.waiting, other.is_away in ((0, False), (1, False), (0, True)):
        assert parts.has_backlog() == (other.waiting > 0 or other.is_away)


# -- the folders of the shards -----------------------------------------------------------------------------------------


MANIFEST = replace(samples.manifest(), shards=2)


def images(number: int) -> list[Image]:
    """Return the parts of a checkpoint, in which each shard has closed a round."""
    states = [json.dumps({"closed": k + 1, "covered": number, "accounts": {"a": [10]}}) for k in range(2)]
    return [
        samples.image(MANIFEST.of_shard(k), [], noise=b"", number=number, state=state) for k, state in enumerate(states)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both parts of the checkpoints 4 and 7."""
    path = tmp_path_factory.mktemp("written")
    for number in (4, 7):
        for part, image in zip(MergerFolder(path).parts(MANIFEST), images(number), strict=True):
            part.store.save(image)
    return path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> MergerFolder:
    """A copy of `written`."""
    shutil.copytree(written, tmp_path / "folder")
    copy = MergerFolder(tmp_path / "folder")
    copy.parts(MANIFEST)
    return copy


def number_of(parts: Sequence[Image]) -> int:
    assert [part.manifest.shard for part in parts] == [0, 1]
    (number,) = {part.number for part in parts}
    return number


def path_of(folder: MergerFolder, shard: int, number: int) -> Path:
    return folder.parts(MANIFEST)[shard].store.path_of(number)


@pytest.mark.parametrize("shard", [0, 1])
def test_only_a_complete_and_sound_checkpoint_is_restored(folder: MergerFolder, shard: int) -> None:
    assert folder.store.complete() == [4, 7]
    assert number_of(MergerFolder(folder.path).newest()) == 7
    shutil.rmtree(path_of(folder, shard, 7) / "metadata")
    assert number_of(MergerFolder(folder.path).newest()) == 4
    shutil.rmtree(path_of(folder, shard, 7))
    assert folder.store.complete() == [4]
    assert number_of(MergerFolder(folder.path).newest()) == 4
    shutil.rmtree(path_of(folder, 1 - shard, 4))
    with failing(ConfigError, "checkpoint.incomplete"):
        MergerFolder(folder.path).newest()


def test_the_last_complete_checkpoint_is_kept_beside_the_newest(folder: MergerFolder) -> None:
    for number in (8, 9, 10, 11):
        folder.store.save(images(number)[0])
    assert folder.store.numbers() == [7, 9, 10, 11]
    assert number_of(MergerFolder(folder.path).newest()) == 7


def test_a_number_of_any_part_or_announcement_is_not_used_again(folder: MergerFolder) -> None:
    folder.parts(MANIFEST)[1].store.save(images(9)[1])
    assert folder.store.next_number() == 10
    home = MemoryBroker().connect("sample")
    restore(home, images(4))
    epoch = home.merger.acquire("another", 5.0)
    assert epoch is not None
    home.merger.announce(epoch, Marker(12, 1))
    checkpointer = folder.checkpointer(home, MANIFEST.of_shard(0), 1.0, at_once)
    checkpointer.load(MANIFEST.of_shard(0), 1)
    checkpointer.cut = cut = Mock(side_effect=UnreachableError("Redis does not answer"))
    with failing(UnreachableError):
        checkpointer.take(RunState(closed=1), 0.0)
    cut.assert_called_once_with(13, "")


def test_a_run_of_all_shards_is_restored_once(folder: MergerFolder) -> None:
    home = MemoryBroker().connect("sample")
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(home, resume=False)
    assert folder.find_or_bring_back(home, resume=True) == MANIFEST
    run = whole(home, MANIFEST)
    assert [head.round if head else None for head in run.reader.heads()] == [1, 2]
    assert run.reader.counters().merged == 4
    with failing(RunExistsError):
        folder.bring_back(home)
    assert folder.find_or_bring_back(home, resume=True) == MANIFEST


def test_an_interrupted_restore_is_completed_from_the_same_checkpoint_only(folder: MergerFolder) -> None:
    home = MemoryBroker().connect("sample")
    of_shard(home, MANIFEST, 1).restore(images(4)[1])
    with failing(RunExistsError, "broker.shard-exists"):
        folder.find_or_bring_back(home, resume=True)
    assert home.reader.uid() is None
    restore(home, images(4))
    assert whole(home, MANIFEST).reader.counters().merged == 4


def test_mergers_on_two_machines_share_a_bucket(bucket: BucketFolder, written: Path, tmp_path: Path) -> None:
    for k, name in enumerate(("checkpoints", "shard-1")):
        shutil.copytree(written / name, tmp_path / f"machine-{k}" / name)
        part = MergerFolder(tmp_path / f"machine-{k}", bucket=bucket).parts(MANIFEST)[k]
        for number in (4, 7) if k == 0 else (4,):
            copier = part._copier(MANIFEST.of_shard(k))
            copier.offer(number)
            assert copier.turn() == 0
    folder = MergerFolder(tmp_path / "machine-0", bucket=bucket)
    folder.parts(MANIFEST)
    assert (folder._missing(4), folder._missing(7)) == ([], [1])
    assert number_of(MergerFolder(tmp_path / "other", bucket=bucket).newest()) == 4
    assert number_of(folder.newest()) == 4
