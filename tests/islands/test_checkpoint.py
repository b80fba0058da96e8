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
from typing import Any

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


def store(folder: Path, of: Manifest | None = None) -> IslandStore:
    return IslandStore(folder, of or tiny.manifest())


def trained(steps: int, run: TinyRun | None = None) -> Island:
    """Return an island that has trained and been merged. Its last contribution is still in flight."""
    run = run or TinyRun()
    island = run.island()
    run.play(island, steps)
    run.merger.transport.merger.updates = lambda *arguments: []  # type: ignore[method-assign]
    while not island.link.channels[0].outbox.unresolved_rounds():
        run.play(island, 1)
    island.advance()  # progress that was not sent
    return island


def optimizer_bytes(of: Island) -> list[bytes]:
    return leaf_bytes(of.inner.optimizer)


def everything(of: Island) -> dict[str, Any]:
    """Return the whole state of an island, bit for bit, without its name and incarnation."""
    sent, queued = of.link.channels[0].outbox.in_flight()
    return {
        "inner": leaf_bytes(of.inner),
        "references": leaf_bytes(of.replica.references),
        "ledger": of.ledger.state(),
        "batches": of.batches.state(),
        "totals": of.totals,
        "in flight": sorted((p.contribution.identity_text, p.contribution, p.payload) for p in sent),
        "queued": len(queued),
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, IslandCut, dict[str, Any]]:
    """Return a folder with a checkpoint, its cut and the island's state. Copy the folder before changing it."""
    folder = tmp_path_factory.mktemp("island") / "kept"
    island = trained(9)
    taken, then = cut(island, NUMBER), everything(island)
    store(folder).save(taken)
    return folder, taken, then


@pytest.fixture
def copied(kept: tuple[Path, IslandCut, dict[str, Any]], tmp_path: Path) -> Path:
    return shutil.copytree(kept[0], tmp_path / "copied")


