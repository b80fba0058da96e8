"""One call of `archipelago up`: the processes of a run, their supervision, and their orderly end."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from archipelago.broker.buckets.copier import FINISH_SECONDS
from archipelago.broker.buckets.folder import chosen
from archipelago.broker.control import IN_WORDS
from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.files import write_atomically
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.logs import printable
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.launch.devices import DeviceShares
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.supervisor import (
    ISLAND,
    NICENESS,
    Child,
    IslandStandbys,
    island_name,
    stop_all,
    thread_environment,
)
from archipelago.ops.settings import say, to_toml
from archipelago.ops.watch import report as run_report
from archipelago.ops.watch.history import RECENT_ROUNDS
from archipelago.ops.watch.reading import Watcher, repeated
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.state_line import state_line
from archipelago.ops.watch.status import line, state_text

if TYPE_CHECKING:
    from archipelago.ops.launch.up import UpOptions

LOOK_SECONDS = 1.0
#: A run prints this many lines about its progress where no terminal shows it, and one at each change of its state.
LINES = 20
LEAVE_SECONDS = 30.0
DRAIN_SECONDS = 20.0
KILL_SECONDS = 5.0
POLL_SECONDS = 0.1
#: `up` no longer waits for the islands of others when Redis has not answered for this long.
AWAY_SECONDS = 30.0
SINGLE_PROCESS = "archipelago.ops.experiments.baselines"


def leave_seconds(worker: WorkerOptions) -> float:
    """Return how long a worker may take to end. With a bucket, it copies its last checkpoint there."""
    return LEAVE_SECONDS + (FINISH_SECONDS if chosen(worker.bucket) else 0.0)


@dataclass
class LocalRun:
    """The merger, the islands and the standbys of a run on this machine.

    Attributes:
        watcher: A reader of the run on a connection of its own.
        redis: The Redis, if it is our own.
        joins: The join file of each process, by name. Processes without one use the URL.
        shares: The accelerators of each island; None on a machine without any.
        seconds: How long this session trained; 0 if the run was already complete.
    """

    options: UpOptions
    manifest: Manifest
    transport: ReaderTransport
    watcher: Watcher
    url: str
    folder: Path
    stopped: Callable[[], bool]
    redis: RedisServer | None
    joins: Mapping[str, str]
    shares: DeviceShares | None
    seconds: float = 0.0
    _left_at: float = 0.0  # when the islands here had left, in Unix seconds
    _serves_others: bool = False

    def __post_init__(self) -> None:
        options, folder, count = self.options, self.folder, self.options.islands
        devices = [self.shares.environment(number) for number in range(count)] if self.shares else []
        what = ["--mesh", options.mesh] if options.mesh else []
        what += ["--task", options.task] if options.task else []
        argv = [*ISLAND, "--standby", *what, *options.curve_flags()]
        environment = self._environment("standby")
        self.standbys = IslandStandbys(options.standbys, argv, environment, folder / "logs", devices)
        where = ["--folder", str(folder / "merger"), "--checkpoint-every", str(options.checkpoint_every)]
        where += ["--spectra", options.spectra]
        self.merger = self._child("merger", ["-m", "archipelago", "merger", "--resume", *where, *options.flags()])
        self.merger.niceness = NICENESS if self.shares else 0
        self.islands = []
        for number in range(count):
            name = island_name(number)
            where = ["--name", name, "--folder", str(folder / "islands" / name)]
            where += ["--evaluate-every", str(options.evaluate_every)]
            island = self._child(name, [*ISLAND, *where, *what, *options.flags()])
            island.environment = {**island.environment, **(devices[number] if devices else {})}
            island.niceness, island.stand_in = 0 if devices else NICENESS, self.standbys.stand_in
            self.islands.append(island)

    def _environment(self, name: str) -> dict[str, str]:
        own = {URL_VARIABLE: self.joins.get(name, self.url), RUN_VARIABLE: self.manifest.run}
        return own | thread_environment(self.options.islands)

    def _child(self, name: str, argv: Sequence[str]) -> Child:
        return Child(name, argv, self._environment(name), self.folder / "logs" / f"{name}.log")

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train until the islands are done or a signal arrives. Return whether the run has made all its steps."""
        view = self._observe()
        if not view.unfinished:
            say(f"the run has already made all its {view.steps:,} steps")
            return True
        (self.folder / run_report.SUMMARY).unlink(missing_ok=True)  # of an earlier session
        where = shlex.quote(str(self.folder)) if self.redis else f"URL --run {self.manifest.run}"
        for island in self.islands:
            if request := view.control.islands.get(island.name):  # it would be refused, which would end all
                island.done = True
                admits = f"`archipelago steer {where} island.{island.name}=` lets it in at the next start"
                say(f"  {island.name} is not started: it was {IN_WORDS[request]}. {admits}")
        children = [self.merger, *self.islands]
        began = time.monotonic()
        try:
            for child in children:
                if not child.done:
                    child.start()
            self.standbys.start()
            self._watch(children)
            self.standbys.end()
            self._end()
        finally:
            self.standbys.end()
            stop_all(children, KILL_SECONDS)
        self.seconds = time.monotonic() - began
        return not self._observe().unfinished

    def _watch(self, children: list[Child]) -> None:
        """Supervise the children and show the run until all islands have ended or a signal arrives."""
        console = Console(stderr=True, highlight=False)
        on_screen = console.is_terminal and not self.options.log_json
        live = Live(console=console, refresh_per_second=4, transient=False) if on_screen else None
        with ExitStack() as stack:
            if live:
                stack.enter_context(live)
            stack.enter_context(repeated(self.watcher.update, LOOK_SECONDS))  # a Redis that hangs holds up nothing else
            said = ("", "", 0)
            while not self.stopped() and self._goes_on():
                now = time.monotonic()
                events = [self.redis.tend()] if self.redis else []
                events += [*(child.tend(now) for child in children), *self.standbys.tend(now)]
                for event in filter(None, events):
                    console.print(Text(f"  {printable(event)}")) if live else say(f"  {event}")
                self._require_workers()
                reading, outage = self.watcher.latest, self.watcher.outage()
                state = state_line(reading, outage)
                if live:
                    live.update(state_text(state))
                elif said != (newest := (state.word, state.about, int(state.share * LINES))):
                    say(f"  {line(reading, outage, known=said[1])}")
                    said = newest
                time.sleep(POLL_SECONDS)

    def _goes_on(self) -> bool:
        """Return whether an island here still trains, or one of others needs this merger.

        Whether others need it is seen after the islands here have left, unless the run was seen to be finished before.
        """
        if not all(child.done or child.failed for child in self.islands):
            return True
        now, latest, others = self.watcher.now(), self.watcher.latest, self._others()
        self._left_at, seen_at = self._left_at or now, latest.unix_seconds if latest else 0.0
        if now - max(self._left_at, seen_at) > AWAY_SECONDS:
            return False
        if seen_at <= self._left_at:
            return latest is None or latest.view.unfinished
        if others and not self._serves_others:
            self._serves_others = True
            say(f"  the islands here have left, and this serves {', '.join(others)} on. Ctrl-C ends it")
        return bool(others)

    def _others(self) -> list[str]:
        """Return the live islands of others in an unfinished run, which need this merger and perhaps this Redis."""
        ours, latest = {child.name for child in self.islands}, self.watcher.latest
        islands = latest.view.islands if latest and latest.view.unfinished else ()
        return [island.name for island in islands if island.live and island.name not in ours]

    def _require_workers(self) -> None:
        """Raise ArchipelagoError if a process has made a fatal error, or if all islands have failed for good."""
        broken = [child for child in [self.merger, *self.islands] if child.failed]
        fatal = [child for child in broken if child.is_fatal or child is self.merger]
        if fatal or (len(broken) == len(self.islands) and not self._others()):
            child = (fatal or broken)[0]
            raise ArchipelagoError(
                f"{child.name} cannot continue: {child.failed.removeprefix('error: ')}",
                "\n  ".join([f"Its log is {child.log}, which ends with:", *child.last_lines()]),
                code="up.worker-failed",
            )

    def _end(self) -> None:
        """Let the islands send their last contributions and leave, and the merger merge them."""
        stop_all(self.islands, leave_seconds(self.options))
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.merger.alive() and time.monotonic() < deadline:
            with suppress(BrokerError):  # If Redis is away, contributions may still wait in it.
                if self.redis:
                    self.redis.tend()
                if self.transport.reader.backlog() == 0:
                    break
            time.sleep(POLL_SECONDS)
        stop_all([self.merger], leave_seconds(self.options))

    def _observe(self) -> RunView:
        """Return the run as it is now. Write its settings, of which an operator may have changed the length."""
        view, config = Watcher(self.transport, RECENT_ROUNDS).read().view, self.options.settings
        settings = replace(config, inner=replace(config.inner, steps=view.steps))
        write_atomically(self.folder / "config.toml", to_toml(settings))  # for `runs` and the comparison
        return view

    # -- the report -------------------------------------------------------------------------------------------------

    def report(self, *, with_comparison: bool) -> dict[str, Any]:
        """Return the report as plain data, at first training one process on as many tokens if there is a comparison."""
        view = self._observe()
        curve = self._one_process(view.tokens_trained) if with_comparison else []
        return run_report.summary(view, curve, self.seconds)

    def _one_process(self, tokens: int) -> run_report.Curve:
        """Return the held-out results of one process that trained on that many tokens with the run's config.

        They are empty if training did not finish.
        """
        result, log = self.folder / "one_process.json", self.folder / "logs" / "one-process.log"
        result.unlink(missing_ok=True)  # of a shorter run
        say(f"one process trains on the same {tokens:,} tokens, for comparison (Ctrl-C skips it)")
        argv = ["-m", SINGLE_PROCESS, "--tokens", str(tokens), "--output", str(result)]
        argv += ["--config", str(self.folder / "config.toml")]
        argv += ["--weights", str(self.options.from_)] if self.options.from_ else []
        argv += ["--task", self.options.task] if self.options.task else []
        child = Child("one-process", argv, thread_environment(1), log)
        child.start()
        try:
            with progress("  training one process"):
                while child.alive() and not self.stopped():
                    time.sleep(POLL_SECONDS)
        finally:
            child.stop(KILL_SECONDS)
        if result.exists():
            return [(tokens, bits) for tokens, bits in json.loads(result.read_text(encoding="utf-8"))["curve"]]
        why = "" if self.stopped() or not (said := child.last_words()) else f" (its log ends with: {said})"
        say(f"  it did not finish, so the report has no comparison{why}")
        return []
