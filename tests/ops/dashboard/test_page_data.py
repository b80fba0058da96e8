"""`glance`, which reads a run every second: it agrees with `observe` without reading the whole stream."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.memory.reader import MemoryReader
from archipelago.broker.memory.transport import MemoryTransport
from archipelago.broker.messages import Books, Evaluation, Pending
from archipelago.ops.watch.run_view import BALANCE_TRIES, RECENT_ROUNDS, glance, observe
from tests import samples

MANIFEST = samples.manifest()


@pytest.fixture
def transport() -> MemoryTransport:
    return samples.merged_one_of_three(Evaluation(1, 4, 100, 1.7e9, 5.0))


def read_through(self: MemoryReader) -> Pending:
    pytest.fail("it read through the stream")


def test_glance_agrees_with_observe(transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = observe(transport, MANIFEST)
    assert expected.pending == 2
    monkeypatch.setattr(MemoryReader, "pending", read_through)
    assert glance(transport, MANIFEST, transport.reader.tape(RECENT_ROUNDS), transport.reader.evaluations()) == expected


def test_only_the_recent_rounds_count(transport: MemoryTransport) -> None:
    (entry,) = transport.reader.tape(1)
    old = [replace(entry, round=0, members=()) for _ in range(RECENT_ROUNDS)]
    (island,) = glance(transport, MANIFEST, [*old, entry], []).islands
    assert island.participation == pytest.approx(1 / RECENT_ROUNDS)


@pytest.mark.parametrize(("torn", "balanced"), [(BALANCE_TRIES - 1, True), (BALANCE_TRIES, False)])
def test_an_inconsistent_reading_is_repeated(
    transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch, torn: int, balanced: bool
) -> None:
    right, readings = transport.reader.books(), 0

    def books(self: MemoryReader) -> Books:
        nonlocal readings
        readings += 1
        return replace(right, merged=right.merged + (readings <= torn))

    monkeypatch.setattr(MemoryReader, "books", books)
    assert glance(transport, MANIFEST, transport.reader.tape(9), []).balanced is balanced
    assert readings == BALANCE_TRIES
