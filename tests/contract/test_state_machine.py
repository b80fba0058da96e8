"""A stateful property test of a whole run on Redis.

Hypothesis draws a sequence of steps. Mergers and islands start, die, stall and return, and Redis or a disk loses data.
After each step the test compares Redis with a model in plain Python.

The model stores every contribution that was published and follows the tape. It recomputes each round from its own
copies of the payloads (`merger.replay`). The run's parameters, outer state, books, cursors and checkpoints must agree
with the result.

`ARCHIPELAGO_EXAMPLES` sets the number of examples, and `ARCHIPELAGO_STEPS` sets the number of steps in each of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import archipelago.broker.redis.chunks
import archipelago.broker.redis.creation
import archipelago.broker.redis.islands
import archipelago.broker.redis.lease
import archipelago.broker.redis.merger
import archipelago.merger.checkpoint
from archipelago.broker.codecs import Vector
from archipelago.broker.config import DataConfig, InnerConfig, OuterConfig, RunConfig, SyncConfig
from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, UnreachableError
from archipelago.broker.messages import Contribution, Refusal, TapeEntry, to_fields
from archipelago.broker.published import newest
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.reader import REMEMBER_SECONDS
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import START, Delivery, Image
from archipelago.broker.wire import digest_of, pack, unpack
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.inner import InnerState, InnerSteps
from archipelago.islands.rejoin import Rejoin
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from archipelago.merger import outer
from archipelago.merger.beside import at_once
from archipelago.merger.rebuild import rebuild
from archipelago.merger.record import read
from archipelago.merger.replay import replay_round
from archipelago.merger.restore import round_of
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.service import Merger
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.virtual_time import VirtualClock
from archipelago.ops.launch.embedded_redis import Server
from tests import samples
from tests.intercept import Intercepted
from tests.tiers import examples

EXAMPLES = int(os.environ.get("ARCHIPELAGO_EXAMPLES", "0"))
STEPS = int(os.environ.get("ARCHIPELAGO_STEPS", "20"))
CONFIG = RunConfig(
    record=True,
    data=DataConfig(batch_size=1, sequence_length=2, shards=3),
    inner=InnerConfig(steps=1 << 20),
    sync=SyncConfig(interval=4, fragments=2, window=2, staleness_cap=3),
    outer=OuterConfig(momentum=0.5),
)
TEXT = np.arange(400, dtype=np.int64).astype(np.uint8)
#: No lease expires by itself, even on a slow machine. The test deletes a lease to make it expire.
LEASE_SECONDS = 1000.0
#: The merger takes no checkpoint by itself. The test asks for each one.
CHECKPOINT_SECONDS = 1e9
NONSENSE = b"nonsense"
#: The islands that publish: two that only publish, and three that train.
NAMES = ("i0", "i1", "i2", "s0", "s1")
#: The remaining time to live of a heartbeat that was sent an hour ago.
DEAD_MS = (REMEMBER_SECONDS - 3600) * 1000
MERGER_FAILPOINTS = [
    "acquire.before", "acquire.done", "renew.done", "announce.before", "announce.done", "refuse.before", "refuse.done",
    "compact.placed-snapshot", "compact.placed-outer", "compact.watched", "compact.done", "commit.placed",
    "commit.watched", "commit.done", "trim.before", "trim.done", "checkpoint.before", "checkpoint.done",
]  # fmt: skip
FAULTS = ["lost before", "lost after", "crash before", "crash after"]
BROKEN = ["digest", "size", "nan", "huge", "zstd", "ahead", "tokens", "fragment", "place"]

_runs = itertools.count(1)


class Crash(Exception):  # noqa: N818 - this stands for a dead process, not for an error
    """Raised where the simulated process dies."""


@dataclass
class Trap:
    """The failpoint at which the next process dies.

    `sprung` says whether a process has died there.
    """

    target: str = ""
    sprung: bool = False

    def reach(self, name: str) -> None:
        """Replace `archipelago.broker.failpoints.failpoint`."""
        if name == self.target:
            self.target, self.sprung = "", True
            raise Crash(name)


TRAP = Trap()
#: The modules that contain failpoints.
TRAPPED = (
    archipelago.broker.redis.islands,
    archipelago.broker.redis.lease,
    archipelago.broker.redis.merger,
    archipelago.broker.redis.creation,
    archipelago.merger.checkpoint,
)


@jax.jit
def _walk(state: InnerState, step: jax.Array) -> InnerState:
    """Change the parameters and the moments a little, as a training step would.

    Each step changes the parameters in a different way. The moments stay within what a peer accepts.
    """
    moved = {name: value + 1e-3 * jnp.cos(step.astype(jnp.float32) + value) for name, value in state.params.items()}
    grown = jax.tree.map(lambda part: part + (1 if jnp.issubdtype(part.dtype, jnp.integer) else 1e-3), state.optimizer)
    return InnerState(moved, grown)


def _steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
    return _walk(state, global_step), jnp.ones(1, jnp.float32)


class Wire(Intercepted):
    """A connection of one process, on which a call can fail.

    The connection breaks, or the process dies, before or after the call takes effect. The model records every
    contribution that is published through this connection.
    """

    def __init__(self, model: Model, inner: RedisTransport) -> None:
        super().__init__(inner)
        self.model = model
        self.calls = 0
        self.fault: tuple[int, str] | None = None

    def arm(self, fault: tuple[int, str] | None) -> None:
        """Set the next fault: the number of the call, counted from now, and the kind of the fault."""
        self.calls, self.fault = 0, fault

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        fault = self.fault[1] if self.fault and self.fault[0] == self.calls else ""
        if fault.endswith("before"):
            self._fail(fault)
        answer = self._publish(method, *args) if name == "publish" else method(*args, **kwargs)
        if fault.endswith("after"):
            self._fail(fault)
        return answer

    def _fail(self, fault: str) -> None:
        raise Crash(fault) if fault.startswith("crash") else UnreachableError(fault)

    def _publish(self, method: Callable[..., Any], contribution: Contribution, payload: bytes, *actions: Any) -> Any:
        try:
            entry = method(contribution, payload, *actions)
        except Crash as crash:
            if str(crash) == "publish.done":
                self.model.published(contribution, payload)
            raise
        self.model.published(contribution, payload)
        return entry


@dataclass
class Model:
    """The data that the run's Redis must hold."""

    rules: RoundMerge
    #: Every contribution that was ever published, by identity.
    sent: dict[str, tuple[Contribution, bytes]] = field(default_factory=dict)
    #: The number of stream entries of each identity that this Redis has received.
    copies: Counter[str] = field(default_factory=Counter)
    total: int = 0
    total_tokens: int = 0
    tape: list[TapeEntry] = field(default_factory=list)
    #: `history[t]` is the merger's state after round t.
    history: list[tuple[RunState, list[FragmentState]]] = field(default_factory=list)
    #: The last round that a checkpoint covers, or covered until its disk was lost.
    covered: int = 0
    exists: bool = True
    #: The consumer group was lost. Redis delivers the kept entries again, and the merger refuses them as repeats.
    regrouped: bool = False
    #: Redis is older than the checkpoint on disk. The stream may contain entries that the checkpoint covers.
    rewound: bool = False

    def published(self, contribution: Contribution, payload: bytes) -> None:
        """Record that Redis received one more entry."""
        self.sent[contribution.identity_text] = (contribution, payload)
        if self.exists:  # A Redis that lost the run also loses this entry when the run is restored.
            self.copies[contribution.identity_text] += 1
            self.total += 1
            self.total_tokens += contribution.tokens

    def follow(self, entry: TapeEntry) -> None:
        """Recompute the next round of the tape.

        Raises:
            DifferenceError: The result differs from the entry.
        """
        state, fragments = copied(self.history[-1][0]), list(self.history[-1][1])
        members = [self.sent[member.identity_text] for member in entry.members]
        deliveries = [Delivery(m.entry, *both) for m, both in zip(entry.members, members, strict=True)]
        fragments[entry.fragment] = replay_round(self.rules, state, fragments[entry.fragment], entry, deliveries)
        self.history.append((state, fragments))
        self.tape.append(entry)

    def past(self) -> Model:
        """Return a copy of the present model, for `Run.rewind_model`."""
        return replace(self, copies=Counter(self.copies), tape=list(self.tape), history=list(self.history))

    @property
    def merged(self) -> Counter[str]:
        """The number of times that each identity is in the tape."""
        return Counter(member.identity_text for entry in self.tape for member in entry.members)


