"""Real `archipelago` commands on this machine, and what a test reads of the run that they serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import psutil

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.transport import connect
from archipelago.islands.turn_log import STEP_VARIABLE
from archipelago.ops.watch.run_view import IslandView, RunView
from tests import samples
from tests.conftest import PATIENCE_SECONDS, gone
from tests.harness.forks import Forks, start

#: The settings of a small run of the corpus `small-text`.
SETTINGS = [
    "--data.corpus=small-text",
    "--data.shards=8",
    "--data.sequence-length=32",
    "--data.batch-size=4",
    "--data.held-out-sequences=32",
    "--inner.warmup-steps=5",
    "--sync.interval=12",
]

#: The shortest step of an island. Without a minimum, islands take all cores while a test waits for other processes.
PACE = {STEP_VARIABLE: "0.15"}
UNPACED = {STEP_VARIABLE: "0"}
#: A process that aborts, as a library may do at its exit, says where its threads were.
SAYS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


class Processes:
    """Starts commands, keeps their output, and ends them all.

    Args:
        folder: The working directory of the commands. What they write to stderr is kept there.
        prefix: A program whose arguments the commands are, such as one that enters a container.
        commands: Forks commands from a process that has loaded JAX, so variables that JAX reads then have no effect.
            None starts each as a user does.
        environment: Environment variables of all commands.
    """

    def __init__(self, folder: Path, *prefix: str, commands: Forks | None = None, **environment: str) -> None:
        self.folder, self.prefix, self.commands, self.environment = folder, prefix, commands, environment
        self.all: list[subprocess.Popen[str]] = []

    def start(self, verb: str, *args: str, **environment: str) -> subprocess.Popen[str]:
        """Start `archipelago` with these arguments."""
        if self.commands is None:
            return self.python("-P", "-m", "archipelago", verb, *args, **environment)
        forked: subprocess.Popen[str] = self.fork(self.commands, "-m", "archipelago", verb, *args, **environment)
        return forked

    def python(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        """Start Python with these arguments. Islands rest after each step, so that they leave time to others."""
        log = self.folder / f"process-{len(self.all)}.log"
        with log.open("w") as said:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, *args],
                cwd=self.folder,
                env={**os.environ, **SAYS, **PACE, **self.environment, **environment},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self.all.append(process)
        return process

    def fork(self, forks: Forks, *args: str, **environment: str) -> Any:
        """Start Python with these arguments as `python` does, from a process that has loaded what it needs."""
        log = self.folder / f"process-{len(self.all)}.log"
        process: Any = start(forks, log, {**os.environ, **SAYS, **PACE, **self.environment, **environment}, *args)
        self.all.append(process)
        return process

    def run(self, *args: str, **environment: str) -> Mapping[str, Any]:
        """Run a command to its end and return its JSON object."""
        found: Mapping[str, Any] = json.loads(self.ended(self.start(*args, "--json", **environment)))
        return found

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> str:
        """Wait until a command has ended with this status and without a traceback. Return what it has printed."""
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
        said = self.said(process)
        assert process.returncode == status, said
        assert "Traceback" not in said, said
        return printed

    def said(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"process-{self.all.index(process)}.log").read_text()

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    def show(self) -> None:
        """Write the end of what each command said. pytest shows it beside a test that failed."""
        for process in self.all:
            words = " ".join(str(word) for word in cast("list[str]", process.args))
            command = words.rpartition("archipelago.ops ")[2]
            sys.stdout.write(f"--- {command} (exit {process.returncode})\n{self.said(process)[-4000:]}\n")


def children(parent: subprocess.Popen[str], word: str = "") -> list[psutil.Process]:
    """Return the processes that a command has started, directly or not, with that word in the path of an open file.

    Processes that are forked all have one command line. The one that forks them is not returned: only it has no session
    of its own.
    """
    session, descendants = os.getsid(parent.pid), psutil.Process(parent.pid).children(recursive=True)
    found = [child for child in descendants if not gone(child.pid) and os.getsid(child.pid) != session]
    return [child for child in found if not word or any(word in file.path for file in child.open_files())]


def view(url: str, run: str) -> RunView:
    transport = connect(url, run)
    try:
        return samples.view_of(transport)
    finally:
        transport.close()


def seen_island(seen: RunView, name: str) -> IslandView:
    """Return the island of that name."""
    return next(island for island in seen.islands if island.name == name)


class UpRun:
    """What a test reads of a run under `up`, from its folder and from the Redis that `up` has started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder.name

    @property
    def url(self) -> str:
        """The URL of its Redis."""
        lines = (self.folder / "redis" / "server.conf").read_text().splitlines()
        settings = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
        return f"redis://:{settings['requirepass']}@127.0.0.1:{settings['port']}/0"

    @property
    def view(self) -> RunView:
        return view(self.url, self.run)

    @property
    def rounds(self) -> int:
        """The closed rounds; 0 while Redis is down."""
        try:
            return self.view.rounds
        except (OSError, ValueError, KeyError, BrokerError):
            return 0

    @property
    def report(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found

    def log(self, name: str) -> str:
        """Return what a worker has logged so far."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""
