"""`bench shards`: one merger and two shards close the same rounds."""

from __future__ import annotations

import pytest

from archipelago.ops.bench import shards


@pytest.mark.full
@pytest.mark.parametrize("mergers", [1, 2])
def test_all_rounds_of_a_cycle_are_closed_and_merged(mergers: int) -> None:
    with shards._run(mergers, False, 8, "rda") as run:
        assert all(run.closed_within(cycle) > 0.0 for cycle in range(2))
        connections = [run.home] if mergers == 1 else [run.home.of_shard(shard) for shard in range(mergers)]
        books = [connection.reader.books() for connection in connections]
    assert sum(each.merged for each in books) == 2 * shards.FRAGMENTS * shards.ISLANDS
    assert not any(each.refused for each in books)
