"""The replica of named arrays of any dtype on any devices of this host: a user's tree, or our models on a mesh.

The references are spread over devices as the parameters are. Fragments are measured and adopted in float32 where their
shards lie (see `cuts`). The rounding of a narrower dtype is no progress: the reference moves by it, or each round would
pull the run's parameters back to the numbers that the narrow dtype has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.adoption import build
from archipelago.islands.sync.arrays import Rows, Tensors, flatten, parameters_in, put, unflatten
from archipelago.islands.sync.cuts import CutPlan, Placed, plan
from archipelago.islands.sync.replica import (
    Replica,
    compiled_quantise,
    difference,
    moments_after,
    settle,
)
from archipelago.islands.sync.sharded_cut import AssembledPart, encode, spec

#: The dtype of each tensor of a fragment, in the order of its rows.
Dtypes = tuple[str, ...]
#: From the references and the tensors of a fragment to the codec's parts and the next references.
TreeMeasure = Callable[[Tensors, Tensors], tuple[Parts, Tensors]]
#: From a snapshot's tensors, a fragment's, its references, and the share of first moments to the next tensors and
#: references.
TreeAdopt = Callable[..., tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Home:
    """The devices of one fragment.

    Attributes:
        mesh: All of them; None for the default device.
        tensors: Where each tensor and its reference are during a computation; None for the default device.
    """

    mesh: Mesh | None
    tensors: tuple[Sharding | None, ...]


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
        self._homes = [_home(rows, templates) for rows in self.layout]
        self._dtypes = [tuple(str(templates[tensor.name].dtype) for tensor, _ in rows) for rows in self.layout]

    def begin(self, vectors: list[Vector]) -> Tensors:
        """Start from these float32 vectors, one for each fragment, and return the leaves by name."""
        params: Tensors = {}
        self.references = []
        for p, (rows, vector_N) in enumerate(zip(self.layout, vectors, strict=True)):
            held_N = np.array(vector_N, np.float32)  # a copy, because a loop may donate what it is given
            for tensor, offset in rows:
                template = self._templates[tensor.name]
                part = held_N[offset : offset + tensor.size]
                own = part.reshape(tensor.shape).astype(template.dtype)
                part[:] = own.astype(np.float32).reshape(-1)
                if tensor.kind != "moment":
                    params[tensor.name] = _own(own, _sharding(template))
            self.references.append(self._placed(p, held_N))
        return params

    def restore(self, references: Sequence[Mapping[str, Any]]) -> None:
        """Continue from these references of each fragment by tensor name."""
        self.references = [
            {t.name: put(found[t.name], there) for (t, _), there in zip(rows, home.tensors, strict=True)}
            for rows, home, found in zip(self.layout, self._homes, references, strict=True)
        ]

    def shardings(self) -> list[dict[str, Sharding | None]]:
        """Return where each reference is; None for the default device."""
        return [
            {tensor.name: there for (tensor, _), there in zip(rows, home.tensors, strict=True)}
            for rows, home in zip(self.layout, self._homes, strict=True)
        ]

    def warm_up(self, tensors: Tensors, share: jax.Array | None = None) -> None:
        """Compile both directions of every fragment without changing anything. `share` is that of first moments."""
        for p, reference in enumerate(self.references):
            part = self._part(p, tensors)
            for codec in self._codecs(self.sizes[p]):
                self._tree_measure(p, codec)(reference, part)
            self._tree_adopt(p, has_moments=share is not None)(reference, part, reference, share)

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts, quantised where its shards lie."""
        measure = self._tree_measure(fragment, codec or self.codec)
        parts, self.references[fragment] = measure(self.references[fragment], self._part(fragment, tensors))
        return parts

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector) -> Tensors:
        """Return the leaves after the fragment's snapshot was adopted by the run's rule."""
        return self._adopted(fragment, tensors, new_N, None)

    def adopt_with_moments(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector, share: jax.Array) -> Tensors:
        """Return the tensors after a fragment with first moments was adopted."""
        return self._adopted(fragment, tensors, new_N, share)

    def _adopted(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector, share: jax.Array | None) -> Tensors:
        adopt = self._tree_adopt(fragment, has_moments=share is not None)
        part, self.references[fragment] = adopt(
            self._placed(fragment, new_N), self._part(fragment, tensors), self.references[fragment], share
        )
        return {**tensors, **{name: _settled(leaf, self._templates[name]) for name, leaf in part.items()}}

    def _placed(self, fragment: int, vector_N: Vector) -> Tensors:
        """Return a fragment's vector as tensors on its devices, each of which gets its own shards only."""
        rows, home = self.layout[fragment], self._homes[fragment].tensors
        parts = [vector_N[offset : offset + tensor.size].reshape(tensor.shape) for tensor, offset in rows]
        placed = put(parts, list(home))
        return {tensor.name: leaf for (tensor, _), leaf in zip(rows, placed, strict=True)}

    def _part(self, fragment: int, tensors: Mapping[str, Any]) -> Tensors:
        rows, home = self.layout[fragment], self._homes[fragment].tensors
        return {t.name: _moved(tensors[t.name], there) for (t, _), there in zip(rows, home, strict=True)}

    def _tree_measure(self, fragment: int, codec: str) -> TreeMeasure:
        rows, home = self.layout[fragment], self._homes[fragment]
        cut = _cut(rows, home, codec)
        if codec != self.codec and not cut.spread:  # the programs of the thin codec are shared
            return _thin_measure(rows, codec, self.sizes[fragment], self.shared_size(fragment))
        return _tree_measure(rows, codec, home, is_thin=codec != self.codec)

    def _tree_adopt(self, fragment: int, *, has_moments: bool) -> TreeAdopt:
        return _tree_adopt(
            self.layout[fragment], self._config, self._dtypes[fragment], self._homes[fragment], has_moments
        )


