"""The replica of named arrays of any dtype, on any devices: a script's tree, or our models on one device or a mesh.

It measures contributions against references and adopts snapshots, in float32, where the arrays are. The rounding of a
narrower dtype is no progress: the reference moves by it, or each round would pull the run's parameters back to the
numbers that the narrow dtype has.

The reference of a fragment is one vector [N]. If tensors of the fragment are split over devices, it is a dictionary of
tensors that are split alike, and nothing is gathered (see `sharded_encoding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import TOP_BLOCK, Parts, Vector
from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.adoption import RULES, Adopt
from archipelago.islands.sync.arrays import (
    DeviceLayout,
    Rows,
    Tensors,
    device_copy,
    device_layout,
    flatten,
    own_copy,
    plain_templates,
    put,
    sharding_of,
    to_sharding,
    unflatten,
)
from archipelago.islands.sync.sharded_encoding import split_measure

#: From a fragment's reference and its tensors to the codec's parts and the next reference.
Measure = Callable[[Any, Tensors], tuple[Parts, Any]]
#: The dtype of each tensor of a fragment, in the order of its rows.
Dtypes = tuple[str, ...]

#: The thin codec pads a fragment to at most this multiple of its size, so that one program quantises several fragments.
PADDING_MAX = 4 / 3


class Replica:
    """The references of all fragments. The parameters belong to the loop and are passed in.

    The outer gradient of a fragment is its reference minus the island's own parameters. After sending, the reference
    moves to the point that the merger will reconstruct. The codec's rounding error thus goes into the next
    contribution, and no progress is sent twice.
    """

    def __init__(
        self, manifest: Manifest, templates: Mapping[str, jax.ShapeDtypeStruct] | None = None, *, donates: bool = False
    ) -> None:
        """Note where each tensor lives.

        Args:
            templates: The shape, dtype and sharding of each tensor by name. Without a sharding, a tensor is on the
                default device, and the loop's own computations may move it. None for float32 on that device.
            donates: Whether adopting a fragment uses up its tensors, so that the next ones take their place in memory.
        """
        self.layout = manifest.layout
        self.sizes = manifest.sizes
        #: One vector [N] for each fragment, or tensors by name if they are split over devices.
        self.references: list[Any] = []
        self.codec = manifest.config.wire.up
        self._codecs = [manifest.codecs(p) for p in range(len(self.sizes))]
        self._config, self._donates = manifest.config.adopt, donates
        self._templates = plain_templates(manifest.tensors) if templates is None else templates
        #: Where the loop uses each tensor; None for the default device.
        self._shardings = {name: sharding_of(template) for name, template in self._templates.items()}
        # The value of this thread, which is the loop's.
        self._default = jax.config.jax_default_device  # type: ignore[attr-defined]
        self._device_layouts = [device_layout(rows, self._templates) for rows in self.layout]
        self._dtypes = [tuple(str(self._templates[tensor.name].dtype) for tensor, _ in rows) for rows in self.layout]

    def begin(self, vectors: list[Vector]) -> Tensors:
        """Start from these float32 vectors, one for each fragment, and return the parameters by name."""
        params: Tensors = {}
        self.references = []
        for p, (rows, vector_N) in enumerate(zip(self.layout, vectors, strict=True)):
            is_exact = _is_exact(self._dtypes[p])
            held_N = vector_N if is_exact else np.array(vector_N)
            for tensor, offset in [] if is_exact else rows:
                part = held_N[offset : offset + tensor.size]
                part[:] = part.astype(self._templates[tensor.name].dtype)
            params |= self._tensors(p, held_N)
            self.references.append(self._placed(p, held_N))
        return dict(sorted(params.items()))

    def merged(self, vectors: Sequence[Vector]) -> Tensors:
        """Return the parameters by name in these float32 vectors, and keep the island's own."""
        return {name: leaf for p, vector_N in enumerate(vectors) for name, leaf in self._tensors(p, vector_N).items()}

    def _tensors(self, fragment: int, vector_N: Vector) -> Tensors:
        """Return new arrays of a fragment, which a loop may donate. Slicing on the host compiles nothing."""
        found = {}
        for tensor, offset in self.layout[fragment]:
            own = vector_N[offset : offset + tensor.size].reshape(tensor.shape)
            own = own.astype(self._templates[tensor.name].dtype)
            found[tensor.name] = own_copy(own, self._shardings[tensor.name])
        return found

    def warm_up(self, tensors: Mapping[str, Any]) -> None:
        """Compile both directions of every fragment without changing anything."""
        for p, reference in enumerate(self.references):
            part = self._part(p, tensors)
            for codec in self._codecs[p]:
                jax.block_until_ready(self._measure(p, codec)(reference, part))  # type: ignore[no-untyped-call]
            jax.block_until_ready(self._adopted(p, reference, device_copy(part) if self._donates else part))  # type: ignore[no-untyped-call]

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts, quantised where its tensors are.

        The reference moves to what the merger will reconstruct.

        Args:
            tensors: The island's tensors, at least those of the fragment.
            codec: The name of the codec; the run's codec by default.
        """
        measure = self._measure(fragment, codec or self.codec)
        parts, self.references[fragment] = measure(self.references[fragment], self._part(fragment, tensors))
        return parts

    def _measure(self, fragment: int, codec: str) -> Measure:
        rows, size, devices = self.layout[fragment], self.sizes[fragment], self._device_layouts[fragment]
        if devices.is_split:
            return split_measure(rows, codec, devices)
        # The thin codec is slow to compile and rarely used, so fragments of similar size share one program.
        padding = 0 if codec == self.codec else _padded_size(size, max(self.sizes)) - size
        return _compiled_measure(rows, codec, padding)

    def prepare(self, fragment: int, new_N: Vector) -> Any:
        """Bring a fragment's snapshot to the device, in the link's thread. `adopt` takes the result."""
        return self._placed(fragment, new_N)

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Any) -> Tensors:
        """Return the tensors after the fragment's snapshot, which may be prepared, was adopted by the run's rule."""
        new = self._placed(fragment, new_N) if isinstance(new_N, np.ndarray) else new_N
        part, self.references[fragment] = self._adopted(fragment, new, self._part(fragment, tensors))
        used = ((name, leaf, self._shardings[name]) for name, leaf in part.items())
        return {**tensors, **{name: leaf if where is None else to_sharding(leaf, where) for name, leaf, where in used}}

    def _adopted(self, fragment: int, new: Any, part: Tensors) -> tuple[Tensors, Any]:
        """Return a fragment's next tensors and its next reference."""
        rows, devices = self.layout[fragment], self._device_layouts[fragment]
        adopt = _compiled_adopt(rows, self._config, self._dtypes[fragment], devices, self._donates)
        held, moved, exact = adopt(new, part, self.references[fragment])
        after = new if moved is None else moved
        return held, after if exact is None else _compiled_rounding(rows, devices)(after, exact, held)

    def _placed(self, fragment: int, vector_N: Vector) -> Any:
        """Return a fragment's vector on its devices, as a reference is kept. Each device gets its own shards only."""
        rows, devices = self.layout[fragment], self._device_layouts[fragment]
        if not devices.is_split and devices.whole is not None:
            return put(vector_N, devices.whole)
        if not devices.is_split:
            with jax.default_device(self._default):  # a committed array would not follow those of the loop
                return jax.device_put(vector_N)
        parts = [vector_N[offset : offset + tensor.size].reshape(tensor.shape) for tensor, offset in rows]
        return dict(zip((tensor.name for tensor, _ in rows), put(parts, list(devices.tensors)), strict=True))

    def _part(self, fragment: int, tensors: Mapping[str, Any]) -> Tensors:
        part = {t.name: tensors[t.name] for t, _ in self.layout[fragment]}
        places = zip(part.items(), self._device_layouts[fragment].tensors, strict=True)
        return {name: jnp.asarray(x) if there is None else to_sharding(x, there) for (name, x), there in places}


