"""`archipelago replay RUN`: merge the rounds of a recorded run again to the same bits, without Redis and clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.broker.wire import digest_of, unpack
from archipelago.merger import record as records
from archipelago.merger.storage import MergerFolder
from archipelago.ops.settings import say

Part = TypeVar("Part")


@dataclass(frozen=True)
class ReplayOptions:
    """Merge the rounds of a recorded run again, and compare every digest.

    `up --record` and `init --record` keep records.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run."""
    folder: Path = Path("runs")
    """The folder of the runs. The record is FOLDER/RUN/merger/record, and FOLDER/RUN/merger/shard-K/record for a
    further shard K."""
    json: bool = False
    """Print one JSON object."""


def main(options: ReplayOptions) -> int:
    """Replay. Return 0 if nothing differs, and 1 if something does."""
    with progress("reading the record"):
        recorded = read(options.folder / options.run / "merger")
    keep_compiled()
    found = repeat(recorded)
    if options.json:
        print_json(found)
    else:
        _tell(found)
    return 0 if found["same"] else 1


class RecordedShard:
    """The merger's state in the record of a run, or of one of its shards, which advances round by round."""

    def __init__(self, record: records.Record) -> None:
        from archipelago.merger.round_merge import RoundMerge, new_state
        from archipelago.merger.state import RunState

        self.record = record
        self.manifest = record.manifest
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
    shards = [RecordedShard(record) for record in recorded]
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


def _tell(found: Mapping[str, Any]) -> None:
    say(f"run {found['run']!r}: {found['rounds']} of {found['rounds_recorded']} rounds repeated, with "
        f"{found['contributions']} contributions")  # fmt: skip
    for fragment in found["fragments"]:
        same = "same" if fragment["digest"] == fragment["recorded"] else f"recorded {fragment['recorded'] or 'nothing'}"
        say(f"  fragment {fragment['fragment']}: {fragment['digest']}  {same}")
    say(f"first difference: {found['first_difference']}" if found["first_difference"] else "no bit differs")
