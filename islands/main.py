"""`archipelago island` and `python -m archipelago.islands`: join a run, train, and leave on SIGTERM."""

from __future__ import annotations

import sys

import tyro

from archipelago.broker.process import guarded, return_freed_memory, stop_on_signals
from archipelago.islands.hosts.island import follow_leader, lead
from archipelago.islands.hosts.membership import membership
from archipelago.islands.options import IslandOptions as IslandOptions
from archipelago.islands.running import run_island
from archipelago.islands.standby import stand_by


def main(options: IslandOptions) -> int:
    """Run one island until the end of the run or a signal. A standby waits for its assignment first."""
    return_freed_memory()
    if options.standby:
        return stand_by(options)
    stopped = stop_on_signals()
    place = membership(options.coordinator, options.hosts, options.host_rank)
    if place is None:
        return run_island(options, stopped)
    return lead(options, place, stopped) if place.leads else follow_leader(options, place, stopped)


def entry() -> int:
    """Run an island with the arguments of this process."""
    return guarded(lambda: main(tyro.cli(IslandOptions, args=sys.argv[1:])), supervised=True)
