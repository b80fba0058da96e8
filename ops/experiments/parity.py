"""`archipelago bench parity`: the loss of islands at equal tokens, in virtual time, against three baselines.

Everything but the wall clock is exact: real islands, a real merger, and the real codec for every contribution. Only the
step times are simulated. With one seed, a difference below about one per cent means little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import make_untracked
from archipelago.broker.process import keep_compiled
from archipelago.islands.creation import fitted
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.evaluation import published
from archipelago.islands.models.interface import Params
from archipelago.islands.tasks.file import TaskFile
from archipelago.islands.tasks.ours import OurTask, our_work
from archipelago.islands.tasks.workload import Workload, require_trainable
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.baselines import (
    Point,
    Progress,
    data_parallel,
    diloco,
    evaluations,
    one_process,
    scoring,
)
from archipelago.ops.experiments.hostile import compiled_wrong
from archipelago.ops.experiments.lockstep_run import LockstepRun
from archipelago.ops.experiments.settings import require_counts, require_slow, shortened
from archipelago.ops.experiments.virtual_time import VirtualRun, are_slow, paces
from archipelago.ops.launch.init import workload_of
from archipelago.ops.plots import add_grid_and_legend, can_draw, pyplot
from archipelago.ops.settings import say

#: Factors of the inner learning rate that tuning tries besides 1.
TUNING = (0.5, 2.0, 4.0)

Say = Callable[[str], None]
Train = Callable[[Workload], list[Point]]


@dataclass(frozen=True)
class ParityOptions(OutputOptions):
    """Compare losses at equal tokens, in virtual time: islands, one process, data-parallel, synchronous DiLoCo.

    With --task or --intervals, islands are compared with data-parallel training alone, for each number of islands and
    each interval. The picture shows what both cost.
    """

    task: str | None = None
    """A task of your own, FILE.py:NAME, in place of one of our models (docs/guide/your-training.md)."""

    islands: tuple[int, ...] = (3,)
    """The numbers of islands."""
    intervals: tuple[int, ...] = ()
    """The intervals H to compare, in inner steps, such as 12 24 48. The default is that of the settings."""
    slow: float = 1.0
    """The last island's steps take this many times longer."""
    seeds: tuple[int, ...] = ()
    """The seeds to take means and spreads over, such as 0 1 2. The default is the settings' own."""
    tune: bool = False
    """Give each baseline the best of four inner learning rates, found with the first seed."""
    quick: bool = False
    """Train for 400 global steps only."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: ParityOptions) -> int:
    """Compare, and write the results."""
    config = checked(options.settings)
    require_counts("--islands", options.islands)
    require_slow(options.slow)
    keep_compiled()
    if options.task is not None or options.intervals:
        return finish("parity", _sync_cost(config, options), options)
    config = shortened(config) if options.quick else config
    found = parity(config, options.islands, options.slow, options.output, say, options.seeds, options.tune)
    return finish("parity", found, options)


def _sync_cost(config: RunConfig, options: ParityOptions) -> dict[str, Any]:
    """Compare islands of several numbers and intervals with data-parallel training."""
    from archipelago.ops.experiments.sync_cost import sync_cost

    if options.tune:
        raise ConfigError(
            "--tune compares the baselines of our models, and not intervals or a task",
            "Leave --tune out.",
            code="parity.tune",
        )
    work = workload_of(config, options.task)
    if isinstance(work.named, TaskFile):
        require_trainable(work)
    work = work.changed(inner=shortened(work.config).inner) if options.quick else work
    return sync_cost(work, options.islands, options.intervals, options.slow, options.output, say, options.seeds)


@dataclass(frozen=True)
class Arm:
    """One way to train, with its results over all seeds.

    Attributes:
        name: Its name in tables.
        islands: Number of islands, workers or replicas.
        curves: One curve for each seed.
        rounds: Rounds of the first seed's run.
        per_round: Mean number of contributions in a round.
        rate: The inner learning rate.
        interval: The interval H of islands in a comparison of intervals, else 0.
    """

    name: str
    islands: int
    curves: tuple[list[Point], ...]
    rounds: int = 0
    per_round: float = 0.0
    rate: float = 0.0
    interval: int = 0

    @property
    def losses(self) -> list[float]:
        """Held-out bits per byte at the end, for each seed."""
        return [curve[-1].bits_per_byte for curve in self.curves]

    def ratio(self, other: Arm) -> float:
        """Return the mean over the seeds of the ratio of this loss to the other's."""
        return fmean(loss / other_loss for loss, other_loss in zip(self.losses, other.losses, strict=True))


