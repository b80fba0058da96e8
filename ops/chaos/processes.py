"""The real processes of a storm: Redis, the merger and the islands, and the faults of their links, disks and clocks."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from archipelago.broker.config import RunConfig
from archipelago.broker.control import checked_changes
from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import opened, whole
from archipelago.broker.transport import ReaderTransport
from archipelago.islands.turn_log import STEP_VARIABLE
from archipelago.islands.turn_log import VARIABLE as TURN_LOG_VARIABLE
from archipelago.ops.chaos.injection import TICK_SECONDS, FakeClock, FaultInjector, FaultTarget, Worker
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.chaos.report.record import STANDBY_USED, Turn
from archipelago.ops.chaos.schedule import ON_LINKS, REDIS, Fault, merger_names
from archipelago.ops.chaos.script import Script
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.init import create
from archipelago.ops.launch.standbys import ISLAND, Standbys
from archipelago.ops.launch.supervisor import Child, thread_environment
from archipelago.ops.settings import say

JOIN_SECONDS, LEAVE_SECONDS, DRAIN_SECONDS = 180.0, 30.0, 60.0


@dataclass(frozen=True)
class Plan:
    """One storm before it begins.

    Attributes:
        run: Name of the run.
        folder: Folder of its logs, data and checkpoints.
        config: The run's config.
        step_seconds: Minimum duration of an inner step, by island; 0 for as fast as possible.
        seconds: Length of the measured window.
        faults: The schedule.
        checkpoint_seconds: Time between two checkpoints.
        settle_seconds: How much longer the window may last, until all processes work again.
        standbys: Number of standby processes.
        merged_tokens: If not 0, the window ends once this many tokens are merged, instead of after `seconds`.
        script: The islands are this script of a user, which creates the run; None for our own islands.
        task: Our islands train this task of a user, FILE.py:NAME; None for one of our models.
        shards: The shards of the run, and the merger processes that share them.
    """

    run: str
    folder: Path
    config: RunConfig
    step_seconds: Mapping[str, float]
    seconds: float
    faults: tuple[Fault, ...] = ()
    checkpoint_seconds: float = 10.0
    settle_seconds: float = 0.0
    standbys: int = 0
    merged_tokens: int = 0
    script: Script | None = None
    task: str | None = None
    shards: int = 1

    @property
    def is_own(self) -> bool:
        """Whether the islands train something of a user's, whose steps and tokens only a run shows."""
        return self.script is not None or self.task is not None


class RedisTarget(FaultTarget):
    """The Redis server. Its folder gives it the same data, port and password at each start."""

    def __init__(self, folder: Path, stack: ExitStack, clock: FakeClock | None = None) -> None:
        super().__init__(REDIS)
        self.folder, self._stack, self.clock = folder, stack, clock
        self.server: Server | None = None

    @property
    def pid(self) -> int:
        """The process ID of the server itself."""
        assert self.server is not None  # noqa: S101
        return self.server.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if self.server is not None:
            self.server.stop()
        environment = self.clock.environment() if self.clock else None
        self.server = self._stack.enter_context(start_server(self.folder, environment=environment))

    def alive(self) -> bool:
        """Return whether the server runs."""
        return self.server is not None and self.server.alive()


