"""`archipelago steer`: change the settings of a running run, or show the changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig
from archipelago.broker.control import CHECKPOINT, ISLAND, SETTINGS, Control, checked_changes, own
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.logs import printable
from archipelago.broker.process import print_json
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.run_source import ITS_REDIS, RunSource
from archipelago.ops.settings import say
from archipelago.ops.watch.run_view import describe_control

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
        fields, settings = transport.reader.control(), {name: own(manifest.config, name) for name in SETTINGS}
        control = Control.of(fields)
        if options.json:
            print_json({"run": manifest.run, "set": fields, "ignored": control.faults, "own": settings})
        else:
            _warn(transport, options.changes)
            sys.stdout.write(f"{printable(describe_control(control)) or 'nothing is steered'}\n")
            sys.stdout.write(f"the run's own: {', '.join(f'{name} = {value}' for name, value in settings.items())}\n")
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


def _warn(transport: ReaderTransport, changes: Sequence[str]) -> None:
    """Warn if a change names an unknown island. It may be a typing error, or an island that will join later."""
    named = {word.partition("=")[0].removeprefix(ISLAND) for word in changes if word.startswith(ISLAND)}
    known = {presence.heartbeat.island for presence in transport.reader.presences()}
    for name in sorted(named - known):
        say(f"there is no island {name!r} yet; known islands: {', '.join(sorted(known)) or 'none'}")
