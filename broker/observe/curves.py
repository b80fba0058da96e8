"""Metric curves: pass points from a worker to TensorBoard event files.

A thread of its own takes points from a bounded queue and asks for one from time to time, so training and merging never
wait for a disk. If the disk fails, the worker logs a warning and loses the points, and its work continues.

The files are written here, because the libraries for it import PyTorch where it is installed: 1.6 s and 190 MiB in each
worker.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: The most points that wait to be written. If there are more, the oldest are dropped.
WAITING_MAX = 4096
SAMPLE_SECONDS = 1.0
CLOSE_SECONDS = 10.0
#: TensorBoard keeps values in float32. Larger ones are left out, as those that are not finite.
FLOAT32_MAX = float(np.finfo(np.float32).max)

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

    def turn(self) -> None:
        """Ask for a point, and write the queued ones."""
        found = self._sample() if self._sample is not None else None
        if found is not None and found[0] != self._sampled_step:
            self._sampled_step = found[0]
            self.put(*found)
        if (file := self._file) is None or not self._waiting:
            return
        try:
            file.write([self._waiting.popleft() for _ in range(len(self._waiting))])
        except Exception as error:  # noqa: BLE001 - a disk must not stop the work
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


class EventFile:
    """TensorBoard event files in `folder`, which is made with the first one. After a failure, another file begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun = 0
        self._path: Path | None = None

    def write(self, points: Sequence[Point]) -> None:
        """Append an event for each point, with all values that float32 can hold. Raises OSError."""
        path, records = self._path, [_record(_event(point)) for point in points]
        if path is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            now, self._begun = time.time(), self._begun + 1
            path = self.folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{self._begun}"
            records.insert(0, _record(_time_field(now) + _field(3, b"brain.Event:2")))
        self._path = None  # a failure may leave a part of a record
        try:
            with path.open("ab") as file:
                file.write(b"".join(records))
        finally:
            if path.exists() and not path.stat().st_size:  # a full disk leaves one at each attempt
                path.unlink()
        self._path = path


def _event(point: Point) -> bytes:
    """Return a point as the message `Event` of TensorBoard (event.proto and summary.proto), encoded by protobuf."""
    values = (
        _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        for name, value in point.values.items()
        if abs(value) <= FLOAT32_MAX
    )
    return _time_field(point.unix_seconds) + b"\x10" + _varint(point.step) + _field(5, b"".join(values))


def _time_field(unix_seconds: float) -> bytes:
    return b"\x09" + struct.pack("<d", unix_seconds)


def _field(number: int, body: bytes) -> bytes:
    """Return a field of protobuf that has a length: a text or a message."""
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    """Return a number as protobuf writes it: 7 bits in each byte, the lowest first."""
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7) if value > 0x7F else bytes([value])


def _record(body: bytes) -> bytes:
    """Return a record of a TFRecord file: length, its checksum, body, its checksum."""
    length = struct.pack("<Q", len(body))
    return length + _checksum(length) + body + _checksum(body)


def _checksum(data: bytes) -> bytes:
    """Return the checksum of TFRecord: CRC-32C (RFC 3720, 12.1), rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(crc: int) -> int:
    """Return the CRC-32C of one byte, without the inversions at both ends."""
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC32C = [_of_byte(byte) for byte in range(256)]
