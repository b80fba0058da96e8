"""Islands as threads of a test, with real ledgers, links and leases, and a stand-in for training.

`check` asserts what must hold at the end, whatever happened to Redis and the mergers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.commits import START
from archipelago.broker.config import STEPS_MAX, DataConfig, InnerConfig, RunConfig, SyncConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Event, Refusal
from archipelago.broker.published import newest
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest_of
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.ranges import range_order
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from tests import samples
from tests.conftest import PATIENCE_SECONDS
from tests.intercept import Intercepted

TEXT = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
CONFIG = RunConfig(
    data=DataConfig(batch_size=1, sequence_length=2, shards=8),
    inner=InnerConfig(steps=STEPS_MAX),
    sync=SyncConfig(interval=4, fragments=2, window=2),
)
Identity = tuple[str, str, int]


def create(url: str, run: str, width: int) -> Manifest:
    """Create a run of two fragments: one of 8 · `width` elements, and one whose payloads fit into stream entries."""
    tensors = (Tensor("embedding", (8, width), "embedding"), Tensor("layers.0", (16, 16)), Tensor("norm", (16,)))
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


@dataclass
class Answers:
    """What Redis has answered to islands.

    Attributes:
        acknowledged: The contributions that it has acknowledged.
        refused: Those of which their island has heard that they were refused, so that it does not send them again.
            Redis may forget such a refusal in a failover.
    """

    acknowledged: set[Identity] = field(default_factory=set)
    refused: set[Identity] = field(default_factory=set)


class RecordingTransport(Intercepted):
    """The connection of one island. It notes what Redis answers."""

    def __init__(self, inner: Transport, island: str, answers: Answers) -> None:
        super().__init__(inner)
        self._island, self._answers = island, answers

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if name == "publish":
            self._answers.acknowledged.add(args[0].identity)
        if name == "events":
            self._answers.refused |= {found for found in refused_in(e for _, e in answer) if found[0] == self._island}
        return answer


def refused_in(events: Iterable[Event]) -> set[Identity]:
    """Return the contributions that were refused, other than as repeats."""
    refusals = (event for event in events if isinstance(event, Refusal) and not event.repeat)
    return {(e.island, e.incarnation, e.sequence) for e in refusals}


class IslandThread:
    """One island on a thread of its own. It makes a step every `pause` seconds."""

    def __init__(self, url: str, manifest: Manifest, name: str, pause: float, answers: Answers) -> None:
        transport = RecordingTransport(connect(url, manifest.run), name, answers)
        shards = range_order(manifest.config.data.shards, manifest.config.seed)
        self.link = Link(transport, manifest, f"{name}/x", shards)
        arrivals = self.link.join()
        batches = Batches(TEXT, manifest.config, self.link.lease)
        self.island = Island(name, manifest, cast(Any, steps), batches, self.link, arrivals, incarnation="x")
        self.pause = pause
        self.fault: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train, name=name, daemon=True)
        self.link.start()
        self._thread.start()

    def _train(self) -> None:
        try:
            while not self._stopped.wait(self.pause):
                self.island.boundary()
                self.island.advance()
            is_sent = self.island.leave() or self.link.drain(PATIENCE_SECONDS)  # Redis may wait for its disk
            assert is_sent, "the island could not send its last contributions"
        except BaseException as fault:  # noqa: BLE001 - the test raises it again
            self.fault = fault

    def leave(self) -> None:
        """Send what the island has, and end."""
        self._stopped.set()
        self._thread.join()
        self.link.stop()
        if self.fault:
            raise self.fault


class IslandThreads:
    """Several islands, and what Redis has answered to them."""

    def __init__(self, url: str, manifest: Manifest, names: Sequence[str], pause: float) -> None:
        self.answers = Answers()
        self.threads = [IslandThread(url, manifest, name, pause, self.answers) for name in names]

    @property
    def acknowledged(self) -> set[Identity]:
        """The contributions that Redis has acknowledged."""
        return self.answers.acknowledged

    def leave(self) -> None:
        """Let all islands leave."""
        for thread in self.threads:
            thread.leave()

    @property
    def steps(self) -> int:
        """The inner steps of all islands."""
        return sum(thread.island.totals.steps for thread in self.threads)


def check(transport: RedisTransport, islands: IslandThreads) -> None:
    """Assert what must hold once all islands have left and nothing waits."""
    books, manifest = transport.reader.books(), transport.reader.manifest()
    assert transport.reader.pending().contributions == transport.reader.backlog() == 0
    assert books.published == books.merged + books.refused
    assert books.published_tokens == books.merged_tokens + books.refused_tokens
    tape = transport.reader.tape(1 << 20)
    assert [entry.round for entry in tape] == list(range(1, len(tape) + 1))
    assert [entry.epoch for entry in tape] == sorted(entry.epoch for entry in tape)
    merged = Counter((m.island, m.incarnation, m.sequence) for entry in tape for m in entry.members)
    assert max(merged.values()) == 1, f"merged twice: {merged.most_common(1)}"
    assert books.merged == len(merged)
    events = [event for _, event in transport.reader.events(START, 0.0, 1 << 20)]
    assert not refused_in(events) & merged.keys(), "contributions were merged and refused"
    lost = islands.acknowledged - merged.keys() - refused_in(events) - islands.answers.refused
    assert not lost, f"acknowledged and lost: {sorted(lost)[:5]}"
    assert all(e.reason for e in events if isinstance(e, Refusal))
    last = {entry.fragment: entry for entry in tape}
    for p, entry in last.items():
        found = newest(transport.reader, manifest, p)
        assert (found.snapshot.version, found.snapshot.round) == (entry.version, entry.round)
        assert digest_of(found.params_N) == entry.digest
    for thread in islands.threads:
        for p in range(len(manifest.fragments)):
            mine = [m for e in tape if e.fragment == p for m in e.members if m.island == thread.island.name]
            assert sum(m.tokens for m in mine) <= thread.island.totals.tokens, "some tokens were merged twice"
