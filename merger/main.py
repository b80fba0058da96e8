"""`archipelago merger`: serve a run. A second merger waits as a standby until the first has left."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from archipelago.broker.errors import UnknownRunError, require_number
from archipelago.broker.files import make_untracked
from archipelago.broker.machine import keep_freed_memory
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.losses import LossUnit, loss_unit
from archipelago.broker.observe.merge_load import warn_of_few_syncs
from archipelago.broker.observe.options import ProbeOptions, WorkerOptions
from archipelago.broker.observe.probes import Health
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import AwaitedRun, keep_compiled, print_json, require_role, stop_on_signals
from archipelago.broker.shards.transport import of_shard
from archipelago.merger.storage import KEEP, OTHER_RUN, MergerFolder, tell_refusal

LINGER_SECONDS = 0.5
#: A lease must outlast a wait for contributions. Redis takes one of more than a day for damage.
LEASE_SECONDS_MIN, LEASE_SECONDS_MAX = 0.5, 24 * 3600

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergerOptions(WorkerOptions, ProbeOptions, AwaitedRun):
    """Serve a run: merge what the islands send. It runs on the CPU.

    A second merger stands by, is listed in `status`, and takes over when the first one ends. Mergers end with status 0
    when the run is finished: all steps are made, no island is live, and a checkpoint holds everything.
    """

    wait_seconds: float = 600.0
    """At the start, how many seconds to wait for a Redis that does not answer, and for the run; 0 fails at once."""
    folder: Path | None = None
    """The folder for the run's checkpoints and its record. The default is runs/RUN/merger."""
    checkpoint_every: float = 30.0
    """The seconds between two checkpoints of the whole run, merger and islands. 0 takes none."""
    keep: int = KEEP
    """How many of the newest checkpoints to keep."""
    resume: bool = False
    """If Redis does not have the run, restore it from the newest checkpoint in the folder or the bucket."""
    lease_seconds: float = 5.0
    """How long a standby waits before it replaces a merger that has stopped responding."""
    restart_seconds: float = 5.0
    """How long another merger may take to merge again what is not yet in a compaction. Smaller values write the full
    state of fragments into Redis more often, but never more bytes of it than of contributions and differences."""
    threads: int = 0
    """The threads that change spectra of matrices (`isotropic`), and those of XLA. The default is $OMP_NUM_THREADS, or
    one for each core; for XLA it is $NPROC, or one for each core. No number changes a bit."""
    spectra: Literal["cpu", "gpu"] = "cpu"
    """Where the spectra of large matrices are changed: on this process's cores, or by a process of its own that holds a
    small share of a GPU. If that fails, the cores go on. It changes no bit."""
    json: bool = False
    """Print one JSON object at the end."""


