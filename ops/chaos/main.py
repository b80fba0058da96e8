"""`archipelago chaos`: run real processes through a storm of faults, and report goodput, uptime and the invariants."""

from __future__ import annotations

import dataclasses
import fcntl
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.commits import START
from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import BrokerError, ConfigError, require_number
from archipelago.broker.files import make_untracked
from archipelago.broker.manifest import SHARDS_MAX
from archipelago.broker.messages import Refusal, TapeEntry
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.process import keep_compiled, print_json, stop_on_signals
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import of_shard
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.chaos import schedule as schedules
from archipelago.ops.chaos.figures import REPORT, Figures, figures, headlines, write
from archipelago.ops.chaos.processes import RunProcesses, StormPlan, monotonic, parse_script, read_turn_log
from archipelago.ops.chaos.record import Identity, LoggedTurn, StormRecord, step_seconds
from archipelago.ops.chaos.schedule import REDIS, Fault, Kind, merger_names
from archipelago.ops.launch.devices import leave_to_children
from archipelago.ops.launch.init import trainable, workload_of
from archipelago.ops.launch.supervisor import STANDBYS_MAX, STANDBYS_REMEDY, island_name
from archipelago.ops.settings import say

#: Exit status if an invariant is broken.
BROKEN = 1
SCHEDULE = "schedule.jsonl"
#: How long the first islands may have trained before the last one joins.
JOINING_SECONDS = 30.0


@dataclass(frozen=True)
class ChaosOptions:
    """Train through a storm of faults in real processes. Report goodput and uptime; fail if an invariant breaks.

    With --task, the islands train a task of yours. With --script, the islands are a training script of yours, as
    `archipelago.join` makes it one. It must take its Redis from ARCHIPELAGO_URL, and must create its run itself.
    """

    run: str = "chaos"
    """The name of the run and of its folder. An earlier storm there is deleted."""
    script: str = ""
    """Storm over your own training script instead of our islands: the file and its arguments, in quotation marks.
    {island} in them stands for the name of the island; without it, the name comes last."""
    task: str | None = None
    """A task of your own, FILE.py:NAME, that the islands train in place of one of our models."""
    islands: int = 3
    """The number of islands on this machine."""
    shards: int = 1
    """The number of shards of the run, and of the merger processes that share them."""
    standbys: int = 0
    """The number of standby processes, which have loaded everything and become an island that is started again."""
    seconds: float = 60.0
    """The length of the storm."""
    settle_seconds: float = 0.0
    """How much longer the storm may last, until all processes work again."""
    fault_seed: int = 0
    """The seed of the schedule: the same seed gives the same faults."""
    mean_seconds_between: float = 20.0
    """The mean time that each process is up before its next fault."""
    kinds: tuple[Kind, ...] = ("kill", "stop")
    """The kinds of faults to choose from: kill, stop, partition, reset, half-open, throttle, delay, disk."""
    return_seconds: float = 2.0
    """The mean duration of a fault, which follows an exponentiated Weibull distribution."""
    every: float = 0.0
    """Instead of random faults: kill a random island every EVERY seconds, and start it after `return_seconds`."""
    schedule: Path | None = None
    """Instead of random faults: a file with a JSON object a line. Each storm leaves its own in its folder."""
    step_seconds: float = 0.05
    """The minimum duration of an inner step, so that islands do not compete for this machine's cores. 0 for none."""
    undisturbed: bool = True
    """Afterwards, repeat the run without faults up to as many merged tokens, to compare the loss."""
    baseline: bool = False
    """Afterwards, train the same model data-parallel under the same faults, and compare. The group restarts from its
    checkpoint after a death. To compare over slow links, give a schedule with `throttle` faults that do not end."""
    checkpoint_every: float = 10.0
    """The seconds between two checkpoints of the whole run."""
    folder: Path = Path("runs")
    """The folder where runs keep their logs, data and reports."""
    config: Path | None = None
    """A TOML file with settings. Flags override it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The run lasts as long as the storm: `--inner.steps` only sets where the learning rate's decay ends."""
    json: bool = False
    """Print the report as one JSON object."""


def main(options: ChaosOptions) -> int:
    """Run the storm. Return 0, or BROKEN if an invariant is broken."""
    config, script = checked(options.settings), parse_script(options.script)
    folder = options.folder / checked_name(options.run, "the run name")
    _require_sensible(options)
    faults = _faults(options)
    if not script:
        keep_compiled()
        leave_to_children()
        trainable(config, options.task)
    stopped = stop_on_signals()
    with _own_folder(folder):
        found = _storm(options, config, folder, faults, stopped)
    if options.json:
        print_json(found)
    return 0 if found["holds"] else BROKEN


