"""The adopt rules, with results worked out by hand, and the exactness of `carry`."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from archipelago.broker.codecs import Vector
from archipelago.broker.config import AdoptConfig
from archipelago.islands.sync.adoption import build, carry, overwrite
from tests.tiers import examples

# Neither these numbers nor their differences are subnormal, because subnormals count as zero.
ELEMENTS = st.just(0.0) | st.builds(math.copysign, st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from([1.0, -1.0]))
VECTOR = arrays(np.float32, 5, elements=ELEMENTS)
NEW = jnp.array([10.0, 20.0, 30.0], jnp.float32)
OWN = jnp.array([1.0, 2.0, 3.0], jnp.float32)
REFERENCE = jnp.array([2.0, 2.0, 2.0], jnp.float32)
compiled_carry = jax.jit(carry)


def both(pair: tuple[jax.Array, jax.Array]) -> tuple[list[float], list[float]]:
    own_N, reference_N = pair
    return own_N.tolist(), reference_N.tolist()


def test_only_carry_keeps_progress() -> None:
    rules = {name: build(AdoptConfig(rule=name)) for name in get_args(get_type_hints(AdoptConfig)["rule"])}
    assert {name: rule.keeps_progress for name, rule in rules.items()} == {"overwrite": False, "carry": True}


def test_overwrite_drops_the_unsent_progress_and_carry_adds_it() -> None:
    assert both(overwrite(NEW, OWN, REFERENCE)) == ([10.0, 20.0, 30.0], [10.0, 20.0, 30.0])
    # 10 + (1 − 2), 20 + (2 − 2), 30 + (3 − 2)
    assert both(carry(NEW, OWN, REFERENCE)) == ([9.0, 20.0, 31.0], [10.0, 20.0, 30.0])


@settings(max_examples=examples(100))
@given(VECTOR, VECTOR, VECTOR)
def test_carry_keeps_unsent_progress_up_to_rounding(new_N: Vector, own_N: Vector, reference_N: Vector) -> None:
    """Carrying onto the sent parameters changes no bit."""
    carried_N, next_N = compiled_carry(jnp.asarray(reference_N), jnp.asarray(own_N), jnp.asarray(reference_N))
    assert np.asarray(carried_N).tobytes() == own_N.tobytes()
    assert np.asarray(next_N).tobytes() == reference_N.tobytes()
    carried_N, next_N = compiled_carry(jnp.asarray(new_N), jnp.asarray(own_N), jnp.asarray(reference_N))
    before = reference_N.astype(np.float64) - own_N
    after = np.asarray(next_N, np.float64) - np.asarray(carried_N)
    # There are two float32 roundings, each of at most half a unit in the last place.
    scale = np.abs(new_N.astype(np.float64)) + np.abs(own_N) + np.abs(reference_N)
    assert (np.abs(after - before) <= 2.0**-22 * scale).all()
