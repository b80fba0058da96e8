"""Values of a run that are derived from those of its shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.memory.transport import MemoryReader
from archipelago.broker.messages import TapeEntry
from archipelago.broker.shards.reader import (
    ShardedReader,
    combined_state,
    combined_status,
    holders_in_words,
)
from archipelago.broker.transport import MergerStatus
from tests import samples
from tests.failing import failing


def test_counts_of_the_mergers_are_added_up() -> None:
    first = {"closed": 7, "step": 70, "accounts": {"a": [3]}, "refused": {"late": 1}, "covered": 3}
    second = {"closed": 5, "step": 50, "accounts": {"a": [4], "b": [1]}, "refused": {}, "covered": 1}
    found = json.loads(combined_state({0: json.dumps(first), 1: json.dumps(second)}))
    assert found["accounts"] == {"a": [7], "b": [1]}
    assert found["refused"] == {"late": 1}
    assert (found["covered"], found["step"]) == (1, 50)
    assert combined_state({0: "", 1: ""}) == ""
    nonsense = json.dumps({"accounts": "x", "covered": -1, "refused": None})
    found = json.loads(combined_state({0: "[1]", 1: nonsense}))
    assert (found["accounts"], found["refused"], found["covered"]) == ({}, {}, 0), "unreadable ones count nothing"


class Tape(MemoryReader):
    """A reader of a shard that has closed every second round, from `first` on, at these times."""

    def __init__(self, first: int, *seconds: float) -> None:
        entry = samples.commit([]).tape
        self._entries = [replace(entry, round=first + 2 * n, unix_seconds=at) for n, at in enumerate(seconds)]

    def tape(self, count: int) -> list[TapeEntry]:
        return self._entries[-count:]


def test_the_rounds_of_a_shard_stay_in_order_when_a_merger_with_a_slower_clock_takes_over() -> None:
    manifest = replace(samples.manifest(), shards=2)
    readers = [Tape(1, 1.0, 5.0, 3.0, 4.0, 7.0), Tape(2, 2.0, 6.0)]
    found = [entry.round for entry in ShardedReader(readers, manifest).tape(9)]
    assert found == [1, 2, 3, 5, 7, 4, 9]
    assert [entry.round for entry in ShardedReader(readers, manifest).tape(2)] == [4, 9]


class Requests(MemoryReader):
    """A reader of a shard with these requests."""

    def __init__(self, **requests: str) -> None:
        self.requests, self.is_away = requests, False

    def control(self) -> dict[str, str]:
        if self.is_away:
            raise UnreachableError("its server is away")
        return self.requests

    def steer(self, changes: Mapping[str, str]) -> None:
        self.requests = dict(changes)


def test_a_request_that_one_shard_has_is_shown_and_none_is_changed_while_one_is_away() -> None:
    manifest, shards = replace(samples.manifest(), shards=2), [Requests(a="0"), Requests(a="1", merging="paused")]
    run = ShardedReader(shards, manifest)
    assert run.control() == {"a": "0", "merging": "paused"}
    shards[1].is_away = True
    with failing(UnreachableError):
        run.steer({"b": "2"})
    assert shards[0].requests == {"a": "0"}
    shards[1].is_away = False
    run.steer({"b": "2"})
    assert [shard.requests for shard in shards] == [{"b": "2"}] * 2


def test_mergers_are_named_with_their_shards() -> None:
    one = combined_status([MergerStatus("m", 3, 4.0, 1.0), MergerStatus("m", 2, 2.0, 9.0)])
    two = combined_status([MergerStatus("m"), MergerStatus("n"), MergerStatus("m")])
    none = combined_status([MergerStatus("m"), MergerStatus("")])
    assert (one.holder, one.epoch, one.lease_seconds, one.still_seconds) == ("m", 3, 2.0, 9.0)
    assert two.holder == "m (shards 0 and 2), n (shard 1)"
    assert (none.holder, none.unserved, none.holders) == ("", (1,), {"m": [0]}), "a shard is without a merger"
    assert holders_in_words(none) == "m (shard 0)"


class _Served(MemoryReader):
    """The reader of a shard, which knows whether a merger serves it, or cannot be reached (None)."""

    def __init__(self, served: bool | None) -> None:
        self._served = served

    def is_served(self) -> bool:
        if self._served is None:
            raise UnreachableError("its server is away")
        return self._served


def test_a_further_shard_that_is_away_is_not_served() -> None:
    manifest = replace(samples.manifest(), shards=2)
    for home in (True, False):
        readers = [_Served(served) for served in (home, None)]
        assert ShardedReader(readers, manifest).is_served() is home
        with pytest.raises(UnreachableError):
            ShardedReader(readers[::-1], manifest).is_served()
