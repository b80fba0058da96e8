"""Rounds that are due together: while one is committed, the next one is merged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.merger.beside import Beside, Spawn, at_once, in_background
from archipelago.merger.service import Merger
from tests.harness.merger_run import Faulty, MergerRun, bits, values

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


def serving(run: MergerRun, transport: Faulty, beside: Beside = lazily) -> Merger:
    made = Merger(transport, run.clock, "merger", live_poll_seconds=0.0, beside=beside)
    assert made.acquire()
    made.load()
    return made


def before_each_commit(transport: Faulty, note: Callable[[], None]) -> None:
    client: Any = transport.merger
    commit = client.commit

    def noted(*arguments: Any) -> None:
        note()
        commit(*arguments)

    client.commit = noted


def send_two(run: MergerRun, first: int) -> None:
    """Send the contributions of two islands to this round and the next one."""
    run.live("a", "b")
    for number in (first, first + 1):
        for island in "ab":
            run.send(island, number, values(2 * number + ord(island)), tokens=100 + number)


def played(fault: tuple[str, int, str] | None = None) -> tuple[MergerRun, Faulty]:
    """Play four rounds, two in each turn. One write may fail, and the merger then loads the run again."""
    run = MergerRun(quorum=2)
    faulty = Faulty(run.broker, "sample", [fault] if fault else [])
    merger = serving(run, faulty)
    for first in (1, 3):
        send_two(run, first)
        try:
            assert merger.turn(0.0)
        except UnreachableError:
            assert merger.acquire()
            merger.load()
        while merger.state.closed <= first:
            assert merger.turn(0.0)
    return run, faulty


def test_a_round_is_merged_before_the_commit_of_the_one_before_has_ended() -> None:
    run = MergerRun(quorum=2)
    transport = Faulty(run.broker, "sample")
    merger = serving(run, transport)
    waiting: list[set[int]] = []
    before_each_commit(transport, lambda: waiting.append(merger.inbox.waiting_fragments()))
    send_two(run, 1)
    assert merger.turn(0.0)
    assert waiting == [set(), set()], "the second round was not taken up before the first commit"
    assert [entry.round for entry in run.transport.reader.tape(10)] == [1, 2]


def test_overlapping_rounds_have_the_bits_of_rounds_one_by_one() -> None:
    alone = MergerRun(quorum=2)
    merger = alone.merger()
    for number in ROUNDS:
        alone.live("a", "b")
        for island in "ab":
            alone.send(island, number, values(2 * number + ord(island)), tokens=100 + number)
        assert merger.turn(0.0)
    assert bits(played()[0]) == bits(alone)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("commit", range(len(ROUNDS)))
def test_a_commit_that_fails_takes_the_round_after_it_along(commit: int, when: str) -> None:
    """`after` stands for a write that arrived although its answer did not."""
    run, faulty = played(("commit", commit, when))
    assert faulty.broken == 1
    run.balance()
    assert bits(run) == bits(played()[0])


def test_a_commit_runs_on_a_thread_of_its_own() -> None:
    run = MergerRun(quorum=2)
    transport = Faulty(run.broker, "sample")
    merger = serving(run, transport, in_background)
    threads: list[str] = []
    before_each_commit(transport, lambda: threads.append(threading.current_thread().name))
    send_two(run, 1)
    assert merger.turn(0.0)
    assert [name.partition("_")[0] for name in threads] == ["commit", "commit"]
    run.balance()
