"""Run the baseline of a storm: real processes that train the same model on the same text, data-parallel.

Each step needs the gradients of all workers, so a worker that is stopped or cut off stops all of them. When a
connection is lost, the group ends: all workers connect again, load the last checkpoint and go on from there.

The workers exchange float32 gradients through a hub in this process, over TCP, so that faults of links apply to them as
to the islands: they pass the same proxy. The baseline has it easier than the islands: its hub never fails, learns at
once that a worker has died or lost its connection, and forms the group again without a delay. A worker's steps have the
same minimum duration as those of an island; the exchange is hidden behind it if both fit into that time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
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
from archipelago.ops.chaos.figures import Figures, pauses
from archipelago.ops.chaos.injection import FaultInjector, FaultTarget
from archipelago.ops.chaos.processes import StormPlan, await_ready
from archipelago.ops.chaos.proxy import LoopServer, Proxy
from archipelago.ops.chaos.schedule import ON_LINKS, Fault
from archipelago.ops.experiments.baselines import Reader
from archipelago.ops.launch.devices import memory_share
from archipelago.ops.launch.init import workload_of
from archipelago.ops.launch.supervisor import Child, thread_environment

CONNECT_SECONDS = 0.1
#: A time without a step is downtime if a connection was lost in it, or if it is longer than this, and than this many
#: median times between steps.
DOWN_SECONDS, DOWN_STEPS = 1.0, 2.0


class Hub(LoopServer):
    """The exchange of a process group.

    A worker connects and sends its name. Once all are connected, each receives the step of the checkpoint to load.
    Then each sends the step of its last checkpoint and its gradient, and receives the mean of all gradients, again and
    again, until a connection is lost. Only the first worker saves checkpoints. Gradients are bytes, all else is lines.

    Attributes:
        port: The port of loopback on which it listens.
        step: How many steps are in the parameters.
        saved: How many steps are in the last checkpoint; 0 before the first.
        made: The time of each step, including those that were rolled back.
        lost: The time of each loss of a connection, after which the group begins again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("hub")
        self._names = tuple(names)
        self.step = self.saved = 0
        self.made: list[float] = []
        self.lost: list[float] = []
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._arrived: dict[str, tuple[int, Vector]] = {}
        self.port = 0

    async def _begin(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers.values():
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # Closed transports free their sockets in the next turn of the loop.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a worker until its connection is lost. The gradient that arrives last is followed by the mean."""
        name = (await reader.readline()).decode(errors="replace").strip()
        if name not in self._names:
            writer.transport.abort()
            return
        if name in self._writers:  # The worker is back before the end of its old connection has arrived.
            self._lose(name)
        self._writers[name] = writer
        if self._is_whole:
            self._arrived.clear()
            self._send(b"%d\n" % self.saved)
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                saved, count = map(int, (await reader.readuntil()).split())
                gradient_N = np.frombuffer(await reader.readexactly(count), np.float32)
                if self._writers.get(name) is not writer:
                    return  # It was left in the buffer of a connection that was lost.
                self._arrived[name] = saved, gradient_N
                if len(self._arrived) == len(self._names):
                    self._step()
        if self._writers.get(name) is writer:
            self._lose(name)

    @property
    def _is_whole(self) -> bool:
        return len(self._writers) == len(self._names)

    def _step(self) -> None:
        """Send all workers the mean of their gradients."""
        saved, gradients = zip(*(self._arrived[name] for name in self._names), strict=True)
        self._arrived.clear()
        mean_N = np.mean(gradients, axis=0, dtype=np.float32)
        self.step, self.saved = self.step + 1, saved[0]
        self.made.append(time.monotonic())
        self._send(mean_N.tobytes())

    def _send(self, message: bytes) -> None:
        """Send all workers a message. None has an earlier one before it, because each answers before the next."""
        for writer in self._writers.values():
            writer.write(message)

    def _lose(self, name: str) -> None:
        """End the connection of a worker, and those of all if the group was whole: it returns to its checkpoint."""
        lost = self._names if self._is_whole else (name,)
        if self._is_whole:
            self.step = self.saved
            self.lost.append(time.monotonic())
        for each in lost:
            self._writers.pop(each).transport.abort()


def worker_faults(faults: Iterable[Fault], names: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a storm that also apply to the workers. A connection that is half open is only reset."""
    kept = (fault for fault in faults if fault.target in names and fault.kind in {"kill", "stop", *ON_LINKS})
    return tuple(
        dataclasses.replace(fault, kind="reset", seconds=0.0) if fault.kind == "half-open" else fault for fault in kept
    )


def start_group(plan: StormPlan, faults: Sequence[Fault], hub: Hub, stack: ExitStack) -> FaultInjector:
    """Start the workers of a process group. Return the injector of their faults."""
    group, names = FaultInjector(), plan.islands
    plan.folder.mkdir(parents=True)
    settings = {
        "config": plan.config.to_json(), "task": plan.task, "islands": names, "step_seconds": plan.step_seconds,
        "checkpoint_seconds": plan.checkpoint_seconds,
    }  # fmt: skip
    (plan.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    linked = {fault.target for fault in faults if fault.kind in ON_LINKS}
    stack.callback(group.end)
    environment = {**thread_environment(len(names)), **memory_share(len(names))}
    for name in names:
        proxy = stack.enter_context(Proxy(hub.port)) if name in linked else None
        port = str(proxy.port if proxy else hub.port)
        argv = ["-m", "archipelago.ops.chaos.baseline", str(plan.folder), name, port]
        child = Child(name, argv, environment, plan.folder / "logs" / f"{name}.log")
        group.targets[name] = FaultTarget(name, child, proxy)
        group.start(group.targets[name])
    return group


def run_baseline(plan: StormPlan, stopped: Callable[[], bool]) -> Figures:
    """Train data-parallel under the faults of a storm, and return the figures.

    Raises ArchipelagoError if the workers do not begin to train, or if a signal interrupts them.
    """
    faults = worker_faults(plan.faults, plan.islands)
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(plan.islands))
        group = start_group(plan, faults, hub, stack)
        await_ready(group, dict.fromkeys(plan.islands, lambda: hub.made))
        first = hub.step
        begin, end = group.carry_out(faults, lambda begin: time.monotonic() >= begin + plan.seconds, stopped)
        useful = hub.step - first
    return summarise(hub.made, hub.lost, useful, begin, end, len(plan.islands), plan.step_seconds)


def summarise(
    times: Sequence[float],
    lost: Sequence[float],
    useful: int,
    begin: float,
    end: float,
    workers: int,
    step_seconds: float,
) -> Figures:
    """Return the figures of a process group.

    Args:
        times, lost: The time of each step, and of each loss of a connection.
        useful: By how many steps the parameters are further at the end of the window than at its begin.
        begin, end: The window.
        workers, step_seconds: The number of workers, and the minimum duration of a step.
    """
    made = sum(begin <= at < end for at in times)
    between = pauses(times, begin, end)
    seconds = [after - before for before, after in between]
    limit = max(DOWN_SECONDS, DOWN_STEPS * statistics.median(seconds)) if made else 0.0
    up = [b - a for a, b in between if b - a <= limit and not any(a <= at < b for at in lost)]
    return {
        "goodput": useful * step_seconds / (end - begin),
        "uptime": sum(up) / (end - begin),
        "steps_useful": useful * workers,
        "steps_lost": (made - useful) * workers,
        "pause_seconds_worst": max(seconds),
    }


# -- a worker's process ------------------------------------------------------------------------------------------------


class DataParallelWorker:
    """The arithmetic of one worker, which computes the gradient of its part of the group's batch.

    Args:
        work: What the group trains. The group's batch is `workers` batches of it.
        number: Which of these batches is this worker's. The first worker saves checkpoints.
        folder: Where the group keeps its checkpoints.
        checkpoint_seconds: The time from one checkpoint to the next.

    Attributes:
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

        def step(state: InnerState, mean_N: jax.Array, global_step: jax.Array, length: jax.Array) -> InnerState:
            return descend(state, ravel_pytree(state.params)[1](mean_N), global_step, length)

        self._descend = jax.jit(step, donate_argnums=0)
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
        clock = (jnp.asarray(each, jnp.int32) for each in (self._step, self._work.config.inner.steps))
        self.state = self._descend(self.state, jnp.asarray(mean_N), *clock)

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
    turns = MeasuredTurns(step_seconds_min)
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
    """Train as a worker until the process is killed: when its connection is lost, it connects again."""
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    names, work = settings["islands"], workload_of(from_json(settings["config"]), settings["task"])
    worker = DataParallelWorker(work, names.index(name), len(names), folder, settings["checkpoint_seconds"])
    while True:
        try:
            with socket.create_connection((LOOPBACK, port)) as connection:
                follow(worker, connection, name, settings["step_seconds"])
        except OSError as error:
            sys.stderr.write(f"{error}; connecting again\n")
        time.sleep(CONNECT_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
