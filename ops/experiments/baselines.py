"""The baselines of islands: the same task and tokens without islands.

`one process` has an island's batch, and makes as many steps as all islands together. `data-parallel` has M batches a
step, and makes as many steps as one island; it computes the same as synchronous data-parallel over M workers,
except that sums are taken in the order of one machine. `DiLoCo` (arXiv 2311.08105) has M replicas, which make H steps
each from the same parameters, on separate shards, and keep their inner optimiser state. Then each replica waits for all
others, and one Nesterov step follows on the plain average of their parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import optax

from archipelago.broker.config import RunConfig
from archipelago.broker.corpus_shards import Place
from archipelago.islands.evaluation import compile_validation, measured
from archipelago.islands.inner import InnerState
from archipelago.islands.models.interface import Params
from archipelago.islands.tasks.ours import OurTask
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.tasks.workload import Workload, compiled_steps

EVALUATIONS = 12
#: With more held-out sequences than this, evaluations would take longer than training, so that there are fewer of them.
LONG_TEXT, EVALUATIONS_OF_LONG_TEXT = 1024, 3
#: Inner steps of one compiled scan.
CHUNK_STEPS = 8
#: The paper's best settings.
DILOCO_RATE, DILOCO_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Point:
    """One evaluation of a run.

    Attributes:
        tokens: Tokens trained on so far.
        bits_per_byte: Loss on the validation text, which is used to choose rates and rules.
        test_bits_per_byte: Loss on the test text, which is not used for any choice.
    """

    tokens: int
    bits_per_byte: float
    test_bits_per_byte: float = math.nan


Progress = Callable[[Point], None]


def evaluations(config: RunConfig) -> int:
    """Return how often a run is evaluated after its start."""
    return EVALUATIONS if config.data.held_out_sequences <= LONG_TEXT else EVALUATIONS_OF_LONG_TEXT


class AllShards:
    """The leases of one of several readers that divide all shards, pass after pass. The others are not asked."""

    is_started = False

    def __init__(self, number: int = 0, of: int = 1) -> None:
        self._number, self._of = number, of
        self._places: Iterator[Place] = iter(())

    def offer(self, shards: Sequence[str], /) -> None:
        """Take every `of`-th shard."""
        mine = shards[self._number :: self._of]
        self._places = (Place(shard, pass_number, 0) for pass_number in (count() if mine else ()) for shard in mine)

    def lease(self) -> Place | None:
        """Return the next shard; None for a reader without any."""
        return next(self._places, None)

    def register_shards(self, count: int, /) -> int:
        """Return that number: there are no other islands."""
        return count


class Reader:
    """One of several readers of a task's data, without a run.

    Attributes:
        tokens: The tokens of all batches so far.
    """

    def __init__(self, work: Workload, number: int = 0, of: int = 1) -> None:
        self._supply = work.supply(TaskRun(f"reader-{number}", number, work.config.seed, AllShards(number, of)))
        self.tokens = 0

    def next(self, count: int) -> Any:
        """Return the next batches, stacked."""
        drawn = self._supply.next(count)
        self.tokens += self._supply.tokens
        self._supply.forget([place.shard for place in self._supply.places() if place.ended])
        return drawn


def tokens_per_step(work: Workload) -> int:
    """Return the tokens of the first batch of a task."""
    reader = Reader(work)
    reader.next(1)
    return reader.tokens


def one_process(work: Workload, tokens: int, progress: Progress, params: Params | None = None) -> list[Point]:
    """Train one process on `tokens`, with the schedule stretched over them. Begin with `params` if given."""
    return list(_train(work, 1, max(1, tokens // tokens_per_step(work)), progress, params))


def data_parallel(work: Workload, workers: int, progress: Progress, steps: int = 0) -> list[Point]:
    """Train with the global batch of `workers`, for as many steps as each of them would make, or for `steps`."""
    return list(_train(work, workers, steps or work.config.inner.steps, progress))


def diloco(
    work: Workload,
    workers: int,
    progress: Progress,
    rate: float = DILOCO_RATE,
    momentum: float = DILOCO_MOMENTUM,
) -> list[Point]:
    """Train replicas in lockstep for `inner.steps` each, with a sync every `sync.interval` steps."""
    return list(_diloco(work, workers, optax.sgd(rate, momentum=momentum, nesterov=True), progress))


def _train(
    work: Workload, workers: int, steps: int, progress: Progress, params: Params | None = None
) -> Iterator[Point]:
    if not work.model.has_own_optimizer:
        work = work.changed(inner=dataclasses.replace(work.config.inner, steps=steps))
    config, model = work.config, work.model
    state = work.begin(model.init() if params is None else params)
    inner = work.steps if workers == 1 else compiled_steps(model, config.inner, workers)
    reader, point = Reader(work), scoring(work)
    chunks, wanted = max(1, steps // CHUNK_STEPS), evaluations(config)
    marks = {round(chunks * (i + 1) / wanted) for i in range(wanted)}
    yield _reported(point(0, state.params), progress)
    for chunk in range(chunks):
        clock = chunk * CHUNK_STEPS * config.inner.steps // steps  # a user's schedule is by the clock of the run
        batches = reader.next(CHUNK_STEPS * workers)
        if workers > 1:
            batches = jax.tree.map(lambda x: x.reshape(CHUNK_STEPS, workers, *x.shape[1:]), batches)
        state, _ = inner(state, jax.device_put(batches), jnp.asarray(clock, jnp.int32))
        if chunk + 1 in marks:
            yield _reported(point(reader.tokens, state.params), progress)


def _diloco(work: Workload, workers: int, outer: optax.GradientTransformation, progress: Progress) -> Iterator[Point]:
    config, params = work.config, work.model.init()
    point, readers = scoring(work), [Reader(work, worker, workers) for worker in range(workers)]
    moments = [work.begin(params).optimizer for _ in range(workers)]
    momentum = outer.init(params)
    steps, done, wanted = config.inner.steps, 0, evaluations(config)
    yield _reported(point(0, params), progress)
    while done < steps:
        n = min(config.sync.interval, steps - done)
        replicas: list[Params] = []
        for worker in range(workers):
            state = InnerState(jax.tree.map(jnp.array, params), moments[worker])  # The steps donate their input.
            state, _ = work.steps(state, jax.device_put(readers[worker].next(n)), jnp.asarray(done, jnp.int32))
            moments[worker] = state.optimizer
            replicas.append(state.params)
        delta = {name: params[name] - sum(r[name] for r in replicas) / workers for name in params}
        updates, momentum = outer.update(delta, momentum, params)
        params = optax.apply_updates(params, updates)
        before, done = done, done + n
        if done * wanted // steps > before * wanted // steps:
            yield _reported(point(sum(reader.tokens for reader in readers), params), progress)


def scoring(work: Workload) -> Callable[[int, Params], Point]:
    """Return a function that evaluates parameters on held-out data: for our models, on both held-out texts.

    Raises:
        ConfigError: The task has no `evaluate` (`task.evaluate`).
    """
    named = work.named
    if isinstance(named, OurTask):
        valid, test = (
            compile_validation(work.config, named.corpus, t) for t in (named.corpus.valid, named.corpus.test)
        )
        return lambda tokens, params: Point(tokens, valid(params), test(params))
    compiled = work.require_evaluation()
    return lambda tokens, params: Point(tokens, measured(compiled(params), params).bits)


def _reported(point: Point, progress: Progress) -> Point:
    progress(point)
    return point
