"""First moments as named tensors beside the parameters, for runs that average them at each sync.

What travels is the mean m / (1 − β^t) of an island's last gradients, as AdamW itself corrects it for its t steps. So
the moments of an island that has just begun count as much as those of the others. Second moments and step counts stay
each island's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from archipelago.broker.codecs import Vector
from archipelago.broker.manifest import MOMENT_PREFIX, Manifest
from archipelago.islands.inner import InnerState, counts
from archipelago.islands.sync.arrays import Tensors
from archipelago.islands.sync.replica import Replica

#: Divisors are at least this, so that an island without any steps has moments of zero.
_TINY = 1e-30


class SyncedState:
    """The synced tensors of an island's inner state: its parameters, and its first moments where the run averages them.

    Attributes:
        averaged: Whether the run averages first moments.
        names: The names of the parameters of each fragment.
    """

    def __init__(self, manifest: Manifest) -> None:
        config = manifest.config
        self.averaged = config.sync.moments == "average"
        self._beta = config.inner.beta1
        self.names = [
            tuple(tensor.name for tensor, _ in rows if tensor.kind != "moment") for rows in manifest.layout
        ]  # fmt: skip

    def tensors(self, fragment: int, inner: InnerState) -> Tensors:
        """Return all parameters and the fragment's first moments, by name."""
        if not self.averaged:
            return inner.params
        return inner.params | _compiled_moments(self._beta, self.names[fragment])(inner.optimizer)

    def adopt(self, replica: Replica, fragment: int, inner: InnerState, new_N: Vector, steps: int) -> InnerState:
        """Return the inner state after it adopted a fragment, `steps` inner steps after it sent that last."""
        tensors = self.tensors(fragment, inner)
        if not self.averaged:
            return inner._replace(params=replica.adopt(fragment, tensors, new_N))
        return self.replaced(inner, replica.adopt_with_moments(fragment, tensors, new_N, self.share(inner, steps)))

    def warm_up(self, replica: Replica, inner: InnerState) -> None:
        """Compile everything that syncs run, without changing anything."""
        if not self.averaged:
            replica.warm_up(inner.params)
            return
        each = [self.tensors(p, inner) for p in range(len(self.names))]
        replica.warm_up({name: x for tensors in each for name, x in tensors.items()}, self.share(inner, 0))
        for tensors in each:
            self.replaced(inner, tensors)

    def replaced(self, inner: InnerState, tensors: Tensors) -> InnerState:
        """Return the inner state with these parameters and these of its first moments."""
        moments = {name.removeprefix(MOMENT_PREFIX): x for name, x in tensors.items() if name.startswith(MOMENT_PREFIX)}
        params = {name: x for name, x in tensors.items() if not name.startswith(MOMENT_PREFIX)}
        return InnerState(params, _compiled_with_moments(self._beta)(inner.optimizer, moments))

    def share(self, inner: InnerState, steps: int) -> jax.Array:
        """Return the share of an island's first moments that is left of those of `steps` steps ago."""
        return _compiled_share(self._beta)(inner.optimizer, jax.device_put(np.int32(steps)))


# The caches below let all islands of one process, as in virtual time, share one compilation.
@cache
def _compiled_moments(beta: float, names: tuple[str, ...]) -> Callable[[optax.OptState], Tensors]:
    return jax.jit(partial(_moments, beta, names))


@cache
def _compiled_with_moments(beta: float) -> Callable[[optax.OptState, Tensors], optax.OptState]:
    return jax.jit(partial(_with_moments, beta))


@cache
def _compiled_share(beta: float) -> Callable[[optax.OptState, jax.Array], jax.Array]:
    return jax.jit(partial(_share, beta))


def _bias(beta: float, steps: jax.Array) -> jax.Array:
    """Return 1 − β^t, the sum of the weights of t gradients in a first moment."""
    return 1.0 - _power(beta, jnp.maximum(steps, 0))


def _power(beta: float, steps: jax.Array) -> jax.Array:
    return jnp.power(jnp.float32(beta), steps.astype(jnp.float32))


def _moments(beta: float, names: tuple[str, ...], optimizer: optax.OptState) -> Tensors:
    bias = jnp.maximum(_bias(beta, counts(optimizer)[0]), _TINY)
    moments = optax.tree_utils.tree_get(optimizer, "mu")
    return {MOMENT_PREFIX + name: moments[name] / bias for name in names}


def _with_moments(beta: float, optimizer: optax.OptState, moments: Tensors) -> optax.OptState:
    bias = _bias(beta, counts(optimizer)[0])
    own = optax.tree_utils.tree_get(optimizer, "mu")
    return optax.tree_utils.tree_set(optimizer, mu={**own, **{name: m * bias for name, m in moments.items()}})


def _share(beta: float, optimizer: optax.OptState, steps: jax.Array) -> jax.Array:
    """Return β^k (1 − β^(t−k)) / (1 − β^t): of the weights of t gradients, the share of those before the last k."""
    seen = counts(optimizer)[0]
    left = _power(beta, steps) * _bias(beta, seen - steps)
    return left / jnp.maximum(_bias(beta, seen), _TINY)
