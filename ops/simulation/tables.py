"""`archipelago simulate tables`: the paper's tables beside the simulated ones, as a table, JSON and a picture."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from archipelago.broker.errors import require_number
from archipelago.broker.files import make_untracked
from archipelago.broker.process import print_json
from archipelago.ops.settings import can_draw, pyplot, say, table_console
from archipelago.ops.simulation.failures import FailureModel
from archipelago.ops.simulation.paper import (
    BANDWIDTH,
    CHIPS,
    GOODPUT,
    ROWS,
    UPTIME,
    UTILISATION,
    Cells,
    PaperSite,
    bandwidth,
    bandwidth_rms,
    covered,
    goodput_and_uptime,
    rms,
)


@dataclass(frozen=True)
class TablesOptions:
    """Simulate Tables 1 and 13 of the paper, and set them beside the published ones, with a picture."""

    model: Annotated[FailureModel, tyro.conf.arg(name="")] = field(default_factory=FailureModel)
    days: float = 7.0
    """The virtual time of each cell."""
    seed: int = 0
    """The seed of all random draws."""
    output: Path = Path("runs/simulate")
    """The folder for the picture."""
    json: bool = False
    """Print one JSON object."""


def main(options: TablesOptions) -> int:
    """Simulate every cell; print and write the tables."""
    require_number("--seed", options.seed, "Give a seed of at least 0.")
    began = time.process_time()
    goodput, uptime = goodput_and_uptime(options.model, options.days, options.seed)
    gbits = bandwidth()
    seconds = time.process_time() - began
    make_untracked(options.output)
    summary = {"goodput_rms_points": rms(goodput, GOODPUT), "uptime_rms_points": rms(uptime, UPTIME),
               "bandwidth_rms": bandwidth_rms(gbits), "cpu_seconds": seconds}  # fmt: skip
    if not options.json:
        console = table_console()
        for table in tables(goodput, uptime, gbits):
            console.print(table)
            console.print()
    _tell(summary, gbits)
    say(f"{options.days:g} virtual days for each cell in {seconds:.1f} processor seconds")
    picture = options.output / "simulation.png"
    if can_draw():
        draw(picture, goodput, uptime, gbits)
        say(f"picture: {picture}")
    if options.json:
        print_json({"model": dataclasses.asdict(options.model), "days": options.days, "seed": options.seed, **summary,
                    "table_1": availability_rows(goodput, uptime), "table_13": bandwidth_rows(gbits),
                    "picture": str(picture)})  # fmt: skip
    return 0


def _tell(summary: Mapping[str, float], gbits: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> None:
    say(f"rms of the differences: goodput {summary['goodput_rms_points']:.2f} points, uptime "
        f"{summary['uptime_rms_points']:.2f} points, bandwidth {100 * summary['bandwidth_rms']:.1f} % (data-parallel "
        f"{100 * bandwidth_rms(gbits, ['data-parallel']):.1f} %, fragments "
        f"{100 * bandwidth_rms(gbits, ['M = 8, bf16', 'M = 8, int4']):.1f} %)")  # fmt: skip


def chips_in_words(chips: float) -> str:
    """Return a number of chips such as 150k or 1.2M."""
    return f"{chips / 1e6:g}M" if chips >= 1e6 else f"{chips / 1e3:g}k"


def availability_rows(goodput: Cells, uptime: Cells) -> list[dict[str, Any]]:
    """Return a row for each cell of Table 1, published and simulated, per cent."""
    return [
        {"row": row.label, "chips": chips, "goodput_published": GOODPUT[row][column],
         "goodput_simulated": goodput[row][column], "uptime_published": UPTIME[row][column],
         "uptime_simulated": uptime[row][column]}
        for row in ROWS for column, chips in enumerate(CHIPS)
    ]  # fmt: skip


def bandwidth_rows(found: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return a row for each cell of Table 13, published and by formula, Gbit/s."""
    return [
        {"step_seconds": site.step_seconds, "sites": site.sites, "kind": kind, "utilisation": utilisation,
         "published": published[column], "formula": found[site][kind][column], "covered": covered(kind, utilisation)}
        for site, kinds in BANDWIDTH.items() for kind, published in kinds.items()
        for column, utilisation in enumerate(UTILISATION)
    ]  # fmt: skip


