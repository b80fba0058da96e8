"""`archipelago simulate`: what failures and links cost, in virtual time, before any machine is rented."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from archipelago.broker.config import RunConfig, from_toml
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import keep_compiled, print_json
from archipelago.ops.settings import say, table_console
from archipelago.ops.simulation import tape as simulation_tape
from archipelago.ops.simulation.failures import YEAR_SECONDS, FailureModel, Outcome, simulate
from archipelago.ops.simulation.published import GOODPUT, UPTIME, bandwidth, bandwidth_rms, goodput_and_uptime, rms
from archipelago.ops.simulation.tape import FailureTape

DAYS = 7.0
QUALITY_CHIPS = (1.2e6, 2.4e6)
QUALITY_STEPS = 200


@dataclass(frozen=True)
class SimulateOptions:
    """What failures and links cost, in virtual time: goodput, uptime, bandwidth; tapes that real training follows.

    `tables`: Tables 1 and 13 of the paper beside this model's, with a picture. `run`: one simulation, from the flags or
    from measured failures (--trace); --tape keeps what the islands did. `quality`: real islands train along tapes of
    1.2 and 2.4 million chips (or along --tape), and along one without failures; minutes.
    """

    what: Annotated[Literal["tables", "run", "quality"], tyro.conf.Positional] = "tables"
    """what to simulate"""
    model: Annotated[FailureModel, tyro.conf.arg(name="")] = field(default_factory=FailureModel)
    days: float | None = None
    """virtual time; default 7, or the length of the trace"""
    seed: int = 0
    """of everything that is drawn"""
    trace: Path | None = None
    """run: measured outages, as CSV with the columns slice,failed_seconds,returned_seconds"""
    trace_slices: int = 0
    """run: slices that were watched, if some of them never failed; default those that the trace names"""
    tape: Path | None = None
    """run: writes what the islands did to this file; quality: follows this file"""
    steps: int = QUALITY_STEPS
    """quality: global steps of the run without failures"""
    config: Path | None = None
    """quality: a TOML file with the run's settings"""
    output: Path = Path("runs/simulate")
    """tables: folder for the picture, and for the tables in Markdown"""
    json: bool = False
    """print one JSON object"""


def main(options: SimulateOptions) -> int:
    """Simulates, and shows."""
    if options.seed < 0 or options.steps < 1:
        raise ConfigError("--seed or --steps is too small", "Give a seed of at least 0, and at least one step.")
    found = {"tables": _tables, "run": _run, "quality": _quality}[options.what](options)
    if options.json:
        print_json(found)
    return 0


def _tables(options: SimulateOptions) -> dict[str, Any]:
    from archipelago.ops.simulation import tables as show

    began = time.process_time()
    days = DAYS if options.days is None else options.days
    goodput, uptime = goodput_and_uptime(options.model, days, options.seed)
    gbits = bandwidth()
    seconds = time.process_time() - began
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / "simulation.png"
    show.draw(picture, goodput, uptime, gbits)
    (options.output / "simulation_tables.md").write_text(show.markdown(goodput, uptime, gbits), encoding="utf-8")
    summary = {"goodput_rms_points": rms(goodput, GOODPUT), "uptime_rms_points": rms(uptime, UPTIME),
               "bandwidth_rms": bandwidth_rms(gbits), "cpu_seconds": seconds}  # fmt: skip
    if not options.json:
        console = table_console()
        for table in show.tables(goodput, uptime, gbits):
            console.print(table)
            console.print()
    say(f"rms of the differences: goodput {summary['goodput_rms_points']:.2f} points, uptime "
        f"{summary['uptime_rms_points']:.2f} points, bandwidth {100 * summary['bandwidth_rms']:.1f} % (data-parallel "
        f"{100 * bandwidth_rms(gbits, ['data-parallel']):.1f} %, fragments "
        f"{100 * bandwidth_rms(gbits, ['M = 8, bf16', 'M = 8, int4']):.1f} %)")  # fmt: skip
    say(f"{days:g} virtual days for each cell in {seconds:.1f} processor seconds; picture: {picture}")
    return {"model": dataclasses.asdict(options.model), "days": days, "seed": options.seed, **summary,
            "table_1": show.availability_rows(goodput, uptime), "table_13": show.bandwidth_rows(gbits),
            "picture": str(picture)}  # fmt: skip


