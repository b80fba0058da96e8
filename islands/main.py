"""`archipelago island` and `python -m archipelago.islands`: join a run, train, and leave on SIGTERM."""

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

from archipelago.broker.buckets.folder import BucketFolder, chosen
from archipelago.broker.config import BATCH_FACTOR_MAX
from archipelago.broker.control import require_welcome
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import make_untracked
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.health import Health
from archipelago.broker.observe.logs import Origin
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import (
    URL_VARIABLE,
    AwaitedRun,
    guarded,
    keep_compiled,
    print_json,
    require_role,
    return_freed_memory,
    stop_on_signals,
)
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.hosts.membership import Membership, membership
from archipelago.islands.mesh.shape import MeshShape, parsed
from archipelago.islands.own_memory import settings_here
from archipelago.islands.replaced import REPLACED_STATUS, remember, require_free
from archipelago.islands.standby import READY, await_assignment

if TYPE_CHECKING:
    from archipelago.broker.config import RunConfig
    from archipelago.broker.manifest import Manifest
    from archipelago.broker.transport import IslandTransport
    from archipelago.islands.evaluator import Evaluator
    from archipelago.islands.hosts.processes import Leading
    from archipelago.islands.mesh.placement import Placement
    from archipelago.islands.prepared import PreparedIsland
    from archipelago.islands.sync.connection.link import Link
    from archipelago.islands.tasks.file import TaskFile
    from archipelago.islands.worker import Island

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandOptions(WorkerOptions, AwaitedRun):
    """Join a run and train. An island needs only the Redis URL, and the run's name if that Redis has several runs."""

    name: str | None = None
    """The name of this island. The default is the one in its join file, else random. A given name stays the same over
    restarts.
    """
    folder: Path | None = None
    """The folder of the island's checkpoints. The default is runs/RUN/islands/NAME."""
    corpus: str | None = None
    """A corpus on this machine to train on instead of the run's, for text that must not leave its site."""
    task: str | None = None
    """The task of the run, FILE.py:NAME, if it trains a task of its users (docs/guide/your-training.md)."""
    mesh: str | None = None
    """How to use several devices of this machine, such as data=2,fsdp=2,tensor=1 (docs/guide/many-devices.md). By
    default all devices are on `data`: each has all parameters and its share of a batch.
    """
    batch_size: int = 0
    """The sequences of this island's inner step, where its devices are larger or smaller than those of others. Its
    weight follows the tokens that it trains on. 0: as many as the run's settings say.
    """
    micro_batches: int | None = None
    """Compute each batch in this many parts on this island, if its device has less memory than those of others. The
    default is the run's --inner.micro-batches.
    """
    rematerialise: bool | None = None
    """Compute layers again in the backward pass on this island, for the same reason. The default is the run's."""
    coordinator: str | None = None
    """The address of host 0 of an island over several hosts, such as node0:9000 (docs/guide/many-devices.md)."""
    hosts: int | None = None
    """The number of hosts of this island. All of them run this command. Slurm, Kubernetes and TPU hosts are detected,
    unless this is 1.
    """
    host_rank: int | None = None
    """The number of this host: 0 for the leader, which alone talks to Redis."""
    scan_steps: int = 0
    """The inner steps between two step boundaries, compiled as one scan. 0 measures and uses the fastest number."""
    step_seconds_min: float = 0.0
    """The minimum duration of an inner step, for trials of more islands than the machine has cores."""
    standby: bool = False
    """Load and compile everything, print `ready`, and join once a line on standard input names the island."""
    evaluate_every: float = 15.0
    """The seconds between two evaluations of the published parameters by this island, if it is the one that evaluates.
    They take at most 2 % of the device's time. 0: this island never evaluates.
    """
    json: bool = False
    """Print one JSON object at the end."""


def main(options: IslandOptions) -> int:
    """Run one island until the end of the run or a signal. A standby waits for its assignment first."""
    return_freed_memory()
    stopped = stop_on_signals()
    if options.standby:
        return _stand_by(options, stopped)
    place = membership(options.coordinator, options.hosts, options.host_rank)
    if place is None:
        return _island(options, stopped)
    return _lead(options, place, stopped) if place.leads else _follow(options, place, stopped)


def _lead(options: IslandOptions, place: Membership, stopped: Callable[[], bool]) -> int:
    """Run an island as the leader of its hosts."""
    from archipelago.islands.hosts.processes import Leading

    _require_valid(options)
    leading = Leading(place, *_shared(options))
    try:
        status = _island(options, lambda: stopped() or leading.team.is_stopping, leading=leading)
    except BaseException as error:
        leading.end(error=error)
        raise
    leading.end(status)
    return status


