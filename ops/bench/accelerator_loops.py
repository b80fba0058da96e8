"""The processes of `archipelago bench accelerator` in which a user's own loop joins a run, in JAX and in PyTorch."""

from __future__ import annotations

import math
import os
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from archipelago.broker.config import RunConfig, SyncConfig
from archipelago.islands.models import llama
from archipelago.ops.bench.accelerator_processes import RUN, settle
from archipelago.ops.bench.harness import INCARNATION
from archipelago.ops.bench.output import seconds_of

#: Training steps of a loop in JAX, calls of `sync` after each of them, and how often the model is sent and adopted.
LOOP_STEPS, LOOP_CALLS, TRANSFERS = 20, 500, 5


class LoopFound(NamedTuple):
    """Seconds in a user's own loop: of steps, of calls of `sync` without an event, and of sending and adopting all."""

    steps: list[float]
    calls: list[float]
    send: list[float]
    adopt: list[float]


def sync_user_loop(pipe: Connection, url: str, config: RunConfig) -> None:
    """Join a run as a user's script does, call `sync` after its training steps, and send a `LoopFound`.

    No merger serves, and no round is due before the measurement ends: nothing happens in a call. Then one fragment,
    which holds the whole model, is sent and adopted several times.
    """
    import jax
    import jax.numpy as jnp

    from archipelago.islands.inner import begin, compile_steps
    from archipelago.islands.models.registry import build
    from archipelago.islands.user_loop.joining import create, join

    model, found = build(config.model), LoopFound([], [], [], [])
    params, steps = model.init(config.seed), compile_steps(model, config.inner)
    batch = jnp.zeros((1, config.data.batch_size, config.data.sequence_length + 1), jnp.uint8)
    create(url, RUN, params, sync=SyncConfig(interval=1 << 20, fragments=1), steps=1 << 20)
    with join(url, RUN, params, island=INCARNATION) as run:
        state, _ = steps(begin(config.inner, jax.tree.map(jnp.copy, run.params)), batch, jnp.int32(0))

        def step() -> None:
            nonlocal state
            state, _ = jax.block_until_ready(steps(state, batch, jnp.int32(0)))  # type: ignore[no-untyped-call]

        def call() -> None:
            run.sync(state.params, tokens=config.tokens_per_step, loss=1.0)

        for _ in range(LOOP_STEPS):
            found.steps.append(seconds_of(step))
            found.calls.extend(seconds_of(call) for _ in range(LOOP_CALLS))
        replica: Any = run._replica
        named, new_N = dict(state.params), np.array(replica.references[0])

        def adopt() -> None:
            nonlocal named
            named = jax.block_until_ready(dict(replica.adopt(0, named, prepared)))  # type: ignore[no-untyped-call]

        for _ in range(TRANSFERS):
            prepared = jax.block_until_ready(replica.prepare(0, new_N))  # type: ignore[no-untyped-call]
            found.send.append(seconds_of(lambda: jax.block_until_ready(replica.measure(0, named))))  # type: ignore[no-untyped-call]
            found.adopt.append(seconds_of(adopt))
    pipe.send(found)


class TorchTurns(NamedTuple):
    """Turns in PyTorch: the steps of each, the seconds with `sync` and without, and the syncs of the model."""

    steps: int
    on: list[float]
    off: list[float]
    syncs: list[float]


def sync_in_torch(
    pipe: Connection, url: str, cores: set[int], config: RunConfig, pairs: int, turn_seconds: float
) -> None:
    """Create a run and join it as a user's script does. Turns of steps with `sync` and without follow each other.

    The model is a Llama of the dimensions that the config names. The process says that the run is created, waits for
    an answer when a merger serves it, and sends a `TorchTurns`.
    """
    os.sched_setaffinity(0, cores)
    import torch
    import transformers

    from archipelago.islands.pytorch.joining import create, join

    size, data, is_cuda = llama.DENSE[config.model.size], config.data, torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    settings = llama.config_of(size, config.model.vocabulary, data.sequence_length, "float32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(config.model.vocabulary, (data.batch_size, data.sequence_length), device=device)
    sections: dict[str, Any] = {name: getattr(config, name) for name in ("sync", "merge", "outer", "adopt", "wire")}
    create(url, RUN, model, steps=config.inner.steps, names=llama.from_llama, **sections)
    pipe.send("created")
    pipe.recv()
    joined: Any = join(url, RUN, model, optimizer, names=llama.from_llama, island=INCARNATION)
    with joined as run:

        def turn(steps: int, *, syncs: bool) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
                    loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if syncs:
                    run.sync(tokens=batch.numel(), loss=loss)
            if is_cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        def adopted() -> int:
            return sum(int(count.version) for count in run._loop.ledger.counts)

        interval, found = config.sync.interval, TorchTurns(0, [], [], [])
        turn(interval, syncs=True)  # This turn pays for everything that happens only once.
        settle(run._loop.link)  # or the merger would still compile its programs
        found = found._replace(steps=interval * math.ceil(turn_seconds / turn(interval, syncs=True)))
        for _ in range(pairs):
            before = adopted()
            found.on.append(turn(found.steps, syncs=True))
            settle(run._loop.link)  # or its threads would work during the next turn
            found.syncs.append((adopted() - before) / config.sync.fragments)
            found.off.append(turn(found.steps, syncs=False))
        pipe.send(found)
