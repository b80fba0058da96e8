"""Payloads: round trips, and hostile ones, which are refused or give a finite vector, in bounded memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.codecs import CODECS, HUGE, PIECE, Vector, codec
from archipelago.broker.errors import WireError
from archipelago.broker.wire import (
    HEADER_BYTES_MAX,
    MAGIC,
    digest,
    digest_of,
    pack,
    payload_bytes_max,
    unpack,
    unpack_encoded,
)
from tests.failing import failing
from tests.limits import memory_below

ELEMENTS = 300
VALUES_N = np.linspace(-2.0, 2.0, ELEMENTS, dtype=np.float32)
BODY = VALUES_N.tobytes()
HONEST = {"codec": "float32", "elements": ELEMENTS, "zstd": True}


def made(header: object, body: bytes) -> bytes:
    """Return a payload with this header and body."""
    text = header if isinstance(header, bytes) else msgpack.packb(header)
    return MAGIC + len(text).to_bytes(2, "big") + text + body


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


def streamed(data: bytes) -> bytes:
    """Return a frame that does not declare its size."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def declared(size: int, data: bytes) -> bytes:
    """Return a frame that declares `size`, and contains `data` of any length."""
    honest = zstd(data, write_checksum=False, write_content_size=True)
    start = zstandard.frame_header_size(honest)
    # magic, then a descriptor: eight bytes of content size, and a single segment, so the size is also the window
    return honest[:4] + bytes([0b1110_0000]) + size.to_bytes(8, "little") + honest[start:]


def windowed(log: int, data: bytes, size: int) -> bytes:
    """Return a frame that requests a window of 2^log bytes, and declares `size`."""
    honest = zstd(data)
    start = zstandard.frame_header_size(honest)
    return honest[:4] + bytes([0b1100_0000, (log - 10) << 3]) + size.to_bytes(8, "little") + honest[start:]


def refused(payload: bytes, elements: int = ELEMENTS) -> str:
    with memory_below(1 << 20), pytest.raises(WireError) as caught:
        unpack(payload, elements)
    assert len(caught.value.reason) < 300
    assert "not enough memory" not in caught.value.reason  # a check must refuse it, not the memory limit
    return caught.value.reason


@given(
    st.lists(st.floats(-float(HUGE), float(HUGE), width=32), max_size=50),
    st.sampled_from(sorted(CODECS)),
    st.integers(0, 3),
)
def test_unpack_returns_the_values_as_the_codec_rounds_them(values: list[float], name: str, level: int) -> None:
    values_N = np.array(values, np.float32)
    payload = pack(values_N, name, level)
    assert len(payload) <= payload_bytes_max(values_N.size)
    rounded_N = codec(name).decode(codec(name).encode(values_N), values_N.size)
    assert unpack(payload, values_N.size).tobytes() == rounded_N.tobytes()


def test_the_helper_makes_the_same_payloads_as_pack() -> None:
    """Otherwise the refusals below could have another reason."""
    for body in (zstd(BODY), declared(len(BODY), BODY), windowed(20, BODY, len(BODY))):
        assert unpack(made(HONEST, body), ELEMENTS).tobytes() == BODY
    assert unpack(made({**HONEST, "zstd": False}, BODY), ELEMENTS).tobytes() == BODY
    assert unpack(made(HONEST, windowed(23, BODY, len(BODY))), ELEMENTS).tobytes() == BODY, "the largest window"


def test_every_truncation_and_anything_after_the_end_is_refused() -> None:
    for level in (0, 1):
        payload = pack(VALUES_N, "bfloat16", level)
        for size in range(len(payload)):
            refused(payload[:size])
        for more in (b"\0", payload, zstd(BODY)):
            refused(payload + more)


def test_frames_that_hold_nothing_are_refused_after_the_end() -> None:
    payload = pack(VALUES_N, "float32", 1)
    for more in (zstd(b""), 2 * zstd(b""), b"\x50\x2a\x4d\x18\0\0\0\0", zstd(b"")[:4], zstd(b"")[:1]):
        assert "unused data" in refused(payload + more)
        with pytest.raises(WireError, match="unused data"):
            unpack_encoded(payload + more, ELEMENTS)


LONG_N = np.random.default_rng(0).standard_normal(3 * PIECE + 77).astype(np.float32)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_difference_is_added_to_the_values_before_it(name: str, level: int) -> None:
    payload, base_N = pack(LONG_N, name, level), LONG_N[::-1].copy()
    found = unpack(payload, LONG_N.size, name, base_N)
    assert found.tobytes() == (unpack(payload, LONG_N.size, name) + base_N).tobytes()


def test_another_magic_or_a_header_length_that_lies_is_refused() -> None:
    payload = pack(VALUES_N, "float32", 1)
    assert "another version" in refused(b"ARC2" + payload[4:])
    refused(b"")
    refused(b"\x80\x04]q\0.")
    for size in (0, 1, 30, HEADER_BYTES_MAX + 1, 0xFFFF):
        refused(payload[:4] + size.to_bytes(2, "big") + payload[6:])


