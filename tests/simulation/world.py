"""A whole run under faults, from one seed: real mergers and islands, a virtual clock, a broker whose answers get lost.

Everything random comes from the seed, so a failing seed fails again, in the same place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from archipelago.broker.config import (
    AdoptConfig,
    DataConfig,
    InnerConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from archipelago.broker.control import SETTINGS
from archipelago.broker.errors import BrokerError, ConfigError, FencedError, UnknownRunError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory import MemoryBroker
from archipelago.broker.messages import Contribution
from archipelago.islands.data.batches import Batches, shard_order
from archipelago.islands.inner import InnerSteps
from archipelago.islands.sync.link import Draft, Link
from archipelago.islands.sync.rejoin import Rejoin
from archipelago.islands.worker import Island
from archipelago.merger.checkpointer import Checkpointer
from archipelago.merger.service import LEASE_SECONDS, Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.simulation.arithmetic import walk
from tests.simulation.disks import IslandDisk, Jobs, MergerDisk, Record, Store
from tests.simulation.faults import FENCED, Connection, Crash, Weather, deliver
from tests.simulation.watch import Watch

RUN = "storm"
NAMES = ("ada", "bea", "cyd", "dot", "eve")
TEXT = np.arange(181, dtype=np.uint8)
NOTHING, TAIL, EVERYTHING = "nothing", "tail", "everything"


@cache
def manifest_of(rule: str, outer: str, shards: int, record: bool) -> Manifest:
    """A run of two fragments whose shards are read in some steps."""
    config = RunConfig(
        record=record,
        data=DataConfig(batch_size=1, sequence_length=4, shards=shards),
        inner=InnerConfig(steps=1 << 20),
        sync=SyncConfig(interval=4, fragments=2, window=2, staleness_cap=4),
        outer=OuterConfig(rule=outer, momentum=0.5),  # type: ignore[arg-type]
        adopt=AdoptConfig(rule=rule),  # type: ignore[arg-type]
        wire=WireConfig(thin="int4", down="float32", zstd_level=0),
    )
    return samples.manifest(RUN, config)


def _copied(run: Any) -> Any:
    """What the broker holds, as it is now; messages and payloads never change."""
    values = {f.name: getattr(run, f.name) for f in fields(run)}
    return type(run)(**{k: v.copy() if isinstance(v, dict | list | set) else v for k, v in values.items()})


class Process:
    """Something that acts, stands still, is cut off, and dies."""

    who = ""
    """the incarnation of an island"""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_stalled = False
        self.cut_until = self.asleep_until = float("-inf")
        self.jobs = Jobs()
        self.connection: Any = Connection(world, self, world.broker.connect(RUN))

    def act(self) -> None:
        """May raise Crash, which is its end."""
        raise NotImplementedError


class MergerProcess(Process):
    """What `merger.main` and `merger.service.serve` do, one turn at a time."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        folder = MergerFolder(Path("/"))
        store = Store(world.disk, lambda where: world.may_crash(where))
        folder.store, folder.recorder = cast(Any, store), cast(Any, world.record)
        manifest = folder.find_or_bring_back(self.connection, resume=world.weather.loses == EVERYTHING)
        checkpointer = (
            Checkpointer(
                self.connection,
                cast(Any, store),
                folder.recorder if manifest.config.record else None,
                6.0,
                self.jobs.submit,
            )
            if world.weather.checkpoints
            else None
        )
        self.merger = Merger(
            self.connection,
            world.clock,
            holder=name,
            live_poll_seconds=0.5,
            checkpointer=checkpointer,
            wall=world.clock,
        )
        self.loaded = False

    def act(self) -> None:
        merger, world = self.merger, self.world
        try:
            if world.faults and world.happens(0.005):
                self._leave()
            if not merger.epoch and not merger.acquire():
                return
            if not self.loaded:
                world.damage()
                merger.load()
                self.loaded = True
                world.check_loaded(merger)
            merger.turn(0.0)
        except (FencedError, UnknownRunError) as error:
            raise Crash(str(error)) from error
        except BrokerError:
            self.loaded, merger.epoch = False, 0

    def _leave(self) -> None:
        if self.merger.epoch:
            if self.loaded:
                self.merger.finish()
            self.connection.release(self.merger.epoch)
        raise Crash("it left")


