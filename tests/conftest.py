"""Settings and fixtures of all tests.

JAX refuses implicit promotion of dtypes and ranks, and pytest turns warnings into errors. Each session has its own home
folder, so that no test touches the user's caches; its workers, and the processes that they start, share there what
JAX compiles.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from archipelago.ops.launch.embedded_redis import Server, start_server
from tests import tiers

settings.register_profile("archipelago", deadline=None, print_blob=True, max_examples=tiers.examples(100))
settings.load_profile("archipelago")

HOME_VARIABLE = "ARCHIPELAGO_TEST_HOME"


def _make_home() -> None:
    """Point everything that looks for the user's folders at a new one. Workers of pytest-xdist inherit it."""
    if HOME_VARIABLE in os.environ:
        return
    home = tempfile.mkdtemp(prefix="archipelago-tests-")
    os.environ.update({HOME_VARIABLE: home, "HOME": home, "JAX_COMPILATION_CACHE_DIR": f"{home}/jax"})
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        del os.environ[name]


def pytest_configure() -> None:
    _make_home()
    # JAX reads these when it is imported, which no test module has done yet. Tests of arithmetic need the CPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")  # type: ignore[no-untyped-call]
    jax.config.update("jax_numpy_rank_promotion", "raise")  # type: ignore[no-untyped-call]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers are still using the folder when they end
        shutil.rmtree(os.environ[HOME_VARIABLE], ignore_errors=True)


Until = Callable[..., None]
#: Slow machines need longer; the suite's own timeout is longer still.
PATIENCE_SECONDS = 300.0


@pytest.fixture(scope="session")
def until() -> Until:
    """`until(predicate, what)` polls until the predicate holds, and fails with `what` after a very long wait."""

    def wait(holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds:.0f} s for: {what}")
            time.sleep(0.01)

    return wait


def gone(pid: int) -> bool:
    """Whether the process has ended. A zombie, which its parent has not reaped yet, counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Redis or Valkey for the whole session. An installed package brings one."""
    with start_server(tmp_path_factory.mktemp("server") / "redis") as running:
        yield running


#: A worker that holds more than this drops what JAX compiled. JAX finds most of it again in the session's folder.
MEMORY_BYTES_MAX = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory() -> Iterator[None]:
    """Keep the memory of a worker bounded: compiled programs of every module would pile up."""
    yield
    if psutil.Process().memory_info().rss > MEMORY_BYTES_MAX:
        import jax

        jax.clear_caches()  # type: ignore[no-untyped-call]
        gc.collect()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own, without the variables that point workers at a run."""
    for name in ("ARCHIPELAGO_URL", "ARCHIPELAGO_RUN", "ARCHIPELAGO_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
