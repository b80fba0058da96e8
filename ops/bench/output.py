"""The turns and the results of a measurement: JSON for programs, a table for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rich.table import Table

from archipelago.broker.files import make_untracked
from archipelago.broker.observe.losses import rounded
from archipelago.broker.process import finite, print_json
from archipelago.ops.bench.provenance import provenance
from archipelago.ops.settings import say, table_console
from archipelago.ops.watch.formatting import new_table

Result = TypeVar("Result")


def taking_turns(sides: Sequence[Callable[[], Result]], rounds: int, warm_ups: int = 1) -> list[list[Result]]:
    """Let all sides work in turn, so that other work on the machine slows all. Return each side's results by round.

    The first rounds warm everything up, and do not count.
    """
    found = [[side() for side in sides] for _ in range(warm_ups + rounds)]
    return [list(side) for side in zip(*found[warm_ups:], strict=True)]


class Compared(NamedTuple):
    """Median seconds of two sides, and the median of the first's seconds over the second's, by round."""

    first: float
    second: float
    ratio: float


def compared(first: Sequence[float], second: Sequence[float]) -> Compared:
    """Compare the seconds of two sides that took turns."""
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    return Compared(median(first), median(second), median(ratios))


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratio_row(
    what: str, ours: float, against: str, theirs: float | str, ratio: float | str | None = None, goal: float | str = ""
) -> dict[str, Any]:
    """Return a line of a table. The ratio is that of both values, unless it is given as a median of ratios."""
    if ratio is None:
        assert not isinstance(theirs, str)  # noqa: S101
        ratio = ours / theirs
    return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio, "goal": goal}


@dataclass(frozen=True)
class OutputOptions:
    """Options of every measurement."""

    output: Path = Path("runs/bench")
    """The folder for the JSON file."""
    json: bool = False
    """Print one JSON object."""


def finish(name: str, found: Mapping[str, Any], options: OutputOptions) -> int:
    """Write `NAME.json` with its provenance, and print the same as JSON or as a table. Return the exit status 0."""
    found = {**found, "provenance": provenance()}
    make_untracked(options.output)
    path = options.output / f"{name}.json"
    path.write_text(json.dumps(finite(found), indent=2) + "\n", encoding="utf-8")
    if options.json:
        print_json(found)
    else:
        console = table_console()
        console.print(table(found["rows"], console.width))
    say(f"written: {path}")
    return 0


def table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return the rows as a table that cuts no name and no number.

    Where the columns do not fit into `width` characters, they move closer and their heads take several lines.
    """
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    heads, *body = cells
    fits = sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) - 2 <= width
    heads = [head.replace("_", " ") if fits else head.replace("_", "\n").replace(".", ".\n") for head in heads]
    made = new_table(*heads, numbers=heads[1:], padding=(0, 1) if fits else (0, 1, 0, 0))
    for row in body:
        made.add_row(*row)
    return made


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return rounded(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
