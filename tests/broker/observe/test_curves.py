"""Curves: event files are read back frame by frame, disks fill up and services fail, and the work goes on."""

from __future__ import annotations

import logging
import math
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import pytest
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.curves import RETRY_SECONDS, WAITING_MAX, EventFile, Outlet, Point, Scalars, WandbRun
from archipelago.broker.observe.options import CurveOptions
from tests.conftest import Until


def events(path: Path) -> Iterator[Event]:
    """The events of one file; TFRecord's frames have checksums of length and body."""
    data = path.read_bytes()
    while data:
        (size,), length = struct.unpack("<Q", data[:8]), data[:8]
        body = data[12 : 12 + size]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(length)
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked_crc32c(body)
        yield Event.FromString(body)
        data = data[16 + size :]


def curves(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, values) of all files there, in order."""
    found = [event for path in sorted(folder.iterdir()) for event in events(path)]
    return [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in found if e.summary.value]


def point(step: int, **values: float) -> Point:
    return Point(1.7e9 + step, step, values)


class Time:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Sick:
    """A sink that raises when it is told to."""

    where, remedy = "curves nowhere", "Try a doctor."

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.calls: list[str] = []
        self.points: list[Point] = []

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if self.fault is not None:
            raise self.fault

    def open(self) -> None:
        self._do("open")

    def write(self, point: Point) -> None:
        self._do("write")
        self.points.append(point)

    def flush(self) -> None:
        self._do("flush")

    def close(self) -> None:
        self._do("close")


def test_an_event_file_is_read_back(tmp_path: Path) -> None:
    sink = EventFile(tmp_path / "tensorboard")
    sink.open()
    sink.write(point(3, loss=2.5, staleness=math.nan, gain=math.inf))
    sink.write(point(9, loss=1.25))
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    first, *rest = events(file)
    assert first.file_version == "brain.Event:2"
    assert [event.wall_time for event in rest] == [1.7e9 + 3, 1.7e9 + 9]
    assert curves(tmp_path / "tensorboard") == [
        (3, {"loss": 2.5}),
        (9, {"loss": 1.25}),
    ]  # what is no number is no point


def test_a_return_begins_a_file_of_its_own(tmp_path: Path) -> None:
    sink = EventFile(tmp_path)
    for step in (1, 2):
        sink.open()
        sink.write(point(step, loss=step))
        sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert curves(tmp_path) == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_a_thread_of_its_own_writes_what_is_put_and_what_it_samples(tmp_path: Path, until: Until) -> None:
    steps = iter(range(5))
    threads = set[str]()

    def sample() -> tuple[int, dict[str, float]] | None:
        threads.add(threading.current_thread().name)
        step = next(steps, None)
        return None if step is None else (step // 2, {"loss": float(step)})

    scalars = Scalars([EventFile(tmp_path)], sample, every_seconds=0.001)
    scalars.put(100, {"loss": 9.0})
    scalars.start()
    until(lambda: next(steps, None) is None, "all samples")
    scalars.close()
    found = curves(tmp_path)
    assert found[0] == (0, {"loss": 0.0}) or found[0] == (100, {"loss": 9.0})
    assert (100, {"loss": 9.0}) in found
    assert [step for step, _ in found if step < 100] == sorted({step for step, _ in found if step < 100})  # once each
    assert threads == {"scalars"}


def test_a_sink_that_hangs_holds_up_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    hanging = threading.Event()
    stuck = Sick()
    stuck._do = lambda what: (hanging.wait(), None)[1]  # type: ignore[method-assign]
    scalars = Scalars([stuck, EventFile(tmp_path)], every_seconds=0.001)
    scalars.start()
    scalars.put(1, {"loss": 1.0})
    scalars.close(seconds=0.5)
    assert curves(tmp_path) == [(1, {"loss": 1.0})]
    hanging.set()


def test_what_waits_is_bounded() -> None:
    sink, clock = Sick(), Time()
    sink.fault = OSError("no")
    outlet = Outlet(sink, clock=clock)
    for step in range(WAITING_MAX + 10):
        outlet.put(point(step, loss=1.0))
    outlet.turn()
    sink.fault = None
    clock.now = RETRY_SECONDS
    outlet.turn()
    assert [p.step for p in sink.points] == list(range(10, WAITING_MAX + 10))


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("a service that is away")])
def test_trouble_is_said_once_with_its_remedy_and_ends(fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sink, clock = Sick(), Time()
    outlet = Outlet(sink, clock=clock)
    outlet.put(point(1, loss=1.0))
    outlet.turn()
    sink.fault = fault
    for _ in range(5):
        outlet.put(point(2, loss=1.0))
        outlet.turn()
        clock.now += RETRY_SECONDS / 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("no curves nowhere, all else goes on: ")
    assert said.endswith("Try a doctor.")
    assert ("No space left" in said) == isinstance(fault, OSError)
    sink.fault = None
    clock.now += RETRY_SECONDS
    outlet.put(point(3, loss=1.0))
    outlet.turn()
    assert caplog.records[-1].getMessage() == "curves nowhere are written again"
    assert [p.step for p in sink.points][-1] == 3
    outlet.close()
    assert sink.calls[-1] == "close"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Path] = []

    def opened(path: str) -> BinaryIO:
        made.append(Path(path))
        made[-1].touch()
        return Path("/dev/full").open("wb")

    monkeypatch.setattr("tensorboardX.record_writer.open_file", opened)
    outlet = Outlet(EventFile(tmp_path))
    outlet.put(point(1, loss=1.0))
    outlet.turn()
    outlet.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"no event files in {tmp_path}, all else goes on: No space left on device. "
        "Is the disk full, or the folder read-only? --no-tensorboard writes none."
    )
    assert made
    assert not list(tmp_path.iterdir()), "it leaves no empty files"


def test_a_folder_that_is_none_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    scalars = Scalars([EventFile(tmp_path / "file" / "tensorboard")], every_seconds=0.001)
    scalars.put(1, {"loss": 1.0})
    scalars.start()
    scalars.close()
    assert caplog.text.count("Not a directory") == 1


# -- Weights & Biases, by a stand-in --------------------------------------------------------------------------------


class StandIn(ModuleType):
    """As much of the package as is used, and what it was told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[tuple[str, Any]] = []
        self.fault: Exception | None = None
        self.__spec__ = SimpleNamespace(name="wandb", loader=object())  # type: ignore[assignment]

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - its own name
        return settings

    def init(self, **how: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        self.told.append(("init", how))
        return SimpleNamespace(
            define_metric=lambda name, step_metric: self.told.append(("axis", step_metric)),
            log=lambda row: self.told.append(("log", row)),
            finish=lambda: self.told.append(("finish", None)),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_points_go_to_a_run_in_the_group_of_the_run(wandb: StandIn, tmp_path: Path) -> None:
    options = CurveOptions(tensorboard=False, wandb=True)
    (sink,) = options.sinks("demo", "oslo", "island", tmp_path, "global_step")
    outlet = Outlet(sink)
    outlet.put(point(7, loss=2.0, staleness=math.nan))
    outlet.turn()
    outlet.close()
    (_, how), *rest = wandb.told
    assert {key: how[key] for key in ("project", "group", "name", "job_type", "dir")} == {
        "project": "archipelago", "group": "demo", "name": "oslo", "job_type": "island", "dir": str(tmp_path),
    }  # fmt: skip
    assert rest == [("axis", "global_step"), ("log", {"global_step": 7, "loss": 2.0}), ("finish", None)]


def test_a_service_that_refuses_is_a_warning(wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wandb.fault = RuntimeError("api_key not configured")
    outlet = Outlet(WandbRun("demo", "oslo", "island", tmp_path, "global_step"))
    outlet.put(point(7, loss=2.0))
    outlet.turn()
    assert "no curves at Weights & Biases, all else goes on: RuntimeError: api_key not configured" in caplog.text
    assert "wandb login" in caplog.text


def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed\. pip install 'archipelago-train\[wandb\]'"):
        CurveOptions(wandb=True).sinks("demo", "oslo", "island", tmp_path, "global_step")


def test_by_default_there_are_event_files_only(tmp_path: Path) -> None:
    (sink,) = CurveOptions().sinks("demo", "oslo", "island", tmp_path, "global_step")
    assert isinstance(sink, EventFile)
    assert sink.folder == tmp_path / "tensorboard"
    assert CurveOptions(tensorboard=False).sinks("demo", "oslo", "island", tmp_path, "global_step") == []
    assert list(tmp_path.iterdir()) == []
