"""Outer optimisers against their recursions, and their states on the way to bytes and back."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import jax
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from archipelago.broker.config import OuterConfig
from archipelago.broker.errors import WireError
from archipelago.broker.wire import digest
from archipelago.merger import outer
from archipelago.merger.outer import MAGIC, OUTER, OuterOptimizer, Round, build, dump, load

Vector = NDArray[np.float32]
RULES = [
    "scheduled", "sgd", "nesterov", "mla", "heloco", "delayed", "adaptive", "averaging", "schedule_free", "sparseloco",
]  # fmt: skip
# No subnormals, and none can come out of sums and differences: they count as zero.
ELEMENTS = st.just(0.0) | st.builds(math.copysign, st.floats(2.0**-90, 2.0**60, width=32), st.sampled_from([1.0, -1.0]))
VECTOR = arrays(np.float32, 6, elements=ELEMENTS)
SGD_OF_RATE_ONE = build(OuterConfig(rule="sgd", learning_rate=1.0))


ALIKE = {name: names for names in ({"mla", "heloco"}, {"averaging", "schedule_free"}) for name in names}
"""rules that keep the same state, for the same purpose; the run's config tells them apart"""


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def of(rule: Any, learning_rate: float = 0.7, momentum: float = 0.9) -> OuterOptimizer:
    return build(OuterConfig(rule=rule, learning_rate=learning_rate, momentum=momentum))


def bits(values: Any) -> list[int]:
    return [int(b) for b in np.asarray(values).reshape(-1).view(np.uint32)]


def deltas(count: int, size: int = 8) -> list[Vector]:
    random = np.random.default_rng(1)
    return [random.standard_normal(size, dtype=np.float32) for _ in range(count)]


def test_the_config_and_the_registry_name_the_same_rules() -> None:
    assert set(get_args(get_type_hints(OuterConfig)["rule"])) == set(OUTER) == set(RULES)


# -- steps ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the first example pays for the compiler
@given(VECTOR, VECTOR)
def test_sgd_of_rate_one_is_the_exact_difference(params_N: Vector, delta_N: Vector) -> None:
    state = SGD_OF_RATE_ONE.init(params_N)
    stepped_N, _, published_N = SGD_OF_RATE_ONE.step(params_N, state, delta_N, Round())
    assert bits(stepped_N) == bits(params_N - delta_N) == bits(published_N)


def test_sgd_by_hand() -> None:
    sgd = of("sgd", 0.5)
    params_N, _, _ = sgd.step(vector(3, -1), sgd.init(vector(3, -1)), vector(2, 4), Round(0.5))
    assert params_N.tolist() == [2.0, -3.0]  # 3 − ½·2 and −1 − ½·4


def test_nesterov_by_hand() -> None:
    rule = of("nesterov", 0.5, 0.5)
    params_N, state, published_N = rule.step(vector(2), rule.init(vector(2)), vector(1), Round())
    # b = 1; θ = 2 − ½(1 + ½·1) = 1.25
    assert params_N.tolist() == published_N.tolist() == [1.25]
    params_N, state, _ = rule.step(params_N, state, vector(1), Round())
    # b = ½·1 + 1 = 1.5; θ = 1.25 − ½(1 + ½·1.5) = 0.375
    assert params_N.tolist() == [0.375]


def momenta(rule: OuterOptimizer, now: list[Round]) -> list[float]:
    """Of each round, all with a Δ of 1 and after one more: what is left of the momentum that was there before it."""
    params_N, state, left = vector(0), rule.init(vector(0)), []
    _, state, _ = rule.step(params_N, state, vector(1), Round())
    for each in now:
        before = float(state.trace[0])
        _, state, _ = rule.step(params_N, state, vector(1), each)
        left.append((float(state.trace[0]) - 1.0) / before)
    return left


