"""Adopt rules: combine an arriving snapshot with the island's own parameters. Each rule is one pure function.

A rule sees three float32 vectors of a fragment's N elements: the snapshot's parameters, the island's own parameters,
and the reference from which the next contribution is measured (the last snapshot, or the point of the last sending).
To add a rule, write the function, register it in `RULES` and name it in `AdoptConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from archipelago.broker.config import AdoptConfig

#: `adopt(new_N, own_N, reference_N)` returns the island's next parameters and its next reference.
Adopt = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class AdoptRule(NamedTuple):
    """An adopt function, and whether it keeps unsent progress.

    Attributes:
        adopt: The function.
        keeps_progress: Whether unsent progress stays in the parameters and goes into the next contribution. The steps
            behind it then stay counted.
    """

    adopt: Adopt
    keeps_progress: bool


def overwrite(new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the snapshot and drop the progress since the last sending (the paper's α = 0)."""
    return new_N, new_N


def carry(new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the snapshot plus the unsent progress: θ_new + (θ_now − θ_sent).

    The sum is written as a shift of θ_now. A snapshot that equals what this island sent then changes no bit of it.
    """
    return own_N + (new_N - reference_N), new_N


#: Adopt rules by the names of `AdoptConfig.rule`.
RULES: dict[str, AdoptRule] = {
    "overwrite": AdoptRule(overwrite, keeps_progress=False),
    "carry": AdoptRule(carry, keeps_progress=True),
}


def build(config: AdoptConfig) -> AdoptRule:
    """Return the rule that the config names."""
    return RULES[config.rule]


def moments_after(
    rule: AdoptRule, new_N: jax.Array, own_N: jax.Array, reference_N: jax.Array, share: jax.Array
) -> jax.Array:
    """Return an island's first moments after it adopted a snapshot.

    A rule that keeps progress adds the snapshot's minus those that the island sent last. A moment forgets, so only the
    `share` that is left of those is replaced. Zeros stand for a snapshot without moments; the island keeps its own.
    """
    adopted_N = own_N + share * (new_N - reference_N) if rule.keeps_progress else new_N
    return jnp.where(jnp.any(new_N != 0.0), adopted_N, own_N)
