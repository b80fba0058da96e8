"""Codecs: a flat float32 vector to bytes and back, lossy or not, with a bound on the error.

A codec is two functions over arrays, written in what numpy and `jax.numpy` have in common: `quantise` gives the arrays
whose bytes travel, `restore` the values that a receiver reads. The merger runs them in numpy, an island inside JAX on
its device; so both find the same bits, and a test says so. Scales are bfloat16: a product of one with a small integer
or a power of two is exact in float32, so that no compiler's fusing changes it.

To add a codec: its two functions and its sizes, in CODECS, and its name in `WireConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from archipelago.broker.errors import WireError

Vector = NDArray[np.float32]
Array = Any
"""of numpy or of JAX, whichever namespace `xp` is"""
Parts = tuple[Array, ...]

INT8_BLOCK, INT4_BLOCK = 256, 128
"""elements that share a scale"""
TOP_BLOCK, TOP_KEPT = 4096, 128
TOP_UNITS, TOP_LARGE = np.float32(4096), 2458
"""magnitudes of what is kept are summed in units of 1/4096 of the largest; from 0.6 of it on they count as large"""
PIECE = 16 * TOP_BLOCK
"""elements that numpy works on at a time: what it makes in between stays in the cache. Whole blocks of every codec."""
TINY, HUGE = np.float32(2.0**-100), np.float32(2.0**110)
"""blocks below the first are zero (some devices flush what is smaller); values over the second are cut to it"""


class Codec(NamedTuple):
    """`quantise(values_N, xp)` gives flat arrays of the sizes and types in `layout(N)`; `restore(parts, N, xp)` [N]."""

    layout: Callable[[int], tuple[tuple[int, DTypeLike], ...]]
    quantise: Callable[[Array, Any], Parts]
    restore: Callable[[Parts, int, Any], Array]
    error_bound: Callable[[Vector], Vector]
    """of each element, the most that `restore` may be off, for finite values up to HUGE"""

    def encoded_size(self, elements: int) -> int:
        """Bytes of a body for so many elements."""
        return sum(size * np.dtype(kind).itemsize for size, kind in self.layout(elements))

    def encode(self, values_N: Vector) -> bytes:
        """A body of exactly `encoded_size(N)` bytes."""
        values_N = np.ascontiguousarray(values_N, np.float32)
        parts = [np.empty(size, kind) for size, kind in self.layout(values_N.size)]
        with np.errstate(invalid="ignore"):
            for start in range(0, values_N.size, PIECE):
                piece = self.quantise(values_N[start : start + PIECE], np)
                for part, found, (first, _) in zip(parts, piece, self.layout(start), strict=True):
                    part[first : first + found.size] = found
        return body_of(tuple(parts))

    def parts_of(self, body: bytes | memoryview, elements: int) -> tuple[Any, ...]:
        """The arrays in a body of exactly `encoded_size(elements)` bytes, where they lie."""
        parts, at = [], 0
        for size, kind in self.layout(elements):
            parts.append(np.frombuffer(body, np.dtype(kind).newbyteorder("<"), size, at).astype(kind, copy=False))
            at += parts[-1].nbytes
        return tuple(parts)

    def decode(self, body: bytes | memoryview, elements: int) -> Vector:
        """The float32 vector in a body of exactly `encoded_size(elements)` bytes."""
        parts, values_N = self.parts_of(body, elements), np.empty(elements, np.float32)
        with np.errstate(all="ignore"):  # a hostile body may hold any scale: whoever reads it looks for NaN
            for start in range(0, elements, PIECE):
                end = min(start + PIECE, elements)
                cuts = zip(self.layout(start), self.layout(end), strict=True)
                piece = tuple(part[a:b] for part, ((a, _), (b, _)) in zip(parts, cuts, strict=True))
                values_N[start:end] = self.restore(piece, end - start, np)
        return values_N


def body_of(parts: Parts) -> bytes:
    """The bytes of quantised arrays, little-endian, one after the other."""
    arrays = [np.asarray(part) for part in parts]
    return b"".join(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data for array in arrays)


def _blocks(values_N: Array, size: int, xp: Any) -> Array:
    """As rows of `size` elements, the last one filled with zeros."""
    missing = -values_N.shape[0] % size
    return xp.concatenate([values_N, xp.zeros(missing, np.float32)]).reshape(-1, size)


def _count(elements: int, size: int) -> int:
    return -(-elements // size)


def _to_bfloat16(values: Array, xp: Any) -> Array:
    """The upper halves of float32 numbers, rounded to nearest, ties to even; uint16."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding may carry a NaN's mantissa into infinity
    return xp.where(xp.isnan(values), quiet, rounded).astype(np.uint16)


