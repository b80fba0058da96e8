"""Attacks that once harmed a run, on a run whose merger and islands are threads, with a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from archipelago.ops.launch.embedded_redis import Server
from tests.conftest import Until
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import ATTACKS, Attack, Scene
from tests.hostile.victims import ThreadedRun

#: The share of a full flood that the quick tier sends.
SCALE = 0.05


@pytest.fixture
def threaded_run(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedRun]:
    """Return a run of its own for each attack."""
    folder = tmp_path_factory.mktemp("merger")
    started = ThreadedRun(server.url, f"hostile-{uuid.uuid4().hex[:8]}", folder)
    yield started
    started.end()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_stops_nobody(threaded_run: ThreadedRun, attack: Attack, until: Until) -> None:
    attacker = Attacker(threaded_run.url, threaded_run.run, manifest=threaded_run.manifest)
    try:
        attack(Scene(attacker, threaded_run, until, SCALE))
    finally:
        attacker.close()
