"""`bench parity --task` and `--intervals`: how much loss the interval H and the number of islands M cost.

For each M, islands with each H are compared with data-parallel training on the same tokens, in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from archipelago.broker.config import checked
from archipelago.broker.files import make_untracked
from archipelago.broker.loss_unit import LossUnit, loss_unit
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.baselines import Point, data_parallel
from archipelago.ops.experiments.parity import Arm, islands, mean_curve, participation
from archipelago.ops.plots import add_grid_and_legend, can_draw, pyplot

Say = Callable[[str], None]


def sync_cost(
    work: Workload,
    counts: Sequence[int],
    intervals: Sequence[int],
    slow: float,
    output: Path,
    say: Say,
    seeds: Sequence[int] = (),
) -> dict[str, Any]:
    """Compare islands with data-parallel training, and draw what H and M cost.

    Args:
        work: One of our models, or a task that has an `evaluate`.
        counts: Numbers of islands, M.
        intervals: The intervals H; empty for that of the settings.
        slow: How many times longer the steps of the last island take.
        output: The folder for the picture.
        say: Prints a line of progress.
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
        for arm in _arms(work, count, intervals or (work.config.sync.interval,), slow, seeds, unit, say)
    ]
    named = work.named.name or work.config.model.size
    found = {
        "config": work.config.digest(), "task": named, "slow": slow, "seeds": list(seeds or [work.config.seed]),
        "unit": unit.name, "rows": [_row(arm, arms, unit) for arm in arms if arm.interval],
        "curves": {arm.name: [(p.tokens, unit.from_evaluation(p.bits_per_byte)) for p in mean_curve(arm.curves)]
                   for arm in arms},
    }  # fmt: skip
    if not can_draw():
        return found
    make_untracked(output)
    picture = output / "parity.png"
    draw(picture, f"{named}: islands against data-parallel training on the same tokens", arms, unit)
    return found | {"picture": str(picture)}


def _arms(
    work: Workload, count: int, intervals: Sequence[int], slow: float, seeds: Sequence[int], unit: LossUnit, say: Say
) -> list[Arm]:
    """Train data-parallel, and islands with each interval."""
    config = work.config
    works = [work.changed(seed=seed) for seed in seeds] or [work]
    steps = max(1, round(config.inner.steps * (count - 1 + 1 / slow) / count))  # as many tokens as the islands
    curves = tuple(data_parallel(each, count, _quiet, steps) for each in works)
    arms = [Arm(f"data-parallel, {count}× batch", count, curves)]
    _tell(arms[0], unit, say)
    for interval in intervals:
        wanted = checked(replace(config, sync=replace(config.sync, interval=interval))).sync
        played = [islands(each.changed(sync=wanted), count, slow) for each in works]
        rounds, per_round = participation(played[0][1])
        name = f"{count} island{'s' * (count > 1)}, H = {interval}"
        arms.append(Arm(name, count, tuple(points for points, _ in played), rounds, per_round, interval=interval))
        _tell(arms[-1], unit, say)
    return arms


def _quiet(_: Point) -> None:
    pass


def _tell(arm: Arm, unit: LossUnit, say: Say) -> None:
    loss = unit.from_evaluation(fmean(arm.losses))
    say(f"{arm.name}: {loss:.4f} {unit.name} after {arm.curves[0][-1].tokens:,} tokens")


def _row(arm: Arm, arms: Sequence[Arm], unit: LossUnit) -> dict[str, Any]:
    parallel = _parallel(arm, arms)
    return {
        "islands": arm.islands,
        "interval": arm.interval,
        "tokens": arm.curves[0][-1].tokens,
        "loss": unit.from_evaluation(fmean(arm.losses)),
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


def draw(path: Path, title: str, arms: Sequence[Arm], unit: LossUnit) -> None:
    """Draw the cost over M, a line for each H; and the curves of the largest M."""
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
        points = mean_curve([curve[1:] for curve in arm.curves])  # the untrained model would stretch the axis
        losses = [unit.from_evaluation(point.bits_per_byte) for point in points]
        style = {"color": "black", "linewidth": 1.0} if not arm.interval else {"marker": "o", "markersize": 3}
        curves.plot([point.tokens / scale for point in points], losses, label=arm.name, **style)
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
