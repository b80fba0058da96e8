"""The merger on a broker in memory: whatever comes, and however often it is cut off or replaced, the books balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, UnreachableError
from archipelago.broker.messages import LIVE_SECONDS, Call, Contribution, Refusal, Resume, Snapshot
from archipelago.broker.wire import digest, pack
from archipelago.merger.service import LEASE_SECONDS, Merger, serve
from archipelago.merger.state import RunState
from archipelago.merger.weights import path
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.merger.simulated_broker import CONFIG, SIZE, Faulty, SimulatedBroker, constant, state_of, values
from tests.tiers import examples

# -- one merger ----------------------------------------------------------------------------------------------------


def test_a_round_of_one_island() -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    assert not merger.turn(0.0)
    simulated.send("a", 1, constant(1.0), global_step=9, loss=3.0)
    assert merger.turn(0.0)
    # Nesterov: b = 1, θ = 0 − ½(1 + ½ · 1).
    assert simulated.parameters(0) == [-0.75] * SIZE
    assert simulated.parameters(1) == [0.0] * SIZE
    ((call,), (snapshot,)) = simulated.events(Call), simulated.events(Snapshot)
    assert call == Call(1, 0)
    assert (snapshot.version, snapshot.step, snapshot.merged) == (1, 9, "a/x/0")
    (entry,) = simulated.transport.reader.tape(5)
    assert (entry.round, entry.fragment, entry.version, entry.loss, entry.live) == (1, 0, 1, 3.0, 1)
    assert entry.digest == digest(constant(-0.75).tobytes())
    assert not merger.turn(0.0)
    simulated.balance()


def test_clipping_compares_norms_by_their_path() -> None:
    """The first ones go over half an interval at the begin of the warm-up, a 50th of the later ones' path."""
    simulated = SimulatedBroker()
    simulated.live("a", "b")
    merger = simulated.merger()
    near: dict[str, Any] = {"steps": 4, "global_step": 4}
    far: dict[str, Any] = {"steps": 8, "global_step": 100}
    longer = path(CONFIG, **far) / path(CONFIG, **near)
    assert longer > 50
    sizes = [(1.0, near)] * 8 + [(longer, far)] * 2 + [(100.0 * longer, far)] * 2
    for number, (size, when) in enumerate(sizes, 1):
        for island in "ab":
            simulated.send(island, number, constant(size), **when)
        assert merger.turn(0.0)
    clips = [member.clip for entry in simulated.transport.reader.tape(20) for member in entry.members]
    assert clips[:20] == [1.0] * 20
    assert clips[20:] == pytest.approx([0.03] * 4), "three times the usual is the most"


def test_rounds_of_two_islands_in_turn() -> None:
    simulated = SimulatedBroker()
    simulated.live("a", "b")
    merger = simulated.merger()
    for number in (1, 2, 3, 4):
        simulated.send("a", number, constant(1.0))
        assert not merger.turn(0.0)
        assert [call.round for call in simulated.events(Call)] == list(range(1, number + 1))
        simulated.send("b", number, constant(3.0))
        assert merger.turn(0.0)
    # The mean is 2. b = 2, 3; θ = −½(2 + 1), then − ½(2 + 1.5).
    assert simulated.parameters(0) + simulated.parameters(1) == pytest.approx([-3.25] * 2 * SIZE)
    assert [(s.fragment, s.version) for s in simulated.events(Snapshot)] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert len(simulated.events(Call)) == 4
    simulated.balance()


def test_a_grace_window_ends_by_the_clock() -> None:
    simulated = SimulatedBroker()
    simulated.live("a", "silent")
    merger = simulated.merger()
    simulated.send("a", 1, constant(1.0), step_seconds=0.25)
    assert not merger.turn(0.0)
    assert merger.rounds.deadline() == 1.0  # ½ · τ 2 · H/P 4 · 0.25 s
    simulated.clock.now = 0.999
    assert not merger.turn(0.0)
    simulated.clock.now = 1.0
    assert merger.turn(0.0)
    (entry,) = simulated.transport.reader.tape(1)
    assert (entry.grace_seconds, entry.open_seconds, entry.live) == (1.0, 1.0, 2)


