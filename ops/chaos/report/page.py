"""The HTML page of a storm. It contains its pictures and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path

from archipelago.broker.process import finite
from archipelago.ops.chaos.lockstep.data_parallel import TIMEOUT_SECONDS
from archipelago.ops.chaos.lockstep.estimates import ELASTIC_PAUSE_SECONDS
from archipelago.ops.chaos.report.figures import Figures, as_data
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.report.tables import COLUMNS, SHARE_LABELS, comparison, headlines
from archipelago.ops.chaos.schedule import KINDS

REPORT, PICTURE, PAGE = "report.json", "storm.png", "storm.html"
BASELINES_PICTURE = "baselines.png"


def write(folder: Path, storm: StormRecord, found: Figures, command: str) -> None:
    """Write report.json, storm.png, storm.html and, if baselines ran, baselines.png into the folder."""
    from archipelago.ops.chaos.report.plots import draw, draw_baselines  # It imports matplotlib.

    data = {"command": command, **as_data(found)}
    (folder / REPORT).write_text(json.dumps(finite(data), indent=2) + "\n", encoding="utf-8")
    draw(folder / PICTURE, storm, found)
    pictures = [(folder / PICTURE).read_bytes()]
    if found.baselines:
        draw_baselines(folder / BASELINES_PICTURE, storm, found)
        pictures.append((folder / BASELINES_PICTURE).read_bytes())
    (folder / PAGE).write_text(page(storm, found, pictures, command), encoding="utf-8")


_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}img{max-width:100%}
table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}
td:first-child{white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#b00;font-weight:bold}.yes{color:#2a7a4a}
code{background:#f3f3f3;padding:.1em .3em}p.note{color:#555}"""


def page(storm: StormRecord, found: Figures, pictures: Sequence[bytes], command: str) -> str:
    """Return the page.

    Args:
        storm: What happened.
        found: Its figures.
        pictures: PNG images: that of the storm and, if baselines ran, that of the baselines.
        command: The command that ran the storm.
    """
    images = [base64.b64encode(picture).decode() for picture in pictures]
    verdict = "all invariants hold" if found.holds else "an invariant is broken"
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f"<title>A storm over {found.islands} islands</title><style>{_STYLE}</style></head><body>",
        f"<h1>A storm over {found.islands} islands: <span class={'yes' if found.holds else 'no'}>{verdict}</span></h1>",
        f"<p><code>{html.escape(command)}</code></p>",
        f'<img alt="timeline of the storm" src="data:image/png;base64,{images[0]}">',
        "<h2>Figures</h2>", _table(headlines(found)), _note(storm, found),
        "<h2>Where the time went</h2>",
        _table([(label, f"{getattr(found.shares, name):.2%}") for name, label in SHARE_LABELS.items()]),
        "<h2>Other methods under the same failures</h2>", *([
            f'<img alt="steps in the parameters over time" src="data:image/png;base64,{image}">' for image in images[1:]
        ]), _baselines(storm, found) if found.baselines else _estimates(found),
        "<h2>Invariants</h2>", _checks(found),
        "<h2>Islands that were killed</h2>", _rejoins(found),
        "<h2>Faults</h2>", _faults(storm), "</body></html>", "",
    ])  # fmt: skip


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


def _baselines(storm: StormRecord, found: Figures) -> str:
    head = "".join(f"<th class=n>{html.escape(name)}</th>" for name in COLUMNS)
    rows = (
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td class=n>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in comparison(storm, found)
    )
    text = (
        "The methods ran one after the other, in real processes under the same schedule. The baselines have it easier: "
        "their exchange goes through this machine's memory, and their coordinator never fails and learns of a death at "
        f"once. The elastic one drops a silent worker after {TIMEOUT_SECONDS:g} s. Faults of Redis, the merger, disks "
        "and clocks, and slow links, do not affect them."
    )
    return f'<table><tr>{head}</tr>{"".join(rows)}</table><p class="note">{text}</p>'


def _estimates(found: Figures) -> str:
    if found.estimates is None:
        return ""
    rows = [
        ("this run, measured", found.goodput),
        ("elastic data-parallel, computed", found.estimates.data_parallel_elastic),
        ("data-parallel without elasticity, computed", found.estimates.data_parallel),
        ("synchronous DiLoCo, computed", found.estimates.diloco),
    ]
    text = (
        "This goodput is computed from the islands' timelines above, not measured. The estimates assume that "
        "synchronisation takes no time, that Redis and the merger never fail, and that each change of an elastic "
        f"group's size costs {ELASTIC_PAUSE_SECONDS:g} s."
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


def _rejoins(found: Figures) -> str:
    names = ("island", "killed at", "away", "until it trains", "until it is merged", "total")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    rows = (
        f"<tr><td>{html.escape(r.island)}</td>"
        + "".join(f"<td class=n>{_seconds(s)}</td>" for s in
                  (r.at, r.away_seconds, r.start_seconds, r.merge_seconds, r.total_seconds))
        + "</tr>"
        for r in found.rejoins
    )  # fmt: skip
    return f"<table>{head}{''.join(rows)}</table>"


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f} s"


def _faults(storm: StormRecord) -> str:
    rows = (
        f"<tr><td class=n>{f.at:.1f} s</td><td>{html.escape(f.target)}</td><td>{html.escape(f.kind)}</td>"
        f"<td class=n>{f.seconds:.1f} s</td><td>{html.escape(KINDS[f.kind])}</td></tr>"
        for f in storm.faults
    )
    return f"<table>{''.join(rows)}</table>"
