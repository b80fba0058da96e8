"""A storm's figures from events written by hand, and what holds of any."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.messages import Books, Member, Pending, TapeEntry
from archipelago.broker.process import finite
from archipelago.ops.chaos.baselines import Span
from archipelago.ops.chaos.page import headlines, page, write
from archipelago.ops.chaos.report import (
    Happening,
    Look,
    Storm,
    Turn,
    as_control,
    as_data,
    checks,
    figures,
    lanes,
    merged_steps,
    returns,
    shares,
    size_live_part,
    stalls,
    uptime,
)
from archipelago.ops.chaos.schedule import Fault

STEP, TOKENS, FRAGMENTS = 0.1, 10, 2


def member(island: str, who: str, sequence: int, steps: int, staleness: int = 0) -> Member:
    return Member(island, who, sequence, 0, staleness, 1.0, 1.0, steps * TOKENS, steps, 2.0)


def entry(number: int, *members: Member, epoch: int = 1) -> TapeEntry:
    return TapeEntry(
        round=number, fragment=(number - 1) % FRAGMENTS, version=(number + 1) // FRAGMENTS, epoch=epoch, step=number,
        gain=1.0, quorum_seconds=0.0, grace_seconds=0.0, open_seconds=0.0, live=2, bytes_up=1, loss=2.0,
        digest="0" * 32, members=members,
    )  # fmt: skip


def life(who: str, first: float, count: int, idle: float = 0.0) -> list[Turn]:
    """One step each STEP seconds; the first ends at `first`."""
    return [Turn(first + n * STEP, who, n + 1, n // 5, 0.001, idle, 0.0) for n in range(count)]


def storm() -> Storm:
    """Two islands over 10 s from second 100 on; `b` is killed at 104, comes back at 105, and trains from 106 on.

    `a` trains 100 steps in the window and is merged in all; of `b`'s 40 steps before the kill 30 are merged, of the 40
    after it all. Each island made 10 steps before the window, all of them merged.
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
    return Storm(
        begin=100.0, end=110.0, islands=("a", "b"), step_seconds={"a": STEP, "b": STEP}, tokens_per_step=TOKENS,
        fragments=FRAGMENTS, faults=(Fault(4.0, "kill", "b", 1.0),),
        happenings=tuple(Happening(*mark) for mark in marks), turns={"a": a, "b": b},
        seen={1: 99.5, 2: 102.0, 3: 107.0, 4: 109.0}, looks=(Look(100.0, 2, 1), Look(105.0, 1, 2), Look(106.5, 2, 2)),
        tape=tuple(merged), books=Books(8, tokens, 8, tokens, bytes_up=5, bytes_down=6), pending=Pending(0, 0),
        bits_per_byte=3.0,
    )  # fmt: skip


def test_lanes_have_no_gaps() -> None:
    found = lanes(storm())
    assert found["b"] == [
        Span(98.2, 99.05, "recovering"),
        Span(99.05, 104.0, "training"),
        Span(104.0, 105.0, "dead"),
        Span(105.0, 106.05, "recovering"),
        Span(106.05, 110.0, "training"),
    ]
    assert found["merger"] == [Span(98.2, 99.5, "recovering"), Span(99.5, 110.0, "training")]
    assert found["redis"] == [Span(98.0, 98.1, "recovering"), Span(98.1, 110.0, "training")]


def test_goodput_counts_what_was_merged_of_what_was_possible() -> None:
    one = storm()
    assert merged_steps(one) == 100 + 30 + 40
    found = figures(one)
    assert found.goodput == pytest.approx(170 / 200)
    assert found.goodput_of_live_time == pytest.approx(170 / (100 + 40 + 39.5))
    assert found.shares.lost == pytest.approx(10 / 200)
    assert found.shares.dead == pytest.approx(1 / 20)
    assert found.shares.recovering == pytest.approx(1.05 / 20)
    assert (found.tokens_trained, found.tokens_merged, found.tokens_lost) == (2000, 1900, 100)
    assert found.uptime == 1.0
    assert found.rounds == 3
    assert found.rounds_per_minute == pytest.approx(18.0)
    assert found.staleness == {0: 6, 1: 1, 2: 1}
    assert found.holds


def test_a_slow_island_lowers_the_ceiling_and_not_what_live_time_allows() -> None:
    slow = replace(storm(), step_seconds={"a": STEP, "b": 2 * STEP})
    found = figures(slow)
    assert found.ceiling == 0.75
    assert found.goodput == pytest.approx(170 / 200)
    assert found.goodput_of_live_time == pytest.approx(170 / (100 + 20 + 19.75))


def test_uptime_is_when_somebody_trains() -> None:
    alone = replace(storm(), islands=("b",))
    assert uptime(alone, lanes(alone)) == pytest.approx((4.0 + 3.95) / 10)


def test_a_return_in_its_parts() -> None:
    (back,) = returns(storm())
    assert (back.island, back.at) == ("b", 4.0)
    assert back.away_seconds == 1.0
    assert back.start_seconds == pytest.approx(1.05)
    assert back.merge_seconds == pytest.approx(0.95)
    assert back.total_seconds == 3.0


def test_who_is_killed_again_before_it_trains_has_not_returned() -> None:
    one = storm()
    more = (Happening(105.5, "b", "kill"), Happening(105.7, "b", "start"))
    first, second = returns(replace(one, happenings=(*one.happenings, *more)))
    assert first.away_seconds == 1.0
    assert math.isnan(first.start_seconds)
    assert math.isnan(first.total_seconds)
    assert second.total_seconds == pytest.approx(1.5)


