"""An island's view of the fragments: it measures contributions against references and adopts snapshots."""

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
from archipelago.islands.sync.adoption import Adopt, AdoptRule, build
from archipelago.islands.sync.arrays import (
    Rows,
    Tensors,
    device_copy,
    flatten,
    parameter_rows,
    parameters_in,
    unflatten,
)
from archipelago.islands.sync.connection.uplink import SMALL_BYTES

#: From a reference [N] and a fragment's tensors to the codec's parts and the next reference.
Measure = Callable[[jax.Array, Tensors], tuple[Parts, jax.Array]]

#: The thin codec pads a fragment to at most this multiple of its size, so that one program quantises several fragments.
PADDING_MAX = 4 / 3


class Replica:
    """The references of all fragments. The parameters belong to the inner loop and are passed in.

    The outer gradient of a fragment is its reference minus the island's own parameters. After sending, the reference
    moves to the point that the merger will reconstruct. The codec's rounding error thus goes into the next
    contribution, and no progress is sent twice.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.layout = manifest.layout
        self.sizes = manifest.sizes
        self.rule = build(manifest.config.adopt)
        #: One vector [N] for each fragment. A replica of several devices has tensors by name in its place.
        self.references: list[Any] = []
        self.codec = manifest.config.wire.up
        self.thin = manifest.config.wire.thin
        self._config = manifest.config.adopt
        self._adopt = [_compiled_adopt(rows, manifest.config.adopt) for rows in self.layout]

    def begin(self, vectors: list[Vector]) -> Tensors:
        """Start from these float32 vectors, one for each fragment, and return the parameters by name."""
        self.references = jax.device_put(list(vectors))
        # Slicing on the host compiles nothing. The copies protect the references, because the inner step donates its
        # parameters.
        parts = {
            tensor.name: vector_N[offset : offset + tensor.size].reshape(tensor.shape)
            for rows, vector_N in zip(self.layout, vectors, strict=True)
            for tensor, offset in parameter_rows(rows)
        }
        params: Tensors = device_copy(dict(sorted(parts.items())))
        return params

    def restore(self, references: Sequence[Mapping[str, Any]]) -> None:
        """Continue from these references of each fragment by tensor name."""
        self.references = [
            jax.device_put(np.concatenate([np.asarray(found[tensor.name]).reshape(-1) for tensor, _ in rows]))
            for rows, found in zip(self.layout, references, strict=True)
        ]

    def warm_up(self, tensors: Tensors, share: jax.Array | None = None) -> None:
        """Compile both directions of every fragment without changing anything. `share` is that of first moments."""
        for p, reference_N in enumerate(self.references):
            part = self._part(p, tensors)
            for codec in self._codecs(reference_N.size):
                self._measure(p, codec)(reference_N, part)
            part = device_copy(part)  # adopting uses up its tensors
            if share is None:
                self._adopt[p](reference_N, part, reference_N)
            else:
                _compiled_adopt_with_moments(self.layout[p], self._config)(reference_N, part, reference_N, share)

    def _codecs(self, elements: int) -> list[str]:
        """Return the codecs that may be used for a fragment of this size."""
        may_be_thin = self.thin and codec_of(self.codec).encoded_size(elements) >= SMALL_BYTES
        return [self.codec, self.thin] if may_be_thin else [self.codec]

    def measure(self, fragment: int, tensors: Tensors, codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts, quantised on the device.

        The reference moves to what the merger will reconstruct. First moments are sent as they are.

        Args:
            fragment: The fragment's number.
            tensors: The island's tensors, at least those of the fragment.
            codec: The name of the codec; the run's codec by default.
        """
        measure = self._measure(fragment, codec or self.codec)
        parts, self.references[fragment] = measure(self.references[fragment], self._part(fragment, tensors))
        return parts

    def _measure(self, fragment: int, codec: str) -> Measure:
        rows, size = self.layout[fragment], self.sizes[fragment]
        if codec == self.codec:
            return _compiled_measure(rows, codec)
        # The thin codec is slow to compile and rarely used, so fragments of similar size share one program.
        return _padded_measure(rows, codec, size, self.shared_size(fragment))

    def shared_size(self, fragment: int) -> int:
        """Return the size to which a fragment is padded for the thin codec."""
        return _padded_size(self.sizes[fragment], max(self.sizes))

    def adopt(self, fragment: int, tensors: Tensors, new_N: Vector) -> Tensors:
        """Return the tensors after the fragment's snapshot was adopted by the run's rule.

        The fragment's own tensors are used up: the next ones take their place in memory.
        """
        placed_N = jax.device_put(new_N)
        part, moved_N = self._adopt[fragment](placed_N, self._part(fragment, tensors), self.references[fragment])
        self.references[fragment] = placed_N if moved_N is None else moved_N
        return {**tensors, **part}

    def adopt_with_moments(self, fragment: int, tensors: Tensors, new_N: Vector, share: jax.Array) -> Tensors:
        """Return the tensors after a fragment with first moments was adopted. Its own tensors are used up.

        `share` is what is left of the first moments that were sent last.
        """
        placed_N = jax.device_put(new_N)
        part, moved_N = _compiled_adopt_with_moments(self.layout[fragment], self._config)(
            placed_N, self._part(fragment, tensors), self.references[fragment], share
        )
        self.references[fragment] = placed_N if moved_N is None else moved_N
        return {**tensors, **part}

    def _part(self, fragment: int, tensors: Tensors) -> Tensors:
        return {tensor.name: tensors[tensor.name] for tensor, _ in self.layout[fragment]}


