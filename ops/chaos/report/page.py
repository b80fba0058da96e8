"""The HTML page of a storm. It contains its pictures and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from archipelago.broker.process import finite
from archipelago.ops.chaos.report.figures import Figures, as_method
from archipelago.ops.chaos.report.goodput import Stalls
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.schedule import KINDS
from archipelago.ops.watch.formatting import number, size

REPORT, PICTURE, PAGE = "report.json", "storm.png", "storm.html"
SHARE_LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip
#: The columns of the comparison with the baseline.
COLUMNS = ("", "goodput", "uptime", "inner steps kept", "inner steps lost", "longest time without a step")


def write(folder: Path, storm: StormRecord, found: Figures, command: str) -> None:
    """Write report.json, storm.png and storm.html into the folder."""
    from archipelago.ops.chaos.report.plots import draw  # It imports matplotlib.

    data = {"command": command, **asdict(found)}
    (folder / REPORT).write_text(json.dumps(finite(data), indent=2) + "\n", encoding="utf-8")
    draw(folder / PICTURE, storm, found)
    (folder / PAGE).write_text(page(storm, found, (folder / PICTURE).read_bytes(), command), encoding="utf-8")


_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}img{max-width:100%}
table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}
td:first-child{white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#b00;font-weight:bold}.yes{color:#2a7a4a}
code{background:#f3f3f3;padding:.1em .3em}p.note{color:#555}"""


def page(storm: StormRecord, found: Figures, picture: bytes, command: str) -> str:
    """Return the page.

    Args:
        storm: What happened.
        found: Its figures.
        picture: The PNG image of the storm.
        command: The command that ran the storm.
    """
    image = base64.b64encode(picture).decode()
    verdict = "all invariants hold" if found.holds else "an invariant is broken"
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f"<title>A storm over {found.islands} islands</title><style>{_STYLE}</style></head><body>",
        f"<h1>A storm over {found.islands} islands: <span class={'yes' if found.holds else 'no'}>{verdict}</span></h1>",
        f"<p><code>{html.escape(command)}</code></p>",
        f'<img alt="timeline of the storm" src="data:image/png;base64,{image}">',
        "<h2>Figures</h2>", _table(headlines(found)), _note(storm, found),
        "<h2>Where the time went</h2>",
        _table([(label, f"{getattr(found.shares, name):.2%}") for name, label in SHARE_LABELS.items()]),
        *_baseline(storm, found),
        "<h2>Invariants</h2>", _checks(found),
        "<h2>Islands that were killed</h2>", _rejoins(found),
        "<h2>Faults</h2>", _faults(storm), "</body></html>", "",
    ])  # fmt: skip


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    ceiling = "" if found.ceiling > 0.999 else f" (at most {found.ceiling:.1%}: an island is slow)"
    rows = [
        ("goodput: merged inner steps over possible ones", f"{found.goodput:.1%}{ceiling}"),
        ("goodput of the time in which islands trained", f"{found.goodput_of_live_time:.1%}"),
        ("lost to restarts: dead, and starting again", f"{found.shares.dead + found.shares.recovering:.1%}"),
        ("uptime: at least one island trains", f"{found.uptime:.1%}"),
        ("rounds, per minute", f"{found.rounds:,}, {found.rounds_per_minute:.0f}"),
        ("contributions per round", f"{found.contributions_per_round:.2f}"),
        ("tokens trained", f"{found.tokens_trained:,} = merged {found.tokens_merged:,} + refused "
                           f"{found.tokens_refused:,} + pending {found.tokens_pending:,} + lost {found.tokens_lost:,}"),
        ("from a kill to the first merged contribution", f"{number(found.rejoin_seconds_median, 1)} s median, "
                                                         f"{number(found.rejoin_seconds_worst, 1)} s worst"),
        ("device idle for over 10 ms", _idle(found.stalls)),
        ("bytes up, down", f"{size(found.bytes_up)}, {size(found.bytes_down)}"),
        _loss_row(found),
    ]  # fmt: skip
    return [*rows, *(_control_rows(found.control) if found.control else [])]


def _loss_row(found: Figures) -> tuple[str, str]:
    if math.isnan(found.held_out_loss):  # only the user's script can compute its model
        return "training loss in the last tenth of the rounds", number(found.training_loss, 4)
    return f"held-out {found.unit}", number(found.held_out_loss, 4)


