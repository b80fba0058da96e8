"""Checkpoints of an island: saving, restoring, and damage."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.errors import DataError
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.islands.checkpoint import KEPT, LEAVING, IslandCut, IslandStore, cut
from archipelago.islands.data.batches import Batches
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.worker import Island
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.harness import tiny
from tests.harness.tiny import TinyRun, leaf_bytes

# After the first fault, Orbax continues to read damaged files in the background, and nothing awaits those reads.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
#: The number of the merger's checkpoint.
NUMBER = 7


class Kept(NamedTuple):
    """A folder with one checkpoint, its cut, and the island's state at that time."""

    folder: Path
    cut: IslandCut
    state: dict[str, Any]

    @property
    def moments(self) -> list[bytes]:
        return leaf_bytes(self.cut.arrays["inner"]["optimizer"])


def store(folder: Path, of: Manifest | None = None) -> IslandStore:
    return IslandStore(folder, of or tiny.manifest())


def trained(steps: int) -> Island:
    """Return an island that has trained and been merged. Its last contribution is still in flight."""
    run = TinyRun()
    island = run.island()
    run.play(island, steps)
    run.merger.transport.merger.updates = lambda *arguments: []  # type: ignore[method-assign]
    while not island.link.channels[0].outbox.unresolved_rounds():
        run.play(island, 1)
    island.advance()  # progress that was not sent
    return island


def fresh() -> Island:
    """Return a new incarnation of the island, which has restored nothing."""
    return TinyRun().island(incarnation="y")


def optimizer_bytes(of: Island) -> list[bytes]:
    return leaf_bytes(of.inner.optimizer)


