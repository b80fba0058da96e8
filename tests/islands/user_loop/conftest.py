"""Fixtures of tests of users' own loops."""

from __future__ import annotations

import importlib
import uuid

import pytest

from archipelago import SyncConfig
from archipelago.islands.sync.connection import link
from tests.islands.user_loop.any_framework import Framework
from tests.islands.user_loop.own_runs import JAX

SYNC = SyncConfig(interval=4, fragments=2)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that waits for events end sooner when an island leaves."""
    monkeypatch.setattr(link, "BLOCK_SECONDS", 0.05)


@pytest.fixture(params=["jax", pytest.param("pytorch", marks=pytest.mark.full)])
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework in turn. Promises to scripts are the same in all; the full tier needs PyTorch."""
    if request.param == "jax":
        return JAX
    found: Framework = importlib.import_module("tests.islands.pytorch.torch_runs").PYTORCH
    return found


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"
