"""`archipelago simulate run`: one simulation, with random failures or with measured ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.process import print_json
from archipelago.ops.settings import say
from archipelago.ops.simulation import tape as failure_tape
from archipelago.ops.simulation.failures import DAYS, FailureModel, Outcome, rng_of, simulate

DAY_SECONDS = 86400.0
#: Failures and returns of each slice, in seconds since the measurement began.
Outages = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class RunOptions:
    """Simulate a number of days once: goodput, uptime, and optionally a tape of the islands' states."""

    model: Annotated[FailureModel, tyro.conf.arg(name="")] = field(default_factory=FailureModel)
    days: float | None = None
    """The virtual time. The default is 7, or the length of the trace."""
    seed: int = 0
    """The seed of all random draws."""
    trace: Path | None = None
    """A CSV file with measured outages instead of random ones. Its columns are slice, failed_seconds, returned_seconds.
    """
    trace_slices: int = 0
    """The number of observed slices, if some of them never failed. The default is those that the trace names."""
    tape: Path | None = None
    """Write a tape of the islands' states to this file, for `archipelago simulate quality`."""
    json: bool = False
    """Print one JSON object."""


def main(options: RunOptions) -> int:
    """Simulate, print the result, and write the tape if one was asked for."""
    rng = rng_of(options.seed)
    model, days, outages = _sizes(options)
    outcome = simulate(model, days * DAY_SECONDS, rng, outages)
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
        failure_tape.write(failure_tape.taped(outcome, model.step_seconds, about), options.tape)
        say(f"tape: {options.tape}")
    if options.json:
        print_json(found)
    return 0


def _sizes(options: RunOptions) -> tuple[FailureModel, float, Outages | None]:
    """Return the model, the days to simulate, and the measured outages if there are any."""
    if not options.trace:
        return options.model, DAYS if options.days is None else options.days, None
    outages = failure_tape.outages(options.trace)
    outages += [[] for _ in range(options.trace_slices - len(outages))]
    last = max(returned for one in outages for _, returned in one)
    days = last / DAY_SECONDS if options.days is None else options.days
    return dataclasses.replace(options.model, slices=len(outages)), days, outages


def _rates(outages: Outages, days: float) -> dict[str, float]:
    """Express measured outages in the model's terms."""
    known = [one for slice_ in outages for one in slice_]
    down = sum(returned - failed for failed, returned in known)
    up_seconds = len(outages) * days * DAY_SECONDS - down
    return {
        "outages": len(known),
        "slice_hours_between": up_seconds / len(known) / 3600.0,
        "mean_return_seconds": down / len(known),
    }


def _tell(found: dict[str, Any], outcome: Outcome) -> None:
    worst, best = min(found["goodput_of_islands"]), max(found["goodput_of_islands"])
    say(f"goodput  {found['goodput']:.1%} over {found['days']:g} days (islands {worst:.1%} to {best:.1%})")
    say(f"uptime   {found['uptime']:.2%}: the share of time in which any of {len(outcome.islands)} islands makes steps")
    say(f"changes  {found['changes_an_hour']:.1f} an hour: an island stops, starts, or continues with other slices")
    if "outages" in found:
        say(f"trace    {found['outages']:,} outages: a slice fails every {found['slice_hours_between']:.2f} h up, "
            f"and is back after {found['mean_return_seconds']:.0f} s on average")  # fmt: skip
