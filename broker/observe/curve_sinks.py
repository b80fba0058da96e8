"""Sinks of metric curves: TensorBoard event files, and Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from archipelago.broker.machine import is_installed, require_extra
from archipelago.broker.observe.curves import Point

PROJECT = "archipelago"


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
