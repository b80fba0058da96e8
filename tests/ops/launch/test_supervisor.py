"""Children that die are restarted or replaced by a standby, mistakes of a user are fatal, and all can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.process import OUTAGE, REPLACED
from archipelago.ops.launch import supervisor
from archipelago.ops.launch.supervisor import LONG_SECONDS, Child, IslandStandbys, stop_all, thread_environment
from tests.conftest import Until, gone
from tests.failing import failing

Make = Callable[[str], Child]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make children that run a line of Python. None outlives the test."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.0,))
    made: list[Child] = []

    def child(code: str) -> Child:
        name = f"child-{len(made)}"
        made.append(Child(name, ["-c", code], {"SAID": "hello"}, tmp_path / "logs" / f"{name}.log"))
        return made[-1]

    yield child
    stop_all(made, 0.0)


def tended(child: Child, until: Until, done: Callable[[], bool], what: str) -> list[str]:
    """Tend a child until `done`, and return the events."""
    events: list[str] = []

    def poll() -> bool:
        events.append(child.tend(time.monotonic()))
        return done()

    until(poll, what)
    return [event for event in events if event]


def test_a_child_that_dies_is_restarted_and_is_done_with_status_0(make: Make, until: Until, tmp_path: Path) -> None:
    """It imports nothing from the working directory, which may have folders named like our packages."""
    (tmp_path / "archipelago").mkdir()
    (tmp_path / "archipelago" / "__init__.py").write_text("raise RuntimeError('imported from the working directory')")
    mark = tmp_path / "mark"
    child = make(
        f"import archipelago, os, pathlib; m = pathlib.Path({str(mark)!r}); "
        "m.exists() or (m.touch(), os.kill(os.getpid(), 9)); print(archipelago.__name__, os.environ['SAID'])"
    )
    child.start()
    assert len(tended(child, until, lambda: child.done, "its second process to end")) == 2
    assert (child.restarts, child.last_words()) == (1, "archipelago hello")


def test_a_mistake_of_the_user_is_fatal_at_once_but_gets_one_more_start_after_a_long_life(
    make: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make("import sys; sys.stderr.write('error: no such run\\n'); sys.exit(2)")
    child.start()
    tended(child, until, lambda: bool(child.failed), "its failure")
    assert (child.failed, child.is_fatal, child.restarts, child.done) == ("error: no such run", True, 0, False)
    monkeypatch.setattr(supervisor, "LONG_SECONDS", 0.0)
    old = make("import sys; sys.exit(2)")
    old.start()
    tended(old, until, lambda: old.restarts == 1, "its restart")
    monkeypatch.setattr(supervisor, "LONG_SECONDS", 60.0)
    tended(old, until, lambda: old.is_fatal, "its failure")


@pytest.mark.parametrize(
    ("code", "said"), [("raise RuntimeError('broken')", "RuntimeError: broken"), ("import os; os.abort()", "two")]
)
def test_a_child_that_fails_at_each_start_is_fatal(make: Make, until: Until, code: str, said: str) -> None:
    child, failures = make(f"print('one', flush=True); print('two', flush=True)\n{code}"), supervisor.FAILURES_MAX
    child.start()
    tended(child, until, lambda: bool(child.failed), "its failure")
    assert (child.is_fatal, child.failures, child.restarts) == (True, failures, failures - 1)
    assert (child.failed, len(child.last_lines())) == (said, supervisor.LAST_LINES)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        (f"import sys; sys.exit({OUTAGE})", f"status {OUTAGE}"),
        (f"import sys; print('the Redis is away'); sys.exit({OUTAGE})", f"status {OUTAGE}: the Redis is away"),
    ],
)
def test_kills_and_outages_are_never_fatal(make: Make, until: Until, code: str, cause: str) -> None:
    child = make(code)
    child.start()
    events = tended(child, until, lambda: child.restarts > supervisor.FAILURES_MAX, "many restarts")
    assert (child.failed, child.is_fatal, child.failures) == ("", False, 0)
    assert all(event.startswith(f"{child.name} died ({cause}) and restarts") for event in events)


def test_an_island_that_has_left_its_name_to_another_is_not_restarted(make: Make, until: Until) -> None:
    """Otherwise two launchers with an island of one name would take it from each other for ever."""
    child = make(f"import sys; print('a newer process has the name'); sys.exit({REPLACED})")
    child.start()
    tended(child, until, lambda: bool(child.failed), "its failure")
    assert (child.failed, child.restarts, child.done) == ("a newer process has the name", 0, False)


def test_all_children_end_even_those_that_ignore_sigterm(make: Make, until: Until) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    polite = "print('up', flush=True); import time; time.sleep(600)"
    children = [make(deaf), make(polite), make(polite)]
    for child in children:
        child.start()
    until(lambda: all("up" in child.log.read_text() for child in children), "all to run")
    stop_all(children[:2], 0.5)
    stop_all(children[2:], 60.0)
    statuses = [child.process.poll() for child in children if child.process]
    assert (statuses[0], statuses[2]) == (-9, -15)
    assert statuses[1] in (-9, -15), "in half a second, a busy machine may not let it end"


def test_what_a_child_has_started_ends_with_it(make: Make, until: Until) -> None:
    """Such as the processes of a data loader, which nothing else would end."""
    for is_deaf in (True, False):
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if is_deaf else ""
        child = make(
            "import signal, subprocess, sys, time; "
            f"{ignore}loader = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(600)']); "
            "print(loader.pid, flush=True); time.sleep(600)"
        )
        child.start()
        until(lambda child=child: len(child.last_lines()) == 2, "both to run")
        loader = max(int(line) for line in child.last_lines())
        child.stop(0.5 if is_deaf else 60.0)
        until(lambda loader=loader: gone(loader), "the loader's end")


def test_what_a_killed_child_has_started_is_killed(make: Make, until: Until, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = make(
        f"import os, pathlib, subprocess, sys; m = pathlib.Path({str(mark)!r}); m.exists() and sys.exit(); m.touch(); "
        "loader = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(loader.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    child.start()
    tended(child, until, lambda: child.done, "its second process to end")
    loader = int(child.last_lines()[-1])
    until(lambda: gone(loader), "the loader's end")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.ops.launch.supervisor.usable_cores", lambda: 8)
    assert thread_environment(3) == {"NPROC": "2", "OMP_NUM_THREADS": "2"}
    assert thread_environment(20) == {"NPROC": "1", "OMP_NUM_THREADS": "1"}


WAITS = """
import json, os, sys, time
print("ready", flush=True)
told = json.loads(sys.stdin.readline() or "null")
if told is None: sys.exit(0)
open(told["log"], "a").write(f"{os.getpid()} is {' '.join(told['arguments'])} {told['environment']}\\n")
time.sleep(600)
"""
LIVES = "import os, time; print(os.getpid(), 'began', flush=True); time.sleep(600)"


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IslandStandbys]:
    """Return a pool of one standby: a small Python program that is not loaded yet."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.0,))
    monkeypatch.setattr(supervisor, "REPLACED_SECONDS", 0.0)
    made = IslandStandbys(1, ["-c", WAITS], {}, tmp_path)
    yield made
    made.end()


