"""The model of a task: functions of parameters by name, as an island keeps them.

An island keeps the floating-point leaves of the task's tree by name, in float32. The task's functions get the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from archipelago.islands.inner import Descent, InnerState
from archipelago.islands.models.interface import Params
from archipelago.islands.tasks.task import NamedTask
from archipelago.islands.user_loop.tensors import kinds_by
from archipelago.islands.user_loop.tree import TreeLayout, name_of


class TaskModel:
    """The model of a task: tensors, and functions by name. Models are equal if they compile to the same programs."""

    def __init__(self, named: NamedTask, seed: int) -> None:
        """Keep the names and shapes of what `init` returns.

        Raises ConfigError if it fails (`task.init`), or if its tree cannot be merged (`loop.nothing`, `loop.unnamed`,
        `loop.dtype`).
        """
        task = named.task
        self.named, self._seed = named, seed
        layout = None if task.shapes is None else TreeLayout.of(task.shapes)
        if layout is None or layout.own:  # leaves that are not trained need their values
            layout = TreeLayout.of(named.call("init", task.init, seed))
        self._layout = layout
        self.tensors = self._layout.tensors(kinds_by(task.kinds))
        # Leaves that are not trained are constants of the program, and `init` may draw them.
        functions = _hashable(task.init), _hashable(task.loss)
        self._key = *functions, id(task.optimizer), seed if self._layout.own else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskModel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the task has an optimiser of its own, and not that of the run's settings."""
        return self.named.task.optimizer is not None

    def init(self) -> Params:
        """Return fresh parameters. Raises ConfigError (`task.init`) for others than the task's `shapes` say."""
        tree = self.named.call("init", self.named.task.init, self._seed)
        if not self._layout.own:  # the layout may be that of `shapes`
            self._require_shapes(tree)
        found = self._layout.leaves_of(tree)
        return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in sorted(found.items())}

    def _require_shapes(self, tree: Any) -> None:
        given = {name_of(path): _described(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        said = {name: _described(leaf) for name, leaf in self._layout.templates.items()}
        if differing := sorted(name for name, _ in said.items() ^ given.items()):
            name = differing[0]
            raise self.named.wrong(
                "init",
                f"gives {given.get(name, 'nothing')} for {name}, where `shapes` has {said.get(name, 'nothing')}",
                "Correct one of them, or leave out `shapes`.",
            )

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

        Raises ConfigError (`task.loss`) if the user's loss fails, or is no scalar.
        """
        found = self.named.call("loss", self.named.task.loss, self.tree(params), batch)
        values = found if isinstance(found, tuple) and len(found) == 2 else (found,)
        for value in values:
            shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", jnp.float32)
            if shape != () or not jnp.issubdtype(dtype, jnp.floating) or not hasattr(value, "__float__"):
                said = f"{dtype}{list(shape)}" if hasattr(value, "shape") else repr(type(value).__name__)
                raise self.named.wrong(
                    "loss",
                    f"gives {said} instead of a scalar",
                    "Return a floating-point scalar, such as a mean, or a pair of a loss and a penalty.",
                )
        loss, *penalties = (jnp.asarray(value).astype(jnp.float32) for value in values)
        return sum(penalties, loss), loss

    def gradient(self, params: Params, batch: Any) -> tuple[Params, jax.Array]:
        """Return the gradients of the objective by name, and the loss. This is the first half of an inner step."""
        differentiated = jax.value_and_grad(self.objective, has_aux=True)
        (_, loss), gradients = self.named.call("loss", differentiated, params, batch)  # the backward pass may fail, too
        return gradients, loss

    # -- the optimiser ------------------------------------------------------------------------------------------------

    def first_state(self, params: Params) -> InnerState:
        """Return these parameters with fresh state of the user's optimiser, as a tuple of its arrays."""
        return InnerState(params, tuple(jax.tree.leaves(self._init_optimizer(params))))

    def _init_optimizer(self, params: Params) -> Any:
        optimizer = self.named.task.optimizer
        return self.named.call("optimizer", optimizer.init, self.trained_tree(params))

    def descent(self) -> Descent:
        """Return the step of the user's optimiser. Its schedules follow the run's clock."""

        def descend(state: InnerState, gradients: Params, global_step: jax.Array, length: jax.Array, /) -> InnerState:
            structure = jax.tree.structure(jax.eval_shape(self._init_optimizer, state.params))
            before = at_step(jax.tree.unflatten(structure, state.optimizer), global_step)
            with jax.numpy_dtype_promotion("standard"):
                own = self.trained_tree(state.params)
                updates, after = self.named.call(
                    "optimizer", self.named.task.optimizer.update, self.trained_tree(gradients), before, own
                )
                trained = jax.tree.leaves(optax.apply_updates(own, updates))
            params = dict(sorted(zip(self._layout.templates, trained, strict=True)))
            return InnerState(params, tuple(jax.tree.leaves(after)))

        return descend

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluated(self, params: Params) -> dict[str, float]:
        """Return what `evaluate` gives, with its `loss`. Raises ConfigError (`task.evaluate`) for anything else."""
        function: Any = self.named.task.evaluate
        assert function is not None  # noqa: S101 - callers look first
        found = self.named.call("evaluate", function, self.tree(params))
        values = dict(found) if isinstance(found, Mapping) else {"loss": found}
        try:
            return {"loss": float(values.pop("loss")), **{str(key): float(value) for key, value in values.items()}}
        except (KeyError, TypeError, ValueError):
            raise self.named.wrong(
                "evaluate", f"gives {found!r:.80}", 'Return a number, or a dictionary of numbers with a "loss".'
            ) from None


def _described(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def _hashable(function: Any) -> Any:
    """Return a function, or the identity of a callable object that has no hash: this model keeps it alive."""
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


def at_step(state: Any, global_step: jax.Array) -> Any:
    """Return the state of an optax transformation whose schedules are at this step of the run."""

    def is_clock(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState) or type(part).__name__ == "WrappedScheduleState"

    def moved(part: Any) -> Any:
        return part._replace(count=jnp.asarray(global_step, part.count.dtype)) if is_clock(part) else part

    return jax.tree.map(moved, state, is_leaf=is_clock)
