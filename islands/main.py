"""`archipelago island` and `python -m archipelago.islands`: join a run, train, and leave on SIGTERM."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import tyro

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import guarded, keep_compiled, return_freed_memory, stop_on_signals
from archipelago.broker.shards.transport import whole
from archipelago.islands.hosts.island import follow_leader, lead
from archipelago.islands.hosts.membership import membership
from archipelago.islands.options import IslandOptions as IslandOptions
from archipelago.islands.options import require_valid
from archipelago.islands.running import run_island
from archipelago.islands.setup import own_placement, own_settings, own_task
from archipelago.islands.standby import READY, await_assignment

if TYPE_CHECKING:
    from archipelago.islands.prepared import PreparedIsland

log = logging.getLogger(__name__)


def main(options: IslandOptions) -> int:
    """Run one island until the end of the run or a signal. A standby waits for its assignment first."""
    return_freed_memory()
    stopped = stop_on_signals()
    if options.standby:
        return _stand_by(options, stopped)
    place = membership(options.coordinator, options.hosts, options.host_rank)
    if place is None:
        return run_island(options, stopped)
    return lead(options, place, stopped) if place.leads else follow_leader(options, place, stopped)


def _stand_by(options: IslandOptions, stopped: Callable[[], bool]) -> int:
    options.log_as("standby", options.run)
    if options.name or options.folder:
        raise ConfigError(
            "A standby has no name and no folder yet",
            "Give --name and --folder in the line that it reads.",
            code="standby.named",
        )
    require_valid(options)
    if sys.stdin is None:
        raise ConfigError("A standby needs its standard input", "Leave it open: the assignment arrives there.")
    prepared = _prepared(options, stopped)
    if stopped():
        return 0
    log.info(
        "ready to become an island of %s, after %.1f s of processor time", prepared.manifest.run, time.process_time()
    )
    with suppress(OSError):  # a supervisor may close this pipe and still write an assignment
        os.write(1, READY)
    assigned = await_assignment(sys.stdin.buffer, stopped)
    if assigned is None:
        return 0
    assigned.take()
    defaults = dataclasses.replace(options, standby=False)
    island = tyro.cli(IslandOptions, prog="archipelago island", args=assigned.arguments, default=defaults)
    if island.standby:
        raise ConfigError(
            "A standby cannot become a standby", "Leave --standby out of the line that it reads.", code="standby.nested"
        )
    return run_island(island, stopped, prepared)


def _prepared(options: IslandOptions, stopped: Callable[[], bool]) -> PreparedIsland:
    """Load and compile everything that an island of this run needs."""
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    try:
        manifest = awaited(transport.reader.manifest)
        task = own_task(options, manifest)
        keep_compiled()

        import orbax.checkpoint  # noqa: F401 - load it now, so that `_run` need not

        from archipelago.islands import (
            telemetry,  # noqa: F401
        )
        from archipelago.islands.prepared import prepare

        with progress("loading and compiling everything that an island needs"):
            prepared = prepare(
                manifest, options.corpus, task, own_placement(options, manifest), options.batch_size,
                own_settings(options, manifest),
            )  # fmt: skip
            prepared.rehearse(whole(transport, manifest), awaited, options.scan_steps)
    finally:
        transport.close()
    return prepared


def entry() -> int:
    """Run an island with the arguments of this process."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])), supervised=True)
