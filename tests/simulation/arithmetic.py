"""NumPy in place of JAX, for processes that play storms: a hundred times faster on tiny arrays.

Only arithmetic is replaced. The ledger, the link, merging, fencing, trimming and recovery are the real code.
"""

from __future__ import annotations

import math
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import archipelago.islands.computation
import archipelago.islands.data.batches
import archipelago.islands.sync.arrays
import archipelago.islands.sync.connection.heartbeats
import archipelago.islands.sync.replica
import archipelago.islands.worker
import archipelago.merger.merge_rules
import archipelago.merger.outer
import archipelago.merger.round_merge
from archipelago.broker.codecs import codec
from archipelago.broker.config import AdoptConfig, InnerConfig, OuterConfig
from archipelago.broker.wire import Body
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.adoption import RULES
from archipelago.merger.outer import OuterOptimizer, Round

Vector = NDArray[np.float32]


class Momentum(NamedTuple):
    """State of the outer optimiser."""

    momentum: Any


class OnDevice(np.ndarray[Any, Any]):
    """An array with the method of JAX arrays that an island calls."""

    def block_until_ready(self) -> OnDevice:
        """Return the array, which is always ready."""
        return self


_LOSSES_n = np.ones(1, np.float32).view(OnDevice)


def install() -> None:
    """Replace JAX in this process for good. Only call this in a process that does nothing else."""
    arrays, replica = archipelago.islands.sync.arrays, archipelago.islands.sync.replica
    for module in (arrays, replica, archipelago.merger.outer):
        _replace(module, jnp=np)
    host = SimpleNamespace(
        Array=jax.Array,
        ShapeDtypeStruct=jax.ShapeDtypeStruct,
        config=jax.config,
        default_device=jax.default_device,
        device_put=_put,
        device_get=_put,
        devices=jax.devices,
        local_devices=jax.local_devices,
        process_count=jax.process_count,
        tree=jax.tree,
        jit=lambda f, **_: f,
    )
    for module in (arrays, replica, archipelago.islands.computation, archipelago.islands.worker):
        _replace(module, jax=host)
    _replace(archipelago.merger.round_merge, jax=SimpleNamespace(device_put=_put))
    _replace(
        archipelago.merger.merge_rules,
        begin=lambda groups: (np.float32(-0.0),),
        norms=_norms,
        accumulate=_accumulate,
        finish=_finish,
    )
    uncompiled = SimpleNamespace(jit=lambda f: f, device_put=_put, tree=jax.tree, tree_util=jax.tree_util)
    _replace(archipelago.merger.outer, jax=uncompiled, build=_outer, _on_cpu=lambda tree: tree)
    _replace(archipelago.islands.computation, begin=_begin)
    _replace(archipelago.islands.sync.connection.heartbeats, platform=SimpleNamespace(node=lambda: "storm"))
    _replace(replica, _compiled_measure=cache(_measure), _compiled_adopt=cache(_adopt))
    _replace(
        archipelago.islands.data.batches, windows=cache(archipelago.islands.data.batches.windows)
    )  # All storms read the same text.
    np.seterr(all="raise", under="ignore")


def _replace(module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} to replace")
        setattr(module, name, value)


def _put(tree: Any, place: object = None, may_alias: bool | None = None) -> Any:
    return jax.tree.map(np.array, tree)


def _decoded(body: Body, groups: Any) -> Vector:
    with np.errstate(all="ignore"):
        decoded_N: Vector = codec(body.codec).restore(body.parts, max(group.end for group in groups), np)
        return decoded_N


def _norms(body: Body, groups: Any) -> tuple[Vector, float]:
    with np.errstate(all="ignore"):
        return np.zeros(0, np.float32), float(np.linalg.norm(_decoded(body, groups).astype(np.float64)))


def _accumulate(
    acc: Any, body: Body, groups: Any, norms: Vector, *, weight: float = 1.0, clip: float = 1.0
) -> tuple[Vector, ...]:
    # Another order would give other bits.
    return (acc[0] + np.float32(weight * clip) * _decoded(body, groups),)


def _finish(acc: Any, groups: Any, *, total_weight: float = 1.0, gain: float = 1.0, **spectra: object) -> Vector:
    merged_N: Vector = np.float32(gain / total_weight) * acc[0]
    return merged_N


def _outer(config: OuterConfig) -> OuterOptimizer:
    rate, mu = np.float32(config.learning_rate), np.float32(config.momentum if config.rule == "nesterov" else 0.0)

    def step(params_N: Vector, state: Any, delta_N: Vector, now: Round) -> Any:
        momentum_N = mu * state.momentum + delta_N
        params_N = params_N - rate * (delta_N + mu * momentum_N)
        return params_N, Momentum(momentum_N)

    return OuterOptimizer(lambda params_N: Momentum(np.zeros_like(params_N)), step)


def _begin(config: InnerConfig, params: dict[str, Any]) -> InnerState:
    return InnerState(params, np.zeros(4, np.float32))


def walk(state: InnerState, tokens_nxBxT1: Any, global_step: Any, length: Any) -> tuple[InnerState, Any]:
    """Stand in for an inner step: the parameters move a little, depending on the step and the text."""
    shift = np.float32(1e-3 * math.cos(int(global_step) + int(tokens_nxBxT1[0, 0, 0])))
    params = {name: value + shift for name, value in state.params.items()}
    return InnerState(params, state.optimizer + shift), _LOSSES_n


def _measure(rows: Any, codec_name: str, padding: int) -> Any:
    replica: Any = archipelago.islands.sync.replica

    def measure(reference_N: Vector, part: Any) -> tuple[tuple[OnDevice, ...], Vector]:
        parts = codec(codec_name).quantise(replica.outer_gradient(rows, reference_N, part), np)
        return tuple(np.asarray(part).view(OnDevice) for part in parts), replica.moved(codec_name, reference_N, parts)

    return measure


def _adopt(rows: Any, config: AdoptConfig, dtypes: Any, devices: object, donates: bool) -> Any:
    return partial(archipelago.islands.sync.replica._adopt, rows, RULES[config.rule], dtypes, False)
