"""The record of one run under faults, the states of its processes, and the invariants of the drained run. Pure.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from archipelago.broker.manifest import Layout
from archipelago.broker.messages import Counters, TapeEntry
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.simulation.failures import covered

#: The `start` event of an island that took over a standby's process is followed by this event.
STANDBY_USED = "was a standby"
SERVING = "training"
STOPPED, RECOVERING, DEAD = "stopped", "recovering", "dead"
_MARKS = {"start", "kill", "died", "stop", "continue"}
#: Shard, island, incarnation and sequence number of a contribution. Sequence numbers count by shard.
Identity = tuple[int, str, str, int]


@dataclass(frozen=True)
class ProcessEvent:
    """An event of a process: `start`, `ready`, `died`, or a fault that begins or is over."""

    at: float
    process: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class LoggedTurn:
    """One turn of an island's training loop, from its turn log.

    Attributes:
        at: When it ended.
        who: The incarnation of the island.
        steps: Inner steps of that incarnation so far.
    """

    at: float
    who: str
    steps: int


@dataclass(frozen=True)
class StormRecord:
    """One run under faults: the schedule, the events and turn logs of its processes, and its tape and counters.

    Attributes:
        begin, end: The measured window, from when all islands train and a merger serves until the faults end.
        step_seconds: The run's step duration: the minimum that was set, or else the median of the measured ones.
        tokens_per_step: Tokens of one inner step of one island; their mean, where batches differ.
        closed_at: When each round closed.
        sent: How many contributions islands say that they have sent, by island and incarnation.
        refused: Refused contributions, as far as the stream still holds the refusals.
        held_out_loss: Held-out loss of the final parameters; NaN if only a user's script can compute it.
    """

    begin: float
    end: float
    islands: tuple[str, ...]
    step_seconds: float
    tokens_per_step: float
    layout: Layout
    faults: tuple[Fault, ...]
    events: tuple[ProcessEvent, ...]
    turns: Mapping[str, Sequence[LoggedTurn]]
    closed_at: Mapping[int, float]
    tape: tuple[TapeEntry, ...]
    counters: Counters
    bytes_down: int
    sent: Mapping[tuple[str, str], int] = field(default_factory=dict)
    refused: frozenset[Identity] = frozenset()
    held_out_loss: float = math.nan
    unit: str = "bits per byte"
    standbys: int = 0

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
    def rounds_in_window(self) -> int:
        """Rounds that closed within the window."""
        return sum(self.begin <= at < self.end for at in self.closed_at.values())

    def steps_between(self, begin: float, end: float) -> Counter[tuple[str, str]]:
        """Count the inner steps that ended in that time, by island and incarnation."""
        out, last = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for island in self.islands:
            for turn in self.turns.get(island, ()):
                one = island, turn.who
                out[one] += turn.steps - last[one] if begin <= turn.at < end else 0
                last[one] = turn.steps
        return out


def step_seconds(turns: Sequence[LoggedTurn]) -> Iterator[float]:
    """Yield the duration of an inner step in each turn but the first of its incarnation."""
    for before, after in itertools.pairwise(turns):
        if before.who == after.who and after.steps > before.steps:
            yield (after.at - before.at) / (after.steps - before.steps)


# -- the states of islands --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A period in which an island has one state."""

    begin: float
    end: float
    state: str


Timelines = Mapping[str, Sequence[Span]]


def timelines(storm: StormRecord) -> dict[str, list[Span]]:
    """Return the states of each island, without gaps from its first start to the end of the storm."""
    return {name: _timeline(storm, name) for name in storm.islands}


def _timeline(storm: StormRecord, island: str) -> list[Span]:
    """Return the states of an island. It is ready with the first turn of each incarnation."""
    marks = [(e.at, e.what) for e in storm.events if e.process == island and e.what in _MARKS]
    first: dict[str, float] = {}
    for turn in storm.turns.get(island, ()):
        first.setdefault(turn.who, turn.at)
    marks += [(at, "ready") for at in first.values()]
    out: list[Span] = []
    state, before_stop = "", ""
    for (at, what), (until, _) in itertools.pairwise([*sorted(marks), (storm.end, "")]):
        before, state = state, _state_after(what, state, before_stop)
        before_stop = before if state == STOPPED != before else before_stop
        if state and min(until, storm.end) > at:
            out.append(Span(at, min(until, storm.end), state))
    return out


def _state_after(what: str, state: str, before_stop: str) -> str:
    """Return the state after an event. `before_stop` is the state that a stopped process returns to."""
    match what:
        case "start":
            return RECOVERING
        case "ready" if state == RECOVERING:
            return SERVING
        case "kill" | "died":
            return DEAD
        case "stop" if state not in (DEAD, ""):
            return STOPPED
        case "continue" if state == STOPPED:
            return before_stop
    return state


