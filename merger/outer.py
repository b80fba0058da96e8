"""Outer optimisers: the step that closes a round, as pure (init, step) pairs over a fragment's flat vector.

The merged outer gradient is the old parameters minus the new ones. A step treats it as a gradient and subtracts it. All
arrays are float32 on the CPU, even on a machine with an accelerator. Subnormal numbers (below 1.2e-38) count as zero.

Every processor computes the same bits, because another one may take the run over. So each product is rounded before it
is added (`rounded`).

To add a rule, register a builder in OUTER and add its name to `OuterConfig.rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from archipelago.broker.codecs import body_of, codec
from archipelago.broker.config import OuterConfig, WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.full_state import PARAMETERS
from archipelago.merger.merge_rules import rounded

Vector = jax.Array | NDArray[np.float32]
#: A pytree of arrays.
State = Any

_TINY = 1e-30


class Round(NamedTuple):
    """Inputs of an outer step besides the outer gradient.

    Attributes:
        participation: n/M, the share of the M live islands whose work is in the merged outer gradient, in (0, 1].
        islands: n, the number of islands whose work is in the merged outer gradient.
        progress: The share of the run's inner steps that are done, in [0, 1].
        interval: H, the inner steps from one sync of the fragment to the next.
    """

    participation: Any = 1.0
    islands: Any = 1.0
    progress: Any = 0.0
    interval: Any = 24.0


class OuterOptimizer(NamedTuple):
    """A pair of pure functions, neither of which changes its inputs.

    Attributes:
        init: `init(params_N)` returns the first state.
        step: `step(params_N, state, delta_N, round)` returns the new parameters and the new state.
    """

    init: Callable[[Any], State]
    step: Callable[[Any, State, Any, Any], tuple[jax.Array, State]]


def sgd(config: OuterConfig) -> OuterOptimizer:
    """Return gradient descent: θ ← θ − ηΔ."""
    rate = np.float32(config.learning_rate)

    def step(params_N: jax.Array, state: State, delta_N: jax.Array, now: Round) -> tuple[jax.Array, State]:
        return params_N - rounded(rate * delta_N, now.islands), state

    return OuterOptimizer(optax.sgd(config.learning_rate).init, step)


def nesterov(config: OuterConfig) -> OuterOptimizer:
    """Return gradient descent with Nesterov momentum: b ← μb + Δ; θ ← θ − η(Δ + μb) (DiLoCo, arXiv 2311.08105)."""
    rate, mu = np.float32(config.learning_rate), np.float32(config.momentum)

    def step(params_N: jax.Array, state: State, delta_N: jax.Array, now: Round) -> tuple[jax.Array, State]:
        before, *rest = state
        trace_N = rounded(mu * before.trace, now.islands) + delta_N
        update_N = rounded(rate * (delta_N + rounded(mu * trace_N, now.islands)), now.islands)
        return params_N - update_N, (optax.TraceState(trace_N), *rest)

    # The state has the form of optax, as in checkpoints of earlier versions.
    return OuterOptimizer(optax.sgd(config.learning_rate, config.momentum, nesterov=True).init, step)


class ScheduledState(NamedTuple):
    """The state of `scheduled`: the momentum, float32 [N], and how many rounds the fragment has had, int32 []."""

    trace: jax.Array
    rounds: jax.Array


#: `scheduled` lengthens its memory by one round for every YOUNG_ROUNDS rounds of a fragment.
YOUNG_ROUNDS = 10.0
#: `scheduled` allows one more round of memory for every LONG_STEPS inner steps (over all islands) in a round.
LONG_STEPS = 32.0


def scheduled_nesterov(config: OuterConfig) -> OuterOptimizer:
    """Return Nesterov SGD with a scheduled momentum, μ = min(`momentum`, 1 − 1/m) · min(1, (1 − progress)/`cooldown`).

    m = 1 + min(1 + k/10, nH/32) is the memory in rounds, where k counts the fragment's rounds from 0:

    * A young run keeps a short memory, because its gradients still change direction quickly. The memory should
      stay under a tenth of all rounds.
    * Many inner steps in a round average the gradient well, and momentum then helps along flat directions. With few
      inner steps, successive gradients are similar, and momentum only enlarges the step.
    * Momentum adds noise to each step, so it falls to zero together with the inner learning rate.

    The learning rate is η · n/M: a partial round scales the step by n/M. M rounds of one island each therefore move as
    far as one round of M islands. This rule is not from a paper.
    """
    most, cooldown = config.momentum, max(config.cooldown, _TINY)

    def step(
        params_N: jax.Array, state: ScheduledState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, ScheduledState]:
        long = now.islands * now.interval / LONG_STEPS
        memory = 1.0 + jnp.minimum(1.0 + state.rounds.astype(jnp.float32) / YOUNG_ROUNDS, long)
        mu = jnp.minimum(most, 1.0 - 1.0 / memory) * jnp.clip((1.0 - now.progress) / cooldown, 0.0, 1.0)
        trace_N = rounded(mu * state.trace, now.islands) + delta_N
        rate = config.learning_rate * now.participation
        params_N = params_N - rounded(rate * (delta_N + rounded(mu * trace_N, now.islands)), now.islands)
        return params_N, ScheduledState(trace_N, state.rounds + 1)

    # NumPy makes the zeros, because JAX would compile programs for them.
    return OuterOptimizer(lambda x_N: ScheduledState(*_on_cpu((np.zeros(x_N.shape, np.float32), np.int32(0)))), step)


#: The rules by name.
OUTER: dict[str, Callable[[OuterConfig], OuterOptimizer]] = {
    "scheduled": scheduled_nesterov,
    "nesterov": nesterov,
    "sgd": sgd,
}


@lru_cache(maxsize=64)  # An operator may change the rate of a run, and each rate is a rule to compile.
def build(config: OuterConfig) -> OuterOptimizer:
    """Return the outer optimiser that the config names, compiled for the CPU once per fragment size.

    SGD at rate 1 computes exactly the float32 difference `params_N − delta_N`. `step` raises ValueError unless
    parameters and outer gradient are float32 vectors of the same size.
    """
    rule = OUTER[config.rule](config)
    compiled = jax.jit(rule.step)

    def init(params_N: Vector) -> State:
        return _on_cpu(rule.init(_on_cpu(params_N)))

    def step(params_N: Vector, state: State, delta_N: Vector, now: Round) -> tuple[jax.Array, State]:
        for name, vector in (("parameters", params_N), ("delta", delta_N)):
            if vector.dtype != np.float32 or vector.shape != (params_N.size,):
                raise ValueError(f"{name}: {vector.dtype} of shape {vector.shape}, not float32 ({params_N.size},)")
        # These are arrays because JAX would trace Python numbers again for each type and promote them weakly.
        results = compiled(*_on_cpu((params_N, state, delta_N)), Round(*map(np.float32, now)))
        stepped: tuple[jax.Array, State] = jax.block_until_ready(results)  # type: ignore[no-untyped-call]
        return stepped

    return OuterOptimizer(init, step)


def _on_cpu(tree: Any) -> Any:
    return jax.device_put(tree, jax.local_devices(backend="cpu")[0])


def publish(wire: WireConfig, held_N: jax.Array, exact_N: jax.Array) -> tuple[jax.Array, bytes]:
    """Return what islands hold after the next snapshot, and the body of the difference that takes them there.

    Args:
        wire: The codecs. Without differences the snapshot is rounded by its own codec, and the body is empty.
    """
    if not wire.sends_differences:
        if wire.full == "float32":
            return exact_N, b""
        chosen = codec(wire.full)
        return jax.device_put(chosen.decode(chosen.encode(np.asarray(exact_N)), exact_N.size)), b""
    measure, quantise, add = _difference_programs(wire.down)
    parts = quantise(measure(held_N, exact_N))
    return add(held_N, parts), body_of(parts)


@cache
def _difference_programs(name: str) -> tuple[Any, Any, Any]:
    """Return three programs: measure the difference, quantise it, and add it.

    In one program, XLA would find the scale of a block once for each of its elements, which takes four times as long.
    """
    chosen = codec(name)
    return (
        jax.jit(lambda held_N, exact_N: exact_N - held_N),
        jax.jit(lambda difference_N: chosen.quantise(difference_N, jnp)),
        jax.jit(lambda held_N, parts: held_N + chosen.restore(parts, held_N.size, jnp)),
    )


# -- the state as named arrays -----------------------------------------------------------------------------------------


def named(params_N: Vector, state: State) -> dict[str, NDArray[Any]]:
    """Return parameters and state as named arrays: PARAMETERS, and each leaf under its path, as `state[0].trace`."""
    return {name: np.asarray(leaf) for name, leaf in {PARAMETERS: params_N, **_leaves(state)}.items()}


def of_named(template_state: State, arrays: Mapping[str, NDArray[Any]], size: int) -> tuple[jax.Array, State]:
    """Return the parameters and state of which `named` made these arrays, bit for bit, on the CPU.

    Args:
        template_state: Any state of the same rule and size, such as `init(zeros)`.
        size: How many parameters there must be.

    Raises:
        WireError: A name, shape or dtype is not the template's.
    """
    leaves = _leaves(template_state)
    expected = {PARAMETERS: ((size,), np.dtype(np.float32))} | {k: (v.shape, v.dtype) for k, v in leaves.items()}
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if found != expected:
        raise WireError(f"the run has {expected!s:.200}, and its full state holds {found!s:.200}")
    state = jax.tree.unflatten(jax.tree.structure(template_state), [arrays[name] for name in leaves])
    params_N, state = _on_cpu((arrays[PARAMETERS], state))
    return params_N, state


def _leaves(state: State) -> dict[str, Any]:
    return {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
