"""`archipelago bench join`: what syncing costs a user's own training script in JAX.

A script of dense layers joins a run on a Redis of its own, with all of the link's threads. Its calls of `run.sync` take
turns with its training steps, so that other work on the machine slows both. Then one fragment that holds the whole
model is sent and adopted several times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import keep_compiled
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.sync.tree_replica import TreeReplica

RUN = "bench-join"
LAYERS, BATCH = 10, 64
#: A call of `sync` without an event must take less.
GOAL_SECONDS = 50e-6
#: Training steps between which the calls are spread, and how often the fragment is sent and adopted.
STEPS, TRANSFERS = 20, 5

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class JoinOptions(OutputOptions):
    """Measure what `run.sync` costs a training script, without and with a fragment that is sent or adopted."""

    parameters: float = 1e7
    """The parameters of the model, which are one fragment."""
    calls: int = 10_000
    """The calls of `sync` without an event."""


def main(options: JoinOptions) -> int:
    """Measure, and write the results."""
    width = round((options.parameters / LAYERS) ** 0.5)
    if width < 1 or options.calls < STEPS:
        raise ConfigError(
            f"{options.parameters:g} parameters and {options.calls} calls are too few",
            f"Choose at least {LAYERS} parameters and {STEPS} calls.",
            code="bench.join",
        )
    keep_compiled()
    return finish("join", measured(width, options.calls), options)


def measured(width: int, calls: int) -> dict[str, Any]:
    """Measure a model of `LAYERS` square layers. Return plain data with `rows`, in milliseconds."""
    from archipelago.broker.config import SyncConfig
    from archipelago.islands.own_loop.creation import create
    from archipelago.islands.own_loop.joining import join

    params, step = _script(width)
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder)) as server:
        # No merger serves, and no round is due before the measurement ends: nothing happens in a call.
        create(server.url, RUN, params, sync=SyncConfig(interval=1 << 20, fragments=1), steps=1 << 20)
        with join(server.url, RUN, params, island="bench") as run:
            stepping, calling = [], []
            trained = step(run.params)
            for _ in range(STEPS):
                began = time.perf_counter()
                trained = _done(step(trained))
                stepping.append(time.perf_counter() - began)
                for _ in range(calls // STEPS):
                    began = time.perf_counter()
                    run.sync(trained, tokens=BATCH, loss=1.0)
                    calling.append(time.perf_counter() - began)
            say(f"a call without an event: {1e6 * statistics.median(calling):.1f} µs, median of {len(calling):,}")
            replica = run._replica
            assert replica is not None  # noqa: S101 - the run is joined
            transfers = _transfers(replica, trained)
    return {
        "parameters": LAYERS * width * width,
        "batch": BATCH,
        "calls": len(calling),
        "goal_ms": 1e3 * GOAL_SECONDS,
        "rows": rows(stepping, calling, transfers),
    }


def rows(
    stepping: list[float], calling: list[float], transfers: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """Return a table for people. `thread` is the time that the training thread is away, `device` until all is done."""
    one = statistics.median(stepping)

    def row(what: str, thread: list[float], device: list[float] | None = None) -> dict[str, Any]:
        middle = statistics.median(thread)
        done = statistics.median(device) if device else ""
        return {"what": what, "thread_ms": 1e3 * middle, "most_ms": 1e3 * max(thread), "to_step": middle / one,
                "device_ms": 1e3 * done if isinstance(done, float) else ""}  # fmt: skip

    found = [row("a training step", stepping), row("sync without an event", calling)]
    for what, times in transfers.items():
        found.append(row(what, [thread for thread, _ in times], [device for _, device in times]))
    return found


def _script(width: int) -> tuple[dict[str, Any], Step]:
    """Return the parameters and the training step of a stack of square layers."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"layer{i}": jax.random.normal(key, (width, width)) / width**0.5 for i, key in enumerate(keys)}
    inputs = jax.random.normal(jax.random.key(1), (BATCH, width))

    def loss(params: dict[str, Any]) -> Any:
        hidden = inputs
        for i in range(LAYERS):
            hidden = jnp.tanh(hidden @ params[f"layer{i}"])
        return jnp.mean(jnp.square(hidden))

    @jax.jit
    def step(params: dict[str, Any]) -> dict[str, Any]:
        gradients = jax.grad(loss)(params)
        found: dict[str, Any] = jax.tree.map(lambda p, g: p - jnp.float32(1e-2) * g, params, gradients)
        return found

    return params, step


def _transfers(replica: TreeReplica, params: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the training thread and those until the device is done, of each sending and adoption."""
    import numpy as np

    new_N = np.concatenate([np.asarray(x).reshape(-1) for x in replica.references[0].values()])
    found: dict[str, list[tuple[float, float]]] = {"send the whole model": [], "adopt the whole model": []}
    named, sent, adopted = dict(params), *found.values()
    for _ in range(TRANSFERS):
        began = time.perf_counter()
        parts = replica.measure(0, named)
        returned = time.perf_counter()
        _done(parts)
        sent.append((returned - began, time.perf_counter() - began))
        began = time.perf_counter()
        named = dict(replica.adopt(0, named, new_N))
        returned = time.perf_counter()
        _done(named)
        adopted.append((returned - began, time.perf_counter() - began))
    return found


def _done(tree: Any) -> Any:
    import jax

    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]
