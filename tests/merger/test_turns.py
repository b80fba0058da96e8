"""Turns of a merger that are interrupted, and what a turn counts, calls and stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Call, Refusal
from archipelago.merger.round_merge import RoundMerge
from tests.harness.merger_run import constant, served_run


def test_what_an_outage_interrupts_is_merged_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, merger = served_run(quorum=2)
    opened, left = RoundMerge.opened, [UnreachableError("the link is down")]

    def once(self: RoundMerge, *args: Any) -> Any:
        if left:
            raise left.pop()
        return opened(self, *args)

    monkeypatch.setattr(RoundMerge, "opened", once)
    for island in "ab":
        run.send(island, 1, constant(1.0))
    with pytest.raises(UnreachableError):
        merger.turn(0.0)
    merger.load()
    run.live("a", "b")
    assert merger.turn(0.0)
    assert run.merged() == [("a", "x", 0), ("b", "x", 0)]


def test_a_sound_copy_is_merged_although_one_before_it_was_damaged() -> None:
    """A server that takes over may have lost a chunk of what the island then sends again."""
    run, merger = served_run(quorum=2)
    run.live("a", "b")
    sent = run.send("a", 1, constant(1.0))
    payload = run.sent[-1][1]
    (entry,) = run.stored.updates
    run.stored.updates[entry] = replace(run.stored.updates[entry], payload=payload[:-1] + b"x")
    run.transport.island.publish(sent, payload)
    run.send("b", 1, constant(1.0))
    assert merger.turn(0.0)
    assert [refusal.repeat for refusal in run.events(Refusal)] == [False]
    assert run.merged() == [("a", "x", 0), ("b", "x", 0)]


def test_a_round_that_closes_before_all_islands_have_answered_is_called() -> None:
    run, merger = served_run(quorum=1, grace=0.0)
    run.live("a", "b")
    merger.turn(0.0)
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert run.events(Call) == [Call(1, 0)]


def test_a_round_counts_the_work_of_all_turns_and_its_merge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, merger = served_run(quorum=3)
    opened = RoundMerge.opened

    def slow(self: RoundMerge, *args: Any) -> Any:
        run.clock.now += 1.0
        return opened(self, *args)

    monkeypatch.setattr(RoundMerge, "opened", slow)
    for island in "abc":
        run.live(*"abc")
        run.send(island, 1, constant(1.0))
        merger.turn(0.0)
    (entry,) = run.transport.reader.tape(2)
    assert (entry.busy_seconds, entry.merge_seconds) == (3.0, 0.0)


def test_a_restart_changes_nothing_that_a_steered_run_records() -> None:
    records = []
    for restarts in (False, True):
        run, merger = served_run(quorum=1, grace=0.0)
        run.transport.reader.steer({"inner.steps": "100"})
        for number in range(1, 5):
            merger = run.merger() if restarts and number == 3 else merger
            run.live("a")
            run.clock.now += 10.0
            run.send("a", number, constant(1.0))
            assert merger.turn(0.0)
        records.append([entry.before for entry in run.transport.reader.tape(9)])
    assert records[0] == records[1]
    assert '"inner.steps": 100}' in records[0][-1]
