"""Bad contributions in any mix: the counters balance, each is merged at most once, and false claims end nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.messages import (
    MEASURE_MAX,
    MERGED_MAX,
    Call,
    Contribution,
    Refusal,
    Snapshot,
    from_fields,
    to_fields,
)
from archipelago.broker.wire import pack
from archipelago.merger.admission import LOGGED_MAX, REFUSED_MAX
from archipelago.merger.state import RunState, Sequences
from tests.harness.merger_run import SIZE, MergerRun, constant, logged_codes, served_run
from tests.samples import contribution


def with_one(value: float) -> Vector:
    """Return ordinary values, except one."""
    values_N = constant(1.0)
    values_N[5] = value
    return values_N


GOOD = constant(1.0)
#: Bad contributions: the code under which the refusal is logged, the values, and what their headers say.
BAD: dict[str, tuple[str, Vector, dict[str, Any]]] = {
    "nan": ("wire.not-finite", with_one(math.nan), {}),
    "inf": ("wire.not-finite", with_one(-math.inf), {}),
    "huge": ("wire.not-finite", with_one(3e38), {}),
    "size": ("wire", constant(1.0, SIZE + 1), {}),
    "codec": ("codec", GOOD, {"payload": pack(GOOD, "float32", 0).replace(b"float32", b"float64"), "codec": "float64"}),
    "digest": ("wire.payload", GOOD, {"digest": "0" * 32}),
    "ahead": ("lost", GOOD, {}),
    "future": ("lost", GOOD, {"base": 1000}),
    "fragment": ("fragment", GOOD, {"fragment": 7}),
    "bytes": ("wire", GOOD, {"payload": b"ARC0" + bytes(50)}),
    "empty": ("wire", GOOD, {"payload": b""}),
    "tokens": ("tokens", GOOD, {"tokens": 1 << 20}),
    "shard": ("data", GOOD, {"data": "0:0:1 64:0:1"}),
    "place": ("data", GOOD, {"data": "0:0:1 \u0663:0:1"}),
    "said": ("wire.payload", GOOD, {"bytes": 1 << 62}),
}


def send_bad(run: MergerRun, kind: str, island: str, number: int) -> Contribution:
    """Send a contribution that must be refused."""
    _, values_N, changes = BAD[kind]
    return run.send(island, number + 2000 * (kind == "ahead"), values_N, **changes)


def test_a_flood_is_refused_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = served_run()
    sizes: list[int] = []

    def note(name: str, *args: Any) -> None:
        if name == "refuse":
            sizes.append(len(args[1]))

    merger = run.merger(transport=run.faulty(before=note))
    for number in range(2200):
        send_bad(run, "future", f"island-{number % 50}", 1)
    while run.transport.reader.backlog():
        merger.turn(0.0)
    assert (sum(sizes), max(sizes)) == (2200, REFUSED_MAX)
    assert logged_codes(caplog) == ([*["refused.lost"] * LOGGED_MAX, "refused.more"]) * len(sizes)
    run.balance()


def test_a_refusal_has_a_reason_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run, merger = served_run()
    run.live("a")
    before = run.digests()
    for count, kind in enumerate(BAD, 1):
        sent = send_bad(run, kind, "a", 1)
        assert not merger.turn(0.0), kind
        refusals = run.events(Refusal)
        assert len(refusals) == count, kind
        refusal = refusals[-1]
        assert (refusal.island, refusal.incarnation, refusal.sequence) == sent.identity, kind
        assert (refusal.round, refusal.fragment, refusal.tokens) == (sent.round, sent.fragment, sent.tokens), kind
        assert refusal.reason, kind
    codes = [code.removeprefix("refused.") for code in logged_codes(caplog)]
    assert codes == [code for code, *_ in BAD.values()]
    assert (run.digests(), run.transport.reader.tape(1), run.events(Call)) == (before, [], [])
    run.balance()
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert run.parameters(0) == [-0.75] * SIZE
    assert merger.state.seen["a/x"] == Sequences(len(BAD) + 1, round=1), "refusals do not make the state grow"


def test_a_repeat_is_refused_while_the_first_copy_waits_and_after_its_merge() -> None:
    run, merger = served_run(quorum=2)
    run.live("a", "b")
    for _ in range(2):
        run.send("a", 1, GOOD, sequence=0)
    assert not merger.turn(0.0)
    run.send("b", 1, GOOD)
    assert merger.turn(0.0)
    run.send("a", 1, GOOD, sequence=0, base=0)
    merger.turn(0.0)
    assert [(refusal.repeat, refusal.decided) for refusal in run.events(Refusal)] == [(True, False), (True, True)]
    assert sorted(run.merged()) == [("a", "x", 0), ("b", "x", 0)]
    assert run.transport.reader.counters().bytes_up == sum(sent.bytes for sent, _ in run.sent)
    run.balance()


def test_a_refused_forgery_uses_up_no_sequence_number() -> None:
    """A client that knows the password can write into an island's stream, with its next numbers."""
    run, merger = served_run(quorum=1)
    run.live("a")
    for ahead in range(50):
        run.send("a", 1, GOOD, sequence=ahead, digest="0" * 32)
    merger.turn(0.0)
    run.sequences["a"] = 0
    for number in range(1, 9):
        run.live("a")
        run.send("a", number, GOOD)
        assert merger.turn(0.0), number
    assert (merger.state.merged, merger.state.refused) == (8, {"wire.payload": 50})
    run.balance()


