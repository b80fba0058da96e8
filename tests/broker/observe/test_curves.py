"""Curves: event files are valid, and work continues when a disk is full."""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from archipelago.broker.observe.curves import WAITING_MAX, CurveWriter, EventFile, Point
from archipelago.broker.observe.options import WorkerOptions
from tests.conftest import Until


def events(path: Path) -> Iterator[Event]:
    """Return the events of one file. TFRecord frames carry checksums of their length and body."""
    data = path.read_bytes()
    while data:
        (size,), length = struct.unpack("<Q", data[:8]), data[:8]
        body = data[12 : 12 + size]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(length)
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked_crc32c(body)
        yield Event.FromString(body)
        data = data[16 + size :]


def curves(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return (step, values) of all files in the folder, in order."""
    found = [event for path in sorted(folder.iterdir()) for event in events(path)]
    return [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in found if e.summary.value]


def point(step: int, **values: float) -> Point:
    return Point(1.7e9 + step, step, values)


class FaultyFile(EventFile):
    """A file that raises `fault` if it is set."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.fault: Exception | None = None
        self.points: list[Point] = []

    def write(self, points: Sequence[Point]) -> None:
        if self.fault is not None:
            raise self.fault
        self.points += points


def test_an_event_file_is_read_back_and_a_broken_one_is_not_continued(tmp_path: Path) -> None:
    sink = EventFile(tmp_path / "tensorboard")
    sink.write([point(3, loss=2.5, staleness=math.nan, gain=math.inf, norm=-1e39)])
    sink.write([point(200, loss=1.25)])
    (file,) = (tmp_path / "tensorboard").iterdir()
    first, *rest = events(file)
    assert first.file_version == "brain.Event:2"
    assert [event.wall_time for event in rest] == [1.7e9 + 3, 1.7e9 + 200]
    long = "x" * 300
    file.rename(tmp_path / "moved")
    file.mkdir()
    with pytest.raises(OSError, match="directory"):
        sink.write([point(201, loss=1.0)])
    file.rmdir()
    (tmp_path / "moved").rename(file)
    sink.write([point(2**40, loss=-1.0, **{long: 0.5})])
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    # Values that float32 cannot hold are left out.
    expected = [(3, {"loss": 2.5}), (200, {"loss": 1.25}), (2**40, {"loss": -1.0, long: 0.5})]
    assert curves(tmp_path / "tensorboard") == expected


def test_a_thread_writes_queued_and_sampled_points(tmp_path: Path, until: Until) -> None:
    steps = iter(range(5))
    threads = set[str]()

    def sample() -> tuple[int, dict[str, float]] | None:
        threads.add(threading.current_thread().name)
        step = next(steps, None)
        return None if step is None else (step // 2, {"loss": float(step)})

    writer = CurveWriter(EventFile(tmp_path), sample, every_seconds=0.001)
    writer.put(100, {"loss": 9.0})
    writer.start()
    until(lambda: next(steps, None) is None, "all samples")
    writer.close()
    found = curves(tmp_path)
    assert found[0] == (0, {"loss": 0.0}) or found[0] == (100, {"loss": 9.0})
    assert (100, {"loss": 9.0}) in found
    assert [step for step, _ in found if step < 100] == sorted({step for step, _ in found if step < 100})
    assert threads == {"curves"}


def test_a_file_that_hangs_does_not_delay_the_end() -> None:
    hanging, stuck = threading.Event(), FaultyFile()
    stuck.write = lambda points: (hanging.wait(), None)[1]  # type: ignore[method-assign]
    writer = CurveWriter(stuck, every_seconds=0.001)
    writer.put(1, {"loss": 1.0})
    writer.start()
    writer.close(seconds=0.05)
    hanging.set()


def test_the_queue_is_bounded() -> None:
    file = FaultyFile()
    writer = CurveWriter(file)
    for step in range(WAITING_MAX + 10):
        writer.put(step, {"loss": 1.0})
    writer.turn()
    assert [p.step for p in file.points] == list(range(10, WAITING_MAX + 10))


def test_a_failure_and_its_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for fault in (OSError(28, "No space left on device"), RuntimeError("a library that fails")):
        caplog.clear()
        file = FaultyFile()
        writer = CurveWriter(file)
        for step, file.fault in enumerate((None, fault, fault, None, None)):
            writer.put(step, {"loss": 1.0})
            writer.turn()
        said, ended = caplog.records
        assert "nowhere" in said.getMessage() and "--no-tensorboard" in said.getMessage()
        assert ("No space left" in said.getMessage()) == isinstance(fault, OSError)
        assert ended.levelno == logging.INFO
        assert [p.step for p in file.points] == [0, 3, 4]


def test_a_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def full(path: Path, mode: str) -> BinaryIO:
        made.append(path)
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = CurveWriter(EventFile(tmp_path), every_seconds=0.001)
    writer.put(1, {"loss": 1.0})
    monkeypatch.setattr(Path, "open", full)
    writer.start()
    writer.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in said
    assert made
    assert not list(tmp_path.iterdir()), "no empty file is left behind"


def test_curves_can_be_turned_off(tmp_path: Path) -> None:
    file = WorkerOptions().event_file(tmp_path)
    assert file is not None and file.folder == tmp_path / "tensorboard"
    assert WorkerOptions(tensorboard=False).event_file(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
