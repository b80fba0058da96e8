"""Outer optimisers: the step that closes a round, as pure (init, step) pairs over a fragment's flat vector.

The merged outer gradient (old minus new parameters) is treated as a gradient, so a step subtracts it. All arrays are
float32 on the CPU, also where there is an accelerator; subnormal numbers (below 1.2e-38) count as zero.

To add a rule: a builder in OUTER, and its name in `OuterConfig.rule`. `from_optax` makes one of any optax transform.
Left out is what needs more than one fragment's merged Δ: rules that treat each arrival by its age or sender before the
merge (ordered momentum; HeLoCo's turning of arrivals, of which `heloco` turns the merged one), or tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
from flax import serialization
from numpy.typing import NDArray

from archipelago.broker.config import OuterConfig
from archipelago.broker.errors import WireError
from archipelago.broker.wire import digest

Vector = jax.Array | NDArray[np.float32]
State = Any
"""a pytree of arrays"""

MAGIC = b"ARO1"
_DIGEST_CHARACTERS = 32


class Round(NamedTuple):
    """What a rule may know of the round that it closes, besides its Δ. Numbers, or float32 scalars."""

    participation: Any = 1.0
    """n/M, those that the merged Δ is of among the M live islands, in (0, 1]"""
    islands: Any = 1.0
    """n"""
    progress: Any = 0.0
    """the share of the run's inner steps that are done, in [0, 1]"""
    interval: Any = 24.0
    """H, inner steps from one sync of the fragment to the next"""


class OuterOptimizer(NamedTuple):
    """`init(params_N)` gives a state, and `step(params_N, state, delta_N, now)` gives all three outputs: params_N,
    state, published_N.

    `published_N` is what islands train from; it is `params_N` unless the rule looks ahead. A step changes none of its
    inputs.
    """

    init: Callable[[Any], State]
    step: Callable[[Any, State, Any, Any], tuple[jax.Array, State, jax.Array]]
    looks_ahead: bool = False
    """what it publishes is not `params_N`"""


def from_optax(transform: optax.GradientTransformation) -> OuterOptimizer:
    """An outer optimiser of an optax gradient transform; it publishes the parameters themselves."""

    def step(params_N: jax.Array, state: State, delta_N: jax.Array, now: Round) -> tuple[jax.Array, State, jax.Array]:
        updates_N, state = transform.update(delta_N, state, params_N)
        params_N = optax.apply_updates(params_N, updates_N)
        return params_N, state, params_N

    return OuterOptimizer(transform.init, step)


class MlaState(NamedTuple):
    """Momentum of the look-ahead rules: float32, N elements."""

    momentum: jax.Array


def look_ahead(config: OuterConfig) -> OuterOptimizer:
    """G = √(n/M) Δ; m ← μm + (1 − μ)G; θ ← θ − η(G + μm); publishes θ − ημm.

    Momentum look-ahead for asynchronous islands: they train from where the momentum will have carried θ.
    """
    return _looking_ahead(config, lambda delta_N, momentum_N: delta_N)


def heloco(config: OuterConfig) -> OuterOptimizer:
    """The look-ahead rule on Δ turned towards the momentum where the two disagree (HeLoCo, for unlike data).

    With c = cos(Δ, m) < 0: Δ ← ‖Δ‖ · φ(φ(Δ) − (1 − conf) · c · φ(m)), conf = ‖Δ‖ / (‖Δ‖ + 3‖m‖), φ(x) = x/‖x‖: of
    what opposes the momentum, the share goes that Δ is too small to be trusted with. HeLoCo turns each arrival,
    tensor by tensor, and only conf is published; this turns the merged Δ of a whole fragment, and how far is ours.
    """

    def turned(delta_N: jax.Array, momentum_N: jax.Array) -> jax.Array:
        size, heading_N = _polar(delta_N)
        inertia, course_N = _polar(momentum_N)
        cosine = jnp.minimum(jnp.vdot(heading_N, course_N), 0.0)
        doubt = 3.0 * inertia / jnp.maximum(size + 3.0 * inertia, _TINY)
        _, unit_N = _polar(heading_N - doubt * cosine * course_N)
        return jnp.where(cosine < 0.0, size * unit_N, delta_N)

    return _looking_ahead(config, turned)