def parity(
    config: RunConfig,
    counts: Sequence[int],
    slow: float,
    output: Path,
    say: Say,
    seeds: Sequence[int] = (),
    tune: bool = False,
) -> dict[str, Any]:
    """Compare islands with their baselines, and draw the curves.

    Args:
        config: The run's config.
        counts: Numbers of islands.
        slow: How many times longer the steps of the last island take.
        output: Folder for the picture.
        say: Prints a line of progress.
        seeds: Seeds to take means over; default the config's own.
        tune: Give each baseline (not the islands) the best of several inner learning rates, found with the first seed.

    Returns:
        Plain data with `rows`, `curves` and `losses`.
    """
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    works = [our_work(dataclasses.replace(config, seed=seed), corpus) for seed in seeds or (config.seed,)]
    arms: list[Arm] = []
    rows: list[dict[str, Any]] = []
    for count in counts:
        arms += (four := _four(works, count, slow, say, tune))
        rows += [_row(arm, four, tune) for arm in four]
    curves = {arm.name: [(p.tokens, p.bits_per_byte) for p in mean_curve(arm.curves)] for arm in arms}
    own_seeds = [work.config.seed for work in works]
    found = {"config": config.digest(), "slow": slow, "seeds": own_seeds, "tuned": tune, "rows": rows,
             "curves": curves, "losses": {arm.name: arm.losses for arm in arms}}  # fmt: skip
    if not can_draw():
        return found
    make_untracked(output)
    picture = output / "parity.png"
    title = f"{config.model.size} model, H = {config.sync.interval}, P = {config.sync.fragments}, {config.data.corpus}"
    draw(picture, title, arms)
    return found | {"picture": str(picture)}


def _four(works: Sequence[Workload], count: int, slow: float, say: Say, tune: bool) -> list[Arm]:
    """Train the islands, one process, data-parallel and synchronous DiLoCo."""
    ours = [islands(work, count, slow) for work in works]
    rounds, per_round = participation(ours[0][1])
    name, rate = f"{count} island{'s' * (count > 1)}", works[0].config.inner.peak
    tokens = ours[0][0][-1].tokens
    arms = [Arm(name, count, tuple(points for points, _ in ours), rounds, per_round, rate)]
    _tell(arms[0], say)
    ways: dict[str, Train] = {
        f"one process, {count}× steps": lambda work: one_process(work, tokens, _quiet),
        f"data-parallel, {count}× batch": lambda work: data_parallel(work, count, _quiet),
        f"DiLoCo, {count} replicas": lambda work: diloco(work, count, _quiet),
    }
    for name, train in ways.items():
        arms.append(_baseline(name, count, works, train, tune))
        _tell(arms[-1], say)
    return arms


def _baseline(name: str, count: int, works: Sequence[Workload], train: Train, tune: bool) -> Arm:
    peak = works[0].config.inner.peak
    tried = {peak: train(works[0])}
    if tune:
        tried |= {peak * factor: train(_at(works[0], peak * factor)) for factor in TUNING}
    best = min(tried, key=lambda rate: _finite(tried[rate][-1].bits_per_byte))
    return Arm(name, count, (tried[best], *(train(_at(work, best)) for work in works[1:])), rate=best)


def _at(work: Workload, rate: float) -> Workload:
    return work.changed(inner=dataclasses.replace(work.config.inner, learning_rate=rate))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _tell(arm: Arm, say: Say) -> None:
    spread = f" ± {stdev(arm.losses):.4f}" if len(arm.losses) > 1 else ""
    say(f"{arm.name}: {fmean(arm.losses):.4f}{spread} bits per byte after {arm.curves[0][-1].tokens:,} tokens")


def _row(arm: Arm, four: Sequence[Arm], tuned: bool) -> dict[str, Any]:
    _, alone, parallel, synchronous = four
    return {
        "what": arm.name,
        "tokens": arm.curves[0][-1].tokens,
        "bits_per_byte": fmean(arm.losses),
        **({"spread": stdev(arm.losses)} if len(arm.losses) > 1 else {}),
        **({"learning_rate": arm.rate} if tuned else {}),
        "rounds": arm.rounds,
        "per_round": arm.per_round,
        "to_one": arm.ratio(alone),
        "to_parallel": arm.ratio(parallel),
        "to_diloco": arm.ratio(synchronous),
    }