def test_a_late_contribution_joins_the_next_round_of_its_fragment() -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    simulated.send("a", 1, constant(1.0))
    merger.turn(0.0)
    simulated.send("late", 1, constant(1.0), base=0)
    assert not merger.turn(0.0)
    assert simulated.transport.reader.backlog() == 1
    for number in (2, 3):
        simulated.send("a", number, constant(1.0))
        merger.turn(0.0)
    (entry,) = simulated.transport.reader.tape(1)
    assert [(m.island, m.staleness) for m in entry.members] == [("late", 1), ("a", 0)]
    assert entry.members[0].weight < entry.members[1].weight
    assert state_of(simulated).staleness.value < 1.0  # which the next gains are measured by
    simulated.balance()


def test_the_step_that_is_stamped_is_the_furthest_of_all() -> None:
    simulated = SimulatedBroker()
    simulated.live("fast", "slow")
    merger = simulated.merger()
    for number, (fast, slow) in enumerate([(30, 10), (35, 40), (20, 25)], start=1):
        simulated.send("fast", number, constant(1.0), global_step=fast)
        simulated.send("slow", number, constant(1.0), global_step=slow)
        merger.turn(0.0)
    assert [s.step for s in simulated.events(Snapshot)] == [30, 40, 40]
    assert [entry.step for entry in simulated.transport.reader.tape(3)] == [30, 40, 40]


def test_contributions_of_departed_islands_are_merged_without_live_islands() -> None:
    simulated = SimulatedBroker()
    simulated.live("a", state="leaving")
    merger = simulated.merger()
    for number in (2, 1):
        simulated.send("a", number, constant(1.0), farewell=True)
    assert merger.turn(0.0)
    assert simulated.parameters(0) + simulated.parameters(1) == pytest.approx([-0.75] * 2 * SIZE)
    assert simulated.events(Call) == []
    simulated.balance()


def test_live_islands_train_and_have_a_recent_heartbeat() -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    simulated.live("silent")
    simulated.clock.now = 0.1
    simulated.live("slow")
    simulated.clock.now = LIVE_SECONDS
    simulated.live("trains")
    for state in ("joining", "leaving", "left", "done"):
        simulated.live(state, state=state)
    merger.turn(0.0)
    assert merger.live == {"trains", "slow"}


# -- what is refused -----------------------------------------------------------------------------------------------

#: Bad contributions, and the codes under which their refusals are logged.
CODES = {
    "nan": "wire.norm", "inf": "wire.norm", "huge": "wire.norm", "size": "wire", "codec": "codec",
    "digest": "wire.digest", "ahead": "ahead", "future": "base", "fragment": "fragment", "bytes": "wire",
    "empty": "wire", "tokens": "tokens", "shard": "data", "place": "data", "said": "wire.size",
}  # fmt: skip
BAD = list(CODES)


