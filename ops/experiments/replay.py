"""`archipelago replay RUN`: merge the rounds of a recorded run again, without Redis and without clocks.

By the run's own rules, the result has the same bits. By other rules, it shows what these would have made of the same
contributions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from archipelago.broker.commits import Delivery
from archipelago.broker.config import RunConfig, checked, differences
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.broker.wire import digest_of, unpack
from archipelago.merger import record as records
from archipelago.merger.storage import MergerFolder
from archipelago.ops.settings import say

ALIASES = {"lr": "learning_rate"}
#: The sections of the config that only the merger's rules read. Changing them leaves recorded contributions valid.
WHAT_IF = ("merge", "outer")
Part = TypeVar("Part")


@dataclass(frozen=True)
class ReplayOptions:
    """Merge the rounds of a recorded run again, and compare every digest; or merge them by other rules.

    `up --record` and `init --record` keep records.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run."""
    folder: Path = Path("runs")
    """The folder of the runs. The record is FOLDER/RUN/merger/record, and FOLDER/RUN/merger/shard-K/record for a
    further shard K."""
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
    found = what_if(recorded, config, [_key(setting) for setting in options.set]) if options.set else repeat(recorded)
    if options.json:
        print_json(found)
    elif options.set:
        _tell_what_if(found)
    else:
        _tell(found)
    return 0 if found["same"] or options.set else 1


class RecordedShard:
    """The merger's state in the record of a run, or of one of its shards, which advances round by round."""

    def __init__(self, record: records.Record, config: RunConfig) -> None:
        from archipelago.merger.round_merge import RoundMerge, new_state
        from archipelago.merger.state import RunState

        self.record = record
        self.manifest = replace(record.manifest, config=config)
        self.rules = RoundMerge.of(self.manifest)
        self.state = RunState()
        vectors = [unpack(data, size) for (_, data), size in zip(record.beginning, self.manifest.sizes, strict=True)]
        self.fragments = [new_state(vector_N, self.rules.outer) for vector_N in vectors]

    def rounds(self) -> Sequence[tuple[TapeEntry, tuple[Delivery, ...]]]:
        """Return the rounds in order. Raise ConfigError if one is missing."""
        numbers = sorted(self.record.rounds)
        missing = [number for number in range(1, max(numbers, default=0) + 1) if number not in self.record.rounds]
        if missing:
            raise ConfigError(
                f"round {missing[0]} is not in the record ({len(missing)} are missing)",
                "If another machine's merger was serving then, its folder has the rest: copy the files together.",
                code="replay.missing-rounds",
            )
        return [self.record.rounds[number] for number in numbers]

    def merge(self, tape: TapeEntry, deliveries: Sequence[Delivery]) -> None:
        """Merge one round again. Raise DifferenceError if the result is not the recorded one."""
        from archipelago.merger.replay import replay_round

        p = tape.fragment
        self.fragments[p] = replay_round(self.rules, self.state, self.fragments[p], tape, deliveries)

    def merge_differently(self, tape: TapeEntry, deliveries: Sequence[Delivery], pinned: Collection[str]) -> None:
        """Merge one round by other rules, and compare nothing. Steering applies, except to `pinned` settings."""
        from archipelago.merger.replay import apply_steering, merge_recorded

        p = tape.fragment
        apply_steering(self.rules, self.state, tape, pinned)
        merged, round_sum = merge_recorded(self.rules, self.state, self.fragments[p], tape, deliveries)
        self.rules.advance(self.state, tape.round, tape.step, merged, round_sum)
        self.fragments[p] = merged.state

    def digests(self) -> list[str]:
        """Return the digest of each fragment's parameters."""
        import numpy as np

        return [digest_of(np.asarray(fragment.published_N)) for fragment in self.fragments]


