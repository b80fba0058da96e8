"""What it costs in loss when an island comes back, by where its inner optimiser state comes from. Virtual time.

The same run each time: an island dies at half-time and returns at once. It gets the state of a healthy peer, its own
checkpoint's of some steps before, or fresh moments with and without their ramp; or it never left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

from archipelago.broker.config import InnerConfig, ModelConfig, RunConfig
from archipelago.islands.creation import fitted
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.evaluation import compile_validation, published
from archipelago.islands.inner import InnerSteps, compile_steps
from archipelago.islands.models.registry import build
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.worker import Island
from archipelago.ops.experiments.virtual_time import VirtualRun

ISLANDS = 3
CHECKPOINT_AGE_STEPS = 100
AFTER_STEPS = 48
"""global steps after the return at which the loss is looked at first"""

Say = Callable[[str], None]


@cache
def _compiled(model: ModelConfig, inner: InnerConfig) -> InnerSteps:
    return compile_steps(build(model), inner)


def returns(config: RunConfig, say: Say) -> dict[str, Any]:
    """A row for each kind of return: held-out bits per byte soon after and at the end, and the island's own loss."""
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    measure = compile_validation(config, corpus)
    unramped = dataclasses.replace(config, inner=dataclasses.replace(config.inner, moments_warmup_steps=0))
    kinds = {
        "it never left": (config, "stay"),
        "a peer's state": (config, "peer"),
        f"own checkpoint, {CHECKPOINT_AGE_STEPS} steps old": (config, "own"),
        "fresh, with a ramp": (config, "fresh"),
        "fresh, no ramp": (unramped, "fresh"),
        "it never returned": (config, "gone"),
    }
    rows: list[dict[str, Any]] = []
    for name, (settings, kind) in kinds.items():
        rows.append({"the island's state": name, **_one(settings, corpus, measure, kind)})
        say(f"{name}: {rows[-1]['soon_after']:.4f} soon after, {rows[-1]['at_the_end']:.4f} at the end")
    for row in rows:
        row["end_to_never_left"] = row["at_the_end"] / rows[0]["at_the_end"]
    return {"config": config.digest(), "islands": ISLANDS, "rows": rows}


def _one(config: RunConfig, corpus: OpenCorpus, measure: Callable[..., float], kind: str) -> dict[str, float]:
    run = VirtualRun(config, corpus, _compiled(config.model, config.inner), [1.0 + 0.01 * i for i in range(ISLANDS)])
    half = config.inner.steps // 2
    _until(run, half - CHECKPOINT_AGE_STEPS)
    victim = next(iter(run.islands))
    kept = device_copy(run.islands[victim].inner.optimizer)
    _until(run, half)
    if kind != "stay":
        run.remove_island(victim, farewell=False)
    if kind in ("peer", "own", "fresh"):
        island = run.add_island(victim, 1.0, "peer" if kind == "peer" else "fresh")
        if kind == "own":
            island.inner = island.inner._replace(optimizer=kept)
    losses = _losses_of(run.islands.get(victim))
    _until(run, half + AFTER_STEPS)
    soon = measure(published(run.transport, run.manifest)[0])
    own = float(np.mean([np.mean(np.asarray(chunk)) for chunk in losses])) if losses else float("nan")
    run.finish()
    end = measure(published(run.transport, run.manifest)[0])
    return {"soon_after": soon, "at_the_end": end, "own_loss_meanwhile": own}


def _until(run: VirtualRun, step: int) -> None:
    run.advance_until(lambda: run.merger.state.step >= step)


def _losses_of(island: Island | None) -> list[jax.Array]:
    """The losses of its inner steps from now on, for a while."""
    losses: list[jax.Array] = []
    if island is not None:
        steps = island.steps

        def noted(*args: Any) -> Any:
            state, losses_n = steps(*args)
            if len(losses) < AFTER_STEPS:
                losses.append(losses_n)
            return state, losses_n

        island.steps = noted
    return losses
