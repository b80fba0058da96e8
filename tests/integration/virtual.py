"""A small task on a small text, for whole runs in virtual time that take a fraction of a second."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.commits import START
from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, RunConfig
from archipelago.broker.manifest import Corpus
from archipelago.broker.messages import Event
from archipelago.broker.transport import IslandTransport, ReaderClient
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.models.interface import Params
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.task import NamedTask, Task
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.virtual_time import ChangedTransport, VirtualRun
from tests.small import SMALL

CONFIG = replace(SMALL, inner=replace(SMALL.inner, learning_rate=0.03))
#: The settings of a run that a test does not play to its end.
ENDLESS = replace(CONFIG, inner=replace(CONFIG.inner, steps=10_000))
#: The rules with which a run of one island equals training without islands.
PLAIN = replace(
    CONFIG,
    merge=MergeConfig(embedding="average", rest="average", clip=0.0),
    outer=OuterConfig(rule="sgd", learning_rate=1.0),
    adopt=AdoptConfig(rule="carry"),
)
TEXT = np.random.default_rng(0).integers(0, 256, 1 << 15, np.uint8)
#: Six fragments of equal shapes share what is compiled for them.
NAMES = ("embedding", *(f"layers.{number}" for number in range(5)))


@cache
def _init_of(rows: int) -> Callable[[int], Params]:
    """Return the function that draws the first parameters. One size has one function, so that it compiles once."""

    def init(seed: int) -> Params:
        chance = np.random.default_rng(seed)
        return {name: jnp.asarray(chance.normal(size=(rows, 8)), jnp.float32) for name in NAMES}

    return init


def _loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    """Return a quadratic loss whose minimum depends on the text."""
    middle = jnp.mean(tokens_BxT1.astype(jnp.float32)) / 256.0
    return jnp.mean(jnp.stack([jnp.mean((each - middle) ** 2) for each in params.values()]))


@dataclass(frozen=True)
class TextTask(NamedTask):
    """A task that reads leased shards of a text."""

    corpus: Corpus

    @property
    def data(self) -> Corpus:
        return self.corpus


def work(config: RunConfig = CONFIG, text: NDArray[np.uint8] = TEXT, rows: int = 16) -> Workload:
    """Return the task with these settings, on this text. Its tensors have `rows` rows of eight."""

    def batches(run: TaskRun) -> Batches:
        run.offer(range_order(config.data.shards, config.seed))
        return Batches(text, config, run.lease, fallback=run.seed)

    task = Task(_init_of(rows), _loss, batches, tokens=config.tokens_per_step)
    return Workload.of(TextTask(task, Corpus("text", "0" * 32, text.size)), config)


class DelayedReader:
    """A reader that learns of each event `seconds` after the merger announced it.

    Islands hold back a snapshot that is newer than the events that they have read, so it is enough to delay events.
    """

    def __init__(self, reader: ReaderClient, clock: Callable[[], float], seconds: float) -> None:
        self._reader, self._clock, self._seconds = reader, clock, seconds
        self._delayed: deque[tuple[float, str, Event]] = deque()
        self._after = START

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def last_event(self) -> str:
        """Return the id after which a new island begins to read."""
        self._after = self._reader.last_event()
        self._delayed.clear()
        return self._after

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        """Return the events after that id whose delay is over."""
        now = self._clock()
        for entry, event in self._reader.events(self._after, 0.0, count):
            self._delayed.append((now + self._seconds, entry, event))
            self._after = entry
        known = [entry for _, entry, _ in self._delayed]
        for _ in range(known.index(after) + 1 if after in known else 0):
            self._delayed.popleft()
        return [(entry, event) for at, entry, event in self._delayed if at <= now][:count]


class LateRun(VirtualRun):
    """A run in which each event of the merger is on its way to every island for `late_seconds`."""

    def __init__(self, work: Workload, step_seconds: Sequence[float], late_seconds: float, **others: Any) -> None:
        self._late_seconds = late_seconds
        super().__init__(work, step_seconds, **others)

    def connect_island(self, name: str) -> IslandTransport:
        transport = super().connect_island(name)
        delayed = DelayedReader(transport.reader, self.clock, self._late_seconds)
        return ChangedTransport(transport.run, transport.island, cast(ReaderClient, delayed))


def require_balanced(run: VirtualRun, pending: int | None = None) -> None:
    """Fail unless the tape has each merged contribution once, and `pending` wait. Without any, none may be missing."""
    counters, numbers = run.transport.reader.counters(), defaultdict[tuple[int, str, str], list[int]](list)
    for entry in run.transport.reader.tape(1 << 20):
        for m in entry.members:  # islands number what they send to a shard without gaps
            numbers[run.manifest.shard_layout.shard_of(entry.round), m.island, m.incarnation].append(m.sequence)
    assert sum(len(set(of)) for of in numbers.values()) == sum(map(len, numbers.values())) == counters.merged
    assert pending is None or counters.pending == pending
    if not counters.pending and not counters.refused:
        assert all(max(of) + 1 == len(of) for of in numbers.values())


def bits(run: VirtualRun) -> list[tuple[Any, ...]]:
    """Return the rounds of a run, as far as they are the same in every run with the same bits."""
    tape = sorted(run.transport.reader.tape(1 << 20), key=lambda entry: entry.round)
    return [(e.round, e.digest, repr([replace(member, entry="") for member in e.members])) for e in tape]
