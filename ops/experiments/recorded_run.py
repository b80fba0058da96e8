"""Merge the rounds of a recorded run again, by its own rules or by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig, differences
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest_of, unpack
from archipelago.merger.record import Record


class RecordedShard:
    """The merger's state in the record of a run, or of one of its shards, which advances round by round.

    Attributes:
        uses: How often each (fragment, version) is still needed. Versions without a use are not kept.
        published: The parameters and the global step of each (fragment, version) that has a use.
    """

    def __init__(self, record: Record, config: RunConfig) -> None:
        from archipelago.merger.round_merge import RoundMerge, new_state
        from archipelago.merger.state import RunState

        self.record = record
        self.manifest = replace(record.manifest, config=config)
        self.rules = RoundMerge.of(self.manifest)
        self.state = RunState()
        vectors = [unpack(data, size) for (_, data), size in zip(record.beginning, self.manifest.sizes, strict=True)]
        self.fragments = [new_state(vector_N, self.rules.outer) for vector_N in vectors]
        self.uses: Counter[tuple[int, int]] = Counter()
        self.published = {(p, 0): (vector_N, 0) for p, vector_N in enumerate(vectors)}

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
        self._publish(tape)

    def merge_differently(self, tape: TapeEntry, deliveries: Sequence[Delivery], pinned: Collection[str]) -> None:
        """Merge one round by other rules, and compare nothing. Steering applies, except to `pinned` settings."""
        from archipelago.merger.replay import apply_steering, merge_recorded

        p = tape.fragment
        apply_steering(self.rules, self.state, tape, pinned)
        merged, round_sum = merge_recorded(self.rules, self.state, self.fragments[p], tape, deliveries)
        self.rules.advance(self.state, tape.round, tape.step, merged, round_sum)
        self.fragments[p] = merged.state

    def _publish(self, tape: TapeEntry) -> None:
        if not self.uses[tape.fragment, tape.version]:
            return
        import numpy as np

        seen_N = np.asarray(self.fragments[tape.fragment].published_N)
        self.published[tape.fragment, tape.version] = (seen_N, tape.step)

    def digests(self) -> list[str]:
        """Return the digest of each fragment's parameters."""
        import numpy as np

        return [digest_of(np.asarray(fragment.published_N)) for fragment in self.fragments]


class RecordedRun:
    """A recorded run, whose rounds are merged again in the order of their times, over all shards.

    Args:
        records: The record of each shard.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        first = records[0].manifest
        self.manifest = first.whole or first
        self.shards = [RecordedShard(record, record.manifest.config) for record in records]
        self.recorded = [shard.rounds() for shard in self.shards]
        #: Makes a contribution again.
        self.again: Callable[[RecordedShard, Delivery], Delivery] = lambda shard, delivery: delivery
        self.contributions = 0
        self._done = [0] * len(records)

    def merge_next(self) -> bool:
        """Merge the next round. Return False after the last one. Raise DifferenceError if the result differs."""
        waiting = [k for k, rounds in enumerate(self.recorded) if self._done[k] < len(rounds)]
        if waiting:
            self._merge(min(waiting, key=lambda k: self.recorded[k][self._done[k]][0].unix_seconds))
        return bool(waiting)

    @property
    def done(self) -> int:
        """The number of rounds that were merged."""
        return sum(self._done)

    def expect(self, uses: Mapping[tuple[int, int], int]) -> None:
        """Keep versions of fragments until they were taken that often."""
        for (fragment, version), count in uses.items():
            shard, own = self.manifest.shard_layout.place(fragment)
            self.shards[shard].uses[own, version] += count

    def take(self, fragment: int, version: int) -> tuple[Vector, int]:
        """Return a version's parameters and step, and forget them after their last use.

        An island adopts what its merger has published before. If the clocks of two mergers differ, that round may
        still wait here, and is merged now.

        Raises:
            KeyError: The record has no such version.
        """
        k, own = self.manifest.shard_layout.place(fragment)
        shard = self.shards[k]
        while (own, version) not in shard.published and self._done[k] < len(self.recorded[k]):
            self._merge(k)
        found = shard.published[own, version]
        shard.uses[own, version] -= 1
        if not shard.uses[own, version]:
            del shard.published[own, version]
        return found

    def _merge(self, k: int) -> None:
        from archipelago.merger.replay import DifferenceError

        shard, (tape, deliveries) = self.shards[k], self.recorded[k][self._done[k]]
        self._done[k] += 1  # first, because an island may need an earlier round of another shard meanwhile
        try:
            shard.merge(tape, [self.again(shard, delivery) for delivery in deliveries])
        except DifferenceError as error:
            if len(self.shards) == 1:
                raise
            raise DifferenceError(f"shard {k}: {error.what}", code=error.code) from None
        self.contributions += len(deliveries)

    def digests(self) -> list[str]:
        """Return the digest of each fragment's parameters, in the order of the run."""
        return in_order(self.manifest, [shard.digests() for shard in self.shards])