def _follow(options: IslandOptions, place: Membership, stopped: Callable[[], bool]) -> int:
    """Do what the leader of the hosts says until the island ends."""
    from archipelago.islands.hosts.processes import come, connect_devices

    options.log_as(f"host-{place.rank}", options.run)
    _require_valid(options)
    seat = come(place, *_shared(options), options.patience(stopped).seconds, stopped)
    manifest = connect_devices(place, seat)
    task = _task(options, manifest)

    from archipelago.islands.hosts.computing import SharedComputation, follow, most_bytes
    from archipelago.islands.hosts.coordinator import disconnect
    from archipelago.islands.prepared import prepare

    seat.most = most_bytes(manifest)
    placement, settings = _placement(options, manifest), _settings(options, manifest)
    prepared = prepare(manifest, options.corpus, task, placement, options.batch_size, settings)
    work = prepared.workload
    computation = SharedComputation(manifest, work.steps, work.begin, placement)
    status = follow(seat, computation, manifest, prepared.sample())
    disconnect()
    return status


def _shared(options: IslandOptions) -> tuple[dict[str, str], bytes]:
    """Return what all hosts of an island must have alike, and the key that strangers do not have."""
    from archipelago.islands.hosts.processes import alike, key_of

    flags = {
        "--run": options.run, "--mesh": options.mesh, "--corpus": options.corpus, "--batch-size": options.batch_size,
        "--micro-batches": options.micro_batches, "--rematerialise": options.rematerialise,
    }  # fmt: skip
    return alike(flags), key_of(options.url or os.environ.get(URL_VARIABLE, ""))


def _stand_by(options: IslandOptions, stopped: Callable[[], bool]) -> int:
    options.log_as("standby", options.run)
    if options.name or options.folder:
        raise ConfigError(
            "A standby has no name and no folder yet",
            "Give --name and --folder in the line that it reads.",
            code="standby.named",
        )
    _require_valid(options)
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
    return _island(island, stopped, prepared)


def _prepared(options: IslandOptions, stopped: Callable[[], bool]) -> PreparedIsland:
    """Load and compile everything that an island of this run needs."""
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    try:
        manifest = awaited(transport.reader.manifest)
        task = _task(options, manifest)
        keep_compiled()

        import orbax.checkpoint  # noqa: F401 - load it now, so that `_run` need not

        from archipelago.islands import (
            telemetry,  # noqa: F401
        )
        from archipelago.islands.prepared import prepare

        with progress("loading and compiling everything that an island needs"):
            prepared = prepare(
                manifest, options.corpus, task, _placement(options, manifest), options.batch_size,
                _settings(options, manifest),
            )  # fmt: skip
            prepared.rehearse(transport, awaited, options.scan_steps)
    finally:
        transport.close()
    return prepared


def _task(options: IslandOptions, manifest: Manifest) -> TaskFile | None:
    """Return the task that the island trains, if the run has one. This may import JAX."""
    if options.task is None and not manifest.task:
        manifest.require_own_code("`archipelago island`")
        return None
    if options.corpus is not None:
        raise ConfigError(
            "a task brings its own data, so --corpus would change nothing", "Leave it out.", code="task.setting"
        )
    keep_compiled()

    from archipelago.islands.tasks.file import task_of

    return task_of(options.task, manifest, "`archipelago island`")


def _settings(options: IslandOptions, manifest: Manifest) -> RunConfig:
    """Return the settings by which this island computes its inner steps."""
    return settings_here(manifest.config, options.micro_batches, options.rematerialise, options.batch_size)


def _require_valid(options: IslandOptions) -> None:
    options.require_status()
    if options.mesh is not None:
        parsed(options.mesh)
    if options.scan_steps < 0:
        raise ConfigError(
            f"--scan-steps is {options.scan_steps}",
            "Give a number of steps, or 0 to measure.",
            code="config.scan-steps",
        )
    if not 0.0 <= options.step_seconds_min < math.inf:
        raise ConfigError(
            f"--step-seconds-min is {options.step_seconds_min}",
            "Give seconds, or 0 for none.",
            code="config.step-seconds",
        )
    if not 0.0 <= options.evaluate_every < math.inf:
        raise ConfigError(
            f"--evaluate-every cannot be {options.evaluate_every}",
            "Give a number of seconds such as 15, or 0 for no evaluations.",
            code="config.evaluate-every",
        )


