"""The folders of a run with several shards: a checkpoint is restored with the parts of all shards, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Marker
from archipelago.broker.shards.images import restore
from archipelago.broker.shards.transport import claim_checkpoint, of_shard, whole
from archipelago.broker.transport import Image
from archipelago.merger.beside import at_once
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.failing import failing

MANIFEST = replace(samples.manifest(), shards=2)


def images(number: int, manifest: Manifest = MANIFEST) -> list[Image]:
    """Return the parts of a checkpoint, in which each shard has closed a round."""
    state = json.dumps({"closed": 1, "covered": number, "island_tokens": {"a": 10}})
    return [samples.image(manifest.of_shard(k), [], outer=b"", number=number, state=state) for k in range(2)]


def written(path: Path, *numbers: int, bucket: BucketFolder | None = None) -> MergerFolder:
    """Return a folder with these checkpoints."""
    folder = MergerFolder(path, bucket=bucket)
    for number in numbers:
        for part, image in zip(folder.parts(MANIFEST), images(number), strict=True):
            part.store.save(image)
    return folder


def loaded(parts: Sequence[Image]) -> int:
    assert [part.manifest.shard for part in parts] == [0, 1]
    (number,) = {part.number for part in parts}
    return number


def lose(folder: MergerFolder, shard: int, number: int) -> None:
    shutil.rmtree(folder.of_shard(MANIFEST, shard).store.path_of(number))


def test_parts_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = written(tmp_path, 1)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/checkpoints")) == [
        "checkpoints", "shard-1/checkpoints",
    ]  # fmt: skip
    assert folder.of_shard(MANIFEST, 0) is folder
    assert folder.of_shard(MANIFEST, 1) is folder.of_shard(MANIFEST, 1)
    assert MergerFolder(tmp_path).of_shard(samples.manifest(), 0).path == tmp_path


@pytest.mark.parametrize("shard", [0, 1])
def test_only_a_complete_checkpoint_is_restored(tmp_path: Path, shard: int) -> None:
    folder = written(tmp_path, 4, 7)
    assert folder.store.complete() == [4, 7]
    lose(folder, shard, 7)
    assert folder.store.complete() == [4]
    assert loaded(MergerFolder(tmp_path).newest()) == 4
    lose(folder, 1 - shard, 4)
    with failing(ConfigError, "checkpoint.incomplete"):
        MergerFolder(tmp_path).newest()


def test_a_damaged_part_makes_the_checkpoint_before_it_the_newest(tmp_path: Path) -> None:
    folder = written(tmp_path, 4, 7)
    shutil.rmtree(folder.of_shard(MANIFEST, 1).store.path_of(7) / "metadata")
    assert loaded(MergerFolder(tmp_path).newest()) == 4


def test_a_new_number_is_greater_than_that_of_any_part(tmp_path: Path) -> None:
    folder = written(tmp_path, 4)
    folder.of_shard(MANIFEST, 1).store.save(images(9)[1])
    assert folder.store.next_number() == 10


def test_the_last_complete_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    folder = written(tmp_path, 1, 2)
    for number in range(3, 8):
        folder.store.save(images(number)[0])
    assert folder.store.numbers() == [2, 5, 6, 7]
    assert loaded(MergerFolder(tmp_path).newest()) == 2


def test_a_number_that_another_merger_has_announced_is_not_used_again(tmp_path: Path) -> None:
    folder, home = written(tmp_path, 4), MemoryBroker().connect("sample")
    restore(home, images(4))
    epoch = home.merger.acquire("another", 5.0)
    assert epoch is not None
    home.merger.announce(epoch, Marker(9, 1))
    checkpointer = folder.of_shard(MANIFEST, 0).checkpointer(home, MANIFEST.of_shard(0), 1.0, at_once)
    checkpointer.forget()  # as a merger does that loads the run
    assert checkpointer.next_number(0.0) == 10


def test_a_run_of_all_shards_is_restored_once(tmp_path: Path) -> None:
    folder, broker = written(tmp_path, 4), MemoryBroker()
    home = broker.connect("sample")
    with failing(UnknownRunError, "broker.resumable"):
        folder.find_or_bring_back(home, resume=False)
    assert folder.find_or_bring_back(home, resume=True) == MANIFEST
    run = whole(home, MANIFEST)
    assert [head.round if head else None for head in run.reader.heads()] == [1, 2]
    assert run.reader.books().merged == 4
    assert claim_checkpoint(run, "a") == (4, [1, 1])
    assert claim_checkpoint(run, "a") is None
    with failing(RunExistsError):
        folder.bring_back(home)
    assert folder.find_or_bring_back(home, resume=True) == MANIFEST


def test_an_interrupted_restore_is_completed_from_the_same_checkpoint_only(tmp_path: Path) -> None:
    folder, broker = written(tmp_path, 4, 7), MemoryBroker()
    home = broker.connect("sample")
    of_shard(home, MANIFEST, 1).restore(images(4)[1])
    with failing(RunExistsError, "broker.shard-exists"):
        folder.find_or_bring_back(home, resume=True)
    assert home.reader.uid() is None
    restore(home, images(4))
    assert claim_checkpoint(whole(home, MANIFEST), "a") == (4, [1, 1])


def test_people_read_the_whole_run(tmp_path: Path) -> None:
    image = written(tmp_path, 4).load()
    assert image is not None
    assert image.manifest == MANIFEST
    assert [snapshot.fragment for snapshot, _ in image.snapshots] == [0, 1]
    assert [entry.round for entry in image.tape] == [1, 2]
    assert image.books.merged == 4
    assert json.loads(image.state)["island_tokens"] == {"a": 20}


def test_mergers_on_two_machines_share_a_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    for number in (4, 7):
        for k, image in enumerate(images(number)):
            part = MergerFolder(tmp_path / f"machine-{k}", bucket=bucket).of_shard(MANIFEST, k)
            part.store.save(image)
            if (k, number) != (1, 7):
                copier = part._copier(MANIFEST.of_shard(k))
                copier.offer(number, part.store.path_of(number))
                assert copier.turn() == 0
    folder = MergerFolder(tmp_path / "machine-0", bucket=bucket)
    folder.parts(MANIFEST)
    assert (folder._missing(4), folder._missing(7)) == ([], [1])
    assert loaded(MergerFolder(tmp_path / "other", bucket=bucket).newest()) == 4
    assert loaded(folder.newest()) == 4
