"""Settings and fixtures of all tests.

JAX refuses implicit promotion of dtypes and ranks, and pytest turns warnings into errors. Each session has its own home
folder, so that no test touches the user's caches; its workers, and the processes that they start, share there what
JAX compiles.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.observe.logs import LOGGERS
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from tests import tiers
from tests.clusters import Cluster
from tests.fake_server import answer_as_redis
from tests.harness.forks import KINDS, Forks, forking, offer
from tests.pytorch import installed
from tests.servers import hide_other_servers

answer_as_redis()

settings.register_profile("archipelago", deadline=None, print_blob=True, max_examples=tiers.examples(100))
settings.load_profile("archipelago")

HOME_VARIABLE = "ARCHIPELAGO_TEST_HOME"

#: Lets XLA compile without most optimisations, which take a fifth of the processor time of quick tests (`optimised`).
PLAINLY_VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"

#: The home folder, in the one process of a session that made it and that deletes it.
_home_made_here: list[str] = []
#: The processes that fork others (`forks`), in that one process.
_forking_here: list[subprocess.Popen[bytes]] = []


def _make_home() -> None:
    """Create a new home folder, and set the environment variables that point to it.

    Its programs come first on PATH, so that all tests use the server of the installed package (`tests.servers`).
    Workers of pytest-xdist, and a pytest that a test starts, inherit these variables and use the same folder.
    """
    if HOME_VARIABLE in os.environ:
        return
    home = tempfile.mkdtemp(prefix="archipelago-tests-")
    _home_made_here.append(home)
    programs = Path(home) / "bin"
    programs.mkdir()
    hide_other_servers(programs)
    os.environ.update({HOME_VARIABLE: home, "HOME": home, "JAX_COMPILATION_CACHE_DIR": f"{home}/jax"})
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        del os.environ[name]


def pytest_configure() -> None:
    _make_home()
    # JAX reads these when it is imported, which no test module has done yet. Tests of arithmetic need the CPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.environ.setdefault(PLAINLY_VARIABLE, "1")
    if _home_made_here:
        _forking_here.extend(offer(kind, Path(_home_made_here[0])) for kind in KINDS)
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")  # type: ignore[no-untyped-call]
    jax.config.update("jax_numpy_rank_promotion", "raise")  # type: ignore[no-untyped-call]


#: A module whose tests all belong to the full tier.
FULL_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.full\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module without a quick test in the quick tier, because PyTorch and its trainers take long to load."""
    if config.option.markexpr == "not full" and collection_path.suffix == ".py":
        return bool(FULL_MODULE.search(collection_path.read_text())) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look through what is loaded, now or later, because that takes long.

    Trainers ask for several collections.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    for process in _forking_here:
        process.kill()
        process.wait()
    while _home_made_here:  # All workers have ended by now.
        shutil.rmtree(_home_made_here.pop(), ignore_errors=True)


Until = Callable[..., None]
#: The longest wait, in seconds. It suffices on a slow machine, and is below the timeout of the suite.
PATIENCE_SECONDS = 300.0


@pytest.fixture(scope="session")
def until() -> Until:
    """A function `until(predicate, what)` that polls until the predicate holds.

    A predicate that asks a server gets a tenth of a processor, so that the processes that it waits for have the rest.
    After a very long wait it fails with `what` as its message.
    """

    def wait(holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            asked = time.monotonic()
            if holds():
                return
            now = time.monotonic()
            if now > deadline:
                pytest.fail(f"waited {seconds:.0f} s for: {what}")
            time.sleep(min(max(0.01, 9 * (now - asked)), 0.3))

    return wait


def gone(pid: int) -> bool:
    """Return whether the process has ended. A zombie counts as ended: only its parent has not reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis or Valkey server for the whole session. It is part of an installed package."""
    with start_server(tmp_path_factory.mktemp("server") / "redis") as running:
        yield running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Cluster]:
    """A Redis Cluster of three primaries without replicas, for the whole session."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), until)
    yield made
    made.end()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Scripts with PyTorch are forked from one process, which has loaded it and its trainers."""
    for package in ("transformers", "lightning", "accelerate"):
        installed(package)
    with forking("trainers", Path(os.environ[HOME_VARIABLE])) as ask:
        yield ask


@pytest.fixture(scope="session")
def commands() -> Iterator[Forks]:
    """Commands of `archipelago` are forked from one process, which has loaded JAX."""
    with forking("commands", Path(os.environ[HOME_VARIABLE])) as ask:
        yield ask


@contextmanager
def optimising() -> Iterator[None]:
    """Let XLA optimise programs as it does for users, where their bits are compared with those of other programs."""
    import jax

    def obey_variable() -> None:
        jax.config.update("jax_disable_most_optimizations", os.environ[PLAINLY_VARIABLE] != "0")  # type: ignore[no-untyped-call]
        jax.clear_caches()  # type: ignore[no-untyped-call]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAINLY_VARIABLE, "0")
        obey_variable()
        yield
    obey_variable()


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """The programs of a module are optimised."""
    with optimising():
        yield


@pytest.fixture
def bucket() -> Iterator[BucketFolder]:
    """An empty bucket in memory (`faulty_bucket`), without faults until the test sets one."""
    from tests.broker.buckets import faulty_bucket

    faulty_bucket.reset()
    yield BucketFolder("faulty://bucket/runs")
    faulty_bucket.reset()


#: A worker drops its compiled programs each time that it has grown by this much. JAX reloads most of them from the
#: session's cache.
GROWTH_BYTES_MAX = 640 << 20
#: The memory of this worker after it dropped its compiled programs the last time.
_kept_bytes = [0]


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory() -> Iterator[None]:
    """Limit the memory of a worker. The compiled programs of all modules would accumulate otherwise."""
    yield
    if psutil.Process().memory_info().rss > _kept_bytes[0] + GROWTH_BYTES_MAX:
        import jax

        jax.clear_caches()  # type: ignore[no-untyped-call]
        gc.collect()
        _kept_bytes[0] = psutil.Process().memory_info().rss


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own folder, without the environment variables that name a run."""
    for name in (
        "ARCHIPELAGO_URL",
        "ARCHIPELAGO_RUN",
        "ARCHIPELAGO_DATA",
        "ARCHIPELAGO_BUCKET",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_signals_and_logging() -> Iterator[None]:
    """Restore the signals and the logging that a command has set up for its process.

    Its handlers of logs write to the captured output of the test, which is closed then.
    """
    loggers = [logging.getLogger(name) for name in ("", *LOGGERS)]
    handlers, levels = list(loggers[0].handlers), [logger.level for logger in loggers]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
