"""A worker of the baseline: it trains data-parallel in a process group, which `archipelago chaos --baseline` starts.

It connects to the hub, loads the checkpoint that the hub names, and exchanges gradients until its connection is lost.
Then it connects again. Its steps have the same minimum duration as those of an island; the exchange is hidden behind it
if both fit into that time.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.flatten_util import ravel_pytree

from archipelago.broker.codecs import Vector
from archipelago.broker.config import from_json
from archipelago.broker.files import write_atomically
from archipelago.broker.machine import LOOPBACK
from archipelago.islands.inner import InnerState, descent
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.turn_log import MeasuredTurns
from archipelago.ops.experiments.baselines import Reader
from archipelago.ops.launch.init import workload_of

CONNECT_SECONDS = 0.1


class DataParallelWorker:
    """The arithmetic of one worker, which computes the gradient of its part of the group's batch.

    Args:
        work: What the group trains. The group's batch is `workers` batches of it.
        number: Which of these batches is this worker's. The first worker saves checkpoints.
        workers: The number of workers.
        folder: Where the group keeps its checkpoints.
        checkpoint_seconds: The time from one checkpoint to the next.

    Attributes:
        state: Parameters and optimiser state.
        saved: The step of the last checkpoint; 0 before the first.
    """

    state: InnerState
    saved: int
    _reader: Reader

    def __init__(self, work: Workload, number: int, workers: int, folder: Path, checkpoint_seconds: float) -> None:
        self._work, self._number, self._workers, self._folder = work, number, workers, folder
        self._checkpoint_seconds = checkpoint_seconds if number == 0 else math.inf
        model = work.model
        descend = model.descent() if model.has_own_optimizer else descent(work.config.inner)
        self._gradient = jax.jit(lambda params, batch: ravel_pytree(model.gradient(params, batch)[0])[0])
        self._descend = jax.jit(
            lambda state, mean_N, n: descend(state, ravel_pytree(state.params)[1](mean_N), n), donate_argnums=0
        )
        self.load(0)
        self._descend_by(self.gradient())  # This compiles all programs before the group begins.

    def gradient(self) -> Vector:
        """Return the gradient of this worker's part of the next batch: float32 [N]."""
        batch = jax.tree.map(lambda x: x[self._number], self._reader.next(self._workers))
        return np.asarray(self._gradient(self.state.params, batch))

    def apply(self, mean_N: Vector) -> None:
        """Make the optimiser's step on the mean gradient, and save a checkpoint if one is due."""
        self._descend_by(mean_N)
        self._step += 1
        if time.monotonic() - self._saved_at >= self._checkpoint_seconds:
            self._save()

    def _save(self) -> None:
        leaves = {f"{number:05d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(self.state))}
        write_atomically(self._checkpoint(self._step), safetensors.numpy.save(leaves))
        kept = {self._checkpoint(self._step), self._checkpoint(self.saved)}  # The hub may not know the newest one yet.
        for path in set(self._folder.glob("checkpoint-*.safetensors")) - kept:
            path.unlink()
        self.saved, self._saved_at = self._step, time.monotonic()

    def _descend_by(self, mean_N: Vector) -> None:
        self.state = self._descend(self.state, jnp.asarray(mean_N), jnp.asarray(self._step, jnp.int32))

    def load(self, step: int) -> None:
        """Continue from the checkpoint after that many steps; 0 for the first parameters."""
        self._step = self.saved = step
        self._saved_at, self._reader = time.monotonic(), Reader(self._work)
        if step == 0:
            self.state = self._work.begin(self._work.model.init())
            return
        leaves = sorted(safetensors.numpy.load_file(self._checkpoint(step)).items())
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), [jnp.asarray(leaf) for _, leaf in leaves])
        for _ in range(step):  # each step has read a batch for each worker
            self._reader.next(self._workers)

    def _checkpoint(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}.safetensors"


def follow(worker: DataParallelWorker, connection: socket.socket, name: str, step_seconds_min: float = 0.0) -> None:
    """Take part in a process group until the connection is lost, which raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"{name}\n".encode())
    turns = MeasuredTurns(None, step_seconds_min)
    with connection.makefile("rb") as stream:
        worker.load(int(_whole(stream.readline(), 1)))
        while True:
            message = worker.gradient().tobytes()
            turns.stepped(1)
            connection.sendall(b"%d %d\n" % (worker.saved, len(message)) + message)
            worker.apply(np.frombuffer(_whole(stream.read(len(message)), len(message)), np.float32))


def _whole(message: bytes, least: int) -> bytes:
    """Return the message. Raise OSError if the connection has ended before that many bytes."""
    if len(message) < least:
        raise ConnectionResetError("the hub has ended the connection")
    return message


def main(folder: Path, name: str, port: int) -> None:
    """Train until the process is killed."""
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    names, work = list(settings["step_seconds"]), workload_of(from_json(settings["config"]), settings["task"])
    worker = DataParallelWorker(work, names.index(name), len(names), folder, settings["checkpoint_seconds"])
    while True:
        try:
            with socket.create_connection((LOOPBACK, port)) as connection:
                follow(worker, connection, name, settings["step_seconds"][name])
        except OSError as error:
            sys.stderr.write(f"{error}; connecting again\n")
        time.sleep(CONNECT_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
