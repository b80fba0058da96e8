"""`archipelago bench time`: time to loss where one machine is slow, for islands and for methods that wait for all.

Time is virtual, and its unit is an inner step of a fast machine. Every method trains on the same number of tokens, with
a learning rate schedule that ends with them. So they take different times, and we compare time and final loss.
Scavenged islands are fast ones that join after a quarter of the run and leave after three quarters (Decoupled DiLoCo,
section 5.4: +25 to +300 % of the islands). They have a second run that takes as long as without them, on more tokens.
Synchronous DiLoCo and data-parallel make each step at the speed of the slowest machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.files import make_untracked
from archipelago.broker.process import keep_compiled
from archipelago.islands.creation import fitted
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.evaluation import published
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.baselines import DILOCO_RATE, EVALUATIONS, Point, data_parallel, diloco, scoring
from archipelago.ops.experiments.settings import require_counts, require_slow, shortened
from archipelago.ops.experiments.virtual_time import VirtualRun, paces
from archipelago.ops.plots import can_draw
from archipelago.ops.settings import say
from archipelago.ops.watch.run_summary import draw

#: Scavenged islands take part between these shares of the run.
JOIN_AT, LEAVE_AT = 0.25, 0.75
#: The best momentum of synchronous DiLoCo among those in `studies/outer.toml`.
TUNED_MOMENTUM = 0.7


@dataclass(frozen=True)
class TimeOptions(OutputOptions):
    """Compare time to loss, in virtual time, where one machine is slow: islands against methods that wait for all."""

    islands: int = 3
    """The number of islands."""
    slow: float = 1.0
    """The last island's steps take this many times longer."""
    scavenged: tuple[int, ...] = (3,)
    """How many islands join for the middle half of the run. One run for each number."""
    seeds: tuple[int, ...] = ()
    """The seeds to take means and spreads over, such as 0 1 2. The default is the settings' own."""
    quick: bool = False
    """Train for 400 global steps only."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: TimeOptions) -> int:
    """Compare, and write the results."""
    config = checked(options.settings)
    require_counts("--islands", [options.islands])
    require_counts("--scavenged", options.scavenged)
    require_slow(options.slow)
    keep_compiled()
    config = shortened(config) if options.quick else config
    seeds = options.seeds or (config.seed,)
    found = time_to_loss(config, options.islands, options.slow, options.scavenged, seeds, options.output, say)
    return finish("time", found, options)


@dataclass(frozen=True)
class Mark:
    """One evaluation of a run, in virtual seconds, tokens and bits per byte."""

    seconds: float
    tokens: int
    bits_per_byte: float


Curve = Sequence[Mark]
Say = Callable[[str], None]
Train = Callable[[Workload], list[Mark]]


def time_to_loss(
    config: RunConfig,
    count: int,
    slow: float,
    scavenged: Sequence[int],
    seeds: Sequence[int],
    output: Path,
    say: Say,
) -> dict[str, Any]:
    """Compare ways to train on `count · inner.steps` batches.

    Args:
        config: The run's config.
        count: The number of islands, replicas or workers.
        slow: How many times longer the steps of the last one take.
        scavenged: For each number, a run with that many additional islands.
        seeds: Seeds to take means over.
        output: Folder for the picture.
        say: Prints a line of progress.

    Returns:
        Plain data with `rows`. `time` is the mean over the seeds; `time_to_target` is when the mean curve reaches the
        best loss that every way reaches.
    """
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    ways: dict[str, Train] = {
        f"data-parallel, {count} workers": lambda w: _waiting(w, slow, count, data_parallel),
        f"DiLoCo, {count} replicas": lambda w: _waiting(w, slow, count, _diloco),
        f"{count} islands": lambda w: islands(w, count, slow),
    }
    for extra in scavenged:
        name = f"{count} islands, {extra} more for half of the run"
        ways[name] = lambda w, extra=extra: islands(w, count, slow, extra)  # type: ignore[misc]
        length = global_steps(config.inner.steps, count, slow)
        ways[f"{name}, as long as without"] = lambda w, extra=extra, length=length: islands(  # type: ignore[misc]
            w, count, slow, extra, length
        )
    curves: dict[str, list[list[Mark]]] = {}
    for name, train in ways.items():
        curves[name] = [train(our_work(dataclasses.replace(config, seed=seed), corpus)) for seed in seeds]
        ends = [curve[-1] for curve in curves[name]]
        say(f"{name}: {fmean(m.bits_per_byte for m in ends):.4f} bits per byte after a time of {ends[0].seconds:,.0f}")
    means = {name: mean(each) for name, each in curves.items()}
    target = max(min(mark.bits_per_byte for mark in curve) for curve in means.values())
    synchronous = means[f"DiLoCo, {count} replicas"][-1]
    rows = [_row(name, curves[name], means[name], target, synchronous) for name in ways]
    found = {"config": config.digest(), "slow": slow, "seeds": list(seeds), "target": target, "rows": rows,
             "curves": {n: [[m.seconds, m.tokens, m.bits_per_byte] for m in c] for n, c in means.items()}}  # fmt: skip
    if not can_draw():
        return found
    make_untracked(output)
    picture = output / "time.png"
    title = f"one of {count} machines {slow:g}× slower: {config.model.size}, {config.data.corpus}"
    losses = {name: [(mark.seconds, mark.bits_per_byte) for mark in curve] for name, curve in means.items()}
    draw(picture, title, losses, "time, in inner steps of a fast machine", unit=1.0)
    return found | {"picture": str(picture)}


def _diloco(work: Workload, workers: int, note: Callable[[Point], None]) -> list[Point]:
    return diloco(work, workers, note, DILOCO_RATE, TUNED_MOMENTUM)


def _waiting(work: Workload, slow: float, count: int, train: Callable[..., Any]) -> list[Mark]:
    """Train with a method that waits for all, so that each step takes as long as the slowest machine's."""
    points = train(work, count, lambda _: None)
    per_step = work.config.tokens_per_step * count
    return [Mark(p.tokens / per_step * slow, p.tokens, p.bits_per_byte) for p in points]