def test_a_scheduled_momentum_grows_with_the_rounds_up_to_the_most() -> None:
    found = momenta(of("scheduled", 1.0, 0.8), [Round(islands=4.0, interval=1000.0)] * 60)
    # 1 − 1/(2 + k/10) in round k, which for the first of these is 1; a memory of 5 is the most at 0.8
    np.testing.assert_allclose(found[:30], [1 - 1 / (2 + k / 10) for k in range(1, 31)], rtol=1e-5)
    np.testing.assert_allclose(found[30:], [0.8] * 30, rtol=1e-5)


@pytest.mark.parametrize(
    ("islands", "interval", "mu"),
    [(4, 2, 0.2), (4, 6, 3 / 7), (4, 24, 0.75), (4, 200, 0.9), (1, 24, 3 / 7), (2, 24, 0.6), (8, 24, 6 / 7)],
)
def test_a_scheduled_momentum_remembers_no_more_than_the_steps_of_all_are_worth(
    islands: float, interval: float, mu: float
) -> None:
    found = momenta(of("scheduled", 1.0, 0.9), [Round(islands=islands, interval=interval)] * 90)
    assert found[-1] == pytest.approx(mu)


def test_a_scheduled_momentum_falls_to_nothing_at_the_end() -> None:
    rule = build(OuterConfig(rule="scheduled", learning_rate=1.0, momentum=0.5, cooldown=0.2))
    found = momenta(rule, [Round(islands=4.0, progress=p) for p in (0.0, 0.8, 0.9, 0.95)])
    np.testing.assert_allclose(found, [0.5, 0.5, 0.25, 0.125], rtol=1e-4)
    assert momenta(rule, [Round(islands=4.0, progress=1.0)]) == [0.0]
    without = build(OuterConfig(rule="scheduled", learning_rate=1.0, momentum=0.5, cooldown=0.0))
    assert momenta(without, [Round(islands=4.0, progress=0.999)]) == [0.5]


def test_a_scheduled_step_is_nesterovs() -> None:
    young = [Round(islands=4.0, interval=8.0)] * 6  # nH/32 = 1: as many rounds of memory as Nesterov has at 0.5
    params_N: Any = np.ones(8, np.float32)
    state = of("scheduled", 0.7, 0.5).init(params_N)
    for (theta_N, _), delta_N, now in zip(run(of("nesterov", 0.7, 0.5), deltas(6)), deltas(6), young, strict=True):
        params_N, state, _ = of("scheduled", 0.7, 0.5).step(params_N, state, delta_N, now)
        np.testing.assert_allclose(params_N, theta_N, rtol=1e-5, atol=1e-5)


def test_rounds_of_one_island_each_go_as_far_as_one_round_of_all() -> None:
    """A whole step in each of them went M times as far, and runs in which nobody is waited for learned badly."""
    rule, at_the_end = of("scheduled", 0.7, 0.9), Round(islands=1.0, progress=1.0)
    together, _, _ = rule.step(vector(5), rule.init(vector(5)), vector(2), at_the_end)
    params_N: Any = vector(5)
    state = rule.init(params_N)
    for _ in range(4):
        params_N, state, _ = rule.step(params_N, state, vector(2), at_the_end._replace(participation=0.25))
    np.testing.assert_allclose(params_N, together, rtol=1e-6)
    np.testing.assert_allclose(together, [5 - 0.7 * 2], rtol=1e-6)


def test_look_ahead_by_hand() -> None:
    rule = of("mla", 1.0, 0.5)
    params_N, state, published_N = rule.step(vector(1), rule.init(vector(1)), vector(0.5), Round())
    # G = ½; m = ½·½ = ¼; θ = 1 − (½ + ½·¼) = 0.375; published 0.375 − ½·¼ = 0.25
    assert (params_N.tolist(), published_N.tolist()) == ([0.375], [0.25])
    params_N, _, published_N = rule.step(params_N, state, vector(1), Round(0.25))
    # G = √¼; m = ½·¼ + ½·½ = 0.375; θ = 0.375 − (½ + 0.1875) = −0.3125; published −0.3125 − 0.1875 = −0.5
    assert (params_N.tolist(), published_N.tolist()) == ([-0.3125], [-0.5])


