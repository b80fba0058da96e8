"""The real processes of a storm: Redis, the mergers and the islands, which are ours or a user's script."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from archipelago.broker.config import RunConfig
from archipelago.broker.control import checked_changes
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import opened, whole
from archipelago.broker.transport import ReaderTransport
from archipelago.islands.turn_log import STEP_VARIABLE
from archipelago.islands.turn_log import VARIABLE as TURN_LOG_VARIABLE
from archipelago.ops.chaos.injection import TICK_SECONDS, FaultInjector, FaultTarget
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.chaos.record import STANDBY_USED, LoggedTurn
from archipelago.ops.chaos.schedule import ON_LINKS, REDIS, Fault, merger_names
from archipelago.ops.launch.devices import memory_share
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.init import create
from archipelago.ops.launch.supervisor import ISLAND, Child, IslandStandbys, stop_all, thread_environment
from archipelago.ops.settings import say

JOIN_SECONDS, LEAVE_SECONDS, DRAIN_SECONDS = 180.0, 30.0, 60.0
#: Stands for the name of the island in the words of a script.
ISLAND_WORD = "{island}"


def parse_script(text: str) -> tuple[str, ...]:
    """Return the script that `--script` names, with its arguments, as in a shell; nothing for an empty text.

    Without `{island}`, which stands for the name of the island, that is added at the end. Raises ConfigError
    (`config.value`) if there is no such script.
    """
    if not text:
        return ()
    try:
        path, *arguments = shlex.split(text) or [""]
        why = "" if Path(path).is_file() else f"there is no script {path!r}"
    except ValueError as error:
        path, arguments, why = "", [], f"--script {text!r}: {error}"
    if why:
        raise ConfigError(
            why,
            'Give a Python file and its arguments, such as --script "train.py --name {island}".',
            code="config.value",
        )
    if not any(ISLAND_WORD in word for word in arguments):
        arguments.append(ISLAND_WORD)
    return (str(Path(path).absolute()), *arguments)


@dataclass(frozen=True)
class StormPlan:
    """One storm before it begins. What is not said here is as in `ChaosOptions`.

    Attributes:
        folder: Folder of its logs, data and checkpoints.
        seconds: Length of the measured window.
        merged_tokens: If not 0, the window ends once this many tokens are merged, instead of after `seconds`.
        script: The script with its arguments, as `parse_script` returns it; empty for our own islands.
    """

    run: str
    folder: Path
    config: RunConfig
    islands: tuple[str, ...]
    step_seconds: float
    seconds: float
    faults: tuple[Fault, ...] = ()
    checkpoint_seconds: float = 10.0
    settle_seconds: float = 0.0
    standbys: int = 0
    merged_tokens: int = 0
    script: tuple[str, ...] = ()
    task: str | None = None
    shards: int = 1

    @property
    def is_own(self) -> bool:
        """Whether the islands train something of a user's, whose steps and tokens only a run shows."""
        return bool(self.script) or self.task is not None


