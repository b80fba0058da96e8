"""The figures of a storm from a record written by hand, and properties of all records."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.manifest import Layout
from archipelago.broker.messages import Counters, RoundMember, TapeEntry
from archipelago.broker.process import finite
from archipelago.ops.chaos.figures import figures, headlines, merged_steps, rejoins, shares, write
from archipelago.ops.chaos.main import own_step_seconds
from archipelago.ops.chaos.record import LoggedTurn, ProcessEvent, Span, StormRecord, checks, timelines
from archipelago.ops.chaos.schedule import Fault

STEP, TOKENS, FRAGMENTS = 0.1, 10, 2


def member(island: str, who: str, sequence: int, steps: int, staleness: int = 0) -> RoundMember:
    return RoundMember(island, who, sequence, 0, staleness, 1.0, 1.0, steps * TOKENS, steps, 2.0)


def entry(number: int, *members: RoundMember, epoch: int = 1) -> TapeEntry:
    return TapeEntry(
        round=number, fragment=(number - 1) % FRAGMENTS, version=(number + 1) // FRAGMENTS, epoch=epoch, step=number,
        gain=1.0, quorum_seconds=0.0, grace_seconds=0.0, open_seconds=0.0, live=2, bytes_up=1, loss=2.0,
        digest="0" * 32, members=members,
    )  # fmt: skip


def life(who: str, first: float, count: int) -> list[LoggedTurn]:
    """Return a step every STEP seconds. The first ends at `first`."""
    return [LoggedTurn(first + n * STEP, who, n + 1) for n in range(count)]


def storm() -> StormRecord:
    """Return a storm of two islands from 100 s to 110 s. `b` is killed at 104 s, started at 105 s, trains from 106 s.

    All 100 steps of `a` in the window are merged. Of the 40 steps of `b` before the kill, 30 are merged, and all of the
    40 after it. Each island made 10 steps before the window, which are merged.
    """
    a = life("a1", 99.05, 110)
    b = life("b1", 99.05, 50) + life("b2", 106.05, 40)
    merged = [
        entry(1, member("a", "a1", 0, 60), member("b", "b1", 0, 40)),
        entry(2, member("a", "a1", 1, 60), member("b", "b1", 1, 40)),
        entry(3, member("a", "a1", 2, 50, 1), member("b", "b2", 0, 40)),
        entry(4, member("a", "a1", 3, 50), member("b", "b2", 1, 40, 2)),
    ]
    tokens = sum(m.tokens for e in merged for m in e.members)
    marks = [(98.0, "redis", "start"), (98.1, "redis", "ready"), (98.2, "merger", "start"), (98.2, "a", "start"),
             (98.2, "b", "start"), (104.0, "b", "kill"), (105.0, "b", "start")]  # fmt: skip
    return StormRecord(
        begin=100.0, end=110.0, islands=("a", "b"), step_seconds=STEP, tokens_per_step=TOKENS,
        layout=Layout((tuple(range(FRAGMENTS)),)), faults=(Fault(4.0, "kill", "b", 1.0),),
        events=tuple(ProcessEvent(*mark) for mark in marks), turns={"a": a, "b": b},
        closed_at={1: 99.5, 2: 102.0, 3: 107.0, 4: 109.0},
        tape=tuple(merged), counters=Counters(8, tokens, 8, tokens, bytes_up=5), bytes_down=6, held_out_loss=3.0,
    )  # fmt: skip


def test_timelines_have_no_gaps() -> None:
    found = timelines(storm())
    assert found["b"] == [
        Span(98.2, 99.05, "recovering"),
        Span(99.05, 104.0, "training"),
        Span(104.0, 105.0, "dead"),
        Span(105.0, 106.05, "recovering"),
        Span(106.05, 110.0, "training"),
    ]


def test_goodput_is_merged_steps_over_possible_steps() -> None:
    one = storm()
    assert merged_steps(one) == 100 + 30 + 40
    found = figures(one)
    assert found["goodput"] == pytest.approx(170 / 200)
    assert found["shares"]["lost"] == pytest.approx(10 / 200)
    assert found["shares"]["dead"] == pytest.approx(1 / 20)
    assert found["shares"]["recovering"] == pytest.approx(1.05 / 20)
    assert [found[f"tokens_{part}"] for part in ("trained", "merged", "lost")] == [2000, 1900, 100]
    assert (found["uptime"], found["rounds"], found["holds"]) == (1.0, 3, True)
    assert found["rounds_per_minute"] == pytest.approx(18.0)
    assert found["staleness"] == {0: 6, 1: 1, 2: 1}


def test_steps_before_a_short_storm_that_were_never_merged_do_not_lower_its_goodput() -> None:
    one = replace(storm(), turns={**storm().turns, "b": [*life("b0", 88.0, 100), *storm().turns["b"]]})
    assert merged_steps(one) == 170
    assert merged_steps(replace(one, begin=109.9)) == 2, "the last step of each island"
    found = figures(one)
    found["shares"]["idle"] = -7e-5
    assert "slower than the step duration 0.0%" in dict(headlines(found))["the islands' time"]


def test_a_rejoin_has_three_parts() -> None:
    (back,) = rejoins(storm())
    assert (back.pop("island"), back.pop("at")) == ("b", 4.0)
    assert [*back.values()] == pytest.approx([1.0, 1.05, 0.95, 3.0])


def test_an_island_that_is_killed_again_before_it_trains_has_not_rejoined() -> None:
    one = storm()
    more = (ProcessEvent(105.5, "b", "kill"), ProcessEvent(105.7, "b", "start"))
    first, second = rejoins(replace(one, events=(*one.events, *more)))
    assert first["away_seconds"] == 1.0
    assert math.isnan(first["start_seconds"]) and math.isnan(first["total_seconds"])
    assert second["total_seconds"] == pytest.approx(1.5)
    shown = dict(headlines(figures(replace(one, events=(*one.events, *more)))))
    assert "1.5 s worst, over 1 of 2 kills" in shown["from a kill to the first merged contribution"]


def test_what_is_merged_after_the_storm_or_the_next_kill_is_no_return() -> None:
    one = storm()
    killed_again = replace(one, events=(*one.events, ProcessEvent(106.9, "b", "kill")))
    for ended in (replace(one, end=106.9), killed_again):
        first = rejoins(ended)[0]
        assert first["start_seconds"] == pytest.approx(1.05)
        assert math.isnan(first["merge_seconds"]) and math.isnan(first["total_seconds"])


def test_a_stopped_island_is_stopped_until_it_continues() -> None:
    one = storm()
    stop = (ProcessEvent(101.0, "a", "stop"), ProcessEvent(103.0, "a", "continue"))
    assert Span(101.0, 103.0, "stopped") in timelines(replace(one, events=(*one.events, *stop)))["a"]


@given(
    st.lists(
        st.tuples(st.floats(98.5, 111.0), st.sampled_from(["start", "kill", "died", "stop", "continue"])), max_size=20
    )
)
def test_shares_sum_to_one_for_any_events(marks: list[tuple[float, str]]) -> None:
    one = storm()
    more = tuple(ProcessEvent(at, "b", what) for at, what in marks)
    harmed = replace(one, events=(*one.events, *more))
    spans = timelines(harmed)["b"]
    assert spans[0].begin == 98.2
    assert all(before.end == after.begin for before, after in itertools.pairwise(spans))
    spent = shares(harmed, timelines(harmed))
    assert sum(spent.values()) == pytest.approx(1.0)
    assert min(spent[state] for state in ("stopped", "recovering", "dead")) >= -1e-9


# -- invariants: each check finds its violation ---------------------------------------------------------------------


def test_each_violation_breaks_its_own_invariant() -> None:
    one = storm()
    first, *others, last = one.tape
    again = entry(5, member("a", "a1", 0, 1))
    tokens = one.counters.merged_tokens + TOKENS
    for keys, changes in (
        ([], {}),
        (["sent"], {"sent": {("a", "a1"): 5}}),
        (["sent"], {"tape": (*one.tape[:-1], entry(4, member("a", "a1", 4, 50), member("b", "b2", 1, 40, 2)))}),
        (["drained"], {"sent": {("a", "a1"): 5}, "counters": replace(one.counters, published=9)}),
        (["tape"], {"counters": replace(one.counters, merged=7, refused=1)}),
        (["merged-once", "steps"], {"tape": (*one.tape, again), "counters": Counters(9, tokens, 9, tokens)}),
        (["steps"], {"turns": {**one.turns, "b": one.turns["b"][:-1]}}),
        (["epochs"], {"tape": (replace(first, epoch=2), *others, last)}),
        (["rounds"], {"tape": (first, *others, replace(last, round=9))}),
        (["refused"], {"refused": frozenset({(0, "a", "a1", 0)})}),
        (["progress"], {"closed_at": {}}),
    ):
        found = checks(replace(one, **changes))
        assert [check.key for check in found if not check.holds] == keys, changes


# -- the report -------------------------------------------------------------------------------------------------------

#: Figures of data-parallel training.
BASELINE = {"goodput": 0.2, "uptime": 0.4, "steps_useful": 40, "steps_lost": 12, "pause_seconds_worst": 4.5}


def test_the_report_compares_with_the_baseline(tmp_path: Path) -> None:
    one, command = storm(), "archipelago chaos <&>"
    found = figures(one, figures(one), BASELINE)
    rows = dict(headlines(found))
    assert rows["islands, this storm"].startswith(
        "goodput 85.0%, uptime 100.0%, inner steps kept 170, lost 10, longest"
    )
    assert rows["data-parallel"].endswith("goodput 20.0%, uptime 40.0%, inner steps kept 40, lost 12, longest time "
                                          "without a step 4.5 s")  # fmt: skip
    write(tmp_path, found, command)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == finite({"command": command, **json.loads(json.dumps(finite(found)))})
    assert "data-parallel" not in dict(headlines(figures(one))), "no baseline ran"


def test_without_a_held_out_loss_the_training_loss_is_shown() -> None:
    record = replace(storm(), held_out_loss=math.nan)
    found = figures(record, figures(record))
    assert found["training_loss"] == pytest.approx(2.0)
    rows = dict(headlines(found))
    assert not any("bits per byte" in text for row in rows.items() for text in row)
    assert sum("2.0000" in text for text in rows.values()) == 2


def test_a_slow_script_has_its_own_step_duration() -> None:
    for seconds, expected in ((0.051, 0.05), (0.3, 0.3)):
        turns = [LoggedTurn(seconds * n, "a", n) for n in range(1, 4)]
        assert own_step_seconds(0.05, {"a": turns}) == pytest.approx(expected)
    assert own_step_seconds(0.05, {}) == 0.05
    assert math.isnan(own_step_seconds(0.0, {}))
