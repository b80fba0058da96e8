"""Codecs: exact rounding, sizes, error bounds, and equal results in numpy and on a device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from archipelago.broker import codecs
from archipelago.broker.codecs import (
    CODECS,
    HUGE,
    TINY,
    TOP_BLOCK,
    TOP_KEPT,
    Vector,
    _ratios,
    body_of,
    codec,
)
from archipelago.broker.errors import WireError
from tests import samples
from tests.failing import failing

pytestmark = pytest.mark.usefixtures("optimised")

#: Any bit patterns, including subnormals, infinities and all kinds of NaN.
BITS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda bits: np.array(bits, np.uint32).view(np.float32))
#: Values halfway between two neighbours in bfloat16.
TIES = st.lists(st.integers(0, 2**16 - 1), max_size=40).map(
    lambda high: (np.array(high, np.uint32) << 16 | 0x8000).view(np.float32)
)
FINITE = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=40).map(
    lambda values: np.array(values, np.float32)
)
#: The program of top3 takes seconds to compile.
COMPILED = [pytest.param(name, marks=pytest.mark.full if name == "top3" else ()) for name in CODECS]


def decoded(name: str, values_N: Vector) -> Vector:
    """Return the values that a receiver reads."""
    return codec(name).decode(codec(name).encode(values_N), values_N.size)


def uint16(body: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(body, "<u2")


@given(BITS | TIES)
def test_bfloat16_rounds_as_ml_dtypes_does_and_float32_is_exact(values_N: Vector) -> None:
    ours = uint16(codec("bfloat16").encode(values_N))
    with np.errstate(invalid="ignore"):
        theirs = values_N.astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~np.isnan(values_N)
    np.testing.assert_array_equal(ours[number], theirs[number])
    decoded_N = codec("bfloat16").decode(ours.tobytes(), values_N.size)
    np.testing.assert_array_equal(np.isnan(decoded_N), np.isnan(values_N))
    body = codec("float32").encode(values_N)
    assert codec("float32").decode(body, values_N.size).tobytes() == values_N.tobytes() == body


@pytest.mark.parametrize("name", CODECS)
@given(values_N=FINITE)
def test_sizes_are_exact_and_a_second_pass_changes_nothing(name: str, values_N: Vector) -> None:
    chosen = codec(name)
    body = chosen.encode(values_N)
    assert len(body) == chosen.encoded_size(values_N.size)
    decoded_N = chosen.decode(body, values_N.size)
    assert decoded_N.dtype == np.float32
    assert decoded_N.shape == values_N.shape
    if name != "top3":  # a second pass changes the means of top3
        assert chosen.encode(decoded_N) == body


def test_a_strided_array_is_encoded() -> None:
    values_N = np.arange(20, dtype=np.float32)
    for name, chosen in CODECS.items():
        assert chosen.encode(values_N[::2]) == chosen.encode(values_N[::2].copy()), name


@pytest.mark.parametrize("name", CODECS)
def test_some_blocks_are_decoded_to_the_bits_of_all(name: str) -> None:
    chosen, size = codec(name), 5 * TOP_BLOCK // 2  # the last block of top3 is not full
    values_N = np.random.default_rng(3).standard_normal(size, np.float32)
    body = chosen.encode(values_N)
    blocks_B = np.array([size // chosen.block - 1, 0, 1])
    wanted = (blocks_B[:, None] * chosen.block + np.arange(chosen.block)).ravel()
    decoded = chosen.decode_blocks(chosen.parts_of(body, size), blocks_B)
    assert decoded.tobytes() == chosen.decode(body, size)[wanted].tobytes()
    whole = chosen.decode_blocks(chosen.parts_of(body, size), np.arange(-(-size // chosen.block)))
    assert whole[:size].tobytes() == chosen.decode(body, size).tobytes()


def _gradients(seed: int, elements: int) -> Vector:
    """Return values like outer gradients: magnitudes differ between blocks, and some blocks are zero or sparse."""
    random = np.random.default_rng(seed)
    values_N = random.standard_normal(elements).astype(np.float32)
    values_N *= np.repeat(np.exp2(random.integers(-60, 60, -(-elements // 64))), 64)[:elements].astype(np.float32)
    values_N[random.random(elements) < random.choice([0.0, 0.5, 0.999])] = 0.0
    values_N[: elements // 3] *= random.integers(0, 2)
    return values_N


@cache
def _device(name: str) -> Any:
    """Return the program of an island's device, which computes the quantised arrays and the receiver's values."""

    @jax.jit
    def both(x_N: jax.Array) -> tuple[Any, jax.Array]:
        parts = codec(name).quantise(x_N, jnp)
        return parts, codec(name).restore(parts, x_N.size, jnp)

    return both


def sent_by_device(name: str, values_N: Vector) -> tuple[bytes, Vector]:
    """Return the body and the receiver's values, as an island's device computes them."""
    parts, restored_N = _device(name)(jnp.asarray(values_N))
    return body_of(parts), np.asarray(restored_N)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("elements", [1, 20_001])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=67108864)  # one code of int4 was another where XLA divides
def test_the_device_sends_the_same_bits(name: str, elements: int, seed: int) -> None:
    values_N = _gradients(seed, elements)
    body, restored_N = sent_by_device(name, values_N)
    assert body == codec(name).encode(values_N)
    np.testing.assert_array_equal(restored_N, decoded(name, values_N))


@pytest.mark.parametrize("name", CODECS)
@given(values_N=FINITE | st.integers(0, 2**32 - 1).map(lambda seed: _gradients(seed, 9000)))
def test_the_error_is_within_its_bound(name: str, values_N: Vector) -> None:
    values_N = np.clip(values_N, -HUGE, HUGE)
    off_N = np.abs(decoded(name, values_N).astype(np.float64) - values_N)
    assert np.all(off_N <= samples.codec_error_bound(name, values_N).astype(np.float64))


def test_the_largest_value_of_a_block_fits_its_code_however_its_scale_is_rounded() -> None:
    halfway_S = (np.arange(128, dtype=np.uint32) << 16 | 0x3F808000).view(np.float32)  # between two bfloat16 numbers
    for name, most in (("int8", 127), ("int4", 7)):
        near = [np.nextafter(halfway_S * np.float32(most), np.float32(to)) for to in (0, np.inf)]
        tops = np.concatenate([*near, halfway_S * np.float32(most)])
        values_N = np.repeat(np.concatenate([tops, -tops]), codec(name).block)
        off_N = np.abs(decoded(name, values_N) - values_N)
        assert np.all(off_N <= samples.codec_error_bound(name, values_N)), name


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_error_that_the_sender_keeps_shrinks(name: str, seed: int) -> None:
    """Error feedback needs this: the accumulated error stays below the size of the input."""
    values_N = np.clip(_gradients(seed, 9000), -1e12, 1e12)
    left = np.linalg.norm((values_N - decoded(name, values_N)).astype(np.float64))
    assert left <= 0.995 * np.linalg.norm(values_N.astype(np.float64)) + 1e-20


@given(seed=st.integers(0, 2**32 - 1), kinds=st.integers(1, 400))
def test_top3_keeps_the_largest_and_earlier_indices_win_ties(seed: int, kinds: int) -> None:
    """The codec keeps the same values as a stable sort, in numpy and on the device."""
    random = np.random.default_rng(seed)
    values_N = random.choice(random.uniform(0.5, 1.0, kinds), 2 * TOP_BLOCK).astype(np.float32)
    values_N *= random.choice(np.array([-1, 1], np.float32), values_N.size)
    kept = np.argsort(-np.abs(values_N.reshape(2, TOP_BLOCK)), axis=1, kind="stable")[:, :TOP_KEPT]
    expected = np.zeros((2, TOP_BLOCK), bool)
    np.put_along_axis(expected, kept, values=True, axis=1)
    np.testing.assert_array_equal(decoded("top3", values_N) != 0, expected.reshape(-1))
    body, restored_N = sent_by_device("top3", values_N)
    assert body == codec("top3").encode(values_N)
    np.testing.assert_array_equal(restored_N != 0, expected.reshape(-1))


def test_bits_per_element() -> None:
    bits = {name: codec(name).encoded_size(1 << 20) * 8 / (1 << 20) for name in CODECS}
    assert bits == {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0625, "int4": 4.125, "top3": 0.4453125}


def test_an_unknown_codec_is_a_wire_error() -> None:
    with failing(WireError, "wire.codec"):
        codec("x" * 10_000)


def _approximate(jaxpr: Any, consts: Any, *values: Any) -> list[Any]:
    """Evaluate a program on a device that divides as XLA does on a GPU: wrong by an ulp, except by a power of two."""
    held: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for step in jaxpr.eqns:
        inputs = [x.val if isinstance(x, jax.extend.core.Literal) else held[x] for x in step.invars]
        if (inner := step.params.get("jaxpr")) is not None:
            found = _approximate(inner.jaxpr, inner.consts, *inputs)
        else:
            found = step.primitive.bind(*inputs, **step.params)
            found = list(found) if step.primitive.multiple_results else [found]
        if step.primitive.name == "div" and found[0].dtype == jnp.float32:
            is_power = jnp.frexp(inputs[1])[0] == 0.5
            found = [jnp.where(is_power, found[0], jnp.nextafter(found[0], jnp.float32(0)))]
        held |= zip(step.outvars, found, strict=True)
    return [x.val if isinstance(x, jax.extend.core.Literal) else held[x] for x in jaxpr.outvars]


@pytest.mark.parametrize("name", COMPILED)
def test_a_device_that_approximates_divisions_sends_the_same_bits(name: str) -> None:
    divides = name in {"int8", "int4"}  # few of many values lie where the last bit of a quotient matters
    values_N = np.random.default_rng(6).standard_normal(1 << (20 if divides else 14), np.float32)
    program = jax.make_jaxpr(lambda values_N: codec(name).quantise(values_N, jnp))(values_N)
    parts = jax.jit(lambda values_N: _approximate(program.jaxpr, program.consts, values_N))(values_N)
    assert body_of(tuple(parts)) == codec(name).encode(values_N)


def test_the_maximum_of_a_block_keeps_its_nan_among_many_blocks() -> None:
    values_N = np.random.default_rng(6).standard_normal(100_000, np.float32)
    values_N[[5, 300]] = np.nan, np.inf
    for name in ("int8", "int4"):
        parts = jax.jit(lambda values_N, name=name: codec(name).quantise(values_N, jnp))(values_N)
        assert body_of(parts) == codec(name).encode(values_N), name


def _sums_of_products(jaxpr: Any) -> list[Any]:
    """Return the sums of float32 in a program that a compiler may fuse with a product, also through a choice."""
    made_by, found = dict[Any, Any](), list[Any]()

    def is_product(value: Any) -> bool:
        step = None if isinstance(value, jax.extend.core.Literal) else made_by.get(value)
        if step is None or step.primitive.name == "mul":
            return step is not None
        is_through = step.primitive.name in ("select_n", "reshape") or "_where" in str(step.params.get("name"))
        return is_through and any(map(is_product, step.invars))

    for step in jaxpr.eqns:
        if (inner := step.params.get("jaxpr")) is not None:
            found += _sums_of_products(inner.jaxpr)
        is_sum = step.primitive.name in ("add", "sub") and step.outvars[0].aval.dtype == jnp.float32
        found += [step] if is_sum and any(map(is_product, step.invars)) else []
        made_by |= dict.fromkeys(step.outvars, step)
    return found


@pytest.mark.parametrize("name", CODECS)
def test_no_device_can_round_a_product_and_a_sum_at_once(name: str) -> None:
    """XLA fuses them on GPUs, and a code beside a tie would be another one."""
    assert _sums_of_products(jax.make_jaxpr(lambda x, y: x * y + x)(jnp.ones(2), jnp.ones(2)).jaxpr)
    values_N = jnp.ones(TOP_BLOCK)
    assert not _sums_of_products(jax.make_jaxpr(lambda values_N: codec(name).quantise(values_N, jnp))(values_N).jaxpr)


def test_the_reciprocal_of_every_scale_is_rounded_as_numpy_rounds_it() -> None:
    """Tops from TINY to HUGE, divided by up to 127, have these scales: all mantissas, and no subnormal reciprocal."""
    first, last = (np.float32(x).view(np.uint32) >> 16 for x in (TINY / 256, HUGE))
    scales_S = (np.arange(first, last + 1, dtype=np.uint32) << 16).view(np.float32)
    ones_Sx1 = np.ones((scales_S.size, 1), np.float32)
    for xp in (np, jnp):
        np.testing.assert_array_equal(_ratios(ones_Sx1, scales_S, xp)[:, 0], np.float32(1) / scales_S)


def test_the_codec_of_the_guide_has_the_same_bits_in_numpy_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/extending.md").read_text(encoding="utf-8")
    monkeypatch.setattr(codecs, "CODECS", dict(CODECS))
    names = dict(vars(codecs))
    exec(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0], names)  # noqa: S102 - it is ours
    ternary = names["CODECS"]["ternary"]
    values_N = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    read_N = ternary.decode(ternary.encode(values_N), values_N.size)
    assert len(np.unique(np.sign(read_N))) == 3
    parts = jax.jit(lambda x_N: ternary.quantise(x_N, jnp))(values_N)
    assert [np.asarray(part).tobytes() for part in parts] == [part.tobytes() for part in ternary.quantise(values_N, np)]
    assert np.asarray(ternary.restore(parts, values_N.size, jnp)).tobytes() == read_N.tobytes()
