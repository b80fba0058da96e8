"""Run a baseline under the faults of a storm: real processes that train the same model on the same text in lockstep.

The baselines have it easier than the islands. Their exchange goes through memory and takes almost no time. Their
coordinator never fails, learns of a death at once, and needs no new rendezvous. Faults of Redis, the merger, disks and
clocks, and slow links, do not affect them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.chaos.injection import TICK_SECONDS, FaultInjector, FaultTarget
from archipelago.ops.chaos.lockstep.coordinator import Bundle, Coordinator, Method
from archipelago.ops.chaos.lockstep.group import GroupSettings, coordinator_of
from archipelago.ops.chaos.lockstep.results import MethodResult, summarise
from archipelago.ops.chaos.processes import LEAVE_SECONDS, Plan, Worker, await_ready
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.chaos.storm import interrupted
from archipelago.ops.launch.init import require_usable
from archipelago.ops.launch.supervisor import Child, thread_environment

if TYPE_CHECKING:
    from archipelago.islands.models.interface import Params

#: The kinds that cut a worker off from the others while it continues to compute.
CUTS = frozenset({"partition", "reset", "half-open"})
HALF_OPEN_SECONDS_MAX = 20.0
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108
FLOAT_BYTES, PLACES = 4, 2


def worker_faults(faults: Iterable[Fault], names: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a storm that also apply to the workers of a baseline."""
    kept = (fault for fault in faults if fault.target in names and fault.kind in {"kill", "stop", *CUTS})
    return tuple(
        dataclasses.replace(f, seconds=min(f.seconds, HALF_OPEN_SECONDS_MAX)) if f.kind == "half-open" else f
        for f in kept
    )


class CoordinatorServer:
    """The connections between a coordinator and its workers, over a Unix socket at `address`, on separate threads."""

    def __init__(self, coordinator: Coordinator, address: str) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):  # A worker that is killed may send an incomplete line.
                    server._serve(self.request, (json.loads(line) for line in self.rfile))

        self._server = socketserver.ThreadingUnixStreamServer(address, Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(TICK_SECONDS,), name="coordinator")

    def __enter__(self) -> CoordinatorServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def call(self, method: Callable[[Coordinator, float], None]) -> None:
        """Call a method of the coordinator with the present time, and send the bundles that result."""
        with self._lock:
            method(self._coordinator, time.monotonic())
            for bundle in self._coordinator.take():
                self._send(bundle)

    def _serve(self, connection: socket.socket, messages: Iterable[dict[str, object]]) -> None:
        messages = iter(messages)
        name = str(next(messages, {}).get("name"))
        self.call(lambda coordinator, now: self._add(name, connection, now))
        try:
            for message in messages:
                self._complete(name, int(str(message["ticket"])), int(str(message["steps"])))
        finally:
            self.call(lambda coordinator, now: self._remove(name, connection, now))

    def _add(self, name: str, connection: socket.socket, now: float) -> None:
        if name not in self._coordinator.names:
            return
        self._coordinator.remove(name, now)  # The end of the previous connection may not have been seen yet.
        self._connections[name] = connection
        self._coordinator.add(name, now)

    def _complete(self, name: str, ticket: int, steps: int) -> None:
        self.call(lambda coordinator, now: coordinator.complete(name, ticket, steps, now))

    def _remove(self, name: str, connection: socket.socket, now: float) -> None:
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._coordinator.remove(name, now)

    def _send(self, bundle: Bundle) -> None:
        message = {"ticket": bundle.ticket, "orders": [dataclasses.asdict(order) for order in bundle.orders]}
        connection = self._connections.get(bundle.to)
        if connection is not None:
            with suppress(OSError):  # It was killed just now. The end of its connection will report that.
                connection.sendall((json.dumps(message) + "\n").encode())


