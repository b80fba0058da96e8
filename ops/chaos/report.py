"""A storm's events into figures: lanes, goodput, where the time went, and what must hold. Pure.

Words: a storm's *window* is what is measured, from when all islands train to the end of the faults. An island's time
is *allocated* for all of it. *Useful* are the inner steps that were merged; *possible* ones are those that allocated
time has room for at the run's step duration.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archipelago.broker.messages import Books, Pending, TapeEntry
from archipelago.ops.chaos.baselines import Baselines, Ran, Span, computed, longest_pause, sampled
from archipelago.ops.chaos.schedule import MERGER, REDIS, Fault

STOOD_IN = "was a standby"
"""what is noted of an island that one became"""
STALL_SECONDS = 0.01
PART_SECONDS = 5.0
"""An island takes part while it was merged into a round of the last so many seconds."""
Identity = tuple[str, str, int]
Spans = list[Span]


@dataclass(frozen=True)
class Happening:
    """Something that was done to a process, or that it did: start, ready, kill, stop, continue, died, or a fault of
    its link or disk that begins or is over.
    """

    at: float
    process: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of an island's loop, from its turn log."""

    at: float
    who: str
    """its incarnation"""
    steps: int
    """inner steps of that incarnation so far"""
    versions: int
    between: float
    """seconds that its training thread was busy between two steps"""
    idle: float
    """seconds that its device had nothing to do before this step"""
    waited: float
    """seconds that its thread was ready to run and had no core"""


@dataclass(frozen=True)
class Look:
    """The run as the Redis had it at one moment."""

    at: float
    live: int
    """islands heard of lately"""
    round: int


@dataclass(frozen=True)
class Storm:
    """All that is known of one run under faults. Times are seconds of one clock."""

    begin: float
    end: float
    islands: tuple[str, ...]
    step_seconds: Mapping[str, float]
    """of each island, at the least; 0 where none is set"""
    tokens_per_step: int
    fragments: int
    faults: tuple[Fault, ...]
    happenings: tuple[Happening, ...]
    turns: Mapping[str, Sequence[Turn]]
    seen: Mapping[int, float]
    """when each round was seen closed"""
    looks: tuple[Look, ...]
    tape: tuple[TapeEntry, ...]
    books: Books
    pending: Pending
    refused: frozenset[Identity] = frozenset()
    """refused for good, as far as the stream still says it"""
    bits_per_byte: float = math.nan
    interval: int = 24
    """H"""
    checkpoint_seconds: float = 10.0
    standbys: int = 0
    """processes that waited beside the islands, to become one that is started again"""

    @property
    def seconds(self) -> float:
        """Of the window."""
        return self.end - self.begin

    @property
    def shortest_step_seconds(self) -> float:
        """The run's step duration: the one that was set, else the median of what was seen."""
        given = min(self.step_seconds.values())
        if given > 0:
            return given
        return statistics.median([s for turns in self.turns.values() for s in _step_seconds(turns)] or [math.nan])

    def steps_between(self, island: str, begin: float, end: float) -> int:
        """Inner steps that the island ended in that time."""
        out, last = 0, Counter[str]()
        for turn in self.turns.get(island, ()):
            out += turn.steps - last[turn.who] if begin <= turn.at < end else 0
            last[turn.who] = turn.steps
        return out


def _step_seconds(turns: Sequence[Turn]) -> Iterable[float]:
    for before, after in itertools.pairwise(turns):
        if before.who == after.who and after.steps > before.steps:
            yield (after.at - before.at) / (after.steps - before.steps)


# -- lanes ------------------------------------------------------------------------------------------------------------


def lanes(storm: Storm) -> dict[str, Spans]:
    """Each process's states, without gaps from its first start to the storm's end."""
    return {name: _lane(storm, name) for name in (REDIS, MERGER, *storm.islands)}


def _lane(storm: Storm, process: str) -> Spans:
    marks = [(h.at, h.what) for h in storm.happenings if h.process == process and h.what in _STATES]
    marks += [(at, "ready") for at in _ready_times(storm, process)]
    out: Spans = []
    state, since, under = "", 0.0, ""
    for at, what in [*sorted(marks), (storm.end, "end")]:
        at = min(at, storm.end)
        new = _after(what, state, under)
        if new == state:
            continue
        if state and at > since:
            joins = bool(out) and out[-1].state == state
            begin = out.pop().begin if joins else since
            out.append(Span(begin, at, state))
        under = state if new == "stopped" else under
        state, since = new, at
    return out


