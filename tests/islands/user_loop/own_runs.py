"""Runs and scripts of users' own loops in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import archipelago
from archipelago.broker.config import RunConfig
from archipelago.islands.sync.replica import Replica
from archipelago.islands.user_loop.joining import JoinedRun
from archipelago.islands.user_loop.parameters import TreeParameters, frozen_values
from archipelago.islands.user_loop.tensors import kinds_by
from archipelago.islands.user_loop.tree import TreeLayout
from archipelago.merger.storage import MergerFolder
from tests.harness.played import Connect
from tests.islands.user_loop.any_framework import CONFIG, STEP, Framework, LoopIsland, LoopRun, Script, Values


def tree(dtype: Any = jnp.float32, more: float = 0.0) -> dict[str, Any]:
    """Return parameters in containers of two kinds, with a leaf that is not merged."""
    layers = [
        {"kernel": jnp.full((4, 4), 1.0 + number + more, dtype), "bias": jnp.full(4, more, dtype)}
        for number in range(2)
    ]
    return {"embedding": jnp.full((8, 4), 1.0 + more, dtype), "layers": layers, "count": jnp.int32(7)}


def trained(params: Any, by: float = STEP) -> Any:
    """Return the parameters after a step that moves each floating-point leaf by the same number."""
    return jax.tree.map(lambda x: (x - by).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x + 1, params)


def only_kernels_trained(params: Any) -> Any:
    """Return the parameters after a step that moves the kernels only."""
    layers = [{**layer, "kernel": layer["kernel"] - STEP} for layer in params["layers"]]
    return {**params, "layers": layers}


def with_bias(params: Any, layer: int, bias: Any) -> Any:
    """Return the parameters with another bias in one layer."""
    layers = [{**each, "bias": bias} if n == layer else each for n, each in enumerate(params["layers"])]
    return {**params, "layers": layers}


def values_of(parameters: TreeParameters) -> Values:
    return {name: np.asarray(leaf, np.float32) for name, leaf in parameters.named().items()}


class OwnIsland(LoopIsland):
    """One island, which holds its parameters in a tree."""

    parameters: TreeParameters

    def __init__(self, run: OwnRun, name: str, template: Any, chosen: Any) -> None:
        parameters = TreeParameters(template, chosen)
        replica = Replica(run.manifest, parameters.layout.templates)
        super().__init__(run, name, parameters, replica, lambda vectors: parameters.start(replica.begin(list(vectors))))

    @property
    def params(self) -> Any:
        return self.parameters.tree

    def step(self, by: float = STEP) -> None:
        self.parameters.offer(trained(self.params, by))

    def spoil(self, value: float) -> str:
        bias = self.params["layers"][1]["bias"].at[2].set(value)
        self.parameters.offer(with_bias(self.params, 1, bias))
        return "layers.1.bias"

    def values(self) -> Values:
        return values_of(self.parameters)

    def dtypes(self) -> set[str]:
        return {str(leaf.dtype) for leaf in self.parameters.named().values()}

    def sync(self, params: Any, steps: int = 1, tokens: int = 10, loss: Any = 2.5) -> Any:
        """Sync these parameters, and return those to train on with."""
        self.parameters.offer(params)
        self.turn(steps, tokens, loss)
        return self.params

    def play(self, turns: int, step: Callable[[Any], Any] = trained) -> None:
        for _ in range(turns):
            self.sync(step(self.params))


class OwnRun(LoopRun):
    """A run of islands that train trees.

    Args:
        params: Its first parameters.
        config: Its settings.
        connect: Makes a connection to the run; by default to a broker in memory.
        folder: Where its merger keeps checkpoints and, in a recorded run, the record.
        trained: Which leaves are trained; all by default.
    """

    def __init__(
        self,
        params: Any = None,
        config: RunConfig = CONFIG,
        connect: Connect | None = None,
        folder: MergerFolder | None = None,
        trained: Any = None,
    ) -> None:
        params = tree() if params is None else params
        layout = TreeLayout.of(params, trained)
        first = {name: np.asarray(leaf, np.float32) for name, leaf in layout.leaves_of(params).items()}
        frozen = [values.named() for values in frozen_values(layout)]
        super().__init__(layout.tensors(kinds_by("embed")), first, config, frozen, connect, folder)
        self._template, self._trained = params, trained

    def island(self, name: str = "a", model: Any = None) -> OwnIsland:
        return OwnIsland(self, name, self._template if model is None else model, self._trained)


class TreeScript(Script):
    """A script in JAX. Its optimiser is Adam, if it has one."""

    session: JoinedRun

    def __init__(
        self, url: str, run: str = "own", model: Any = None, *, optimizes: bool = False, **options: Any
    ) -> None:
        params = tree() if model is None else model
        self._adam, self._state, self._newest = optax.adam(0.1), None, params
        if optimizes:
            self._gradients = {key: value for key, value in params.items() if key != "count"}
            self._state = self._adam.init(self._gradients)
            options["state"] = lambda: self._state
        session = archipelago.join(url, run, params, **options)
        assert isinstance(session, JoinedRun)
        super().__init__(session)

    def __enter__(self) -> Self:
        super().__enter__()
        self._newest = self.session.params
        if self._state is not None:
            self._state = self.session.state
        return self

    def step(self, by: float = STEP) -> None:
        if self._state is not None:
            with jax.numpy_dtype_promotion("standard"):
                _, self._state = self._adam.update(self._gradients, self._state)
        self._newest = trained(self._newest, by)

    def sync(self, **about: Any) -> None:
        self._newest = self.session.sync(self._newest, **about)

    def values(self) -> Values:
        return values_of(self.session._parameters)

    def state(self) -> list[NDArray[Any]]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self._state)]


def _with_shape() -> tuple[Any, str]:
    return with_bias(tree(), 1, jnp.ones(5)), "layers.1.bias"


def _with_value(value: float) -> tuple[Any, str]:
    return with_bias(tree(), 1, jnp.full(4, value)), "layers.1.bias"


JAX = Framework(
    "jax", tree, OwnRun, archipelago.create, TreeScript, _with_shape, _with_value, jnp.asarray,
)  # fmt: skip
