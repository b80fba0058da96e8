"""What may go wrong between a process and the broker, and a connection on which it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.memory import MemoryTransport

if TYPE_CHECKING:
    from tests.simulation.world import Process, World

REPEATED = frozenset(["publish", "heartbeat", "record_actions", "hand_over"])
FENCED = frozenset(["renew", "announce", "refuse", "commit", "trim", "release"])
WRITES = REPEATED | FENCED | {"lease_shard", "ask", "promise", "withdraw", "acquire", "updates"}
"""`updates` too: what it delivers to somebody who does not wait for it any more, nobody else is given"""


class Crash(Exception):  # noqa: N818 - not an error of anyone's: the process is gone
    """The process died in the middle of its I/O."""


@dataclass(frozen=True)
class Weather:
    """How likely each fault is, at each call or each event."""

    lost: float
    """a call's request or its answer"""
    crash: float
    """of the process, at a call"""
    repeat: float
    """the broker does it twice"""
    garble: float
    """a contribution's payload is damaged on its way"""
    late: float
    """the caller hears of an error, and the broker gets the request later"""
    lag: float
    """of the events that are there, only some are seen yet"""
    stall: float
    """a process stands still in the middle of a call, while others go on"""
    cut: float
    """a process is cut off for a while"""
    pause: float
    """a process does nothing for a while"""
    loses: str
    """what the broker may lose: nothing, its tail, or everything"""
    checkpoints: bool
    """whether mergers take any"""
    damage: bool
    """whether the merger's own state may be gone when the next one loads"""
    steered: float
    """the operator wishes something else, or somebody writes nonsense there"""

    @classmethod
    def of(cls, rng: random.Random) -> Weather:
        """Calm or wild, each fault on its own."""
        checkpoints = rng.random() < 0.85
        loses = rng.choice(["nothing", "nothing", "tail", "everything"])
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
            loses=loses if checkpoints or loses != "everything" else "nothing",
            checkpoints=checkpoints,
            damage=checkpoints and loses == "nothing",
            steered=rng.choice([0.0, 0.01, 0.03]),
        )


class Connection:
    """A process's connection to the broker. Its calls may be lost, repeated, late, or the process's last."""

    def __init__(self, world: World, process: Process, inner: MemoryTransport) -> None:
        self._world, self._process, self._inner = world, process, inner
        self.run = inner.run

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        call = self._events if name == "events" else partial(self._call, name, method)
        setattr(self, name, call)  # found directly from now on
        return call

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        world = self._world
        if not world.faults:
            return world.execute(self._process, name, method, args, kwargs)
        world.before(self._process, name)
        if name in WRITES and world.happens(world.weather.late):
            world.late.append((self._process, name, method, args, kwargs))
            raise UnreachableError(f"no answer to {name}")
        answer = world.execute(self._process, name, method, args, kwargs)
        if name in REPEATED and world.happens(world.weather.repeat):
            answer = world.execute(self._process, name, method, args, kwargs)
        world.after(self._process, name)
        return answer

    def _events(self, after: str, block_seconds: float, count: int = 256) -> Any:
        world = self._world
        if not world.faults:
            return self._inner.events(after, 0.0, count)
        world.before(self._process, "events")
        found = self._inner.events(after, 0.0, count)
        if found and world.happens(world.weather.lag):
            found = found[: world.random.randrange(len(found))]  # an older view than that of the fragments
        world.after(self._process, "events")
        return found


def deliver(world: World) -> None:
    """One of the late requests reaches the broker, in any order; nobody hears the answer."""
    process, name, method, args, kwargs = world.late.pop(world.random.randrange(len(world.late)))
    try:
        world.execute(process, name, method, args, kwargs)
    except BrokerError:
        return
