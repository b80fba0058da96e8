"""A run of two fragments at a Redis, whose keys a test damages while islands go on sending.

What the islands send depends only on the number of the round, so a run whose keys were damaged can be compared with one
that was left alone, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.redis.client import RedisClient
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport
from archipelago.merger.admission import version_after
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.harness.merger_run import CONFIG, Shelf, values
from tests.harness.merger_run import MergerRun as InMemory

#: Differences go down, so what islands hold cannot be derived from the merger's exact parameters.
DIFFERENCES = replace(
    CONFIG, wire=replace(CONFIG.wire, down="int4"), sync=replace(CONFIG.sync, quorum=2, grace=0.0), record=True
)
RUN, ISLANDS = "sample", "ab"
TURNS_MAX = 200


class Died(Exception):  # noqa: N818 - the merger's process was killed, which is no error
    """The merger dies here, so that it neither takes a last checkpoint nor releases the lease."""


class Observed(Merger):
    """A merger that counts how often it took the lease."""

    taken = 0

    def acquire(self) -> bool:
        """Take the lease."""
        done = super().acquire()
        self.taken += done
        return done


class DamagedRun:
    """A run, its islands and its merger. `play` serves until a number of rounds has closed.

    Attributes:
        digests: The digest of the published parameters after each round.
        taken: How often mergers took the lease.
    """

    def __init__(self, client: RedisClient, *, has_store: bool = True) -> None:
        self.client: Any = client
        self.keys = Keys(RUN)
        self.clock = VirtualClock()
        self.manifest = samples.manifest(RUN, DIFFERENCES)
        self.transport = RedisTransport(client, RUN)
        self.transport.create(self.manifest, samples.first_snapshots(self.manifest))
        self.store = Shelf() if has_store else None
        self.digests: dict[int, str] = {}
        self.sent: dict[tuple[str, int], str] = {}
        self.turns = 0
        self.merger = self._merger()
        self.taken = 0

    def _merger(self) -> Observed:
        transport = RedisTransport(self.client, RUN)
        checkpointer = None
        if self.store is not None:
            made = InMemory.checkpointer
            checkpointer = made(_Broker(transport), self.store)  # type: ignore[arg-type]
        return Observed(
            transport, self.clock, "merger", live_poll_seconds=0.0, checkpointer=checkpointer, on_round=self._closed
        )

    def _closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        self.digests[entry.round] = entry.digest

    def restart(self) -> None:
        """Replace the merger by a new one with --resume, which loads the run from Redis."""
        self.taken += self.merger.taken
        folder = MergerFolder(Path("nowhere"))
        if self.store is not None:
            folder.store = self.store
        folder.find_or_bring_back(self.transport, resume=True)
        self.merger = self._merger()

    def play(self, until: int, damage: Callable[[], None] = lambda: None, checkpoint: int = 0) -> None:
        """Serve until round `until` has closed.

        Args:
            until: The last round.
            damage: Called once, as soon as the merger has loaded the run.
            checkpoint: Take a checkpoint after that round.
        """
        turns, pending = 0, [damage]

        def stopped() -> bool:
            nonlocal turns
            turns += 1
            assert turns < TURNS_MAX, f"round {max(self.digests, default=0) + 1} does not close"
            self.clock.now += 2.0  # so that each turn renews the lease and looks after the keys
            if pending and turns > 2:
                pending.pop()()
            closed = max(self.digests, default=0)
            if checkpoint and closed == checkpoint and self.store is not None and not self.store.images:
                self.merger.checkpoint()
            if closed >= until and not pending:
                raise Died
            self._act(min(closed + 1, until))
            return False

        def pause(seconds: float) -> None:
            self.clock.now += seconds

        with contextlib.suppress(Died):
            serve(self.merger, stopped, pause)

    def _act(self, number: int) -> None:
        """Let each island send a heartbeat, and its contribution to a round unless Redis holds it."""
        for island in ISLANDS:
            with contextlib.suppress(BrokerError, WireError):  # the island tries again
                self.transport.island.heartbeat(samples.heartbeat(island))
        for island in ISLANDS:
            with contextlib.suppress(BrokerError, WireError):
                self._send(island, number)

    def _send(self, island: str, number: int) -> None:
        entry = self.sent.get((island, number))
        if number in self.digests or (entry is not None and self.transport.island.holds(entry)):
            return
        p = (number - 1) % 2
        contribution, payload = samples.packed(
            values(2 * number + ord(island)),
            island=island, round=number, fragment=p, base=version_after(number - 1, p, 2), sequence=number,
            tokens=100 + number, data=f"{ord(island) - 97}:0:{number}",
        )  # fmt: skip
        actions = samples.actions(number, island=island)
        self.sent[island, number] = self.transport.island.publish(contribution, payload, actions)


class _Broker:
    """Stands in for a `MergerRun`, to build its checkpointer on another transport."""

    def __init__(self, transport: RedisTransport) -> None:
        self.broker = self
        self._transport = transport

    def connect(self, run: str) -> RedisTransport:
        """Return the transport."""
        return self._transport


# -- damages -----------------------------------------------------------------------------------------------------------

HUGE = b"9" * 400


def _values(run: DamagedRun, key: str, new: bytes) -> None:
    """Replace a string, each value of a hash, or add an entry or a member of that value."""
    kind = run.client.type(key)
    if kind == b"hash":
        run.client.hset(key, mapping=dict.fromkeys(run.client.hkeys(key), new))
    elif kind == b"stream":
        newest = run.client.xrevrange(key, count=1)
        run.client.xadd(key, dict.fromkeys(newest[0][1] if newest else [b"round"], new))
    elif kind == b"set":
        run.client.sadd(key, new)
    else:
        run.client.set(key, new)


def _delete(run: DamagedRun, key: str) -> None:
    run.client.delete(key)


def _empty(run: DamagedRun, key: str) -> None:
    kind = run.client.type(key)
    if kind == b"stream":
        run.client.xtrim(key, maxlen=0, approximate=False)
    elif kind == b"string":
        run.client.set(key, b"")
    else:
        run.client.delete(key)


def _as_list(run: DamagedRun, key: str) -> None:
    run.client.delete(key)
    run.client.rpush(key, "nonsense")


def _as_text(run: DamagedRun, key: str) -> None:
    run.client.set(key, "nonsense")


def _ahead(run: DamagedRun, key: str) -> None:
    """Add a million to all numbers: of a string, of a hash, or in a copy of a stream's newest entry."""
    kind = run.client.type(key)
    if kind == b"hash":
        run.client.hset(key, mapping={name: _added(value) for name, value in run.client.hgetall(key).items()})
    elif kind == b"stream":
        for _, fields in run.client.xrevrange(key, count=1):
            run.client.xadd(key, {name: _added(value) for name, value in fields.items()})
    elif kind == b"string":
        run.client.set(key, _added(run.client.get(key)))


