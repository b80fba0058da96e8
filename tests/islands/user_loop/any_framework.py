"""Runs of users' own loops, whatever the framework.

A framework has two harnesses. A `LoopRun` plays a run in virtual time, without sessions. A `Script` joins a run on a
server as a user's script does.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import Vector
from archipelago.broker.config import (
    OWN_MODEL,
    InnerConfig,
    MergeConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from archipelago.broker.frozen import FrozenTensor
from archipelago.broker.manifest import NO_CORPUS, Manifest, Tensor, balanced
from archipelago.broker.redis.transport import connect
from archipelago.islands.sync.adoption import AnyReplica
from archipelago.islands.sync.participant import Participant
from archipelago.islands.user_loop.new_run import first_snapshots
from archipelago.islands.user_loop.session import Session
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from tests.harness.played import Connect, PlayedRun

CONFIG = RunConfig(
    model=ModelConfig(size=OWN_MODEL),
    inner=InnerConfig(steps=1000),
    sync=SyncConfig(interval=4, fragments=2, window=2, quorum=1, grace=0.0),
    merge=MergeConfig(embedding="average", rest="rda"),  # the tests expect exact sums
    outer=OuterConfig(rule="sgd", learning_rate=1.0),
    wire=WireConfig(up="float32", thin="", down="float32"),
)


Values = dict[str, NDArray[np.float32]]
#: How far a parameter moves in one step.
STEP = 0.125


class LoopRun(PlayedRun, ABC):
    """A run of loops in virtual time.

    Args:
        tensors: What the run trains.
        first: The first values of each tensor by name.
        config: Its settings.
        frozen: What the run does not train.
        connect: Makes a connection to the run; by default to a broker in memory.
        folder: Where its merger keeps checkpoints and, in a recorded run, the record. It needs `connect`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        first: Mapping[str, NDArray[np.float32]],
        config: RunConfig = CONFIG,
        frozen: Sequence[FrozenTensor] = (),
        connect: Connect | None = None,
        folder: MergerFolder | None = None,
    ) -> None:
        fragments = balanced(tuple(tensors), config.sync.fragments)
        uid = uuid.UUID(int=1).hex
        manifest = Manifest("own", config, tuple(tensors), fragments, NO_CORPUS, {}, uid, tuple(frozen))
        self.first = first
        snapshots = first_snapshots(manifest, lambda name: first[name].reshape(-1))
        checkpointer = None
        if folder is not None:
            assert connect is not None
            folder.recorder.begin(manifest, snapshots)
            checkpointer = folder.checkpointer(connect(), manifest, 1e9, at_once)
        super().__init__(manifest, snapshots, connect, checkpointer)

    @abstractmethod
    def island(self, name: str = "a", model: Any = None) -> LoopIsland:
        """Return an island that has joined, with a model of its own."""

    def merged(self) -> Values:
        return merged_by(self.merger)


class LoopIsland(ABC):
    """One island: its loop, and how its framework holds the parameters.

    Args:
        run: The run, which it joins.
        name: The island's name.
        parameters: Its parameters.
        replica: Its replica.
        begin: Places the run's parameters, one vector for each fragment.
    """

    def __init__(
        self,
        run: LoopRun,
        name: str,
        parameters: Any,
        replica: AnyReplica,
        begin: Callable[[Sequence[Vector]], None],
    ) -> None:
        self.run, self.parameters, self.replica = run, parameters, replica
        self.link = run.link(f"{name}/x")
        arrivals = self.link.join()
        begin([arrival.params_N for arrival in arrivals])
        self.loop = Participant(
            name, run.manifest, self.link, replica, parameters, arrivals, "test", clock=run.clock, incarnation="x"
        )
        self.loop.begin()
        self.link.pump()

    @abstractmethod
    def step(self, by: float = STEP) -> None:
        """Make a step that moves each trained parameter by the same number."""

    @abstractmethod
    def spoil(self, value: float) -> str:
        """Set one element of a parameter. Return the parameter's name."""

    @abstractmethod
    def values(self) -> Values:
        """Return the newest parameters by name, as float32."""

    @abstractmethod
    def dtypes(self) -> set[str]:
        """Return the dtypes of all trained parameters."""

    def turn(self, steps: int = 1, tokens: int = 10, loss: Any = 2.5) -> None:
        """Sync after some steps, and exchange everything before and after it."""
        self.run.turn(self.link, lambda: self.loop.turn(steps, tokens, loss), steps)

    def train(self, turns: int = 1, by: float = STEP) -> None:
        for _ in range(turns):
            self.step(by)
            self.turn()


class Script(ABC):
    """A script that has joined a run on a server, as a context manager. A framework adds how it holds its model."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.__exit__(kind, error, trace)

    @property
    def loop(self) -> Participant:
        """The loop of a script that has joined."""
        assert self.session._loop is not None
        return self.session._loop

    @abstractmethod
    def step(self, by: float = STEP) -> None:
        """Make a step that moves each trained parameter by the same number, and a step of the optimiser."""

    @abstractmethod
    def sync(self, **about: Any) -> None:
        """Sync the newest parameters."""

    @abstractmethod
    def values(self) -> Values:
        """Return the newest parameters by name, as float32."""

    @abstractmethod
    def state(self) -> list[NDArray[Any]]:
        """Return the arrays of the optimiser."""

    def train(self, turns: int = 1, by: float = STEP) -> None:
        for _ in range(turns):
            self.step(by)
            self.sync()


@dataclass(frozen=True)
class Framework:
    """How tests write a script in one framework.

    Attributes:
        name: Its name.
        model: Returns a model of a dtype, whose first values are higher by a number.
        run: Creates a run in virtual time.
        create: Creates a run on a server: `create` of the framework.
        join: Returns a script that is about to join a run, by its URL and name: `join` of the framework. It has an
            optimiser if `optimizes` is set.
        with_shape: Returns a model one of whose parameters has another shape, and the name of the parameter.
        with_value: Returns a model with this value in one of its parameters, and the name of the parameter.
        array: Returns an array of the framework.
    """

    name: str
    model: Callable[..., Any]
    run: Callable[..., LoopRun]
    create: Callable[..., bool]
    join: Callable[..., Script]
    with_shape: Callable[[], tuple[Any, str]]
    with_value: Callable[[float], tuple[Any, str]]
    array: Callable[..., Any]


@contextmanager
def served(url: str, run: str = "own", linger_seconds: float = 0.0) -> Iterator[Merger]:
    """Serve a run in another thread."""
    merger = Merger(connect(url, run), holder="merger", linger_seconds=linger_seconds)
    stop = threading.Event()
    assert merger.acquire()
    merger.load()

    def serve() -> None:
        while not stop.is_set():
            merger.turn(0.1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield merger
    finally:
        stop.set()
        thread.join()


def merged_by(merger: Merger) -> Values:
    """Return the run's newest parameters by name, as float32."""
    found = {}
    for p, fragment in merger.fragments.items():
        for tensor, offset in merger.manifest.layout[p]:
            part = fragment.published_N[offset : offset + tensor.size]
            found[tensor.name] = np.array(part).reshape(tensor.shape)
    return found
