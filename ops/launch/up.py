"""`archipelago up`, the main job: a Redis if none is given, a merger and N islands here, live view, report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.live import Live

from archipelago.broker.address import redacted
from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ArchipelagoError, ConfigError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe import metrics
from archipelago.broker.observe.curve_sinks import require_wandb
from archipelago.broker.observe.logs import as_json
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, keep_compiled, print_json, stop_on_signals
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import Transport
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.init import create, require_same, require_usable
from archipelago.ops.launch.standbys import Standbys, require_standbys
from archipelago.ops.launch.supervisor import Child, stop_all, thread_environment
from archipelago.ops.settings import say, to_toml
from archipelago.ops.watch import formatting
from archipelago.ops.watch import run_summary as report
from archipelago.ops.watch.run_view import RunView, observe

LOOK_SECONDS = 1.0
LINE_SECONDS = 10.0
LEAVE_SECONDS = 30.0
DRAIN_SECONDS = 20.0


@dataclass(frozen=True)
class UpOptions(WorkerOptions):
    """Train on this machine: starts a Redis (unless a URL is given), a merger and islands; ends with a report.

    Ctrl-C ends it cleanly, and the same command goes on from there.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    """a Redis that runs already; without one, `up` starts its own on loopback"""
    run: str = "demo"
    """name of the run, and of its folder"""
    islands: int = 3
    """islands on this machine; more may join from anywhere"""
    standbys: int = 0
    """processes that wait with everything loaded, to take the place of an island that dies within a moment"""
    folder: Path = Path("runs")
    """where runs keep their logs, data and reports"""
    resume: bool = False
    """if the Redis does not have the run, go on from the newest checkpoint in the folder"""
    checkpoint_every: float = 30.0
    """seconds between two checkpoints of the whole run, merger and islands; 0 takes none"""
    evaluate_every: float = 15.0
    """seconds between two evaluations on held-out text"""
    one_process: bool = True
    """afterwards train one process on as many tokens, for comparison"""
    metrics_port: int | None = None
    """serve Prometheus metrics: the merger's at http://HOST:PORT/metrics, each island's at the next port"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """weights that a new run begins with: a .safetensors file, or a folder with one, such as `export` writes"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """print the report as one JSON object"""


def main(options: UpOptions) -> int:
    """Trains, and writes the report. 130 when it was interrupted before the end."""
    config = checked(options.settings)
    name = checked_name(options.run, "the run name")
    if not 1 <= options.islands <= 256:
        raise ConfigError(f"--islands cannot be {options.islands}", "Choose 1 to 256.")
    require_standbys(options.standbys)
    if not options.evaluate_every > 0:
        raise ConfigError(f"--evaluate-every cannot be {options.evaluate_every}", "Give seconds, such as 15.")
    folder = options.folder / name
    _require_telemetry(options, name)
    keep_compiled()
    require_usable(config, options.from_)  # before anything is started or written
    stopped = stop_on_signals()
    with ExitStack() as stack:
        server, url = _server(options.url, folder, stack)
        transport = connect(url, name)
        stack.callback(transport.close)
        manifest, created = _find_or_create(transport, config, folder, options)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        _greet(manifest, created, server, url, folder)
        described = server.describe() if server else redacted(url)
        checkpointer = ServerKeeper(server, stack) if server else None
        session = Session(options, manifest, transport, url, folder, stopped, checkpointer)
        finished = session.train()
        found = session.report(described, with_baseline=finished)
    if session.seconds or report.read(folder) is None:
        report.write(folder, found)
    else:  # nothing was trained: what the run's own session measured stands
        found = report.read(folder) or found
    _farewell(found, finished, folder, options)
    return 0 if finished else 130


def _require_telemetry(options: UpOptions, name: str) -> None:
    """Sets up what is asked for here; what the workers would refuse is refused before they are started."""
    if options.log_json:
        options.log_as("up", name)
    if options.wandb:
        require_wandb()
    first = options.metrics_port or 0
    if not 0 <= first <= metrics.PORT_MAX - options.islands:
        raise ConfigError(f"--metrics-port cannot be {first}", f"Choose 0 to {metrics.PORT_MAX - options.islands}.")


def _find_or_create(transport: Transport, config: RunConfig, folder: Path, options: UpOptions) -> tuple[Manifest, bool]:
    """The run's manifest, and whether it was created just now; never a fresh run over an old one's checkpoints."""
    kept = MergerFolder(folder / "merger")
    if numbers := kept.store.numbers():
        known = transport.run in transport.runs()
        require_same(kept.find_or_bring_back(transport, resume=options.resume), config)
        if not known:
            say(f"the Redis had no such run: it goes on from checkpoint {numbers[-1]} in {kept.path}")
    return create(transport, config, options.from_)


def _server(url: str | None, folder: Path, stack: ExitStack) -> tuple[Server | None, str]:
    if url:
        return None, url
    server = stack.enter_context(start_server(folder / "redis"))
    return server, server.url


def _greet(manifest: Manifest, created: bool, server: Server | None, url: str, folder: Path) -> None:
    say(f"run {manifest.run!r} {'begins' if created else 'goes on'}: {manifest.parameters:,} parameters "
        f"({manifest.config.model.size}) in {len(manifest.fragments)} fragments, corpus {manifest.corpus.name} "
        f"({manifest.corpus.bytes:,} bytes)")  # fmt: skip
    say(f"  redis   {server.describe() if server else redacted(url)}")
    if server and not as_json():  # a password is for whoever sits here, not for where logs are kept
        say(f"  look    {server.cli_hint()}")
        say(f"  join    archipelago island '{url}' --run {manifest.run}")
    say(f"  folder  {folder}/ (logs, config.toml, report)")


class ServerKeeper:
    """Starts the run's own server again when it dies; its folder gives it the same data, port and password."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._server, self._stack = server, stack

    def tend(self) -> str:
        """Says what happened, if anything did."""
        if self._server.alive():
            return ""
        self._server.stop()
        self._server = self._stack.enter_context(start_server(self._server.folder))
        return "redis died, and is started again from its append-only file"


