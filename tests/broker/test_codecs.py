"""Codecs: the rounding bit for bit, the sizes, the error, and the device's copy of the same rounding."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from broker.codecs import CODECS, Vector, codec
from broker.errors import WireError
from islands.quantise import QUANTISE

NORMAL_MIN = float(np.finfo(np.float32).tiny)
OVERFLOW = 3.3961776e38
"""halfway between bfloat16's largest finite number and the next power of two: this and more rounds to infinity"""

BITS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda bits: np.array(bits, np.uint32).view(np.float32))
"""any bit pattern: subnormals, infinities and NaN of every kind among them"""
TIES = st.lists(st.integers(0, 2**16 - 1), max_size=40).map(
    lambda high: (np.array(high, np.uint32) << 16 | 0x8000).view(np.float32)
)
"""just halfway between two neighbours"""
FINITE = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=40).map(
    lambda values: np.array(values, np.float32)
)


def uint16(body: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(body, "<u2")


@given(BITS | TIES)
def test_bfloat16_rounds_as_ml_dtypes_does(values_N: Vector) -> None:
    ours = uint16(codec("bfloat16").encode(values_N))
    with np.errstate(invalid="ignore"):
        theirs = values_N.astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~np.isnan(values_N)
    np.testing.assert_array_equal(ours[number], theirs[number])
    decoded_N = codec("bfloat16").decode(ours.tobytes())
    np.testing.assert_array_equal(np.isnan(decoded_N), np.isnan(values_N))


def test_bfloat16_by_hand() -> None:
    values_N = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7FFFFFFF, 0xFF800001, 0x80000001], np.uint32)
    bits = uint16(codec("bfloat16").encode(values_N.view(np.float32)))
    # ties go to the even neighbour, the largest float32 to infinity, NaN stays NaN with its sign, −0 keeps its own
    assert [hex(b) for b in bits] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fff", "0xffc0", "0x8000"]


@given(FINITE)
def test_bfloat16_is_off_by_at_most_half_a_unit(values_N: Vector) -> None:
    values_N = values_N[(np.abs(values_N) >= NORMAL_MIN) | (values_N == 0)]
    decoded_N = codec("bfloat16").decode(codec("bfloat16").encode(values_N))
    assert np.all(np.abs(decoded_N.astype(np.float64) - values_N) <= np.abs(values_N.astype(np.float64)) * 2.0**-8)


@given(BITS)
def test_float32_is_exact(values_N: Vector) -> None:
    body = codec("float32").encode(values_N)
    assert codec("float32").decode(body).tobytes() == values_N.tobytes() == body


@pytest.mark.parametrize("name", CODECS)
@given(values_N=FINITE)
def test_sizes_and_a_second_pass_changes_nothing(name: str, values_N: Vector) -> None:
    chosen = codec(name)
    body = chosen.encode(values_N)
    assert len(body) == chosen.encoded_size(values_N.size)
    decoded_N = chosen.decode(body)
    assert decoded_N.dtype == np.float32
    assert decoded_N.shape == values_N.shape
    assert chosen.encode(decoded_N) == body


def test_what_is_not_contiguous_is_encoded_all_the_same() -> None:
    values_N = np.arange(20, dtype=np.float32)
    for chosen in CODECS.values():
        assert chosen.encode(values_N[::2]) == chosen.encode(values_N[::2].copy())


def test_the_island_has_a_quantiser_for_each_codec() -> None:
    assert set(QUANTISE) == set(CODECS)


def _many(seed: int) -> Vector:
    """All magnitudes and all ties, but no subnormals: XLA on a CPU flushes them to zero, where `encode` keeps them."""
    bits_N = np.random.default_rng(seed).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits_N[::4] = bits_N[::4] & 0xFFFF0000 | 0x8000
    values_N = bits_N.view(np.float32)
    return values_N[(np.abs(values_N) >= NORMAL_MIN) & (np.abs(values_N) < OVERFLOW)]


@pytest.mark.parametrize("name", CODECS)
def test_the_device_rounds_to_the_same_bits(name: str) -> None:
    values_N = np.concatenate([_many(seed=7), np.array([0.0, -0.0], np.float32)])
    theirs_N = np.asarray(QUANTISE[name](jnp.asarray(values_N)))
    ours_N = codec(name).decode(codec(name).encode(values_N))
    np.testing.assert_array_equal(theirs_N.view(np.uint32), ours_N.view(np.uint32))


def test_an_unknown_codec_is_a_wire_error() -> None:
    with pytest.raises(WireError, match=r"codec 'x{32}' is unknown.*float32"):
        codec("x" * 10_000)
