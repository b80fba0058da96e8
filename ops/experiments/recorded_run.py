"""Merge the rounds of a recorded run again, by its own rules or by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from archipelago.broker.config import RunConfig, differences
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest_of, unpack
from archipelago.merger.record import Record


class RecordedRun:
    """The merger's state in a recorded run, which advances round by round.

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


def repeat(record: Record, *, islands: bool) -> dict[str, Any]:
    """Repeat the run, and compare every digest.

    Args:
        record: The record of the run.
        islands: Also repeat the islands' training; otherwise their recorded contributions are used. The training of
            users' own loops is never repeated.

    Returns:
        Plain data: counts, digests, and the first difference if there is one.
    """
    from archipelago.merger.replay import DifferenceError
    from archipelago.ops.experiments.recorded_islands import RecordedIslands

    run = RecordedRun(record, record.manifest.config)
    has_own_loops = record.manifest.config.has_own_loops
    trained = RecordedIslands(run) if islands and not has_own_loops else None
    first_difference, taken = "", 0
    rounds = run.rounds()
    with progress("repeating the rounds", len(rounds)) as repeating:
        for tape, deliveries in rounds:
            try:
                run.merge(tape, [trained.contribution(delivery) if trained else delivery for delivery in deliveries])
            except DifferenceError as error:
                first_difference = error.what
                break
            taken += len(deliveries)
            repeating.done += 1
    expected = {tape.fragment: tape.digest for tape, _ in rounds}
    found = dict(enumerate(run.digests()))
    return {
        "run": record.manifest.run,
        "rounds": run.state.closed,
        "rounds_recorded": len(rounds),
        "contributions": taken,
        "trained_again": trained.count if trained else 0,
        "own_loops": has_own_loops,
        "islands_from_payloads": trained.lost if trained else {},
        "fragments": [{"fragment": p, "digest": found[p], "recorded": expected.get(p, "")} for p in found],
        "first_difference": first_difference,
        "same": not first_difference and all(found[p] == expected.get(p, found[p]) for p in found),
    }


def what_if(record: Record, config: RunConfig, pinned: Collection[str] = ()) -> dict[str, Any]:
    """Merge the recorded contributions by the rules of another config.

    Args:
        record: The record of the run.
        config: The run's config with other rules for the merger.
        pinned: Settings that keep the config's value where the run was steered.

    Returns:
        Plain data: the changes, and the held-out loss by both sets of rules.
    """
    from archipelago.merger.replay import DifferenceError

    recorded, other = RecordedRun(record, record.manifest.config), RecordedRun(record, config)
    rounds = recorded.rounds()
    with progress("merging the rounds by both sets of rules", len(rounds)) as merging:
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
        "run": record.manifest.run,
        "rounds": recorded.state.closed,
        "changed": differences(record.manifest.config, config),
        "bits_per_byte_recorded": bits_per_byte(recorded),
        "bits_per_byte_what_if": bits_per_byte(other),
        "same": recorded.digests() == other.digests(),
    }


def bits_per_byte(run: RecordedRun) -> float:
    """Return the held-out loss of the run's present parameters."""
    import numpy as np

    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import assemble, compile_validation

    config = run.manifest.config
    measure = compile_validation(config, open_corpus(config.data.corpus))
    return measure(assemble(run.manifest, [np.asarray(fragment.published_N) for fragment in run.fragments]))
