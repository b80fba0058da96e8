"""The replica of named arrays of any dtype on any devices of this host: a user's tree, or our models on a mesh.

The references are spread over devices as the parameters are. Fragments are measured and adopted in float32 where their
shards lie (see `cuts`). The rounding of a narrower dtype is no progress: the reference moves by it, or each round would
pull the run's parameters back to the numbers that the narrow dtype has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.arrays import Tensors, put
from archipelago.islands.sync.homes import at_home, home_of, own_copy, settled, sharding_of
from archipelago.islands.sync.replica import Replica
from archipelago.islands.sync.tree_programs import (
    TreeAdopt,
    TreeMeasure,
    cut_of,
    thin_measure,
    tree_adopt,
    tree_measure,
    whole_measure,
)


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