_STATES = {"start", "ready", "kill", "died", "stop", "continue"}
_SERVING = "training"


def _after(what: str, state: str, under: str) -> str:
    """The state that comes after that mark; `under` is what a stopped process goes back to."""
    match what:
        case "start":
            return "recovering"
        case "ready" if state == "recovering":
            return _SERVING
        case "kill" | "died":
            return "dead"
        case "stop" if state not in ("dead", ""):
            return "stopped"
        case "continue" if state == "stopped":
            return under
        case "end":
            return ""
    return state


def _ready_times(storm: Storm, process: str) -> list[float]:
    """When an island began to train, and when rounds closed: the first one after a start is the merger's being ready.

    The server says itself when it is.
    """
    if process == MERGER:
        return sorted(storm.seen.values())
    out, known = [], set()
    for turn in storm.turns.get(process, ()):
        if turn.who not in known:
            out.append(turn.at)
            known.add(turn.who)
    return out


def seconds_in(spans: Spans, state: str, begin: float, end: float) -> float:
    """Of that state, within a window."""
    return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans if s.state == state)


def uptime(storm: Storm, found: Mapping[str, Spans]) -> float:
    """Share of the window in which some island was training."""
    edges = sorted(
        (max(s.begin, storm.begin), min(s.end, storm.end))
        for island in storm.islands
        for s in found[island]
        if s.state == _SERVING and s.end > storm.begin
    )
    covered, reached = 0.0, storm.begin
    for begin, end in edges:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / storm.seconds if storm.seconds else math.nan


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Where the allocated time of the islands went, each as a share of it. They sum to one, but for what is rounded."""

    useful: float
    """inner steps that were merged"""
    lost: float
    """steps that were trained and never merged"""
    idle: float
    """trained slower than the step duration allows: stalls, a busy machine, an island that is slow"""
    stopped: float
    recovering: float
    """started and not yet training: imports, compiling, joining"""
    dead: float


def shares(storm: Storm, found: Mapping[str, Spans]) -> Shares:
    """Of all islands together."""
    allocated = storm.seconds * len(storm.islands)
    step = storm.shortest_step_seconds

    def share(state: str) -> float:
        return sum(seconds_in(found[i], state, storm.begin, storm.end) for i in storm.islands) / allocated

    trained = sum(storm.steps_between(i, storm.begin, storm.end) for i in storm.islands) * step / allocated
    useful = merged_steps(storm) * step / allocated
    return Shares(
        useful, trained - useful, share(_SERVING) - trained, share("stopped"), share("recovering"),
        1.0 - sum(share(state) for state in (_SERVING, "stopped", "recovering")),
    )  # fmt: skip


def merged_steps(storm: Storm) -> float:
    """Inner steps of the window that were merged, mean over the fragments.

    What was trained outside of the window is taken off as if all of it had been merged: no step too many.
    """
    merged = sum(member.steps for entry in storm.tape for member in entry.members) / storm.fragments
    outside = sum(
        storm.steps_between(i, -math.inf, storm.begin) + storm.steps_between(i, storm.end, math.inf)
        for i in storm.islands
    )
    return merged - outside


def possible_while_live(storm: Storm, found: Mapping[str, Spans]) -> float:
    """Inner steps that the islands had time for while they trained, each at its own step duration."""
    fallback = storm.shortest_step_seconds
    return sum(
        seconds_in(found[i], _SERVING, storm.begin, storm.end) / (storm.step_seconds[i] or fallback)
        for i in storm.islands
    )


@dataclass(frozen=True)
class Waits:
    """How often something took longer than 10 ms, and the worst of it."""

    over_10_ms: int
    worst_seconds: float
    net_over_10_ms: int
    """the same, less what the thread waited meanwhile for a core that others had"""
    net_worst_seconds: float


@dataclass(frozen=True)
class Stalls:
    """How long islands that nobody touched were kept from their steps, in the window."""

    turns: int
    """of their loops"""
    idle: Waits
    """the device had no step in hand"""
    between: Waits
    """the training thread was busy between two steps; the device works on meanwhile"""


def stalls(storm: Storm, found: Mapping[str, Spans]) -> Stalls:
    """Over all islands; what overlaps a time that the island was stopped is not counted."""
    pairs = [pair for island in storm.islands for pair in _undisturbed(storm, island, found[island])]
    # A device that stands idle may have done so since the turn before; what lies between two steps is in one turn.
    idle = _waits([(turn.idle, turn.waited + before.waited) for before, turn in pairs])
    return Stalls(len(pairs), idle, _waits([(turn.between, turn.waited) for _, turn in pairs]))


def _waits(seconds_waited: Sequence[tuple[float, float]]) -> Waits:
    gross = [seconds for seconds, _ in seconds_waited]
    net = [max(0.0, seconds - waited) for seconds, waited in seconds_waited]
    return Waits(
        sum(s > STALL_SECONDS for s in gross), max(gross, default=0.0),
        sum(s > STALL_SECONDS for s in net), max(net, default=0.0),
    )  # fmt: skip


def _undisturbed(storm: Storm, island: str, spans: Spans) -> Iterable[tuple[Turn, Turn]]:
    """Turns of the window, each with the one before it in the same life (at first: with itself)."""
    stopped = [span for span in spans if span.state == "stopped"]
    lives: dict[str, Turn] = {}
    for turn in storm.turns.get(island, ()):
        before = lives.get(turn.who, turn)
        lives[turn.who] = turn
        slack = max(turn.idle, turn.between) + storm.step_seconds[island]
        touched = any(span.begin <= turn.at and span.end >= before.at - slack for span in stopped)
        if storm.begin <= turn.at < storm.end and not touched:
            yield before, turn


@dataclass(frozen=True)
class Return:
    """An island was killed: how long each part of its return took. NaN for what did not come before the storm's end,
    or before it was killed again.
    """

    island: str
    at: float
    """seconds from the window's begin"""
    away_seconds: float
    """until it was started again"""
    start_seconds: float
    """from there until its first step"""
    merge_seconds: float
    """from there until a contribution of its new life was in a closed round"""
    total_seconds: float


