"""Rounds that are due together: while one is committed, the next one is merged."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from archipelago.broker.errors import UnreachableError
from archipelago.merger.beside import Spawn, at_once
from tests.harness.merger_run import MergerRun, bits
from tests.harness.played import started
from tests.intercept import Faulty

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


def played(fault: tuple[str, int, str] | None = None) -> tuple[MergerRun, Faulty]:
    """Play four rounds, two in each turn. One write may fail, and the merger then loads the run again."""
    run = MergerRun(quorum=2)
    faulty = run.faulty(*([fault] if fault else []))
    merger = run.merger(transport=faulty, beside=lazily)
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

    merger = run.merger(transport=run.faulty(before=note), beside=lazily)
    send_two(run, 1)
    assert merger.turn(0.0)
    assert waiting == [set(), set()], "the second round was not taken up before the first commit"
    assert [entry.round for entry in run.transport.reader.tape(10)] == [1, 2]


def test_overlapping_rounds_have_the_bits_of_rounds_one_by_one_also_when_a_commit_fails() -> None:
    """A round is merged again if the commit before it fails. `after` stands for a write whose answer is lost."""
    alone = MergerRun(quorum=2)
    alone.play(alone.merger(), *ROUNDS)
    expected = bits(alone)
    assert bits(played()[0]) == expected
    for commit in range(len(ROUNDS)):
        for when in ("before", "after"):
            run, faulty = played(("commit", commit, when))
            assert faulty.broken == 1
            run.balance()
            assert bits(run) == expected, (commit, when)
