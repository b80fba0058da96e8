"""What joining a run costs, as parts of `archipelago bench accelerator`: the start of an island, and a user's own loop.

Each start is a process of its own. The first one finds empty caches; the others find its caches, like an island that
was killed and restarts. We measure processor time because a storm restarts several islands on busy cores. Islands take
turns with a process that makes the first step of the same model in plain JAX, with flax and optax. A user's own loop
trains the same model, too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from archipelago.broker.config import RunConfig, SyncConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE
from archipelago.ops.bench.measured_run import INCARNATION, own_redis
from archipelago.ops.bench.process import child
from archipelago.ops.bench.turns import create_run, timed
from archipelago.ops.launch import parent_death

RUN = "bench-joining"
#: Training steps of a user's loop, calls of `sync` after each of them, and how often the model is sent and adopted.
LOOP_STEPS, LOOP_CALLS, TRANSFERS = 20, 500, 5
WAIT_SECONDS = 600.0
#: An island that tells when its first step has ended, and then leaves as if somebody had stopped it.
ISLAND = """
import os, runpy, signal, time
import jax
from archipelago.islands.worker import Island

advance = Island.advance

def first(island):
    Island.advance = advance
    advance(island)
    jax.block_until_ready(island.inner)
    print(time.process_time(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

Island.advance = first
runpy.run_module("archipelago.islands", run_name="__main__")
"""
PLAIN = """
import sys, time
import jax, numpy
from pydantic import TypeAdapter
from archipelago.broker.config import RunConfig
from archipelago.islands.inner import begin, compile_steps
from archipelago.islands.models.registry import build

config = TypeAdapter(RunConfig).validate_json(sys.argv[1])
model = build(config.model)
state = begin(config.inner, model.init(config.seed))
batch = numpy.zeros((1, config.data.batch_size, config.data.sequence_length + 1), numpy.uint8)
jax.block_until_ready(compile_steps(model, config.inner)(state, batch, numpy.int32(0)))
print(time.process_time())
"""


class LoopFound(NamedTuple):
    """Seconds in a user's own loop: of steps, of calls of `sync` without an event, and of sending and adopting all."""

    steps: list[float]
    calls: list[float]
    send: list[float]
    adopt: list[float]


def sync_own_loop(pipe: Connection, url: str, config: RunConfig) -> None:
    """Join a run as a user's script does, call `sync` after its training steps, and send a `LoopFound`.

    No merger serves, and no round is due before the measurement ends: nothing happens in a call. Then one fragment,
    which holds the whole model, is sent and adopted several times.
    """
    import jax
    import jax.numpy as jnp

    from archipelago.islands.inner import begin, compile_steps
    from archipelago.islands.models.registry import build
    from archipelago.islands.own_loop.creation import create
    from archipelago.islands.own_loop.joining import join

    model, found = build(config.model), LoopFound([], [], [], [])
    params, steps = model.init(config.seed), compile_steps(model, config.inner)
    batch = jnp.zeros((1, config.data.batch_size, config.data.sequence_length + 1), jnp.uint8)
    create(url, RUN, params, sync=SyncConfig(interval=1 << 20, fragments=1), steps=1 << 20)
    with join(url, RUN, params, island=INCARNATION) as run:
        state, _ = steps(begin(config.inner, jax.tree.map(jnp.copy, run.params)), batch, jnp.int32(0))
        for _ in range(LOOP_STEPS):
            with timed(found.steps):
                state, _ = steps(state, batch, jnp.int32(0))
                jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            for _ in range(LOOP_CALLS):
                with timed(found.calls):
                    run.sync(state.params, tokens=config.tokens_per_step, loss=1.0)
        replica, named = run._replica, dict(state.params)
        assert replica is not None  # noqa: S101 - the run is joined
        new_N = np.concatenate([np.asarray(x).reshape(-1) for x in replica.references[0].values()])
        for _ in range(TRANSFERS):
            with timed(found.send):
                jax.block_until_ready(replica.measure(0, named))  # type: ignore[no-untyped-call]
            with timed(found.adopt):
                named = dict(replica.adopt(0, named, new_N))
                jax.block_until_ready(named)  # type: ignore[no-untyped-call]
    pipe.send(found)


def start_times(config: RunConfig, starts: int, say: Callable[[str], None]) -> dict[str, float]:
    """Measure a start with empty caches, and `starts` with warm ones.

    Returns:
        Medians in seconds of processor time: of an island in all (`total`) and by part, of plain JAX (`plain`), and of
        both with empty caches (`cold`, `plain_cold`).
    """
    with tempfile.TemporaryDirectory() as folder, own_redis() as server:
        with child(create_run, server.url, config, RUN) as creating:
            creating.receive()
        environment = {
            **os.environ,
            URL_VARIABLE: server.url,
            RUN_VARIABLE: RUN,
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        cold, plain_cold = _island(folder, environment), _plain(config, environment)
        say(f"a start with empty caches: {cold['total']:.2f} s of processor time; plain JAX: {plain_cold:.2f} s")
        islands, plain = [], []
        for number in range(starts):
            islands.append(_island(folder, environment))
            plain.append(_plain(config, environment))
            say(f"again, {number + 1} of {starts}: {islands[-1]['total']:.2f} s; plain JAX: {plain[-1]:.2f} s")
    medians = {part: statistics.median(island[part] for island in islands) for part in cold}
    return {**medians, "plain": statistics.median(plain), "cold": cold["total"], "plain_cold": plain_cold}


def _island(folder: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Return the parts of an island's start, and their sum."""
    flags = ["--name", "island", "--folder", f"{folder}/island", "--scan-steps", "1", "--evaluate-every", "0"]
    total, summary = _output([ISLAND, *flags, "--no-tensorboard", "--json"], environment).split("\n", 1)
    parts: dict[str, float] = json.loads(summary)["start_seconds"]
    return {"total": float(total), **parts, "first_step": max(0.0, float(total) - sum(parts.values()))}


def _plain(config: RunConfig, environment: Mapping[str, str]) -> float:
    return float(_output([PLAIN, TypeAdapter(RunConfig).dump_json(config).decode()], environment))


def _output(script: list[str], environment: Mapping[str, str]) -> str:
    """Run a script with its arguments, and return its output. Raise BrokerError if it fails."""
    command: list[Any] = parent_death.command([sys.executable, "-P", "-c", *script])
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BrokerError(
            f"a process of the measurement made no step for {WAIT_SECONDS:g} s", f"It wrote: {error.stderr!r:.300}",
            code="bench.timeout",
        ) from None  # fmt: skip
    if found.returncode:
        last = " / ".join(found.stderr.splitlines()[-3:]) or "nothing"
        raise BrokerError("a process of the measurement failed", f"It wrote: {last}", code="bench.process-failed")
    return found.stdout