HOSTILE_HEADERS = {
    "no msgpack": b"\xc1",
    "cut off": b"\x83\xa5codec",
    "more after it": msgpack.packb(HONEST) + b"\x00",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "an extension of 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "deep arrays": b"\x91" * 1000 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 300 + b"\xc0",
    "a map as a key": b"\x81\x80\xc0",
    "not UTF-8": b"\x81\xa1\xff\xc0",
    "many keys": msgpack.packb({**HONEST, **{str(n): n for n in range(100)}}),
    "over 1 KiB": msgpack.packb({**HONEST, **{f"{n:064}": "x" * 64 for n in range(12)}}),
    "a long string": msgpack.packb({**HONEST, "more": "x" * 500}),
    "a number": msgpack.packb(7),
}


def test_a_hostile_header_is_refused() -> None:
    for what, header in HOSTILE_HEADERS.items():
        assert refused(made(header, zstd(BODY))), what


def test_a_header_that_does_not_fit_is_refused() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"elements": ELEMENTS - 1}, "299 elements where the manifest has 300"),
        ({"elements": 2**62}, "elements"),
        ({"elements": -1}, "elements"),
        ({"elements": "300"}, "elements"),
        ({"codec": "float64"}, "codec 'float64' is unknown"),
        ({"codec": None}, "unknown"),
        ({"codec": "bfloat16"}, "where the codec needs 600"),
        ({"zstd": False}, "where the codec needs 1200"),
    ]
    for change, reason in changes:
        assert reason in refused(made({**HONEST, **change}, zstd(BODY)))


def test_a_body_of_another_codec_or_size_is_refused() -> None:
    for name, other in itertools.permutations(CODECS, 2):
        payload, body = pack(VALUES_N, name, 1), codec(other).encode(VALUES_N)
        with failing(WireError, "wire.codec"):
            unpack(payload, ELEMENTS, other)
        for data in (b"", body, body * 2, codec(name).encode(VALUES_N) + b"\0"):
            if len(data) != codec(name).encoded_size(ELEMENTS):
                refused(made({"codec": name, "elements": ELEMENTS, "zstd": False}, data))


def bombs() -> dict[str, bytes]:
    return {
        "16 MiB of zeros, declared": zstd(bytes(1 << 24)),
        "16 MiB of zeros, not declared": streamed(bytes(1 << 24)),
        "1 GiB declared": declared(1 << 30, BODY),
        "16 EiB declared": declared(2**64 - 2, BODY),
        "the size not declared": streamed(BODY),
        "the right size declared, 16 MiB held": declared(len(BODY), bytes(1 << 24)),
        "the right size declared, one byte more held": declared(len(BODY), BODY + b"\0"),
        "the right size declared, one byte less held": declared(len(BODY), BODY[:-1]),
        "the right size declared, nothing held": declared(len(BODY), b""),
        "a window of 16 MiB": windowed(24, BODY, len(BODY)),
        "a window of 1 GiB": windowed(30, BODY, len(BODY)),
        "a window of 2 TiB": windowed(41, BODY, len(BODY)),
        "a skippable frame": b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        "a skippable frame before the body": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(BODY),
        "a frame for a dictionary": zstd(BODY)[:4] + b"\x21\x07\xb0\x04" + zstd(BODY)[7:],
        "two frames of half the size": zstd(BODY[:600]) + zstd(BODY[600:]),
        "gzip": b"\x1f\x8b\x08" + bytes(100),
        "nothing": b"",
    }


def test_a_bomb_is_refused_and_takes_no_memory() -> None:
    for what, body in bombs().items():
        assert refused(made(HONEST, body)), what


def test_the_memory_limit_detects_a_decompressed_bomb() -> None:
    """Without the checks, the same bytes decompress to too much memory, and `memory_below` fails."""
    bomb = zstd(bytes(1 << 24))
    with pytest.raises(AssertionError), memory_below(1 << 20):
        zstandard.ZstdDecompressor().decompress(bomb, max_output_size=len(BODY))


def test_digests_are_of_the_bytes() -> None:
    assert digest_of(VALUES_N) == digest(BODY) == digest(memoryview(BODY))
    assert digest_of(VALUES_N[::-1]) == digest(VALUES_N[::-1].tobytes())
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing
    assert digest(BODY) != digest(BODY[:-1] + b"\1")


# -- bodies of the right size ------------------------------------------------------------------------------------------

#: Two blocks of the largest size, the second one not full.
BLOCKS = 5000
#: The memory in which every payload of BLOCKS must be decoded or refused. A bomb decompresses to 16 MiB.
MEMORY_BYTES = 2 << 20
NAMES = sorted(CODECS)
BLOCKS_N: Vector = np.random.default_rng(0).standard_normal(BLOCKS).astype(np.float32)