def _require_sensible(options: ChaosOptions) -> None:
    """Raise ConfigError for values out of range (`config.value`) and options that do not go together."""
    positive = ("seconds", "mean_seconds_between")
    for name in (*positive, "return_seconds", "every", "step_seconds", "checkpoint_every", "settle_seconds"):
        value = getattr(options, name)
        least = math.nextafter(0.0, 1.0) if name in positive else 0.0
        require_number(f"--{name.replace('_', '-')}", value, "Give a positive number.", least)
    for flag, count, most in (("--islands", options.islands, 256), ("--shards", options.shards, SHARDS_MAX)):
        require_number(flag, count, f"Choose 1 to {most}.", 1, most)
    require_number("--standbys", options.standbys, STANDBYS_REMEDY, most=STANDBYS_MAX)
    _require_compatible(options)


def _require_compatible(options: ChaosOptions) -> None:
    """Raise ConfigError (`config.value`) for options that do not go together."""
    baseline = {"--baseline": options.baseline}
    needs_our_loop = {"--task": bool(options.task), "--standbys": options.standbys > 0, "--shards": options.shards > 1}
    for other, is_set, flags in (
        ("--step-seconds 0", not options.step_seconds, baseline),
        ("--script", bool(options.script), needs_our_loop | baseline),
    ):
        if is_set and (wrong := [flag for flag, is_given in flags.items() if is_given]):
            raise ConfigError(
                f"{wrong[0]} and {other} exclude each other", "Leave one of them out.", code="config.value"
            )


def _faults(options: ChaosOptions) -> list[Fault]:
    """Return the schedule. Raise ConfigError for a file that cannot be read, or for a fault that this system lacks."""
    islands = [island_name(number) for number in range(options.islands)]
    targets = [REDIS, *merger_names(options.shards), *islands]
    if options.schedule:
        found = schedules.from_file(options.schedule, targets)
    elif options.every:
        found = schedules.periodic(options.every, islands, options.return_seconds, options.seconds, options.fault_seed)
    else:
        found = schedules.poisson(
            targets, options.seconds, options.fault_seed, options.mean_seconds_between, options.kinds,
            options.return_seconds,
        )  # fmt: skip
    if sys.platform != "linux" and any(fault.kind == "disk" for fault in found):
        raise ConfigError("the fault `disk` needs Linux", "Leave `disk` out of --kinds.", code="config.value")
    return found


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Make an empty folder, and keep it for this process while the block runs.

    An earlier storm is deleted. Raises ConfigError if it still runs, or if the folder holds anything else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / SCHEDULE).exists():
        raise ConfigError(
            f"{folder} is not empty and holds no storm", "Name another run with --run.", code="chaos.foreign-folder"
        )
    make_untracked(folder)
    with (folder / SCHEDULE).open("a") as schedule:
        try:
            fcntl.flock(schedule, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what, remedy = f"the storm in {folder} still runs", "Wait for its end, or name another run with --run."
            raise ConfigError(what, remedy, code="chaos.running") from None
        except OSError:
            pass  # some network file systems have no locks
        for each in {*folder.iterdir()} - {folder / SCHEDULE, folder / ".gitignore"}:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        yield


def _storm(
    options: ChaosOptions, config: RunConfig, folder: Path, faults: Sequence[Fault], stopped: Callable[[], bool]
) -> Figures:
    """Run a storm and, as the options say, the same run without faults and the baseline. Write the report."""
    names = tuple(island_name(number) for number in range(options.islands))
    (folder / SCHEDULE).write_text(schedules.to_text(faults), encoding="utf-8")
    long = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=_enough_steps(options, config)))
    plan = StormPlan(
        folder.name, folder / "storm", long, names, options.step_seconds, options.seconds, tuple(faults),
        options.checkpoint_every, options.settle_seconds, options.standbys, script=parse_script(options.script),
        task=options.task, shards=options.shards,
    )  # fmt: skip
    origin = f"--schedule {options.schedule}" if options.schedule else f"--fault-seed {options.fault_seed}"
    say(f"{len(names)} islands, {len(faults)} faults in {options.seconds:g} s, {origin}; {folder}")
    command = " ".join(["archipelago", *sys.argv[1:]])
    storm, control = run_storm(plan, stopped), None
    if options.undisturbed:
        say("the same run without faults, up to as many merged tokens, for comparison")
        merged = storm.counters.merged_tokens // storm.layout.count
        calm = dataclasses.replace(plan, folder=folder / "undisturbed", faults=(), merged_tokens=merged, standbys=0)
        control = figures(run_storm(calm, stopped))
    found = figures(storm, control)
    write(folder, found, command)
    if options.baseline:  # The report of the storm is already written, in case this fails.
        from archipelago.ops.chaos.baseline import run_baseline

        say("data-parallel training under the same faults, for comparison")
        own = dataclasses.replace(
            plan, folder=folder / "baseline", seconds=storm.seconds, step_seconds=storm.step_seconds
        )
        found = figures(storm, control, run_baseline(own, stopped))
        write(folder, found, command)
    _print(found, folder)
    return found


