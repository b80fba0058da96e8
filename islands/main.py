"""`archipelago island` and `python -m archipelago.islands`: joins a run with its URL, trains, leaves on SIGTERM."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from archipelago.broker.control import require_welcome
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.logs import Origin
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.process import AwaitedRun, guarded, keep_compiled, print_json, stop_on_signals
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.standby import READY, await_assignment

if TYPE_CHECKING:
    from archipelago.islands.prepared import PreparedIsland

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandOptions(WorkerOptions, AwaitedRun):
    """Join a run and train. Needs nothing but the Redis URL (and the run's name where that Redis has several)."""

    name: str | None = None
    """name of this island; default one of its own, kept over restarts if you name it"""
    folder: Path | None = None
    """where the island keeps its checkpoints for its own return; default runs/RUN/islands/NAME"""
    corpus: str | None = None
    """a corpus of this machine to train on instead of the run's: text that must not leave its site"""
    scan_steps: int = 0
    """inner steps between two step boundaries, as one compiled scan; 0 measures whether more than one pays"""
    step_seconds_min: float = 0.0
    """an inner step takes at least so many seconds: for trials of more islands than a machine has cores for"""
    standby: bool = False
    """load and compile everything, say `ready`, and join once a line on standard input says as whom"""
    json: bool = False
    """print one JSON object at the end"""


def main(options: IslandOptions) -> int:
    """Runs one island until the run's end or a signal; a standby, from when it is told which."""
    stopped = stop_on_signals()
    return _stand_by(options, stopped) if options.standby else _island(options, stopped)


def _stand_by(options: IslandOptions, stopped: Callable[[], bool]) -> int:
    options.log_as("standby", options.run)
    if options.name or options.folder:
        raise ConfigError(
            "a standby has no name or folder yet", "Leave --name and --folder for the line that it reads."
        )
    _require_sensible(options)
    if sys.stdin is None:
        raise ConfigError("a standby has no standard input", "It reads there as whom to join: leave it open.")
    prepared = _prepared(options, stopped)
    if stopped():
        return 0
    log.info(
        "ready to become an island of %s, after %.1f s of processor time", prepared.manifest.run, time.process_time()
    )
    with suppress(OSError):  # whoever does not read that may write all the same
        os.write(1, READY)
    assigned = await_assignment(sys.stdin.buffer, stopped)
    if assigned is None:
        return 0
    assigned.take()
    as_ours = dataclasses.replace(options, standby=False)
    island = tyro.cli(IslandOptions, prog="archipelago island", args=assigned.arguments, default=as_ours)
    if island.standby:
        raise ConfigError("a standby cannot become a standby", "Leave --standby out of the line that it reads.")
    return _island(island, stopped, prepared)


def _prepared(options: IslandOptions, stopped: Callable[[], bool]) -> PreparedIsland:
    """All that an island of this run loads and compiles."""
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    try:
        manifest = awaited(transport.reader.manifest)
        keep_compiled()

        import orbax.checkpoint  # noqa: F401 - with the modules below, what `_run` would wait for

        from archipelago.islands import (
            telemetry,  # noqa: F401
        )
        from archipelago.islands.prepared import prepare

        prepared = prepare(manifest, options.corpus)
        prepared.rehearse(transport, awaited, options.scan_steps)
    finally:
        transport.close()
    return prepared


def _require_sensible(options: IslandOptions) -> None:
    if options.scan_steps < 0:
        raise ConfigError(f"--scan-steps cannot be {options.scan_steps}", "Give a number of steps, or 0 to measure.")
    if not 0.0 <= options.step_seconds_min < math.inf:
        raise ConfigError(f"--step-seconds-min cannot be {options.step_seconds_min}", "Give seconds, or 0 for none.")


def _island(options: IslandOptions, stopped: Callable[[], bool], prepared: PreparedIsland | None = None) -> int:
    name = checked_name(
        options.name or f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}", "the island name"
    )
    origin = options.log_as(name, options.run, island=name)
    _require_sensible(options)
    summary = _run(options, name, stopped, origin, prepared)
    if options.json:
        print_json(summary)
    return 0


def _run(
    options: IslandOptions,
    name: str,
    stopped: Callable[[], bool],
    origin: Origin,
    prepared: PreparedIsland | None = None,
) -> dict[str, object]:
    began = time.process_time() if prepared else 0.0  # a standby's time before it was told is not this island's
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    origin.run = transport.run
    folder = options.folder or Path("runs") / transport.run / "islands" / name
    registry = options.registry()
    sinks = options.sinks(transport.run, name, "island", folder, "global_step")
    manifest = awaited(transport.reader.manifest)  # before JAX loads: a wrong name is answered at once
    require_welcome(awaited(transport.reader.control), name, manifest.run)  # before anything is claimed in that name
    keep_compiled()

    from archipelago.islands import telemetry
    from archipelago.islands.checkpoint import IslandStore
    from archipelago.islands.prepared import prepare, register_text
    from archipelago.islands.sync.rejoin import Rejoin
    from archipelago.islands.turn_log import TurnLog
    from archipelago.islands.worker import train

    loaded = time.process_time() - began
    if prepared is None or not prepared.fits(manifest, options.corpus):
        prepared = prepare(manifest, options.corpus)
    awaited(partial(register_text, prepared.corpus, transport, options.corpus))
    store = IslandStore(folder, manifest)
    returned = awaited(lambda: transport.island.claim_return(name))
    whole = store.find(*returned) if returned else None
    incarnation = uuid.uuid4().hex[:8]
    link = prepared.link(transport, f"{name}/{incarnation}")
    arrivals = awaited(link.join)
    island = prepared.island(name, incarnation, link, arrivals)
    island.on_marker = store.on_marker
    joined = time.process_time() - began
    rejoin = Rejoin(transport, store, island, arrivals)
    rejoin.ask()
    island.beat("joining")
    if registry is not None:
        registry.register(telemetry.IslandCollector(island))
    curves = CurveWriter(sinks, lambda: telemetry.point(island))
    island.pacer.step_seconds_min = options.step_seconds_min
    link.start()
    prepared.warm_up(island, options.scan_steps)
    compiled = time.process_time() - began
    rejoin.complete(whole)
    del arrivals, rejoin, whole  # the model as it was then: one more in memory
    curves.start()
    ready = time.process_time() - began
    log.info(
        "joined %s at round %s on %s, optimiser state: %s, %s steps a boundary, after %.1f s of processor time",
        manifest.run, island.ledger.closed, island.device, island.moments, island.scan_steps, ready,
        extra={"round": island.ledger.closed},
    )  # fmt: skip
    try:
        state = train(island, stopped, TurnLog.named_in(os.environ, incarnation))
    finally:
        link.stop()
        curves.close()  # of an island that has diverged, the last points are those that matter
    store.finish(island)
    log.info("%s after %s steps, %s tokens", state, island.totals.steps, f"{island.totals.tokens:,}")
    return {
        "island": name,
        "run": manifest.run,
        "state": state,
        "steps": island.totals.steps,
        "tokens": island.totals.tokens,
        "global_step": island.ledger.global_step,
        "moments": island.moments,
        "sent": link.sent,
        "refused": island.ledger.refused,
        "bytes_up": link.bytes_up,
        "bytes_down": link.bytes_down,
        "start_seconds": {
            "imports": loaded,
            "joining": joined - loaded,
            "programs": compiled - joined,
            "state": ready - compiled,
        },
    }


def entry() -> int:
    """`python -m archipelago.islands`."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])))
