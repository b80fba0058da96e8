"""A whole run under faults: real mergers and islands on a virtual clock, with a broker in memory and lost answers.

One seed determines everything random, so a failing seed fails again in the same place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, cast

from archipelago.broker.commits import Image
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
from archipelago.broker.errors import BrokerError, ConfigError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.state import key_of
from archipelago.broker.messages import Contribution, Marker
from archipelago.broker.shards.transport import create, of_shard, whole
from archipelago.broker.wire import is_digest
from archipelago.islands.checkpoint import OwnState
from archipelago.islands.sync.connection.outbox import KEPT_SECONDS
from archipelago.merger.service import LEASE_SECONDS
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.simulation.brokers import SimulatedMemory, SimulatedRedis
from tests.simulation.disks import Jobs, Record
from tests.simulation.faults import (
    DISKS,
    EVERYTHING,
    FAILOVER,
    FENCED,
    NOTHING,
    READS,
    Crash,
    FaultRates,
    FaultyConnection,
    OldPrimary,
    deliver,
)
from tests.simulation.invariants import Invariants
from tests.simulation.processes import RUN, TEXT, IslandProcess, MergerProcess, Process

NAMES = ("ada", "bea", "cyd", "dot", "eve")
#: A replica that is promoted lacks the writes of at least this time.
LAG_SECONDS = 2.0


@cache
def manifest_of(rule: str, outer: str, data_shards: int, record: bool, down: str, shards: int) -> Manifest:
    """Return the manifest of a run whose data shards are read in a few steps. Some shards have several fragments."""
    config = RunConfig(
        record=record,
        data=DataConfig(batch_size=1, sequence_length=4, shards=data_shards),
        inner=InnerConfig(steps=1 << 20),
        sync=SyncConfig(interval=4, window=2, staleness_cap=4),
        outer=OuterConfig(rule=outer, momentum=0.5),  # type: ignore[arg-type]
        adopt=AdoptConfig(rule=rule),  # type: ignore[arg-type]
        wire=WireConfig(thin="int4", down=down, zstd_level=0),  # type: ignore[arg-type]
    )
    manifest = samples.manifest(RUN, config, fragments=min(shards + 1, 4))
    return replace(manifest, corpus=manifest.corpus._replace(bytes=TEXT.size), shards=shards)


def _copied(run: Any) -> Any:
    """Copy what the broker holds. Messages and payloads are immutable, so they are shared."""
    values = {f.name: getattr(run, f.name) for f in fields(run)}
    return type(run)(**{k: v.copy() if isinstance(v, dict | list | set) else v for k, v in values.items()})


class Simulation:
    """A run and its processes. `play` plays one event, and `check` asserts the invariants.

    Args:
        seed: Determines everything that is random.
        shards: The number of shards, each with mergers of its own.
        on_redis: Whether the broker is a fake Redis.
        rates: The rate of each fault; drawn by default.

    Attributes:
        trap: The failpoint at which the next process dies, or "". See `broker.failpoints`.
    """

    def __init__(self, seed: int, shards: int = 1, *, on_redis: bool = False, rates: FaultRates | None = None) -> None:
        self.random = random.Random(seed)
        self.damages = random.Random(seed + 1)  # of its own, so that storms without damage stay as they are
        self.clock = VirtualClock()
        self.broker: Any = SimulatedRedis(self.clock, self._reach) if on_redis else SimulatedMemory(self.clock)
        self.on_redis, self.trap = on_redis, ""
        self.rates = rates or FaultRates.draw(self.random)
        if on_redis and self.rates.loses == FAILOVER:
            self.rates = replace(self.rates, loses=NOTHING)
        self.manifest = manifest_of(
            self.random.choice(["overwrite", "carry"]),
            self.random.choice(["nesterov", "sgd"]),
            self.random.choice([6, 10, 16]),
            self.random.random() < 0.3,
            "float32" if seed % 3 == 0 else "int8",
            shards,
        )
        self.first = samples.first_snapshots(self.manifest, value=1.0)
        create(self.broker.connect(RUN), self.manifest, self.first)
        self.faults = False
        self.births = self.losses = 0
        self.late: list[tuple[FaultyConnection, str, Callable[..., Any], Any, Any]] = []
        self.disks: Sequence[dict[int, Image]] = [{} for _ in range(shards)]  # the checkpoints of each shard
        self.records = [Record(self.may_crash) for _ in range(shards)]
        self.island_disks: dict[str, dict[str, OwnState]] = {}
        self.saved: tuple[float, int, Any] | None = None
        self.old_primary: OldPrimary | None = None
        self.damaged: Sequence[dict[int, tuple[int, bytes]]] = [{} for _ in range(shards)]
        self.trained: Counter[str] = Counter()
        self.markers: Counter[int] = Counter()  # how often shard 0 has announced each checkpoint
        self.invariants: Sequence[Invariants] = [Invariants(self, shard) for shard in range(shards)]
        self.away: int | None = None
        self.is_cut_off = False
        self.wanted = list(NAMES[: self.random.randint(1, 4)])
        self.processes: list[Process] = []
        self.alive: set[str] = set()
        self.left_behind: list[Jobs] = []
        self._nested = False
        for shard in range(shards):
            self._start_merger(shard)
        for name in self.wanted:
            self._start(partial(IslandProcess, self, name))
        self.faults = True

    @property
    def run(self) -> Any:
        """What the broker holds of shard 0, which is all of a run with one; None after it has lost the run."""
        return self.broker.shown(RUN, 0)

    @property
    def mergers(self) -> list[MergerProcess]:
        """The living ones."""
        return [process for process in self.processes if isinstance(process, MergerProcess)]

    def mergers_of(self, shard: int) -> list[MergerProcess]:
        """Return the living ones of a shard."""
        return [process for process in self.mergers if process.shard == shard]

    @property
    def islands(self) -> list[IslandProcess]:
        """The living ones."""
        return [process for process in self.processes if isinstance(process, IslandProcess)]

    # -- faults -----------------------------------------------------------------------------------------------------

    def happens(self, rate: float) -> bool:
        """Draw whether an event of that probability happens."""
        return rate > 0.0 and self.random.random() < rate

    def may_crash(self, where: str) -> None:
        """Sometimes let the process die here, and sometimes let its disk be full."""
        self._reach(where)
        if self.faults and self.happens(8 * self.rates.crash):
            raise Crash(where)
        if self.faults and self.happens(self.rates.lost):
            raise OSError(f"no room for {where}")

    def _reach(self, failpoint: str) -> None:
        """Let the process die here, if this failpoint is the trap, and sometimes in a storm."""
        if failpoint == self.trap:
            self.trap = ""
            raise Crash(failpoint)
        if self.on_redis and self.faults and self.happens(4 * self.rates.crash):  # calls in memory have no middle
            raise Crash(failpoint)

    def before(self, connection: FaultyConnection, name: str) -> None:
        process, shard = connection.process, connection.shard
        if self.happens(self.rates.stall) and not self._nested:
            self.clock.now += self.random.choice([0.0, 6.0, 11.0])
            self.go_on_without(process, self.random.randint(1, 12))
        if self.clock.now < process.cut_until.get(shard, 0.0):
            raise UnreachableError("cut off")
        if self.happens(self.rates.cut):
            process.cut_until[shard] = self.clock.now + self.random.choice([1.0, 7.0, 14.0])
        self.after(name)

    def after(self, name: str) -> None:
        # The shards of a run are restored one after another. What is half restored should be seen often.
        is_half = name == "restore" and self.manifest.shards > 1
        if self.happens(50 * self.rates.crash if is_half else self.rates.crash):
            raise Crash(name)
        if self.happens(self.rates.lost):
            raise UnreachableError(f"lost {name}")

    def execute(
        self, connection: FaultyConnection, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Let the broker execute a call, and let the invariants observe it."""
        is_old = self.uses_old_primary(connection.process, connection.shard)
        instance = f"primary {self.invariants[connection.shard].losses - is_old}"
        if name == "instance":
            return instance
        if not self.on_redis:
            self.broker.instance = instance  # a merger builds on nothing that another primary may have forgotten
        if name == "refuse":
            self.invariants[connection.shard].refused |= {refusal.identity_text for _, refusal in args[1]}
        if is_old and self.old_primary:
            answer = self.old_primary.call(self.broker.runs, method, args, kwargs)
            if name == "publish":
                self.old_primary.acknowledged.add(cast(Contribution, args[0]).identity_text)
            return answer
        before = dict(self.run.holders) if name == "lease_range" and self.run else {}
        if self.faults and name == "publish" and self.happens(self.rates.garble):
            args = (args[0], args[1][:-1] + bytes([args[1][-1] ^ 1]), *args[2:])
        try:
            answer = method(*args, **kwargs)
        except Crash as crash:  # at a failpoint
            if str(crash) == "publish.done":
                self._observe(connection, name, args, self.broker.newest_entry(RUN, connection.shard, args[0].island))
            elif str(crash).endswith(".done"):
                self._observe(connection, name, args, None)
            raise
        finally:
            if name not in READS:
                self.broker.touched(connection.shard)
        self._observe(connection, name, args, answer, before)
        return answer

    def _observe(
        self, connection: FaultyConnection, name: str, args: Any, answer: Any, holders: Mapping[str, str] | None = None
    ) -> None:
        """Let the invariants see what a call has done. `holders` are those of the ranges of the text before it."""
        invariants = self.invariants[connection.shard]
        if name == "publish":
            invariants.published(answer, cast(Contribution, args[0]), args[1])
        elif name == "look" and args[2] is not None:
            invariants.wrote(args[2].epoch)  # it has renewed its lease
        elif name in FENCED:
            invariants.wrote(args[0])
            if name == "announce" and isinstance(args[1], Marker) and connection.shard == 0:
                self._announced(args[1].number)
        elif name == "lease_range" and answer is not None:
            self.invariants[0].leased((holders or {}).get(answer.range, ""), answer.range, args[1])
        elif name == "restore":
            self._restored(invariants)

    def _announced(self, number: int) -> None:
        """Note a checkpoint. A merger that replaces another one reuses no number that it could know of.

        That of a run with one shard does not look. It may use a number again whose checkpoint was never written.
        """
        self.markers[number] += 1
        is_new = self.markers[number] == 1
        assert is_new or self.losses or self.manifest.shards == 1, f"checkpoint {number} is announced again"

    def go_on_without(self, process: Process, events: int) -> None:
        """Play events of the other processes in the middle of an action of `process`."""
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
        """Lose everything or the checkpoints of a shard, or let the replica of one fall behind.

        The replica is promoted soon (`_fail_over`). Entry ids derive from the time, so they continue. Every connection
        breaks.
        """
        if self.rates.loses == DISKS:
            self.check()  # of what the lost checkpoints have covered, the entries may be gone
            self.disks[self._any_shard(self.random)].clear()
            return
        if self.rates.loses == EVERYTHING:
            if self.complete() and self.run is not None:
                self.lose_everything()
            return
        if self.saved is None and self.old_primary is None:
            shard = self._any_shard(self.random)
            self.saved = (self.clock.now, shard, _copied(self.invariants[shard].run))

    def lose_everything(self) -> None:
        """Let the broker lose the run. A merger restores it from a checkpoint."""
        self.broker.lose_everything()
        for each in self.invariants:
            self._forget(each.shard)
        for island in self.islands if self.manifest.shards > 1 else ():
            if self.damages.random() < 0.5:  # and then it goes back to its own part of the checkpoint
                self._end(island)

    def send_again(self) -> None:
        """Let a contribution that was merged or refused arrive once more."""
        contribution, payload = next(iter(self.invariants[0].entries.values()))
        entry = self.broker.connect(RUN).island.publish(contribution, payload)
        self.invariants[0].published(entry, contribution, payload)
        self.broker.touched()

    def _fail_over(self) -> None:
        """Promote the replica. Some processes may use the old primary for a while."""
        assert self.saved is not None
        since, shard, then = self.saved
        invariants = self.invariants[shard]
        now, acknowledged = invariants.run, list(invariants.acknowledged)
        then.next_event, then.next_update = now.next_event, now.next_update
        self.broker.runs[key_of(RUN, shard)], self.saved = then, None
        self._forget(shard)
        share = self.random.choice([0.0, 0.5])
        users = [process for process in self.processes if self.happens(share)]
        until = self.clock.now + self.random.choice([1.0, 4.0])
        self.old_primary = OldPrimary(shard, key_of(RUN, shard), now, acknowledged, since, users, until)

    def _find_new_primary(self) -> None:
        """Let all processes find the new primary."""
        if (old := self.old_primary) is not None:
            self.old_primary = None
            self._disconnect(process for process in self.mergers if process in old.users)
            if self.clock.now - old.since <= KEPT_SECONDS:
                self.invariants[old.shard].promised |= old.acknowledged

    def uses_old_primary(self, process: Process, shard: int) -> bool:
        """Return whether a process still uses a primary whose replica was promoted."""
        old = self.old_primary
        return old is not None and old.shard == shard and process in old.users

    def _any_shard(self, random: random.Random) -> int:
        return random.randrange(self.manifest.shards) if self.manifest.shards > 1 else 0

    def _forget(self, shard: int) -> None:
        self.losses += 1
        self.invariants[shard].forget()
        self._disconnect(self.mergers_of(shard))

    def _disconnect(self, mergers: Iterable[MergerProcess]) -> None:
        """Let the connections of mergers break. They load the run again."""
        for process in mergers:
            process.loaded, process.merger.epoch = False, 0

    def _restored(self, invariants: Invariants) -> None:
        self.broker.restored(RUN, invariants.shard)
        payloads = {
            sent.identity_text: payload
            for sent, payload in invariants.entries.values()
            if is_digest(sent.digest, payload)  # a checkpoint holds no contribution that was damaged on its way
        }
        run = invariants.run
        for name, entry in run.updates.items():
            payload = payloads[entry.contribution.identity_text]
            invariants.published(name, entry.contribution, payload)
        invariants.forget()

    def complete(self) -> list[int]:
        """Return the checkpoints of which all shards have their parts, ascending."""
        return sorted(set.intersection(*map(set, self.disks)))

    def damage(self, shard: int, *, serving: bool = False) -> None:
        """Sometimes delete or damage keys that only mergers write, if a checkpoint and the tape can rebuild them.

        Args:
            shard: The shard whose keys these are.
            serving: This happens at any time, and not just before a merger loads the run.
        """
        run = self.invariants[shard].run
        if not (self.faults and self.rates.damage and self.disks[shard] and (serving or self.happens(0.5))):
            return
        of_fragments = dict(run.fragments)
        for p, outer in dict(run.outer).items():
            if p in of_fragments and (self.damages.random() < 0.5 if serving else self.happens(0.6)):
                self.damaged[shard][p] = (of_fragments[p][0].version, outer)
                self.broker.damage(RUN, shard, "outer", p, self.damages)
        found = [(kind, at) for kind in ("fragments", "heads", "differences") for at in getattr(run, kind)]
        for kind, at in found:
            if self.damages.random() < 0.3:
                self.broker.damage(RUN, shard, kind, at, self.damages)
        if self.damages.random() < 0.3:
            self.broker.damage(RUN, shard, "state", None, self.damages)

    # -- events -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Let time pass, inject faults, and let one process act."""
        self.clock.now += self.random.random() * 0.5
        if self.late and self.happens(0.2):
            deliver(self)
        if self.happens(0.3):
            self._background()
        if self.old_primary and self.clock.now >= self.old_primary.until:
            self._find_new_primary()
        if self.faults:
            self._inject_faults()
        self._keep_staffed()
        able = [p for p in self.processes if not p.is_stalled and p.asleep_until <= self.clock.now]
        mergers = [p for p in able if isinstance(p, MergerProcess)]
        islands = [p for p in able if isinstance(p, IslandProcess)]
        # However many shards there are, each merger acts two thirds as often as all islands.
        if who := (mergers if self.happens(self.manifest.shards / (self.manifest.shards + 1.5)) else islands) or able:
            self._act(self.random.choice(who))

    def _inject_faults(self) -> None:
        if self.saved and self.clock.now - self.saved[0] >= LAG_SECONDS:
            self._fail_over()
        if self.happens(0.02) and self.rates.loses != NOTHING:
            self._lose()
        if self.damages.random() < 0.02:
            self.damage(self._any_shard(self.damages), serving=True)
        if self.happens(0.01) and len(self.mergers) < 3 * self.manifest.shards:
            self._start_merger(self._any_shard(self.random))
        if self.happens(0.01) and len(self.wanted) < len(NAMES):
            self.wanted.append(NAMES[len(self.wanted)])
        if self.run is not None and self.happens(self.rates.steered):
            self._steer()
        if self.happens(self.rates.pause) and self.processes:
            process = self.random.choice(self.processes)
            process.asleep_until = self.clock.now + self.random.choice([2.0, 7.0, 13.0])

    def _steer(self) -> None:
        """Change a setting of the operator, sometimes to nonsense."""
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
        whole(self.broker.connect(RUN), self.manifest).reader.steer({name: self.random.choice(values)})
        self.broker.touched()

    def _keep_staffed(self) -> None:
        if self._nested:
            return
        for shard in range(self.manifest.shards):
            if shard != self.away and not self.mergers_of(shard):
                self._start_merger(shard)
        missing = set(self.wanted) - {island.name for island in self.islands}
        if missing and self.happens(0.3):
            self._start(partial(IslandProcess, self, min(missing)))

    def _start_merger(self, shard: int) -> None:
        self.births += 1
        self._start(partial(MergerProcess, self, f"merger-{self.births}", shard))

    def _start(self, started: Callable[[], Process]) -> None:
        before = set(self.alive)
        try:
            self.processes.append(started())
        # ConfigError: the operator has expelled the island. WireError: a fragment is gone until a merger writes it.
        except (Crash, BrokerError, ConfigError, WireError):
            self.alive &= before  # It is started again later.

    def _act(self, process: Process) -> None:
        try:
            process.act()
        except Crash:
            self._end(process)
            if self.happens(0.5):
                self.left_behind.append(process.jobs)  # A fenced merger, say, lets its thread end its work.

    def _end(self, process: Process) -> None:
        if process in self.processes:  # a job of its own may have ended it meanwhile
            self.processes.remove(process)
        self.alive.discard(process.who)

    def _background(self) -> None:
        """Let the background thread of one process do a job."""
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

    def take_away(self, shard: int) -> None:
        """Let all mergers of a shard die, and start none until `away` is None again.

        The islands cannot reach a further shard either, unless some are missing, which could not join without it.
        """
        self.away = shard
        self.is_cut_off = shard > 0 and {island.name for island in self.islands} == set(self.wanted)
        self.kill_mergers(shard)

    def kill_mergers(self, shard: int = 0) -> None:
        for process in self.mergers_of(shard):
            self._end(process)

    def settle(self, events: int) -> None:
        """Play events without faults. The holder of the lease keeps it, and every contribution is merged or refused."""
        self.faults = False
        self._find_new_primary()
        for each in self.invariants:
            control = each.run.control if each.run else {}
            if changes := {name: "" for name in control if name not in SETTINGS}:
                of_shard(self.broker.connect(RUN), self.manifest, each.shard).reader.steer(changes)
        self.broker.touched()
        self.clock.now += LEASE_SECONDS + 1
        for process in self.processes:
            process.cut_until.clear()
            process.asleep_until = float("-inf")
        for _ in range(events):
            self.play()
            self.check()

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold after every event."""
        for each in self.invariants:
            each.check()

    def check_sums(self) -> None:
        """Assert that readers of the whole run see the counters and the rounds of all shards."""
        reader = whole(self.broker.connect(RUN), self.manifest).reader
        counters, tape = reader.counters(), reader.tape(1 << 20)
        runs = [each.run for each in self.invariants]
        assert counters.published == counters.merged + counters.refused + sum(len(run.updates) for run in runs)
        assert counters.merged == sum(run.counters["merged"] for run in runs)
        assert len(tape) == sum(len(run.tape) for run in runs)
        for p, head in enumerate(reader.heads()):
            versions = [entry.version for entry in tape if entry.fragment == p]
            assert versions == list(range(1, len(versions) + 1)), f"fragment {p} has versions {versions}"
            assert head is None or head.version == len(versions)

    def check_loaded(self, process: MergerProcess) -> None:
        """Assert that a merger has loaded what the broker had."""
        damaged = self.damaged[process.shard]
        self.invariants[process.shard].check_loaded(process.merger, damaged)
        damaged.clear()