def test_size_live_and_part_are_three_numbers() -> None:
    points = {at: rest for at, *rest in size_live_part(storm(), points=10)}
    assert points[0.0] == [2, 2, 2]
    assert points[6.0] == [2, 1, 2], "b is thought to be dead, and was merged four seconds ago"
    assert points[7.0] == [2, 2, 2]


def test_a_stopped_island_is_stopped_and_its_stall_is_nobodys() -> None:
    one = storm()
    stop = (Happening(101.0, "a", "stop"), Happening(103.0, "a", "continue"))
    turns = [turn for turn in one.turns["a"] if not 101.0 < turn.at < 103.0]
    late = [replace(turn, idle=1.9) if turn.at == min(t.at for t in turns if t.at > 103.0) else turn for turn in turns]
    stopped = replace(one, happenings=(*one.happenings, *stop), turns={**one.turns, "a": late})
    assert Span(101.0, 103.0, "stopped") in lanes(stopped)["a"]
    assert stalls(stopped, lanes(stopped)).idle.worst_seconds == 0.0
    free = replace(stopped, happenings=one.happenings)
    assert stalls(free, lanes(free)).idle.worst_seconds == 1.9


def test_waits_for_a_core_are_told_apart() -> None:
    one = storm()
    turns = life("a1", 99.05, 110, idle=0.03)
    waited = [replace(turn, waited=0.0125) for turn in turns]  # of the turn before, too
    found = stalls(replace(one, turns={**one.turns, "a": waited}), lanes(one)).idle
    assert (found.over_10_ms, found.worst_seconds) == (100, 0.03)
    assert found.net_over_10_ms == 0
    assert found.net_worst_seconds == pytest.approx(0.005)


@given(
    st.lists(
        st.tuples(st.floats(98.5, 111.0), st.sampled_from(["start", "kill", "died", "stop", "continue"])), max_size=20
    )
)
def test_whatever_is_done_to_an_island_its_time_is_accounted_for(marks: list[tuple[float, str]]) -> None:
    one = storm()
    more = tuple(Happening(at, "b", what) for at, what in marks)
    harmed = replace(one, happenings=(*one.happenings, *more))
    lane = lanes(harmed)["b"]
    assert lane[0].begin == 98.2
    assert all(before.end == after.begin and before.state != after.state for before, after in itertools.pairwise(lane))
    spent = shares(harmed, lanes(harmed))
    parts = (spent.useful, spent.lost, spent.idle, spent.stopped, spent.recovering, spent.dead)
    assert sum(parts) == pytest.approx(1.0)
    assert min(spent.stopped, spent.recovering, spent.dead) >= -1e-9


# -- what must hold: each check notices what it is for ----------------------------------------------------------------


def broken(one: Storm) -> list[str]:
    return [check.name for check in checks(one) if not check.holds]


def test_a_sound_storm_breaks_nothing() -> None:
    assert broken(storm()) == []


def test_an_identity_that_is_on_the_tape_twice_is_found() -> None:
    one = storm()
    again = entry(5, member("a", "a1", 0, 1))
    books = replace(one.books, merged=9, published=9, merged_tokens=one.books.merged_tokens + TOKENS,
                    published_tokens=one.books.published_tokens + TOKENS)  # fmt: skip
    found = broken(replace(one, tape=(*one.tape, again), books=books))
    assert any("identities" in name for name in found)
    assert any("no inner step is merged twice" in name for name in found)


def test_books_that_do_not_balance_are_found() -> None:
    one = storm()
    assert len(broken(replace(one, books=replace(one.books, published=9)))) == 1
    assert len(broken(replace(one, books=replace(one.books, published_tokens=1)))) == 1
    assert broken(replace(one, pending=Pending(1, 5))) != []
    assert len(broken(replace(one, books=replace(one.books, merged=7, refused=1)))) == 1, "the tape says eight"


def test_more_merged_steps_than_were_made_are_found() -> None:
    one = storm()
    fewer = {**one.turns, "b": one.turns["b"][:-1]}
    (found,) = broken(replace(one, turns=fewer))
    assert "no inner step is merged twice" in found


def test_a_gap_an_older_epoch_and_a_refused_member_are_found() -> None:
    one = storm()
    assert len(broken(replace(one, tape=(replace(one.tape[0], epoch=2), *one.tape[1:])))) == 1
    assert len(broken(replace(one, tape=(*one.tape[:3], replace(one.tape[3], round=9))))) == 1
    assert len(broken(replace(one, refused=frozenset({("a", "a1", 0)})))) == 1
    assert len(broken(replace(one, seen={}))) == 1


# -- picture and page -------------------------------------------------------------------------------------------------


def test_report_picture_and_page_stand_alone(tmp_path: Path) -> None:
    one = storm()
    found = figures(one, as_control(one))
    write(tmp_path, one, found, "archipelago chaos <&>")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["goodput"] == pytest.approx(0.85)
    assert data == finite({"command": "archipelago chaos <&>", **json.loads(json.dumps(finite(as_data(found))))})
    assert (tmp_path / "storm.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "storm.html").read_text()
    assert "archipelago chaos &lt;&amp;&gt;" in text
    assert "://" not in text, "it needs nothing from elsewhere"
    assert "every invariant held" in text
    for name, value in headlines(found):
        assert name.replace("'", "&#x27;") in text
        assert value.replace("'", "&#x27;") in text


def test_the_page_says_what_broke_and_how_long_steps_were() -> None:
    torn = replace(storm(), books=Books(), step_seconds={"a": 0.0, "b": 0.0})
    found = figures(torn)
    assert found.step_seconds == pytest.approx(STEP)
    text = page(torn, found, [b""], "archipelago chaos")
    assert "an invariant broke" in text
    assert "BROKEN" in text
    assert "as fast as this machine made them" in text
    assert "minimum duration" in page(storm(), figures(storm()), [b""], "archipelago chaos")
