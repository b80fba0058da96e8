"""`archipelago replay RUN`: repeat a recorded run without Redis and without clocks, to the same bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.merger import record as records
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.recorded_run import repeat, what_if
from archipelago.ops.settings import say

ALIASES = {"lr": "learning_rate"}
#: The sections of the config that only the merger's rules read. Changing them leaves recorded contributions valid.
WHAT_IF = ("merge", "outer")


@dataclass(frozen=True)
class ReplayOptions:
    """Repeat a recorded run, merger and islands, and compare every digest; or merge its contributions by other rules.

    `up --record` and `init --record` keep records.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run."""
    folder: Path = Path("runs")
    """The folder of the runs. The record is FOLDER/RUN/merger/record, and FOLDER/RUN/merger/shard-K/record for a
    further shard K."""
    islands: bool = True
    """Repeat the islands' training too. Otherwise their recorded contributions are used."""
    set: tuple[str, ...] = ()
    """Apply other rules of the merger to the recorded contributions, such as outer.lr=0.5 merge.rest=average."""
    json: bool = False
    """Print one JSON object."""


def main(options: ReplayOptions) -> int:
    """Replay. Return 0 if nothing differs or other rules were requested, and 1 if something differs."""
    with progress("reading the record"):
        recorded = read(options.folder / options.run / "merger")
    manifest = recorded[0].manifest
    if options.set:
        manifest.require_own_code("Comparing other rules by their held-out loss")
    config = with_settings(manifest.config, options.set)
    keep_compiled()
    found = (
        what_if(recorded, config, [_key(setting) for setting in options.set])
        if options.set
        else repeat(recorded, islands=options.islands)
    )
    if options.json:
        print_json(found)
    elif options.set:
        _tell_what_if(found)
    else:
        _tell(found)
    return 0 if found["same"] or options.set else 1


def read(folder: Path) -> list[records.Record]:
    """Return the record of each shard of a run, from the folder of its mergers. Raises ConfigError."""
    kept = MergerFolder(folder)
    first = records.read(kept.recorder.folder)
    others = kept.parts(first.manifest.whole or first.manifest)[1:]
    return [first, *(records.read(part.recorder.folder) for part in others)]


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return the config with some of the merger's rules changed.

    Args:
        config: The config of the run.
        settings: Changes such as `outer.lr=0.5`.

    Raises:
        ConfigError: A change is not one of the merger's rules.
    """
    values = dataclasses.asdict(config)
    for setting in settings:
        _, equals, text = setting.partition("=")
        section, _, name = _key(setting).partition(".")
        if not equals or section not in WHAT_IF or name not in values[section]:
            known = [f"{part}.{key}" for part in WHAT_IF for key in values[part]]
            raise ConfigError(
                f"--set {setting!r} names no rule of the merger",
                f"Set one of {', '.join(known)}.",
                code="replay.unknown-rule",
            )
        try:
            values[section][name] = json.loads(text)
        except ValueError:
            values[section][name] = text
    return checked(values, "--set")


def _key(setting: str) -> str:
    """Return the section and the name in `section.name=value`, as the config spells them."""
    section, _, name = setting.partition("=")[0].strip().partition(".")
    return f"{section}.{ALIASES.get(name, name.replace('-', '_'))}"


def _tell(found: Mapping[str, Any]) -> None:
    say(f"run {found['run']!r}: {found['rounds']} of {found['rounds_recorded']} rounds repeated, with "
        f"{found['contributions']} contributions, {found['trained_again']} of them trained again")  # fmt: skip
    if found["own_loops"]:
        say("  Only the merger was repeated, exactly. The islands are training scripts of users: their training "
            "cannot be repeated, so their recorded contributions were used.")  # fmt: skip
    for who, why in found["islands_from_payloads"].items():
        say(f"  {who} uses its recorded payloads: {why}")
    for fragment in found["fragments"]:
        same = "same" if fragment["digest"] == fragment["recorded"] else f"recorded {fragment['recorded'] or 'nothing'}"
        say(f"  fragment {fragment['fragment']}: {fragment['digest']}  {same}")
    say(f"first difference: {found['first_difference']}" if found["first_difference"] else "no bit differs")


def _tell_what_if(found: Mapping[str, Any]) -> None:
    say(f"run {found['run']!r}: {found['rounds']} rounds with their recorded contributions")
    for change in found["changed"]:
        say(f"  {change}")
    say(f"held-out bits per byte: {found['bits_per_byte_recorded']:.4f} as recorded, "
        f"{found['bits_per_byte_what_if']:.4f} by these rules")  # fmt: skip
    say("The islands trained from the parameters published then. The more the rules differ, the less this means.")
