"""Children that die are started again, those that cannot go on are not, and all of them end when told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archipelago.ops.launch import supervisor
from archipelago.ops.launch.supervisor import Child, stop_all, thread_environment
from tests.conftest import Until

Make = Callable[[str], Child]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Children that run a line of Python; none outlives the test."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.0,))
    made: list[Child] = []

    def child(code: str) -> Child:
        made.append(Child(f"child-{len(made)}", ["-c", code], {"SAID": "hello"}, tmp_path / "logs" / "child.log"))
        return made[-1]

    yield child
    stop_all(made, 0.0)


def tended(child: Child, until: Until, done: Callable[[], bool], what: str) -> list[str]:
    """Looks after a child until that holds; what was said meanwhile."""
    said: list[str] = []

    def look() -> bool:
        said.append(child.tend(time.monotonic()))
        return done()

    until(look, what)
    return [news for news in said if news]


def test_one_that_ends_well_is_done(make: Make, until: Until) -> None:
    child = make("import os; print(os.environ['SAID'])")
    child.start()
    assert tended(child, until, lambda: child.done, "its end") == ["child-0 is done"]
    assert child.last_words() == "hello"
    assert child.restarts == 0


def test_one_that_dies_is_started_again(make: Make, until: Until, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = make(
        f"import os, pathlib; m = pathlib.Path({str(mark)!r}); m.exists() or (m.touch(), os.kill(os.getpid(), 9))"
    )
    child.start()
    said = tended(child, until, lambda: child.done, "its second life to end")
    assert said[0].startswith("child-0 died (SIGKILL) and starts again in 0 s; its log: ")
    assert said[1:] == ["child-0 is done"]
    assert child.restarts == 1


def test_one_that_cannot_go_on_says_why(make: Make, until: Until) -> None:
    """A user's error is tried a few times, since it may have been an outage, and then shown."""
    child = make("import sys; sys.stderr.write('error: no such run\\n'); sys.exit(2)")
    child.start()
    said = tended(child, until, lambda: bool(child.failed), "it to be given up")
    assert said[-1] == "child-0 cannot go on: error: no such run"
    assert child.restarts == supervisor.USER_ERRORS_MAX
    assert not child.done


def test_all_end_when_told_even_those_that_do_not_listen(make: Make, until: Until) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    children = [make(deaf), make("print('up', flush=True); import time; time.sleep(600)")]
    for child in children:
        child.start()
    until(lambda: children[0].log.read_text().count("up") == 2, "both to run")
    stop_all(children, 0.5)
    assert [child.process.poll() for child in children if child.process] == [-9, -15]


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    assert thread_environment(3)["OMP_NUM_THREADS"] == "2"
    assert thread_environment(20)["OMP_NUM_THREADS"] == "1"
    flags = thread_environment(20)["XLA_FLAGS"]
    assert flags == "--mine --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
