"""Values of a run that are derived from those of its shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import TapeEntry
from archipelago.broker.shards.layout import Layout
from archipelago.broker.shards.reader import (
    ShardedReader,
    combined_state,
    combined_status,
    holders_in_words,
    merged_everywhere,
)
from archipelago.broker.transport import MergerStatus, ReaderClient
from tests import samples

LAYOUT = Layout(((0, 3), (1, 2)))


@pytest.mark.parametrize(
    ("home", "other", "merged"),
    [
        ((0, 40), (0, 30), (0, 30)),
        ((0, 40), (0, 50), (0, 40)),
        ((1, 8), (1, 9), (1, 8)),
        ((1, 8), (0, 50), (1, 0)),  # the other shard of the run has not come to this pass
        ((1, 8), (2, 3), (1, 8)),
        ((0, 40), None, (0, 0)),
    ],
)
def test_a_cursor_is_where_all_shards_have_merged(
    home: tuple[int, int], other: tuple[int, int] | None, merged: tuple[int, int]
) -> None:
    assert merged_everywhere([{"0": home}, {"0": other} if other else {}]) == {"0": merged}


def test_counts_of_the_mergers_are_added_up() -> None:
    first = {"closed": 7, "island_tokens": {"a": 3}, "refused": {"late": 1}, "lowered_tokens": 2, "covered": 3}
    second = {"closed": 5, "island_tokens": {"a": 4, "b": 1}, "refused": {}, "lowered_tokens": 1, "covered": 1}
    found = json.loads(combined_state({0: json.dumps(first), 1: json.dumps(second)}, LAYOUT))
    assert found["island_tokens"] == {"a": 7, "b": 1}
    assert (found["refused"], found["lowered_tokens"]) == ({"late": 1}, 3)
    assert found["covered"] == min(LAYOUT.run_round(0, 3), LAYOUT.run_round(1, 1))


def test_states_that_cannot_be_read_count_nothing() -> None:
    assert combined_state({0: "", 1: ""}, LAYOUT) == ""
    found = json.loads(
        combined_state({0: "[1]", 1: json.dumps({"island_tokens": "x", "covered": -1, "refused": None})}, LAYOUT)
    )
    assert (found["island_tokens"], found["refused"], found["covered"]) == ({}, {}, 0)


class Tape:
    """A reader of a shard that has closed rounds at these times."""

    def __init__(self, *seconds: float) -> None:
        entry = samples.commit([]).tape
        self._entries = [replace(entry, round=n + 1, fragment=0, unix_seconds=at) for n, at in enumerate(seconds)]

    def tape(self, count: int) -> list[TapeEntry]:
        return self._entries[-count:]


def test_the_rounds_of_a_shard_stay_in_order_when_a_merger_with_a_slower_clock_takes_over() -> None:
    manifest = replace(samples.manifest(), shards=2)
    readers = cast(Sequence[ReaderClient], [Tape(1.0, 5.0, 3.0, 4.0, 7.0), Tape(2.0, 6.0)])
    found = [entry.round for entry in ShardedReader(readers, manifest).tape(9)]
    assert found == [1, 2, 3, 5, 7, 4, 9]
    assert [entry.round for entry in ShardedReader(readers, manifest).tape(2)] == [4, 9]


def test_one_merger_of_all_shards_is_named_once() -> None:
    found = combined_status([MergerStatus("m", 3, 4.0, 1.0), MergerStatus("m", 2, 2.0, 9.0)])
    assert found is not None
    assert (found.holder, found.epoch, found.lease_seconds, found.still_seconds) == ("m", 3, 2.0, 9.0)


def test_mergers_are_named_with_their_shards() -> None:
    found = combined_status([MergerStatus("m"), MergerStatus("n"), MergerStatus("m")])
    assert found is not None
    assert found.holder == "m (shards 0 and 2), n (shard 1)"


def test_a_shard_without_a_merger_leaves_the_run_without_one() -> None:
    found = combined_status([MergerStatus("m"), MergerStatus("")])
    assert found is not None
    assert (found.holder, found.unserved, found.holders) == ("", (1,), {"m": [0]})
    assert holders_in_words(found) == "m (shard 0)"
    assert combined_status([MergerStatus("m"), None]) is None


class _Served:
    """The reader of a shard, which knows whether a merger serves it, or cannot be reached (None)."""

    def __init__(self, served: bool | None) -> None:
        self._served = served

    def is_served(self) -> bool:
        if self._served is None:
            raise UnreachableError("its server is away")
        return self._served


@pytest.mark.parametrize("home", [True, False])
def test_a_further_shard_that_is_away_is_not_served(home: bool) -> None:
    manifest = replace(samples.manifest(), shards=2)
    readers = [cast(ReaderClient, _Served(served)) for served in (home, None)]
    assert ShardedReader(readers, manifest).is_served() is home
    with pytest.raises(UnreachableError):
        ShardedReader(readers[::-1], manifest).is_served()
