"""`create` and `join`, as a script calls them, on a server in memory."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import archipelago
from archipelago import SyncConfig, create, join
from archipelago.broker.config import AdoptConfig, MergeConfig
from archipelago.broker.errors import ConfigError, DivergedError, MismatchError, UnknownRunError
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory
from archipelago.islands.own_loop.reported import CALL_STEPS_MAX
from archipelago.islands.own_loop.tensors import EMBEDDINGS, kinds_by
from archipelago.islands.own_loop.tree import TreeLayout
from archipelago.islands.sync.connection import link
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.islands.own_loop.any_framework import served
from tests.islands.own_loop.own_runs import trained, tree

SYNC = SyncConfig(interval=4, fragments=2)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that waits for events end sooner when an island leaves."""
    monkeypatch.setattr(link, "BLOCK_SECONDS", 0.05)


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def made(url: str) -> str:
    assert create(url, "own", tree(), sync=SYNC, steps=1000)
    return url


def notes(url: str) -> list[str]:
    transport = connect(url, "own")
    try:
        return [f"{note.kind}: {note.text}" for note in transport.reader.notes(100)]
    finally:
        transport.close()


# -- create ---------------------------------------------------------------------------------------------------------


def test_create_publishes_the_tree(made: str) -> None:
    reader = connect(made, "own").reader
    manifest = reader.manifest()
    assert {t.name: (t.shape, t.kind) for t in manifest.tensors} == {
        "embedding": ((8, 4), "embedding"),
        "layers.0.bias": ((4,), "rest"),
        "layers.0.kernel": ((4, 4), "rest"),
        "layers.1.bias": ((4,), "rest"),
        "layers.1.kernel": ((4, 4), "rest"),
    }
    assert manifest.config.inner.steps == 1000
    assert manifest.config.has_own_loops
    with join(made, "own", jax.tree.map(jnp.zeros_like, tree()), island="a") as run:
        for got, given in zip(jax.tree.leaves(run.params), jax.tree.leaves(tree()), strict=True):
            if jnp.issubdtype(given.dtype, jnp.floating):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(given))


def test_create_again_changes_nothing_and_other_settings_are_refused(made: str) -> None:
    assert not create(made, "own", jax.tree.map(lambda x: x * 0, tree()), sync=SYNC, steps=1000)
    with failing(MismatchError, "config.other-settings"):
        create(made, "own", tree(), sync=SYNC, steps=999)
    with failing(MismatchError, "config.other-settings"):
        create(made, "own", tree(), sync=SYNC, steps=1000, kinds="nothing")
    with failing(MismatchError, "loop.other-tensors"):
        create(made, "own", {"w": jnp.ones(3)}, sync=SYNC, steps=1000)


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"n": jnp.arange(4)}, "loop.nothing"),
        ({}, "loop.nothing"),
        (jnp.ones(4), "loop.unnamed"),
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, "loop.unnamed"),
        ({"w": np.ones(4)}, "loop.dtype"),
        ({"": jnp.ones(2)}, "loop.unnamed"),
    ],
)
def test_a_tree_that_cannot_be_merged_is_refused(params: Any, code: str, url: str) -> None:
    with failing(ConfigError, code):
        create(url, "own", params, steps=10)
    with failing(ConfigError, code):
        join(url, "own", params)


def test_a_container_without_names_is_refused(url: str) -> None:
    @jax.tree_util.register_pytree_node_class
    class Nameless:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tree_flatten(self) -> Any:
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    with failing(ConfigError, "loop.unnamed"):
        create(url, "own", {"part": Nameless(jnp.ones(2))}, steps=10)


def test_dataclasses_and_variables_have_readable_names() -> None:
    from flax import nnx

    @jax.tree_util.register_dataclass
    @dataclass
    class Layer:
        weight: Any
        bias: Any

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    layout = TreeLayout.of({"first": Layer(jnp.ones(2), jnp.ones(1)), "second": [jnp.ones(3)]})
    assert set(layout.templates) == {"first.weight", "first.bias", "second.0"}
    layout = TreeLayout.of(nnx.state(Model()))
    assert set(layout.templates) == {"layers.0.kernel", "layers.0.bias"}
    assert layout.own


