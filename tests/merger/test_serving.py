"""The loop of a merger process: outages, standbys, a lost lease, and the end of a finished run."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.keys import is_name
from archipelago.merger import serving
from archipelago.merger.admission import WITHDRAWN_MAX
from archipelago.merger.service import LEASE_SECONDS, Merger
from archipelago.merger.serving import ANNOUNCE_SECONDS, has_ended_here, merger_name, numbering, serve
from archipelago.merger.state import RunState
from tests.conftest import Until
from tests.harness.merger_run import CONFIG, MergerRun, Shelf, constant, logged_codes

# -- outages -------------------------------------------------------------------------------------------------------


def test_a_fenced_merger_stands_by() -> None:
    run, new = MergerRun(), list[Merger]()
    old = run.idle_merger("old", transport=run.faulty())
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            run.clock.now += LEASE_SECONDS
            new.append(run.merger("new"))
        return asked == 6

    serve(old, stopped, lambda seconds: None)
    assert (old.epoch, new[0].epoch) == (0, 2)
    assert not run.idle_merger("third").acquire()  # it did not release the lease of another merger


def test_an_island_that_deletes_what_it_has_sent_does_not_stop_the_others() -> None:
    """It may append to its stream, and can shorten it with that."""
    run, tries = MergerRun(), list[float]()

    def shorten(name: str, *_: object) -> None:
        if name == "commit":
            for number in [number for number, entry in run.stored.updates.items() if entry.sender == "b"]:
                del run.stored.updates[number]

    def again(seconds: float) -> None:
        tries.append(seconds)
        run.send("b", 1, constant(2.0))

    merger = run.idle_merger(transport=run.faulty(before=shorten))
    run.live("a", "b")
    run.send("a", 1, constant(1.0))
    run.send("b", 1, constant(1.0))
    serve(merger, lambda: bool(run.merged()), again)
    assert run.merged() == [("a", "x", 0)]
    assert len(tries) == WITHDRAWN_MAX


def test_a_standby_is_listed_until_it_takes_over_when_the_lease_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    run = MergerRun()
    run.live("a")
    run.merger("first")
    run.send("a", 1, constant(1.0))
    pauses, listed = list[float](), list[list[str]]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        listed.append([each.name for each in run.transport.reader.standbys()])
        assert run.events(Snapshot) == []
        run.clock.now += seconds
        run.live("a")

    with caplog.at_level(logging.INFO, "archipelago.merger.serving"):
        standby = run.idle_merger("second", transport=run.faulty())
        serve(standby, lambda: bool(run.events(Snapshot)), pause)
    assert sum(pauses) == pytest.approx(LEASE_SECONDS)
    assert run.merged() == [("a", "x", 0)]
    assert listed == [["second"]] * len(pauses)
    assert run.transport.reader.standbys() == []
    said = [text for text in caplog.messages if text.startswith(("standing by", "taking over"))]
    assert len(said) == 2, "one line when it begins to wait, and one when it takes over"
    assert run.notes("left") == ["it was stopped after round 1"]
    third = run.idle_merger("third", transport=run.faulty())
    assert third.acquire(), "the lease was released"
    turns = iter([False, False, True])
    serve(run.idle_merger("fourth", transport=run.faulty()), lambda: next(turns), lambda seconds: None)
    assert run.transport.reader.standbys() == [], "a standby that is stopped leaves the list"


@pytest.mark.parametrize(
    ("is_away", "turns", "codes"),
    [(True, 0, ["checkpoint.not-last"]), (True, 2, ["broker.unreachable", "checkpoint.not-last"]), (False, 0, [])],
)
def test_a_merger_that_ends_in_an_outage_says_that_it_takes_no_last_checkpoint(
    is_away: bool, turns: int, codes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, left = MergerRun(), iter(range(turns, -1, -1))
    run.live("a")
    run.send("a", 1, constant(1.0))

    def fail(name: str, *_: object) -> None:
        if is_away and run.merged():
            raise UnreachableError("it is away")

    merger = run.idle_merger(transport=run.faulty(before=fail), store=Shelf())
    serve(merger, lambda: bool(run.merged()) and next(left) == 0, lambda seconds: None)
    assert logged_codes(caplog) == codes


def test_a_merger_that_has_handed_over_misses_no_last_checkpoint_in_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    run, pauses = MergerRun(), list[float]()
    run.live("a")
    run.send("a", 1, constant(1.0))

    def fail(name: str, *_: object) -> None:
        if pauses:
            raise UnreachableError("it is away")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        run.clock.now += ANNOUNCE_SECONDS

    merger = run.idle_merger(transport=run.faulty(before=fail), store=Shelf())
    serve(merger, lambda: len(pauses) == 2, pause, lambda: not run.merged(), lambda: bool(run.merged()))
    assert merger.lacks_checkpoint()
    assert logged_codes(caplog) == ["broker.unreachable"]


# -- the end of a run ------------------------------------------------------------------------------------------------

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


def idle(run: MergerRun, name: str = "m", store: Shelf | None = None) -> Merger:
    return run.idle_merger(name, transport=run.faulty(), store=store)


class Turns:
    """Lets half a second pass before each turn.

    Args:
        run: The run.
        act: Called with the time before each turn.
        most: The merger is stopped after that many turns. By default it fails if the merger serves for ever.
    """

    def __init__(self, run: MergerRun, act: Callable[[float], object] = lambda now: None, most: int | None = None):
        self.run, self.act, self.turns, self.most = run, act, 0, most

    def __call__(self) -> bool:
        self.turns += 1
        assert self.turns < 200, "the merger serves for ever"
        self.run.clock.now += 0.5
        self.act(self.run.clock.now)
        return self.turns == self.most


def test_each_merger_of_a_finished_run_ends_and_frees_the_lease() -> None:
    run = finished_run()
    run.live("a", state="left")
    for name in ("second", "third"):
        assert serve(idle(run, name), Turns(run))
        assert run.transport.reader.notes(1)[0].kind == "left"
    assert idle(run, "fourth").acquire()


def test_a_finished_run_is_not_handed_over() -> None:
    """It would pass for ever between two processes of which each has served it to its end."""
    run = finished_run()
    run.live("a", state="left")
    assert serve(idle(run), Turns(run), lambda seconds: None, is_to_hand_over=lambda: True)


def test_a_finished_run_is_served_while_an_island_is_live_or_its_work_waits() -> None:
    run = finished_run()
    left_at = run.clock.now + 20.0

    def act(now: float) -> None:
        if now < left_at:
            run.live("a")
        elif len(run.sent) == 2:
            run.send("a", 3, constant(1.0), farewell=True, global_step=STEPS)
            run.live("a", state="left")

    assert serve(idle(run), Turns(run, act))
    assert run.clock.now >= left_at
    assert len(run.merged()) == 3
    run.balance()


def test_the_merger_of_a_finished_run_waits_until_its_last_checkpoint_is_written() -> None:
    run = finished_run()
    run.live("a", state="left")
    disk = Shelf([ConfigError("the disk is full", "Free space there.")] * 3)
    assert serve(idle(run, store=disk), Turns(run))
    assert disk.faults == []
    assert [image.round for image in disk.images.values()] == [2]


# -- mergers on one machine: one that was killed frees the lease at once -----------------------------------------------

NAME = "from archipelago.merger.serving import merger_name; print(merger_name(), flush=True)"

numbered = pytest.mark.skipif(not numbering(), reason="this system does not tell what numbers its processes")


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a merger that has ended."""
    done = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@numbered
