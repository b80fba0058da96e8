"""A run on threads of a test: a real merger, and islands with real ledgers, links and leases that train nothing.

`end` asserts what must hold at the end, whatever happened to Redis and the mergers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.commits import START
from archipelago.broker.config import STEPS_MAX, DataConfig, InnerConfig, RunConfig, SyncConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Event, Refusal
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.wire import digest_of, newest
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.ranges import range_order
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.conftest import PATIENCE_SECONDS, Until
from tests.intercept import Intercepted

TEXT = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
CONFIG = RunConfig(
    data=DataConfig(batch_size=1, sequence_length=2, shards=8),
    inner=InnerConfig(steps=STEPS_MAX),
    sync=SyncConfig(interval=4, fragments=2, window=2),
)
#: Payloads of one fragment have up to 190 kB, which is three chunks where chunks are small.
WIDTH = 12_000
Identity = tuple[str, str, int]


def create(url: str, run: str) -> Manifest:
    """Create a run of two fragments: one of 8 · WIDTH elements, and one whose payloads fit into stream entries."""
    tensors = (Tensor("embedding", (8, WIDTH), "embedding"), Tensor("layers.0", (16, 16)), Tensor("norm", (16,)))
    of = Manifest(run, CONFIG, tensors, balanced(tensors, 2), Corpus("text", "0" * 32, TEXT.size), {"jax": "1"})
    transport = connect(url, run)
    transport.create(of, samples.first_snapshots(of, value=1.0))
    transport.close()
    return of


@jax.jit
def _walk(params: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    return {name: value + 1e-3 * jnp.cos(step.astype(jnp.float32) + value) for name, value in params.items()}


def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
    """Stand in for an inner step: each parameter moves a little, depending on the step."""
    return state._replace(params=_walk(state.params, global_step)), jnp.ones(1, jnp.float32)


def refused_in(events: Iterable[Event]) -> set[Identity]:
    """Return the contributions that were refused, other than as repeats."""
    refusals = (event for event in events if isinstance(event, Refusal) and not event.repeat)
    return {(e.island, e.incarnation, e.sequence) for e in refusals}


class RecordingTransport(Intercepted):
    """The connection of one island. It notes in the run what Redis answers."""

    def __init__(self, inner: RedisTransport, island: str, run: ThreadedRun) -> None:
        super().__init__(inner)
        self._island, self._of = island, run

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if name == "publish":
            self._of.acknowledged.add(args[0].identity)
        if name == "events":
            self._of.refused |= {found for found in refused_in(e for _, e in answer) if found[0] == self._island}
        return answer


class Background(threading.Thread):
    """A thread that works until `finish`, which raises again what has ended its work early."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.fault: BaseException | None = None
        self.stopped = threading.Event()

    def work(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.work()
        except BaseException as fault:  # noqa: BLE001 - the test raises it again
            self.fault = fault

    def finish(self) -> None:
        self.stopped.set()
        self.join()
        if self.fault:
            raise self.fault


class IslandThread(Background):
    """One island. It makes a step every 10 ms."""

    def __init__(self, url: str, manifest: Manifest, name: str, run: ThreadedRun) -> None:
        super().__init__(name)
        transport = RecordingTransport(connect(url, manifest.run), name, run)
        shards = range_order(manifest.config.data.shards, manifest.config.seed)
        self.link = Link(transport, manifest, f"{name}/x", shards)
        arrivals = self.link.join()
        batches = Batches(TEXT, manifest.config, self.link.lease)
        self.island = Island(name, manifest, cast(Any, steps), batches, self.link, arrivals, incarnation="x")
        self.link.pumps.start()
        self.start()

    def work(self) -> None:
        while not self.stopped.wait(0.01):
            self.island.boundary()
            self.island.advance()
        is_sent = self.island.leave() or self.link.drain(PATIENCE_SECONDS)  # Redis may wait for its disk
        assert is_sent, "the island could not send its last contributions"

    def finish(self) -> None:
        """Send what the island has, and end."""
        super().finish()
        self.link.pumps.stop()


class MergerThread(Background):
    """A merger, followed by another one whenever it leaves or the server is down."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        super().__init__("merger")
        self.url, self.of, self.folder = url, run, folder
        self.start()

    def work(self) -> None:
        while not self.stopped.is_set():
            try:
                self._serve()
            except BrokerError:
                self.stopped.wait(0.05)

    def _serve(self) -> None:
        transport = connect(self.url, self.of)
        try:
            checkpointer = MergerFolder(self.folder).checkpointer(
                transport, transport.reader.manifest(), every_seconds=0.5
            )
            merger = Merger(transport, linger_seconds=0.2, checkpointer=checkpointer, lease_seconds=1.0)
            serve(merger, self.stopped.is_set, pause=lambda seconds: void(self.stopped.wait(min(seconds, 0.05))))
        finally:
            transport.close()


def void(_: object) -> None:
    """Ignore the value."""


class ThreadedRun:
    """A run of three islands and a merger.

    Attributes:
        acknowledged: The contributions that Redis has acknowledged.
        refused: Those of which their island has heard that they were refused, so that it does not send them again.
            Redis may forget such a refusal in a failover.
    """

    def __init__(self, url: str, name: str, folder: Path, until: Until) -> None:
        self.until, self.folder = until, folder / "merger"
        self.acknowledged: set[Identity] = set()
        self.refused: set[Identity] = set()
        self.manifest = create(url, name)
        self.transport = connect(url, name)
        self.merger = MergerThread(url, name, self.folder)
        self.islands = [IslandThread(url, self.manifest, island, self) for island in "abc"]

    @property
    def closed(self) -> int:
        """The last closed round; -1 while the server is down."""
        try:
            tape = self.transport.reader.tape(1)
        except BrokerError:
            return -1
        return tape[-1].round if tape else 0

    def goes_on(self, what: str, rounds: int = 1) -> None:
        """Wait for further rounds and contributions."""
        taken = len(self.acknowledged)
        self.until(lambda: self.closed >= 0, f"an answer {what}")
        before = self.closed
        self.until(lambda: self.closed >= before + rounds, f"rounds {what}")
        self.until(lambda: len(self.acknowledged) > taken, f"a contribution {what}")

    def _has_heard_all(self, after: int) -> bool:
        """Return whether each island has heard of the newest rounds, and takes part in some after that one."""
        heard = [thread.link.channels[0].inbox.heard_round for thread in self.islands]
        since = [entry for entry in self.transport.reader.tape(100) if entry.round > after]
        part = {member.island for entry in since for member in entry.members}
        return min(heard) > after and len(part) == len(heard)

    def end(self, what: str) -> None:
        """Let all islands leave, and assert that nothing was lost and nothing merged twice."""
        self.goes_on(what, rounds=20)
        before = self.closed
        # An island that leaves before it has heard of a failover cannot send again what that has undone.
        self.until(lambda: self._has_heard_all(before), f"each island to hear of rounds {what}")
        for island in self.islands:
            island.finish()
        self.until(lambda: self.transport.reader.backlog() == 0, f"everything to be merged {what}")
        self.merger.finish()
        self._check()
        assert MergerFolder(self.folder).store.load() is not None
        self.transport.close()

    def _check(self) -> None:
        reader = self.transport.reader
        books = reader.books()
        assert reader.pending().contributions == reader.backlog() == 0
        assert books.published == books.merged + books.refused
        assert books.published_tokens == books.merged_tokens + books.refused_tokens
        tape = reader.tape(1 << 20)
        assert [entry.round for entry in tape] == list(range(1, len(tape) + 1))
        assert [entry.epoch for entry in tape] == sorted(entry.epoch for entry in tape)
        merged = Counter((m.island, m.incarnation, m.sequence) for entry in tape for m in entry.members)
        assert max(merged.values()) == 1, f"merged twice: {merged.most_common(1)}"
        assert books.merged == len(merged)
        events = [event for _, event in reader.events(START, 0.0, 1 << 20)]
        assert not refused_in(events) & merged.keys(), "contributions were merged and refused"
        lost = self.acknowledged - merged.keys() - refused_in(events) - self.refused
        assert not lost, f"acknowledged and lost: {sorted(lost)[:5]}"
        assert all(e.reason for e in events if isinstance(e, Refusal))
        for p, entry in {entry.fragment: entry for entry in tape}.items():
            found = newest(reader, self.manifest, p)
            assert (found.snapshot.version, found.snapshot.round) == (entry.version, entry.round)
            assert digest_of(found.params_N) == entry.digest
            for thread in self.islands:
                mine = [m for e in tape if e.fragment == p for m in e.members if m.island == thread.island.name]
                assert sum(m.tokens for m in mine) <= thread.island.totals.tokens, "some tokens were merged twice"
