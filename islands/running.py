"""The life of one island: connect, prepare, join, train, leave. Its metrics for Prometheus and its curves."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.control import require_welcome
from archipelago.broker.files import make_untracked
from archipelago.broker.manifest import loss_unit
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.logs import Origin
from archipelago.broker.observe.metrics import Health, family
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import REPLACED, keep_compiled, print_json
from archipelago.broker.shards.transport import whole
from archipelago.islands.options import IslandOptions, own_bucket, own_task, require_valid
from archipelago.islands.own_loop.session import island_name
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.recovery import Newcomer

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from archipelago.broker.transport import IslandTransport
    from archipelago.islands.evaluation import Evaluator
    from archipelago.islands.hosts.leader import HostLeader
    from archipelago.islands.prepared import PreparedIsland
    from archipelago.islands.worker import Island

log = logging.getLogger(__name__)


def run_island(
    options: IslandOptions,
    stopped: Callable[[], bool],
    prepared: PreparedIsland | None = None,
    leader: HostLeader | None = None,
) -> int:
    name = island_name(options.url, options.name, "--name")
    origin = options.log_as(name, options.run, island=name)
    require_valid(options)
    summary = run_named(options, name, stopped, origin, prepared, leader)
    if options.json:
        print_json(summary)
    if summary["state"] == "replaced":
        return REPLACED
    # An operator who asked the island to leave does not want it back, unlike a launcher that needs its machine.
    return options.stopped_status if summary["state"] == "left" and stopped() else 0


def run_named(
    options: IslandOptions,
    name: str,
    stopped: Callable[[], bool],
    origin: Origin,
    prepared: PreparedIsland | None = None,
    leader: HostLeader | None = None,
) -> dict[str, object]:
    began = time.process_time() if prepared else 0.0  # the time before a standby's assignment does not count
    awaited = options.patience(stopped)
    health = Health()
    registry = options.registry(health)
    home = awaited(options.connect)
    origin.run = home.run
    folder = options.folder or Path("runs") / home.run / "islands" / name
    manifest = awaited(home.reader.manifest)  # before JAX loads, so that a wrong name fails at once
    transport = whole(home, manifest)
    task = own_task(options, manifest)
    # Before the island claims anything under that name.
    require_welcome(awaited(transport.reader.control), name, manifest.run)
    bucket = own_bucket(options, transport.run, name)
    keep_compiled()
    if leader is not None:
        leader.assemble(manifest, awaited.seconds, stopped)

    from archipelago.islands.checkpoint import IslandStore
    from archipelago.islands.prepared import prepared_for
    from archipelago.islands.turn_log import TurnLog
    from archipelago.islands.worker import train

    end_of_imports()
    loaded = time.process_time() - began
    with progress("opening the data and building the model"):
        prepared = prepared_for(options, manifest, task, prepared)
    if leader is not None:
        prepared.share(leader)
    with suppress(OSError):  # An island trains without checkpoints where it cannot write.
        make_untracked(folder)
    store = IslandStore(folder, manifest, bucket)
    incarnation = uuid.uuid4().hex[:8]
    link = Link(transport, manifest, f"{name}/{incarnation}", ())
    with progress(f"downloading the {manifest.parameters:,} parameters"):
        arrivals = awaited(link.join)
    with progress("placing the parameters on the device"):
        island = prepared.island(
            name, incarnation, link, arrivals, options.scan_steps, lambda of, _: store.on_marker(of)
        )
    if leader is not None:
        leader.island = island
    joined = time.process_time() - began
    del arrivals  # another copy of the model
    rejoin = Newcomer(transport, island)
    rejoin.ask()
    island.beat("joining")
    if registry is not None:
        registry.register(IslandCollector(island))
    curves = CurveWriter(options.event_file(folder), lambda: point(island))
    island.pacer.step_seconds_min = options.step_seconds_min
    link.pumps.start()
    evaluator = _evaluator(options, prepared, transport, link, curves)
    with progress("compiling the inner steps"):
        island.warm_up()
    compiled = time.process_time() - began
    with progress("taking the optimiser state"):
        rejoin.complete(store)
    curves.start()
    ready = time.process_time() - began
    log.info(
        "joined %s at round %s on %s, optimiser state: %s, %s steps a boundary, after %.1f s of processor time",
        manifest.run, island.ledger.closed, island.host.device, island.moments, island.scan_steps, ready,
        extra={"round": island.ledger.closed},
    )  # fmt: skip
    try:
        watched = health.watched(stopped, lambda: "training")
        state = train(island, watched, TurnLog.named_in(os.environ, incarnation))
        health.leave()
        if evaluator is not None:
            evaluator.stop()
            if state == "done":
                with progress("evaluating the final parameters"):
                    evaluator.finish(stopped)
    finally:
        link.pumps.stop()
        curves.close()  # the last points matter most after a divergence
    if state == "replaced":
        store.close()
    else:
        with progress("writing the last checkpoint"):
            store.finish(island)
    log.info("%s after %s steps, %s tokens", state, island.totals.steps, f"{island.totals.tokens:,}")
    seconds = {
        "imports": loaded, "joining": joined - loaded, "programs": compiled - joined, "state": ready - compiled
    }  # fmt: skip
    return _summary(island, state) | {"start_seconds": seconds}


def end_of_imports() -> None:
    """Begin to collect garbage, if the process has not yet. What was imported lives as long as the process."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _summary(island: Island, state: str) -> dict[str, object]:
    """Return what the island has done, for `--json`."""
    link = island.link
    return {
        "island": island.name,
        "run": island.manifest.run,
        "state": state,
        "steps": island.totals.steps,
        "tokens": island.totals.tokens,
        "global_step": island.ledger.global_step,
        "moments": island.moments,
        "sent": link.channels.sent,
        "refused": island.ledger.refused,
        "bytes_up": link.channels.bytes_up,
        "bytes_down": link.channels.bytes_down,
    }