def _from_bfloat16(bits: Array, xp: Any) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scales(top: Array, xp: Any) -> tuple[Array, Array]:
    """Scales as they travel (uint16), and what to divide by: 1 where a block is zero."""
    bits = _to_bfloat16(xp.where(top < TINY, np.float32(0), top), xp)
    scale = _from_bfloat16(bits, xp)
    return bits, xp.where(scale > 0, scale, np.float32(1))


def _row_tops(magnitudes: Array, xp: Any) -> Array:
    """The largest of each row, whose length is a power of two; NaN where there is one."""
    if xp is np:
        return np.max(magnitudes, axis=1)
    while magnitudes.shape[1] > 1:  # halves against each other: XLA takes rows one number at a time, these many at once
        half = magnitudes.shape[1] // 2
        magnitudes = xp.maximum(magnitudes[:, :half], magnitudes[:, half:])
    return magnitudes[:, 0]


def _tops(blocks: Array, xp: Any) -> Array:
    """The largest magnitude of each row, at most HUGE; NaN where there is a NaN or an infinity."""
    top = _row_tops(xp.abs(blocks), xp)
    return xp.where(xp.isfinite(top), xp.minimum(top, HUGE), np.float32(np.nan))


def _rounded(ratio: Array, most: int, xp: Any) -> Array:
    """Whole numbers within ±most; 0 for NaN, whose block has a scale that tells."""
    if xp is np and not np.isnan(ratio).any():  # the rule, and half the passes
        whole = np.rint(ratio)
        return np.clip(whole, np.float32(-most), np.float32(most), out=whole)
    return xp.clip(xp.where(xp.isnan(ratio), np.float32(0), xp.round(ratio)), -most, most)


def _quantise_int8(values_N: Array, xp: Any) -> Parts:
    blocks = _blocks(values_N, INT8_BLOCK, xp)
    bits, divisor = _scales(_tops(blocks, xp) / np.float32(127), xp)
    return bits, _rounded(blocks / divisor[:, None], 127, xp).astype(np.int8).reshape(-1)


def _restore_int8(parts: Parts, elements: int, xp: Any) -> Array:
    bits, codes = parts
    values = codes.reshape(-1, INT8_BLOCK).astype(np.float32) * _from_bfloat16(bits, xp)[:, None]
    return values.reshape(-1)[:elements]


def _pack_nibbles(codes: Array) -> Array:
    """Codes of 0 to 15 (uint8, rows of a block) two a byte: the block's first half low, its second half high.

    So both halves lie in one piece, which numpy and XLA handle many at a time.
    """
    half = codes.shape[1] // 2
    return (codes[:, :half] | (codes[:, half:] << np.uint8(4))).reshape(-1)