# The caches below let all islands of one process, as in virtual time, share one compilation.
@cache
def _compiled_measure(rows: Rows, codec: str) -> Measure:
    return in_steps(partial(outer_gradient, rows), codec, partial(moved, rows, codec), reuses_memory=True)


@cache
def _padded_measure(rows: Rows, codec: str, size: int, padded_size: int) -> Measure:
    cut = jax.jit(partial(difference, rows, padded_size))
    finish = _compiled_settle(codec, size, parameters_in(rows))

    def measure(reference_N: jax.Array, part: Tensors) -> tuple[Parts, jax.Array]:
        difference_M, reference_N = cut(reference_N, part)
        return finish(reference_N, *quantised(codec, difference_M))

    return measure


def in_steps(
    cut: Callable[..., jax.Array], codec: str, move: Callable[..., Any], *, reuses_memory: bool = False
) -> Callable[..., tuple[Parts, Any]]:
    """Return the function from references and tensors to the codec's parts and the next references.

    It runs three programs. In one program, XLA would find the scale of a block once for each of its elements, which
    takes four times as long on a CPU.

    Args:
        cut: Returns the outer gradient, from references and tensors.
        codec: The name of the codec.
        move: Returns the next references, from references, tensors and the codec's parts.
        reuses_memory: Whether the next references, which are one vector, take the place of the outer gradient in
            memory. New memory of a CPU costs more time than the arithmetic.
    """
    # What `float32` sends is the outer gradient itself.
    donated = (0,) if reuses_memory and codec != "float32" else ()
    cutting = jax.jit(cut)
    moving = jax.jit(lambda _, *arguments: move(*arguments), donate_argnums=donated, keep_unused=bool(donated))

    def measure(reference: Any, part: Tensors) -> tuple[Parts, Any]:
        difference_N = cutting(reference, part)
        parts = _compiled_quantise(codec)(difference_N)
        return parts, moving(difference_N, reference, part, parts)

    return measure


def quantised(codec: str, values_M: jax.Array) -> tuple[Parts, jax.Array]:
    """Return the codec's parts of a vector, and the vector that a receiver will read. Two programs (`in_steps`)."""
    parts_M = _compiled_quantise(codec)(values_M)
    return parts_M, _compiled_restore(codec, values_M.size)(parts_M)


@cache
def _compiled_quantise(codec: str) -> Callable[[jax.Array], Parts]:
    return jax.jit(lambda values_M: codec_of(codec).quantise(values_M, jnp))


@cache
def _compiled_restore(codec: str, elements: int) -> Callable[[Parts], jax.Array]:
    return jax.jit(lambda parts_M: codec_of(codec).restore(parts_M, elements, jnp))


@cache
def _compiled_settle(
    codec: str, elements: int, start: int
) -> Callable[[jax.Array, Parts, jax.Array], tuple[Parts, jax.Array]]:
    return jax.jit(partial(settle, codec, elements, start))


@cache
def _compiled_adopt(
    rows: Rows, config: AdoptConfig
) -> Callable[[jax.Array, Tensors, jax.Array], tuple[Tensors, jax.Array | None]]:
    return jax.jit(partial(_adopt, rows, build(config).adopt), donate_argnames="part")


@cache
def _compiled_adopt_with_moments(
    rows: Rows, config: AdoptConfig
) -> Callable[[jax.Array, Tensors, jax.Array, jax.Array], tuple[Tensors, jax.Array | None]]:
    return jax.jit(partial(_adopt_with_moments, rows, build(config)), donate_argnames="part")


