"""An operator's requests to the merger: changed settings, pauses, checkpoints on demand, expelled islands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.control import GRACE, OUTER_RATE, QUORUM, SETTINGS, STEPS
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Refusal, TapeEntry
from archipelago.broker.transport import Delivery
from archipelago.merger import outer
from archipelago.merger.checkpointer import RETRY_SECONDS
from archipelago.merger.rebuild import rebuild
from archipelago.merger.replay import DifferenceError
from archipelago.merger.scores import Score
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.state import RunState
from archipelago.merger.steering import EXPELLED, OperatorControls
from archipelago.merger.weights import ENOUGH
from tests.failing import failing
from tests.intercept import Intercepted
from tests.harness.merger_run import CONFIG, SIZE, MergerRun, Shelf, bits, constant, state_of
from tests.merger.test_replay import recorded, replayed
from tests.tiers import examples

STEERED = {OUTER_RATE: "0.25", QUORUM: "3", GRACE: "0.125"}
CLOCK = 1.7e9


def notes(run: MergerRun, kind: str) -> list[str]:
    return [note.text for note in run.transport.reader.notes(1000) if note.kind == kind]


def steered_on_tape(run: MergerRun) -> list[str]:
    return [entry.steered for entry in run.transport.reader.tape(1000)]


def play_one(run: MergerRun, merger: Merger, number: int, value: float = 1.0) -> None:
    """Run a round of island a alone."""
    run.live("a")
    run.send("a", number, constant(value))
    assert merger.turn(0.0), f"round {number} did not close"


def test_a_learning_rate_takes_effect_with_the_next_round() -> None:
    run = MergerRun()
    merger = run.merger()
    play_one(run, merger, 1)
    play_one(run, merger, 2)
    assert run.parameters(0) + run.parameters(1) == pytest.approx([-0.75] * 2 * SIZE)
    run.transport.reader.steer({OUTER_RATE: "0.25"})
    play_one(run, merger, 3)
    play_one(run, merger, 4)
    # Nesterov: b = 1.5, and a step of ¼(1 + ½ · 1.5) where ½ was the run's own rate.
    assert run.parameters(0) + run.parameters(1) == pytest.approx([-0.75 - 0.4375] * 2 * SIZE)
    run.transport.reader.steer({OUTER_RATE: ""})
    play_one(run, merger, 5)
    # b = 1.75, and the run's own rate again.
    assert run.parameters(0) == pytest.approx([-0.75 - 0.4375 - 0.9375] * SIZE)
    assert steered_on_tape(run) == ["", "", "outer.learning_rate=0.25", "", "outer.learning_rate=0.5"]
    assert notes(run, "steered") == [
        "outer.learning_rate=0.25 from round 3 on",
        "outer.learning_rate=0.5 from round 5 on",
    ]
    assert state_of(run).steered == {}


def test_a_tape_entry_has_its_time_and_the_duration_of_the_merge() -> None:
    run = MergerRun()
    merger = Merger(run.broker.connect("sample"), run.clock, "m", live_poll_seconds=0.0, wall=lambda: CLOCK)
    assert merger.acquire()
    merger.load()
    play_one(run, merger, 1)
    (entry,) = run.transport.reader.tape(9)
    assert (entry.unix_seconds, entry.merge_seconds) == (CLOCK, 0.0)
    assert run.transport.reader.notes(1)[0].unix_seconds == CLOCK


def test_a_quorum_takes_effect_with_the_next_round() -> None:
    run = MergerRun(quorum=1, grace=0.0)
    merger = run.merger()
    run.live("a", "b", "c")
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0), "one island is a quorum, and there is no grace"
    run.transport.reader.steer({QUORUM: "2"})
    run.send("a", 2, constant(1.0))
    assert not merger.turn(0.0)
    run.send("b", 2, constant(1.0))
    assert merger.turn(0.0)
    assert steered_on_tape(run) == ["", "sync.quorum=2"]


def test_a_grace_factor_applies_to_later_quorums_only() -> None:
    run = MergerRun(quorum=1, grace=1.0)
    merger = run.merger()
    run.live("a", "b")
    run.send("a", 1, constant(1.0))
    assert not merger.turn(0.0), "b may answer yet"
    run.transport.reader.steer({GRACE: "0"})
    run.clock.now += 1000.0
    assert merger.turn(0.0)
    run.live("a", "b")
    run.send("a", 2, constant(1.0))
    assert merger.turn(0.0), "the round closes without b"
    assert [entry.grace_seconds > 0.0 for entry in run.transport.reader.tape(9)] == [True, False]


# -- takeovers, restarts, replays ----------------------------------------------------------------------------------


def steered_run(takeover: bool) -> MergerRun:
    """Run six rounds of two islands and change settings in the middle, with or without a takeover right after that."""
    run = MergerRun(quorum=2)
    merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    run.play(merger, 1, 2)
    run.transport.reader.steer(STEERED)
    run.play(merger, 3)
    run.transport.reader.steer({OUTER_RATE: "fast", QUORUM: ""})  # the rate stays as it is
    if takeover:
        merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    run.play(merger, 4, 5)
    run.transport.reader.steer({OUTER_RATE: ""})
    run.play(merger, 6)
    return run


def test_a_takeover_keeps_changed_settings() -> None:
    one, other = steered_run(takeover=False), steered_run(takeover=True)
    assert steered_on_tape(one) == steered_on_tape(other)
    assert steered_on_tape(one) == [
        "", "", "outer.learning_rate=0.25 sync.quorum=3 sync.grace=0.125", "sync.quorum=2", "",
        "outer.learning_rate=0.5",
    ]  # fmt: skip
    assert bits(one) == bits(other)


def test_a_replay_of_a_steered_run_has_the_same_bits() -> None:
    run = steered_run(takeover=True)
    state, fragments = replayed(run, recorded(run))
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == [run.transport.merger.outer(p) for p in range(2)]
    assert state.steered == state_of(run).steered == {GRACE: 0.125}


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
def test_other_settings_on_the_tape_are_a_difference(change: object, code: str) -> None:
    assert callable(change)
    run = steered_run(takeover=False)
    with failing(DifferenceError, code):
        replayed(run, [(change(entry), deliveries) for entry, deliveries in recorded(run)])


def test_a_restart_from_checkpoint_and_tape_has_the_same_bits() -> None:
    """The checkpoint has one learning rate; the tape after it has two others."""
    shelf, run = Shelf(), MergerRun(quorum=2)
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    run.transport.reader.steer({OUTER_RATE: "0.25"})
    run.play(merger, 1, 2)
    merger.checkpoint()
    run.play(merger, 3)
    run.transport.reader.steer({OUTER_RATE: "0.125"})
    run.play(merger, 4)
    expected = [run.transport.merger.outer(p) for p in range(2)]
    assert RunState.from_json(shelf.images[2].state).steered == {OUTER_RATE: 0.25}
    state, fragments = rebuild(merger.rules, shelf.images[2], run.transport)
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == expected
    assert state.steered == {OUTER_RATE: 0.125}
    del run.broker.runs["sample"].outer[0]
    again = run.merger(checkpointer=run.checkpointer(shelf))
    assert [outer.dump(f.params_N, f.outer) for f in again.fragments] == expected


def test_a_restored_redis_has_the_requests_again() -> None:
    shelf, run = Shelf(), MergerRun(quorum=1)
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    run.transport.reader.steer({OUTER_RATE: "0.25", "island.c": "expel", QUORUM: "many"})
    run.play(merger, 1)
    merger.checkpoint()
    del run.broker.runs["sample"]
    run.transport.restore(shelf.images[1])
    assert run.transport.reader.control() == {OUTER_RATE: "0.25", "island.c": "expel"}
    run.play(run.merger(), 2)
    assert steered_on_tape(run)[1:] == [""], "it continues with the changed settings"
    assert state_of(run).steered == {OUTER_RATE: 0.25}


# -- pauses ----------------------------------------------------------------------------------


def test_a_pause_closes_no_round_and_loses_nothing() -> None:
    run = MergerRun(quorum=1)
    merger = run.merger()
    run.play(merger, 1)
    run.transport.reader.steer({"merging": "paused"})
    run.live("a", "b")
    for number in (2, 3):
        for island in "ab":
            run.send(island, number, constant(1.0))
            run.clock.now += 1000.0
            run.live("a", "b")
            assert not merger.turn(0.0)
    assert merger.rounds.deadline() is None, "a paused round has no deadline"
    run.balance()
    merger = run.merger()  # the pause survives a takeover
    assert not merger.turn(0.0)
    assert len(run.transport.reader.tape(9)) == 1
    run.transport.reader.steer({"merging": ""})
    assert merger.turn(0.0)
    assert [len(entry.members) for entry in run.transport.reader.tape(9)] == [2, 2, 2]
    assert notes(run, "paused")
    assert len(notes(run, "resumed")) == 1
    run.balance()


def test_a_pause_does_not_change_the_measured_round_times() -> None:
    """The time to a quorum excludes the rest of a pause. Otherwise no slack would be left afterwards."""
    run = MergerRun(quorum=2)
    merger = run.merger()
    run.transport.reader.steer({"merging": "paused"})
    run.live("a", "b", "c")
    run.send("a", 1, constant(1.0))
    merger.turn(0.0)
    run.clock.now += 1.0
    run.send("b", 1, constant(1.0))
    merger.turn(0.0)
    run.clock.now += 10_000.0
    run.live("a", "b", "c")
    run.transport.reader.steer({"merging": ""})
    assert merger.turn(0.0)
    (entry,) = run.transport.reader.tape(9)
    assert (entry.quorum_seconds, entry.open_seconds) == (1.0, 10_001.0)
    assert state_of(run).timing.quorum_seconds == 1.0


def test_a_checkpoint_is_taken_in_a_pause_too() -> None:
    shelf, run = Shelf(), MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 1)
    run.transport.reader.steer({"merging": "paused", "checkpoint": "before the move"})
    merger.turn(0.0)
    assert list(shelf.images) == [1]


# -- checkpoints ----------------------------------------------------------------------------------


def test_each_request_takes_one_checkpoint() -> None:
    shelf, run = Shelf(), MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 1)
    assert not shelf.images
    run.transport.reader.steer({"checkpoint": "first"})
    for number in (2, 3):
        play_one(run, merger, number)
    assert [image.round for image in shelf.images.values()] == [2]
    assert fields_of(shelf, 0) == {"checkpoint": "first"}
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 4)
    assert len(shelf.images) == 1, "another merger does not take it again"
    run.transport.reader.steer({"checkpoint": "second"})
    merger.turn(0.0)
    assert [image.round for image in shelf.images.values()] == [2, 4]
    merger.turn(0.0)
    assert notes(run, "checkpoint") == [
        "checkpoint 2 holds the run up to round 2",
        "checkpoint 4 holds the run up to round 4",
    ]


def test_a_new_merger_takes_the_checkpoint_that_a_dead_one_did_not_finish() -> None:
    shelf, run = Shelf([OSError("killed while it wrote")]), MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 1)
    run.transport.reader.steer({"checkpoint": "first"})
    merger.turn(0.0)
    play_one(run, merger, 2)
    assert not shelf.images
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    merger.turn(0.0)
    merger.turn(0.0)
    assert [image.round for image in shelf.images.values()] == [2]
    assert notes(run, "checkpoint") == ["checkpoint 2 holds the run up to round 2"]


def fields_of(shelf: Shelf, index: int) -> Mapping[str, str]:
    return RunState.from_json(list(shelf.images.values())[index].state).control


def test_no_checkpoint_is_taken_when_the_newest_is_up_to_date() -> None:
    shelf, run = Shelf(), MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 1)
    for text in ("first", "second"):
        run.transport.reader.steer({"checkpoint": text})
        merger.turn(0.0)
        merger.turn(0.0)
    assert len(shelf.images) == 1
    assert len(notes(run, "checkpoint")) == 2


def test_a_failed_checkpoint_is_retried_and_then_noted() -> None:
    shelf, run = Shelf([OSError("no")]), MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(shelf))
    play_one(run, merger, 1)
    run.transport.reader.steer({"checkpoint": "first"})
    merger.turn(0.0)
    merger.turn(0.0)
    assert (list(shelf.images), notes(run, "checkpoint")) == ([], [])
    run.clock.now += RETRY_SECONDS
    merger.turn(0.0)
    merger.turn(0.0)
    assert notes(run, "checkpoint") == ["checkpoint 1 holds the run up to round 1"]


def test_a_merger_without_checkpoints_answers_a_request_once() -> None:
    run = MergerRun()
    merger = run.merger()
    run.transport.reader.steer({"checkpoint": "now"})
    merger.turn(0.0)
    merger.turn(0.0)
    assert notes(run, "checkpoint") == ["this merger takes no checkpoints (--checkpoint-every 0)"]


# -- islands ----------------------------------------------------------------------------------


def test_rounds_do_not_wait_for_an_expelled_island() -> None:
    run = MergerRun(quorum=2)
    merger = run.merger()
    run.live("a", "b")
    run.transport.reader.steer({"island.b": "expel"})
    run.send("b", 1, constant(9.0))
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0), "the round closes without b"
    assert run.parameters(0) == [-0.75] * SIZE
    (refusal,) = run.events(Refusal)
    assert (refusal.island, refusal.reason) == ("b", EXPELLED)
    assert [refused for _, refused in run.transport.reader.refusals(9)] == [refusal]
    assert merger.live == {"a"}
    run.transport.reader.steer({"island.b": ""})
    run.send("b", 2, constant(1.0))
    run.send("a", 2, constant(1.0))
    assert merger.turn(0.0)
    assert len(run.transport.reader.tape(9)[1].members) == 2
    assert notes(run, "steered") == [
        "b is expelled by the operator: its contributions are refused",
        "b is admitted again",
    ]
    run.balance()


@pytest.mark.parametrize("takeover", [False, True])
def test_waiting_contributions_of_an_expelled_island_are_refused(takeover: bool) -> None:
    run = MergerRun(quorum=3)
    merger = run.merger()
    run.live("a", "b", "c")
    run.send("b", 1, constant(9.0))
    run.send("c", 1, constant(1.0))
    run.send("c", 2, constant(1.0))
    assert not merger.turn(0.0)
    run.transport.reader.steer({"island.b": "expel"})
    if takeover:
        merger = run.merger()
    assert not merger.turn(0.0), "its answer does not count towards the quorum"
    assert [(refusal.island, refusal.reason) for refusal in run.events(Refusal)] == [("b", EXPELLED)]
    run.balance()
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert run.merged() == [("c", "x", 0), ("a", "x", 0)]
    assert run.parameters(0) == [-0.75] * SIZE
    run.balance()


def test_a_takeover_does_not_repeat_notes() -> None:
    run = MergerRun()
    merger = run.merger()
    run.transport.reader.steer({"island.b": "expel", "merging": "paused"})
    merger.turn(0.0)
    run.transport.reader.steer({"merging": ""})
    play_one(run, merger, 1)
    play_one(run, run.merger(), 2)
    assert [note.kind for note in run.transport.reader.notes(99)] == [
        "served",
        "paused",
        "steered",
        "resumed",
        "served",
    ]


def test_all_contributions_of_a_drained_island_are_merged() -> None:
    run = MergerRun(quorum=2)
    merger = run.merger()
    run.live("a", "b")
    run.transport.reader.steer({"island.b": "drain"})
    run.send("b", 1, constant(1.0))
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert len(run.merged()) == 2


# -- hostile requests ----------------------------------------------------------------------------------


def test_an_invalid_request_is_ignored_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()
    merger = run.merger()
    run.transport.reader.steer({OUTER_RATE: "1e9", "merging": "perhaps", "nonsense": "1"})
    play_one(run, merger, 1)
    play_one(run, merger, 2)
    assert run.parameters(0) == [-0.75] * SIZE
    assert steered_on_tape(run) == ["", ""]
    (note,) = notes(run, "steered")
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
def test_no_request_stops_the_merger_or_breaks_a_replay(requests: list[dict[str, str]]) -> None:
    run = MergerRun(quorum=1)
    merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    for number, request in enumerate(requests, 1):
        run.transport.reader.steer(request)
        play_one(run, merger, number)
        if number % 2 == 0:
            merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    run.balance()
    sent = {f"{each[0].island}/{number}-0": each for number, each in enumerate(run.sent, 1)}
    rounds = [(e, [Delivery(m.entry, *sent[m.entry]) for m in e.members]) for e in run.transport.reader.tape(1000)]
    _, fragments = replayed(run, rounds)
    for p in range(2):
        if run.version(p):
            assert outer.dump(fragments[p].params_N, fragments[p].outer) == run.transport.merger.outer(p)


class RefusesNotes(Intercepted):
    """A transport that refuses notes."""

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "note":
            raise UnreachableError("no room for notes")
        return method(*args, **kwargs)


def test_a_lost_note_does_not_stop_the_merger() -> None:
    run = MergerRun()
    merger = Merger(RefusesNotes(run.broker.connect("sample")), run.clock, "m", live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()
    run.transport.reader.steer({OUTER_RATE: "0.25"})
    play_one(run, merger, 1)
    assert steered_on_tape(run) == ["outer.learning_rate=0.25"]


def test_a_merger_notes_that_it_serves_and_why_it_leaves() -> None:
    run = MergerRun()
    turns = iter([False, False, False, True])
    serve(Merger(run.broker.connect("sample"), run.clock, "m", live_poll_seconds=0.0), lambda: next(turns))
    assert notes(run, "served") == ["epoch 1 begins after round 0"]
    assert notes(run, "left") == ["it was stopped after round 0"]
    assert {note.who for note in run.transport.reader.notes(9)} == {"merger"}


def test_the_operator_is_told_once_of_a_lowered_weight_and_the_rule_expels() -> None:
    run = MergerRun(replace(CONFIG, merge=replace(CONFIG.merge, expel_after=4)))
    controls = OperatorControls(run.transport, run.manifest, run.clock)
    good, bad = Score(10.0, 10.0, 0.01), Score(-5.0, 10.0, 0.01)
    before = {"a": good, "b": good}
    for lowered in range(1, 6):
        after = {"a": good, "b": replace(bad, lowered=lowered)}
        controls.tell_of_scores(before, after)
        before = after
    assert [(note.kind, note.text.partition(":")[0]) for note in run.transport.reader.notes(10)] == [
        ("lowered", "b"),
        ("expelled", "b"),
    ]
    assert run.transport.reader.control() == {"island.b": "expel"}
    controls.tell_of_scores(before, {"a": good, "b": good})
    assert run.transport.reader.notes(1)[0].kind == "restored"


# -- the length of the run --------------------------------------------------------------------------------------------


def test_contributions_that_wait_during_an_extension_are_added_again() -> None:
    """Their norms are compared by the learning rate, which the length of the run decides."""
    run = MergerRun(replace(CONFIG, inner=replace(CONFIG.inner, steps=200, warmup_steps=0)))
    merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    for number in range(1, 2 * ENOUGH + 3):  # from now on norms are clipped
        play_one(run, merger, number)
    run.live("a", "b")
    number = merger.state.closed + 1
    run.send("a", number, constant(50.0))
    run.send("a", number + 1, constant(50.0))
    assert not merger.turn(0.0), "b may answer yet"
    before = {p: list(s.addends) for p, s in merger.inbox._sums.items()}
    run.transport.reader.steer({STEPS: "8000"})
    run.send("b", number, constant(1.0))
    assert merger.turn(0.0)
    (waiting,) = (s.addends for s in merger.inbox._sums.values() if s.addends)
    assert waiting[0].path != before[merger.manifest.fragment_of(number + 1)][0].path
    run.send("b", number + 1, constant(1.0))
    assert merger.turn(0.0)
    assert steered_on_tape(run)[-2:] == [f"{STEPS}=8000", ""]
    state, fragments = replayed(run, recorded(run))
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == [run.transport.merger.outer(p) for p in range(2)]
    assert replace(state, timing=state_of(run).timing, accounts=state_of(run).accounts) == replace(
        state_of(run), control=state.control
    )