def copied(state: RunState) -> RunState:
    return RunState.from_json(state.to_json())


def determined(state: RunState) -> dict[str, Any]:
    """Return the part of the merger's state that the tape determines.

    The round timing depends on the clock. Refusals and checkpoints are not on the tape.
    """
    return {
        "closed": state.closed, "step": state.step, "tokens": state.tokens, "staleness": state.staleness,
        "norms": state.norms, "cursors": state.cursors, "step_seconds": state.step_seconds,
        "island_tokens": state.island_tokens,
    }  # fmt: skip


def bits(fragment: FragmentState) -> tuple[bytes, str, Any]:
    """Return a fragment's whole state in a form that compares bit for bit."""
    state = outer.dump(fragment.params_N, fragment.outer)
    return state, digest_of(np.asarray(fragment.published_N)), fragment.norms


def as_texts(tape: Sequence[TapeEntry]) -> list[dict[str, str]]:
    """Return the entries as text, because a loss that is NaN does not equal itself."""
    return [to_fields(entry) for entry in tape]


def comparable(image: Image) -> Image:
    """Return the image with its messages as text, so that two images compare equal."""
    return replace(
        image,
        tape=cast(Any, as_texts(image.tape)),
        pending=cast(Any, [(to_fields(c), data) for c, data in image.pending]),
    )


