"""The processes of a simulated run: mergers and islands, which run the real code one event at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError
from archipelago.broker.shards.transport import of_shard, whole
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, Shard, range_order
from archipelago.islands.inner import InnerSteps
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.leaving import leave
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.worker import Island
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from tests.simulation.arithmetic import walk
from tests.simulation.disks import IslandDisk, Jobs, folder_on
from tests.simulation.faults import EVERYTHING, Crash, FaultyConnection

if TYPE_CHECKING:
    from tests.simulation.simulated_run import Simulation

RUN = "storm"
TEXT = np.arange(181, dtype=np.uint8)


class Process:
    """A process that acts, and that may stall, be cut off, sleep or die.

    Attributes:
        who: The island and its incarnation; "" for a merger.
        is_stalled: Whether it stands still in the middle of a call.
        cut_until: Until when each shard is out of its reach.
        asleep_until: Until when it does nothing.
        must_leave: Whether it leaves in order as soon as it acts.
        jobs: Its background thread.
        home: Its faulty connection to the run, which is that to shard 0.
    """

    who = ""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.is_stalled = False
        self.cut_until: dict[int, float] = {}
        self.asleep_until = float("-inf")
        self.must_leave = False
        self.jobs = Jobs()
        self.home = FaultyConnection(simulation, self, simulation.broker.connect(RUN))

    def act(self) -> None:
        """Do one thing. A Crash ends the process."""
        raise NotImplementedError


class MergerProcess(Process):
    """Serves one shard. Does one turn at a time of what `merger.main` and `merger.serving.serve` do."""

    def __init__(self, simulation: Simulation, name: str, shard: int) -> None:
        super().__init__(simulation, name)
        self.shard = shard
        self.connection = of_shard(self.home, simulation.manifest, shard)
        folder = folder_on(simulation.disks, simulation.records, simulation.manifest, simulation.may_crash)
        manifest = folder.find_or_bring_back(self.home, resume=simulation.rates.loses == EVERYTHING)
        part = folder.parts(manifest)[shard]
        checkpointer = (
            part.checkpointer(self.connection, manifest.of_shard(shard), 6.0 / manifest.shards, self.jobs.submit)
            if simulation.rates.checkpoints
            else None
        )
        self.merger = Merger(
            self.connection,
            simulation.clock,
            holder=name,
            live_poll_seconds=0.5,
            checkpointer=checkpointer,
            wall=simulation.clock,
            executor=lambda kind, threads: self.jobs.submit if kind == "compaction" else at_once,
            primary=self.home if shard else None,
        )
        self.loaded = False

    def act(self) -> None:
        merger, simulation = self.merger, self.simulation
        try:
            if self.must_leave or (simulation.faults and simulation.happens(0.005)):
                self._leave()
            if not merger.epoch and not merger.acquire():
                return
            if not self.loaded:
                simulation.damage(self.shard)
                merger.load()
                self.loaded = True
                if not simulation.uses_old_primary(self, self.shard):
                    simulation.check_loaded(self)
            merger.turn(0.0)
        except (FencedError, UnknownRunError) as error:
            raise Crash(str(error)) from error
        except BrokerError:
            self.loaded, merger.epoch = False, 0

    def _leave(self) -> None:
        if self.merger.epoch:
            if self.loaded:
                merger, go_on = self.merger, lambda seconds: self.simulation.go_on_without(self, 1)
                merger.finish(go_on)
            self.connection.merger.release(self.merger.epoch)
        raise Crash("it left")


class IslandProcess(Process):
    """Does one step at a time of what `islands.running` does."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        config = simulation.manifest.config
        self.connection = whole(self.home, simulation.manifest)
        simulation.births += 1
        self.store = IslandDisk(simulation.island_disks.setdefault(name, {}), simulation.manifest, simulation.may_crash)
        self.jobs = self.store.jobs
        self.incarnation = f"i{simulation.births}"
        self.who = f"{name}/{self.incarnation}"
        simulation.alive.add(self.who)
        shards = range_order(config.data.shards, config.seed)
        link = Link(self.connection, simulation.manifest, self.who, shards, simulation.clock, wall=simulation.clock)
        arrivals = link.join()
        batches = Batches(TEXT, config, link.lease, fallback=simulation.births)
        self.island = Island(
            name,
            simulation.manifest,
            Computation(simulation.manifest, cast(InnerSteps, walk)),
            batches,
            link,
            arrivals,
            simulation.clock,
            self.incarnation,
            on_marker=self.store.on_marker,
        )
        self._observe(simulation, link, batches)
        rejoin = Newcomer(self.connection, self.island, seconds=2.0, pause=self._wait)
        rejoin.ask()
        self.island.beat("joining")
        self._pump()
        rejoin.complete(self.store)

    def _observe(self, simulation: Simulation, link: Link, batches: Batches) -> None:
        begin, send = batches._begin, link.send
        shard_of = simulation.manifest.shard_layout.shard_of

        def begun(shard: Shard) -> None:
            at = shard.read_position()
            begin(shard)
            simulation.invariants[0].began(self.who, at, at.position + len(batches._starts))

        def sent(draft: Draft) -> None:
            if shard_of(draft.header.round) == 0:
                simulation.invariants[0].sent(self.who, draft.header)
            send(draft)

        batches._begin, link.send = begun, sent  # type: ignore[method-assign]

    def _wait(self, seconds: float) -> None:
        self._pump()
        self.simulation.go_on_without(self, 2)

    def _pump(self) -> None:
        self.island.link.pump()
        if self.island.link.pumps.failure is not None:
            raise self.island.link.pumps.failure

    def act(self) -> None:
        simulation, island = self.simulation, self.island
        self._pump()
        if self.must_leave or island.reason or (simulation.faults and simulation.happens(0.01)):
            leave(island, flush_seconds=0.0)
            self._pump()
            self.store.finish(island)
            raise Crash("it left")
        island.boundary()
        for each in simulation.invariants:
            each.check_heard(island)
        island.advance()
        simulation.trained[self.who] += simulation.manifest.config.tokens_per_step