# -- computations ------------------------------------------------------------------------------------------------------


@cache
def _cut(rows: Rows, home: Home, codec: str) -> CutPlan:
    placed = [_place(there) for there in home.tensors]
    return plan(rows, placed, dict(home.mesh.shape) if home.mesh else {}, codec_of(codec).block)


def _place(there: Sharding | None) -> Placed:
    if not isinstance(there, NamedSharding):
        return Placed()
    return Placed(tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in there.spec))


@cache
def compiled_tree_measure(rows: Rows, codec: str, home: Home, *, is_thin: bool) -> Any:
    """Return the program that encodes a fragment where its shards lie, and moves its references."""
    chosen, cut = codec_of(codec), _cut(rows, home, codec)
    moments = {tensor.name for tensor, _ in rows if tensor.kind == "moment"}

    def measure(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        own = {tensor.name: part[tensor.name].astype(jnp.float32) for tensor, _ in rows}
        values = {name: reference[name] - x for name, x in own.items() if name not in moments}
        # The thin codec would leave few first moments. It sends zeros, which stand for none.
        values |= {name: jnp.zeros_like(own[name]) if is_thin else own[name] for name in moments}
        parts, restored = encode(chosen, cut, home.mesh, values)
        return parts, {name: x if name in moments else reference[name] - restored[name] for name, x in own.items()}

    if home.mesh is None:
        return jax.jit(measure)
    # The leader of several hosts sends what all of them have encoded.
    is_here = all(device.process_index == jax.process_index() for device in home.mesh.devices.flat)
    encoded = NamedSharding(home.mesh, spec(cut.axes) if cut.axes and is_here else spec())
    return jax.jit(measure, out_shardings=(encoded, _named(rows, home)))


def _tree_measure(rows: Rows, codec: str, home: Home, *, is_thin: bool) -> TreeMeasure:
    chosen, cut = codec_of(codec), _cut(rows, home, codec)
    compiled = compiled_tree_measure(rows, codec, home, is_thin=is_thin)

    def measured(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        parts, after = compiled(reference, part)
        if cut.spread:
            parts = tuple(AssembledPart(i, chosen, cut, each) for i, each in enumerate(parts))
        return parts, after

    return measured


@cache
def _thin_measure(rows: Rows, codec: str, size: int, shared_size: int) -> TreeMeasure:
    """Measure tensors that no device has a part of, with the program of the thin codec that fragments share."""
    start = parameters_in(rows)
    cut = jax.jit(lambda reference, part: difference(rows, shared_size, flatten(rows, reference), part))
    quantise = compiled_quantise(codec)

    def settled(reference_N: jax.Array, parts_M: Parts, restored_M: jax.Array) -> tuple[Parts, Tensors]:
        parts, next_N = settle(codec, size, start, reference_N, parts_M, restored_M)
        return parts, unflatten(rows, next_N)

    finish = jax.jit(settled)

    def measured(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        difference_M, reference_N = cut(reference, part)
        parts, after = finish(reference_N, *quantise(difference_M))
        return parts, after

    return measured


@cache
def _tree_adopt(rows: Rows, config: AdoptConfig, dtypes: Dtypes, home: Home, has_moments: bool) -> TreeAdopt:
    adopt, settle = partial(_adopt, rows, config, dtypes, has_moments), _rounded
    if home.mesh is None:
        adopting, settling = jax.jit(adopt), jax.jit(settle)
    else:
        named = _named(rows, home)
        adopting, settling = jax.jit(adopt, out_shardings=(named, named, named)), jax.jit(settle, out_shardings=named)
    is_exact = all(dtype == "float32" for dtype in dtypes)

    def adopted(new: Tensors, part: Tensors, reference: Tensors, share: jax.Array | None) -> tuple[Tensors, Tensors]:
        held, next_reference, own = adopting(new, part, reference, share)
        # This is a program of its own: within one, XLA may leave out a rounding whose result becomes float32 again.
        return held, next_reference if is_exact else settling(next_reference, own, held)

    return adopted


def _adopt(
    rows: Rows,
    config: AdoptConfig,
    dtypes: Dtypes,
    has_moments: bool,
    new: Tensors,
    part: Tensors,
    reference: Tensors,
    share: jax.Array | None,
) -> tuple[Tensors, Tensors, Tensors]:
    """Return the next tensors, and the next references and the next parameters as they are before rounding."""
    rule = build(config)
    exact, after = {}, {}
    for tensor, _ in rows:
        name = tensor.name
        exact[name], after[name] = rule.adopt(new[name], part[name].astype(jnp.float32), reference[name])
    if has_moments:
        assert share is not None  # noqa: S101 - runs that average moments give it
        names = [tensor.name for tensor, _ in rows if tensor.kind == "moment"]
        are_there = jnp.any(jnp.stack([jnp.any(new[name] != 0.0) for name in names]))
        for name in names:
            exact[name] = moments_after(rule, new[name], part[name], reference[name], share, are_there)
    held = {t.name: exact[t.name].astype(dtype) for (t, _), dtype in zip(rows, dtypes, strict=True)}
    return held, after, exact


def _rounded(reference: Tensors, own: Tensors, held: Tensors) -> Tensors:
    """Return the references, moved by what rounding did to the parameters."""
    return {name: x + (held[name].astype(jnp.float32) - own[name]) for name, x in reference.items()}


def _named(rows: Rows, home: Home) -> dict[str, Sharding | None]:
    return {tensor.name: there for (tensor, _), there in zip(rows, home.tensors, strict=True)}


# -- devices -----------------------------------------------------------------------------------------------------------


def _sharding(template: jax.ShapeDtypeStruct) -> Sharding | None:
    """Return where a leaf lives; None for the default device."""
    return template.sharding if isinstance(template.sharding, Sharding) else None


def _own(values: Any, place: Sharding | None) -> jax.Array:
    """Return a copy of values of the host that a loop may donate."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(values, place, may_alias=False)  # type: ignore[no-any-return]
    copied: jax.Array = put(values.copy(), place)
    return copied


def _home(rows: Rows, templates: Mapping[str, jax.ShapeDtypeStruct]) -> Home:
    """Return where a fragment is computed: on the devices of its most spread leaf."""
    shardings = [_sharding(templates[tensor.name]) for tensor, _ in rows]
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
