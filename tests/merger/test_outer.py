"""Outer optimisers: their recursions, the encoding of their states, and how they converge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from archipelago.broker.codecs import CODECS
from archipelago.broker.config import MergeConfig, OuterConfig
from archipelago.broker.errors import WireError
from archipelago.broker.full_state import joined, separated
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import digest, encoded
from archipelago.merger import merge_rules
from archipelago.merger.outer import OUTER, OuterOptimizer, Round, build, named, of_named
from archipelago.merger.weights import groups

pytestmark = pytest.mark.usefixtures("optimised")

Vector = NDArray[np.float32]
RULES = ["scheduled", "nesterov", "sgd"]
SGD_OF_RATE_ONE = build(OuterConfig(rule="sgd", learning_rate=1.0))


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def of(rule: Any, learning_rate: float = 0.7, momentum: float = 0.9) -> OuterOptimizer:
    return build(OuterConfig(rule=rule, learning_rate=learning_rate, momentum=momentum))


def bits(values: Any) -> list[int]:
    return [int(b) for b in np.asarray(values).reshape(-1).view(np.uint32)]


def deltas(count: int, size: int = 8) -> list[Vector]:
    random = np.random.default_rng(1)
    return [random.standard_normal(size, dtype=np.float32) for _ in range(count)]


# -- steps ---------------------------------------------------------------------------------------------------------


def test_sgd_by_hand() -> None:
    assert set(get_args(get_type_hints(OuterConfig)["rule"])) == set(OUTER) == set(RULES)
    sgd = of("sgd", 0.5)
    params_N, _ = sgd.step(vector(3, -1), sgd.init(vector(3, -1)), vector(2, 4), Round(0.5))
    assert params_N.tolist() == [2.0, -3.0]  # 3 − ½·2 and −1 − ½·4
    stepped_N = SGD_OF_RATE_ONE.step(params_N, SGD_OF_RATE_ONE.init(params_N), vector(0.1, 0.3), Round())[0]
    assert bits(stepped_N) == bits(np.asarray(params_N) - vector(0.1, 0.3)), "a rate of one gives the exact difference"


def momenta(rule: OuterOptimizer, now: list[Round]) -> list[float]:
    """Return μ of each round, as the share of the earlier momentum that remains. All gradients are 1."""
    params_N, state, left = vector(0), rule.init(vector(0)), []
    _, state = rule.step(params_N, state, vector(1), Round())
    for each in now:
        before = float(state.trace[0])
        _, state = rule.step(params_N, state, vector(1), each)
        left.append((float(state.trace[0]) - 1.0) / before)
    return left


def test_a_scheduled_momentum_grows_with_the_rounds_up_to_its_limit() -> None:
    found = momenta(of("scheduled", 1.0, 0.8), [Round(islands=4.0, interval=1000.0)] * 60)
    # 1 − 1/(2 + k/10) in round k, which for the first of these is 1; a memory of 5 is the most at 0.8
    np.testing.assert_allclose(found[:30], [1 - 1 / (2 + k / 10) for k in range(1, 31)], rtol=1e-5)
    np.testing.assert_allclose(found[30:], [0.8] * 30, rtol=1e-5)


def test_a_scheduled_momentum_is_limited_by_the_steps_of_a_round() -> None:
    rule = of("scheduled", 1.0, 0.9)
    for islands, interval, mu in (
        (4, 2, 0.2), (4, 6, 3 / 7), (4, 24, 0.75), (4, 200, 0.9), (1, 24, 3 / 7), (2, 24, 0.6), (8, 24, 6 / 7),
    ):  # fmt: skip
        found = momenta(rule, [Round(islands=float(islands), interval=float(interval))] * 90)
        assert found[-1] == pytest.approx(mu), (islands, interval)


def test_a_scheduled_momentum_falls_to_zero_at_the_end() -> None:
    rule = build(OuterConfig(rule="scheduled", learning_rate=1.0, momentum=0.5, cooldown=0.2))
    found = momenta(rule, [Round(islands=4.0, progress=p) for p in (0.0, 0.8, 0.9, 0.95)])
    np.testing.assert_allclose(found, [0.5, 0.5, 0.25, 0.125], rtol=1e-4)
    assert momenta(rule, [Round(islands=4.0, progress=1.0)]) == [0.0]
    without = build(OuterConfig(rule="scheduled", learning_rate=1.0, momentum=0.5, cooldown=0.0))
    assert momenta(without, [Round(islands=4.0, progress=0.999)]) == [0.5]


def test_partial_rounds_together_move_as_far_as_one_full_round() -> None:
    """Otherwise M rounds with a full step each would move M times as far."""
    rule, at_the_end = of("scheduled", 0.7, 0.9), Round(islands=1.0, progress=1.0)
    together, _ = rule.step(vector(5), rule.init(vector(5)), vector(2), at_the_end)
    params_N: Any = vector(5)
    state = rule.init(params_N)
    for _ in range(4):
        params_N, state = rule.step(params_N, state, vector(2), at_the_end._replace(participation=0.25))
    np.testing.assert_allclose(params_N, together, rtol=1e-6)
    np.testing.assert_allclose(together, [5 - 0.7 * 2], rtol=1e-6)


def test_nesterov_follows_the_closed_recursion() -> None:
    for rate, mu in ((0.7, 0.9), (1.0, 0.0), (0.4, 0.5)):
        theta, b, found = np.ones(8), np.zeros(8), run(of("nesterov", rate, mu), deltas(6))
        for delta_N, params_N in zip(deltas(6), found, strict=True):
            b = mu * b + delta_N
            theta = theta - rate * (delta_N + mu * b)
            np.testing.assert_allclose(params_N, theta, rtol=1e-5, atol=1e-5)


def run(rule: OuterOptimizer, rounds: list[Vector]) -> list[Any]:
    """Return the parameters after each round, from ones."""
    params_N: Any = np.ones(8, np.float32)
    state, out = rule.init(params_N), []
    for delta_N in rounds:
        params_N, state = rule.step(params_N, state, delta_N, Round())
        out.append(np.asarray(params_N))
    return out


@pytest.mark.parametrize("rule_name", RULES)
def test_a_step_is_deterministic_and_float32_on_the_cpu_and_changes_no_input(rule_name: str) -> None:
    rule, (params_N, first_N, second_N) = of(rule_name), deltas(3)
    with jax.default_device(jax.devices()[-1]):
        _, state = rule.step(params_N, rule.init(params_N), first_N, Round())
        one = rule.step(params_N, state, second_N, Round(0.5))
        two = rule.step(params_N, state, second_N, Round(0.5))
    leaves = jax.tree.leaves((state, one))
    assert [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(two)]
    assert bits(params_N) == bits(deltas(3)[0])
    assert {leaf.dtype for leaf in leaves if leaf.shape} == {np.dtype(np.float32)}
    assert {leaf.dtype for leaf in leaves if not leaf.shape} <= {np.dtype(np.int32)}, "the only scalar is a count"
    assert {device for leaf in leaves for device in leaf.devices()} == {jax.local_devices(backend="cpu")[0]}
    for wrong in (np.ones(1, np.float32), np.ones((8, 1), np.float32), np.ones(8, np.float64)):
        with pytest.raises(ValueError):
            rule.step(params_N, state, wrong, Round())
    with pytest.raises(ValueError):
        rule.step(params_N.astype(np.float64), state, params_N, Round())


# -- states -------------------------------------------------------------------------------------------------------


def trained(rule: OuterOptimizer, size: int = 8) -> tuple[Any, Any]:
    params_N: Any = np.ones(size, np.float32)
    state = rule.init(params_N)
    for delta_N in deltas(2, size):
        params_N, state = rule.step(params_N, state, delta_N, Round(0.5))
    return params_N, state


@pytest.mark.parametrize("rule_name", RULES)
def test_a_loaded_state_continues_with_the_same_bits(rule_name: str) -> None:
    rule = of(rule_name)
    params_N, state = trained(rule)
    loaded_N, loaded = of_named(rule.init(np.zeros(8, np.float32)), separated(joined(named(params_N, state))), 8)
    assert bits(loaded_N) == bits(params_N)
    next_direct = jax.tree.leaves(rule.step(params_N, state, deltas(3)[2], Round(0.5)))
    next_from_bytes = jax.tree.leaves(rule.step(loaded_N, loaded, deltas(3)[2], Round(0.5)))
    assert [bits(leaf) for leaf in next_from_bytes] == [bits(leaf) for leaf in next_direct]
    assert loaded_N.devices() == {jax.local_devices(backend="cpu")[0]}


EIGHT = np.ones(8, np.float32)
TRACE = "state[0].trace"
OTHERS: list[dict[str, Any]] = [
    {"params": EIGHT},
    {"params": EIGHT, TRACE: EIGHT, "more": EIGHT},
    {"params": np.ones(7, np.float32), TRACE: EIGHT},
    {"params": EIGHT.reshape(2, 4), TRACE: EIGHT},
    {"params": EIGHT, TRACE: EIGHT.view(np.int32)},
]


def test_the_arrays_of_another_rule_or_size_are_refused() -> None:
    state = of("nesterov").init(EIGHT)
    of_named(state, {"params": EIGHT, TRACE: EIGHT}, 8)
    for other in OTHERS:
        with pytest.raises(WireError):
            of_named(state, other, 8)


# -- quadratics with a known optimum, at staleness 0 to 8, compared with recorded trajectories -------------------------


RECORDED = Path(__file__).with_name("trajectories.json")
RECORD_VARIABLE = "ARCHIPELAGO_RECORD"
AXES, STALENESS_MAX, ROUNDS = 6, 8, 1500

Distances = NDArray[np.float32]


def settings_of(rule: str, rate: Any, momentum: float = 0.5) -> OuterConfig:
    return OuterConfig(rule=rule, learning_rate=rate, momentum=momentum)  # type: ignore[arg-type]


def quadratic(seed: int) -> tuple[Distances, Distances, Distances]:
    """Return a start, an optimum, and the share of the distance that local training covers along each axis."""
    random = np.random.default_rng(seed)
    pull_N = np.concatenate([[0.2, 1.0], random.uniform(0.2, 1.0, AXES - 2)])
    values = random.normal(size=AXES), random.normal(size=AXES), pull_N
    start_N, optimum_N, pull_N = (np.asarray(value, np.float32) for value in values)
    return start_N, optimum_N, pull_N


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


def merged_digests() -> list[str]:
    """Return the digests of what a merger computes of random contributions: sums, merged gradients and outer steps."""
    random, found, size = np.random.default_rng(0), list[Any](), 128 * 64 + 1000
    rows = ((Tensor("matrix", (128, 64), "rest"), 0), (Tensor("bias", (1000,), "rest"), 128 * 64))
    vectors = random.standard_normal((8, size)).astype(np.float32)
    for rule in ("average", "rda", "isotropic"):
        of_fragment = groups(rows, MergeConfig(rest=rule, embedding=rule))
        acc = merge_rules.begin(of_fragment)
        for weight, (name, vector_N) in enumerate(zip(CODECS, vectors, strict=False), 1):
            body = encoded(vector_N, name)
            norms, norm = merge_rules.norms(body, of_fragment)
            acc = merge_rules.accumulate(acc, body, of_fragment, norms, weight=0.3 * weight)
            found += [np.asarray(leaf) for leaf in (*jax.tree.leaves(acc), norms, norm)]
        found.append(np.asarray(merge_rules.finish(acc, of_fragment)))
    for rule in RULES:
        optimizer = of(rule)
        params_N, state = vectors[5], optimizer.init(vectors[5])
        for vector_N, now in zip(vectors[6:], (Round(2 / 3, 2.0, 0.37), Round(progress=0.41)), strict=True):
            params_N, state = optimizer.step(params_N, state, vector_N, now)
            found += [np.asarray(leaf) for leaf in (params_N, *jax.tree.leaves(state))]
    return [digest(array.tobytes()) for array in found]


@pytest.mark.full
def test_a_processor_with_fewer_instructions_computes_the_same_bits() -> None:
    """It adds a product in two instructions, where this one may do so in one. A merger there may take the run over."""
    script = "from tests.merger.test_outer import merged_digests; print(*merged_digests())"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == merged_digests(), done.stderr
