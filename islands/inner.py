"""The inner step: AdamW or Muon under a warm-up and cosine schedule, compiled as one scan of n steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from archipelago.broker.config import InnerConfig
from archipelago.broker.errors import WireError
from archipelago.islands.models.interface import Model, Params


class InnerState(NamedTuple):
    """Parameters (float32, by tensor name) and the inner optimiser's state, which syncs never reset."""

    params: Params
    optimizer: optax.OptState


InnerSteps = Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]
Gradient = Callable[[Params, jax.Array], tuple[Params, jax.Array]]
"""from parameters and tokens [B, T + 1], uint8 or int32, to gradients and the loss (nats)"""
Descent = Callable[[InnerState, Params, jax.Array], InnerState]
"""from a state, gradients and the steps made before, int32 [], to the state after this one"""


def learning_rate(config: InnerConfig) -> optax.Schedule:
    """Linear warm-up, then cosine decay to `final_share` of the peak at `steps`, as a function of the global step."""
    warmup = min(config.warmup_steps, config.steps - 1)
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.peak / (warmup + 1),
        peak_value=config.peak,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=config.peak * config.final_share,
    )


_NOT_BY_MUON = frozenset({"embedding", "router", "output"})
"""Muon is for the hidden layers: what is under these names has rows or columns that are things of their own."""


def optimizer(config: InnerConfig) -> optax.GradientTransformation:
    """The inner optimiser before its learning rate, which the step applies: its own count is not the global step."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        RULES[config.optimizer](config),
        # Norm scales are vectors; decaying them only fights the normalisation.
        optax.add_decayed_weights(config.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )


def _adamw(config: InnerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2)


def _muon(config: InnerConfig) -> optax.GradientTransformation:
    """The orthogonalised momentum of hidden matrices (Jordan 2024), Adam with Nesterov's momentum for all else.

    Its steps are scaled to Adam's size (arXiv 2502.16982, Eq. 4), so both go by one learning rate and one decay.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,  # optax turns the sign, the step does it once more
        beta=config.muon_momentum,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_hidden_matrices,
    )


def _hidden_matrices(params: Params) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
    def is_hidden(name: str) -> bool:  # optax asks again with placeholders for what it has given to Adam
        return getattr(params[name], "ndim", 0) == 2 and _NOT_BY_MUON.isdisjoint(name.split("."))

    return {name: optax.contrib.MuonDimensionNumbers() if is_hidden(name) else None for name in params}


RULES: dict[str, Callable[[InnerConfig], optax.GradientTransformation]] = {"adamw": _adamw, "muon": _muon}
"""by the names of `InnerConfig.optimizer`; what takes the gradient to a descent of the size that Adam's has"""


def begin(config: InnerConfig, params: Params) -> InnerState:
    """Fresh moments for these parameters."""
    return InnerState(params, _compiled_init(config)(params))


@cache
def _compiled_init(config: InnerConfig) -> Callable[[Params], optax.OptState]:
    return jax.jit(optimizer(config).init)  # one program, where each kind of tensor would be one


def counts(moments: optax.OptState) -> list[jax.Array]:
    """The steps that these moments have seen, as often as their optimiser counts them; int32, [] each."""
    return [count for _, count in optax.tree_utils.tree_get_all_with_path(moments, "count")]


def require_sound(state: optax.OptState, like: optax.OptState) -> None:
    """Raise WireError for optimiser state that no steps of the optimiser lead to.

    Args:
        state: What a peer sent.
        like: Fresh state of the same optimiser.
    """

    def named(tree: optax.OptState, *names: str) -> list[jax.Array]:
        found = [part for name in names for _, part in optax.tree_utils.tree_get_all_with_path(tree, name)]
        return jax.tree.leaves(found)

    if any((leaf < 0).any() for leaf in named(state, "nu", "count")):
        raise WireError("a negative second moment or count in the peer's optimiser state", code="handover.unsound")
    constant = zip(named(state, "ns_coeffs"), named(like, "ns_coeffs"), strict=True)  # of Muon's Newton-Schulz steps
    if any((theirs != ours).any() for theirs, ours in constant):
        raise WireError("other coefficients in the peer's optimiser state", code="handover.unsound")


def _ramp(moments: optax.OptState, steps: int) -> jax.Array:
    """From 1/steps to 1 over the first steps that these moments have seen.

    Fresh moments know one gradient's sign only: in the middle of a run the first updates would be as large as its
    learning rate allows, in directions of noise. Their own count tells how fresh they are, after any kind of return.
    """
    seen = counts(moments)[0]
    return jnp.minimum(1.0, (seen + 1).astype(jnp.float32) / max(1, steps))


def gradient(model: Model) -> Gradient:
    """The first half of an inner step; gradients are of the objective, the loss is the model's own."""
    differentiated = jax.value_and_grad(model.objective, has_aux=True)

    def of(params: Params, tokens_BxT1: jax.Array) -> tuple[Params, jax.Array]:
        (_, loss), gradients = differentiated(params, tokens_BxT1.astype(jnp.int32))
        return gradients, loss

    return of


def descent(config: InnerConfig) -> Descent:
    """The second half: from the gradients of a batch, or of several averaged, to the state after the step."""
    transformation, schedule = optimizer(config), learning_rate(config)

    def descend(state: InnerState, gradients: Params, global_step: jax.Array) -> InnerState:
        with jax.numpy_dtype_promotion("standard"):  # optax counts in int32 and computes in float32
            updates, moments = transformation.update(gradients, state.optimizer, state.params)
            rate = jnp.asarray(schedule(global_step), jnp.float32) * _ramp(state.optimizer, config.moments_warmup_steps)
        return InnerState(jax.tree.map(lambda p, u: p - rate * u, state.params, updates), moments)

    return descend


def compile_steps(model: Model, config: InnerConfig) -> InnerSteps:
    """`steps(state, tokens_nxBxT1, global_step)` makes n inner steps and gives the state and the n losses (nats).

    The losses are the model's own, without what its objective adds.
    `tokens_nxBxT1` is uint8 or int32, `global_step` an int32 scalar, the steps made before the first of these. The
    state that goes in is donated. Compiles once for each n.
    """
    of, descend = gradient(model), descent(config)

    def step(
        carry: tuple[InnerState, jax.Array], tokens_BxT1: jax.Array
    ) -> tuple[tuple[InnerState, jax.Array], jax.Array]:
        state, count = carry
        gradients, loss = of(state.params, tokens_BxT1)
        return (descend(state, gradients, count), count + 1), loss

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        (after, _), losses_n = jax.lax.scan(step, (state, global_step), tokens_nxBxT1)
        return after, losses_n

    return jax.jit(steps, donate_argnums=0)
