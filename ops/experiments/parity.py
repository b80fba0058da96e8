"""Loss at equal tokens: islands in virtual time against one process, data-parallel and synchronous DiLoCo.

Exact in everything but the wall clock: the real islands and merger, every contribution through the real codec, with
step times that the clock is told. With one seed a difference under about one per cent says little.
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
from archipelago.broker.process import keep_compiled
from archipelago.islands.creation import fitted
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.evaluation import published
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.baselines import (
    EVALUATIONS,
    Point,
    Progress,
    compiled,
    data_parallel,
    diloco,
    one_process,
    scoring,
)
from archipelago.ops.experiments.settings import require_counts, require_slow, shortened
from archipelago.ops.experiments.virtual_time import VirtualRun, paces
from archipelago.ops.plots import can_draw, pyplot
from archipelago.ops.settings import say

TUNING = (0.5, 2.0, 4.0)
"""what a baseline's inner learning rate is multiplied with, besides 1, where baselines are tuned"""

Say = Callable[[str], None]
Train = Callable[[RunConfig], list[Point]]


@dataclass(frozen=True)
class ParityOptions(OutputOptions):
    """Loss at equal tokens, in virtual time: islands against one process, data-parallel and synchronous DiLoCo."""

    islands: tuple[int, ...] = (3,)
    """numbers of islands"""
    slow: float = 1.0
    """the last island's steps take this many times longer"""
    seeds: tuple[int, ...] = ()
    """seeds to take means and spreads over, such as 0 1 2; default the settings' own"""
    tune: bool = False
    """give each baseline the best of four inner learning rates, found with the first seed"""
    quick: bool = False
    """400 global steps"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: ParityOptions) -> int:
    """Compare, and write what was found."""
    config = checked(options.settings)
    require_counts("--islands", options.islands)
    require_slow(options.slow)
    keep_compiled()
    config = shortened(config) if options.quick else config
    found = parity(config, options.islands, options.slow, options.output, say, options.seeds, options.tune)
    return finish("parity", found, options)


@dataclass(frozen=True)
class Arm:
    """One way to train, over the seeds."""

    name: str
    islands: int
    curves: tuple[list[Point], ...]
    """one a seed"""
    rounds: int = 0
    per_round: float = 0.0
    rate: float = 0.0
    """the inner learning rate"""

    @property
    def losses(self) -> list[float]:
        """Held-out bits per byte at the end, one a seed."""
        return [curve[-1].bits_per_byte for curve in self.curves]

    def ratio(self, other: Arm) -> float:
        """Mean over the seeds of this loss to the other's, seed by seed."""
        return fmean(mine / theirs for mine, theirs in zip(self.losses, other.losses, strict=True))


def parity(
    config: RunConfig,
    counts: Sequence[int],
    slow: float,
    output: Path,
    say: Say,
    seeds: Sequence[int] = (),
    tune: bool = False,
) -> dict[str, Any]:
    """Rows for each number of islands and for its baselines, means over the seeds; and the curves as a picture.

    `tune`: baselines take the best of several inner learning rates, found with the first seed; the islands do not.
    """
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    configs = [dataclasses.replace(config, seed=seed) for seed in seeds or (config.seed,)]
    arms: list[Arm] = []
    rows: list[dict[str, Any]] = []
    for count in counts:
        arms += (four := _four(configs, corpus, count, slow, say, tune))
        rows += [_row(arm, four, tune) for arm in four]
    curves = {arm.name: [(p.tokens, p.bits_per_byte) for p in mean_curve(arm.curves)] for arm in arms}
    found = {"config": config.digest(), "slow": slow, "seeds": [c.seed for c in configs], "tuned": tune, "rows": rows,
             "curves": curves, "losses": {arm.name: arm.losses for arm in arms}}  # fmt: skip
    if not can_draw():
        return found
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "parity.png"
    title = f"{config.model.size} model, H = {config.sync.interval}, P = {config.sync.fragments}, {config.data.corpus}"
    draw(picture, title, arms)
    return found | {"picture": str(picture)}


