"""Codecs: a flat float32 vector to bytes and back. To add one, write the three functions and register them.

`islands.quantise` holds the same rounding for the island's device; a test compares the two bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.errors import WireError

Vector = NDArray[np.float32]


class Codec(NamedTuple):
    """`encode` gives exactly `encoded_size(n)` bytes for n elements; `decode` gives n elements for exactly those."""

    encoded_size: Callable[[int], int]
    encode: Callable[[Vector], bytes]
    decode: Callable[[bytes], Vector]


def _encode_bfloat16(values_N: Vector) -> bytes:
    bits = np.ascontiguousarray(values_N, dtype="<f4").view(np.uint32)
    # Round to nearest, ties to even: add half of the dropped range, minus one when the kept part is even.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype("<u2")
    nan = np.isnan(values_N)
    if nan.any():  # rounding may carry a NaN's mantissa into infinity or over the sign
        rounded[nan] = ((bits[nan] >> 16) | 0x40).astype("<u2")
    return rounded.tobytes()


def _decode_bfloat16(body: bytes) -> Vector:
    return (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)


CODECS: dict[str, Codec] = {
    "float32": Codec(
        encoded_size=lambda n: 4 * n,
        encode=lambda values_N: np.ascontiguousarray(values_N, dtype="<f4").tobytes(),
        decode=lambda body: np.frombuffer(body, "<f4").astype(np.float32),
    ),
    "bfloat16": Codec(encoded_size=lambda n: 2 * n, encode=_encode_bfloat16, decode=_decode_bfloat16),
}


def codec(name: str) -> Codec:
    """The codec of that name. Raises WireError, since names arrive from outside."""
    try:
        return CODECS[name]
    except KeyError:
        raise WireError(f"codec {name[:32]!r} is unknown", f"Known: {', '.join(CODECS)}.") from None
