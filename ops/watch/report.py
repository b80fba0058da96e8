"""`archipelago report`: write a run's figures into one HTML file that needs no network. Also `report.json` of `up`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.broker.files import make_untracked, write_atomically
from archipelago.broker.observe.losses import loss_unit, rounded
from archipelago.broker.observe.merge_load import FEW_SYNCS_REMEDY
from archipelago.broker.process import finite, print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.dashboard.page_data import PAGE, chart_library, charts_of, plain, to_json
from archipelago.ops.run_source import RUNS, RunSource
from archipelago.ops.settings import say
from archipelago.ops.watch.formatting import seconds_text
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.state_line import state_line

SCRIPTS = ("charts.js", "page.js")
FILE, SUMMARY = "report.html", "report.json"
#: Pairs of tokens and bits per byte, in order.
Curve = Sequence[tuple[int, float]]
#: The figures that `report.json` has under the same names as the view.
_OF_VIEW = ("run", "unit", "parameters", "rounds", "held_out_first", "held_out_last", "pending", "tokens_merged")
#: An evaluation after fewer steps of a run is not that of its end.
EVALUATED_SHARE = 0.9


@dataclass(frozen=True)
class ReportOptions(RunSource):
    """Write a run's figures into one HTML file, from its Redis, from its folder, or from a bucket (s3://…)."""

    out: Path | None = None
    """The file to write. The default is report.html in the run's folder, or in runs/RUN, which git ignores."""
    json: bool = False
    """Print one JSON object: the name of the file, and the figures."""


def main(options: ReportOptions) -> int:
    library = chart_library()
    found, folder = everything(options)
    name = checked_name(str(found["page"]["run"]), "the run name")
    path = options.out or (folder or RUNS / name) / FILE
    text = html(found, library.read_text(encoding="utf-8"))
    make_untracked(path.parent)
    write_atomically(path, text)
    if options.json:
        print_json({"file": str(path), "page": found["page"], "about": found["about"]})
    else:
        say(f"report: {path} ({len(text.encode()) / 1e6:.1f} MB, opens without network)")
    return 0


def everything(options: ReportOptions) -> tuple[dict[str, Any], Path | None]:
    """Return the data of the page for the run that the options name, and its folder. Raise ArchipelagoError."""
    with options.open() as found:
        watch = Watcher(found.transport, address=found.address, folder=found.folder)
        return of_watch(watch, found.folder), found.folder


def of_watch(watch: Watcher, folder: Path | None = None) -> dict[str, Any]:
    """Return the run as Redis has it now. `folder` has the report.json of `up`; None if that is not known."""
    reading, report = watch.read(), (read(folder) if folder else None) or {}
    return {
        "state": state_line(reading),
        "page": plain(reading),
        "charts": charts_of(reading, watch.history) | {"one_process": report.get("curve_one_process", [])},
        "about": [*([result_in_words(report)] if report else []), syncs_in_words(reading.view)],
    }


def html(found: Mapping[str, Any], library: str) -> str:
    """Return one file with the page, its style, its scripts, the chart library and the data."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    policy = (
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">"
    )
    page = page.replace('<link rel="stylesheet" href="/page.css">', f"{policy}\n<style>\n{style}</style>")
    data = to_json(found).replace("<", "\\u003c")  # so that no text in it can end its element
    page = page.replace('id="data"></script>', f'id="data">{data}</script>')
    page = page.replace('<script src="/plotly.min.js"></script>', f"<script>{_escaped_script(library)}</script>")
    for name in SCRIPTS:
        script = (PAGE / name).read_text(encoding="utf-8")
        page = page.replace(f'<script src="/{name}"></script>', f"<script>\n{_escaped_script(script)}</script>")
    return page


def _escaped_script(script: str) -> str:
    """Escape a script so that it cannot end its element; within strings the meaning stays."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


# -- report.json of `up` ----------------------------------------------------------------------------------------------


def summary(view: RunView, one_process: Curve, seconds: float) -> dict[str, Any]:
    """Return report.json as plain data: how the run ended after that many seconds of training.

    `one_process` has the results of the comparison as evaluations have them; it is empty if none ran.
    """
    unit = loss_unit(view.manifest.corpus)
    return {
        **{name: getattr(view, name) for name in _OF_VIEW},
        "finished": not view.unfinished,
        "held_out_one_process": unit.from_evaluation(one_process[-1][1]) if one_process else math.nan,
        "held_out_step": view.evaluations[-1].step if view.evaluations else 0,
        "syncs_in_words": syncs_in_words(view),
        "steps": view.step,
        "islands": view.known,
        "seconds": seconds,
        "curve": [[e.tokens, unit.from_evaluation(e.bits_per_byte)] for e in view.evaluations],
        "curve_one_process": [[tokens, unit.from_evaluation(bits)] for tokens, bits in one_process],
    }


def result_in_words(report: Mapping[str, Any]) -> str:
    """Return how the run ended, as one sentence: the time it took, and its loss beside that of one process."""
    last, single = report["held_out_last"], report["held_out_one_process"]
    ended = "finished" if report["finished"] else "interrupted"
    took = f" in {seconds_text(report['seconds'])}" if report["seconds"] else ""
    islands = f"{report['islands']} {'island' if report['islands'] == 1 else 'islands'}"
    if math.isnan(last):
        why = "its held-out loss is not a number" if report["curve"] else "nothing was evaluated"
        return f"{ended}{took} with {islands}; {why}"
    side = "above" if last > single else "below"
    share = f"{abs((last - single) / single):.1%} " if single else ""
    gap = f", {share}{side} one process on as many tokens ({rounded(single)})"
    reached = f"{ended}{took}: {islands} reached {rounded(last)} {report['unit']} on held-out data"
    step = report.get("held_out_step", report["steps"])  # earlier versions did not write it
    if step < EVALUATED_SHARE * report["steps"]:
        reached += f" at step {step:,}, the last evaluation"
        reached += " (the logs of islands say why)" if report["finished"] else ""
    return reached if math.isnan(single) else reached + gap


def syncs_in_words(view: RunView) -> str:
    """Return how many syncs there were, or what is wrong if they were too few."""
    if fault := view.few_syncs:
        return f"{fault} {FEW_SYNCS_REMEDY}"
    count = round(view.syncs)
    return f"each fragment was synchronised {count:,} {'time' if count == 1 else 'times'}"


def write(folder: Path, report: Mapping[str, Any]) -> None:
    make_untracked(folder)
    write_atomically(folder / SUMMARY, json.dumps(finite(report), indent=2) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    """Return the report in the folder, with null as NaN, or None if there is none."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return {key: math.nan if value is None else value for key, value in found.items()}
