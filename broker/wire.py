"""Payloads: four magic bytes, a bounded msgpack header, and a zstd body.

A payload cannot decide how much memory a reader allocates. The manifest gives the number of elements, and the codec
gives the exact size of the body. The reader compares both with the header and the zstd frame before it decompresses
anything, and stops at that size. (zstandard itself would not, because a frame may hold more than it declares.)

The newest published parameters of a fragment are its newest full snapshot, and the differences after it (`newest`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import xxhash
import zstandard

from archipelago.broker.codecs import PIECE, Vector, codec, empty_vector
from archipelago.broker.errors import WireError
from archipelago.broker.machine import map_in_threads
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


def unpack(payload: bytes, elements: int, codec_name: str = "") -> Vector:
    """Decode a payload into a float32 vector of exactly `elements` elements.

    Args:
        codec_name: The expected codec; empty accepts every codec.

    Raises:
        WireError: The payload is damaged, has other elements or another codec, or the result has NaN or infinity.
    """
    return Unpacking(elements, codec_name).finish(payload)


class Unpacking:
    """Decodes a payload while it arrives, `decoded` elements so far, and adds the values to `base_N` if it is given.

    The other arguments, and the errors, are those of `unpack`.
    """

    def __init__(self, elements: int, codec_name: str = "", base_N: Vector | None = None) -> None:
        self._elements, self._codec_name, self._base_N = elements, codec_name, base_N
        self._begin()

    def _begin(self) -> None:
        self.decoded, self._arrived = 0, 0
        self._values_N = empty_vector(self._elements)
        self._body: _ArrivingBody | None = None
        self._fault: WireError | None = None

    def arrived(self, payload: bytes | memoryview) -> None:
        """Decode what is new in a payload, of which all bytes so far are given, and in the first call its header.

        As many bytes as before, or fewer, are the beginning of another try to read it. `finish` tells of damage.
        """
        if len(payload) <= self._arrived:
            self._begin()
        self._arrived = len(payload)
        try:
            if self._fault is None:
                self._decode(payload)
        except WireError as error:
            self._fault = error

    def _decode(self, payload: bytes | memoryview) -> None:
        if self._body is None:
            self._body = _ArrivingBody(payload, self._elements, self._codec_name)
        body, chosen = self._body.so_far(payload), codec(self._body.codec)
        base_N, values_N = self._base_N, self._values_N  # of this try to read the payload

        def is_finite(start: int) -> bool:
            return bool(np.isfinite(chosen.decode_piece(body, start, base_N, values_N)).all())

        ends = {start: min(start + PIECE, self._elements) for start in range(self.decoded, self._elements, PIECE)}
        there = [start for start, end in ends.items() if len(body) >= chosen.bytes_until(end, self._elements)]
        if not all(map_in_threads(is_finite, there)):
            raise WireError("NaN or infinity among the values", code="wire.not-finite")
        self.decoded = max((ends[start] for start in there), default=self.decoded)

    def finish(self, payload: bytes) -> Vector:
        """Return the vector of the whole payload, of which any part may have arrived before. Raises WireError."""
        if len(payload) != self._arrived or not payload:
            self.arrived(payload)
        if self._fault is not None:
            raise self._fault
        assert self._body is not None  # noqa: S101 - what arrived has a body or a fault
        self._body.require_whole(payload)
        return self._values_N


class Body(NamedTuple):
    """A vector in encoded form: the flat arrays of the codec's layout."""

    codec: str
    parts: tuple[Any, ...]


def encoded(values_N: Vector, codec_name: str) -> Body:
    """Encode a vector (float32, N elements) with that codec."""
    return Body(codec_name, codec(codec_name).quantise(values_N, np))


def unpack_encoded(payload: bytes, elements: int, codec_name: str = "") -> Body:
    """Check a payload as `unpack` does, but return it encoded. The decoded values may contain NaN."""
    arriving = _ArrivingBody(payload, elements, codec_name)
    body = arriving.require_whole(payload)
    return Body(arriving.codec, codec(arriving.codec).parts_of(body, elements))


