"""`archipelago report`: write a run's figures into one HTML file that needs no network."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import make_untracked, write_atomically
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, TapeEntry
from archipelago.broker.process import print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.dashboard.page_data import PAGE, chart_library, charts_of, page_of, to_json
from archipelago.ops.run_source import RUNS, open_run
from archipelago.ops.settings import flags, say
from archipelago.ops.watch import run_summary
from archipelago.ops.watch.formatting import ago, date, number
from archipelago.ops.watch.run_summary import syncs_in_words
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.state_line import state_line
from archipelago.ops.watch.watcher import TAPE_MOST, Watcher

SCRIPTS = ("charts.js", "page.js")
FILE = "report.html"


@dataclass(frozen=True)
class ReportOptions:
    """Write a run's figures into one HTML file, from its Redis, or from its folder if the Redis is gone."""

    target: Annotated[str | None, tyro.conf.Positional] = None
    """The URL of a Redis, a join file, or the name or folder of a run of `up`, also in a bucket (s3://…). The default
    is $ARCHIPELAGO_URL.
    """
    run: str | None = None
    """The name of the run at that URL. The default is $ARCHIPELAGO_RUN, or the only run there."""
    out: Path | None = None
    """The file to write. The default is FOLDER/RUN/report.html, in a folder that git ignores."""
    folder: Path = RUNS
    """The folder where runs keep their logs, data and reports."""
    json: bool = False
    """Print one JSON object: the name of the file, and the figures."""


def main(options: ReportOptions) -> int:
    """Write the file."""
    library = chart_library()
    found, folder = everything(options)
    name = checked_name(str(found["page"]["run"]["run"]), "the run name")
    path = options.out or (folder or options.folder / name) / FILE
    text = html(found, library.read_text(encoding="utf-8"))
    try:
        make_untracked(path.parent)
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror})", "Name another file with --out.", code="report.unwritable"
        ) from None
    if options.json:
        print_json({"file": str(path), "page": found["page"], "about": found["about"]})
    else:
        say(f"report: {path} ({len(text.encode()) / 1e6:.1f} MB, opens without network)")
    return 0


def everything(options: ReportOptions) -> tuple[dict[str, Any], Path | None]:
    """Return the data of the page for the run that the options name, and its folder. Raise ArchipelagoError."""
    with open_run(options.target, options.run, options.folder, starts_redis=True) as found:
        return of_watch(Watcher(found.transport), found.folder), found.folder


def of_watch(watch: Watcher, folder: Path | None = None) -> dict[str, Any]:
    """Return the run as Redis has it now. `folder` has the report.json of `up`; None if that is not known."""
    reading, history, manifest = watch.read(), watch.history, watch.manifest
    tape, left = watch.transport.reader.tape(TAPE_MOST), (run_summary.read(folder) if folder else None) or {}
    return {
        "state": asdict(state_line(reading)),
        "page": page_of(reading, manifest),
        "charts": charts_of(reading, history, manifest) | {"one_process": left.get("curve_one_process", [])},
        "about": provenance(manifest, reading.view, tape, left),
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


def provenance(
    manifest: Manifest, view: RunView, tape: Sequence[TapeEntry], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `sections`, facts in words by section and name, and `commands`, a shell script that repeats the run.

    `tape` has all rounds that are still known, and `report` is the run's report.json, empty if there is none.
    """
    islands = view.known or int(report.get("islands") or 0)
    sections = {
        "Run": {"config digest": manifest.config.digest(), **_times(tape, view.evaluations, report)},
        "Result": {**_baseline(report), "syncs": syncs_in_words(view)},
        "Machines": _machines(view),
        "Changed while it ran": {f"round {e.round}": e.steered for e in tape if e.steered},
    }
    return {
        "sections": {title: facts for title, facts in sections.items() if facts},
        "commands": commands(manifest, islands, [e for e in tape if e.steered]),
    }


def _times(tape: Sequence[TapeEntry], evaluations: Sequence[Evaluation], report: Mapping[str, Any]) -> dict[str, str]:
    """Return when the run began and ended, as far as its rounds and evaluations tell."""
    recorded = [entry.unix_seconds for entry in tape] + [evaluation.unix_seconds for evaluation in evaluations]
    moments = [moment for moment in recorded if moment > 0]
    if not moments:
        return {}
    found = {
        "first record": date(min(moments)),
        "last record": date(max(moments)),
        "duration": f"{ago(max(moments) - min(moments))}, pauses included",
    }
    trained, speed = (float(report.get(key) or math.nan) for key in ("seconds", "tokens_per_second"))
    if trained > 0:
        found["last session"] = f"{ago(trained)}, {number(speed, 0)} tokens/s in all"
    return found


def _baseline(report: Mapping[str, Any]) -> dict[str, str]:
    single, curve = float(report.get("held_out_one_process") or math.nan), report.get("curve_one_process")
    if math.isnan(single) or not curve:
        return {"baseline": "not measured"}
    last = float(report.get("held_out_last") or math.nan)
    return {
        "baseline": f"{number(single, 4)}: one process that trained on {int(curve[-1][0]):,} tokens",
        "relative to it": f"{100 * (last / single - 1):+.2f} %",
    }


def _machines(view: RunView) -> dict[str, str]:
    """Return what each host is and which islands trained on it."""
    hosts: dict[str, list[str]] = {}
    for island in view.islands:
        hosts.setdefault(island.host, []).append(f"{island.name} on {island.device}")
    described = {island.host: island.machine for island in view.islands if island.machine}
    return {host: "; ".join(filter(None, (described.get(host), ", ".join(on)))) for host, on in hosts.items()}


def commands(manifest: Manifest, islands: int, steered: Sequence[TapeEntry]) -> str:
    """Return a shell script that repeats the run of our own islands, without addresses and passwords."""
    from archipelago.islands.data.corpus import KNOWN

    if manifest.task or manifest.config.has_user_loops:
        what = f"the task {manifest.task!r}" if manifest.task else "training scripts of its users"
        return f"# The islands of this run were {what}: start them again, with another name for the run.\n"
    name, corpus = shlex.quote(f"{manifest.run}-again"), manifest.corpus
    again = corpus.name if corpus.name in KNOWN else f"FILE_OR_FOLDER --name {corpus.name}"
    config = "".join(f" {shlex.quote(word)}" for word in flags(manifest.config))
    weights = manifest.versions.get("weights", "").rpartition(" ")[0]  # The digest follows the name.
    config += f" --from {shlex.quote(weights)}" if weights else ""
    versions = ", ".join(f"{package} {manifest.versions.get(package, '')}" for package in ("archipelago-train", "jax"))
    tokenizer = f", and its tokenizer {corpus.tokenizer}" if corpus.tokenizer else ""
    lines = [
        f"# {versions}; several machines: `archipelago init` with the same settings, `merger`, and `island` on each",
        f"archipelago prepare {again}   # its digest must be {corpus.digest}{tokenizer}",
        f"archipelago up --run {name} --islands {max(1, islands)}{config}",
        *(f"archipelago steer runs/{name}/admin.join {entry.steered}   # at round {entry.round}" for entry in steered),
    ]
    return "\n".join(lines) + "\n"
