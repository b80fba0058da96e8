"""`follow`: whole versions of a run's parameters, in the caller's own tree or module, without a write to the run."""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import archipelago
from archipelago.broker.config import WireConfig
from archipelago.broker.errors import ConfigError, MismatchError, UnknownRunError
from archipelago.broker.redis.transport import connect
from archipelago.islands.sync import listener
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.listener import CYCLES_KEPT, Cycles, Listener, Receiver
from archipelago.islands.user_loop.following import Published
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import CONFIG, Framework, Values, served
from tests.islands.user_loop.conftest import SYNC
from tests.islands.user_loop.own_runs import OwnRun, tree

INT4 = replace(CONFIG, wire=WireConfig(up="float32", thin="", down="int4"))


class FollowedRun:
    """A run in virtual time, its only island, and the parameters after each of its rounds."""

    def __init__(self, **changes: Any) -> None:
        self.run = OwnRun(**changes)
        self.island = self.run.island()
        self.after: dict[int, Values] = {0: self.run.merged()}

    def train(self, rounds: int) -> None:
        until = self.run.merger.rounds.closed + rounds
        while (closed := self.run.merger.rounds.closed) < until:
            self.after[closed] = self.run.merged()
            self.island.train()
        self.after[closed] = self.run.merged()

    def answers_from(self, instance: str) -> None:
        """Let this server answer from now on, and a new merger serve the run there."""
        self.run.broker.instance = instance
        self.run.clock.now += 60.0
        self.run.merger = self.run.new_merger()

    def receiver(self) -> Receiver:
        return Receiver(self.run.connect(), self.run.manifest, self.run.clock)


def listener_of(receiver: Receiver, *, consistent: bool = True) -> Listener:
    return Listener(receiver, dict, consistent=consistent)


def look(receiver: Receiver, following: Listener) -> archipelago.Version | None:
    """Receive what there is, and return the newest version."""
    receiver.pumps.run_once()
    assert not receiver.pumps.trouble
    return following.newest()


def assert_same(found: Any, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), values)


@pytest.fixture(autouse=True)
def short_waits_of_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(listener, "BLOCK_SECONDS", 0.05)


