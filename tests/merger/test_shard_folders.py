"""The folders of a run with several shards: a checkpoint is restored with the parts of all shards, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.commits import Image
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Marker
from archipelago.broker.shards.transport import claim_checkpoint, of_shard, restore, whole
from archipelago.merger.beside import at_once
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.failing import failing

MANIFEST = replace(samples.manifest(), shards=2)


def images(number: int) -> list[Image]:
    """Return the parts of a checkpoint, in which each shard has closed a round."""
    state = json.dumps({"closed": 1, "covered": number, "island_tokens": {"a": 10}})
    return [samples.image(MANIFEST.of_shard(k), [], outer=b"", number=number, state=state) for k in range(2)]


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
    return folder.of_shard(MANIFEST, shard).store.path_of(number)


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
    folder.of_shard(MANIFEST, 1).store.save(images(9)[1])
    assert folder.store.next_number() == 10
    home = MemoryBroker().connect("sample")
    restore(home, images(4))
    epoch = home.merger.acquire("another", 5.0)
    assert epoch is not None
    home.merger.announce(epoch, Marker(12, 1))
    checkpointer = folder.checkpointer(home, MANIFEST.of_shard(0), 1.0, at_once)
    checkpointer.load(MANIFEST.of_shard(0), 1)
    assert checkpointer.next_number(0.0) == 13


def test_a_run_of_all_shards_is_restored_once(folder: MergerFolder) -> None:
    home = MemoryBroker().connect("sample")
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(home, resume=False)
    assert folder.find_or_bring_back(home, resume=True) == MANIFEST
    run = whole(home, MANIFEST)
    assert [head.round if head else None for head in run.reader.heads()] == [1, 2]
    assert run.reader.books().merged == 4
    assert claim_checkpoint(run, "a") == (7, [1, 1])
    assert claim_checkpoint(run, "a") is None
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
    assert claim_checkpoint(whole(home, MANIFEST), "a") == (4, [1, 1])


def test_mergers_on_two_machines_share_a_bucket(bucket: BucketFolder, written: Path, tmp_path: Path) -> None:
    for k, name in enumerate(("checkpoints", "shard-1")):
        shutil.copytree(written / name, tmp_path / f"machine-{k}" / name)
        part = MergerFolder(tmp_path / f"machine-{k}", bucket=bucket).of_shard(MANIFEST, k)
        for number in (4, 7) if k == 0 else (4,):
            copier = part._copier(MANIFEST.of_shard(k))
            copier.offer(number)
            assert copier.turn() == 0
    folder = MergerFolder(tmp_path / "machine-0", bucket=bucket)
    folder.parts(MANIFEST)
    assert (folder._missing(4), folder._missing(7)) == ([], [1])
    assert number_of(MergerFolder(tmp_path / "other", bucket=bucket).newest()) == 4
    assert number_of(folder.newest()) == 4
