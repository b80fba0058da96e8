"""The devices of fragments: where each tensor of a tree is computed, and how it gets there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from archipelago.islands.sync.arrays import Rows, put
from archipelago.islands.sync.sharded_cut import spec


@dataclass(frozen=True)
class Home:
    """The devices of one fragment.

    Attributes:
        mesh: All of them; None for the default device.
        tensors: Where each tensor and its reference are during a computation; None for the default device.
    """

    mesh: Mesh | None
    tensors: tuple[Sharding | None, ...]


def sharding_of(template: jax.ShapeDtypeStruct) -> Sharding | None:
    """Return where a leaf lives; None for the default device."""
    return template.sharding if isinstance(template.sharding, Sharding) else None


def own_copy(values: Any, place: Sharding | None) -> jax.Array:
    """Return a copy of values of the host that a loop may donate."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(values, place, may_alias=False)  # type: ignore[no-any-return]
    copied: jax.Array = put(values.copy(), place)
    return copied


def home_of(rows: Rows, templates: Mapping[str, jax.ShapeDtypeStruct]) -> Home:
    """Return where a fragment is computed: on the devices of its most spread leaf."""
    shardings = [sharding_of(templates[tensor.name]) for tensor, _ in rows]
    known = [sharding for sharding in shardings if sharding is not None]
    if not known:
        return Home(None, tuple(shardings))
    mesh = _mesh_of(max(known, key=lambda sharding: len(sharding.device_set)))
    everywhere = NamedSharding(mesh, spec())
    devices = list(mesh.devices.flat)
    return Home(mesh, tuple(_on_devices(sharding, devices) or everywhere for sharding in shardings))


def _mesh_of(sharding: Sharding) -> Mesh:
    """Return a mesh of the sharding's devices whose axes the compiler handles by itself."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return _automatic(sharding.mesh)
    devices = np.array(sorted(sharding.device_set, key=_number))
    return Mesh(devices, ("device",), axis_types=(AxisType.Auto,))


def _number(device: Any) -> int:
    return int(device.id)


def _automatic(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _on_devices(sharding: Sharding | None, devices: list[jax.Device]) -> NamedSharding | None:
    """Return the same placement with automatic axes; None if it is on other devices, or in another order."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    if list(sharding.mesh.devices.flat) != devices:
        return None
    return NamedSharding(_automatic(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _devices(sharding: NamedSharding) -> list[jax.Device]:
    return list(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else []


def at_home(leaf: Any, home: Sharding | None) -> jax.Array:
    """Return a leaf of the loop where its fragment is computed. This copies no array that is there already.

    An array of numpy is always copied, because `device_put` may share its memory, which the loop may change in place.
    """
    if home is None:
        return jnp.asarray(leaf)
    if isinstance(leaf, jax.Array) and isinstance(home, NamedSharding):
        there = _on_devices(leaf.sharding, _devices(home))
        if there is not None:
            return _same_bytes(leaf, there)
    placed: jax.Array = jax.device_put(leaf.copy() if isinstance(leaf, np.ndarray) else leaf, home)
    return placed


def settled(leaf: jax.Array, template: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a computed leaf in the sharding that the loop uses."""
    wanted = sharding_of(template)
    if wanted is None or leaf.sharding == wanted:
        return leaf
    if isinstance(wanted, NamedSharding) and isinstance(leaf.sharding, NamedSharding):
        there = _on_devices(wanted, _devices(leaf.sharding))
        if there is not None and leaf.sharding.is_equivalent_to(there, leaf.ndim):
            return _same_bytes(leaf, wanted)
    placed: jax.Array = jax.device_put(leaf, wanted)
    return placed


def _same_bytes(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array of the same buffers under another name of the same placement."""
    if leaf.sharding == sharding:
        return leaf
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [shard.data for shard in leaf.addressable_shards], dtype=leaf.dtype
    )
