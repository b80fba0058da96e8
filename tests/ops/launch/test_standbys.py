"""A standby becomes the child that died; where none is ready, the child is started as ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.ops.launch import standbys, supervisor
from archipelago.ops.launch.standbys import Standby, Standbys, require_standbys
from archipelago.ops.launch.supervisor import LONG_SECONDS, Child, stop_all
from tests.conftest import Until, gone

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
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standbys]:
    """One standby, of a Python that is nothing more; it is not loaded yet."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.0,))
    monkeypatch.setattr(standbys, "REPLACED_SECONDS", 0.0)
    made = Standbys(0, [], {}, tmp_path)
    made.all = [Standby("standby-0", ["-c", WAITS], {}, tmp_path / "standby-0.log")]
    yield made
    made.end()


@pytest.fixture
def island(pool: Standbys, tmp_path: Path) -> Iterator[Child]:
    """A child with two words before its arguments, as `-m islands` has."""
    made = Child("oslo", ["-c", LIVES, "--name", "oslo"], {"SAID": "hello"}, tmp_path / "oslo.log")
    made.stand_in = pool.stand_in
    yield made
    stop_all([made], 0.0)


def pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def died(child: Child) -> int:
    """Kills its process, whose number it was."""
    assert child.process is not None
    child.process.kill()
    child.process.wait()
    return child.process.pid


def test_a_standby_takes_the_place_of_who_dies(pool: Standbys, island: Child, until: Until, tmp_path: Path) -> None:
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    first, waiting = died(island), pid(pool.all[0])
    assert island.tend(time.monotonic()).startswith("oslo died (SIGKILL), and a standby takes its place; its log: ")
    assert pid(island) == waiting != first
    assert island.restarts == 1
    said = f"{waiting} is --name oslo {{'SAID': 'hello'}}"
    until(lambda: said in (tmp_path / "oslo.log").read_text(), "it to know who it is")
    assert island.tend(time.monotonic()) == ""


def test_the_next_is_loaded_then(pool: Standbys, island: Child, until: Until) -> None:
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    died(island)
    island.tend(time.monotonic())
    assert not pool.are_ready()
    assert pool.tend(1e18) == []
    until(pool.are_ready, "another")
    assert pid(pool.all[0]) != pid(island)
    pool.tend(time.monotonic())
    assert pool.all[0].restarts == 0, "one that was used is none that failed"


def test_where_none_is_ready_it_is_started_as_ever(pool: Standbys, island: Child, until: Until) -> None:
    island.start()
    until(lambda: "began" in island.log.read_text(), "its first life")
    died(island)
    assert "starts again in 0 s" in island.tend(time.monotonic())
    island.tend(time.monotonic())
    until(lambda: island.log.read_text().count("began") == 2, "its second life")


def test_a_standby_that_has_died_is_no_help(pool: Standbys, island: Child, until: Until) -> None:
    pool.start()
    until(pool.are_ready, "a standby")
    died(pool.all[0])
    island.start()
    until(lambda: "began" in island.log.read_text(), "a start without it")
    assert "standby-0 died (SIGKILL)" in pool.tend(time.monotonic())[0]
    pool.tend(time.monotonic())
    until(pool.are_ready, "another")


def test_one_that_cannot_be_had_is_said(pool: Standbys, until: Until) -> None:
    pool.all[0].argv = ["-c", "import sys; sys.stderr.write('error: no such run\\n'); sys.exit(2)"]
    pool.start()
    assert not pool.are_ready()
    said: list[str] = []

    def given_up() -> bool:
        said.extend(pool.tend(time.monotonic()))
        return bool(pool.all[0].failed)

    until(given_up, "it to be given up")
    assert said[-1] == "standby-0 cannot go on: error: no such run"
    with pytest.raises(ArchipelagoError, match="standby-0 cannot be had: no such run"):
        pool.are_ready()


def test_what_else_it_says_does_no_harm(pool: Standbys, until: Until) -> None:
    pool.all[0].argv = ["-c", "print('hello' * 9000, flush=True)\n" + WAITS]
    pool.start()
    until(pool.are_ready, "a standby")


def test_who_dies_at_every_start_does_not_use_them_up(pool: Standbys, island: Child, until: Until) -> None:
    """The first time one helps; after that it is started after a pause, until it has lived for long."""
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    died(island)
    assert "a standby takes its place" in island.tend(time.monotonic())
    pool.tend(1e18)
    until(pool.are_ready, "another, which is not given at once")
    died(island)
    assert "starts again in 0 s" in island.tend(time.monotonic())
    island.tend(time.monotonic())
    assert island.stood_in, "after the pause it is"
    pool.tend(1e18)
    until(pool.are_ready, "another")
    died(island)
    assert "a standby takes its place" in island.tend(time.monotonic() + LONG_SECONDS)


def test_those_that_are_no_islands_end_with_the_run(pool: Standbys, island: Child, until: Until) -> None:
    pool.start()
    until(pool.are_ready, "a standby")
    island.start()
    pool.tend(1e18)
    until(pool.are_ready, "another")
    own, waiting = pid(island), pid(pool.all[0])
    pool.end()
    until(lambda: gone(waiting), "its end")
    assert not gone(own)


@pytest.mark.parametrize("count", [-1, 65])
def test_how_many_there_can_be(count: int) -> None:
    with pytest.raises(ConfigError, match="--standbys cannot be"):
        require_standbys(count)
