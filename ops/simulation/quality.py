"""`archipelago simulate quality`: real islands train along failure tapes, in virtual time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig, from_toml
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import keep_compiled, print_json
from archipelago.ops.settings import say
from archipelago.ops.simulation import tape as failure_tape
from archipelago.ops.simulation.failures import YEAR_SECONDS, FailureModel, rng_of, simulate
from archipelago.ops.simulation.tape import FailureTape

CHIPS = (1.2e6, 2.4e6)
STEPS = 200
TAPE_SECONDS = YEAR_SECONDS / 730.5  # This is half a day.


@dataclass(frozen=True)
class QualityOptions:
    """Train real islands along tapes of 1.2 and 2.4 million chips, and along one without failures; takes minutes."""

    model: Annotated[FailureModel, tyro.conf.arg(name="")] = field(default_factory=FailureModel)
    tape: Path | None = None
    """Follow this tape instead."""
    steps: int = STEPS
    """The global steps of the run without failures."""
    seed: int = 0
    """The seed of the tapes and of the training."""
    config: Path | None = None
    """A TOML file with the run's settings."""
    json: bool = False
    """Print one JSON object."""


def main(options: QualityOptions) -> int:
    """Train along each tape, and compare the losses."""
    config = _config(options)
    tapes = {options.tape.name: failure_tape.read(options.tape)} if options.tape else drawn(options.model, options.seed)
    keep_compiled()
    from archipelago.ops.experiments.tape_run import calm, quality

    first = next(iter(tapes.values()))
    rows = quality(config, {"no failures": calm(len(first.islands), first.step_seconds), **tapes}, say)
    for row in rows:
        say(f"{row['tape']:<14}goodput {row['goodput']:.1%}  {row['tokens']:>12,} tokens  "
            f"{row['bits_per_byte']:.4f} bits per byte  {row['to_first']:.4f}  "
            f"{row['schedule_done']:.0%} of the schedule")  # fmt: skip
    if options.json:
        print_json({"config": config.digest(), "seed": options.seed, "rows": rows})
    return 0


def drawn(model: FailureModel, seed: int) -> dict[str, FailureTape]:
    """Return a tape of half a day for each number of chips in CHIPS, with this model's other parameters."""
    found = {}
    for chips in CHIPS:
        outcome = simulate(dataclasses.replace(model, chips=chips), TAPE_SECONDS, rng_of(seed))
        found[f"{chips / 1e6:g}M chips"] = failure_tape.taped(outcome, model.step_seconds)
    return found


def _config(options: QualityOptions) -> RunConfig:
    """Return the run's config. The warm-up takes at most a tenth of the steps."""
    if options.steps < 1:
        raise ConfigError(f"--steps cannot be {options.steps}", "Give at least one step.", code="config.steps")
    rng_of(options.seed)
    config = from_toml(options.config) if options.config else RunConfig()
    warmup = min(config.inner.warmup_steps, max(1, options.steps // 10))
    inner = dataclasses.replace(config.inner, steps=options.steps, warmup_steps=warmup)
    return dataclasses.replace(config, seed=options.seed, inner=inner)
