"""Rounds: calls, closing by answers, quorums and grace windows, with time as an argument."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig, SyncConfig
from archipelago.broker.messages import Contribution
from archipelago.merger.rounds import Close, Rounds, grace_seconds
from archipelago.merger.state import RoundTiming, RunState
from tests import samples

FRAGMENTS = 4


def rounds(closed: int = 0, timing: RoundTiming | None = None, fragments: int = FRAGMENTS, **settings: Any) -> Rounds:
    """Return the rounds of four fragments with H = 8, so a stride is two inner steps. Grace is half of the slack."""
    changes = {"interval": 8, "window": 2, "quorum": 1, "grace": 0.5, "smoothing": 0.8} | settings
    of = replace(samples.manifest(fragments=fragments), config=RunConfig(sync=SyncConfig(**changes)))
    return Rounds(of, RunState(closed=closed, timing=timing or RoundTiming()))


def commit(some: Rounds, close: Close, sync_seconds: float = 0.0) -> None:
    """Commit a round as the merger does."""
    timing = some._state.timing.after_quorum(close.quorum_seconds, some.config.smoothing)
    timing = timing.after_sync(sync_seconds, some.config.smoothing)
    some.advance(replace(some._state, closed=close.round, timing=timing), close)


def answered(island: str, number: int = 1, *, farewell: bool = False, step_seconds: float = 1.0) -> Contribution:
    return samples.contribution(
        island=island, round=number, fragment=(number - 1) % FRAGMENTS, farewell=farewell, step_seconds=step_seconds
    )


def called(some: Rounds) -> list[int]:
    return [call.round for call in some.calls()]


def waiting(*numbers: int) -> set[int]:
    """Return the fragments of these rounds."""
    return {(number - 1) % FRAGMENTS for number in numbers}


LIVE = frozenset({"a", "b"})


# -- calls ---------------------------------------------------------------------------------------------------------


def test_the_first_contribution_calls_its_round_once() -> None:
    some = rounds()
    assert (some.calls(), some.deadline()) == ([], None)
    some.answer(answered("a"), 0.0)
    assert called(some) == [1]
    some.answer(answered("b"), 1.0)
    assert called(some) == []


def test_only_open_rounds_are_called() -> None:
    some = rounds(closed=4, window=2)
    for number in (7, 6):
        some.answer(answered("a", number), 0.0)
    assert called(some) == [6]  # 5 and 6 are open
    some.answer(answered("a", 5), 0.0)
    assert called(some) == [5]
    close = some.close(0.0, frozenset("a"), waiting(5, 6, 7))
    assert close is not None
    commit(some, close, 0.0)
    assert called(some) == [7]


# -- closing by answers --------------------------------------------------------------------------------------------


def test_a_round_closes_once_all_live_islands_have_answered() -> None:
    some = rounds(quorum=2)
    some.answer(answered("a"), 10.0)
    assert some.close(10.0, LIVE, waiting(1)) is None
    some.answer(answered("b"), 12.0)
    close = some.close(12.5, LIVE, waiting(1))
    # The quorum is noted by the first call after it. The stride is 2 s, and Eq. 3 gives ½ · 2 · 2 s.
    assert close == Close(1, 0, 1, quorum_seconds=2.5, grace_seconds=2.0, open_seconds=2.5)


def test_farewells_and_answers_of_dead_islands_count_and_repeats_do_not() -> None:
    some = rounds()
    for island in ("gone", "a", "b"):
        some.answer(answered(island), 0.0)
    assert some.close(0.0, LIVE, waiting(1)) is not None, "an answer of a dead island delays the round"
    some = rounds(quorum=2)
    some.answer(answered("a", farewell=True), 0.0)
    some.answer(answered("b"), 0.0)
    assert some.close(0.0, LIVE, waiting(1)) is not None, "a farewell is no answer"
    some = rounds(quorum=2)
    for _ in range(3):
        some.answer(answered("a"), 0.0)
    assert some.close(1e6, LIVE, waiting(1)) is None, "one island has answered for two"
    some = rounds(quorum=2, grace=0.0)
    some.answer(answered("gone"), 0.0)
    assert some.close(1.0, LIVE, waiting(1)) is None
    assert some.close(2.0, frozenset("a"), waiting(1)) == Close(1, 0, 1, 2.0, 0.0, 2.0), "a dead island does not count"


# -- closing by the clock ------------------------------------------------------------------------------------------


def test_grace_by_hand() -> None:
    some = rounds(timing=RoundTiming(quorum_seconds=0.5, sync_seconds=0.5), quorum=2)
    live = frozenset({"fast", "slow", "silent"})
    some.answer(answered("slow", step_seconds=3.0), 10.0)
    some.answer(answered("fast", step_seconds=1.0), 11.0)
    # T_step = 2 · 1 s of the fastest; slack = 2 · 2 − (0.5 + 0.5) = 3; grace = ½ · 3.
    assert some.deadline() is None
    assert some.close(11.0, live, waiting(1)) is None
    assert some.deadline() == 12.5
    some.is_paused = True
    assert (some.deadline(), some.close(12.5, live, waiting(1))) == (None, None)
    some.is_paused = False
    assert some.close(math.nextafter(12.5, 0.0), live, waiting(1)) is None
    assert some.close(12.5, live, waiting(1)) == Close(1, 0, 1, quorum_seconds=1.0, grace_seconds=1.5, open_seconds=2.5)
    some = rounds()
    some.answer(answered("a", step_seconds=1.0), 0.0)
    assert some.close(0.0, live, waiting(1)) is None
    some.answer(answered("b", step_seconds=0.001), 1.0)  # would leave almost no slack
    assert some.close(1.0, live, waiting(1)) is None
    assert some.deadline() == 2.0, "grace is fixed at the quorum"


def test_without_grace_or_slack_a_round_closes_at_its_quorum_and_never_before() -> None:
    for some in (rounds(grace=0.0), rounds(timing=RoundTiming(quorum_seconds=4.0, sync_seconds=0.5))):
        some.answer(answered("a"), 3.0)
        assert some.close(3.0, LIVE, waiting(1)) == Close(1, 0, 1, 0.0, 0.0, 0.0)
    some = rounds(quorum=2)
    some.answer(answered("a"), 0.0)
    assert some.close(1e9, frozenset("abc"), waiting(1)) is None
    assert some.deadline() is None


# -- order ---------------------------------------------------------------------------------------------------------


def test_a_quorum_ends_with_the_answers_of_an_island_that_is_expelled() -> None:
    some = rounds()
    some.answer(answered("a"), 0.0)
    assert some.close(0.0, frozenset("ab"), {0}) is None
    assert some.deadline() is not None
    some.forget(["a"])
    assert some.deadline() is None, "the merger would look for contributions without a pause"
    some.answer(answered("b"), 100.0)
    assert some.close(100.0, frozenset("bc"), {0}) is None, "the round has a grace window again"


def test_a_later_round_has_its_own_quorum_and_grace() -> None:
    some = rounds()
    some.answer(answered("a", 2), 0.0)
    assert some.close(0.0, LIVE, waiting(2)) is None
    some.answer(answered("a", 1), 10.0)
    assert some.close(10.0, LIVE, waiting(1, 2)) is None
    close = some.close(12.0, LIVE, waiting(1, 2))
    assert close == Close(1, 0, 1, quorum_seconds=0.0, grace_seconds=2.0, open_seconds=2.0)
    commit(some, close, 0.0)
    assert some.deadline() == 2.0  # its grace window ended long ago
    assert some.close(12.0, LIVE, waiting(2)) == Close(2, 1, 1, 0.0, 2.0, 12.0)


def test_late_contributions_and_those_of_other_fragments_are_no_answers() -> None:
    some = rounds(closed=4)
    some.answer(answered("a", 1), 0.0)  # round 1 and round 5 sync the same fragment
    assert called(some) == []
    for live in (frozenset[str](), LIVE):
        assert some.close(1e6, live, set()) is None
    assert some.close(1e6, frozenset("a"), waiting(5)) is None
    some.answer(answered("a", 5), 1e6)
    assert some.close(1e6, frozenset("a"), waiting(6)) is None
    assert some.close(1e6, frozenset("a"), waiting(5)) is not None


# -- the end -------------------------------------------------------------------------------------------------------


def drain(some: Rounds, left: set[int]) -> list[int]:
    """Close rounds without live islands. Each merges the contributions that wait for its fragment."""
    closed = []
    while (close := some.close(0.0, frozenset(), left)) is not None:
        left.discard(some.manifest.fragment_of(close.round))
        commit(some, close, 0.0)
        closed.append(close.round)
    return closed


def test_a_round_whose_answers_were_merged_earlier_closes_empty() -> None:
    """Islands that were ahead answered round 5 while round 1 was open. Round 1 merged this, and they send no other."""
    some = rounds()
    for number in (5, 1, 2, 3, 4):
        for island in LIVE:
            some.answer(answered(island, number), 0.0)
    for number in (1, 2, 3, 4):
        close = some.close(0.0, LIVE, waiting(*range(number, 5)))
        assert close is not None
        commit(some, close, 0.0)
    close = some.close(0.0, LIVE, set())
    assert close is not None
    assert close.round == 5
    commit(some, close, 0.0)
    assert some.close(0.0, LIVE, set()) is None


@given(st.integers(0, 20), st.sets(st.integers(0, FRAGMENTS - 1)), st.integers(1, 9), st.integers(1, 9))
def test_draining_takes_at_most_one_round_per_fragment(closed: int, left: set[int], window: int, quorum: int) -> None:
    some = rounds()
    some.answer(answered("a", 3, farewell=True), 0.0)
    assert drain(some, waiting(3)) == [1, 2, 3]  # 1 and 2 are empty
    numbers = drain(rounds(closed=closed, window=window, quorum=quorum), set(left))
    assert numbers == list(range(closed + 1, closed + 1 + len(numbers)))
    assert {(number - 1) % FRAGMENTS for number in numbers} >= left
    assert len(numbers) <= FRAGMENTS


ISLANDS = st.sampled_from("abc")


@given(
    st.lists(
        st.tuples(ISLANDS, st.integers(-3, 4), st.booleans(), st.floats(0.0, 3.0), st.frozensets(ISLANDS, min_size=1)),
        max_size=30,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_no_round_closes_early(
    happenings: list[tuple[str, int, bool, float, frozenset[str]]], window: int, quorum: int
) -> None:
    """Rounds close in order, after the answers of all live islands or after quorum and grace, in any history."""
    some = rounds(window=window, quorum=quorum)
    answers: dict[int, set[str]] = {}
    called: set[int] = set()
    quorum_at: dict[int, float] = {}
    now = 0.0

    def note_quorums(live: frozenset[str]) -> None:
        for number in range(some.closed + 1, some.closed + 1 + window):
            if number in called and len(answers[number]) >= min(quorum, len(live)):
                quorum_at.setdefault(number, now)

    for island, ahead, farewell, seconds, live in happenings:
        now += seconds
        number = max(1, some.closed + ahead)
        some.answer(answered(island, number, farewell=farewell), now)
        if number > some.closed:
            answers.setdefault(number, set()).add(island)
            called |= set() if farewell else {number}
        note_quorums(live)
        while (close := some.close(now, live, set(range(FRAGMENTS)))) is not None:
            assert close.round == some.closed + 1
            if not live <= answers.get(close.round, set()):
                assert now >= quorum_at[close.round] + close.grace_seconds
            commit(some, close, 0.0)
            note_quorums(live)


# -- the grace window of the paper's Eq. 3 -----------------------------------------------------------------------------

SECONDS = st.floats(0.0, 1e6)


def test_the_first_sample_sets_the_average_and_the_next_ones_move_it() -> None:
    timing = RoundTiming().after_quorum(10.0, 0.8)
    assert timing == RoundTiming(quorum_seconds=10.0, sync_seconds=None)
    assert timing.after_quorum(20.0, 0.8).quorum_seconds == pytest.approx(12.0)  # 0.8·10 + 0.2·20
    timing = timing.after_sync(1.0, 0.5).after_sync(3.0, 0.5)
    assert timing == RoundTiming(quorum_seconds=10.0, sync_seconds=2.0)  # 0.5·1 + 0.5·3
    assert timing.after_quorum(4.0, 0.0).quorum_seconds == 4.0  # without smoothing it is the last sample
    assert RoundTiming().after_sync(-5.0, 0.8).sync_seconds == 0.0, "a clock that was set back gives zero"
    assert RoundTiming(10.0, None).after_quorum(-5.0, 0.5).quorum_seconds == 5.0


def test_slack_and_grace_by_hand() -> None:
    timing = RoundTiming(quorum_seconds=3.0, sync_seconds=1.5)
    assert grace_seconds(0.9, 2, 4.0, timing) == pytest.approx(0.9 * 3.5)  # 2·4 − (3 + 1.5)
    assert grace_seconds(0.9, 1, 4.0, timing) == 0.0
    assert grace_seconds(1.0, 2, 4.0, RoundTiming()) == 8.0
    assert grace_seconds(1.0, 2, 4.0, RoundTiming(sync_seconds=1.0)) == 7.0
