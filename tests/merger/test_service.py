"""The merger on a broker in memory: the books balance after any contributions, outages and takeovers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, UnreachableError
from archipelago.broker.messages import LIVE_SECONDS, Call, Contribution, Refusal, Resume, Snapshot
from archipelago.broker.redis.transport import connect
from archipelago.broker.wire import digest, pack
from archipelago.merger import spectra, spectrum
from archipelago.merger.round_merge import RoundMerge, RoundSum
from archipelago.merger.service import LEASE_SECONDS, Merger
from archipelago.merger.serving import serve
from archipelago.merger.state import RunState
from archipelago.merger.weights import path
from archipelago.ops.bench.largest_islands import create, manifest_of
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.conftest import Until
from tests.harness.merger_run import CONFIG, SIZE, Faulty, MergerRun, constant, state_of, values
from tests.tiers import examples

# -- one merger ----------------------------------------------------------------------------------------------------


def test_equal_fragments_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    url, manifest = f"fakeredis://{uuid.uuid4().hex}", manifest_of(16, 3, 2)
    create(url, manifest, constant(0.0, 16))
    warmed: list[int] = []
    begin = RoundMerge.begin

    def counted(rules: RoundMerge, p: int, *rest: Any) -> RoundSum:
        warmed.append(p)
        return begin(rules, p, *rest)

    monkeypatch.setattr(RoundMerge, "begin", counted)
    Merger(connect(url, manifest.run)).warm_up()
    assert len(warmed) == 1
    warmed.clear()
    run = MergerRun()
    assert len({*run.manifest.sizes}) == 1, "equal sizes, and other tensors"
    Merger(run.transport).warm_up()
    assert sorted(warmed) == [0, 1]


def test_a_round_of_one_island() -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    assert not merger.turn(0.0)
    run.clock.now += 1.0
    run.send("a", 1, constant(1.0), global_step=9, loss=3.0)
    assert merger.turn(0.0)
    # Nesterov: b = 1, θ = 0 − ½(1 + ½ · 1).
    assert run.parameters(0) == [-0.75] * SIZE
    assert run.parameters(1) == [0.0] * SIZE
    ((call,), (snapshot,)) = run.events(Call), run.events(Snapshot)
    assert call == Call(1, 0)
    assert (snapshot.version, snapshot.step, snapshot.merged) == (1, 9, "a/x/0")
    (entry,) = run.transport.reader.tape(5)
    assert (entry.round, entry.fragment, entry.version, entry.loss, entry.live) == (1, 0, 1, 3.0, 1)
    assert entry.digest == digest(constant(-0.75).tobytes())
    assert not merger.turn(0.0)
    run.balance()


def test_clipping_compares_norms_by_their_path() -> None:
    """The first contributions cover half an interval at the start of the warm-up, a 50th of the later paths."""
    run = MergerRun()
    run.live("a", "b")
    merger = run.merger()
    near: dict[str, Any] = {"steps": 4, "global_step": 4}
    far: dict[str, Any] = {"steps": 8, "global_step": 100}
    longer = path(CONFIG, **far) / path(CONFIG, **near)
    assert longer > 50
    sizes = [(1.0, near)] * 8 + [(longer, far)] * 2 + [(100.0 * longer, far)] * 2
    for number, (size, when) in enumerate(sizes, 1):
        for island in "ab":
            run.send(island, number, constant(size), **when)
        assert merger.turn(0.0)
    clips = [member.clip for entry in run.transport.reader.tape(20) for member in entry.members]
    assert clips[:20] == [1.0] * 20
    assert clips[20:] == pytest.approx([0.03] * 4), "clipped to three times the usual norm"


def test_rounds_of_two_islands_in_turn() -> None:
    run = MergerRun()
    run.live("a", "b")
    merger = run.merger()
    for number in (1, 2, 3, 4):
        run.send("a", number, constant(1.0))
        assert not merger.turn(0.0)
        assert [call.round for call in run.events(Call)] == list(range(1, number + 1))
        run.send("b", number, constant(3.0))
        assert merger.turn(0.0)
    # The mean is 2. b = 2, 3; θ = −½(2 + 1), then − ½(2 + 1.5).
    assert run.parameters(0) + run.parameters(1) == pytest.approx([-3.25] * 2 * SIZE)
    assert [(s.fragment, s.version) for s in run.events(Snapshot)] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert len(run.events(Call)) == 4
    run.balance()


def test_a_grace_window_ends_by_the_clock() -> None:
    run = MergerRun()
    run.live("a", "silent")
    merger = run.merger()
    run.send("a", 1, constant(1.0), step_seconds=0.25)
    assert not merger.turn(0.0)
    assert merger.rounds.deadline() == 1.0  # ½ · τ 2 · H/P 4 · 0.25 s
    run.clock.now = 0.999
    assert not merger.turn(0.0)
    run.clock.now = 1.0
    assert merger.turn(0.0)
    (entry,) = run.transport.reader.tape(1)
    assert (entry.grace_seconds, entry.open_seconds, entry.live) == (1.0, 1.0, 2)


def test_a_late_contribution_joins_the_next_round_of_its_fragment() -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    run.send("a", 1, constant(1.0))
    merger.turn(0.0)
    run.send("late", 1, constant(1.0), base=0)
    assert not merger.turn(0.0)
    assert run.transport.reader.backlog() == 1
    for number in (2, 3):
        run.send("a", number, constant(1.0))
        merger.turn(0.0)
    (entry,) = run.transport.reader.tape(1)
    assert [(m.island, m.staleness) for m in entry.members] == [("late", 1), ("a", 0)]
    assert entry.members[0].weight < entry.members[1].weight
    assert state_of(run).staleness.value < 1.0  # the next gains are relative to this mean
    run.balance()


def test_the_published_step_is_the_largest_of_all_contributions() -> None:
    run = MergerRun()
    run.live("fast", "slow")
    merger = run.merger()
    for number, (fast, slow) in enumerate([(20, 10), (25, 30), (15, 20)], start=1):
        run.clock.now += 5.0
        run.send("fast", number, constant(1.0), global_step=fast)
        run.send("slow", number, constant(1.0), global_step=slow)
        merger.turn(0.0)
    assert [s.step for s in run.events(Snapshot)] == [20, 30, 30]
    assert [entry.step for entry in run.transport.reader.tape(3)] == [20, 30, 30]


def test_contributions_of_departed_islands_are_merged_without_live_islands() -> None:
    run = MergerRun()
    run.live("a", state="leaving")
    merger = run.merger()
    for number in (2, 1):
        run.send("a", number, constant(1.0), farewell=True)
    assert merger.turn(0.0)
    assert run.parameters(0) + run.parameters(1) == pytest.approx([-0.75] * 2 * SIZE)
    assert run.events(Call) == []
    run.balance()


def test_live_islands_train_and_have_a_recent_heartbeat() -> None:
    run = MergerRun()
    merger = run.merger()
    run.live("silent")
    run.clock.now = 0.1
    run.live("slow")
    run.clock.now = LIVE_SECONDS
    run.live("trains")
    for state in ("joining", "leaving", "left", "done"):
        run.live(state, state=state)
    merger.turn(0.0)
    assert merger.live == {"trains", "slow"}


# -- refusals ------------------------------------------------------------------------------------------------------

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


def send_bad(run: MergerRun, kind: str, island: str, number: int) -> Contribution:
    """Send a contribution that must be refused."""
    good = constant(1.0)
    with np.errstate(over="ignore"):
        odd = {"nan": np.nan, "inf": -np.inf, "huge": 3e38}.get(kind, 1.0)
    match kind:
        case "nan" | "inf" | "huge":
            spoilt = good.copy()
            spoilt[5] = odd
            return run.send(island, number, spoilt)
        case "size":
            return run.send(island, number, constant(1.0, SIZE + 1))
        case "codec":
            payload = pack(good, "float32", 0).replace(b"float32", b"float64")
            return run.send(island, number, good, payload=payload, codec="float64")
        case "digest":
            return run.send(island, number, good, digest="0" * 32)
        case "ahead":
            return run.send(island, number + 2000, good)
        case "future":
            return run.send(island, number, good, base=1000)
        case "fragment":
            return run.send(island, number, good, fragment=7)
        case "bytes":
            return run.send(island, number, good, payload=b"ARC0" + bytes(50))
        case "empty":
            return run.send(island, number, good, payload=b"")
        case "shard":
            return run.send(island, number, good, data="0:0:1 64:0:1")
        case "place":
            return run.send(island, number, good, data="0:0:1 \u0663:0:1")
        case "said":
            return run.send(island, number, good, bytes=1 << 62)
        case _:
            return run.send(island, number, good, tokens=1 << 20)


@pytest.mark.parametrize("kind", BAD)
def test_a_refusal_has_a_reason_and_changes_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    before = run.digests()
    sent = send_bad(run, kind, "a", 1)
    assert not merger.turn(0.0)
    (refusal,) = run.events(Refusal)
    assert (refusal.island, refusal.incarnation, refusal.sequence) == sent.identity
    assert (refusal.round, refusal.fragment, refusal.tokens) == (sent.round, sent.fragment, sent.tokens)
    assert refusal.reason
    assert refusal_codes(caplog) == [CODES[kind]]
    assert run.digests() == before
    assert run.transport.reader.tape(1) == []
    assert run.events(Call) == []
    run.balance()
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert run.parameters(0) == [-0.75] * SIZE


def test_a_base_is_compared_with_the_version_of_its_fragment(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    for closed in range(5):
        for p in range(2):
            run.send("b", p + 1, constant(1.0), base=run.version(p) + 1)
        merger.turn(0.0)
        assert [run.version(p) for p in range(2)] == [(closed + 1) // 2, closed // 2]
        assert refusal_codes(caplog) == ["base"] * 2 * (closed + 1)
        run.send("a", closed + 1, constant(1.0))
        assert merger.turn(0.0)


def test_a_contribution_over_the_staleness_cap_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()  # the cap is 2
    run.live("a")
    merger = run.merger()
    for number in range(1, 6):
        run.send("a", number, constant(1.0))
        merger.turn(0.0)
    assert run.version(0) == 3
    run.send("late", 1, constant(1.0), base=0)
    merger.turn(0.0)
    assert refusal_codes(caplog) == ["stale"]
    run.balance()


@given(st.lists(st.tuples(st.sampled_from(BAD), st.sampled_from("ab"), st.integers(1, 3)), max_size=12))
def test_bad_contributions_never_change_the_parameters(bad: list[tuple[str, str, int]]) -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    before = run.digests()
    for kind, island, number in bad:
        send_bad(run, kind, island, number)
    merger.turn(0.0)
    run.live("a", state="left")
    merger.turn(0.0)
    assert run.digests() == before
    assert (run.transport.reader.backlog(), run.transport.reader.books().refused) == (0, len(bad))
    run.balance()


def test_a_repeat_is_merged_once() -> None:
    run = MergerRun()
    run.live("a", "b")
    merger = run.merger()
    run.send("a", 1, constant(1.0))
    run.publish(*run.sent[0])  # while the first one waits
    merger.turn(0.0)
    assert run.transport.reader.books().refused == 1
    run.send("b", 1, constant(1.0))
    assert merger.turn(0.0)
    run.publish(*run.sent[0])  # after it was merged
    merger.turn(0.0)
    run.publish(*run.sent[0])
    run.merger().turn(0.0)  # after a restart
    assert run.merged() == [("a", "x", 0), ("b", "x", 0)]
    assert [r.repeat for r in run.events(Refusal)] == [True] * 3
    run.balance()


def test_a_repeat_that_was_read_before_a_restart_is_merged_once() -> None:
    run = MergerRun()
    run.live("a", "b")
    run.merger().turn(0.0)
    run.send("a", 1, constant(1.0))
    run.publish(*run.sent[0])
    run.transport.merger.updates(0.0)  # a merger reads both and dies
    merger = run.merger()
    assert (run.transport.reader.backlog(), run.transport.reader.books().refused) == (1, 1)
    run.send("b", 1, constant(1.0))
    assert merger.turn(0.0)
    assert sorted(run.merged()) == [("a", "x", 0), ("b", "x", 0)]
    run.balance()


def test_a_refused_contribution_is_refused_again() -> None:
    """A repeat of a refused contribution must not be merged in a later state, nor after a restart."""
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    run.send("a", 6, constant(1.0))  # the limit is 4 rounds ahead
    merger.turn(0.0)
    for number in (1, 2, 3):
        run.send("a", number, constant(1.0))
        merger.turn(0.0)
    run.publish(*run.sent[0])
    merger.turn(0.0)
    run.publish(*run.sent[0])
    run.merger().turn(0.0)
    assert run.transport.reader.books().refused == 3
    assert ("a", "x", 0) not in run.merged()
    run.balance()


def test_refusals_do_not_make_the_state_grow() -> None:
    run = MergerRun()
    run.live("a")
    merger = run.merger()
    for number in range(1, 30):
        send_bad(run, "digest", "a", number)
        run.send("a", number, constant(1.0))
        merger.turn(0.0)
    seen = RunState.from_json(run.transport.reader.merger_state()).seen["a/x"]
    assert (seen.floor, seen.above) == (58, set())


# -- any mix -------------------------------------------------------------------------------------------------------

ISLANDS = st.sampled_from("abc")
ACTIONS = st.one_of(
    st.tuples(st.just("good"), ISLANDS, st.integers(-2, 2), st.integers(0, 3)),
    st.tuples(st.just("bad"), ISLANDS, st.integers(0, 2), st.sampled_from(BAD)),
    st.tuples(st.just("repeat"), ISLANDS, st.integers(0, 50), st.none()),
    st.tuples(st.sampled_from(["turn", "restart", "wait"]), ISLANDS, st.just(0), st.none()),
    st.tuples(st.sampled_from(["training", "left"]), ISLANDS, st.just(0), st.none()),
)


@given(st.lists(ACTIONS, max_size=40), st.integers(1, 3))
def test_the_books_balance_after_any_actions(actions: list[tuple[str, str, int, Any]], quorum: int) -> None:
    run = MergerRun(quorum=quorum)
    merger = run.merger()
    # The bases of contributions that may be merged, by identity, until a merger has read them.
    expected: dict[tuple[str, str, int], int] = {}
    merged, refused = set[tuple[str, str, int]](), 0

    def turn() -> None:
        nonlocal refused
        for identity, base in expected.items():
            p = next(c.fragment for c, _ in run.sent if c.identity == identity)
            if run.version(p) - base > CONFIG.sync.staleness_cap:
                refused += 1
            else:
                merged.add(identity)
        expected.clear()
        merger.turn(0.0)
        run.balance()

    for action, island, number, detail in actions:
        match action:
            case "good":
                number = max(1, merger.rounds.closed + number)
                version = run.version((number - 1) % 2)
                sent = run.send(island, number, values(len(run.sent)), base=max(0, version - detail))
                expected[sent.identity] = sent.base
            case "bad":
                send_bad(run, detail, island, merger.rounds.closed + 1 + number)
                refused += 1
            case "repeat" if run.sent:
                run.publish(*run.sent[number % len(run.sent)])
                refused += 1
            case "turn":
                turn()
            case "restart":
                merger = run.merger()
            case "wait":
                run.clock.now += 1.0
            case "training" | "left":
                run.live(island, state=action)
            case _:
                pass
    turn()
    run.live("a", "b", "c", state="left")
    turn()
    books = run.transport.reader.books()
    assert run.transport.reader.backlog() == 0
    assert set(run.merged()) == merged
    assert (books.merged, books.refused) == (len(merged), refused)
    for p in range(2):
        versions = [s.version for s in run.events(Snapshot) if s.fragment == p]
        assert versions == list(range(1, len(versions) + 1))
    assert [entry.round for entry in run.transport.reader.tape(10_000)] == list(range(1, merger.rounds.closed + 1))
    if "restart" not in {action for action, *_ in actions}:
        assert max(Counter(call.round for call in run.events(Call)).values(), default=0) <= 1


# -- restarts ------------------------------------------------------------------------------------------------------


def played(script: Sequence[tuple[str, int, int]], restarts: Iterable[int]) -> MergerRun:
    """Send contributions (island, rounds ahead, versions behind), each before a turn, and restart the merger."""
    run = MergerRun(quorum=2)
    run.live("a", "b", "c")
    merger = run.merger()
    for index, (island, ahead, behind) in enumerate(script):
        if index in restarts:
            merger = run.merger()
        number = merger.rounds.closed + ahead
        base = max(0, run.version((number - 1) % 2) - behind)
        run.send(island, number, values(index), tokens=100 + index, base=base)
        merger.turn(0.0)
    if len(script) in restarts:
        merger = run.merger()
    run.live("a", "b", "c", state="left")
    merger.turn(0.0)
    run.balance()
    return run


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(ISLANDS, st.integers(1, 2), st.integers(0, 2)), max_size=16), st.sets(st.integers(0, 16)))
def test_restarts_at_any_time_give_the_same_bits(script: list[tuple[str, int, int]], restarts: set[int]) -> None:
    undisturbed, restarted = played(script, ()), played(script, restarts)
    tapes = [
        [(e.round, e.version, e.digest, e.members, e.gain) for e in run.transport.reader.tape(10_000)]
        for run in (undisturbed, restarted)
    ]
    assert tapes[0] == tapes[1]
    assert undisturbed.digests() == restarted.digests()
    assert state_of(undisturbed) == state_of(restarted)
    assert [undisturbed.transport.merger.outer(p) for p in range(2)] == [
        restarted.transport.merger.outer(p) for p in range(2)
    ]


@settings(max_examples=examples(60))
@given(st.lists(st.floats(0.0, 2.0), min_size=2, max_size=8), st.sets(st.integers(1, 7)))
def test_a_restart_keeps_the_measured_round_times(delays: list[float], restarts: set[int]) -> None:
    """Grace windows depend on the measured times of quorums, and they decide which islands are in a round."""

    def seconds_of(restarts: Iterable[int]) -> list[tuple[float, float, str]]:
        run = MergerRun(quorum=2)
        merger = run.merger()
        for number, delay in enumerate(delays, start=1):
            if number in restarts:
                merger = run.merger()
            run.live("a", "b", "silent")
            run.send("a", number, values(number))
            merger.turn(0.0)
            run.clock.now += delay
            run.send("b", number, values(-number % 99))
            closed = merger.turn(0.0)
            while not closed:
                run.live("a", "b", "silent")
                run.clock.now = merger.rounds.deadline() or run.clock.now
                closed = merger.turn(0.0)
        return [(e.grace_seconds, e.open_seconds, e.digest) for e in run.transport.reader.tape(100)]

    assert seconds_of(restarts) == seconds_of(())


# -- two mergers ---------------------------------------------------------------------------------------------------


def everything(run: MergerRun) -> list[Any]:
    stored = run.broker.runs["sample"]
    return [
        stored.fragments.copy(), stored.outer.copy(), stored.state, list(stored.tape), list(stored.events),
        dict(stored.books), dict(stored.updates), stored.epoch, stored.lease,
    ]  # fmt: skip


@pytest.mark.parametrize("write", ["call", "refuse", "commit", "renew"])
def test_the_older_merger_is_fenced_and_writes_nothing(write: str) -> None:
    run = MergerRun()
    run.live("a")
    sleeper = VirtualClock()  # the clock of this merger stood still
    old = run.merger("old", sleeper)
    if write == "commit":
        run.live("a", "b")
        run.send("a", 1, constant(1.0))
        assert not old.turn(0.0)
        run.live("b", state="left")  # now the round may close
    run.clock.now += LEASE_SECONDS
    run.live("a")
    new = run.merger("new")
    if write == "refuse":
        send_bad(run, "nan", "a", 1)
    if write == "call":
        run.send("a", 1, constant(1.0))
    if write == "renew":
        sleeper.now += LEASE_SECONDS
    before = everything(run)
    with pytest.raises(FencedError):
        old.turn(0.0)
    assert everything(run) == before
    new.turn(0.0)
    assert run.transport.reader.backlog() == 0
    run.balance()


def test_entries_that_a_fenced_merger_had_read_are_merged() -> None:
    """A machine wakes up and reads entries that are meant for its successor before it learns that it was replaced."""
    run = MergerRun()
    run.live("a", "b")
    old = run.merger("old", VirtualClock())
    run.clock.now += LEASE_SECONDS
    run.live("a", "b")
    new = run.merger("new")
    run.send("a", 1, constant(1.0))
    with pytest.raises(FencedError):
        old.turn(0.0)
    run.send("b", 1, constant(1.0))
    new.turn(0.0)
    new.turn(0.0)
    assert sorted(run.merged()) == [("a", "x", 0), ("b", "x", 0)]
    run.balance()


def test_only_the_holder_of_the_lease_serves() -> None:
    run = MergerRun()
    run.merger("first")
    second = Merger(run.broker.connect("sample"), run.clock, "second")
    assert not second.acquire()
    run.clock.now += LEASE_SECONDS
    assert second.acquire()


def test_turns_renew_the_lease() -> None:
    run = MergerRun()
    first = run.merger("first")
    second = Merger(run.broker.connect("sample"), run.clock, "second")
    for _ in range(20):
        run.clock.now += LEASE_SECONDS / 3
        first.turn(0.0)
        assert not second.acquire()


def test_a_long_merge_renews_the_lease(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    """The spectra of a large fragment take longer than a lease. Another thread changes them meanwhile."""
    run = MergerRun(replace(CONFIG, merge=replace(CONFIG.merge, embedding="isotropic", rest="isotropic")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(spectra, "BETWEEN_SECONDS", 0.001)
    first = run.merger("first")
    product, epoch, slept = spectrum.product, first.epoch, 0

    def slow(*factors: Any) -> Any:
        nonlocal slept
        run.clock.now += LEASE_SECONDS / 3
        slept += 1
        until(lambda: run.clock.now - first._renewed_at < LEASE_SECONDS / 3, "the lease to be renewed")
        return product(*factors)

    monkeypatch.setattr(spectrum, "product", slow)
    run.play(first, 1, 2)
    assert slept > 6, "the merge took at least two leases"
    assert Merger(run.broker.connect("sample"), run.clock, "second").acquire() is False
    assert first.epoch == epoch


# -- serving -------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A serving merger. The test acts as the islands between two turns."""

    run: MergerRun
    transport: Faulty
    rounds: int = 4
    turns: int = 0

    def __call__(self) -> bool:
        """Send the next contributions when none is pending. Return True when all rounds have closed."""
        self.turns += 1
        assert self.turns < 500, "the merger makes no progress"
        self.run.live("a", "b")
        closed = RunState.from_json(self.run.transport.reader.merger_state()).closed
        if self.run.transport.reader.backlog() == 0:
            if closed == self.rounds:
                return True
            send_bad(self.run, "nan", "a", closed + 1)
            self.run.send("a", closed + 1, values(closed))
            self.run.send("b", closed + 1, values(100 + closed))
            self.run.publish(*self.run.sent[-1])
        return False

    def pause(self, seconds: float) -> None:
        self.run.clock.now += seconds


