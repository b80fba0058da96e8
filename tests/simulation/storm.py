"""Simulated storms, one a seed: a single one, or many on all cores."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipelago.broker.failpoints import FAILPOINTS

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants
    from tests.simulation.simulated_run import Simulation

EVENTS = 150
#: Within this number of events, a process comes to each failpoint.
FAILPOINT_EVENTS = 400
#: One of these is the number of shards.
SHARDS = (1, 1, 1, 2, 3, 4)
#: One seed in this many plays on a fake Redis. The others play on a broker in memory, which is faster.
REDIS_EVERY = 20
#: Number of seeds that a process plays at once.
BLOCK = 10


@dataclass(frozen=True)
class Failure:
    """A seed that breaks an invariant, and the traceback."""

    seed: int
    text: str

    def __str__(self) -> str:
        again = f"ARCHIPELAGO_FIRST_SEED={self.seed} ARCHIPELAGO_SEEDS=1 make test ARGS=tests/simulation"
        return f"the storm of seed {self.seed} broke an invariant\n{self.text}\nRepeat it with: {again}"


class Goal:
    """The progress that a shard must make once its faults have ended."""

    def __init__(self, invariants: Invariants) -> None:
        self.invariants = invariants
        self.closed = invariants.round
        self.sent = invariants.unresolved()
        self.cursors = dict(invariants.cursors)

    def unmet(self) -> str:
        """Return what has not happened yet, or ""."""
        simulation, run = self.invariants.simulation, self.invariants.run
        if run is None or self.invariants.round < self.closed + 3:
            return f"no rounds of shard {self.invariants.shard} close"
        islands = {island.name for island in simulation.islands}
        part = {member.island for entry in run.tape if entry.round > self.closed for member in entry.members}
        if islands != set(simulation.wanted) or not part >= islands:
            return f"of {simulation.wanted} only {sorted(islands)} live and {sorted(part)} take part"
        if waits := self.sent & self.invariants.unresolved():
            return f"still pending: {sorted(waits)}"
        # All text is leased in shard 0, so islands soon get none while that is away.
        if simulation.away != 0 and self.invariants.cursors == self.cursors:
            return "the text cursors do not move"
        if stale := self.invariants.not_deleted():
            return f"covered by a checkpoint, and not deleted: {stale[:3]}"
        backlog = len(run.updates)
        return "contributions pile up" if backlog > 4 * len(islands) else ""


def play(seed: int) -> list[str]:
    """Play a storm. Assert the invariants after every event, and progress after the storm. Return the digests."""
    from tests.simulation.simulated_run import Simulation

    shards = random.Random(seed + 2).choice(SHARDS)
    simulation = Simulation(seed, shards, on_redis=seed % REDIS_EVERY == REDIS_EVERY - 1)
    for _ in range(EVENTS * (shards + 1) // 2):  # all shards share the events
        simulation.play()
        simulation.check()
    for each in simulation.invariants:
        each.check_nothing_lost()
    simulation.settle(60)
    if shards > 1:  # a shard without a merger stops only its own fragments
        simulation.take_away(seed % shards)
        require_progress(simulation)
        simulation.away = None
    require_progress(simulation)
    check_end(simulation)
    digests = [entry.digest for each in simulation.invariants for entry in each.run.tape]
    return [f"{simulation.clock.now} {simulation.random.random()}", *digests]


def check_end(simulation: Simulation) -> None:
    """Assert what must hold once the faults have ended."""
    simulation.broker.reread()
    for each in simulation.invariants:
        each.check_nothing_lost()
        each.check_announcements()
        each.check_promises()
        each.check_replay()
        each.check_record()
    simulation.check_sums()


def die_at_each_failpoint(seed: int) -> list[str]:
    """Let a process die at each failpoint, one after the other, in one run on a fake Redis.

    Returns:
        The failpoints that no process has reached.
    """
    from tests.simulation.faults import FaultRates
    from tests.simulation.simulated_run import Simulation

    simulation = Simulation(seed, on_redis=True, rates=FaultRates.none())
    simulation.settle(60)
    missed = []
    for name in random.Random(seed).sample(list(FAILPOINTS), len(FAILPOINTS)):
        simulation.trap = name
        for event in range(FAILPOINT_EVENTS):
            if event % 20 == 0:
                _provoke(simulation, name.partition(".")[0])
            simulation.play()
            simulation.check()
            if not simulation.trap:
                break
        else:
            missed.append(name)
        simulation.trap = ""
    require_progress(simulation)
    check_end(simulation)
    return missed


def _provoke(simulation: Simulation, family: str) -> None:
    """Let a process come to a failpoint that it would not come to by itself."""
    match family:
        case "acquire" | "release":
            for merger in simulation.mergers:
                merger.must_leave = True
        case "refuse":
            simulation.send_again()
        case "restore" if simulation.run is not None and simulation.complete():
            simulation.lose_everything()


def require_progress(simulation: Simulation) -> None:
    """Play on until each shard that has a merger makes progress. Raises AssertionError if one does not."""
    goals = [Goal(each) for each in simulation.invariants if each.shard != simulation.away]
    number, has_all = max(simulation.complete(), default=0), simulation.manifest.shards > 1 and simulation.away is None
    unmet: list[str] = []
    for _ in range(12 * len(simulation.invariants)):  # the mergers of all shards take turns with the islands
        simulation.settle(25)
        unmet = [text for goal in goals if (text := goal.unmet())]
        if has_all and simulation.rates.checkpoints and number == max(simulation.complete(), default=0):
            unmet.append(f"no checkpoint after {number} is complete")
        if not unmet:
            break
    assert not unmet, unmet


def begin() -> None:
    """Prepare a process that plays storms."""
    import gc
    import logging

    from tests.simulation import arithmetic, brokers

    logging.disable(logging.CRITICAL)
    gc.set_threshold(50_000)
    arithmetic.install()
    brokers.install()


def play_block(first: int, count: int) -> Failure | None:
    """Play `count` seeds. Return the first failure."""
    for seed in range(first, first + count):
        try:
            play(seed)
        except Exception:  # noqa: BLE001 - any exception is a failure of this seed
            return Failure(seed, traceback.format_exc())
    return None


def pool() -> ProcessPoolExecutor:
    """Return a pool with a process for each core. These processes use NumPy in place of JAX."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count() or 1, context, initializer=begin)


def spread(workers: ProcessPoolExecutor, first: int, count: int) -> list[Future[Failure | None]]:
    """Distribute `count` seeds over the processes."""
    starts = range(first, first + count, BLOCK)
    return [workers.submit(play_block, start, min(BLOCK, first + count - start)) for start in starts]
