"""The merger's state as JSON and back, to the bit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError
from merger.admission import Sequences
from merger.clip import NormWindow
from merger.pace import Pace
from merger.state import RunState
from merger.weights import RunningMean

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
    pace=Pace(0.25, 1.5),
    norms={0: NormWindow((1.0, 2.0)), 1: NormWindow()},
    seen={"a/x": Sequences(3, {5, 7}), "b/y": Sequences()},
)


@st.composite
def states(draw: st.DrawFn) -> RunState:
    state = RunState(
        closed=draw(COUNT),
        step=draw(COUNT),
        tokens=draw(COUNT),
        staleness=RunningMean(draw(st.floats(1e-6, 1.0))),
        pace=Pace(draw(SECONDS), draw(SECONDS)),
        norms=draw(st.dictionaries(st.integers(0, 20), NORMS, max_size=4)),
    )
    for identity in draw(st.lists(IDENTITIES, max_size=12)):
        state.see(identity)
    return state


@given(states())
def test_json_keeps_every_bit(state: RunState) -> None:
    again = RunState.from_json(state.to_json())
    assert again == state
    assert again.to_json() == state.to_json()


def test_no_text_is_a_fresh_state() -> None:
    assert RunState.from_json("") == RunState()


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(FULL.to_json()) | changes)


def test_the_full_state_reads_back() -> None:
    assert RunState.from_json(damaged()) == FULL


@pytest.mark.parametrize("missing", sorted(json.loads(FULL.to_json())))
def test_a_missing_part_is_an_error(missing: str) -> None:
    values = json.loads(FULL.to_json())
    del values[missing]
    with pytest.raises(ConfigError, match="cannot be read"):
        RunState.from_json(json.dumps(values))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "7",
        "[" * 100_000,
        damaged(closed="many"),
        damaged(step=None),
        damaged(tokens=math.inf),
        damaged(staleness={"wrong": 1.0}),
        damaged(staleness=0.5),
        damaged(pace=[1.0, 2.0]),
        damaged(norms=[[1.0]]),
        damaged(norms={"first": [1.0]}),
        damaged(norms={"0": 1.0}),
        damaged(seen=[]),
        damaged(seen={"a/x": []}),
        damaged(seen={"a/x": [0, [1]]}),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_state_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunState.from_json(text)


@given(st.sets(IDENTITIES), st.sets(IDENTITIES))
def test_it_knows_what_it_has_seen(seen: set[tuple[str, str, int]], others: set[tuple[str, str, int]]) -> None:
    state = RunState()
    for identity in seen:
        state.see(identity)
    again = RunState.from_json(state.to_json())
    for identity in seen | others:
        assert state.has_seen(identity) == again.has_seen(identity) == (identity in seen)


def test_another_life_of_an_island_has_sequences_of_its_own() -> None:
    state = RunState()
    state.see(("a", "x", 0))
    assert state.has_seen(("a", "x", 0))
    assert not state.has_seen(("a", "y", 0))
    assert not state.has_seen(("b", "x", 0))
    assert not state.has_seen(("a", "x", 1))
