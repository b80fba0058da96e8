"""Trainers of all kinds as real processes on a real server: one run of all, kills, signals, and several processes."""

from __future__ import annotations

import json
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago.broker.machine import LOOPBACK, free_port
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import pytorch
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import UNPACED, Processes
from tests.islands.user_loop.any_framework import Values, merged_by, served

for package in ("torch", "transformers", "lightning", "accelerate"):
    pytorch.required(package)

from tests.islands.trainers.trainer_scripts import SPLIT, SPLIT_STEPS, SYNC, Network  # noqa: E402 - it imports torch

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = str(Path(__file__).with_name("trainer_scripts.py"))
TRAINERS = ("transformers", "lightning", "accelerate")
ENDLESS = 1_000_000
ENVIRONMENT: dict[str, Any] = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **UNPACED}


class Run:
    """A run on the server, and the scripts that train it."""

    def __init__(self, url: str, folder: Path, steps: int = ENDLESS) -> None:
        self.url, self.name, self.steps = url, f"kinds-{uuid.uuid4().hex[:8]}", steps
        self.processes = Processes(folder, **ENVIRONMENT)
        archipelago.pytorch.create(url, self.name, Network(), steps=steps, sync=SYNC)
        self.reader = connect(url, self.name).reader

    def start(self, kind: str) -> Any:
        """Start a script as a user does."""
        return self.processes.python(SCRIPT, *self._arguments(kind))

    def fork(self, forks: Forks, kind: str, island: str = "", **environment: str) -> Any:
        return self.processes.fork(forks, SCRIPT, *self._arguments(kind, island), **environment)

    def fork_two(self, forks: Forks, kind: str) -> list[Any]:
        """Start two processes of a script, as `torchrun` does."""
        place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": self.name}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **place}
        return [self.fork(forks, kind, RANK=str(n), LOCAL_RANK=str(n), **sizes) for n in range(2)]

    def _arguments(self, kind: str, island: str = "") -> list[str]:
        return [kind, self.url, self.name, island or kind, str(self.steps)]

    def end(self) -> None:
        """End all scripts. pytest shows what they said beside a test that failed."""
        self.processes.end()
        self.processes.show()

    def live(self) -> dict[str, str]:
        """Return the islands that train now: the incarnation of each name."""
        beats = [each.heartbeat for each in self.reader.presences() if each.is_live]
        return {beat.island: beat.incarnation for beat in beats if beat.state == "training"}

    def shorten(self) -> None:
        """Let the run end soon."""
        heads = [head.step for head in self.reader.heads() if head is not None]
        self.reader.steer({"inner.steps": str(max(heads) + 40)})


@pytest.fixture
def run(server: RedisServer, tmp_path: Path) -> Iterator[Run]:
    made = Run(server.url, tmp_path)
    try:
        yield made
    finally:
        made.end()


def same(printed: str, merged: Values, key: str = "weights") -> bool:
    """Return whether what a script printed at its end, once in each process, are the run's parameters.

    A progress bar may stand before it, and the other process after it, in the same line.
    """
    found = [json.loads(text) for text in re.findall(rf'"{key}": (\{{[^{{}}]*\}})', printed)]
    sums = {name: float(values.sum(dtype=np.float64)) for name, values in merged.items()}
    return bool(found) and all(each == pytest.approx(sums) for each in found)


def test_one_run_of_all_kinds_survives_a_kill_of_each(run: Run, forks: Forks, until: Until) -> None:
    kinds = {*TRAINERS, "plain"}
    with served(run.url, run.name) as merger:
        alive = {kind: run.fork(forks, kind) for kind in kinds}
        until(lambda: set(run.live()) == kinds, "all islands to train")
        for kind in kinds:
            alive[kind].kill()
            before, merged = run.live()[kind], run.reader.counters().merged
            alive[kind] = run.fork(forks, kind)
            until(lambda merged=merged: run.reader.counters().merged > merged + 4, f"the run to go on without {kind}")
            until(lambda kind=kind, before=before: run.live().get(kind, before) != before, f"{kind} to train again")
        run.shorten()
        printed = {kind: run.processes.ended(script) for kind, script in alive.items()}
        values = merged_by(merger)
    assert all(same(each, values) for each in printed.values()), "all end with the run's parameters"
    counters = run.reader.counters()
    assert counters.published == counters.merged + counters.refused
    assert counters.published_tokens == counters.merged_tokens + counters.refused_tokens


def test_signals_and_exceptions_leave_as_in_a_script(run: Run, forks: Forks, until: Until) -> None:
    """Two islands of each kind train together, and then one of each."""
    with served(run.url, run.name):
        for sent, each_kind in ((signal.SIGTERM, "ab"), (signal.SIGINT, "a")):
            names = [(kind, f"{kind}-{letter}") for kind in TRAINERS for letter in each_kind]
            started = {name: run.fork(forks, kind, name) for kind, name in names}
            until(lambda started=started: set(run.live()) == set(started), "all islands to train")
            merged = run.reader.counters().merged
            until(lambda merged=merged: run.reader.counters().merged > merged + 4, "their contributions")
            for script in started.values():
                script.send_signal(sent)
            until(lambda: not run.live(), f"all islands to leave after {sent.name}")
            for script in started.values():
                script.wait()
            beats = [each.heartbeat for each in run.reader.presences()]
            assert {beat.state for beat in beats} == {"left"}
            # Ctrl-C may hit a `sync`, and then the parameters are adopted in part.
            torn = {note.who for note in run.reader.notes(len(beats)) if "KeyboardInterrupt" in note.text}
            unsent = {beat.island for beat in beats if beat.tokens_unsent} - (torn if sent is signal.SIGINT else set())
            assert not unsent, "the newest progress is sent"
        with pytest.raises(AssertionError):
            run.processes.ended(run.start("broken"))
    assert "ZeroDivisionError: a bad step" in run.reader.notes(1)[0].text


@pytest.mark.parametrize("kind", TRAINERS)
def test_two_processes_of_a_trainer_are_one_island(run: Run, forks: Forks, until: Until, kind: str) -> None:
    archipelago.pytorch.create(run.url, run.name + SPLIT, Network(), steps=SPLIT_STEPS, sync=SYNC)
    with served(run.url, run.name) as merger, served(run.url, run.name + SPLIT) as other:
        started = run.fork_two(forks, kind)
        until(lambda: run.reader.counters().merged > 4, "its contributions")
        assert set(run.live()) == {kind}
        run.shorten()
        printed = "".join(map(run.processes.ended, started))
        values, split = merged_by(merger), merged_by(other)
    assert same(printed, values), "of DistributedDataParallel"
    assert same(printed, split, "split"), "of FSDP2"
    assert printed.count("weights") == 2
    said = "".join(map(run.processes.said, started))
    assert not re.findall(r"[^\r\n]\d\d:\d\d:\d\d archipelago", said), "lines go above bars"
    (beat,) = run.reader.presences()
    assert beat.heartbeat.tokens % 16 == 0
