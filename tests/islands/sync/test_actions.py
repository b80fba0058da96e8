"""Actions of an island: their text, and the assembly of a log from its parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions, from_fields, to_fields
from archipelago.islands.sync.actions import (
    ACTIONS_MAX,
    Action,
    ActionLog,
    Adopt,
    BeginPass,
    ForgetShards,
    Join,
    RestoreWhole,
    Send,
    Steps,
    TakeMoments,
    parse,
    unfolded,
    word,
)
from tests.failing import failing
from tests.tiers import examples

WORDS: dict[str, Action] = {
    "n1": Steps(1),
    "n4": Steps(4),
    "a2:7": Adopt(2, 7),
    "s9": Send(9),
    "s9:top3": Send(9, "top3"),
    "d17:0:96:0": BeginPass("17:0:96:0"),
    "dsite/3:0:0:1!": BeginPass("site/3:0:0:1!"),
    "f17,site/3": ForgetShards(("17", "site/3")),
    "join:0,1": Join((0, 1)),
    "moments:b/y@8": TakeMoments("b/y", 8),
    "whole:a/w@12": RestoreWhole("a/w", 12),
}
DONE = st.lists(st.tuples(st.sampled_from(list(WORDS.values())), st.integers(1, 5)), max_size=12).map(
    lambda runs: [action for action, count in runs for _ in range(count)]
)


def action_log(*done: Action, enabled: bool = True) -> ActionLog:
    log = ActionLog("a", "x", enabled)
    for action in done:
        log.add(action)
    return log


def test_each_action_has_its_text() -> None:
    for text, action in WORDS.items():
        assert parse(text) == action
        assert word(action) == text
    for text in ("", "n", "n-1", "n٣", "a2", "a2:x", "s9:", "join:", "join:0,", "whole:a", "d", "x"):
        with failing(WireError):
            pytest.fail(f"{text} was read as {parse(text)}")


def test_a_repeated_action_is_written_once_and_take_empties_the_log() -> None:
    n4 = Steps(4)
    assert action_log(n4, n4, n4, Adopt(2, 7), n4, n4).take() == Actions("a", "x", 0, "n4*3 a2:7 n4*2")
    log = action_log(Steps(1), Steps(1), Send(1))
    assert log.peek() == log.peek() == log.take()
    assert (log.peek(), log.take(), log.done) == (None, None, 3)
    log.add(Steps(1))
    assert log.take() == Actions("a", "x", 3, "n1")  # repeats are not combined across `take`
    assert log.done == 4
    disabled = action_log(Steps(1), Send(1), enabled=False)
    assert (disabled.take(), disabled.done) == (None, 0)


@settings(max_examples=examples(100))
@given(done=DONE, cuts=st.sets(st.integers(0, 60)))
def test_the_parts_of_a_log_hold_all_actions(done: list[Action], cuts: set[int]) -> None:
    log, parts = action_log(), []
    for index, action in enumerate(done):
        if index in cuts and (part := log.take()) is not None:
            assert part.index + len(unfolded([Actions("a", "x", 0, part.text)])) == log.done == index
            parts.append(part)
        log.add(action)
    last = log.take()
    parts += [last] if last else []
    assert log.done == len(done)
    assert unfolded([from_fields(Actions, to_fields(part)) for part in parts]) == done


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[Action], list[tuple[int, int]]]:
    """Draw actions and the overlapping parts of them that arrive, in any order."""
    done = draw(DONE)
    ends = st.integers(0, len(done))
    return done, draw(st.lists(st.tuples(ends, ends).map(lambda ab: (min(ab), max(ab))), max_size=6))


@settings(max_examples=examples(100))
@given(spans())
def test_overlapping_parts_count_once_and_a_gap_ends_the_list(
    arrived: tuple[list[Action], list[tuple[int, int]]],
) -> None:
    done, stretches = arrived
    parts, known = [], set()
    for first, last in stretches:
        if (part := action_log(*done[first:last]).take()) is not None:
            parts.append(Actions("a", "x", first, part.text))
            known |= set(range(first, last))
    until_gap = next((index for index in range(len(done)) if index not in known), len(done))
    assert unfolded(parts) == done[:until_gap]


def test_a_gap_or_an_unreadable_action_ends_the_list_and_too_many_repetitions_are_refused() -> None:
    assert unfolded([]) == []
    assert unfolded([Actions("a", "x", 1, "n1")]) == []
    assert unfolded([Actions("a", "x", 0, "n1 nonsense n1"), Actions("a", "x", 3, "n1")]) == [Steps(1)]
    assert unfolded([Actions("a", "x", 0, "n1*3"), Actions("a", "x", 1, "n1*4")]) == [Steps(1)] * 5, "they overlap"
    for text in (f"n1*{ACTIONS_MAX + 1}", "n1*999999999999999999", f"n1 n2*{ACTIONS_MAX}"):
        with failing(WireError, "wire.too-many-actions"):
            unfolded([Actions("a", "x", 0, text)])