def _evaluator(
    options: IslandOptions, prepared: PreparedIsland, transport: IslandTransport, link: Link, curves: CurveWriter
) -> Evaluator | None:
    """Start the evaluations of this island; None if it makes none."""
    from archipelago.islands.evaluation import Evaluator

    evaluation = prepared.workload.evaluation() if options.evaluate_every else None
    if evaluation is not None and not prepared.evaluates_here:
        log.info("this island evaluates nothing, because no device of its leader holds the whole model")
        return None
    if evaluation is None:
        return None
    evaluator = Evaluator(
        transport,
        prepared.manifest,
        link.who,
        evaluation,
        link.channels.all_held,
        options.evaluate_every,
        curves,
        place=prepared.place,
    )
    evaluator.start()
    return evaluator


def point(island: Island) -> tuple[int, Mapping[str, float]] | None:
    """Return the global step and the values that curves show, or None while the island does not train."""
    beat = island.link.heartbeat
    if beat is None or beat.state != "training":
        return None
    return beat.global_step, {
        "loss": loss_unit(island.manifest.corpus).from_nats(beat.loss),
        "learning_rate": island.learning_rate,
        "tokens_per_second": beat.tokens_per_second,
        "step_seconds": beat.step_seconds or math.nan,
        "staleness": beat.staleness,
    }


@dataclass(frozen=True)
class IslandCollector:
    """Reads an island's state at each scrape; yields nothing before its first heartbeat."""

    island: Island

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        island = self.island
        beat = island.link.heartbeat
        if beat is None:
            return
        unit = loss_unit(island.manifest.corpus)
        since = island.link.clock() - island.link.channels.arrived_at
        labels = {"run": island.manifest.run, "island": beat.island}
        for name, documentation, value in (
            ("steps_total", "Inner steps made, including those before the island rejoined.", beat.steps),
            ("tokens_total", "Tokens trained on, including those before the island rejoined.", beat.tokens),
            ("tokens_per_second", "Training speed, moving average.", beat.tokens_per_second),
            ("step_seconds", "Time of an inner step, moving average.", beat.step_seconds),
            ("global_step", "Global step of the run, as the island knows it.", beat.global_step),
            ("learning_rate", "Inner learning rate.", island.learning_rate),
            ("loss", f"Training loss in {unit.name}, mean since the last contribution.", unit.from_nats(beat.loss)),
            ("staleness_versions", "Newest version announced minus version held, mean over fragments.", beat.staleness),
            ("backlog_contributions", "Contributions that wait to be sent.", beat.backlog),
            ("sent_contributions_total", "Contributions that the broker has acknowledged.", beat.sent),
            ("refused_contributions_total", "Contributions that the merger has refused.", beat.refused),
            ("ignored_events_total", "Announcements that no merger of the run can have sent.", beat.ignored),
            ("sent_bytes_total", "Payload bytes sent.", beat.bytes_up),
            ("received_bytes_total", "Payload bytes received.", beat.bytes_down),
            ("link_up", "1 while the broker answers, else 0.", float(not island.link.pumps.trouble)),
            ("snapshot_age_seconds", "Time since the last snapshot arrived.", since if since < math.inf else math.nan),
        ):
            yield family(f"archipelago_island_{name}", documentation, labels, [(labels, value)])
