"""The faults of a simulation, a connection to the broker on which calls fail, and a primary that was replaced."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.memory.state import MemoryRun
from archipelago.broker.shards.transport import Shardable
from tests.intercept import Intercepted

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.simulated_run import Simulation

REPEATED = frozenset(["publish", "heartbeat", "hand_over"])
FENCED = frozenset(["renew", "take_up", "announce", "refuse", "commit", "compact", "trim", "release", "rewrite"])
WRITES = REPEATED | FENCED | {"lease_range", "request_state", "promise_answer", "withdraw_request", "acquire", "look"}
#: Calls that change nothing.
READS = frozenset(
    ["events", "heads", "fragment", "difference", "manifest", "tape", "cursors", "control", "outer", "updates",
     "presences", "kept", "merger_state", "instance", "holds", "leased", "last_event", "uid"]
)  # fmt: skip
NOTHING, DISKS, FAILOVER, EVERYTHING = "nothing", "disks", "failover", "everything"


class Crash(Exception):  # noqa: N818 - a process has died, which is no error
    """A process died in the middle of its I/O."""


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault, at each call or each event.

    Attributes:
        lost: The request or the answer of a call is lost.
        crash: The process dies at a call.
        repeat: The broker executes a call twice.
        garble: The payload of a contribution is damaged on its way.
        late: The caller gets an error, and the broker gets the request later.
        lag: A process sees only some of the events.
        stall: A process stands still in the middle of a call while others act.
        cut: A process is cut off from a shard for a while.
        pause: A process does nothing for a while.
        loses: What may be lost: nothing, checkpoints (`disks`), the newest writes of the broker (`failover`), or all of
            it (`everything`).
        checkpoints: Whether mergers write checkpoints.
        damage: Whether the merger's own state may be gone when the next merger loads it.
        steered: The operator changes a setting, sometimes to nonsense.
    """

    lost: float
    crash: float
    repeat: float
    garble: float
    late: float
    lag: float
    stall: float
    cut: float
    pause: float
    loses: str
    checkpoints: bool
    damage: bool
    steered: float

    @classmethod
    def none(cls) -> FaultRates:
        """Return the rates of a run with checkpoints and without faults, which can be restored."""
        return cls(
            lost=0.0, crash=0.0, repeat=0.0, garble=0.0, late=0.0, lag=0.0, stall=0.0, cut=0.0, pause=0.0,
            loses=EVERYTHING, checkpoints=True, damage=False, steered=0.0,
        )  # fmt: skip

    @classmethod
    def draw(cls, rng: random.Random) -> FaultRates:
        checkpoints = rng.random() < 0.85
        loses = rng.choice([NOTHING, DISKS, FAILOVER, EVERYTHING])
        return cls(
            lost=rng.choice([0.0, 0.01, 0.05, 0.15]),
            crash=rng.choice([0.0, 0.002, 0.006]),
            repeat=rng.choice([0.0, 0.02, 0.1]),
            garble=rng.choice([0.0, 0.0, 0.02]),
            late=rng.choice([0.0, 0.0, 0.01, 0.03]),
            lag=rng.choice([0.0, 0.1, 0.5]),
            stall=rng.choice([0.0, 0.0, 0.002, 0.008]),
            cut=rng.choice([0.0, 0.01]),
            pause=rng.choice([0.0, 0.01]),
            loses=loses if checkpoints or loses == FAILOVER else NOTHING,
            checkpoints=checkpoints,
            damage=checkpoints and loses == NOTHING,
            steered=rng.choice([0.0, 0.01, 0.03]),
        )


class FaultyConnection(Intercepted):
    """A process's connection to one shard. Its calls may be lost, repeated or late, or end with a crash.

    Attributes:
        process: Whose connection it is.
        shard: The number of the shard.
    """

    def __init__(self, simulation: Simulation, process: Process, inner: Shardable, shard: int = 0) -> None:
        super().__init__(inner)
        self._world, self._home = simulation, inner
        self.process, self.shard = process, shard

    def of_shard(self, shard: int) -> FaultyConnection:
        return FaultyConnection(self._world, self.process, cast(Shardable, self._home.of_shard(shard)), shard)

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._world.is_cut_off and self.shard == self._world.away:
            raise UnreachableError("its server is away")
        if name == "events":
            return self._events(method, *args, **kwargs)
        return self._call(name, method, *args, **kwargs)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        simulation = self._world
        if not simulation.faults:
            return simulation.execute(self, name, method, args, kwargs)
        simulation.before(self, name)
        if name in WRITES and simulation.happens(simulation.rates.late):
            simulation.late.append((self, name, method, args, kwargs))
            raise UnreachableError(f"no answer to {name}")
        answer = simulation.execute(self, name, method, args, kwargs)
        if name in REPEATED and simulation.happens(simulation.rates.repeat):
            answer = simulation.execute(self, name, method, args, kwargs)
        simulation.after(name)
        return answer

    def _events(self, read: Callable[..., Any], after: str, block_seconds: float, count: int = 256) -> Any:
        simulation = self._world
        if not simulation.faults:
            return read(after, 0.0, count)
        simulation.before(self, "events")
        found = simulation.execute(self, "events", read, (after, 0.0, count), {})
        # Redis withholds no marker from a merger that looks for those of another shard.
        may_lag = self.process.who or simulation.manifest.shards == 1
        if found and may_lag and simulation.happens(simulation.rates.lag):
            found = found[: simulation.random.randrange(len(found))]  # The process sees fewer events than snapshots.
        simulation.after("events")
        return found


def deliver(simulation: Simulation) -> None:
    """Let one late request reach the broker. The order is random, and its answer is lost."""
    connection, name, method, args, kwargs = simulation.late.pop(simulation.random.randrange(len(simulation.late)))
    if name == "look":  # what it reads leaves no trace at a server, so only the lease may be renewed
        _, _, *renewals = args
        if not any(renewals):
            return
        name, method, args, kwargs = "renew", connection.inner.merger.renew, renewals[0], {}
    try:
        simulation.execute(connection, name, method, args, kwargs)
    except (BrokerError, Crash):  # only a part of it arrives
        return


class OldPrimary:
    """Answers its users until they find the new primary. What they write in the meantime is lost.

    Ids of entries and events derive from the time, so the two primaries never give the same one.

    Attributes:
        acknowledged: The contributions that it has acknowledged, by identity.

    Args:
        shard: The shard that it held.
        key: The name under which the broker keeps that shard.
        run: What it holds.
        acknowledged: As above, until now.
        since: When the new primary became its replica for the last time. Later writes are lost.
        users: The processes that still use it.
        until: When they find the new one.
    """

    def __init__(
        self,
        shard: int,
        key: str,
        run: MemoryRun,
        acknowledged: Iterable[str],
        since: float,
        users: Collection[Process],
        until: float,
    ) -> None:
        self.shard, self._key, self._run = shard, key, run
        self.acknowledged, self.since = set(acknowledged), since
        self.users, self.until = users, until

    def call(self, runs: dict[str, MemoryRun], method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let it execute a call."""
        new, old = runs[self._key], self._run
        _advance(old, new)
        runs[self._key] = old
        try:
            return method(*args, **kwargs)
        finally:
            runs[self._key] = new
            _advance(new, old)


def _advance(run: MemoryRun, other: MemoryRun) -> None:
    run.next_event, run.next_update = other.next_event, other.next_update
