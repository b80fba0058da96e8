"""The codecs' rounding on the island's device, bit for bit that of `broker.codecs`: what a receiver will read."""

from __future__ import annotations

from collections.abc import Callable

import jax


def _bfloat16(values_N: jax.Array) -> jax.Array:
    # Not a pair of conversions, which the compiler may drop as excess precision.
    return jax.lax.reduce_precision(values_N, exponent_bits=8, mantissa_bits=7)


QUANTISE: dict[str, Callable[[jax.Array], jax.Array]] = {"float32": lambda values_N: values_N, "bfloat16": _bfloat16}
