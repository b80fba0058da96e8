"""Metric curves: pass points from a worker to TensorBoard event files.

A thread of its own takes points from a bounded queue and asks for one from time to time, so training and merging never
wait for a disk. It also imports the library. If the disk fails, the worker logs a warning and loses the points, and its
work continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from archipelago.broker.machine import is_installed

#: The most points that wait to be written. If there are more, the oldest are dropped.
WAITING_MAX = 4096
SAMPLE_SECONDS = 1.0
CLOSE_SECONDS = 10.0

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """Values by name at one step (a global step, a round, or a number of tokens)."""

    unix_seconds: float
    step: int
    values: Mapping[str, float]


#: Returns a step and values, or None if there are none yet.
Sample = Callable[[], "tuple[int, Mapping[str, float]] | None"]


class CurveWriter:
    """A writer of points. While the file fails, it warns once and drops points.

    Args:
        file: Where the points go; None drops them.
        sample: Is asked for a point every `every_seconds`.
    """

    def __init__(
        self, file: EventFile | None, sample: Sample | None = None, every_seconds: float = SAMPLE_SECONDS
    ) -> None:
        self._file, self._sample, self._every_seconds = file, sample, every_seconds
        self._waiting: deque[Point] = deque(maxlen=WAITING_MAX)
        self._sampled_step = -1
        self._is_broken = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="curves", daemon=True)

    def start(self) -> None:
        if self._file is not None:
            self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a point. This never blocks."""
        if self._file is not None:
            self._waiting.append(Point(time.time(), step, values))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the queued points and end. A disk that hangs is abandoned after `seconds`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _keep_writing(self) -> None:
        while not self._stopping.wait(self._every_seconds):
            self.turn()
        self.turn()
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()

    def turn(self) -> None:
        """Ask for a point, and write the queued ones. After a failure, the next turn begins a new file."""
        found = self._sample() if self._sample is not None else None
        if found is not None and found[0] != self._sampled_step:
            self._sampled_step = found[0]
            self.put(*found)
        if (file := self._file) is None or not self._waiting:
            return
        try:
            while self._waiting:
                file.write(self._waiting.popleft())
            file.flush()
        except Exception as error:  # noqa: BLE001 - a disk must not stop the work
            with contextlib.suppress(Exception):
                file.close()
            if not self._is_broken:
                said = isinstance(error, OSError) and error.strerror
                log.warning(
                    "cannot write event files in %s (%.300s); the work continues. Check the disk's space and the "
                    "folder's permissions, or turn curves off with --no-tensorboard.", file.folder,
                    said or f"{type(error).__name__}: {error}".rstrip("."),
                )  # fmt: skip
            self._is_broken = True
            return
        if self._is_broken:
            self._is_broken = False
            log.info("event files in %s: writing again", file.folder)


def has_tensorboard() -> bool:
    """Return whether event files can be written (extra `plots`)."""
    return is_installed("tensorboardX")


class EventFile:
    """TensorBoard event files in `folder`. The first event after `close` begins a new file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened = 0
        self._writer: Any = None

    @staticmethod
    def load() -> None:
        """Import the library. Meanwhile, the other threads of the process hardly go on."""
        from tensorboardX import record_writer  # type: ignore[import-untyped]  # noqa: F401
        from tensorboardX.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]  # noqa: F401

    def _begin(self) -> None:
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

        self.folder.mkdir(parents=True, exist_ok=True)
        self._opened += 1
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{self._opened}"
        self._writer = RecordWriter(str(self.folder / name))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def write(self, point: Point) -> None:
        """Write one event with all values that are finite."""
        if self._writer is None:
            self._begin()
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        known = {name: float(value) for name, value in point.values.items() if math.isfinite(value)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        event = Event(wall_time=point.unix_seconds, step=point.step, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
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
