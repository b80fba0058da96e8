"""The history of a run: every line is checked by hand, and long histories stay small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.manifest import Layout
from archipelago.broker.messages import RoundMember, TapeEntry
from archipelago.merger.admission import reason_to_refuse
from archipelago.ops.watch.history import (
    DETAIL_ROUNDS,
    ISLAND_ROWS,
    ISLANDS_KEPT,
    RECENT_ROUNDS,
    ROWS_KEPT,
    History,
    Trail,
    refusal_remedy,
    thinned,
)
from tests import samples
from tests.samples import member

ROUND = samples.commit([]).tape


def entry(number: int, members: Sequence[RoundMember], **changes: Any) -> TapeEntry:
    return replace(ROUND, round=number, members=tuple(members), digest=f"{number:032x}", **changes)


TAPE = [
    entry(1, [member("a")], loss=4.0, live=1),
    entry(2, [member("a", 1), member("b", tokens=300)], loss=2.0, live=3),
    entry(3, [member("b", 1)], loss=math.nan, live=2),
]


def history(tape: Sequence[TapeEntry] = TAPE, merged_tokens: int = 600) -> History:
    out = History(Layout(((0, 1),)))
    out.begin(merged_tokens, tape)
    return out


def test_lines_match_a_calculation_by_hand() -> None:
    lines = history().lines()
    assert lines["round"] == [1, 2, 3]
    assert lines["tokens"] == [50, 250, 300]  # A token counts once it is in both fragments.
    assert lines["loss"][:2] == [4.0, 2.0]
    assert math.isnan(lines["loss"][2])
    assert lines["live"] == [1, 3, 2]
    assert lines["known"] == [1, 3, 2]  # Three islands were live in round 2, and the tape names two of them.
    assert lines["participating"] == [1, 2, 2]
    assert history(TAPE[1:], merged_tokens=2000).lines()["tokens"] == [950, 1000], "it begins in the middle"
    assert history(merged_tokens=0).lines()["tokens"][0] == 50, "the accounts are behind the tape"


def test_an_island_that_left_stays_known_and_participates_for_some_rounds() -> None:
    lines = history([entry(1, [member("a"), member("b")], live=2), entry(2, [member("a")], live=1)]).lines()
    assert (lines["known"], lines["live"], lines["participating"]) == ([2, 2], [2, 1], [2, 1])
    seen = history([entry(1, [member("b")], live=9)])
    seen.extend([entry(n, [member("a")], live=9) for n in range(2, RECENT_ROUNDS + 2)])
    counts = seen.lines()["participating"]
    assert (counts[RECENT_ROUNDS - 1], counts[RECENT_ROUNDS]) == (2, 1)


def test_changes_and_takeovers_are_marked() -> None:
    tape = [
        entry(1, [member("a")], epoch=1),
        entry(2, [member("a")], epoch=1, steered="sync.quorum=2", unix_seconds=7.0),
        entry(3, [member("a")], epoch=4, unix_seconds=9.0),
    ]
    assert history(tape, merged_tokens=300).marks() == {
        "round": [2, 3], "tokens": [100, 150], "unix_seconds": [7.0, 9.0],
        "text": ["steered: sync.quorum=2", "epoch 4 begins"],
    }  # fmt: skip


def test_the_losses_of_each_island() -> None:
    losses = history().losses()
    assert {name: (columns["round"], columns["tokens"], columns["loss"]) for name, columns in losses.items()} == {
        "a": ([1, 2], [50, 250], [2.0, 2.0]), "b": ([2, 3], [250, 300], [2.0, 2.0]),
    }  # fmt: skip
    many = history([entry(n, [member("a"), member(f"i{n}")], live=2) for n in range(1, 3 * ISLANDS_KEPT)]).losses()
    assert len(many) == ISLANDS_KEPT
    assert {"a", f"i{3 * ISLANDS_KEPT - 1}"} <= many.keys()
    assert len(many["a"]["loss"]) <= ISLAND_ROWS


def test_a_tape_connects_only_without_a_gap() -> None:
    for tape, follows in (
        (TAPE, True),
        ([TAPE[2], entry(4, [])], True),
        ([entry(5, []), entry(6, [])], False),  # Some entries are missing in between.
        (TAPE[:2], False),  # The run returned to a checkpoint.
        ([*TAPE[:2], replace(TAPE[2], digest="f" * 32)], False),  # It then continued from there differently.
        ([], False),  # Its Redis lost all data.
    ):
        assert history().follows(tape) is follows, tape
    assert History(Layout(((0, 1),))).follows([])
    assert not History(Layout(((0, 1),))).follows(TAPE)


LAYOUT = Layout(((0, 3), (1, 2)))


def of_shards(*numbers: int) -> list[TapeEntry]:
    """Return rounds in the order in which their shards closed them. Odd epochs are those of shard 1."""
    return [entry(number, [member("a")], epoch=2 + LAYOUT.shard_of(number)) for number in numbers]


def test_rounds_of_several_shards_are_added_in_the_order_in_which_they_close() -> None:
    out = History(LAYOUT)
    out.begin(0, of_shards(1, 4, 5, 2))
    assert out.extend(of_shards(4, 5, 2, 8, 3)) == 2
    assert out.details()["round"] == [1, 4, 5, 2, 8, 3]
    assert out.lines()["round"] == [1, 4, 5, 5, 8, 8], "the axis goes one way"
    assert out.marks()["text"] == [], "two mergers take turns, and none takes over"
    assert out.extend([replace(of_shards(6)[0], epoch=9)]) == 1
    assert out.marks()["text"] == ["epoch 9 begins in shard 1"]


def test_a_shard_without_new_rounds_breaks_no_history() -> None:
    out = History(LAYOUT)
    out.begin(0, of_shards(1, 2, 4, 5))
    assert out.follows(of_shards(5, 8, 9))
    assert not out.follows(of_shards(8, 9)), "round 5 of shard 0 is missing"
    assert not out.follows(of_shards(5, 3)), "round 2 of shard 1 is missing"
    assert not out.follows(of_shards(2, 4)), "shard 0 went back"
    forked = [*of_shards(2), replace(of_shards(5)[0], digest="f" * 32)]
    assert not out.follows(forked)


def test_a_refusal_after_a_return_says_that_nothing_has_to_be_done() -> None:
    reason = reason_to_refuse(samples.contribution(round=1001), samples.manifest(), 0)
    assert reason is not None
    assert (reason.code, "follows by itself" in refusal_remedy(reason.text)) == ("lost", True)


@given(st.lists(st.integers(), max_size=400), st.integers(1, 50))
def test_thinning_keeps_order_and_the_newest(rows: list[int], most: int) -> None:
    spans: list[int] = []

    def joined(group: Sequence[int]) -> int:
        spans.append(len(group))
        return group[-1]

    found = thinned(rows, most, joined)
    assert len(found) <= most
    assert sum(spans) == len(rows)  # Each row is in exactly one group.
    assert found[-1:] == rows[-1:]
    assert max(spans[:-1], default=0) == min(spans[:-1], default=0)  # The groups have equal sizes.


@given(st.integers(0, 3000), st.integers(2, 64).map(lambda half: 2 * half))
def test_a_trail_is_bounded_even_and_complete(count: int, most: int) -> None:
    trail: Trail[tuple[int, int]] = Trail(most, lambda rows: (rows[0][0], rows[-1][1]))
    for n in range(count):
        trail.add((n, n))
    rows = trail.rows
    assert len(rows) <= most
    assert [n for first, last in rows for n in range(first, last + 1)] == list(range(count))
    assert {last - first + 1 for first, last in rows[:-1]} <= {trail.span}
    assert count < most or len(rows) >= most // 2  # It is no coarser than necessary.


def test_a_long_run_stays_small() -> None:
    rounds, seen = (ROWS_KEPT // 1000 + 2) * 1000, history([], 0)
    for start in range(0, rounds, 1000):
        seen.extend([entry(n, [member("a"), member("b", n % 3)], live=2) for n in range(start + 1, start + 1001)])
    lines = seen.lines()
    assert all(ROWS_KEPT // 2 <= len(values) <= ROWS_KEPT for values in lines.values())
    assert lines["round"][-1] == rounds
    assert lines["tokens"][-1] == rounds * 200 / 2
    assert len(seen.details()["round"]) == DETAIL_ROUNDS
