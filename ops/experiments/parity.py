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
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import require_number
from archipelago.broker.manifest import LossUnit, loss_unit
from archipelago.broker.process import keep_compiled
from archipelago.islands.tasks.task import TaskFile
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.trial import ISLANDS_MAX, CurvePoint, Trial, work_of
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


@dataclass(frozen=True)
class Arm:
    """One way to train, with its results over all seeds.

    Attributes:
        name: Its name in tables.
        islands: Number of islands or of workers.
        curves: One curve for each seed.
        rounds: Rounds of the first seed's run.
        per_round: Mean number of contributions in a round.
        interval: The interval H of islands; 0 for data-parallel.
    """

    name: str
    islands: int
    curves: tuple[list[CurvePoint], ...]
    rounds: int = 0
    per_round: float = 0.0
    interval: int = 0

    @property
    def losses(self) -> list[float]:
        """Held-out bits per byte at the end, for each seed."""
        return [curve[-1].bits_per_byte for curve in self.curves]

    def ratio(self, other: Arm) -> float:
        """Return the mean over the seeds of the ratio of this loss to the other's."""
        return fmean(loss / other_loss for loss, other_loss in zip(self.losses, other.losses, strict=True))


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
    unit = loss_unit(work.named.data)
    arms = [
        arm
        for count in counts
        for arm in _arms(work, count, intervals or (work.config.sync.interval,), slow, seeds, unit)
    ]
    return {
        "config": work.config.digest(), "task": work.named.name or work.config.model.size,
        "slow": slow, "seeds": list(seeds or [work.config.seed]),
        "unit": unit.name, "rows": [_row(arm, arms, unit) for arm in arms if arm.interval],
        "curves": {arm.name: [(p.tokens, unit.from_evaluation(p.bits_per_byte)) for p in mean_curve(arm.curves)]
                   for arm in arms},
        "losses": {arm.name: [unit.from_evaluation(loss) for loss in arm.losses] for arm in arms},
    }  # fmt: skip


def _arms(
    work: Workload, count: int, intervals: Sequence[int], slow: float, seeds: Sequence[int], unit: LossUnit
) -> list[Arm]:
    """Train data-parallel, and islands with each interval."""
    from archipelago.ops.experiments.baselines import data_parallel
    from archipelago.ops.experiments.island_runs import islands, participation

    config, trial = work.config, Trial.of({}, islands=count, slow=slow)
    works = [work.changed(seed=seed) for seed in seeds] or [work]
    steps = max(1, round(config.inner.steps * work_of(trial) / count))  # as many tokens as the islands
    curves = tuple(data_parallel(each, count, steps=steps) for each in works)
    arms = [Arm(f"data-parallel, {count}× batch", count, curves)]
    _tell(arms[0], unit)
    for interval in intervals:
        wanted = checked(replace(config, sync=replace(config.sync, interval=interval))).sync
        played = [islands(each.changed(sync=wanted), trial) for each in works]
        rounds, per_round = participation(played[0][1])
        name = f"{count} island{'s' * (count > 1)}, H = {interval}"
        arms.append(Arm(name, count, tuple(points for points, _ in played), rounds, per_round, interval))
        _tell(arms[-1], unit)
    return arms


def _spread(arm: Arm, unit: LossUnit) -> float:
    """Return the standard deviation over the seeds; 0 for one seed."""
    return stdev(map(unit.from_evaluation, arm.losses)) if len(arm.losses) > 1 else 0.0


def _tell(arm: Arm, unit: LossUnit) -> None:
    loss, spread = unit.from_evaluation(fmean(arm.losses)), _spread(arm, unit)
    shown = f" ± {spread:.4f}" if spread else ""
    say(f"{arm.name}: {loss:.4f}{shown} {unit.name} after {arm.curves[0][-1].tokens:,} tokens")


def _row(arm: Arm, arms: Sequence[Arm], unit: LossUnit) -> dict[str, Any]:
    parallel = next(other for other in arms if not other.interval and other.islands == arm.islands)
    # A user's loss may be negative; then ratios mean nothing.
    has_ratios = all(loss > 0 for arm in arms if not arm.interval for loss in arm.losses)
    return {
        "islands": arm.islands,
        "interval": arm.interval,
        "tokens": arm.curves[0][-1].tokens,
        "loss": unit.from_evaluation(fmean(arm.losses)),
        **({"spread": _spread(arm, unit)} if len(arm.losses) > 1 else {}),
        "data_parallel": unit.from_evaluation(fmean(parallel.losses)),
        "to_parallel": arm.ratio(parallel) if has_ratios else math.nan,
        "rounds": arm.rounds,
        "per_round": arm.per_round,
    }


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Return the mean curve: tokens and loss, point by point."""
    return [
        CurvePoint(round(fmean(p.tokens for p in points)), fmean(p.bits_per_byte for p in points))
        for points in zip(*curves, strict=False)
    ]