class IslandProcess(Process):
    """What `islands.main` and `islands.worker.train` do, one step at a time."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        config = world.manifest.config
        world.births += 1
        self.store = IslandDisk(world.island_disks.setdefault(name, {}), world.manifest, world.may_crash)
        self.jobs = self.store.jobs
        returned = self.connection.claim_return(name)
        whole = self.store.find(*returned) if returned else None
        self.incarnation = f"i{world.births}"
        self.who = f"{name}/{self.incarnation}"
        world.alive.add(self.who)
        shards = shard_order(config.data.shards, config.seed)
        link = Link(self.connection, world.manifest, self.who, shards, world.clock, wall=world.clock)
        arrivals = link.join()
        batches = Batches(TEXT, config, link.lease, fallback=world.births)
        self.island = Island(
            name, world.manifest, cast(InnerSteps, walk), batches, link, arrivals, world.clock, self.incarnation
        )
        self.island.on_marker = self.store.on_marker
        self._let_watch(world, link, batches)
        rejoin = Rejoin(self.connection, self.store, self.island, arrivals, seconds=2.0, pause=self._wait)
        rejoin.ask()
        self.island.beat("joining")
        self._pump()
        rejoin.complete(whole)
        if whole is not None:
            world.check_whole(self, whole)
            world.watch.trained[self.who] += max(count.tokens for count in self.island.ledger.counts)

    def _let_watch(self, world: World, link: Link, batches: Batches) -> None:
        said, send = batches.on_begin, link.send

        def began(text: str) -> None:
            if said is not None:
                said(text)
            assert batches._pass is not None
            world.watch.began(self.who, text, len(batches._pass.starts))

        def sent(draft: Draft) -> None:
            world.watch.sent(self.who, draft.contribution)
            send(draft)

        batches.on_begin, link.send = began, sent  # type: ignore[method-assign]

    def _wait(self, seconds: float) -> None:
        self._pump()
        self.world.go_on_without(self, 2)

    def _pump(self) -> None:
        self.island.link.pump()
        if self.island.link.failure is not None:
            raise self.island.link.failure

    def act(self) -> None:
        world, island = self.world, self.island
        self._pump()
        if island.is_sent_away or (world.faults and world.happens(0.01)):
            island.leave(flush_seconds=0.0)
            self._pump()
            self.store.finish(island)
            raise Crash("it left")
        island.boundary()
        world.watch.check_heard(island)
        island.advance()
        world.watch.trained[self.who] += world.manifest.config.tokens_per_step


class World:
    """The run and its actors. `play` plays one event; `check` asserts what must always hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.weather = Weather.of(self.random)
        self.manifest = manifest_of(
            self.random.choice(["overwrite", "carry"]),
            self.random.choice(["nesterov", "sgd"]),
            self.random.choice([6, 10, 16]),
            self.random.random() < 0.3,
        )
        self.first = samples.first_snapshots(self.manifest, value=1.0)
        self.broker.connect(RUN).create(self.manifest, self.first)
        self.faults = False
        self.births = self.losses = 0
        self.late: list[tuple[Process, str, Callable[..., Any], Any, Any]] = []
        self.disk = MergerDisk()
        self.record = Record(self.may_crash)
        self.island_disks: dict[str, dict[int, dict[str, Any]]] = {}
        self.saved: tuple[float, Any] | None = None
        self.lost_at: tuple[int, int] | None = None
        self.damaged: dict[int, tuple[int, bytes]] = {}
        self.watch = Watch(self)
        self.wanted = list(NAMES[: self.random.randint(1, 4)])
        self.processes: list[Process] = []
        self.alive: set[str] = set()
        self.left_behind: list[Jobs] = []
        self._nested = False
        self._start_merger()
        for name in self.wanted:
            self._start(IslandProcess, name)
        self.faults = True

    @property
    def run(self) -> Any:
        """What the broker holds, None when it has lost the run."""
        return self.broker.runs.get(RUN)

    @property
    def mergers(self) -> list[MergerProcess]:
        """Those that live."""
        return [process for process in self.processes if isinstance(process, MergerProcess)]

    @property
    def islands(self) -> list[IslandProcess]:
        """Those that live."""
        return [process for process in self.processes if isinstance(process, IslandProcess)]

    # -- faults -----------------------------------------------------------------------------------------------------

    def happens(self, rate: float) -> bool:
        """Whether something of that likelihood does."""
        return rate > 0.0 and self.random.random() < rate

    def may_crash(self, where: str) -> None:
        """Sometimes the process dies here, sometimes its disk is full."""
        if self.faults and self.happens(8 * self.weather.crash):
            raise Crash(where)
        if self.faults and self.happens(self.weather.lost):
            raise OSError(f"no room for {where}")

    def before(self, process: Process, name: str) -> None:
        """What may go wrong before a call takes effect."""
        if self.happens(self.weather.stall) and not self._nested:
            self.clock.now += self.random.choice([0.0, 6.0, 11.0])
            self.go_on_without(process, self.random.randint(1, 12))
        if self.clock.now < process.cut_until:
            raise UnreachableError("cut off")
        if self.happens(self.weather.cut):
            process.cut_until = self.clock.now + self.random.choice([1.0, 7.0, 14.0])
        self.after(process, name)

    def after(self, process: Process, name: str) -> None:
        """What may go wrong when a call has taken effect."""
        if self.happens(self.weather.crash):
            raise Crash(name)
        if self.happens(self.weather.lost):
            raise UnreachableError(f"lost {name}")

    def execute(self, process: Process, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The broker does what a call says, and the watch sees it."""
        before = dict(self.run.holders) if name == "lease_shard" and self.run else {}
        if self.faults and name == "publish" and self.happens(self.weather.garble):
            args = (args[0], args[1][:-1] + bytes([args[1][-1] ^ 1]), *args[2:])
        answer = method(*args, **kwargs)
        if name == "publish":
            self.watch.published(answer, cast(Contribution, args[0]), args[1])
        elif name in FENCED:
            self.watch.wrote(args[0])
        elif name == "lease_shard" and answer is not None:
            self.watch.leased(before.get(answer.shard, ""), answer.shard, args[1])
        elif name == "restore":
            self._restored()
        return answer

    def go_on_without(self, process: Process, events: int) -> None:
        """Time passes for everybody else, in the middle of what `process` does."""
        if self._nested:
            return
        self._nested = process.is_stalled = True
        try:
            for _ in range(events):
                self.play()
                self.check()
        finally:
            self._nested = process.is_stalled = False

    def _lose(self) -> None:
        """The broker dies. Ids are made of the time, so they go on; who wrote has to look again."""
        if self.weather.loses == EVERYTHING:
            if self.disk.images and self.run is not None:
                self.lost_at = (self.run.next_event, self.run.next_update)
                del self.broker.runs[RUN]
                self._forget()
            return
        if self.saved is None:
            self.saved = (self.clock.now, _copied(self.run))
        elif self.clock.now - self.saved[0] >= 2.0:
            now, (_, then) = self.run, self.saved
            then.next_event, then.next_update = now.next_event, now.next_update
            self.broker.runs[RUN], self.saved = then, None
            self._forget()

    def _forget(self) -> None:
        self.losses += 1
        self.watch.forget()
        for process in self.mergers:
            process.loaded, process.merger.epoch = False, 0  # every connection broke

    def _restored(self) -> None:
        assert self.lost_at is not None
        run, (events, updates) = self.run, self.lost_at
        run.updates = {number + updates: kept for number, kept in run.updates.items()}
        run.next_update += updates
        run.next_event = events
        for number, (contribution, payload) in run.updates.items():
            self.watch.published(f"{number}-0", contribution, payload)
        self.watch.forget()

    def damage(self) -> None:
        """Sometimes the merger's own state is gone from the broker just when it is needed."""
        if not (self.faults and self.weather.damage and self.disk.images and self.happens(0.5)):
            return
        for p in list(self.run.outer):
            if self.happens(0.6):
                self.damaged[p] = (self.run.fragments[p][0].version, self.run.outer.pop(p))

    # -- events -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """One event: time passes, and somebody acts, or something happens."""
        self.clock.now += self.random.random() * 0.5
        if self.late and self.happens(0.2):
            deliver(self)
        if self.happens(0.3):
            self._background()
        if self.faults:
            self._disturb()
        self._keep_staffed()
        able = [p for p in self.processes if not p.is_stalled and p.asleep_until <= self.clock.now]
        mergers = [p for p in able if isinstance(p, MergerProcess)]
        islands = [p for p in able if isinstance(p, IslandProcess)]
        if who := (mergers if self.happens(0.4) else islands) or able:
            self._let(self.random.choice(who))

    def _disturb(self) -> None:
        if self.happens(0.02) and self.weather.loses != NOTHING:
            self._lose()
        if self.happens(0.01) and len(self.mergers) < 3:
            self._start_merger()
        if self.happens(0.01) and len(self.wanted) < len(NAMES):
            self.wanted.append(NAMES[len(self.wanted)])
        if self.run is not None and self.happens(self.weather.steered):
            self._steer()
        if self.happens(self.weather.pause) and self.processes:
            process = self.random.choice(self.processes)
            process.asleep_until = self.clock.now + self.random.choice([2.0, 7.0, 13.0])

    def _steer(self) -> None:
        """The operator changes their mind, or somebody writes nonsense."""
        name, values = self.random.choice(
            [
                ("outer.learning_rate", ["", "0.5", "0.25", "fast"]),
                ("sync.quorum", ["", "2", "3", "0"]),
                ("sync.grace", ["", "0", "0.5"]),
                ("merging", ["", "", "paused", "perhaps"]),
                ("checkpoint", ["", str(self.births), "now"]),
                (f"island.{self.random.choice(self.wanted)}", ["", "", "drain", "expel", "dance"]),
            ]
        )
        self.broker.connect(RUN).steer({name: self.random.choice(values)})

    def _keep_staffed(self) -> None:
        if self._nested:
            return
        if not self.mergers:
            self._start_merger()
        missing = set(self.wanted) - {island.name for island in self.islands}
        if missing and self.happens(0.3):
            self._start(IslandProcess, min(missing))

    def _start_merger(self) -> None:
        self.births += 1
        self._start(MergerProcess, f"merger-{self.births}")

    def _start(self, kind: type[Process], name: str) -> None:
        before = set(self.alive)
        try:
            self.processes.append(kind(self, name))
        except (Crash, BrokerError, ConfigError):  # the last: it is not welcome
            self.alive &= before  # it is started again

    def _let(self, process: Process) -> None:
        try:
            process.act()
        except Crash:
            self._end(process)
            if self.happens(0.5):
                self.left_behind.append(process.jobs)  # it was fenced, say, and its thread ends its work

    def _end(self, process: Process) -> None:
        self.processes.remove(process)
        self.alive.discard(process.who)

    def _background(self) -> None:
        """A background thread of somebody's does its work."""
        busy = [process for process in self.processes if process.jobs.waiting and not process.is_stalled]
        if busy:
            process = self.random.choice(busy)
            try:
                process.jobs.run_one()
            except Crash:
                self._end(process)
        elif self.left_behind:
            try:
                self.left_behind.pop(0).run_one()
            except Crash:
                return

    def calm(self, events: int) -> None:
        """No more faults: whoever holds the lease keeps it, and everything that was sent is decided about."""
        self.faults = False
        if self.run is not None:
            self.run.control = {name: wish for name, wish in self.run.control.items() if name in SETTINGS}
        self.clock.now += LEASE_SECONDS + 1
        for process in self.processes:
            process.cut_until = process.asleep_until = float("-inf")
        for _ in range(events):
            self.play()
            self.check()

    # -- what must always hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every event."""
        self.watch.check()

    def check_loaded(self, merger: Merger) -> None:
        """What a merger has rebuilt is what the broker had."""
        self.watch.check_loaded(merger, self.damaged)
        self.damaged.clear()

    def check_whole(self, process: IslandProcess, whole: Any) -> None:
        """An island went back to no later a time than the run did."""
        self.watch.check_whole(process.island, whole)
