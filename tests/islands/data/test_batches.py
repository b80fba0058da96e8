"""Batches: ranges tile the text, leases are read once, and what is leased is restored exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from archipelago.broker.config import DataConfig, RunConfig
from archipelago.broker.errors import DataError
from archipelago.broker.ranges import PASSES_MAX, POSITIONS_MAX, ReadPosition, parse_positions
from archipelago.islands.data import batches, preparation
from archipelago.islands.data.batches import PRIVATE_PASSES, Batches, range_order
from tests.failing import failing

Bytes = NDArray[np.uint8]


def positions(size: int) -> Bytes:
    """Return a text of up to 128 KiB in which each pair of bytes is its own position."""
    return np.frombuffer(np.arange(size // 2 + 1, dtype=">u2").tobytes(), dtype=np.uint8)[:size]


def found(text: Bytes, row: Bytes) -> int:
    """Return where the window `row` begins in a text of `positions`."""
    whole, wanted = text.tobytes(), row.tobytes()
    places = [place for place in range(len(whole)) if whole.startswith(wanted, place)]
    assert places
    return places[0]


def configured(shards: int = 4, length: int = 8, batch: int = 2, seed: int = 0) -> RunConfig:
    return RunConfig(seed=seed, data=DataConfig(shards=shards, sequence_length=length, batch_size=batch))


def leases(answers: Iterable[ReadPosition | None]) -> Callable[[], ReadPosition | None]:
    """Return a `lease` that gives these places and then None."""
    waiting = iter(answers)
    return lambda: next(waiting, None)


def fresh(*shards: int, pass_number: int = 0) -> Callable[[], ReadPosition | None]:
    """Return a `lease` that gives these ranges from their beginning and then None."""
    return leases(ReadPosition(str(shard), pass_number, 0) for shard in shards)


TEXT, CONFIG = positions(4000), configured(batch=1)


def rows(name: str, pass_number: int) -> Bytes:
    """Return the windows of a pass over TEXT, in the order of use."""
    return np.asarray(batches.gather(TEXT, batches.windows(4000, 4, 8, 0, int(name), pass_number), 8), np.uint8)


# -- ranges and windows -----------------------------------------------------------------------------------------------


def test_the_order_of_ranges_and_windows_is_the_same_on_every_machine() -> None:
    # Recorded values. If they change, islands of two versions train on the same windows.
    assert range_order(8, seed=1) == ["0", "6", "2", "1", "3", "7", "4", "5"]
    assert batches.windows(200, 3, 16, 1, 1, 5).tolist() == [7, 55, 151, 103]


@given(
    size=st.integers(60, 3000),
    shards=st.integers(1, 5),
    length=st.integers(2, 10),
    seed=st.integers(0, (1 << 31) - 1),
    pass_number=st.integers(0, 5) | st.sampled_from([PASSES_MAX, PRIVATE_PASSES]),
)
def test_the_windows_of_a_pass_tile_the_text(size: int, shards: int, length: int, seed: int, pass_number: int) -> None:
    dealt = [batches.windows(size, shards, length, seed, shard, pass_number) for shard in range(shards)]
    assert all(len(starts) >= 1 for starts in dealt)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    ordered = np.sort(np.concatenate(dealt))
    assert np.all(np.diff(ordered) == length)
    assert 0 <= ordered[0] < length
    assert 0 <= size - (ordered[-1] + length + 1) < length  # no further window fits


@settings(deadline=None)
@given(size=st.integers(10, 3000), sequences=st.integers(1, 50), length=st.integers(2, 80))
def test_held_out_windows_are_spread_and_do_not_overlap(size: int, sequences: int, length: int) -> None:
    text = positions(size)
    if size <= length:
        with failing(DataError, "data.too-small"):
            batches.held_out(text, sequences, length)
        return
    out = batches.held_out(text, sequences, length)
    assert out.shape == (min(sequences, (size - 1) // length), length + 1)
    assert out.dtype == np.uint8
    starts = [found(text, row) for row in out]
    assert all(after - before >= length for before, after in pairwise(starts))


def test_held_out_text_is_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    (tmp_path / "text").write_bytes(b"t" * 90_000 + b"v" * 5_000 + b"x" * 5_000)
    opened = preparation.prepare_text(tmp_path / "text", "letters")
    trained_on = Batches(opened.train, configured(), fresh(0, 1, 2, 3)).next(11_000)
    assert set(trained_on.tobytes()) == set(b"t")
    assert set(batches.held_out(opened.valid, 10_000, 8).tobytes()) == set(b"v")
    assert set(batches.held_out(opened.test, 10_000, 8).tobytes()) == set(b"x")


def test_a_text_too_short_for_its_ranges_is_refused() -> None:
    text = positions(1000)
    for config, said in ((configured(shards=64, length=100), "at most 9,"), (configured(shards=1, length=1000), "")):
        with failing(DataError, "data.too-small") as caught:
            Batches(text, config, fresh())
        assert said in caught.value.remedy
    Batches(text, configured(shards=9, length=100), fresh(*range(9))).next(1)


# -- reading leased ranges --------------------------------------------------------------------------------------------


def test_a_leased_range_is_read_once_from_its_cursor() -> None:
    supply = Batches(TEXT, CONFIG, leases([ReadPosition("2", 0, 0), ReadPosition("0", 5, 17)]))
    for expected in (rows("2", 0), rows("0", 5)[17:]):
        assert np.array_equal(supply.next(len(expected))[:, 0], expected)
    assert supply.positions() == (ReadPosition("2", 1, 0), ReadPosition("0", 6, 0))
    together, again = (Batches(TEXT, configured(), fresh(0, 1)) for _ in range(2))
    batches = together.next(6)
    assert batches.shape == (6, 2, 9)
    assert batches.dtype == np.uint8
    assert np.array_equal(batches, np.concatenate([again.next(n) for n in (1, 2, 3)]))


def test_without_a_lease_an_island_reads_private_passes() -> None:
    supplies = [Batches(TEXT, CONFIG, fresh(), fallback=number) for number in range(6)]
    batches = [supply.next(1)[0] for supply in supplies]
    assert len({batch.tobytes() for batch in batches}) == 6
    for n, batch in enumerate(batches):
        assert np.array_equal(batch, rows(str(n % 4), PRIVATE_PASSES + n // 4)[: len(batch)])
    assert [supply.positions() for supply in supplies] == [()] * 6
    assert PASSES_MAX < PRIVATE_PASSES
    supply = Batches(TEXT, CONFIG, leases([ReadPosition("3", 1, 9), None, None, None, ReadPosition("1", 0, 0)]))
    for expected in (rows("3", 1)[9:], rows("0", PRIVATE_PASSES), rows("1", PRIVATE_PASSES)):
        assert np.array_equal(supply.next(len(expected))[:, 0], expected)
        assert supply.positions() == (ReadPosition("3", 2, 0),)
    supply.next(1)
    assert supply.positions() == (ReadPosition("3", 2, 0), ReadPosition("1", 0, 1))


@settings(deadline=None)
@given(
    leased=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(0, 15)), unique_by=lambda t: t[0]),
    sizes=st.lists(st.integers(0, 40), max_size=6),
)
def test_places_report_the_position_in_each_lease(leased: list[tuple[int, int, int]], sizes: list[int]) -> None:
    config = configured(shards=21, batch=3)
    given_out = [ReadPosition(str(shard), pass_number, position) for shard, pass_number, position in leased]
    supply = Batches(TEXT, config, leases(given_out))
    left = 0
    for size in sizes:
        supply.next(size)
        left += 3 * size
    expected = []
    for place in given_out if left else []:
        count = len(batches.windows(4000, 21, 8, 0, int(place.range), place.pass_number))
        position = min(count, place.position + left)
        cursor = (place.pass_number + 1, 0) if position == count else (place.pass_number, position)
        expected.append(ReadPosition(place.range, *cursor))
        left -= position - place.position
        if not left:
            break
    assert supply.positions() == tuple(expected)
    assert parse_positions(" ".join(map(str, supply.positions()))) == supply.positions()


def test_an_island_holds_no_more_ranges_than_it_can_report() -> None:
    shards = POSITIONS_MAX + 8
    supply = Batches(TEXT, configured(shards=shards, batch=1), fresh(*range(shards)))
    windows = [len(batches.windows(4000, shards, 8, 0, shard, 0)) for shard in range(shards)]
    supply.next(sum(windows[:POSITIONS_MAX]) + 1)
    assert [place.range for place in supply.positions()] == [str(shard) for shard in range(POSITIONS_MAX)]
    assert supply.reading.current is not None and not supply.reading.current.is_leased
    supply.forget(["3"])  # its end was merged
    supply.next(1)
    assert supply.positions()[-1] == ReadPosition(str(POSITIONS_MAX), 0, 1)


def test_a_lost_lease_is_not_read_further() -> None:
    supply = Batches(TEXT, CONFIG, fresh(0, 1))
    supply.next(3)
    supply.forget({"0"})
    assert supply.positions() == ()
    assert np.array_equal(supply.next(4)[:, 0], rows("1", 0)[:4])
    assert supply.positions() == (ReadPosition("1", 0, 4),)
    supply.forget(["0", "7"])
    assert supply.positions() == (ReadPosition("1", 0, 4),), "forgetting an ended pass does not end the next"
    supply.forget({"1"})
    assert np.array_equal(supply.next(4)[:, 0], rows("0", PRIVATE_PASSES)[:4])
    assert supply.positions() == ()


def test_a_cursor_beyond_the_pass_ends_it() -> None:
    count = len(rows("0", 0))
    supply = Batches(
        TEXT, CONFIG, leases([ReadPosition("0", 0, count), ReadPosition("2", 3, 10**15 - 1), ReadPosition("1", 0, 0)])
    )
    assert np.array_equal(supply.next(4)[:, 0], rows("1", 0)[:4])
    assert supply.positions() == (
        ReadPosition("0", 1, 0),
        ReadPosition("2", 4, 0),
        ReadPosition("1", 0, 4),
    )
