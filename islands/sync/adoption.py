"""What an island does with a snapshot that arrives while it trains. Each rule is one pure function.

Three float32 vectors of a fragment's N elements: the snapshot's parameters, the island's own, and the *reference*
that its next contribution is measured from (the last snapshot, or the point of the last sending). To add a rule,
write the function and register it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from archipelago.broker.config import AdoptConfig

Adopt = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class AdoptRule(NamedTuple):
    """`adopt(new_N, own_N, reference_N)` gives the island's next parameters and reference."""

    adopt: Adopt
    keeps_progress: bool
    """unsent progress stays in the parameters and goes into the next contribution, so its steps stay counted"""


def overwrite(new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The paper's α = 0: what was trained since the sending is dropped."""
    return new_N, new_N


def carry(new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The snapshot plus the progress that no contribution holds: θ_new + (θ_now − θ_sent).

    Written as a shift of θ_now, so that a snapshot which says what this island sent changes no bit of it.
    """
    return own_N + (new_N - reference_N), new_N


def blend(share: float) -> Adopt:
    """(1 − α) θ_new + α θ_now (Streaming DiLoCo, 2501.18512); the blended point is the next reference."""

    def adopt(new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed_N = (1.0 - share) * new_N + share * own_N
        return mixed_N, mixed_N

    return adopt


def build(config: AdoptConfig) -> AdoptRule:
    """The rule of that config."""
    rules = {
        "overwrite": AdoptRule(overwrite, keeps_progress=False),
        "blend": AdoptRule(blend(config.blend), keeps_progress=False),
        "carry": AdoptRule(carry, keeps_progress=True),
    }
    return rules[config.rule]
