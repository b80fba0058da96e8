"""A storm: a run in real processes on a real Redis, while a schedule of faults is done to them; and what is seen of it.

Everything that can be told later is noted: what was done to whom when, by the machine's monotonic clock; each turn of
each island's loop, by the islands' diaries; when each round was seen closed.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.messages import Refusal
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import START
from archipelago.islands.turn_log import VARIABLE as TURN_LOG_VARIABLE
from archipelago.ops.chaos.fake_clock import FalseClock
from archipelago.ops.chaos.faults import TICK_SECONDS, Target, Trial
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.chaos.report import STOOD_IN, Identity, Look, Storm, Turn
from archipelago.ops.chaos.schedule import MERGER, ON_LINKS, REDIS, Fault
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.init import create
from archipelago.ops.launch.standbys import ISLAND, Standbys
from archipelago.ops.launch.supervisor import Child, thread_environment
from archipelago.ops.settings import say

JOIN_SECONDS, LEAVE_SECONDS, DRAIN_SECONDS = 180.0, 30.0, 60.0
LOOK_SECONDS = 0.1
RECENT = 32
EVERYTHING = 1 << 20


@dataclass(frozen=True)
class Plan:
    """One storm, before it begins."""

    run: str
    folder: Path
    config: RunConfig
    step_seconds: Mapping[str, float]
    """of each island, by name; 0 for as fast as it goes"""
    seconds: float
    """how long the window lasts"""
    faults: tuple[Fault, ...] = ()
    checkpoint_seconds: float = 10.0
    settle_seconds: float = 0.0
    """and how much longer at most, until everybody is back"""
    standbys: int = 0
    """that wait to become an island"""
    merged_tokens: int = 0
    """end once so many are merged, instead of after `seconds`; 0 for not"""


class Worker(Target):
    """An island or the merger, perhaps with a proxy on its way to the Redis."""

    def __init__(self, child: Child, proxy: Proxy | None) -> None:
        super().__init__(child.name)
        self.child, self.proxy = child, proxy

    @property
    def pid(self) -> int:
        """Of its newest process."""
        assert self.child.process is not None  # noqa: S101
        return self.child.process.pid

    def start(self) -> None:
        """From the main thread."""
        self.child.start()

    def alive(self) -> bool:
        """Also reaps it."""
        return self.child.process is not None and self.child.process.poll() is None


class Broker(Target):
    """The Redis; its folder gives it the same data, port and password at each start."""

    def __init__(self, folder: Path, stack: ExitStack, clock: FalseClock | None = None) -> None:
        super().__init__(REDIS)
        self.folder, self._stack, self.clock = folder, stack, clock
        self.server: Server | None = None

    @property
    def pid(self) -> int:
        """Of the server itself."""
        assert self.server is not None  # noqa: S101
        return self.server.pid

    def start(self) -> None:
        """Returns when it answers."""
        if self.server is not None:
            self.server.stop()
        environment = self.clock.environment() if self.clock else None
        self.server = self._stack.enter_context(start_server(self.folder, environment=environment))

    def alive(self) -> bool:
        """Also reaps it."""
        return self.server is not None and self.server.alive()


class Watch:
    """Looks at the run ten times a second, on a thread and a connection of its own; an outage is a gap."""

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url, run
        self.looks: list[Look] = []
        self.seen: dict[int, float] = {}
        self.merged_tokens = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        transport: RedisTransport | None = None
        turns = itertools.count()
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                transport = transport or connect(self._url, self._run)
                self._look(transport, slow=next(turns) % 5 == 0)
            except BrokerError:
                continue
        if transport is not None:
            transport.close()

    def _look(self, transport: RedisTransport, *, slow: bool) -> None:
        last = max(self.seen, default=0)
        entries = transport.tape(RECENT)
        if entries and entries[0].round > last + 1:
            entries = transport.tape(EVERYTHING)
        now = time.monotonic()
        for entry in entries:
            self.seen.setdefault(entry.round, now)
        if slow:
            live = sum(presence.is_live for presence in transport.presences())
            self.looks.append(Look(time.monotonic(), live, max(self.seen, default=0)))
        self.merged_tokens = transport.books().merged_tokens


class SimulatedBroker(Trial):
    """The processes of one plan, and what happens to them."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        super().__init__()
        self.plan = plan
        self._diaries = plan.folder / "diaries"
        self._diaries.mkdir(parents=True)
        jumps = any(fault.kind == "clock" for fault in plan.faults)
        clock = FalseClock(plan.folder / "clock") if jumps else None
        self.broker = Broker(plan.folder / "redis", stack, clock)
        self.start(self.broker)
        assert self.broker.server is not None  # noqa: S101
        self.url = self.broker.server.url
        self.transport = connect(self.url, plan.run)
        stack.callback(self.transport.close)
        self.manifest, _ = create(self.transport, plan.config)
        self._linked = {fault.target for fault in plan.faults if fault.kind in ON_LINKS}
        every = ["--checkpoint-every", str(plan.checkpoint_seconds)]
        self.merger = self._worker(
            MERGER, ["-m", "archipelago.merger", "--folder", str(plan.folder / "merger"), *every], stack
        )
        environment = {URL_VARIABLE: self.url, RUN_VARIABLE: plan.run, **self._threads}
        flags = self._pace(min(plan.step_seconds.values()))
        self.standbys = Standbys(plan.standbys, flags, environment, plan.folder / "logs")
        self.islands = [self._island(name, stack) for name in plan.step_seconds]
        self.targets = {t.name: t for t in (self.broker, self.merger, *self.islands)}
        stack.callback(self.end)

    # -- the processes ------------------------------------------------------------------------------------------------

    def _island(self, name: str, stack: ExitStack) -> Worker:
        argv = [*ISLAND, "--name", name, "--folder", str(self.plan.folder / "islands" / name)]
        worker = self._worker(name, [*argv, *self._pace(self.plan.step_seconds[name])], stack)
        worker.child.stand_in = self.standbys.stand_in
        return worker

    @staticmethod
    def _pace(step_seconds: float) -> list[str]:
        """One step a boundary where steps are long enough; else what pays is measured, as always."""
        return ["--scan-steps", "1", "--step-seconds-min", str(step_seconds)] if step_seconds else []

    @property
    def _threads(self) -> dict[str, str]:
        return thread_environment(len(self.plan.step_seconds))

    def _worker(self, name: str, argv: Sequence[str], stack: ExitStack) -> Worker:
        assert self.broker.server is not None  # noqa: S101
        proxy = stack.enter_context(Proxy("127.0.0.1", self.broker.server.port)) if name in self._linked else None
        environment = {
            URL_VARIABLE: _behind(self.url, proxy), RUN_VARIABLE: self.plan.run,
            TURN_LOG_VARIABLE: str(self._diaries / f"{name}.jsonl"), **self._threads,
        }  # fmt: skip
        return Worker(Child(name, argv, environment, self.plan.folder / "logs" / f"{name}.log"), proxy)

    def start(self, target: Target) -> None:
        """Starts it, or starts it again."""
        super().start(target)
        if target is self.broker:
            self.note(REDIS, "ready")
        if isinstance(target, Worker) and target.child.stood_in:
            self.note(target.name, STOOD_IN)

    def tend(self) -> None:
        """The standbys as well."""
        super().tend()
        for news in self.standbys.tend(time.monotonic()):
            say(f"  {news}")

    def turn_log(self, name: str) -> Path:
        """The file that an island writes down its turns in."""
        return self._diaries / f"{name}.jsonl"

    # -- faults -------------------------------------------------------------------------------------------------------

    def befall(self, target: Target, fault: Fault) -> None:
        """Does it to the target, now."""
        match fault.kind:
            case "kill" | "stop":
                super().befall(target, fault)
            case "disk":
                self._fill_disk(target, fault)
            case "clock":
                self._jump(fault)
            case _:
                assert isinstance(target, Worker)  # noqa: S101
                self._disturb(target, fault)

    def _fill_disk(self, target: Target, fault: Fault) -> None:
        """A limit on the size of its files stands in for a full disk: writes fail, with EFBIG for ENOSPC.

        Its turn log and its log may go on a little: they are of this trial, not of the run.
        """
        if target.dead:
            self.note(target.name, "spared", "disk: it is dead")
            return
        own = [self.turn_log(target.name), self.plan.folder / "logs" / f"{target.name}.log"]
        own += self.broker.folder.rglob("*") if target is self.broker else []
        limit = int(fault.value) + max(path.stat().st_size if path.is_file() else 0 for path in own)
        _limit_files(target.pid, limit)
        self.note(target.name, "disk", f"files end at {limit:,} bytes")
        started = target.started
        self.later(fault.seconds, lambda: self._free_disk(target, started))

    def _free_disk(self, target: Target, started: int) -> None:
        if not target.dead and target.started == started:
            _limit_files(target.pid, None)
            self.note(target.name, "disk over")

    def _jump(self, fault: Fault) -> None:
        clock = self.broker.clock
        assert clock is not None  # noqa: S101
        clock.jump(fault.value)
        self.note(REDIS, "clock", f"{fault.value:+g} s")

        def back() -> None:
            clock.jump(0.0)
            self.note(REDIS, "clock over")

        self.later(fault.seconds, back)

    def _disturb(self, worker: Worker, fault: Fault) -> None:
        proxy = worker.proxy
        assert proxy is not None  # noqa: S101
        self.note(worker.name, fault.kind, f"{fault.value:g}" if fault.value else "")
        match fault.kind:
            case "partition":
                proxy.cut()
                over = proxy.heal
            case "reset":
                proxy.cut(reset=True)
                over = proxy.heal
            case "throttle":
                proxy.set_rates(fault.value, fault.value)

                def over() -> None:
                    proxy.set_rates(math.inf, math.inf)

            case "delay":
                proxy.delay_seconds = fault.value

                def over() -> None:
                    proxy.delay_seconds = 0.0

            case _:
                proxy.half_open()
                return

        def end() -> None:
            over()
            self.note(worker.name, f"{fault.kind} over")

        self.later(fault.seconds, end)

    # -- the end --------------------------------------------------------------------------------------------------

    def is_well(self, last_round_at: float) -> bool:
        """Nothing is still to happen, all islands train, and a round has closed since the last thing that happened."""
        if self.is_busy or last_round_at < max(happening.at for happening in self.happenings):
            return False
        try:
            training = {p.heartbeat.island: p.heartbeat.pid for p in self.transport.presences() if p.is_training}
        except BrokerError:
            return False
        return all(training.get(island.name) == island.pid for island in self.islands)

    def calm(self) -> None:
        """No more faults: whatever was to be over later is over now, and the Redis and the merger are there."""
        for island in self.islands:
            island.started += island.dead  # who is away at the end stays away
        super().calm()

    def drain(self) -> bool:
        """Islands send what they have and leave, the merger merges it; whether all of it was."""
        for island in self.islands:
            if not island.dead:
                island.signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_SECONDS
        for island in self.islands:
            island.child.wait(deadline - time.monotonic())
            island.dead = True
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            self.tend()
            with suppress(BrokerError):
                if self.transport.backlog() == 0 and self.transport.pending().contributions == 0:
                    return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """All processes but the Redis, which the caller's stack ends; a stopped one would not hear of its end."""
        self.standbys.end()
        for target in self.targets.values():
            if target.started and target.alive():
                target.signal(signal.SIGCONT)
        for worker in (*self.islands, self.merger):
            worker.child.stop(5.0)