def returns(storm: Storm) -> list[Return]:
    """One for each kill of an island."""
    kills = [h for h in storm.happenings if h.what in ("kill", "died") and h.process in storm.islands]
    return [_return(storm, kill) for kill in kills]


def _return(storm: Storm, kill: Happening) -> Return:
    mine = [h for h in storm.happenings if h.process == kill.process and h.at > kill.at]
    again = min((h.at for h in mine if h.what in ("kill", "died")), default=math.inf)
    started = min((h.at for h in mine if h.what == "start"), default=math.nan)
    life = [turn for turn in storm.turns.get(kill.process, ()) if kill.at < turn.at < again]
    if not life:
        return Return(kill.process, kill.at - storm.begin, started - kill.at, math.nan, math.nan, math.nan)
    first, who = life[0].at, life[0].who
    contributed = min((storm.seen.get(e.round, math.inf) for e in storm.tape if _has(e, kill.process, who)),
                      default=math.nan)  # fmt: skip
    return Return(
        kill.process, kill.at - storm.begin, started - kill.at, first - started, contributed - first,
        contributed - kill.at,
    )  # fmt: skip


def size_live_part(storm: Storm, points: int = 240) -> list[tuple[float, int, int, int]]:
    """(seconds, islands that should be there, heard of lately, merged lately) at even times over the window."""
    merged = {i: sorted(storm.seen[e.round] for e in storm.tape if e.round in storm.seen and _has(e, i))
              for i in storm.islands}  # fmt: skip
    out = []
    for n in range(points + 1):
        at = storm.begin + storm.seconds * n / points
        live = next((look.live for look in reversed(storm.looks) if look.at <= at), 0)
        part = sum(any(at - PART_SECONDS < t <= at for t in times) for times in merged.values())
        out.append((round(at - storm.begin, 3), len(storm.islands), live, part))
    return out


def _has(entry: TapeEntry, island: str, incarnation: str = "") -> bool:
    return any(m.island == island and incarnation in ("", m.incarnation) for m in entry.members)


def staleness(storm: Storm) -> dict[int, int]:
    """Contributions merged at each staleness."""
    return dict(sorted(Counter(member.staleness for entry in storm.tape for member in entry.members).items()))