def _unpack_nibbles(packed: Array, xp: Any) -> Array:
    """As rows of a block."""
    rows = packed.reshape(-1, INT4_BLOCK // 2)
    return xp.concatenate([rows & np.uint8(15), rows >> np.uint8(4)], axis=1)


def _quantise_int4(values_N: Array, xp: Any) -> Parts:
    blocks = _blocks(values_N, INT4_BLOCK, xp)
    bits, divisor = _scales(_tops(blocks, xp) / np.float32(7), xp)
    codes = _rounded(blocks / divisor[:, None], 7, xp) + np.float32(8)
    return bits, _pack_nibbles(codes.astype(np.uint8))


def _restore_int4(parts: Parts, elements: int, xp: Any) -> Array:
    bits, packed = parts
    codes = _unpack_nibbles(packed, xp).astype(np.float32) - np.float32(8)
    return (codes * _from_bfloat16(bits, xp)[:, None]).reshape(-1)[:elements]


def _quantise_e3m0(values_N: Array, xp: Any) -> Parts:
    """A sign and three bits of exponent: 0, or the block's largest times 2^−6 … 2^0; the nearest of them."""
    blocks = _blocks(values_N, INT4_BLOCK, xp)
    bits, divisor = _scales(_tops(blocks, xp), xp)
    ratio = xp.abs(blocks) / divisor[:, None]
    ratio = xp.where(xp.isnan(ratio), np.float32(0), ratio)
    # Adding half of a mantissa carries into the exponent from 1.5 on, half-way to the next power of two.
    power = ((ratio.view(np.uint32) + np.uint32(0x400000)) >> np.uint32(23)).astype(np.int32) - 127
    level = xp.clip(power + 7, 0, 7)
    level = xp.where((ratio >= np.float32(2.0**-7)) & (level < 1), 1, level).astype(np.uint8)
    negative = ((blocks < 0) & (level > 0)).astype(np.uint8)
    return bits, _pack_nibbles(level | (negative << np.uint8(3)))


def _restore_e3m0(parts: Parts, elements: int, xp: Any) -> Array:
    bits, packed = parts
    codes = _unpack_nibbles(packed, xp)
    level = (codes & np.uint8(7)).astype(np.uint32)
    power = ((level + np.uint32(120)) << np.uint32(23)).view(np.float32)  # 2^(level − 7)
    magnitude = xp.where(level > 0, power, np.float32(0))
    signed = xp.where(codes > 7, -magnitude, magnitude)
    return (signed * _from_bfloat16(bits, xp)[:, None]).reshape(-1)[:elements]


def _quantise_top(values_N: Array, xp: Any) -> Parts:
    """Of each block the TOP_KEPT largest, each as ± the mean of the larger or of the smaller ones; the rest is zero.

    A mean is never further off than zero would be, however sparse the block: so what stays with the sender shrinks.
    The means are sums of whole numbers, which come out the same in any order.
    """
    blocks = _blocks(values_N, TOP_BLOCK, xp)
    top = _tops(blocks, xp)
    kept = _largest(blocks, TOP_KEPT, xp)
    values = xp.take_along_axis(blocks, kept, axis=1)
    _, divisor = _scales(top, xp)
    whole = _rounded(xp.abs(values) / divisor[:, None] * TOP_UNITS, 2 * int(TOP_UNITS), xp).astype(np.int32)
    large = whole >= TOP_LARGE
    scales = [_mean(whole, large, xp) * divisor, _mean(whole, ~large, xp) * divisor]
    scales = [xp.where(xp.isnan(top), top, xp.where(top < TINY, np.float32(0), scale)) for scale in scales]
    bits = xp.stack([_to_bfloat16(scale, xp) for scale in scales], axis=1)
    codes = (large.astype(np.uint8) | ((values < 0).astype(np.uint8) << np.uint8(1))).reshape(-1, 4)
    packed = codes[:, 0] | (codes[:, 1] << np.uint8(2)) | (codes[:, 2] << np.uint8(4)) | (codes[:, 3] << np.uint8(6))
    pairs = kept.astype(np.uint16).reshape(-1, 2)  # twelve bits each: two in three bytes
    first, second = pairs[:, 0], pairs[:, 1]
    middle = (first >> np.uint16(8)) | ((second & np.uint16(15)) << np.uint16(4))
    places = xp.stack([first & np.uint16(255), middle, second >> np.uint16(4)], axis=1).astype(np.uint8)
    return bits.reshape(-1), places.reshape(-1), packed


def _largest(blocks: Array, count: int, xp: Any) -> Array:
    """Where the `count` largest magnitudes of each row are, ascending, of equal ones the first; rows of a power of two.

    A search for the least of them, bit by bit, and then for each place: XLA on a CPU takes a tenth of the time in which
    it sorts, and numpy a third. As whole numbers, magnitudes have the same order.
    """
    magnitudes = blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = xp.zeros((blocks.shape[0], 1), np.uint32)
    for bit in reversed(range(31)):
        higher = least | np.uint32(1 << bit)
        enough = xp.sum(magnitudes >= higher, axis=1, keepdims=True, dtype=np.int32) >= count
        least = xp.where(enough, higher, least)
    larger, equal = magnitudes > least, magnitudes == least
    room = count - xp.sum(larger, axis=1, keepdims=True, dtype=np.int32)
    chosen = larger | (equal & (xp.cumsum(equal, axis=1, dtype=np.int32) <= room))
    so_far = xp.cumsum(chosen, axis=1, dtype=np.int32)
    wanted = xp.arange(1, count + 1, dtype=np.int32)[None, :]
    places = xp.zeros((blocks.shape[0], count), np.int32)
    step = blocks.shape[1] // 2
    while step:  # the first place by which so many are chosen
        before = xp.take_along_axis(so_far, places + (step - 1), axis=1) < wanted
        places = xp.where(before, places + step, places)
        step //= 2
    return places


def _mean(whole: Array, chosen: Array, xp: Any) -> Array:
    """Mean of the chosen ones of each row in units of 1 / TOP_UNITS; 0 where there is none."""
    total = xp.sum(xp.where(chosen, whole, 0), axis=1, dtype=np.int32).astype(np.float32)
    count = xp.sum(chosen, axis=1, dtype=np.int32).astype(np.float32)
    return total / (xp.maximum(count, np.float32(1)) * TOP_UNITS)


def _restore_top(parts: Parts, elements: int, xp: Any) -> Array:
    bits, places, packed = parts
    low, middle, high = (places.reshape(-1, 3)[:, i].astype(np.int32) for i in range(3))
    kept = xp.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], axis=1).reshape(-1, TOP_KEPT)
    codes = xp.stack([(packed >> np.uint8(2 * i)) & np.uint8(3) for i in range(4)], axis=1).reshape(-1, TOP_KEPT)
    scales = _from_bfloat16(bits, xp).reshape(-1, 2)
    magnitude = xp.where((codes & np.uint8(1)) > 0, scales[:, :1], scales[:, 1:])
    values = xp.where(codes > 1, -magnitude, magnitude)
    blocks = xp.zeros((kept.shape[0], TOP_BLOCK), np.float32)
    if xp is np:
        np.put_along_axis(blocks, kept, values, axis=1)
    else:
        blocks = xp.put_along_axis(blocks, kept, values, axis=1, inplace=False)
    return blocks.reshape(-1)[:elements]


