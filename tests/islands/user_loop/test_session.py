"""`create` and `join` of both frameworks, as a script calls them, on a server in memory."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import weakref
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from archipelago import SyncConfig, create, join
from archipelago.broker import process
from archipelago.broker.config import AdoptConfig, MergeConfig
from archipelago.broker.control import DRAIN, EXPEL, island_field
from archipelago.broker.errors import ConfigError, DivergedError, MismatchError, UnknownRunError, UnreachableError
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory
from archipelago.islands.sync import leaving, participant
from archipelago.islands.sync.script import CALL_STEPS_MAX
from archipelago.islands.user_loop import new_run
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import Framework, merged_by, served
from tests.islands.user_loop.conftest import SYNC
from tests.islands.user_loop.own_runs import trained, tree


@pytest.fixture
def made(url: str) -> str:
    """The URL of a run of JAX scripts."""
    assert create(url, "own", tree(), sync=SYNC, steps=1000)
    return url


def counters_of(url: str) -> Any:
    return connect(url, "own").reader.counters()


def left_because(url: str) -> list[str]:
    return [note.text for note in connect(url, "own").reader.notes(100) if note.kind == "left"]


# -- in each framework ----------------------------------------------------------------------------------------------


def test_islands_take_the_first_parameters_and_no_other_call_changes_them(framework: Framework, url: str) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    assert not framework.create(url, "own", framework.model(more=1.0), sync=SYNC, steps=1000)
    for changed in ({"steps": 999}, {"kinds": lambda name: "embedding"}):
        with failing(MismatchError, "config.other-settings"):
            framework.create(url, "own", framework.model(), **{"sync": SYNC, "steps": 1000, **changed})
    with framework.join(url, model=framework.model(more=5.0)) as script:
        found, first = script.values(), framework.run().first
        assert found.keys() == first.keys()
        for name, value in first.items():
            np.testing.assert_array_equal(found[name], value)
        assert all(value.dtype == np.float32 for value in found.values())
    other, named = framework.with_shape()
    for refused in (
        lambda: framework.create(url, "own", other, sync=SYNC, steps=1000),
        framework.join(url, model=other).__enter__,
    ):
        with failing(MismatchError, "loop.other-tensors") as caught:
            refused()
        assert named in caught.value.what


def test_nothing_is_sent_to_a_redis_that_cannot_hold_the_model(
    framework: Framework, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for memory in (Memory(used=1 << 20, limit=(1 << 20) + 99), Memory(used=1 << 20, limit=0, machine=(1 << 20) + 99)):
        monkeypatch.setattr(RedisConnection, "memory", lambda self, memory=memory: memory)
        with failing(ConfigError, "loop.too-large"):
            framework.create(url, "own", framework.model(), steps=10)
    with failing(UnknownRunError, "broker.unknown-run"):
        connect(url, "own").reader.manifest()
    monkeypatch.setattr(RedisConnection, "memory", lambda self: Memory(used=1 << 20, limit=32 << 20))
    assert framework.create(url, "own", framework.model(), steps=10)


def test_create_waits_for_a_redis_that_is_just_starting(
    framework: Framework, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = UnreachableError("it does not answer")
    monkeypatch.setattr(new_run, "connect_to", Mock(side_effect=[away, away, connect(url, "own"), away]))
    monkeypatch.setattr(process, "PAUSE_SECONDS", 0.0)
    assert framework.create(url, "own", framework.model(), steps=1000)
    with failing(UnreachableError, "broker.unreachable"):
        framework.create(url, "own", framework.model(), steps=1000, wait_seconds=0.0)


def test_a_first_parameter_that_is_not_finite_is_named(framework: Framework, url: str) -> None:
    model, named = framework.with_value(math.nan)
    with failing(DivergedError, "loop.not-finite") as caught:
        framework.create(url, "own", model, steps=10)
    assert repr(named) in caught.value.what


def test_sync_belongs_to_the_thread_and_the_time_of_the_membership(framework: Framework, url: str) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    caught: list[str] = []

    def elsewhere() -> None:
        for call in (script.sync, script.session.leave):
            try:
                call()
            except ConfigError as error:
                caught.append(error.code)

    with framework.join(url) as script:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        script.train()
        script.session.leave()
        script.session.leave()
        assert script.session.finished
        with failing(ConfigError, "loop.left"):
            script.sync()
    assert caught == ["loop.other-thread"] * 2
    assert counters_of(url).published == 2, "nothing was lost"
    with failing(ConfigError, "loop.left"):
        framework.join(url).sync()
    with failing(ConfigError, "loop.left"), script:
        pass


#: Tokens and steps of a call that are impossible.
NO_COUNTS: list[tuple[Any, Any]] = [
    (1.5, 1), (-1, 1), (1, 0), (1 << 40, 1), (3, 1.5), ("x", 1), ("12", 1), (math.nan, 1), (math.inf, 1),
    (np.ones(2), 1), (object(), 1), (1, "2"), (1, None), (1, math.nan), (1, CALL_STEPS_MAX + 1),
]  # fmt: skip
NO_LOSSES: list[Any] = ["0.5", object(), [0.5], np.array(["a"]), np.ones(0), 1j, np.array([None])]


def test_what_is_no_number_is_one_error_and_nothing_is_lost(framework: Framework, url: str) -> None:
    array = framework.array
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    with served(url) as merger:
        with framework.join(url) as script:
            script.step()
            for tokens, steps in [*NO_COUNTS, (array([1, 2, 3]), 1), (array(math.nan), 1)]:
                with failing(ConfigError, "loop.argument"):
                    script.sync(tokens=tokens, steps=steps)
            for loss in [*NO_LOSSES, array(1j), array([])]:
                with failing(ConfigError, "loop.argument"):
                    script.sync(loss=loss)
            before = script.loop.totals.tokens
            for tokens in (np.int64(3), 3.0, array(3.0), np.full((), 3, np.float32)):
                for loss in (np.float32(2.0), array([1.0, 1.0]), 1, np.ones(3), array(1)):
                    script.sync(tokens=tokens, loss=loss)
            assert script.loop.totals.tokens == before + 4 * 5 * 3
        counters = merger.transport.reader.counters()
    assert counters.refused == 0
    assert counters.published >= 2


def test_a_newcomer_takes_the_state_of_a_peer(framework: Framework, url: str, until: Until) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=100_000)
    stopped, given = threading.Event(), list[list[np.ndarray[Any, Any]]]()

    def train() -> None:
        with framework.join(url, optimizes=True, island="giver") as giver:
            while not stopped.wait(0.005):
                giver.step(0.001)
                given.append(giver.state())
                giver.sync()

    thread = threading.Thread(target=train)
    with served(url) as merger:
        thread.start()
        try:
            until(lambda: merger.state.closed > 2, "the first rounds")
            with framework.join(url, optimizes=True, island="new") as newcomer:
                assert newcomer.session.optimizer_origin == "peer giver"
                taken = newcomer.state()
            assert any(all(map(np.array_equal, taken, each)) for each in given)
            with framework.join(url, island="without") as other:
                assert other.session.optimizer_origin == "fresh"
        finally:
            stopped.set()
            thread.join()


# -- names and errors -----------------------------------------------------------------------------------------------


def test_leaves_without_values_are_named(url: str, made: str) -> None:
    with failing(ConfigError, "loop.meta") as caught:
        create(url, "new", jax.eval_shape(tree), steps=10)
    assert "'embedding'" in caught.value.what
    with join(made, "own", tree()) as run:
        with failing(ConfigError, "loop.meta"):
            for _ in range(8):
                run.sync(jax.eval_shape(tree), steps=4)
        with failing(ConfigError, "loop.meta"):
            jax.jit(lambda params: run.sync(params, steps=4))(run.params)
        run.leave()


def test_joining_again_under_one_name_replaces_the_older_membership(made: str, until: Until) -> None:
    with join(made, "own", tree(), island="a") as older, join(made, "own", tree(), island="a") as newer:
        until(lambda: older.finished, "the older one to notice")
        assert (older.reason, newer.reason, newer.finished) == ("replaced", "", False)
        assert "replaced" in repr(older) and "training" in repr(newer)


def test_a_script_knows_what_an_operator_asked_for(made: str, until: Until) -> None:
    for request, reason in ((DRAIN, "drained"), (EXPEL, "expelled")):
        run = join(made, "own", tree(), island=reason)
        assert (run.finished, run.reason) == (False, "")
        with run:
            connect(made, "own").reader.steer({island_field(reason): request})
            until(lambda run=run: run.finished, f"the island to be {reason}")
        assert (run.finished, run.reason) == (True, reason)


def test_an_island_that_no_merger_serves_is_stranded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participant, "STRANDED_SECONDS", 0.0)
    assert create(url, "own", tree(), sync=SYNC, steps=8)
    with join(url, "own", tree()) as run:
        reasons = [(run.sync(trained(run.params)), run.reason)[1] for _ in range(8)]
    assert reasons == [""] * 7 + ["stranded"]
    assert run.reason == "stranded"


def test_only_the_newest_parameters_are_kept(made: str) -> None:
    params = tree()
    older = weakref.ref(params["embedding"])
    with served(made), join(made, "own", params) as run:
        for _ in range(12):
            params = run.sync(trained(run.params))
            gc.collect()
            assert older() is None
            older = weakref.ref(params["embedding"])
            del params


# -- how a session ends ---------------------------------------------------------------------------------------------


def test_what_a_loop_does_after_the_end_of_its_run_changes_nothing(framework: Framework, url: str) -> None:
    framework.create(url, "own", framework.model(), sync=SYNC, steps=8)
    with served(url, linger_seconds=0.3) as merger, framework.join(url) as script:
        while not script.session.finished:
            script.train()
    published, merged = counters_of(url).published, merged_by(merger)
    with framework.join(url) as late:
        late.train()  # as a trainer, which looks at `finished` after its first step
        late.session.final(timeout=5.0)
    assert counters_of(url).published == published
    assert (late.session.step, late.session.reason) == (8, "completed")
    for name, value in late.values().items():
        np.testing.assert_array_equal(value, merged[name])


def test_an_island_stays_until_the_last_contributions_of_the_run_are_merged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def codes() -> list[str]:
        return [getattr(record, "code", "") for record in caplog.records]

    def train(run: Any) -> None:
        while not run.finished:
            run.sync(trained(run.params))
            time.sleep(0.001)

    assert create(url, "own", tree(), sync=SYNC, steps=8)
    with served(url, linger_seconds=0.3):
        with join(url, "own", tree(), island="a") as run:
            train(run)
        counters = counters_of(url)
        assert counters.merged == counters.published > 0
        assert run.reason == "completed"
    assert "run.few-syncs" in codes()
    assert "island.not-merged" not in codes()
    assert create(url, "unserved", tree(), sync=SYNC, steps=8)
    monkeypatch.setattr(leaving, "MERGED_SECONDS", 0.1)
    with join(url, "unserved", tree(), island="a") as run:
        with served(url, "unserved"):
            train(run)
        run.sync(trained(run.params))
    assert "island.not-merged" in codes(), "it waits for a while, not for ever"


def test_an_exception_is_said_and_sends_nothing(made: str) -> None:
    with pytest.raises(ValueError, match="my bug"), join(made, "own", tree(), island="a") as run:
        run.sync(trained(run.params))
        raise ValueError("my bug")
    assert (run.finished, run.reason) == (True, "left")
    assert counters_of(made).published == 0
    assert "my bug" in left_because(made)[0]
    with join(made, "own", tree(), island="a"):
        pass


def test_an_interrupted_sync_sends_nothing(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment that was adopted in part would go out as progress of this island."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), join(made, "own", tree(), island="a") as run:
        monkeypatch.setattr(run._loop, "boundary", interrupted)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            run.sync(trained(run.params))
        with failing(ConfigError, "loop.left"):
            run.sync(trained(run.params))
        raise KeyboardInterrupt
    assert counters_of(made).published == 0


def test_progress_that_was_donated_is_not_sent(made: str) -> None:
    with join(made, "own", tree(), island="a") as run:
        params = run.sync(trained(run.params))
        jax.tree.map(lambda x: x.delete(), params)
    assert counters_of(made).published == 0


def test_sigterm_ends_the_loop_and_sends_its_progress(made: str) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with join(made, "own", tree(), island="a") as run:
            for kill in (False, True):
                if kill:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.sync(trained(run.params))
                assert (run.finished, run.reason) == (kill, "signalled" if kill else "")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(SystemExit) as ended, join(made, "own", tree(), island="a") as run:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # it never looks at `finished`
                run.sync(trained(run.params))
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert counters_of(made).published >= 4


@pytest.mark.parametrize("rule", ["overwrite", pytest.param("carry", marks=pytest.mark.full)])
def test_what_a_loop_does_before_a_merger_serves_counts_in_full(url: str, rule: Any) -> None:
    sync = SyncConfig(interval=4, fragments=2, window=1, quorum=1, grace=0.0)
    merge = MergeConfig(rest="average", embedding="average")
    assert create(url, "own", tree(), sync=sync, merge=merge, adopt=AdoptConfig(rule=rule), steps=100_000)
    with join(url, "own", tree(), island="a") as run:
        for _ in range(100):
            time.sleep(0.002)
            run.sync(trained(run.params, 1e-4), steps=10)
        with served(url) as merger:
            while merger.state.closed < 5:
                run.sync(trained(run.params, 1e-4))
                time.sleep(0.001)
            state = merger.state
    assert not state.refused