def await_training(
    trial: Trial, workers: Sequence[Worker], trains: Callable[[str], object], others: Sequence[Worker] = ()
) -> None:
    """Until each of the workers trains, by name. Raises ArchipelagoError where one, or another, ends instead."""
    deadline = time.monotonic() + JOIN_SECONDS
    waiting = {worker.name: worker for worker in workers}
    while waiting:
        trial.tend()
        waiting = {name: worker for name, worker in waiting.items() if not trains(name)}
        ended = [worker for worker in (*others, *workers) if worker.dead]
        if ended or (waiting and time.monotonic() > deadline):
            late = ended[0] if ended else waiting[min(waiting)]
            raise ArchipelagoError(
                f"{late.name} does not train: {late.child.last_words()}", f"Its log is {late.child.log}."
            )
        time.sleep(TICK_SECONDS)


def _await_standbys(sea: SimulatedBroker) -> None:
    """Until all of them are ready. Raises ArchipelagoError where one cannot be."""
    sea.standbys.start()
    deadline = time.monotonic() + JOIN_SECONDS
    while not sea.standbys.are_ready():
        sea.tend()
        if time.monotonic() > deadline:
            raise ArchipelagoError("the standbys do not get ready", f"Their logs are in {sea.plan.folder / 'logs'}.")
        time.sleep(TICK_SECONDS)