def tables(goodput: Cells, uptime: Cells, found: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> list[Table]:
    """Return the tables for a terminal. Each cell is published / simulated."""
    return [
        _table("goodput, %, published / simulated", GOODPUT, goodput),
        _table("uptime, %, published / simulated", UPTIME, uptime),
        _bandwidth_table(found),
    ]


def _new(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


def _table(title: str, published: Cells, found: Cells) -> Table:
    table = _new(title, ["chips", *map(chips_in_words, CHIPS)])
    for row in ROWS:
        pairs = zip(published[row], found[row], strict=True)
        table.add_row(row.label, *(f"{paper:.0f} / {model:.1f}" for paper, model in pairs))
    return table


def _bandwidth_table(found: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> Table:
    table = _new("Gbit/s between sites, published / by formula", ["utilisation", *(f"{u:.0%}" for u in UTILISATION)])
    for site, kinds in BANDWIDTH.items():
        for kind, published in kinds.items():
            pairs = list(zip(published, found[site][kind], strict=True))
            cells = [f"{paper:g} / {f'{model:.2g}' if model < 10 else f'{model:.0f}'}" for paper, model in pairs]
            marked = [c if covered(kind, u) else f"{c} *" for c, u in zip(cells, UTILISATION, strict=True)]
            table.add_row(f"{site.step_seconds:g} s, {site.sites} sites, {kind}", *marked)
    table.caption = "* not covered by the formula: docs/results/simulation.md says why"
    table.caption_justify = "left"
    return table


_COLOURS = ("#7f7f7f", "#d62728", "#ff7f0e", "#2ca02c", "#1f77b4", "#9467bd")


def draw(path: Path, goodput: Cells, uptime: Cells, found: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> None:
    """Draw goodput, uptime and bandwidth. Marks are published, lines are simulated."""
    plt = pyplot()
    plt.style.use("default")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.8), dpi=110, layout="constrained")
    for axes, title, published, mine in ((left, "goodput", GOODPUT, goodput), (middle, "uptime", UPTIME, uptime)):
        for row, colour in zip(ROWS, _COLOURS, strict=True):
            axes.plot(CHIPS, mine[row], color=colour, linewidth=1.4, label=row.label)
            axes.plot(CHIPS, published[row], "o", color=colour, markersize=5)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CHIPS, [chips_in_words(chips) for chips in CHIPS])
        axes.minorticks_off()
        axes.set(title=f"{title}: {rms(mine, published):.1f} points rms", xlabel="chips", ylim=(0, 104))
        axes.set_ylabel(f"{title}, %")
    left.legend(frameon=False, fontsize="small", loc="lower left", title="marks: published\nlines: simulated")
    _draw_bandwidth(right, found)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, facecolor="white")
    plt.close(figure)


_KINDS = {"data-parallel": "#7f7f7f", "M = 8, bf16": "#1f77b4", "M = 8, int4": "#2ca02c"}


def _draw_bandwidth(axes: Any, found: Mapping[PaperSite, Mapping[str, Sequence[float]]]) -> None:
    x = [100 * u for u in UTILISATION]
    for site, style in zip(BANDWIDTH, ("-", "--", "-.", ":"), strict=True):
        for kind, colour in _KINDS.items():
            axes.plot(x, found[site][kind], style, color=colour, linewidth=1.2)
            for at, utilisation, gbits in zip(x, UTILISATION, BANDWIDTH[site][kind], strict=True):
                axes.plot(at, gbits, "o" if covered(kind, utilisation) else "x", color=colour, markersize=4)
        axes.plot(
            [], [], style, color="black", linewidth=1.2, label=f"{site.step_seconds:g} s step, {site.sites} sites"
        )
    for kind, height in zip(_KINDS, (70, 1.1, 0.28), strict=True):
        axes.text(101, height, kind.replace(", ", ",\n"), color=_KINDS[kind], fontsize="small", va="center")
    axes.set_yscale("log")
    axes.set_xticks(x)
    axes.set(title=f"bandwidth: {100 * bandwidth_rms(found):.1f} % rms (× not covered)", xlim=(48, 114),
             xlabel="compute utilisation, %", ylabel="Gbit/s between sites")  # fmt: skip
    axes.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(0.0, 0.54), ncols=2)