def seconds_in(spans: Sequence[Span], state: str, begin: float, end: float) -> float:
    """Return the seconds of a window in which an island had that state."""
    return covered(((span.begin, span.end) for span in spans if span.state == state), begin, end)


def uptime(storm: StormRecord, states: Timelines) -> float:
    """Return the share of the window in which at least one island was training."""
    spans = [(s.begin, s.end) for island in storm.islands for s in states[island] if s.state == SERVING]
    return covered(spans, storm.begin, storm.end) / storm.seconds if storm.seconds else math.nan


# -- invariants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        key: A stable name, for programs.
        name: What must hold, for people.
        found: The observed values, for people.
    """

    key: str
    name: str
    holds: bool
    found: str


def checks(storm: StormRecord) -> list[Check]:
    counters, tapes = storm.counters, storm.tapes
    waiting = counters.pending
    merged = Counter(
        (shard, m.island, m.incarnation, m.sequence)
        for shard, tape in enumerate(tapes)
        for entry in tape
        for m in entry.members
    )
    twice = [identity for identity, count in merged.items() if count > 1]
    both = sorted(storm.refused & merged.keys())
    tokens = sum(member.tokens for entry in storm.tape for member in entry.members)
    sent = _sent(storm, merged.keys() | storm.refused)
    over, incarnations = _merged_beyond_steps(storm)
    in_order = all(
        [entry.round for entry in tape] == storm.layout.rounds[shard].following(0, len(tape))
        for shard, tape in enumerate(tapes)
    )
    epochs = [[entry.epoch for entry in tape] for tape in tapes]
    rounds = storm.rounds_in_window
    return [
        Check(
            "sent", "no contribution is lost: the mergers have counted as many as the islands sent",
            sent <= counters.published,
            f"{sent:,} sent, {counters.merged:,} merged + {counters.refused:,} refused + {waiting:,} pending",
        ),
        Check(
            "drained", "no contribution waits after all islands have left",
            waiting == 0, f"{waiting:,} wait",
        ),
        Check(
            "merged-once", "no contribution is merged twice: the identities on the tape are unique",
            not twice, _examples(twice, len(merged)),
        ),
        Check(
            "tape", "the tape and the counters agree",
            (counters.merged, counters.merged_tokens) == (merged.total(), tokens),
            f"{merged.total():,} contributions of {tokens:,} tokens on the tape",
        ),
        Check(
            "refused", "no contribution is both merged and refused", not both, _examples(both, len(storm.refused)),
        ),
        Check(
            "steps", "no inner step is merged twice: no incarnation has more merged steps of a fragment than it made",
            not over, _examples(over, incarnations),
        ),
        Check("rounds", "every round is on the tape once, in order", in_order, f"{len(storm.tape):,} rounds"),
        Check(
            "epochs", "an older merger never writes after a newer one", all(of == sorted(of) for of in epochs),
            f"{sum(len(set(of)) for of in epochs)} epochs closed rounds, "
            f"the last is {max(of[-1] if of else 0 for of in epochs)}",
        ),
        Check("progress", "the run made progress: rounds closed in the storm", rounds > 0, f"{rounds:,} rounds"),
    ]  # fmt: skip


def _sent(storm: StormRecord, settled: Iterable[Identity]) -> int:
    """Return how many contributions were sent, by the numbers that islands gave them and by their last heartbeats.

    An incarnation numbers what it sends to a shard without gaps, so a number tells of all earlier ones.
    """
    numbered = Counter[tuple[int, str, str]]()
    for shard, island, who, sequence in settled:
        numbered[shard, island, who] = max(numbered[shard, island, who], sequence + 1)
    out = Counter[tuple[str, str]]()
    for (_, island, who), count in numbered.items():
        out[island, who] += count
    return (out | Counter(storm.sent)).total()


def _merged_beyond_steps(storm: StormRecord) -> tuple[list[str], int]:
    """Return the incarnations with more merged steps of a fragment than their turn logs have, and how many there are.

    Each incarnation has all of its steps in the last turn of its log.
    """
    made = {(island, turn.who): turn.steps for island, turns in storm.turns.items() for turn in turns}
    merged: Counter[tuple[str, str, int]] = Counter()
    for entry in storm.tape:
        for m in entry.members:
            merged[m.island, m.incarnation, entry.fragment] += m.steps
    over = [
        f"{island}/{who} fragment {p}: {steps} merged of {made.get((island, who), 0)}"
        for (island, who, p), steps in merged.items()
        if steps > made.get((island, who), 0)
    ]
    return over, len({(island, who) for island, who, _ in merged})


def _examples(wrong: Sequence[object], of: int) -> str:
    return f"none of {of:,}" if not wrong else f"{len(wrong)} of {of:,}, such as {wrong[0]}"
