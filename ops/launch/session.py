"""One call of `archipelago up`: the processes of a run, their supervision, and their orderly end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from archipelago.broker.buckets.copier import FINISH_SECONDS
from archipelago.broker.buckets.folder import chosen
from archipelago.broker.errors import ArchipelagoError, BrokerError, UnreachableError
from archipelago.broker.loss_unit import loss_unit
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.observe.printable import printable
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.broker.transport import MergerStatus, ReaderTransport
from archipelago.ops.launch.comparison import compare
from archipelago.ops.launch.devices import Shares
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.standbys import ISLAND, Standbys
from archipelago.ops.launch.supervisor import ISLAND_NICENESS, Child, stop_all, thread_environment
from archipelago.ops.settings import say
from archipelago.ops.watch import formatting, run_summary
from archipelago.ops.watch.advice import Problem, problems
from archipelago.ops.watch.health import Health
from archipelago.ops.watch.run_view import RunView, observe

LOOK_SECONDS = 1.0
LINE_SECONDS = 10.0
LEAVE_SECONDS = 30.0
EVALUATE_SECONDS = 30.0
DRAIN_SECONDS = 20.0
KILL_SECONDS = 5.0
POLL_SECONDS = 0.1


def leave_seconds(worker: WorkerOptions) -> float:
    """Return how long a worker may take to end. With a bucket, it copies its last checkpoint there."""
    return LEAVE_SECONDS + (FINISH_SECONDS if chosen(worker.bucket) else 0.0)


class RedisSupervisor:
    """A supervisor that restarts the run's embedded server. Its folder keeps data, port and password."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._server, self._stack = server, stack

    def tend(self) -> str:
        """Restart the server if it has died. Return a message about that, or an empty string."""
        if self._server.alive():
            return ""
        self._server.stop()
        self._server = self._stack.enter_context(start_server(self._server.folder, opening=self._server.opening))
        return "Redis died and was restarted from its append-only file"


