"""A run of real processes under attack: a merger and islands that train on real text."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from archipelago.broker.redis.transport import connect
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes

LEASE_SECONDS = "1"
#: Faster islands would take the processor from the other tests, for as long as this run is attacked.
STEP_SECONDS = "0.02"


class ProcessRun:
    """A merger and islands as processes. See `victims.Victims`.

    Args:
        url: The address of the server, for the merger and the test.
        run: The name of the run, which is created.
        folder: Where the processes keep their files and logs.
        corpora: The folder with the corpus `small-text`.
        islands: The names of the islands.
        settings: Settings of the run besides those of every small run.
    """

    def __init__(
        self,
        url: str,
        run: str,
        folder: Path,
        corpora: Path,
        islands: tuple[str, ...] = ("ada", "bea"),
        settings: Sequence[str] = ("--inner.steps=1000000",),
    ) -> None:
        self.url, self.run, self.islands, self.folder = url, run, islands, folder
        self.environment = {"ARCHIPELAGO_DATA": str(corpora), "OMP_NUM_THREADS": "1"}
        self.processes = Processes(folder)
        self.processes.run("init", url, "--run", run, *SETTINGS, *settings, **self.environment)
        self.transport = connect(url, run)
        self.members = [self.start_island(name) for name in islands]
        self.mergers = [self.start_merger()]

    def start_island(self, name: str, url: str = "") -> subprocess.Popen[str]:
        """Start an island in a folder of its own."""
        folder = str(self.folder / "islands" / f"{name}-{len(self.processes.all)}")
        return self.processes.start(
            "island", url or self.url, "--run", self.run, "--name", name, "--folder", folder,
            "--step-seconds-min", STEP_SECONDS, **self.environment,
        )  # fmt: skip

    def start_merger(self) -> subprocess.Popen[str]:
        """Start a merger that writes checkpoints often."""
        return self.processes.start(
            "merger", self.url, "--run", self.run, "--folder", str(self.folder / "merger"), "--checkpoint-every", "3",
            "--lease-seconds", LEASE_SECONDS, **self.environment,
        )  # fmt: skip

    def await_training(self, until: Until) -> None:
        """Wait until all islands take part in rounds."""

        def training() -> bool:
            self.assert_running()
            tape = self.transport.reader.tape(20)
            return {m.island for entry in tape for m in entry.members} >= set(self.islands)

        until(training, "all islands to take part")

    def steps(self) -> int:
        beats = [p.heartbeat for p in self.transport.reader.presences() if p.heartbeat.island in self.islands]
        return max((beat.steps for beat in beats), default=0)

    def slowest(self) -> int:
        """Return the steps of the island that has made the fewest."""
        return min(p.heartbeat.steps for p in self.transport.reader.presences() if p.heartbeat.island in self.islands)

    def assert_running(self) -> None:
        for process in (*self.members, self.mergers[-1]):
            assert process.poll() is None, f"ended with {process.returncode}: {self.processes.said(process)}"
        self.assert_no_traceback()

    def assert_no_traceback(self) -> None:
        """Assert that no process has printed a traceback."""
        for process in self.processes.all:
            said = self.processes.said(process)
            assert "Traceback" not in said, said

    def stop_merger(self) -> None:
        self.mergers[-1].kill()
        self.mergers[-1].wait()

    def begin_merger(self) -> None:
        self.mergers.append(self.start_merger())

    def status(self) -> int:
        """Run `archipelago status --json`, and return its exit status."""
        shown = self.processes.start("status", self.url, "--run", self.run, "--json", **self.environment)
        out, _ = shown.communicate()
        assert out, self.processes.said(shown)
        return shown.returncode

    def end(self) -> None:
        """End all processes."""
        self.transport.close()
        self.processes.end()
