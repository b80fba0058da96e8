"""Children end with their launcher, by the kernel's death signal or by a supervisor process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.ops.launch import parent_death
from tests.conftest import Until, gone

pytestmark = pytest.mark.processes

#: Both ways: by a supervisor process, and by the death signal, which only Linux has.
WAYS = (True, False) if parent_death.HAS_DEATH_SIGNAL else (True,)

LAUNCHER = """
import subprocess, sys
from archipelago.ops.launch import parent_death
parent_death.HAS_DEATH_SIGNAL = sys.argv[1] == "False"
argv = parent_death.command(["sh", "-c", "echo $$; exec sleep 600"])
subprocess.Popen(argv, start_new_session=True).wait()
"""


def command(argv: list[str], watch: bool, niceness: int = 0) -> list[str]:
    """Return the command line on a system with a death signal, or on one without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parent_death, "HAS_DEATH_SIGNAL", not watch)
        return parent_death.command(argv, niceness=niceness)


def run(argv: list[str], *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd)


def test_a_child_dies_with_a_killed_launcher(until: Until) -> None:
    for watch in WAYS:
        argv = [sys.executable, "-P", "-c", LAUNCHER, str(watch)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            pid = int(launcher.stdout.readline())
            assert not gone(pid)
            launcher.kill()
            until(lambda pid=pid: gone(pid), f"the child of the killed launcher is gone (watch: {watch})")


def test_a_child_is_not_started_if_its_launcher_is_already_gone() -> None:
    for watch in WAYS:
        argv = command(["echo", "started"], watch)
        done = run([str(os.getppid()) if word == str(os.getpid()) else word for word in argv])
        assert (done.returncode, done.stdout) == (1, ""), watch


def test_a_child_receives_signals_and_returns_its_status() -> None:
    # A handler would be called only after the sleep if the signal came just before it.
    code = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [{0}])\n"
        "print('up', flush=True)\n"
        "signal.sigwait([{0}])\n"
        "sys.exit(9)"
    )
    for watch, number in itertools.product(WAYS, (signal.SIGTERM, signal.SIGINT)):
        argv = command([sys.executable, "-c", code.format(int(number))], watch)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            child.send_signal(number)
            assert child.wait() == 9, (watch, number)


def test_a_child_passes_on_arguments_output_status_and_niceness(tmp_path: Path) -> None:
    (tmp_path / "subprocess.py").write_text("raise RuntimeError('imported from the working directory')")
    echo = ["sh", "-c", 'echo "$1" "$2"; nice; exit 7', "sh", "two words", "--watch"]
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    for watch in WAYS:
        done = run(command(echo, watch, niceness=3), cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (7, f"two words --watch\n{niceness}\n", ""), watch
        missing = run(command(["/no/such/program"], watch))
        assert (missing.returncode, "/no/such/program" in missing.stderr) == (127, True), watch


def test_the_supervisor_reports_a_signal_as_a_shell_does() -> None:
    assert run(command(["sh", "-c", "kill -TERM $$"], watch=True)).returncode == 128 + signal.SIGTERM


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