class RunProcesses(FaultInjector):
    """All processes of one plan, and the faults that are injected into them."""

    def __init__(self, plan: StormPlan, stack: ExitStack) -> None:
        super().__init__()
        self.plan, self._stack = plan, stack
        self._turn_logs = plan.folder / "turns"
        self._turn_logs.mkdir(parents=True)
        self._linked = {fault.target for fault in plan.faults if fault.kind in ON_LINKS}
        count = len(plan.islands)
        self._threads = {**thread_environment(count), **memory_share(count + plan.standbys)}
        self.redis = self._redis()
        environment = {URL_VARIABLE: self.url, RUN_VARIABLE: plan.run, **self._threads}
        self._task = ["--task", plan.task] if plan.task else []
        argv = [*ISLAND, "--standby", *self._task]
        self.standbys = IslandStandbys(plan.standbys, argv, environment, plan.folder / "logs")
        self.islands = [self._island(name) for name in plan.islands]
        self.targets = {target.name: target for target in (self.redis, *self.islands)}
        stack.callback(self.end)
        self.run = self._created_run()
        self.primary = stack.enter_context(closing(connect(self.url, self.run)))
        self.manifest = self._manifest()
        self.transport: ReaderTransport = whole(self.primary, self.manifest)
        options = ["--folder", str(plan.folder / "merger"), "--checkpoint-every", str(plan.checkpoint_seconds)]
        argv = ["-m", "archipelago", "merger", *options, "--run", self.run]
        self.mergers = [self._worker(name, argv) for name in merger_names(plan.shards)]
        self.targets |= {merger.name: merger for merger in self.mergers}

    # -- starting -----------------------------------------------------------------------------------------------------

    def _redis(self) -> FaultTarget:
        folder = self.plan.folder / "redis"
        self.note(REDIS, "start")
        server = start_server(folder)
        self._stack.enter_context(server)
        self.note(REDIS, "ready")
        self.url, self._port = server.url, server.port
        return FaultTarget(REDIS, server, own_files=(folder,), started=1, dead=False)

    def _created_run(self) -> str:
        """Return the name of the run. A user's script chooses it, so its first island is started to see it."""
        if not self.plan.script:
            return self.plan.run
        first = self.islands[0]
        self.start(first)
        with closing(connect(self.url, self.plan.run)) as transport:
            await_ready(self, {first.name: transport.reader.runs})
            return transport.reader.runs()[0]

    def _manifest(self) -> Manifest:
        """Create the run, or take the one that a user's script has created. Make it long enough for the storm."""
        steps = self.plan.config.inner.steps
        if not self.plan.script:
            return create(self.primary, self.plan.config, task=self.plan.task, shards=self.plan.shards)[0]
        manifest, transport = opened(self.primary)
        if manifest.config.inner.steps < steps:
            transport.reader.steer(checked_changes(manifest.config, {"inner.steps": str(steps)}))
        return manifest

    def _island(self, name: str) -> FaultTarget:
        if self.plan.script:
            return self._worker(name, [word.replace(ISLAND_WORD, name) for word in self.plan.script])
        argv = [*ISLAND, "--evaluate-every", "0", "--name", name, "--folder", str(self.plan.folder / "islands" / name)]
        return self._worker(name, [*argv, *self._task])

    def _worker(self, name: str, argv: Sequence[str]) -> FaultTarget:
        proxy = self._stack.enter_context(Proxy(self._port)) if name in self._linked else None
        log, turn_log = self.plan.folder / "logs" / f"{name}.log", self.turn_log(name)
        environment = {
            URL_VARIABLE: proxy.url(self.url) if proxy else self.url, RUN_VARIABLE: self.plan.run,
            TURN_LOG_VARIABLE: str(turn_log), STEP_VARIABLE: str(self.plan.step_seconds), **self._threads,
        }  # fmt: skip
        child = Child(name, argv, environment, log)
        if name in self.plan.islands and self.plan.script:
            child.program = [sys.executable]  # which finds the modules beside the script
        elif name in self.plan.islands:
            child.stand_in = self.standbys.stand_in
        return FaultTarget(name, child, proxy, own_files=(log, turn_log))

    def start(self, target: FaultTarget) -> None:
        super().start(target)
        if target is self.redis:
            self.note(REDIS, "ready")
        if isinstance(target.process, Child) and target.process.stood_in:
            self.note(target.name, STANDBY_USED)

    def await_all(self) -> None:
        """Start what does not run yet, and wait until the mergers serve, the islands train and the standbys wait."""
        workers = (*self.mergers, *self.islands)
        for worker in workers:
            if not worker.started:
                self.start(worker)
        await_ready(self, {worker.name: partial(self._is_ready, worker.name) for worker in workers})
        self._require_names()
        self.standbys.start()
        await_ready(self, {"a standby": self.standbys.are_ready})

    def _require_names(self) -> None:
        """Raise ConfigError (`chaos.name`) if a script ignores the names of its islands, by which a storm counts."""
        own = {turn.who: name for name in self.plan.islands for turn in read_turn_log(self.turn_log(name))}
        for beat in (presence.heartbeat for presence in self.transport.reader.presences()):
            if beat.island != (name := own.get(beat.incarnation, beat.island)):
                raise ConfigError(
                    f"the script got the name {name}, and its island has the name {beat.island}",
                    "Give `join` or the callback the name that the script gets, such as island=sys.argv[1].",
                    code="chaos.name",
                )

    def _is_ready(self, name: str) -> bool:
        """Return whether that island has made a turn of its loop. Mergers are ready once every shard is served."""
        if name in self.plan.islands:
            return bool(read_turn_log(self.turn_log(name)))
        return bool(self.transport.reader.merger_status().holder)

    # -- running and ending -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Inject and undo the faults that are due, and restart standbys that have died."""
        super().poll()
        for news in self.standbys.tend(time.monotonic()):
            say(f"  {news}")

    def turn_log(self, name: str) -> Path:
        """Return the file into which an island writes each turn of its loop."""
        return self._turn_logs / f"{name}.jsonl"

    def is_well(self) -> bool:
        """Return whether no fault is left, all islands train, and a round has closed since the last event.

        A script's heartbeats say that it trains as soon as it has joined, while it may compile its first step. Its
        turns go on while it has not reached Redis again. So both count.
        """
        if self.is_busy:
            return False
        try:
            newest = self.transport.reader.tape(1)
            training = {p.heartbeat.incarnation for p in self.transport.reader.presences() if p.is_training}
        except BrokerError:
            return False
        last = max(event.at for event in self.events)
        has_closed = bool(newest) and monotonic(newest[-1]) > last
        return has_closed and all(
            (turns := read_turn_log(self.turn_log(island.name))) and turns[-1].at > last and turns[-1].who in training
            for island in self.islands
        )

    def end_faults(self) -> None:
        """Undo all active faults and start Redis and the merger again. Dead islands stay dead."""
        for island in self.islands:
            island.started += island.dead  # Pending restarts compare this number, and so do nothing.
        super().end_faults()

    def drain(self) -> bool:
        """Let the islands send their last contributions and leave. Return whether the merger has merged all of them."""
        stop_all([each.process for each in self.islands if isinstance(each.process, Child)], LEAVE_SECONDS)
        for island in self.islands:
            island.dead = True
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            self.poll()
            with suppress(BrokerError):
                if self.transport.reader.backlog() == 0:
                    return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """End all processes except Redis, which the caller's stack ends."""
        self.standbys.end()
        super().end()


