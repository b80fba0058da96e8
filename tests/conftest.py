"""Hostile settings for every test: strict dtype promotion, no rank promotion, warnings are errors. And shared tools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Before JAX is imported: tests of arithmetic want the CPU, and its threads shared among what runs beside.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import settings

from archipelago.ops.launch.embedded_redis import Server, start_server
from tests import tiers

settings.register_profile("archipelago", deadline=None, print_blob=True, max_examples=tiers.examples(100))
settings.load_profile("archipelago")


def pytest_configure() -> None:
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")  # type: ignore[no-untyped-call]
    jax.config.update("jax_numpy_rank_promotion", "raise")  # type: ignore[no-untyped-call]


Until = Callable[..., None]


@pytest.fixture(scope="session")
def until() -> Until:
    """`until(predicate, what)`: polls until it holds; fails, saying what it waited for, after 30 s."""

    def wait(holds: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds:.0f} s for: {what}")
            time.sleep(0.01)

    return wait


def gone(pid: int) -> bool:
    """The process is no more; one that nobody has reaped counts as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Redis or Valkey for the whole session; the installed packages carry one."""
    with start_server(tmp_path_factory.mktemp("server") / "redis") as running:
        yield running


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test does reaches the user's environment, and nothing there reaches a test."""
    for name in ("ARCHIPELAGO_URL", "ARCHIPELAGO_RUN", "ARCHIPELAGO_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
