"""The main function of an island, called within the test's process."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.config import OWN_MODEL, ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import NO_CORPUS
from archipelago.broker.observe.logs import Origin
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands import main, running
from archipelago.islands.data.corpus import OpenCorpus, Splits
from tests import samples
from tests.failing import failing

TEXT = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
CORPUS = OpenCorpus(
    "noise", TEXT.size, "0" * 32, "chance", Splits(TEXT.size, 0, 0), train=TEXT, valid=TEXT[:4096], test=TEXT[:4096]
)


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def transport(url: str) -> Iterator[RedisTransport]:
    made = connect(url, "demo")
    yield made
    made.close()


def run(url: str, folder: Path) -> str:
    options = main.IslandOptions(url=url, run="demo", folder=folder)
    return running.WorkerRun(options, "oslo", lambda: False, Origin("oslo")).train()


def test_an_excluded_island_claims_nothing(url: str, transport: RedisTransport, tmp_path: Path) -> None:
    transport.restore(samples.image(samples.manifest("demo"), []))
    for action in ("drain", "expel"):
        transport.reader.steer({"island.oslo": action})
        with failing(ConfigError, "control.unwelcome"):
            run(url, tmp_path)
    assert transport.reader.presences() == []


@pytest.mark.full
def test_a_start_loads_no_optional_library() -> None:
    """Importing one of these would delay each start by a large part of a second."""
    late = {"orbax", "tokenizers", "torch", "fakeredis"}
    imports = "import sys; from archipelago.islands import checkpoint, main, prepared, running, worker"
    code = f"{imports}; print(*({late} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_our_worker_refuses_a_run_of_user_loops(url: str, transport: RedisTransport, tmp_path: Path) -> None:
    ours = samples.manifest("demo")
    own = replace(ours, config=replace(ours.config, model=ModelConfig(size=OWN_MODEL)), corpus=NO_CORPUS)
    transport.create(own, samples.first_snapshots(own))
    with failing(ConfigError, "model.own"):
        run(url, tmp_path)