def main(options: MergerOptions) -> int:
    """Serve until the run is finished, a signal arrives or another merger takes over."""
    stopped = stop_on_signals()
    origin = options.log_as("merger", options.run)
    options.require_status()
    least, most = LEASE_SECONDS_MIN, LEASE_SECONDS_MAX
    require_number("--lease-seconds", options.lease_seconds, f"Give {least} to {most}.", least, most)
    remedy = "Give a number of seconds, such as 30, or 0 for no checkpoints."
    require_number("--checkpoint-every", options.checkpoint_every, remedy)
    remedy = "Give a number of seconds, such as 5."
    require_number("--restart-seconds", options.restart_seconds, remedy)
    require_number("--threads", options.threads, "Give a number, or leave it out.")
    require_role(options.invitation(), "merger")
    health = Health()
    options.answer_probes(health)
    awaited = options.patience(stopped)
    transport = awaited(options.connect)
    origin.run = transport.run
    awaited(transport.connection.warn_of_eviction)
    bucket = options.bucket_folder(transport.run, "merger")
    folder = MergerFolder(options.folder or Path("runs") / transport.run / "merger", options.keep, bucket)
    curves = CurveWriter(options.event_file(folder.path))
    # Read the manifest before JAX loads, so that errors appear quickly.
    try:
        with progress("looking for the run, in Redis and in checkpoints"):
            manifest = awaited(lambda: folder.find_or_bring_back(transport, resume=options.resume), for_run=True)
    except UnknownRunError as error:
        if error.code == OTHER_RUN:  # the run's scripts and islands say why nobody serves it
            tell_refusal(transport, f"{error}")
        raise
    transport.connection.register()
    with suppress(OSError):  # A merger serves without checkpoints where it cannot write.
        make_untracked(folder.path)
    keep_compiled()
    keep_freed_memory()
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerators belong to the islands
    if options.threads:
        # Numpy's and PyTorch's products share the second number (`merger.spectra`), and XLA's have the first.
        os.environ |= dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), str(options.threads))

    from archipelago.merger.accelerator import Accelerator
    from archipelago.merger.executor import in_background
    from archipelago.merger.service import Merger
    from archipelago.merger.serving import has_ended_here, merger_name
    from archipelago.merger.shards import serve_shards
    from archipelago.merger.spectra import by_fastest

    shards = [manifest.of_shard(shard) for shard in range(manifest.shards)]
    every, name, unit = options.checkpoint_every, merger_name(), loss_unit(manifest.corpus)
    faster = Accelerator() if options.spectra == "gpu" else by_fastest
    mergers = []
    for shard, own_manifest in enumerate(shards):
        own = of_shard(transport, manifest, shard)
        checkpointer = folder.parts(manifest)[shard].checkpointer(own, own_manifest, every) if every > 0 else None
        mergers.append(
            Merger(
                own,
                holder=name,
                linger_seconds=LINGER_SECONDS,
                checkpointer=checkpointer,
                lease_seconds=options.lease_seconds,
                on_round=lambda entry: curves.put(entry.round, values(entry, unit)),
                faster=faster,
                restart_seconds=options.restart_seconds,
                is_gone=has_ended_here,
                executor=in_background,
                primary=transport if shard else None,
                manifest=own_manifest,
            )
        )
    curves.start()

    def phase() -> str:
        served = [str(shard) for shard, merger in enumerate(mergers) if merger.epoch]
        if not served:
            return "standing by"
        return "serving" if len(mergers) == 1 else f"serving shard {', '.join(served)}"

    try:
        is_finished = serve_shards(mergers, health.watched(stopped, phase))
    except UnknownRunError as error:
        raise folder.lost(error, transport) from None
    finally:
        health.leave()
        curves.close()
        for merger in mergers:
            merger.close()
    closed = max(merger.state.closed for merger in mergers)
    if is_finished:
        step = max(merger.state.step for merger in mergers)
        text = "the run is finished: all %s steps are made, no island is live, and everything is merged"
        log.info(text, f"{step:,}", extra={"round": closed})
        log.info("each fragment had %.1f syncs", syncs := closed / len(manifest.fragments))
        warn_of_few_syncs(log, syncs)
    if is_finished or any(merger.has_served for merger in mergers):
        log.info("leaving after round %s", closed, extra={"round": closed})
    else:
        log.info("leaving, and was a standby")
    if options.json:
        print_json({"run": transport.run, "finished": is_finished})
    return 0 if is_finished else options.stopped_status


# -- what a merger tells of its rounds --------------------------------------------------------------------------------


def values(entry: TapeEntry, unit: LossUnit) -> Mapping[str, float]:
    """Return the values that curves show of one round, with the loss in that unit."""
    return {
        "loss": unit.from_nats(entry.loss),
        "contributions": len(entry.members),
        "staleness": statistics.fmean([m.staleness for m in entry.members]) if entry.members else math.nan,
        "gain": entry.gain,
        "open_seconds": entry.open_seconds,
        "grace_seconds": entry.grace_seconds,
        "merge_seconds": entry.merge_seconds,
        "spectra_seconds": entry.spectra_seconds,
        "busy_seconds": entry.busy_seconds,
    }