def global_steps(steps: int, count: int, slow: float, scavenged: int = 0) -> int:
    """Return the steps of the fastest island, and so the time, until all have made `count · steps` together."""
    return round(steps * count / (count - 1 + 1 / slow + scavenged * (LEAVE_AT - JOIN_AT)))


def islands(work: Workload, count: int, slow: float, scavenged: int = 0, length: int = 0) -> list[Mark]:
    """Play a run of islands, the last of which is slow, on the tokens of `count · inner.steps` batches.

    Args:
        work: What they train.
        count: The number of islands.
        slow: How many times longer the steps of the last island take.
        scavenged: The number of scavenged islands.
        length: Steps of the fastest island to play instead, on as many tokens as that takes; 0 for the above.
    """
    inner, measure = work.config.inner, scoring(work)
    length = length or global_steps(inner.steps, count, slow, scavenged)
    seconds = paces(count)
    seconds[-1] *= slow
    run = VirtualRun(work.changed(inner=dataclasses.replace(inner, steps=length)), seconds)
    trained: dict[str, int] = {}
    marks: list[Mark] = []

    def count_tokens() -> None:
        trained.update({name: island.totals.tokens for name, island in run.islands.items()})

    def note() -> None:
        count_tokens()
        found = measure(sum(trained.values()), published(run.transport, run.manifest)[0])
        marks.append(Mark(run.clock.now, found.tokens, found.bits_per_byte))

    def join() -> None:
        for number in range(scavenged):
            run.add_island(f"scavenged-{number}", 1.0 + 0.02 * number / max(1, scavenged), "peer")

    def leave() -> None:
        for number in range(scavenged):
            run.remove_island(f"scavenged-{number}", farewell=True)

    agenda = [(length * mark / EVALUATIONS, note) for mark in range(EVALUATIONS)]
    agenda += [(length * JOIN_AT, join), (length * LEAVE_AT, leave)] if scavenged else []
    for due, act in sorted(agenda, key=lambda each: each[0]):
        run.advance_until(lambda due=due: run.clock.now >= due)  # type: ignore[misc]
        count_tokens()
        act()
    last = dict(run.islands)
    run.finish()
    trained.update({name: island.totals.tokens for name, island in last.items()})
    note()
    return marks


def mean(curves: Sequence[Curve]) -> list[Mark]:
    """Return the mean curve over the seeds, point by point."""

    def average(marks: Sequence[Mark]) -> Mark:
        tokens, bits_per_byte = fmean(m.tokens for m in marks), fmean(m.bits_per_byte for m in marks)
        return Mark(fmean(m.seconds for m in marks), round(tokens), bits_per_byte)

    return [average(marks) for marks in zip(*curves, strict=False)]


def time_at(curve: Curve, target: float) -> float:
    """Return when the curve first reaches a loss, by linear interpolation; infinity if it never does."""
    if curve[0].bits_per_byte <= target:
        return curve[0].seconds
    for before, after in pairwise(curve):
        if after.bits_per_byte <= target:
            share = (before.bits_per_byte - target) / (before.bits_per_byte - after.bits_per_byte)
            return before.seconds + share * (after.seconds - before.seconds)
    return math.inf


def _row(name: str, curves: Sequence[Curve], average: Curve, target: float, synchronous: Mark) -> Mapping[str, Any]:
    ends = [curve[-1].bits_per_byte for curve in curves]
    return {
        "what": name,
        "tokens": average[-1].tokens,
        "time": average[-1].seconds,
        "time_to_target": time_at(average, target),
        "bits_per_byte": fmean(ends),
        **({"spread": stdev(ends)} if len(ends) > 1 else {}),
        "time_to_diloco": average[-1].seconds / synchronous.seconds,
        "loss_to_diloco": fmean(ends) / synchronous.bits_per_byte,
    }
