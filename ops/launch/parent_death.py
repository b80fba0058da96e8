"""Starts a program that dies with its launcher, even when the launcher is killed and can clean up nothing.

    python -m archipelago.ops.launch.parent_death PROGRAM ARGS...

On Linux the kernel does it: this process asks for SIGKILL at its parent's death and becomes PROGRAM; the request
survives exec. Elsewhere, and with `--watch`, it stays as a small supervisor that looks for its parent every quarter of
a second, passes SIGTERM and SIGINT on, and ends with the program's status.

Linux means the *thread* that started the child, not its process: launchers start children from their main thread, or
the child dies when that thread ends. What PROGRAM itself starts is not tethered.

This runs before every child of a launcher, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing `typing` for this would cost as much as all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence

HAS_DEATH_SIGNAL = sys.platform == "linux"
POLL_SECONDS = 0.25

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9  # `signal` takes as long to import as `ctypes`
_ORPHANED, _NOT_EXECUTABLE, _NOT_FOUND = 1, 126, 127  # the last two as a shell says it


def command(argv: Sequence[str], *, watch: bool | None = None) -> list[str]:
    """The command line that runs `argv` tethered to the calling process, which must also be the one that starts it.

    Works from any folder and any kind of install: it names this file, and leaves out the site packages that this file
    does not need. `watch` forces the supervisor or the death signal; None takes what the system has.
    """
    supervised = not HAS_DEATH_SIGNAL if watch is None else watch
    options = [f"--parent={os.getpid()}", *(["--watch"] if supervised else [])]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, *argv]  # noqa: PTH100 pathlib is slow to import


def become(parent: int, argv: Sequence[str]) -> None:
    """Turns this process into the program, with a death signal set. Returns only if `parent` is gone already."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses a parent-death signal")
    # A parent that died before the call above sends nothing any more; this process has another parent by now.
    if os.getppid() == parent:
        os.execvp(argv[0], list(argv))  # noqa: S606


def watch(parent: int, argv: Sequence[str]) -> int:
    """Runs the program as a child until it ends or `parent` is gone; returns the exit status."""
    import select
    import signal
    import subprocess

    # Signals become bytes in a pipe: none is lost before the child exists, and the wait below ends at each of them.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    if os.getppid() != parent:
        return _ORPHANED
    child = subprocess.Popen(argv)
    while (status := child.poll()) is None:
        ready, _, _ = select.select([reader], [], [], POLL_SECONDS)
        for received in os.read(reader, 64) if ready else b"":
            if received != signal.SIGCHLD:
                child.send_signal(received)
        if os.getppid() != parent:
            child.kill()
    return status if status >= 0 else 128 - status


def main(arguments: Sequence[str]) -> int:
    """Reads `[--parent=PID] [--watch] PROGRAM ARGS...` and runs it."""
    rest = list(arguments)
    parent, supervised = os.getppid(), not HAS_DEATH_SIGNAL
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        if name == "--parent":
            parent = int(value)
        elif name == "--watch":
            supervised = True
        else:
            rest.clear()
    if not rest:
        raise SystemExit(
            "usage: python -m archipelago.ops.launch.parent_death [--parent=PID] [--watch] PROGRAM ARGS..."
        )
    try:
        if supervised:
            return watch(parent, rest)
        become(parent, rest)
    except OSError as error:
        sys.stderr.write(f"cannot start {rest[0]}: {error}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    return _ORPHANED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
