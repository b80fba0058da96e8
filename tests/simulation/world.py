"""A whole run under faults, from one seed: real mergers and islands, a virtual clock, a broker whose answers get lost.

Everything random comes from the seed, so a failing seed fails again, in the same place.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from broker.config import DataConfig, InnerConfig, OuterConfig, RunConfig, SyncConfig
from broker.errors import BrokerError, FencedError, UnreachableError
from broker.manifest import Manifest
from broker.memory import MemoryBroker, MemoryTransport
from broker.messages import Contribution, Refusal, Snapshot
from broker.wire import digest_of, unpack
from islands.batches import Batches
from islands.inner import InnerState, InnerSteps
from islands.link import Link
from islands.worker import Island
from merger.service import LEASE_SECONDS, Merger
from ops.virtual import VirtualClock
from tests import samples

RUN = "storm"
CONFIG = RunConfig(
    data=DataConfig(batch_size=1, sequence_length=2),
    inner=InnerConfig(steps=1 << 20),
    sync=SyncConfig(interval=4, fragments=2, window=2, staleness_cap=4),
    outer=OuterConfig(momentum=0.5),
)


class Crash(Exception):  # noqa: N818 - not an error of anyone's: the process is gone
    """The process died in the middle of its I/O."""


@jax.jit
def _walk(params: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    """A stand-in for training: each parameter moves a little, another way each step."""
    return {name: value + 1e-3 * jnp.cos(step.astype(jnp.float32) + value) for name, value in params.items()}


def _steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
    return state._replace(params=_walk(state.params, global_step)), jnp.ones(1, jnp.float32)


class _Batches:
    """As many zeros as are asked for."""

    def next(self, steps: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.zeros((steps, 1, 3), np.uint8)


class Faulty:
    """A connection whose every call may be lost, before or after it took effect, or be its process's last."""

    def __init__(self, world: World, inner: MemoryTransport) -> None:
        self._world, self._inner = world, inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "run" or not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            self._world.may_fail(f"before {name}")
            answer = method(*args, **kwargs)
            if name == "publish":
                self._world.acknowledged.append(cast(Contribution, args[0]))
            self._world.may_fail(f"after {name}")
            return answer

        return call