def refusal_codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the codes of the refusals that were logged, oldest first."""
    codes = [str(getattr(record, "code", "")) for record in caplog.records]
    return [code.removeprefix("refused.") for code in codes if code.startswith("refused.")]


def send_bad(simulated: SimulatedBroker, kind: str, island: str, number: int) -> Contribution:
    """A contribution that nobody may merge."""
    good = constant(1.0)
    with np.errstate(over="ignore"):
        odd = {"nan": np.nan, "inf": -np.inf, "huge": 3e38}.get(kind, 1.0)
    match kind:
        case "nan" | "inf" | "huge":
            spoilt = good.copy()
            spoilt[5] = odd
            return simulated.send(island, number, spoilt)
        case "size":
            return simulated.send(island, number, constant(1.0, SIZE + 1))
        case "codec":
            payload = pack(good, "float32", 0).replace(b"float32", b"float64")
            return simulated.send(island, number, good, payload=payload, codec="float64")
        case "digest":
            return simulated.send(island, number, good, digest="0" * 32)
        case "ahead":
            return simulated.send(island, number + 2000, good)
        case "future":
            return simulated.send(island, number, good, base=1000)
        case "fragment":
            return simulated.send(island, number, good, fragment=7)
        case "bytes":
            return simulated.send(island, number, good, payload=b"ARC0" + bytes(50))
        case "empty":
            return simulated.send(island, number, good, payload=b"")
        case "shard":
            return simulated.send(island, number, good, data="0:0:1 64:0:1")
        case "place":
            return simulated.send(island, number, good, data="0:0:1 \u0663:0:1")
        case "said":
            return simulated.send(island, number, good, bytes=1 << 62)
        case _:
            return simulated.send(island, number, good, tokens=1 << 50)


@pytest.mark.parametrize("kind", BAD)
def test_each_refusal_says_why_and_touches_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    before = simulated.digests()
    sent = send_bad(simulated, kind, "a", 1)
    assert not merger.turn(0.0)
    (refusal,) = simulated.events(Refusal)
    assert (refusal.island, refusal.incarnation, refusal.sequence) == sent.identity
    assert (refusal.round, refusal.fragment, refusal.tokens) == (sent.round, sent.fragment, sent.tokens)
    assert refusal.reason
    assert refusal_codes(caplog) == [CODES[kind]]
    assert simulated.digests() == before
    assert simulated.transport.reader.tape(1) == []
    assert simulated.events(Call) == []
    simulated.balance()
    simulated.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert simulated.parameters(0) == [-0.75] * SIZE


def test_a_base_is_judged_by_the_versions_of_its_fragment(caplog: pytest.LogCaptureFixture) -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    for closed in range(5):
        for p in range(2):
            simulated.send("b", p + 1, constant(1.0), base=simulated.version(p) + 1)
        merger.turn(0.0)
        assert [simulated.version(p) for p in range(2)] == [(closed + 1) // 2, closed // 2]
        assert refusal_codes(caplog) == ["base"] * 2 * (closed + 1)
        simulated.send("a", closed + 1, constant(1.0))
        assert merger.turn(0.0)


def test_too_stale_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    simulated = SimulatedBroker()  # the cap is 2
    simulated.live("a")
    merger = simulated.merger()
    for number in range(1, 6):
        simulated.send("a", number, constant(1.0))
        merger.turn(0.0)
    assert simulated.version(0) == 3
    simulated.send("late", 1, constant(1.0), base=0)
    merger.turn(0.0)
    assert refusal_codes(caplog) == ["stale"]
    simulated.balance()


@given(st.lists(st.tuples(st.sampled_from(BAD), st.sampled_from("ab"), st.integers(1, 3)), max_size=12))
def test_however_many_are_bad_the_parameters_stay(bad: list[tuple[str, str, int]]) -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    before = simulated.digests()
    for kind, island, number in bad:
        send_bad(simulated, kind, island, number)
    merger.turn(0.0)
    simulated.live("a", state="left")
    merger.turn(0.0)
    assert simulated.digests() == before
    assert (simulated.transport.reader.backlog(), simulated.transport.reader.books().refused) == (0, len(bad))
    simulated.balance()


def test_a_repeat_is_merged_once() -> None:
    simulated = SimulatedBroker()
    simulated.live("a", "b")
    merger = simulated.merger()
    simulated.send("a", 1, constant(1.0))
    simulated.publish(*simulated.sent[0])  # beside the first, which waits
    merger.turn(0.0)
    assert simulated.transport.reader.books().refused == 1
    simulated.send("b", 1, constant(1.0))
    assert merger.turn(0.0)
    simulated.publish(*simulated.sent[0])  # after it was merged
    merger.turn(0.0)
    simulated.publish(*simulated.sent[0])
    simulated.merger().turn(0.0)  # after a restart
    assert simulated.merged() == [("a", "x", 0), ("b", "x", 0)]
    assert [r.repeat for r in simulated.events(Refusal)] == [True] * 3
    simulated.balance()


def test_a_repeat_that_was_read_before_a_restart_is_merged_once() -> None:
    simulated = SimulatedBroker()
    simulated.live("a", "b")
    simulated.merger().turn(0.0)
    simulated.send("a", 1, constant(1.0))
    simulated.publish(*simulated.sent[0])
    simulated.transport.merger.updates(0.0)  # a merger read both, and died
    merger = simulated.merger()
    assert (simulated.transport.reader.backlog(), simulated.transport.reader.books().refused) == (1, 1)
    simulated.send("b", 1, constant(1.0))
    assert merger.turn(0.0)
    assert sorted(simulated.merged()) == [("a", "x", 0), ("b", "x", 0)]
    simulated.balance()


def test_a_refused_contribution_is_refused_again() -> None:
    """Refused once means ended: a repeat must not be judged by a later state, nor after a restart."""
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    simulated.send("a", 6, constant(1.0))  # two round trips ahead are 4
    merger.turn(0.0)
    for number in (1, 2, 3):
        simulated.send("a", number, constant(1.0))
        merger.turn(0.0)
    simulated.publish(*simulated.sent[0])
    merger.turn(0.0)
    simulated.publish(*simulated.sent[0])
    simulated.merger().turn(0.0)
    assert simulated.transport.reader.books().refused == 3
    assert ("a", "x", 0) not in simulated.merged()
    simulated.balance()


def test_refusals_leave_no_trace_that_grows() -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    merger = simulated.merger()
    for number in range(1, 30):
        send_bad(simulated, "digest", "a", number)
        simulated.send("a", number, constant(1.0))
        merger.turn(0.0)
    seen = RunState.from_json(simulated.transport.reader.merger_state()).seen["a/x"]
    assert (seen.floor, seen.above) == (58, set())


# -- any mix -------------------------------------------------------------------------------------------------------

ISLANDS = st.sampled_from("abc")
DEEDS = st.one_of(
    st.tuples(st.just("good"), ISLANDS, st.integers(-2, 2), st.integers(0, 3)),
    st.tuples(st.just("bad"), ISLANDS, st.integers(0, 2), st.sampled_from(BAD)),
    st.tuples(st.just("repeat"), ISLANDS, st.integers(0, 50), st.none()),
    st.tuples(st.sampled_from(["turn", "restart", "wait"]), ISLANDS, st.just(0), st.none()),
    st.tuples(st.sampled_from(["training", "left"]), ISLANDS, st.just(0), st.none()),
)


@given(st.lists(DEEDS, max_size=40), st.integers(1, 3))
def test_the_books_balance_after_any_mix(deeds: list[tuple[str, str, int, Any]], quorum: int) -> None:
    simulated = SimulatedBroker(quorum=quorum)
    merger = simulated.merger()
    expected: dict[tuple[str, str, int], int] = {}
    """base of those that may be merged, by identity, until a merger has read them"""
    merged, refused = set[tuple[str, str, int]](), 0

    def turn() -> None:
        nonlocal refused
        for identity, base in expected.items():
            p = next(c.fragment for c, _ in simulated.sent if c.identity == identity)
            if simulated.version(p) - base > CONFIG.sync.staleness_cap:
                refused += 1
            else:
                merged.add(identity)
        expected.clear()
        merger.turn(0.0)
        simulated.balance()

    for deed, island, number, detail in deeds:
        match deed:
            case "good":
                number = max(1, merger.rounds.closed + number)
                version = simulated.version((number - 1) % 2)
                sent = simulated.send(island, number, values(len(simulated.sent)), base=max(0, version - detail))
                expected[sent.identity] = sent.base
            case "bad":
                send_bad(simulated, detail, island, merger.rounds.closed + 1 + number)
                refused += 1
            case "repeat" if simulated.sent:
                simulated.publish(*simulated.sent[number % len(simulated.sent)])
                refused += 1
            case "turn":
                turn()
            case "restart":
                merger = simulated.merger()
            case "wait":
                simulated.clock.now += 1.0
            case "training" | "left":
                simulated.live(island, state=deed)
            case _:
                pass
    turn()
    simulated.live("a", "b", "c", state="left")
    turn()
    books = simulated.transport.reader.books()
    assert simulated.transport.reader.backlog() == 0
    assert set(simulated.merged()) == merged
    assert (books.merged, books.refused) == (len(merged), refused)
    for p in range(2):
        versions = [s.version for s in simulated.events(Snapshot) if s.fragment == p]
        assert versions == list(range(1, len(versions) + 1))
    assert [entry.round for entry in simulated.transport.reader.tape(10_000)] == list(
        range(1, merger.rounds.closed + 1)
    )
    if "restart" not in {deed for deed, *_ in deeds}:
        assert max(Counter(call.round for call in simulated.events(Call)).values(), default=0) <= 1


# -- restarts ------------------------------------------------------------------------------------------------------


def played(script: Sequence[tuple[str, int, int]], restarts: Iterable[int]) -> SimulatedBroker:
    """Plays (island, rounds ahead, versions behind) one after the other, a turn after each; new mergers in between."""
    simulated = SimulatedBroker(quorum=2)
    simulated.live("a", "b", "c")
    merger = simulated.merger()
    for index, (island, ahead, behind) in enumerate(script):
        if index in restarts:
            merger = simulated.merger()
        number = merger.rounds.closed + ahead
        base = max(0, simulated.version((number - 1) % 2) - behind)
        simulated.send(island, number, values(index), tokens=100 + index, base=base)
        merger.turn(0.0)
    if len(script) in restarts:
        merger = simulated.merger()
    simulated.live("a", "b", "c", state="left")
    merger.turn(0.0)
    simulated.balance()
    return simulated


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(ISLANDS, st.integers(1, 2), st.integers(0, 2)), max_size=16), st.sets(st.integers(0, 16)))
def test_a_restart_anywhere_goes_on_to_the_same_bits(script: list[tuple[str, int, int]], restarts: set[int]) -> None:
    undisturbed, restarted = played(script, ()), played(script, restarts)
    tapes = [
        [(e.round, e.version, e.digest, e.members, e.gain) for e in simulated.transport.reader.tape(10_000)]
        for simulated in (undisturbed, restarted)
    ]
    assert tapes[0] == tapes[1]
    assert undisturbed.digests() == restarted.digests()
    assert state_of(undisturbed) == state_of(restarted)
    assert [undisturbed.transport.merger.outer(p) for p in range(2)] == [
        restarted.transport.merger.outer(p) for p in range(2)
    ]


@settings(max_examples=examples(60))
@given(st.lists(st.floats(0.0, 2.0), min_size=2, max_size=8), st.sets(st.integers(1, 7)))
def test_a_restart_between_rounds_keeps_the_pace(delays: list[float], restarts: set[int]) -> None:
    """Grace windows depend on how long quorums took so far, and they decide who is in a round."""

    def seconds_of(restarts: Iterable[int]) -> list[tuple[float, float, str]]:
        simulated = SimulatedBroker(quorum=2)
        merger = simulated.merger()
        for number, delay in enumerate(delays, start=1):
            if number in restarts:
                merger = simulated.merger()
            simulated.live("a", "b", "silent")
            simulated.send("a", number, values(number))
            merger.turn(0.0)
            simulated.clock.now += delay
            simulated.send("b", number, values(-number % 99))
            closed = merger.turn(0.0)
            while not closed:
                simulated.live("a", "b", "silent")
                simulated.clock.now = merger.rounds.deadline() or simulated.clock.now
                closed = merger.turn(0.0)
        return [(e.grace_seconds, e.open_seconds, e.digest) for e in simulated.transport.reader.tape(100)]

    assert seconds_of(restarts) == seconds_of(())


# -- two mergers ---------------------------------------------------------------------------------------------------


def everything(simulated: SimulatedBroker) -> list[Any]:
    run = simulated.broker.runs["sample"]
    return [run.fragments.copy(), run.outer.copy(), run.state, list(run.tape), list(run.events), dict(run.books),
            dict(run.updates), run.epoch, run.lease]  # fmt: skip


@pytest.mark.parametrize("write", ["call", "refuse", "commit", "renew"])
def test_the_older_merger_is_fenced_and_writes_nothing(write: str) -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    sleeper = VirtualClock()  # its clock stood still while it slept
    old = simulated.merger("old", sleeper)
    if write == "commit":
        simulated.live("a", "b")
        simulated.send("a", 1, constant(1.0))
        assert not old.turn(0.0)
        simulated.live("b", state="left")  # now the round may close
    simulated.clock.now += LEASE_SECONDS
    simulated.live("a")
    new = simulated.merger("new")
    if write == "refuse":
        send_bad(simulated, "nan", "a", 1)
    if write == "call":
        simulated.send("a", 1, constant(1.0))
    if write == "renew":
        sleeper.now += LEASE_SECONDS
    before = everything(simulated)
    with pytest.raises(FencedError):
        old.turn(0.0)
    assert everything(simulated) == before
    new.turn(0.0)
    assert simulated.transport.reader.backlog() == 0
    simulated.balance()


def test_entries_that_a_fenced_merger_had_read_are_merged() -> None:
    """A machine that slept wakes up, reads what is meant for its successor, and only then learns that it has one."""
    simulated = SimulatedBroker()
    simulated.live("a", "b")
    old = simulated.merger("old", VirtualClock())
    simulated.clock.now += LEASE_SECONDS
    simulated.live("a", "b")
    new = simulated.merger("new")
    simulated.send("a", 1, constant(1.0))
    with pytest.raises(FencedError):
        old.turn(0.0)
    simulated.send("b", 1, constant(1.0))
    new.turn(0.0)
    new.turn(0.0)
    assert sorted(simulated.merged()) == [("a", "x", 0), ("b", "x", 0)]
    simulated.balance()


def test_only_the_holder_of_the_lease_serves() -> None:
    simulated = SimulatedBroker()
    simulated.merger("first")
    second = Merger(simulated.broker.connect("sample"), simulated.clock, "second")
    assert not second.acquire()
    simulated.clock.now += LEASE_SECONDS
    assert second.acquire()


def test_a_merger_that_turns_keeps_its_lease() -> None:
    simulated = SimulatedBroker()
    first = simulated.merger("first")
    second = Merger(simulated.broker.connect("sample"), simulated.clock, "second")
    for _ in range(20):
        simulated.clock.now += LEASE_SECONDS / 3
        first.turn(0.0)
        assert not second.acquire()


# -- serving -------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A merger that serves while the test plays the islands between two turns."""

    simulated: SimulatedBroker
    transport: Faulty
    rounds: int = 4
    turns: int = 0

    def __call__(self) -> bool:
        """`stopped`: sends what comes next whenever nothing is pending; True when all rounds have closed."""
        self.turns += 1
        assert self.turns < 500, "the merger does not get on"
        self.simulated.live("a", "b")
        closed = RunState.from_json(self.simulated.transport.reader.merger_state()).closed
        if self.simulated.transport.reader.backlog() == 0:
            if closed == self.rounds:
                return True
            send_bad(self.simulated, "nan", "a", closed + 1)
            self.simulated.send("a", closed + 1, values(closed))
            self.simulated.send("b", closed + 1, values(100 + closed))
            self.simulated.publish(*self.simulated.sent[-1])
        return False

    def pause(self, seconds: float) -> None:
        self.simulated.clock.now += seconds


