"""A played run of two fragments whose islands the test simulates, and faulty disks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.commits import START, Delivery, Image
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.memory.state import MemoryRun
from archipelago.broker.messages import Contribution, Refusal, TapeEntry
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.transport import Transport
from archipelago.broker.wire import newest, pack, unpack
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.committing import Uncovered, full_state
from archipelago.merger.executor import at_once
from archipelago.merger.record import Recorder
from archipelago.merger.replay import replay_round
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.service import Merger
from archipelago.merger.state import FragmentState, RoundTiming, RunState
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.harness.played import CreatedRun, started
from tests.intercept import Faulty

#: Elements of each fragment.
SIZE = 32
CONFIG = RunConfig(
    sync=SyncConfig(interval=8, window=2, quorum=1, grace=0.5, smoothing=0.5, staleness_cap=2),
    merge=MergeConfig(embedding="average", rest="rda", staleness="polynomial", normalise=True, clip=3.0),
    outer=OuterConfig(rule="nesterov", learning_rate=0.5, momentum=0.5),
    wire=WireConfig(up="float32", thin="int4", down="float32"),
)
#: The same run with spectra, which are merged by matrix products.
ISOTROPIC = replace(CONFIG, merge=replace(CONFIG.merge, embedding="isotropic", rest="isotropic"))


def constant(value: float, size: int = SIZE) -> Vector:
    return np.full(size, value, np.float32)


def values(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(SIZE, dtype=np.float32)


class MergerRun(CreatedRun):
    """A run of two fragments. The test sends what islands would send, and sets the clock."""

    def __init__(self, config: RunConfig = CONFIG, **sync: Any) -> None:
        manifest = samples.manifest(config=replace(config, sync=replace(config.sync, **sync)))
        assert manifest.sizes == (SIZE, SIZE)
        super().__init__(manifest, samples.first_snapshots(manifest))
        self.sequences = Counter[str]()
        self.sent: list[tuple[Contribution, bytes]] = []

    @property
    def stored(self) -> MemoryRun:
        """What the broker holds of the run."""
        return self.broker.runs["sample"]

    def idle_merger(
        self,
        holder: str = "merger",
        *,
        transport: Transport | None = None,
        store: CheckpointStore | None = None,
        clock: VirtualClock | None = None,
        **settings: Any,
    ) -> Merger:
        """Return a merger that has neither taken the lease nor loaded. With a store, it takes checkpoints on request.

        Other settings are arguments of `Merger`.
        """
        if store is not None:
            settings["checkpointer"] = self.checkpointer(store)
        return Merger(transport or self.connect(), clock or self.clock, holder, live_poll_seconds=0.0, **settings)

    def merger(self, holder: str = "merger", **settings: Any) -> Merger:
        """Return a merger that holds the lease and has loaded. For the settings, see `idle_merger`."""
        return started(self.idle_merger(holder, **settings))

    def checkpointer(
        self, store: CheckpointStore, recorder: Recorder | None = None, every: float = 1e9, spawn: Spawn = at_once
    ) -> Checkpointer:
        """Return a checkpointer that takes a checkpoint every `every` seconds, by default only on request."""
        return Checkpointer(self.broker.connect("sample"), store, recorder, every, spawn)

    def faulty(self, *faults: tuple[str, int, str], **settings: Any) -> Faulty:
        """Return a connection to the run some of whose calls fail."""
        return Faulty(self.connect(), faults, **settings)

    def play(self, merger: Merger, *numbers: int) -> None:
        """Run these rounds of islands a and b, with values that depend on the round's number."""
        for number in numbers:
            self.live("a", "b")
            self.send_both(number)
            assert merger.turn(0.0), f"round {number} did not close"

    def send_both(self, number: int) -> None:
        """Send the contributions of islands a and b to a round."""
        for island in "ab":
            values_N = values(2 * number + ord(island))
            self.send(island, number, values_N, tokens=100 + number, data=f"{ord(island) - 97}:0:{number}")

    def live(self, *islands: str, state: str = "training") -> None:
        for island in islands:
            self.transport.island.heartbeat(samples.heartbeat(island, state=state))

    def version(self, p: int) -> int:
        head = self.transport.reader.heads()[p]
        assert head is not None
        return head.version

    def kept_rounds(self) -> list[int]:
        """Return the rounds whose merged entries the broker keeps."""
        return [
            entry.round
            for entry in self.transport.reader.tape(1000)
            if any(not each.fault for each in self.transport.merger.read([m.entry for m in entry.members]))
        ]

    def notes(self, kind: str) -> list[str]:
        """Return the texts of the notes of this kind, oldest first."""
        return [note.text for note in self.transport.reader.notes(1000) if note.kind == kind]

    def digests(self) -> list[str]:
        return [head.digest for head in self.transport.reader.heads() if head is not None]

    def parameters(self, p: int) -> list[float]:
        params: list[float] = newest(self.transport.reader, self.manifest, p).params_N.tolist()
        return params

    def send(
        self, island: str, number: int, values_N: Vector, *, payload: bytes | None = None, **changes: Any
    ) -> Contribution:
        """Send an island's next contribution, measured from the newest version unless `changes` override that."""
        payload = pack(values_N, "float32", 1) if payload is None else payload
        p = (number - 1) % 2
        ordinary = {"round": number, "fragment": p, "base": self.version(p), "sequence": self.sequences[island]}
        contribution = samples.contribution(payload, island=island, **(ordinary | changes))
        self.sequences[island] += 1
        self.publish(contribution, payload)
        return contribution

    def publish(self, contribution: Contribution, payload: bytes) -> None:
        self.sent.append((contribution, payload))
        self.transport.island.publish(contribution, payload)

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for _, event in self.transport.reader.events(START, 0.0, 10_000) if isinstance(event, kind)]

    def merged(self) -> list[tuple[str, str, int]]:
        """Return the identities of all contributions on the tape."""
        return [
            (m.island, m.incarnation, m.sequence) for entry in self.transport.reader.tape(10_000) for m in entry.members
        ]

    def balance(self) -> None:
        """Assert that published = merged + refused + pending, in contributions and in tokens."""
        counters = self.transport.reader.counters()
        pending = self.stored.updates.values()
        assert counters.published == len(self.sent) == counters.merged + counters.refused + len(pending)
        assert counters.published_tokens == sum(c.tokens for c, _ in self.sent)
        tokens = counters.merged_tokens + counters.refused_tokens + sum(entry.contribution.tokens for entry in pending)
        assert counters.published_tokens == tokens
        members = [m for entry in self.transport.reader.tape(10_000) for m in entry.members]
        assert (counters.merged, counters.merged_tokens) == (len(members), sum(m.tokens for m in members))
        assert counters.refused == len(self.events(Refusal))
        assert max(Counter(self.merged()).values(), default=0) <= 1
        state = RunState.from_json(self.transport.reader.merger_state())
        assert (state.closed, state.tokens) == (len(self.transport.reader.tape(10_000)), counters.merged_tokens)


