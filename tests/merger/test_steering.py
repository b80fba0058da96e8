"""A merger that is steered: settings from the next round on, pauses, checkpoints on demand, expelled islands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.control import GRACE, OUTER_RATE, QUORUM, SETTINGS
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Refusal, TapeEntry
from archipelago.broker.transport import Delivery
from archipelago.merger import outer
from archipelago.merger.checkpointer import RETRY_SECONDS
from archipelago.merger.replay import DifferenceError
from archipelago.merger.restore import rebuild
from archipelago.merger.service import Merger, serve
from archipelago.merger.state import RunState
from archipelago.merger.steering import EXPELLED
from tests.failing import failing
from tests.intercept import Intercepted
from tests.merger.simulated_broker import SIZE, Shelf, SimulatedBroker, bits, constant, state_of
from tests.merger.test_replay import recorded, redone
from tests.tiers import examples

STEERED = {OUTER_RATE: "0.25", QUORUM: "3", GRACE: "0.125"}
CLOCK = 1.7e9


def notes(simulated: SimulatedBroker, kind: str) -> list[str]:
    return [note.text for note in simulated.transport.reader.notes(1000) if note.kind == kind]


def steered_on_tape(simulated: SimulatedBroker) -> list[str]:
    return [entry.steered for entry in simulated.transport.reader.tape(1000)]


def play_one(simulated: SimulatedBroker, merger: Merger, number: int, value: float = 1.0) -> None:
    """A round of island a alone."""
    simulated.live("a")
    simulated.send("a", number, constant(value))
    assert merger.turn(0.0), f"round {number} did not close"


def test_a_rate_takes_effect_with_the_round_that_closes_next() -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    play_one(simulated, merger, 1)
    play_one(simulated, merger, 2)
    assert simulated.parameters(0) + simulated.parameters(1) == pytest.approx([-0.75] * 2 * SIZE)
    simulated.transport.reader.steer({OUTER_RATE: "0.25"})
    play_one(simulated, merger, 3)
    play_one(simulated, merger, 4)
    # Nesterov: b = 1.5, and a step of ¼(1 + ½ · 1.5) where ½ was the run's own rate.
    assert simulated.parameters(0) + simulated.parameters(1) == pytest.approx([-0.75 - 0.4375] * 2 * SIZE)
    simulated.transport.reader.steer({OUTER_RATE: ""})
    play_one(simulated, merger, 5)
    # b = 1.75, and the run's own rate again.
    assert simulated.parameters(0) == pytest.approx([-0.75 - 0.4375 - 0.9375] * SIZE)
    assert steered_on_tape(simulated) == ["", "", "outer.learning_rate=0.25", "", "outer.learning_rate=0.5"]
    assert notes(simulated, "steered") == [
        "outer.learning_rate=0.25 from round 3 on",
        "outer.learning_rate=0.5 from round 5 on",
    ]
    assert state_of(simulated).steered == {}


def test_the_tape_has_the_wall_clock_and_the_merge_time() -> None:
    simulated = SimulatedBroker()
    merger = Merger(simulated.broker.connect("sample"), simulated.clock, "m", live_poll_seconds=0.0, wall=lambda: CLOCK)
    assert merger.acquire()
    merger.load()
    play_one(simulated, merger, 1)
    (entry,) = simulated.transport.reader.tape(9)
    assert (entry.unix_seconds, entry.merge_seconds) == (CLOCK, 0.0)
    assert simulated.transport.reader.notes(1)[0].unix_seconds == CLOCK


def test_a_quorum_counts_from_the_next_round_on() -> None:
    simulated = SimulatedBroker(quorum=1, grace=0.0)
    merger = simulated.merger()
    simulated.live("a", "b", "c")
    simulated.send("a", 1, constant(1.0))
    assert merger.turn(0.0), "one is enough, and there is no grace"
    simulated.transport.reader.steer({QUORUM: "2"})
    simulated.send("a", 2, constant(1.0))
    assert not merger.turn(0.0)
    simulated.send("b", 2, constant(1.0))
    assert merger.turn(0.0)
    assert steered_on_tape(simulated) == ["", "sync.quorum=2"]


def test_grace_holds_for_rounds_that_reach_their_quorum_afterwards() -> None:
    simulated = SimulatedBroker(quorum=1, grace=1.0)
    merger = simulated.merger()
    simulated.live("a", "b")
    simulated.send("a", 1, constant(1.0))
    assert not merger.turn(0.0), "b may answer yet"
    simulated.transport.reader.steer({GRACE: "0"})
    simulated.clock.now += 1000.0
    assert merger.turn(0.0)
    simulated.live("a", "b")
    simulated.send("a", 2, constant(1.0))
    assert merger.turn(0.0), "nobody is waited for"
    assert [entry.grace_seconds > 0.0 for entry in simulated.transport.reader.tape(9)] == [True, False]


# -- takeovers, restarts, replays ----------------------------------------------------------------------------------


def steered_run(takeover: bool) -> SimulatedBroker:
    """Six rounds of two islands, steered in the middle, and a merger that takes over right after that or none."""
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger(checkpointer=simulated.checkpointer(Shelf()))
    simulated.play(merger, 1, 2)
    simulated.transport.reader.steer(STEERED)
    simulated.play(merger, 3)
    simulated.transport.reader.steer({OUTER_RATE: "fast", QUORUM: ""})  # the rate stays as it is
    if takeover:
        merger = simulated.merger(checkpointer=simulated.checkpointer(Shelf()))
    simulated.play(merger, 4, 5)
    simulated.transport.reader.steer({OUTER_RATE: ""})
    simulated.play(merger, 6)
    return simulated


def test_a_takeover_keeps_changed_settings() -> None:
    one, other = steered_run(takeover=False), steered_run(takeover=True)
    assert steered_on_tape(one) == steered_on_tape(other)
    assert steered_on_tape(one) == [
        "", "", "outer.learning_rate=0.25 sync.quorum=3 sync.grace=0.125", "sync.quorum=2", "",
        "outer.learning_rate=0.5",
    ]  # fmt: skip
    mine, theirs = bits(one), bits(other)
    assert mine == theirs


def test_a_replay_of_a_steered_run_has_the_same_bits() -> None:
    simulated = steered_run(takeover=True)
    state, fragments = redone(simulated, recorded(simulated))
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == [
        simulated.transport.merger.outer(p) for p in range(2)
    ]
    assert state.steered == state_of(simulated).steered == {GRACE: 0.125}


def without_steering(entry: TapeEntry) -> TapeEntry:
    return replace(entry, steered="")


def otherwise_steered(entry: TapeEntry) -> TapeEntry:
    return replace(entry, steered=entry.steered.replace("0.25", "0.26"))


def badly_steered(entry: TapeEntry) -> TapeEntry:
    return replace(entry, steered=entry.steered.replace("0.25", "-1"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_steering, "replay.digest"),
        (otherwise_steered, "replay.digest"),
        (badly_steered, "replay.steering"),
    ],
)
def test_a_tape_that_was_steered_otherwise_is_another(change: object, code: str) -> None:
    assert callable(change)
    simulated = steered_run(takeover=False)
    with failing(DifferenceError, code):
        redone(simulated, [(change(entry), deliveries) for entry, deliveries in recorded(simulated)])


def test_a_restart_from_checkpoint_and_tape_has_the_same_bits() -> None:
    """The checkpoint knows one rate; the tape after it has another, and then a third."""
    shelf, simulated = Shelf(), SimulatedBroker(quorum=2)
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    simulated.transport.reader.steer({OUTER_RATE: "0.25"})
    simulated.play(merger, 1, 2)
    merger.checkpoint()
    simulated.play(merger, 3)
    simulated.transport.reader.steer({OUTER_RATE: "0.125"})
    simulated.play(merger, 4)
    expected = [simulated.transport.merger.outer(p) for p in range(2)]
    assert RunState.from_json(shelf.images[2].state).steered == {OUTER_RATE: 0.25}
    state, fragments = rebuild(merger.rules, shelf.images[2], simulated.transport)
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == expected
    assert state.steered == {OUTER_RATE: 0.125}
    del simulated.broker.runs["sample"].outer[0]
    again = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    assert [outer.dump(f.params_N, f.outer) for f in again.fragments] == expected


def test_a_redis_that_lost_everything_gets_the_wishes_back() -> None:
    shelf, simulated = Shelf(), SimulatedBroker(quorum=1)
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    simulated.transport.reader.steer({OUTER_RATE: "0.25", "island.c": "expel", QUORUM: "many"})
    simulated.play(merger, 1)
    merger.checkpoint()
    del simulated.broker.runs["sample"]
    simulated.transport.restore(shelf.images[1])
    assert simulated.transport.reader.control() == {OUTER_RATE: "0.25", "island.c": "expel"}
    simulated.play(simulated.merger(), 2)
    assert steered_on_tape(simulated)[1:] == [""], "it goes on as it was"
    assert state_of(simulated).steered == {OUTER_RATE: 0.25}


# -- pauses ----------------------------------------------------------------------------------


def test_a_pause_closes_no_round_and_loses_nothing() -> None:
    simulated = SimulatedBroker(quorum=1)
    merger = simulated.merger()
    simulated.play(merger, 1)
    simulated.transport.reader.steer({"merging": "paused"})
    simulated.live("a", "b")
    for number in (2, 3):
        for island in "ab":
            simulated.send(island, number, constant(1.0))
            simulated.clock.now += 1000.0
            simulated.live("a", "b")
            assert not merger.turn(0.0)
    assert merger.rounds.deadline() is None, "nobody needs to wake for it"
    simulated.balance()
    merger = simulated.merger()  # it survives a takeover
    assert not merger.turn(0.0)
    assert len(simulated.transport.reader.tape(9)) == 1
    simulated.transport.reader.steer({"merging": ""})
    assert merger.turn(0.0)
    assert [len(entry.members) for entry in simulated.transport.reader.tape(9)] == [2, 2, 2]
    assert notes(simulated, "paused")
    assert len(notes(simulated, "resumed")) == 1
    simulated.balance()


def test_the_pace_knows_of_no_pauses() -> None:
    """A quorum that was reached in a pause was reached then; else nobody would be waited for after it."""
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger()
    simulated.transport.reader.steer({"merging": "paused"})
    simulated.live("a", "b", "c")
    simulated.send("a", 1, constant(1.0))
    merger.turn(0.0)
    simulated.clock.now += 1.0
    simulated.send("b", 1, constant(1.0))
    merger.turn(0.0)
    simulated.clock.now += 10_000.0
    simulated.live("a", "b", "c")
    simulated.transport.reader.steer({"merging": ""})
    assert merger.turn(0.0)
    (entry,) = simulated.transport.reader.tape(9)
    assert (entry.quorum_seconds, entry.open_seconds) == (1.0, 10_001.0)
    assert state_of(simulated).timing.quorum_seconds == 1.0


def test_a_checkpoint_is_taken_in_a_pause_too() -> None:
    shelf, simulated = Shelf(), SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 1)
    simulated.transport.reader.steer({"merging": "paused", "checkpoint": "before the move"})
    merger.turn(0.0)
    assert list(shelf.images) == [1]


# -- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_is_taken_once_for_each_text() -> None:
    shelf, simulated = Shelf(), SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 1)
    assert not shelf.images
    simulated.transport.reader.steer({"checkpoint": "first"})
    for number in (2, 3):
        play_one(simulated, merger, number)
    assert [image.round for image in shelf.images.values()] == [2]
    assert fields_of(shelf, 0) == {"checkpoint": "first"}
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 4)
    assert len(shelf.images) == 1, "another merger knows that it was taken"
    simulated.transport.reader.steer({"checkpoint": "second"})
    merger.turn(0.0)
    assert [image.round for image in shelf.images.values()] == [2, 4]
    merger.turn(0.0)
    assert notes(simulated, "checkpoint") == [
        "checkpoint 2 holds the run up to round 2",
        "checkpoint 4 holds the run up to round 4",
    ]


def test_a_checkpoint_that_died_with_its_merger_is_taken_by_the_next_one() -> None:
    shelf, simulated = Shelf([OSError("killed while it wrote")]), SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 1)
    simulated.transport.reader.steer({"checkpoint": "first"})
    merger.turn(0.0)
    play_one(simulated, merger, 2)
    assert not shelf.images
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    merger.turn(0.0)
    merger.turn(0.0)
    assert [image.round for image in shelf.images.values()] == [2]
    assert notes(simulated, "checkpoint") == ["checkpoint 2 holds the run up to round 2"]


def fields_of(shelf: Shelf, index: int) -> Mapping[str, str]:
    return RunState.from_json(list(shelf.images.values())[index].state).control


def test_no_checkpoint_is_taken_when_the_newest_is_up_to_date() -> None:
    shelf, simulated = Shelf(), SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 1)
    for text in ("first", "second"):
        simulated.transport.reader.steer({"checkpoint": text})
        merger.turn(0.0)
        merger.turn(0.0)
    assert len(shelf.images) == 1
    assert len(notes(simulated, "checkpoint")) == 2


def test_a_checkpoint_that_failed_is_told_of_once_it_is_made_up_for() -> None:
    shelf, simulated = Shelf([OSError("no")]), SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(shelf))
    play_one(simulated, merger, 1)
    simulated.transport.reader.steer({"checkpoint": "first"})
    merger.turn(0.0)
    merger.turn(0.0)
    assert (list(shelf.images), notes(simulated, "checkpoint")) == ([], [])
    simulated.clock.now += RETRY_SECONDS
    merger.turn(0.0)
    merger.turn(0.0)
    assert notes(simulated, "checkpoint") == ["checkpoint 1 holds the run up to round 1"]


def test_a_merger_that_keeps_no_checkpoints_says_so_once() -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    simulated.transport.reader.steer({"checkpoint": "now"})
    merger.turn(0.0)
    merger.turn(0.0)
    assert notes(simulated, "checkpoint") == ["this merger takes no checkpoints (--checkpoint-every 0)"]


# -- islands ----------------------------------------------------------------------------------


def test_an_expelled_island_is_refused_and_not_waited_for() -> None:
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger()
    simulated.live("a", "b")
    simulated.transport.reader.steer({"island.b": "expel"})
    simulated.send("b", 1, constant(9.0))
    simulated.send("a", 1, constant(1.0))
    assert merger.turn(0.0), "b is not waited for"
    assert simulated.parameters(0) == [-0.75] * SIZE
    (refusal,) = simulated.events(Refusal)
    assert (refusal.island, refusal.reason) == ("b", EXPELLED)
    assert [refused for _, refused in simulated.transport.reader.refusals(9)] == [refusal]
    assert merger.live == {"a"}
    simulated.transport.reader.steer({"island.b": ""})
    simulated.send("b", 2, constant(1.0))
    simulated.send("a", 2, constant(1.0))
    assert merger.turn(0.0)
    assert len(simulated.transport.reader.tape(9)[1].members) == 2
    assert notes(simulated, "steered") == [
        "b is expelled by the operator: its contributions are refused",
        "b is admitted again",
    ]
    simulated.balance()


@pytest.mark.parametrize("takeover", [False, True])
def test_waiting_contributions_of_an_expelled_island_are_refused(takeover: bool) -> None:
    simulated = SimulatedBroker(quorum=3)
    merger = simulated.merger()
    simulated.live("a", "b", "c")
    simulated.send("b", 1, constant(9.0))
    simulated.send("c", 1, constant(1.0))
    simulated.send("c", 2, constant(1.0))
    assert not merger.turn(0.0)
    simulated.transport.reader.steer({"island.b": "expel"})
    if takeover:
        merger = simulated.merger()
    assert not merger.turn(0.0), "what it answered is no part of the quorum"
    assert [(refusal.island, refusal.reason) for refusal in simulated.events(Refusal)] == [("b", EXPELLED)]
    simulated.balance()
    simulated.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert simulated.merged() == [("c", "x", 0), ("a", "x", 0)]
    assert simulated.parameters(0) == [-0.75] * SIZE
    simulated.balance()


def test_a_takeover_does_not_repeat_notes() -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    simulated.transport.reader.steer({"island.b": "expel", "merging": "paused"})
    merger.turn(0.0)
    simulated.transport.reader.steer({"merging": ""})
    play_one(simulated, merger, 1)
    play_one(simulated, simulated.merger(), 2)
    assert [note.kind for note in simulated.transport.reader.notes(99)] == [
        "served",
        "paused",
        "steered",
        "resumed",
        "served",
    ]


def test_a_drained_island_is_merged_to_its_last_contribution() -> None:
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger()
    simulated.live("a", "b")
    simulated.transport.reader.steer({"island.b": "drain"})
    simulated.send("b", 1, constant(1.0))
    simulated.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert len(simulated.merged()) == 2


# -- hostile requests ----------------------------------------------------------------------------------


def test_a_value_that_cannot_be_used_is_ignored_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    simulated = SimulatedBroker()
    merger = simulated.merger()
    simulated.transport.reader.steer({OUTER_RATE: "1e9", "merging": "perhaps", "nonsense": "1"})
    play_one(simulated, merger, 1)
    play_one(simulated, merger, 2)
    assert simulated.parameters(0) == [-0.75] * SIZE
    assert steered_on_tape(simulated) == ["", ""]
    (note,) = notes(simulated, "steered")
    assert note.startswith("ignored: ")
    assert "outer.learning_rate" in note
    assert "'perhaps'" in note
    assert "'nonsense'" in note
    assert len([record for record in caplog.records if record.__dict__.get("code") == "control.invalid"]) == 1


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*SETTINGS, "merging", "checkpoint", "island.b", "island.a/x", "?"]),
            st.sampled_from(["", "0.5", "2", "-1", "nan", "1e999", "drain", "paused ", "\x00", "9" * 5000, "١"]),
        ),
        max_size=6,
    )
)
def test_no_wish_stops_the_merger_or_breaks_a_replay(wishes: list[dict[str, str]]) -> None:
    simulated = SimulatedBroker(quorum=1)
    merger = simulated.merger(checkpointer=simulated.checkpointer(Shelf()))
    for number, wish in enumerate(wishes, 1):
        simulated.transport.reader.steer(wish)
        play_one(simulated, merger, number)
        if number % 2 == 0:
            merger = simulated.merger(checkpointer=simulated.checkpointer(Shelf()))
    simulated.balance()
    sent = {f"{number}-0": each for number, each in enumerate(simulated.sent, 1)}
    rounds = [
        (e, [Delivery(m.entry, *sent[m.entry]) for m in e.members]) for e in simulated.transport.reader.tape(1000)
    ]
    _, fragments = redone(simulated, rounds)
    for p in range(2):
        if simulated.version(p):
            assert outer.dump(fragments[p].params_N, fragments[p].outer) == simulated.transport.merger.outer(p)


class Mute(Intercepted):
    """Takes no notes."""

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "note":
            raise UnreachableError("no room for notes")
        return method(*args, **kwargs)


def test_a_lost_note_does_not_stop_the_merger() -> None:
    simulated = SimulatedBroker()
    merger = Merger(Mute(simulated.broker.connect("sample")), simulated.clock, "m", live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()
    simulated.transport.reader.steer({OUTER_RATE: "0.25"})
    play_one(simulated, merger, 1)
    assert steered_on_tape(simulated) == ["outer.learning_rate=0.25"]


def test_a_merger_notes_that_it_serves_and_why_it_leaves() -> None:
    simulated = SimulatedBroker()
    turns = iter([False, False, False, True])
    serve(Merger(simulated.broker.connect("sample"), simulated.clock, "m", live_poll_seconds=0.0), lambda: next(turns))
    assert notes(simulated, "served") == ["epoch 1 begins after round 0"]
    assert notes(simulated, "left") == ["it was stopped after round 0"]
    assert {note.who for note in simulated.transport.reader.notes(9)} == {"merger"}
