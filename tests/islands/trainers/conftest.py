"""Fixtures of the trainers."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty Redis, which scripts that name none use too, with the run `own`."""
    found = f"fakeredis://{uuid.uuid4().hex}"
    monkeypatch.setenv("ARCHIPELAGO_URL", found)
    monkeypatch.setenv("ARCHIPELAGO_RUN", "own")
    return found
