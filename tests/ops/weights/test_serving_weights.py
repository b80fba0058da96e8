"""`serve-weights`: whole folders of versions, a link to the newest, and no mixture of runs."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from safetensors.numpy import load_file

import archipelago
from archipelago.broker.errors import ConfigError
from archipelago.islands.sync import listener
from archipelago.islands.sync.listener import Version
from archipelago.ops.commands import run as command
from archipelago.ops.weights import serving
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by, served
from tests.islands.user_loop.conftest import SYNC
from tests.islands.user_loop.own_runs import OwnRun, TreeScript, tree


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".gitignore")


def test_the_last_versions_stay_and_the_link_leads_to_the_newest(tmp_path: Path) -> None:
    for number in (998, 999_999, 1_000_000):
        target = tmp_path / f"weight_v{number:06d}"
        target.mkdir()
        serving.publish(target, keep=2)
        assert (tmp_path / "latest").resolve() == target
    assert names(tmp_path) == ["latest", "weight_v1000000", "weight_v999999"]


def test_versions_of_rounds_that_the_run_has_lost_are_deleted(tmp_path: Path) -> None:
    for number in (10, 12, 14, 8):
        target = tmp_path / f"weight_v{number:06d}"
        target.mkdir()
        serving.publish(target, keep=3)
        assert (tmp_path / "latest").resolve() == target and target.is_dir()
    assert names(tmp_path) == ["latest", "weight_v000008"]


class Followed(list[Version]):
    """What `follow` returns for a run that publishes these versions."""

    def __init__(self, run: OwnRun, *versions: Version) -> None:
        super().__init__(versions)
        self.manifest = run.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_round_of_the_same_number_replaces_that_of_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OwnRun()
    values = run.merged()
    for by in (0.0, 1.0):  # it went back to an earlier round, with or without a new start of this process
        version = Version(8, 40, {name: each + by for name, each in values.items()})
        monkeypatch.setattr(serving, "follow", lambda *args, found=version, **kwargs: Followed(run, found))
        assert serving.main(serving.ServeWeightsOptions(tmp_path, dtype="float32")) == 0
        found = load_file(tmp_path / "latest" / "model.safetensors")
        assert all(np.array_equal(found[name], each) for name, each in version.params.items())
        assert names(tmp_path) == ["latest", "weight_v000008"]
    before = (tmp_path / "latest").stat().st_ino
    assert serving.main(serving.ServeWeightsOptions(tmp_path, dtype="float32")) == 0
    assert (tmp_path / "latest").stat().st_ino == before, "a reader may be in it, and it is the same"
    run.manifest = replace(run.manifest, uid="2" * 32)  # it was created again
    with failing(ConfigError, "export.exists") as raised:
        serving.main(serving.ServeWeightsOptions(tmp_path))
    assert f"{tmp_path} has weights of an earlier run 'own'" in raised.value.what, "the folder is to be deleted"


@pytest.mark.full
def test_a_run_is_written_to_its_end(
    tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listener, "WATCH_SECONDS", 0.05)
    url, folder = f"fakeredis://{uuid.uuid4().hex}", tmp_path / "weights"
    archipelago.create(url, "own", tree(), sync=SYNC, steps=24)
    with served(url) as merger:
        with TreeScript(url) as script:
            while not script.session.finished:
                script.train()
                until(lambda: merger.rounds.closed * 2 >= min(24, script.session.step) - 4, "rounds close")
        call = ["serve-weights", str(folder), url, "--keep=2", "--dtype=float32", "--json"]
        newest, last = folder / "latest", {"round": 0}
        for _ in range(2):  # one that starts again finds what is there
            assert command(call) == 0
            last = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert (last["round"], last["folder"]) == (merger.rounds.closed, str(newest.resolve()))
            found, merged = load_file(newest / "model.safetensors"), merged_by(merger)
            assert all(np.array_equal(found[name], merged[name]) for name in merged)
        assert len(names(folder)) <= 3
    (newest / "config.json").write_text("{}")
    shutil.copytree(newest.resolve(), folder / f"weight_v{last['round'] + 2:06d}")
    with failing(ConfigError, "export.exists"):
        command(call)
