"""A task with the settings of a run: everything that an island trains.

Our models and users' tasks become a `Workload` in the same way, and an island sees no difference.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from archipelago.broker.config import OWN_MODEL, DataConfig, InnerConfig, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest, balanced, installed_versions
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Supply
from archipelago.islands.evaluation import CorpusEvaluation, Evaluate
from archipelago.islands.inner import InnerState, InnerSteps, accumulated, begin, compiled_scan, descent
from archipelago.islands.models.interface import Params
from archipelago.islands.placement import Placement
from archipelago.islands.sync.evaluator import Measures, mean_of
from archipelago.islands.tasks.batches import TaskBatches, TaskRun
from archipelago.islands.tasks.model import TaskModel
from archipelago.islands.tasks.task import NamedTask, TaskFile
from archipelago.islands.team.jax_team import JaxTeam

#: The peak of the learning rate of a task without an optimiser, if the settings do not give one.
LEARNING_RATE = 1e-3
#: Our worker leaves after this many losses in a row that are not finite. After one, some optimisers skip a step.
DIVERGED_MAX = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """A task with the settings of a run."""

    named: NamedTask
    config: RunConfig
    model: TaskModel
    steps: InnerSteps

    @classmethod
    def of(cls, named: NamedTask, config: RunConfig) -> Workload:
        """Return the workload of a task. Raises ConfigError for a task that is wrong; the code names the part."""
        model = TaskModel(named, config.seed)
        return cls(named, config, model, compiled_steps(model, config.inner))

    def changed(self, **settings: Any) -> Workload:
        """Return the task with other settings, such as another `seed` or section `inner`."""
        config = replace(self.config, **settings)
        return Workload.of(self.named.under(config), config)

    def describe(self, run: str) -> Manifest:
        """Return the manifest of a run that trains this."""
        named, config, tensors = self.named, self.config, tuple(self.model.tensors)
        fragments = balanced(tensors, config.sync.fragments)
        return Manifest(run, config, tensors, fragments, named.data, installed_versions(), task=named.name)

    def begin(self, params: Params) -> InnerState:
        """Return these parameters with fresh state of the inner optimiser."""
        return self.model.first_state(params) if self.model.has_own_optimizer else begin(self.config.inner, params)

    def supply(self, run: TaskRun) -> Supply:
        """Return the batches of an island. Raises ConfigError (`task.batches`) if the task gives none."""
        found = self.named.call("batches", self.named.task.batches, run)
        return found if isinstance(found, Supply) else TaskBatches(self.named, run, found)

    def computation(
        self, manifest: Manifest, placement: Placement | None = None, team: JaxTeam | None = None
    ) -> Computation:
        """Return what an island computes to train this. The arguments are those of `Computation`."""
        has_own_optimizer = self.model.has_own_optimizer
        return Computation(manifest, self.steps, self.begin, placement, has_own_optimizer=has_own_optimizer, team=team)

    def evaluation(self) -> Evaluate | None:
        """Return the evaluation of the task; None if it has none. That of a user has one slice."""
        evaluate = self.named.task.evaluate
        return evaluate if isinstance(evaluate, CorpusEvaluation) else self._evaluated if evaluate else None

    def _evaluated(self, params: Params) -> Iterator[Measures]:
        found = self.model.evaluated(params)
        if more := {key: value for key, value in found.items() if key not in ("loss", "accuracy")}:
            log.info("evaluated: %s", ", ".join(f"{key} {value:.4g}" for key, value in more.items()))
        yield Measures(found["loss"] / math.log(2.0), found.get("accuracy", math.nan))

    def require_evaluation(self) -> Evaluate:
        """Return the evaluation. Raises ConfigError (`task.evaluate`) for a task without one."""
        if (found := self.evaluation()) is None:
            raise self.named.wrong("evaluate", "is missing", "Give it a function from parameters to a held-out loss.")
        return found


@lru_cache(maxsize=64)
def compiled_steps(model: TaskModel, inner: InnerConfig, workers: int = 1) -> InnerSteps:
    """Return the compiled inner steps, once in a process, because compiling takes longer than a short run.

    Args:
        workers: With more than one, each step takes the mean of their gradients. Batches are [n, workers, …] then.
    """
    compute = own = accumulated(model.gradient, inner.micro_batches)
    if workers > 1:
        compute = accumulated(lambda params, one: own(params, jax.tree.map(lambda x: x[0], one)), workers)
    return compiled_scan(compute, model.descent() if model.has_own_optimizer else descent(inner))


def task_config(config: RunConfig, file: TaskFile) -> RunConfig:
    """Return the settings of a run that trains a task. Raises ConfigError (`config.value`) for one without effect."""
    useless = []
    if config.model not in (ModelConfig(), ModelConfig(OWN_MODEL)):
        useless.append("model")
    if config.data != DataConfig():
        useless.append("data")
    inner = config.inner
    if file.task.optimizer is not None and inner != InnerConfig(steps=inner.steps, micro_batches=inner.micro_batches):
        useless.append("inner (apart from inner.steps and inner.micro-batches)")
    if useless:
        raise ConfigError(
            f"the settings of {' and of '.join(useless)} would change nothing: the task {file.name!r} has its own",
            f"Leave them out, or change {file.path}.",
            code="config.value",
        )
    if file.task.optimizer is None and inner.learning_rate is None:
        inner = replace(inner, learning_rate=LEARNING_RATE)
    return replace(config, model=ModelConfig(OWN_MODEL), inner=inner)


def require_trainable(work: Workload) -> None:
    """Draw some batches of a task, trace its loss and its optimiser, and compute the loss of its first parameters.

    Raises ConfigError if a part of the task is wrong. The code names the part.
    """
    params = work.model.init()
    batches = work.supply(TaskRun("check", 0)).sample(DIVERGED_MAX)
    batch = jax.tree.map(lambda x_n: x_n[:1], batches)
    # The loss names itself where it fails. What remains is an optimiser whose new state is not like its old one.
    state, part = jax.eval_shape(work.begin, params), "optimizer" if work.model.has_own_optimizer else "loss"
    work.named.call(part, jax.eval_shape, work.steps, state, batch, np.int32(0), np.int32(1))

    def objective(params: Params, one: Any) -> jax.Array:
        parts = work.config.inner.micro_batches
        return accumulated(lambda _, part: ({}, work.model.objective(params, part)[0]), parts)({}, one)[1]

    # All arrays are arguments: in the program they would be constants, which take memory and time to compile.
    all_losses = jax.jit(lambda params, batches: jax.lax.map(lambda one: objective(params, one), batches))
    with suppress(jax.errors.JaxRuntimeError):  # one device may lack the memory that an island's mesh has
        losses = all_losses(params, batches).tolist()
        if not any(map(math.isfinite, losses)):
            remedy = "Training would end at once. Does it divide by zero, or take a logarithm or a root of zero?"
            raise work.named.wrong("loss", f"is {losses[0]} for the first parameters and batches", remedy)
    if (evaluation := work.evaluation()) is not None:
        mean_of(evaluation(params))
