"""Named arrays of an island: the flat vectors of its fragments, and where each tensor of a tree is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

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


def spec(*parts: Any) -> PartitionSpec:
    """Return how the dimensions of an array are spread over the axes of a mesh."""
    return PartitionSpec(*parts)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class DeviceLayout:
    """The devices of one fragment, and where each tensor and its reference are. None stands for the default device."""

    mesh: Mesh | None
    tensors: tuple[Sharding | None, ...]

    @cached_property
    def is_split(self) -> bool:
        """Whether a device has a part only of some tensor."""
        return any(there is not None and not there.is_fully_replicated for there in self.tensors)

    @cached_property
    def whole(self) -> Sharding | None:
        """Where all devices have an array whole; None for the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec())

    def by_name(self, rows: Rows) -> dict[str, Sharding | None]:
        """Return where each tensor is, by its name."""
        return {tensor.name: there for (tensor, _), there in zip(rows, self.tensors, strict=True)}


def plain_templates(tensors: Iterable[Tensor]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what float32 tensors on the default device are like."""
    return {tensor.name: jax.ShapeDtypeStruct(tensor.shape, jnp.float32) for tensor in tensors}  # type: ignore[no-untyped-call]


def sharding_of(template: jax.ShapeDtypeStruct) -> Sharding | None:
    """Return where a leaf lives; None for the default device."""
    return template.sharding if isinstance(template.sharding, Sharding) else None


def own_copy(values: Any, place: Sharding | None) -> jax.Array:
    """Return a copy of values of the host that a loop may donate."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(values, place, may_alias=False)  # type: ignore[no-any-return]
    copied: jax.Array = put(values.copy(), place)
    return copied


def device_layout(rows: Rows, templates: Mapping[str, jax.ShapeDtypeStruct]) -> DeviceLayout:
    """Return where a fragment is computed: on the devices of its most spread leaf."""
    shardings = [sharding_of(templates[tensor.name]) for tensor, _ in rows]
    known = [sharding for sharding in shardings if sharding is not None]
    if not known:
        return DeviceLayout(None, tuple(shardings))
    mesh = _mesh_of(max(known, key=lambda sharding: len(sharding.device_set)))
    everywhere = NamedSharding(mesh, spec())
    devices = list(mesh.devices.flat)
    return DeviceLayout(mesh, tuple(_on_devices(sharding, devices) or everywhere for sharding in shardings))


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


def to_sharding(leaf: Any, sharding: Sharding) -> jax.Array:
    """Return a leaf in another sharding. JAX copies no array of one process whose bytes are there already.

    An array of numpy is always copied, because `device_put` may share its memory, which the loop may change in place.
    """
    placed: jax.Array = jax.device_put(leaf.copy() if isinstance(leaf, np.ndarray) else leaf, sharding)
    return placed


def own_pieces(leaf: Any) -> list[Any]:
    """Return what the devices of this process hold of an array, each piece once."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return [leaf]
    return list({str(shard.index): shard.data for shard in leaf.addressable_shards}.values())


# -- optimiser state of a peer ----------------------------------------------------------------------------------------


def put_like(own: Any, values: np.ndarray[Any, Any]) -> Any:
    """Return a copy of values where the island's own are, as the same kind. Each device gets its own shards only."""
    if isinstance(own, jax.Array):
        return own_copy(values.copy(), own.sharding if own.committed else None)
    return values.copy() if isinstance(own, np.ndarray) else values[()]
