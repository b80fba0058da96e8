"""Islands of two processes on the CPU, over gloo: FSDP2, which never has the whole model, and data-parallel."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.messages import Counters, Evaluation
from archipelago.broker.presence import Presence
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import start_server
from tests import pytorch
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import Processes
from tests.islands.user_loop.any_framework import Values, merged_by, served

torch = pytorch.required()

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = Path(__file__).with_name("two_torch_processes.py")

#: The scenarios of the script in order, and how many contributions of its run are merged at least; None without a run.
SCENARIOS = {"bits": None, "refused": None, "replicated": 4, "island": 13, "stopped": 0, "deaf": 0, "lost": 0}


@dataclass(frozen=True)
class Played:
    """What each process found in a scenario, and the last counters and heartbeats of its run."""

    found: list[dict[str, Any]]
    counters: Counters = field(default_factory=Counters)
    beats: Sequence[Presence] = ()
    merged: Values = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()

    def sums(self, dtype: Any) -> list[float]:
        """Return the sum of each of the run's tensors in a dtype, in the order of the module."""
        return [float(torch.from_numpy(values).to(dtype).double().sum()) for values in self.merged.values()]

    @property
    def islands(self) -> set[str]:
        return {beat.heartbeat.island for beat in self.beats}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, until: Until, forks: Forks) -> dict[str, Played]:
    """Run all scenarios in two processes, and merge their runs."""
    folder = tmp_path_factory.mktemp("processes")
    with start_server(folder / "redis") as server:
        process = Processes(folder).fork(forks, str(SCRIPT), str(folder), server.url)

        def found(scenario: str) -> list[dict[str, Any]]:
            files = [folder / f"{scenario}-{rank}.json" for rank in range(1 if scenario == "lost" else 2)]
            until(lambda: all(map(Path.exists, files)) or process.poll() is not None, f"the scenario {scenario}")
            return [json.loads(file.read_text()) for file in files]

        def merged(scenario: str, least: int) -> Played:
            reader = connect(server.url, scenario).reader
            until(lambda: reader.uid() or process.poll() is not None, f"the run {scenario}")
            with served(server.url, scenario) as merger:
                said = found(scenario)
                until(lambda: reader.counters().merged >= least, f"the contributions of {scenario}")
            return Played(said, reader.counters(), reader.presences(), merged_by(merger), reader.evaluations())

        try:
            out = {
                name: Played(found(name)) if least is None else merged(name, least) for name, least in SCENARIOS.items()
            }
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
    return out


def two_processes_send_and_adopt_the_bits_of_one_device(played: dict[str, Played]) -> None:
    leader, other = played["bits"].found
    assert leader["different"] == other["different"] == []


def wrong_use_is_refused_in_every_process(played: dict[str, Played]) -> None:
    leader, other = played["refused"].found
    of_all = {
        "calls": "loop.not-together",
        "twice": "loop.sharded",
        "meshes": "loop.sharded",
        "first fsdp": "loop.sharded",
        "unwrapped": "loop.sharded",
    }
    assert leader == {**of_all, "nan": "loop.not-finite", "no run": "broker.unknown-run"}
    assert other == {**of_all, "nan": "loop.leader-left", "no run": "loop.leader-left"}


def data_parallel_processes_have_the_same_bits(played: dict[str, Played]) -> None:
    run = played["replicated"]
    leader, other = run.found
    assert leader == other, "clock, parameters, moments and evaluations"
    assert leader["alone"] == "loop.not-together", "`final` in one process does not wait for ever"
    assert leader["travels"] == [True, False], "a state of one layout only"
    require_evaluated(run, leader)
    assert run.evaluations[-1].round > 0, "the final parameters"
    assert sorted(leader["sums"]) == sorted(run.sums(torch.bfloat16))
    assert (leader["step"][0] >= 120, leader["step"][1]) == (True, "completed")
    assert run.counters.refused == 0
    assert run.islands <= {"both"}


def require_evaluated(run: Played, leader: dict[str, Any]) -> None:
    """Check that what the leader found was recorded."""
    recorded = [each.bits_per_byte * math.log(2.0) for each in run.evaluations]
    assert recorded == pytest.approx(leader["evaluated"])
    assert len(recorded) > 0
    assert {each.by for each in run.evaluations} == {"both"}


def an_island_of_two_processes_creates_trains_gives_and_takes(played: dict[str, Played]) -> None:
    run = played["island"]
    leader, other = run.found
    assert leader["new"] == other["new"] == [True, False]
    assert leader["weights"] == other["weights"]
    assert leader["evaluated"] == other["evaluated"]
    require_evaluated(run, leader)
    assert leader["step"] == other["step"] > 0
    assert leader["reason"] == other["reason"] == "left"
    assert leader["alone"] == "peer both", "one process takes the state of two"
    assert leader["moments"] == "peer alone", "two processes take the state of one"
    assert leader["has_moments"]
    assert other["has_moments"]
    assert leader["steps"] == other["steps"]
    assert min(leader["steps"]) > 0
    assert run.counters.refused == 0
    assert run.islands <= {"both", "again", "alone"}


def sigterm_ends_all_processes_at_one_step_with_their_progress_sent(played: dict[str, Played]) -> None:
    for scenario, status in (("stopped", 0), ("deaf", 143)):
        run = played[scenario]
        (leader, other), (beat,) = run.found, run.beats
        assert leader == other | {"unsent": 0}
        assert sorted(leader["sums"]) == pytest.approx(sorted(run.sums(torch.float32)), rel=1e-12)
        assert (leader["steps"], leader["status"]) == (31, status)
        assert leader["reason"] == "signalled"
        assert beat.heartbeat.state == "left"
        assert run.counters.published > 0
        assert beat.heartbeat.tokens_unsent == 0


def a_lost_process_ends_the_island(played: dict[str, Played]) -> None:
    run = played["lost"]
    assert run.found == [{"ended": "RuntimeError", "reason": "left"}]
    assert all(beat.heartbeat.state == "left" for beat in run.beats)


def test_each_scenario(played: dict[str, Played], subtests: pytest.Subtests) -> None:
    """This is one test, because two workers that shared tests would both play the scenarios."""
    for check in (
        two_processes_send_and_adopt_the_bits_of_one_device,
        wrong_use_is_refused_in_every_process,
        data_parallel_processes_have_the_same_bits,
        an_island_of_two_processes_creates_trains_gives_and_takes,
        sigterm_ends_all_processes_at_one_step_with_their_progress_sent,
        a_lost_process_ends_the_island,
    ):
        with subtests.test(check.__name__):
            check(played)
