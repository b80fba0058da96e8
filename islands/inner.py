"""The inner step: AdamW or Muon under a warm-up and cosine schedule, compiled as one scan of n steps.

The gradients of a batch can be computed in parts, one after the other. A part needs the activations of its own examples
only. The sum of the gradients takes the memory of one more gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from archipelago.broker.config import InnerConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models.interface import Gradient, Params
from archipelago.islands.sync.recovery import MOMENTS_SLACK, MomentBounds, adam_ratio


class InnerState(NamedTuple):
    """Parameters (float32, by tensor name) and the inner optimiser's state, which syncs do not reset."""

    params: Params
    optimizer: optax.OptState


#: Several inner steps as one program, as `compiled_scan` returns it.
InnerSteps = Callable[..., tuple[InnerState, jax.Array]]
#: From a state, gradients, the number of earlier steps and the length of the run, int32 [] each, to the next state.
Descent = Callable[..., InnerState]


def learning_rate(config: InnerConfig, length: jax.Array | int) -> optax.Schedule:
    """Return the schedule over the global step: linear warm-up, then cosine decay to `final_share` of the peak.

    Args:
        length: The length of the run, int32 []. As an argument of the program, a change of it compiles nothing.
    """

    def rate(count: Any) -> jax.Array:
        end, step = (jnp.asarray(each, jnp.int32) for each in (length, count))
        warmup = jnp.minimum(config.warmup_steps, end - 1)
        start, peak = warmup.astype(jnp.float32), jnp.float32(config.peak)
        share = jnp.minimum(1.0, (step - warmup).astype(jnp.float32) / (end - warmup).astype(jnp.float32))
        cosine = 0.5 * (1.0 + jnp.cos(jnp.float32(math.pi) * share))
        decayed = peak * ((1.0 - config.final_share) * cosine + config.final_share)
        return jnp.where(step < warmup, peak * (1.0 + step.astype(jnp.float32)) / (start + 1.0), decayed)

    return rate


#: Muon trains hidden matrices only. The rows or columns of tensors under these names have individual meanings.
_NOT_BY_MUON = frozenset({"embedding", "router", "output"})


def optimizer(config: InnerConfig) -> optax.GradientTransformation:
    """Return the inner optimiser without its learning rate, which the step applies by the global step."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        RULES[config.optimizer](config),
        # Norm scales are vectors. Decaying them would work against the normalisation.
        optax.add_decayed_weights(config.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )


def _adamw(config: InnerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2)


def _muon(config: InnerConfig) -> optax.GradientTransformation:
    """Return Muon for hidden matrices (Jordan 2024), and Adam with Nesterov's momentum for the others.

    Muon's steps are scaled to the size of Adam's (arXiv 2502.16982, Eq. 4), so both share a learning rate and a decay.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,  # optax flips the sign, and the step flips it back
        beta=config.muon_momentum,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_hidden_matrices,
    )


def _hidden_matrices(params: Params) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
    def is_hidden(name: str) -> bool:  # optax passes placeholders for the tensors of Adam
        return getattr(params[name], "ndim", 0) == 2 and _NOT_BY_MUON.isdisjoint(name.split("."))

    return {name: optax.contrib.MuonDimensionNumbers() if is_hidden(name) else None for name in params}


#: By the names of `InnerConfig.optimizer`: from a gradient to a direction of the size of Adam's.
RULES: dict[str, Callable[[InnerConfig], optax.GradientTransformation]] = {"adamw": _adamw, "muon": _muon}


def begin(config: InnerConfig, params: Params) -> InnerState:
    """Return these parameters with fresh optimiser state."""
    return InnerState(params, _compiled_init(config)(params))


@cache
def _compiled_init(config: InnerConfig) -> Callable[[Params], optax.OptState]:
    return jax.jit(optimizer(config).init)  # one program instead of one for each shape


def counts(moments: optax.OptState) -> list[jax.Array]:
    """Return the step counts in the optimiser's state, int32 [] each. Muon has two."""
    return [count for _, count in optax.tree_utils.tree_get_all_with_path(moments, "count")]