def ride(plan: Plan, stopped: Callable[[], bool]) -> Storm:
    """Plays the plan. Raises ArchipelagoError when the run does not come about, or a signal ends it."""
    with ExitStack() as stack:
        sea = SimulatedBroker(plan, stack)
        watch = stack.enter_context(Watch(sea.url, plan.run))
        for worker in (sea.merger, *sea.islands):
            sea.start(worker)
        await_training(sea, sea.islands, lambda name: read_turn_log(sea.turn_log(name)), (sea.merger,))
        _await_standbys(sea)
        begin = time.monotonic()
        sea.schedule(plan.faults, begin)
        _await_end(plan, sea, watch, begin, stopped)
        end = time.monotonic()
        sea.calm()
        drained = sea.drain()
        if not drained:
            say("  not all that was sent was merged before the time for that was over")
        time.sleep(2 * LOOK_SECONDS)  # the last rounds are to be seen, too
        bits = _bits_per_byte(sea.transport)
        return _told(plan, sea, watch, begin, end, bits)


def _await_end(plan: Plan, sea: SimulatedBroker, watch: Watch, begin: float, stopped: Callable[[], bool]) -> None:
    look_due = 0.0
    while True:
        if (now := time.monotonic()) >= look_due:
            if _is_over(plan, sea, watch, begin):
                return
            look_due = now + LOOK_SECONDS
        if stopped():
            raise ArchipelagoError("the storm was interrupted", "Nothing of it is kept but its folder.")
        sea.tend()
        sea.say_news(begin)
        time.sleep(TICK_SECONDS)