class Run(RuleBasedStateMachine):
    """The state machine of one run. Each test makes a subclass that sets the class attributes."""

    #: The Redis client. All connections of the run use its connection pool.
    client: Any
    #: The folder for the checkpoints.
    folder: Path
    #: Whether this is a real server, not fakeredis.
    is_real: bool

    def __init__(self) -> None:
        super().__init__()
        self.run = f"machine-{next(_runs)}"
        self.clock = VirtualClock()
        self.direct = RedisTransport(self.client, self.run)
        self.raw = self.client
        self.keys = Keys(self.run)
        manifest = samples.manifest(self.run, CONFIG)
        first = samples.first_snapshots(manifest, value=1.0)
        self.direct.create(manifest, first)
        self.manifest = manifest
        rules = RoundMerge.of(manifest)
        beginning = [
            new_state(unpack(data, n), rules.outer) for (_, data), n in zip(first, manifest.sizes, strict=True)
        ]
        self.model = Model(rules, history=[(RunState(), beginning)])
        self.path = Path(tempfile.mkdtemp(dir=self.folder))
        self.images: dict[int, tuple[Image, Model]] = {}
        self.remembered: tuple[dict[bytes, tuple[bytes, int]], Model] | None = None
        self.merger: Merger | None = None
        self.loaded = False
        self.paused: list[Merger] = []
        self.islands: dict[str, Island] = {}
        self.trained: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.births = 0
        self.poison: set[str] = set()
        self.record_has_gaps = False
        self.publisher = self.wire()
        TRAP.target, TRAP.sprung = "", False

    # -- tools ------------------------------------------------------------------------------------------------------

    def wire(self) -> Wire:
        return Wire(self.model, RedisTransport(self.client, self.run))

    @property
    def closed(self) -> int:
        return len(self.model.tape)

    def new_merger(self) -> Merger:
        self.births += 1
        wire = cast(Any, self.wire())
        folder = MergerFolder(self.path / "merger")
        save = folder.store.save

        def saving(image: Image) -> None:
            self.check_image(image)
            try:
                save(image)
            except Crash as crash:
                if str(crash) == "checkpoint.done":
                    self.note_image(image)
                raise
            self.note_image(image)

        folder.store.save = saving  # type: ignore[method-assign]
        checkpointer = folder.checkpointer(wire, self.manifest, CHECKPOINT_SECONDS, at_once)
        return Merger(
            wire,
            self.clock,
            f"merger-{self.births}",
            live_poll_seconds=0.0,
            checkpointer=checkpointer,
            lease_seconds=LEASE_SECONDS,
        )

    def note_image(self, image: Image) -> None:
        self.images[image.number] = (image, self.model.past())
        self.model.covered = max(self.model.covered, RunState.from_json(image.state).closed)

    @contextlib.contextmanager
    def merging(self, fault: tuple[int, str] | None = None, trap: str = "") -> Iterator[Merger]:
        """Yield the serving merger, and handle its failures as `serve` does.

        After a crash the merger is gone. After a lost connection it loads its state again.
        """
        assert self.merger is not None
        serving = self.merger
        cast(Wire, serving.transport).arm(fault)
        TRAP.target = trap
        try:
            yield serving
        except Crash:
            self.merger, self.loaded = None, False
        except FencedError:
            raise AssertionError("the merger that holds the lease was fenced") from None
        except BrokerError as error:
            assert isinstance(error, UnreachableError), error
            self.loaded, serving.epoch = False, 0  # `serve` does the same.
        finally:
            cast(Wire, serving.transport).arm(None)
            TRAP.target = ""

    def load(self, serving: Merger) -> None:
        serving.load()
        self.loaded = True
        self.follow_tape()
        self.check_merger(serving)

    def expire_lease(self) -> None:
        self.raw.delete(self.keys.lease)

    # -- the merger -------------------------------------------------------------------------------------------------

    @initialize(islands=st.integers(0, 2), turns=st.integers(0, 12), seed=st.integers(0, 1 << 16))
    def begin(self, islands: int, turns: int, seed: int) -> None:
        """Start the merger and the islands, and let them work for a while."""
        self.start("", None)
        for index in range(islands):
            self.join(f"i{index}")
        self.work(turns, seed)

    @precondition(lambda self: self.merger is not None and self.loaded and self.model.exists)
    @rule(turns=st.integers(1, 8), seed=st.integers(0, 1 << 16))
    def work(self, turns: int, seed: int) -> None:
        """Train, publish and merge without faults."""
        dice = random.Random(seed)
        for _ in range(turns):
            if self.islands and dice.random() < 0.6:
                self.train_island(dice.choice(sorted(self.islands)), dice.randint(1, 3))
            else:
                ahead, stale = dice.choice([0, 0, 0, 1, -1]), dice.choice([0, 0, 1])
                self.publish(
                    dice.choice(["s0", "s1"]), dice.randrange(1 << 16), ahead, stale, "", "once", farewell=False
                )
            self.turn(dice.choice([0.0, 1.0]), None, "", fresh=False)

    @precondition(lambda self: self.merger is None and self.model.exists)
    @rule(
        trap=st.sampled_from(["", "", "", "acquire.before", "acquire.done", "announce.before"]),
        fault=st.none() | st.tuples(st.integers(1, 12), st.sampled_from(FAULTS)),
    )
    def start(self, trap: str, fault: tuple[int, str] | None) -> None:
        """Start a merger. If a dead merger holds the lease, the new one must wait until it expires."""
        self.merger = self.new_merger()
        held = self.raw.get(self.keys.lease)
        with self.merging(fault, trap) as serving:
            if held is not None:
                assert not serving.acquire()
                self.expire_lease()
            assert serving.acquire()
            self.load(serving)

    @precondition(lambda self: self.merger is not None and self.model.exists)
    @rule(
        seconds=st.sampled_from([0.0, 0.1, 1.0, 300.0]),
        fault=st.none() | st.tuples(st.integers(1, 12), st.sampled_from(FAULTS)),
        trap=st.sampled_from(["", "", *MERGER_FAILPOINTS]),
        fresh=st.booleans(),
    )
    def turn(self, seconds: float, fault: tuple[int, str] | None, trap: str, fresh: bool) -> None:
        """Let the merger take one turn, in which it may die.

        Args:
            seconds: The time that has passed since the last turn.
            fault: The fault of the connection, if any.
            trap: The failpoint at which the merger dies, if any.
            fresh: Whether a new contribution was published just before the turn.
        """
        if fresh:
            self.publish("s0", self.sequences["s0"], 0, 0, "", "once", farewell=False)
        self.clock.now += seconds
        with self.merging(fault, trap) as serving:
            if not serving.epoch and not serving.acquire():
                self.expire_lease()  # A dead merger still holds the lease.
                assert serving.acquire()
            if not self.loaded:
                self.load(serving)
            serving.turn(0.0)
            self.follow_tape()
            self.check_merger(serving)

    @precondition(lambda self: self.merger is not None and self.loaded and self.model.exists)
    @rule()
    def leave(self) -> None:
        """Stop the merger. It must leave a complete checkpoint and release its lease."""
        with self.merging() as serving:
            serving.finish()
            serving.transport.merger.release(serving.epoch)
        self.merger, self.loaded = None, False
        self.check_finished()
        assert self.raw.get(self.keys.lease) is None

    @precondition(lambda self: self.merger is not None and self.loaded and self.model.exists)
    @rule(
        trap=st.sampled_from(
            [
                "",
                "",
                "",
                "trim.before",
                "trim.done",
                "checkpoint.before",
                "checkpoint.done",
                "announce.done",
            ]
        ),
        fault=st.none() | st.tuples(st.integers(1, 8), st.sampled_from(FAULTS)),
    )
    def checkpoint(self, trap: str, fault: tuple[int, str] | None) -> None:
        """Take a checkpoint, and trim the entries that it covers."""
        if self.closed <= self.model.history[-1][0].covered:
            return
        with self.merging(fault, trap) as serving:
            serving.checkpoint()
            serving.retention.release(serving.state, serving.epoch, wait=True)

    @precondition(lambda self: self.merger is not None and self.loaded and self.model.exists)
    @rule()
    def take_over(self) -> None:
        """Pause the merger for longer than its lease, and let another merger take over."""
        standby = self.new_merger()
        assert not standby.acquire()
        self.expire_lease()
        assert standby.acquire()
        assert self.merger is not None
        self.paused.append(self.merger)
        self.merger = standby
        with self.merging():
            self.load(standby)

    @precondition(lambda self: bool(self.paused))
    @rule(
        data=st.data(), seconds=st.sampled_from([0.0, 300.0]), doing=st.sampled_from(["turn", "checkpoint", "release"])
    )
    def wake(self, data: st.DataObject, seconds: float, doing: str) -> None:
        """Wake a paused merger that has lost its lease. Redis must refuse all its writes."""
        index = data.draw(st.integers(0, len(self.paused) - 1))
        old = self.paused[index]
        self.clock.now += seconds
        before = self.written()
        images = list(self.images)
        fenced = False
        try:
            if doing == "turn":
                old.turn(0.0)
            elif doing == "checkpoint":
                old.checkpoint()
            else:
                old.transport.merger.release(old.epoch)
        except BrokerError as error:
            fenced = True
            assert isinstance(error, FencedError | UnknownRunError), error
            del self.paused[index]
        assert fenced or (doing == "turn" and not seconds)
        assert self.written() == before, "a merger without the lease wrote"
        assert list(self.images) == images

    def written(self) -> tuple[Any, ...]:
        """Return all data that only the lease holder may change."""
        names = [self.keys.state, self.keys.lease, self.keys.epoch]
        hashes = [
            self.keys.books,
            self.keys.data,
            *(k(p) for p in range(2) for k in (self.keys.outer, self.keys.fragment)),
        ]
        streams = [*map(self.keys.updates, NAMES), self.keys.tape, self.keys.snapshots]
        return (
            *(self.raw.get(name) for name in names), *(self.raw.hgetall(name) for name in hashes),
            *([entry for entry, _ in self.raw.xrange(name)] for name in streams),
        )  # fmt: skip

    # -- losses -----------------------------------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """Return whether Redis alone suffices to restart the merger.

        It does not between a loss of the merger's state and the commits that write this state again.
        """
        outers = [self.raw.hgetall(self.keys.outer(p)) for p in range(2) if self.compacted(p)]
        damaged = any(not fields or NONSENSE in fields.values() for fields in outers)
        return not damaged and (not self.closed or bool(self.raw.exists(self.keys.state)))

    @precondition(lambda self: self.model.exists)
    @rule(what=st.sampled_from(["disk", "group", "merger"]))
    def lose(self, what: str) -> None:
        """Lose the disk with all checkpoints, the stream's consumer group, or the merger between two turns."""
        if what != "merger" and not self.is_whole():
            return  # The design covers only one loss at a time.
        if what == "disk":
            shutil.rmtree(self.path, ignore_errors=True)
            self.images.clear()
        elif what == "group":
            self.lose_groups()
            # Merged entries are gone, and a checkpoint may cover their rounds before the record has them.
            self.model.regrouped = self.record_has_gaps = True
        else:
            self.merger, self.loaded = None, False

    def lose_groups(self) -> None:
        for name in NAMES:
            if self.raw.exists(self.keys.updates(name)):
                self.raw.xgroup_destroy(self.keys.updates(name), "merger")

    @precondition(lambda self: self.model.exists and self.rebuildable())
    @rule(which=st.sampled_from(["outer", "state", "both", "damaged"]), data=st.data())
    def lose_outer_state(self, which: str, data: st.DataObject) -> None:
        """Delete or damage the merger's state in Redis.

        A new merger must rebuild it bit for bit from the checkpoint, the tape and the stream entries.
        """
        if which in ("state", "both"):
            self.raw.delete(self.keys.state)
        if which in ("outer", "both"):
            for p in data.draw(st.sampled_from([[0], [1], [0, 1]])):
                self.raw.delete(self.keys.outer(p))
        if which == "damaged" and self.version(0):
            self.raw.hset(self.keys.outer(0), data.draw(st.sampled_from(["payload", "bytes", "chunks"])), NONSENSE)
        self.merger, self.loaded = None, False
        self.start("", None)

    def rebuildable(self) -> bool:
        """Return whether the newest checkpoint and the stream suffice to rebuild the merger's state.

        The checkpoint must belong to the present tape, and Redis must hold all later entries.
        """
        if not self.images or self.model.regrouped:
            return False
        _, then = self.images[max(self.images)]
        return as_texts(then.tape) == as_texts(self.model.tape[: len(then.tape)])

    @precondition(lambda self: self.model.exists and self.images)
    @rule()
    def lose_everything(self) -> None:
        """Restart Redis without any data."""
        self.forget_run()
        self.model.exists = False
        self.remembered = None
        if self.merger is not None:
            self.paused.append(self.merger)
        self.merger, self.loaded = None, False

    def forget_run(self) -> None:
        names = list(self.raw.scan_iter(match=f"*{self.run}[:}}]*", count=1000))
        names = [name for name in names if name.startswith((f"{self.run}:".encode(), f"{{{self.run}:".encode()))]
        if names:
            self.raw.delete(*names)
        self.raw.srem(REGISTRY, self.run)

    @precondition(lambda self: not self.model.exists)
    @rule(trap=st.sampled_from(["", "", "restore.placed", "restore.done"]))
    def restore_run(self, trap: str) -> None:
        """Restore the run from its newest checkpoint, as a merger with --resume does."""
        TRAP.target = trap
        with contextlib.suppress(Crash):
            MergerFolder(self.path / "merger").find_or_bring_back(RedisTransport(self.client, self.run), resume=True)
        TRAP.target = ""
        if not self.raw.exists(self.keys.manifest):
            assert trap == "restore.placed"
            return
        image, then = self.images[max(self.images)]
        self.rewind_model(then)
        model = self.model
        round_number = RunState.from_json(image.state).closed
        model.covered = round_number
        del model.tape[round_number:], model.history[round_number + 1 :]
        model.copies = Counter(c.identity_text for c, _ in image.pending) + model.merged
        model.total = image.books.merged + image.books.refused + len(image.pending)
        model.total_tokens = image.books.merged_tokens + image.books.refused_tokens
        model.total_tokens += sum(c.tokens for c, _ in image.pending)
        model.exists, model.regrouped, model.rewound = True, False, False

    def rewind_model(self, then: Model) -> None:
        """Set the model back to an earlier copy, but keep `sent`: the islands may still resend it."""
        past = then.past()
        for name in ("copies", "total", "total_tokens", "tape", "history", "covered", "exists", "regrouped"):
            setattr(self.model, name, getattr(past, name))

    @precondition(lambda self: self.model.exists and self.is_real)
    @rule()
    def remember(self) -> None:
        """Save a dump of all keys, as Redis does on its disk."""
        if not self.is_whole():
            return
        names = [n for n in self.raw.scan_iter(match=f"*{self.run}*", count=1000) if f"{self.run}:".encode() in n]
        self.remembered = ({n: (self.raw.dump(n), max(0, self.raw.pttl(n))) for n in names}, self.model.past())

    @precondition(lambda self: self.model.exists and self.remembered is not None)
    @rule()
    def fall_back(self) -> None:
        """Restart Redis from its last dump. All connections break."""
        assert self.remembered is not None
        dumped, then = self.remembered
        self.forget_run()
        for name, (data, ttl_ms) in dumped.items():
            self.raw.restore(name, ttl_ms, data)
        self.raw.sadd(REGISTRY, self.run)
        covered = self.model.covered
        self.rewind_model(then)
        self.remembered = None
        # The trims after the dump are undone, and a checkpoint on disk may be newer than this Redis.
        self.model.covered = min(then.covered, covered)
        self.model.rewound = self.record_has_gaps = True
        self.merger, self.loaded = None, False
        self.paused.clear()

    # -- contributions ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.exists)
    @rule(
        island=st.sampled_from(["s0", "s1"]),
        seed=st.integers(0, 1 << 16),
        ahead=st.integers(-4, 4),
        stale=st.sampled_from([0, 0, 0, 1, 2, 5]),
        broken=st.sampled_from(["", "", "", "", *BROKEN]),
        how=st.sampled_from(["once", "once", "lost reply", "publish.placed", "publish.done"]),
        farewell=st.booleans(),
    )
    def publish(self, island: str, seed: int, ahead: int, stale: int, broken: str, how: str, farewell: bool) -> None:
        """Publish a contribution that is timely, early, late, stale or invalid.

        Args:
            island: The name of the island that publishes it.
            seed: The seed of the contents.
            ahead: The distance of its round from the next round.
            stale: The number of versions by which its base is older than the fragment.
            broken: The defect, if any.
            how: `once`, `lost reply` (the island publishes twice), or the failpoint at which the island dies.
            farewell: Whether this is the island's last contribution.
        """
        contribution, payload = self.draft_contribution(island, seed, ahead, stale, broken, farewell)
        if broken:
            self.poison.add(contribution.identity_text)
        TRAP.target = how if how.startswith("publish") else ""
        with contextlib.suppress(Crash):
            self.publisher.island.publish(contribution, payload)
            if how == "lost reply":
                self.publisher.island.publish(contribution, payload)
        TRAP.target = ""

    def draft_contribution(
        self, island: str, seed: int, ahead: int, stale: int, broken: str, farewell: bool
    ) -> tuple[Contribution, bytes]:
        dice = random.Random(seed)
        number = max(1, self.closed + 1 + ahead)
        p = self.manifest.fragment_of(number)
        base = max(0, newest(self.direct.reader, self.manifest, p).snapshot.version - stale)
        values_N = np.random.default_rng(seed).standard_normal(self.manifest.sizes[p], dtype=np.float32)
        payload = pack(broken_values(values_N, broken), dice.choice(["float32", "bfloat16"]), dice.choice([0, 1]))
        if broken == "zstd":
            payload = payload[: len(payload) // 2]
        steps = dice.randint(1, 9)
        contribution = samples.contribution(
            payload, island=island, sequence=self.sequences[island], round=number, fragment=p, base=base, steps=steps,
            tokens=steps * CONFIG.tokens_per_step, global_step=self.closed + steps, farewell=farewell,
            step_seconds=dice.random(), loss=dice.choice([2.5, float("nan")]),
            data=f"{dice.randrange(3)}:{dice.randrange(2)}:{dice.choice(['7', '30', 'end'])}",
        )  # fmt: skip
        self.sequences[island] += 1
        return broken_message(contribution, broken), payload

    @precondition(lambda self: self.model.exists and self.model.sent)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        """Publish an earlier contribution again."""
        contribution, payload = self.model.sent[data.draw(st.sampled_from(sorted(self.model.sent)))]
        self.publisher.island.publish(contribution, payload)

    # -- islands ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.exists)
    @rule(name=st.sampled_from(["i0", "i1", "i2"]))
    def join(self, name: str) -> None:
        """Let an island join. An island of that name that already runs was killed, and lost all its state."""
        self.islands.pop(name, None)
        before = [self.direct.reader.fragment(p) for p in range(2)]
        self.births += 1
        wire = cast(Any, self.wire())
        incarnation = f"n{self.births}"
        link = Link(wire, self.manifest, f"{name}/{incarnation}", shard_order(CONFIG.data.shards, CONFIG.seed))
        arrivals = link.join()
        batches = Batches(TEXT, CONFIG, link.lease, fallback=self.births)
        island = Island(name, self.manifest, cast(InnerSteps, _steps), batches, link, arrivals, self.clock, incarnation)
        self.check_newcomer(island)
        island.beat("joining")
        link.pump()
        givers = self.ask_peers(wire, island, arrivals)
        assert [self.direct.reader.fragment(p) for p in range(2)] == before, "the join changed a fragment"
        if givers:
            giver = givers[island.moments.removeprefix("peer ")]
            for received, given in zip(
                jax.tree.leaves(island.inner.optimizer), jax.tree.leaves(giver.inner.optimizer), strict=True
            ):
                assert np.array_equal(np.asarray(received), np.asarray(given))
        else:
            assert not island.moments.startswith("peer")
        self.check_newcomer(island)
        island.beat("training")
        link.pump()
        assert link.failure is None
        self.islands[name] = island

    def ask_peers(self, wire: Any, island: Island, arrivals: Any) -> dict[str, Island]:
        """Ask for moments, and let the other islands answer. Return the islands that could have answered."""
        rejoin = Rejoin(wire, None, island, arrivals, seconds=0.0)
        rejoin.ask()
        asked = rejoin._asked
        for other in self.islands.values():
            self.pass_boundary(other)
        rejoin.complete(None)
        return dict(self.islands) if asked else {}

    def check_newcomer(self, island: Island) -> None:
        """Check that a new island has the run's present parameters, and no progress to publish."""
        for p, rows in enumerate(self.manifest.layout):
            snapshot, params_N, _ = newest(self.direct.reader, self.manifest, p)
            found_N = np.concatenate([np.asarray(island.inner.params[t.name]).reshape(-1) for t, _ in rows])
            assert np.array_equal(found_N, params_N)
            assert island.ledger.counts[p].version == snapshot.version
            assert (island.ledger.counts[p].steps, island.ledger.counts[p].tokens) == (0, 0)
            assert island.ledger.global_step >= snapshot.step

    def pass_boundary(self, island: Island) -> None:
        """Let an island pass a step boundary, with all communication before and after it."""
        island.link.pump()
        assert island.link.failure is None
        island.boundary()
        island.link.pump()
        assert island.link.failure is None

    @precondition(lambda self: bool(self.islands))
    @rule(data=st.data(), steps=st.integers(1, 5))
    def train(self, data: st.DataObject, steps: int) -> None:
        """Train an island. This works without Redis too."""
        self.train_island(data.draw(st.sampled_from(sorted(self.islands))), steps)

    def train_island(self, name: str, steps: int) -> None:
        island = self.islands[name]
        for _ in range(steps):
            self.pass_boundary(island)
            island.advance()
            self.trained[f"{island.name}/{island.incarnation}"] += CONFIG.tokens_per_step

    @precondition(lambda self: bool(self.islands))
    @rule(data=st.data(), how=st.sampled_from(["silent", "killed", "leaves"]))
    def fall_silent(self, data: st.DataObject, how: str) -> None:
        """Let an island stay silent for an hour, kill it, or let it leave as on SIGTERM."""
        name = data.draw(st.sampled_from(sorted(self.islands)))
        if how == "silent":
            self.raw.pexpire(self.keys.island(name), DEAD_MS)
            return
        island = self.islands.pop(name)
        if how == "leaves":
            island.leave(flush_seconds=0.0)
            island.link.pump()
            assert island.link.failure is None

    # -- invariants -------------------------------------------------------------------------------------------------

    def follow_tape(self) -> None:
        """Recompute the new rounds on the tape in the model."""
        found = self.direct.reader.tape(1 << 20)
        model = self.model
        assert [entry.round for entry in found] == list(range(1, len(found) + 1))
        assert as_texts(found[: self.closed]) == as_texts(model.tape), "the past has changed"
        for entry in found[self.closed :]:
            poisoned = {m.identity_text for m in entry.members} & self.poison
            assert not poisoned, f"merged {poisoned}"
            model.follow(entry)
        assert max(model.merged.values(), default=0) <= 1, "merged twice"

    @invariant()
    def all_agree(self) -> None:
        if self.model.exists:
            self.follow_tape()
            self.check_truth()
            self.check_books()
            self.check_islands()

    def check_truth(self) -> None:
        """Check that the snapshots, the outer state, the merger's state and the cursors follow from the tape."""
        state, fragments = self.model.history[-1]
        for p, fragment in enumerate(fragments):
            _, published, _ = bits(fragment)
            found = newest(self.direct.reader, self.manifest, p)
            assert found.snapshot.version == self.version(p)
            assert digest_of(found.params_N) == published
            fields = self.raw.hgetall(self.keys.outer(p))
            if fields and NONSENSE not in fields.values():
                compacted, _, _ = bits(self.model.history[round_of(int(fields[b"version"]), p, 2)][1][p])
                assert self.direct.merger.outer(p) == compacted
        if text := self.direct.reader.merger_state():
            assert determined(RunState.from_json(text)) == determined(state)
        assert self.direct.reader.cursors() == state.cursors

    def version(self, p: int) -> int:
        return sum(entry.fragment == p for entry in self.model.tape)

    def compacted(self, p: int) -> int:
        """Return the version of a fragment's newest full state in Redis."""
        return int(self.raw.hget(self.keys.fragment(p), "version") or 0)

    def uncovered(self) -> list[str]:
        """Return the merged entries that no compaction covers."""
        rounds = [entry for entry in self.model.tape if entry.version > self.compacted(entry.fragment)]
        return [member.entry for entry in rounds for member in entry.members]

    def check_books(self) -> None:
        """Check that published = merged + refused + pending.

        This holds for contributions, for tokens, and for each identity.
        """
        model, books, pending = self.model, self.direct.reader.books(), self.direct.reader.pending()
        assert books.published == books.merged + books.refused + pending.contributions
        assert books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens
        assert self.direct.reader.backlog() == pending.contributions
        assert books.merged == sum(model.merged.values())
        if not model.regrouped:
            assert (books.published, books.published_tokens) == (model.total, model.total_tokens)
        waiting = Counter(c.identity_text for c in self.direct.updates.waiting() if c is not None)
        refused = Counter[str]()
        for _, event in self.direct.reader.events(START, 0.0, 1 << 20):
            if isinstance(event, Refusal):
                assert event.reason
                refused[event.identity_text] += 1
        fates = model.merged + refused + waiting
        if not model.regrouped:
            assert fates == model.copies
            there = {f"{n}/{id_.decode()}" for n in NAMES for id_, _ in self.raw.xrange(self.keys.updates(n))}
            members = [(entry.round, m.entry) for entry in model.tape for m in entry.members]
            needed = {entry for number, entry in members if number > model.covered} | set(self.uncovered())
            assert needed <= there, f"trimmed before a checkpoint and a compaction cover them: {needed - there}"
            assert books.kept == sum(entry in there for _, entry in members)
        else:
            assert not (model.copies - fates), "a contribution is gone"

    def check_islands(self) -> None:
        """Check that no inner step was merged twice."""
        for p in range(2):
            tokens = Counter[str]()
            for entry in self.model.tape:
                for m in entry.members if entry.fragment == p else ():
                    tokens[f"{m.island}/{m.incarnation}"] += m.tokens
            for island, trained in self.trained.items():
                merged = tokens[island]
                assert merged <= trained, f"{island} trained on {trained} tokens, but {merged} were merged"

    def check_merger(self, serving: Merger) -> None:
        """Check that the merger's memory follows from the tape, bit for bit."""
        state, fragments = self.model.history[-1]
        assert determined(serving.state) == determined(state)
        assert [bits(f) for f in serving.fragments] == [bits(f) for f in fragments]
        assert [s.version for s in serving.snapshots] == [self.version(p) for p in range(2)]
        for name in self.model.merged:
            assert serving.state.has_seen(self.model.sent[name][0].identity)

    def check_image(self, image: Image) -> None:
        """Check that a checkpoint holds the complete run after its round."""
        self.follow_tape()
        state = RunState.from_json(image.state)
        then, fragments = self.model.history[state.closed]
        assert determined(state) == determined(then)
        assert image.cursors == then.cursors
        assert [entry.round for entry in image.tape] == list(range(1, state.closed + 1))
        for fragment, (snapshot, payload), outer_state in zip(fragments, image.snapshots, image.outers, strict=True):
            expected, published, _ = bits(fragment)
            assert digest_of(unpack(payload, self.manifest.sizes[snapshot.fragment])) == published
            assert outer_state == (expected if snapshot.version else b"")

    def check_finished(self) -> None:
        """Check that the newest checkpoint covers everything, and that only what no compaction covers is left."""
        if not self.closed:
            return
        assert self.images, "a merger left without a checkpoint"
        image, _ = self.images[max(self.images)]
        found = MergerFolder(self.path / "merger").store.load()
        assert found is not None
        assert comparable(found) == comparable(image)
        if not self.model.regrouped:
            assert self.rebuildable()
            assert RunState.from_json(image.state).closed == self.closed
            assert self.model.rewound or self.direct.reader.books().kept == len(self.uncovered())
            self.check_record()

    def check_record(self) -> None:
        """Check that the record on disk is the whole tape with all contributions, unless Redis lost a part."""
        folder = self.path / "merger" / "record"
        if self.record_has_gaps or not (folder / "begin.bin").exists():
            return
        found = [read(folder).rounds[number] for number in range(1, self.closed + 1)]
        assert as_texts([entry for entry, _ in found]) == as_texts(self.model.tape)
        for entry, deliveries in found:
            for member, delivery in zip(entry.members, deliveries, strict=True):
                contribution, payload = self.model.sent[member.identity_text]
                assert delivery.contribution is not None
                assert to_fields(delivery.contribution) == to_fields(contribution)
                assert delivery.payload == payload

    # -- end of the run ---------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """End the run, and clean up."""
        try:
            self.end()
        finally:
            self.forget_run()
            shutil.rmtree(self.path, ignore_errors=True)

    def end(self) -> None:
        """Let the merger decide about every contribution, then restore the run from disk with the same bits."""
        if not self.model.exists:
            self.restore_run("")
        if self.merger is None:
            self.start("", None)
        if not self.loaded:
            self.turn(0.0, None, "", fresh=False)
        self.decide_everything()
        self.all_agree()
        pending = self.direct.reader.pending()
        assert (pending.contributions, pending.tokens) == (0, 0)
        ended = set(self.model.merged) | {
            e.identity_text for _, e in self.direct.reader.events(START, 0.0, 1 << 20) if isinstance(e, Refusal)
        }
        assert set(self.model.copies) <= ended
        if self.rebuildable():
            image = self.images[max(self.images)][0]
            _, fragments = rebuild(self.model.rules, image, self.direct)
            assert [bits(f) for f in fragments] == [bits(f) for f in self.model.history[-1][1]]
        self.leave()
        if self.closed:
            self.lose_everything()
            self.restore_run("")
            self.start("", None)
            self.all_agree()

    def decide_everything(self) -> None:
        """Let the islands send and receive everything, then go silent, until the merger has decided about all."""
        for _ in range(60):
            for island in self.islands.values():
                island.link.pump()
                assert island.link.failure is None
            for name in ("i0", "i1", "i2"):
                self.raw.pexpire(self.keys.island(name), DEAD_MS)
            if not self.direct.reader.backlog() and not any(
                i.link.channels[0].outbox.unresolved_rounds() for i in self.islands.values()
            ):
                return
            self.turn(1.0, None, "", fresh=False)
        left = {name: i.link.channels[0].outbox.unresolved_rounds() for name, i in self.islands.items()}
        raise AssertionError(
            f"the merger never decides about {self.direct.reader.backlog()} contributions; unresolved: {left}"
        )


def broken_values(values_N: Vector, broken: str) -> Vector:
    if broken == "size":
        return values_N[:-1]
    if broken == "nan":
        return np.where(np.arange(values_N.size) == 3, np.float32("nan"), values_N)
    return values_N * np.float32(1e30) if broken == "huge" else values_N


def broken_message(contribution: Contribution, broken: str) -> Contribution:
    changes: dict[str, dict[str, Any]] = {
        "digest": {"digest": "0" * 32},
        "ahead": {"base": contribution.base + 1000},
        "tokens": {"tokens": 10_000},
        "fragment": {"fragment": 1 - contribution.fragment},
        "place": {"data": "7:0:end"},
    }
    return replace(contribution, **changes.get(broken, {}))


def check_run_on(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, full: int) -> None:
    """Run the state machine. Small payloads are split into chunks too, and processes die at the trap's failpoint."""
    monkeypatch.setattr(archipelago.broker.redis.chunks, "INLINE_BYTES", 64)
    monkeypatch.setattr(archipelago.broker.redis.chunks, "CHUNK_BYTES", 100)
    for module in TRAPPED:
        monkeypatch.setattr(module, "failpoint", TRAP.reach)
    transport = connect(url, "machine")
    try:
        run_state_machine_as_test(machine(transport, folder), settings=bounds(full))
    finally:
        transport.close()


def machine(transport: RedisTransport, folder: Path) -> type[Run]:
    """Return the state machine for this Redis. Checkpoints go to `folder`."""
    return type(
        "Run",
        (Run,),
        {"client": transport.connection.redis, "is_real": transport.connection.has_info, "folder": folder},
    )


def bounds(full: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples(full),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_a_run_on_a_real_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_run_on(server.url, tmp_path, monkeypatch, full=16)


def test_a_run_on_fakeredis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_run_on(f"fakeredis://machine-{os.getpid()}", tmp_path, monkeypatch, full=4)
