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


def by_tensor(rows: Rows, held: Any) -> dict[str, Any]:
    """Return a fragment's tensors by name, from those or from its vector, which is then cut in the host's memory."""
    if isinstance(held, dict):
        return held
    vector_N = np.asarray(held)
    return {t.name: vector_N[offset : offset + t.size].reshape(t.shape) for t, offset in rows}


def is_spread(leaf: Any) -> bool:
    """Return whether an array is on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def put(values: Any, places: Any) -> Any:
    """Return a tree of arrays at these places. On several hosts, all of which do this, each takes its own shards only.

    `jax.device_put` would first compare the values of all hosts.
    """

    def one(value: Any, place: Any) -> Any:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, place)
        held = np.asarray(value)
        return jax.make_array_from_callback(held.shape, place, lambda index: held[index])

    leaves = [place for place in jax.tree.leaves(places) if place is not None]
    if all(place.is_fully_addressable for place in leaves):
        return jax.device_put(values, places)
    return jax.tree.map(one, values, places)


def device_copy(tree: Any) -> Any:
    """Copy a tree of arrays to the device without compiling anything. A later step may donate the copy."""
    # On a CPU, `device_put` may keep reading the host's memory even with `may_alias=False`, so we copy that first.
    own = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(own) if isinstance(leaf, jax.Array)):
        return jax.device_put(own, may_alias=False)
    return jax.device_put(own, jax.tree.map(lambda leaf: leaf.sharding, own), may_alias=False)
