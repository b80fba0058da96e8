"""The task of the guide, as it stands: `up` trains it in real processes, is interrupted, and goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Until
from tests.integration.test_processes import Processes, rounds_of

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
    assert found["pending"] == 0
    logs = (tmp_path / "runs/bytes/logs/island-0.log").read_text()
    assert "optimiser state: own checkpoint" in logs or "optimiser state: peer" in logs
    assert "repeat data" not in logs


def test_a_mistake_in_a_task_ends_up_with_one_error(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(TASK.read_text().replace(").mean()", ")"))
    process = processes.start("up", "--task", "wrong.py", "--run=wrong")
    assert process.wait() == 2
    said = processes.said(process)
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists(), "nothing was started"