# The caches below let all islands of one process, as in virtual time, share one compilation.
@cache
def _compiled_measure(rows: Rows, codec: str, padding: int) -> Measure:
    """Return what measures a fragment whose tensors are whole, and which is quantised with that many zeros at its end.

    It runs three programs. In one program, XLA would find the scale of a block once for each of its elements, which
    takes four times as long on a CPU.
    """
    subtract = jax.jit(lambda reference_N, part: jnp.pad(outer_gradient(rows, reference_N, part), (0, padding)))
    move = _compiled_move(codec, not padding)

    def measure(reference_N: jax.Array, part: Tensors) -> tuple[Parts, jax.Array]:
        difference_M = subtract(reference_N, part)
        parts: Parts = _compiled_quantise(codec)(difference_M)
        if padding:
            layout = codec_of(codec).layout(reference_N.size)
            parts = tuple(each[:size] for each, (size, _) in zip(parts, layout, strict=True))
        return parts, move(difference_M, reference_N, parts)

    return measure


@cache
def _compiled_move(codec: str, has_its_size: bool) -> Callable[[jax.Array, jax.Array, Parts], jax.Array]:
    """Return the program to a fragment's next reference. Fragments of the same size share it.

    The next reference takes the place of the outer gradient in memory, if that has its size. New memory of a CPU costs
    more time than the arithmetic. What `float32` sends is the outer gradient itself, which therefore stays.
    """
    donated = (0,) if has_its_size and codec != "float32" else ()
    return jax.jit(
        lambda _, reference_N, parts: moved(codec, reference_N, parts), donate_argnums=donated, keep_unused=True
    )


