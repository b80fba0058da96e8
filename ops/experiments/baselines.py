"""The baselines of islands: the same model, data and tokens without islands.

`one process` has an island's batch, and makes as many steps as all islands together. `data-parallel` has M batches a
step, and makes as many steps as one island; it computes the same as synchronous data-parallel over M workers,
except that sums are taken in the order of one machine. `DiLoCo` (arXiv 2311.08105) has M replicas, which make H steps
each from the same parameters, on separate shards, and keep their inner optimiser state. Then each replica waits for all
others, and one Nesterov step follows on the plain average of their parameters.
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


@cache
def compiled(model: str | ModelConfig, inner: InnerConfig) -> InnerSteps:
    """Return inner steps, compiled once per process, because compiling takes longer than a short run."""
    return compile_steps(build(model), inner)


def one_process(
    config: RunConfig, corpus: OpenCorpus, tokens: int, progress: Progress, params: Params | None = None
) -> list[Point]:
    """Train one process on `tokens`, with the schedule stretched over them. Begin with `params` if given."""
    steps = max(1, tokens // config.tokens_per_step)
    stretched = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=steps))
    return list(_train(stretched, corpus, steps, progress, params))


def data_parallel(config: RunConfig, corpus: OpenCorpus, workers: int, progress: Progress) -> list[Point]:
    """Train with the global batch of `workers`, for as many steps as each of them would make."""
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
    """Train replicas in lockstep for `config.inner.steps` each, with a sync every `config.sync.interval` steps."""
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
    chunks, count = max(1, steps // CHUNK_STEPS), evaluations(config)
    marks = {round(chunks * (i + 1) / count) for i in range(count)}
    yield _reported(point(0, state.params), progress)
    for chunk in range(chunks):
        done = chunk * CHUNK_STEPS
        state, _ = inner(state, jnp.asarray(batches.next(CHUNK_STEPS)), jnp.asarray(done, jnp.int32))
        if chunk + 1 in marks:
            trained = (done + CHUNK_STEPS) * config.tokens_per_step
            yield _reported(point(trained, state.params), progress)


def _diloco(
    config: RunConfig, corpus: OpenCorpus, workers: int, outer: optax.GradientTransformation, progress: Progress
) -> Iterator[Point]:
    params = build(config.model).init(config.seed)
    inner, point = compiled(config.model, config.inner), scoring(config, corpus)
    moments = [begin(config.inner, params).optimizer for _ in range(workers)]
    leases = [lease_share(config.data.shards, config.seed, worker, workers) for worker in range(workers)]
    batches = [Batches(corpus.train, config, lease) for lease in leases]
    momentum = outer.init(params)
    steps, done, count = config.inner.steps, 0, evaluations(config)
    yield _reported(point(0, params), progress)
    while done < steps:
        n = min(config.sync.interval, steps - done)
        replicas: list[Params] = []
        for worker in range(workers):
            state = InnerState(jax.tree.map(jnp.array, params), moments[worker])  # The steps donate their input.
            state, _ = inner(state, jnp.asarray(batches[worker].next(n)), jnp.asarray(done, jnp.int32))
            moments[worker] = state.optimizer
            replicas.append(state.params)
        delta = {name: params[name] - sum(r[name] for r in replicas) / workers for name in params}
        updates, momentum = outer.update(delta, momentum, params)
        params = optax.apply_updates(params, updates)
        before, done = done, done + n
        if done * count // steps > before * count // steps:
            yield _reported(point(done * config.tokens_per_step * workers, params), progress)


def scoring(config: RunConfig, corpus: OpenCorpus) -> Callable[[int, Params], Point]:
    """Return a function that evaluates parameters on the run's share of both held-out texts."""
    valid, test = (compile_validation(config, corpus, text) for text in (corpus.valid, corpus.test))
    return lambda tokens, params: Point(tokens, valid(params), test(params))


def _reported(point: Point, progress: Progress) -> Point:
    progress(point)
    return point
