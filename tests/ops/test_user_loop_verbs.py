"""The verbs on a run whose islands are training scripts of its users: they work, or say what is impossible."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from archipelago import join
from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.footprint import footprint, redis_parts
from archipelago.broker.redis.transport import connect
from archipelago.islands.user_loop.tree import TreeLayout
from archipelago.merger.storage import MergerFolder
from archipelago.ops.dashboard import page_data
from archipelago.ops.experiments.replay import ReplayOptions
from archipelago.ops.experiments.replay import main as replay
from archipelago.ops.launch.init import InitOptions, next_steps
from archipelago.ops.launch.init import main as init
from archipelago.ops.run_source import open_run
from archipelago.ops.watch.doctor.main import DoctorOptions
from archipelago.ops.watch.doctor.main import main as doctor
from archipelago.ops.watch.status import StatusOptions
from archipelago.ops.watch.status import main as status
from archipelago.ops.watch.steer import SteerOptions
from archipelago.ops.watch.steer import main as steer
from archipelago.ops.weights.export import ExportOptions
from archipelago.ops.weights.export import main as export
from archipelago.ops.weights.generate import GenerateOptions
from archipelago.ops.weights.generate import main as generate
from tests.failing import failing
from tests.harness.merger_run import finish
from tests.islands.user_loop.any_framework import CONFIG
from tests.islands.user_loop.own_runs import OwnRun, only_kernels_trained, tree
from tests.islands.user_loop.own_runs import trained as every_leaf_trained


class Served:
    """A recorded run with one island, on a server in memory. Its merger's folder is in `runs` of a folder."""

    def __init__(self, folder: Path, trained: Any = None) -> None:
        self.url, self.folder = f"fakeredis://{uuid.uuid4().hex}", folder
        self.run = OwnRun(
            config=replace(CONFIG, record=True),
            connect=lambda: connect(self.url, "own"),
            folder=MergerFolder(folder / "runs/own/merger"),
            trained=trained,
        )
        self.island = self.run.island("oslo")
        self.island.play(12, every_leaf_trained if trained is None else only_kernels_trained)
        finish(self.run.merger)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("own"))


@pytest.fixture
def served(made: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The run, in whose folder the test runs."""
    monkeypatch.chdir(made.folder)
    return made


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_replay_merges_the_run_of_a_script_exactly(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(ReplayOptions("own", json=True)) == 0
    found = printed(capsys)
    assert found["same"]
    assert found["rounds"] == served.run.merger.state.closed >= 4
    assert replay(ReplayOptions("runs/own")) == 0


def test_status_doctor_and_steer_work(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    status(StatusOptions(url=served.url, run="own", json=True))
    shown = printed(capsys)
    assert shown["run"] == "own"
    status(StatusOptions(url=served.url, run="own"))
    capsys.readouterr()
    doctor(DoctorOptions(url=served.url, run="own", seconds=0.0, json=True))
    assert "corpus" not in {finding["subject"] for finding in printed(capsys)["findings"]}
    assert steer(SteerOptions(changes=("inner.steps=2000",), url=served.url, run="own")) == 0
    served.island.link.pump()
    assert served.island.link.heartbeats.run_steps == 2000


def test_a_run_with_frozen_tensors_says_what_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its merger needs nothing but the trained tensors, so replay is exact, and an export holds only these."""
    served = Served(tmp_path, trained="kernel")
    manifest = served.run.manifest
    assert (manifest.parameters, manifest.frozen_parameters) == (32, 40)
    assert replay(ReplayOptions("own", json=True)) == 0
    assert printed(capsys)["same"]
    status(StatusOptions(url=served.url, run="own", json=True))
    shown = printed(capsys)
    assert (shown["parameters"], shown["frozen_parameters"]) == (32, 40)
    status(StatusOptions(url=served.url, run="own"))
    assert "(40 more are frozen)" in capsys.readouterr().out
    assert export(ExportOptions(served.url, "own", out=Path("out"), json=True)) == 0
    assert printed(capsys)["frozen_parameters"] == 40
    assert set(load_file("out/model.safetensors")) == {"layers.0.kernel", "layers.1.kernel"}
    url = f"fakeredis://{uuid.uuid4().hex}"
    MergerFolder(Path("runs/own/merger")).bring_back(connect(url, "own"))
    with join(url, "own", tree(), island="lima") as run:
        assert run.step == served.run.merger.state.step > 0
    other = tree() | {"embedding": tree()["embedding"] + 1}
    with failing(MismatchError, "loop.other-frozen"), join(url, "own", other):
        pass


def test_a_run_of_scripts_has_no_settings_of_ours_and_no_model(served: Served) -> None:
    manifest = served.run.manifest
    shown = page_data.settings(manifest)
    assert shown["inner.steps"] == "1000"
    assert not {"data.corpus", "inner.learning_rate", "model.size"} & set(shown)
    assert footprint(manifest, 0)["an island"] == 16 * manifest.parameters, "what the link holds"
    parts = redis_parts(manifest.config, manifest.parameters, max(manifest.sizes))
    assert footprint(manifest, 0)["Redis"] == sum(parts.values())
    with failing(ConfigError, "model.own"):
        generate(GenerateOptions(served.url, run="own"))
    with failing(ConfigError, "model.own"):
        init(InitOptions(url=served.url, run="own"))


def test_export_writes_the_leaves_under_their_names(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(ExportOptions(served.url, "own", out=Path("out"))) == 0
    found = load_file("out/model.safetensors")
    expected = served.run.merged()
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(value))
    told = "".join(capsys.readouterr())
    assert "out/model.safetensors" in told
    assert "archipelago up" not in told, "only its script can go on with these parameters"
    assert not {"corpus", "vocabulary"} & set(json.loads(Path("out/config.json").read_text())["archipelago"])


def test_a_run_that_its_redis_has_lost_goes_on_from_a_checkpoint(served: Served) -> None:
    lost, url = served.run, f"fakeredis://{uuid.uuid4().hex}"
    MergerFolder(Path("runs/own/merger")).bring_back(connect(url, "own"))
    told = "".join(next_steps(url, lost.manifest))
    assert "archipelago island" not in told and "training script" in told, "only the script can train it"
    assert "archipelago island --run own --task FILE.py:NAME" in "".join(
        next_steps(url, replace(lost.manifest, task="mine"))
    )
    with join(url, "own", tree(), island="lima") as run:
        assert run.step == lost.merger.state.step > 0
        named = TreeLayout.of(run.params).leaves_of(run.params)
    for name, value in lost.merged().items():
        np.testing.assert_array_equal(np.asarray(named[name]), np.asarray(value))


def test_a_folder_whose_own_redis_has_lost_the_run_is_read_from_its_checkpoint(served: Served) -> None:
    """As after `up`, which starts an empty one and names `--resume`."""
    Path("runs/own/redis").mkdir()
    with open_run("runs/own", None) as found:
        assert found.transport.reader.tape(1)[-1].round == served.run.merger.state.closed > 0


def test_a_checkpoint_is_not_steered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing(ConfigError, "config.which-run"):
        steer(SteerOptions("own", changes=("merging=paused",)))
    monkeypatch.setenv("ARCHIPELAGO_URL", f"fakeredis://{uuid.uuid4().hex}")  # which has the run no more
    with open_run("own", None) as found:
        assert found.origin.startswith("checkpoint")
    with failing(ConfigError, "config.which-run"):
        steer(SteerOptions("own", changes=("merging=paused",)))