@pytest.mark.parametrize(("rate", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_nesterov_follows_the_closed_recursion(rate: float, mu: float) -> None:
    rule = of("nesterov", rate, mu)
    theta, b = np.ones(8), np.zeros(8)
    params_N: Any = np.ones(8, np.float32)
    state = rule.init(params_N)
    for delta_N in deltas(6):
        b = mu * b + delta_N
        theta = theta - rate * (delta_N + mu * b)
        params_N, state, published_N = rule.step(params_N, state, delta_N, Round(0.5))
        np.testing.assert_allclose(params_N, theta, rtol=1e-5, atol=1e-5)
        assert bits(published_N) == bits(params_N)


@pytest.mark.parametrize(("rate", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_look_ahead_follows_the_closed_recursion(rate: float, mu: float) -> None:
    rule = of("mla", rate, mu)
    theta, m = np.ones(8), np.zeros(8)
    params_N: Any = np.ones(8, np.float32)
    state = rule.init(params_N)
    for arrivals, delta_N in enumerate(deltas(6), start=1):
        share = min(arrivals, 4) / 4
        rho = math.sqrt(share)
        m = mu * m + (1 - mu) * rho * delta_N
        theta = theta - rate * (rho * delta_N + mu * m)
        params_N, state, published_N = rule.step(params_N, state, delta_N, Round(share))
        np.testing.assert_allclose(params_N, theta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(published_N, theta - rate * mu * m, rtol=1e-5, atol=1e-5)


def run(rule: OuterOptimizer, rounds: list[Vector], params_N: Any = None) -> list[tuple[Any, Any]]:
    """Parameters and what is published after each round, from ones."""
    params_N = np.ones(8, np.float32) if params_N is None else params_N
    state, out = rule.init(params_N), []
    for delta_N in rounds:
        params_N, state, published_N = rule.step(params_N, state, delta_N, Round())
        out.append((np.asarray(params_N), np.asarray(published_N)))
    return out


def test_delayed_nesterov_by_hand() -> None:
    rule = build(OuterConfig(rule="delayed", learning_rate=1.0, momentum=0.5, delay=2))
    found = [float(params_N[0]) for params_N, _ in run(rule, [vector(1), vector(3), vector(2), vector(2)], vector(10))]
    # 10 − 1/2; m = (1 + 3)/2 = 2, 9.5 − 3/2 − ½·2; 7 − 2/2; m = ½·2 + 2 = 3, 6 − 2/2 − ½·3
    assert found == [9.5, 7.0, 6.0, 3.5]


@pytest.mark.parametrize("delay", [1, 3])
def test_delayed_nesterov_moves_as_nesterov_on_the_mean(delay: int) -> None:
    """Between two moves of the momentum it goes the same way as Nesterov with the mean of the rounds since."""
    rounds = deltas(4 * delay)
    means = [np.asarray(np.mean(rounds[i : i + delay], axis=0), np.float32) for i in range(0, len(rounds), delay)]
    ours = run(build(OuterConfig(rule="delayed", learning_rate=0.4, momentum=0.9, delay=delay)), rounds)
    theirs = run(of("nesterov", 0.4, 0.9), means)
    for (mine_N, _), (expected_N, _) in zip(ours[delay - 1 :: delay], theirs, strict=True):
        np.testing.assert_allclose(mine_N, expected_N, rtol=1e-4, atol=1e-4)


def test_what_agrees_with_the_momentum_is_not_turned() -> None:
    rounds = [vector(1, 0), vector(1, 2), vector(3, 1)]
    ones_N = vector(1, 1)
    for (a_N, _), (b_N, _) in zip(run(of("heloco"), rounds, ones_N), run(of("mla"), rounds, ones_N), strict=True):
        assert bits(a_N) == bits(b_N)


def test_what_opposes_the_momentum_is_turned_and_keeps_its_length() -> None:
    first_N, second_N = vector(4, 0), vector(-0.6, 0.8)
    (before_N, _), (after_N, _) = run(of("heloco", 1.0, 0.5), [first_N, second_N], vector(0, 0))
    # m = ½·(4, 0); conf = 1/(1 + 3·2) = 1/7, c = −0.6: φ((−0.6 + 6/7 · 0.6, 0.8)) = φ((−0.6/7, 0.8)), of length 1
    turned_N = np.array([-0.6 / 7, 0.8]) / math.hypot(0.6 / 7, 0.8)
    momentum_N = 0.5 * np.array([2.0, 0.0]) + 0.5 * turned_N
    np.testing.assert_allclose(after_N, before_N - (turned_N + 0.5 * momentum_N), rtol=1e-5)


def test_adaptive_momentum_by_hand() -> None:
    rule = of("adaptive", 0.5, 0.9)
    found = run(rule, [vector(1, 0), vector(2, 0), vector(0, 1)], vector(0, 0))
    # ρ = 0 at first: μ = 0.9, but b was 0: b = (1, 0). ρ = 1: μ = 0, b = (2, 0). ρ = 0: μ = 0.9, b = (1.8, 1)
    expected = [[-0.5 * 1.9, 0.0], [-0.95 - 1.0, 0.0], [-1.95 - 0.5 * 0.9 * 1.8, -0.5 * 1.9]]
    np.testing.assert_allclose([params_N for params_N, _ in found], expected, rtol=1e-6)


def test_averaging_with_equal_shares_is_nesterov() -> None:
    rule = build(OuterConfig(rule="averaging", learning_rate=2.0, momentum=0.8, interpolation=0.8))
    theirs = run(of("nesterov", 2.0 * (1 - 0.8), 0.8), deltas(6))
    for (_, published_N), (expected_N, _) in zip(run(rule, deltas(6)), theirs, strict=True):
        np.testing.assert_allclose(published_N, expected_N, rtol=1e-4, atol=1e-4)


def test_schedule_free_is_that_of_optax_with_the_average_at_hand() -> None:
    rate, beta = 0.7, 0.9
    transform = optax.contrib.schedule_free(optax.sgd(rate), rate, b1=beta)
    y_N: Any = np.ones(8, np.float32)
    state = transform.init(y_N)
    rule = build(OuterConfig(rule="schedule_free", learning_rate=rate, interpolation=beta))
    with jax.numpy_dtype_promotion("standard"):
        for delta_N, (params_N, published_N) in zip(deltas(6), run(rule, deltas(6)), strict=True):
            updates_N, state = transform.update(delta_N, state, y_N)
            y_N = optax.apply_updates(y_N, updates_N)
            np.testing.assert_allclose(published_N, y_N, rtol=1e-4, atol=1e-4)
            x_N = optax.contrib.schedule_free_eval_params(state, y_N)
            np.testing.assert_allclose(params_N, x_N, rtol=1e-3, atol=1e-3)


def test_the_rate_of_sparseloco_falls_and_stays() -> None:
    rule = build(OuterConfig(rule="sparseloco", learning_rate=1.0, decay_rounds=4, final_share=0.5))
    found = [float(params_N[0]) for params_N, _ in run(rule, [vector(1)] * 6, vector(0))]
    np.testing.assert_allclose(-np.diff([0.0, *found]), [1.0, 0.875, 0.75, 0.625, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("rule_name", RULES)
def test_a_step_changes_none_of_its_inputs_and_repeats_bit_for_bit(rule_name: str) -> None:
    rule, (params_N, first_N, second_N) = of(rule_name), deltas(3)
    _, state, _ = rule.step(params_N, rule.init(params_N), first_N, Round())
    one = rule.step(params_N, state, second_N, Round(0.5))
    two = rule.step(params_N, state, second_N, Round(0.5))
    assert [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(two)]
    assert bits(params_N) == bits(deltas(3)[0])


@pytest.mark.parametrize("rule_name", RULES)
def test_everything_is_float32_on_the_cpu(rule_name: str) -> None:
    rule, params_N = of(rule_name), np.ones(8, np.float32)
    with jax.default_device(jax.devices()[-1]):
        state = rule.init(params_N)
        leaves = jax.tree.leaves((state, rule.step(params_N, state, params_N, Round())))
    assert {leaf.dtype for leaf in leaves if leaf.shape} == {np.dtype(np.float32)}
    assert {leaf.dtype for leaf in leaves if not leaf.shape} <= {np.dtype(np.int32)}, "a count, and nothing else"
    assert {device for leaf in leaves for device in leaf.devices()} == {jax.local_devices(backend="cpu")[0]}


def test_participation_and_values_are_not_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        traces.append("step")
        return updates, state

    counted = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    monkeypatch.setitem(OUTER, "sgd", lambda config: outer.from_optax(counted))
    rule = build(OuterConfig(rule="sgd", learning_rate=0.123))  # of no other test: what was built is kept
    params_N: Any = np.ones(8, np.float32)
    for participation in (1, 0.5, 0.25, np.float64(0.1), np.float32(0.3)):
        params_N, _, _ = rule.step(params_N, rule.init(params_N), np.ones(8, np.float32), Round(participation))
    assert traces == ["step"]
    assert np.asarray(params_N).tolist() == [6.0] * 8


@pytest.mark.parametrize("rule_name", RULES)
def test_vectors_that_do_not_fit_are_an_error(rule_name: str) -> None:
    rule, params_N = of(rule_name), np.ones(8, np.float32)
    state = rule.init(params_N)
    for wrong in (np.ones(1, np.float32), np.ones((8, 1), np.float32), np.ones(8, np.float64)):
        with pytest.raises(ValueError, match="delta: float"):
            rule.step(params_N, state, wrong, Round())
    with pytest.raises(ValueError, match="parameters: float64"):
        rule.step(params_N.astype(np.float64), state, params_N, Round())


# -- bytes ---------------------------------------------------------------------------------------------------------


def trained(rule: OuterOptimizer, size: int = 8) -> tuple[Any, Any]:
    params_N: Any = np.ones(size, np.float32)
    state = rule.init(params_N)
    for delta_N in deltas(2, size):
        params_N, state, _ = rule.step(params_N, state, delta_N, Round(0.5))
    return params_N, state


@pytest.mark.parametrize("rule_name", RULES)
def test_a_run_goes_on_from_bytes_as_if_nothing_had_happened(rule_name: str) -> None:
    rule = of(rule_name)
    params_N, state = trained(rule)
    loaded_N, loaded = load(rule.init(np.zeros(8, np.float32)), dump(params_N, state), 8)
    assert bits(loaded_N) == bits(params_N)
    went_on = jax.tree.leaves(rule.step(params_N, state, deltas(3)[2], Round(0.5)))
    went_on_from_bytes = jax.tree.leaves(rule.step(loaded_N, loaded, deltas(3)[2], Round(0.5)))
    assert [bits(leaf) for leaf in went_on_from_bytes] == [bits(leaf) for leaf in went_on]
    assert loaded_N.devices() == {jax.local_devices(backend="cpu")[0]}


def test_every_bit_pattern_survives() -> None:
    # Minus zero, the smallest subnormal, infinity, and NaNs that carry something.
    patterns = np.array([1 << 31, 1, 0x7F800000, 0x7FC00001, 0xFFC12345, 0x3F800000], np.uint32).view(np.float32)
    rule = of("nesterov")
    state = jax.tree.map(lambda leaf: jax.device_put(patterns), rule.init(patterns))
    loaded_N, loaded = load(rule.init(patterns), dump(patterns, state))
    assert bits(loaded_N) == bits(patterns)
    assert [bits(leaf) for leaf in jax.tree.leaves(loaded)] == [bits(patterns)]


def test_states_with_other_dtypes_survive_too() -> None:
    adam = outer.from_optax(optax.adam(0.1))
    params_N = np.ones(8, np.float32)
    state = jax.tree.map(lambda leaf: leaf + 1, adam.init(params_N))
    _, loaded = load(adam.init(params_N), dump(params_N, state))
    before, after = jax.tree.leaves(state), jax.tree.leaves(loaded)
    assert [leaf.dtype for leaf in after] == [leaf.dtype for leaf in before]
    assert [leaf.tolist() for leaf in after] == [leaf.tolist() for leaf in before]
    assert before[0].tolist() == 1  # the step count, an integer


@pytest.mark.parametrize("rule_name", RULES)
def test_every_damaged_byte_and_every_cut_is_noticed(rule_name: str) -> None:
    rule = of(rule_name)
    params_N, state = trained(rule)
    data = dump(params_N, state)
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << (i % 8)
        for wrong in (bytes(damaged), data[:i]):
            with pytest.raises(WireError):
                load(state, wrong, 8)
    with pytest.raises(WireError):
        load(state, data + b"\0", 8)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    state = SGD_OF_RATE_ONE.init(np.ones(8, np.float32))
    for hostile in (data, MAGIC + data, MAGIC + digest(data).encode() + data):
        with pytest.raises(WireError):
            load(state, hostile, 8)


def sealed(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else serialization.msgpack_serialize(value)
    return MAGIC + digest(body).encode() + body


EIGHT = np.ones(8, np.float32)
TRACE = "state[0].trace"


def array_of(shape: Any, dtype: Any, body: bytes) -> bytes:
    packed = msgpack.packb((shape, dtype, body))
    data: bytes = msgpack.packb({"params": msgpack.ExtType(1, packed), TRACE: msgpack.ExtType(1, packed)})
    return data


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\x91" * 5000,  # lists in lists in lists
        [EIGHT, EIGHT],
        {"params": EIGHT},
        {"params": EIGHT, TRACE: EIGHT, "more": EIGHT},
        {"params": EIGHT, TRACE: np.ones(7, np.float32)},
        {"params": np.ones(7, np.float32), TRACE: EIGHT},
        {"params": EIGHT.reshape(2, 4), TRACE: EIGHT},
        {"params": EIGHT.astype(np.float64), TRACE: EIGHT},
        {"params": EIGHT, TRACE: EIGHT.view(np.int32)},
        {"params": 1.0, TRACE: EIGHT},
        {"params": [[1.0], [2.0, 3.0]], TRACE: EIGHT},
        {"params": EIGHT, TRACE: {"__msgpack_chunked_array__": True, "shape": {"0": 8}, "chunks": {"0": 5}}},
        {"params": EIGHT, TRACE: {"__msgpack_chunked_array__": True, "shape": 8, "chunks": {}}},
        array_of([1 << 62], "float32", b""),
        array_of([8], "object", b"\0" * 64),
        array_of([8], ",", b"\0" * 32),
        array_of([8], 5, b"\0" * 32),
        array_of("x", "float32", b"\0" * 32),
    ],
)
def test_well_sealed_bytes_that_do_not_fit_are_refused(hostile: Any) -> None:
    state = of("nesterov").init(EIGHT)
    load(state, sealed({"params": EIGHT, TRACE: EIGHT}), 8)  # the seal and the names are right
    with pytest.raises(WireError):
        load(state, sealed(hostile), 8)


def test_the_state_of_another_rule_or_size_is_refused() -> None:
    states = {name: trained(of(name)) for name in RULES}
    for name, (params_N, state) in states.items():
        for other in set(RULES) - ALIKE.get(name, {name}):
            with pytest.raises(WireError, match="where the rule has"):
                load(states[other][1], dump(params_N, state))
        with pytest.raises(WireError, match=r"float32 of shape \(9,\)"):
            load(state, dump(params_N, state), 9)
