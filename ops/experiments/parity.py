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
from archipelago.broker.files import make_untracked
from archipelago.broker.manifest import LossUnit, loss_unit
from archipelago.broker.process import keep_compiled
from archipelago.islands.tasks.task import TaskFile
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.trial import ISLANDS_MAX, CurvePoint, Trial, work_of
from archipelago.ops.launch.init import workload_of
from archipelago.ops.settings import add_grid_and_legend, can_draw, pyplot, say

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

#: The steps of a quick comparison.
QUICK_STEPS, QUICK_WARMUP_STEPS = 400, 40


@dataclass(frozen=True)
class ParityOptions(OutputOptions):
    """Compare losses at equal tokens, in virtual time: islands with data-parallel training, for each M and each H.

    The picture shows what the number of islands M and the interval H cost.
    """

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
    found = parity(work, options.islands, options.intervals, options.slow, options.output, options.seeds)
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
    output: Path,
    seeds: Sequence[int] = (),
) -> dict[str, Any]:
    """Compare islands with data-parallel training, and draw what H and M cost.

    Args:
        work: One of our models, or a task that has an `evaluate`.
        counts: Numbers of islands, M.
        intervals: The intervals H; empty for that of the settings.
        slow: How many times longer the steps of the last island take.
        output: The folder for the picture.
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
    named = work.named.name or work.config.model.size
    found = {
        "config": work.config.digest(), "task": named, "slow": slow, "seeds": list(seeds or [work.config.seed]),
        "unit": unit.name, "rows": [_row(arm, arms, unit) for arm in arms if arm.interval],
        "curves": {arm.name: [(p.tokens, unit.from_evaluation(p.bits_per_byte)) for p in mean_curve(arm.curves)]
                   for arm in arms},
        "losses": {arm.name: [unit.from_evaluation(loss) for loss in arm.losses] for arm in arms},
    }  # fmt: skip
    if not can_draw():
        return found
    make_untracked(output)
    picture = output / "parity.png"
    draw(picture, f"{named}: islands against data-parallel training on the same tokens", arms, unit)
    return found | {"picture": str(picture)}


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
    parallel = _parallel(arm, arms)
    return {
        "islands": arm.islands,
        "interval": arm.interval,
        "tokens": arm.curves[0][-1].tokens,
        "loss": unit.from_evaluation(fmean(arm.losses)),
        **({"spread": _spread(arm, unit)} if len(arm.losses) > 1 else {}),
        "data_parallel": unit.from_evaluation(fmean(parallel.losses)),
        "to_parallel": arm.ratio(parallel) if _has_ratios(arms) else math.nan,
        "rounds": arm.rounds,
        "per_round": arm.per_round,
    }


def _parallel(arm: Arm, arms: Sequence[Arm]) -> Arm:
    """Return data-parallel training of as many workers."""
    return next(other for other in arms if not other.interval and other.islands == arm.islands)


def _has_ratios(arms: Sequence[Arm]) -> bool:
    """Return whether ratios mean something. A user's loss may be negative."""
    return all(loss > 0 for arm in arms if not arm.interval for loss in arm.losses)


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Return the mean curve: tokens and loss, point by point."""
    return [
        CurvePoint(round(fmean(p.tokens for p in points)), fmean(p.bits_per_byte for p in points))
        for points in zip(*curves, strict=False)
    ]


def draw(path: Path, title: str, arms: Sequence[Arm], unit: LossUnit) -> None:
    """Draw the cost over M, a line for each H; and the curves of the largest M, with a band over the seeds."""
    plt = pyplot()
    figure, (costs, curves) = plt.subplots(1, 2, figsize=(11, 4.5), dpi=120, layout="constrained")
    counts = sorted({arm.islands for arm in arms})
    is_relative = _has_ratios(arms)
    for interval in sorted({arm.interval for arm in arms if arm.interval}):
        own = sorted((arm for arm in arms if arm.interval == interval), key=lambda arm: arm.islands)
        cost = [_cost(arm, _parallel(arm, arms), unit, is_relative=is_relative) for arm in own]
        costs.plot([arm.islands for arm in own], cost, marker="o", markersize=4, label=f"H = {interval}")
    costs.axhline(0.0, color="black", linewidth=1, label="data-parallel")
    costs.set_xscale("log", base=2)
    costs.set_xticks(counts, [str(count) for count in counts])
    costs.minorticks_off()
    over = f"loss over that of data-parallel, {'%' if is_relative else unit.name}"
    costs.set(title="What H and M cost", xlabel="islands M", ylabel=over)
    largest = [arm for arm in arms if arm.islands == counts[-1]]
    scale, word = (1e6, "million") if largest[0].curves[0][-1].tokens >= 1e6 else (1e3, "thousand")
    for arm in largest:
        trained = [curve[1:] for curve in arm.curves]  # the untrained model would stretch the axis
        points = mean_curve(trained)
        x, losses = [p.tokens / scale for p in points], [unit.from_evaluation(p.bits_per_byte) for p in points]
        style = {"color": "black", "linewidth": 1.0} if not arm.interval else {"marker": "o", "markersize": 3}
        (line,) = curves.plot(x, losses, label=f"{arm.name}: {losses[-1]:.3f}", **style)
        if len(trained) > 1:
            seeds = [[unit.from_evaluation(p.bits_per_byte) for p in each] for each in zip(*trained, strict=False)]
            low, high = [min(each) for each in seeds], [max(each) for each in seeds]
            curves.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
    curves.set(title=f"M = {counts[-1]}", xlabel=f"{word} tokens", ylabel=f"held-out {unit.name}")
    for axes in (costs, curves):
        add_grid_and_legend(axes)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def _cost(arm: Arm, parallel: Arm, unit: LossUnit, *, is_relative: bool) -> float:
    if is_relative:
        return 100.0 * (arm.ratio(parallel) - 1.0)
    return unit.from_evaluation(fmean(arm.losses) - fmean(parallel.losses))
