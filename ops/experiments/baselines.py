"""What the islands are measured against: the same model, data and tokens without islands.

`one process`: an island's batch, as many steps as all islands made together. `data-parallel`: M batches a step, as
many steps as one island made; what synchronous data-parallel over M workers computes, to the bit of one machine's sums.
`DiLoCo` (arXiv 2311.08105): M replicas make H steps each from the same parameters, on shards of their own and with
inner optimiser state that they keep; all wait for all; then one Nesterov step on the plain average of all parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import optax

from archipelago.broker.config import InnerConfig, ModelConfig, RunConfig
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import lease_all, lease_share
from archipelago.islands.evaluation import compile_validation
from archipelago.islands.inner import InnerState, InnerSteps, begin, compile_steps
from archipelago.islands.models.registry import Params, build

EVALUATIONS = 12
CHUNK_STEPS = 8
"""inner steps of one compiled scan"""
DILOCO_RATE, DILOCO_MOMENTUM = 0.7, 0.9
"""what the paper found"""


@dataclass(frozen=True)
class Point:
    """One evaluation on the way."""

    tokens: int
    bits_per_byte: float
    """of the validation text, which rates and rules are chosen by"""
    test_bits_per_byte: float = math.nan
    """of the test text, which nothing is chosen by"""


Progress = Callable[[Point], None]


@cache
def compiled(model: str | ModelConfig, inner: InnerConfig) -> InnerSteps:
    """Inner steps, compiled once a process: whoever measures many runs would wait for little else."""
    return compile_steps(build(model), inner)


def one_process(
    config: RunConfig, corpus: OpenCorpus, tokens: int, progress: Progress, params: Params | None = None
) -> list[Point]:
    """Trains alone, with the schedule stretched over the steps that so many tokens take; from `params`, if any."""
    steps = max(1, tokens // config.tokens_per_step)
    stretched = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=steps))
    return list(_train(stretched, corpus, steps, progress, params))


def data_parallel(config: RunConfig, corpus: OpenCorpus, workers: int, progress: Progress) -> list[Point]:
    """Trains with the global batch of so many workers, for as many steps as each of them would make."""
    data = dataclasses.replace(config.data, batch_size=config.data.batch_size * workers)
    return list(_train(dataclasses.replace(config, data=data), corpus, config.inner.steps, progress))


def diloco(
    config: RunConfig,
    corpus: OpenCorpus,
    workers: int,
    progress: Progress,
    rate: float = DILOCO_RATE,
    momentum: float = DILOCO_MOMENTUM,
) -> list[Point]:
    """Trains so many replicas in step, each for `config.inner.steps`, with a sync every `config.sync.interval`."""
    return list(_diloco(config, corpus, workers, optax.sgd(rate, momentum=momentum, nesterov=True), progress))


def _train(
    config: RunConfig, corpus: OpenCorpus, steps: int, progress: Progress, params: Params | None = None
) -> Iterator[Point]:
    inner, state = (
        compiled(config.model, config.inner),
        begin(config.inner, params or build(config.model).init(config.seed)),
    )
    batches = Batches(corpus.train, config, lease_all(config.data.shards, config.seed))
    point = scoring(config, corpus)
    chunks = max(1, steps // CHUNK_STEPS)
    marks = {round(chunks * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    yield _told(point(0, state.params), progress)
    for chunk in range(chunks):
        done = chunk * CHUNK_STEPS
        state, _ = inner(state, jnp.asarray(batches.next(CHUNK_STEPS)), jnp.asarray(done, jnp.int32))
        if chunk + 1 in marks:
            trained = (done + CHUNK_STEPS) * config.tokens_per_step
            yield _told(point(trained, state.params), progress)


def _diloco(
    config: RunConfig, corpus: OpenCorpus, workers: int, outer: optax.GradientTransformation, progress: Progress
) -> Iterator[Point]:
    params = build(config.model).init(config.seed)
    inner, point = compiled(config.model, config.inner), scoring(config, corpus)
    moments = [begin(config.inner, params).optimizer for _ in range(workers)]
    leases = [lease_share(config.data.shards, config.seed, worker, workers) for worker in range(workers)]
    batches = [Batches(corpus.train, config, lease) for lease in leases]
    momentum = outer.init(params)
    steps, done = config.inner.steps, 0
    yield _told(point(0, params), progress)
    while done < steps:
        n = min(config.sync.interval, steps - done)
        replicas: list[Params] = []
        for worker in range(workers):
            state = InnerState(jax.tree.map(jnp.array, params), moments[worker])  # a copy: the steps use it up
            state, _ = inner(state, jnp.asarray(batches[worker].next(n)), jnp.asarray(done, jnp.int32))
            moments[worker] = state.optimizer
            replicas.append(state.params)
        delta = {name: params[name] - sum(r[name] for r in replicas) / workers for name in params}
        updates, momentum = outer.update(delta, momentum, params)
        params = optax.apply_updates(params, updates)
        before, done = done, done + n
        if done * EVALUATIONS // steps > before * EVALUATIONS // steps:
            yield _told(point(done * config.tokens_per_step * workers, params), progress)


def scoring(config: RunConfig, corpus: OpenCorpus) -> Callable[[int, Params], Point]:
    """From tokens trained on and parameters to a point, over the run's share of both held-out texts."""
    valid, test = (compile_validation(config, corpus, text) for text in (corpus.valid, corpus.test))
    return lambda tokens, params: Point(tokens, valid(params), test(params))


def _told(point: Point, progress: Progress) -> Point:
    progress(point)
    return point
