"""The run of the tests of the link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from archipelago.islands.sync.connection import link
from tests import samples
from tests.islands.sync.connection.link_run import Harness


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Return a harness of the sample run, whose pumps wait for moments only."""
    monkeypatch.setattr(link, "RETRY_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(link, "BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", 0.01)
    manifest = samples.manifest()
    made = Harness(manifest, samples.first_snapshots(manifest))
    yield made
    made.end()
