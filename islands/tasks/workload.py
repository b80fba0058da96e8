"""A task as a workload of our worker: its parameters by name, its inner steps, its batches and its evaluation.

The worker keeps the floating-point leaves of the user's tree by name, in float32. The user's functions get the tree.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from archipelago.broker.config import OWN_MODEL, DataConfig, InnerConfig, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.manifest import NO_CORPUS, Manifest, installed_versions, synced
from archipelago.broker.transport import IslandTransport
from archipelago.islands.data.supply import Supply
from archipelago.islands.evaluation import Measures, Slices
from archipelago.islands.inner import (
    Descent,
    InnerState,
    InnerSteps,
    MomentBounds,
    begin,
    compiled_scan,
    descent,
)
from archipelago.islands.models.interface import Params
from archipelago.islands.own_loop.tensors import kinds_by, require_same_tensors
from archipelago.islands.own_loop.tree import TreeLayout
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.tasks.batches import TaskBatches
from archipelago.islands.tasks.file import TaskFile
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.workload import Workload, number_of

#: The peak of the learning rate of a task without an optimiser, if the settings do not give one.
LEARNING_RATE = 1e-3

log = logging.getLogger(__name__)


class TaskModel:
    """The model of a task: its tensors, and its functions of parameters by name.

    Attributes:
        file: The task.
        tensors: The tensors that are trained and merged.
    """

    def __init__(self, file: TaskFile, seed: int) -> None:
        """Call `init`, and keep the names and shapes of what it returns.

        Raises:
            ConfigError: `init` failed (`task.init`), or its tree cannot be merged (`loop.nothing`, `loop.unnamed`,
                `loop.dtype`).
        """
        self.file, self._seed = file, seed
        self._layout = TreeLayout.of(file.call("init", file.task.init, seed))
        self.tensors = self._layout.tensors(kinds_by(file.task.kinds))

    def init(self) -> Params:
        """Return the first parameters by name. Raises DivergedError (`loop.not-finite`) for NaN or infinity."""
        found = self._layout.leaves_of(self.file.call("init", self.file.task.init, self._seed))
        params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in found.items()}
        for name, leaf in params.items():
            if not bool(jnp.isfinite(leaf).all()):
                raise DivergedError(
                    f"init of the task {self.file.name!r} gives NaN or infinity in {name!r}",
                    "Initialise the parameters otherwise.",
                    code="loop.not-finite",
                )
        return dict(sorted(params.items()))

    def tree(self, params: Mapping[str, Any]) -> Any:
        """Return the user's tree with these parameters, in the dtypes of `init`."""
        layout = self._layout
        own = {name: params[name].astype(template.dtype) for name, template in layout.templates.items()}
        leaves = {**layout.own, **own}
        return jax.tree.unflatten(layout.structure, [leaves[name] for name in layout.names])

    def trained_tree(self, params: Mapping[str, Any]) -> Any:
        """Return the user's tree of what is trained, in float32. Leaves that are not trained are None."""
        layout = self._layout
        return jax.tree.unflatten(layout.structure, [params.get(name) for name in layout.names])

    def objective(self, params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the value that training minimises, and the loss that it reports. They differ by the penalty.

        Raises:
            ConfigError: The user's loss failed, or is no scalar (`task.loss`).
        """
        found = self.file.call("loss", self.file.task.loss, self.tree(params), batch)
        loss, penalty = found if isinstance(found, tuple) and len(found) == 2 else (found, 0.0)
        for value in (loss, penalty):
            shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", jnp.float32)
            if shape != () or not jnp.issubdtype(dtype, jnp.floating) or not hasattr(value, "__float__"):
                said = f"{dtype}{list(shape)}" if hasattr(value, "shape") else repr(type(value).__name__)
                raise self.file.wrong(
                    "loss",
                    f"gives {said}, and no scalar",
                    "Return a floating-point scalar, such as a mean, or a pair of a loss and a penalty.",
                )
        loss, penalty = (jnp.asarray(value).astype(jnp.float32) for value in (loss, penalty))
        return loss + penalty, loss

    def gradient(self, params: Params, batch: Any) -> tuple[Params, jax.Array]:
        """Return the gradients of the objective by name, and the loss."""
        differentiated = jax.value_and_grad(self.objective, has_aux=True)
        (_, loss), gradients = self.file.call("loss", differentiated, params, batch)  # the way back may fail, too
        return gradients, loss

    # -- the optimiser ------------------------------------------------------------------------------------------------

    def first_state(self, params: Params) -> InnerState:
        """Return these parameters with fresh state of the user's optimiser, as a tuple of its arrays."""
        return InnerState(params, tuple(jax.tree.leaves(self._init_optimizer(params))))

    def _init_optimizer(self, params: Params) -> Any:
        optimizer = self.file.task.optimizer
        return self.file.call("optimizer", optimizer.init, self.trained_tree(params))

    def descent(self) -> Descent:
        """Return the step of the user's optimiser. Its schedules follow the run's clock."""

        def descend(
            state: InnerState, gradients: Params, global_step: jax.Array, length: jax.Array | None = None, /
        ) -> InnerState:
            structure = jax.tree.structure(jax.eval_shape(self._init_optimizer, state.params))
            before = at_step(jax.tree.unflatten(structure, state.optimizer), global_step)
            with jax.numpy_dtype_promotion("standard"):
                own = self.trained_tree(state.params)
                updates, after = self.file.call(
                    "optimizer", self.file.task.optimizer.update, self.trained_tree(gradients), before, own
                )
                trained = jax.tree.leaves(optax.apply_updates(own, updates))
            params = dict(sorted(zip(self._layout.templates, trained, strict=True)))
            return InnerState(params, tuple(jax.tree.leaves(after)))

        return descend

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluated(self, params: Params) -> dict[str, float]:
        """Return what `evaluate` gives, with its `loss`. Raises ConfigError (`task.evaluate`) for anything else."""
        function = self.file.task.evaluate
        assert function is not None  # noqa: S101 - callers look first
        found = self.file.call("evaluate", function, self.tree(params))
        values = dict(found) if isinstance(found, Mapping) else {"loss": found}
        try:
            return {"loss": float(values.pop("loss")), **{str(key): float(value) for key, value in values.items()}}
        except (KeyError, TypeError, ValueError):
            raise self.file.wrong(
                "evaluate", f"gives {found!r:.80}", 'Return a number, or a dictionary of numbers with a "loss".'
            ) from None


def at_step(state: Any, global_step: jax.Array) -> Any:
    """Return the state of an optax transformation whose schedules are at this step of the run."""

    def is_clock(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState) or type(part).__name__ == "WrappedScheduleState"

    def moved(part: Any) -> Any:
        return part._replace(count=jnp.asarray(global_step, part.count.dtype)) if is_clock(part) else part

    return jax.tree.map(moved, state, is_leaf=is_clock)


class TaskSlices:
    """The evaluation of a task, which is one slice."""

    slices = 1

    def __init__(self, model: TaskModel) -> None:
        self._model = model

    def measure_slice(self, params: Params, index: int) -> Measures:
        """Return the loss of the user's evaluation, and its accuracy if there is one."""
        found = self._model.evaluated(params)
        if more := {key: value for key, value in found.items() if key not in ("loss", "accuracy")}:
            log.info("evaluated: %s", ", ".join(f"{key} {value:.4g}" for key, value in more.items()))
        return Measures(found["loss"] / math.log(2.0), found.get("accuracy", math.nan))


class TaskWorkload(Workload):
    """A task of a run.

    Attributes:
        model: Its model.
    """

    def __init__(self, file: TaskFile, manifest: Manifest) -> None:
        """Build the model and its inner steps. Raises MismatchError (`loop.other-tensors`) for other tensors."""
        config = manifest.config
        self.file, self._manifest = file, manifest
        self.model = TaskModel(file, config.seed)
        require_same_tensors(manifest, self.model.tensors)
        self.steps: InnerSteps = task_steps(self.model, config.inner)
        if file.task.optimizer is not None:
            self.first_state, self.bounds = self.model.first_state, MomentBounds()

    @property
    def shards(self) -> list[str]:
        """None at first: `run.shards` says how many there are."""
        return []

    def supply(self, name: str, link: Link, *, rehearses: bool) -> Supply:
        """Return the user's batches."""
        seed = number_of(f"{name}/{uuid.uuid4().hex}")
        run = TaskRun(name, seed, self._manifest.config.seed, None if rehearses else link)
        return TaskBatches(self.file, run)

    def register(self, transport: IslandTransport) -> None:
        """Do nothing: the run knows no data of its users."""

    def evaluation(self) -> Callable[[Params], Slices] | None:
        """Return the user's evaluation, if there is one."""
        return None if self.file.task.evaluate is None else lambda params: TaskSlices(self.model)


def task_steps(model: TaskModel, inner: InnerConfig) -> InnerSteps:
    """Compile the inner steps of a task."""
    own = model.file.task.optimizer is not None
    return compiled_scan(model.gradient, model.descent() if own else descent(inner))


def task_config(config: RunConfig, file: TaskFile) -> RunConfig:
    """Return the settings of a run that trains a task.

    Raises:
        ConfigError: A setting is given that would change nothing (`task.setting`).
    """
    useless = []
    if config.model not in (ModelConfig(), ModelConfig(OWN_MODEL)):
        useless.append("model")
    if config.data != DataConfig():
        useless.append("data")
    inner = config.inner
    if file.task.optimizer is not None and inner != InnerConfig(steps=inner.steps):
        useless.append("inner (apart from inner.steps)")
    if useless:
        raise ConfigError(
            f"the settings of {' and of '.join(useless)} would change nothing: the task {file.name!r} has its own",
            f"Leave them out, or change {file.path}.",
            code="task.setting",
        )
    if file.task.optimizer is None and inner.learning_rate is None:
        inner = replace(inner, learning_rate=LEARNING_RATE)
    return replace(config, model=ModelConfig(OWN_MODEL), inner=inner)


def describe_task(run: str, config: RunConfig, model: TaskModel) -> Manifest:
    """Return the manifest of a run that trains a task with these settings (`task_config`)."""
    tensors, fragments = synced(model.tensors, config)
    return Manifest(run, config, tensors, fragments, NO_CORPUS, installed_versions(), task=model.file.name)


def require_trainable(file: TaskFile, config: RunConfig) -> TaskModel:
    """Return the model of a task, after one batch was drawn and its loss and its optimiser were traced.

    Raises:
        ConfigError: A part of the task is wrong. The code names the part.
    """
    model = TaskModel(file, config.seed)
    params = model.init()
    batch = TaskBatches(file, TaskRun("check", 0)).sample(1)
    fresh = model.first_state if file.task.optimizer is not None else lambda params: begin(config.inner, params)
    state = jax.eval_shape(fresh, params)
    jax.eval_shape(task_steps(model, config.inner), state, batch, np.int32(0))
    return model
