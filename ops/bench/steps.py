"""Whether a compiled scan over several inner steps pays: seconds a step, against single steps, in the same run."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from archipelago.broker.config import RunConfig
from archipelago.islands.inner import begin, compile_steps
from archipelago.islands.models.registry import build


def steps(config: RunConfig, repeats: int) -> dict[str, Any]:
    """A row for each length of scan that divides a stride; the ratio is to single steps (less is better)."""
    model = build(config.model)
    compiled = compile_steps(model, config.inner)
    stride = max(1, config.sync.interval // config.sync.fragments)
    rows: list[dict[str, Any]] = []
    for n in [n for n in range(1, stride + 1) if stride % n == 0]:
        shape = (n, config.data.batch_size, config.data.sequence_length + 1)
        batch = jnp.zeros(shape, jnp.uint8)
        state = begin(config.inner, model.init(config.seed))
        samples = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            state, losses_n = compiled(state, batch, jnp.asarray(0, jnp.int32))
            losses_n.block_until_ready()
            samples.append((time.perf_counter() - began) / n)
        rows.append({"scan_steps": str(n), "milliseconds_a_step": 1e3 * statistics.median(samples[1:])})
    for row in rows:
        row["to_single"] = row["milliseconds_a_step"] / rows[0]["milliseconds_a_step"]
    return {"model": config.model.size, "device": jax.devices()[0].device_kind, "rows": rows}