def _island(
    options: IslandOptions,
    stopped: Callable[[], bool],
    prepared: PreparedIsland | None = None,
    leading: Leading | None = None,
) -> int:
    name = _name(options)
    origin = options.log_as(name, options.run, island=name)
    _require_valid(options)
    summary = _run(options, name, stopped, origin, prepared, leading)
    if options.json:
        print_json(summary)
    if summary["state"] == "replaced":
        return REPLACED_STATUS
    # An operator who asked the island to leave does not want it back, unlike a launcher that needs its machine.
    return options.stopped_status if summary["state"] == "left" and stopped() else 0


def _name(options: IslandOptions) -> str:
    """Return the island's name. An invited island has the name in its join file, as only that may write as it."""
    invited = options.invitation()
    require_role(invited, "island")
    if invited is None:
        random = f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}"
        return checked_name(options.name or random, "the island name")
    if options.name not in (None, invited.name):
        raise ConfigError(
            f"the join file is the one of the island {invited.name!r}, not of {options.name!r}",
            "Leave out --name, or use the join file of that island.",
            code="invitation.other-name",
        )
    return invited.name


def _bucket(options: IslandOptions, run: str, name: str) -> BucketFolder | None:
    """Return the folder of the island's copies in a bucket. An island with a random name cannot come back to them."""
    if options.name is None and options.invitation() is None:
        if chosen(options.bucket):
            log.info("no copies in the bucket: without --name, the island cannot come back to them")
        return None
    return options.bucket_folder(run, "islands", name)


