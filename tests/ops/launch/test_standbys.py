"""A standby takes the place of a child that died; if none is ready, the child is restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.launch import supervisor
from archipelago.ops.launch.supervisor import LONG_SECONDS, Child, IslandStandbys, stop_all
from tests.conftest import Until, gone
from tests.failing import failing

WAITS = """
import json, os, sys, time
print("ready", flush=True)
told = json.loads(sys.stdin.readline() or "null")
if told is None: sys.exit(0)
open(told["log"], "a").write(f"{os.getpid()} is {' '.join(told['arguments'])} {told['environment']}\\n")
time.sleep(600)
"""
LIVES = "import os, time; print(os.getpid(), 'began', flush=True); time.sleep(600)"


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IslandStandbys]:
    """Return a pool of one standby: a small Python program that is not loaded yet."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.0,))
    monkeypatch.setattr(supervisor, "REPLACED_SECONDS", 0.0)
    made = IslandStandbys(1, ["-c", WAITS], {}, tmp_path)
    yield made
    made.end()


@pytest.fixture
def island(pool: IslandStandbys, tmp_path: Path) -> Iterator[Child]:
    """Return a child with two words before its arguments, like `-m archipelago.islands`."""
    made = Child("oslo", ["-c", LIVES, "--name", "oslo"], {"SAID": "hello"}, tmp_path / "oslo.log")
    made.stand_in = pool.stand_in
    yield made
    stop_all([made], 0.0)


def pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def died(child: Child) -> int:
    """Kill its process, and return its ID."""
    assert child.process is not None
    child.process.kill()
    child.process.wait()
    return child.process.pid


def test_a_standby_replaces_a_child_that_dies_and_another_is_loaded(
    pool: IslandStandbys, island: Child, until: Until, tmp_path: Path
) -> None:
    pool.all[0].restarts = pool.all[0].failures = 2  # before it could be loaded
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    first, waiting = died(island), pid(pool.all[0])
    assert island.tend(time.monotonic())
    assert island.stood_in
    assert pid(island) == waiting != first
    assert island.restarts == 1
    said = f"{waiting} is --name oslo {{'SAID': 'hello'}}"
    until(lambda: said in (tmp_path / "oslo.log").read_text(), "its assignment")
    assert island.tend(time.monotonic()) == ""
    assert not pool.are_ready()
    assert pool.tend(1e18) == []
    until(pool.are_ready, "another")
    assert pid(pool.all[0]) != pid(island)
    assert (pool.all[0].restarts, pool.all[0].failures) == (0, 0), "a standby that was used has not failed"
    own, waiting = pid(island), pid(pool.all[0])
    pool.end()
    until(lambda: gone(waiting), "its end with the run")
    assert not gone(own)


def test_without_a_ready_standby_a_child_is_restarted(pool: IslandStandbys, island: Child, until: Until) -> None:
    pool.start()
    until(pool.are_ready, "a standby")
    died(pool.all[0])
    island.start()
    until(lambda: "began" in island.log.read_text(), "a start without the standby, which has died")
    died(island)
    assert island.tend(time.monotonic())
    assert not island.stood_in
    island.tend(time.monotonic())
    until(lambda: island.log.read_text().count("began") == 2, "its second process")
    assert len(pool.tend(time.monotonic())) == 1
    pool.tend(time.monotonic())
    until(pool.are_ready, "another standby")


def test_a_standby_that_cannot_be_loaded_is_an_error(pool: IslandStandbys, until: Until) -> None:
    pool.all[0].argv = ["-c", "import sys; sys.stderr.write('error: no such run\\n'); sys.exit(2)"]
    pool.start()
    assert not pool.are_ready()

    def failed() -> bool:
        pool.tend(time.monotonic())
        return bool(pool.all[0].failed)

    until(failed, "its failure")
    assert pool.all[0].failed == "error: no such run"
    with failing(ArchipelagoError, "up.worker-failed"):
        pool.are_ready()


def test_a_child_that_dies_at_every_start_gets_a_standby_only_after_a_pause(
    pool: IslandStandbys, island: Child, until: Until
) -> None:
    """The first time it gets one at once; then only after a pause, until it has lived for long."""
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    died(island)
    assert island.tend(time.monotonic())
    first = pid(island)
    pool.tend(1e18)
    until(pool.are_ready, "another")
    died(island)
    assert island.tend(time.monotonic())
    assert pid(island) == first, "it waits for the pause to end"
    island.tend(time.monotonic())
    assert island.stood_in
    assert pid(island) != first
    pool.tend(1e18)
    until(pool.are_ready, "another")
    died(island)
    second = pid(island)
    assert island.tend(time.monotonic() + LONG_SECONDS)
    assert pid(island) != second
