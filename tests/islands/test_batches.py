from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from broker.config import DataConfig, RunConfig
from broker.errors import DataError
from islands import batches, corpus
from islands.batches import PRIVATE_ORDINALS, Batches, shard_for

Bytes = NDArray[np.uint8]


def positions(size: int) -> Bytes:
    """A text of up to 128 KiB whose neighbouring bytes tell where they stand."""
    return np.frombuffer(np.arange(size // 2 + 1, dtype=">u2").tobytes(), dtype=np.uint8)[:size]


def found(text: Bytes, row: Bytes) -> int:
    """Where the window `row` begins; words of `positions` begin at even places only."""
    whole, wanted = text.tobytes(), row.tobytes()
    places = [place for place in range(len(whole)) if whole.startswith(wanted, place)]
    assert places
    return places[0]


def configured(shards: int = 4, length: int = 8, batch: int = 2, seed: int = 0) -> RunConfig:
    return RunConfig(seed=seed, data=DataConfig(shards=shards, sequence_length=length, batch_size=batch))


def claims(ordinals: Iterable[int | None]) -> Callable[[], int | None]:
    """Hands out these, and then nothing."""
    waiting = iter(ordinals)
    return lambda: next(waiting, None)


@given(st.integers(1, 300), st.integers(0, (1 << 31) - 1), st.integers(0, 1 << 40))
def test_in_each_epoch_every_shard_comes_once(shards: int, seed: int, epoch: int) -> None:
    ordinals = range(epoch * shards, (epoch + 1) * shards) if epoch < 3 else [epoch * shards + i for i in range(3)]
    drawn = [shard_for(ordinal, shards, seed) for ordinal in ordinals]
    assert len(set(drawn)) == min(len(drawn), shards)
    assert all(0 <= shard < shards for shard in drawn)


def test_the_order_of_shards_is_the_same_on_every_machine() -> None:
    # Recorded: a change here means that islands of two versions would train on the same shards.
    assert [shard_for(ordinal, 8, seed=1) for ordinal in range(16)] == [7, 4, 5, 1, 6, 2, 0, 3, 2, 1, 4, 7, 6, 0, 3, 5]
    assert batches.windows(200, 3, 16, 1, 5, 0).tolist() == [53, 5, 101, 149]


@given(
    size=st.integers(60, 3000),
    shards=st.integers(1, 5),
    length=st.integers(2, 10),
    seed=st.integers(0, (1 << 31) - 1),
    epoch=st.integers(0, 5) | st.just(PRIVATE_ORDINALS),
)
def test_the_windows_of_an_epoch_tile_the_text_and_no_two_shards_share_one(
    size: int, shards: int, length: int, seed: int, epoch: int
) -> None:
    dealt = [batches.windows(size, shards, length, seed, epoch * shards + place) for place in range(shards)]
    assert all(len(starts) >= 1 for starts in dealt)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    ordered = np.sort(np.concatenate(dealt))
    assert np.all(np.diff(ordered) == length)
    assert 0 <= ordered[0] < length
    assert 0 <= size - (ordered[-1] + length + 1) < length  # no room for another


def test_a_shard_is_a_sample_of_the_whole_text() -> None:
    starts = batches.windows(100_000, 10, 8, 0, 3)
    quarters = np.histogram(starts, bins=4, range=(0, 100_000))[0]
    assert quarters.min() > 0.99 * len(starts) / 4


def test_windows_differ_between_ordinals_seeds_and_repeats() -> None:
    entropies = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, PRIVATE_ORDINALS, 0)]
    orders = {tuple(batches.windows(10_000, 4, 16, *entropy).tolist()) for entropy in entropies}
    assert len(orders) == len(entropies)


