"""`archipelago island` and `python -m islands`: joins a run with its URL, trains, leaves on SIGTERM."""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from broker.errors import ConfigError
from broker.keys import checked_name
from broker.process import RunAddress, guarded, keep_compiled, log_to_stderr, print_json, stop_on_signals

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandOptions(RunAddress):
    """Join a run and train. Needs nothing but the Redis URL (and the run's name where that Redis has several)."""

    name: str | None = None
    """name of this island; default one of its own, kept over restarts if you name it"""
    folder: Path | None = None
    """where the island keeps its optimiser state for its own return; default runs/RUN/islands/NAME"""
    scan_steps: int = 0
    """inner steps between two step boundaries, as one compiled scan; 0 measures whether more than one pays"""
    json: bool = False
    """print one JSON object at the end"""


def main(options: IslandOptions) -> int:
    """Runs one island until the run's end or a signal."""
    stopped = stop_on_signals()
    name = checked_name(
        options.name or f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}", "the island name"
    )
    log_to_stderr(name)
    if options.scan_steps < 0:
        raise ConfigError(f"--scan-steps cannot be {options.scan_steps}", "Give a number of steps, or 0 to measure.")
    summary = _run(options, name, stopped)
    if options.json:
        print_json(summary)
    return 0


def _run(options: IslandOptions, name: str, stopped: Callable[[], bool]) -> dict[str, object]:
    transport = options.connect()
    manifest = transport.manifest()  # before JAX loads: a wrong name is answered at once
    keep_compiled()

    from islands import checkpoint
    from islands.batches import Batches
    from islands.corpus import open_corpus
    from islands.creation import describe
    from islands.device import best_scan_steps
    from islands.inner import compile_steps
    from islands.link import Link
    from islands.model import build
    from islands.worker import Island, train

    config = manifest.config
    corpus = open_corpus(manifest.corpus.name)
    manifest.require_same(describe(manifest.run, config, corpus.identity))
    link = Link(transport, manifest)
    arrivals = link.join()
    batches = Batches(corpus.train, config, link.claim, fallback=_number_of(name))
    steps = compile_steps(build(config.model.size), config.inner)
    island = Island(name, manifest, steps, batches, link, arrivals, scan_steps=options.scan_steps or 1)
    link.start()
    island.scan_steps = options.scan_steps or best_scan_steps(island)
    island.warm_up()
    folder = options.folder or Path("runs") / manifest.run / "islands" / name
    returned = checkpoint.restore(folder, island)
    log.info(
        "joined %s at round %s on %s%s, %s steps a boundary",
        manifest.run,
        island.ledger.closed,
        island.device,
        ", with its kept optimiser state" if returned else "",
        island.scan_steps,
    )
    state = train(island, stopped)
    link.stop()
    checkpoint.save(folder, island)
    log.info("%s after %s steps, %s tokens", state, island.totals.steps, f"{island.totals.tokens:,}")
    return {
        "island": name,
        "run": manifest.run,
        "state": state,
        "steps": island.totals.steps,
        "tokens": island.totals.tokens,
        "global_step": island.ledger.global_step,
        "sent": link.sent,
        "refused": island.ledger.refused,
        "bytes_up": link.bytes_up,
        "bytes_down": link.bytes_down,
    }


def _number_of(name: str) -> int:
    """A number of its own for each name: where an island without a shard would begin."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def entry() -> int:
    """`python -m islands`."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])))