def state_of(run: MergerRun) -> RunState:
    """Return the committed state. Times that were not measured yet are 0, as in Eq. 3."""
    state = RunState.from_json(run.transport.reader.merger_state())
    state.timing = RoundTiming(state.timing.quorum_seconds or 0.0, state.timing.sync_seconds or 0.0)
    return state


def served_run(
    config: RunConfig = CONFIG, store: CheckpointStore | None = None, **sync: Any
) -> tuple[MergerRun, Merger]:
    """Return a run, and a merger that serves it and takes checkpoints if there is a store for them."""
    run = MergerRun(config, **sync)
    return run, run.merger(store=store)


def outer_states(run: MergerRun) -> list[bytes]:
    """Return the outer states of both fragments' compactions; empty before the first one."""
    return [run.stored.outer.get(p, b"") for p in range(2)]


def bits(run: MergerRun) -> list[Any]:
    """Return everything that must be the same after any number of merger deaths, which excludes times."""
    state = state_of(run)
    state.covered, state.timing = 0, RoundTiming()
    tape = [(e.round, e.version, e.digest, e.members, e.gain) for e in run.transport.reader.tape(10_000)]
    return [tape, run.digests(), outer_states(run), state]


Rounds = list[tuple[TapeEntry, list[Delivery]]]