class WorkerGroup(FaultInjector):
    """The workers of a baseline, and the faults that are injected into them."""

    def __init__(self, plan: Plan, method: Method, config: RunConfig, stack: ExitStack) -> None:
        # These modules import JAX, which takes seconds.
        from archipelago.ops.chaos.lockstep.files import save_first

        super().__init__()
        self.plan = plan
        names = tuple(plan.step_seconds)
        files = plan.folder / "files"
        files.mkdir(parents=True)
        first = _first_parameters(config)
        save_first(files, first)
        memory = _memory_folder(sum(tensor.size for tensor in first.values()), len(names))
        exchange = stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-", dir=memory))
        settings = GroupSettings(
            method, config.to_json(), names, dict(plan.step_seconds), exchange, str(files.resolve()),
            0.7, 0.9,  # the best settings of the paper (arXiv 2311.08105)
        )  # fmt: skip
        path = plan.folder / "settings.json"
        path.write_text(settings.to_text(), encoding="utf-8")
        self.coordinator = coordinator_of(settings, config.sync.interval, plan.checkpoint_seconds)
        self.server = stack.enter_context(CoordinatorServer(self.coordinator, settings.socket))
        argv = ["-m", "archipelago.ops.chaos.lockstep.worker", "--settings", str(path)]
        environment = thread_environment(len(names))
        self.workers = [
            Worker(Child(name, [*argv, "--name", name], environment, plan.folder / "logs" / f"{name}.log"), None)
            for name in names
        ]
        self.targets = {worker.name: worker for worker in self.workers}
        stack.callback(self.end)

    def is_training(self, name: str) -> bool:
        """Return whether that worker has made a step."""
        return any(step.worker == name for step in self.coordinator.ledger.made)

    def poll(self) -> None:
        """Inject and undo the faults that are due, and let the coordinator check its timeouts."""
        super().poll()
        self.server.call(lambda coordinator, now: coordinator.tick(now))

    def inject(self, target: FaultTarget, fault: Fault) -> None:
        """Inject a fault now."""
        if fault.kind not in CUTS:
            super().inject(target, fault)
            return
        self.note(target.name, fault.kind)
        self.server.call(lambda coordinator, now: coordinator.cut(target.name))

        def undo() -> None:
            self.server.call(lambda coordinator, now: coordinator.heal(target.name, now))
            self.note(target.name, f"{fault.kind} over")

        self.call_later(fault.seconds, undo)

    def end_faults(self) -> None:
        """Undo all active faults. Dead workers stay dead."""
        for worker in self.workers:
            worker.started += worker.dead  # Pending restarts compare this number, and so do nothing.
        super().end_faults()

    def finish(self) -> str:
        """End the training. Return the file with the final state. Raise ArchipelagoError after LEAVE_SECONDS."""
        self.server.call(lambda coordinator, now: coordinator.end(now))
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.coordinator.final is None:
            if time.monotonic() > deadline:
                raise ArchipelagoError(
                    "a baseline did not end in time",
                    f"Its logs are in {self.plan.folder / 'logs'}.",
                    code="chaos.baseline-stuck",
                )
            time.sleep(TICK_SECONDS)
        return self.coordinator.final

    def end(self) -> None:
        """Kill all workers, stopped ones as well."""
        for worker in self.workers:
            if worker.started and worker.alive():
                worker.child.process.kill()  # type: ignore[union-attr]
            worker.child.wait(5.0)


def run_baseline(plan: Plan, method: Method, stopped: Callable[[], bool]) -> MethodResult:
    """Train by that method under the plan's faults.

    Args:
        plan: The plan of the storm.
        method: The training method.
        stopped: Whether a signal has asked this process to stop.

    Raises:
        ArchipelagoError: The workers do not begin to train, or a signal interrupted them.
    """
    config, _ = require_usable(plan.config)
    faults = worker_faults(plan.faults, tuple(plan.step_seconds))
    with ExitStack() as stack:
        group = WorkerGroup(plan, method, config, stack)
        for worker in group.workers:
            group.start(worker)
        await_ready(group, group.workers, group.is_training)
        begin = time.monotonic()
        group.schedule(faults, begin)
        while time.monotonic() < begin + plan.seconds:
            if stopped():
                raise interrupted()
            group.poll()
            group.report_events(begin)
            time.sleep(TICK_SECONDS)
        end = time.monotonic()
        group.end_faults()
        final = group.finish()
    bits_per_byte = _bits_per_byte(config, plan.folder / "files", final)
    kills = [(event.at, event.process) for event in group.events if event.what in ("kill", "died")]
    ledger = group.coordinator.ledger
    return summarise(method, ledger, kills, begin, end, plan.step_seconds, config.tokens_per_step, bits_per_byte)


def _first_parameters(config: RunConfig) -> Params:
    from archipelago.islands.models.registry import build

    return build(config.model).init(config.seed)


def _memory_folder(size_N: int, workers: int) -> Path | None:
    """Return a folder in memory with room for all slots, or None for the system's temporary folder."""
    needed = 2 * workers * PLACES * FLOAT_BYTES * size_N
    return MEMORY_FOLDER if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > needed else None


def _bits_per_byte(config: RunConfig, folder: Path, final: str) -> float:
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import compile_validation
    from archipelago.ops.chaos.lockstep.files import params_in

    return compile_validation(config, open_corpus(config.data.corpus))(params_in(folder, final))
