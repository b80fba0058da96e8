"""`archipelago steer`: change the settings of a running run, or show the changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from archipelago.broker.config import RunConfig
from archipelago.broker.control import CHECKPOINT, ISLAND, MERGING, PAUSED, SETTINGS, Control, checked_changes, own
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.logs import printable
from archipelago.broker.process import print_json
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.run_source import ITS_REDIS, RunSource
from archipelago.ops.settings import say
from archipelago.ops.watch.formatting import new_table

_EXAMPLES = "Write NAME=VALUE, such as outer.learning_rate=0.5, merging=paused or island.oslo=drain; or `checkpoint`."


@dataclass(frozen=True)
class SteerOptions(RunSource):
    """Change the settings of a running run; without changes, show them.

    outer.learning_rate, sync.quorum and sync.grace apply from the next round that closes. inner.steps is the length of
    the run: a larger one extends the run, also after its end. While merging=paused is set,
    no round closes, and islands continue to train. checkpoint takes a checkpoint now. island.NAME=drain makes an island
    leave as on SIGTERM; island.NAME=expel also refuses what it sends. NAME= removes a change.
    """

    changes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """NAME=VALUE changes a setting, NAME= removes the change, and `checkpoint` asks for a checkpoint."""
    json: bool = False
    """Print one JSON object."""


def main(options: SteerOptions) -> int:
    """Apply the changes, and show all of them."""
    options = _with_all_changes(options)
    with options.open() as source:
        manifest, transport = opened(source.transport)
        if options.changes:
            if source.origin != ITS_REDIS:
                raise ConfigError(
                    f"the run was read from {source.origin}, and no merger would see a change of that",
                    "Name the run's Redis (redis://HOST:PORT), or start the run first.",
                    code="config.which-run",
                )
            changes = changes_of(manifest.config, options.changes, transport.reader.control(), time.time)
            transport.reader.steer(changes)
        found = observe(transport, manifest.config)
        if options.json:
            print_json(found)
        else:
            _warn(transport, options.changes)
            Console(highlight=False).print(_table(found))
    return 0


def _with_all_changes(options: SteerOptions) -> SteerOptions:
    """Treat the first word as a change if it cannot be a URL: the URL may be in the environment."""
    first = options.url or ""
    if "://" not in first and ("=" in first or first == CHECKPOINT):
        return replace(options, url=None, changes=(first, *options.changes))
    return options


def changes_of(
    config: RunConfig, words: Sequence[str], present: Mapping[str, str], wall: Callable[[], float]
) -> dict[str, str]:
    """Parse and check the changes that the words of a command line name. Raise ConfigError.

    Each change that is `present` can be removed, even if it is not valid. Each request for a checkpoint is a new one.
    """
    changes: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word == CHECKPOINT:
            value = f"asked at {wall():.3f}"
        elif not equals or not name:
            raise ConfigError(f"{word!r:.80} is not a change", _EXAMPLES, code="steer.no-change")
        if changes.get(name, value) != value:
            raise ConfigError(
                f"{name} is given twice, as {changes[name]!r} and {value!r}", "Give it once.", code="steer.no-change"
            )
        changes[name] = value
    removed = {name: "" for name, value in changes.items() if not value and name in present}
    return checked_changes(config, {name: changes[name] for name in changes if name not in removed}) | removed


def observe(transport: ReaderTransport, config: RunConfig) -> dict[str, Any]:
    """Return the changes, and the run's own settings."""
    fields = transport.reader.control()
    control = Control.of(fields)
    return {
        "run": transport.run,
        "set": fields,
        "ignored": dict(control.faults),
        "settings": {name: {"set": control.settings.get(name), "own": own(config, name)} for name in SETTINGS},
        "paused": control.is_paused,
        "islands": dict(control.islands),
    }


def _warn(transport: ReaderTransport, changes: Sequence[str]) -> None:
    """Warn if a change names an unknown island. It may be a typing error, or an island that will join later."""
    named = {word.partition("=")[0].removeprefix(ISLAND) for word in changes if word.startswith(ISLAND)}
    known = {presence.heartbeat.island for presence in transport.reader.presences()}
    for name in sorted(named - known):
        say(f"there is no island {name!r} yet; known islands: {', '.join(sorted(known)) or 'none'}")


def _table(found: Mapping[str, Any]) -> Table:
    table = new_table(f"run {found['run']}", "set", "run's own")
    for name, values in found["settings"].items():
        wish = "–" if values["set"] is None else str(values["set"])
        table.add_row(name, wish, str(values["own"]))
    table.add_row(MERGING, PAUSED if found["paused"] else "–", "")
    for name, wish in sorted(found["islands"].items()):
        table.add_row(ISLAND + name, wish, "")
    for name, fault in found["ignored"].items():
        table.add_row(Text(printable(name)), Text("ignored", style="yellow"), Text(printable(fault)))
    return table