def _is_over(plan: Plan, sea: SimulatedBroker, watch: Watch, begin: float) -> bool:
    if plan.merged_tokens:
        return watch.merged_tokens >= plan.merged_tokens * len(sea.manifest.fragments)
    left = begin + plan.seconds - time.monotonic()
    return left <= 0 and (left <= -plan.settle_seconds or sea.is_well(max(watch.seen.values(), default=0.0)))


def _told(plan: Plan, sea: SimulatedBroker, watch: Watch, begin: float, end: float, bits: float) -> Storm:
    transport = sea.transport
    return Storm(
        begin=begin,
        end=end,
        islands=tuple(plan.step_seconds),
        step_seconds=dict(plan.step_seconds),
        tokens_per_step=plan.config.tokens_per_step,
        fragments=len(sea.manifest.fragments),
        faults=plan.faults,
        happenings=tuple(sea.happenings),
        turns={island.name: read_turn_log(sea.turn_log(island.name)) for island in sea.islands},
        seen=dict(watch.seen),
        looks=tuple(watch.looks),
        tape=tuple(transport.tape(EVERYTHING)),
        books=transport.books(),
        pending=transport.pending(),
        refused=_refused(transport),
        bits_per_byte=bits,
        interval=plan.config.sync.interval,
        checkpoint_seconds=plan.checkpoint_seconds,
        standbys=plan.standbys,
    )


def _refused(transport: RedisTransport) -> frozenset[Identity]:
    events = [event for _, event in transport.events(START, 0.0, EVERYTHING)]
    return frozenset((e.island, e.incarnation, e.sequence) for e in events if isinstance(e, Refusal) and not e.repeat)


def _bits_per_byte(transport: RedisTransport) -> float:
    from archipelago.ops.watch.evaluate import evaluator

    return evaluator(transport)().bits_per_byte


def read_turn_log(path: Path) -> list[Turn]:
    """An island's turn log; a line that its writer did not live to end is left out."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            out.append(Turn(**json.loads(line)))
    return out


def _limit_files(pid: int, limit: int | None) -> None:
    """None gives back what it began with."""
    with suppress(ProcessLookupError):  # it ended just now
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if limit is None else limit, hard))


def _behind(url: str, proxy: Proxy | None) -> str:
    if proxy is None:
        return url
    address = urlsplit(url)
    return address._replace(netloc=f":{address.password or ''}@127.0.0.1:{proxy.port}").geturl()
