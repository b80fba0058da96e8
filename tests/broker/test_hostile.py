"""Hostile payloads for every codec. Each gives a WireError or a finite vector of the right size, in bounded memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgpack
import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.codecs import CODECS, Vector, codec
from archipelago.broker.errors import WireError
from archipelago.broker.wire import MAGIC, pack, unpack
from tests.limits import memory_below

#: Two blocks of the largest size, the second one not full.
ELEMENTS = 5000
#: The memory in which every payload of ELEMENTS must be decoded or refused. A bomb decompresses to 16 MiB.
MEMORY_BYTES = 2 << 20
NAMES = sorted(CODECS)
VALUES_N: Vector = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)


def judged(payload: bytes) -> str:
    """Return the reason of the refusal; empty if the payload decodes to a finite vector of the right size."""
    with memory_below(MEMORY_BYTES):
        try:
            found_N = unpack(payload, ELEMENTS)
        except WireError as error:
            assert 0 < len(error.reason) < 300
            assert "not enough memory" not in error.reason, "the memory limit refused the payload, not a check"
            return error.reason
    assert found_N.shape == (ELEMENTS,)
    assert found_N.dtype == np.float32
    assert np.isfinite(found_N).all()
    return ""


def made(name: str, body: bytes, **changes: Any) -> bytes:
    """Return an uncompressed payload with that codec's name and these changes to its header."""
    header = msgpack.packb({"codec": name, "elements": ELEMENTS, "zstd": False, **changes})
    return MAGIC + len(header).to_bytes(2, "big") + header + body


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)


def body_with(name: str, place: int, values: bytes) -> bytes:
    """Return a valid body, overwritten from `place` on."""
    body = bytearray(codec(name).encode(VALUES_N))
    body[place : place + len(values)] = values
    return bytes(body)


def scales(name: str) -> int:
    """Return the size in bytes of the scales at the start of a body; 0 for a codec without scales."""
    (first, kind), *rest = codec(name).layout(ELEMENTS)
    return first * np.dtype(kind).itemsize if rest else 0


def test_valid_payloads_pass() -> None:
    """Otherwise the refusals below could have another reason."""
    for name in NAMES:
        body = codec(name).encode(VALUES_N)
        for payload in (pack(VALUES_N, name, 1), pack(VALUES_N, name, 0), made(name, body)):
            assert judged(payload) == "", name
        assert unpack(made(name, body), ELEMENTS).tobytes() == codec(name).decode(body, ELEMENTS).tobytes(), name


def test_a_scale_that_is_not_finite_is_refused() -> None:
    """The bits are a bfloat16 scale; in `float32` they are the upper half of an element."""
    for name, bits in itertools.product(NAMES, [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]):
        hostile, size = bits.to_bytes(2, "little"), scales(name)
        body = body_with(name, 2 if name == "float32" else 0, hostile)
        payload = made(name, hostile * (size // 2) + body[size:])
        assert "NaN or infinity" in judged(payload), (name, hex(bits))


def test_an_extreme_scale_gives_an_error_or_a_finite_vector() -> None:
    """The scales are the largest and smallest numbers, negative ones and minus zero, with any codes."""
    for name in filter(scales, NAMES):
        size = scales(name)
        rest = codec(name).encoded_size(ELEMENTS) - size
        for bits, fill in itertools.product([0x7F7F, 0xFF7F, 0x8000, 0x0001, 0xBF80], [0x00, 0x77, 0x80, 0xFF]):
            judged(made(name, bits.to_bytes(2, "little") * (size // 2) + bytes([fill]) * rest))


def test_a_flipped_bit_gives_an_error_or_a_finite_vector() -> None:
    for level in (0, 1):
        payload = pack(VALUES_N, "int4", level)
        for place in (*range(64), *range(64, len(payload), 40)):
            damaged = bytearray(payload)
            damaged[place] ^= 1 << place % 8
            judged(bytes(damaged))


def test_every_index_of_top3_lies_within_its_block() -> None:
    """An index has twelve bits and a block 4,096 elements. Repeated indices and those past the end do no damage."""
    (first, _), (places, _), (codes, _) = codec("top3").layout(ELEMENTS)
    ones = (0x3F80).to_bytes(2, "little") * first
    for fill in (0x00, 0xFF, 0x55):
        body = ones + bytes([fill]) * places + b"\0" * codes
        assert judged(made("top3", body)) == ""
        found_N = unpack(made("top3", body), ELEMENTS)
        assert np.count_nonzero(found_N) <= 4, "each block has at most two different indices"
    last = unpack(made("top3", ones + b"\xff" * places + b"\0" * codes), ELEMENTS)
    assert last[4095] == 1.0
    assert np.count_nonzero(last) == 1, "values past the end of the vector must be dropped"


@given(st.sampled_from(NAMES), st.booleans(), st.integers(0, 2**32 - 1))
def test_random_bodies_of_the_right_size_are_judged(name: str, compressed: bool, seed: int) -> None:
    body = random.Random(seed).randbytes(codec(name).encoded_size(ELEMENTS))
    judged(made(name, zstd(body) if compressed else body, zstd=compressed))


@given(st.data())
def test_a_mutated_payload_gives_an_error_or_a_finite_vector(data: st.DataObject) -> None:
    """Valid payloads are cut, extended, overwritten, shuffled and mixed."""
    pool = [pack(VALUES_N, name, level) for name in NAMES for level in (0, 1)]
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
