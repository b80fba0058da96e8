"""The pictures of a storm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.ops.chaos.report.figures import Figures
from archipelago.ops.chaos.report.page import SHARE_LABELS
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.report.timelines import Timelines, timelines
from archipelago.ops.chaos.schedule import KINDS
from archipelago.ops.plots import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_COLOURS = {"training": "#4c9f70", "stopped": "#e0b040", "recovering": "#6fa8dc", "dead": "#c0504d"}
STATE_LABELS = {"training": "training (redis, merger: serving)"}
MARKS = {"kill": "x", "died": "x", "stop": "s", "disk": "d", "clock": "*"}
OTHER_MARK = "v"
SHARE_COLOURS = {**{name: STATE_COLOURS[name] for name in ("stopped", "recovering", "dead")},
                 "useful": STATE_COLOURS["training"], "lost": "#8064a2", "idle": "#b8b8b8"}  # fmt: skip


def draw(path: Path, storm: StormRecord, found: Figures) -> None:
    """Draw timelines and faults, rounds per minute, staleness and shares of time."""
    plt = pyplot()
    states = timelines(storm)
    heights = [0.45 * len(states) + 0.6, 1.5, 1.6]
    figure, axes = plt.subplot_mosaic(
        [["states", "states"], ["pace", "pace"], ["stale", "shares"]],
        figsize=(11, sum(heights) + 1.2), dpi=110, layout="constrained", height_ratios=heights,
    )  # fmt: skip
    _draw_timelines(axes["states"], storm, states)
    _draw_round_rate(axes["pace"], storm)
    _draw_staleness(axes["stale"], found)
    _draw_shares(axes["shares"], found)
    for name in ("states", "pace"):
        axes[name].set_xlim(0.0, storm.seconds)
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{found.islands} islands, {found.step_seconds * 1e3:.0f} ms steps, {len(storm.faults)} faults in "
        f"{found.seconds:.0f} s: goodput {found.goodput:.1%}, {found.goodput_of_live_time:.1%} of live time, "
        f"uptime {found.uptime:.1%}"
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
    _mark_faults(axes, storm, names)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.7))
    handles = [Patch(color=colour, label=STATE_LABELS.get(state, state)) for state, colour in STATE_COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=8, loc="lower right",
                bbox_to_anchor=(1.0, 1.0), title="✕ kill  ■ stop  ▼ link  ◆ disk  ★ clock",
                title_fontsize=8)  # fmt: skip


def _mark_faults(axes: Axes, storm: StormRecord, names: list[str]) -> None:
    for event in storm.events:
        if event.what not in KINDS and event.what != "died":
            continue
        place = event.at - storm.begin, names.index(event.process) - 0.42
        mark = MARKS.get(event.what, OTHER_MARK)
        axes.plot(*place, marker=mark, color="black", markersize=5, clip_on=False)
        if event.what not in ("kill", "stop", "died"):
            axes.annotate(event.what, place, xytext=(4, -2), textcoords="offset points", fontsize=7)


def _draw_round_rate(axes: Axes, storm: StormRecord, bin_seconds: float = 2.0) -> None:
    times = [at - storm.begin for at in storm.closed_at.values() if storm.begin <= at < storm.end]
    bins = max(1, round(storm.seconds / bin_seconds))
    width = storm.seconds / bins
    axes.hist(times, bins=bins, range=(0.0, storm.seconds), weights=[60.0 / width] * len(times), color="#4472c4")
    axes.set(xlabel="seconds", ylabel="rounds per minute")


def _draw_staleness(axes: Axes, found: Figures) -> None:
    axes.bar([str(lag) for lag in found.staleness], list(found.staleness.values()), color="#4472c4")
    axes.set(xlabel="staleness when merged", ylabel="contributions")


def _draw_shares(axes: Axes, found: Figures) -> None:
    left = 0.0
    for name, label in SHARE_LABELS.items():
        share = getattr(found.shares, name)
        axes.barh(0, max(0.0, share), left=left, color=SHARE_COLOURS[name], label=f"{label} {share:.1%}")
        left += max(0.0, share)
    axes.set(xlim=(0, 1), ylim=(-0.5, 3.0), yticks=[], xlabel="share of the islands' allocated time")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
