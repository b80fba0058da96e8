"""The replica of a user's tree: any dtype of the leaves, on any devices of this host.

Fragments are measured and adopted in float32 on the devices that hold their leaves. The rounding of a narrower dtype is
no progress: the reference moves by it, or each round would pull the run's parameters back to the numbers that the
narrow dtype has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from archipelago.broker.codecs import Vector
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.adoption import build
from archipelago.islands.sync.arrays import Rows, Tensors, flatten, unflatten
from archipelago.islands.sync.replica import Replica

#: The dtype of each tensor of a fragment, in the order of its rows.
Dtypes = tuple[str, ...]
#: From a snapshot [N], a fragment's tensors and its reference [N] to the next tensors and the next reference.
TreeAdopt = Callable[[jax.Array, Tensors, jax.Array], tuple[Tensors, jax.Array]]


@dataclass(frozen=True)
class Home:
    """The devices of one fragment.

    Attributes:
        vector: Where its reference is; None for the default device.
        tensors: Where its tensors are during a computation, by name; None for the default device.
    """

    vector: Sharding | None
    tensors: Mapping[str, Sharding | None]


class TreeReplica(Replica):
    """The references of all fragments of a tree, given by the leaves that are merged."""

    def __init__(self, manifest: Manifest, templates: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Note where each leaf lives.

        Args:
            manifest: The run.
            templates: The shape, dtype and sharding of each leaf by name. Without a sharding, a leaf is on the default
                device, and the loop's own computations may move it.
        """
        super().__init__(manifest)
        self._templates = templates
        self._homes = [_home(rows, size, templates) for rows, size in zip(self.layout, self.sizes, strict=True)]
        self._adopt = [
            _tree_adopt(
                rows,
                manifest.config.adopt,
                tuple(str(templates[tensor.name].dtype) for tensor, _ in rows),
                home.vector,
                tuple(home.tensors[tensor.name] for tensor, _ in rows),
            )
            for rows, home in zip(self.layout, self._homes, strict=True)
        ]

    def begin(self, vectors: list[Vector]) -> Tensors:
        """Start from these float32 vectors, one for each fragment, and return the leaves by name."""
        params: Tensors = {}
        self.references = []
        for rows, home, vector_N in zip(self.layout, self._homes, vectors, strict=True):
            held_N = np.array(vector_N, np.float32)  # a copy, because a loop may donate what it is given
            for tensor, offset in rows:
                template = self._templates[tensor.name]
                part = held_N[offset : offset + tensor.size]
                own = part.reshape(tensor.shape).astype(template.dtype)
                part[:] = own.astype(np.float32).reshape(-1)
                params[tensor.name] = jax.device_put(own, _sharding(template), may_alias=False)
            self.references.append(jax.device_put(held_N, home.vector, may_alias=False))
        return params

    def adopt(self, fragment: int, params: Mapping[str, Any], new_N: Vector) -> Tensors:
        """Return the leaves after the fragment's snapshot was adopted by the run's rule."""
        arrived_N = jax.device_put(new_N, self._homes[fragment].vector)
        part, self.references[fragment] = self._adopt[fragment](
            arrived_N, self._part(fragment, params), self.references[fragment]
        )
        return {**params, **{name: _settled(leaf, self._templates[name]) for name, leaf in part.items()}}

    def _part(self, fragment: int, params: Mapping[str, Any]) -> Tensors:
        home = self._homes[fragment].tensors
        return {tensor.name: _moved(params[tensor.name], home[tensor.name]) for tensor, _ in self.layout[fragment]}


@cache
def _tree_adopt(
    rows: Rows, config: AdoptConfig, dtypes: Dtypes, vector: Sharding | None, tensors: tuple[Sharding | None, ...]
) -> TreeAdopt:
    rule = partial(_adopt, rows, build(config).adopt, dtypes)
    if vector is None:
        adopt, settle = jax.jit(rule), jax.jit(partial(_rounded, rows))
    else:
        placed = {tensor.name: sharding for (tensor, _), sharding in zip(rows, tensors, strict=True)}
        adopt = jax.jit(rule, out_shardings=(placed, vector, vector))
        settle = jax.jit(partial(_rounded, rows), out_shardings=vector)
    is_exact = all(dtype == "float32" for dtype in dtypes)

    def adopted(new_N: jax.Array, part: Tensors, reference_N: jax.Array) -> tuple[Tensors, jax.Array]:
        held, next_reference_N, own_N = adopt(new_N, part, reference_N)
        # This is a program of its own: within one, XLA may leave out a rounding whose result becomes float32 again.
        return held, next_reference_N if is_exact else settle(next_reference_N, own_N, held)

    return adopted


def _adopt(
    rows: Rows, rule: Any, dtypes: Dtypes, new_N: jax.Array, part: Tensors, reference_N: jax.Array
) -> tuple[Tensors, jax.Array, jax.Array]:
    """Return the next tensors, and the next reference and the next parameters [N] as they are before rounding."""
    own_N, next_reference_N = rule(new_N, flatten(rows, part), reference_N)
    exact = unflatten(rows, own_N)
    held = {t.name: exact[t.name].astype(dtype) for (t, _), dtype in zip(rows, dtypes, strict=True)}
    return held, next_reference_N, own_N


def _rounded(rows: Rows, reference_N: jax.Array, own_N: jax.Array, held: Tensors) -> jax.Array:
    """Return the reference, moved by what rounding did to the parameters."""
    return reference_N + (flatten(rows, held) - own_N)


# -- devices -----------------------------------------------------------------------------------------------------------


def _sharding(template: jax.ShapeDtypeStruct) -> Sharding | None:
    """Return where a leaf lives; None for the default device."""
    return template.sharding if isinstance(template.sharding, Sharding) else None


def _home(rows: Rows, size: int, templates: Mapping[str, jax.ShapeDtypeStruct]) -> Home:
    """Return where a fragment is computed: on the devices of its most spread leaf."""
    shardings = {tensor.name: _sharding(templates[tensor.name]) for tensor, _ in rows}
    known = [sharding for sharding in shardings.values() if sharding is not None]
    if not known:
        return Home(None, shardings)
    widest = max(known, key=lambda sharding: len(sharding.device_set))
    mesh = _mesh_of(widest)
    everywhere = NamedSharding(mesh, _spec())
    devices = list(mesh.devices.flat)
    return Home(
        NamedSharding(mesh, _spec_of_vector(mesh, size)),
        {name: _on_devices(sharding, devices) or everywhere for name, sharding in shardings.items()},
    )


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


def _spec_of_vector(mesh: Mesh, size: int) -> PartitionSpec:
    """Return how a vector is spread: over as many axes as divide its size."""
    axes: list[str] = []
    for axis, length in mesh.shape.items():
        if size % length == 0:
            axes.append(str(axis))
            size //= length
    return _spec(tuple(axes)) if axes else _spec()


def _spec(*parts: Any) -> PartitionSpec:
    return PartitionSpec(*parts)  # type: ignore[no-untyped-call]


def _on_devices(sharding: Sharding | None, devices: list[jax.Device]) -> NamedSharding | None:
    """Return the same placement with automatic axes; None if it is on other devices, or in another order."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    if list(sharding.mesh.devices.flat) != devices:
        return None
    return NamedSharding(_automatic(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _devices(sharding: NamedSharding) -> list[jax.Device]:
    return list(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else []


def _moved(leaf: Any, home: Sharding | None) -> jax.Array:
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


def _settled(leaf: jax.Array, template: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a computed leaf in the sharding that the loop uses."""
    wanted = _sharding(template)
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