def recorded(run: MergerRun) -> Rounds:
    """Return each tape entry with the contributions that it merged, which the broker still keeps."""
    return [
        (entry, run.transport.merger.read([m.entry for m in entry.members]))
        for entry in run.transport.reader.tape(1000)
    ]


def beginning(run: MergerRun) -> tuple[RoundMerge, RunState, list[FragmentState]]:
    rules = RoundMerge.of(run.manifest)
    first = [unpack(payload, SIZE) for _, payload in samples.first_snapshots(run.manifest)]
    return rules, RunState(), [new_state(params_N, rules.outer) for params_N in first]


def replayed(run: MergerRun, rounds: Rounds) -> tuple[RunState, list[FragmentState]]:
    rules, state, fragments = beginning(run)
    for tape, deliveries in rounds:
        fragments[tape.fragment] = replay_round(rules, state, fragments[tape.fragment], tape, deliveries)
    return state, fragments


def logged_codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the codes of the warnings that were logged, oldest first."""
    return [str(record.__dict__["code"]) for record in caplog.records if record.__dict__.get("code")]


class Shelf(CheckpointStore):
    """Checkpoints in memory. Each of the next saves raises one of `faults`."""

    def __init__(self, faults: Iterable[Exception] = ()) -> None:
        super().__init__(Path("nowhere"))
        self.images: dict[int, Image] = {}
        self.faults = list(faults)

    def numbers(self) -> list[int]:
        return sorted(self.images)

    def next_number(self) -> int:
        return max(self.images, default=0) + 1

    def save(self, image: Image) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.images[image.number] = image

    def load(self, number: int | None = None) -> Image | None:
        return self.images[number or max(self.images)] if self.images else None


class PendingJob(Future[CheckpointCut]):
    """A pending future. Waiting for it fails the test instead of blocking it."""

    def result(self, timeout: float | None = None) -> CheckpointCut:
        assert self.done(), "the code waits for a job that the test has not run yet"
        return super().result(timeout)


class Later:
    """A `Spawn` that runs its jobs when the test calls `do_all`."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[CheckpointCut], Callable[[], CheckpointCut]]] = []

    def __call__(self, job: Callable[[], CheckpointCut]) -> Future[CheckpointCut]:
        self.jobs.append((PendingJob(), job))
        return self.jobs[-1][0]

    def do_all(self) -> None:
        while self.jobs:
            future, job = self.jobs.pop(0)
            done = at_once(job)
            if error := done.exception():
                future.set_exception(error)
            else:
                future.set_result(done.result())


def take_checkpoint(merger: Merger) -> None:
    """Take a checkpoint now, as an operator's request does."""
    assert merger.checkpointer is not None
    merger.checkpointer.take(merger.state, merger.clock())


def finish(merger: Merger) -> None:
    """Take a last checkpoint and wait for it, as a merger that ends does."""
    merger.finish(lambda seconds: None)


def compact_now(merger: Merger, p: int) -> None:
    """Write the full state of fragment `p` at its newest version, unless it is written."""
    full = full_state(merger.snapshots[p], merger.fragments[p]).packed(merger.config.wire)
    if full.snapshot.version > merger.transport.reader.fragment(p)[0].version:
        of = merger.transport.merger
        of.compact(merger.epoch, of.place(merger.epoch, full), merger.state.closed, [])
        merger.compactor.fragments[p] = Uncovered(full.snapshot.round, full.snapshot.version)
