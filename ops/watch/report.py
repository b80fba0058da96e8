"""`archipelago report`: write a run's figures into one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.address import redacted
from archipelago.broker.buckets.folder import is_bucket
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.files import make_untracked, write_atomically
from archipelago.broker.invitation import names_redis
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.process import connect_to, print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import restore
from archipelago.ops.dashboard.page_data import PAGE, chart_library, charts_of, page_of, to_json
from archipelago.ops.settings import say
from archipelago.ops.watch import run_summary
from archipelago.ops.watch.provenance import provenance
from archipelago.ops.watch.watcher import TAPE_MOST, Watcher

if TYPE_CHECKING:
    from archipelago.merger.storage import MergerFolder

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
    folder: Path = Path("runs")
    """The folder where runs keep their logs, data and reports."""
    json: bool = False
    """Print one JSON object: the name of the file, and the figures."""


def main(options: ReportOptions) -> int:
    """Write the file."""
    library = chart_library()
    found = everything(options)
    name = checked_name(str(found["page"]["run"]["run"]), "the run name")
    path = options.out or _folder_of(options, name) / FILE
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


def _folder_of(options: ReportOptions, name: str) -> Path:
    """Return the folder that the options name, or that of the run with this name."""
    if options.target and is_bucket(options.target):
        return options.folder / name
    return Path(options.target) if options.target and _is_path(options.target) else options.folder / name


def _is_path(target: str) -> bool:
    """Return whether the target is a folder: not a URL, a join file or the name of a run."""
    return "/" in target and not names_redis(target)


def everything(options: ReportOptions) -> dict[str, Any]:
    """Return the data of the page for the run that the options name. Raise ArchipelagoError."""
    if options.target is not None and is_bucket(options.target):
        return of_bucket(options.target)
    if options.target is None or names_redis(options.target):
        transport = connect_to(options.target, options.run)
        try:
            return of_watch(Watcher(transport))
        finally:
            transport.close()
    if not _is_path(options.target):
        checked_name(options.target, "the run")
    folder = _folder_of(options, options.target)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}", "Give the URL of the run's Redis, or --folder.", code="report.no-data"
        )
    return of_folder(folder)


def of_watch(watch: Watcher, folder: Path | None = None) -> dict[str, Any]:
    """Return the run as Redis has it now. `folder` has the report.json of `up`; None if that is not known."""
    reading, history, manifest = watch.read(), watch.history, watch.manifest
    tape, left = watch.transport.reader.tape(TAPE_MOST), (run_summary.read(folder) if folder else None) or {}
    return {
        "page": page_of(reading, history, manifest),
        "charts": charts_of(reading, history, manifest) | {"one_process": left.get("curve_one_process", [])},
        "about": provenance(manifest, reading.view, tape, left),
    }


def of_folder(folder: Path) -> dict[str, Any]:
    """Return a run of this machine from its embedded Redis or its data, or from the newest checkpoint."""
    from archipelago.merger.storage import MergerFolder

    if (folder / "redis").is_dir():
        return _of_own_server(folder)
    return _of_checkpoint(MergerFolder(folder / "merger"), folder, str(folder))


def of_bucket(address: str) -> dict[str, Any]:
    """Return a run from its folder in a bucket: the newest checkpoint of its merger."""
    from archipelago.merger.storage import fetched

    with fetched(address) as kept:
        return _of_checkpoint(kept, kept.path, redacted(address))


def _of_checkpoint(kept: MergerFolder, folder: Path, place: str) -> dict[str, Any]:
    """Return a run from its newest checkpoint, which is restored in memory."""
    images = kept.newest()
    if not images:
        raise ConfigError(
            f"{place} holds no checkpoint and no Redis data",
            "Give the URL of the run's Redis, or the folder of a run, also in a bucket (s3://BUCKET/FOLDER/RUN).",
            code="report.no-data",
        )
    transport = MemoryBroker().connect(images[0].manifest.run)
    restore(transport, images)
    return of_watch(Watcher(transport), folder)


def _of_own_server(folder: Path) -> dict[str, Any]:
    from archipelago.ops.launch.embedded_redis import start_server
    from archipelago.ops.watch.run_list import address_of

    with ExitStack() as stack:
        try:
            address = address_of(folder) or stack.enter_context(start_server(folder / "redis")).url
        except OSError as error:
            raise BrokerError(
                f"cannot read {folder}: {error.strerror}", "Run this as the user that started `up`."
            ) from None
        transport = connect_to(address, folder.resolve().name)
        stack.callback(transport.close)
        return of_watch(Watcher(transport), folder)


def html(found: Mapping[str, Any], library: str) -> str:
    """Return one file with the page, its style, its scripts, the chart library and the data."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    policy = (
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">"
    )
    page = page.replace('<link rel="stylesheet" href="page.css">', f"{policy}\n<style>\n{style}</style>")
    data = to_json(found).replace("<", "\\u003c")  # so that no text in it can end its element
    page = page.replace('id="data"></script>', f'id="data">{data}</script>')
    page = page.replace('<script src="plotly.min.js"></script>', f"<script>{_escaped_script(library)}</script>")
    for name in SCRIPTS:
        script = (PAGE / name).read_text(encoding="utf-8")
        page = page.replace(f'<script src="{name}"></script>', f"<script>\n{_escaped_script(script)}</script>")
    return page


def _escaped_script(script: str) -> str:
    """Escape a script so that it cannot end its element; within strings the meaning stays."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
