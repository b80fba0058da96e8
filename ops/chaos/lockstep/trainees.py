"""The arithmetic of a worker: data-parallel training, and a replica of synchronous DiLoCo.

Steps are those of an island: its compiled inner steps and its batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig, from_json
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.sharding import lease_all, lease_share
from archipelago.islands.inner import InnerState, InnerSteps, begin, compile_steps, descent, gradient
from archipelago.islands.models.interface import Params
from archipelago.islands.models.registry import build
from archipelago.islands.sync.arrays import device_copy
from archipelago.ops.chaos.lockstep.coordinator import Method
from archipelago.ops.chaos.lockstep.files import Saved, first_in, like
from archipelago.ops.chaos.lockstep.group import GroupSettings

OuterStep = Callable[[Params, optax.OptState, jax.Array], tuple[Params, optax.OptState]]


class Trainee(Protocol):
    """The arithmetic of one worker. Each method carries out one kind of order."""

    def begin(self) -> None:
        """Begin from the run's first parameters."""

    def step(self, n: int) -> None:
        """Make a step on the next batch. `n` steps were made before it."""

    def vector(self) -> Vector:
        """Return the vector that the worker shares after the step: float32 [N]."""

    def merge(self, mean_N: Vector, n: int) -> None:
        """Apply the mean of the vectors that the members shared in the n-th exchange."""

    def shared_state(self) -> Saved:
        """Return the state that is the same for all workers."""

    def own_state(self) -> Saved:
        """Return the state that only this worker has."""

    def load(self, shared: Saved, own: Saved | None) -> None:
        """Continue from a saved state."""


@cache
def _gradient(config: RunConfig) -> Callable[[Params, jax.Array], jax.Array]:
    """Return a function from parameters and tokens [B, T + 1] to the gradient, float32 [N]."""
    of = gradient(build(config.model))
    return jax.jit(lambda params, tokens_BxT1: ravel_pytree(of(params, tokens_BxT1)[0])[0])


@cache
def _descent(config: RunConfig) -> Callable[[InnerState, jax.Array, jax.Array], InnerState]:
    """Return a function from a state, a mean gradient [N] and a step number to the next state. It donates the state."""
    descend = descent(config.inner)

    def step(state: InnerState, mean_N: jax.Array, n: jax.Array) -> InnerState:
        return descend(state, ravel_pytree(state.params)[1](mean_N), n)

    return jax.jit(step, donate_argnums=0)


@cache
def _inner(config: RunConfig) -> InnerSteps:
    return compile_steps(build(config.model), config.inner)


@cache
def _outer(rate: float, momentum: float) -> tuple[optax.GradientTransformation, OuterStep]:
    """Return Nesterov's optimiser, and its step from parameters, state and the mean of all parameters, float32 [N]."""
    outer = optax.sgd(rate, momentum=momentum, nesterov=True)

    def step(params: Params, state: optax.OptState, mean_N: jax.Array) -> tuple[Params, optax.OptState]:
        delta = jax.tree.map(lambda p, mean: p - mean, params, ravel_pytree(params)[1](mean_N))
        updates, after = outer.update(delta, state, params)
        return optax.apply_updates(params, updates), after

    return outer, jax.jit(step)


