"""Outer rules on quadratics with a known optimum, at staleness 0 to 8, compared with recorded trajectories.

Contributions are measured from parameters that were published `staleness` rounds earlier. Local training covers the
share c of the distance to the optimum along an axis of curvature c.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from archipelago.broker.config import OuterConfig
from archipelago.merger.outer import OUTER, Round, build
from tests.tiers import examples

RECORDED = Path(__file__).with_name("trajectories.json")
RECORD_VARIABLE = "ARCHIPELAGO_RECORD"
RULES = sorted(OUTER)
AXES, STALENESS_MAX, ROUNDS = 6, 8, 1500

Distances = NDArray[np.float32]


def settings_of(rule: str, rate: Any, momentum: float = 0.5) -> OuterConfig:
    return OuterConfig(rule=rule, learning_rate=rate, momentum=momentum)  # type: ignore[arg-type]


@cache
def distances(rule: str, momentum: float) -> Callable[[Any, Any, Any, Any], jax.Array]:
    """`(start_N, optimum_N, pull_N, rates_S)` gives ‖published − optimum‖ after each round; float32 [S, ROUNDS].

    Staleness is 0 in the first row of the result, 1 in the second, and so on.
    """

    def one(start_N: Any, optimum_N: Any, pull_N: Any, rate: Any, staleness: Any) -> jax.Array:
        outer = OUTER[rule](settings_of(rule, rate, momentum))

        def round_(carry: Any, _: None) -> tuple[Any, jax.Array]:
            params_N, state, history_VxN = carry  # the published parameters, newest first
            delta_N = pull_N * (history_VxN[staleness] - optimum_N)
            params_N, state = outer.step(params_N, state, delta_N, Round())
            history_VxN = jnp.concatenate([params_N[None], history_VxN[:-1]])
            return (params_N, state, history_VxN), jnp.linalg.norm(params_N - optimum_N)

        first = (start_N, outer.init(start_N), jnp.tile(start_N[None], (STALENESS_MAX + 1, 1)))
        found: jax.Array = jax.lax.scan(round_, first, None, length=ROUNDS)[1]
        return found

    every = jax.vmap(one, in_axes=(None, None, None, 0, 0))
    compiled: Callable[[Any, Any, Any, Any], jax.Array] = jax.jit(
        lambda start_N, optimum_N, pull_N, rates_S: every(
            start_N, optimum_N, pull_N, rates_S, jnp.arange(STALENESS_MAX + 1)
        )
    )
    return compiled


def quadratic(seed: int) -> tuple[Distances, Distances, Distances]:
    """Return a start, an optimum, and the share of the distance that local training covers along each axis."""
    random = np.random.default_rng(seed)
    pull_N = np.concatenate([[0.2, 1.0], random.uniform(0.2, 1.0, AXES - 2)])
    values = random.normal(size=AXES), random.normal(size=AXES), pull_N
    start_N, optimum_N, pull_N = (np.asarray(value, np.float32) for value in values)
    return start_N, optimum_N, pull_N


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**31 - 1))
def test_every_rule_finds_the_optimum_at_every_staleness(rule: str, seed: int) -> None:
    """The rate shrinks with staleness, as with s(τ) and a smaller gain."""
    start_N, optimum_N, pull_N = quadratic(seed)
    rates_S = np.array([0.3 / (1 + s) for s in range(STALENESS_MAX + 1)], np.float32)
    found = np.asarray(distances(rule, 0.5)(start_N, optimum_N, pull_N, rates_S))
    first = float(np.linalg.norm(start_N - optimum_N))
    assert (found[:, -1] < 2e-3 * first).all(), found[:, -1] / first
    assert (found < 3.0 * first).all(), "the distance grew too much on the way"


def test_stale_runs_diverge_with_momentum_and_converge_without() -> None:
    """This is a negative control: at the same rate and staleness, SGD converges and Nesterov does not."""
    start_N, optimum_N, pull_N = quadratic(1)
    rates_S = np.full(STALENESS_MAX + 1, 0.15, np.float32)
    first = float(np.linalg.norm(start_N - optimum_N))
    plain, heavy = (np.asarray(distances(r, 0.5)(start_N, optimum_N, pull_N, rates_S)) for r in ("sgd", "nesterov"))
    assert (plain[:, -1] < 1e-3 * first).all()
    assert heavy[0, -1] < 1e-3 * first, "momentum converges without staleness"
    assert not (heavy[STALENESS_MAX, -1] < first), "momentum diverges at staleness 8"


def trajectory(rule: str) -> list[list[float]]:
    """Return the parameters after each of 24 rounds at staleness 2 with two of four islands in each."""
    start_N, optimum_N, pull_N = quadratic(1)
    outer, params_N, rows = build(settings_of(rule, 0.6, 0.9)), jnp.asarray(start_N), []
    state, history = outer.init(params_N), [start_N] * 3
    for _ in range(24):
        delta_N = pull_N * (history[-3] - optimum_N)
        params_N, state = outer.step(params_N, state, delta_N, Round(0.5))
        history.append(np.asarray(params_N))
        rows.append([*map(float, params_N)])
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_trajectories_equal_the_recorded_ones(rule: str) -> None:
    """A mismatch means that a rule has changed, and that running runs would continue differently.

    If the change is intended, record again with ARCHIPELAGO_RECORD=1 and say so in the commit. The tolerance is that of
    float32 sums in another order, on another processor.
    """
    rows = trajectory(rule)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    if os.environ.get(RECORD_VARIABLE) == "1":
        recorded[rule] = [[float(f"{value:.7g}") for value in row] for row in rows]
        lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert set(recorded) <= set(RULES), "recordings of removed rules"
    np.testing.assert_allclose(rows, recorded[rule], rtol=1e-4, atol=1e-5)