def await_ready(injector: FaultInjector, waiting: Mapping[str, Callable[[], object]]) -> None:
    """Wait until each of the conditions holds, which are given by the name of the process.

    Raises ArchipelagoError (`chaos.not-ready`) if one of the processes ends, or if they take longer than JOIN_SECONDS.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    targets = [injector.targets[name] for name in waiting if name in injector.targets]
    while waiting:
        injector.poll()
        waiting = {name: is_ready for name, is_ready in waiting.items() if not is_ready()}
        ended = [target.name for target in targets if target.dead]
        if ended or (waiting and time.monotonic() > deadline):
            late = ended[0] if ended else min(waiting)
            process = injector.targets[late].process if late in injector.targets else None
            said = f": {process.last_words()}" if isinstance(process, Child) else ""
            log = f"Its log is {process.log}." if isinstance(process, Child) else "Read the logs in the storm's folder."
            raise ArchipelagoError(f"{late} is not ready{said}", log, code="chaos.not-ready")
        time.sleep(TICK_SECONDS)


def monotonic(entry: TapeEntry) -> float:
    """Return when a round closed, on this machine's monotonic clock. The tape has the clock of the Redis here."""
    return entry.unix_seconds - time.time() + time.monotonic()


def read_turn_log(path: Path) -> list[LoggedTurn]:
    """Read an island's turn log. Skip a line that a kill cut short."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            out.append(LoggedTurn(**json.loads(line)))
    return out
