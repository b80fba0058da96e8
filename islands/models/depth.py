"""The passage through the layers of a model: unrolled or as one scan, with or without rematerialisation.

Neither changes a parameter, a name or a fragment. An unrolled program grows with the number of layers. A scan compiles
one layer; for that, each call stacks the layers' tensors, which costs one copy of them in the dtype of computation.
Rematerialisation keeps only the input of each layer for the backward pass, and computes the layer again there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Penalty(nnx.Variable[jax.Array]):
    """A term (float32, []) that a module adds to the training loss. The module sets it as an attribute when called."""


@dataclass(frozen=True)
class Depth:
    """How a model passes through its layers.

    Attributes:
        scan: Compile one layer and repeat it instead of one program for all layers.
        rematerialise: Compute each layer again in the backward pass instead of keeping its activations.
    """

    scan: bool = False
    rematerialise: bool = False

    def through(self, layers: Sequence[Any], x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Apply layers of one kind in turn.

        Returns:
            The output of the last layer, and the sum of all `Penalty` terms. None where the layers keep theirs.
        """
        if self == UNROLLED:
            for layer in layers:
                x = layer(x)
            return x, None
        if self.scan:
            for layer in layers:
                _cast(layer)
        graph = nnx.graphdef(layers[0])
        states = [nnx.state(layer) for layer in layers]

        def apply(x: jax.Array, state: Any) -> tuple[jax.Array, jax.Array]:
            layer = nnx.merge(graph, state)
            x = layer(x)
            return x, sum(jax.tree.leaves(nnx.pop(layer, Penalty)), jnp.zeros((), jnp.float32))

        if self.rematerialise:
            apply = jax.checkpoint(apply, prevent_cse=not self.scan)  # a scan prevents it anyway
        if self.scan:
            x, penalties = jax.lax.scan(apply, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
            return x, jnp.sum(penalties)
        total = jnp.zeros((), jnp.float32)
        for state in states:
            x, penalty = apply(x, state)
            total += penalty
        return x, total


#: The program of all layers in a row, which keeps their activations.
UNROLLED = Depth()


def _cast(layer: Any) -> None:
    """Cast the kernels of all projections to the dtype that they are used in, so that stacking copies fewer bytes."""
    for _, part in nnx.iter_modules(layer):
        if isinstance(part, nnx.Linear) and part.dtype is not None:
            part.kernel.set_value(part.kernel[...].astype(part.dtype))
