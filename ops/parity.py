"""Loss at equal tokens: islands in virtual time against one process and against data-parallel.

Exact in everything but the wall clock: the real islands and merger, every contribution through the real codec, with
step times that the clock is told. One seed: a difference under about one per cent says little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker.config import RunConfig
from islands.batches import held_out
from islands.corpus import OpenCorpus, open_corpus
from islands.evaluation import compile_evaluation, published
from islands.inner import compile_steps
from islands.model import build
from ops import report
from ops.baselines import EVALUATIONS, Point, data_parallel, one_process
from ops.virtual import VirtualRun

Say = Callable[[str], None]


def parity(config: RunConfig, counts: Sequence[int], slow: float, output: Path, say: Say) -> dict[str, Any]:
    """A row for each number of islands and for each of their two baselines, and the curves as a picture."""
    corpus = open_corpus(config.data.corpus)
    rows: list[dict[str, Any]] = []
    curves: dict[str, list[tuple[int, float]]] = {}

    def keep(name: str, points: Sequence[Point], rounds: int, islands_per_round: float) -> float:
        curves[name] = [(p.tokens, p.bits_per_byte) for p in points]
        rows.append({"what": name, "tokens": points[-1].tokens, "bits_per_byte": points[-1].bits_per_byte,
                     "rounds": rounds, "per_round": islands_per_round})  # fmt: skip
        say(f"{name}: {points[-1].bits_per_byte:.4f} bits per byte after {points[-1].tokens:,} tokens")
        return points[-1].bits_per_byte

    for count in counts:
        points, run = islands(config, corpus, count, slow)
        members = [len(entry.members) for entry in run.transport.tape(1 << 30)]
        ours = keep(f"{count} island{'s' * (count > 1)}", points, len(members), sum(members) / max(1, len(members)))
        alone = keep(f"one process, {count}× steps", one_process(config, corpus, points[-1].tokens, _quiet), 0, 0.0)
        parallel = keep(f"data-parallel, {count}× batch", data_parallel(config, corpus, count, _quiet), 0, 0.0)
        rows[-3] |= {"to_one": ours / alone, "to_parallel": ours / parallel}
        for row in rows[-2:]:
            row |= {"to_one": row["bits_per_byte"] / alone, "to_parallel": row["bits_per_byte"] / parallel}
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "parity.png"
    title = f"{config.model.size} model, H = {config.sync.interval}, P = {config.sync.fragments}, {config.data.corpus}"
    report.draw(picture, title, curves)
    return {"config": config.digest(), "slow": slow, "rows": rows, "curves": curves, "picture": str(picture)}


def islands(config: RunConfig, corpus: OpenCorpus, count: int, slow: float) -> tuple[list[Point], VirtualRun]:
    """A run of `count` islands to its end; the last one's steps take `slow` times longer than the others'."""
    model = build(config.model.size)
    text = held_out(corpus.valid, config.data.held_out_sequences, config.data.sequence_length)
    measure = compile_evaluation(model, text)
    # Speeds within 2 % of each other: machines that tick in unison exist only in simulations.
    seconds = [1.0 + 0.02 * number / max(1, count - 1) for number in range(count)]
    seconds[-1] *= slow if count > 1 else 1.0
    run = VirtualRun(config, corpus, compile_steps(model, config.inner), seconds)
    trained: dict[str, int] = {}

    def point() -> Point:
        trained.update({name: island.totals.tokens for name, island in run.islands.items()})
        return Point(sum(trained.values()), measure(published(run.transport, run.manifest)[0]))

    points = [point()]
    for mark in range(1, EVALUATIONS):
        due = config.inner.steps * mark // EVALUATIONS
        run.advance_until(lambda due=due: run.merger.state.step >= due)  # type: ignore[misc]
        points.append(point())
    last = dict(run.islands)
    run.finish()
    trained.update({name: island.totals.tokens for name, island in last.items()})
    return [*points, point()], run


def _quiet(_: Point) -> None:
    pass
