"""Named arrays of an island, the flat vectors of its fragments, and copies on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.manifest import Tensor

#: Arrays by tensor name.
Tensors = dict[str, jax.Array]
#: The tensors of one fragment with their offsets in its vector.
Rows = tuple[tuple[Tensor, int], ...]


def flatten(rows: Rows, tensors: Tensors) -> jax.Array:
    """Return a fragment's tensors as one float32 vector [N], in the manifest's order."""
    return jnp.concatenate([tensors[tensor.name].reshape(-1).astype(jnp.float32) for tensor, _ in rows])


def unflatten(rows: Rows, vector_N: jax.Array) -> Tensors:
    """Invert `flatten`."""
    return {t.name: vector_N[offset : offset + t.size].reshape(t.shape) for t, offset in rows}


def parameter_rows(rows: Rows) -> Rows:
    """Return the rows of the parameters, without those of first moments."""
    return tuple((tensor, offset) for tensor, offset in rows if tensor.kind != "moment")


def parameters_in(rows: Rows) -> int:
    """Return the number of parameters of a fragment. First moments, if there are any, come after these."""
    return sum(tensor.size for tensor, _ in parameter_rows(rows))


def device_copy(tree: Any) -> Any:
    """Copy a tree of arrays to the device without compiling anything. A later step may donate the copy."""
    # On a CPU, `device_put` may keep reading the host's memory even with `may_alias=False`, so we copy that first.
    own = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
    return jax.device_put(own, may_alias=False)