class RunProcesses(FaultInjector):
    """All processes of one plan, and the faults that are injected into them."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        super().__init__()
        self.plan = plan
        self._turn_logs = plan.folder / "turns"
        self._turn_logs.mkdir(parents=True)
        has_clock_faults = any(fault.kind == "clock" for fault in plan.faults)
        clock = FakeClock(plan.folder / "clock") if has_clock_faults else None
        self.redis = RedisTarget(plan.folder / "redis", stack, clock)
        self.start(self.redis)
        assert self.redis.server is not None  # noqa: S101
        self.url = self.redis.server.url
        self._linked = {fault.target for fault in plan.faults if fault.kind in ON_LINKS}
        environment = {URL_VARIABLE: self.url, RUN_VARIABLE: plan.run, **self._threads}
        flags = [*self._task_flags, *self._step_flags(min(plan.step_seconds.values()))]
        self.standbys = Standbys(plan.standbys, flags, environment, plan.folder / "logs")
        self.islands = [self._island(name, stack) for name in plan.step_seconds]
        self.targets = {t.name: t for t in (self.redis, *self.islands)}
        stack.callback(self.end)
        self.run = self._created_run()
        self.home = connect(self.url, self.run)
        stack.callback(self.home.close)
        self.manifest = self._manifest()
        self.transport: ReaderTransport = whole(self.home, self.manifest)
        options = ["--folder", str(plan.folder / "merger"), "--checkpoint-every", str(plan.checkpoint_seconds)]
        options += ["--run", self.run]
        argv = ["-m", "archipelago.merger", *options]
        self.mergers = [self._worker(name, argv, stack) for name in merger_names(plan.shards)]
        self.targets |= {merger.name: merger for merger in self.mergers}

    # -- starting -----------------------------------------------------------------------------------------------------

    def _created_run(self) -> str:
        """Return the name of the run. A user's script chooses it, so its first island is started to see it."""
        if self.plan.script is None:
            return self.plan.run
        first = self.islands[0]
        self.start(first)
        transport = connect(self.url, self.plan.run)
        try:
            await_ready(self, (first,), lambda _: transport.reader.runs())
            return transport.reader.runs()[0]
        finally:
            transport.close()

    def _manifest(self) -> Manifest:
        """Create the run, or take the one that a user's script has created. Make it long enough for the storm."""
        steps = self.plan.config.inner.steps
        if self.plan.script is None:
            return create(self.home, self.plan.config, task=self.plan.task, shards=self.plan.shards)[0]
        manifest, transport = opened(self.home)
        if manifest.config.inner.steps < steps:
            transport.reader.steer(checked_changes(manifest.config, {"inner.steps": str(steps)}))
        return manifest

    def _island(self, name: str, stack: ExitStack) -> Worker:
        if self.plan.script is not None:
            return self._worker(name, self.plan.script.argv(name), stack)
        argv = [*ISLAND, "--evaluate-every", "0", "--name", name, "--folder", str(self.plan.folder / "islands" / name)]
        argv += self._task_flags
        worker = self._worker(name, [*argv, *self._step_flags(self.plan.step_seconds[name])], stack)
        worker.child.stand_in = self.standbys.stand_in
        return worker

    @property
    def _task_flags(self) -> list[str]:
        return ["--task", self.plan.task] if self.plan.task else []

    @staticmethod
    def _step_flags(step_seconds: float) -> list[str]:
        """Return the flags of steps with a minimum duration, which run one by one.

        Without a duration, the island measures how many steps to run at once.
        """
        return ["--scan-steps", "1", "--step-seconds-min", str(step_seconds)] if step_seconds else []

    @property
    def _threads(self) -> dict[str, str]:
        return thread_environment(len(self.plan.step_seconds))

    def _worker(self, name: str, argv: Sequence[str], stack: ExitStack) -> Worker:
        assert self.redis.server is not None  # noqa: S101
        proxy = stack.enter_context(Proxy("127.0.0.1", self.redis.server.port)) if name in self._linked else None
        environment = {
            URL_VARIABLE: _through(proxy, self.url), RUN_VARIABLE: self.plan.run,
            TURN_LOG_VARIABLE: str(self.turn_log(name)), **self._threads,
        }  # fmt: skip
        if self.plan.script is not None and name in self.plan.step_seconds:
            environment |= {STEP_VARIABLE: str(self.plan.step_seconds[name]), **self.plan.script.environment()}
        return Worker(Child(name, argv, environment, self.plan.folder / "logs" / f"{name}.log"), proxy)

    def start(self, target: FaultTarget) -> None:
        """Start a target for the first time, or restart it."""
        super().start(target)
        if target is self.redis:
            self.note(REDIS, "ready")
        if isinstance(target, Worker) and target.child.stood_in:
            self.note(target.name, STANDBY_USED)

    def poll(self) -> None:
        """Inject and undo the faults that are due, and restart standbys that have died."""
        super().poll()
        for news in self.standbys.tend(time.monotonic()):
            say(f"  {news}")

    def turn_log(self, name: str) -> Path:
        """Return the file into which an island writes each turn of its loop."""
        return self._turn_logs / f"{name}.jsonl"

    def is_ready(self, name: str) -> bool:
        """Return whether that island has made a turn of its loop. Mergers are ready once every shard is served."""
        if name in self.plan.step_seconds:
            return bool(read_turn_log(self.turn_log(name)))
        status = self.transport.reader.merger_status()
        return status is not None and bool(status.holder)

    # -- faults -------------------------------------------------------------------------------------------------------

    def inject(self, target: FaultTarget, fault: Fault) -> None:
        """Inject a fault now."""
        match fault.kind:
            case "disk":
                self._fill_disk(target, fault)
            case "clock":
                self._jump(fault)
            case _:
                super().inject(target, fault)

    def _fill_disk(self, target: FaultTarget, fault: Fault) -> None:
        """Limit the size of the target's files, which stands in for a full disk: writes fail with EFBIG, not ENOSPC.

        Its turn log and its log belong to this storm and not to the run, so the limit leaves room for them.
        """
        if target.dead:
            self.note(target.name, "spared", "disk: it is dead")
            return
        own = [self.turn_log(target.name), self.plan.folder / "logs" / f"{target.name}.log"]
        own += self.redis.folder.rglob("*") if target is self.redis else []
        limit = int(fault.value) + max(path.stat().st_size if path.is_file() else 0 for path in own)
        _limit_files(target.pid, limit)
        self.note(target.name, "disk", f"files end at {limit:,} bytes")
        started = target.started
        self.call_later(fault.seconds, lambda: self._free_disk(target, started))

    def _free_disk(self, target: FaultTarget, started: int) -> None:
        if not target.dead and target.started == started:
            _limit_files(target.pid, None)
            self.note(target.name, "disk over")

    def _jump(self, fault: Fault) -> None:
        clock = self.redis.clock
        assert clock is not None  # noqa: S101
        clock.jump(fault.value)
        self.note(REDIS, "clock", f"{fault.value:+g} s")

        def undo() -> None:
            clock.jump(0.0)
            self.note(REDIS, "clock over")

        self.call_later(fault.seconds, undo)

    # -- ending -------------------------------------------------------------------------------------------------------

    def is_well(self) -> bool:
        """Return whether no fault is left, all islands train, and a round has closed since the last event."""
        if self.is_busy:
            return False
        try:
            newest = self.transport.reader.tape(1)
            training = {p.heartbeat.island: p.heartbeat.pid for p in self.transport.reader.presences() if p.is_training}
        except BrokerError:
            return False
        has_closed = bool(newest) and monotonic(newest[-1]) > max(event.at for event in self.events)
        return has_closed and all(training.get(island.name) == island.pid for island in self.islands)

    def end_faults(self) -> None:
        """Undo all active faults and start Redis and the merger again. Dead islands stay dead."""
        for island in self.islands:
            island.started += island.dead  # Pending restarts compare this number, and so do nothing.
        super().end_faults()

    def drain(self) -> bool:
        """Let the islands send their last contributions and leave. Return whether the merger has merged all of them."""
        for island in self.islands:
            if not island.dead:
                island.signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_SECONDS
        for island in self.islands:
            island.child.wait(deadline - time.monotonic())
            island.dead = True
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            self.poll()
            with suppress(BrokerError):
                if self.transport.reader.backlog() == 0 and self.transport.reader.pending().contributions == 0:
                    return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """End all processes except Redis, which the caller's stack ends."""
        self.standbys.end()
        super().end()


