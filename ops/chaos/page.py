"""A storm's figures as one picture and one page that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.process import finite
from archipelago.ops.chaos.baselines import ELASTIC_PAUSE_SECONDS, Ran
from archipelago.ops.chaos.rendezvous import TIMEOUT_SECONDS
from archipelago.ops.chaos.report import OURS, Control, Figures, Spans, Storm, Waits, as_data, as_ran, lanes
from archipelago.ops.chaos.schedule import KINDS
from archipelago.ops.watch.formatting import number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT, PICTURE, PAGE = "report.json", "storm.png", "storm.html"
BASELINES_PICTURE = "baselines.png"
COLOURS = {"training": "#4c9f70", "stopped": "#e0b040", "recovering": "#6fa8dc", "dead": "#c0504d"}
MARKS = {"kill": "x", "died": "x", "stop": "s", "disk": "d", "clock": "*"}
OTHER_MARK = "v"
LEGEND = {"training": "training (redis, merger: serving)"}
LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip
SHARE_COLOURS = {**{name: COLOURS[name] for name in ("stopped", "recovering", "dead")},
                 "useful": COLOURS["training"], "lost": "#8064a2", "idle": "#b8b8b8"}  # fmt: skip
WAY_COLOURS = {OURS: COLOURS["training"], "synchronous DiLoCo": "#4472c4", "elastic data-parallel": "#e0b040",
               "data-parallel": "#c0504d"}  # fmt: skip
"""of a way to train, in the order in which they are shown"""


def write(folder: Path, storm: Storm, found: Figures, command: str) -> None:
    """report.json, storm.png, storm.html and, where baselines ran, baselines.png into the folder."""
    data = {"command": command, **as_data(found)}
    (folder / REPORT).write_text(json.dumps(finite(data), indent=2) + "\n", encoding="utf-8")
    draw(folder / PICTURE, storm, found)
    pictures = [(folder / PICTURE).read_bytes()]
    if found.baselines:
        draw_baselines(folder / BASELINES_PICTURE, storm, found)
        pictures.append((folder / BASELINES_PICTURE).read_bytes())
    (folder / PAGE).write_text(page(storm, found, pictures, command), encoding="utf-8")


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(path: Path, storm: Storm, found: Figures) -> None:
    """A lane for each process with its faults; size, live and taking part; rounds a minute; staleness; shares."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    states = lanes(storm)
    heights = [0.45 * len(states) + 0.6, 1.5, 1.5, 1.6]
    figure, axes = plt.subplot_mosaic(
        [["lanes", "lanes"], ["size", "size"], ["pace", "pace"], ["stale", "shares"]],
        figsize=(11, sum(heights) + 1.2), dpi=110, layout="constrained", height_ratios=heights,
    )  # fmt: skip
    _draw_lanes(axes["lanes"], storm, states)
    _draw_size(axes["size"], found)
    _draw_pace(axes["pace"], storm)
    _draw_staleness(axes["stale"], found)
    _draw_shares(axes["shares"], found)
    for name in ("lanes", "size", "pace"):
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


def _draw_lanes(axes: Axes, storm: Storm, states: Mapping[str, Spans]) -> None:
    names = list(states)
    for row, name in enumerate(names):
        for span in states[name]:
            begin = span.begin - storm.begin
            axes.broken_barh([(begin, span.end - span.begin)], (row - 0.32, 0.64), color=COLOURS[span.state])
        axes.vlines(_adoptions(storm, name), row - 0.32, row - 0.12, color="white", linewidth=0.5, alpha=0.8)
    for happening in storm.happenings:
        if happening.what in KINDS or happening.what == "died":
            axes.plot(
                happening.at - storm.begin, names.index(happening.process) - 0.42,
                marker=MARKS.get(happening.what, OTHER_MARK), color="black", markersize=5, clip_on=False,
            )  # fmt: skip
            if happening.what in KINDS and happening.what not in ("kill", "stop"):
                axes.annotate(happening.what, (happening.at - storm.begin, names.index(happening.process) - 0.42),
                              xytext=(4, -2), textcoords="offset points", fontsize=7)  # fmt: skip
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.7))
    handles = [_patch(colour, LEGEND.get(state, state)) for state, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=8, loc="lower right",
                bbox_to_anchor=(1.0, 1.0), title="✕ kill  ■ stop  ▼ link  ◆ disk  ★ clock   white: a snapshot adopted",
                title_fontsize=8)  # fmt: skip