@pytest.fixture
def island(pool: IslandStandbys, tmp_path: Path) -> Iterator[Child]:
    """Return a child with two words before its arguments, like `-m archipelago.islands`."""
    made = Child("oslo", ["-c", LIVES, "--name", "oslo"], {"SAID": "hello"}, tmp_path / "oslo.log")
    made.stand_in = pool.stand_in
    yield made
    stop_all([made], 0.0)


def died(child: Child) -> int:
    """Kill its process, and return its ID."""
    assert child.process is not None
    child.process.kill()
    child.process.wait()
    return child.process.pid


def test_a_standby_replaces_a_child_that_dies_and_another_is_loaded(
    pool: IslandStandbys, island: Child, until: Until, tmp_path: Path
) -> None:
    pool.all[0].restarts = pool.all[0].failures = 2  # before it could be loaded
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    first, waiting = died(island), pool.all[0].pid
    assert island.tend(time.monotonic())
    assert island.stood_in
    assert island.pid == waiting != first
    assert island.restarts == 1
    said = f"{waiting} is --name oslo {{'SAID': 'hello'}}"
    until(lambda: said in (tmp_path / "oslo.log").read_text(), "its assignment")
    assert island.tend(time.monotonic()) == ""
    assert not pool.are_ready()
    assert pool.tend(1e18) == []
    until(pool.are_ready, "another")
    assert pool.all[0].pid != island.pid
    assert (pool.all[0].restarts, pool.all[0].failures) == (0, 0), "a standby that was used has not failed"
    own, waiting = island.pid, pool.all[0].pid
    pool.end()
    until(lambda: gone(waiting), "its end with the run")
    assert not gone(own)


def test_a_standby_that_cannot_be_loaded_is_an_error(pool: IslandStandbys, until: Until) -> None:
    pool.all[0].argv = ["-c", "import sys; sys.stderr.write('error: no such run\\n'); sys.exit(2)"]
    pool.start()
    assert not pool.are_ready()

    def failed() -> bool:
        pool.tend(time.monotonic())
        return bool(pool.all[0].failed)

    until(failed, "its failure")
    assert pool.all[0].failed == "error: no such run"
    with failing(ArchipelagoError, "up.worker-failed"):
        pool.are_ready()


def test_a_child_that_dies_at_every_start_gets_a_standby_only_after_a_pause(
    pool: IslandStandbys, island: Child, until: Until
) -> None:
    """The first time it gets one at once; then only after a pause, until it has lived for long."""
    island.start()
    pool.start()
    until(pool.are_ready, "a standby")
    died(island)
    assert island.tend(time.monotonic())
    first = island.pid
    pool.tend(1e18)
    until(pool.are_ready, "another")
    died(island)
    assert island.tend(time.monotonic())
    assert island.pid == first, "it waits for the pause to end"
    island.tend(time.monotonic())
    assert island.stood_in
    assert island.pid != first
    pool.tend(1e18)
    until(pool.are_ready, "another")
    died(island)
    second = island.pid
    assert island.tend(time.monotonic() + LONG_SECONDS)
    assert island.pid != second


def test_a_standby_replaces_only_an_island_with_its_devices(tmp_path: Path, island: Child, until: Until) -> None:
    pool = IslandStandbys(1, ["-c", WAITS], {}, tmp_path, [{"DEVICES": "0,1"}])
    pool.start()
    until(pool.are_ready, "a standby")
    assert not pool.stand_in(island)
    island.environment = {"DEVICES": "0,1"}
    assert pool.stand_in(island)
    pool.end()
