"""Codecs: encode a flat float32 vector as bytes and back, with a bound on the error.

A codec is two functions over arrays that run in numpy and in `jax.numpy`. `quantise` returns the arrays whose bytes
travel, and `restore` returns the values that a receiver reads. The merger runs them in numpy, and an island runs them
in JAX on its device. Both compute the same bits, which a test checks. Scales are bfloat16: their product with a small
integer or a power of two is exact in float32, so the fusions of a compiler cannot change it.

To add a codec, add its functions and sizes to CODECS, and its name to `WireConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from archipelago.broker.errors import WireError

Vector = NDArray[np.float32]
#: An array of numpy or of JAX, according to the namespace `xp`.
Array = Any
#: The arrays of one encoded vector.
Parts = tuple[Array, ...]

#: Elements that share a scale.
INT8_BLOCK, INT4_BLOCK = 256, 128
#: `top3` keeps the TOP_KEPT largest magnitudes of each block.
TOP_BLOCK, TOP_KEPT = 4096, 128
#: `top3` sums magnitudes in units of 1/4096 of the largest. From TOP_LARGE units (0.6) on a magnitude is large.
TOP_UNITS, TOP_LARGE = np.float32(4096), 2458
#: 1 / 1 to 1 / 1.9921875: of each mantissa of a bfloat16 number, rounded to nearest.
RECIPROCALS = np.float32(128) / np.arange(128, 256, dtype=np.float32)
#: A float32 from which on whole numbers are one apart. Its lowest four bits are those of 8.
ROUNDER = np.float32(1.5 * 2**23 + 8)
#: XLA on a CPU vectorises the maximum of two halves of a row, and not the reduction of a row. So rows are halved until
#: they have this many elements, and then reduced.
HALVED = 32
#: Elements that numpy encodes or decodes at a time, so that intermediate arrays fit the cache. A multiple of every
#: block size. Each operation of numpy gives Python's lock away, and a thread that computes in Python gives it back only
#: after `sys.getswitchinterval()`. So pieces are as large as the cache allows.
PIECE = 128 * TOP_BLOCK
#: JAX on a CPU takes arrays without a copy that begin at a multiple of this number of bytes.
ALIGNMENT = 64
#: A block whose magnitudes are below TINY becomes zero, as some devices flush smaller numbers. A block with a magnitude
#: above HUGE, with infinity or with NaN is unsound: its scale is NaN, and its codes are those of zero.
TINY, HUGE = np.float32(2.0**-100), np.float32(2.0**110)


class Codec(NamedTuple):
    """The functions of one codec.

    Attributes:
        layout: Returns the size and dtype of each part, for N elements.
        quantise: Called as `quantise(values_N, xp)`. Returns flat arrays with that layout.
        restore: Called as `restore(parts, N, xp)`. Returns the decoded vector [N].
        block: Elements that are encoded together. Whole blocks of a vector can be encoded apart from the others.
    """

    layout: Callable[[int], tuple[tuple[int, DTypeLike], ...]]
    quantise: Callable[[Array, Any], Parts]
    restore: Callable[[Parts, int, Any], Array]
    block: int = 1

    def encoded_size(self, elements: int) -> int:
        """Return the size in bytes of an encoded vector of `elements` elements."""
        return sum(size * np.dtype(kind).itemsize for size, kind in self.layout(elements))

    def encode(self, values_N: Vector) -> bytes:
        """Return the encoded vector, exactly `encoded_size(N)` bytes."""
        values_N = np.ascontiguousarray(values_N, np.float32)
        parts = [np.empty(size, kind) for size, kind in self.layout(values_N.size)]
        with np.errstate(invalid="ignore", over="ignore"):  # a block with NaN has no scale
            for start in range(0, values_N.size, PIECE):
                piece = self.quantise(values_N[start : start + PIECE], np)
                for part, found, (first, _) in zip(parts, piece, self.layout(start), strict=True):
                    part[first : first + found.size] = found
        return body_of(tuple(parts))

    def parts_of(self, body: bytes | memoryview, elements: int, start: int = 0, end: int | None = None) -> Parts:
        """Return the arrays in a body of `encoded_size(elements)` bytes, without a copy where possible.

        They are those of the elements from `start` to `end`, by default of all. `start` is a multiple of `block`.
        """
        parts, at = [], 0
        cuts = zip(*map(self.layout, (start, elements if end is None else end, elements)), strict=True)
        for (first, kind), (last, _), (size, _) in cuts:
            width = np.dtype(kind).itemsize
            part = np.frombuffer(body, np.dtype(kind).newbyteorder("<"), last - first, at + first * width)
            parts.append(part.astype(kind, copy=False))
            at += size * width
        return tuple(parts)

    def decode(self, body: bytes | memoryview, elements: int) -> Vector:
        """Return the float32 vector in a body of exactly `encoded_size(elements)` bytes."""
        values_N = empty_vector(elements)
        for start in range(0, elements, PIECE):
            self.decode_piece(body, start, None, values_N)
        return values_N

    def decode_piece(self, body: bytes | memoryview, start: int, base_N: Vector | None, values_N: Vector) -> Vector:
        """Decode up to PIECE elements, from `start` on, into their place in `values_N`. Return that place.

        `start` is a multiple of PIECE. The values are added to `base_N`, if it is given.
        """
        end = min(start + PIECE, values_N.size)
        parts, piece = self.parts_of(body, values_N.size, start, end), values_N[start:end]
        with np.errstate(all="ignore"):  # a hostile body may hold any scale, so callers check for NaN
            found = self.restore(parts, end - start, np)
            if base_N is None:
                piece[:] = found
            else:
                np.add(base_N[start:end], found, out=piece)
        return piece

    def decode_blocks(self, parts: Parts, blocks_B: NDArray[np.intp]) -> Vector:
        """Return the decoded elements of some blocks, by their numbers, one block after the other.

        `parts` are the numpy arrays of `parts_of`. The last block may have more elements than the vector.
        """
        sizes = [size for size, _ in self.layout(self.block)]
        chosen = tuple(part.reshape(-1, size)[blocks_B].ravel() for part, size in zip(parts, sizes, strict=True))
        with np.errstate(all="ignore"):
            values: Vector = self.restore(chosen, blocks_B.size * self.block, np)
        return values


def empty_vector(elements: int) -> Vector:
    """Return a float32 vector with undefined values.

    Its memory begins at a multiple of 64 bytes, so that JAX on a CPU uses it in place and makes no copy.
    """
    raw = np.empty(elements + ALIGNMENT // 4, np.float32)
    start = -raw.ctypes.data // 4 % (ALIGNMENT // 4)
    return raw[start : start + elements]


def body_of(parts: Parts) -> bytes:
    """Return the little-endian bytes of quantised arrays, concatenated."""
    arrays = [np.asarray(part) for part in parts]
    return b"".join(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data for array in arrays)


def _blocks(values_N: Array, size: int, xp: Any) -> Array:
    """Return the vector as rows of `size` elements. The last row is padded with zeros."""
    missing = -values_N.shape[0] % size
    return xp.concatenate([values_N, xp.zeros(missing, np.float32)]).reshape(-1, size)


def _last_apart(quantise: Callable[[Array, Any], Parts], size: int) -> Callable[[Array, Any], Parts]:
    """Return the function that encodes a last block of fewer than `size` elements apart from the whole ones.

    To pad the vector would copy it, and new memory for the copy takes longer than encoding. `top3` pads: it is slow to
    compile, and islands give it whole blocks.
    """

    def quantised(values_N: Array, xp: Any) -> Parts:
        whole = values_N.shape[0] // size * size
        if whole in (0, values_N.shape[0]):
            return quantise(values_N, xp)
        blocks, last = quantise(values_N[:whole], xp), quantise(values_N[whole:], xp)
        return tuple(xp.concatenate(part) for part in zip(blocks, last, strict=True))

    return quantised


def _to_bfloat16(values: Array, xp: Any) -> Array:
    """Return the upper halves of float32 numbers as uint16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding may carry a NaN's mantissa into infinity
    return xp.where(xp.isnan(values), quiet, rounded).astype(np.uint16)


