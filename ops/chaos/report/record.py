"""The record of one run under faults. All times are seconds of one monotonic clock."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.broker.messages import Books, Pending, TapeEntry
from archipelago.broker.shards.layout import Layout
from archipelago.ops.chaos.schedule import MERGER, Fault

#: The detail of the `start` event of an island that took over a standby's process.
STANDBY_USED = "was a standby"
#: Shard, island, incarnation and sequence number of a contribution. Sequence numbers count by shard.
Identity = tuple[int, str, str, int]


@dataclass(frozen=True)
class ProcessEvent:
    """An event of a process: its start, its end, or a fault.

    Attributes:
        at: Its time.
        process: `redis`, the name of a merger or of an island.
        what: `start`, `ready`, `kill`, `stop`, `continue`, `died`, or a fault of its link, disk or clock that begins
            or is over.
        detail: Further information, for people.
    """

    at: float
    process: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of an island's training loop, from its turn log.

    Attributes:
        at: When it ended.
        who: The incarnation of the island.
        steps: Inner steps of that incarnation so far.
        idle: Seconds that the device had no work before this step.
        waited: Seconds that the training thread was ready to run and had no core.
    """

    at: float
    who: str
    steps: int
    idle: float
    waited: float


@dataclass(frozen=True)
class StormRecord:
    """One run under faults.

    Attributes:
        begin, end: The measured window, from when all islands train and a merger serves until the faults end.
        islands: The names of the islands.
        step_seconds: Minimum duration of an inner step, by island; 0 where none is set.
        tokens_per_step: Tokens of one inner step of one island; their mean, where batches differ.
        layout: The fragments of each shard.
        faults: The schedule.
        events: The events of all processes.
        turns: The turn log of each island.
        closed_at: When each round closed.
        tape: All rounds.
        books: Counts of published, merged and refused contributions.
        pending: Contributions that were still waiting at the end.
        refused: Refused contributions, as far as the stream still holds the refusals.
        held_out_loss: Held-out loss of the final parameters; NaN if only a user's script can compute it.
        unit: Its unit.
        standbys: Number of standby processes.
        mergers: The names of the merger processes.
    """

    begin: float
    end: float
    islands: tuple[str, ...]
    step_seconds: Mapping[str, float]
    tokens_per_step: float
    layout: Layout
    faults: tuple[Fault, ...]
    events: tuple[ProcessEvent, ...]
    turns: Mapping[str, Sequence[Turn]]
    closed_at: Mapping[int, float]
    tape: tuple[TapeEntry, ...]
    books: Books
    pending: Pending
    refused: frozenset[Identity] = frozenset()
    held_out_loss: float = math.nan
    unit: str = "bits per byte"
    standbys: int = 0
    mergers: tuple[str, ...] = (MERGER,)

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return self.layout.count

    @property
    def tapes(self) -> list[list[TapeEntry]]:
        """The tape of each shard. Its rounds are those of the run."""
        out: list[list[TapeEntry]] = [[] for _ in range(self.layout.shards)]
        for entry in self.tape:
            out[self.layout.shard_of(entry.round)].append(entry)
        return out

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.begin

    @property
    def shortest_step_seconds(self) -> float:
        """The run's step duration: the shortest that was set, or else the median of the measured ones."""
        given = min(self.step_seconds.values())
        if given > 0:
            return given
        return statistics.median([s for turns in self.turns.values() for s in step_seconds(turns)] or [math.nan])

    @property
    def training_loss(self) -> float:
        """The mean training loss that the islands reported in the last tenth of the rounds."""
        losses = [entry.loss for entry in self.tape[-max(1, len(self.tape) // 10) :] if math.isfinite(entry.loss)]
        return statistics.fmean(losses) if losses else math.nan

    @property
    def rounds_in_window(self) -> int:
        """Rounds that closed within the window."""
        return sum(self.begin <= at < self.end for at in self.closed_at.values())

    def steps_between(self, island: str, begin: float, end: float) -> int:
        """Count the inner steps that the island ended in that time."""
        out, last = 0, Counter[str]()
        for turn in self.turns.get(island, ()):
            out += turn.steps - last[turn.who] if begin <= turn.at < end else 0
            last[turn.who] = turn.steps
        return out


def step_seconds(turns: Sequence[Turn]) -> Iterable[float]:
    """Yield the duration of an inner step in each turn but the first of its incarnation."""
    for before, after in itertools.pairwise(turns):
        if before.who == after.who and after.steps > before.steps:
            yield (after.at - before.at) / (after.steps - before.steps)


def has_member(entry: TapeEntry, island: str, incarnation: str = "") -> bool:
    """Return whether a contribution of that island, or of that incarnation, was merged into a round."""
    return any(m.island == island and incarnation in ("", m.incarnation) for m in entry.members)
