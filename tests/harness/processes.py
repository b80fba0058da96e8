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
    """Starts `archipelago` commands, keeps their output, and ends them all."""

    def __init__(self, folder: Path, *prefix: str) -> None:
        """Keep output in `folder`. The commands are arguments of `prefix`, if it is given."""
        self.folder, self.prefix = folder, prefix
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        log = self.folder / f"process-{len(self.all)}.log"
        with log.open("w") as said:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, "-P", "-m", "archipelago.ops", *args],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self.all.append(process)
        return process

    def run(self, *args: str, **environment: str) -> Mapping[str, Any]:
        """Run a command to its end and return its JSON object."""
        process = self.start(*args, "--json", **environment)
        out, _ = process.communicate()
        assert process.returncode == 0, self.said(process)
        found: Mapping[str, Any] = json.loads(out)
        return found

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
            _, _, command = words.partition("archipelago.ops ")
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
