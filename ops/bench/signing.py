"""`archipelago bench signing`: what signatures add to one outer synchronisation of a whole model.

Two runs, each with a Redis, a merger and two islands, sync in turn: one signs everything, and the other nothing. The
same work on the machine slows both. Each process of the signed run also counts the time that it spends on signatures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from archipelago.broker.observe.progress import progress
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import wait_until
from archipelago.ops.bench.two_islands import (
    AT_ONCE,
    FRAGMENTS,
    PATIENCE_SECONDS,
    WIRE,
    Size,
    Synced,
    TwoIslands,
    two_islands,
)
from archipelago.ops.settings import say

#: Syncs at the beginning that do not count.
WARM_UPS = 2


@dataclass(frozen=True)
class SigningOptions(OutputOptions):
    """Measure what signatures add to a sync of 10 M parameters."""

    syncs: int = 40
    """The syncs of each run."""


def main(options: SigningOptions) -> int:
    """Measure, and write the results."""
    return finish("signing", signing(say, Size(rounds=options.syncs)), options)


def signing(report: Callable[[str], None], size: Size) -> dict[str, Any]:
    """Measure both runs.

    Returns:
        Plain data with `rows`. `seconds` are the median, and the quartiles, of one sync. `to_unsigned` is the median of
        the ratios of two syncs that follow each other, with its quartiles. `merger_ms` and `island_ms` are the
        milliseconds of a sync that the merger and one island spend on signatures.
    """
    with two_islands(AT_ONCE, size) as plain, two_islands(AT_ONCE, size, signed=True) as signed:
        runs = (plain, signed)
        for run in runs:  # the merger may close the first rounds before it knows both islands
            wait_until(lambda run=run: run.sync().committed, "sync of both islands", PATIENCE_SECONDS)  # type: ignore[misc]
        for number in range(WARM_UPS):
            _pair(runs, number)
        merger_before = signed.merger_signing()
        found = []
        with progress("syncing in turn", size.rounds) as activity:
            for number in range(size.rounds):
                found.append(_pair(runs, number))
                activity.done += 1
        merger_seconds = (signed.merger_signing() - merger_before) / size.rounds
    ratios = [b.seconds / a.seconds for a, b in found]
    report(f"signed to unsigned: {statistics.median(ratios):.3f}, median of {len(ratios)}")
    rows = [_row("unsigned", [a for a, _ in found]), _row("signed", [b for _, b in found])]
    low, middle, high = _quartiles(ratios)
    rows[1] |= {"to_unsigned": middle, "ratio_from": low, "ratio_to": high}
    rows[1]["merger_ms"] = 1e3 * merger_seconds
    rows[1]["island_ms"] = 1e3 * statistics.median(b.signing for _, b in found)
    return {
        "parameters": sum(tensor.size for tensor in size.tensors),
        "fragments": FRAGMENTS,
        "codecs": f"{WIRE.up} up, {WIRE.down} down",
        "rows": rows,
    }


def _pair(runs: tuple[TwoIslands, TwoIslands], number: int) -> tuple[Synced, Synced]:
    """Let both runs sync, in alternating order, and return the unsigned sync first."""
    if number % 2:
        second, first = runs[1].sync(), runs[0].sync()
    else:
        first, second = runs[0].sync(), runs[1].sync()
    return first, second


def _row(what: str, syncs: Sequence[Synced]) -> dict[str, Any]:
    low, middle, high = _quartiles([sync.seconds for sync in syncs])
    return {
        "what": what,
        "seconds": middle,
        "from": low,
        "to": high,
        "committed": f"{sum(sync.committed for sync in syncs)} of {len(syncs)}",
        "to_unsigned": float("nan"),
        "ratio_from": float("nan"),
        "ratio_to": float("nan"),
        "merger_ms": 0.0,
        "island_ms": 0.0,
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