def island_name(number: int) -> str:
    """Return the name of an island on this machine."""
    return f"island-{number}"


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session.

    Attributes:
        islands: Number of islands on this machine.
        standbys: Number of standbys on this machine.
        checkpoint_every: Seconds between two checkpoints; 0 for none.
        merger_threads: Threads of the merger that change spectra; 0 for its default.
        evaluate_every: Seconds between two evaluations; 0 for one at the end only.
        weights: The weights that the run began with, for the comparison; None for fresh ones.
        task: The users' task that the islands train, FILE.py:NAME; None for one of our models.
        has_losses: Whether the run is evaluated on held-out data. A task may have no evaluation.
        worker: Options that all workers share.
        mesh: The mesh of each island, as `archipelago island` takes it; None for its default.
        shares: The accelerators of each island; None on a machine without any.
    """

    islands: int
    standbys: int
    checkpoint_every: float
    merger_threads: int
    evaluate_every: float
    weights: Path | None
    task: str | None
    has_losses: bool
    worker: WorkerOptions
    mesh: str | None = None
    shares: Shares | None = None


class Session:
    """The merger, the islands and the standbys of a run on this machine, and its last evaluation.

    Attributes:
        seconds: How long this session trained; 0 if the run was already complete.
    """

    def __init__(
        self,
        options: SessionOptions,
        manifest: Manifest,
        transport: ReaderTransport,
        url: str,
        folder: Path,
        stopped: Callable[[], bool],
        redis: RedisSupervisor | None,
        joins: Mapping[str, str] | None = None,
    ) -> None:
        """`joins` has the join file of each process, by name. Without it, all use the URL."""
        self.options, self.manifest, self.transport = options, manifest, transport
        self.folder, self.stopped, self.redis = folder, stopped, redis
        worker = options.worker
        threads = {RUN_VARIABLE: manifest.run, **thread_environment(options.islands)}

        def environment(name: str) -> dict[str, str]:
            return {URL_VARIABLE: (joins or {}).get(name, url), **threads}

        def child(name: str, *argv: str, devices: Mapping[str, str] | None = None, niceness: int = 0) -> Child:
            variables, log = {**environment(name), **(devices or {})}, folder / "logs" / f"{name}.log"
            return Child(name, argv, variables, log, niceness=niceness)

        shares, mesh = options.shares, ["--mesh", options.mesh] if options.mesh else []
        devices = [shares.environment(number) for number in range(options.islands)] if shares else []

        merger = ["--resume", "--folder", str(folder / "merger"), "--checkpoint-every", str(options.checkpoint_every)]
        merger += ["--threads", str(options.merger_threads)] if options.merger_threads else []
        self.merger = child("merger", "-m", "archipelago.merger", *merger, *worker.flags(0))
        task = ["--task", options.task] if options.task else []
        self.evaluator = child("evaluate", "-m", "archipelago.ops", "evaluate", *task)
        self.islands = []
        for number in range(options.islands):
            name = island_name(number)
            where = ["--name", name, "--folder", str(folder / "islands" / name)]
            where += ["--evaluate-every", str(options.evaluate_every)]
            own = devices[number] if devices else None
            argv = [*ISLAND, *where, *mesh, *task, *worker.flags(number + 1)]
            self.islands.append(child(name, *argv, devices=own, niceness=ISLAND_NICENESS))
        flags = [*mesh, *task, *worker.curve_flags()]
        self.standbys = Standbys(options.standbys, flags, environment("standby"), folder / "logs", devices)
        for island in self.islands:
            island.stand_in = self.standbys.stand_in
        self.seconds = 0.0
        self._view: RunView | None = None
        self._tokens_before = 0

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train until the islands are done or a signal arrives. Return whether the run has made all its steps."""
        view = self._observe()
        self._tokens_before = view.tokens_trained
        if view.step >= view.steps:
            say(f"the run has already made all its {view.steps:,} steps")
            return True
        children = [self.merger, *self.islands]
        began = time.monotonic()
        try:
            for child in children:
                child.start()
            self.standbys.start()
            self._watch(children)
            self.standbys.end()
            self._end()
        finally:
            self.standbys.end()
            stop_all([*children, self.evaluator], KILL_SECONDS)
        self.seconds = time.monotonic() - began
        return self._last_view().step >= view.steps

    def _watch(self, children: list[Child]) -> None:
        """Supervise the children and show the run until all islands have ended or a signal arrives."""
        console = Console(stderr=True, highlight=False)
        on_screen = console.is_terminal and not self.options.worker.log_json
        live = Live(console=console, refresh_per_second=4, transient=False) if on_screen else None
        with ExitStack() as stack:
            if live:
                stack.enter_context(live)
            line_due = look_due = 0.0
            while not self.stopped() and not all(child.done or child.failed for child in self.islands):
                now = time.monotonic()
                events = [self.redis.tend()] if self.redis else []
                events += [*(child.tend(now) for child in children), *self.standbys.tend(now)]
                for event in filter(None, events):
                    console.print(Text(f"  {printable(event)}")) if live else say(f"  {event}")
                self._require_workers()
                if now >= look_due:
                    look_due = now + LOOK_SECONDS
                    line_due = self._display(live, now, line_due)
                time.sleep(POLL_SECONDS)

    def _display(self, live: Live | None, now: float, line_due: float) -> float:
        """Show the run now, and return when its next line is due. During an outage the islands train on."""
        try:
            view = self._observe()
        except UnreachableError:
            return line_due
        if live:
            live.update(formatting.render(view, found=self._problems(view)))
        elif now >= line_due:
            say(f"  {formatting.line(view)}")
            return now + LINE_SECONDS
        return line_due

    def _problems(self, view: RunView) -> list[Problem]:
        """Return what is wrong with the run, without the absence of our own islands: we start them again."""
        ours = {"run", *(island.name for island in self.islands)}
        found = problems(view, Health(MergerStatus()), self.manifest.config)
        return [each for each in found if each.code not in ("run.no-islands", "island.silent") or each.who not in ours]

    def _require_workers(self) -> None:
        """Raise ArchipelagoError if a process has made a fatal error, or if all islands have failed for good."""
        broken = [child for child in [self.merger, *self.islands] if child.failed]
        fatal = [child for child in broken if child.is_fatal or child is self.merger]
        if fatal or len(broken) == len(self.islands):
            child = (fatal or broken)[0]
            raise ArchipelagoError(
                f"{child.name} cannot continue: {child.failed.removeprefix('error: ')}",
                "\n  ".join([f"Its log is {child.log}, which ends with:", *child.last_lines()]),
                code="up.worker-failed",
            )

    def _end(self) -> None:
        """Let the islands send their last contributions and leave, the merger merge them, and measure the result."""
        stop_all(self.islands, leave_seconds(self.options.worker))
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.merger.process is not None and self.merger.process.poll() is None and time.monotonic() < deadline:
            with suppress(BrokerError):  # If Redis is away, contributions may still wait in it.
                if self.redis:
                    self.redis.tend()
                if self.transport.reader.backlog() == 0:
                    break
            time.sleep(POLL_SECONDS)
        if self.options.has_losses and not self._is_evaluated():
            self.evaluator.start()
            self.evaluator.wait(EVALUATE_SECONDS)
        stop_all([self.merger], leave_seconds(self.options.worker))

    def _is_evaluated(self) -> bool:
        """Return whether the newest parameters have been evaluated, as the last island does at the end of a run.

        A run that is stopped before its first merge has nothing new to evaluate.
        """
        try:
            newest = max((head.round for head in self.transport.reader.heads() if head is not None), default=0)
            known = self.transport.reader.evaluations()
        except BrokerError:
            return True  # without Redis there is nothing to evaluate
        if not newest and self.stopped():
            return True
        return bool(known) and known[-1].round >= newest

    def _observe(self) -> RunView:
        self._view = observe(self.transport, self.manifest)
        return self._view

    def _last_view(self) -> RunView:
        """Return the run as it is now, or as it was last seen if Redis died during the shutdown."""
        try:
            return self._observe()
        except BrokerError as error:
            if self._view is None:
                raise
            say(f"the report shows the run as it was last seen: {error.what}")
            return self._view

    # -- the report -------------------------------------------------------------------------------------------------

    def report(self, server: str, with_comparison: bool) -> dict[str, Any]:
        """Return the report as plain data.

        Args:
            server: The Redis server, in words.
            with_comparison: Whether to train one process on as many tokens first.
        """
        view = self._last_view()
        curve: run_summary.Curve = []
        if with_comparison:
            curve = compare(self.folder, view.tokens_trained, self.options.weights, self.options.task, self.stopped)
        evaluations = []
        with suppress(BrokerError):
            evaluations = self.transport.reader.evaluations()
        tokens = view.tokens_trained - self._tokens_before
        return run_summary.summary(
            view,
            evaluations,
            curve,
            loss_unit(self.manifest.corpus),
            tokens_per_second=tokens / self.seconds if self.seconds else math.nan,
            seconds=self.seconds,
            server=server,
            interval=self.manifest.config.sync.interval,
        )
