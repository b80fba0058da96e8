"""The main function of an island, called within the test's process."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

from archipelago.broker.config import OWN_MODEL, ModelConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.manifest import NO_CORPUS
from archipelago.broker.observe.logs import Origin
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands import main, running
from archipelago.islands.creation import describe, first_snapshots
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.worker import Island
from tests import samples
from tests.broker.observe.test_curves import events
from tests.failing import failing
from tests.small import SMALL

TEXT = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
CORPUS = OpenCorpus("noise", "0" * 32, "chance", TEXT, TEXT[:4096], TEXT[:4096])


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def transport(url: str) -> Iterator[RedisTransport]:
    made = connect(url, "demo")
    yield made
    made.close()


def run(url: str, folder: Path) -> dict[str, object]:
    options = main.IslandOptions(url=url, run="demo", folder=folder, scan_steps=1)
    return running.run_named(options, "oslo", lambda: False, Origin("oslo"))


def test_an_excluded_island_claims_nothing(url: str, transport: RedisTransport, tmp_path: Path) -> None:
    """After the run went back to a checkpoint, an island that is admitted later can still restore its own."""
    transport.restore(samples.image(samples.manifest("demo"), []))
    for action in ("drain", "expel"):
        transport.reader.steer({"island.oslo": action})
        with failing(ConfigError, "control.unwelcome"):
            run(url, tmp_path)
    assert transport.island.claim_checkpoint("oslo") == (3, 1)


def curve_points(folder: Path) -> list[Event]:
    found = [event for path in folder.glob("tensorboard/*") for event in events(path)]
    return [event for event in found if event.summary.value]


@pytest.mark.full
def test_the_curves_of_a_diverged_island_are_complete(
    url: str, transport: RedisTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = describe("demo", SMALL, CORPUS.identity)
    transport.create(manifest, first_snapshots(manifest))

    def diverge(island: Island, stopped: Callable[[], bool], turn_log: object) -> str:
        island.beat("training")
        raise DivergedError("the loss of oslo was not finite")

    monkeypatch.setattr(running, "keep_compiled", lambda: None)
    monkeypatch.setattr("archipelago.islands.tasks.ours.training_text", lambda *_: CORPUS)
    monkeypatch.setattr("archipelago.islands.worker.train", diverge)
    with pytest.raises(DivergedError):
        run(url, tmp_path)
    assert curve_points(tmp_path)


@pytest.mark.full
def test_a_start_loads_no_optional_library() -> None:
    """Importing one of these would delay each start by a large part of a second."""
    late = {"orbax", "tokenizers", "tensorboardX", "wandb", "matplotlib", "fakeredis"}
    imports = "import sys; from archipelago.islands import checkpoint, main, prepared, running, worker"
    code = f"{imports}; print(*({late} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_our_worker_refuses_a_run_of_own_loops(url: str, transport: RedisTransport, tmp_path: Path) -> None:
    ours = samples.manifest("demo")
    own = replace(ours, config=replace(ours.config, model=ModelConfig(size=OWN_MODEL)), corpus=NO_CORPUS)
    transport.create(own, samples.first_snapshots(own))
    with failing(ConfigError, "model.own"):
        run(url, tmp_path)