def test_a_killed_process_has_ended_before_its_parent_takes_note(until: Until) -> None:
    """A supervisor may take its time for that."""
    with subprocess.Popen([sys.executable, "-c", f"{NAME}; input()"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert not has_ended_here(name)
        assert not has_ended_here(merger_name()), "this process lives"
        process.kill()
        until(lambda: has_ended_here(name), "the end of the process")


@numbered
def test_processes_that_are_numbered_elsewhere_are_unknown(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boot").write_text("other", encoding="ascii")
    (tmp_path / "pid").symlink_to("pid:[1]")
    for where, file, is_known in (
        ("_BOOT", "boot", True), ("_NAMESPACE", "pid", True), ("_BOOT", "no such file", False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(serving, where, tmp_path / file)
            numbering.cache_clear()
            assert not has_ended_here(dead), file
            assert bool(numbering()) == is_known, file
            assert re.fullmatch(r"[A-Za-z0-9-]+-[0-9]+-([0-9a-f]{8}-)?[0-9a-f]{6}", merger_name())
        numbering.cache_clear()


@numbered
def test_other_names_are_unknown_and_those_of_mergers_can_be_parts_of_keys() -> None:
    for name in ("", "merger", "a-1-b", "a-99999999999-00000000-abcdef", "x" * 300, "é-1-2-3"):
        assert not has_ended_here(name)
    assert is_name(merger_name())
    assert merger_name() != merger_name()


@numbered
def test_the_lease_of_a_dead_merger_is_taken_at_once_and_its_epoch_has_ended(dead: str) -> None:
    run = MergerRun()
    before = run.merger(dead)
    assert not run.idle_merger("elsewhere").acquire()
    here = run.idle_merger(merger_name(), is_gone=has_ended_here)
    assert here.acquire()
    assert here.epoch == before.epoch + 1
    assert not run.idle_merger(merger_name(), is_gone=has_ended_here).acquire(), "the one that serves now lives"