def _from_bfloat16(bits: Array, xp: Any) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scales(top: Array, xp: Any) -> tuple[Array, Array]:
    """Return the scales as uint16 bits, and the divisor of each block: 1 where it is zero, infinity where unsound."""
    bits = _to_bfloat16(xp.where(top < TINY, np.float32(0), top), xp)
    scale = _from_bfloat16(bits, xp)
    return bits, xp.where(scale > 0, scale, xp.where(xp.isnan(scale), np.float32(np.inf), np.float32(1)))


def _ratios(rows: Array, divisor: Array, xp: Any) -> Array:
    """Return the rows, each multiplied by the reciprocal of its divisor: every device must send the same bits.

    The rows of unsound blocks become zeros. No ratio rounds to more than its largest code, although a scale is rounded
    to bfloat16: 127 (1 + 2^-8) is below 127.5.

    XLA approximates divisions on GPUs, except by a power of two. So a table has the reciprocals of the 128 mantissas
    that a divisor, which is a bfloat16 number, can have. The division comes last because XLA repeats what is cheaper
    for each element of the row.
    """
    bits = divisor.view(np.uint32)
    whole = xp.take(RECIPROCALS, (bits >> np.uint32(16)) & np.uint32(127), mode="clip")
    power = (bits & np.uint32(0x7F800000)).view(np.float32)
    ratios = rows * (whole / power)[:, None]
    if xp is np and np.isfinite(divisor).all():  # the usual case, which needs half the passes over memory
        return ratios
    return xp.where(xp.isnan(ratios), np.float32(0), ratios)