class Session:
    """One call of `up`: children, view, and what is measured between their start and their end."""

    def __init__(
        self, options: UpOptions, manifest: Manifest, transport: RedisTransport, url: str, folder: Path,
        stopped: Callable[[], bool], checkpointer: ServerKeeper | None,
    ) -> None:  # fmt: skip
        self.options, self.manifest, self.transport = options, manifest, transport
        self.folder, self.stopped, self.checkpointer = folder, stopped, checkpointer
        environment = {URL_VARIABLE: url, RUN_VARIABLE: manifest.run}
        threads = thread_environment(options.islands)

        def child(child_name: str, *argv: str) -> Child:
            return Child(child_name, argv, {**environment, **threads}, folder / "logs" / f"{child_name}.log")

        kept = ["--folder", str(folder / "merger"), "--checkpoint-every", str(options.checkpoint_every)]
        self.merger = child("merger", "-m", "archipelago.merger", "--resume", *kept, *options.flags(0))
        looks = ["--every", str(options.evaluate_every), "--folder", str(folder / "evaluate")]
        self.evaluator = child("evaluate", "-m", "archipelago.ops", "evaluate", *looks, *options.curve_flags())
        names = [f"island-{number}" for number in range(options.islands)]
        self.islands = [
            child(
                name,
                "-m",
                "archipelago.islands",
                "--name",
                name,
                "--folder",
                str(folder / "islands" / name),
                *options.flags(port),
            )
            for port, name in enumerate(names, 1)
        ]  # fmt: skip
        self.standbys = Standbys(options.standbys, options.curve_flags(), {**environment, **threads}, folder / "logs")
        for island in self.islands:
            island.stand_in = self.standbys.stand_in
        self.seconds = 0.0
        self.tokens_before = 0

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Starts everything, watches until the islands are done or a signal comes, and ends it in order."""
        view = self._look()
        self.tokens_before = view.tokens_trained
        if view.step >= view.steps:
            say(f"the run has made all its {view.steps:,} steps already")
            return True
        children = [self.merger, self.evaluator, *self.islands]
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
            stop_all(children, 5.0)
        self.seconds = time.monotonic() - began
        return self._look().step >= view.steps

    def _watch(self, children: list[Child]) -> None:
        console = Console(stderr=True, highlight=False)
        on_screen = console.is_terminal and not self.options.log_json
        live = Live(console=console, refresh_per_second=4, transient=False) if on_screen else None
        with ExitStack() as stack:
            if live:
                stack.enter_context(live)
            line_due = look_due = 0.0
            while not self.stopped() and not all(child.done or child.failed for child in self.islands):
                now = time.monotonic()
                happened = [self.checkpointer.tend()] if self.checkpointer else []
                happened += [*(child.tend(now) for child in children), *self.standbys.tend(now)]
                for news in filter(None, happened):
                    (console.print if live else say)(f"  {news}")
                self._require_hope()
                if now >= look_due:
                    look_due = now + LOOK_SECONDS
                    line_due = self._display(live, now, line_due)
                time.sleep(0.1)

    def _display(self, live: Live | None, now: float, line_due: float) -> float:
        try:
            view = self._look()
        except UnreachableError:
            return line_due  # the islands train on; so does the watch
        if live:
            live.update(formatting.render(view))
        elif now >= line_due:
            say(f"  {formatting.line(view)}")
            return now + LINE_SECONDS
        return line_due

    def _require_hope(self) -> None:
        broken = [child for child in [self.merger, *self.islands] if child.failed]
        if self.merger.failed or len([c for c in broken if c is not self.merger]) == len(self.islands):
            raise ArchipelagoError(
                f"{broken[0].name} cannot go on: {broken[0].failed.removeprefix('error: ')}",
                f"Its log is {broken[0].log}.",
            )

    def _end(self) -> None:
        """Islands send what they have and leave; the merger merges it; the last evaluation sees it."""
        stop_all(self.islands, LEAVE_SECONDS)
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.merger.process is not None and self.merger.process.poll() is None and time.monotonic() < deadline:
            if self.transport.backlog() == 0:
                break
            time.sleep(0.05)
        stop_all([self.evaluator], LEAVE_SECONDS)
        stop_all([self.merger], LEAVE_SECONDS)

    def _look(self) -> RunView:
        return observe(self.transport, self.manifest)

    # -- afterwards -------------------------------------------------------------------------------------------------

    def report(self, server: str, with_baseline: bool) -> dict[str, Any]:
        """The report as plain data; trains the one process first, where that is wanted and was not done before."""
        view = self._look()
        curve: list[tuple[int, float]] = []
        if with_baseline and self.options.one_process:
            curve = self._one_process(view.tokens_trained)
        tokens = view.tokens_trained - self.tokens_before
        return report.summary(
            view,
            self.transport.evaluations(),
            curve,
            tokens_per_second=tokens / self.seconds if self.seconds else math.nan,
            seconds=self.seconds,
            server=server,
        )

    def _one_process(self, tokens: int) -> list[tuple[int, float]]:
        kept = self.folder / "one_process.json"
        if kept.exists():
            found = json.loads(kept.read_text(encoding="utf-8"))
            if found["tokens"] == tokens:
                return [(int(t), float(b)) for t, b in found["curve"]]
        say(f"one process trains on the same {tokens:,} tokens, for comparison (Ctrl-C skips it)")
        argv = ["-m", "archipelago.ops.experiments.single_process", "--tokens", str(tokens), "--output", str(kept)]
        argv += ["--config", str(self.folder / "config.toml")]
        argv += ["--from", str(self.options.from_)] if self.options.from_ else []
        log = self.folder / "logs" / "one-process.log"
        log.unlink(missing_ok=True)
        child = Child("one-process", argv, thread_environment(1), log)
        child.start()
        shown = 0
        try:
            while child.process is not None and child.process.poll() is None and not self.stopped():
                lines = child.log.read_text(encoding="utf-8").splitlines()
                for text in lines[shown:]:
                    say(f"  {text}")
                shown = len(lines)
                time.sleep(0.2)
        finally:
            child.stop(5.0)
        if not kept.exists():
            say("  it did not finish: the report goes without it")
            return []
        return [(int(t), float(b)) for t, b in json.loads(kept.read_text(encoding="utf-8"))["curve"]]


def _farewell(found: dict[str, Any], finished: bool, folder: Path, options: UpOptions) -> None:
    if options.json:
        print_json(found)
    first, last, alone = (found[f"bits_per_byte_{key}"] for key in ("first", "last", "one_process"))
    say()
    learnt = f"{formatting.number(first, 4)} → {formatting.number(last, 4)} with {found['islands']} islands"
    say(f"held-out bits per byte: {learnt}; one process on as many tokens: {formatting.number(alone, 4)}")
    say(f"report: {folder / report.TEXT}  picture: {folder / report.PICTURE}")
    if not finished:
        say(f"interrupted; the same command goes on:  archipelago up --run {found['run']} …")