class Parallel:
    """Data-parallel: each worker draws the whole batch, takes its own rows, and shares their gradient."""

    def __init__(self, settings: GroupSettings, name: str, corpus: OpenCorpus, first: Params) -> None:
        config, number, workers = from_json(settings.config), settings.names.index(name), len(settings.names)
        size = config.data.batch_size
        data = dataclasses.replace(config.data, batch_size=size * workers)
        self._config, self._corpus = dataclasses.replace(config, data=data), corpus
        self._rows = slice(number * size, (number + 1) * size)
        self._first = first
        self._gradient_N: Vector = np.asarray(ravel_pytree(first)[0])
        self._gradient, self._descend = _gradient(config), _descent(config)
        self.begin()

    def begin(self) -> None:
        """Begin from the run's first parameters."""
        self.state = begin(self._config.inner, device_copy(self._first))
        lease = lease_all(self._config.data.shards, self._config.seed)
        self._batches = Batches(self._corpus.train, self._config, lease)

    def step(self, n: int) -> None:
        """Compute the gradient of this worker's rows."""
        tokens_BxT1 = self._batches.next(1)[0, self._rows]
        self._gradient_N = np.asarray(self._gradient(self.state.params, jnp.asarray(tokens_BxT1)))

    def vector(self) -> Vector:
        """Return that gradient."""
        return self._gradient_N

    def merge(self, mean_N: Vector, n: int) -> None:
        """Make the inner optimiser's step on the mean gradient."""
        self.state = self._descend(self.state, jnp.asarray(mean_N), jnp.asarray(n - 1, jnp.int32))

    def shared_state(self) -> Saved:
        """Return parameters, moments and the position in the text."""
        return self.state, self._batches.state()

    def own_state(self) -> Saved:
        """Return nothing: all state is shared."""
        return (), {}

    def load(self, shared: Saved, own: Saved | None) -> None:
        """Continue from a saved state."""
        self.state = like(self.state, shared[0])
        self._batches.restore(shared[1])


class Replica:
    """Synchronous DiLoCo: inner steps on separate shards, and one outer step on the mean of all parameters."""

    def __init__(self, settings: GroupSettings, name: str, corpus: OpenCorpus, first: Params) -> None:
        self._config, self._corpus = from_json(settings.config), corpus
        self._place = settings.names.index(name), len(settings.names)
        self._first = first
        self._inner = _inner(self._config)
        self._nesterov, self._outer = _outer(settings.outer_rate, settings.outer_momentum)
        self.begin()

    def begin(self) -> None:
        """Begin from the run's first parameters."""
        self.params, self._momentum = self._first, self._nesterov.init(self._first)
        self._state = begin(self._config.inner, device_copy(self.params))
        lease = lease_share(self._config.data.shards, self._config.seed, *self._place)
        self._batches = Batches(self._corpus.train, self._config, lease)

    def step(self, n: int) -> None:
        """Make an inner step."""
        self._state, losses_n = self._inner(self._state, jnp.asarray(self._batches.next(1)), jnp.asarray(n, jnp.int32))
        losses_n.block_until_ready()

    def vector(self) -> Vector:
        """Return this worker's parameters."""
        return np.asarray(ravel_pytree(self._state.params)[0])

    def merge(self, mean_N: Vector, n: int) -> None:
        """Make the outer step. The inner moments do not change."""
        self.params, self._momentum = self._outer(self.params, self._momentum, jnp.asarray(mean_N))
        self._state = self._state._replace(params=device_copy(self.params))

    def shared_state(self) -> Saved:
        """Return the round's parameters and the outer momentum."""
        return (self.params, self._momentum), {}

    def own_state(self) -> Saved:
        """Return the inner moments, and the position in the own shards."""
        return self._state.optimizer, self._batches.state()

    def load(self, shared: Saved, own: Saved | None) -> None:
        """Begin the round of a saved state."""
        assert own is not None  # noqa: S101
        self.params, self._momentum = like((self.params, self._momentum), shared[0])
        self._state = InnerState(device_copy(self.params), like(self._state.optimizer, own[0]))
        self._batches.restore(own[1])


TRAINEES: dict[Method, Callable[[GroupSettings, str, OpenCorpus, Params], Trainee]] = {
    "data-parallel": Parallel,
    "elastic data-parallel": Parallel,
    "synchronous DiLoCo": Replica,
}


def trainee_of(settings: GroupSettings, name: str) -> Trainee:
    """Return the arithmetic of the worker of that name."""
    corpus = open_corpus(from_json(settings.config).data.corpus)
    return TRAINEES[settings.method](settings, name, corpus, first_in(Path(settings.folder)))
