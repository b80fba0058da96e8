"""Several processes of one island: SIGTERM while they join, which `jax.distributed` takes until we do, and lateness."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from archipelago import create
from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.islands.team import protocol
from archipelago.islands.team.protocol import Said, Team, Work, process_left
from archipelago.islands.team.scripts import Following, Leading
from archipelago.islands.user_loop.joining import JoinedRun, Joining
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.own_runs import tree


class Signalled(Team):
    """A team of one process, which gets the signal while it waits for the others."""

    rank, size = 0, 1

    def __init__(self, call: str) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the signal would be lost"
        os.kill(os.getpid(), signal.SIGTERM)

    def _sum(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    def share_bytes(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return data


class Alone(Signalled):
    """A team whose other processes come once the leader has said that it waits for them."""

    def __init__(self, told: Callable[[], object]) -> None:
        self._told_of_others = told

    def _sum(self, numbers: Sequence[int]) -> Sequence[int]:
        self._told_of_others()
        return numbers


def test_a_leader_says_when_the_others_do_not_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    monkeypatch.setattr(protocol, "LONG_WAIT_SECONDS", 0.01)
    team = Alone(lambda: until(lambda: caplog.records, "a warning"))
    for call in (lambda: team.is_same("join"), lambda: team.exchange(Said()), lambda: team.tell(Work.ADOPT)):
        caplog.clear()
        call()
        assert [getattr(record, "code", "") for record in caplog.records] == ["loop.waits"]


class Leader(Leading, JoinedRun):
    _new_team = Signalled


class Follower(Following):
    def _do(self, team: Any, said: Said) -> None:
        pass


@pytest.fixture(autouse=True)
def _default_meaning() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL


def test_a_signal_before_the_others_have_come_ends_the_loop() -> None:
    url = "fakeredis://signalled"
    create(url, "own", tree(), steps=1000)
    for run in (Leader(Joining(url, "own", tree())), Follower("own", None, Signalled)):
        with run:
            assert run.reason == "signalled"


def test_a_process_that_cannot_join_gives_the_signal_its_meaning_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: str) -> Team:
        raise process_left("the other one is gone", code="loop.not-together")

    for run in (Follower("own", None, fail), Leader(Joining("fakeredis://signalled", "own", tree()))):
        monkeypatch.setattr(Leader, "_new_team", staticmethod(fail))
        with failing(ConfigError, "loop.not-together"):
            run.__enter__()


def test_a_leader_that_is_stopped_waits_for_its_redis_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise UnreachableError("it is away")

    monkeypatch.setattr("archipelago.islands.user_loop.session.connect_to", away)
    with pytest.raises(KeyboardInterrupt):
        Leader(Joining("fakeredis://signalled", "own", tree())).__enter__()