def _adoptions(storm: Storm, island: str) -> list[float]:
    """Seconds of the window at which it adopted something, at most a few hundred of them."""
    known: dict[str, int] = {}
    out = []
    for turn in storm.turns.get(island, ()):
        if turn.versions > known.get(turn.who, turn.versions):
            out.append(turn.at - storm.begin)
        known[turn.who] = turn.versions
    return out[:: max(1, len(out) // 400)]


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _draw_size(axes: Axes, found: Figures) -> None:
    seconds, islands, live, part = zip(*found.size_live_part, strict=True)
    axes.step(seconds, islands, where="post", color="#888888", label="islands", linewidth=1)
    axes.step(seconds, live, where="post", color="#4472c4", label="live: heard of within 10 s")
    axes.step(seconds, part, where="post", color=COLOURS["training"], label="taking part: merged within 5 s")
    axes.set(ylabel="islands", ylim=(0, max(islands) + 0.6), yticks=range(max(islands) + 1))
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left")


def _draw_pace(axes: Axes, storm: Storm, bin_seconds: float = 2.0) -> None:
    times = [at - storm.begin for at in storm.seen.values() if storm.begin <= at < storm.end]
    bins = max(1, round(storm.seconds / bin_seconds))
    width = storm.seconds / bins
    axes.hist(times, bins=bins, range=(0.0, storm.seconds), weights=[60.0 / width] * len(times), color="#4472c4")
    axes.set(xlabel="seconds", ylabel="rounds a minute")


def _draw_staleness(axes: Axes, found: Figures) -> None:
    axes.bar([str(lag) for lag in found.staleness], list(found.staleness.values()), color="#4472c4")
    axes.set(xlabel="staleness when merged", ylabel="contributions")


def _draw_shares(axes: Axes, found: Figures) -> None:
    left = 0.0
    for name, label in LABELS.items():
        share = getattr(found.shares, name)
        axes.barh(0, max(0.0, share), left=left, color=SHARE_COLOURS[name], label=f"{label} {share:.1%}")
        left += max(0.0, share)
    axes.set(xlim=(0, 1), ylim=(-0.5, 3.0), yticks=[], xlabel="share of the islands' allocated time")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def draw_baselines(path: Path, storm: Storm, found: Figures) -> None:
    """Steps in the parameters over time, a line each way to train; faults of workers as marks below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5), dpi=110, layout="constrained")
    possible = storm.seconds / storm.shortest_step_seconds * len(storm.islands)
    axes.plot([0, storm.seconds], [0, possible], color="#b8b8b8", linewidth=1, linestyle="--", label="without faults")
    for one in ways(storm, found):
        seconds, steps = zip(*one.curve, strict=True)
        axes.plot(seconds, steps, color=WAY_COLOURS[one.way], label=f"{one.way}: {one.goodput:.1%}", linewidth=1.6)
    for row, name in enumerate(storm.islands):
        low = -0.05 * possible * (row + 1)
        axes.annotate(name, (0, low), xytext=(-6, 0), textcoords="offset points", ha="right", va="center", fontsize=8)
        for fault in (f for f in storm.faults if f.target == name):
            axes.plot([fault.at, fault.until], [low, low], color="#888888", linewidth=3, solid_capstyle="butt")
            axes.plot(fault.at, low, marker=MARKS.get(fault.kind, OTHER_MARK), color="black", markersize=5)
    bottom = -0.05 * possible * (len(storm.islands) + 1)
    axes.set(xlim=(0, storm.seconds), ylim=(bottom, 1.02 * possible), xlabel="seconds",
             ylabel="inner steps in the parameters",
             title="goodput under the same faults (✕ kill  ■ stop  ▼ link, grey until it is over)")  # fmt: skip
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= possible])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)
    plt.close(figure)


# -- the page ---------------------------------------------------------------------------------------------------------

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}img{max-width:100%}
table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}
td:first-child{white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#b00;font-weight:bold}.yes{color:#2a7a4a}
code{background:#f3f3f3;padding:.1em .3em}p.note{color:#555}"""


def page(storm: Storm, found: Figures, pictures: Sequence[bytes], command: str) -> str:
    """The page: the storm's picture and, where there is one, that of the baselines are in it."""
    images = [base64.b64encode(picture).decode() for picture in pictures]
    verdict = "every invariant held" if found.holds else "an invariant broke"
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f"<title>A storm over {found.islands} islands</title><style>{_STYLE}</style></head><body>",
        f"<h1>A storm over {found.islands} islands: <span class={'yes' if found.holds else 'no'}>{verdict}</span></h1>",
        f"<p><code>{html.escape(command)}</code></p>",
        f'<img alt="timeline of the storm" src="data:image/png;base64,{images[0]}">',
        "<h2>Figures</h2>", _table(headlines(found)), _note(storm, found),
        "<h2>Where the time went</h2>",
        _table([(label, f"{getattr(found.shares, name):.2%}") for name, label in LABELS.items()]),
        "<h2>Others under the same failures</h2>", *([
            f'<img alt="steps in the parameters over time" src="data:image/png;base64,{image}">' for image in images[1:]
        ]), _ran(storm, found) if found.baselines else _computed(found),
        "<h2>What must hold</h2>", _checks(found),
        "<h2>Islands that were killed</h2>", _returns(found),
        "<h2>Faults</h2>", _faults(storm), "</body></html>", "",
    ])  # fmt: skip


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Name and value of each figure, for people."""
    stalls = found.stalls
    ceiling = "" if found.ceiling > 0.999 else f" (ceiling {found.ceiling:.1%}: an island is slow)"
    rows = [
        ("goodput: merged inner steps of the possible ones", f"{found.goodput:.1%}{ceiling}"),
        ("the same, of what the islands' live time allows", f"{found.goodput_of_live_time:.1%}"),
        ("lost to restarts: dead, and starting again", f"{found.shares.dead + found.shares.recovering:.1%}"),
        ("uptime: some island trains", f"{found.uptime:.1%}"),
        ("rounds, a minute", f"{found.rounds:,}, {found.rounds_per_minute:.0f}"),
        ("contributions a round", f"{found.contributions_per_round:.2f}"),
        ("tokens trained / merged / refused / lost", f"{found.tokens_trained:,} / {found.tokens_merged:,} / "
                                                     f"{found.tokens_refused:,} / {found.tokens_lost:,}"),
        ("from a kill to the first merged contribution", f"{number(found.return_seconds_median, 1)} s median, "
                                                         f"{number(found.return_seconds_worst, 1)} s worst"),
        ("device idle over 10 ms", _waits(stalls.idle, stalls.turns)),
        ("training thread busy between two steps over 10 ms", _waits(stalls.between, stalls.turns)),
        ("bytes up, down", f"{size(found.bytes_up)}, {size(found.bytes_down)}"),
        ("held-out bits per byte", number(found.bits_per_byte, 4)),
    ]  # fmt: skip
    return [*rows, *(_control_rows(found.control) if found.control else [])]


def _control_rows(control: Control) -> list[tuple[str, str]]:
    stalls = control.stalls
    return [
        (f"the same run without faults, after {control.tokens_merged:,} merged tokens",
                                                                 f"{number(control.bits_per_byte, 4)} bits per byte, "
                                                                 f"goodput {control.goodput:.1%}"),
        ("its device idle over 10 ms", _waits(stalls.idle, stalls.turns)),
        ("its training thread busy between two steps over 10 ms", _waits(stalls.between, stalls.turns)),
    ]  # fmt: skip


def _waits(waits: Waits, turns: int) -> str:
    return (
        f"{waits.over_10_ms:,} of {turns:,}, worst {waits.worst_seconds * 1e3:.0f} ms; less waits for a core "
        f"{waits.net_over_10_ms:,}, worst {waits.net_worst_seconds * 1e3:.0f} ms"
    )


def _note(storm: Storm, found: Figures) -> str:
    if any(storm.step_seconds.values()):
        text = (
            f"Inner steps were given a minimum duration of {found.step_seconds * 1e3:g} ms, so that the islands do not "
            "compete for this machine's cores. A step that takes longer counts as idle time."
        )
    else:
        text = (
            f"Inner steps were as fast as this machine made them; their median, {found.step_seconds * 1e3:.1f} ms, "
            "stands for a step's duration. The islands compete for its cores, so goodput says little: set "
            "--step-seconds."
        )
    if found.standbys:
        text += (
            f" {found.standbys} standby{'s' * (found.standbys > 1)} waited beside the islands, with everything loaded, "
            f"to become whichever was started again, as {found.stood_in} did. Their time is not allocated; what they "
            "cost the islands counts."
        )
    return f'<p class="note">{text}</p>'


def ways(storm: Storm, found: Figures) -> list[Ran]:
    """Ours and those that ran under the same faults, in the order in which they are shown."""
    return sorted([as_ran(storm, found), *found.baselines], key=lambda one: list(WAY_COLOURS).index(one.way))


COLUMNS = (
    "", "goodput", "tokens in the parameters", "held-out bits per byte", "from a kill to its next step",
    "longest time without a step",
)  # fmt: skip


def compared(storm: Storm, found: Figures) -> list[tuple[str, ...]]:
    """A row for each way to train: COLUMNS."""
    return [
        (
            f"{one.way}, this run" if one.way == OURS else one.way,
            f"{one.goodput:.1%}",
            f"{one.tokens:,}",
            number(one.bits_per_byte, 4),
            f"{number(one.return_seconds_median, 1)} s",
            f"{number(one.pause_seconds_worst, 1)} s",
        )
        for one in ways(storm, found)
    ]


def _ran(storm: Storm, found: Figures) -> str:
    head = "".join(f"<th class=n>{html.escape(name)}</th>" for name in COLUMNS)
    rows = (
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td class=n>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in compared(storm, found)
    )
    text = (
        "Run one after the other, in real processes under the same schedule. The others are spared much: their "
        "exchange goes through this machine's memory, whoever coordinates them never fails and hears of a death at "
        f"once, who is silent is given up after {TIMEOUT_SECONDS:g} s by the elastic one, and no fault of the Redis, "
        "the merger, a disk, a clock or a slow link is theirs."
    )
    return f'<table><tr>{head}</tr>{"".join(rows)}</table><p class="note">{text}</p>'


def _computed(found: Figures) -> str:
    if found.computed is None:
        return ""
    rows = [
        ("this run, measured", found.goodput),
        ("elastic data-parallel, computed", found.computed.data_parallel_elastic),
        ("data-parallel without elasticity, computed", found.computed.data_parallel),
        ("synchronous DiLoCo, computed", found.computed.diloco),
    ]
    text = (
        "Goodput that is computed from the islands' lanes above, not run: synchronising takes no time there, the Redis "
        f"and the merger never fail, and each change of an elastic run's size costs {ELASTIC_PAUSE_SECONDS:g} s."
    )
    return _table([(name, f"{goodput:.1%}") for name, goodput in rows]) + f'<p class="note">{text}</p>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{html.escape(name)}</td><td class=n>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _checks(found: Figures) -> str:
    rows = (
        f"<tr><td class={'yes' if check.holds else 'no'}>{'holds' if check.holds else 'BROKEN'}</td>"
        f"<td>{html.escape(check.name)}</td><td>{html.escape(check.found)}</td></tr>"
        for check in found.checks
    )
    return f"<table>{''.join(rows)}</table>"


def _returns(found: Figures) -> str:
    names = ("island", "at", "away", "until it trains", "until it is merged", "in all")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    rows = (
        f"<tr><td>{html.escape(r.island)}</td>"
        + "".join(f"<td class=n>{_seconds(s)}</td>" for s in
                  (r.at, r.away_seconds, r.start_seconds, r.merge_seconds, r.total_seconds))
        + "</tr>"
        for r in found.returns
    )  # fmt: skip
    return f"<table>{head}{''.join(rows)}</table>"


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f} s"


def _faults(storm: Storm) -> str:
    rows = (
        f"<tr><td class=n>{f.at:.1f} s</td><td>{html.escape(f.target)}</td><td>{html.escape(f.kind)}</td>"
        f"<td class=n>{f.seconds:.1f} s</td><td>{html.escape(KINDS[f.kind])}</td></tr>"
        for f in storm.faults
    )
    return f"<table>{''.join(rows)}</table>"