def islands(
    work: Workload,
    count: int,
    slow: float,
    progress: Progress | None = None,
    slowed: int = 1,
    sending: float = 0.0,
    late: float = 0.0,
    attack: str = "",
    hostile: int = 0,
    apart: bool = False,
    lockstep: bool = False,
) -> tuple[list[Point], VirtualRun]:
    """Play a run of islands to its end.

    Args:
        work: What they train.
        count: The number of islands.
        slow: How many times longer the steps of the last `slowed` islands take.
        progress: Receives each evaluation.
        slowed: How many islands are slow.
        sending: How long each contribution of a slow island is on its way, in steps of a fast island.
        late: How long each event of the merger is on its way to every island, in steps of a fast island.
        attack: What hostile islands do (`hostile.FORGERIES`).
        hostile: How many islands, from the first on, are hostile. Tokens count those of the others.
        apart: Each island reads a part of the text of its own.
        lockstep: All islands step at once, and adopt at the same step boundary what they have sent.

    Returns:
        The evaluations, and the finished run.
    """
    if lockstep:
        run: VirtualRun = LockstepRun(work, [1.0] * count)
        return play(run, scoring(work), progress), run
    seconds = paces(count, slow, slowed)
    on_the_way = [sending * is_slow for is_slow in are_slow(count, slowed)]
    attacks = {f"island-{number}": attack for number in range(hostile)}
    others = {f"island-{number}": part_of(work, number, count) for number in range(count if apart else 0)}
    if attack == "labels":
        wrong = compiled_wrong(work.config.model, work.config.inner)
        others |= {name: dataclasses.replace(others.get(name, work), steps=wrong) for name in attacks}
    run = VirtualRun(work, seconds, sending_seconds=on_the_way, late_seconds=late, attacks=attacks, others=others)
    return play(run, scoring(work), progress), run


def play(run: VirtualRun, point: Callable[[int, Params], Point], progress: Progress | None = None) -> list[Point]:
    """Play a run to its end. Return evaluations of its merged parameters over the tokens of all honest islands.

    Args:
        run: The run.
        point: Evaluates parameters (`baselines.scoring`).
        progress: Receives each evaluation.
    """
    config = run.manifest.config
    trained: dict[str, int] = {}
    points: list[Point] = []

    def note() -> None:
        trained.update({name: island.totals.tokens for name, island in run.islands.items() if name not in run.attacks})
        points.append(point(sum(trained.values()), published(run.transport, run.manifest)[0]))
        (progress or _quiet)(points[-1])

    note()
    marks = evaluations(config)
    for mark in range(1, marks):
        due = config.inner.steps * mark // marks
        run.advance_until(lambda due=due: run.merger.state.step >= due)  # type: ignore[misc]
        note()
    last = dict(run.islands)
    run.finish()
    trained.update({name: island.totals.tokens for name, island in last.items() if name not in run.attacks})
    note()
    return points


def part_of(work: Workload, number: int, of: int) -> Workload:
    """Return one of our models on a part of its text, cut into `of` parts."""
    assert isinstance(work.named, OurTask)  # noqa: S101 - studies train our models
    corpus = work.named.corpus
    length = len(corpus.train) // of
    part = dataclasses.replace(corpus, train=corpus.train[number * length : (number + 1) * length])
    return our_work(work.config, part)


def participation(run: VirtualRun) -> tuple[int, float]:
    """Return the number of rounds, and the mean number of contributions in a round."""
    members = [len(entry.members) for entry in run.transport.reader.tape(1 << 30)]
    return len(members), sum(members) / max(1, len(members))


def staleness(run: VirtualRun) -> tuple[float, int]:
    """Return the mean and the maximum staleness of merged contributions, in versions of their fragment."""
    found = [member.staleness for entry in run.transport.reader.tape(1 << 30) for member in entry.members]
    return sum(found) / max(1, len(found)), max(found, default=0)


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean curve: tokens and loss, point by point."""
    return [
        Point(round(fmean(p.tokens for p in points)), fmean(p.bits_per_byte for p in points))
        for points in zip(*curves, strict=False)
    ]


def draw(path: Path, title: str, arms: Sequence[Arm]) -> None:
    """Draw bits per byte over tokens: a line for each arm, and a band from the best to the worst seed."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for arm in arms:
        trained = [curve[1:] for curve in arm.curves]  # The untrained model would stretch the axis.
        mean = mean_curve(trained)
        x = [point.tokens / 1e6 for point in mean]
        label = f"{arm.name}: {fmean(arm.losses):.3f}"
        (line,) = axes.plot(x, [point.bits_per_byte for point in mean], marker="o", markersize=3, label=label)
        if len(trained) > 1:
            bands = [[point.bits_per_byte for point in points] for points in zip(*trained, strict=False)]
            axes.fill_between(x, [min(b) for b in bands], [max(b) for b in bands], color=line.get_color(), alpha=0.2)
    axes.set(title=title, xlabel="million tokens (bytes)", ylabel="held-out bits per byte")
    add_grid_and_legend(axes)
    figure.savefig(path)
    plt.close(figure)


def _quiet(_: Point) -> None:
    pass
