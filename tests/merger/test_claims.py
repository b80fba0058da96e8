"""What islands claim is bounded by what the merger sees, and honest claims are never lowered."""

from __future__ import annotations

import math
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
from archipelago.broker.ranges import advanced, parse_positions
from archipelago.merger import claims
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
    assert claims.refused_tokens(claim(tokens=100), CONFIG) == 100
    assert claims.refused_tokens(claim(tokens=1 << 53), CONFIG) * 1_000_000 < 1 << 62


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


def test_places_that_no_island_can_have_reached_move_nothing() -> None:
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
    assert believed("1:0:70 0:2:70") == f"1:0:70 0:2:{10 + reach - 70}"  # the shards share the work of the contribution
    assert believed(f"1:0:{reach} 0:2:99") == f"1:0:{reach} 0:2:10"


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 2)), min_size=1, max_size=30), st.integers(20, 400))
def test_an_island_that_reads_on_moves_the_cursor_to_the_end_of_its_shard(
    parts: list[tuple[int, int]], size: int
) -> None:
    """Some of its contributions get lost, and later ones catch up."""
    cursors: dict[str, tuple[int, int]] = {}
    position, place, c = 0, "", claim()
    for steps, lost in parts:
        position += 2 * steps
        place = f"0:0:{position}" if position < size else "0:0:end"
        c = claim(data=place, tokens=steps * BATCH)
        if not lost:
            cursors |= advanced(
                cursors, parse_positions(claims.believed_data(c, c.steps, cursors, {}, CONFIG, size // 2))
            )
        assert cursors.get("0", (0, 0)) <= parse_positions(place)[0].cursor
    for _ in range(1000):
        if cursors.get("0", (0, 0)) == (parse_positions(place)[0].cursor):
            break
        cursors |= advanced(cursors, parse_positions(claims.believed_data(c, c.steps, cursors, {}, CONFIG, size // 2)))
    assert cursors["0"] == parse_positions(place)[0].cursor