def served(faults: Iterable[tuple[str, int, str]], error: BrokerError | None = None) -> Served:
    """Four rounds of two islands, each with a bad contribution and a repeat, over a connection with these faults."""
    simulated = SimulatedBroker(quorum=2)
    transport = Faulty(simulated.broker, "sample", faults)
    transport.error = error or transport.error
    course = Served(simulated, transport)
    serve(Merger(transport, simulated.clock, "merger", live_poll_seconds=0.0), course, course.pause)
    simulated.balance()
    return course


def outcome(course: Served) -> list[Any]:
    """What an outage must not change. (That a refusal was made is only remembered from the next commit on.)"""
    entries = course.simulated.transport.reader.tape(100)
    seen = RunState.from_json(course.simulated.transport.reader.merger_state())
    assert all(seen.has_seen(identity) for identity in course.simulated.merged())
    return [
        [(e.round, e.digest, e.members) for e in entries],
        course.simulated.digests(),
        course.simulated.transport.reader.books().merged,
    ]


@cache
def undisturbed() -> list[Any]:
    return outcome(served(()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "method", ["commit", "refuse", "announce", "updates", "unacknowledged", "acquire", "presences"]
)
def test_a_broken_connection_loses_nothing_and_repeats_nothing(method: str, when: str) -> None:
    course = served([(method, 0, when), (method, 2, when)])
    assert course.transport.broken >= 1
    assert outcome(course) == undisturbed()


METHODS = st.sampled_from(
    ["commit", "refuse", "announce", "updates", "unacknowledged", "merger_state", "presences", "renew", "acquire"]
)


@settings(max_examples=examples(60))
@given(st.sets(st.tuples(METHODS, st.integers(0, 12), st.sampled_from(["before", "after"])), max_size=12))
def test_any_outages_lose_nothing_and_repeat_nothing(faults: set[tuple[str, int, str]]) -> None:
    assert outcome(served(faults)) == undisturbed()


def test_a_broker_that_refuses_for_a_while_is_waited_for() -> None:
    """A Redis that is full, say: not unreachable, but as passing."""
    course = served([("commit", n, "before") for n in range(3)], BrokerError("out of memory"))
    assert course.transport.broken == 3
    assert outcome(course) == undisturbed()


def test_a_run_that_is_gone_is_not_waited_for() -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    del simulated.broker.runs["sample"]
    with pytest.raises(UnknownRunError):
        serve(merger, lambda: False, lambda seconds: pytest.fail("it waits"))


def test_every_beginning_is_announced() -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    first = simulated.merger()
    for number in (1, 2):
        simulated.send("a", number, constant(1.0))
        first.turn(0.0)
    second = simulated.merger()
    assert simulated.events(Resume) == [Resume(0, first.epoch), Resume(2, second.epoch)]
    assert second.epoch > first.epoch


def test_a_fenced_merger_leaves() -> None:
    simulated = SimulatedBroker()
    old = Merger(Faulty(simulated.broker, "sample"), simulated.clock, "old", live_poll_seconds=0.0)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 10, "it should have left"
        if asked == 3:
            simulated.clock.now += LEASE_SECONDS
            simulated.merger("new")
        return False

    serve(old, stopped, lambda seconds: None)
    assert asked == 3
    assert not Merger(
        simulated.transport, simulated.clock, "third"
    ).acquire()  # it gave nothing away that was not its own


def test_a_standby_takes_over_when_the_lease_runs_out() -> None:
    simulated = SimulatedBroker()
    simulated.live("a")
    simulated.merger("first")
    simulated.send("a", 1, constant(1.0))
    standby = Merger(Faulty(simulated.broker, "sample"), simulated.clock, "standby", live_poll_seconds=0.0)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert simulated.events(Snapshot) == []
        simulated.clock.now += seconds
        simulated.live("a")

    serve(standby, lambda: bool(simulated.events(Snapshot)), pause)
    assert sum(pauses) == pytest.approx(LEASE_SECONDS)
    assert simulated.merged() == [("a", "x", 0)]
    assert Merger(simulated.transport, simulated.clock, "third").acquire()  # it gave the lease back when it was stopped


def test_stopping_during_an_outage_still_ends() -> None:
    simulated = SimulatedBroker()
    merger = Merger(Faulty(simulated.broker, "sample"), simulated.clock, "merger", live_poll_seconds=0.0)
    turns = iter([False, False, True])
    merger.transport.merger.release = _unreachable  # type: ignore[method-assign, assignment]
    serve(merger, lambda: next(turns), lambda seconds: None)
    assert merger.epoch == 1


def _unreachable(*_: object) -> None:
    raise UnreachableError("nobody answers")
