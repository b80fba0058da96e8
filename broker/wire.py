"""Payloads: four magic bytes, a bounded msgpack header, and a zstd body.

A payload cannot decide how much memory a reader allocates. The manifest gives the number of elements, and the codec
gives the exact size of the body. The reader compares both with the header and the zstd frame before it decompresses
anything. (zstandard ignores `max_output_size` when a frame declares its own size.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
import zstandard

from archipelago.broker.codecs import Vector, codec
from archipelago.broker.errors import WireError

MAGIC = b"ARC1"
HEADER_BYTES_MAX = 1024
WINDOW_BYTES_MAX = 8 << 20
_PREFIX = len(MAGIC) + 2


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of a payload or of a fragment's parameters, as thirty-two hexadecimal digits.

    The digest detects damage, not forgery: a client that can write a payload can write its digest too. A cryptographic
    hash would take longer than all other work of the merger on a payload, and XXH3 takes a tenth of a memory copy.
    """
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(values_N: Vector) -> str:
    """Return the digest of a float32 vector's little-endian bytes, which the tape records for each snapshot."""
    return digest(np.ascontiguousarray(values_N, dtype="<f4").view(np.uint8).data)


def payload_bytes_max(elements: int) -> int:
    """Return an upper bound, in bytes, on the size of a valid payload of `elements` elements."""
    return _PREFIX + HEADER_BYTES_MAX + 4 * elements + 4 * elements // 128 + 1024


def pack(values_N: Vector, codec_name: str, zstd_level: int) -> bytes:
    """Encode `values_N` (float32, N elements) as a payload. `unpack` returns the values as the codec rounds them."""
    return pack_body(codec(codec_name).encode(values_N), codec_name, int(values_N.size), zstd_level)


def pack_body(body: bytes, codec_name: str, elements: int, zstd_level: int) -> bytes:
    """Return the payload of a body that the codec has encoded already."""
    if zstd_level:
        body = zstandard.ZstdCompressor(level=zstd_level, write_content_size=True).compress(body)
    header = msgpack.packb({"codec": codec_name, "elements": elements, "zstd": bool(zstd_level)})
    return MAGIC + len(header).to_bytes(2, "big") + header + body


def unpack(payload: bytes, elements: int, codec_name: str = "", base_N: Vector | None = None) -> Vector:
    """Decode a payload into a float32 vector of exactly `elements` elements.

    Args:
        payload: The payload.
        elements: The expected number of elements.
        codec_name: The expected codec; empty accepts every codec.
        base_N: The values are added to it, piece by piece; None for nothing.

    Raises:
        WireError: The payload is damaged, has other elements or another codec, or the result has NaN or infinity.
    """
    name, body = _body_in(payload, elements, codec_name)
    values_N = codec(name).decode(body, elements, base_N)
    if not np.isfinite(values_N).all():
        raise WireError("NaN or infinity among the values", code="wire.not-finite")
    return values_N


class Body(NamedTuple):
    """A vector in encoded form: the flat arrays of the codec's layout."""

    codec: str
    parts: tuple[Any, ...]


def encoded(values_N: Vector, codec_name: str) -> Body:
    """Encode a vector (float32, N elements) with that codec."""
    return Body(codec_name, codec(codec_name).quantise(values_N, np))


def unpack_encoded(payload: bytes, elements: int, codec_name: str = "") -> Body:
    """Check a payload as `unpack` does, but return it encoded. The decoded values may contain NaN."""
    name, body = _body_in(payload, elements, codec_name)
    return Body(name, codec(name).parts_of(body, elements))


def _body_in(payload: bytes, elements: int, codec_name: str) -> tuple[str, memoryview]:
    if len(payload) > payload_bytes_max(elements):
        raise WireError(f"a payload of {len(payload)} bytes for {elements} elements")
    header, body = _split(payload)
    if header.get("elements") != elements:
        raise WireError(f"{header.get('elements')!r:.32} elements where the manifest has {elements}")
    chosen = codec(str(header.get("codec")))
    if codec_name and header.get("codec") != codec_name:
        raise WireError(
            f"a payload of codec {header.get('codec')!r:.32} where {codec_name[:32]!r} was announced", code="wire.codec"
        )
    expected = chosen.encoded_size(elements)
    if header.get("zstd"):
        body = _decompress(body, expected)
    if len(body) != expected:
        raise WireError(f"a body of {len(body)} bytes where the codec needs {expected}")
    return str(header["codec"]), body


def _split(payload: bytes) -> tuple[dict[str, Any], memoryview]:
    if payload[: len(MAGIC)] != MAGIC:
        raise WireError("not an archipelago payload, or one of another version")
    size = int.from_bytes(payload[len(MAGIC) : _PREFIX], "big")
    if size > HEADER_BYTES_MAX or _PREFIX + size > len(payload):
        raise WireError(f"a header of {size} bytes in a payload of {len(payload)}")
    try:
        header = msgpack.unpackb(
            payload[_PREFIX : _PREFIX + size],
            max_map_len=16,
            max_array_len=0,
            max_str_len=64,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(f"the header is not msgpack ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise WireError("the header is not a map")
    return header, memoryview(payload)[_PREFIX + size :]


def _decompress(body: memoryview, expected: int) -> memoryview:
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.content_size != expected or frame.window_size > max(WINDOW_BYTES_MAX, 2 * expected):
            raise WireError(f"a zstd frame of {frame.content_size} bytes where the codec needs {expected}")
        whole = zstandard.ZstdDecompressor().decompress(body, max_output_size=expected, allow_extra_data=False)
        return memoryview(whole)
    except zstandard.ZstdError as error:
        if "llocation error" in str(error):  # this machine lacks memory; the payload may be valid
            raise MemoryError(f"not enough memory for a payload of {expected} bytes") from None
        raise WireError(f"the body is not zstd ({error})") from None
