"""The attacks on real processes: a merger, and islands that train on real text, with all commands of an operator."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.ops.launch.embedded_redis import Server
from tests.conftest import Until
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import ATTACKS, Attack, Scene
from tests.hostile.process_run import ProcessRun

pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.fixture(scope="module")
def process_run(
    server: Server, tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path, until: Until
) -> Iterator[ProcessRun]:
    """Return a run that all attacks of this module attack, one after the other."""
    started = ProcessRun(
        server.url, f"hostile-{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("hostile"), corpus_folder
    )
    started.await_training(until)
    yield started
    started.end()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_stops_no_process(process_run: ProcessRun, attack: Attack, until: Until) -> None:
    name = f"mallory-{attack.__name__}"[:40]
    attacker = Attacker(process_run.url, process_run.run, name)
    try:
        attack(Scene(attacker, process_run, until))
    finally:
        attacker.close()
    assert process_run.status() == 0
    process_run.assert_running()