Part = TypeVar("Part")


def in_order(manifest: Manifest, parts: Sequence[Sequence[Part]]) -> list[Part]:
    """Return what each shard has of its fragments in the order of the run's fragments."""
    places = map(manifest.shard_layout.place, range(len(manifest.fragments)))
    return [parts[shard][own] for shard, own in places]


def repeat(records: Sequence[Record], *, islands: bool) -> dict[str, Any]:
    """Repeat the run, and compare every digest.

    Args:
        records: The record of each shard of the run.
        islands: Also repeat the islands' training; otherwise their recorded contributions are used. The training of
            users' own loops is never repeated.

    Returns:
        Plain data: counts, digests, and the first difference if there is one.
    """
    from archipelago.merger.replay import DifferenceError
    from archipelago.ops.experiments.recorded_islands import RecordedIslands

    run = RecordedRun(records)
    has_own_loops = run.manifest.config.has_own_loops
    trained = RecordedIslands(run) if islands and not has_own_loops else None
    if trained is not None:
        run.again = trained.contribution
    first_difference = ""
    count = sum(map(len, run.recorded))
    with progress("repeating the rounds", count) as repeating:
        try:
            while run.merge_next():
                repeating.done = run.done
        except DifferenceError as error:
            first_difference = error.what
    expected = [{tape.fragment: tape.digest for tape, _ in rounds} for rounds in run.recorded]
    last = [[of_shard.get(p, "") for p in range(len(run.shards[k].fragments))] for k, of_shard in enumerate(expected)]
    pairs = list(zip(run.digests(), in_order(run.manifest, last), strict=True))
    return {
        "run": run.manifest.run,
        "rounds": sum(shard.state.closed for shard in run.shards),
        "rounds_recorded": count,
        "contributions": run.contributions,
        "trained_again": trained.count if trained else 0,
        "own_loops": has_own_loops,
        "islands_from_payloads": trained.lost if trained else {},
        "fragments": [
            {"fragment": p, "digest": found, "recorded": recorded} for p, (found, recorded) in enumerate(pairs)
        ],
        "first_difference": first_difference,
        "same": not first_difference and all(found == (recorded or found) for found, recorded in pairs),
    }


def what_if(records: Sequence[Record], config: RunConfig, pinned: Collection[str] = ()) -> dict[str, Any]:
    """Merge the recorded contributions by the rules of another config.

    Args:
        records: The record of each shard of the run.
        config: The run's config with other rules for the merger.
        pinned: Settings that keep the config's value where the run was steered.

    Returns:
        Plain data: the changes, and the held-out loss by both sets of rules.
    """
    from archipelago.merger.replay import DifferenceError

    run = RecordedRun(records)
    others = [RecordedShard(record, config) for record in records]
    with progress("merging the rounds by both sets of rules", sum(map(len, run.recorded))) as merging:
        for recorded, other, rounds in zip(run.shards, others, run.recorded, strict=True):
            for tape, deliveries in rounds:
                try:
                    recorded.merge(tape, deliveries)
                except DifferenceError as error:
                    raise ArchipelagoError(
                        f"the record does not replay: {error.what}",
                        "Run `archipelago replay` on it without --set.",
                        code="replay.difference",
                    ) from None
                other.merge_differently(tape, deliveries, pinned)
                merging.done += 1
    return {
        "run": run.manifest.run,
        "rounds": sum(shard.state.closed for shard in run.shards),
        "changed": differences(run.manifest.config, config),
        "bits_per_byte_recorded": bits_per_byte(run.manifest, run.shards),
        "bits_per_byte_what_if": bits_per_byte(run.manifest, others),
        "same": [shard.digests() for shard in run.shards] == [other.digests() for other in others],
    }


def bits_per_byte(manifest: Manifest, shards: Sequence[RecordedShard]) -> float:
    """Return the held-out loss of the run's present parameters."""
    import numpy as np

    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import assemble, compile_validation

    measure = compile_validation(manifest.config, open_corpus(manifest.config.data.corpus))
    vectors = [[np.asarray(fragment.published_N) for fragment in shard.fragments] for shard in shards]
    return measure(assemble(manifest, in_order(manifest, vectors)))
