"""What islands claim is bounded by what the merger sees, and rounds wait for islands that send and contribute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import (
    DataConfig,
    InnerConfig,
    RunConfig,
    SyncConfig,
)
from archipelago.broker.messages import Contribution
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.merger import claims
from archipelago.merger.accounts import (
    ACCOUNTS_MAX,
    BURST_INTERVALS,
    FIRST_BURST_INTERVALS,
    NEWCOMERS_MIN,
    SILENT_ROUNDS,
    SILENT_SECONDS,
    SILENT_SECONDS_MAX,
    Accounts,
    Liveness,
)
from archipelago.merger.claims import StepTimes
from tests import samples
from tests.tiers import examples

H, P = 24, 6
CONFIG = RunConfig(
    data=DataConfig(batch_size=2, sequence_length=8),
    inner=InnerConfig(steps=1000),
    sync=SyncConfig(interval=H, fragments=P),
)
BATCH = CONFIG.tokens_per_step
STRIDE = H / P


def claim(**changes: Any) -> Contribution:
    return samples.contribution(**changes)


# -- contradictions --------------------------------------------------------------------------------------------------


def test_impossible_claims_contradict_themselves_and_cannot_fill_the_books() -> None:
    found = claims.contradiction(claim(tokens=1 << 53, steps=1 << 30), CONFIG)
    assert found is not None
    assert found[0] == "tokens"
    assert claims.counted_tokens(claim(tokens=100), CONFIG) == 100
    assert claims.counted_tokens(claim(tokens=1 << 53), CONFIG) * 1_000_000 < 1 << 62


# -- speed -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=9), st.floats(0.0, 1e9), st.randoms(use_true_random=False))
def test_a_minority_moves_the_fastest_plausible_speed_only_among_honest_speeds(
    honest: list[float], false: float, random: object
) -> None:
    """The others of an island are the honest ones and a smaller number of hostile ones."""
    hostile = (len(honest) - 1) // 2
    reported = {f"h{i}": s for i, s in enumerate(honest)} | {f"x{i}": false for i in range(hostile)}
    fastest = StepTimes(reported).fastest("me")
    assert claims.STEP_SECONDS_MIN <= fastest <= max(honest) / claims.SPEED_MAX + claims.STEP_SECONDS_MIN
    assert fastest >= min(min(honest) / claims.SPEED_MAX, 1.0) or fastest == claims.STEP_SECONDS_MIN


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 1.6), min_size=1))
def test_honest_step_times_are_believed(reported: dict[str, float]) -> None:
    """Islands differ 16-fold, and the merger saw each at about its speed, or jumps of the global step."""
    for factor in (0.01, 0.5, 1.0, 2.0):
        seen = {island: factor * seconds for island, seconds in reported.items()}
        assert StepTimes(reported).believed(seen) == reported


def test_false_step_times_are_not_believed() -> None:
    reported = {"a": 1.0, "b": 1.1, "c": 1.2, "x": 1e-300}
    assert StepTimes(reported).believed({})["x"] == 1.1 / claims.SPEED_MAX
    # The island contributes like the others, so its steps cannot be that short.
    assert StepTimes(reported).believed({"x": 1.0})["x"] == 1.0
    assert StepTimes(reported).believed({"x": 1e9})["x"] == 1.1


# -- the schedule ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(st.floats(0.05, 5.0), st.lists(st.floats(1.0, 16.0), max_size=6), st.integers(1, 40))
def test_the_schedule_follows_the_fastest_island(fast: float, slower: list[float], rounds: int) -> None:
    reported = StepTimes({"fast": fast} | {f"s{i}": fast * factor for i, factor in enumerate(slower)})
    step = 0
    for number in range(1, rounds + 1):
        member = claim(island="fast", global_step=math.ceil(number * STRIDE), step_seconds=fast)
        step = claims.next_step(step, [member], reported, STRIDE * fast, STRIDE)
        assert step == math.ceil(number * STRIDE)


@given(st.integers(1, (1 << 31) - 1), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_one_of_three_islands_cannot_end_the_run(claimed: int, gaps: list[float]) -> None:
    reported = StepTimes({"a": 0.5, "b": 0.6, "x": 1e-9})
    step = 0
    for gap in gaps:
        members = [claim(island="x", global_step=claimed), claim(island="a", global_step=step + 1)]
        after = claims.next_step(step, members, reported, gap, STRIDE)
        assert step <= after <= step + 1 + claims.STRIDES_OF_A_ROUND * STRIDE + gap * claims.SPEED_MAX / 0.5
        step = after


def test_before_others_report_a_step_time_only_rounds_advance_the_schedule() -> None:
    members = [claim(island="x", global_step=1 << 30)]
    least = math.ceil(claims.STRIDES_OF_A_ROUND * STRIDE)
    assert claims.next_step(0, members, StepTimes({"x": 1e-9}), 60.0, STRIDE, {"x", "a"}) == least
    assert (
        claims.next_step(0, members, StepTimes({"x": 1e-9, "a": 1.0}), 60.0, STRIDE, {"x", "a"})
        <= 60 * 4 + 2 * STRIDE + 1
    )


def test_the_schedule_catches_up_with_an_island_that_was_cut_off() -> None:
    """It trained alone for hours at the speed of the others, and its step was lowered at first."""
    reported = StepTimes(dict.fromkeys("abc", 1.0))
    step, alone, rounds = 1000, 10_000, 0
    while step < alone:
        alone, rounds = alone + int(STRIDE), rounds + 1
        step = claims.next_step(step, [claim(island="a", global_step=alone)], reported, STRIDE, STRIDE)
        assert rounds < 1000
    after_an_outage = claims.next_step(
        10, [claim(island="a", global_step=7210)], StepTimes({"a": 0.5, "b": 0.5}), 3600.0, STRIDE
    )
    assert after_an_outage == 7210


# -- data ------------------------------------------------------------------------------------------------------------


def test_positions_that_no_island_can_have_reached_move_nothing() -> None:
    cursors = {"0": (2, 10), "1": (0, 0)}

    def believed(data: str, tokens: int = 4 * BATCH, sequences: int = 10_000) -> str:
        c = claim(data=data, tokens=tokens)
        return claims.believed_data(c, c.steps, cursors, {}, CONFIG, sequences)

    assert believed("0:2:18 1:0:3") == "0:2:18 1:0:3"
    assert believed("0:1:end 0:2:9") == "0:1:end 0:2:9"  # nothing new
    reach = 4 * 4 * 2 + H * 2
    assert believed("0:99999999:end") == believed("0:3:1") == f"0:2:{10 + reach}"
    assert believed("0:99999999:end", sequences=50) == "0:2:end"
    assert believed("0:2:9999") == f"0:2:{10 + reach}"
    assert believed("0:2:end") == f"0:2:{10 + reach}"
    assert believed("0:2:end", sequences=50) == "0:2:end"
    assert believed("site/1:0:end") == "site/1:0:end"
    many = {f"site/{number}": (0, 1) for number in range(claims.OTHER_CURSORS_MAX + CONFIG.data.shards)}
    forged = claim(data="site/0:0:2 forged/0:0:1 0:0:1")
    assert claims.believed_data(forged, 4, many, {}, CONFIG, 10_000) == "site/0:0:2 0:0:1"
    assert believed("1:0:70 0:2:70") == f"1:0:70 0:2:{10 + reach - 70}"  # the ranges share the work of the contribution
    assert believed(f"1:0:{reach} 0:2:99") == f"1:0:{reach} 0:2:10"


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_the_oldest_accounts_are_forgotten_first() -> None:
    accounts = Accounts(CONFIG)
    for number in range(ACCOUNTS_MAX + 5):
        accounts.accept(claim(island=f"i{number}"), 0, float(number), float(number))
    assert len(accounts.stored()) == ACCOUNTS_MAX
    assert accounts.round_of("i4") is None
    assert accounts.round_of("i5") == 0


def test_an_island_that_waited_for_snapshots_may_have_read_on() -> None:
    """While no merger serves, an island trains on. Its next contribution has few steps, and says all that was read."""
    accounts, reported = Accounts(CONFIG), StepTimes({"a": 1.0, "b": 1.0, "c": 1.0})
    accounts.meet(["a"], 0.0)
    for p in range(P):
        accounts.accept(claim(fragment=p, steps=4, global_step=4), 0, 40.0, 40.0)
    waited = claim(steps=1, tokens=BATCH, global_step=4)
    assert accounts.steps_read(waited, reported, 42.0) == BURST_INTERVALS * H + 2 * claims.SPEED_MAX
    assert accounts.steps_read(replace(waited, incarnation="other"), reported, 42.0) == 1


def test_an_island_that_trained_before_any_merger_may_have_read_as_long() -> None:
    """Time without a merger counts for islands that were there when it began, and not for those that come later."""
    reported = StepTimes({"a": 1e-3, "b": 1e-3, "c": 1e-3})
    accounts = Accounts(CONFIG)
    accounts.load({}, 100.0, 5e8, unwatched_seconds=600.0)
    accounts.meet(["a"], 100.0)
    accounts.meet(["late"], 101.0)
    long = claim(island="a", steps=600_000, tokens=600_000 * BATCH)
    assert accounts.steps_read(long, reported, 101.0) == 600_000
    late = replace(long, island="late")
    assert accounts.steps_read(late, reported, 102.0) < FIRST_BURST_INTERVALS * H + 1e5


# -- heartbeats ------------------------------------------------------------------------------------------------------


class Watch:
    """A merger that looks at heartbeats each second. Islands that are not `frozen` send one each second."""

    def __init__(self) -> None:
        self.accounts = Accounts(RunConfig())
        self.liveness = Liveness(self.accounts)
        self.now, self.closed = 0.0, 0

    def look(self, islands: Iterable[str], frozen: Iterable[str] = (), age: float = 0.5, **changes: Any) -> set[str]:
        self.now += 1.0
        beats = [Presence(samples.heartbeat(island, tokens=int(self.now), **changes), 0.5) for island in islands]
        beats += [Presence(samples.heartbeat(island), age) for island in frozen]
        return set(self.liveness.look(beats, self.now, self.closed))

    def contribute(self, *islands: str) -> None:
        for island in islands:
            self.accounts.accept(samples.contribution(island=island), self.closed, self.now, self.now)


def test_a_heartbeat_that_never_changes_counts_for_ten_seconds() -> None:
    watch = Watch()
    found = [watch.look("a", frozen=["x"], age=0.25) for _ in range(int(LIVE_SECONDS) + 5)]
    assert found[0] == {"a", "x"}
    assert found[-1] == {"a"}
    assert Watch().look("a", frozen=["x"], age=-1e9) == {"a"}, "a life cannot be endless"
    watch, ages = Watch(), [0.1, 0.9, 0.2, 0.8] * 10
    again = [watch.look([], frozen=["a"], age=age) for age in ages]
    assert again == [{"a"}] * 40, "it may be written again with the same text"


def test_islands_that_never_contribute_stop_counting() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    idle = [f"x{i:03}" for i in range(1000)]
    assert len(watch.look(["a", "b", *idle])) == 2 + NEWCOMERS_MIN
    for _ in range(SILENT_ROUNDS + 1):
        watch.closed += 1
        watch.contribute("a", "b")
    watch.now += SILENT_SECONDS
    assert watch.look(["a", "b", *idle]) == {"a", "b"}
    assert len(watch.liveness.idle) == 1000


def test_an_island_that_stops_contributing_stops_counting_and_returns() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    for _ in range(SILENT_ROUNDS + 1):
        assert watch.look("ab") == {"a", "b"}
        watch.closed += 1
        watch.contribute("a")
    watch.now += SILENT_SECONDS
    watch.contribute("a")
    assert watch.look("ab") == {"a"}
    watch.contribute("b")
    assert watch.look("ab") == {"a", "b"}


def test_nobody_stops_counting_while_no_round_closes() -> None:
    """A pause, or an outage of all other islands, may take days."""
    watch = Watch()
    watch.contribute("a", "b")
    watch.look("ab")
    for _ in range(10):
        watch.now += 5.0
        assert watch.look("abc") == {"a", "b", "c"}
    watch.now += 1e6
    assert watch.look("abc") == {"a", "b", "c"}


def test_slow_islands_have_more_time() -> None:
    watch = Watch()
    watch.contribute("a")
    for _ in range(600):
        assert "slow" in watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    watch.now += 5.0
    for _ in range(int(SILENT_SECONDS_MAX)):
        watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    assert watch.look(["slow"], step_seconds=1e9) == set()
