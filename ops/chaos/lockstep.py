"""Other ways to train, under a storm's faults: real processes that train the same model on the same text in step.

What they are spared, beside an island's storm: the exchange goes through memory and takes next to no time; whoever
decides who does what is never gone, and hears of a death at once; nobody has to be met again; and what happens to a
Redis or a merger, to disks and clocks, and what makes a link slow, happens to none of them.
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
from types import TracebackType
from typing import TYPE_CHECKING

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.chaos.baselines import Ran, ran
from archipelago.ops.chaos.faults import TICK_SECONDS, Target, Trial
from archipelago.ops.chaos.rendezvous import Bundle, Group, Setting, Way, group_of
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.chaos.storm import LEAVE_SECONDS, Plan, Worker, await_training
from archipelago.ops.launch.init import require_usable
from archipelago.ops.launch.supervisor import Child, thread_environment

if TYPE_CHECKING:
    from archipelago.islands.models.interface import Params

CUTS = frozenset({"partition", "reset", "half-open"})
"""kinds that cut a worker off from the others; it goes on computing"""
HALF_OPEN_SECONDS_MAX = 20.0
MEMORY = Path("/dev/shm")  # noqa: S108
FLOAT_BYTES, PLACES = 4, 2


def theirs(faults: Iterable[Fault], names: Sequence[str]) -> tuple[Fault, ...]:
    """Those of a storm's faults that these workers meet, too."""
    kept = (fault for fault in faults if fault.target in names and fault.kind in {"kill", "stop", *CUTS})
    return tuple(
        dataclasses.replace(f, seconds=min(f.seconds, HALF_OPEN_SECONDS_MAX)) if f.kind == "half-open" else f
        for f in kept
    )


class Hub:
    """The socket of a group: tells it who comes, goes and is done, and gives out its bundles. On threads of its own."""

    def __init__(self, group: Group, address: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        hub = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):  # it was killed in the middle of a word
                    hub._serve(self.request, (json.loads(line) for line in self.rfile))

        self._server = socketserver.ThreadingUnixStreamServer(address, Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(TICK_SECONDS,), name="hub")

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def tell(self, what: Callable[[Group, float], None]) -> None:
        """Tells the group something, with what time it is."""
        with self._lock:
            what(self._group, time.monotonic())
            for bundle in self._group.take():
                self._send(bundle)

    def _serve(self, connection: socket.socket, messages: Iterable[dict[str, object]]) -> None:
        messages = iter(messages)
        name = str(next(messages, {}).get("name"))
        self.tell(lambda group, now: self._came(name, connection, now))
        try:
            for message in messages:
                self._done(name, int(str(message["ticket"])), int(str(message["steps"])))
        finally:
            self.tell(lambda group, now: self._went(name, connection, now))

    def _came(self, name: str, connection: socket.socket, now: float) -> None:
        if name not in self._group.names:
            return
        self._group.goes(name, now)  # where the end of the one before has not been seen yet
        self._connections[name] = connection
        self._group.comes(name, now)

    def _done(self, name: str, ticket: int, steps: int) -> None:
        self.tell(lambda group, now: group.done(name, ticket, steps, now))

    def _went(self, name: str, connection: socket.socket, now: float) -> None:
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._group.goes(name, now)

    def _send(self, bundle: Bundle) -> None:
        message = {"ticket": bundle.ticket, "orders": [dataclasses.asdict(order) for order in bundle.orders]}
        connection = self._connections.get(bundle.to)
        if connection is not None:
            with suppress(OSError):  # it was killed just now: the end of its connection will say so
                connection.sendall((json.dumps(message) + "\n").encode())


