"""What an island did, as text: nothing is lost or told twice, however it is cut into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions, from_fields, to_fields
from archipelago.islands.sync.actions import ACTIONS_MAX, ActionLog, unfolded

WORDS = st.sampled_from(
    ["n1", "n4", "a2:7", "s9", "d17:0:96:0", "d17:0:0:1!", "f17,site/3", "join:0,1", "moments:b/y@8"]
)
DEEDS = st.lists(st.tuples(WORDS, st.integers(1, 5)), max_size=12).map(
    lambda words: [word for word, count in words for _ in range(count)]
)


def action_log(*deeds: str, enabled: bool = True) -> ActionLog:
    one = ActionLog("a", "x", enabled)
    for deed in deeds:
        one.did(deed)
    return one


def test_what_is_repeated_is_said_once() -> None:
    actions = action_log("n4", "n4", "n4", "a2:7", "n4", "n4").take()
    assert actions == Actions("a", "x", 0, "n4*3 a2:7 n4*2")


def test_taking_takes_it_away_and_looking_does_not() -> None:
    one = action_log("n1", "n1", "s1")
    assert one.peek() == one.peek() == one.take()
    assert (one.peek(), one.take(), one.done) == (None, None, 3)
    one.did("n1")
    assert one.take() == Actions("a", "x", 3, "n1")  # not joined with what was taken
    assert one.done == 4


def test_who_does_not_record_tells_nothing() -> None:
    one = action_log("n1", "s1", enabled=False)
    assert (one.take(), one.done) == (None, 0)


@given(deeds=DEEDS, cuts=st.sets(st.integers(0, 60)))
def test_the_tracks_together_say_all_that_was_done(deeds: list[str], cuts: set[int]) -> None:
    one, logged = action_log(), []
    for index, deed in enumerate(deeds):
        if index in cuts and (actions := one.take()) is not None:
            assert actions.index + len(unfolded([Actions("a", "x", 0, actions.text)])) == one.done == index
            logged.append(actions)
        one.did(deed)
    last = one.take()
    logged += [last] if last else []
    assert one.done == len(deeds)
    assert unfolded([from_fields(Actions, to_fields(actions)) for actions in logged]) == deeds


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, int]]]:
    """What was done, and which stretches of it were told, in any order."""
    deeds = draw(DEEDS)
    ends = st.integers(0, len(deeds))
    return deeds, draw(st.lists(st.tuples(ends, ends).map(lambda ab: (min(ab), max(ab))), max_size=6))


@given(spans())
def test_overlaps_are_said_once_and_a_gap_ends_it(told: tuple[list[str], list[tuple[int, int]]]) -> None:
    deeds, stretches = told
    logged, known = [], set()
    for first, last in stretches:
        if (actions := action_log(*deeds[first:last]).take()) is not None:
            logged.append(Actions("a", "x", first, actions.text))
            known |= set(range(first, last))
    until_gap = next((index for index in range(len(deeds)) if index not in known), len(deeds))
    assert unfolded(logged) == deeds[:until_gap]


def test_nothing_told_is_nothing_done() -> None:
    assert unfolded([]) == []
    assert unfolded([Actions("a", "x", 1, "n1")]) == []


@pytest.mark.parametrize("text", [f"n1*{ACTIONS_MAX + 1}", "n1*999999999999999999", f"n1 n2*{ACTIONS_MAX}"])
def test_a_bomb_is_refused_before_it_unfolds(text: str) -> None:
    with pytest.raises(WireError, match="the actions of a are more than"):
        unfolded([Actions("a", "x", 0, text)])