def _looking_ahead(config: OuterConfig, seen: Callable[[jax.Array, jax.Array], jax.Array]) -> OuterOptimizer:
    """Look-ahead on what `seen(delta_N, momentum_N)` makes of an outer gradient."""
    rate, mu = config.learning_rate, config.momentum

    def step(
        params_N: jax.Array, state: MlaState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, MlaState, jax.Array]:
        gradient_N = jnp.sqrt(now.participation) * seen(delta_N, state.momentum)
        momentum_N = mu * state.momentum + (1.0 - mu) * gradient_N
        params_N = params_N - rate * (gradient_N + mu * momentum_N)
        return params_N, MlaState(momentum_N), params_N - rate * mu * momentum_N

    return OuterOptimizer(lambda params_N: MlaState(jnp.zeros_like(params_N)), step, looks_ahead=True)


_TINY = 1e-30


def _polar(x_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Norm and unit vector, φ(0) = 0."""
    norm = jnp.linalg.norm(x_N)
    return norm, x_N / jnp.maximum(norm, _TINY)


class DelayedState(NamedTuple):
    """Momentum and the outer gradients since it moved last (float32, N elements), and how many these are (int32)."""

    momentum: jax.Array
    gathered: jax.Array
    rounds: jax.Array


def delayed_nesterov(config: OuterConfig) -> OuterOptimizer:
    """θ ← θ − ηΔ/N, gathering Δ; with every N-th, m ← μm + ΣΔ/N and θ ← θ − ημm besides; N is `delay`.

    Delayed Nesterov (arXiv 2401.09135, algorithm 3 with activation c = 0). There a Δ is one worker's and N their
    number; here it is a quorum's, so at the same η it moves a run as fast as Nesterov at η/N.
    """
    rate, mu, delay = config.learning_rate, config.momentum, config.delay

    def init(params_N: jax.Array) -> DelayedState:
        return DelayedState(jnp.zeros_like(params_N), jnp.zeros_like(params_N), jnp.zeros((), jnp.int32))

    def step(
        params_N: jax.Array, state: DelayedState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, DelayedState, jax.Array]:
        gathered_N, full = state.gathered + delta_N, state.rounds + 1 == delay
        momentum_N = jnp.where(full, mu * state.momentum + gathered_N / delay, state.momentum)
        params_N = params_N - rate * (delta_N / delay + jnp.where(full, mu * momentum_N, 0.0))
        after = DelayedState(momentum_N, jnp.where(full, 0.0, gathered_N), jnp.where(full, 0, state.rounds + 1))
        return params_N, after, params_N

    return OuterOptimizer(init, step)


class AdaptiveState(NamedTuple):
    """Momentum and the outer gradient of the round before: float32, N elements."""

    trace: jax.Array
    previous: jax.Array


def adaptive_nesterov(config: OuterConfig) -> OuterOptimizer:
    """Nesterov with μ ← clamp(2(1 − ρ), 0, μ_max), ρ = cos(Δ, the Δ before); μ_max is `momentum`.

    Short intervals and drifting islands make successive Δ alike: momentum then only enlarges the step, by about
    1 + μ/(1 − μρ), which is what makes it diverge. Unlike ones it averages, which is what it is good for.
    """
    rate, most = config.learning_rate, config.momentum

    def step(
        params_N: jax.Array, state: AdaptiveState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, AdaptiveState, jax.Array]:
        cosine = jnp.vdot(_polar(delta_N)[1], _polar(state.previous)[1])
        mu = jnp.clip(2.0 * (1.0 - cosine), 0.0, most)
        trace_N = mu * state.trace + delta_N
        params_N = params_N - rate * (delta_N + mu * trace_N)
        return params_N, AdaptiveState(trace_N, delta_N), params_N

    return OuterOptimizer(lambda params_N: AdaptiveState(jnp.zeros_like(params_N), jnp.zeros_like(params_N)), step)


class ScheduledState(NamedTuple):
    """Momentum (float32, N elements), and how many rounds the fragment has had (int32)."""

    trace: jax.Array
    rounds: jax.Array


YOUNG_ROUNDS, LONG_STEPS = 10.0, 32.0
"""`scheduled`: a round of memory more for each so many rounds so far; and for each so many steps in one"""


def scheduled_nesterov(config: OuterConfig) -> OuterOptimizer:
    """Nesterov with a momentum that its surroundings set: μ = min(`momentum`, 1 − 1/m) · min(1, (1 − progress)/c).

    m = 1 + min(1 + k/10, nH/32) is how many rounds may be remembered in the fragment's round k, counted from 0, and c
    is `cooldown`. A young run would remember where it comes from, not where it goes (momentum's memory should stay
    under a tenth of all rounds). Where many steps were averaged into one, the flat directions want them back; where
    few were, momentum only enlarges what is alike. And what it adds to a step, it adds to its noise: so it ends with
    the learning rate.

    The rate is η · n/M: of a round that some are not in, the step is theirs as a part of all, as if the others had not
    moved; what they did comes with their next one. So M rounds of one island each go as far as one of M islands.

    Ours; `docs/results/learning.md` has what each is worth.
    """
    most, cooldown = config.momentum, max(config.cooldown, _TINY)

    def step(
        params_N: jax.Array, state: ScheduledState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, ScheduledState, jax.Array]:
        long = now.islands * now.interval / LONG_STEPS
        memory = 1.0 + jnp.minimum(1.0 + state.rounds.astype(jnp.float32) / YOUNG_ROUNDS, long)
        mu = jnp.minimum(most, 1.0 - 1.0 / memory) * jnp.clip((1.0 - now.progress) / cooldown, 0.0, 1.0)
        trace_N = mu * state.trace + delta_N
        rate = config.learning_rate * now.participation
        params_N = params_N - rate * (delta_N + mu * trace_N)
        return params_N, ScheduledState(trace_N, state.rounds + 1), params_N

    return OuterOptimizer(lambda params_N: ScheduledState(jnp.zeros_like(params_N), jnp.zeros((), jnp.int32)), step)


class AveragingState(NamedTuple):
    """z, the iterate that outer gradients move (float32, N elements), and the number of rounds (int32)."""

    iterate: jax.Array
    rounds: jax.Array


def primal_averaging(config: OuterConfig) -> OuterOptimizer:
    """z ← z − ηΔ; x ← μx + (1 − μ)z; publishes y = βx + (1 − β)z, β being `interpolation`. x are the parameters.

    Generalised primal averaging (arXiv 2512.17131). With β = μ, y goes where Nesterov at rate η(1 − μ) goes.
    """
    return _averaging(config, lambda rounds: jnp.float32(1.0 - config.momentum))


def schedule_free(config: OuterConfig) -> OuterOptimizer:
    """z ← z − ηΔ; x ← x + (z − x)/t in round t; publishes y = βx + (1 − β)z. `momentum` plays no part.

    Schedule-free SGD (arXiv 2405.15682), as optax.contrib.schedule_free at a constant rate; here x is at hand.
    """
    return _averaging(config, lambda rounds: 1.0 / rounds.astype(jnp.float32))


def _averaging(config: OuterConfig, share: Callable[[jax.Array], jax.Array]) -> OuterOptimizer:
    """x takes in `share(round)` of z in each round, counted from 1."""
    rate, beta = config.learning_rate, config.interpolation

    def step(
        params_N: jax.Array, state: AveragingState, delta_N: jax.Array, now: Round
    ) -> tuple[jax.Array, AveragingState, jax.Array]:
        iterate_N, rounds = state.iterate - rate * delta_N, state.rounds + 1
        params_N = params_N + share(rounds) * (iterate_N - params_N)
        return params_N, AveragingState(iterate_N, rounds), params_N + (1.0 - beta) * (iterate_N - params_N)

    def init(params_N: jax.Array) -> AveragingState:
        return AveragingState(jnp.array(params_N), jnp.zeros((), jnp.int32))

    return OuterOptimizer(init, step, looks_ahead=True)


def decaying_sgd(config: OuterConfig) -> OuterOptimizer:
    """θ ← θ − αΔ, without momentum; α falls from η to `final_share` of it over `decay_rounds` rounds of a fragment.

    SparseLoCo's outer step (arXiv 2508.15706; Covenant-72B went from 1 to 0.65). Its other half, the largest elements
    in two bits with error feedback, is the codec `top3` at the sender.
    """
    last = config.learning_rate * config.final_share
    return from_optax(optax.sgd(optax.schedules.linear_schedule(config.learning_rate, last, config.decay_rounds)))


OUTER: dict[str, Callable[[OuterConfig], OuterOptimizer]] = {
    "scheduled": scheduled_nesterov,
    "sgd": lambda config: from_optax(optax.sgd(config.learning_rate)),
    "nesterov": lambda config: from_optax(optax.sgd(config.learning_rate, momentum=config.momentum, nesterov=True)),
    "mla": look_ahead,
    "heloco": heloco,
    "delayed": delayed_nesterov,
    "adaptive": adaptive_nesterov,
    "averaging": primal_averaging,
    "schedule_free": schedule_free,
    "sparseloco": decaying_sgd,
}
"""By name. `sgd`: θ ← θ − ηΔ. `nesterov`: b ← μb + Δ; θ ← θ − η(Δ + μb) (DiLoCo, arXiv 2311.08105). The others: see
their builders."""


@lru_cache(maxsize=64)  # a run that is steered has another rate now and then
def build(config: OuterConfig) -> OuterOptimizer:
    """The outer optimiser that the config names, compiled, on the CPU; it compiles once for each fragment size.

    SGD at rate 1 gives exactly the float32 difference `params − delta`. `step` raises ValueError unless parameters
    and delta are float32 vectors of the same size.
    """
    rule = OUTER[config.rule](config)
    compiled = jax.jit(rule.step)

    def init(params_N: Vector) -> State:
        return _on_cpu(rule.init(_on_cpu(params_N)))

    def step(params_N: Vector, state: State, delta_N: Vector, now: Round) -> tuple[jax.Array, State, jax.Array]:
        for name, vector in (("parameters", params_N), ("delta", delta_N)):
            if vector.dtype != np.float32 or vector.shape != (params_N.size,):
                raise ValueError(f"{name}: {vector.dtype} of shape {vector.shape}, not float32 ({params_N.size},)")
        # As an array: a Python number would be traced anew for each of its types, and be promoted weakly.
        results = compiled(*_on_cpu((params_N, state, delta_N, Round(*map(np.float32, now)))))
        stepped: tuple[jax.Array, State, jax.Array] = jax.block_until_ready(results)  # type: ignore[no-untyped-call]
        return stepped

    return OuterOptimizer(init, step, rule.looks_ahead)


def _on_cpu(tree: Any) -> Any:
    return jax.device_put(tree, jax.local_devices(backend="cpu")[0])


def _named(state: State) -> dict[str, Any]:
    """The leaves of a state, each under its path, such as `state[0].trace`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def dump(params_N: Vector, state: State) -> bytes:
    """Parameters and state as bytes: four magic ones, the digest of the rest, flax's msgpack of the named arrays."""
    arrays = {name: np.asarray(leaf) for name, leaf in {"params": params_N, **_named(state)}.items()}
    body = serialization.msgpack_serialize(arrays, in_place=True)
    return MAGIC + digest(body).encode() + body


def load(template_state: State, data: bytes, size: int | None = None) -> tuple[jax.Array, State]:
    """The parameters and state that `dump` wrote, bit for bit, on the CPU.

    `template_state` is any state of the same rule and size, such as `init(zeros)`; `size`, when given, is how many
    parameters there must be (SGD's empty state cannot tell). Raises WireError when a bit of the bytes is damaged, or
    when a name, shape or dtype is not the template's.
    """
    body = data[len(MAGIC) + _DIGEST_CHARACTERS :]
    if data[: len(data) - len(body)] != MAGIC + digest(body).encode():
        raise WireError("the outer optimiser's state is damaged, or was written by another version")
    arrays = _restored(body)
    size = getattr(arrays.get("params"), "size", 0) if size is None else size
    named = _named(template_state)
    expected = {"params": ((size,), np.dtype(np.float32))} | {k: (leaf.shape, leaf.dtype) for k, leaf in named.items()}
    if arrays.keys() != expected.keys():
        raise WireError(f"arrays {sorted(map(str, arrays))!s:.200} where the rule has {sorted(expected)}")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (shape, dtype):
            raise WireError(f"{name} is {_described(array)} where the run has {dtype} of shape {shape}")
    leaves = [arrays[name] for name in named]
    state = jax.tree.unflatten(jax.tree.structure(template_state), leaves)
    params_N, state = _on_cpu((arrays["params"], state))
    return params_N, state


def _restored(body: bytes) -> dict[Any, Any]:
    try:
        arrays = serialization.msgpack_restore(body)
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        RecursionError,
        SyntaxError,  # numpy parses the names of dtypes
        msgpack.exceptions.UnpackException,
    ) as error:
        raise WireError(f"the outer optimiser's state is not msgpack ({type(error).__name__})") from None
    if not isinstance(arrays, dict):
        raise WireError("the outer optimiser's state is not a map")
    return arrays


def _described(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)} of shape {getattr(array, 'shape', '()')}"
