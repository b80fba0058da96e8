"""An island's own optimiser state and totals on its disk: saving, restoring, and damage."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.islands.checkpoint import FILE, IslandStore, OwnState, taken
from archipelago.islands.sync.measures import Totals
from archipelago.islands.worker import Island
from tests.broker.buckets.faulty_bucket import FaultyFileSystem, no_fault
from tests.harness import tiny
from tests.harness.merger_run import logged_codes
from tests.harness.tiny import TinyRun, leaf_bytes


class Kept(NamedTuple):
    """A folder with the state of an island, and what was written."""

    folder: Path
    own: OwnState
    moments: list[bytes]


def store(folder: Path) -> IslandStore:
    return IslandStore(folder, tiny.manifest())


def trained(steps: int) -> Island:
    run = TinyRun()
    island = run.island()
    run.play(island, steps)
    return island


def fresh() -> Island:
    """Return a new incarnation of the island, which has restored nothing."""
    return TinyRun().island(incarnation="y")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return a saved state. Copy the folder before changing it."""
    folder = tmp_path_factory.mktemp("island") / "kept"
    island = trained(9)
    own = taken(island)
    assert own is not None
    store(folder).save(own)
    return Kept(folder, own, leaf_bytes(island.inner.optimizer))


@pytest.fixture
def copied(kept: Kept, tmp_path: Path) -> Path:
    return shutil.copytree(kept.folder, tmp_path / "copied")


def test_an_island_restores_its_moments_and_totals_only(kept: Kept) -> None:
    """Parameters, clock and counts come from the merger."""
    after = fresh()
    before = leaf_bytes((after.inner.params, after.computation.replica.references)), after.ledger.counts
    assert store(kept.folder).restore(after)
    assert leaf_bytes(after.inner.optimizer) == kept.moments != leaf_bytes(fresh().inner.optimizer)
    assert (after.totals, after.optimizer_origin) == (Totals(9, 9 * tiny.CONFIG.tokens_per_step), "own checkpoint")
    assert (leaf_bytes((after.inner.params, after.computation.replica.references)), after.ledger.counts) == before
    after.advance()


def test_a_state_fits_another_config_of_its_run_and_no_other_run(kept: Kept, tmp_path: Path) -> None:
    ours = tiny.manifest()
    longer = replace(ours, config=replace(ours.config, inner=replace(ours.config.inner, learning_rate=0.5)))
    assert IslandStore(kept.folder, longer).restore(fresh())
    for other in (replace(ours, run="other"), replace(ours, uid="2" * 32), replace(ours, tensors=ours.tensors[:1])):
        after = fresh()
        assert not IslandStore(kept.folder, other).restore(after)
        assert after.optimizer_origin == "fresh"
    assert not store(tmp_path / "empty").restore(fresh())


def test_damage_restores_nothing(copied: Path) -> None:
    path = copied / FILE
    whole = path.read_bytes()
    line, _, payload = whole.partition(b"\n")
    about = json.loads(line)
    changed = [
        json.dumps({**about, "totals": ["many"]}).encode() + b"\n" + payload,
        json.dumps({**about, "handover": {}}).encode() + b"\n" + payload,
        line + b"\n" + payload[:-1],
        line + b"\n" + payload.replace(payload[40:44], b"\0\0\0\0"),
        whole[: len(line) // 2],
        b"",
        b"[]\n",
        b"\xff\xff\n",
    ]
    for content in changed:
        path.write_bytes(content)
        after = fresh()
        before = leaf_bytes(after.inner)
        assert not store(copied).restore(after), content[:80]
        assert (leaf_bytes(after.inner), after.optimizer_origin) == (before, "fresh")


def test_a_death_at_the_rename_leaves_the_state_before_or_after(
    copied: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    rename: Callable[..., None] = os.replace
    later = kept.own[0], Totals(11, 11)
    for is_done in (False, True):

        def dies(*paths: object, is_done: bool = is_done) -> None:
            if is_done:
                rename(*paths)
            raise Died

        monkeypatch.setattr(os, "replace", dies)
        with pytest.raises(Died):
            store(copied).save(later)
        monkeypatch.undo()
        after = fresh()
        assert store(copied).restore(after)
        assert after.totals.steps == (11 if is_done else 9)


def test_a_disk_that_cannot_be_written_does_not_stop_training(
    kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    full = store(tmp_path / "file" / "k")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            full.save(kept.own)
    assert len(caplog.records) == 1
    assert "training continues" in caplog.text


def test_markers_and_leaving_write_one_state_at_a_time(tmp_path: Path) -> None:
    kept, island = store(tmp_path), trained(3)
    writing, go_on, steps, save = threading.Event(), threading.Event(), list[int](), kept.save

    def slow(own: OwnState) -> None:
        steps.append(own[1].steps)
        writing.set()
        assert go_on.wait(60.0)
        save(own)

    kept.save = slow  # type: ignore[method-assign]
    kept.on_marker(island)
    assert writing.wait(60.0)
    island.advance()
    kept.on_marker(island)  # the last one is still being written
    go_on.set()
    kept.finish(island)
    assert steps == [3, 4]
    after = fresh()
    assert store(tmp_path).restore(after)
    assert after.totals.steps == 4


# -- a copy in a bucket ------------------------------------------------------------------------------------------------


def test_an_island_on_another_machine_takes_its_state_from_the_bucket(
    bucket: BucketFolder, tmp_path: Path, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    IslandStore(tmp_path / "one", tiny.manifest(), bucket).save(kept.own)
    after = fresh()
    assert IslandStore(tmp_path / "two", tiny.manifest(), bucket).restore(after)
    assert leaf_bytes(after.inner.optimizer) == kept.moments

    def away(request: str, path: str) -> None:
        raise ConnectionError("refused")

    FaultyFileSystem.fault = staticmethod(away)
    third = IslandStore(tmp_path / "three", tiny.manifest(), bucket)
    assert not third.restore(fresh())
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            third.save(kept.own)
        assert third.restore(fresh()), "the disk has it"
        FaultyFileSystem.fault = staticmethod(no_fault)
        for _ in range(2):
            third.save(kept.own)
    assert logged_codes(caplog) == ["bucket.failed", "bucket.recovered"]
    assert str(tmp_path) not in caplog.text, "the disk is not blamed"


def test_the_last_state_stays_where_the_newest_cannot_be_had(tmp_path: Path) -> None:
    """Another process of the island may be lost, with its part of the state."""
    island = trained(3)
    store(tmp_path).finish(island)
    kept = store(tmp_path)
    before = kept.path.read_bytes()
    island.optimizer = replace(island.optimizer, copies=lambda: None)
    kept.on_marker(island)
    kept.finish(island)
    assert kept.path.read_bytes() == before
