"""An island's parameters, fragment by fragment: what it sends of them, and how it takes snapshots in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp

from archipelago.broker.codecs import TOP_BLOCK, Parts, Vector
from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import AdoptConfig
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.islands.models.interface import Params
from archipelago.islands.programs import Programs, copied
from archipelago.islands.sync.adoption import Adopt, build
from archipelago.islands.sync.uplink import SMALL_BYTES

Rows = tuple[tuple[Tensor, int], ...]
Measure = Callable[[jax.Array, Params], tuple[Parts, jax.Array]]
WASTE_MAX = 4 / 3
"""What fragments are filled up to, at most, as a multiple of their own size, so that one program quantises them all."""


def flatten(rows: Rows, params: Params) -> jax.Array:
    """A fragment's tensors as one float32 vector of N elements, in the manifest's order."""
    return jnp.concatenate([params[tensor.name].reshape(-1) for tensor, _ in rows])


def unflatten(rows: Rows, vector_N: jax.Array) -> Params:
    """The inverse of `flatten`."""
    return {t.name: vector_N[offset : offset + t.size].reshape(t.shape) for t, offset in rows}


class Replica:
    """References of every fragment; the parameters themselves belong to the inner loop and are passed in.

    The outer gradient is the reference minus the own parameters. After sending, the reference moves to the point that
    the merger will reconstruct (what the codec's rounding left out stays owed), so no progress is sent twice.
    """

    def __init__(self, manifest: Manifest, programs: Programs | None = None) -> None:
        """`programs`: where compiled ones are found and kept; by default nowhere."""
        self.layout = manifest.layout
        self.sizes = manifest.sizes
        self.rule = build(manifest.config.adopt)
        self.references: list[jax.Array] = []
        self.codec = manifest.config.wire.up
        self.thin = manifest.config.wire.thin
        self._kept = Programs(None) if programs is None else programs
        self._measure = cache(self._program_of)
        self._quantise = cache(self._quantise_of)
        self._adopt = [
            self._kept.keep(
                partial(_compiled_adopt, rows, manifest.config.adopt),
                ("adopt", rows, manifest.config.adopt),
                lambda new_N, part, reference_N: (part, 0),
            )
            for rows in self.layout
        ]

    def begin(self, vectors: list[Vector]) -> Params:
        """Takes over all fragments (float32 vectors) as they are, and gives the parameters."""
        self.references = jax.device_put(list(vectors))
        # Cut on the host, where that compiles nothing; copies, as the inner step donates its parameters, and the
        # references must outlive that.
        cut = {
            tensor.name: vector_N[offset : offset + tensor.size].reshape(tensor.shape)
            for rows, vector_N in zip(self.layout, vectors, strict=True)
            for tensor, offset in rows
        }
        params: Params = copied(dict(sorted(cut.items())))
        return params

    def warm_up(self, params: Params) -> None:
        """Compiles both directions of every fragment, and changes nothing."""
        for p, reference_N in enumerate(self.references):
            part = self._part(p, params)
            for codec in self._codecs(reference_N.size):
                self._measure(p, codec)(reference_N, part)
            self._adopt[p](reference_N, part, reference_N)

    def _codecs(self, elements: int) -> list[str]:
        """Those that a fragment of so many elements may be sent with."""
        may_be_thin = self.thin and codec_of(self.codec).encoded_size(elements) >= SMALL_BYTES
        return [self.codec, self.thin] if may_be_thin else [self.codec]

    def measure(self, fragment: int, params: Params, codec: str = "") -> Parts:
        """The outer gradient as the codec (by default the run's) sends it, quantised on the device.

        The reference moves to what the merger will reconstruct; what rounding left out stays owed.
        """
        program = self._measure(fragment, codec or self.codec)
        parts, self.references[fragment] = program(self.references[fragment], self._part(fragment, params))
        return parts

    def _program_of(self, fragment: int, codec: str) -> Measure:
        rows, size = self.layout[fragment], self.sizes[fragment]
        parts = (0,) * len(codec_of(codec).layout(size))
        if codec == self.codec:
            return self._kept.keep(
                partial(_compiled_measure, rows, codec), ("measure", rows, codec), lambda reference_N, part: (parts, 0)
            )
        # What is for thin links may be much to compile, and is wanted seldom: one program for fragments of like size.
        filled = _filled(size, max(self.sizes))
        difference = self._kept.keep(
            partial(_compiled_difference, rows, filled), ("difference", rows, filled), lambda reference_N, part: 0
        )
        quantise = self._quantise(codec)
        settle = self._kept.keep(
            partial(_compiled_settle, codec, size),
            ("settle", codec, size),
            lambda reference_N, parts_M, restored_M: (parts, 0),
        )

        def measure(reference_N: jax.Array, part: Params) -> tuple[Parts, jax.Array]:
            return settle(reference_N, *quantise(difference(reference_N, part)))

        return measure

    def _quantise_of(self, codec: str) -> Callable[[jax.Array], tuple[Parts, jax.Array]]:
        parts = (0,) * len(codec_of(codec).layout(1))
        return self._kept.keep(partial(_compiled_quantise, codec), ("quantise", codec), lambda values_M: (parts, 0))

    def adopt(self, fragment: int, params: Params, new_N: Vector) -> Params:
        """The parameters with the fragment's snapshot taken in by the run's adopt rule."""
        part, self.references[fragment] = self._adopt[fragment](
            jax.device_put(new_N), self._part(fragment, params), self.references[fragment]
        )
        return {**params, **part}

    def _part(self, fragment: int, params: Params) -> Params:
        return {tensor.name: params[tensor.name] for tensor, _ in self.layout[fragment]}


# One compilation a fragment and process, however many islands a process holds in virtual time.
@cache
def _compiled_measure(rows: Rows, codec: str) -> Measure:
    return jax.jit(partial(_measure, rows, codec))


@cache
def _compiled_difference(rows: Rows, filled: int) -> Callable[[jax.Array, Params], jax.Array]:
    return jax.jit(partial(_difference, rows, filled))


@cache
def _compiled_quantise(codec: str) -> Callable[[jax.Array], tuple[Parts, jax.Array]]:
    return jax.jit(partial(_quantise, codec))


@cache
def _compiled_settle(codec: str, elements: int) -> Callable[[jax.Array, Parts, jax.Array], tuple[Parts, jax.Array]]:
    return jax.jit(partial(_settle, codec, elements))


@cache
def _compiled_adopt(
    rows: Rows, config: AdoptConfig
) -> Callable[[jax.Array, Params, jax.Array], tuple[Params, jax.Array]]:
    return jax.jit(partial(_adopt, rows, build(config).adopt))


def _measure(rows: Rows, codec: str, reference_N: jax.Array, part: Params) -> tuple[Parts, jax.Array]:
    chosen = codec_of(codec)
    parts = chosen.quantise(reference_N - flatten(rows, part), jnp)
    return parts, reference_N - chosen.restore(parts, reference_N.size, jnp)


def _filled(elements: int, most: int) -> int:
    """So many and what fills them up to whole blocks of every codec: those of the largest, unless that is too much."""
    own, shared = (-(-count // TOP_BLOCK) * TOP_BLOCK for count in (elements, most))
    return shared if shared <= WASTE_MAX * own else own


def _difference(rows: Rows, filled: int, reference_N: jax.Array, part: Params) -> jax.Array:
    """The outer gradient with zeros after it, [M]."""
    return jnp.pad(reference_N - flatten(rows, part), (0, filled - reference_N.size))


def _quantise(codec: str, values_M: jax.Array) -> tuple[Parts, jax.Array]:
    chosen = codec_of(codec)
    parts_M = chosen.quantise(values_M, jnp)
    return parts_M, chosen.restore(parts_M, values_M.size, jnp)


def _settle(
    codec: str, elements: int, reference_N: jax.Array, parts_M: Parts, restored_M: jax.Array
) -> tuple[Parts, jax.Array]:
    """What of these is the fragment's, and the next reference."""
    layout = codec_of(codec).layout(elements)
    parts = tuple(part[:size] for part, (size, _) in zip(parts_M, layout, strict=True))
    return parts, reference_N - restored_M[:elements]


def _adopt(rows: Rows, rule: Adopt, new_N: jax.Array, part: Params, reference_N: jax.Array) -> tuple[Params, jax.Array]:
    own_N, next_reference_N = rule(new_N, flatten(rows, part), reference_N)
    return unflatten(rows, own_N), next_reference_N
