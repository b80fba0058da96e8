"""`archipelago up`: train on this machine, with a Redis if none is given, a merger and islands; end with a report."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from archipelago.broker import invitation as invitations
from archipelago.broker.address import redacted
from archipelago.broker.config import RunConfig, checked
from archipelago.broker.control import STEPS, checked_changes, run_steps
from archipelago.broker.errors import ConfigError, UnknownRunError, require_number
from archipelago.broker.files import require_writable
from archipelago.broker.invitation import ADMIN, Invitation
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.process import FAILED, INTERRUPTED, keep_compiled, name_of_new_run, print_json, stop_on_signals
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import whole
from archipelago.broker.transport import Transport
from archipelago.islands.mesh import parsed
from archipelago.merger.accelerator import MEMORY_SHARE as SPECTRA_SHARE
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.administration import ADMIN_FILE, Administrator, administrator_at, invite_ours
from archipelago.ops.launch.devices import MEMORY_SHARE, DeviceShares, accelerators, leave_to_children, shared_out
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from archipelago.ops.launch.init import create, require_same, text_of, trainable
from archipelago.ops.launch.local_run import LocalRun
from archipelago.ops.launch.opening import public_host
from archipelago.ops.launch.supervisor import STANDBYS_MAX, STANDBYS_REMEDY, island_name
from archipelago.ops.settings import is_given, say
from archipelago.ops.watch import report as run_report
from archipelago.ops.watch.history import RECENT_ROUNDS
from archipelago.ops.watch.reading import Watcher

#: The most seconds from a signal to the end of everything. The steps of an orderly end take less together.
END_SECONDS = 300.0
ISLANDS_MAX = 256


@dataclass(frozen=True)
class UpOptions(WorkerOptions):
    """Train on this machine: start a Redis (unless a URL is given), a merger and islands, and end with a report.

    Ctrl-C ends it in order. The same command continues the run.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    """A Redis that is already running. Without one, `up` starts its own on loopback."""
    open_: Annotated[bool, tyro.conf.arg(name="open")] = False
    """Let others join: the Redis of `up` then talks TLS, on port 6379 if it is free, and all need an invitation."""
    host: str | None = None
    """With --open: the name or address under which others reach this machine. The default is the one it sends with."""
    run: str = field(default_factory=name_of_new_run)
    """The name of the run and of its folder. The default is $ARCHIPELAGO_RUN, or else `demo`."""
    islands: int = 3
    """The number of islands on this machine. More can join from other machines."""
    mesh: str | None = None
    """How each island uses its devices, such as data=2,fsdp=2 (docs/guide/many-devices.md). The default is all on data.
    """
    share_devices: bool = False
    """Let several islands use one accelerator. Otherwise each island gets accelerators of its own."""
    shards: int = 1
    """How many shards a new run has. One process serves all of them (docs/guide/scaling.md#shards)."""
    spectra: Literal["cpu", "gpu"] = "cpu"
    """Where the merger changes spectra of matrices: its cores, or the first NVIDIA GPU, of which it takes a tenth."""
    standbys: int = 0
    """The processes that have loaded and compiled everything and replace an island that dies."""
    folder: Path = Path("runs")
    """The folder with the folders of all runs: logs, data and reports."""
    resume: bool = False
    """If the Redis does not have the run, continue from the newest checkpoint in the folder or the bucket."""
    checkpoint_every: float = 30.0
    """The seconds between two checkpoints of the whole run, merger and islands. 0 takes none."""
    evaluate_every: float = 15.0
    """The seconds between two evaluations on held-out text, by one of the islands. 0 evaluates nothing."""
    one_process: bool = True
    """Afterwards train one process on as many tokens, for comparison."""
    task: str | None = None
    """A task of your own to train, FILE.py:NAME, in place of one of our models (docs/guide/tasks.md)."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The weights that a new run begins with: a .safetensors file or its folder, such as `export` writes."""
    config: Path | None = None
    """A TOML file with settings. Flags override it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """Print the report as one JSON object."""


def main(options: UpOptions) -> int:
    """Train, and write the report. Return 130 if training was interrupted, and 1 if its islands left before its end."""
    options = replace(options, settings=checked(options.settings))
    config, name = options.settings, checked_name(options.run, "the run name")
    require_sensible(options)
    options, shares = _with_devices(options)
    folder = options.folder / name
    if options.log_json:
        options.log_as("up", name)
    keep_compiled()
    leave_to_children(shares.found.platform if shares else "")
    has_losses = trainable(config, options.task, options.from_).evaluation() is not None and options.evaluate_every > 0
    bucket = options.bucket_folder(name)
    # Nothing has been started or written before this line.
    stopped = stop_on_signals(END_SECONDS)
    with ExitStack() as stack:
        if stopped():
            raise KeyboardInterrupt
        server, url = _server(options, folder, stack)
        invited = administrator_at(server, name, folder) if server and server.host else None
        transport = stack.enter_context(closing(connect(url, name, invited)))
        if not server:
            require_writable(folder)
        administrator = None
        if server and server.host:
            administrator = Administrator(transport, server.address.url(server.host), folder)
            administrator.open()  # before anything is written into the run
        elif server:
            invitations.write(folder / ADMIN_FILE, Invitation(url, name, ADMIN, ADMIN))
        kept = MergerFolder(folder / "merger", bucket=bucket.child("merger") if bucket else None)
        manifest, created = _find_or_create(transport, config, kept, options)
        all_shards = whole(transport, manifest)
        _greet(manifest, created, server, url, folder)
        names = [island_name(number) for number in range(options.islands)]
        for line in shares.describe(names) if shares else []:
            say(f"  device  {line}")
        joins: dict[str, str] = {}
        if administrator:
            administrator.put_back(["merger", "standby", *names])
            joins = invite_ours(administrator, url, names)
        if stopped():  # From here on, processes have to be ended in order.
            raise KeyboardInterrupt
        watcher = Watcher(stack.enter_context(closing(connect(url, name, invited))), RECENT_ROUNDS)
        local = LocalRun(options, manifest, all_shards, watcher, url, folder, stopped, server, joins, shares)
        finished = local.train()
        report = {} if local.seconds else run_report.read(folder) or {}
        if not report.get("finished") or "syncs_in_words" not in report:  # else an earlier call has written it
            report = local.report(with_comparison=finished and options.one_process and has_losses)
            run_report.write(folder, report)
    _farewell(report, finished, folder, options)
    if number := kept.missing_in_bucket():
        say(f"  warning: the bucket does not have checkpoint {number} of {kept.path} yet; the merger's log says why")
    if finished or stopped():
        return 0 if finished else INTERRUPTED
    say(f"  its islands have left before its end: `archipelago status {shlex.quote(str(folder))}` says why")
    return FAILED


def require_sensible(options: UpOptions) -> None:
    """Raise ConfigError for options that the workers would refuse, before any of them is started."""
    require_number("--islands", options.islands, f"Choose 1 to {ISLANDS_MAX}.", 1, ISLANDS_MAX)
    require_number("--standbys", options.standbys, STANDBYS_REMEDY, most=STANDBYS_MAX)
    _require_openable(options)
    remedy = "Give a number of seconds, such as 30, or 0 for no checkpoints."
    require_number("--checkpoint-every", options.checkpoint_every, remedy)
    remedy = "Give a number of seconds such as 15, or 0 to evaluate nothing."
    require_number("--evaluate-every", options.evaluate_every, remedy)


def _require_openable(options: UpOptions) -> None:
    if options.open_ and options.url:
        raise ConfigError(
            "--open starts a Redis of its own, so it takes no URL",
            "Leave out one of them. With a URL, `archipelago invite` gives others their access.",
            code="config.value",
        )
    if options.host is not None and not options.open_:
        raise ConfigError("--host needs --open", "Give both, or neither.", code="config.value")
    file = options.folder / options.run / ADMIN_FILE
    if not options.open_ and not options.url and file.exists() and invitations.read(file).merger_key:
        raise ConfigError(
            f"the members of the run {options.run!r} have invitations, and its Redis is open to them",
            f"Continue it with `archipelago up --open --run {options.run}`.",
            code="up.was-open",
        )


def _with_devices(options: UpOptions) -> tuple[UpOptions, DeviceShares | None]:
    """Return the options with a number of islands that this machine's accelerators allow, and the share of each.

    Raises ConfigError (`up.devices`, `mesh.size`) if there are not enough for what was asked.
    """
    mesh, found = parsed(options.mesh) if options.mesh is not None else None, accelerators()
    if found is not None and not options.share_devices and not is_given("--islands"):
        options = replace(options, islands=min(options.islands, len(found.names)))
    if options.spectra == "gpu" and (found is None or found.platform != "cuda"):
        raise ConfigError(
            "--spectra gpu needs an NVIDIA GPU, and this machine has none",
            "Leave it out: the merger then changes spectra on its cores.",
            code="up.devices",
        )
    shares = shared_out(found, options.islands, options.standbys, may_share=options.share_devices, mesh=mesh)
    if shares and options.spectra == "gpu":
        shares = replace(shares, memory=MEMORY_SHARE - SPECTRA_SHARE)
    return options, shares


def _find_or_create(
    transport: Transport, config: RunConfig, kept: MergerFolder, options: UpOptions
) -> tuple[Manifest, bool]:
    """Return the run's manifest, and whether it was created now. Checkpoints of a run are never overwritten."""
    known, found = transport.run in transport.reader.runs(), None
    if not known:
        kept.fetch()
    if numbers := kept.store.numbers():
        found = kept.find_or_bring_back(transport, resume=options.resume)
    elif known:
        with suppress(UnknownRunError):  # its name is all that is left of it
            found = transport.reader.manifest()
    if found is None:
        return create(transport, config, options.from_, task=options.task, shards=options.shards)
    _extend(transport, found, config, options)
    if not known:
        say(f"this Redis did not have the run: it continues from checkpoint {numbers[-1]} in {kept.path}")
    return found, False


