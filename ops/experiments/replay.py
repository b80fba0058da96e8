"""`archipelago replay RUN`: merge the rounds of a recorded run again to the same bits, without Redis and clocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.broker.wire import unpack
from archipelago.merger import record as records
from archipelago.merger.storage import MergerFolder
from archipelago.ops.run_source import RUNS
from archipelago.ops.settings import say


@dataclass(frozen=True)
class ReplayOptions:
    """Merge the rounds of a recorded run again, and compare every digest.

    `up --record` and `init --record` keep records.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run, or its folder, such as runs/demo. The record is runs/demo/merger/record, and
    runs/demo/merger/shard-K/record for a further shard K."""
    json: bool = False
    """Print one JSON object."""


def main(options: ReplayOptions) -> int:
    """Replay. Return 0 if nothing differs, and 1 if something does."""
    with progress("reading the record"):
        own = Path(options.run) if "/" in options.run else RUNS / options.run
        recorded = read(own / "merger")
    keep_compiled()
    os.environ["JAX_PLATFORMS"] = "cpu"  # as in a merger
    found = repeat(recorded)
    if options.json:
        print_json(found)
    else:
        say(f"run {found['run']!r}: {found['rounds']} of {found['rounds_recorded']} rounds repeated, with "
            f"{found['contributions']} contributions")  # fmt: skip
        say(f"first difference: {found['first_difference']}" if found["first_difference"] else "no bit differs")
    return 0 if found["same"] else 1


def repeat(recorded: Sequence[records.Record]) -> dict[str, Any]:
    """Merge the run again by its own rules, each shard up to its first difference, and compare every digest.

    `recorded` has the record of each shard. Return plain data: counts, and the first difference if there is one.
    Raises ConfigError as `rounds_of`.
    """
    from archipelago.merger.replay import DifferenceError, replay_round
    from archipelago.merger.round_merge import RoundMerge, new_state
    from archipelago.merger.state import RunState

    manifest = recorded[0].manifest.of_shard(None)
    rounds = [rounds_of(record) for record in recorded]
    count, closed, contributions, found = sum(map(len, rounds)), 0, 0, list[str]()
    with progress("repeating the rounds", count) as repeating:
        for number, record in enumerate(recorded):
            rules, state, sizes = RoundMerge.of(record.manifest), RunState(), manifest.sizes
            vectors = {snapshot.fragment: unpack(data, sizes[snapshot.fragment]) for snapshot, data in record.beginning}
            fragments = {p: new_state(vector_N, rules.outer) for p, vector_N in vectors.items()}
            try:
                for tape, deliveries in rounds[number]:
                    p = tape.fragment
                    fragments[p] = replay_round(rules, state, fragments[p], tape, deliveries)
                    contributions += len(deliveries)
                    repeating.done += 1
            except DifferenceError as error:
                found.append(f"shard {number}: {error.what}" if len(recorded) > 1 else error.what)
            closed += record.manifest.own_rounds.until(state.closed)
    return {
        "run": manifest.run,
        "rounds": closed,
        "rounds_recorded": count,
        "contributions": contributions,
        "first_difference": found[0] if found else "",
        "same": not found,
    }


def rounds_of(record: records.Record) -> Sequence[tuple[TapeEntry, tuple[Delivery, ...]]]:
    """Return the rounds of a shard in order. Raise ConfigError if one is missing."""
    of, last = record.manifest, max(record.rounds, default=0)
    numbers = of.own_rounds.following(0, of.own_rounds.until(last))
    missing = [number for number in numbers if number not in record.rounds]
    if missing:
        raise ConfigError(
            f"round {missing[0]} is not in the record ({len(missing)} are missing)",
            "If another machine's merger was serving then, its folder has the rest: copy the files together. "
            "Otherwise the tape in Redis was damaged: the merger's log says so (`record.gone`).",
            code="replay.missing-rounds",
        )
    return [record.rounds[number] for number in numbers]


def read(folder: Path) -> list[records.Record]:
    """Return the record of each shard of a run, from the folder of its mergers. Raises ConfigError."""
    kept = MergerFolder(folder)
    first = records.read(kept.recorder.folder)
    others = kept.parts(first.manifest)[1:]
    return [first, *(records.read(part.recorder.folder) for part in others)]