class Fleet(Trial):
    """The workers of a group, and what happens to them."""

    def __init__(self, plan: Plan, way: Way, config: RunConfig, stack: ExitStack) -> None:
        from archipelago.ops.chaos.lockstep_worker import save_first
        from archipelago.ops.experiments.baselines import DILOCO_MOMENTUM, DILOCO_RATE

        super().__init__()
        self.plan = plan
        names = tuple(plan.step_seconds)
        files = plan.folder / "files"
        files.mkdir(parents=True)
        first = _first(config)
        save_first(files, first)
        room = _memory(sum(tensor.size for tensor in first.values()), len(names))
        exchange = stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-", dir=room))
        seconds, place = dict(plan.step_seconds), str(files.resolve())
        setting = Setting(way, config.to_json(), names, seconds, exchange, place, DILOCO_RATE, DILOCO_MOMENTUM)
        written = plan.folder / "setting.json"
        written.write_text(setting.to_text(), encoding="utf-8")
        self.group = group_of(setting, config.sync.interval, plan.checkpoint_seconds)
        self.hub = stack.enter_context(Hub(self.group, setting.socket))
        argv = ["-m", "archipelago.ops.chaos.lockstep_worker", "--setting", str(written)]
        environment = thread_environment(len(names))
        self.workers = [
            Worker(Child(name, [*argv, "--name", name], environment, plan.folder / "logs" / f"{name}.log"), None)
            for name in names
        ]
        self.targets = {worker.name: worker for worker in self.workers}
        stack.callback(self.end)

    def trains(self, name: str) -> bool:
        """Whether it has made a step."""
        return any(step.worker == name for step in self.group.ledger.made)

    def tend(self) -> None:
        """Also lets the group know that time passes."""
        super().tend()
        self.hub.tell(lambda group, now: group.tick(now))

    def befall(self, target: Target, fault: Fault) -> None:
        """Does it to the target, now."""
        if fault.kind not in CUTS:
            super().befall(target, fault)
            return
        self.note(target.name, fault.kind)
        self.hub.tell(lambda group, now: group.cut(target.name))

        def over() -> None:
            self.hub.tell(lambda group, now: group.heal(target.name, now))
            self.note(target.name, f"{fault.kind} over")

        self.later(fault.seconds, over)

    def calm(self) -> None:
        """No more faults; who is away stays away."""
        for worker in self.workers:
            worker.started += worker.dead
        super().calm()

    def finish(self) -> str:
        """The file with what all have in the end. Raises ArchipelagoError where it does not come about."""
        self.hub.tell(lambda group, now: group.end(now))
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.group.final is None:
            if time.monotonic() > deadline:
                raise ArchipelagoError("a baseline does not end", f"Its logs are in {self.plan.folder / 'logs'}.")
            time.sleep(TICK_SECONDS)
        return self.group.final

    def end(self) -> None:
        """All of them, also who is stopped."""
        for worker in self.workers:
            if worker.started and worker.alive():
                worker.child.process.kill()  # type: ignore[union-attr]
            worker.child.wait(5.0)


def ride_in_step(plan: Plan, way: Way, stopped: Callable[[], bool]) -> Ran:
    """Trains that way under the plan's faults, for as long. Raises ArchipelagoError when it does not come about."""
    config, _ = require_usable(plan.config)
    names = tuple(plan.step_seconds)
    faults = theirs(plan.faults, names)
    with ExitStack() as stack:
        fleet = Fleet(plan, way, config, stack)
        for worker in fleet.workers:
            fleet.start(worker)
        await_training(fleet, fleet.workers, fleet.trains)
        begin = time.monotonic()
        fleet.schedule(faults, begin)
        while time.monotonic() < begin + plan.seconds:
            if stopped():
                raise ArchipelagoError("the storm was interrupted", "Nothing of it is kept but its folder.")
            fleet.tend()
            fleet.say_news(begin)
            time.sleep(TICK_SECONDS)
        end = time.monotonic()
        fleet.calm()
        final = fleet.finish()
    bits = _bits_per_byte(config, plan.folder / "files", final)
    kills = [(happening.at, happening.process) for happening in fleet.happenings if happening.what in ("kill", "died")]
    return ran(way, fleet.group.ledger, kills, begin, end, plan.step_seconds, config.tokens_per_step, bits)


def _first(config: RunConfig) -> Params:
    from archipelago.islands.models.registry import build

    return build(config.model).init(config.seed)


def _memory(size_N: int, workers: int) -> Path | None:
    """A folder that is memory, where there is one with room for the slots of all."""
    needed = 2 * workers * PLACES * FLOAT_BYTES * size_N
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None


def _bits_per_byte(config: RunConfig, folder: Path, final: str) -> float:
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import compile_validation
    from archipelago.ops.chaos.lockstep_worker import params_in

    return compile_validation(config, open_corpus(config.data.corpus))(params_in(folder, final))