@pytest.mark.parametrize(("config", "rounds"), [(CONFIG, 1), (INT4, 1), (INT4, 3), (INT4, 7)])
def test_each_version_is_the_run_after_a_whole_cycle(config: Any, rounds: int) -> None:
    run = FollowedRun(config=config)
    receiver = run.receiver()
    following, seen = listener_of(receiver), list[int]()
    for _ in range(5):
        version = look(receiver, following)
        if version is not None:
            seen.append(version.round)
            assert_same(version.params, run.after[version.round])
        assert look(receiver, following) is None, "a version is returned once"
        run.train(rounds)
    assert seen == sorted({closed // 2 * 2 for closed in range(0, 5 * rounds, rounds)})


def test_versions_may_come_round_by_round() -> None:
    run = FollowedRun()
    receiver = run.receiver()
    following = listener_of(receiver, consistent=False)
    for number in range(5):
        version = look(receiver, following)
        assert version is not None and version.round == number
        assert_same(version.params, run.after[number])
        run.train(1)


def test_a_listener_that_comes_within_a_cycle_begins_with_the_last_whole_one() -> None:
    run = FollowedRun(config=INT4)
    run.train(5)
    receiver = run.receiver()
    version = look(receiver, listener_of(receiver))
    assert version is not None and version.round == 4
    assert_same(version.params, run.after[4])
    assert 0 < version.step < run.run.merger.state.step


def test_a_run_that_goes_back_gives_no_version_twice() -> None:
    def arrival(p: int, version: int, value: float) -> Arrival:
        snapshot = replace(samples.first_snapshots(samples.manifest())[0][0], fragment=p, version=version)
        return Arrival(snapshot, np.full(1, value, np.float32))

    cycles = Cycles([0, 1])
    for p, version in ((0, 1), (1, 1), (0, 2)):
        cycles.add(arrival(p, version, 1.0))
    assert [each.snapshot.version for each in cycles.arrivals(consistent=True)] == [1, 1]
    cycles.forget(0)  # its version 2 was lost
    cycles.add(arrival(1, 2, 2.0))
    for consistent in (False, True):
        assert cycles.arrivals(consistent=consistent) == (), "another version 2 follows"
    cycles.add(arrival(0, 2, 2.0))
    assert [float(each.params_N[0]) for each in cycles.arrivals(consistent=True)] == [2.0, 2.0]
    cycles.forget(1)  # it was lost after the version was whole
    cycles.add(arrival(1, 1, 3.0))
    cycles.add(arrival(1, 2, 3.0))
    assert [float(each.params_N[0]) for each in cycles.arrivals(consistent=True)] == [2.0, 3.0]
    for version in range(3, 20):  # fragment 1 cannot be read
        cycles.add(arrival(0, version, 1.0))
    assert len(cycles._building) == CYCLES_KEPT


@pytest.mark.parametrize("consistent", [True, False])
def test_a_run_that_goes_back_is_followed_at_once(consistent: bool) -> None:
    run = FollowedRun()
    run.answers_from("a server")
    receiver = run.receiver()
    following = listener_of(receiver, consistent=consistent)
    run.train(4)
    stored = vars(run.run.broker.runs[run.run.manifest.run])
    checkpoint = copy.deepcopy(stored)
    run.train(4)
    lost = look(receiver, following)
    assert lost is not None and lost.round == 8
    stored.update(checkpoint)
    run.answers_from("another server")
    for number in (4, 6, 8):
        version = look(receiver, following)
        assert version is not None and version.round == number
        assert_same(version.params, run.after[number])
        assert look(receiver, following) is None, "a version is returned once"
        run.train(2)


# -- in the form that the caller uses ---------------------------------------------------------------------------------


def test_versions_come_into_a_tree_a_dictionary_or_names() -> None:
    run = OwnRun(tree())
    published, merged = Published.of(run.manifest), run.merged()
    assert_same(published.filling(None)(merged), merged)
    like = tree(jnp.bfloat16, more=5.0)
    found = published.filling(like)(merged)
    assert found["layers"][1]["kernel"].dtype == jnp.bfloat16 and int(found["count"]) == 7
    np.testing.assert_array_equal(found["layers"][1]["kernel"].astype(jnp.float32), merged["layers.1.kernel"])
    assert float(like["embedding"][0, 0]) == 6.0, "the tree that was given stays as it is"
    on_host = {name: np.zeros(values.shape, np.float16) for name, values in merged.items()}
    taken = published.filling(on_host)(merged)
    assert all(isinstance(values, np.ndarray) and values.dtype == np.float16 for values in taken.values())
    assert_same(taken, merged)


def test_other_tensors_are_named() -> None:
    published = Published.of(OwnRun(tree()).manifest)
    for like in ({"other": jnp.ones(3)}, {**tree(), "more": jnp.ones(3)}, {"embedding": jnp.ones((8, 4))}):
        with pytest.raises(MismatchError) as raised:
            published.filling(like)
        assert raised.value.code in ("loop.other-tensors", "loop.other-frozen")
    with failing(ConfigError, "loop.other-frozen"):
        Published.of(OwnRun(tree(), trained="kernel").manifest).filling(tree(more=1.0))


# -- as a user calls it -----------------------------------------------------------------------------------------------


def test_a_script_is_followed_to_its_end(framework: Framework, url: str, until: Until) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=24)
    with served(url) as merger:
        model = framework.model(more=3.0)
        following = archipelago.follow(url, "own", like=model)
        first = next(following)
        assert (first.round, first.step) == (0, 0)
        with framework.join(url) as script:
            while not script.session.finished:
                script.train()
                until(lambda: merger.rounds.closed * 2 >= min(24, script.session.step) - 4, "rounds close")
        *_, last = following
        assert last.round == merger.rounds.closed and last.step == merger.state.step >= 24
        again = archipelago.follow(url, "own")  # of a finished run: all its rounds, at once
        *_, whole = again
        assert (whole.round, whole.step) == (last.round, last.step)
        until(lambda: threading.active_count() < 20, "threads ended")


def test_wrong_names_fail_at_once_and_dropped_listeners_end(url: str, until: Until) -> None:
    with failing(UnknownRunError, UnknownRunError.code):
        archipelago.follow(url, "own")
    assert archipelago.create(url, "own", tree(), sync=SYNC, steps=1000)
    for _ in archipelago.follow(url, "own"):
        break
    gc.collect()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("link-")], "its threads ended")


def test_a_listener_ends_when_another_run_takes_the_name(url: str, until: Until) -> None:
    assert archipelago.create(url, "own", tree(), sync=SYNC, steps=1000)
    with archipelago.follow(url, "own") as following:
        next(following)
        redis: Any = connect(url, "own").connection.redis
        redis.flushall()
        assert archipelago.create(url, "own", tree(more=1.0), sync=SYNC, steps=1000)
        with failing(ConfigError, "island.other-run") as raised:
            next(following)
        assert "island" not in f"{raised.value}"
