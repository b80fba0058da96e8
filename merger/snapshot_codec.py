"""What goes down to the islands: full snapshots, or quantised differences against what they hold already.

With a codec that blocks its values (`int8`, `int4`, `e3m0`), the merger keeps a shadow: the parameters that the islands
hold, bit for bit, since all of them add the same differences. A difference is measured from the shadow to the exact
parameters, so it carries all rounding of the ones before, and errors do not add up. Pure.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import body_of, codec
from archipelago.broker.config import WireConfig


def sent_down(wire: WireConfig, shadow_N: jax.Array, exact_N: jax.Array) -> tuple[jax.Array, bytes]:
    """What islands hold after the next snapshot (float32, N elements), and the body of the difference that takes them
    there; without differences the snapshot itself, rounded where its codec rounds, and no body.
    """
    if not wire.sends_differences:
        if wire.full == "float32":
            return exact_N, b""
        chosen = codec(wire.full)
        return jnp.asarray(chosen.decode(chosen.encode(np.asarray(exact_N)), exact_N.size)), b""
    parts, held_N = _program(wire.down)(shadow_N, exact_N)
    return held_N, body_of(parts)


@cache
def _program(name: str) -> Any:
    chosen = codec(name)

    def step(shadow_N: jax.Array, exact_N: jax.Array) -> tuple[Any, jax.Array]:
        parts = chosen.quantise(exact_N - shadow_N, jnp)
        return parts, shadow_N + chosen.restore(parts, shadow_N.size, jnp)

    return jax.jit(step)