def _extend(transport: Transport, found: Manifest, config: RunConfig, options: UpOptions) -> None:
    """Extend a run if the user gives more steps than it has.

    The extension is a steered change (`archipelago steer inner.steps=N`), so that the tape records it. Without
    inner.steps, the run keeps its length: the default is that of new runs. Raises MismatchError, before anything
    changes, if another setting is not the run's.
    """
    own, now, wanted = found.config.inner.steps, run_steps(found.config, transport.reader.control()), config.inner.steps
    if wanted == RunConfig().inner.steps and not is_given(f"--{STEPS}", options.config):
        wanted = now
    same = replace(config, inner=replace(config.inner, steps=own))
    is_shorter = wanted < now and wanted != own
    require_same(found, config if is_shorter else same, options.from_, task=options.task, shards=options.shards)
    if wanted > now:
        whole(transport, found).reader.steer(checked_changes(found.config, {STEPS: str(wanted)}))
        say(f"run {found.run!r} is extended from {now:,} to {wanted:,} steps")


def _server(options: UpOptions, folder: Path, stack: ExitStack) -> tuple[RedisServer | None, str]:
    if options.url:
        return None, options.url
    host = public_host(options.host) if options.open_ else None
    require_writable(folder)
    server = stack.enter_context(start_server(folder / "redis", host=host))
    return server, server.url