def _control_rows(control: Figures) -> list[tuple[str, str]]:
    name = f"the same run without faults, after {control.tokens_merged:,} merged tokens"
    return [
        (name, f"{_control_loss(control)}, goodput {control.goodput:.1%}"),
        ("its device idle for over 10 ms", _idle(control.stalls)),
    ]


def _control_loss(control: Figures) -> str:
    if math.isnan(control.held_out_loss):
        return f"training loss {number(control.training_loss, 4)}"
    return f"{number(control.held_out_loss, 4)} {control.unit}"


def _idle(stalls: Stalls) -> str:
    return (
        f"{stalls.over_10_ms:,} of {stalls.turns:,}, worst {stalls.worst_seconds * 1e3:.0f} ms; without waits for a "
        f"core {stalls.net_over_10_ms:,}, worst {stalls.net_worst_seconds * 1e3:.0f} ms"
    )


def _note(storm: StormRecord, found: Figures) -> str:
    if any(storm.step_seconds.values()):
        text = (
            f"Inner steps had a minimum duration of {found.step_seconds * 1e3:g} ms, so that islands do not compete "
            "for this machine's cores. The time that a step takes beyond it counts as idle."
        )
    else:
        text = (
            f"Inner steps had no minimum duration; their median, {found.step_seconds * 1e3:.1f} ms, is used as the "
            "step duration. The islands compete for this machine's cores, so goodput says little. Set --step-seconds."
        )
    if found.standbys:
        text += (
            f" Standby processes: {found.standbys}. They had loaded everything and became islands that were started "
            f"again ({found.standbys_used} times). Their own time is not allocated, but their cost to islands counts."
        )
    return f'<p class="note">{text}</p>'


def comparison(storm: StormRecord, found: Figures) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for the islands and one for the baseline; nothing if the baseline did not run."""
    if found.baseline is None:
        return []
    methods = {"islands, this storm": as_method(storm, found), "data-parallel": found.baseline}
    return [
        (
            name,
            f"{one.goodput:.1%}",
            f"{one.uptime:.1%}",
            f"{one.steps_useful:,.0f}",
            f"{one.steps_lost:,.0f}",
            f"{one.pause_seconds_worst:.1f} s",
        )
        for name, one in methods.items()
    ]


def _baseline(storm: StormRecord, found: Figures) -> list[str]:
    if not (rows := comparison(storm, found)):
        return []
    text = (
        "The baseline ran after the islands, in real processes under the same schedule. A step needs the gradients of "
        "all workers. After a death or a lost connection, all load the last checkpoint. The baseline has it easier "
        "than the islands: its hub never fails, learns of a death at once, and forms the group again without a delay. "
        "Faults of Redis, the merger, disks and clocks do not affect it."
    )
    return [
        "<h2>Data-parallel training under the same faults</h2>",
        _table(rows, COLUMNS),
        f'<p class="note">{text}</p>',
    ]


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> str:
    """Return a table whose first column is text and whose others are numbers."""

    def line(tag: str, name: str, *values: str) -> str:
        cells = "".join(f"<{tag} class=n>{html.escape(value)}</{tag}>" for value in values)
        return f"<tr><{tag}>{html.escape(name)}</{tag}>{cells}</tr>"

    head = line("th", *columns) if columns else ""
    return f"<table>{head}{''.join(line('td', *row) for row in rows)}</table>"


def _checks(found: Figures) -> str:
    rows = (
        f"<tr><td class={'yes' if check.holds else 'no'}>{'holds' if check.holds else 'BROKEN'}</td>"
        f"<td>{html.escape(check.name)}</td><td>{html.escape(check.found)}</td></tr>"
        for check in found.checks
    )
    return f"<table>{''.join(rows)}</table>"


def _rejoins(found: Figures) -> str:
    columns = ("island", "killed at", "away", "until it trains", "until it is merged", "total")
    return _table([
        (r.island, *map(_seconds, (r.at, r.away_seconds, r.start_seconds, r.merge_seconds, r.total_seconds)))
        for r in found.rejoins
    ], columns)  # fmt: skip


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f} s"


def _faults(storm: StormRecord) -> str:
    rows = (
        f"<tr><td class=n>{f.at:.1f} s</td><td>{html.escape(f.target)}</td><td>{html.escape(f.kind)}</td>"
        f"<td class=n>{f.seconds:.1f} s</td><td>{html.escape(KINDS[f.kind])}</td></tr>"
        for f in storm.faults
    )
    return f"<table>{''.join(rows)}</table>"
