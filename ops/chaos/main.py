"""`archipelago chaos`: faults on purpose. A run in real processes through a storm, what it came to, and what held."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import finite, keep_compiled, print_json, stop_on_signals
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.chaos import schedule as schedules
from archipelago.ops.chaos.baselines import Ran
from archipelago.ops.chaos.fake_clock import require_library
from archipelago.ops.chaos.lockstep import ride_in_step
from archipelago.ops.chaos.page import COLUMNS, PAGE, PICTURE, REPORT, compared, headlines, write
from archipelago.ops.chaos.rendezvous import WAYS
from archipelago.ops.chaos.report import Control, Figures, Storm, as_control, as_data, figures
from archipelago.ops.chaos.schedule import MERGER, REDIS, Fault, Kind, Weather
from archipelago.ops.chaos.storm import Plan, ride
from archipelago.ops.launch.init import require_usable
from archipelago.ops.launch.standbys import require_standbys
from archipelago.ops.settings import say

BROKEN = 1
"""exit status when an invariant broke"""
SCHEDULE = "schedule.jsonl"
JOINING_SECONDS = 30.0
"""what islands may have trained for when the last of them has joined"""
WIDTHS = (24, 9, 26, 24, 30, 30)
"""of the table of baselines"""
PEERS_KILL_SECONDS, PEERS_AWAY_SECONDS, PEERS_SLOW = 15.0, 2.0, 2.0


@dataclass(frozen=True)
class ChaosOptions:
    """Train through a storm of faults in real processes; report goodput and uptime; fail when an invariant breaks.

    `storm` is one run under a schedule of faults. `peers` is the bench that others were measured with: 3 islands,
    H = 40 steps of 50 ms, 1 M parameters; without faults, with a SIGKILL every 15 s, with one island 2 times slower.
    """

    what: Annotated[Literal["storm", "peers"], tyro.conf.Positional] = "storm"
    """one storm, or the peers' bench"""
    run: str = "chaos"
    """name of the run, and of its folder, which is made anew"""
    islands: int = 3
    """islands on this machine"""
    standbys: int = 0
    """processes beside them that wait with everything loaded, and become whichever island is started again"""
    seconds: float = 60.0
    """how long faults last, and are measured"""
    settle_seconds: float = 0.0
    """after that, how long at most is waited and measured until everybody that was away is back"""
    fault_seed: int = 0
    """of the schedule: the same seed makes the same faults"""
    fault_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """peers: seeds of the schedules"""
    mean_seconds_between: float = 20.0
    """mean time that each process is well, until its next fault"""
    kinds: tuple[Kind, ...] = ("kill", "stop")
    """faults to choose from: kill, stop, partition, reset, half-open, throttle, delay, disk"""
    spare: tuple[str, ...] = ()
    """processes that nothing happens to: redis, merger, or an island"""
    return_seconds: float = 2.0
    """mean time until a fault is over; it is an exponentiated Weibull delay"""
    return_shape: float = 2.0
    """k of that delay"""
    return_power: float = 4.0
    """α of that delay"""
    every: float = 0.0
    """instead: SIGKILL of a random island every so many seconds, back after `return_seconds`"""
    schedule: Path | None = None
    """instead: a file of faults, a JSON object a line; each storm leaves its own in its folder"""
    spot: Path | None = None
    """instead: a spot-market trace in JSON, whose zones take islands away"""
    spot_faster: float = 100.0
    """how many times faster that is played"""
    slow: float = 1.0
    """the last island's steps take this many times longer"""
    step_seconds: float = 0.05
    """an inner step takes at least so long, so that islands do not compete for this machine's cores; 0 for none"""
    undisturbed: bool = True
    """afterwards the same run without faults, to as many merged tokens, to hold the loss against"""
    baselines: bool = False
    """afterwards others under the same faults: data-parallel, elastic data-parallel, synchronous DiLoCo"""
    checkpoint_every: float = 10.0
    """seconds between two checkpoints of the whole run"""
    folder: Path = Path("runs")
    """where runs keep their logs, data and reports"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """the run lasts as long as the storm: `--inner.steps` is only where the learning rate has decayed to its end"""
    json: bool = False
    """print the report as one JSON object"""


def main(options: ChaosOptions) -> int:
    """1 when an invariant broke."""
    config = checked(options.settings)
    folder = options.folder / checked_name(options.run, "the run name")
    _require_sensible(options)
    faults = _faults(options)
    keep_compiled()
    require_usable(config)
    stopped = stop_on_signals()
    _make_anew(folder)
    if options.what == "peers":
        return _peers(options, config, folder, stopped)
    found = _storm(options, config, folder, faults, stopped, options.slow, options.undisturbed)
    if options.json:
        print_json(as_data(found))
    return 0 if found.holds else BROKEN


def _require_sensible(options: ChaosOptions) -> None:
    positive = ("seconds", "mean_seconds_between", "return_shape", "return_power", "slow", "spot_faster")
    for name in (*positive, "return_seconds", "every", "step_seconds", "checkpoint_every", "settle_seconds"):
        value = getattr(options, name)
        if not 0 <= value < math.inf or (name in positive and not value):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be {value}", "Give a positive number.")
    if not 1 <= options.islands <= 256:
        raise ConfigError(f"--islands cannot be {options.islands}", "Choose 1 to 256.")
    require_standbys(options.standbys)
    if options.slow != 1.0 and not options.step_seconds:
        raise ConfigError("--slow needs a step's duration to be a multiple of", "Give --step-seconds, such as 0.05.")
    if options.baselines and not options.step_seconds:
        raise ConfigError("--baselines needs a step's duration to count by", "Give --step-seconds, such as 0.05.")


def _names(options: ChaosOptions) -> list[str]:
    return [f"island-{number}" for number in range(options.islands)]


def _faults(options: ChaosOptions) -> list[Fault]:
    """By the options. Raises ConfigError for a file that cannot be used, and for faults that this system lacks."""
    islands = _names(options)
    everybody = [REDIS, MERGER, *islands]
    if unknown := set(options.spare) - set(everybody):
        raise ConfigError(f"--spare cannot be {min(unknown)}", f"Name some of {', '.join(everybody)}.")
    targets = [name for name in everybody if name not in options.spare]
    victims = [name for name in islands if name not in options.spare]
    if options.schedule:
        found = schedules.from_text(_text(options.schedule), everybody)
    elif options.spot:
        found = schedules.from_spot(_text(options.spot), victims, options.seconds, options.spot_faster)
    elif options.every and victims:
        found = schedules.periodic(options.every, victims, options.return_seconds, options.seconds, options.fault_seed)
    else:
        weather = Weather(
            options.mean_seconds_between, options.kinds, options.return_seconds, options.return_shape,
            options.return_power,
        )  # fmt: skip
        found = schedules.poisson(weather, targets, options.seconds, options.fault_seed)
    if sys.platform != "linux" and any(fault.kind == "disk" for fault in found):
        raise ConfigError("only Linux can limit another process's files", "Leave `disk` out of --kinds.")
    if any(fault.kind == "clock" for fault in found):
        require_library()
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "Check the path.") from None


def _make_anew(folder: Path) -> None:
    """An empty folder for a storm. Raises ConfigError rather than take away what is no storm's."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / SCHEDULE).exists():
            raise ConfigError(f"{folder} holds something that is no storm's", "Name another run with --run.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCHEDULE).touch()


def _storm(
    options: ChaosOptions, config: RunConfig, folder: Path, faults: Sequence[Fault], stopped: Callable[[], bool],
    slow: float, undisturbed: bool,
) -> Figures:  # fmt: skip
    """Rides it, and the run without faults where that is wanted; writes the report into the folder."""
    names = _names(options)
    step_seconds = dict.fromkeys(names, options.step_seconds)
    step_seconds[names[-1]] *= slow
    (folder / SCHEDULE).write_text(schedules.to_text(faults), encoding="utf-8")
    endless = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=_enough_steps(options, config)))
    plan = Plan(
        folder.name, folder / "storm", endless, step_seconds, options.seconds, tuple(faults), options.checkpoint_every,
        options.settle_seconds, options.standbys,
    )  # fmt: skip
    say(f"{len(names)} islands, {len(faults)} faults in {options.seconds:g} s, seed {options.fault_seed}; {folder}")
    storm = ride(plan, stopped)
    control: Control | None = None
    if undisturbed:
        say("the same run without faults, to as many merged tokens, for comparison")
        merged = storm.books.merged_tokens // storm.fragments
        calm = dataclasses.replace(plan, folder=folder / "undisturbed", faults=(), merged_tokens=merged, standbys=0)
        control = as_control(ride(calm, stopped))
    found = figures(storm, control)
    write(folder, storm, found, _command())
    if options.baselines:  # what there is of the storm is kept, whatever comes of these
        found = figures(storm, control, _baselines(dataclasses.replace(plan, seconds=storm.seconds), stopped))
        write(folder, storm, found, _command())
    _tell(storm, found, folder)
    return found