class _ArrivingBody:
    """The body of a payload that arrives piece by piece.

    Args:
        head: The beginning of the payload, with the whole header.
        codec_name: The expected codec; empty accepts every codec.

    Raises:
        WireError: The header is damaged, or names other elements, or another codec.
    """

    def __init__(self, head: bytes | memoryview, elements: int, codec_name: str) -> None:
        header, self._start = _header(head)
        if header.get("elements") != elements:
            raise WireError(f"{header.get('elements')!r:.32} elements where the manifest has {elements}")
        self.codec, self._most = str(header.get("codec")), payload_bytes_max(elements)
        self._size = codec(self.codec).encoded_size(elements)
        if codec_name and header.get("codec") != codec_name:
            raise WireError(
                f"a payload of codec {self.codec:.32} where {codec_name[:32]!r} was announced", code="wire.codec"
            )
        self._elements = elements
        self._read = self._start  # bytes of the payload that were decompressed
        self._zstd = _Frame(self._size) if header.get("zstd") else None

    def so_far(self, payload: bytes | memoryview) -> memoryview:
        """Return as much of the body as there is in the payload so far."""
        if len(payload) > self._most:
            raise WireError(f"a payload of {len(payload)} bytes for {self._elements} elements")
        if self._zstd is None:
            return memoryview(payload)[self._start :]
        self._zstd.feed(memoryview(payload)[self._read :])
        self._read = len(payload)
        return self._zstd.so_far

    def require_whole(self, payload: bytes) -> memoryview:
        """Return the body of a payload that is there in full. Raises WireError unless it has the right size."""
        body = self.so_far(payload)
        if len(body) != self._size:
            raise WireError(f"a body of {len(body)} bytes where the codec needs {self._size}")
        return body


def _header(payload: bytes | memoryview) -> tuple[dict[str, Any], int]:
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


class _Frame:
    """A zstd frame that arrives piece by piece. It must hold `size` bytes, and declare that itself.

    Its last byte must be the last one of the payload and end the last block. So the frame has no checksum, and nothing
    follows it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = _Held(0)
        self._writer: Any = None

    @property
    def so_far(self) -> memoryview:
        return memoryview(self._held.whole)[: self._held.end]

    def feed(self, more: memoryview) -> None:
        """Decompress more of a frame. Raises WireError if it is damaged, of another size, or not the payload's end."""
        if not more:
            return
        try:
            if self._writer is None:
                frame = zstandard.get_frame_parameters(more)
                if frame.content_size != self._size or frame.window_size > max(WINDOW_BYTES_MAX, 2 * self._size):
                    raise WireError(f"a zstd frame of {frame.content_size} bytes where the codec needs {self._size}")
                self._held = _Held(self._size)
                self._writer = zstandard.ZstdDecompressor().stream_writer(self._held)  # type: ignore[arg-type]
            for part in filter(len, (more[:-1], more[-1:])):
                # With its last byte the frame is complete, and not before, unless it holds nothing. zstandard would
                # go on with another frame.
                if self._size and self._held.end == self._size:
                    raise WireError("bytes after the last block of the zstd frame")
                self._writer.write(part)
        except zstandard.ZstdError as error:
            if "llocation error" in str(error):  # this machine lacks memory; the payload may be valid
                raise MemoryError(f"not enough memory for a payload of {self._size} bytes") from None
            raise WireError(f"the body is not zstd ({error})") from None


class _Held:
    """What a decompressor has written, up to `size` bytes.

    It does not know the decompressor: a cycle of references would keep both for a while after their last use.
    """

    def __init__(self, size: int) -> None:
        self.whole, self.end = bytearray(size), 0

    def write(self, data: bytes) -> int:
        """Take at most 128 KiB. Raises WireError beyond `size`, because a frame may hold more than it declares."""
        end = self.end + len(data)
        if end > len(self.whole):
            raise WireError(f"a zstd frame of more than the {len(self.whole)} bytes that it declares")
        self.whole[self.end : end] = data
        self.end = end
        return len(data)


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
    unpacking = Unpacking(manifest.sizes[p])
    snapshot, payload = reader.fragment(p, unpacking.arrived)
    if not is_digest(snapshot.digest, payload) or snapshot.fragment != p:
        raise WireError(f"the snapshot of fragment {p} is not the announced one", code="wire.snapshot")
    return Published(snapshot, unpacking.finish(payload), len(payload))


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
    """Download the difference to a version of fragment `p`, and add it, as it arrives, to the version before.

    Returns:
        The parameters of that version, and the bytes of the difference; None if it is gone.

    Raises:
        WireError: The difference is damaged.
    """
    unpacking = Unpacking(manifest.sizes[p], manifest.config.wire.down, before_N)
    payload = reader.difference(p, version, unpacking.arrived)
    return None if payload is None else (unpacking.finish(payload), len(payload))