def _four(configs: Sequence[RunConfig], corpus: OpenCorpus, count: int, slow: float, say: Say, tune: bool) -> list[Arm]:
    """The islands, one process, data-parallel and synchronous DiLoCo."""
    ours = [islands(config, corpus, count, slow) for config in configs]
    rounds, per_round = participation(ours[0][1])
    name, rate = f"{count} island{'s' * (count > 1)}", configs[0].inner.peak
    tokens = ours[0][0][-1].tokens
    arms = [Arm(name, count, tuple(points for points, _ in ours), rounds, per_round, rate)]
    _tell(arms[0], say)
    ways: dict[str, Train] = {
        f"one process, {count}× steps": lambda config: one_process(config, corpus, tokens, _quiet),
        f"data-parallel, {count}× batch": lambda config: data_parallel(config, corpus, count, _quiet),
        f"DiLoCo, {count} replicas": lambda config: diloco(config, corpus, count, _quiet),
    }
    for name, train in ways.items():
        arms.append(_baseline(name, count, configs, train, tune))
        _tell(arms[-1], say)
    return arms


def _baseline(name: str, count: int, configs: Sequence[RunConfig], train: Train, tune: bool) -> Arm:
    peak = configs[0].inner.peak
    tried = {peak: train(configs[0])}
    if tune:
        tried |= {peak * factor: train(_at(configs[0], peak * factor)) for factor in TUNING}
    best = min(tried, key=lambda rate: _finite(tried[rate][-1].bits_per_byte))
    return Arm(name, count, (tried[best], *(train(_at(config, best)) for config in configs[1:])), rate=best)


def _at(config: RunConfig, rate: float) -> RunConfig:
    return dataclasses.replace(config, inner=dataclasses.replace(config.inner, learning_rate=rate))


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
    config: RunConfig,
    corpus: OpenCorpus,
    count: int,
    slow: float,
    progress: Progress | None = None,
    slowed: int = 1,
    sending: float = 0.0,
    late: float = 0.0,
) -> tuple[list[Point], VirtualRun]:
    """A run of `count` islands to its end; steps of the last `slowed` take `slow` times longer than the others'.

    And each of their contributions is on its way for `sending` steps of the others. To all islands, what the merger
    says is on its way for `late` of them.
    """
    point = scoring(config, corpus)
    is_slow = [count - number <= slowed < count for number in range(count)]
    seconds = [s * slow if crawls else s for s, crawls in zip(paces(count), is_slow, strict=True)]
    steps, on_the_way = compiled(config.model, config.inner), [sending * crawls for crawls in is_slow]
    run = VirtualRun(config, corpus, steps, seconds, sending_seconds=on_the_way, late_seconds=late)
    trained: dict[str, int] = {}
    points: list[Point] = []

    def note() -> None:
        trained.update({name: island.totals.tokens for name, island in run.islands.items()})
        points.append(point(sum(trained.values()), published(run.transport, run.manifest)[0]))
        (progress or _quiet)(points[-1])

    note()
    for mark in range(1, EVALUATIONS):
        due = config.inner.steps * mark // EVALUATIONS
        run.advance_until(lambda due=due: run.merger.state.step >= due)  # type: ignore[misc]
        note()
    last = dict(run.islands)
    run.finish()
    trained.update({name: island.totals.tokens for name, island in last.items()})
    note()
    return points, run


def participation(run: VirtualRun) -> tuple[int, float]:
    """How many rounds a run had, and the mean number of contributions in one."""
    members = [len(entry.members) for entry in run.transport.reader.tape(1 << 30)]
    return len(members), sum(members) / max(1, len(members))


def staleness(run: VirtualRun) -> tuple[float, int]:
    """Mean and most of what was merged, in versions of a fragment."""
    found = [member.staleness for entry in run.transport.reader.tape(1 << 30) for member in entry.members]
    return sum(found) / max(1, len(found)), max(found, default=0)


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Point by point the mean of tokens and loss."""
    return [
        Point(round(fmean(p.tokens for p in points)), fmean(p.bits_per_byte for p in points))
        for points in zip(*curves, strict=False)
    ]


def draw(path: Path, title: str, arms: Sequence[Arm]) -> None:
    """Held-out bits per byte over tokens: a line an arm, and from the least to the most over the seeds a band."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for arm in arms:
        trained = [curve[1:] for curve in arm.curves]  # the untrained model is far above all
        mean = mean_curve(trained)
        x = [point.tokens / 1e6 for point in mean]
        label = f"{arm.name}: {fmean(arm.losses):.3f}"
        (line,) = axes.plot(x, [point.bits_per_byte for point in mean], marker="o", markersize=3, label=label)
        if len(trained) > 1:
            bands = [[point.bits_per_byte for point in points] for points in zip(*trained, strict=False)]
            axes.fill_between(x, [min(b) for b in bands], [max(b) for b in bands], color=line.get_color(), alpha=0.2)
    axes.set(title=title, xlabel="million tokens (bytes)", ylabel="held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def _quiet(_: Point) -> None:
    pass
