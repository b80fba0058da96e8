"""`archipelago island` and `python -m islands`: joins a run with its URL, trains, leaves on SIGTERM."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from broker.control import require_welcome
from broker.errors import ConfigError, MismatchError
from broker.keys import checked_name
from broker.logs import Origin
from broker.manifest import Manifest
from broker.process import AwaitedRun, Patience, guarded, keep_compiled, print_json, programs_folder, stop_on_signals
from broker.scalars import Scalars
from broker.telemetry import WorkerOptions
from broker.transport import Transport

if TYPE_CHECKING:
    from islands.corpus import OpenCorpus
    from islands.programs import Programs

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
    json: bool = False
    """print one JSON object at the end"""


def main(options: IslandOptions) -> int:
    """Runs one island until the run's end or a signal."""
    stopped = stop_on_signals()
    name = checked_name(
        options.name or f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}", "the island name"
    )
    origin = options.log_as(name, options.run, island=name)
    if options.scan_steps < 0:
        raise ConfigError(f"--scan-steps cannot be {options.scan_steps}", "Give a number of steps, or 0 to measure.")
    if not 0.0 <= options.step_seconds_min < math.inf:
        raise ConfigError(f"--step-seconds-min cannot be {options.step_seconds_min}", "Give seconds, or 0 for none.")
    summary = _run(options, name, stopped, origin)
    if options.json:
        print_json(summary)
    return 0


def _run(options: IslandOptions, name: str, stopped: Callable[[], bool], origin: Origin) -> dict[str, object]:
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    origin.run = transport.run
    folder = options.folder or Path("runs") / transport.run / "islands" / name
    endpoint = options.endpoint()
    sinks = options.sinks(transport.run, name, "island", folder, "global_step")
    manifest = awaited(transport.manifest)  # before JAX loads: a wrong name is answered at once
    require_welcome(awaited(transport.control), name, manifest.run)  # before anything is claimed in that name
    keep_compiled()

    from islands import telemetry
    from islands.batches import Batches, shard_order
    from islands.checkpoint import IslandStore
    from islands.comeback import Comeback
    from islands.device import best_scan_steps
    from islands.diary import Diary
    from islands.inner import InnerSteps, compile_steps
    from islands.link import Link
    from islands.programs import Programs
    from islands.worker import Island, train

    loaded = time.process_time()
    config = manifest.config
    programs = Programs(programs_folder())
    corpus = _corpus(manifest, transport, options.corpus, awaited, programs)
    store = IslandStore(folder, manifest)
    returned = awaited(lambda: transport.claim_return(name))
    whole = store.find(*returned) if returned else None
    incarnation = uuid.uuid4().hex[:8]
    shards = shard_order(config.data.shards, config.seed, options.corpus or "")
    link = Link(transport, manifest, f"{name}/{incarnation}", shards)
    arrivals = awaited(link.join)
    batches = Batches(corpus.train, config, link.lease, fallback=_number_of(name))

    def make() -> InnerSteps:
        from islands.model import build  # with flax, which takes a quarter of a second

        return compile_steps(build(config.model), config.inner)

    steps = programs.keep(
        make, ("steps", config.model, config.inner), lambda state, tokens_nxBxT1, global_step: (state, 0), donate=(0,)
    )
    island = Island(name, manifest, steps, batches, link, arrivals, incarnation=incarnation, programs=programs)
    island.on_marker = store.on_marker
    joined = time.process_time()
    comeback = Comeback(transport, store, island, arrivals)
    comeback.ask()
    island.beat("joining")
    endpoint.families = lambda: telemetry.families(island)
    curves = Scalars(sinks, lambda: telemetry.point(island))
    island.pacer.step_seconds_min = options.step_seconds_min
    link.start()
    island.scan_steps = options.scan_steps or best_scan_steps(island)
    island.warm_up()
    compiled = time.process_time()
    comeback.complete(whole)
    del arrivals, comeback, whole  # the model as it was then: one more in memory
    curves.start()
    ready = time.process_time()
    log.info(
        "joined %s at round %s on %s, optimiser state: %s, %s steps a boundary, after %.1f s of processor time",
        manifest.run, island.ledger.closed, island.device, island.moments, island.scan_steps, ready,
        extra={"round": island.ledger.closed},
    )  # fmt: skip
    try:
        state = train(island, stopped, Diary.named_in(os.environ, incarnation))
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


def _corpus(
    manifest: Manifest, transport: Transport, pinned: str | None, awaited: Patience, programs: Programs | None = None
) -> OpenCorpus:
    """The text to train on: the run's, or one that stays here. Raises MismatchError for another than is known."""
    from islands.corpus import open_corpus
    from islands.creation import describe, require_readable

    corpus = open_corpus(pinned or manifest.corpus.name)
    ours = manifest.corpus if pinned else corpus.identity
    manifest.require_same(describe(manifest.run, manifest.config, ours, programs))
    require_readable(manifest.config, corpus, manifest.corpus.tokenizer, programs)
    if pinned:
        theirs = awaited(lambda: transport.register_corpus(pinned, corpus.digest))
        if theirs != corpus.digest:
            raise MismatchError(
                f"corpus {pinned!r}", theirs, corpus.digest,
                "Another island trains on a text of the same name: prepare this one under another (--name).",
            )  # fmt: skip
    return corpus


def _number_of(name: str) -> int:
    """A number of its own for each name: where an island without a shard would begin."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def entry() -> int:
    """`python -m islands`."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])))
