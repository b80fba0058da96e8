"""The merger's state: its JSON form, and its changes by rounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import archipelago.merger.state
from archipelago.broker.errors import ConfigError
from archipelago.merger.claims import Account
from archipelago.merger.scores import Score
from archipelago.merger.state import (
    INCARNATIONS_MAX,
    INCARNATIONS_OF_AN_ISLAND,
    REMEMBERED_MAX,
    RoundTiming,
    RunState,
    Sequences,
)
from archipelago.merger.weights import NormWindow, RunningMean
from tests import samples
from tests.failing import failing

COUNT = st.integers(0, 1 << 62)
SECONDS = st.none() | st.floats(0.0, 1e9)
NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,5}\Z")
NORMS = st.lists(st.floats(0.0, 1e300), max_size=6).map(lambda norms: NormWindow(tuple(norms)))
IDENTITIES = st.tuples(NAMES, NAMES, st.integers(0, 9))
FULL = RunState(
    closed=7,
    step=40,
    tokens=1000,
    staleness=RunningMean(0.9),
    timing=RoundTiming(0.25, 1.5),
    norms={0: NormWindow((1.0, 2.0)), 1: NormWindow()},
    seen={"a/x": Sequences(3, {5, 7}), "b/y": Sequences()},
    cursors={"0": (0, 96), "site/7": (2, 0)},
    step_seconds={"a": 0.25, "b": 0.1},
    island_tokens={"a": 700, "b": 300},
    scores={"a": Score(1.5, 2.0, 0.01, 1.25, 0.9, 4, 1), "b": Score()},
    accounts={"a": Account("x", 6, 1e9, 9e8, 40, 1024.0)},
    refused={"stale": 2, "claims.steps": 1},
    covered=5,
)


@st.composite
def states(draw: st.DrawFn) -> RunState:
    state = RunState(
        closed=draw(COUNT),
        step=draw(COUNT),
        tokens=draw(COUNT),
        staleness=RunningMean(draw(st.floats(1e-6, 1.0))),
        timing=RoundTiming(draw(SECONDS), draw(SECONDS)),
        norms=draw(st.dictionaries(st.integers(0, 20), NORMS, max_size=4)),
        cursors=draw(st.dictionaries(NAMES, st.tuples(COUNT, COUNT), max_size=4)),
        step_seconds=draw(st.dictionaries(NAMES, st.floats(0.0, 1e9), max_size=4)),
        island_tokens=draw(st.dictionaries(NAMES, COUNT, max_size=4)),
        covered=draw(COUNT),
    )
    for identity in draw(st.lists(IDENTITIES, max_size=12)):
        state.see(identity)
    return state


@given(states())
def test_json_keeps_every_bit(state: RunState) -> None:
    again = RunState.from_json(state.to_json())
    assert again == state
    assert again.to_json() == state.to_json()


def test_an_empty_text_is_a_fresh_state() -> None:
    assert RunState.from_json("") == RunState()


def damaged(**changes: Any) -> str:
    return json.dumps(without_digest() | changes)


def without_digest() -> dict[str, Any]:
    """Return the parts of a state, so that each is judged by itself."""
    values: dict[str, Any] = json.loads(FULL.to_json())
    del values["digest"]
    return values


def test_a_changed_number_is_an_error() -> None:
    text = FULL.to_json()
    assert RunState.from_json(text) == FULL
    with failing(ConfigError, "config.merger-state"):
        RunState.from_json(json.dumps(json.loads(text) | {"tokens": FULL.tokens + 1}))


def test_the_full_state_reads_back() -> None:
    assert RunState.from_json(damaged()) == FULL


def test_a_missing_part_is_an_error() -> None:
    for missing in without_digest():
        values = without_digest()
        del values[missing]
        with failing(ConfigError, "config.merger-state"):
            RunState.from_json(json.dumps(values))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        damaged(closed="many"),
        damaged(tokens=math.inf),
        damaged(staleness={"wrong": 1.0}),
        damaged(timing=[1.0, 2.0]),
        damaged(norms={"first": [1.0]}),
        damaged(seen=[]),
        damaged(seen={"a/x": [0, [1]]}),
        damaged(cursors={"0": [1]}),
        damaged(step_seconds={"a": "slow"}),
        damaged(island_tokens={"a": []}),
        damaged(covered=None),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_state_is_an_error(text: str) -> None:
    with failing(ConfigError, "config.merger-state"):
        RunState.from_json(text)


@given(st.sets(IDENTITIES), st.sets(IDENTITIES))
def test_seen_contributions_are_remembered(seen: set[tuple[str, str, int]], others: set[tuple[str, str, int]]) -> None:
    state = RunState()
    for identity in seen:
        state.see(identity)
    again = RunState.from_json(state.to_json())
    for identity in seen | others:
        assert state.has_seen(identity) == again.has_seen(identity) == (identity in seen)


def test_each_incarnation_has_its_own_sequences() -> None:
    state = RunState()
    state.see(("a", "x", 0))
    assert state.has_seen(("a", "x", 0))
    assert not state.has_seen(("a", "y", 0))
    assert not state.has_seen(("b", "x", 0))
    assert not state.has_seen(("a", "x", 1))


# -- after a round -------------------------------------------------------------------------------------------------


def test_a_round_advances_the_state() -> None:
    state = replace(FULL, seen={}, cursors={"0": (0, 96)})
    merged = [
        samples.contribution(
            island="b", sequence=4, tokens=50, global_step=39, step_seconds=0.2, data="0:0:95 1:0:end"
        ),
        samples.contribution(island="c", sequence=0, tokens=30, global_step=44, step_seconds=0.3, data="0:0:97"),
    ]
    state.after_round(8, 44, merged)
    assert (state.closed, state.step, state.tokens, state.timing) == (8, 44, 1080, FULL.timing)
    assert state.cursors == {"0": (0, 97), "1": (1, 0)}  # cursors only advance, also to the next pass
    assert state.step_seconds == {"a": 0.25, "b": 0.2, "c": 0.3}
    assert state.island_tokens == {"a": 700, "b": 350, "c": 30}
    assert state.has_seen(("b", "x", 4))
    assert state.has_seen(("c", "x", 0))
    assert state.covered == 5  # only checkpoints change this


def test_an_empty_round_advances_only_the_round_number() -> None:
    state = RunState.from_json(FULL.to_json())
    state.after_round(8, 40, [])
    assert state == replace(FULL, closed=8)


PARTS = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.sampled_from("xy"), st.integers(1, 900), st.floats(0.1, 9.0), st.integers(0, 99)
    ),
    max_size=6,
)


@given(PARTS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(parts: list[tuple[str, str, int, float, int]], random: Random) -> None:
    """This holds for two incarnations of one island with different speeds, too."""
    merged = [
        samples.contribution(
            island=island, incarnation=life, sequence=n, tokens=tokens, step_seconds=seconds, data=f"{n % 2}:0:{at}"
        )
        for n, (island, life, tokens, seconds, at) in enumerate(parts)
    ]
    one, other = RunState(), RunState()
    one.after_round(1, 4, merged)
    random.shuffle(merged)
    other.after_round(1, 4, merged)
    assert one.to_json() == other.to_json()


# -- the memory of seen contributions is bounded -------------------------------------------------------------------


def test_the_least_recent_incarnations_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archipelago.merger.state, "INCARNATIONS_MAX", 3)
    state = RunState()
    for life in ("p", "q", "r"):
        state.see(("a", life, 0))
    state.see(("a", "p", 1))  # so that q is the least recent
    state = RunState.from_json(state.to_json())  # a restart keeps the order
    state.see(("a", "s", 0))
    assert list(state.seen) == ["a/r", "a/p", "a/s"]
    assert state.seen["a/p"] == Sequences(2)
    assert not state.has_seen(("a", "q", 0))
    state.has_seen(("a", "r", 0))  # asking does not change the order
    state.see(("a", "t", 0))
    assert list(state.seen) == ["a/p", "a/s", "a/t"]


def test_thousands_of_incarnations_are_remembered() -> None:
    state = RunState()
    for island in range(INCARNATIONS_MAX + 10):
        state.see((str(island), "x", 0))
    assert list(state.seen) == [f"{island}/x" for island in range(10, INCARNATIONS_MAX + 10)]


def test_the_incarnations_of_one_island_do_not_displace_others() -> None:
    state = RunState()
    state.see(("b", "y", 0))
    for life in range(10 * INCARNATIONS_OF_AN_ISLAND):
        state.see(("a", str(life), 0))
    assert len(state.seen) == INCARNATIONS_OF_AN_ISLAND + 1
    assert state.has_seen(("b", "y", 0))
    assert state.has_seen(("a", str(10 * INCARNATIONS_OF_AN_ISLAND - 1), 0))


@given(st.lists(IDENTITIES, max_size=30), st.sets(st.integers(0, 30)))
def test_restarts_do_not_change_which_incarnations_are_forgotten(
    identities: list[tuple[str, str, int]], restarts: set[int]
) -> None:
    def remembered(restarts: set[int]) -> str:
        state = RunState()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archipelago.merger.state, "INCARNATIONS_MAX", 4)
            for index, identity in enumerate(identities):
                state = RunState.from_json(state.to_json()) if index in restarts else state
                state.see(identity)
                assert state.has_seen(identity)
                assert len(state.seen) <= 4
        return state.to_json()

    assert remembered(restarts) == remembered(set())


# -- sequences -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=80))
def test_sequences_behave_like_a_set(numbers: list[int]) -> None:
    kept, plain = Sequences(), set[int]()
    for number in numbers:
        kept = kept.with_one(number)
        plain.add(number)
        assert kept.floor == next(n for n in range(42) if n not in plain)
        assert kept.above == {n for n in plain if n > kept.floor}
    assert [n in kept for n in range(42)] == [n in plain for n in range(42)]


def test_numbers_in_order_take_constant_memory() -> None:
    kept = Sequences()
    for number in range(5000):
        kept = kept.with_one(number)
    assert (kept.floor, kept.above) == (5000, set())


def test_a_gap_takes_bounded_memory() -> None:
    kept = Sequences()
    for number in range(1, 3 * REMEMBERED_MAX):  # number 0 never arrives
        kept = kept.with_one(number)
        assert len(kept.above) <= REMEMBERED_MAX
        assert number in kept
        assert number + 1 not in kept
    assert all(number in kept for number in range(1, 3 * REMEMBERED_MAX))
