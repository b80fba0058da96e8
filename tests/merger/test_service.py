"""Rounds of one merger and of two: results by hand, the same bits after restarts, and the lease."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archipelago.broker.commits import Delivery
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Call, Snapshot
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.wire import digest
from archipelago.merger import executor, merge_rules, round_merge
from archipelago.merger.executor import at_once, in_background
from archipelago.merger.merge_rules import NORM_MAX
from archipelago.merger.round_merge import Addend
from archipelago.merger.service import LEASE_SECONDS
from archipelago.merger.weights import path
from tests.conftest import Until
from tests.harness.merger_run import (
    CONFIG,
    ISOTROPIC,
    SIZE,
    MergerRun,
    Shelf,
    bits,
    constant,
    recorded,
    replayed,
    served_run,
    state_of,
    values,
)
from tests.harness.played import started
from tests.intercept import Faulty

# -- one merger ----------------------------------------------------------------------------------------------------


def test_a_round_of_one_island() -> None:
    run, merger = served_run()
    run.live("a")
    assert not merger.turn(0.0)
    run.clock.now += 1.0
    run.send("a", 1, constant(1.0), global_step=9, loss=3.0)
    assert merger.turn(0.0)
    # Nesterov: b = 1, θ = 0 − ½(1 + ½ · 1).
    assert run.parameters(0) == [-0.75] * SIZE
    assert run.parameters(1) == [0.0] * SIZE
    (snapshot,) = run.events(Snapshot)
    assert not run.events(Call), "a round that closes at once needs no call"
    assert (snapshot.version, snapshot.step, snapshot.merged) == (1, 9, "a/x/0")
    (entry,) = run.transport.reader.tape(5)
    assert (entry.round, entry.fragment, entry.version, entry.loss, entry.live) == (1, 0, 1, 3.0, 1)
    assert entry.digest == digest(constant(-0.75).tobytes())
    assert not merger.turn(0.0)
    run.balance()


def test_what_a_process_sent_in_turn_adds_up_and_is_replayed() -> None:
    """It does so where no round closes: no merger serves, or the island leaves. A mean would lose most of it."""
    first: dict[str, Any] = {"tokens": 100, "steps": 6}
    parts = [(values(1), first), (values(2), {"tokens": 500, "steps": 30, "farewell": True})]
    together, whole, apart = (MergerRun() for _ in range(3))
    for n, (delta_N, own) in enumerate(parts):
        together.send("a", 1, delta_N, **own)
        apart.send("a", 1, delta_N, incarnation=f"x{n}", **own)
    whole.send("a", 1, values(1) + values(2), tokens=600, steps=36)
    for run in (together, whole, apart):
        merger = run.merger(store=Shelf())
        run.live("b")
        run.send("b", 1, values(3))
        merger.turn(0.0)
        run.balance()
    assert together.digests() == whole.digests() != apart.digests(), "two processes went different ways"
    (entry,), (one,) = (run.transport.reader.tape(5) for run in (together, whole))
    assert [m.tokens for m in entry.members] == [100, 500, 100]
    shares = [m.weight for m in one.members]
    assert [m.weight for m in entry.members] == pytest.approx([shares[0] / 6, shares[0] * 5 / 6, shares[1]])
    _, fragments = replayed(together, recorded(together))
    assert np.asarray(fragments[0].published_N).tolist() == together.parameters(0)


def test_no_spectrum_is_changed_where_contributions_hold_a_large_part_of_the_run() -> None:
    rda = replace(CONFIG.merge, embedding="rda", rest="rda")
    for steps, is_alike in (((1999, 1999), False), ((2000, 8), False), ((2000, 2600), True)):
        found = []
        for config in (ISOTROPIC, replace(ISOTROPIC, merge=rda)):
            run = MergerRun(replace(config, inner=replace(config.inner, steps=10_000)))
            merger = run.merger(store=Shelf())
            run.live("a", "b")
            for number, island in enumerate("ab"):
                run.send(island, 1, values(number), steps=steps[number])
            assert merger.turn(0.0)
            found.append(run.parameters(0))
            _, fragments = replayed(run, recorded(run))
            assert np.asarray(fragments[0].published_N).tolist() == run.parameters(0)
        assert (found[0] == found[1]) == is_alike, steps


def test_what_adds_up_to_more_than_can_be_merged_is_not_added() -> None:
    found = []
    for incarnations in (("x", "x"), ("x", "y")):
        run = MergerRun()
        for incarnation in incarnations:
            run.send("a", 1, constant(0.7 * NORM_MAX / SIZE**0.5), incarnation=incarnation)
        run.merger().turn(0.0)
        run.balance()
        found.append(run.parameters(0))
    assert found[0] == found[1]


def test_clipping_compares_norms_by_the_path_at_the_runs_own_step() -> None:
    """Paths grow with the warm-up. A step that an island claims gives no contribution a longer one."""
    run, merger = served_run()
    run.live("a", "b")
    for number in range(1, 13):
        usual = path(CONFIG, 4, 4 * number) / path(CONFIG, 4, 4)
        claimed = 4 * number if number <= 10 else 100_000
        for island in "ab":
            values_N = constant(usual if number <= 10 else 100.0 * usual)
            run.send(island, number, values_N, steps=4, global_step=claimed if island == "b" else 4 * number)
        assert merger.turn(0.0)
    assert path(CONFIG, 4, 4 * 12) > 10 * path(CONFIG, 4, 4)
    clips = [member.clip for entry in run.transport.reader.tape(20) for member in entry.members]
    assert clips[:20] == [1.0] * 20
    assert clips[20:] == pytest.approx([0.03] * 4, rel=0.1), "clipped to three times the usual norm"


def test_a_late_contribution_joins_the_next_round_of_its_fragment() -> None:
    run, merger = served_run()
    run.live("a")
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


# -- restarts ------------------------------------------------------------------------------------------------------


def played(script: Sequence[tuple[str, int, int]], restarts: Iterable[int]) -> MergerRun:
    """Send contributions (island, rounds ahead, versions behind), each before a turn, and restart the merger."""
    run, merger = served_run(quorum=2)
    run.live("a", "b", "c")
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


def test_a_restart_keeps_the_measured_round_times() -> None:
    """Grace windows depend on the measured times of quorums, and they decide which islands are in a round."""
    run = MergerRun(quorum=2)
    merger, graces = run.merger(), list[float]()
    for number, delay in ((1, 0.5), (2, 2.0), (3, 0.0)):
        run.live("a", "b", "silent")
        run.send("a", number, values(number))
        merger.turn(0.0)
        run.clock.now += delay
        run.send("b", number, values(-number % 99))
        while not merger.turn(0.0):
            run.live("a", "b", "silent")
            run.clock.now = merger.rounds.deadline() or run.clock.now
        graces.append(run.transport.reader.tape(1)[0].grace_seconds)
        before, merger = merger.state.timing, run.merger()
        assert merger.state.timing.quorum_seconds == before.quorum_seconds
    assert merger.state.timing.quorum_seconds == 0.625  # by halves of 0.5, 2 and 0
    assert graces[0] > graces[1] > 0.0


# -- two mergers ---------------------------------------------------------------------------------------------------


def test_a_merger_takes_up_a_run_however_fast_an_island_sends() -> None:
    run, _ = served_run()
    run.live("a")
    sent: list[str] = []

    def flood(name: str, *_: object) -> None:
        if name == "updates" and len(sent) < 100:
            sent.append(run.send("a", 1, constant(1.0), tokens=1 << 20).island)

    run.send("a", 1, constant(1.0))
    merger = run.merger(transport=run.faulty(before=flood))
    assert len(sent) < 10
    assert merger.turn(0.0)


@pytest.mark.parametrize("part", ["accumulate", "finish", "outer_step", "publish"])
def test_a_long_merge_renews_the_lease(part: str, monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    """Each part of the merge of a large fragment may take longer than a lease."""
    run = MergerRun(ISOTROPIC)
    monkeypatch.setattr(executor, "BETWEEN_SECONDS", 0.001)
    first = run.merger("first", executor=in_background)
    owner = round_merge if hasattr(round_merge, part) else merge_rules
    fast, epoch, slept = getattr(owner, part), first.epoch, 0

    def slow(*args: Any, **settings: Any) -> Any:
        nonlocal slept
        for _ in range(4):
            run.clock.now += LEASE_SECONDS / 3
            slept += 1
            until(lambda: run.clock.now - first._renewed_at < LEASE_SECONDS / 3, "the lease to be renewed")
        return fast(*args, **settings)

    monkeypatch.setattr(owner, part, slow)
    run.play(first, 1)
    assert slept >= 4, "the merge took longer than a lease"
    assert not run.idle_merger("second").acquire()
    assert first.epoch == epoch


def test_a_merger_that_receives_many_contributions_keeps_its_lease() -> None:
    """Each takes a while to download. Another merger must not take over in the middle of a turn."""
    run, names, taken = MergerRun(quorum=9), [f"island-{n}" for n in range(9)], list[bool]()

    merger = run.merger("first")
    opened = merger.rules.opened

    def slow(delivery: Delivery) -> Addend:
        run.clock.now += LEASE_SECONDS / 6
        taken.append(run.idle_merger("second").acquire())
        return opened(delivery)

    object.__setattr__(merger.rules, "opened", slow)
    run.live(*names)
    for name in names:
        run.send(name, 1, values(1))
    assert merger.turn(0.0)
    assert taken == [False] * len(names)


# -- rounds that are due together: while one is committed, the next one is merged --------------------------------------


ROUNDS = (1, 2, 3, 4)


class Lazy(Future[Any]):
    """A job that begins when its result is needed, as late as a thread could begin with it."""

    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self._job = job

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._job())
        return super().result(timeout)


def lazily(kind: str, threads: int = 1) -> Spawn:
    return Lazy if kind == "commit" else at_once


def send_two(run: MergerRun, first: int) -> None:
    """Send the contributions of two islands to this round and the next one, as `MergerRun.play` does."""
    run.live("a", "b")
    for number in (first, first + 1):
        run.send_both(number)


def overlapped(fault: tuple[str, int, str] | None = None) -> tuple[MergerRun, Faulty]:
    """Play four rounds, two in each turn. One write may fail, and the merger then loads the run again."""
    run = MergerRun(quorum=2)
    faulty = run.faulty(*([fault] if fault else []))
    merger = run.merger(transport=faulty, executor=lazily)
    for first in (1, 3):
        send_two(run, first)
        try:
            assert merger.turn(0.0)
        except UnreachableError:
            started(merger)
        while merger.state.closed <= first:
            assert merger.turn(0.0)
    return run, faulty


def test_a_round_is_merged_before_the_commit_of_the_one_before_has_ended() -> None:
    run, waiting = MergerRun(quorum=2), list[set[int]]()

    def note(name: str, *_: object) -> None:
        if name == "commit":
            waiting.append(merger.inbox.waiting_fragments())

    merger = run.merger(transport=run.faulty(before=note), executor=lazily)
    send_two(run, 1)
    assert merger.turn(0.0)
    assert waiting == [set(), set()], "the second round was not taken up before the first commit"
    assert [entry.round for entry in run.transport.reader.tape(10)] == [1, 2]


def test_overlapping_rounds_have_the_bits_of_rounds_one_by_one_also_when_a_commit_fails() -> None:
    """A round is merged again if the commit before it fails. `after` stands for a write whose answer is lost."""
    alone = MergerRun(quorum=2)
    alone.play(alone.merger(), *ROUNDS)
    expected = bits(alone)
    assert bits(overlapped()[0]) == expected
    for commit in range(len(ROUNDS)):
        for when in ("before", "after"):
            run, faulty = overlapped(("commit", commit, when))
            assert faulty.broken == 1
            run.balance()
            assert bits(run) == expected, (commit, when)