def outer_gradient(rows: Rows, reference_N: jax.Array, part: Tensors) -> jax.Array:
    """Return a fragment's outer gradient [N], with first moments as they are."""
    own_N = flatten(rows, part)
    return _with_moments_of(own_N, reference_N - own_N, parameters_in(rows))


def moved(rows: Rows, codec: str, reference_N: jax.Array, part: Tensors, parts: Parts) -> jax.Array:
    """Return the reference [N] after the parts were sent, with first moments as they are."""
    restored_N = codec_of(codec).restore(parts, reference_N.size, jnp)
    return _with_moments_of(flatten(rows, part), reference_N - restored_N, parameters_in(rows))


def _padded_size(elements: int, largest: int) -> int:
    """Return the size after padding to whole blocks: the largest fragment's, unless that wastes too much."""
    own, shared = (-(-count // TOP_BLOCK) * TOP_BLOCK for count in (elements, largest))
    return shared if shared <= PADDING_MAX * own else own


def difference(rows: Rows, padded_size: int, reference_N: jax.Array, part: Tensors) -> tuple[jax.Array, jax.Array]:
    """Return the outer gradient, padded with zeros to [M], and the reference with the present first moments.

    First moments are sent as zeros, which stand for none, because the thin codec would leave few of them.
    """
    own_N, start = flatten(rows, part), parameters_in(rows)
    values_N = (reference_N - own_N)[:start]
    return jnp.pad(values_N, (0, padded_size - start)), _with_moments_of(own_N, reference_N, start)


def _with_moments_of(own_N: jax.Array, vector_N: jax.Array, start: int) -> jax.Array:
    """Return the vector with the first moments of `own_N`, which begin at `start`."""
    return vector_N if start == own_N.size else jnp.concatenate([vector_N[:start], own_N[start:]])


def settle(
    codec: str, elements: int, start: int, reference_N: jax.Array, parts_M: Parts, restored_M: jax.Array
) -> tuple[Parts, jax.Array]:
    """Return the parts without the padding, and the next reference [N], whose first moments begin at `start`."""
    layout = codec_of(codec).layout(elements)
    parts = tuple(part[:size] for part, (size, _) in zip(parts_M, layout, strict=True))
    return parts, _with_moments_of(reference_N, reference_N - restored_M[:elements], start)


def _adopt(
    rows: Rows, rule: Adopt, new_N: jax.Array, part: Tensors, reference_N: jax.Array
) -> tuple[Tensors, jax.Array | None]:
    """Return the next parameters, tensor by tensor, and the next reference [N]; None if that is the snapshot itself.

    A program that returned the snapshot would copy it.
    """
    new, reference = unflatten(rows, new_N), unflatten(rows, reference_N)
    adopted = {name: rule(new[name], part[name].astype(jnp.float32), reference[name]) for name in new}
    params = {name: own for name, (own, _) in adopted.items()}
    if all(moved is new[name] for name, (_, moved) in adopted.items()):
        return params, None
    return params, flatten(rows, {name: moved for name, (_, moved) in adopted.items()})


def _adopt_with_moments(
    rows: Rows, rule: AdoptRule, new_N: jax.Array, part: Tensors, reference_N: jax.Array, share: jax.Array
) -> tuple[Tensors, jax.Array | None]:
    own_N, start = flatten(rows, part), parameters_in(rows)
    next_N, next_reference_N = rule.adopt(new_N, own_N, reference_N)
    moments = moments_after(rule, new_N[start:], own_N[start:], reference_N[start:], share)
    return unflatten(
        rows, jnp.concatenate([next_N[:start], moments])
    ), None if next_reference_N is new_N else next_reference_N


def moments_after(
    rule: AdoptRule,
    new_N: jax.Array,
    own_N: jax.Array,
    reference_N: jax.Array,
    share: jax.Array,
    are_there: jax.Array | None = None,
) -> jax.Array:
    """Return an island's first moments after it adopted a snapshot.

    A rule that keeps progress adds the snapshot's minus those that the island sent last. A moment forgets, so only the
    `share` that is left of those is replaced. Zeros stand for a snapshot without moments; the island keeps its own.
    `are_there` says whether the snapshot has any, if the vectors are a part of them.
    """
    adopted_N = own_N + share * (new_N - reference_N) if rule.keeps_progress else new_N
    return jnp.where(jnp.any(new_N != 0.0) if are_there is None else are_there, adopted_N, own_N)
