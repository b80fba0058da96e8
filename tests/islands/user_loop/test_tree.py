"""Trees of JAX loops: names of leaves, trees that cannot be merged, and the optimiser's state for a newcomer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago import create, join
from archipelago.broker.config import STEPS_MAX
from archipelago.broker.errors import ConfigError, MismatchError, WireError
from archipelago.broker.messages import Handover
from archipelago.islands.sync import recovery
from archipelago.islands.user_loop.parameters import LoopState
from archipelago.islands.user_loop.tensors import EMBEDDINGS, kinds_by
from archipelago.islands.user_loop.tree import TreeLayout
from tests.failing import failing


@jax.tree_util.register_pytree_node_class
class Nameless:
    """A container that gives its leaves no names."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> Any:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def test_a_tree_that_cannot_be_merged_is_refused() -> None:
    wrongs: list[tuple[Any, str]] = [
        ({"n": jnp.arange(4)}, "loop.nothing"),
        ({}, "loop.nothing"),
        (jnp.ones(4), "loop.unnamed"),
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, "loop.unnamed"),
        ({"": jnp.ones(2)}, "loop.unnamed"),
        ({"part": Nameless(jnp.ones(2))}, "loop.unnamed"),
        ({"w": np.ones(4)}, "loop.dtype"),
    ]
    for params, code in wrongs:
        with failing(ConfigError, code) as caught:
            create("fakeredis://never", "own", params, steps=10)
        assert "`create`" not in caught.value.remedy, "tasks raise the same errors"
        with failing(ConfigError, code):
            join("fakeredis://never", "own", params)


def test_a_leaf_whose_type_is_not_merged_is_not_said_to_be_missing() -> None:
    url, params = "fakeredis://types", {"a": jnp.ones(4), "b": jnp.ones(2)}
    create(url, "own", params, steps=10)
    for own, is_missing in ({"a": jnp.ones(4), "b": jnp.arange(2)}, False), ({"a": jnp.ones(4)}, True):
        for refused in (lambda own=own: create(url, "own", own, steps=10), join(url, "own", own).__enter__):
            with failing(MismatchError, "loop.other-tensors") as caught:
                refused()
            assert ("b [2] is missing" in caught.value.what) == is_missing


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


def test_kinds_are_a_pattern_or_a_function() -> None:
    assert kinds_by("EMBED|wte")("model.wte.weight") == "embedding"
    assert kinds_by("embed")("layers.0.kernel") == "rest"
    assert kinds_by(lambda name: "embedding" if name == "x" else "rest")("x") == "embedding"
    with failing(ConfigError, "loop.argument"):
        kinds_by("(")
    with failing(ConfigError, "loop.argument"):
        kinds_by(lambda name: "bias")("x")  # type: ignore[arg-type, return-value]
    gpt2 = ("transformer.wte.weight", "transformer.wpe.weight")
    for name in ("params.Embed_0.embedding", "model.embed_tokens.weight", *gpt2):
        assert kinds_by(EMBEDDINGS)(name) == "embedding"


def handed_over(state: Any) -> tuple[Handover, bytes]:
    leaves = LoopState(lambda: state).copies()
    assert leaves is not None
    return recovery.encode(recovery.StateForPeer("b/y", leaves, 5), "a/x")


def adam(count: int = 3) -> Any:
    return optax.ScaleByAdamState(jnp.int32(count), {"w": jnp.ones(4)}, {"w": jnp.ones(4)})


def test_arrays_of_numpy_keep_their_dtype() -> None:
    """JAX has no 64-bit numbers by default."""
    theirs = {"a": np.array([1e300, 2.0]), "b": np.float64(1e300), "c": np.int64(1 << 60)}
    own = {"a": np.zeros(2), "b": np.float64(0), "c": np.int64(0)}
    mine = LoopState(lambda: own)
    found = mine.taken(mine.decode(*handed_over(theirs)))
    for key, value in theirs.items():
        assert type(found[key]) is type(value)
        np.testing.assert_array_equal(found[key], value)


def test_a_state_of_as_many_bytes_and_another_layout_is_refused() -> None:
    own = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(6)}
    others: list[Any] = [
        {"a": jnp.ones(6), "b": jnp.ones((2, 3))},
        {"a": jnp.ones((3, 2)), "b": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "c": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(6, jnp.int32)},
        {"a": jnp.ones((2, 3)), "b": {"b": jnp.ones(6)}},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones(3)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(7)},
    ]
    for theirs in others:
        with failing(WireError, "handover.shape"):
            LoopState(lambda: own).decode(*handed_over(theirs))


def test_what_is_no_plain_number_stays_the_islands_own() -> None:
    kinds: list[Any] = [
        np.zeros(2, "m8[s]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.longdouble(2),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        np.ones(2, object),
    ]
    for own in kinds:
        mine = LoopState(partial(dict, own=own, mu=jnp.zeros(3)))
        found = mine.taken(mine.decode(*handed_over({"own": own, "mu": jnp.ones(3)})))
        assert found["own"] is own
        np.testing.assert_array_equal(found["mu"], np.ones(3))


def test_a_state_that_cannot_be_read_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    for broken in (lambda: 1 / 0, lambda: {3: jnp.ones(2), "a": jnp.ones(2)}):
        caplog.clear()
        assert LoopState(broken).copies() is None
        assert "state" in caplog.text


def test_a_count_that_no_steps_can_produce_is_refused() -> None:
    for count in (-1, STEPS_MAX + 1):
        with failing(WireError, "handover.unsound"):
            LoopState(adam).decode(*handed_over(adam(count)))