def steps_of(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


# -- an island that rejoins a run ------------------------------------------------------------------------------------


def test_moments_and_totals_are_restored_bit_for_bit(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    folder, taken, then = kept
    after = TinyRun().island(incarnation="y")
    assert optimizer_bytes(after) != leaf_bytes(taken.arrays["inner"]["optimizer"])
    found = store(folder).restore_moments(after)
    assert found is not None
    assert optimizer_bytes(after) == leaf_bytes(taken.arrays["inner"]["optimizer"])
    assert str(jax.tree.structure(after.inner)) == str(jax.tree.structure(TinyRun().island().inner))
    assert after.totals == then["totals"]
    assert after.totals.steps > 9
    assert after.moments == "own checkpoint"
    assert (found.number, found.incarnation) == (NUMBER, "x")


def test_parameters_clock_and_counts_come_from_the_merger(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    after = TinyRun().island(incarnation="y")
    before = everything(after)
    assert store(kept[0]).restore_moments(after)
    now = everything(after)
    assert after.inner.params["kernel"].tolist() == [[1.0] * 3] * 2
    for part in ("references", "ledger", "batches", "in flight", "queued"):
        assert now[part] == before[part]


def test_the_record_names_the_origin_of_the_moments(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    """Unsent actions count too, because a replay uses the moments after the last action."""
    _, taken, _ = kept
    after = TinyRun().island(incarnation="y")
    found = store(kept[0]).restore_moments(after)
    assert found is not None
    unsent, actions = found.unsent_actions, after.action_log.take()
    assert actions is not None
    assert taken.rest["done"] > unsent[0].index > 0
    assert unsent[-1].index >= unsent[0].index
    assert actions.text.split()[-1] == f"moments:a/x@{taken.rest['done']}"


# -- an island of a run that went back to the checkpoint of the same number -----------------------------------------


def whole(folder: Path, island: Island, number: int | None = NUMBER) -> bool:
    kept = store(folder)
    found = kept.find(number)
    return found is not None and kept.restore_whole(found, island)


def test_the_whole_state_is_restored_bit_for_bit(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    folder, _, then = kept
    after = TinyRun().island(incarnation="y")
    assert everything(after) != then
    assert whole(folder, after)
    now = everything(after)
    assert then["in flight"]
    assert any(count["steps"] for count in then["ledger"]["counts"])
    for part in then:
        assert now[part] == then[part], part


def test_a_restored_island_continues_with_the_same_bits(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    """This holds for parameters, moments and contributions."""
    before, after = trained(9), TinyRun().island(incarnation="y")
    assert whole(kept[0], after)
    sent: list[list[Draft]] = [[], []]
    for island, drafts in zip((before, after), sent, strict=True):
        island.link.send = drafts.append  # type: ignore[method-assign, assignment]
        for _ in range(6):
            island.advance()
        for number in island.ledger.farewells():
            island._send(number, farewell=True)
    assert leaf_bytes(before.inner) == leaf_bytes(after.inner)
    assert before.batches.state() == after.batches.state()
    assert len(sent[0]) == 2
    for one, other in zip(*sent, strict=True):
        assert leaf_bytes(one.parts) == leaf_bytes(other.parts)
        own: dict[str, Any] = {"incarnation": "", "sequence": 0, "loss": 0.0, "step_seconds": 0.0}
        assert replace(other.header, **own) == replace(one.header, **own)


def test_contributions_in_flight_are_sent_again_under_their_old_identity(
    kept: tuple[Path, IslandCut, dict[str, Any]],
) -> None:
    run = TinyRun()
    after = run.island(incarnation="y")
    assert whole(kept[0], after)
    after.link.pump()
    found = [(d.contribution.identity_text, d.payload) for d in run.connect().merger.updates(0.0) if d.contribution]
    assert sorted(found) == [(identity, payload) for identity, _, payload in kept[2]["in flight"]]
    assert all(identity.startswith("a/x/") for identity, _ in found)


def test_queued_contributions_are_kept_with_those_in_flight(tmp_path: Path) -> None:
    island = trained(3)
    island.link.channels[0].outbox.pump = lambda: None  # type: ignore[method-assign]
    sent = {p.contribution.identity_text for p in island.link.channels[0].outbox.in_flight()[0]}
    for number in island.ledger.farewells():
        island._send(number, farewell=True)
    taken = cut(island, NUMBER)
    assert len(taken.queued) == 2
    store(tmp_path / "k").save(taken)
    after = TinyRun().island(incarnation="y")
    assert whole(tmp_path / "k", after)
    resumed = {p.contribution.identity_text: p for p in after.link.channels[0].outbox.in_flight()[0]}
    queued = {draft.header.identity_text: draft for draft in taken.queued}
    assert resumed.keys() == sent | queued.keys()
    for identity, draft in queued.items():
        assert resumed[identity].payload == draft.encoded(1)[1]


def test_later_steps_do_not_change_a_cut(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    island = trained(9)
    taken = cut(island, NUMBER)
    for _ in range(3):
        island.advance()
    assert leaf_bytes(taken.arrays) == leaf_bytes(kept[1].arrays)
    assert taken.rest == kept[1].rest


def test_only_a_checkpoint_of_the_wanted_number_is_found(copied: Path) -> None:
    later = cut(trained(12), NUMBER + 1)
    store(copied).save(later)
    for number, steps in ((NUMBER, 0), (NUMBER + 1, 1), (None, 1)):
        found = store(copied).find(number)
        assert found is not None
        assert found.step == steps
    assert store(copied).find(NUMBER + 2) is None


def test_another_text_is_refused(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    after = TinyRun().island(incarnation="y")
    after.batches = Batches(tiny.TEXT[:64], tiny.CONFIG, lambda: None)
    with pytest.raises(DataError):
        whole(kept[0], after)


def test_plain_orbax_restores_the_arrays(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    import orbax.checkpoint as ocp

    (newest,) = steps_of(kept[0])
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(newest / "arrays")
    params = kept[1].arrays["inner"]["params"]
    assert {name: leaf_bytes(found["inner"]["params"][name]) for name in params} == {
        name: leaf_bytes(params[name]) for name in params
    }


# -- missing checkpoints, and those of other runs -------------------------------------------------------------------


def test_an_empty_folder_restores_nothing(tmp_path: Path) -> None:
    fresh = TinyRun().island()
    before = everything(fresh)
    assert store(tmp_path / "missing").restore_moments(fresh) is None
    assert not (tmp_path / "missing").exists()
    (tmp_path / "empty").mkdir()
    assert store(tmp_path / "empty").restore_moments(fresh) is None
    assert store(tmp_path / "empty").find(NUMBER) is None
    assert everything(fresh) == before


@pytest.mark.parametrize(
    "other",
    [
        tiny.manifest("another"),
        tiny.manifest(tensors=(*tiny.TENSORS, Tensor("more", (2,)))),
        tiny.manifest(tensors=tiny.TENSORS[::-1]),
    ],
    ids=["another name", "another tree", "another order"],
)
def test_the_state_of_another_run_is_not_restored(
    kept: tuple[Path, IslandCut, dict[str, Any]], other: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    other_store = store(kept[0], other)
    assert other_store.find(NUMBER) is None
    assert other_store.find() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_moments_are_restored_under_another_config(kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    warmer = replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, learning_rate=0.02))
    after = TinyRun(tiny.manifest(config=warmer)).island(incarnation="y")
    assert store(kept[0], after.manifest).restore_moments(after)


# -- damage ---------------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(share: float) -> Callable[[Path], None]:
    """Return a change of one byte at this share of the file."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        if data:
            data[int(share * (len(data) - 1))] ^= 1
        path.write_bytes(bytes(data))

    return change


@pytest.mark.parametrize("item", ["arrays", "rest"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    kept: tuple[Path, IslandCut, dict[str, Any]], copied: Path, item: str
) -> None:
    store(copied).save(cut(trained(12), NUMBER))
    files = [path for path in (steps_of(copied)[-1] / item).rglob("*") if path.is_file()]
    truncate(max(files, key=lambda path: path.stat().st_size))
    after = TinyRun().island(incarnation="y")
    assert store(copied).restore_moments(after) is not None
    assert optimizer_bytes(after) == leaf_bytes(kept[1].arrays["inner"]["optimizer"])


@pytest.mark.full
@pytest.mark.parametrize(
    "damage", [remove, truncate, flip(0.3), flip(0.8)], ids=["removed", "cut short", "early byte", "late byte"]
)
def test_damage_to_any_file_restores_an_older_state_or_none(
    kept: tuple[Path, IslandCut, dict[str, Any]], copied: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    older, newer = kept[2], trained(12)
    store(copied).save(cut(newer, NUMBER))
    states = [older, everything(newer)]
    files = sorted(path.relative_to(copied) for path in steps_of(copied)[-1].rglob("*") if path.is_file())
    assert len(files) > 5
    fallbacks = 0
    for index, path in enumerate(files):
        folder = shutil.copytree(copied, tmp_path / str(index))
        damage(folder / path)
        after, returned = TinyRun().island(incarnation="y"), TinyRun().island(incarnation="y")
        fresh = everything(after)
        if whole(folder, after):
            assert everything(after) in states, f"{path} damaged"
        else:
            assert everything(after) == fresh, f"{path} damaged"
        assert store(folder).restore_moments(returned) is not None, (
            f"{path} damaged, and the older checkpoint is not restored"
        )
        moments = optimizer_bytes(returned)
        origins = [s for s in states if (s["inner"][-len(moments) :], s["totals"]) == (moments, returned.totals)]
        assert origins, f"{path} damaged"
        fallbacks += returned.totals == older["totals"]
    assert fallbacks > 0


@pytest.mark.parametrize("word", ["done", "sequence"])
def test_a_changed_number_in_the_json_is_detected(copied: Path, word: str) -> None:
    """The file is valid JSON, and Orbax keeps no digest of it."""
    (path,) = [path for path in (steps_of(copied)[-1] / "rest").iterdir() if word in path.read_text()]
    changed = re.sub(rf'("{word}": "?)([0-9])', lambda found: f"{found[1]}{(int(found[2]) + 1) % 10}", path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    assert store(copied).find() is None
    assert store(copied).restore_moments(TinyRun().island()) is None


def _tear(folder: Path, newest: Path) -> None:
    """Make a checkpoint incomplete under a temporary name, as a death during the write leaves it."""
    torn = folder / f"{int(newest.name) + 1}.orbax-checkpoint-tmp-1"
    shutil.copytree(newest, torn)
    for path in torn.rglob("*"):
        if path.is_file():
            truncate(path)


def test_a_half_written_checkpoint_is_never_read(copied: Path, kept: tuple[Path, IslandCut, dict[str, Any]]) -> None:
    _tear(copied, steps_of(copied)[-1])
    after = TinyRun().island(incarnation="y")
    assert whole(copied, after)
    assert everything(after) == kept[2]


def test_a_folder_with_only_a_half_written_checkpoint_is_empty(copied: Path) -> None:
    (newest,) = steps_of(copied)
    _tear(copied, newest)
    shutil.rmtree(newest)
    assert store(copied).find() is None
    assert store(copied).restore_moments(TinyRun().island()) is None


@pytest.mark.full
def test_a_death_at_any_rename_leaves_the_state_before_or_after(
    copied: Path, kept: tuple[Path, IslandCut, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
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
        after = TinyRun().island(incarnation="y")
        assert store(copied).restore_moments(after)
        found.append(optimizer_bytes(after))
    earlier = leaf_bytes(kept[1].arrays["inner"]["optimizer"])
    assert found == [earlier] * deaths + [optimizer_bytes(last)]
    assert deaths >= 1


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [9, 3], ids=["the same step", "earlier"])
def test_the_last_saved_state_is_restored(copied: Path, steps: int) -> None:
    """An island that rejoined may leave at an earlier global step than before, because it uses the merger's."""
    last = trained(steps)
    last.advance()  # to distinguish it from the first
    store(copied).save(cut(last, LEAVING))
    after = TinyRun().island(incarnation="y")
    assert store(copied).restore_moments(after)
    assert optimizer_bytes(after) == optimizer_bytes(last)
    assert after.totals == last.totals


def test_the_newest_are_kept(copied: Path) -> None:
    island = trained(9)
    for number in range(8, 12):
        store(copied).save(cut(island, number))
    assert len(steps_of(copied)) == KEPT == 3
    assert [store(copied).find(number) is not None for number in range(7, 12)] == [False, False, True, True, True]


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


def test_each_marker_and_leaving_write_a_checkpoint(tmp_path: Path) -> None:
    kept, island = store(tmp_path / "k"), trained(3)
    kept.on_marker(island, 4)
    then = optimizer_bytes(island)
    island.advance()
    kept.finish(island)
    numbers = [found.number for found in kept._found(lambda found: True)]
    assert numbers == [LEAVING, 4]
    after = TinyRun().island(incarnation="y")
    assert whole(tmp_path / "k", after, 4)
    assert optimizer_bytes(after) == then


def test_a_checkpoint_that_knows_a_later_round_than_the_run_is_not_found(tmp_path: Path) -> None:
    kept, island = store(tmp_path / "k"), trained(9)
    closed = island.ledger.closed
    assert closed > 0
    kept.save(cut(island, NUMBER))
    assert kept.find(NUMBER, [closed]) is not None
    assert kept.find(NUMBER, [closed - 1]) is None


def test_only_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    kept, island = store(tmp_path / "k"), trained(3)
    saved: list[int] = []
    gate = threading.Event()

    def save(taken: IslandCut) -> None:
        gate.wait()
        saved.append(taken.rest["number"])

    kept.save = save  # type: ignore[method-assign]
    for number in (4, 5):  # the second finds the disk busy
        kept.on_marker(island, number)
    gate.set()
    assert kept._job is not None
    kept._job.result()
    kept.on_marker(island, 6)
    kept.finish(island)
    assert saved == [4, 6, LEAVING]


# -- copies in a bucket ------------------------------------------------------------------------------------------------


def test_an_island_on_another_machine_takes_its_checkpoint_from_the_bucket(
    bucket: BucketFolder, tmp_path: Path, kept: tuple[Path, IslandCut, dict[str, Any]]
) -> None:
    _, taken, then = kept
    first = IslandStore(tmp_path / "one", tiny.manifest(), bucket)
    assert first.copier is not None
    first.save(taken)
    assert first.copier.turn() == 0
    other = IslandStore(tmp_path / "two", tiny.manifest(), bucket)
    after = TinyRun().island(incarnation="y")
    assert other.restore_moments(after)
    assert optimizer_bytes(after) == leaf_bytes(taken.arrays["inner"]["optimizer"])
    third = IslandStore(tmp_path / "three", tiny.manifest(), bucket)
    found = third.find(NUMBER)
    assert found is not None
    after = TinyRun().island(incarnation="y")
    assert third.restore_whole(found, after)
    assert everything(after)["ledger"] == then["ledger"]


def test_a_failing_bucket_delays_no_checkpoint_of_an_island(
    bucket: BucketFolder, tmp_path: Path, kept: tuple[Path, IslandCut, dict[str, Any]]
) -> None:
    """On a new disk an island whose bucket was away at first still numbers above what the bucket holds."""
    _, taken, _ = kept
    first = IslandStore(tmp_path / "one", tiny.manifest(), bucket)
    assert first.copier is not None
    for _ in range(2):
        first.save(taken)
        assert first.copier.turn() == 0
    assert first.copier.bundles.numbers() == [0, 1]

    def away(request: str, path: str) -> None:
        raise ConnectionError("refused")

    FaultyFileSystem.fault = staticmethod(away)
    second = IslandStore(tmp_path / "two", tiny.manifest(), bucket)
    assert second.copier is not None
    assert not second.restore_moments(TinyRun().island(incarnation="y"))
    second.save(taken)
    assert second.copier.turn() > 0
    assert [path.name for path in steps_of(tmp_path / "two")] == ["0"]
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    assert second.copier.turn() == 0
    second.save(taken)
    assert second.copier.turn() == 0
    assert second.copier.bundles.numbers() == [0, 1, 2]
