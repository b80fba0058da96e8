"""The task of the guide, as it stands: `up` trains it in real processes, is interrupted, and goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Until, gone
from tests.harness.processes import Processes, rounds_of

pytestmark = [pytest.mark.full, pytest.mark.processes]

TASK = Path(__file__).parents[2] / "docs" / "examples" / "task_bytes.py"


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Start commands in an empty folder, and end them."""
    monkeypatch.chdir(tmp_path)
    started = Processes(tmp_path)
    yield started
    started.end()


def test_up_trains_the_task_of_the_guide(processes: Processes, tmp_path: Path, until: Until) -> None:
    args = ["up", "--task", str(TASK), "--run=bytes", "--islands=2", "--standbys=1", "--inner.steps=6000"]
    args += ["--evaluate-every=2", "--no-tensorboard"]
    first = processes.start(*args)
    config = tmp_path / "runs/bytes/redis/server.conf"
    until(lambda: rounds_of(config, "bytes") >= 4, "some rounds")
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130, processes.said(first)
    interrupted = json.loads((tmp_path / "runs/bytes/report.json").read_text())

    refused = processes.start("up", "--run=bytes", "--inner.steps=6000")
    assert refused.wait() == 2, "without its task, the run cannot go on"
    assert "Traceback" not in processes.said(refused)

    found = processes.run(*args)
    assert found["finished"]
    assert found["rounds"] > interrupted["rounds"] > 0
    assert found["held_out_first"] > 5.4, "the untrained model knows 256 bytes"
    assert found["held_out_last"] < 3.0
    assert found["held_out_one_process"] < 3.0, "one process trained on as many tokens"
    assert found["pending"] == 0
    logs = (tmp_path / "runs/bytes/logs/island-0.log").read_text()
    assert "optimiser state: own checkpoint" in logs or "optimiser state: peer" in logs
    assert "repeat data" not in logs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_up_that_is_stopped_before_an_island_has_joined_ends_everything(
    processes: Processes, tmp_path: Path, until: Until, number: signal.Signals
) -> None:
    process = processes.start("up", "--task", str(TASK), "--run=early", "--islands=2", "--no-tensorboard")
    log = tmp_path / "runs/early/logs/island-1.log"
    until(log.exists, "the islands to be started")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait() == 130, processes.said(process)
    assert "joined" not in log.read_text()
    assert len(started) >= 3
    assert all(gone(each.pid) for each in started), "the Redis, the merger and the islands have ended"


def test_a_mistake_in_a_task_ends_up_with_one_error(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(TASK.read_text().replace(").mean()", ")"))
    process = processes.start("up", "--task", "wrong.py", "--run=wrong")
    assert process.wait() == 2
    said = processes.said(process)
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists(), "nothing was started"