def test_nothing_is_sent_to_a_redis_that_cannot_hold_the_model(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(connect(url, "own").reader)
    monkeypatch.setattr(kind, "memory", lambda self: Memory(used=1 << 20, limit=2 << 20))
    with failing(ConfigError, "loop.too-large") as caught:
        create(url, "own", {"w": jnp.zeros((512, 512))}, steps=10)
    assert "262,144" in caught.value.what
    with failing(UnknownRunError, "broker.unknown-run"):
        connect(url, "own").reader.manifest()
    monkeypatch.setattr(kind, "memory", lambda self: Memory(used=1 << 20, limit=0, machine=2 << 20))
    with failing(ConfigError, "loop.too-large"):
        create(url, "own", {"w": jnp.zeros((512, 512))}, steps=10)
    assert create(url, "own", {"w": jnp.zeros(8)}, steps=10)


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
        assert run.finished


def test_parameters_that_are_not_finite_are_refused(url: str) -> None:
    with failing(DivergedError, "loop.not-finite") as caught:
        create(url, "own", {"good": jnp.ones(2), "bad": jnp.full(2, jnp.nan)}, steps=10)
    assert "'bad'" in caught.value.what


def test_kinds_are_a_pattern_or_a_function() -> None:
    assert kinds_by("EMBED|wte")("model.wte.weight") == "embedding"
    assert kinds_by("embed")("layers.0.kernel") == "rest"
    assert kinds_by(lambda name: "embedding" if name == "x" else "rest")("x") == "embedding"
    with failing(ConfigError, "loop.kinds"):
        kinds_by("(")
    with failing(ConfigError, "loop.kinds"):
        kinds_by(lambda name: "bias")("x")  # type: ignore[arg-type, return-value]


def test_embeddings_are_found_by_the_names_of_all_frameworks() -> None:
    assert signature(create).parameters["kinds"].default == EMBEDDINGS
    kind_of = kinds_by(EMBEDDINGS)
    for name in ("params.Embed_0.embedding", "model.embed_tokens.weight", "transformer.wte.weight"):
        assert kind_of(name) == "embedding"
    assert kind_of("layers.0.kernel") == "rest"


# -- join -----------------------------------------------------------------------------------------------------------


def test_another_tree_than_the_runs_is_refused_with_the_difference(made: str) -> None:
    other = tree()
    other["layers"][0]["kernel"] = jnp.ones((4, 5))
    del other["layers"][1]["bias"]
    with failing(MismatchError, "loop.other-tensors") as caught, join(made, "own", other):
        pass
    assert "layers.0.kernel" in caught.value.what
    assert "layers.1.bias" in caught.value.what


def test_a_run_of_ours_refuses_another_tree(url: str) -> None:
    of_ours = samples.manifest("own")
    connect(url, "own").create(of_ours, samples.first_snapshots(of_ours))
    with failing(MismatchError, "loop.other-tensors"), join(url, "own", tree()):
        pass


def test_a_run_that_does_not_exist_is_named(url: str) -> None:
    with failing(UnknownRunError, "broker.unknown-run"), join(url, "nowhere", tree(), wait_seconds=0.0):
        pass


def test_joining_twice_under_one_name_is_refused(made: str) -> None:
    with join(made, "own", tree(), island="a") as run:
        with failing(ConfigError, "loop.joined-twice"), join(made, "own", tree(), island="a"):
            pass
        with join(made, "own", tree(), island="b") as other:
            assert (run.island, other.island) == ("a", "b")
        run.sync(run.params)
    with join(made, "own", tree(), island="a"):
        pass


def test_two_runs_do_not_train_one_tree(made: str) -> None:
    assert create(made, "second", tree(), sync=SYNC, steps=1000)
    with join(made, "own", tree()) as one, join(made, "second", tree()) as other:
        params = one.sync(trained(one.params))
        with failing(ConfigError, "loop.two-runs"):
            other.sync(params)
        other.sync(trained(other.params))
        one.sync(trained(params))


def test_sync_belongs_to_the_thread_and_the_time_of_the_membership(made: str) -> None:
    caught: list[str] = []

    def elsewhere() -> None:
        for call in (lambda: run.sync(run.params), run.leave):
            try:
                call()
            except ConfigError as error:
                caught.append(error.code)

    with join(made, "own", tree()) as run:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        run.sync(trained(run.params))
        run.leave()
        run.leave()
        assert run.finished
        with failing(ConfigError, "loop.left"):
            run.sync(run.params)
    assert caught == ["loop.other-thread"] * 2
    assert connect(made, "own").reader.books().published == 2, "nothing was lost"
    with failing(ConfigError, "loop.left"):
        join(made, "own", tree()).sync(tree())
    with failing(ConfigError, "loop.left"), run:
        pass


def test_only_the_newest_parameters_are_kept(made: str) -> None:
    params = tree()
    older = weakref.ref(params["embedding"])
    with served(made), join(made, "own", params) as run:
        gc.collect()
        gc.freeze()  # what is there already takes long to look through
        try:
            for _ in range(12):
                params = run.sync(trained(run.params))
                gc.collect()
                assert older() is None
                older = weakref.ref(params["embedding"])
                del params
        finally:
            gc.unfreeze()


def test_parameters_may_be_described_instead_of_given(made: str) -> None:
    with join(made, "own", jax.eval_shape(tree)) as run:
        np.testing.assert_array_equal(np.asarray(run.params["embedding"]), np.asarray(tree()["embedding"]))


NO_COUNTS: list[tuple[Any, Any]] = [
    (-1, 1), (1, 0), (1 << 40, 1), (3, 1.5), ("x", 1), ("12", 1), (math.nan, 1), (math.inf, 1), (np.ones(2), 1),
    (jnp.arange(3), 1), (object(), 1), (1, "2"), (1, None), (1, math.nan), (1, CALL_STEPS_MAX + 1),
    (jnp.float32(jnp.nan), 1),
]  # fmt: skip
COUNTS: list[Any] = [np.int64(3), 3.0, jnp.float32(3), np.ones((), np.float32), True]
NO_LOSSES: list[Any] = ["0.5", object(), [0.5], np.array(["a"]), np.ones(0), 1j, jnp.complex64(1j), np.array([None])]


def test_what_is_no_number_is_one_error_and_nothing_is_lost(made: str) -> None:
    with served(made) as merger:
        with join(made, "own", tree(), island="a") as run:
            params = trained(run.params)
            for tokens, steps in NO_COUNTS:
                with failing(ConfigError, "loop.tokens"):
                    run.sync(params, tokens=tokens, steps=steps)
            for loss in NO_LOSSES:
                with failing(ConfigError, "loop.loss"):
                    run.sync(params, loss=loss)
            for tokens in COUNTS:
                for loss in (np.float32(2.0), jnp.ones(2, jnp.bfloat16), 1, np.ones(3)):
                    params = run.sync(params, tokens=tokens, loss=loss)
        books = merger.transport.reader.books()
    assert books.refused == 0
    assert books.published >= 2


def test_own_leaves_are_named_once(made: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), join(made, "own", tree()) as run:
        for _ in range(3):
            run.sync(trained(run.params))
    assert len([record for record in caplog.records if "count" in record.getMessage()]) == 1


def test_a_clean_end_sends_all_progress(made: str, until: Until) -> None:
    with served(made) as merger:
        with join(made, "own", tree(), island="a") as run:
            run.sync(trained(run.params), tokens=64, loss=1.5)
        until(lambda: merger.state.closed >= 2, "both fragments to be merged")
        books = merger.transport.reader.books()
        assert books.merged == 2
        assert books.merged_tokens == 128
    assert any(note.startswith("left") for note in notes(made))


def test_an_exception_is_said_and_sends_nothing(made: str) -> None:
    def train() -> None:
        with join(made, "own", tree(), island="a") as run:
            run.sync(trained(run.params))
            raise ValueError("my bug")

    with pytest.raises(ValueError, match="my bug"):
        train()
    assert connect(made, "own").reader.books().published == 0
    assert any("my bug" in note for note in notes(made))
    with join(made, "own", tree(), island="a"):
        pass


def test_an_interrupted_sync_sends_nothing(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment that was adopted in part would go out as progress of this island."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    def train() -> None:
        with join(made, "own", tree(), island="a") as run:
            monkeypatch.setattr(run._loop, "boundary", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.sync(trained(run.params))
            with failing(ConfigError, "loop.left"):
                run.sync(trained(run.params))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert connect(made, "own").reader.books().published == 0


def test_progress_that_was_donated_is_not_sent(made: str) -> None:
    with join(made, "own", tree(), island="a") as run:
        params = run.sync(trained(run.params))
        jax.tree.map(lambda x: x.delete(), params)
    assert connect(made, "own").reader.books().published == 0


def train_on_after_sigterm(url: str) -> None:
    """Never look at `finished`."""
    with join(url, "own", tree(), island="a") as run:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            run.sync(trained(run.params))


def test_sigterm_ends_the_loop_and_sends_its_progress(made: str) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with join(made, "own", tree(), island="a") as run:
            for kill in (False, True):
                if kill:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.sync(trained(run.params))
                assert run.finished is kill
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(SystemExit) as ended:
            train_on_after_sigterm(made)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert connect(made, "own").reader.books().published >= 4


def test_a_handler_of_the_users_stays(made: str) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with join(made, "own", tree()) as run:
            os.kill(os.getpid(), signal.SIGTERM)
            run.sync(trained(run.params))
            assert not run.finished
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_the_operator_drains_it(made: str, until: Until) -> None:
    with join(made, "own", tree(), island="a") as run:
        run.sync(trained(run.params))
        connect(made, "own").reader.steer({"island.a": "drain"})
        until(lambda: run.finished, "the request to arrive")
    with failing(ConfigError, "control.unwelcome"), join(made, "own", tree(), island="a"):
        pass


@pytest.mark.parametrize("rule", ["overwrite", pytest.param("carry", marks=pytest.mark.full)])
def test_what_a_loop_does_before_a_merger_serves_counts_in_full(url: str, rule: Any) -> None:
    sync = SyncConfig(interval=3, fragments=3, window=1, quorum=1, grace=0.0)
    merge = MergeConfig(rest="average", embedding="average")
    assert create(url, "own", tree(), sync=sync, merge=merge, adopt=AdoptConfig(rule=rule), steps=100_000)
    with join(url, "own", tree(), island="a") as run:
        params = run.params
        for _ in range(300):
            time.sleep(0.002)
            params = run.sync(trained(params, 1e-4), steps=10)
        with served(url) as merger:
            while merger.state.closed < 5:
                params = run.sync(trained(params, 1e-4))
                time.sleep(0.001)
            state = merger.state
    assert state.lowered_tokens == 0
    assert not any(code.startswith("claims.steps") for code in state.refused)


# -- the optimiser's state ------------------------------------------------------------------------------------------


def test_a_run_that_is_over_is_said_to_be(url: str, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    create(url, "own", tree(), sync=SYNC, steps=8)
    with served(url) as merger:
        with join(url, "own", tree()) as run:
            while not run.finished:
                run.sync(run.params)
        until(lambda: merger.state.step >= 8, "the last merge")
    assert "loop.finished" not in {getattr(record, "code", "") for record in caplog.records}
    with join(url, "own", tree()) as run:
        assert run.finished
    assert "loop.finished" in {getattr(record, "code", "") for record in caplog.records}


def test_a_newcomer_takes_the_state_of_a_peer(made: str, until: Until) -> None:
    optimizer = optax.adam(0.1)
    merged = {key: value for key, value in tree().items() if key != "count"}
    stopped = threading.Event()
    given: list[Any] = []

    def train() -> None:
        state = optimizer.init(merged)
        joined = join(made, "own", tree(), state=lambda: state, island="giver")
        with jax.numpy_dtype_promotion("standard"), joined as run:
            while not stopped.wait(0.005):
                _, state = optimizer.update(merged, state)
                given.append(state)
                run.sync(trained(run.params, 0.001))

    thread = threading.Thread(target=train)
    with served(made) as merger:
        thread.start()
        try:
            until(lambda: merger.state.closed > 2, "the first rounds")
            fresh = optimizer.init(merged)
            with join(made, "own", tree(), state=fresh, island="new") as run:
                assert run.moments == "peer giver"
                assert str(jax.tree.structure(run.state)) == str(jax.tree.structure(fresh))
                taken = [np.asarray(leaf) for leaf in jax.tree.leaves(run.state)]
            assert any(
                all(np.array_equal(a, np.asarray(b)) for a, b in zip(taken, jax.tree.leaves(each), strict=True))
                for each in given
            )
        finally:
            stopped.set()
            thread.join()


def test_without_a_peer_the_own_state_is_kept(made: str) -> None:
    with join(made, "own", tree(), state={"mu": jnp.ones(3)}) as run:
        assert run.moments == "fresh"
        assert run.state["mu"].shape == (3,)
    with join(made, "own", tree()) as run:
        assert run.state is None


def test_the_api_names_them() -> None:
    assert archipelago.create is create
    assert {"create", "join", "SyncConfig"} <= set(dir(archipelago))