def _run(options: SimulateOptions) -> dict[str, Any]:
    model, days, outages = options.model, options.days, None
    if options.trace:
        outages = simulation_tape.outages(options.trace)
        outages += [[] for _ in range(options.trace_slices - len(outages))]
        model = dataclasses.replace(model, slices=len(outages))
        days = max(returned for one in outages for _, returned in one) / 86400.0 if days is None else days
    days = DAYS if days is None else days
    outcome = simulate(model, days * 86400.0, np.random.default_rng(options.seed), outages)
    found = {
        "goodput": outcome.goodput,
        "uptime": outcome.uptime,
        "days": days,
        "changes_an_hour": outcome.changes / (days * 24.0),
        "goodput_of_islands": [outcome.goodput_of(island) for island in range(model.islands)],
        "model": dataclasses.asdict(model),
        **(_rates(outages, days) if outages else {}),
    }
    _tell(found, outcome)
    if options.tape:
        about = {key: found[key] for key in ("model", "goodput", "uptime")} | {"seed": options.seed}
        simulation_tape.write(simulation_tape.taped(outcome, model.step_seconds, about), options.tape)
        say(f"tape: {options.tape}")
    return found


def _rates(outages: Sequence[Sequence[tuple[float, float]]], days: float) -> dict[str, float]:
    """What was measured, in the model's terms."""
    known = [one for slice_ in outages for one in slice_]
    down = sum(returned - failed for failed, returned in known)
    up_seconds = len(outages) * days * 86400.0 - down
    return {
        "outages": len(known),
        "slice_hours_between": up_seconds / len(known) / 3600.0,
        "mean_return_seconds": down / len(known),
    }


def _tell(found: dict[str, Any], outcome: Outcome) -> None:
    worst, best = min(found["goodput_of_islands"]), max(found["goodput_of_islands"])
    say(f"goodput  {found['goodput']:.1%} over {found['days']:g} days (islands {worst:.1%} to {best:.1%})")
    say(f"uptime   {found['uptime']:.2%}: the share of time in which any of {len(outcome.islands)} islands makes steps")
    say(f"changes  {found['changes_an_hour']:.1f} an hour, of an island's slices or of whether it stands")
    if "outages" in found:
        say(f"trace    {found['outages']:,} outages: a slice fails every {found['slice_hours_between']:.2f} h up, "
            f"and is back after {found['mean_return_seconds']:.0f} s on average")  # fmt: skip


def tapes(model: FailureModel, seed: int) -> dict[str, FailureTape]:
    """Tapes of QUALITY_CHIPS with this model's other parameters, half a day each."""
    found = {}
    for chips in QUALITY_CHIPS:
        outcome = simulate(dataclasses.replace(model, chips=chips), YEAR_SECONDS / 730.5, np.random.default_rng(seed))
        found[f"{chips / 1e6:g}M chips"] = simulation_tape.taped(outcome, model.step_seconds)
    return found


def _quality(options: SimulateOptions) -> dict[str, Any]:
    config = from_toml(options.config) if options.config else RunConfig()
    warmup = min(config.inner.warmup_steps, max(1, options.steps // 10))
    config = dataclasses.replace(
        config, seed=options.seed, inner=dataclasses.replace(config.inner, steps=options.steps, warmup_steps=warmup)
    )
    following = (
        {options.tape.name: simulation_tape.read(options.tape)} if options.tape else tapes(options.model, options.seed)
    )
    keep_compiled()
    from archipelago.ops.experiments.tape_run import calm, quality

    first = next(iter(following.values()))
    rows = quality(config, {"no failures": calm(len(first.islands), first.step_seconds), **following}, say)
    for row in rows:
        say(f"{row['tape']:<14}goodput {row['goodput']:.1%}  {row['tokens']:>12,} tokens  "
            f"{row['bits_per_byte']:.4f} bits per byte  {row['to_first']:.4f}  "
            f"{row['schedule_done']:.0%} of the schedule")  # fmt: skip
    return {"config": config.digest(), "seed": options.seed, "rows": rows}
