"""All keys but the manifest are deleted, emptied and overwritten, and the next merger that loads the run has its bits.

What the islands send depends only on the number of the round, so a run whose keys were damaged can be compared with one
that was left alone, bit for bit. One run is damaged again and again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import pytest

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import TapeEntry
from archipelago.broker.redis import chunks
from archipelago.broker.redis.client import fake_client
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.merger import kinds_of
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.wire import digest_of, full_snapshot, newest
from archipelago.merger.checkpointer import Checkpointer
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from tests import samples
from tests.harness.merger_run import CONFIG, Shelf, take_checkpoint, values
from tests.harness.played import CreatedRun
from tests.intercept import Intercepted

RUN, ISLANDS = "sample", "ab"
#: Differences go down, so what islands hold cannot be derived from the merger's exact parameters.
DIFFERENCES = replace(
    CONFIG, wire=replace(CONFIG.wire, down="int4"), sync=replace(CONFIG.sync, quorum=2, grace=0.0), record=True
)
TURNS_MAX = 200
#: The rounds of one case, after which a checkpoint is taken, a key is damaged, and the case ends.
CHECKPOINT, DAMAGED, ROUNDS = 2, 4, 9
#: The run takes a checkpoint only when the test asks for it.
CHECKPOINT_SECONDS = 1e9
#: Keys of a family. The newest one is damaged.
FAMILIES = ("difference", "kept")
#: Each key of a run, by its name in `Keys`. Keys of a family stand for all of it.
KEYS: dict[str, Callable[[Keys], str]] = {
    **{name: attrgetter(name) for name in vars(Keys(RUN)) if name not in ("run", "tag", "manifest")},
    "updates": lambda keys: keys.updates("a"),
    "taken": lambda keys: keys.taken("0"),
    "island": lambda keys: keys.island("a"),
    "name": lambda keys: keys.name("a"),
    "registry": lambda keys: REGISTRY,
    "head": lambda keys: keys.head(0),
    "fragment": lambda keys: keys.fragment(0),
    "outer": lambda keys: keys.outer(0),
    "handover": lambda keys: keys.handover("a/x"),
}
#: The quick tier plays these cases, which cover each way of loading, and the full tier plays all.
QUICK = [
    ("state", "a list", "serving"), ("state", "earlier", "restarted"), ("epoch", "huge", "restarted"),
    ("lease", "a list", "restarted"), ("counters", "not UTF-8", "serving"), ("head", "deleted", "serving"),
    ("head", "ahead", "restarted"), ("kept", "deleted", "restarted"), ("difference", "deleted", "serving"),
    ("fragment", "deleted", "serving"), ("fragment", "earlier", "restarted"), ("outer", "not UTF-8", "restarted"),
    ("tape", "a list", "serving"), ("tape", "huge", "restarted"), ("snapshots", "a list", "serving"),
    ("islands", "a list", "restarted"), ("data", "huge", "restarted"),
    ("updates", "a list", "serving"),
]  # fmt: skip
_SERVERS = itertools.count()
Case = tuple[str, str, str]


class Unchanged(Exception):  # noqa: N818 - what would damage a key leaves it as it is, so that the case is over
    """A key that does not exist is deleted, for example."""


class Died(Exception):  # noqa: N818 - the merger's process was killed, which is no error
    """The merger dies here, so that it neither takes a last checkpoint nor releases the lease."""


class Unblocked(Intercepted):
    """A connection that never waits for contributions, because no other thread sends any."""

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(0.0, *args[1:], **kwargs) if name == "look" else method(*args, **kwargs)


class Observed(Merger):
    """A merger that counts how often it took the lease."""

    taken = 0

    def acquire(self) -> bool:
        """Take the lease."""
        done = super().acquire()
        self.taken += done
        return done


class DamagedRun(CreatedRun):
    """A run, its islands and its merger. `play` serves until a number of rounds has closed.

    Attributes:
        client: The client of its fake server.
        digests: The digest of the published parameters after each round.
    """

    def __init__(self) -> None:
        self.client: Any = fake_client(f"damaged-{next(_SERVERS)}")
        self.keys, manifest = Keys(RUN), samples.manifest(RUN, DIFFERENCES)
        super().__init__(manifest, samples.first_snapshots(manifest), lambda: RedisTransport(self.client, RUN))
        self.store = Shelf()
        self.digests: dict[int, str] = {}
        self.sent: dict[tuple[str, int], str] = {}
        self.tried: dict[tuple[str, int], int] = {}
        self.sequences = itertools.count()
        self._taken = 0
        self.merger = self._merger()

    def _merger(self) -> Observed:
        transport = Unblocked(self.connect())
        checkpointer = Checkpointer(transport, self.store, None, CHECKPOINT_SECONDS, at_once)
        return Observed(
            transport, self.clock, "merger", live_poll_seconds=0.0, checkpointer=checkpointer, on_round=self._on_round
        )

    def _on_round(self, entry: TapeEntry) -> None:
        self.digests[entry.round] = entry.digest

    def _go_back(self) -> None:
        """Forget the rounds after the last one that the merger knows. Islands hear of it when it takes up the run."""
        if self.merger.taken and self.merger.fragments:
            last = self.merger.state.closed
            self.digests = {number: digest for number, digest in self.digests.items() if number <= last}

    @property
    def closed(self) -> int:
        """The last closed round."""
        return max(self.digests, default=0)

    @property
    def taken(self) -> int:
        """How often mergers took the lease."""
        return self._taken + self.merger.taken

    def key(self, name: str) -> str:
        """Return the key of a name in KEYS."""
        if name == "difference":
            return self.keys.difference(0, (self.closed + 1) // 2)  # of the newest version of fragment 0
        if name == "kept":
            tape = self.transport.reader.tape(1)
            return self.keys.kept(tape[0].members[0].entry if tape else "a/1-0")
        return KEYS[name](self.keys)

    def restart(self) -> None:
        """Replace the merger by a new one, which loads the run from Redis."""
        self._taken += self.merger.taken
        self.merger = self._merger()

    def play(self, until: int, damage: Callable[[], None] = lambda: None, checkpoint: int | None = None) -> None:
        """Serve until round `until` has closed.

        Args:
            until: The last round.
            damage: Called once, as soon as the merger has loaded the run.
            checkpoint: Take a checkpoint after that round.
        """
        turns, turns_max, pending = 0, TURNS_MAX + 2 * (until - self.closed), [damage]

        def stopped() -> bool:
            nonlocal turns
            turns += 1
            assert turns < turns_max, f"round {self.closed + 1} does not close"
            self.clock.now += 2.0  # so that each turn renews the lease
            self._go_back()
            if pending and turns > 2:
                pending.pop()()
            if self.closed == checkpoint and not any(image.round == checkpoint for image in self.store.images.values()):
                take_checkpoint(self.merger)
            if self.closed >= until and not pending:
                raise Died
            self._act(min(self.closed + 1, until))
            return False

        def pause(seconds: float) -> None:
            self.clock.now += seconds

        with contextlib.suppress(Died):
            serve(self.merger, stopped, pause)

    def _act(self, number: int) -> None:
        """Let each island send a heartbeat, and its contribution to a round unless Redis holds it."""
        unreadable = self._unreadable()
        for island in ISLANDS:
            with contextlib.suppress(BrokerError, WireError):  # the island tries again
                self.transport.island.heartbeat(samples.heartbeat(island, unreadable=unreadable))
        for island in ISLANDS:
            with contextlib.suppress(BrokerError, WireError):
                self._send(island, number)

    def _unreadable(self) -> str:
        """Return what islands say that they cannot read, which a merger then writes again."""
        out, reader = [], self.connect().reader
        for p in range(2):
            try:
                newest(reader, self.manifest, p)
            except (BrokerError, WireError):
                out.append(str(p))
        return " ".join(out)

    def _send(self, island: str, number: int) -> None:
        entry = self.sent.get((island, number))
        if number in self.digests or (entry is not None and self.transport.island.holds(entry)):
            return
        p = (number - 1) % 2
        if entry is not None or (island, number) not in self.tried:  # what could not be sent keeps its identity
            self.tried[island, number] = next(self.sequences)
        contribution, payload = samples.packed(
            values(2 * number + ord(island)),
            island=island, round=number, fragment=p, base=self.manifest.version_at(number - 1, p),
            sequence=self.tried[island, number], tokens=100 + number, data=f"{ord(island) - 97}:0:{number}",
        )  # fmt: skip
        self.sent[island, number] = self.transport.island.publish(contribution, payload)


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
    "not UTF-8": lambda run, key: _values(run, key, b"\xff\xfe"),
    "huge": lambda run, key: _values(run, key, HUGE),
    "negative": lambda run, key: _values(run, key, b"-5"),
    "ahead": _ahead,
}


# -- the tests ---------------------------------------------------------------------------------------------------------


def test_each_key_has_a_case() -> None:
    names = {name for name in dir(Keys) if not name.startswith("_")} | set(vars(Keys(RUN)))
    assert names - {*KEYS, *FAMILIES} == {
        "run", "tag", "manifest", "patterns", "short", "of_the_past", "of_island", "said", "chunk", "chunk_prefix",
        "handover_chunks", "kept_prefix",
    }  # fmt: skip


HOWS = (*DAMAGES, "earlier")
#: How many cases damage one run. A long run takes more time in each of its cases.
PART = 6
#: What the merger does meanwhile.
WHEN = ("serving", "restarted")


@cache
def run_left_alone() -> DamagedRun:
    """Return a run that is never damaged."""
    return DamagedRun()


def undamaged(rounds: int) -> dict[int, str]:
    """Return the digests of the first rounds of a run that is left alone."""
    alone = run_left_alone()
    if alone.closed < rounds:
        alone.play(rounds)
    return {number: alone.digests[number] for number in range(1, rounds + 1)}


def play(run: DamagedRun, name: str, how: str, when: str) -> None:
    """Play a few rounds, and damage a key after some of them. A checkpoint holds the first ones."""
    key, first, taken = run.key(name), run.closed, run.taken
    run.play(first + DAMAGED - 2, checkpoint=first + CHECKPOINT)
    earlier = run.client.dump(key)
    run.play(first + DAMAGED, checkpoint=first + CHECKPOINT)

    def damage() -> None:
        before = run.client.dump(run.key(name))
        if how != "earlier":
            DAMAGES[how](run, run.key(name))
        elif earlier is None:
            run.client.delete(key)
        else:
            run.client.restore(key, 0, earlier, replace=True)
        if run.client.dump(run.key(name)) == before:
            raise Unchanged

    if when == "serving":  # the merger goes on, and the next one finds what is still damaged
        run.play(first + DAMAGED + 2, damage=damage)
    else:
        damage()
    run.restart()
    run.play(first + ROUNDS)
    check(run)
    assert run.taken - taken <= 6, "the merger loads the run again and again"


def check(run: DamagedRun) -> None:
    """Assert that what islands read is what the merger has, and that every key is sound again."""
    fresh = run.connect()
    for p in range(2):
        full = full_snapshot(fresh.reader, run.manifest, p)
        assert digest_of(full.params_N) == (full.snapshot.held or digest_of(full.params_N))
        last = newest(fresh.reader, run.manifest, p)
        assert digest_of(last.params_N) == last.snapshot.held == run.digests[last.snapshot.round]
    view = samples.view_of(fresh)
    assert view.rounds == run.closed
    assert fresh.reader.backlog() == 0, "a contribution was never read"
    kinds = kinds_of(run.keys, range(2), ISLANDS)
    found = {key: run.client.type(key).decode() for key in kinds}
    assert {key: kind for key, kind in found.items() if kind not in (kinds[key], "none")} == {}


def play_all(cases: Sequence[Case]) -> DamagedRun:
    """Play one run through these cases."""
    run, expected = DamagedRun(), undamaged(ROUNDS * len(cases))
    for case in cases:
        try:
            with contextlib.suppress(Unchanged):
                play(run, *case)
            if case[0] != "updates":  # what an island has sent is lost with its stream
                assert run.digests == {number: expected[number] for number in run.digests}
        except Exception as error:
            raise AssertionError(f"damaged: {case}") from error
    return run


@pytest.fixture(autouse=True)
def _all_payloads_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "INLINE_BYTES", 64)


def test_a_run_goes_on_to_the_same_bits() -> None:
    for first in range(0, len(QUICK), PART):
        cases = QUICK[first : first + PART]
        assert play_all(cases).closed == ROUNDS * len(cases), "each damage changes its key"


@pytest.mark.full
@pytest.mark.parametrize("how", HOWS)
def test_a_run_goes_on_to_the_same_bits_whichever_key_is_damaged(how: str) -> None:
    for number, name in enumerate((*KEYS, *FAMILIES), HOWS.index(how)):
        play_all([(name, how, WHEN[number % 2])])