def _run(
    options: IslandOptions,
    name: str,
    stopped: Callable[[], bool],
    origin: Origin,
    prepared: PreparedIsland | None = None,
    leading: Leading | None = None,
) -> dict[str, object]:
    began = time.process_time() if prepared else 0.0  # the time before a standby's assignment does not count
    awaited = options.patience(stopped)
    health = Health()
    registry = options.registry(health)
    transport = awaited(options.connect)
    origin.run = transport.run
    folder = options.folder or Path("runs") / transport.run / "islands" / name
    sinks = options.sinks(transport.run, name, "island", folder, "global_step")
    manifest = awaited(transport.reader.manifest)  # before JAX loads, so that a wrong name fails at once
    task = _task(options, manifest)
    require_welcome(
        awaited(transport.reader.control), name, manifest.run
    )  # before the island claims anything under that name
    require_free(folder, name, awaited(transport.reader.presences))
    bucket = _bucket(options, transport.run, name)
    keep_compiled()
    if leading is not None:
        leading.assemble(manifest, awaited.seconds, stopped)

    from archipelago.islands import telemetry
    from archipelago.islands.checkpoint import IslandStore
    from archipelago.islands.prepared import prepare
    from archipelago.islands.rejoin import Rejoin
    from archipelago.islands.turn_log import TurnLog
    from archipelago.islands.worker import train

    loaded = time.process_time() - began
    placement, settings = _placement(options, manifest), _settings(options, manifest)
    if prepared is None or not prepared.fits(manifest, options.corpus, placement, options.batch_size, settings):
        with progress("opening the data and building the model"):
            prepared = prepare(manifest, options.corpus, task, placement, options.batch_size, settings)
    if leading is not None:
        prepared.share(leading.team)
    _tell_of_device(dataclasses.replace(manifest, config=settings), placement)
    awaited(partial(prepared.register, transport))
    with suppress(OSError):  # An island trains without checkpoints where it cannot write.
        make_untracked(folder)
    store = IslandStore(folder, manifest, bucket)
    if store.copier is not None:
        store.copier.start()
    returned = awaited(lambda: transport.island.claim_checkpoint(name))
    whole = store.find(*returned) if returned else None
    incarnation = uuid.uuid4().hex[:8]
    link = prepared.link(transport, f"{name}/{incarnation}")
    with progress(f"downloading the {manifest.parameters:,} parameters"):
        arrivals = awaited(link.join)
    with progress("placing the parameters on the device"):
        island = prepared.island(name, incarnation, link, arrivals, store.on_marker)
    if leading is not None:
        leading.island = island
    joined = time.process_time() - began
    rejoin = Rejoin(transport, store, island, arrivals)
    rejoin.ask()
    island.beat("joining")
    if registry is not None:
        registry.register(telemetry.IslandCollector(island))
    curves = CurveWriter(sinks, lambda: telemetry.point(island))
    island.pacer.step_seconds_min = options.step_seconds_min
    link.start()
    evaluator = _evaluator(options, prepared, transport, link, curves)
    with progress("compiling and measuring the inner steps"):
        prepared.warm_up(island, options.scan_steps)
    compiled = time.process_time() - began
    with progress("taking the optimiser state"):
        rejoin.complete(whole)
    del arrivals, rejoin, whole  # each holds another copy of the model
    curves.start()
    ready = time.process_time() - began
    log.info(
        "joined %s at round %s on %s, optimiser state: %s, %s steps a boundary, after %.1f s of processor time",
        manifest.run, island.ledger.closed, island.device, island.moments, island.scan_steps, ready,
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
        link.stop()
        curves.close()  # the last points matter most after a divergence
    if state == "replaced":
        remember(folder, name, link.replaced_by)
        store.close()
    else:
        with progress("writing the last checkpoint"):
            store.finish(island)
    log.info("%s after %s steps, %s tokens", state, island.totals.steps, f"{island.totals.tokens:,}")
    seconds = {
        "imports": loaded, "joining": joined - loaded, "programs": compiled - joined, "state": ready - compiled
    }  # fmt: skip
    return _summary(island, state) | {"start_seconds": seconds}


def _summary(island: Island, state: str) -> dict[str, object]:
    """Return what the island has done, for `--json`."""
    outbox = island.link.outbox
    return {
        "island": island.name,
        "run": island.manifest.run,
        "state": state,
        "steps": island.totals.steps,
        "tokens": island.totals.tokens,
        "global_step": island.ledger.global_step,
        "moments": island.moments,
        "sent": outbox.sent,
        "refused": island.ledger.refused,
        "bytes_up": outbox.bytes_up,
        "bytes_down": island.link.bytes_down,
    }


def _placement(options: IslandOptions, manifest: Manifest) -> Placement | None:
    """Return where everything is on the devices of this process; None for one device. This imports JAX."""
    import jax

    from archipelago.islands.mesh.placement import placement_of

    _require_batch(options.batch_size, manifest)
    shape = parsed(options.mesh) if options.mesh is not None else None
    config = _settings(options, manifest)
    own = options.batch_size or config.data.batch_size
    batch_size = 0 if manifest.task else own // config.inner.micro_batches  # a task has its own
    placement = placement_of(shape, manifest, batch_size, jax.devices())
    if jax.process_count() > 1 and (placement is None or placement.shape.devices < jax.device_count()):
        raise ConfigError(
            f"this island has {jax.device_count()} devices on {jax.process_count()} hosts, and its mesh has "
            f"{placement.shape.devices if placement else 1}",
            "Give a --mesh of all of them, or a --batch-size that their number divides.",
            code="hosts.mesh",
        )
    return placement


def _require_batch(batch_size: int, manifest: Manifest) -> None:
    """Raise ConfigError (`config.batch-size`, `task.setting`) for a batch that the run would not take."""
    if batch_size and manifest.task:
        raise ConfigError(
            "a task has batches of its own, so --batch-size would change nothing", "Leave it out.", code="task.setting"
        )
    most = BATCH_FACTOR_MAX * manifest.config.data.batch_size
    if not 0 <= batch_size <= most:
        raise ConfigError(
            f"--batch-size cannot be {batch_size}",
            f"Give 1 to {most:,} sequences ({BATCH_FACTOR_MAX} times the run's batch), or 0 for the run's.",
            code="config.batch-size",
        )


def _tell_of_device(manifest: Manifest, placement: Placement | None) -> None:
    """Log what the run needs and what this machine has, and which devices stay unused."""
    import jax

    from archipelago.islands.device import memory_in_words, unused_devices

    shape = placement.shape if placement is not None else MeshShape()
    said, troubles = memory_in_words(manifest, jax.devices()[0], shape)
    log.info("%s", said)
    for trouble in troubles:
        log.warning("%s", trouble, extra={"code": "island.memory"})
    if unused := unused_devices(jax.local_devices(), shape, os.environ):
        log.warning("%s", unused, extra={"code": "island.unused-devices"})


def _evaluator(
    options: IslandOptions, prepared: PreparedIsland, transport: IslandTransport, link: Link, curves: CurveWriter
) -> Evaluator | None:
    """Start the evaluations of this island; None if it makes none."""
    from archipelago.islands.evaluator import Evaluator

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
        link.inbox.snapshots.all_held,
        options.evaluate_every,
        curves,
        place=prepared.place,
    )
    evaluator.start()
    return evaluator


def entry() -> int:
    """Run an island with the arguments of this process."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])), supervised=True)
