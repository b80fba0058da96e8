"""`archipelago bench parity`: how much loss the interval H and the number of islands M cost, at equal tokens.

For each M, islands with each H are compared with data-parallel training on as many tokens. Everything but the wall
clock is exact: real islands, a real merger, and the real codec for every contribution. Only the step times are
simulated. With one seed, a difference below about one per cent means little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import require_number
from archipelago.broker.manifest import LossUnit, loss_unit
from archipelago.broker.process import keep_compiled
from archipelago.islands.tasks.task import TaskFile
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.trial import ISLANDS_MAX, Record, Settings, Trial, TrialRow, measure
from archipelago.ops.launch.init import workload_of
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

#: The steps of a quick comparison.
QUICK_STEPS, QUICK_WARMUP_STEPS = 400, 40


@dataclass(frozen=True)
class ParityOptions(OutputOptions):
    """Compare losses at equal tokens, in virtual time: islands with data-parallel training, for each M and each H."""

    task: str | None = None
    """A task of your own, FILE.py:NAME, in place of one of our models (docs/guide/your-training.md)."""

    islands: tuple[int, ...] = (3,)
    """The numbers of islands M to compare."""
    intervals: tuple[int, ...] = ()
    """The intervals H to compare, in inner steps, such as 12 24 48. The default is that of the settings."""
    slow: float = 1.0
    """The last island's steps take this many times longer."""
    seeds: tuple[int, ...] = ()
    """The seeds to take means and spreads over, such as 0 1 2. The default is the settings' own."""
    quick: bool = False
    """Make 400 inner steps only."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: ParityOptions) -> int:
    """Compare, and write the results."""
    config = checked(options.settings)
    for count in options.islands or (0,):
        require_number("--islands", count, f"Give numbers from 1 to {ISLANDS_MAX}.", 1, ISLANDS_MAX)
    require_number("--slow", options.slow, "Give a factor of at least 1.", 1.0)
    keep_compiled()
    work = workload_of(config, options.task)
    if isinstance(work.named, TaskFile):
        from archipelago.islands.tasks.workload import require_trainable

        require_trainable(work)
    if options.quick:
        work = work.changed(inner=replace(work.config.inner, steps=QUICK_STEPS, warmup_steps=QUICK_WARMUP_STEPS))
    found = parity(work, options.islands, options.intervals, options.slow, options.seeds)
    return finish("parity", found, options)


def parity(
    work: Workload,
    counts: Sequence[int],
    intervals: Sequence[int],
    slow: float,
    seeds: Sequence[int] = (),
) -> dict[str, Any]:
    """Compare islands with data-parallel training.

    Args:
        work: One of our models, or a task that has an `evaluate`.
        counts: Numbers of islands, M.
        intervals: The intervals H; empty for that of the settings.
        slow: How many times longer the steps of the last island take.
        seeds: Seeds to take means over; default the settings' own.

    Returns:
        Plain data with a row for each M and H.

    Raises:
        ConfigError: The task is wrong, or has no evaluation (`task.evaluate`).
    """
    work.require_evaluation()
    unit, seeds, rows, curves = loss_unit(work.named.data), seeds or [work.config.seed], [], {}
    for count in counts:
        settings: list[Settings] = [
            {"sync.interval": interval} for interval in intervals or [work.config.sync.interval]
        ]
        parallel = _measured(Trial.of({}, kind="parallel", islands=count, slow=slow), work, seeds)
        names = {f"data-parallel, {count}× batch": parallel}
        for each in settings:
            measured = _measured(Trial.of(each, islands=count, slow=slow), work, seeds)
            names[f"{count} island{'s' * (count > 1)}, H = {each['sync.interval']}"] = measured
            rows.append(_row(measured, parallel, unit))
        for name, measured in names.items():
            say(f"{name}: {unit.from_evaluation(measured.mean):.4f} {unit.name} after {measured.tokens:,.0f} tokens")
            curves[name] = [_curve(record, unit) for record in measured.records]
    return {
        "config": work.config.digest(), "task": work.named.name or work.config.model.size,
        "slow": slow, "seeds": [*seeds], "unit": unit.name, "rows": rows, "curves": curves,
    }  # fmt: skip


def _measured(trial: Trial, work: Workload, seeds: Sequence[int]) -> TrialRow:
    """Run the trial with each seed."""
    config = work.config
    sync = checked(
        replace(config, sync=replace(config.sync, **{k.removeprefix("sync."): v for k, v in trial.settings}))
    )
    records = [measure(replace(trial, seed=seed), work.changed(seed=seed, sync=sync.sync)) for seed in seeds]
    return TrialRow(trial.named_values, tuple(records))


def _row(islands: TrialRow, parallel: TrialRow, unit: LossUnit) -> dict[str, Any]:
    first = islands.records[0]
    # A user's loss may be negative; then ratios mean nothing.
    has_ratios = all(loss > 0 for loss in parallel.losses.values())
    return {
        "islands": islands.settings["islands"],
        "interval": islands.settings["sync.interval"],
        "tokens": first["tokens"],
        "loss": unit.from_evaluation(islands.mean),
        **({"spread": unit.from_evaluation(islands.spread)} if len(islands.records) > 1 else {}),
        "data_parallel": unit.from_evaluation(parallel.mean),
        "to_parallel": islands.ratio(parallel) if has_ratios else math.nan,
        "rounds": first["rounds"],
        "per_round": first["per_round"],
    }


def _curve(record: Record, unit: LossUnit) -> list[tuple[int, float]]:
    return [(tokens, unit.from_evaluation(math.nan if loss is None else loss)) for tokens, loss in record["curve"]]