def everything(of: Island) -> dict[str, Any]:
    """Return the whole state of an island, bit for bit, without its name and incarnation."""
    sent, queued = of.link.channels[0].outbox.in_flight()
    return {
        "inner": leaf_bytes(of.inner),
        "references": leaf_bytes(of.computation.replica.references),
        "ledger": of.ledger.state(),
        "batches": of.batches.state(),
        "totals": of.totals,
        "in flight": sorted((p.contribution.identity_text, p.contribution, p.payload) for p in sent),
        "queued": len(queued),
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return a checkpoint. Copy the folder before changing it."""
    folder = tmp_path_factory.mktemp("island") / "kept"
    island = trained(9)
    taken, state = cut(island, NUMBER), everything(island)
    store(folder).save(taken)
    return Kept(folder, taken, state)


@pytest.fixture
def copied(kept: Kept, tmp_path: Path) -> Path:
    return shutil.copytree(kept.folder, tmp_path / "copied")


def steps_of(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def whole(folder: Path, island: Island, number: int | None = NUMBER) -> bool:
    kept = store(folder)
    found = kept.find(number)
    return found is not None and kept.restore_whole(found, island)


# -- an island that rejoins a run ------------------------------------------------------------------------------------


def test_an_island_that_rejoins_restores_its_moments_and_totals_only(kept: Kept) -> None:
    """Parameters, clock and counts come from the merger."""
    after = fresh()
    before, structure = everything(after), str(jax.tree.structure(after.inner))
    assert store(kept.folder).restore_moments(after)
    assert optimizer_bytes(after) == kept.moments != leaf_bytes(fresh().inner.optimizer)
    assert str(jax.tree.structure(after.inner)) == structure
    assert after.totals == kept.state["totals"]
    assert after.totals.steps > 9
    assert after.moments == "own checkpoint"
    assert after.inner.params["kernel"].tolist() == [[1.0] * 3] * 2
    now = everything(after)
    for part in ("references", "ledger", "batches", "in flight", "queued"):
        assert now[part] == before[part]


def test_moments_are_restored_under_another_config_but_not_in_another_run(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    warmer = replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, learning_rate=0.02))
    after = TinyRun(tiny.manifest(config=warmer)).island(incarnation="y")
    assert store(kept.folder, after.manifest).restore_moments(after)
    others = [
        tiny.manifest("another"),
        tiny.manifest(tensors=(*tiny.TENSORS, Tensor("more", (2,)))),
        tiny.manifest(tensors=tiny.TENSORS[::-1]),
    ]
    for other in others:
        caplog.clear()
        assert store(kept.folder, other).find(NUMBER) is None
        assert store(kept.folder, other).find() is None
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


# -- an island of a run that went back to the checkpoint of the same number -----------------------------------------


def test_the_whole_state_is_restored_bit_for_bit(kept: Kept) -> None:
    """Contributions in flight are sent again under their old identity."""
    run = TinyRun()
    after = run.island(incarnation="y")
    assert everything(after) != kept.state
    assert whole(kept.folder, after)
    now = everything(after)
    assert kept.state["in flight"]
    assert any(count["steps"] for count in kept.state["ledger"]["counts"])
    for part, expected in kept.state.items():
        assert now[part] == expected, part
    after.link.pump()
    found = [(d.contribution.identity_text, d.payload) for d in run.connect().merger.updates(0.0) if d.contribution]
    assert sorted(found) == [(identity, payload) for identity, _, payload in kept.state["in flight"]]
    assert all(identity.startswith("a/x/") for identity, _ in found)
    after.batches = Batches(tiny.TEXT[:64], tiny.CONFIG, lambda: None)
    with pytest.raises(DataError):
        whole(kept.folder, after)


def test_a_restored_island_continues_with_the_same_bits(kept: Kept) -> None:
    """This holds for parameters, moments and contributions. Later steps do not change a cut."""
    before, after = trained(9), fresh()
    taken = cut(before, NUMBER)
    assert whole(kept.folder, after)
    sent: list[list[Draft]] = [[], []]
    for island, drafts in zip((before, after), sent, strict=True):
        island.link.send = drafts.append  # type: ignore[method-assign, assignment]
        for _ in range(6):
            island.advance()
        island.leave(flush_seconds=0.0)
    assert leaf_bytes(taken.arrays) == leaf_bytes(kept.cut.arrays)
    assert taken.rest == kept.cut.rest
    assert leaf_bytes(before.inner) == leaf_bytes(after.inner)
    assert before.batches.state() == after.batches.state()
    assert len(sent[0]) == 2
    for one, other in zip(*sent, strict=True):
        assert leaf_bytes(one.parts) == leaf_bytes(other.parts)
        own: dict[str, Any] = {"incarnation": "", "sequence": 0, "loss": 0.0, "step_seconds": 0.0}
        assert replace(other.header, **own) == replace(one.header, **own)


# -- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(kept: Kept, copied: Path) -> None:
    store(copied).save(kept.cut)
    for item in ("arrays", "rest"):
        store(copied).save(cut(trained(12), NUMBER))
        files = [path for path in (steps_of(copied)[-1] / item).rglob("*") if path.is_file()]
        truncate(max(files, key=lambda path: path.stat().st_size))
    after = fresh()
    assert store(copied).restore_moments(after)
    assert optimizer_bytes(after) == kept.moments


@pytest.mark.full
@pytest.mark.parametrize("damage", [truncate, flip])
def test_damage_to_any_file_restores_an_older_state_or_none(
    kept: Kept, copied: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    newer = trained(12)
    store(copied).save(cut(newer, NUMBER))
    states = [kept.state, everything(newer)]
    files = sorted(path.relative_to(copied) for path in steps_of(copied)[-1].rglob("*") if path.is_file())
    assert len(files) > 5
    fallbacks = 0
    for index, path in enumerate(files):
        folder = shutil.copytree(copied, tmp_path / str(index))
        damage(folder / path)
        after, returned = fresh(), fresh()
        allowed = states if whole(folder, after) else [everything(fresh())]
        assert everything(after) in allowed, f"{path} damaged"
        assert store(folder).restore_moments(returned), f"{path} damaged, and the older one is not restored"
        moments = optimizer_bytes(returned)
        origins = [s for s in states if (s["inner"][-len(moments) :], s["totals"]) == (moments, returned.totals)]
        assert origins, f"{path} damaged"
        fallbacks += returned.totals == kept.state["totals"]
    assert fallbacks > 0


def test_a_changed_number_in_the_json_is_detected(copied: Path) -> None:
    """The file is valid JSON, and Orbax keeps no digest of it."""
    for word in ("number", "sequence"):
        (path,) = [path for path in (steps_of(copied)[-1] / "rest").iterdir() if word in path.read_text()]
        text = path.read_text()
        changed = re.sub(rf'("{word}": "?)([0-9])', lambda found: f"{found[1]}{(int(found[2]) + 1) % 10}", text)
        assert changed != text
        path.write_text(changed)
        assert store(copied).find() is None
        assert not store(copied).restore_moments(fresh())
        path.write_text(text)


def test_a_half_written_checkpoint_is_never_read(copied: Path, kept: Kept) -> None:
    """It has a temporary name, as a death during the write leaves it."""
    (newest,) = steps_of(copied)
    torn = copied / f"{int(newest.name) + 1}.orbax-checkpoint-tmp-1"
    shutil.copytree(newest, torn)
    for path in torn.rglob("*"):
        if path.is_file():
            truncate(path)
    after = fresh()
    assert whole(copied, after)
    assert everything(after) == kept.state
    shutil.rmtree(newest)
    assert store(copied).find() is None
    assert not store(copied).restore_moments(fresh())


@pytest.mark.full
def test_a_death_at_any_rename_leaves_the_state_before_or_after(
    copied: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files become visible by renames, so a death at any rename leaves complete checkpoints."""

    class Died(BaseException):
        pass

    last = trained(12)
    rename, left, deaths = os.rename, 0, 0

    def dies(source: str, target: str) -> None:
        nonlocal left, deaths
        if left == 0:
            deaths += 1
            raise Died
        left -= 1
        rename(source, target)

    found: list[list[bytes]] = []
    while len(found) < 20 and found[-1:] != [optimizer_bytes(last)]:
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            left = len(found)
            patched.setattr(os, "rename", dies)
            store(copied).save(cut(last, NUMBER))
        after = fresh()
        assert store(copied).restore_moments(after)
        found.append(optimizer_bytes(after))
    assert found == [kept.moments] * deaths + [optimizer_bytes(last)]
    assert deaths >= 1


# -- writing --------------------------------------------------------------------------------------------------------


def test_the_last_saved_state_is_restored(copied: Path) -> None:
    """An island that rejoined may leave at an earlier global step than before, because it uses the merger's."""
    last = trained(3)
    store(copied).save(cut(last, LEAVING))
    after = fresh()
    assert store(copied).restore_moments(after)
    assert optimizer_bytes(after) == optimizer_bytes(last)
    assert after.totals == last.totals


def test_the_newest_are_kept_and_found_by_their_number(copied: Path, kept: Kept) -> None:
    folder, (closed,) = store(copied), kept.state["ledger"]["closed"]
    assert closed > 0
    assert folder.find(NUMBER, [closed]) is not None
    assert folder.find(NUMBER, [closed - 1]) is None, "it knows a later round than the run"
    for number in range(NUMBER + 1, NUMBER + 4):
        folder.save(replace(kept.cut, rest={**kept.cut.rest, "number": number}))
    assert len(steps_of(copied)) == KEPT == 3
    found = {number: folder.find(number) for number in (*range(NUMBER, NUMBER + 5), None)}
    assert [each and each.step for each in found.values()] == [None, 1, 2, 3, None, 3]


def test_a_disk_that_cannot_be_written_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    kept = store(tmp_path / "file")
    island = trained(3)
    with caplog.at_level(logging.WARNING):
        kept.save(cut(island, NUMBER))
        kept.on_marker(island, NUMBER)
        kept.finish(island)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # the same failure is logged once
    assert kept.find(NUMBER) is None
    assert (tmp_path / "file").read_text() == "in the way of the folder"


def test_markers_and_leaving_write_one_checkpoint_at_a_time(tmp_path: Path) -> None:
    kept, island = store(tmp_path / "k"), trained(3)
    saved: list[int] = []
    gate, save = threading.Event(), kept.save

    def gated(taken: IslandCut) -> None:
        gate.wait()
        save(taken)
        saved.append(taken.rest["number"])

    kept.save = gated  # type: ignore[method-assign]
    kept.on_marker(island, 4)
    then = optimizer_bytes(island)
    island.advance()
    kept.on_marker(island, 5)  # the disk is busy
    gate.set()
    assert kept._job is not None
    kept._job.result()
    kept.on_marker(island, 6)
    kept.finish(island)
    assert saved == [4, 6, LEAVING]
    after = fresh()
    assert whole(tmp_path / "k", after, 4)
    assert optimizer_bytes(after) == then


# -- copies in a bucket ------------------------------------------------------------------------------------------------


def test_an_island_on_another_machine_takes_its_checkpoint_from_the_bucket(
    bucket: BucketFolder, tmp_path: Path, kept: Kept
) -> None:
    first, other, third = (IslandStore(tmp_path / name, tiny.manifest(), bucket) for name in ("one", "two", "three"))
    assert first.copier is not None
    first.save(kept.cut)
    assert first.copier.turn() == 0
    after = fresh()
    assert other.restore_moments(after)
    assert optimizer_bytes(after) == kept.moments
    found = third.find(NUMBER)
    assert found is not None
    assert third.restore_whole(found, after)
    assert everything(after)["ledger"] == kept.state["ledger"]


def test_a_failing_bucket_delays_no_checkpoint_of_an_island(bucket: BucketFolder, tmp_path: Path, kept: Kept) -> None:
    """On a new disk an island whose bucket was away at first still numbers above what the bucket holds."""
    first = IslandStore(tmp_path / "one", tiny.manifest(), bucket)
    assert first.copier is not None
    for _ in range(2):
        first.save(kept.cut)
        assert first.copier.turn() == 0
    assert first.copier.bundles.numbers() == [0, 1]

    def away(request: str, path: str) -> None:
        raise ConnectionError("refused")

    FaultyFileSystem.fault = staticmethod(away)
    second = IslandStore(tmp_path / "two", tiny.manifest(), bucket)
    assert second.copier is not None
    assert not second.restore_moments(fresh())
    second.save(kept.cut)
    assert second.copier.turn() > 0
    assert [path.name for path in steps_of(tmp_path / "two")] == ["0"]
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    assert second.copier.turn() == 0
    second.save(kept.cut)
    assert second.copier.turn() == 0
    assert second.copier.bundles.numbers() == [0, 1, 2]