def repeat(recorded: Sequence[records.Record]) -> dict[str, Any]:
    """Merge the run again by its own rules, each shard up to its first difference, and compare every digest.

    Args:
        recorded: The record of each shard of the run.

    Returns:
        Plain data: counts, digests, and the first difference if there is one.
    """
    from archipelago.merger.replay import DifferenceError

    manifest = run_of(recorded)
    shards = [RecordedShard(record, manifest.config) for record in recorded]
    rounds = [shard.rounds() for shard in shards]
    count, contributions, found = sum(map(len, rounds)), 0, list[str]()
    with progress("repeating the rounds", count) as repeating:
        for number, shard in enumerate(shards):
            try:
                for tape, deliveries in rounds[number]:
                    shard.merge(tape, deliveries)
                    contributions += len(deliveries)
                    repeating.done += 1
            except DifferenceError as error:
                found.append(f"shard {number}: {error.what}" if len(shards) > 1 else error.what)
    expected = [{tape.fragment: tape.digest for tape, _ in of_shard} for of_shard in rounds]
    last = [[of_shard.get(p, "") for p in range(len(shards[k].fragments))] for k, of_shard in enumerate(expected)]
    repeated = in_order(manifest, [shard.digests() for shard in shards])
    pairs = list(zip(repeated, in_order(manifest, last), strict=True))
    return {
        "run": manifest.run,
        "rounds": sum(shard.state.closed for shard in shards),
        "rounds_recorded": count,
        "contributions": contributions,
        "fragments": [
            {"fragment": p, "digest": digest, "recorded": recorded} for p, (digest, recorded) in enumerate(pairs)
        ],
        "first_difference": found[0] if found else "",
        "same": not found and all(digest == (recorded or digest) for digest, recorded in pairs),
    }


def what_if(recorded: Sequence[records.Record], config: RunConfig, pinned: Collection[str] = ()) -> dict[str, Any]:
    """Merge the recorded contributions by the rules of another config.

    Args:
        recorded: The record of each shard of the run.
        config: The run's config with other rules for the merger.
        pinned: Settings that keep the config's value where the run was steered.

    Returns:
        Plain data: the changes, and the held-out loss by both sets of rules.
    """
    from archipelago.merger.replay import DifferenceError

    manifest = run_of(recorded)
    shards = [RecordedShard(record, manifest.config) for record in recorded]
    others = [RecordedShard(record, config) for record in recorded]
    with progress("merging the rounds by both sets of rules", sum(len(each.rounds()) for each in shards)) as merging:
        for shard, other in zip(shards, others, strict=True):
            for tape, deliveries in shard.rounds():
                try:
                    shard.merge(tape, deliveries)
                except DifferenceError as error:
                    raise ArchipelagoError(
                        f"the record does not replay: {error.what}",
                        "Run `archipelago replay` on it without --set.",
                        code="replay.difference",
                    ) from None
                other.merge_differently(tape, deliveries, pinned)
                merging.done += 1
    return {
        "run": manifest.run,
        "rounds": sum(shard.state.closed for shard in shards),
        "changed": differences(manifest.config, config),
        "bits_per_byte_recorded": bits_per_byte(manifest, shards),
        "bits_per_byte_what_if": bits_per_byte(manifest, others),
        "same": [shard.digests() for shard in shards] == [other.digests() for other in others],
    }


def bits_per_byte(manifest: Manifest, shards: Sequence[RecordedShard]) -> float:
    """Return the held-out loss of the run's present parameters."""
    import numpy as np

    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import assemble, compile_validation

    measure = compile_validation(manifest.config, open_corpus(manifest.config.data.corpus))
    vectors = [[np.asarray(fragment.published_N) for fragment in shard.fragments] for shard in shards]
    return measure(assemble(manifest, in_order(manifest, vectors)))


def run_of(recorded: Sequence[records.Record]) -> Manifest:
    """Return the manifest of the run whose shards these are."""
    first = recorded[0].manifest
    return first.whole or first


def in_order(manifest: Manifest, parts: Sequence[Sequence[Part]]) -> list[Part]:
    """Return what each shard has of its fragments in the order of the run's fragments."""
    places = map(manifest.shard_layout.place, range(len(manifest.fragments)))
    return [parts[shard][own] for shard, own in places]


def read(folder: Path) -> list[records.Record]:
    """Return the record of each shard of a run, from the folder of its mergers. Raises ConfigError."""
    kept = MergerFolder(folder)
    first = records.read(kept.recorder.folder)
    others = kept.parts(run_of([first]))[1:]
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
        f"{found['contributions']} contributions")  # fmt: skip
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