class World:
    """The run and its actors. `play` plays one event; `check` asserts what must always hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.manifest: Manifest = samples.manifest(RUN, CONFIG)
        self.direct = self.broker.connect(RUN)
        self.direct.create(self.manifest, samples.first_snapshots(self.manifest, value=1.0))
        self.fault_rate = self.random.choice([0.0, 0.01, 0.05, 0.2])
        self.crash_rate = self.random.choice([0.0, 0.002, 0.01])
        self.loses_tail = self.random.random() < 0.3
        self.faults = False
        self.acknowledged: list[Contribution] = []
        self.trained: Counter[tuple[str, str]] = Counter()
        self.births = 0
        self.saved: tuple[float, Any] | None = None
        self.tails_lost = 0
        self.mergers = [self._new_merger()]
        self.islands = [self._new_island() for _ in range(self.random.randint(1, 4))]
        self.faults = True

    # -- faults -----------------------------------------------------------------------------------------------------

    def may_fail(self, where: str) -> None:
        """Sometimes the connection breaks here, sometimes the process dies."""
        if not self.faults:
            return
        if self.random.random() < self.crash_rate:
            raise Crash(where)
        if self.random.random() < self.fault_rate:
            raise UnreachableError(f"lost {where}")

    @contextmanager
    def _no_faults(self) -> Iterator[None]:
        faults, self.faults = self.faults, False
        yield
        self.faults = faults

    def _lose_tail(self) -> None:
        """The broker dies and comes back as it was a moment ago: an append-only file that was not flushed.

        Ids are made of the time, so they go on; every connection breaks, and whoever wrote has to look again.
        """
        if self.saved is None:
            self.saved = (self.clock.now, copy.deepcopy(self.broker.runs[RUN]))
            return
        if self.clock.now - self.saved[0] < 2.0:
            return
        now, (_, then) = self.broker.runs[RUN], self.saved
        then.next_event, then.next_update = now.next_event, now.next_update
        self.broker.runs[RUN] = then
        self.saved = None
        self.tails_lost += 1
        for merger in self.mergers:
            merger.forgetful = True  # type: ignore[attr-defined]

    # -- actors -----------------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        return Faulty(self, self.broker.connect(RUN))

    def _new_merger(self) -> Merger:
        self.births += 1
        with self._no_faults():  # a process that cannot begin is started again; that is not what is tested here
            return Merger(self._connect(), self.clock, holder=f"merger-{self.births}", live_poll_seconds=0.5)

    def _new_island(self) -> Island:
        self.births += 1
        link = Link(self._connect(), self.manifest)
        with self._no_faults():
            arrivals = link.join()
        name = f"island-{self.births % 5}"
        return Island(
            name, self.manifest, cast(InnerSteps, _steps), cast(Batches, _Batches()), link, arrivals, self.clock,
            incarnation=f"i{self.births}",
        )  # fmt: skip

    # -- events -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """One event: time passes, and an island or a merger acts; now and then one more of them appears."""
        self.clock.now += self.random.random() * 0.5
        if self.faults and self.loses_tail and self.random.random() < 0.02:
            self._lose_tail()
        if self.faults and self.random.random() < 0.01 and len(self.mergers) < 3:
            self.mergers.append(self._new_merger())
        if self.faults and self.random.random() < 0.01 and len(self.islands) < 5:
            self.islands.append(self._new_island())
        if self.random.random() < 0.4:
            self._merger_acts(self.random.randrange(len(self.mergers)))
        else:
            self._island_acts(self.random.randrange(len(self.islands)))

    def _merger_acts(self, index: int) -> None:
        merger = self.mergers[index]
        try:
            if not merger.epoch:
                if merger.acquire():
                    self._begin(merger)
            elif getattr(merger, "forgetful", False):
                self._begin(merger)
            else:
                merger.turn(0.0)
        except (Crash, FencedError):
            del self.mergers[index]
            if not self.mergers:
                self.mergers.append(self._new_merger())
        except BrokerError:
            merger.forgetful = True  # type: ignore[attr-defined]

    def _begin(self, merger: Merger) -> None:
        merger.load()
        merger.forgetful = False  # type: ignore[attr-defined]

    def _island_acts(self, index: int) -> None:
        island = self.islands[index]
        try:
            island.link.pump()
            if isinstance(island.link.failure, Crash):
                raise island.link.failure
            if self.faults and self.random.random() < 0.01:
                island.leave(flush_seconds=0.0)
                island.link.pump()
                raise Crash("it left")
            island.boundary()
            island.advance()
            self.trained[(island.name, island.incarnation)] += CONFIG.tokens_per_step
        except Crash:
            self.islands[index] = self._new_island()

    def calm(self, events: int) -> None:
        """No more faults: whoever holds the lease keeps it, and everything that was sent is decided about."""
        self.faults = False
        self.clock.now += LEASE_SECONDS + 1
        for _ in range(events):
            self.play()

    # -- what must always hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants 1, 2, 4 and 5 of the design, and that no inner step counts twice."""
        books, pending = self.direct.books(), self.direct.backlog()
        assert books.published == books.merged + books.refused + pending
        tape = self.direct.tape(1 << 30)
        assert [entry.round for entry in tape] == list(range(1, len(tape) + 1))
        merged = Counter((m.island, m.incarnation, m.sequence) for entry in tape for m in entry.members)
        assert max(merged.values(), default=1) == 1, f"merged twice: {merged.most_common(1)}"
        self._check_snapshots()
        for p in range(len(self.manifest.fragments)):
            tokens: Counter[tuple[str, str]] = Counter()
            for entry in tape:
                for m in entry.members if entry.fragment == p else ():
                    tokens[(m.island, m.incarnation)] += m.tokens
            for who, count in tokens.items():
                assert count <= self.trained[who], f"{who} trained {self.trained[who]} tokens, {count} are merged"

    def _check_snapshots(self) -> None:
        newest = {entry.fragment: entry for entry in self.direct.tape(len(self.manifest.fragments))}
        for p, entry in newest.items():
            snapshot, payload = self.direct.fragment(p)
            assert (snapshot.version, snapshot.round) == (entry.version, entry.round)
            assert digest_of(unpack(payload, self.manifest.sizes[p])) == entry.digest

    def check_nothing_lost(self) -> None:
        """Every acknowledged contribution was merged, refused, or still waits."""
        state = self.broker.runs[RUN]
        told = {contribution.identity_text for contribution, _ in state.updates.values()}
        for _, event in state.events:
            told |= event.identities if isinstance(event, Snapshot) else set()
            told |= {event.identity_text} if isinstance(event, Refusal) else set()
        lost = [c.identity_text for c in self.acknowledged if c.identity_text not in told]
        assert not lost, f"lost: {lost[:3]}"