def judged(payload: bytes) -> str:
    """Return the reason of the refusal; empty if the payload decodes to a finite vector of the right size."""
    with memory_below(MEMORY_BYTES):
        try:
            found_N = unpack(payload, BLOCKS)
        except WireError as error:
            assert 0 < len(error.reason) < 300
            assert "not enough memory" not in error.reason, "the memory limit refused the payload, not a check"
            return error.reason
    assert found_N.shape == (BLOCKS,)
    assert found_N.dtype == np.float32
    assert np.isfinite(found_N).all()
    return ""


def plain(name: str, body: bytes) -> bytes:
    """Return an uncompressed payload of that codec."""
    return made({"codec": name, "elements": BLOCKS, "zstd": False}, body)


def body_with(name: str, place: int, values: bytes) -> bytes:
    """Return a valid body, overwritten from `place` on."""
    body = bytearray(codec(name).encode(BLOCKS_N))
    body[place : place + len(values)] = values
    return bytes(body)


def scales(name: str) -> int:
    """Return the size in bytes of the scales at the start of a body; 0 for a codec without scales."""
    (first, kind), *rest = codec(name).layout(BLOCKS)
    return first * np.dtype(kind).itemsize if rest else 0


def test_a_scale_that_is_not_finite_is_refused() -> None:
    """The bits are a bfloat16 scale; in `float32` they are the upper half of an element."""
    for name, bits in itertools.product(NAMES, [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]):
        hostile, size = bits.to_bytes(2, "little"), scales(name)
        body = body_with(name, 2 if name == "float32" else 0, hostile)
        payload = plain(name, hostile * (size // 2) + body[size:])
        assert "NaN or infinity" in judged(payload), (name, hex(bits))


def test_an_extreme_scale_gives_an_error_or_a_finite_vector() -> None:
    """The scales are the largest and smallest numbers, negative ones and minus zero, with any codes."""
    for name in filter(scales, NAMES):
        size = scales(name)
        rest = codec(name).encoded_size(BLOCKS) - size
        for bits, fill in itertools.product([0x7F7F, 0xFF7F, 0x8000, 0x0001, 0xBF80], [0x00, 0x77, 0x80, 0xFF]):
            judged(plain(name, bits.to_bytes(2, "little") * (size // 2) + bytes([fill]) * rest))


def test_every_index_of_top3_lies_within_its_block() -> None:
    """An index has twelve bits and a block 4,096 elements. Repeated indices and those past the end do no damage."""
    (first, _), (places, _), (codes, _) = codec("top3").layout(BLOCKS)
    ones = (0x3F80).to_bytes(2, "little") * first
    for fill in (0x00, 0xFF, 0x55):
        body = ones + bytes([fill]) * places + b"\0" * codes
        assert judged(plain("top3", body)) == ""
        found_N = unpack(plain("top3", body), BLOCKS)
        assert np.count_nonzero(found_N) <= 4, "each block has at most two different indices"
    last = unpack(plain("top3", ones + b"\xff" * places + b"\0" * codes), BLOCKS)
    assert last[4095] == 1.0
    assert np.count_nonzero(last) == 1, "values past the end of the vector must be dropped"


@given(st.data())
def test_a_mutated_payload_gives_an_error_or_a_finite_vector(data: st.DataObject) -> None:
    """Valid payloads are cut, extended, overwritten, shuffled and mixed."""
    pool = [pack(BLOCKS_N, name, level) for name in NAMES for level in (0, 1)]
    payload = bytearray(data.draw(st.sampled_from(pool)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, min(64, len(payload))) | st.integers(0, len(payload)))
        end = data.draw(st.integers(start, min(len(payload), start + 16)) | st.just(len(payload)))
        other = data.draw(st.sampled_from(pool))
        payload[start:end] = data.draw(
            st.binary(max_size=16)
            | st.just(b"")
            | st.just(bytes(end - start))
            | st.just(b"\xff" * (end - start))
            | st.just(other[start:end])
            | st.just(bytes(payload[start:end]) * 2)
            | st.just(bytes(payload[start:end][::-1]))
        )
    judged(bytes(payload))


FORKING = """
import os
from archipelago.broker.wire import in_threads

print(*in_threads(str, [1, 2, 3]), flush=True)
if (child := os.fork()) == 0:
    print(*in_threads(str, [4, 5]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_threads_share_work_in_a_forked_process_too() -> None:
    """JAX, which other tests load, does not allow a fork."""
    done = subprocess.run([sys.executable, "-P", "-c", FORKING], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "1 2 3\n4 5\n"


ENDING = """
import threading, time
from archipelago.broker.wire import in_threads

def late():
    threading.main_thread().join()
    print(*in_threads(str, [1, 2, 3]))

threading.Thread(target=late).start()
"""


def test_threads_share_no_work_when_the_interpreter_ends() -> None:
    """An island may train in a thread that outlives the main one."""
    done = subprocess.run([sys.executable, "-P", "-c", ENDING], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("1 2 3\n", "")