def _baselines(plan: Plan, stopped: Callable[[], bool]) -> list[Ran]:
    """Others under the same faults, one after the other."""
    out = []
    for way in WAYS:
        say(f"{way} under the same faults")
        own = plan.folder.parent / "baselines" / way.lower().replace(" ", "-")
        out.append(ride_in_step(dataclasses.replace(plan, folder=own), way, stopped))
    return out


def _enough_steps(options: ChaosOptions, config: RunConfig) -> int:
    """Of the run: a little more than the storm has time for, so that the learning rate comes down; no fewer than asked.

    A run that ended within the storm would leave nothing to do faults to; islands begin before it does.
    """
    shortest = options.step_seconds or 1e-3
    return max(
        config.inner.steps, math.ceil((1.1 * (options.seconds + options.settle_seconds) + JOINING_SECONDS) / shortest)
    )


def _command() -> str:
    return " ".join(["archipelago", *sys.argv[1:]])


def _tell(storm: Storm, found: Figures, folder: Path) -> None:
    say()
    for name, value in headlines(found):
        say(f"  {name:<64} {value}")
    for check in found.checks:
        say(f"  {'holds ' if check.holds else 'BROKEN'} {check.name}: {check.found}")
    if found.baselines:
        for row in (COLUMNS, *compared(storm, found)):
            say("  " + "".join(f"{cell:<{width}}" for cell, width in zip(row, WIDTHS, strict=True)).rstrip())
    say(f"report: {folder / REPORT}  picture: {folder / PICTURE}  page: {folder / PAGE}")


