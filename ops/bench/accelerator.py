"""`archipelago bench accelerator`: what an island costs on an accelerator, as one table by one command.

For each model: an inner step with syncing over one without, tokens a second beside the same model in plain JAX, and a
profile of syncs, in which one can see whether copies hide behind steps. Then the time to quantise the elements of 124 M
parameters to int4, against a copy of the same memory. On a processor, steps and syncs share the cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from archipelago.broker.codecs import codec
from archipelago.broker.config import ModelConfig, RunConfig, checked
from archipelago.broker.process import keep_compiled
from archipelago.islands.mesh.shape import parsed
from archipelago.ops.bench.island import island
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import child
from archipelago.ops.settings import say

SIZES, SIZES_QUICK = ("124m", "1b"), ("tiny",)
ELEMENTS, ELEMENTS_QUICK = 124_000_000, 1_000_000
CODEC = "int4"
#: How often both programs run, in turn, after one run that compiles.
TIMES = 20
#: A step with syncing takes at most this many times as long as one without.
GOAL_STEP = 1.01


@dataclass(frozen=True)
class AcceleratorOptions(OutputOptions):
    """Measure an island on an accelerator: steps with syncing, tokens beside plain JAX, quantising, and a profile."""

    quick: bool = False
    """Use the tiny model, few elements and short turns, as a trial of the command on any machine."""
    sizes: tuple[str, ...] = ()
    """The models. The default is 124m and 1b."""
    mesh: str | None = None
    """Spread the island over devices, as `island --mesh` does. Plain JAX uses one device."""


def main(options: AcceleratorOptions) -> int:
    """Measure, and write the results and the profiles."""
    keep_compiled()
    if options.mesh is not None:
        parsed(options.mesh)
    sizes = options.sizes or (SIZES_QUICK if options.quick else SIZES)
    _require_known(sizes)
    return finish("accelerator", accelerator(sizes, options.quick, options.output, say, options.mesh), options)


def _require_known(sizes: tuple[str, ...]) -> None:
    """Raise ConfigError (`model.unknown`) before anything is measured."""
    from archipelago.islands.models.registry import build

    for size in sizes:
        build(ModelConfig(size))


def accelerator(
    sizes: tuple[str, ...], quick: bool, folder: Path, say: Callable[[str], None], mesh: str | None = None
) -> dict[str, Any]:
    """Measure each model, and the quantiser. Return plain data with `rows`."""
    models = {}
    for size in sizes:
        config = checked(replace(RunConfig(), model=ModelConfig(size)))
        profile = folder / f"profile-{size}"
        found = island(config, quick, say, mesh, str(profile.absolute()))
        models[size] = {**found, "profile": str(profile)}
        say(f"profile of {size}: {profile} (open it with xprof or TensorBoard)")
    elements = ELEMENTS_QUICK if quick else ELEMENTS
    say(f"quantising {elements:,} elements to {CODEC}, against a copy")
    with child(quantise_and_copy, elements) as measuring:
        seconds = measuring.receive()
    return {"models": models, "elements": elements, **seconds, "rows": rows(models, elements, seconds)}


def quantise_and_copy(pipe: Connection, elements: int) -> None:
    """Send the median seconds to quantise a vector where it lies, and to copy it."""
    import jax
    import jax.numpy as jnp

    values_N = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    programs = {
        "quantise_seconds": jax.jit(lambda values_N: codec(CODEC).quantise(values_N, jnp)),
        "copy_seconds": jax.jit(jnp.copy),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(values_N))  # type: ignore[no-untyped-call]
    for _ in range(TIMES):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(values_N))  # type: ignore[no-untyped-call]
            seconds[name].append(time.perf_counter() - began)
    pipe.send({name: statistics.median(each) for name, each in seconds.items()})


def rows(models: dict[str, Any], elements: int, seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Return the figures as one table for people."""
    made = []
    for s in models.values():
        goal = GOAL_STEP if s["backend"] != "cpu" else ""
        on, off = 1e3 * s["step_seconds_on"], 1e3 * s["step_seconds_off"]
        made.append(_row(f"{s['what']}: a step with syncing, ms", on, "without", off, s["step_ratio"], goal))
        ours, plain = s["tokens_a_second"], s["tokens_a_second_plain"]
        made.append(_row("  tokens a second with syncing", ours, "plain JAX", plain, ours / plain, ""))
    quantise, copy = 1e3 * seconds["quantise_seconds"], 1e3 * seconds["copy_seconds"]
    what = f"{elements / 1e6:g} M elements to {CODEC}, ms"
    return [*made, _row(what, quantise, "a copy", copy, quantise / copy, "")]


def _row(what: str, ours: float, against: str, theirs: float, ratio: float, goal: float | str) -> dict[str, Any]:
    return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio, "goal": goal}
