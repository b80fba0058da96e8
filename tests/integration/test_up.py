"""`archipelago up` in real processes: what it trains, survives, reports and continues."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import whole
from archipelago.islands.checkpoint import FILE
from archipelago.merger.storage import MergerFolder
from archipelago.ops.watch.run_list import of_folder
from tests.conftest import Until, gone
from tests.harness.processes import SETTINGS, UNPACED, Processes, UpRun, children

pytestmark = [pytest.mark.full, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
#: The tests set another length once a run has begun. A call of `up` without this setting keeps it.
STEPS = 120
FIRST = f"--inner.steps={STEPS}"


def training(run: UpRun) -> dict[str, int]:
    """Return the training islands and their processes."""
    transport = connect(run.url, run.run)
    try:
        return {p.heartbeat.island: p.heartbeat.pid for p in transport.reader.presences() if p.is_training}
    finally:
        transport.close()


def set_steps(run: UpRun, steps: int) -> None:
    """Set the length of a run, as `archipelago steer` does."""
    transport = connect(run.url, run.run)
    whole(transport, transport.reader.manifest()).reader.steer({"inner.steps": str(steps)})
    transport.close()


def begin(run: UpRun, until: Until) -> None:
    """Wait until a run has begun, and let it go on for longer than the test."""
    until(lambda: run.rounds >= 1, "the first round")
    set_steps(run, 1_000_000)


class Phoenix(UpRun):
    """A run of two shards with checkpoints."""

    def __init__(self, processes: Processes, folder: Path, until: Until) -> None:
        super().__init__(folder)
        self.processes, self.until = processes, until
        self.checkpoints = MergerFolder(folder / "merger")

    def up(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        return self.processes.start(
            "up", f"--run={self.run}", "--shards=2", "--islands=2", "--checkpoint-every=4", "--evaluate-every=2",
            "--no-one-process", *SETTINGS, *options, **environment,
        )  # fmt: skip

    def kill(self, launcher: subprocess.Popen[str]) -> None:
        """Kill the launcher. Everything that it started must end."""
        assert launcher.poll() is None, f"it ended before it was killed: {self.processes.said(launcher)}"
        started = children(launcher)
        assert len(started) >= 4
        launcher.kill()
        launcher.wait()
        for each in started:
            if each.status() == "stopped":
                each.kill()
        self.until(lambda: all(gone(each.pid) for each in started), "everything to die")

    def kill_with_whole_checkpoint(self, launcher: subprocess.Popen[str]) -> int:
        """Kill everything once all islands have their part of a checkpoint. Return the last round in it."""

        def stopped() -> bool:
            """Stop the mergers, so that none begins another checkpoint before the kill, and look again."""
            if not self.is_whole():
                return False
            mergers = children(launcher, "/logs/merger")
            for merger in mergers:
                merger.suspend()
            if self.is_whole():
                return True
            for merger in mergers:
                merger.resume()
            return False

        self.until(stopped, "a checkpoint of all processes")
        self.kill(launcher)
        return self.covered()

    def is_whole(self) -> bool:
        """Return whether both shards have their parts of a checkpoint, and both islands their own."""
        return self.covered() > 0 and all((self.folder / "islands" / f"island-{n}" / FILE).exists() for n in range(2))

    def covered(self) -> int:
        """Return the last round in the newest checkpoint of both shards; 0 without one."""
        try:
            return max((image.round for image in self.checkpoints.newest()), default=0)
        except ConfigError:  # no checkpoint has the parts of all shards yet
            return 0


def test_a_run_survives_kills_the_loss_of_redis_an_interrupt_and_the_loss_of_its_checkpoints(
    processes: Processes, tmp_path: Path, until: Until
) -> None:
    """A standby takes the name and the log of the island that is killed, and is no island before that."""
    run = Phoenix(processes, tmp_path / "runs/phoenix", until)
    launcher = run.up(FIRST, "--standbys=1")
    begin(run, until)
    until(lambda: "ready" in run.log("standby-0"), "the standby")
    until(lambda: sorted(training(run)) == ["island-0", "island-1"], "both islands to train")
    (standby,) = children(launcher, "/logs/standby")
    (killed,) = (each for each in children(launcher) if each.pid == training(run)["island-1"])
    killed.kill()
    until(lambda: training(run).get("island-1") == standby.pid, "the standby to train as the island")
    for word in ("/logs/merger", "/redis/"):
        before = run.rounds
        children(launcher, word)[0].kill()
        until(lambda before=before: run.rounds > before + 4, f"rounds after {word} died")

    covered = run.kill_with_whole_checkpoint(launcher)
    shutil.rmtree(run.folder / "redis")
    processes.ended(run.up(), status=2)

    second = run.up("--resume")
    until(lambda: run.rounds > covered + 4, "rounds after the checkpoint")
    own = {"island-0": "own checkpoint", "island-1": "own checkpoint"}
    until(
        lambda: {island.name: island.optimizer_origin for island in run.view.islands} == own, "the islands' own moments"
    )
    steps = run.view.step + STEPS
    set_steps(run, steps)
    started = children(second)
    second.send_signal(signal.SIGINT)
    second.wait()  # its status depends on how far the run has come
    assert [entry.steps for entry in of_folder(tmp_path / "runs")] == [steps]
    assert all(gone(each.pid) for each in started)
    interrupted = run.report
    assert (interrupted["finished"], interrupted["pending"]) == (False, 0)
    shutil.rmtree(run.folder / "merger")
    shutil.rmtree(run.folder / "islands")

    processes.ended(run.up(**UNPACED))
    found = run.report
    assert found["finished"]
    assert found["pending"] == 0
    assert found["held_out_last"] < 0.7 * found["held_out_first"]
    assert found["rounds"] > interrupted["rounds"] > covered + 4
    assert found["islands"] > 0
    assert found["tokens_merged"] > interrupted["tokens_merged"]
    assert run.covered() > 0, "no checkpoint in the new folder"
    assert "Traceback" not in "".join(path.read_text() for path in (run.folder / "logs").iterdir())


def test_up_trains_the_task_of_the_guide(processes: Processes, tmp_path: Path, until: Until) -> None:
    """The first time, it is stopped before an island has joined, and ends everything."""
    run, steps, task = UpRun(tmp_path / "runs/bytes"), "--inner.steps=600", str(EXAMPLES / "task_bytes.py")
    args = ["up", "--task", task, "--run=bytes", "--islands=2", steps, "--evaluate-every=2", "--no-tensorboard"]
    stopped = processes.start(*args)
    until((run.folder / "logs" / "island-1.log").exists, "the islands to be started")
    started = children(stopped)
    stopped.send_signal(signal.SIGTERM)
    processes.ended(stopped, status=130)
    assert "joined" not in run.log("island-1")
    assert len(started) >= 3
    assert all(gone(each.pid) for each in started), "the Redis, the merger and the islands have ended"
    processes.ended(processes.start("up", "--run=bytes", steps), status=2)  # without its task, it cannot go on

    found = processes.run(*args, **UNPACED)
    assert found == run.report
    assert found["finished"]
    assert found["held_out_first"] > 5.4, "the untrained model knows 256 bytes"
    assert found["held_out_last"] < 3.0
    assert found["held_out_one_process"] < 3.0, "one process trained on as many tokens"
    assert found["pending"] == 0
    assert "repeat data" not in run.log("island-0")
