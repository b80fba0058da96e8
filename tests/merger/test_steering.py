"""An operator's requests to the merger: changed settings, pauses, checkpoints on demand, expelled islands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.control import GRACE, OUTER_RATE, QUORUM, STEPS
from archipelago.broker.messages import Refusal
from archipelago.merger.checkpointer import RETRY_SECONDS
from archipelago.merger.scores import Score
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.steering import EXPELLED, OperatorControls
from archipelago.merger.weights import ENOUGH
from tests import samples
from tests.harness.merger_run import (
    CONFIG,
    SIZE,
    MergerRun,
    Shelf,
    bits,
    constant,
    outer_states,
    recorded,
    replayed,
    served_run,
    state_of,
)
from tests.intercept import EVERY

STEERED = {OUTER_RATE: "0.25", QUORUM: "3", GRACE: "0.125"}
CLOCK = 1.7e9


def steered_on_tape(run: MergerRun) -> list[str]:
    return [entry.steered for entry in run.transport.reader.tape(1000)]


def play_one(run: MergerRun, merger: Merger, number: int, value: float = 1.0) -> None:
    """Run a round of island a alone."""
    run.live("a")
    run.send("a", number, constant(value))
    assert merger.turn(0.0), f"round {number} did not close"


def test_a_learning_rate_takes_effect_with_the_next_round() -> None:
    run, merger = served_run()
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
    assert run.notes("steered") == [
        "outer.learning_rate=0.25 from round 3 on",
        "outer.learning_rate=0.5 from round 5 on",
    ]
    assert state_of(run).steered == {}


def test_a_quorum_and_a_grace_factor_take_effect_with_the_next_round_and_quorum() -> None:
    run, merger = served_run(quorum=1, grace=1.0)
    run.live("a", "b")
    run.send("a", 1, constant(1.0))
    assert not merger.turn(0.0), "b may answer yet"
    run.transport.reader.steer({GRACE: "0"})
    run.clock.now += 800.0
    assert merger.turn(0.0)
    run.live("a", "b")
    run.send("a", 2, constant(1.0))
    assert merger.turn(0.0), "the round closes without b"
    assert [entry.grace_seconds > 0.0 for entry in run.transport.reader.tape(9)] == [True, False]
    run.transport.reader.steer({GRACE: "0", QUORUM: "2"})
    run.send("a", 3, constant(1.0))
    assert not merger.turn(0.0)
    run.send("b", 3, constant(1.0))
    assert merger.turn(0.0)
    assert steered_on_tape(run)[2] == "sync.quorum=2"


# -- takeovers, restarts, replays ----------------------------------------------------------------------------------


def steered_run(takeover: bool) -> MergerRun:
    """Run six rounds of two islands and change settings in the middle, with or without a takeover right after that."""
    run, merger = served_run(quorum=2, store=Shelf())
    run.play(merger, 1, 2)
    run.transport.reader.steer(STEERED)
    run.play(merger, 3)
    run.transport.reader.steer({OUTER_RATE: "fast", QUORUM: ""})  # the rate stays as it is
    if takeover:
        merger = run.merger(store=Shelf())
    run.play(merger, 4, 5)
    run.transport.reader.steer({OUTER_RATE: ""})
    run.play(merger, 6)
    return run


def test_a_takeover_and_a_replay_keep_changed_settings() -> None:
    one, other = steered_run(takeover=False), steered_run(takeover=True)
    assert steered_on_tape(one) == steered_on_tape(other)
    assert steered_on_tape(one) == [
        "", "", "outer.learning_rate=0.25 sync.quorum=3 sync.grace=0.125", "sync.quorum=2", "",
        "outer.learning_rate=0.5",
    ]  # fmt: skip
    assert bits(one) == bits(other)
    state, fragments = replayed(other, recorded(other))
    assert [samples.outer_bits(f) for f in fragments] == outer_states(other)
    assert state.steered == state_of(other).steered == {GRACE: 0.125}


# -- pauses ----------------------------------------------------------------------------------


def test_a_pause_closes_no_round_and_loses_nothing() -> None:
    run, merger = served_run(quorum=1)
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
    assert run.notes("paused")
    assert len(run.notes("resumed")) == 1
    run.balance()


# -- checkpoints ----------------------------------------------------------------------------------


def test_each_request_takes_one_checkpoint() -> None:
    shelf = Shelf()
    run, merger = served_run(store=shelf)
    play_one(run, merger, 1)
    assert not shelf.images
    run.transport.reader.steer({"checkpoint": "first", "merging": "paused"})
    merger.turn(0.0)
    assert list(shelf.images) == [1], "also in a pause"
    run.transport.reader.steer({"merging": ""})
    for number in (2, 3):
        play_one(run, merger, number)
    assert [image.round for image in shelf.images.values()] == [1]
    assert RunState.from_json(shelf.images[1].state).control["checkpoint"] == "first"
    merger = run.merger(store=shelf)
    play_one(run, merger, 4)
    assert len(shelf.images) == 1, "another merger does not take it again"
    run.transport.reader.steer({"checkpoint": "second"})
    merger.turn(0.0)
    assert list(shelf.images) == [1, 4]
    merger.turn(0.0)
    assert run.notes("checkpoint") == [f"checkpoint {n} holds the run up to round {n}" for n in (1, 4)]
    run.transport.reader.steer({"checkpoint": "third"})
    for _ in range(2):
        merger.turn(0.0)
    assert (len(shelf.images), len(run.notes("checkpoint"))) == (2, 3), "the newest one is up to date"


def test_a_request_whose_checkpoint_failed_is_kept_and_answered_by_another_merger() -> None:
    shelf = Shelf([OSError("killed while it wrote"), OSError("no")])
    run, merger = served_run(store=shelf)
    play_one(run, merger, 1)
    run.transport.reader.steer({"checkpoint": "first"})
    merger.turn(0.0)
    play_one(run, merger, 2)
    merger = run.merger(store=shelf)
    for _ in range(2):
        merger.turn(0.0)
    assert (shelf.faults, shelf.images, run.notes("checkpoint")) == ([], {}, [])
    run.clock.now += RETRY_SECONDS
    for _ in range(2):
        merger.turn(0.0)
    assert list(shelf.images) == [2]
    assert run.notes("checkpoint")[0] == "checkpoint 2 holds the run up to round 2"


def test_a_merger_without_checkpoints_answers_a_request_once() -> None:
    run, merger = served_run()
    run.transport.reader.steer({"checkpoint": "now"})
    merger.turn(0.0)
    merger.turn(0.0)
    assert len(run.notes("checkpoint")) == 1


# -- islands ----------------------------------------------------------------------------------


def test_rounds_do_not_wait_for_an_expelled_island() -> None:
    run, merger = served_run(quorum=2)
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
    assert run.notes("steered") == [
        "b is expelled by the operator: its contributions are refused",
        "b is admitted again",
    ]
    run.transport.reader.steer({"island.b": "drain"})
    run.send("b", 3, constant(1.0))
    run.send("a", 3, constant(1.0))
    assert merger.turn(0.0)
    assert len(run.transport.reader.tape(9)[2].members) == 2, "all contributions of a drained island are merged"
    run.balance()


@pytest.mark.parametrize("takeover", [False, True])
def test_waiting_contributions_of_an_expelled_island_are_refused(takeover: bool) -> None:
    run, merger = served_run(quorum=3)
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
    merger = run.merger(wall=lambda: CLOCK)
    run.transport.reader.steer({"island.b": "expel", "merging": "paused"})
    merger.turn(0.0)
    run.transport.reader.steer({"merging": ""})
    play_one(run, merger, 1)
    play_one(run, run.merger(), 2)
    (entry, _), notes = run.transport.reader.tape(9), run.transport.reader.notes(99)
    assert (entry.unix_seconds, entry.merge_seconds) == (CLOCK, 0.0)
    assert {(note.who, note.unix_seconds) for note in notes[:4]} == {("merger", CLOCK)}
    assert run.notes("served") == ["epoch 1 begins after round 0", "epoch 2 begins after round 1"]
    assert [note.kind for note in notes] == ["served", "paused", "steered", "resumed", "served"]


# -- hostile requests ----------------------------------------------------------------------------------


def test_an_invalid_request_is_ignored() -> None:
    run, merger = served_run()
    run.transport.reader.steer({OUTER_RATE: "1e9", "merging": "perhaps", "nonsense": "1"})
    play_one(run, merger, 1)
    play_one(run, merger, 2)
    assert run.parameters(0) == [-0.75] * SIZE
    assert steered_on_tape(run) == ["", ""]


def test_a_lost_note_does_not_stop_the_merger() -> None:
    run = MergerRun()
    merger = run.merger(transport=run.faulty(("note", EVERY, "before")))
    run.transport.reader.steer({OUTER_RATE: "0.25"})
    play_one(run, merger, 1)
    assert steered_on_tape(run) == ["outer.learning_rate=0.25"]


def test_the_operator_is_told_once_of_a_lowered_weight_and_the_rule_expels() -> None:
    run = MergerRun(replace(CONFIG, merge=replace(CONFIG.merge, expel_after=4)))
    controls = OperatorControls(run.transport, run.manifest, run.clock)
    good, bad = Score(10.0, 10.0, 0.01), Score(-5.0, 10.0, 0.01)
    before = {"a": good, "b": good}
    for lowered in range(1, 6):
        after = {"a": good, "b": bad._replace(lowered=lowered)}
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


def test_contributions_that_wait_during_an_extension_are_clipped_by_its_rates() -> None:
    """Their norms are compared by the learning rate, which the length of the run decides."""
    run, merger = served_run(replace(CONFIG, inner=replace(CONFIG.inner, steps=200, warmup_steps=0)), store=Shelf())
    for number in range(1, 2 * ENOUGH + 3):  # from now on norms are clipped
        play_one(run, merger, number)
    run.live("a", "b")
    number = merger.state.closed + 1
    run.send("a", number, constant(50.0))
    run.send("a", number + 1, constant(50.0))
    assert not merger.turn(0.0), "b may answer yet"
    run.transport.reader.steer({STEPS: "8000"})
    run.send("b", number, constant(1.0))
    assert merger.turn(0.0)
    run.send("b", number + 1, constant(1.0))
    assert merger.turn(0.0)
    assert steered_on_tape(run)[-2:] == [f"{STEPS}=8000", ""]
    state, fragments = replayed(run, recorded(run))
    assert [samples.outer_bits(f) for f in fragments] == outer_states(run)
    assert replace(state, timing=state_of(run).timing) == replace(state_of(run), control=state.control)