def test_a_contribution_that_waits_after_its_forgery_was_refused_outlives_its_merger() -> None:
    """Its number counts as used with its own merge only, although its island goes on meanwhile."""
    run, merger = served_run(quorum=2)
    run.live("a", "b")
    run.send("a", 2, GOOD, sequence=0, digest="0" * 32)
    merger.turn(0.0)
    run.send("a", 2, GOOD, sequence=0)
    run.send("a", 1, GOOD, sequence=1)
    run.send("b", 1, GOOD)
    assert merger.turn(0.0)
    run.send("b", 2, GOOD)
    assert run.merger().turn(0.0)
    assert sorted(run.merged()) == [("a", "x", 0), ("a", "x", 1), ("b", "x", 0), ("b", "x", 1)]


# -- claims of more work than the merger saw ----------------------------------------------------------------------


def test_claims_of_tokens_and_steps_buy_no_weight() -> None:
    run, merger = served_run(quorum=4)
    interval = run.manifest.config.sync.interval
    claimed = [(interval, 64 * 1024 * interval)] * 2 + [(10**6, 10**9)] * 6
    for number, (steps, tokens) in enumerate(claimed, 1):
        run.clock.now += 4.0
        run.live(*"abcx")
        for island in "abc":
            run.send(island, number, constant(1.0), global_step=4 * number, steps=interval, tokens=1024 * interval)
        run.send("x", number, constant(1.0), global_step=4 * number, steps=steps, tokens=tokens)
        assert merger.turn(0.0)
        (entry,) = run.transport.reader.tape(1)
        weight = {member.island: member.weight for member in entry.members}
        assert weight["x"] <= weight["a"] == weight["b"] == weight["c"]


@pytest.mark.parametrize("order", ["islands first", "merger first", "merger restarts"])
def test_what_islands_do_while_no_merger_serves_counts_in_full(order: str, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of 0.1 ms, 10,000 of them in a second: the order in which processes start accuses nobody."""
    run, steps = MergerRun(quorum=2), 10_000
    merger = None if order == "islands first" else run.merger()
    for number in (1, 2):
        run.clock.now += 1.0
        run.live("a", "b")
        if order == "merger restarts":
            merger = run.merger()
        for island in "ab":
            run.send(island, number, constant(1.0), global_step=4 * number, steps=steps, tokens=1024 * steps)
        if merger is not None:
            assert merger.turn(0.0)
    last = merger or run.merger()
    while last.turn(0.0):
        pass
    assert {n: a.tokens for n, a in last.state.accounts.items()} == dict.fromkeys("ab", 2 * 1024 * steps)
    assert [m.weight for e in run.transport.reader.tape(2) for m in e.members] == [0.5] * 4
    assert not last.state.refused
    assert not logged_codes(caplog)
    run.balance()


def test_a_round_has_no_more_members_than_its_event_can_name() -> None:
    run, merger = served_run(quorum=1000)
    run.live("a")
    payload = pack(constant(0.0), "float32", 1)
    for number in range(500):
        name = f"{number:064}"
        run.publish(contribution(payload, island=name, incarnation="y" * 64), payload)
    while not run.events(Snapshot):
        run.live("a", state="left")
        run.clock.now += 1.0
        merger.turn(0.0)
    snapshot = run.events(Snapshot)[0]
    assert len(snapshot.merged) <= MERGED_MAX
    assert from_fields(Snapshot, to_fields(snapshot)) == snapshot
    told = snapshot.identities | {refusal.identity_text for refusal in run.events(Refusal)}
    assert len(told) == 500
    run.balance()


def test_extreme_numbers_leave_a_tape_and_a_state_that_can_be_read() -> None:
    run, merger = served_run(quorum=1)
    run.live("x", "silent")
    for number, loss, seconds in ((1, MEASURE_MAX, 1e9), (2, -MEASURE_MAX, 1e9), (3, -5e-324, 1e-300)):
        run.clock.now += 1.0
        run.send("x", number, constant(1.0), step_seconds=seconds, loss=loss)
        while not merger.turn(0.0):
            run.live("x")
            run.clock.now = max(run.clock.now + 1.0, merger.rounds.deadline() or 0.0)
    for entry in run.transport.reader.tape(20):
        assert to_fields(from_fields(type(entry), to_fields(entry))) == to_fields(entry)
    assert run.merger().state.closed == 3
    state = RunState(tokens=(1 << 62) - 5)
    state.after_round(1, 4, [contribution(tokens=100)], {}, {"a": 0})
    assert state.tokens == 1 << 62, "counters stop at the largest number of a message"