def _added(value: bytes) -> bytes:
    try:
        state = json.loads(value)
    except ValueError:
        number, _, rest = value.partition(b" ")
        return b"%d %s" % (int(number) + 1_000_000, rest) if number.isdigit() else value
    if isinstance(state, dict) and "closed" in state:
        state |= {"closed": state["closed"] + 1_000_000}
        return json.dumps(state).encode()
    return b"%d" % (state + 1_000_000) if isinstance(state, int) else value


DAMAGES: dict[str, Callable[[DamagedRun, str], None]] = {
    "deleted": _delete,
    "emptied": _empty,
    "a list": _as_list,
    "a text": _as_text,
    "not UTF-8": lambda run, key: _values(run, key, b"\xff\xfe"),
    "huge": lambda run, key: _values(run, key, HUGE),
    "negative": lambda run, key: _values(run, key, b"-5"),
    "ahead": _ahead,
}


class Earlier:
    """The value that a key had at an earlier time."""

    def __init__(self, run: DamagedRun, key: str) -> None:
        self._run, self._key, self._kind = run, key, run.client.type(key)
        read = {b"hash": "hgetall", b"set": "smembers", b"string": "get"}.get(self._kind)
        self._value: Any = getattr(run.client, read)(key) if read else []
        if self._kind == b"stream":
            self._value = run.client.xrange(key)

    def put_back(self) -> None:
        """Give the key that value again."""
        client, key = self._run.client, self._key
        client.delete(key)
        if self._kind == b"hash":
            client.hset(key, mapping=self._value)
        elif self._kind == b"set":
            client.sadd(key, *self._value)
        elif self._kind == b"string":
            client.set(key, self._value)
        for entry, fields in self._value if self._kind == b"stream" else ():
            client.xadd(key, fields, id=entry)