def await_ready(injector: FaultInjector, workers: Sequence[Worker], is_ready: Callable[[str], object]) -> None:
    """Wait until `is_ready` holds for the name of each worker.

    Raises:
        ArchipelagoError: A worker ended, or the workers took longer than JOIN_SECONDS.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    waiting = {worker.name: worker for worker in workers}
    while waiting:
        injector.poll()
        waiting = {name: worker for name, worker in waiting.items() if not is_ready(name)}
        ended = [worker for worker in workers if worker.dead]
        if ended or (waiting and time.monotonic() > deadline):
            late = ended[0] if ended else waiting[min(waiting)]
            raise ArchipelagoError(
                f"{late.name} is not ready: {late.child.last_words()}",
                f"Its log is {late.child.log}.",
                code="chaos.not-ready",
            )
        time.sleep(TICK_SECONDS)


def await_standbys(processes: RunProcesses) -> None:
    """Wait until all standbys are ready. Raise ArchipelagoError if they take longer than JOIN_SECONDS."""
    processes.standbys.start()
    deadline = time.monotonic() + JOIN_SECONDS
    while not processes.standbys.are_ready():
        processes.poll()
        if time.monotonic() > deadline:
            raise ArchipelagoError(
                "the standbys are not ready in time",
                f"Their logs are in {processes.plan.folder / 'logs'}.",
                code="chaos.no-standbys",
            )
        time.sleep(TICK_SECONDS)


def monotonic(entry: TapeEntry) -> float:
    """Return when a round closed, on the machine's monotonic clock. The merger wrote down its wall clock."""
    return entry.unix_seconds - time.time() + time.monotonic()


def read_turn_log(path: Path) -> list[Turn]:
    """Read an island's turn log. Skip a line that a kill cut short."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            out.append(Turn(**json.loads(line)))
    return out


def _limit_files(pid: int, limit: int | None) -> None:
    """Limit the size of a process's files in bytes; None restores the limit that it started with."""
    with suppress(psutil.NoSuchProcess):  # It may have ended just now.
        process = psutil.Process(pid)
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (hard if limit is None else limit, hard))


def _through(proxy: Proxy | None, url: str) -> str:
    """Return the URL of the server behind `url` as a client reaches it through the proxy."""
    if proxy is None:
        return url
    address = urlsplit(url)
    return address._replace(netloc=f":{address.password or ''}@127.0.0.1:{proxy.port}").geturl()
