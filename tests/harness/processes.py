"""Real `archipelago` commands on this machine, and what a test reads of the run that they serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.transport import connect
from archipelago.ops.watch.run_view import IslandView, RunView, observe
from tests.conftest import PATIENCE_SECONDS

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


class Processes:
    """Starts commands, keeps their output, and ends them all.

    Args:
        folder: The working directory of the commands. What they write to stderr is kept there.
        prefix: A program whose arguments the commands are, such as one that enters a container.
        environment: Environment variables of all commands.
    """

    def __init__(self, folder: Path, *prefix: str, **environment: str) -> None:
        self.folder, self.prefix, self.environment = folder, prefix, environment
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        """Start `archipelago` with these arguments."""
        return self.python("-P", "-m", "archipelago.ops", *args, **environment)

    def python(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        log = self.folder / f"process-{len(self.all)}.log"
        with log.open("w") as said:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, *args],
                cwd=self.folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment, **environment},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
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


def view(url: str, run: str) -> RunView:
    transport = connect(url, run)
    try:
        return observe(transport, transport.reader.manifest())
    finally:
        transport.close()


def balanced(seen: RunView) -> bool:
    return seen.books.published == seen.books.merged + seen.books.refused + seen.pending


def seen_island(seen: RunView, name: str) -> IslandView:
    """Return the island of that name."""
    return next(island for island in seen.islands if island.name == name)


def rounds_of(config: Path, run: str) -> int:
    """Return the closed rounds of the run on the server with this config; 0 while the server is down."""
    try:
        return view(url_of(config), run).rounds
    except (OSError, StopIteration, BrokerError):
        return 0


def url_of(config: Path) -> str:
    """Return the URL of the server with this config."""
    port, password = (_setting(config, key) for key in ("port", "requirepass"))
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _setting(config: Path, key: str) -> str:
    return next(line.split()[1] for line in config.read_text().splitlines() if line.startswith(f"{key} "))