def _magnitudes(values: Array) -> Array:
    """Return the bits of the magnitudes as uint32. They have the order of the magnitudes, and NaN is above infinity.

    XLA's maximum of floats may lose a NaN in a reduction of rows.
    """
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def _tops(blocks: Array, xp: Any) -> Array:
    """Return the largest magnitude of each row; NaN if it is above HUGE, or the row contains NaN or infinity.

    The row length must be a power of two.
    """
    magnitudes = _magnitudes(blocks)
    while xp is not np and magnitudes.shape[1] > HALVED:
        half = magnitudes.shape[1] // 2
        magnitudes = xp.maximum(magnitudes[:, :half], magnitudes[:, half:])
    top = xp.max(magnitudes, axis=1).view(np.float32)
    return xp.where(top <= HUGE, top, np.float32(np.nan))


def _quantise_int8(values_N: Array, xp: Any) -> Parts:
    blocks = _blocks(values_N, INT8_BLOCK, xp)
    bits, divisor = _scales(_tops(blocks, xp) * np.float32(1 / 127), xp)
    return bits, xp.rint(_ratios(blocks, divisor, xp)).astype(np.int8).reshape(-1)


def _restore_int8(parts: Parts, elements: int, xp: Any) -> Array:
    bits, codes = parts
    values = codes.reshape(-1, INT8_BLOCK).astype(np.float32) * _from_bfloat16(bits, xp)[:, None]
    return values.reshape(-1)[:elements]


def _quantise_int4(values_N: Array, xp: Any) -> Parts:
    blocks = _blocks(values_N, INT4_BLOCK, xp)
    bits, divisor = _scales(_tops(blocks, xp) * np.float32(1 / 7), xp)
    # XLA vectorises the two halves of blocks apart from each other, in half the time of packing whole blocks.
    half = INT4_BLOCK // 2
    low, high = (_int4_codes(_ratios(part, divisor, xp), xp) for part in (blocks[:, :half], blocks[:, half:]))
    return bits, (low | (high << np.uint32(4))).astype(np.uint8).reshape(-1)


def _int4_codes(ratio: Array, xp: Any) -> Array:
    """Return the ratios rounded to whole numbers, plus 8, as uint32.

    Adding ROUNDER rounds to nearest, ties to even, and leaves the sum's integer in the lowest bits of its mantissa.
    """
    if xp is not np:  # keeps XLA from rounding the product and this sum at once, as it may on GPUs
        ratio = xp.clip(ratio, np.float32(-7), np.float32(7))
    return (ratio + ROUNDER).view(np.uint32) & np.uint32(15)


