"""The replica of named arrays of any dtype on any devices of this host: a user's tree, or our models on a mesh.

The references are spread over devices as the parameters are. Fragments are measured and adopted in float32 where their
shards lie (see `cuts`). The rounding of a narrower dtype is no progress: the reference moves by it, or each round would
pull the run's parameters back to the numbers that the narrow dtype has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.adoption import RULES
from archipelago.islands.sync.arrays import (
    Home,
    Rows,
    Tensors,
    at_home,
    flatten,
    home_of,
    own_copy,
    put,
    settled,
    sharding_of,
    spec,
    unflatten,
)
from archipelago.islands.sync.cuts import CutPlan, TensorAxes, plan
from archipelago.islands.sync.replica import (
    Replica,
    in_steps,
    moved,
    outer_gradient,
    padded_gradient,
    quantised,
    settle,
)
from archipelago.islands.sync.sharded_cut import AssembledPart, encode

#: The dtype of each tensor of a fragment, in the order of its rows.
Dtypes = tuple[str, ...]
#: From the references and the tensors of a fragment to the codec's parts and the next references.
TreeMeasure = Callable[[Tensors, Tensors], tuple[Parts, Tensors]]
#: From a snapshot's tensors, a fragment's, and its references to the next tensors and references.
TreeAdopt = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]


@cache
def cut_of(rows: Rows, home: Home, codec: str) -> CutPlan:
    """Return how a fragment is cut for a codec."""
    placed = [_place(there) for there in home.tensors]
    return plan(rows, placed, dict(home.mesh.shape) if home.mesh else {}, codec_of(codec).block)


def _place(there: Sharding | None) -> TensorAxes:
    if not isinstance(there, NamedSharding):
        return TensorAxes()
    return TensorAxes(tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in there.spec))


@cache
def compiled_tree_measure(rows: Rows, codec: str, home: Home) -> Any:
    """Return the program that encodes a fragment where its shards lie, on a mesh, and moves its references."""
    assert home.mesh is not None  # noqa: S101
    chosen, cut = codec_of(codec), cut_of(rows, home, codec)

    def measure(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        names = [tensor.name for tensor, _ in rows]
        values = {name: reference[name] - part[name].astype(jnp.float32) for name in names}
        parts, restored = encode(chosen, cut, home.mesh, values)
        return parts, {name: reference[name] - restored[name] for name in names}

    # The leader of several hosts sends what all of them have encoded.
    is_here = all(device.process_index == jax.process_index() for device in home.mesh.devices.flat)
    encoded = NamedSharding(home.mesh, spec(cut.axes) if cut.axes and is_here else spec())
    return jax.jit(measure, out_shardings=(encoded, _named(rows, home)))


def tree_measure(rows: Rows, codec: str, home: Home) -> TreeMeasure:
    """Return what measures a fragment, and puts together on the host what several devices have encoded."""
    chosen, cut = codec_of(codec), cut_of(rows, home, codec)
    compiled = compiled_tree_measure(rows, codec, home)

    def measured(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        parts, after = compiled(reference, part)
        if cut.spread:
            parts = tuple(AssembledPart(i, chosen, cut, each) for i, each in enumerate(parts))
        return parts, after

    return measured


@cache
def whole_measure(rows: Rows, codec: str) -> TreeMeasure:
    """Measure tensors that are all on one device."""

    def cut(reference: Tensors, part: Tensors) -> jax.Array:
        return outer_gradient(rows, flatten(rows, reference), part)

    def move(_: jax.Array, reference: Tensors, parts: Parts) -> Tensors:
        return unflatten(rows, moved(codec, flatten(rows, reference), parts))

    return in_steps(jax.jit(cut), codec, jax.jit(move))


@cache
def thin_measure(rows: Rows, codec: str, size: int, shared_size: int) -> TreeMeasure:
    """Measure tensors that no device has a part of, with the program of the thin codec that fragments share."""
    cut = jax.jit(lambda reference, part: padded_gradient(rows, shared_size, flatten(rows, reference), part))

    def settled(reference: Tensors, parts_M: Parts, restored_M: jax.Array) -> tuple[Parts, Tensors]:
        parts, next_N = settle(codec, size, flatten(rows, reference), parts_M, restored_M)
        return parts, unflatten(rows, next_N)

    finish = jax.jit(settled)

    def measured(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        parts, after = finish(reference, *quantised(codec, cut(reference, part)))
        return parts, after

    return measured


@cache
def tree_adopt(rows: Rows, config: AdoptConfig, dtypes: Dtypes, home: Home) -> TreeAdopt:
    """Return what adopts a fragment's snapshot by the run's rule."""
    adopt, settle = partial(_adopt, rows, config, dtypes), _rounded
    if home.mesh is None:
        adopting, settling = jax.jit(adopt), jax.jit(settle)
    else:
        named = _named(rows, home)
        adopting, settling = jax.jit(adopt, out_shardings=(named, named, named)), jax.jit(settle, out_shardings=named)
    is_exact = all(dtype == "float32" for dtype in dtypes)

    def adopted(new: Tensors, part: Tensors, reference: Tensors) -> tuple[Tensors, Tensors]:
        held, next_reference, own = adopting(new, part, reference)
        # This is a program of its own: within one, XLA may leave out a rounding whose result becomes float32 again.
        return held, next_reference if is_exact else settling(next_reference, own, held)

    return adopted


def _adopt(
    rows: Rows, config: AdoptConfig, dtypes: Dtypes, new: Tensors, part: Tensors, reference: Tensors
) -> tuple[Tensors, Tensors, Tensors]:
    """Return the next tensors, and the next references and the next parameters as they are before rounding."""
    rule = RULES[config.rule]
    exact, after = {}, {}
    for tensor, _ in rows:
        name = tensor.name
        exact[name], after[name] = rule.adopt(new[name], part[name].astype(jnp.float32), reference[name])
    held = {t.name: exact[t.name].astype(dtype) for (t, _), dtype in zip(rows, dtypes, strict=True)}
    return held, after, exact


def _rounded(reference: Tensors, own: Tensors, held: Tensors) -> Tensors:
    """Return the references, moved by what rounding did to the parameters."""
    return {name: x + (held[name].astype(jnp.float32) - own[name]) for name, x in reference.items()}


def _named(rows: Rows, home: Home) -> dict[str, Sharding | None]:
    return {tensor.name: there for (tensor, _), there in zip(rows, home.tensors, strict=True)}


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
        self._homes = [home_of(rows, templates) for rows in self.layout]
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
                params[tensor.name] = own_copy(own, sharding_of(template))
            self.references.append(self._placed(p, held_N))
        return params

    def warm_up(self, tensors: Tensors) -> None:
        """Compile both directions of every fragment without changing anything."""
        for p, reference in enumerate(self.references):
            part = self._part(p, tensors)
            for codec in self._codecs(self.sizes[p]):
                self._tree_measure(p, codec)(reference, part)
            self._tree_adopt(p)(reference, part, reference)

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts, quantised where its shards lie."""
        measure = self._tree_measure(fragment, codec or self.codec)
        parts, self.references[fragment] = measure(self.references[fragment], self._part(fragment, tensors))
        return parts

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector) -> Tensors:
        """Return the leaves after the fragment's snapshot was adopted by the run's rule."""
        part, self.references[fragment] = self._tree_adopt(fragment)(
            self._placed(fragment, new_N), self._part(fragment, tensors), self.references[fragment]
        )
        return {**tensors, **{name: settled(leaf, self._templates[name]) for name, leaf in part.items()}}

    def _placed(self, fragment: int, vector_N: Vector) -> Tensors:
        """Return a fragment's vector as tensors on its devices, each of which gets its own shards only."""
        rows, home = self.layout[fragment], self._homes[fragment].tensors
        parts = [vector_N[offset : offset + tensor.size].reshape(tensor.shape) for tensor, offset in rows]
        placed = put(parts, list(home))
        return {tensor.name: leaf for (tensor, _), leaf in zip(rows, placed, strict=True)}

    def _part(self, fragment: int, tensors: Mapping[str, Any]) -> Tensors:
        rows, home = self.layout[fragment], self._homes[fragment].tensors
        return {t.name: at_home(tensors[t.name], there) for (t, _), there in zip(rows, home, strict=True)}

    def _tree_measure(self, fragment: int, codec: str) -> TreeMeasure:
        rows, home = self.layout[fragment], self._homes[fragment]
        cut = cut_of(rows, home, codec)
        if codec != self.codec and not cut.spread:  # the programs of the thin codec are shared
            return thin_measure(rows, codec, self.sizes[fragment], self.shared_size(fragment))
        if home.mesh is None:
            return whole_measure(rows, codec)
        return tree_measure(rows, codec, home)

    def _tree_adopt(self, fragment: int) -> TreeAdopt:
        return tree_adopt(self.layout[fragment], self._config, self._dtypes[fragment], self._homes[fragment])
