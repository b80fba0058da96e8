"""The merge of one round: weights, clipping, merge rule and outer step together, with results worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.config import MergeConfig, OuterConfig, WireConfig
from archipelago.broker.messages import Contribution
from archipelago.broker.wire import digest_of, encoded
from archipelago.merger import outer
from archipelago.merger.claims import SeenWork
from archipelago.merger.committing import mean_loss
from archipelago.merger.merge_rules import norms
from archipelago.merger.round_merge import Addend, MergedRound, merge_round, new_state
from archipelago.merger.state import FragmentState
from archipelago.merger.weights import Group, RunningMean
from tests import samples

MERGE = MergeConfig(staleness="polynomial", normalise=True, clip=3.0)
AVERAGE = (Group(0, 2, "average"),)
RDA = (Group(0, 2, "rda"),)
SGD = outer.build(OuterConfig(rule="sgd", learning_rate=0.5))
NESTEROV = outer.build(OuterConfig(rule="nesterov", learning_rate=0.7, momentum=0.9))
SCHEDULED = outer.build(OuterConfig(rule="scheduled", learning_rate=0.5, momentum=0.0))


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


class Part(NamedTuple):
    contribution: Contribution
    delta_N: Vector


def part(island: str, delta_N: Vector, **changes: Any) -> Part:
    """Return a contribution of 100 tokens in 4 steps, measured from version 3."""
    return Part(samples.contribution(island=island, **({"base": 3} | changes)), delta_N)


def state(params_N: Vector, rule: outer.OuterOptimizer = SGD) -> FragmentState:
    return new_state(params_N, rule)


def close(of: FragmentState, *parts: Part, running: float = 1.0, **changes: Any) -> MergedRound:
    settings: dict[str, Any] = {
        "version": 3,
        "groups": AVERAGE,
        "live": len(parts),
        "config": MERGE,
        "wire": WireConfig(down="float32"),
        "outer": SGD,
        "now": outer.Round(),
        "path": lambda steps: 1.0,
        "seen": SeenWork([c.steps for c, _ in parts], [c.tokens / c.steps for c, _ in parts], {}),
    } | changes
    bodies = [encoded(part.delta_N, "float32") for part in parts]
    addends = [
        Addend(f"entry-{part.contribution.island}", part.contribution, body, *norms(body, settings["groups"]))
        for part, body in zip(parts, bodies, strict=True)
    ]
    return merge_round(of, RunningMean(running), addends, [[addend] for addend in addends], **settings)


# -- by hand -------------------------------------------------------------------------------------------------------


def test_an_average_weighs_by_tokens_and_batch_size() -> None:
    # 100 · 100/4 = 2500 and 100 · 100/2 = 5000: shares ⅓ and ⅔. ⅓(3, 0) + ⅔(0, 3) = (1, 2).
    closed = close(state(vector(10, 10)), part("a", vector(3, 0), steps=4), part("b", vector(0, 3), steps=2))
    np.testing.assert_allclose(np.asarray(closed.state.published_N), [9.5, 9.0], rtol=1e-6)
    assert [m.weight for m in closed.members] == pytest.approx([1 / 3, 2 / 3])
    assert [m.clip for m in closed.members] == [1.0, 1.0]
    assert closed.gain == 1.0
    assert closed.staleness == RunningMean(1.0)
    assert closed.state.params_N.tolist() == closed.state.published_N.tolist()
    assert closed.norms == (3.0, 3.0)


def test_a_stale_contribution_weighs_less() -> None:
    # Staleness 3: (1 + 3)^−½ = ½. Equal work has shares ⅔ and ⅓. The mean s is ¾, and the gain of the first round is ¾.
    parts = part("a", vector(3, 0)), part("b", vector(0, 3), base=0)
    closed = close(state(vector(0, 0)), *parts)
    assert [(m.staleness, m.base) for m in closed.members] == [(0, 3), (3, 0)]
    assert [m.weight for m in closed.members] == pytest.approx([2 / 3, 1 / 3])
    assert closed.gain == pytest.approx(0.75)
    assert closed.staleness.value == pytest.approx(0.9875)  # 1 + 0.05 · (0.75 − 1)
    np.testing.assert_allclose(np.asarray(closed.state.published_N), [-0.5 * 0.75 * 2, -0.5 * 0.75 * 1], rtol=1e-6)


def test_outliers_are_clipped_by_the_norms_of_earlier_rounds_and_the_tape_has_the_factor() -> None:
    # The median is 1 and the limit 3, so a norm of 30 is scaled by a tenth.
    closed = close(state(vector(0, 0)), part("a", vector(30, 0)), norms=(1.0,) * 8)
    assert [m.clip for m in closed.members] == pytest.approx([0.1])
    np.testing.assert_allclose(np.asarray(closed.state.published_N), [-1.5, 0.0], rtol=1e-6)
    assert closed.norms == pytest.approx((1.0,) * 8 + (3.0,))
    parts = [part(island, vector(300, 0)) for island in "abcdefghi"]
    closed = close(state(vector(0, 0)), *parts, norms=(1.0,) * 8)
    assert [m.clip for m in closed.members] == pytest.approx([0.01] * 9), "its own outliers do not change the limit"


def test_a_round_without_contributions_changes_nothing() -> None:
    moving = close(state(vector(2, 0), rule=NESTEROV), part("a", vector(1, 0)), outer=NESTEROV).state
    closed = close(moving, running=0.8, outer=NESTEROV, norms=(1.0,))
    assert samples.outer_bits(closed.state) == samples.outer_bits(moving)
    assert digest_of(np.asarray(closed.state.published_N)) == digest_of(np.asarray(moving.params_N))
    assert (closed.members, closed.gain, closed.staleness) == ((), 0.0, RunningMean(0.8))
    assert closed.norms == (1.0,)


def test_no_ratio_of_weights_overflows() -> None:
    """Weights grow with tokens squared, and norms up to 1e9 are admitted."""
    for work in ((1, 10**12), (10**12, 1), (0, 1), (1, 0), (0, 0)):
        parts = [part(island, vector(7e8, 7e8), tokens=tokens) for island, tokens in zip("ab", work, strict=True)]
        closed = close(state(vector(0, 0)), *parts)
        np.testing.assert_allclose(np.asarray(closed.state.published_N), [-3.5e8, -3.5e8], rtol=1e-6)


def test_members_are_in_the_order_of_the_sum_and_their_mean_loss_is_weighted_by_tokens() -> None:
    parts = [
        part("b", vector(0, 0), loss=2.0, tokens=300),
        part("a", vector(0, 0), loss=4.0, sequence=4),
        part("a", vector(0, 0), loss=math.nan, tokens=999, sequence=3),
    ]
    members = close(state(vector(0, 0)), *parts).members
    assert [(m.island, m.incarnation, m.sequence) for m in members] == [("b", "x", 0), ("a", "x", 4), ("a", "x", 3)]
    assert [(m.tokens, m.steps, m.loss) for m in members[:2]] == [(300, 4, 2.0), (100, 4, 4.0)]
    assert mean_loss(members) == 2.5
    assert math.isnan(mean_loss(()))
    assert math.isnan(mean_loss(members[2:]))


# -- the share cap and the islands' scores ----------------------------------------------------------------------------


def test_no_island_has_more_than_its_share_whatever_it_claims() -> None:
    parts = [part("a", vector(8, 0), tokens=1 << 53, steps=1 << 40), *(part(i, vector(0, 4)) for i in "bcd")]
    closed = close(state(vector(0, 0)), *parts)
    assert [m.weight for m in closed.members] == pytest.approx([0.4, 0.2, 0.2, 0.2])  # 2 of 2 + 3
    np.testing.assert_allclose(np.asarray(closed.state.published_N), [-0.5 * 3.2, -0.5 * 2.4], rtol=1e-6)
    uncapped = close(state(vector(0, 0)), *parts, config=replace(MERGE, share_cap=1e30))
    assert uncapped.members[0].weight > 0.999


def hostile_round(*names: str) -> list[Part]:
    """Return contributions that agree, except that of `bad`, which points the other way."""
    common_N = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    own = {name: np.random.default_rng(ord(name[0])).standard_normal(4096).astype(np.float32) for name in names}
    return [part(name, -common_N if name == "bad" else common_N + own[name]) for name in names]


WIDE = (Group(0, 1024, "average"), Group(1024, 3072, "rda"))


def test_a_round_is_as_if_the_hostile_island_were_absent() -> None:
    zeros_N = np.zeros(4096, np.float32)
    settings: dict[str, Any] = {"groups": WIDE, "outer": SCHEDULED}
    attacked = close(state(zeros_N, rule=SCHEDULED), *hostile_round("d", "bad", "e", "f"), **settings)
    without = close(state(zeros_N, rule=SCHEDULED), *hostile_round("d", "e", "f"), **settings)
    assert [m.weight for m in attacked.members] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    np.testing.assert_array_equal(np.asarray(attacked.state.published_N), np.asarray(without.state.published_N))
    assert attacked.norms == without.norms
    assert attacked.gain == without.gain
    settings["config"] = replace(MERGE, scores=False)
    off = close(state(zeros_N, rule=SCHEDULED), *hostile_round("d", "bad", "e", "f"), **settings)
    assert off.members[1].weight == 0.25


def test_a_round_in_which_nothing_has_any_weight_changes_nothing() -> None:
    zeros_N = np.zeros(4096, np.float32)
    known = close(state(zeros_N), *hostile_round("d", "bad", "e", "f"), groups=WIDE).scores
    begin = state(zeros_N)
    closed = close(begin, part("bad", zeros_N + 1), groups=WIDE, live=4, scores=known, norms=(1.0,))
    assert [m.weight for m in closed.members] == [0.0]
    assert closed.gain == 0.0
    assert not np.asarray(closed.state.published_N).any()
    assert closed.norms == (1.0,)


def test_the_outer_rule_gets_participation() -> None:
    """The rule needs the number of contributing islands, because momentum for all live islands made runs diverge."""
    heard: list[outer.Round] = []

    def step(params_N: Any, state: Any, delta_N: Any, now: outer.Round) -> Any:
        heard.append(now)
        return SGD.step(params_N, state, delta_N, now)

    listening = outer.OuterOptimizer(SGD.init, step)
    now = outer.Round(progress=0.5, interval=6.0)
    close(state(vector(0, 0)), part("a", vector(1, 1)), part("b", vector(1, 1)), live=8, outer=listening, now=now)
    assert heard == [outer.Round(participation=0.25, islands=2.0, progress=0.5, interval=6.0)]