# -- what must hold ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    holds: bool
    found: str


def checks(storm: Storm) -> list[Check]:
    """The design's invariants that can be seen from outside, once the run is drained."""
    books, pending = storm.books, storm.pending
    merged = Counter((m.island, m.incarnation, m.sequence) for entry in storm.tape for m in entry.members)
    twice = [identity for identity, count in merged.items() if count > 1]
    both = storm.refused & merged.keys()
    epochs = [entry.epoch for entry in storm.tape]
    gaps = [entry.round for n, entry in enumerate(storm.tape, 1) if entry.round != n]
    over = _counted_twice(storm)
    tokens = sum(m.tokens for entry in storm.tape for m in entry.members)
    return [
        Check(
            "books balance: published = merged + refused + pending",
            books.published == books.merged + books.refused + pending.contributions,
            f"{books.published:,} = {books.merged:,} + {books.refused:,} + {pending.contributions:,}",
        ),
        Check(
            "and in tokens",
            books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens,
            f"{books.published_tokens:,} = {books.merged_tokens:,} + {books.refused_tokens:,} + {pending.tokens:,}",
        ),
        Check("nothing waits once all have left", pending.contributions == 0, f"{pending.contributions:,} wait"),
        Check("nothing is merged twice: identities on the tape are unique", not twice, _some(twice, len(merged))),
        Check(
            "the tape and the books agree",
            (books.merged, books.merged_tokens) == (merged.total(), tokens),
            f"{merged.total():,} contributions of {tokens:,} tokens on the tape",
        ),
        Check("nothing is merged and refused", not both, _some(sorted(both), len(storm.refused))),
        Check(
            "no inner step is merged twice: each life's merged steps of a fragment are steps that it made",
            not over, _some(over, len({identity[:2] for identity in merged})),
        ),
        Check("every round is on the tape once, in order", not gaps, f"{len(storm.tape):,} rounds"),
        Check("an older merger never writes after a newer one", epochs == sorted(epochs),
              f"{len(set(epochs))} epochs"),
        Check("the run went on: rounds closed in the storm", _closed(storm) > 0, f"{_closed(storm):,} rounds"),
    ]  # fmt: skip


def _closed(storm: Storm) -> int:
    return sum(storm.begin <= at < storm.end for at in storm.seen.values())


def _counted_twice(storm: Storm) -> list[str]:
    """Lives whose merged steps of a fragment are more than the steps in their own turn log."""
    made = {(i, turn.who): turn.steps for i, turns in storm.turns.items() for turn in turns}
    merged: Counter[tuple[str, str, int]] = Counter()
    for entry in storm.tape:
        for m in entry.members:
            merged[m.island, m.incarnation, entry.fragment] += m.steps
    return [
        f"{island}/{who} fragment {p}: {steps} merged of {made.get((island, who), 0)}"
        for (island, who, p), steps in merged.items()
        if steps > made.get((island, who), 0)
    ]


def _some(wrong: Sequence[object], of: int) -> str:
    return f"none of {of:,}" if not wrong else f"{len(wrong)} of {of:,}, such as {wrong[0]}"


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """The same run without faults, to as many merged tokens."""

    bits_per_byte: float
    tokens_merged: int
    seconds: float
    goodput: float
    stalls: Stalls


@dataclass(frozen=True)
class Figures:
    """What a storm comes to."""

    seconds: float
    islands: int
    step_seconds: float
    ceiling: float
    """of goodput, where an island is slower than the others: the best that its own pace allows"""
    goodput: float
    """merged inner steps over possible ones"""
    goodput_of_live_time: float
    """merged inner steps over those that the islands had time for while they trained"""
    uptime: float
    shares: Shares
    rounds: int
    rounds_per_minute: float
    contributions_per_round: float
    faults: dict[str, int]
    returns: list[Return]
    return_seconds_median: float
    return_seconds_worst: float
    stalls: Stalls
    staleness: dict[int, int]
    tokens_trained: int
    tokens_merged: int
    tokens_refused: int
    tokens_lost: int
    bytes_up: int
    bytes_down: int
    bits_per_byte: float
    checks: list[Check]
    holds: bool
    control: Control | None = None
    computed: Baselines | None = None
    """what others would have made of the same failures: computed, not run"""
    baselines: list[Ran] = field(default_factory=list)
    """what others made of them, where they ran"""
    size_live_part: list[tuple[float, int, int, int]] = field(default_factory=list)
    standbys: int = 0
    stood_in: int = 0
    """starts of islands for which a standby was ready"""


