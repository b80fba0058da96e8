"""Metric curves: pass points from a worker to files or services.

Each sink has its own thread, which also imports the sink's library. The thread takes points from a bounded queue
and asks for one from time to time, so training and merging never wait for a disk. If a sink fails, the worker logs a
warning and loses the points, and its work continues.
"""

from __future__ import annotations

import contextlib
import importlib
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

from archipelago.broker.machine import is_installed, require_extra

#: The most points that wait to be written. If there are more, the oldest are dropped.
WAITING_MAX = 4096
FLUSH_SECONDS = 5.0
RETRY_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
CLOSE_SECONDS = 10.0
#: The project at Weights & Biases.
PROJECT = "archipelago"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """Values by name at one step (a global step, a round, or a number of tokens)."""

    unix_seconds: float
    step: int
    values: Mapping[str, float]

    @property
    def known(self) -> dict[str, float]:
        """The values that are finite."""
        return {name: float(value) for name, value in self.values.items() if math.isfinite(value)}


class Sink(Protocol):
    """A destination of points. Any method may raise; the sink is then closed, and opened again later.

    Attributes:
        where: A description of the sink, for messages.
        remedy: What a user can do if it fails.
    """

    where: str
    remedy: str

    def open(self) -> None: ...
    def write(self, point: Point) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


#: Returns a step and values, or None if there are none yet.
Sample = Callable[[], "tuple[int, Mapping[str, float]] | None"]


class CurveWriter:
    """A writer that passes points to sinks. Each sink has its own thread, so that a slow sink does not delay others.

    With `sample`, each thread also asks it for a point every `every_seconds`.
    """

    def __init__(
        self, sinks: Sequence[Sink], sample: Sample | None = None, every_seconds: float = SAMPLE_SECONDS
    ) -> None:
        self._outlets = [Outlet(sink, sample) for sink in sinks]
        self._every_seconds = every_seconds
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for outlet in self._outlets:
            thread = threading.Thread(target=self._keep_writing, args=(outlet,), name="curves", daemon=True)
            thread.start()
            self._threads.append(thread)

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a point. This never blocks."""
        for outlet in self._outlets:
            outlet.put(Point(time.time(), step, values))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the queued points and end. A disk or network that hangs is abandoned after `seconds`."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(seconds)

    def _keep_writing(self, outlet: Outlet) -> None:
        while not self._stopping.wait(self._every_seconds):
            outlet.turn()
        outlet.turn()
        outlet.close()


class Outlet:
    """A sink with its queue. If the sink fails, the outlet warns once, drops points, and tries again later."""

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
        """Queue a point; a full queue drops its oldest."""
        self._waiting.append(point)

    def turn(self) -> None:
        """Ask for a point, and write the queued ones."""
        found = self._sample() if self._sample is not None else None
        if found is not None and found[0] != self._sampled_step:
            self._sampled_step = found[0]
            self.put(Point(self._wall_clock(), *found))
        if not self._is_open and self._clock() >= self._again_at:  # It failed RETRY_SECONDS ago, or never.
            self._is_open = self._attempt(self._sink.open)
        if self._is_open:
            self._attempt(self._write)

    def close(self) -> None:
        """Close the sink. The last turn has written the queue."""
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
                log.info("%s: writing again", self._sink.where)

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a disk or a service must not stop the work
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()
        if not self._was_broken:
            said = isinstance(error, OSError) and error.strerror
            log.warning(
                "cannot write %s (%.300s); the work continues. %s", self._sink.where,
                said or f"{type(error).__name__}: {error}".rstrip("."), self._sink.remedy,
            )  # fmt: skip
        self._is_open, self._was_broken = False, True
        self._again_at = self._clock() + RETRY_SECONDS


# -- sinks: TensorBoard event files, and Weights & Biases --------------------------------------------------------------


def has_tensorboard() -> bool:
    """Return whether event files can be written (extra `plots`)."""
    return is_installed("tensorboardX")


class EventFile:
    """TensorBoard event files in `folder`. Each `open` begins a new file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = f"event files in {folder}"
        self.remedy = "Check the disk's space and the folder's permissions, or turn curves off with --no-tensorboard."
        self._opened = 0
        self._writer: Any = None

    def open(self) -> None:
        """Begin a new file, so that a broken one is never continued."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

        self.folder.mkdir(parents=True, exist_ok=True)
        self._opened += 1
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{self._opened}"
        self._writer = RecordWriter(str(self.folder / name))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def write(self, point: Point) -> None:
        """Write one event with all values."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.known.items()]
        event = Event(wall_time=point.unix_seconds, step=point.step, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Pass everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file, and delete it if it is empty. A full disk leaves an empty file behind at each attempt."""
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
    """A run at Weights & Biases, one for each worker, in the group of its run. The variables of wandb apply."""

    def __init__(self, group: str, name: str, kind: str, folder: Path, axis: str) -> None:
        """Raise ConfigError if wandb is not installed. `kind` is the type of job; `axis` names a point's step."""
        require_wandb()
        self.where = "curves at Weights & Biases"
        self.remedy = "Run `wandb login`, or set WANDB_MODE=offline, or leave out --wandb."
        self._how = {"project": PROJECT, "group": group, "name": name, "job_type": kind, "dir": str(folder)}
        self._folder, self._axis = folder, axis
        self._run: Any = None

    def open(self) -> None:
        """Begin a run at the service."""
        wandb = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(**self._how, settings=wandb.Settings(silent=True, console="off", disable_git=True))
        # wandb's own step may only grow, but a run that returns to a checkpoint repeats its steps.
        self._run.define_metric("*", step_metric=self._axis)

    def write(self, point: Point) -> None:
        """Send one row."""
        self._run.log({self._axis: point.step, **point.known})

    def flush(self) -> None:
        """Do nothing, because wandb sends points on its own thread."""

    def close(self) -> None:
        """End the run at the service."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def require_wandb() -> None:
    """Raise ConfigError unless wandb is installed. A folder named `wandb`, which it makes itself, does not count."""
    require_extra("wandb", "--wandb")
