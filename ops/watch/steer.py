"""`archipelago steer`: changes a running run, or shows what was changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from archipelago.broker.config import RunConfig
from archipelago.broker.control import (
    CHECKPOINT,
    ISLAND,
    MERGING,
    PAUSED,
    SETTINGS,
    Control,
    checked_changes,
    own,
    read_settings,
    steered,
)
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import RunAddress, print_json
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.settings import say

_EXAMPLES = "Write NAME=VALUE, such as outer.learning_rate=0.5, merging=paused or island.oslo=drain; or `checkpoint`."


@dataclass(frozen=True)
class SteerOptions(RunAddress):
    """Steer a running run: outer learning rate, quorum, grace, a pause, a checkpoint, islands. Without changes: show.

    outer.learning_rate, sync.quorum and sync.grace take effect with the round that closes next. merging=paused closes
    no round until it is removed; islands train on. checkpoint takes one now. island.NAME=drain has an island leave as
    on SIGTERM; island.NAME=expel besides refuses what it sends. NAME= takes any of them back.
    """

    changes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """NAME=VALUE, or NAME= to take it back; and `checkpoint`"""
    json: bool = False
    """print one JSON object"""


def main(options: SteerOptions) -> int:
    """Changes what it is told to, and shows what is set."""
    options = _with_all_changes(options)
    transport = options.connect()
    config = transport.reader.manifest().config
    if options.changes:
        transport.reader.steer(changes_of(config, options.changes, transport.reader.control(), time.time))
    found = observe(transport, config)
    if options.json:
        print_json(found)
    else:
        _warn(transport, options.changes)
        Console(highlight=False).print(_table(found))
    return 0


def _with_all_changes(options: SteerOptions) -> SteerOptions:
    """What stands first is a change too where it cannot be an address: the URL may be in the environment."""
    first = options.url or ""
    if "://" not in first and ("=" in first or first == CHECKPOINT):
        return replace(options, url=None, changes=(first, *options.changes))
    return options


def changes_of(
    config: RunConfig, words: Sequence[str], present: Mapping[str, str], wall: Callable[[], float]
) -> dict[str, str]:
    """The changes that the words ask for, checked. `checkpoint` alone gets a text that is new. Raises ConfigError.

    Whatever is `present` can be removed, also what means nothing.
    """
    changes: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word == CHECKPOINT:
            value = f"asked at {wall():.3f}"
        elif not equals or not name:
            raise ConfigError(f"{word!r:.80} is no change", _EXAMPLES)
        if changes.get(name, value) != value:
            raise ConfigError(f"{name} is given twice, as {changes[name]!r} and {value!r}", "Give it once.")
        changes[name] = value
    removed = {name: "" for name, value in changes.items() if not value and name in present}
    return checked_changes(config, {name: changes[name] for name in changes if name not in removed}) | removed


def observe(transport: ReaderTransport, config: RunConfig) -> dict[str, Any]:
    """What is set, what is in force since the last closed round, and what the run's own settings are."""
    fields = transport.reader.control()
    control = Control.of(fields)
    now = steered(config, _in_force(transport.reader.merger_state()))
    return {
        "run": transport.run,
        "set": fields,
        "ignored": dict(control.faults),
        "settings": {
            name: {"set": control.settings.get(name), "in_force": own(now, name), "own": own(config, name)}
            for name in SETTINGS
        },
        "paused": control.is_paused,
        "islands": dict(control.islands),
    }


def _in_force(state: str) -> dict[str, float]:
    try:
        return read_settings(json.loads(state or "{}").get("steered", {}))
    except (ConfigError, ValueError, AttributeError, RecursionError):
        return {}


def _warn(transport: ReaderTransport, changes: Sequence[str]) -> None:
    """Says when a change names an island that nobody knows: it may be a slip, or one that is to come."""
    named = {word.partition("=")[0].removeprefix(ISLAND) for word in changes if word.startswith(ISLAND)}
    known = {presence.heartbeat.island for presence in transport.reader.presences()}
    for name in sorted(named - known):
        say(f"no island {name!r} was heard of; known are {', '.join(sorted(known)) or 'none'}")


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in (f"run {found['run']}", "set", "in force", "the run's own"):
        table.add_column(column)
    for name, values in found["settings"].items():
        wish = "–" if values["set"] is None else str(values["set"])
        table.add_row(name, wish, str(values["in_force"]), str(values["own"]))
    table.add_row(MERGING, PAUSED if found["paused"] else "–", "", "")
    for name, wish in sorted(found["islands"].items()):
        table.add_row(ISLAND + name, wish, "", "")
    for name, fault in found["ignored"].items():
        table.add_row(Text(name), Text("ignored", style="yellow"), Text(fault), "")
    return table
