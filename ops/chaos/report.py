"""The report of a storm: its figures as text and in report.json, and a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.machine import is_installed
from archipelago.broker.process import finite
from archipelago.ops.chaos.figures import Figures
from archipelago.ops.chaos.record import StormRecord, Timelines, timelines
from archipelago.ops.chaos.schedule import KINDS
from archipelago.ops.settings import pyplot
from archipelago.ops.watch.formatting import number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT, PICTURE = "report.json", "storm.png"
SHARE_LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip
STATE_COLOURS = {"training": "#4c9f70", "stopped": "#e0b040", "recovering": "#6fa8dc", "dead": "#c0504d"}
MARKS = {"kill": "x", "died": "x", "stop": "s", "disk": "d", "clock": "*"}
OTHER_MARK = "v"


def write(folder: Path, storm: StormRecord, found: Figures, command: str) -> None:
    """Write report.json and, if it can be drawn, storm.png into the folder. `command` is the one that ran the storm."""
    text = json.dumps(finite({"command": command, **found}), indent=2)
    (folder / REPORT).write_text(f"{text}\n", encoding="utf-8")
    if is_installed("matplotlib"):
        draw(folder / PICTURE, storm, found)


# -- figures as text --------------------------------------------------------------------------------------------------


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    ceiling = "" if found["ceiling"] > 0.999 else f" (at most {found['ceiling']:.1%}: an island is slow)"
    spent = found["shares"]
    rows = [
        ("goodput: merged inner steps over possible ones", f"{found['goodput']:.1%}{ceiling}"),
        ("goodput of the time in which islands trained", f"{found['goodput_of_live_time']:.1%}"),
        ("lost to restarts: dead, and starting again", f"{spent['dead'] + spent['recovering']:.1%}"),
        ("the islands' time", ", ".join(f"{label} {spent[name]:.1%}" for name, label in SHARE_LABELS.items())),
        ("uptime: at least one island trains", f"{found['uptime']:.1%}"),
        ("rounds, per minute", f"{found['rounds']:,}, {found['rounds_per_minute']:.0f}"),
        ("contributions per round", f"{found['contributions_per_round']:.2f}"),
        ("tokens trained", "{tokens_trained:,} = merged {tokens_merged:,} + refused {tokens_refused:,} + pending "
                           "{tokens_pending:,} + lost {tokens_lost:,}".format(**found)),
        ("from a kill to the first merged contribution", f"{number(found['rejoin_seconds_median'], 1)} s median, "
                                                         f"{number(found['rejoin_seconds_worst'], 1)} s worst"),
        ("device idle for over 10 ms, without waits for a core",
         "{over_10_ms:,} of {turns:,} turns, worst {worst_seconds:.3f} s".format(**found["stalls"])),
        ("bytes up, down", f"{size(found['bytes_up'])}, {size(found['bytes_down'])}"),
        _loss(found),
    ]  # fmt: skip
    if (control := found["control"]) is not None:
        name, loss = _loss(control)
        what = f"the same run without faults, after {control['tokens_merged']:,} merged tokens"
        rows.append((what, f"{name} {loss}, goodput {control['goodput']:.1%}"))
    if (baseline := found["baseline"]) is not None:
        columns = ("goodput {goodput:.1%}, uptime {uptime:.1%}, inner steps kept {steps_useful:,.0f}, lost "
                   "{steps_lost:,.0f}, longest time without a step {pause_seconds_worst:.1f} s")  # fmt: skip
        rows += [("islands, this storm", columns.format(**found)), ("data-parallel", columns.format(**baseline))]
    return rows


def _loss(found: Figures) -> tuple[str, str]:
    if math.isnan(found["held_out_loss"]):  # only the user's script can compute its model
        return "training loss in the last tenth of the rounds", number(found["training_loss"], 4)
    return f"held-out {found['unit']}", number(found["held_out_loss"], 4)


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(path: Path, storm: StormRecord, found: Figures) -> None:
    """Draw a lane for each process, with its states and faults."""
    plt = pyplot()
    states = timelines(storm)
    figure, axes = plt.subplots(figsize=(11, 0.45 * len(states) + 1.4), dpi=110, layout="constrained")
    _draw_timelines(axes, storm, states)
    axes.set(xlim=(0.0, storm.seconds), xlabel="seconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{found['islands']} islands, {found['step_seconds'] * 1e3:.0f} ms steps, {len(storm.faults)} faults in "
        f"{found['seconds']:.0f} s: goodput {found['goodput']:.1%}, {found['goodput_of_live_time']:.1%} of live time, "
        f"uptime {found['uptime']:.1%}"
    )
    figure.savefig(path)
    plt.close(figure)


def _draw_timelines(axes: Axes, storm: StormRecord, states: Timelines) -> None:
    from matplotlib.patches import Patch

    names = list(states)
    for row, name in enumerate(names):
        for span in states[name]:
            begin = span.begin - storm.begin
            axes.broken_barh([(begin, span.end - span.begin)], (row - 0.32, 0.64), color=STATE_COLOURS[span.state])
    for event in storm.events:
        if event.what in KINDS or event.what == "died":
            place = event.at - storm.begin, names.index(event.process) - 0.42
            mark = MARKS.get(event.what, OTHER_MARK)
            axes.plot(*place, marker=mark, color="black", markersize=5, clip_on=False)
            if event.what not in ("kill", "stop", "died"):
                axes.annotate(event.what, place, xytext=(4, -2), textcoords="offset points", fontsize=7)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.7))
    labels = {"training": "training (redis, merger: serving)"}
    handles = [Patch(color=colour, label=labels.get(state, state)) for state, colour in STATE_COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=8, loc="lower right",
                bbox_to_anchor=(1.0, 1.0), title="✕ kill  ■ stop  ▼ link  ◆ disk  ★ clock",
                title_fontsize=8)  # fmt: skip