def moment_bounds(config: InnerConfig) -> MomentBounds:
    """Return the bounds for an optimiser. Clipping bounds each gradient."""
    b1, b2, clip = config.beta1, config.beta2, config.clip_norm
    decay = max(b1, config.muon_momentum)
    first, second = (clip / (1.0 - decay), clip**2) if clip else (math.inf, math.inf)
    return MomentBounds(MOMENTS_SLACK * first, MOMENTS_SLACK * second, MOMENTS_SLACK * adam_ratio(b1, b2))


def _ramp(moments: optax.OptState, steps: int) -> jax.Array:
    """Return a factor that grows from 1/steps to 1 over the first steps of fresh moments.

    After one step, moments reflect only the sign of one gradient. In the middle of a run, such updates would be noise
    of full size. The count in the moments tells how many steps they have seen.
    """
    seen = counts(moments)[0]
    return jnp.minimum(1.0, (seen + 1).astype(jnp.float32) / max(1, steps))


def descent(config: InnerConfig) -> Descent:
    """Return the second half of an inner step: from gradients, or an average of several, to the next state."""
    transformation = optimizer(config)

    def descend(state: InnerState, gradients: Params, global_step: jax.Array, length: jax.Array, /) -> InnerState:
        with jax.numpy_dtype_promotion("standard"):  # optax counts in int32 and computes in float32
            updates, moments = transformation.update(gradients, state.optimizer, state.params)
            rate = learning_rate(config, length)(global_step) * _ramp(state.optimizer, config.moments_warmup_steps)
        return InnerState(jax.tree.map(lambda p, u: p - rate * u, state.params, updates), moments)

    return descend


def compiled_scan(compute: Gradient, descend: Descent) -> InnerSteps:
    """Compile n inner steps, each from the gradients of a batch, as one scan.

    It compiles once for each n and donates the given state.

    Returns:
        A function from a state, n batches such as tokens (uint8 or int32, [n, B, T + 1]), the number of earlier global
        steps and the length of the run (int32 [] each) to the next state and the losses of the n steps in nats,
        without auxiliary terms.
    """

    def steps(
        state: InnerState, batches_n: Any, global_step: jax.Array, length: jax.Array, /
    ) -> tuple[InnerState, jax.Array]:
        def step(carry: tuple[InnerState, jax.Array], batch: Any) -> tuple[tuple[InnerState, jax.Array], jax.Array]:
            state, count = carry
            gradients, loss = compute(state.params, batch)
            return (descend(state, gradients, count, length), count + 1), loss

        (after, _), losses_n = jax.lax.scan(step, (state, global_step), batches_n)
        return after, losses_n

    return jax.jit(steps, donate_argnums=0)


def accumulated(compute: Gradient, parts: int) -> Gradient:
    """Return a function to the mean gradients and the mean loss of `parts` equal parts of a batch.

    They equal those of the whole batch up to rounding, if the objective is a mean over examples. Terms that are no such
    mean, as the balance of experts, become means over parts. With one part, this is `compute` itself.
    """
    if parts == 1:
        return compute

    def in_parts(params: Params, batch: Any) -> tuple[Params, jax.Array]:
        def add(sums: tuple[Params, jax.Array], part: Any) -> tuple[tuple[Params, jax.Array], None]:
            return jax.tree.map(jnp.add, sums, compute(params, part)), None

        nothing = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))
        sums, _ = jax.lax.scan(add, nothing, jax.tree.map(lambda leaf: _cut(leaf, parts), batch))
        gradients, loss = jax.tree.map(lambda leaf: leaf / parts, sums)
        return gradients, loss

    return in_parts


def require_divisible(examples: int, parts: int) -> None:
    """Raise ConfigError (`config.value`) unless the examples of a batch can be cut into equal parts."""
    if examples % parts:
        raise ConfigError(
            f"a batch of {examples:,} examples cannot be cut into {parts:,} equal micro-batches",
            "Set --inner.micro-batches to a divisor of the batch size.",
            code="config.value",
        )


def _cut(leaf: jax.Array, parts: int) -> jax.Array:
    """Cut [B, …] to [parts, B / parts, …]. Part k has the examples k, k + parts, k + 2 · parts, …

    A device that holds a block of the batch thus has its share of each part.
    """
    examples = leaf.shape[0] if leaf.ndim else 1
    require_divisible(examples, parts)
    return leaf.reshape(examples // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)
