"""`bench islands`: its islands contribute to real rounds, and all of them are merged."""

from __future__ import annotations

import math

import pytest

from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.bench import many_islands


@pytest.mark.full
def test_every_contribution_of_every_island_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def noted(url: str, run: str) -> RedisTransport:
        urls.append(url)
        return connect(url, run)

    monkeypatch.setattr(many_islands, "connect", noted)
    with many_islands._run(5, 64) as run:
        found = run.measured(2)
        look = connect(urls[0], many_islands.RUN)
        books, tape, cursors = look.reader.books(), look.reader.tape(1), look.reader.cursors()
        live = [presence for presence in look.reader.presences() if presence.is_training]
        look.close()
    assert all(math.isfinite(each) and each >= 0.0 for each in found.values())
    assert (books.merged, books.refused) == (5 * (2 + many_islands.WARM_UPS), 0)
    assert tape[0].live == len(tape[0].members) == len(live) == len(cursors) == 5
    assert all(member.weight == pytest.approx(0.2, abs=0.01) for member in tape[0].members)
