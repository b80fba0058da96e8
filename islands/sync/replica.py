"""An island's view of the fragments: it measures contributions against references and adopts snapshots."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from archipelago.broker.codecs import TOP_BLOCK, Parts, Vector
from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.adoption import RULES, Adopt
from archipelago.islands.sync.arrays import Rows, Tensors, device_copy, flatten, unflatten
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
        self.rule = RULES[manifest.config.adopt.rule]
        #: One vector [N] for each fragment. A replica of several devices has tensors by name in its place.
        self.references: list[Any] = []
        self.codec = manifest.config.wire.up
        self.thin = manifest.config.thin
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
            for tensor, offset in rows
        }
        params: Tensors = device_copy(dict(sorted(parts.items())))
        return params

    def warm_up(self, tensors: Tensors) -> None:
        """Compile both directions of every fragment without changing anything."""
        for p, reference_N in enumerate(self.references):
            part = self._part(p, tensors)
            for codec in self._codecs(reference_N.size):
                self._measure(p, codec)(reference_N, part)
            self._adopt[p](reference_N, device_copy(part), reference_N)  # adopting uses up its tensors

    def _codecs(self, elements: int) -> list[str]:
        """Return the codecs that may be used for a fragment of this size."""
        may_be_thin = self.thin and codec_of(self.codec).encoded_size(elements) >= SMALL_BYTES
        return [self.codec, self.thin] if may_be_thin else [self.codec]

    def measure(self, fragment: int, tensors: Tensors, codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts, quantised on the device.

        The reference moves to what the merger will reconstruct.

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

    def _part(self, fragment: int, tensors: Tensors) -> Tensors:
        return {tensor.name: tensors[tensor.name] for tensor, _ in self.layout[fragment]}


# The caches below let all islands of one process, as in virtual time, share one compilation.
@cache
def _compiled_measure(rows: Rows, codec: str) -> Measure:
    return in_steps(jax.jit(partial(outer_gradient, rows)), codec, _compiled_move(codec))


@cache
def _padded_measure(rows: Rows, codec: str, size: int, padded_size: int) -> Measure:
    cut = jax.jit(partial(padded_gradient, rows, padded_size))
    finish = _compiled_settle(codec, size)

    def measure(reference_N: jax.Array, part: Tensors) -> tuple[Parts, jax.Array]:
        return finish(reference_N, *quantised(codec, cut(reference_N, part)))

    return measure


def in_steps(cut: Callable[..., jax.Array], codec: str, move: Callable[..., Any]) -> Callable[..., tuple[Parts, Any]]:
    """Return the function from references and tensors to the codec's parts and the next references.

    It runs three programs. In one program, XLA would find the scale of a block once for each of its elements, which
    takes four times as long on a CPU.

    Args:
        cut: Returns the outer gradient, from references and tensors.
        codec: The name of the codec.
        move: Returns the next references, from the outer gradient, references and the codec's parts.
    """

    def measure(reference: Any, part: Tensors) -> tuple[Parts, Any]:
        difference_N = cut(reference, part)
        parts = _compiled_quantise(codec)(difference_N)
        return parts, move(difference_N, reference, parts)

    return measure


@cache
def _compiled_move(codec: str) -> Callable[[jax.Array, jax.Array, Parts], jax.Array]:
    """Return the program to a fragment's next reference. Fragments of the same size share it.

    The next reference takes the place of the outer gradient in memory. New memory of a CPU costs more time than the
    arithmetic. What `float32` sends is the outer gradient itself, which therefore stays.
    """
    donated = () if codec == "float32" else (0,)
    return jax.jit(
        lambda _, reference_N, parts: moved(codec, reference_N, parts), donate_argnums=donated, keep_unused=True
    )


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
def _compiled_settle(codec: str, elements: int) -> Callable[[jax.Array, Parts, jax.Array], tuple[Parts, jax.Array]]:
    return jax.jit(partial(settle, codec, elements))


@cache
def _compiled_adopt(
    rows: Rows, config: AdoptConfig
) -> Callable[[jax.Array, Tensors, jax.Array], tuple[Tensors, jax.Array | None]]:
    return jax.jit(partial(_adopt, rows, RULES[config.rule].adopt), donate_argnames="part")


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


def padded_gradient(rows: Rows, padded_size: int, reference_N: jax.Array, part: Tensors) -> jax.Array:
    """Return a fragment's outer gradient, padded with zeros to [M]."""
    return jnp.pad(outer_gradient(rows, reference_N, part), (0, padded_size - reference_N.size))


def settle(
    codec: str, elements: int, reference_N: jax.Array, parts_M: Parts, restored_M: jax.Array
) -> tuple[Parts, jax.Array]:
    """Return the parts without the padding, and the next reference [N]."""
    layout = codec_of(codec).layout(elements)
    parts = tuple(part[:size] for part, (size, _) in zip(parts_M, layout, strict=True))
    return parts, reference_N - restored_M[:elements]


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