@cache
def _compiled_quantise(codec: str) -> Callable[[jax.Array], Parts]:
    return jax.jit(lambda values_M: codec_of(codec).quantise(values_M, jnp))


@cache
def _compiled_adopt(rows: Rows, config: AdoptConfig, dtypes: Dtypes, devices: DeviceLayout, donates: bool) -> Any:
    adopt = partial(_adopt, rows, RULES[config.rule], dtypes, devices.is_split)
    places = None if devices.mesh is None else (devices.by_name(rows), None, None)
    return jax.jit(adopt, donate_argnames="part" if donates else None, out_shardings=places)


@cache
def _compiled_rounding(rows: Rows, devices: DeviceLayout) -> Any:
    """Return the program to a reference that has moved by what rounding did to the parameters.

    It is a program of its own: within one, XLA may leave out a rounding whose result becomes float32 again.
    """
    places = devices.by_name(rows) if devices.is_split else devices.whole
    return jax.jit(partial(_rounded, rows, devices.is_split), out_shardings=places)


def outer_gradient(rows: Rows, reference_N: jax.Array, part: Tensors) -> jax.Array:
    """Return a fragment's outer gradient [N]."""
    return reference_N - flatten(rows, part)


def moved(codec: str, reference_N: jax.Array, parts: Parts) -> jax.Array:
    """Return the reference [N] after the parts were sent."""
    restored_N: jax.Array = codec_of(codec).restore(parts, reference_N.size, jnp)
    return reference_N - restored_N


def _padded_size(elements: int, largest: int) -> int:
    """Return the size after padding to whole blocks: the largest fragment's, unless that wastes too much."""
    own, shared = (-(-count // TOP_BLOCK) * TOP_BLOCK for count in (elements, largest))
    return shared if shared <= PADDING_MAX * own else own


def _adopt(
    rows: Rows, rule: Adopt, dtypes: Dtypes, is_split: bool, new: Any, part: Tensors, reference: Any
) -> tuple[Tensors, Any, Tensors | None]:
    """Return the next tensors, the next reference, and the next tensors before rounding.

    The reference is None if it is the snapshot itself, because a program that returned the snapshot would copy it. The
    tensors before rounding are None if no dtype rounds them.
    """
    news, references = (each if is_split else unflatten(rows, each) for each in (new, reference))
    adopted = {name: rule(news[name], part[name].astype(jnp.float32), references[name]) for name in news}
    exact = {name: own for name, (own, _) in adopted.items()}
    held = {tensor.name: exact[tensor.name].astype(dtype) for (tensor, _), dtype in zip(rows, dtypes, strict=True)}
    before = None if _is_exact(dtypes) else exact
    if all(after is news[name] for name, (_, after) in adopted.items()):
        return held, None, before
    next_reference = {name: after for name, (_, after) in adopted.items()}
    return held, next_reference if is_split else flatten(rows, next_reference), before


def _is_exact(dtypes: Dtypes) -> bool:
    """Return whether no dtype of a fragment's tensors rounds float32."""
    return all(dtype == "float32" for dtype in dtypes)


def _rounded(rows: Rows, is_split: bool, reference: Any, exact: Tensors, held: Tensors) -> Any:
    """Return the reference, moved by what rounding did to the parameters."""
    by = {name: own.astype(jnp.float32) - exact[name] for name, own in held.items()}
    return {name: x + by[name] for name, x in reference.items()} if is_split else reference + flatten(rows, by)