def _greet(manifest: Manifest, created: bool, server: RedisServer | None, url: str, folder: Path) -> None:
    corpus = f", corpus {manifest.corpus.name} ({manifest.corpus.bytes:,} bytes)" if not manifest.task else ""
    say(f"run {manifest.run!r} {'begins' if created else 'continues'}: {manifest.parameters:,} parameters "
        f"({manifest.task or manifest.config.model.size}) in {len(manifest.fragments)} fragments{corpus}")  # fmt: skip
    say(f"  data    {text_of(manifest)}")
    say(f"  redis   {server.describe() if server else redacted(url)}")
    task, file = " --task FILE.py:NAME" if manifest.task else "", shlex.quote(str(folder / ADMIN_FILE))
    runs = "" if folder.parent == Path("runs") else f" --folder {shlex.quote(str(folder.parent))}"
    if server and server.host:
        say(f"  invite  archipelago invite NAME --role island --run {manifest.run}{runs}   (makes a join file)")
        say(f"  join    archipelago island {manifest.run}.NAME.join{task}   (on another machine, with that file)")
    elif server:
        say(f"  join    archipelago island {file}{task}   (on this machine)")
    if server:  # The file holds the password, so that it shows neither here nor in `ps`.
        say(f"  watch   archipelago status {file}")
    say(f"  folder  {folder}/ (logs, config.toml, report)")


def _farewell(report: dict[str, Any], finished: bool, folder: Path, options: UpOptions) -> None:
    if options.json:
        print_json(report)
    say()
    say(run_report.result_in_words(report))
    say(f"  {report['syncs_in_words']}")
    place = shlex.quote(str(folder))
    if not finished:
        say(f"  continue  archipelago up --run {report['run']} …   (the same command)")
    say(f"  report    archipelago report {place}")
    say(f"  export    archipelago export {place} --out {report['run']}-model")
    say(f"  look      archipelago dash {place}" if options.task else f"  try       archipelago generate {place}")