def figures(storm: Storm, control: Control | None = None, baselines: Sequence[Ran] = ()) -> Figures:
    """All of them."""
    found, must = lanes(storm), checks(storm)
    step, back = storm.shortest_step_seconds, returns(storm)
    totals = [r.total_seconds for r in back if not math.isnan(r.total_seconds)]
    spent = shares(storm, found)
    trained = sum(storm.steps_between(i, -math.inf, math.inf) for i in storm.islands) * storm.tokens_per_step
    merged = storm.books.merged_tokens // storm.fragments
    live = possible_while_live(storm, found)
    return Figures(
        seconds=storm.seconds,
        islands=len(storm.islands),
        step_seconds=step,
        ceiling=statistics.fmean(step / (storm.step_seconds[i] or step) for i in storm.islands),
        goodput=spent.useful,
        goodput_of_live_time=merged_steps(storm) / live if live else math.nan,
        uptime=uptime(storm, found),
        shares=spent,
        rounds=_closed(storm),
        rounds_per_minute=_closed(storm) / storm.seconds * 60,
        contributions_per_round=statistics.fmean(len(e.members) for e in storm.tape) if storm.tape else 0.0,
        faults=dict(sorted(Counter(f"{f.kind} {f.target}" for f in storm.faults).items())),
        returns=back,
        return_seconds_median=statistics.median(totals) if totals else math.nan,
        return_seconds_worst=max(totals, default=math.nan),
        stalls=stalls(storm, found),
        staleness=staleness(storm),
        tokens_trained=trained,
        tokens_merged=merged,
        tokens_refused=storm.books.refused_tokens // storm.fragments,
        tokens_lost=trained - merged,
        bytes_up=storm.books.bytes_up,
        bytes_down=storm.books.bytes_down,
        bits_per_byte=storm.bits_per_byte,
        checks=must,
        holds=all(check.holds for check in must),
        control=control,
        computed=computed(
            found,
            {i: storm.step_seconds[i] or step for i in storm.islands},
            storm.begin,
            storm.end,
            storm.interval,
            storm.checkpoint_seconds,
        ),
        baselines=list(baselines),
        size_live_part=size_live_part(storm),
        standbys=storm.standbys,
        stood_in=sum(happening.what == STOOD_IN for happening in storm.happenings),
    )


OURS = "islands"


def as_ran(storm: Storm, found: Figures) -> Ran:
    """The islands' own figures in the form of those that ran beside them."""
    turns = [turn for island in storm.islands for turn in storm.turns.get(island, ())]
    returned = [r.away_seconds + r.start_seconds for r in found.returns if not math.isnan(r.start_seconds)]
    merged = sorted(((storm.seen[e.round], e) for e in storm.tape if e.round in storm.seen), key=lambda pair: pair[0])
    steps = itertools.accumulate(sum(m.steps for m in entry.members) / storm.fragments for _, entry in merged)
    useful = merged_steps(storm)
    return Ran(
        way=OURS,
        seconds=found.seconds,
        goodput=found.goodput,
        steps_useful=useful,
        steps_made=sum(storm.steps_between(island, storm.begin, storm.end) for island in storm.islands),
        tokens=found.tokens_merged,
        bits_per_byte=found.bits_per_byte,
        return_seconds_median=statistics.median(returned) if returned else math.nan,
        return_seconds_worst=max(returned, default=math.nan),
        pause_seconds_worst=longest_pause([turn.at for turn in turns], storm.begin, storm.end),
        curve=sampled(list(zip([at for at, _ in merged], steps, strict=True)), storm.begin, storm.end, useful),
    )


def as_control(storm: Storm) -> Control:
    """A run without faults, to hold a storm against."""
    found = lanes(storm)
    return Control(
        storm.bits_per_byte, storm.books.merged_tokens // storm.fragments, storm.seconds,
        shares(storm, found).useful, stalls(storm, found),
    )  # fmt: skip


def as_data(found: Figures) -> dict[str, Any]:
    """For report.json."""
    return asdict(found)
