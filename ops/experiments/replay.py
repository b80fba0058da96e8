"""`archipelago replay RUN`: merge the rounds of a recorded run again to the same bits, without Redis and clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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


def repeat(recorded: Sequence[records.Record]) -> dict[str, Any]:
    """Merge the run again by its own rules, each shard up to its first difference, and compare every digest.

    Args:
        recorded: The record of each shard of the run.

    Returns:
        Plain data: counts, digests, and the first difference if there is one.

    Raises:
        ConfigError: A round is missing in a record.
    """
    import numpy as np

    from archipelago.merger.replay import DifferenceError, replay_round
    from archipelago.merger.round_merge import RoundMerge, new_state
    from archipelago.merger.state import RunState

    manifest = run_of(recorded)
    rounds = [rounds_of(record) for record in recorded]
    count, closed, contributions, found = sum(map(len, rounds)), 0, 0, list[str]()
    repeated, last = list[list[str]](), list[list[str]]()
    with progress("repeating the rounds", count) as repeating:
        for number, record in enumerate(recorded):
            rules, state, sizes = RoundMerge.of(record.manifest), RunState(), record.manifest.sizes
            vectors = [unpack(data, size) for (_, data), size in zip(record.beginning, sizes, strict=True)]
            fragments = [new_state(vector_N, rules.outer) for vector_N in vectors]
            try:
                for tape, deliveries in rounds[number]:
                    p = tape.fragment
                    fragments[p] = replay_round(rules, state, fragments[p], tape, deliveries)
                    contributions += len(deliveries)
                    repeating.done += 1
            except DifferenceError as error:
                found.append(f"shard {number}: {error.what}" if len(recorded) > 1 else error.what)
            closed += state.closed
            expected = {tape.fragment: tape.digest for tape, _ in rounds[number]}
            last.append([expected.get(p, "") for p in range(len(fragments))])
            repeated.append([digest_of(np.asarray(fragment.published_N)) for fragment in fragments])
    pairs = list(zip(in_order(manifest, repeated), in_order(manifest, last), strict=True))
    return {
        "run": manifest.run,
        "rounds": closed,
        "rounds_recorded": count,
        "contributions": contributions,
        "fragments": [
            {"fragment": p, "digest": digest, "recorded": recorded} for p, (digest, recorded) in enumerate(pairs)
        ],
        "first_difference": found[0] if found else "",
        "same": not found and all(digest == (recorded or digest) for digest, recorded in pairs),
    }


def rounds_of(record: records.Record) -> Sequence[tuple[TapeEntry, tuple[Delivery, ...]]]:
    """Return the rounds of a shard in order. Raise ConfigError if one is missing."""
    numbers = sorted(record.rounds)
    missing = [number for number in range(1, max(numbers, default=0) + 1) if number not in record.rounds]
    if missing:
        raise ConfigError(
            f"round {missing[0]} is not in the record ({len(missing)} are missing)",
            "If another machine's merger was serving then, its folder has the rest: copy the files together.",
            code="replay.missing-rounds",
        )
    return [record.rounds[number] for number in numbers]


def run_of(recorded: Sequence[records.Record]) -> Manifest:
    """Return the manifest of the run whose shards these are."""
    first = recorded[0].manifest
    return first.whole or first


def in_order(manifest: Manifest, parts: Sequence[Sequence[str]]) -> list[str]:
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