@settings(deadline=None)
@given(size=st.integers(10, 3000), sequences=st.integers(1, 50), length=st.integers(2, 80))
def test_held_out_windows_are_spread_and_do_not_overlap(size: int, sequences: int, length: int) -> None:
    text = positions(size)
    if size <= length:
        with pytest.raises(DataError, match="shorter than one sequence"):
            batches.held_out(text, sequences, length)
        return
    out = batches.held_out(text, sequences, length)
    assert out.shape == (min(sequences, (size - 1) // length), length + 1)
    assert out.dtype == np.uint8
    starts = [found(text, row) for row in out]
    assert all(after - before >= length for before, after in pairwise(starts))


def test_a_batch_has_the_shape_that_the_step_wants_and_reads_on() -> None:
    text = positions(4000)
    supply = Batches(text, configured(), claims([0, 1]))
    together = supply.next(6)
    assert together.shape == (6, 2, 9)
    assert together.dtype == np.uint8
    again = Batches(text, configured(), claims([0, 1]))
    assert np.array_equal(together, np.concatenate([again.next(n) for n in (1, 2, 3)]))


@given(seed=st.integers(0, 1000), size=st.integers(400, 4000), shards=st.integers(1, 20))
def test_in_an_epoch_no_byte_is_read_twice_by_whoever_claims_its_shard(seed: int, size: int, shards: int) -> None:
    read = np.zeros(size, dtype=np.int64)
    for ordinal in range(shards):
        inputs = batches.windows(size, shards, 8, seed, ordinal)[:, None] + np.arange(8)
        np.add.at(read, inputs.ravel(), 1)
    assert read.max() == 1
    assert read.sum() >= size - 16  # what does not fill a window


def test_held_out_text_is_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    (tmp_path / "text").write_bytes(b"t" * 90_000 + b"v" * 5_000 + b"x" * 5_000)
    opened = corpus.prepare_text(tmp_path / "text", "letters")
    trained_on = Batches(opened.train, configured(), claims(range(8))).next(11_000)
    assert set(trained_on.tobytes()) == set(b"t")
    assert set(batches.held_out(opened.valid, 10_000, 8).tobytes()) == set(b"v")
    assert set(batches.held_out(opened.test, 10_000, 8).tobytes()) == set(b"x")


def test_a_claimed_shard_is_read_once_before_the_next() -> None:
    text, config = positions(4000), configured(shards=4, batch=1)
    supply = Batches(text, config, claims([2, 0]))
    for ordinal in (2, 0):
        starts = batches.windows(4000, 4, 8, 0, ordinal)
        assert np.array_equal(supply.next(len(starts))[:, 0], batches.gather(text, starts, 8))
    assert supply.repeats == 0


def test_with_nothing_to_claim_it_goes_over_its_shard_in_another_order() -> None:
    text, config = positions(4000), configured(shards=4, batch=1)
    passes = [batches.windows(4000, 4, 8, 0, 7, repeat) for repeat in range(3)]
    supply = Batches(text, config, claims([7, None, None, 1]))
    for number, starts in enumerate(passes):
        assert np.array_equal(supply.next(len(starts))[:, 0], batches.gather(text, starts, 8))
        assert supply.repeats == number
    supply.next(1)
    assert supply.state() == {"ordinal": 1, "repeat": 0, "position": 1, "repeats": 2}


def test_an_island_that_never_reached_the_counter_begins_on_a_shard_of_its_own() -> None:
    text, config = positions(4000), configured(shards=4, batch=1)
    supplies = [Batches(text, config, claims([]), fallback=number) for number in range(4)]
    first = [bytes(supply.next(1)) for supply in supplies]
    assert len(set(first)) == 4
    assert [supply.state()["ordinal"] for supply in supplies] == [PRIVATE_ORDINALS + number for number in range(4)]
    assert len({shard_for(supply.state()["ordinal"], 4, 0) for supply in supplies}) == 4


@settings(deadline=None, max_examples=50)
@given(
    before=st.integers(0, 60),
    answers=st.lists(st.none() | st.integers(0, 100), max_size=8),
    seed=st.integers(0, 99),
    fallback=st.integers(0, 1 << 62),
)
def test_restored_batches_go_on_exactly(before: int, answers: list[int | None], seed: int, fallback: int) -> None:
    text, config = positions(2000), configured(shards=8, length=16, batch=3, seed=seed)
    answered = 0

    def claim() -> int | None:
        nonlocal answered
        answered += 1
        return answers[answered - 1] if answered <= len(answers) else None

    original = Batches(text, config, claim, fallback)
    original.next(before)
    state = original.state()
    used = answered
    expected = original.next(20)
    restored = Batches(text, config, claims(answers[used:]), fallback)
    restored.restore(state)
    assert restored.state() == state
    assert np.array_equal(restored.next(20), expected)
    assert restored.state() == original.state()


@pytest.mark.parametrize(
    "damage", [{"position": 10_000}, {"position": -1}, {"repeat": -1}, {"ordinal": -1, "position": 3}]
)
def test_a_place_that_is_not_in_the_text_is_refused(damage: dict[str, int]) -> None:
    supply = Batches(positions(2000), configured(), claims([3]))
    supply.next(2)
    state = supply.state()
    with pytest.raises(DataError, match="saved place"):
        supply.restore(state | damage)
    assert supply.state() == state


def test_a_text_too_short_for_its_shards_is_refused_with_the_number_that_would_do() -> None:
    text = positions(1000)
    with pytest.raises(DataError, match=r"data\.shards.*data\.sequence_length.*at most 9,"):
        Batches(text, configured(shards=64, length=100), claims([]))
    Batches(text, configured(shards=9, length=100), claims(range(9))).next(1)
    with pytest.raises(DataError):
        Batches(text, configured(shards=1, length=1000), claims([]))
