"""`archipelago simulate tables`: the paper's tables beside the simulated ones, as tables or JSON.

Source: Decoupled DiLoCo (arXiv 2604.21428v1), Tables 1a and 1b. One interruption per chip and year; 5 B parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from rich.table import Table

from archipelago.broker.errors import require_number
from archipelago.broker.process import print_json
from archipelago.ops.settings import say, table_console
from archipelago.ops.simulation.failures import FailureModel, simulate
from archipelago.ops.watch.formatting import new_table


@dataclass(frozen=True)
class TablesOptions:
    """Simulate Table 1 of the paper, goodput and uptime, and set it beside the published one."""

    days: float = 7.0
    """The virtual time of each cell."""
    seed: int = 0
    """The seed of all random draws."""
    json: bool = False
    """Print one JSON object."""


def main(options: TablesOptions) -> int:
    require_number("--days", options.days, "Give more than 0.", 1e-6)
    require_number("--seed", options.seed, "Give a seed of at least 0.")
    began = time.process_time()
    model = FailureModel()
    tables = goodput_and_uptime(model, options.days, options.seed)
    seconds = time.process_time() - began
    found = {f"{name}_rms": rms(cells) for name, cells in tables.items()}
    say(f"rms of the differences: goodput {found['goodput_rms']:.2f} points, uptime {found['uptime_rms']:.2f} points")
    say(f"{options.days:g} virtual days for each cell in {seconds:.1f} processor seconds")
    if options.json:
        plain = {name: [cell._asdict() for cell in cells] for name, cells in tables.items()}
        print_json({"model": dataclasses.asdict(model), "days": options.days, "seed": options.seed, **found, **plain})
        return 0
    console = table_console()
    for name, cells in tables.items():
        console.print(_table(TITLES[name], cells))
        console.print()
    return 0


class Cell(NamedTuple):
    """A published number beside ours, both in per cent, at its row and column of the table."""

    row: str
    column: str
    published: float
    ours: float


# -- Table 1 -----------------------------------------------------------------------------------------------------------


def count_text(value: float) -> str:
    """Format a number of parameters, tokens or chips, such as 150k or 1.2M."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:g}"


#: The columns: chips by their heads.
CHIPS = {count_text(chips): chips for chips in (150e3, 300e3, 600e3, 1.2e6, 2.4e6)}


class PaperRow(NamedTuple):
    """A row of Table 1: the islands, and per cent of goodput (1a) and uptime (1b)."""

    islands: int
    elastic: bool
    goodput: tuple[float, ...]
    uptime: tuple[float, ...]

    @property
    def label(self) -> str:
        """The name of the row in the table."""
        if self.islands > 1:
            return f"M = {self.islands}"
        return "M = 1, elastic" if self.elastic else "M = 1, not elastic"


ROWS = (
    PaperRow(1, False, (72, 57, 38, 27, 18), (72, 57, 38, 27, 18)),
    PaperRow(1, True, (88, 80, 69, 58, 40), (88, 81, 69, 59, 42)),
    PaperRow(2, True, (94, 88, 80, 70, 54), (100, 97, 96, 90, 80)),
    PaperRow(4, True, (96, 93, 89, 82, 73), (100, 100, 99, 99, 99)),
    PaperRow(8, True, (98, 96, 94, 88, 80), (100, 100, 100, 100, 99)),
    PaperRow(16, True, (99, 98, 96, 93, 86), (100, 100, 100, 100, 99)),
)


def goodput_and_uptime(model: FailureModel, days: float, seed: int) -> dict[str, list[Cell]]:
    """Return Tables 1a and 1b by `model`, with the table's chips, islands and elasticity."""
    found: dict[str, list[Cell]] = {"goodput": [], "uptime": []}
    for (number, row), (column, head) in itertools.product(enumerate(ROWS), enumerate(CHIPS)):
        cell = replace(model, chips=CHIPS[head], islands=row.islands, elastic=row.elastic)
        outcome = simulate(cell, days * 86400.0, np.random.default_rng([seed, number, column]))
        for name, cells in found.items():
            cells.append(Cell(row.label, head, getattr(row, name)[column], 100.0 * getattr(outcome, name)))
    return found


# -- output ------------------------------------------------------------------------------------------------------------

TITLES = {
    "goodput": "goodput, %, published / simulated",
    "uptime": "uptime, %, published / simulated",
}


def rms(cells: Sequence[Cell]) -> float:
    """Return the root mean square of the differences, in points."""
    return math.sqrt(sum((cell.ours - cell.published) ** 2 for cell in cells) / len(cells))


def _table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a table for a terminal. Each cell is published / ours."""
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {})[cell.column] = f"{cell.published:g} / {cell.ours:.1f}"
    table = new_table("", *CHIPS, numbers=CHIPS, title=title, title_justify="left")
    for label, row in rows.items():
        table.add_row(label, *row.values())
    return table
