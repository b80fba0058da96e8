"""`archipelago island` and `python -m archipelago.islands`: join a run, train, and leave on SIGTERM; or stand by.

A standby is a process that has loaded and compiled everything an island needs, and waits for the island's name. A new
island takes seconds to load; a standby joins within a moment. The supervisor that starts it reads `ready` from its
standard output and later writes one line of JSON, an `Assignment`, to its standard input. No other island knows of a
standby before that. A standby ends when its input ends, and at once at a signal: it has nothing to save. Supervisors
import this module, so it does not import JAX.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tyro

from archipelago.broker.errors import ConfigError
from archipelago.broker.machine import return_freed_memory
from archipelago.broker.messages import adapter
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import guarded, stop_on_signals
from archipelago.broker.shards.transport import whole
from archipelago.islands.options import IslandOptions as IslandOptions
from archipelago.islands.options import own_task, require_valid
from archipelago.islands.running import end_of_imports, run_island
from archipelago.islands.team.hosts import host_rank, run_host

if TYPE_CHECKING:
    from archipelago.islands.prepared import PreparedIsland

log = logging.getLogger(__name__)


def main(options: IslandOptions) -> int:
    """Run one island until the end of the run or a signal. A standby waits for its assignment first."""
    return_freed_memory()
    if options.standby:
        return stand_by(options)
    stopped = stop_on_signals()
    here = host_rank(options.coordinator, options.hosts, options.host_rank)
    if here is None:
        return run_island(options, stopped)
    return run_host(options, here, stopped)


def entry() -> int:
    """Run an island with the arguments of this process."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])), supervised=True)


@dataclass(frozen=True)
class Assignment:
    """The island that a standby becomes.

    Attributes:
        arguments: The arguments of `archipelago island`, in addition to those of the standby.
        log: The file that replaces standard output and error; empty keeps them.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""

    def line(self) -> bytes:
        """Return the line that the standby reads."""
        fields = {"arguments": self.arguments, "environment": dict(self.environment), "log": self.log}
        return json.dumps(fields).encode() + b"\n"

    def take(self) -> None:
        """Give this process the environment and the log."""
        os.environ.update(self.environment)
        if self.log:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)


def assignment(line: bytes) -> Assignment:
    """Return the assignment in a line. Raises ConfigError for any other line."""
    try:
        found: Assignment = adapter(Assignment).validate_python(json.loads(line))
    except ValueError:  # also what pydantic raises
        raise ConfigError(
            f"A standby cannot read the line {line[:80].decode(errors='replace').strip()!r}",
            'Write one line such as {"arguments": ["--name", "oslo"], "environment": {}, "log": "oslo.log"}.',
            code="standby.assignment",
        ) from None
    return found


def stand_by(options: IslandOptions) -> int:
    """Load everything, wait for an assignment, and become that island."""
    options.log_as("standby", options.run)
    require_valid(options)
    if sys.stdin is None:
        raise ConfigError("A standby needs its standard input", "Leave it open: the assignment arrives there.")
    output = os.dup(1)
    os.dup2(2, 1)  # what a task prints while it is loaded is not the word that the supervisor awaits
    prepared = prepared_here(options)
    log.info(
        "ready to become an island of %s, after %.1f s of processor time", prepared.manifest.run, time.process_time()
    )
    os.write(output, b"ready\n")
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0
    stopped = stop_on_signals()
    os.dup2(output, 1)
    os.close(output)
    assigned = assignment(line)
    assigned.take()
    island = tyro.cli(IslandOptions, prog="archipelago island", args=assigned.arguments, default=options)
    return run_island(dataclasses.replace(island, standby=False), stopped, prepared)


def prepared_here(options: IslandOptions) -> PreparedIsland:
    """Load and compile everything that an island of this run needs."""
    awaited = options.patience(lambda: False)
    with closing(awaited(options.connect)) as transport:
        manifest = awaited(transport.reader.manifest)
        task = own_task(options, manifest)

        from archipelago.islands.prepared import prepared_for

        end_of_imports()
        with progress("loading and compiling everything that an island needs"):
            prepared = prepared_for(options, manifest, task)
            prepared.rehearse(whole(transport, manifest), awaited)
    return prepared
