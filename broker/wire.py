"""Payloads: four magic bytes, a bounded msgpack header, and a zstd body.

A payload cannot decide how much memory a reader allocates. The manifest gives the number of elements, and the codec
gives the exact size of the body. The reader compares both with the header and the zstd frame before it decompresses
anything, and stops at that size.

The newest published parameters of a fragment are its newest full snapshot, and the differences after it (`newest`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import xxhash
import zstandard

from archipelago.broker.codecs import PIECE, Vector, codec, empty_vector
from archipelago.broker.errors import WireError
from archipelago.broker.machine import usable_cores
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot

if TYPE_CHECKING:  # clients use this module
    from archipelago.broker.transport import ReaderClient

MAGIC = b"ARC1"
HEADER_BYTES_MAX = 1024
WINDOW_BYTES_MAX = 8 << 20
#: The length of a `signed_digest`.
SIGNED_DIGITS = 64
_PREFIX = len(MAGIC) + 2
#: How often the newest version is read again because a newer full snapshot has replaced differences meanwhile.
TRIES = 4
#: More threads decode no faster: memory is as fast as some cores.
THREADS_MAX = 4


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of a payload or of a fragment's parameters, as thirty-two hexadecimal digits.

    The digest detects damage, not forgery: a client that can write a payload can write its digest too. A cryptographic
    hash would take longer than all other work of the merger on a payload, and XXH3 takes a tenth of a memory copy.
    """
    return xxhash.xxh3_128_hexdigest(data)


def signed_digest(payload: bytes | memoryview) -> str:
    """Return the SHA-256 digest of a payload, which a signed header names: 64 hexadecimal digits."""
    return hashlib.sha256(payload).hexdigest()


def is_digest(announced: str, payload: bytes) -> bool:
    """Return whether a header announces this payload: by its `signed_digest` in runs whose members sign."""
    return announced == (signed_digest(payload) if len(announced) == SIGNED_DIGITS else digest(payload))


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
    """Decode a payload into a float32 vector of exactly `elements` elements, and add `base_N` if it is given.

    Args:
        codec_name: The expected codec; empty accepts every codec.

    Raises:
        WireError: The payload is damaged, has other elements or another codec, or the result has NaN or infinity.
    """
    name, body = _body_of(payload, elements, codec_name)
    chosen, values_N = codec(name), empty_vector(elements)

    def is_finite(start: int) -> bool:
        return bool(np.isfinite(chosen.decode_piece(body, start, base_N, values_N)).all())

    if not all(in_threads(is_finite, range(0, elements, PIECE))):
        raise WireError("NaN or infinity among the values", code="wire.not-finite")
    return values_N


def in_threads(work: Callable[[int], bool], items: Sequence[int]) -> Iterator[bool]:
    """Return what `work` makes of each item, in their order, by threads that all callers share.

    It pays where numpy does the work, without Python's lock. Work must not call this again.
    """
    if len(items) > 1:
        with suppress(RuntimeError):  # the interpreter ends, and its threads take nothing more
            return _threads().map(work, items)
    return map(work, items)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS_MAX, usable_cores()), "pieces")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of the threads


class Body(NamedTuple):
    """A vector in encoded form: the flat arrays of the codec's layout."""

    codec: str
    parts: tuple[Any, ...]


def encoded(values_N: Vector, codec_name: str) -> Body:
    """Encode a vector (float32, N elements) with that codec."""
    return Body(codec_name, codec(codec_name).quantise(values_N, np))


def unpack_encoded(payload: bytes, elements: int, codec_name: str = "") -> Body:
    """Check a payload as `unpack` does, but return it encoded. The decoded values may contain NaN."""
    name, body = _body_of(payload, elements, codec_name)
    return Body(name, codec(name).parts_of(body, elements))


def _body_of(payload: bytes, elements: int, codec_name: str) -> tuple[str, memoryview]:
    """Return the codec of a payload, and its body. Raises WireError unless the body has the size that the codec needs.

    `codec_name` is the expected codec; empty accepts every codec.
    """
    header, start = _header(payload)
    if header.get("elements") != elements:
        raise WireError(f"{header.get('elements')!r:.32} elements where the manifest has {elements}")
    name = str(header.get("codec"))
    size = codec(name).encoded_size(elements)
    if codec_name and header.get("codec") != codec_name:
        raise WireError(f"a payload of codec {name:.32} where {codec_name[:32]!r} was announced", code="wire.codec")
    if len(payload) > payload_bytes_max(elements):
        raise WireError(f"a payload of {len(payload)} bytes for {elements} elements")
    body = memoryview(payload)[start:]
    if header.get("zstd"):
        body = _decompressed(body, size)
    if len(body) != size:
        raise WireError(f"a body of {len(body)} bytes where the codec needs {size}")
    return name, body


