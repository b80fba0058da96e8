"""Hostile moves that nobody listed, against a run with a real server. The seeds of findings are kept as examples."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings

from archipelago.ops.launch.embedded_redis import Server
from tests.conftest import Until
from tests.hostile.attacker import Attacker
from tests.hostile.moves import Move, hostile_moves, make
from tests.hostile.victims import ThreadedRun, assert_unharmed, standing
from tests.tiers import examples

#: An attacker makes its moves under a name of its own, so that the oracle can tell its tokens from those of others.
ATTACKERS = ("mallory", "trent")


@pytest.fixture(scope="module")
def threaded_run(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedRun]:
    """Return a run that all examples attack, one after the other."""
    folder = tmp_path_factory.mktemp("merger")
    started = ThreadedRun(server.url, f"generated-{uuid.uuid4().hex[:8]}", folder)
    yield started
    started.end()


@example([Move("contribution", (("global_step", 1 << 62),))])
@example([Move("contribution", (("tokens", 1 << 53), ("steps", 1 << 40)), "noise", 40)])
@example([Move("contribution", (("data", "0:99999999:end"),))])
@example([Move("heartbeat", (("step_seconds", 1e-300), ("state", "training")))])
@example([Move(kind) for kind in ("pointer", "raw", "not-a-stream", "not-a-heartbeat", "leases", "requests")])
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(hostile_moves())
def test_no_move_harms_the_run(threaded_run: ThreadedRun, until: Until, moves: list[Move]) -> None:
    before = standing(threaded_run)
    for name in ATTACKERS:
        attacker = Attacker(threaded_run.url, threaded_run.run, name, threaded_run.manifest)
        try:
            make(attacker, moves)
        finally:
            attacker.close()
    assert_unharmed(threaded_run, before, until)