# -- the peers' bench -------------------------------------------------------------------------------------------------


def _peers(options: ChaosOptions, config: RunConfig, folder: Path, stopped: Callable[[], bool]) -> int:
    """Each case a storm in a folder of its own; their figures side by side in one JSON file."""
    options = dataclasses.replace(options, islands=3, step_seconds=0.05)
    config = checked(dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, size="small"),
        data=dataclasses.replace(config.data, batch_size=1, sequence_length=16),
        sync=dataclasses.replace(config.sync, interval=40),
    ))  # fmt: skip
    kill = f"kill every {PEERS_KILL_SECONDS:g} s"
    cases: list[tuple[str, int, float]] = [("no faults", 0, 1.0)]
    cases += [(kill, seed, 1.0) for seed in options.fault_seeds]
    cases += [(f"one island {PEERS_SLOW:g} times slower", 0, PEERS_SLOW)]
    rows: list[dict[str, Any]] = []
    for case, seed, slow in cases:
        faults = schedules.periodic(
            PEERS_KILL_SECONDS, _names(options), PEERS_AWAY_SECONDS, options.seconds, seed
        ) if case == kill else []  # fmt: skip
        own = folder / f"case-{len(rows)}"
        own.mkdir()
        say(f"\n{case}, seed {seed}")
        found = _storm(dataclasses.replace(options, fault_seed=seed), config, own, faults, stopped, slow, False)
        rows.append({"case": case, "seed": seed, **finite(as_data(found))})
    (folder / "peers.json").write_text(json.dumps({"command": _command(), "rows": rows}, indent=2) + "\n", "utf-8")
    say(f"\n{'case':<28}{'goodput':>9}{'of live':>9}{'restarts':>10}{'ceiling':>9}  worst stall, net")
    for case in dict.fromkeys(row["case"] for row in rows):
        say(_peers_line(case, [row for row in rows if row["case"] == case]))
    if options.json:
        print_json({"rows": rows})
    return 0 if all(row["holds"] for row in rows) else BROKEN


def _peers_line(case: str, rows: Sequence[dict[str, Any]]) -> str:
    mean = statistics.fmean
    goodput, live = mean(row["goodput"] for row in rows), mean(row["goodput_of_live_time"] for row in rows)
    restarts = mean(row["shares"]["dead"] + row["shares"]["recovering"] for row in rows)
    worst = [max(r["stalls"]["idle"][key] for r in rows) for key in ("worst_seconds", "net_worst_seconds")]
    return (
        f"{case:<28}{goodput:>9.1%}{live:>9.1%}{restarts:>10.1%}{rows[0]['ceiling']:>9.1%}"
        f"  {worst[0] * 1e3:.0f} ms, {worst[1] * 1e3:.0f} ms"
    )
