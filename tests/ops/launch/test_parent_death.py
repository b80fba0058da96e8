"""Children end with their launcher, by the kernel's death signal or by a supervisor process."""

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
from archipelago.ops.launch import parent_death
watch = sys.argv[1] == "True"
argv = parent_death.command(["sh", "-c", "echo $$; exec sleep 600"], watch=watch)
subprocess.Popen(argv, start_new_session=True).wait()
"""


def run(argv: list[str], *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd)


@WATCH
def test_a_child_dies_with_a_killed_launcher(watch: bool, until: Until) -> None:
    argv = [sys.executable, "-P", "-c", LAUNCHER, str(watch)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert not gone(pid)
        launcher.kill()
        until(lambda: gone(pid), "the child of the killed launcher is gone")


@WATCH
def test_a_child_is_not_started_if_its_launcher_is_already_gone(watch: bool) -> None:
    argv = [
        option if not option.startswith("--parent=") else f"--parent={os.getppid()}"
        for option in parent_death.command(["echo", "started"], watch=watch)
    ]
    done = run(argv)
    assert (done.returncode, done.stdout) == (1, "")


@WATCH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_child_receives_signals_and_returns_its_status(watch: bool, number: signal.Signals) -> None:
    # A handler would be called only after the sleep if the signal came just before it.
    code = (
        "import signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\n"
        "print('up', flush=True)\n"
        f"signal.sigwait([{int(number)}])\n"
        "sys.exit(9)"
    )
    argv = parent_death.command([sys.executable, "-c", code], watch=watch)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        assert child.wait() == 9


@WATCH
def test_a_child_passes_on_arguments_output_and_status(watch: bool, tmp_path: Path) -> None:
    (tmp_path / "subprocess.py").write_text("raise RuntimeError('imported from the working directory')")
    argv = parent_death.command(["sh", "-c", 'echo "$1" "$2"; exit 7', "sh", "two words", "--watch"], watch=watch)
    done = run(argv, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "two words --watch\n", "")


def test_the_supervisor_reports_a_signal_as_a_shell_does() -> None:
    assert run(parent_death.command(["sh", "-c", "kill -TERM $$"], watch=True)).returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(not parent_death.HAS_DEATH_SIGNAL, reason="only Linux has a parent-death signal")
def test_the_death_signal_leaves_no_process_between() -> None:
    with subprocess.Popen(parent_death.command(["sh", "-c", "echo $$"]), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert int(child.stdout.read()) == child.pid


@WATCH
def test_a_child_gives_way_to_others(watch: bool) -> None:
    code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    done = run(parent_death.command([sys.executable, "-c", code], watch=watch, niceness=3))
    assert (done.returncode, done.stdout) == (0, f"{min(19, own + 3)}\n")


@WATCH
def test_a_missing_program_is_named(watch: bool) -> None:
    done = run(parent_death.command(["/no/such/program"], watch=watch))
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr


def test_the_module_runs_by_name() -> None:
    done = run([sys.executable, "-P", "-m", "archipelago.ops.launch.parent_death", "echo", "hello"])
    assert (done.returncode, done.stdout) == (0, "hello\n")


@pytest.mark.parametrize("arguments", [[], ["--watch"], ["--unknown", "echo"]])
def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    done = run([sys.executable, "-P", "-m", "archipelago.ops.launch.parent_death", *arguments])
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")


def test_the_module_imports_nothing_slow() -> None:
    """It runs before every child, so each start pays for its imports."""
    code = (
        "import os, sys; before = set(sys.modules)\n"
        f"source = open({parent_death.__file__!r}).read()\n"
        "exec(compile(source, 'parent_death', 'exec'), {'__name__': 'parent_death'})\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = run([sys.executable, "-I", "-S", "-c", code])
    assert done.stdout.split() == ["__future__"], done.stderr
