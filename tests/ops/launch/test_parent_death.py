"""Children that end with their launcher, by the death signal and by the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.ops.launch import parent_death
from tests.conftest import Until, gone

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
WATCH = pytest.mark.parametrize(
    "watch",
    [
        pytest.param(True, id="watch"),
        pytest.param(
            False,
            id="death-signal",
            marks=pytest.mark.skipif(not parent_death.HAS_DEATH_SIGNAL, reason="only Linux has a parent-death signal"),
        ),
    ],
)

LAUNCHER = """
import subprocess, sys
from ops import tether
watch = sys.argv[1] == "True"
child = subprocess.Popen(tether.command(["sh", "-c", "echo $$; exec sleep 600"], watch=watch), start_new_session=True)
child.wait()
"""


def run(argv: list[str], *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=cwd)


@WATCH
def test_child_dies_with_a_killed_launcher(watch: bool, until: Until) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(watch)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert not gone(pid)
        launcher.kill()
        until(lambda: gone(pid), "the child of the killed launcher is gone")


@WATCH
def test_child_is_not_started_for_a_launcher_that_is_gone_already(watch: bool) -> None:
    argv = [
        option if not option.startswith("--parent=") else f"--parent={os.getppid()}"
        for option in parent_death.command(["echo", "started"], watch=watch)
    ]
    done = run(argv)
    assert (done.returncode, done.stdout) == (1, "")


@WATCH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_child_hears_signals_and_says_its_status(watch: bool, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    argv = parent_death.command([sys.executable, "-c", code], watch=watch)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        assert child.wait(20) == 9


@WATCH
def test_child_passes_arguments_output_and_status(watch: bool, tmp_path: Path) -> None:
    (tmp_path / "subprocess.py").write_text("raise RuntimeError('the working folder is no place to import from')")
    argv = parent_death.command(["sh", "-c", 'echo "$1" "$2"; exit 7', "sh", "two words", "--watch"], watch=watch)
    done = run(argv, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "two words --watch\n", "")


def test_supervisor_tells_a_signal_as_a_shell_does() -> None:
    assert run(parent_death.command(["sh", "-c", "kill -TERM $$"], watch=True)).returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(not parent_death.HAS_DEATH_SIGNAL, reason="only Linux has a parent-death signal")
def test_death_signal_leaves_no_process_between() -> None:
    with subprocess.Popen(parent_death.command(["sh", "-c", "echo $$"]), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert int(child.stdout.read()) == child.pid


@WATCH
def test_missing_program_is_named(watch: bool) -> None:
    done = run(parent_death.command(["/no/such/program"], watch=watch))
    assert done.returncode == 127
    assert done.stderr.startswith("cannot start /no/such/program: ")


def test_module_runs_by_name() -> None:
    done = run([sys.executable, "-m", "archipelago.ops.launch.parent_death", "echo", "hello"])
    assert (done.returncode, done.stdout) == (0, "hello\n")


@pytest.mark.parametrize("arguments", [[], ["--watch"], ["--unknown", "echo"]])
def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    done = run([sys.executable, "-m", "archipelago.ops.launch.parent_death", *arguments])
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")


def test_module_imports_nothing_slow() -> None:
    """It runs before every child, so its imports are paid at every start."""
    code = f"import os, sys; before = set(sys.modules); sys.path.insert(0, {str(ROOT)!r}); import ops.tether"
    done = run([sys.executable, "-I", "-S", "-c", f"{code}; print(*sorted(set(sys.modules) - before))"])
    assert done.stdout.split() == ["__future__", "ops", "archipelago.ops.launch.parent_death"]