def _block_tops(values_N: Vector, size: int) -> Vector:
    """For each element the largest magnitude in its block."""
    tops: Vector = np.abs(_blocks(values_N, size, np)).max(axis=1)
    return np.repeat(tops, size)[: values_N.size]


def _bound_of_steps(size: int, steps: int) -> Callable[[Vector], Vector]:
    """Half a step, and what the scale's own rounding adds at the end of its range."""
    share = np.float32((0.5 + steps / 256) / steps)

    def bound(values_N: Vector) -> Vector:
        return np.asarray(_block_tops(values_N, size) * share + TINY * steps, np.float32)

    return bound


def _bound_e3m0(values_N: Vector) -> Vector:
    """A third of the magnitude or, below the smallest level, half of that; and the scale's rounding."""
    tops = _block_tops(values_N, INT4_BLOCK)
    magnitude = np.abs(values_N)
    off = np.maximum(magnitude * np.float32(0.34), tops * np.float32(2.0**-7 * 1.01)) + tops / 256 + TINY
    return np.asarray(off, np.float32)


def _bound_top(values_N: Vector) -> Vector:
    """What is dropped is dropped whole; what is kept is off by 0.6 of the block's largest at most."""
    off = np.maximum(np.abs(values_N), _block_tops(values_N, TOP_BLOCK) * np.float32(0.61)) + TINY
    return np.asarray(off, np.float32)


def _blocked(size: int, *bytes_a_block: tuple[int, DTypeLike]) -> Callable[[int], tuple[tuple[int, DTypeLike], ...]]:
    return lambda n: tuple((_count(n, size) * items, kind) for items, kind in bytes_a_block)


CODECS: dict[str, Codec] = {
    "float32": Codec(
        layout=lambda n: ((n, np.float32),),
        quantise=lambda values_N, xp: (values_N,),
        restore=lambda parts, elements, xp: parts[0],
        error_bound=lambda values_N: np.zeros_like(values_N),
    ),
    "bfloat16": Codec(
        layout=lambda n: ((n, np.uint16),),
        quantise=lambda values_N, xp: (_to_bfloat16(values_N, xp),),
        restore=lambda parts, elements, xp: _from_bfloat16(parts[0], xp),
        error_bound=lambda values_N: np.abs(values_N) * np.float32(2.0**-8) + np.float32(2.0**-126),
    ),
    "int8": Codec(
        layout=_blocked(INT8_BLOCK, (1, np.uint16), (INT8_BLOCK, np.int8)),
        quantise=_quantise_int8,
        restore=_restore_int8,
        error_bound=_bound_of_steps(INT8_BLOCK, 127),
    ),
    "int4": Codec(
        layout=_blocked(INT4_BLOCK, (1, np.uint16), (INT4_BLOCK // 2, np.uint8)),
        quantise=_quantise_int4,
        restore=_restore_int4,
        error_bound=_bound_of_steps(INT4_BLOCK, 7),
    ),
    "e3m0": Codec(
        layout=_blocked(INT4_BLOCK, (1, np.uint16), (INT4_BLOCK // 2, np.uint8)),
        quantise=_quantise_e3m0,
        restore=_restore_e3m0,
        error_bound=_bound_e3m0,
    ),
    "top3": Codec(
        layout=_blocked(TOP_BLOCK, (2, np.uint16), (TOP_KEPT * 3 // 2, np.uint8), (TOP_KEPT // 4, np.uint8)),
        quantise=_quantise_top,
        restore=_restore_top,
        error_bound=_bound_top,
    ),
}
"""By name. Bits an element: 32, 16, 8.06, 4.13, 4.13, 0.44. `int8`, `int4`: whole multiples of a scale a block. `e3m0`:
powers of two, as Streaming DiLoCo sends them (arXiv 2501.18512). `top3`: the largest 3 % of each block in two bits
(after SparseLoCo, arXiv 2508.15706), for very thin links: what it drops stays with the sender."""


def codec(name: str) -> Codec:
    """The codec of that name. Raises WireError, since names arrive from outside."""
    try:
        return CODECS[name]
    except KeyError:
        raise WireError(
            f"codec {name[:32]!r} is unknown", f"Known: {', '.join(CODECS)}.", code="wire.unknown-codec"
        ) from None