def served(faults: Iterable[tuple[str, int, str]], error: BrokerError | None = None) -> Served:
    """Serve four rounds of two islands, each with a bad contribution and a repeat, over a faulty connection."""
    run = MergerRun(quorum=2)
    transport = Faulty(run.broker, "sample", faults)
    transport.error = error or transport.error
    course = Served(run, transport)
    serve(Merger(transport, run.clock, "merger", live_poll_seconds=0.0), course, course.pause)
    run.balance()
    return course


def outcome(course: Served) -> list[Any]:
    """Return everything that an outage must not change. Refusals are only remembered from the next commit on."""
    entries = course.run.transport.reader.tape(100)
    seen = RunState.from_json(course.run.transport.reader.merger_state())
    assert all(seen.has_seen(identity) for identity in course.run.merged())
    return [
        [(e.round, e.digest, e.members) for e in entries],
        course.run.digests(),
        course.run.transport.reader.books().merged,
    ]


@cache
def undisturbed() -> list[Any]:
    return outcome(served(()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "method", ["commit", "refuse", "announce", "updates", "unacknowledged", "acquire", "presences"]
)
def test_one_broken_call_loses_and_repeats_nothing(method: str, when: str) -> None:
    course = served([(method, 0, when), (method, 2, when)])
    assert course.transport.broken >= 1
    assert outcome(course) == undisturbed()


METHODS = st.sampled_from(
    ["commit", "refuse", "announce", "updates", "unacknowledged", "merger_state", "presences", "renew", "acquire"]
)


@settings(max_examples=examples(60))
@given(st.sets(st.tuples(METHODS, st.integers(0, 12), st.sampled_from(["before", "after"])), max_size=12))
def test_any_outages_lose_and_repeat_nothing(faults: set[tuple[str, int, str]]) -> None:
    assert outcome(served(faults)) == undisturbed()


def test_the_merger_waits_while_the_broker_refuses_writes() -> None:
    """A full Redis, for example, is reachable, and its refusals are temporary."""
    course = served([("commit", n, "before") for n in range(3)], BrokerError("out of memory"))
    assert course.transport.broken == 3
    assert outcome(course) == undisturbed()


def test_the_merger_ends_when_the_run_is_deleted() -> None:
    run = MergerRun()
    merger = run.merger()
    del run.broker.runs["sample"]
    with pytest.raises(UnknownRunError):
        serve(merger, lambda: False, lambda seconds: pytest.fail("it waits"))


def test_each_start_of_a_merger_is_announced() -> None:
    run = MergerRun()
    run.live("a")
    first = run.merger()
    for number in (1, 2):
        run.send("a", number, constant(1.0))
        first.turn(0.0)
    second = run.merger()
    assert run.events(Resume) == [Resume(0, first.epoch), Resume(2, second.epoch)]
    assert second.epoch > first.epoch


def test_a_fenced_merger_leaves() -> None:
    run = MergerRun()
    old = Merger(Faulty(run.broker, "sample"), run.clock, "old", live_poll_seconds=0.0)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 10, "it should have left"
        if asked == 3:
            run.clock.now += LEASE_SECONDS
            run.merger("new")
        return False

    serve(old, stopped, lambda seconds: None)
    assert asked == 3
    assert not Merger(run.transport, run.clock, "third").acquire()  # it did not release the lease of another merger


def test_a_standby_takes_over_when_the_lease_runs_out() -> None:
    run = MergerRun()
    run.live("a")
    run.merger("first")
    run.send("a", 1, constant(1.0))
    standby = Merger(Faulty(run.broker, "sample"), run.clock, "standby", live_poll_seconds=0.0)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert run.events(Snapshot) == []
        run.clock.now += seconds
        run.live("a")

    serve(standby, lambda: bool(run.events(Snapshot)), pause)
    assert sum(pauses) == pytest.approx(LEASE_SECONDS)
    assert run.merged() == [("a", "x", 0)]
    assert Merger(run.transport, run.clock, "third").acquire()  # it released the lease when it was stopped


def test_the_merger_can_be_stopped_during_an_outage() -> None:
    run = MergerRun()
    merger = Merger(Faulty(run.broker, "sample"), run.clock, "merger", live_poll_seconds=0.0)
    turns = iter([False, False, True])
    merger.transport.merger.release = _unreachable  # type: ignore[method-assign, assignment]
    serve(merger, lambda: next(turns), lambda seconds: None)
    assert merger.epoch == 1


def _unreachable(*_: object) -> None:
    raise UnreachableError("connection refused")