def _enough_steps(options: ChaosOptions, config: RunConfig) -> int:
    """Return a few more inner steps than the storm has time for, and no fewer than the config asks for.

    A run that ended within the storm would leave no targets for faults. With just enough steps, the learning rate
    decays during the storm. Islands begin before the storm does.
    """
    shortest = options.step_seconds or (1e-4 if options.script or options.task else 1e-3)
    return max(
        config.inner.steps, math.ceil((1.1 * (options.seconds + options.settle_seconds) + JOINING_SECONDS) / shortest)
    )


def _print(found: Figures, folder: Path) -> None:
    say()
    for name, value in headlines(found):
        say(f"  {name:<64} {value}")
    for check in found["checks"]:
        say(f"  {'holds ' if check['holds'] else 'BROKEN'} {check['name']}: {check['found']}")
    say(f"report: {folder / REPORT}")


EVERYTHING = 1 << 20
#: A measured step duration of a script that exceeds the minimum by less than this share is the minimum.
TIMER_SHARE = 0.05


def run_storm(plan: StormPlan, stopped: Callable[[], bool]) -> StormRecord:
    """Run a plan to its end. Raise ArchipelagoError if its run does not begin to train, or if `stopped`."""
    with ExitStack() as stack:
        processes = RunProcesses(plan, stack)
        processes.await_all()
        begin, end = processes.carry_out(plan.faults, lambda begin: _is_over(plan, processes, begin), stopped)
        processes.end_faults()
        if not processes.drain():
            say("  some contributions were not merged in time")
        return _record(plan, processes, begin, end)


def _is_over(plan: StormPlan, processes: RunProcesses, begin: float) -> bool:
    if plan.merged_tokens:
        with suppress(BrokerError):  # Redis may be too busy to answer; the next look asks again.
            merged = processes.transport.reader.counters().merged_tokens
            return merged >= plan.merged_tokens * len(processes.manifest.fragments)
        return False
    left = begin + plan.seconds - time.monotonic()
    return left <= 0 and (left <= -plan.settle_seconds or processes.is_well())


def _record(plan: StormPlan, processes: RunProcesses, begin: float, end: float) -> StormRecord:
    transport = processes.transport
    config, tape = processes.manifest.config, tuple(transport.reader.tape(EVERYTHING))
    turns = {island.name: read_turn_log(processes.turn_log(island.name)) for island in processes.islands}
    has_own, beats = plan.is_own or not plan.step_seconds, [p.heartbeat for p in transport.reader.presences()]
    return StormRecord(
        begin=begin,
        end=end,
        islands=plan.islands,
        step_seconds=own_step_seconds(plan.step_seconds, turns) if has_own else plan.step_seconds,
        tokens_per_step=_tokens_per_step(tape) if plan.is_own else config.tokens_per_step,
        layout=processes.manifest.shard_layout,
        faults=plan.faults,
        events=tuple(processes.events),
        turns=turns,
        closed_at={entry.round: monotonic(entry) for entry in tape},
        tape=tape,
        counters=transport.reader.counters(),
        bytes_down=sum(beat.bytes_down for beat in beats),
        sent={(beat.island, beat.incarnation): beat.sent for beat in beats},
        refused=_refused(processes),
        held_out_loss=_held_out_loss(plan, transport),
        unit=loss_unit(processes.manifest.corpus).name,
        standbys=plan.standbys,
    )


def own_step_seconds(asked: float, turns: Mapping[str, Sequence[LoggedTurn]]) -> float:
    """Return the minimum that was asked for, or the median of what steps take if that is more; NaN for neither."""
    measured = [seconds for each in turns.values() for seconds in step_seconds(each)]
    usual = statistics.median(measured or [asked or math.nan])
    return asked if usual <= asked * (1 + TIMER_SHARE) else usual


def _tokens_per_step(tape: Sequence[TapeEntry]) -> float:
    """Return the mean tokens of an inner step of a user's script or task, by what was merged."""
    steps = sum(member.steps for entry in tape for member in entry.members)
    return sum(member.tokens for entry in tape for member in entry.members) / max(1, steps)


def _refused(processes: RunProcesses) -> frozenset[Identity]:
    return frozenset(
        (shard, event.island, event.incarnation, event.sequence)
        for shard in range(processes.manifest.shards)
        for _, event in of_shard(processes.primary, processes.manifest, shard).reader.events(START, 0.0, EVERYTHING)
        if isinstance(event, Refusal) and not event.repeat
    )


def _held_out_loss(plan: StormPlan, transport: ReaderTransport) -> float:
    """Return the held-out loss of the final parameters; NaN for a script, or a task without `evaluate`."""
    from archipelago.islands.evaluation import published
    from archipelago.islands.sync.evaluator import mean_of

    manifest = transport.reader.manifest()
    evaluate = None if plan.script else workload_of(manifest.config, plan.task).evaluation()
    if evaluate is None:
        return math.nan
    params, _, _ = published(transport, manifest)
    return loss_unit(manifest.corpus).from_evaluation(mean_of(evaluate(params)).bits)
