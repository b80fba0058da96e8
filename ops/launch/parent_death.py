"""Start a program that ends with its launcher, even if the launcher is killed and cannot clean up.

On Linux the kernel does this: the process asks for SIGKILL at its parent's death and then becomes the program; the
request survives exec. On other systems the process stays as a supervisor. It checks every quarter of a second whether
its parent lives, passes on SIGTERM and SIGINT, and ends with the program's status.

For Linux the parent is the *thread* that started the child. A launcher must therefore start children from its main
thread, or they die when that thread ends. Processes that PROGRAM starts do not end with the launcher.

This module runs before every child of a launcher, so it imports almost nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # Importing `typing` would take as long as everything else here.
if TYPE_CHECKING:
    from collections.abc import Sequence

HAS_DEATH_SIGNAL = sys.platform == "linux"
POLL_SECONDS = 0.25

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9  # Importing `signal` takes as long as `ctypes`.
_ORPHANED, _NOT_EXECUTABLE, _NOT_FOUND = 1, 126, 127  # The last two are a shell's.


def command(argv: Sequence[str], *, niceness: int = 0) -> list[str]:
    """Return the command line that runs `argv` and ends it with the calling process, which must also start it.

    The command names this file and skips site packages, so it works from any folder and with any kind of install.

    Args:
        niceness: How much the program gives way to others for a processor, from 0 to 19, as with `nice`.
    """
    way = "signal" if HAS_DEATH_SIGNAL else "watch"
    own = [sys.executable, "-I", "-S", os.path.abspath(__file__)]  # noqa: PTH100 pathlib is slow to import
    return [*own, str(os.getpid()), str(niceness), way, *argv]


def give_way(niceness: int) -> None:
    os.nice(niceness)
    # Linux may compare whole sessions, each of which has a niceness of its own.
    try:
        with open("/proc/self/autogroup", "w", encoding="ascii") as group:  # noqa: PTH123 pathlib is slow to import
            group.write(str(niceness))
    except OSError:
        return


def ends_with(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends, and return whether that parent still lives."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses a parent-death signal")
    # If the parent died before the call above, there is no signal, and this process already has another parent.
    return os.getppid() == parent


def watch(parent: int, argv: Sequence[str]) -> int:
    """Run the program as a child until it ends or `parent` is gone. Return the exit status."""
    import select
    import signal
    import subprocess

    # Signals become bytes in a pipe. None is lost before the child exists, and each ends the wait below.
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
    parent, niceness, way, *rest = arguments
    if int(niceness):
        give_way(int(niceness))
    try:
        if way == "watch":
            return watch(int(parent), rest)
        if ends_with(int(parent)):
            os.execvp(rest[0], rest)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot start {rest[0]}: {error}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    return _ORPHANED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
