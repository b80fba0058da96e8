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
    ACCOUNTS_MAX,
    INCARNATIONS_OF_AN_ISLAND,
    REMEMBERED_MAX,
    RoundTiming,
    RunState,
    Sequences,
    digested,
)
from archipelago.merger.weights import RunningMean
from tests import samples
from tests.failing import failing

FULL = RunState(
    closed=7,
    step=40,
    tokens=1000,
    staleness=RunningMean(0.9),
    timing=RoundTiming(0.25, 1.5),
    norms={2: (1.0, 2.0), 10: ()},  # whose order differs as numbers and as texts
    seen={"a/x": Sequences(3, frozenset({5, 7}), 6), "b/y": Sequences()},
    cursors={"0": (0, 96), "7": (2, 0)},
    accounts={"a": Account(700, 6, 40, 0.25, 12.5, 24, Score(1.5, 2.0, 0.01, 1.25, 4, 1)), "b": Account(300, 5)},
    refused={"stale": 2, "late": 1},
    covered=5,
)


def test_only_an_undamaged_state_is_read() -> None:
    assert RunState.from_json("") == RunState()
    assert RunState.from_json(FULL.to_json()) == FULL
    assert RunState.from_json(FULL.to_json()).to_json() == FULL.to_json()
    values: dict[str, Any] = json.loads(FULL.to_json())
    assert RunState.from_json(json.dumps(dict(reversed(values.items())))) == FULL, "the broker keeps no order"
    changed = [values | {"tokens": FULL.tokens + 1}, {k: v for k, v in values.items() if k != "seen"}, {}, []]
    del values["digest"]  # so that each part is judged by itself
    assert RunState.from_json(digested(values)) == FULL
    wrong: dict[str, list[Any]] = {
        "closed": ["many"],
        "tokens": [math.inf],
        "staleness": [{"wrong": 1.0}],
        "timing": [["slow", 2.0]],
        "norms": [{"first": [1.0]}],
        "seen": [[], {"a/x": [0, 1]}],
        "cursors": [{"0": [1]}],
        "accounts": [{"a": [1] * 14}, {"a": ["many", 1]}],
        "covered": [None],
        "steered": [{"inner.steps": 0}, {"data.shards": 3}],
    }
    damaged = [digested(values | {name: value}) for name, all_ in wrong.items() for value in all_]
    for text in ("{", "[" * 100_000, json.dumps(values), *map(json.dumps, changed), *damaged):
        with failing(ConfigError, "config.lost-state"):
            RunState.from_json(text)


# -- after a round -------------------------------------------------------------------------------------------------


def test_a_round_advances_the_state() -> None:
    state = replace(FULL, seen={}, cursors={"0": (0, 96)})
    merged = [
        samples.contribution(island="b", sequence=4, tokens=50, global_step=39, step_seconds=0.2, data="0:0:95 1:1:0"),
        samples.contribution(island="c", sequence=0, tokens=30, global_step=44, step_seconds=0.3, data="0:0:97"),
    ]
    state.after_round(8, 44, merged, {"b": Score(rounds=1), "x": Score()}, {"b": 1, "c": 2})
    assert (state.closed, state.step, state.tokens, state.timing) == (8, 44, 1080, FULL.timing)
    assert state.cursors == {"0": (0, 97), "1": (1, 0)}  # cursors only advance, also to the next pass
    assert state.accounts["b"] == Account(350, 8, 39, 0.2, 12.5, 1, Score(rounds=1))
    assert state.accounts == FULL.accounts | {"b": state.accounts["b"], "c": Account(30, 8, 44, 0.3, 7.5, 2)}
    assert state.usual_batch == 12.5
    assert state.has_seen(("b", "x", 4))
    assert state.has_seen(("c", "x", 0))
    assert not any(state.has_seen(other) for other in (("b", "y", 4), ("c", "x", 4), ("d", "x", 0)))
    assert state.covered == 5  # only checkpoints change this
    state.after_round(9, 44, [], {}, {})
    assert (state.closed, state.step, state.tokens) == (9, 44, 1080), "an empty round only has a number"
    state.refuse("stale", 20, 5)
    counts = {"merged": 2, "merged_tokens": 1080, "refused": 4, "refused_tokens": 20}
    assert state.counts() == counts | {"bytes_up": sum(c.bytes for c in merged) + 5}
    needed = state.needed_by(2, {"b"})
    assert (needed.norms, list(needed.accounts)) == ({2: FULL.norms[2]}, ["b"]), "the tape repeats no more than this"


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
    one.after_round(1, 4, merged, {}, dict.fromkeys("ab", 0))
    random.shuffle(merged)
    other.after_round(1, 4, merged, {}, dict.fromkeys("ab", 0))
    assert one.to_json() == other.to_json()


# -- the memory of islands is bounded ------------------------------------------------------------------------------


def test_the_oldest_accounts_are_forgotten_first() -> None:
    state = RunState()
    old, new = [f"old{number}" for number in range(5)], [f"new{number}" for number in range(ACCOUNTS_MAX - 2)]
    for number, islands in enumerate([*([island] for island in old), new], 1):
        state.after_round(
            number, 4, [samples.contribution(island=island) for island in islands], {}, dict.fromkeys(islands, 0)
        )
    assert len(state.accounts) == ACCOUNTS_MAX
    assert [island for island in state.accounts if island.startswith("old")] == ["old3", "old4"]


def test_the_incarnations_of_one_island_do_not_displace_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archipelago.merger.state, "INCARNATIONS_MAX", INCARNATIONS_OF_AN_ISLAND + 1)
    state = RunState()
    state.see(("b", "y", 0))
    for life in range(2 * INCARNATIONS_OF_AN_ISLAND):
        state.closed = life
        state.see(("a", "long-lived", life))
        state.see(("a", str(life), 0))
    assert len(state.seen) == INCARNATIONS_OF_AN_ISLAND + 1
    assert state.has_seen(("b", "y", 0))
    assert state.has_seen(("a", "long-lived", 0))
    assert state.has_seen(("a", str(2 * INCARNATIONS_OF_AN_ISLAND - 1), 0))
    assert not state.has_seen(("a", str(INCARNATIONS_OF_AN_ISLAND - 1), 0))
    state.see(("c", "z", 0))
    assert not state.has_seen(("b", "y", 0)), "the least recent one is forgotten"


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


def test_numbers_take_bounded_memory() -> None:
    kept, gap, odd = Sequences(), Sequences(), Sequences()
    for number in range(3 * REMEMBERED_MAX):
        kept = kept.with_one(number)
        if number:  # number 0 never arrives
            gap = gap.with_one(number)
            assert len(gap.above) <= REMEMBERED_MAX
            assert number in gap
            assert number + 1 not in gap
        if number % 2:
            odd = odd.with_one(number)
            assert len(odd.above) <= REMEMBERED_MAX
            assert number - 1 not in odd, "only the oldest gaps count as seen"
    assert (kept.floor, kept.above) == (3 * REMEMBERED_MAX, frozenset())
    assert all(number in gap for number in range(1, 3 * REMEMBERED_MAX))