def _restore_int4(parts: Parts, elements: int, xp: Any) -> Array:
    bits, packed = parts
    rows = packed.reshape(-1, INT4_BLOCK // 2)
    # The low nibbles hold a block's first half, and the high ones its second half: numpy and XLA can vectorise that.
    codes = xp.concatenate([rows & np.uint8(15), rows >> np.uint8(4)], axis=1).astype(np.float32) - np.float32(8)
    return (codes * _from_bfloat16(bits, xp)[:, None]).reshape(-1)[:elements]


def _quantise_top(values_N: Array, xp: Any) -> Parts:
    """Keep the TOP_KEPT largest values of each block, and set the rest to zero.

    A kept value becomes plus or minus a mean: that of the large kept magnitudes, or that of the small ones. A mean is
    never further from the value than zero would be, so the error that the sender keeps (error feedback) shrinks. The
    means are sums of integers, so the order of summation does not matter.
    """
    blocks = _blocks(values_N, TOP_BLOCK, xp)
    top = _tops(blocks, xp)
    kept = _largest(blocks, TOP_KEPT, xp)
    values = xp.take_along_axis(blocks, kept, axis=1)
    _, divisor = _scales(top, xp)
    whole = xp.rint(_ratios(xp.abs(values), divisor, xp) * TOP_UNITS).astype(np.int32)
    large = whole >= TOP_LARGE
    scales = [_mean(whole, large, xp) * divisor, _mean(whole, ~large, xp) * divisor]
    scales = [xp.where(xp.isnan(top), top, xp.where(top < TINY, np.float32(0), scale)) for scale in scales]
    bits = xp.stack([_to_bfloat16(scale, xp) for scale in scales], axis=1)
    codes = (large.astype(np.uint8) | ((values < 0).astype(np.uint8) << np.uint8(1))).reshape(-1, 4)
    packed = codes[:, 0] | (codes[:, 1] << np.uint8(2)) | (codes[:, 2] << np.uint8(4)) | (codes[:, 3] << np.uint8(6))
    pairs = kept.astype(np.uint16).reshape(-1, 2)  # an index has twelve bits, so three bytes hold two
    first, second = pairs[:, 0], pairs[:, 1]
    middle = (first >> np.uint16(8)) | ((second & np.uint16(15)) << np.uint16(4))
    places = xp.stack([first & np.uint16(255), middle, second >> np.uint16(4)], axis=1).astype(np.uint8)
    return bits.reshape(-1), places.reshape(-1), packed


def _largest(blocks: Array, count: int, xp: Any) -> Array:
    """Return the indices of the `count` largest magnitudes of each row, ascending. Earlier indices win ties.

    XLA sorts rows twice, which it compiles in a third of the time of a search for the smallest kept magnitude.
    """
    magnitudes, width = _magnitudes(blocks), blocks.shape[1]
    ordered = np.partition(magnitudes, -count, axis=1) if xp is np else xp.sort(magnitudes, axis=1)
    least = ordered[:, -count, None]
    larger, equal = magnitudes > least, magnitudes == least
    room = count - xp.sum(larger, axis=1, keepdims=True, dtype=np.int32)
    chosen = larger | (equal & (xp.cumsum(equal, axis=1, dtype=np.int32) <= room))
    if xp is np:
        return np.nonzero(chosen)[1].reshape(-1, count).astype(np.int32)
    return xp.sort(xp.where(chosen, xp.arange(width, dtype=np.int32), width), axis=1)[:, :count]


def _mean(whole: Array, chosen: Array, xp: Any) -> Array:
    """Return the mean of each row's chosen values, divided by TOP_UNITS; 0 for a row without any.

    It is rounded down to 2^-11 units, which have at most 24 bits: integers divide alike on every device.
    """
    total, count = (xp.sum(xp.where(chosen, x, 0), axis=1, dtype=np.int32).astype(np.uint32) for x in (whole, 1))
    mean = (total << np.uint32(11)) // xp.maximum(count, np.uint32(1))
    return mean.astype(np.float32) * (np.float32(2.0**-11) / TOP_UNITS)


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


def _blocked(size: int, *bytes_a_block: tuple[int, DTypeLike]) -> Callable[[int], tuple[tuple[int, DTypeLike], ...]]:
    return lambda n: tuple((-(-n // size) * items, kind) for items, kind in bytes_a_block)


#: All codecs by name. In bits per element they take 32, 16, 8.06, 4.13 and 0.44. `int8` and `int4` store integer
#: multiples of one scale per block. `top3` stores the largest 3 % of each block in two bits each, after SparseLoCo
#: (arXiv 2508.15706). It is for very slow links, and the sender adds the dropped part to its next contribution.
CODECS: dict[str, Codec] = {
    "float32": Codec(
        layout=lambda n: ((n, np.float32),),
        quantise=lambda values_N, xp: (values_N,),
        restore=lambda parts, elements, xp: parts[0],
    ),
    "bfloat16": Codec(
        layout=lambda n: ((n, np.uint16),),
        quantise=lambda values_N, xp: (_to_bfloat16(values_N, xp),),
        restore=lambda parts, elements, xp: _from_bfloat16(parts[0], xp),
    ),
    "int8": Codec(
        layout=_blocked(INT8_BLOCK, (1, np.uint16), (INT8_BLOCK, np.int8)),
        quantise=_last_apart(_quantise_int8, INT8_BLOCK),
        restore=_restore_int8,
        block=INT8_BLOCK,
    ),
    "int4": Codec(
        layout=_blocked(INT4_BLOCK, (1, np.uint16), (INT4_BLOCK // 2, np.uint8)),
        quantise=_last_apart(_quantise_int4, INT4_BLOCK),
        restore=_restore_int4,
        block=INT4_BLOCK,
    ),
    "top3": Codec(
        layout=_blocked(TOP_BLOCK, (2, np.uint16), (TOP_KEPT * 3 // 2, np.uint8), (TOP_KEPT // 4, np.uint8)),
        quantise=_quantise_top,
        restore=_restore_top,
        block=TOP_BLOCK,
    ),
}


def codec(name: str) -> Codec:
    """Return the codec of that name. Raises WireError for an unknown one, since names arrive from outside."""
    if name not in CODECS:
        raise WireError(f"codec {name[:32]!r} is unknown", f"Known: {', '.join(CODECS)}.", code="wire.codec")
    return CODECS[name]
