"""A merger in a run with one hostile island: its claims end nothing, and the others are merged as before."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from archipelago.broker.messages import MERGED_MAX, Books, Refusal, Snapshot, from_fields, to_fields
from archipelago.broker.wire import pack
from archipelago.merger.accounts import BURST_INTERVALS, FIRST_BURST_INTERVALS
from archipelago.merger.claims import SPEED_MAX
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.ops.watch.run_view import observe
from tests import samples
from tests.harness.merger_run import MergerRun, constant, served_run
from tests.samples import contribution

H, STRIDE_SECONDS = 8, 4.0


def play(run: MergerRun, merger: Merger, number: int, **false: Any) -> None:
    """Play a round of the islands a and b, whose steps take a second, and of the hostile island x."""
    run.clock.now += STRIDE_SECONDS
    run.live("a", "b", "x")
    for island in "ab":
        ours: dict[str, Any] = {
            "steps": 4,
            "tokens": 4096,
            "global_step": 4 * number,
            "data": f"{ord(island) - 97}:0:{4 * number}",
        }
        run.send(island, number, constant(1.0), **ours)
    theirs: dict[str, Any] = {"steps": 4, "tokens": 4096, "global_step": 4 * number}
    run.send("x", number, constant(1.0), **(theirs | false))
    assert merger.turn(0.0)


def attacked(rounds: int = 12, quorum: int = 3, **false: Any) -> MergerRun:
    """Return a run of so many rounds, in which x makes these claims from the second round on."""
    run, merger = served_run(quorum=quorum)
    run.live("a", "b", "x")
    for number in range(1, rounds + 1):
        play(run, merger, number, **(false if number > 1 else {}))
    return run


def state_of(run: MergerRun) -> RunState:
    return RunState.from_json(run.transport.reader.merger_state())


def test_false_claims_of_work_have_no_more_weight_than_a_burst_and_do_not_end_the_run() -> None:
    """The step advances no faster than an island that is 16 times as fast as the others."""
    run = attacked(steps=1_000_000, tokens=1_000_000_000, global_step=(1 << 31) - 1)
    steps = [snapshot.step for snapshot in run.events(Snapshot)]
    assert steps[0] == 4
    assert all(0 <= after - before <= 8 + SPEED_MAX * STRIDE_SECONDS for before, after in pairwise(steps))
    assert steps[-1] < 1000
    state = state_of(run)
    first = 2 * FIRST_BURST_INTERVALS * H * 1024 * 4
    per_round = (BURST_INTERVALS * H + SPEED_MAX * 2 * STRIDE_SECONDS) * 1024 * 4
    assert state.island_tokens["x"] <= first + 12 * per_round
    assert state.island_tokens["a"] == 12 * 4096
    claimed = 11 * 1_000_000_000 + 4096
    assert state.island_tokens["x"] + state.lowered_tokens == claimed, "it knows what it lowers"
    assert observe(run.transport, run.manifest).tokens_lowered == 0, "its heartbeats do not say so"
    run.transport.island.heartbeat(samples.heartbeat("x", tokens=claimed // 2))
    view = observe(run.transport, run.manifest)
    assert (view.tokens_lowered, view.tokens_lost) == (state.lowered_tokens // 2, 0)
    assert state.refused["claims.steps"] == 11
    members = run.transport.reader.tape(1)[0].members
    assert max(member.weight for member in members if member.island == "x") <= 0.5 + 1e-9


def test_refused_tokens_cannot_fill_the_books() -> None:
    run, merger = served_run()
    run.live("a")
    for _ in range(600):
        run.send("a", 1, constant(1.0), tokens=1 << 53, steps=(1 << 31) - 1)
    while run.transport.reader.backlog():
        merger.turn(0.0)
    books = run.transport.reader.books()
    assert books.refused == 600
    assert from_fields(Books, to_fields(books)) == books
    assert books.refused_tokens < 1 << 62


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
    for number, loss, seconds in ((1, 1.7e308, 1e9), (2, 1.7e308, 1e9), (3, -5e-324, 1e-300)):
        run.clock.now += 1.0
        run.send("x", number, constant(1.0), step_seconds=seconds, loss=loss)
        while not merger.turn(0.0):
            run.live("x")
            run.clock.now = max(run.clock.now + 1.0, merger.rounds.deadline() or 0.0)
    for entry in run.transport.reader.tape(20):
        assert to_fields(from_fields(type(entry), to_fields(entry))) == to_fields(entry)
    assert run.merger().state.closed == 3
    state = RunState(tokens=(1 << 62) - 5)
    state.after_round(1, 4, [contribution(tokens=100)])
    assert state.tokens == 1 << 62, "counters stop at the largest number of a message"