def _header(payload: bytes) -> tuple[dict[str, Any], int]:
    """Return the header at the beginning of a payload, and where its body begins."""
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
    return header, _PREFIX + size


def _decompressed(frame: memoryview, size: int) -> memoryview:
    """Return the content of a zstd frame, which must declare `size` bytes and end with the payload. Raises WireError.

    zstandard allocates what the frame declares, and refuses a frame that holds more or less.
    """
    try:
        found = zstandard.get_frame_parameters(frame)
        if found.content_size != size or found.window_size > max(WINDOW_BYTES_MAX, 2 * size):
            raise WireError(f"a zstd frame of {found.content_size} bytes where the codec needs {size}")
        whole = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
        return memoryview(whole)
    except zstandard.ZstdError as error:
        if "llocation error" in str(error):  # this machine lacks memory; the payload may be valid
            raise MemoryError(f"not enough memory for a payload of {size} bytes") from None
        raise WireError(f"the body is not zstd ({error})") from None


class Published(NamedTuple):
    """A version of a fragment, the bytes that were downloaded, and the version before if it was built on the way."""

    snapshot: Snapshot
    params_N: Vector
    bytes: int
    before_N: Vector | None = None


def newest(reader: ReaderClient, manifest: Manifest, p: int) -> Published:
    """Download the newest version of fragment `p`.

    Raises WireError if it cannot be read, or if what can be read leads to other parameters (`wire.snapshot`).
    """
    tries = 0
    while True:
        full = full_snapshot(reader, manifest, p)
        head = reader.heads()[p]
        head = head if head is not None and head.fragment == p else None  # it is damaged, and the merger restores it
        if head is None or head.version <= full.snapshot.version or not manifest.config.wire.sends_differences:
            is_same = head is not None and head.round == full.snapshot.round and head.held == full.snapshot.held
            return full._replace(snapshot=head) if is_same and head is not None else full
        found = _later(reader, manifest, full, head)
        if found is not None:
            return found
        if (tries := tries + 1) == TRIES:
            version = full.snapshot.version
            raise WireError(
                f"the differences of fragment {p} after version {version} do not lead to version {head.version}",
                code="wire.snapshot",
            )


def full_snapshot(reader: ReaderClient, manifest: Manifest, p: int) -> Published:
    """Download the newest full snapshot of fragment `p`. Raises WireError for a payload that was not announced."""
    snapshot, payload = reader.fragment(p)
    if not is_digest(snapshot.digest, payload) or snapshot.fragment != p:
        raise WireError(f"the snapshot of fragment {p} is not the announced one", code="wire.snapshot")
    return Published(snapshot, unpack(payload, manifest.sizes[p]), len(payload))


def _later(reader: ReaderClient, manifest: Manifest, full: Published, head: Snapshot) -> Published | None:
    """Return the version of the header, or None if a difference is missing or they lead to other parameters."""
    vector_N, before_N, size = full.params_N, full.params_N, full.bytes
    for version in range(full.snapshot.version + 1, head.version + 1):
        found = after_difference(reader, manifest, head.fragment, version, vector_N)
        if found is None:
            return None
        before_N, vector_N, size = vector_N, found[0], size + found[1]
    return Published(head, vector_N, size, before_N) if digest_of(vector_N) == head.held else None


def after_difference(
    reader: ReaderClient, manifest: Manifest, p: int, version: int, before_N: Vector
) -> tuple[Vector, int] | None:
    """Download the difference to a version of fragment `p`, and add it to the version before.

    Returns:
        The parameters of that version, and the bytes of the difference; None if it is gone.

    Raises:
        WireError: The difference is damaged.
    """
    payload = reader.difference(p, version)
    if payload is None:
        return None
    return unpack(payload, manifest.sizes[p], manifest.config.wire.down, before_N), len(payload)
