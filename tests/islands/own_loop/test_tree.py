"""The names of a tree's leaves, the kinds that follow from them, and trees that cannot be merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago import create, join
from archipelago.broker.errors import ConfigError
from archipelago.islands.own_loop.tensors import EMBEDDINGS, kinds_by
from archipelago.islands.own_loop.tree import TreeLayout
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
        with failing(ConfigError, code):
            create("fakeredis://never", "own", params, steps=10)
        with failing(ConfigError, code):
            join("fakeredis://never", "own", params)


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
    for name in ("params.Embed_0.embedding", "model.embed_tokens.weight", "transformer.wte.weight"):
        assert kinds_by(EMBEDDINGS)(name) == "embedding"
