"""The baselines of islands: the same task and tokens without islands. `archipelago up` runs one as a process.

`one process` has an island's batch, and makes as many steps as all islands together. `data-parallel` has M batches a
step, and makes as many steps as one island; it computes the same as synchronous data-parallel over M workers,
except that sums are taken in the order of one machine.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from archipelago.broker.config import RunConfig, from_toml
from archipelago.broker.files import write_atomically
from archipelago.broker.observe.losses import loss_unit, rounded
from archipelago.broker.process import guarded, keep_compiled
from archipelago.broker.ranges import ReadPosition
from archipelago.islands.evaluation import CorpusEvaluation
from archipelago.islands.models.interface import Params
from archipelago.islands.sync.evaluator import mean_of
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import OurTask
from archipelago.islands.tasks.workload import Workload, compiled_steps
from archipelago.ops.experiments.trial import CurvePoint, Progress
from archipelago.ops.launch.init import workload_of
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import WeightFiles

EVALUATIONS = 12
#: With more held-out sequences than this, evaluations would take longer than training, so that there are fewer of them.
LONG_TEXT, EVALUATIONS_OF_LONG_TEXT = 1024, 3
#: Inner steps of one compiled scan.
CHUNK_STEPS = 8


def evaluations(config: RunConfig) -> int:
    """Return how often a run is evaluated after its start."""
    return EVALUATIONS if config.data.held_out_sequences <= LONG_TEXT else EVALUATIONS_OF_LONG_TEXT


class AllShards:
    """The leases of a reader without a run: all shards, pass after pass."""

    def __init__(self) -> None:
        self._positions: Iterator[ReadPosition] = iter(())

    def offer(self, ranges: Sequence[str], /) -> None:
        passes = count() if ranges else ()
        self._positions = (ReadPosition(name, pass_number, 0) for pass_number in passes for name in ranges)

    def lease(self, *, asks: bool = False) -> ReadPosition | None:
        """Return the next shard; None if there are none."""
        return next(self._positions, None)

    def register_shards(self, count: int, /) -> int:
        """Return that number: there are no other islands."""
        return count


class Reader:
    """A reader of a task's data without a run.

    Attributes:
        tokens: The tokens of all batches so far.
    """

    def __init__(self, work: Workload) -> None:
        self._supply = work.supply(TaskRun("reader-0", 0, work.config.seed, AllShards()))
        self.tokens = 0

    def next(self, count: int) -> Any:
        """Return the next batches, stacked."""
        drawn = self._supply.next(count)
        self.tokens += self._supply.tokens
        self._supply.forget([position.range for position in self._supply.positions()[:-1]])  # their passes have ended
        return drawn


def train(work: Workload, workers: int, steps: int, progress: Progress, params: Params | None = None) -> None:
    """Train with the global batch of `workers`, with the schedule stretched over `steps`, from the task's parameters
    or from `params`. Report each evaluation.
    """
    config, model = work.config, work.model
    length = config.inner.steps if model.has_own_optimizer else steps  # a user's schedule is by the clock of the run
    state = work.begin(model.init() if params is None else params)
    inner = work.steps if workers == 1 else compiled_steps(model, config.inner, workers)
    reader, point = Reader(work), scoring(work)
    chunks, wanted = math.ceil(steps / CHUNK_STEPS), evaluations(config)
    marks = {round(chunks * (i + 1) / wanted) for i in range(wanted)}
    progress(point(0, state.params))
    for chunk in range(chunks):
        clock = jnp.asarray(chunk * CHUNK_STEPS * length // steps, jnp.int32)
        left = steps - chunk * CHUNK_STEPS
        batches = reader.next(min(CHUNK_STEPS, left) * workers)
        if workers > 1:
            batches = jax.tree.map(lambda x: x.reshape(-1, workers, *x.shape[1:]), batches)
        state, _ = inner(state, jax.device_put(batches), clock, jnp.asarray(length, jnp.int32))
        if chunk + 1 in marks:
            progress(replace(point(reader.tokens, state.params), share=(chunk + 1) / chunks))


def scoring(work: Workload) -> Callable[[int, Params], CurvePoint]:
    """Return a function that evaluates parameters on held-out data: for our models, on both held-out texts.

    Raises ConfigError (`task.evaluate`) for a task without `evaluate`.
    """
    named = work.named
    if isinstance(named, OurTask):
        of, texts = named.corpus, (named.corpus.valid, named.corpus.test)
        both = [CorpusEvaluation(work.config, of, text) for text in texts]
        return lambda tokens, params: CurvePoint(tokens, *(mean_of(each(params)).bits for each in both))
    evaluation = work.require_evaluation()
    return lambda tokens, params: CurvePoint(tokens, mean_of(evaluation(params)).bits)


def write_curve(work: Workload, tokens: int, output: Path, params: Params | None = None) -> int:
    """Train one process on `tokens`, print each evaluation, and write the curve as JSON at the end."""
    unit, curve, first = loss_unit(work.named.data), list[list[float]](), Reader(work)
    first.next(1)

    def progress(point: CurvePoint) -> None:
        say(f"{point.tokens:>13,} tokens  held-out {rounded(unit.from_evaluation(point.bits_per_byte))} {unit.name}")
        curve.append([point.tokens, point.bits_per_byte])

    train(work, 1, max(1, tokens // first.tokens), progress, params)
    write_atomically(output, json.dumps({"tokens": tokens, "curve": curve}))
    return 0


def main(*, tokens: int, output: Path, config: Path, weights: Path | None = None, task: str | None = None) -> int:
    """Write the curve of a run's config, from the task's first parameters or from weights."""
    keep_compiled()
    work = workload_of(from_toml(config), task, weights)
    return write_curve(work, tokens, output, WeightFiles(weights).load(work.model.tensors) if weights else None)


if __name__ == "__main__":
    sys.exit(guarded(lambda: tyro.cli(main)))
