"""Ctrl-C ends every verb with status 130 and without a traceback, also while its code is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from archipelago.broker.process import guarded, interruptible, stop_on_signals
from archipelago.ops.launch import up

#: Nothing answers there, so that verbs that wait for a Redis wait.
NOWHERE = "redis://127.0.0.1:1"
COMMAND = "import sys; from archipelago.ops.cli import main; sys.exit(main())"


def interrupted_after(module: str, args: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command, send it SIGINT once it has loaded that module, and return its status and standard error."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *args],
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1", "ARCHIPELAGO_DATA": str(folder / "data")},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        lines = []
        for line in process.stderr:  # one for each module, when it is loaded
            lines.append(line)
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"{module} is not loaded by {args}: {''.join(lines)[-500:]}")
        rest = process.stderr.read()
    return process.returncode, "".join(line for line in rest.splitlines(True) if not line.startswith("import time:"))


#: A module and a command that loads it. The command is interrupted when it has loaded the module.
MOMENTS = [
    ("archipelago.broker.errors", ["status", NOWHERE]),
    ("archipelago.ops.commands", ["generate", NOWHERE, "a"]),
    pytest.param("pydantic", ["up"], marks=pytest.mark.full),
]


@pytest.mark.parametrize(("module", "args"), MOMENTS)
def test_ctrl_c_during_the_start_leaves_no_traceback(module: str, args: list[str], tmp_path: Path) -> None:
    status, said = interrupted_after(module, args, tmp_path)
    assert status == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "interrupted"


def test_sigterm_ends_a_verb_as_ctrl_c_does_and_a_second_one_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        interruptible()
        signal.raise_signal(signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert guarded(main) == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupted_library_may_raise_another_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Extension modules turn KeyboardInterrupt into ImportError when they are interrupted while they load."""

    def main() -> int:
        interruptible()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
        return 0

    def failed() -> int:
        raise ImportError("not ours")

    assert guarded(main) == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(ImportError):
        guarded(failed)


def test_ctrl_c_that_a_library_ignores_counts_once_signals_are_handled() -> None:
    """Python drops exceptions that callbacks raise, such as those of the garbage collector while JAX is loaded."""

    def main() -> int:
        interruptible()
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stopped, again = stop_on_signals(), stop_on_signals()
        return 7 if stopped() and not again() else 0

    assert guarded(main) == 7


def test_a_process_that_hangs_after_a_signal_ends_and_says_where() -> None:
    hangs = (
        "import threading; from archipelago.broker.process import stop_on_signals; stop_on_signals(0.1); "
        "print(0, flush=True); threading.Event().wait(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, said = process.communicate()
    assert process.returncode == 1
    assert "threading.py" in said


def test_up_that_was_interrupted_while_it_was_loaded_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "stop_on_signals", lambda seconds: lambda: True)
    monkeypatch.setattr(up, "start_server", lambda *args, **named: pytest.fail("a server was started"))
    assert guarded(lambda: up.main(up.UpOptions(folder=tmp_path / "runs"))) == 130
    assert not (tmp_path / "runs").exists()


DROPPED = """
import os, signal, sys, time
from archipelago.broker.process import guarded, interruptible

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass

def main():
    Dropping()
    time.sleep(20.0)
    return 0

interruptible()
sys.exit(guarded(main))
"""


def test_ctrl_c_that_python_drops_ends_a_verb_all_the_same() -> None:
    command = [sys.executable, "-P", "-c", DROPPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


INTERRUPTED = """
import atexit, sys
from archipelago.ops import cli, commands

def run(*_):
    print("so far")
    atexit.register(print, "the interpreter's end")
    raise KeyboardInterrupt

commands.run = run
sys.exit(cli.main())
"""


def test_an_interrupted_verb_does_not_wait_for_what_xla_compiles() -> None:
    """The interpreter's end crashes while XLA compiles on threads of its own: 139 in place of 130."""
    command = [sys.executable, "-P", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "so far\n", "interrupted\n")
