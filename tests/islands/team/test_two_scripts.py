"""A script of two processes that is one island, beside an island of one process: sharded and replicated parameters."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import archipelago
from archipelago.broker.machine import free_port
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import start_server
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import Processes
from tests.islands.team.two_scripts import KINDS, STEPS, batch_of, first_state, step, values
from tests.islands.user_loop.any_framework import merged_by, served

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: A step of the island of one process is slower than one of the two, which so have their part in each round.
STEP_SECONDS = 0.04
#: While the two join, which takes long on a loaded machine, its steps are so slow that the run does not end.
JOIN_SECONDS = 0.5


class TwoScripts(Processes):
    """Two processes of a script with two devices each, which XLA makes of one processor."""

    close = Processes.end

    def __init__(self, folder: Path, url: str, commands: Forks) -> None:
        port, flags = str(free_port()), os.environ.get("XLA_FLAGS", "")
        super().__init__(folder, XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count=2")
        for rank in ("0", "1"):
            self.fork(commands, "-m", "tests.islands.team.two_scripts", rank, port, str(folder), url)

    def have_ended(self) -> bool:
        return any(process.poll() is not None for process in self.all)

    def all_said(self) -> str:
        return "\n".join(self.said(process)[-6000:] for process in self.all)


class Alone:
    """An island of one process, in a thread. It is there before the others begin."""

    def __init__(self, url: str, kind: str, folder: Path) -> None:
        self._url, self._kind, self._folder = url, kind, folder
        self._left = folder / f"{kind}.left"
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return not (self._thread.is_alive() or self._left.exists())

    def _train(self) -> None:
        params: Any = values(self._kind)
        state, number = first_state(params), 0
        joined = archipelago.join(self._url, self._kind, params, state=lambda: state, island="alone")
        with jax.numpy_dtype_promotion("standard"), joined as run:
            params = run.params
            while not run.finished:
                params, state, loss = step(params, state, batch_of(-number % 97))
                params = run.sync(params, tokens=8, loss=loss)
                number += 1
                (self._folder / f"{self._kind}.begun").touch()
                marker = self._folder / f"{self._kind}.{'both' if run.step <= STEPS // 2 else 'again'}"
                time.sleep(STEP_SECONDS if marker.exists() else JOIN_SECONDS)
        self._left.touch()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, until: Until, commands: Forks) -> dict[str, Any]:
    """Run all scenarios in two processes, and merge their runs. Return what each process found in each."""
    folder, out = tmp_path_factory.mktemp("scripts"), dict[str, Any]()
    with (
        start_server(folder / "redis") as server,
        closing(TwoScripts(folder, server.url, commands)) as both,
    ):

        def found(scenario: str, goes_on: Callable[[], bool] = lambda: True) -> list[dict[str, Any]]:
            files = [folder / f"{scenario}-{rank}.json" for rank in (0, 1)]
            until(
                lambda: all(map(Path.exists, files)) or both.have_ended() or not goes_on(), f"the scenario {scenario}"
            )
            assert all(map(Path.exists, files)), both.all_said()
            return [json.loads(file.read_text()) for file in files]

        out["refused"] = found("refused")
        for kind in KINDS:
            reader = connect(server.url, kind).reader
            until(lambda reader=reader: reader.uid() or both.have_ended(), f"the run {kind}")
            with served(server.url, kind) as merger:
                alone = Alone(server.url, kind, folder)
                out[kind] = found(kind, lambda alone=alone: not alone.has_failed)  # type: ignore[misc]
            out[f"{kind} run"] = reader.counters(), merged_by(merger), reader.presences(), reader.evaluations()
        out["lost"] = both.all[0].wait(), both.all_said()
    return out


def wrong_use_is_refused_in_every_process(played: dict[str, Any]) -> None:
    leader, other = played["refused"]
    of_all = {"mixed": "loop.sharded", "alone": "loop.sharded", "early": "loop.left"}
    assert leader == {**of_all, "nan": "loop.not-finite", "no run": "broker.unknown-run"}
    assert other == {**of_all, "nan": "loop.leader-left", "no run": "loop.leader-left"}


def two_processes_are_one_island_of_a_run(played: dict[str, Any], kind: str) -> None:
    leader, other = played[kind]
    counters, merged, beats, evaluations = played[f"{kind} run"]
    assert leader["created"] == other["created"] == [True, False]
    assert leader["origins"][1] == "peer alone"
    assert other["origins"][1] == "the leader"
    assert leader["counts"] == other["counts"]
    assert min(leader["counts"]) > 0, "the moments of a peer"
    assert leader["losses"] == other["losses"]
    assert leader["reason"] == other["reason"] == "completed"
    assert leader["seen"] == other["seen"], "the same parameters after each sync"
    assert leader["evaluated"] == other["evaluated"]
    assert [each.bits_per_byte * math.log(2.0) for each in evaluations] == pytest.approx(leader["evaluated"])
    assert {each.by for each in evaluations} <= {"both", "again"}
    assert leader["specs"] == [str(PartitionSpec(*KINDS[kind][name][0])) for name in sorted(KINDS[kind])]  # type: ignore[no-untyped-call]
    assert {beat.heartbeat.island for beat in beats} <= {"alone", "both", "again"}
    assert counters.refused == 0
    assert counters.merged > STEPS // 4, "the two have a part in the rounds"
    assert leader["final"] == other["final"]
    for name, expected in merged.items():
        dtype = KINDS[kind][name][1]
        np.testing.assert_array_equal(np.array(leader["final"][name], np.float32), expected.astype(dtype), err_msg=name)


def two_processes_evaluate_the_merged_parameters_together(played: dict[str, Any]) -> None:
    assert any(leader["evaluated"] for leader, _ in (played[kind] for kind in KINDS))


def a_lost_process_ends_the_island(played: dict[str, Any]) -> None:
    status, said = played["lost"]
    assert status != 0, said


def test_each_scenario(played: dict[str, Any], subtests: pytest.Subtests) -> None:
    """This is one test, because two workers that shared tests would both play the scenarios."""
    for check in (
        wrong_use_is_refused_in_every_process,
        two_processes_evaluate_the_merged_parameters_together,
        a_lost_process_ends_the_island,
    ):
        with subtests.test(check.__name__):
            check(played)
    for kind in KINDS:
        with subtests.test("two processes are one island of a run", kind=kind):
            two_processes_are_one_island_of_a_run(played, kind)
