"""A task: what our worker needs to train a model. Our own models are tasks too (`tasks.ours`).

It does not import JAX, so that a task's file decides what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archipelago.islands.own_loop.tensors import EMBEDDINGS, KindOf

if TYPE_CHECKING:
    from archipelago.islands.data.batches import Supply
    from archipelago.islands.evaluation import Sliced
    from archipelago.islands.tasks.shards import TaskRun


@dataclass(frozen=True)
class Task:
    """A model with its loss and its data, for `archipelago up --task FILE.py:NAME`.

        task = Task(init, loss, batches, evaluate)

    Attributes:
        init: From a seed to the first parameters: any tree of arrays whose leaves have names. Leaves of float32,
            bfloat16 and float16 are trained and merged, in float32; `loss` gets them in their own dtype. Others stay
            as they are.
        loss: From parameters and a batch to the loss to minimise, a scalar; or to a pair of the loss to report and a
            penalty that training adds to it. It is compiled and differentiated by JAX.
        batches: From a `TaskRun` to an endless iterable of batches: trees of arrays, all of the same shapes and dtypes.
            Or to a `Supply`, which draws several batches at once and says where it stands, as our own tasks do.
        evaluate: From parameters to a loss on held-out data, or to a dictionary with `loss` and, optionally,
            `accuracy` (0 … 1). Other entries are logged. Without it, the run has no held-out loss. A `Sliced`
            evaluation lets inner steps pass in between.
        optimizer: Any optax transformation, whose schedules follow the run's clock. The default is that of the run's
            settings (`--inner.optimizer`).
        kinds: Which tensors are embeddings, for which the merge rules have a setting of their own: a regular expression
            that is found in their names, or a function from a name to "embedding" or "rest".
        tokens: What a batch counts, in tokens, examples or any unit that all islands share: a number, or a function of
            a batch. The weight of an island follows from it. The default is the length of the first array.
        name: The name of the task in its run. The default is that of its file.
        shapes: The tree of `jax.ShapeDtypeStruct` that `init` fills. With it, `init` is only called to begin a run.
    """

    init: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[TaskRun], Iterable[Any] | Supply]
    evaluate: Callable[[Any], float | Mapping[str, float]] | Sliced | None = None
    optimizer: Any = None
    kinds: str | KindOf = EMBEDDINGS
    tokens: int | Callable[[Any], int] | None = None
    name: str = ""
    shapes: Any = None
