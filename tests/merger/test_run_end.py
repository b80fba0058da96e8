"""A finished run ends its mergers, once everything is merged and in a checkpoint. Standbys say what they do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.keys import is_name
from archipelago.merger.checkpointer import Checkpointer
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.standby import merger_name
from archipelago.merger.state import RunState
from tests.harness.merger_run import CONFIG, Faulty, MergerRun, Shelf, constant

STEPS = 16


def finished_run() -> MergerRun:
    """Return a run whose island has made all its steps, and still lives. No merger serves it."""
    run = MergerRun(replace(CONFIG, inner=replace(CONFIG.inner, steps=STEPS)))
    run.live("a")
    merger = run.merger("first")
    for number in (1, 2):
        run.clock.now += 30.0
        run.live("a")
        run.send("a", number, constant(1.0), global_step=STEPS)
        merger.turn(0.0)
    assert RunState.from_json(run.transport.reader.merger_state()).step >= STEPS
    merger.transport.merger.release(merger.epoch)
    return run


def merger_of(run: MergerRun, name: str = "m", checkpointer: Checkpointer | None = None) -> Merger:
    faulty = Faulty(run.broker, "sample")
    return Merger(faulty, run.clock, name, live_poll_seconds=0.0, checkpointer=checkpointer)


class Turns:
    """Lets half a second pass before each turn, and fails if the merger serves for ever.

    Args:
        run: The run.
        act: Called with the time before each turn.
    """

    def __init__(self, run: MergerRun, act: Callable[[float], object] = lambda now: None) -> None:
        self.run, self.act, self.turns = run, act, 0

    def __call__(self) -> bool:
        self.turns += 1
        assert self.turns < 200, "the merger serves for ever"
        self.run.clock.now += 0.5
        self.act(self.run.clock.now)
        return False


def test_each_merger_of_a_finished_run_ends_and_frees_the_lease() -> None:
    run = finished_run()
    run.live("a", state="left")
    for name in ("second", "third"):
        assert serve(merger_of(run, name), Turns(run))
        assert run.transport.reader.notes(1)[0].kind == "left"
    assert merger_of(run, "fourth").acquire()


def test_a_finished_run_is_served_while_an_island_is_live_or_its_work_waits() -> None:
    run = finished_run()
    left_at = run.clock.now + 20.0

    def act(now: float) -> None:
        if now < left_at:
            run.live("a")
        elif len(run.sent) == 2:
            run.send("a", 3, constant(1.0), farewell=True, global_step=STEPS)
            run.live("a", state="left")

    assert serve(merger_of(run), Turns(run, act))
    assert run.clock.now >= left_at
    assert len(run.merged()) == 3
    run.balance()


def test_a_run_that_is_not_finished_waits_for_islands() -> None:
    run = MergerRun()
    turns = iter([False] * 100 + [True])

    def stopped() -> bool:
        run.clock.now += 0.5
        return next(turns)

    assert not serve(merger_of(run), stopped)


def test_the_merger_of_a_finished_run_waits_until_its_last_checkpoint_is_written() -> None:
    run = finished_run()
    run.live("a", state="left")
    disk = Shelf([ConfigError("the disk is full", "Free space there.")] * 3)
    assert serve(merger_of(run, checkpointer=run.checkpointer(disk)), Turns(run))
    assert disk.faults == []
    assert [image.round for image in disk.images.values()] == [2]


def test_a_standby_says_who_serves_and_is_listed_until_it_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()
    run.live("a")
    run.merger("first")
    standby = merger_of(run, "second")
    listed = []

    def pause(seconds: float) -> None:
        listed.append([each.name for each in run.transport.reader.standbys()])
        run.clock.now += seconds

    with caplog.at_level(logging.INFO, "archipelago.merger.standby"):
        serve(standby, lambda: bool(standby.epoch), pause)
    assert len(listed) > 1
    assert all(names == ["second"] for names in listed)
    assert run.transport.reader.standbys() == []
    said = [record for record in caplog.records if record.name == "archipelago.merger.standby"]
    assert len(said) == 2, "one line when it begins to wait, and one when it takes over"


def test_a_standby_that_is_stopped_leaves_the_list() -> None:
    run = MergerRun()
    run.merger("first")
    turns = iter([False, False, True])
    serve(merger_of(run, "second"), lambda: next(turns), lambda seconds: None)
    assert run.transport.reader.standbys() == []


def test_the_name_of_a_merger_can_be_part_of_a_key_and_is_its_own() -> None:
    assert is_name(merger_name())
    assert merger_name() != merger_name()


def test_an_extended_run_is_served_again() -> None:
    run = finished_run()
    run.live("a", state="left")
    assert serve(merger_of(run), Turns(run))
    run.transport.reader.steer({"inner.steps": str(2 * STEPS)})
    turns = iter([False] * 50 + [True])

    def stopped() -> bool:
        run.clock.now += 0.5
        return next(turns)

    assert not serve(merger_of(run, "later"), stopped)
