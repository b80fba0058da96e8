"""`archipelago island` as one of several hosts: as their leader, or as one that follows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import URL_VARIABLE, supervised_status
from archipelago.islands.hosts.membership import Membership
from archipelago.islands.options import IslandOptions, require_valid
from archipelago.islands.running import run_island
from archipelago.islands.setup import own_task

if TYPE_CHECKING:
    from archipelago.islands.hosts.computing import SharedComputation
    from archipelago.islands.hosts.seat import Seat


def lead(options: IslandOptions, place: Membership, stopped: Callable[[], bool]) -> int:
    """Run an island as the leader of its hosts."""
    from archipelago.islands.hosts.processes import Leading

    require_valid(options)
    leading = Leading(place, *_shared(options))
    try:
        status = run_island(options, lambda: stopped() or leading.team.is_stopping, leading=leading)
    except BaseException as error:
        leading.end(error=error)
        raise
    leading.end(status)
    return status


def follow_leader(options: IslandOptions, place: Membership, stopped: Callable[[], bool]) -> int:
    """Do what the leader of the hosts says until the island ends."""
    from archipelago.islands.hosts.processes import come

    options.log_as(f"host-{place.rank}", options.run)
    require_valid(options)
    seat = come(place, *_shared(options), options.patience(stopped).seconds, stopped)
    try:
        manifest, computation, sample = _prepared(options, place, seat)
    except ArchipelagoError as error:
        seat.fail(error.what, supervised_status(error))
        raise

    from archipelago.islands.hosts.computing import follow
    from archipelago.islands.hosts.coordinator import leave

    status = follow(seat, computation, manifest, sample)
    leave()
    return status


def _prepared(options: IslandOptions, place: Membership, seat: Seat) -> tuple[Manifest, SharedComputation, Any]:
    """Return the run, this process's part of the computation, and a batch."""
    from archipelago.islands.hosts.processes import connect_devices

    manifest, device_bytes = connect_devices(place, seat)
    task = own_task(options, manifest)

    from archipelago.islands.hosts.computing import SharedComputation
    from archipelago.islands.prepared import prepared_for

    prepared = prepared_for(options, manifest, task, device_bytes)
    work = prepared.workload
    return manifest, SharedComputation(manifest, work.steps, work.begin, prepared.placement), prepared.sample()


def _shared(options: IslandOptions) -> tuple[dict[str, str], bytes]:
    """Return what all hosts of an island must have alike, and the key that strangers do not have."""
    from archipelago.islands.hosts.processes import alike, key_of

    flags = {
        "--run": options.run, "--mesh": options.mesh, "--corpus": options.corpus, "--batch-size": options.batch_size,
        "--micro-batches": options.micro_batches, "--rematerialise": options.rematerialise,
    }  # fmt: skip
    return alike(flags), key_of(options.url or os.environ.get(URL_VARIABLE, ""))
