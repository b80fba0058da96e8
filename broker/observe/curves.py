"""Curves on disk and elsewhere: TensorBoard event files by default, Weights & Biases where it was asked for.

Everything that writes belongs to one thread of its own, which also loads the libraries. It takes points from a bounded
queue, or asks for one now and then; so nobody who trains or merges waits for a disk. What cannot be written costs a
warning and the points, never the work that they are about.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from archipelago.broker.errors import ConfigError

PROJECT = "archipelago"
WAITING_MAX = 4096
"""points that wait to be written; beyond it the oldest are dropped"""
FLUSH_SECONDS = 5.0
RETRY_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
CLOSE_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """Values by name at one place of their common axis (a global step, a round, tokens)."""

    unix_seconds: float
    step: int
    values: Mapping[str, float]

    @property
    def known(self) -> dict[str, float]:
        """The values that are numbers."""
        return {name: float(value) for name, value in self.values.items() if math.isfinite(value)}


class Sink(Protocol):
    """Where points go. Any method may raise; then the sink is closed, and opened again later."""

    where: str
    """what it is, in words"""
    remedy: str
    """the next step for a user when it breaks"""

    def open(self) -> None: ...
    def write(self, point: Point) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class EventFile:
    """TensorBoard's event files in `folder`, a new one each time it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = f"event files in {folder}"
        self.remedy = "Is the disk full, or the folder read-only? --no-tensorboard writes none."
        self._opened = 0
        self._writer: Any = None

    def open(self) -> None:
        """Begins a file of its own: a broken one is never gone on with."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

        self.folder.mkdir(parents=True, exist_ok=True)
        self._opened += 1
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{self._opened}"
        self._writer = RecordWriter(str(self.folder / name))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def write(self, point: Point) -> None:
        """One event with all values."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.known.items()]
        event = Event(wall_time=point.unix_seconds, step=point.step, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Brings all of it to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """The same, for the last time. A file that got nothing goes: a full disk makes one with each try."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
        finally:
            path = Path(writer.path)
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


class WandbRun:
    """A run of Weights & Biases: one for each worker, in the group of its run. WANDB_MODE and its like are its own."""

    def __init__(self, group: str, name: str, kind: str, folder: Path, axis: str) -> None:
        """`kind` is the type of job, `axis` what the points' step counts. Raises ConfigError without the package."""
        require_wandb()
        self.where = "curves at Weights & Biases"
        self.remedy = "`wandb login` once, or WANDB_MODE=offline; without --wandb there are none."
        self._how = {"project": PROJECT, "group": group, "name": name, "job_type": kind, "dir": str(folder)}
        self._folder, self._axis = folder, axis
        self._run: Any = None

    def open(self) -> None:
        """Begins a run there."""
        wandb = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(**self._how, settings=wandb.Settings(silent=True, console="off", disable_git=True))
        # Not wandb's own step, which must only grow: a run that goes back to a checkpoint has its places again.
        self._run.define_metric("*", step_metric=self._axis)

    def write(self, point: Point) -> None:
        """One row."""
        self._run.log({self._axis: point.step, **point.known})

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        """Ends the run there."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def require_wandb() -> None:
    """Raises ConfigError without the package."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.loader is None:  # a folder of that name, such as it makes itself, is no package
        raise ConfigError(
            "--wandb needs the package wandb, which is not installed", "pip install 'archipelago-train[wandb]'"
        )


Sample = Callable[[], "tuple[int, Mapping[str, float]] | None"]
"""gives a step and values, or None while there are none"""


class Scalars:
    """Points on their way to sinks, each with a thread of its own: a slow one holds up no other.

    With a `sample`, each thread asks it for a point every `every_seconds`, besides those that are put.
    """

    def __init__(
        self, sinks: Sequence[Sink], sample: Sample | None = None, every_seconds: float = SAMPLE_SECONDS
    ) -> None:
        self._outlets = [Outlet(sink, sample) for sink in sinks]
        self._every_seconds = every_seconds
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads."""
        for outlet in self._outlets:
            thread = threading.Thread(target=self._keep_writing, args=(outlet,), name="scalars", daemon=True)
            thread.start()
            self._threads.append(thread)

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queues a point. Waits for nothing."""
        for outlet in self._outlets:
            outlet.put(Point(time.time(), step, values))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes what waits and ends; a disk or a network that hangs is left behind after `seconds`."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(seconds)

    def _keep_writing(self, outlet: Outlet) -> None:
        while not self._stopping.wait(self._every_seconds):
            outlet.turn()
        outlet.turn()
        outlet.close()


class Outlet:
    """A sink that may break, and what waits for it. It says so once, drops points, and is tried again later."""

    def __init__(
        self,
        sink: Sink,
        sample: Sample | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sink, self._sample, self._clock, self._wall_clock = sink, sample, clock, wall_clock
        self._waiting: deque[Point] = deque(maxlen=WAITING_MAX)
        self._sampled_step = -1
        self._is_open = self._was_broken = False
        self._again_at = self._flush_at = -math.inf

    def put(self, point: Point) -> None:
        """Queues it; the oldest goes when there are too many."""
        self._waiting.append(point)

    def open(self) -> None:
        """Opens the sink, unless it has just failed."""
        if not self._is_open and self._clock() >= self._again_at:
            self._is_open = self._attempt(self._sink.open)

    def turn(self) -> None:
        """Asks for a point, and writes what waits."""
        found = self._sample() if self._sample is not None else None
        if found is not None and found[0] != self._sampled_step:
            self._sampled_step = found[0]
            self.put(Point(self._wall_clock(), *found))
        self.open()
        if self._is_open:
            self._attempt(self._write)

    def close(self) -> None:
        """The end; what waits was written by the last turn."""
        if self._is_open:
            self._is_open = False
            self._attempt(self._sink.close)

    def _write(self) -> None:
        while self._waiting:
            self._sink.write(self._waiting.popleft())
        if self._clock() >= self._flush_at:
            self._flush_at = self._clock() + FLUSH_SECONDS
            self._sink.flush()
            if self._was_broken:
                self._was_broken = False
                log.info("%s are written again", self._sink.where)

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a disk or a service does, the work goes on
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()
        if not self._was_broken:
            said = isinstance(error, OSError) and error.strerror
            log.warning(
                "no %s, all else goes on: %.300s. %s", self._sink.where,
                said or f"{type(error).__name__}: {error}".rstrip("."), self._sink.remedy,
            )  # fmt: skip
        self._is_open, self._was_broken = False, True
        self._again_at = self._clock() + RETRY_SECONDS
