"""A process that has loaded JAX or PyTorch, and forks commands and scripts. Short ones spend most time on loading.

One goes on there as if it had loaded everything itself: it gets the signals, and ends as the interpreter does. What a
launcher starts is forked, too, and is its child as always (`launching`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module, reload
from pathlib import Path
from typing import IO, Any

from archipelago.broker import failpoints
from archipelago.ops.launch import parent_death

#: What each kind of these processes loads.
KINDS = {
    "trainers": (
        "archipelago.transformers",
        "archipelago.lightning",
        "archipelago.accelerate",
        "transformers.trainer",
    ),
    "commands": (
        "archipelago.ops.launch.up",
        "archipelago.islands.prepared",
        "archipelago.islands.models.registry",
        "archipelago.merger.main",
        "archipelago.merger.service",
        "archipelago.merger.shards",
        "archipelago.merger.spectra_trial",
        "orbax.checkpoint",
    ),
}
#: Linux gives a process that asks so the orphans among its descendants.
PR_SET_CHILD_SUBREAPER = 36
#: Sends a line to such a process, and returns its answer (`forked`).
Forks = Callable[..., Any]


def offer(kind: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the one process of this kind, which listens in a folder. It ends with this process at the latest."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    given = {**os.environ, **one_thread, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / kind))
        listener.listen()
        command = parent_death.command([sys.executable, "-P", __file__, kind])
        return subprocess.Popen(command, stdin=listener.fileno(), env=given)


@contextmanager
def forking(kind: str, folder: Path) -> Iterator[Forks]:
    """Ask the process of this kind, which listens in a folder."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / kind))
        with connection.makefile("rw") as lines:

            def ask(*about: object) -> Any:
                lines.write(json.dumps(about) + "\n")
                lines.flush()
                return json.loads(lines.readline())

            yield ask


class Forked:
    """A process that was forked, with what is used of `subprocess.Popen`.

    Args:
        wait: Returns its exit status, as `os.waitpid` does with these options; None while it runs.
        out: The file of what it prints.
    """

    stdin = stdout = None
    returncode: int | None = None

    def __init__(self, pid: int, wait: Callable[[int, int], int | None], out: Path, args: Sequence[str]) -> None:
        self.pid, self._wait, self._out, self.args = pid, wait, out, args

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._wait(self.pid, options)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self.poll(0)
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return status

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait until it has ended, and return what it has printed. The limit is that of the test."""
        self.wait()
        return self._out.read_text(), None


def start(forks: Forks, log: Path, environment: Mapping[str, str], *args: str) -> Forked:
    """Let a process be forked in the folder of its log, to which it writes its stderr."""
    log.touch()
    out = log.with_suffix(".out")
    pid = forks("start", str(log.parent), [str(out), str(log)], {**environment}, args)
    return Forked(pid, lambda *about: forks("wait", *about), out, args)


# -- in the processes that fork ----------------------------------------------------------------------------------------


def forked(modules: Sequence[str]) -> list[str]:
    """Load the modules when the first caller connects, and fork a process for each. It answers the caller's lines.

    For a line `["start", FOLDER, LOGS, ENVIRONMENT, ARGS]` it forks a process, which returns ARGS here, and answers
    with its process id. The answer to `["wait", PROCESS, OPTIONS]` is the status of such a process (`Forked`).
    """
    listener = socket.socket(fileno=os.dup(0))
    caller, _ = listener.accept()
    gc.disable()  # until everything is loaded
    for module in modules:
        import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # processes collect their garbage more quickly, and leave these objects in the memory that they share
    while os.fork():
        caller, _ = listener.accept()
    for descriptor in (0, 1):
        os.dup2(caller.fileno(), descriptor)
    listener.close()
    caller.close()
    for verb, *about in map(json.loads, sys.stdin):
        if verb == "wait":
            answer = status_of(*about)
        elif not (answer := os.fork()):
            return begin(*about)
        print(json.dumps(answer), flush=True)  # noqa: T201
    sys.exit()


def status_of(process: int, options: int) -> int | None:
    """Return the exit status of a child; None while it runs."""
    ended, status = os.waitpid(process, options)
    return os.waitstatus_to_exitcode(status) if ended else None


def begin(folder: str, logs: Sequence[str], environment: Mapping[str, str], args: list[str]) -> list[str]:
    """Give a process that was forked its folder, files and variables. Return its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    reload(failpoints)  # it reads the environment when it is loaded
    os.chdir(folder)
    for descriptor, path in enumerate((os.devnull, *logs)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    return args


def launching(args: list[str]) -> list[str]:
    """Go on as a launcher whose children are forked, and return the arguments of the launcher and of each child.

    A launcher uses JAX, whose threads a fork would lack. So another process forks them, which the launcher forks now.
    It forks each one twice. The first fork ends at once, so the kernel makes the launcher the parent of the second one.
    """
    launcher, asked = os.getpid(), socket.socketpair()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if helper := os.fork():
        lines = asked[0].makefile("rw")
        atexit.register(os.waitpid, helper, 0)
        atexit.register(os.kill, helper, signal.SIGKILL)  # which comes before the other
        subprocess.Popen = partial(_popen, subprocess.Popen, lines)  # type: ignore[assignment,misc]
        return args
    parent_death.ends_with(launcher)
    asked[0].close()
    for niceness, *about in map(json.loads, asked[1].makefile()):
        if first := os.fork():
            os.waitpid(first, 0)
            continue
        first = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        parent_death.give_way(niceness)
        while os.getppid() == first:
            time.sleep(0.001)
        if not parent_death.ends_with(launcher):
            os._exit(1)
        asked[1].sendall(b"%d\n" % os.getpid())
        asked[1].close()
        return begin(*about)
    sys.exit()


def _popen(started: Callable[..., Any], lines: IO[str], args: Sequence[str], **options: Any) -> Any:
    """Start a child of a launcher: by a fork if it is a module or script of Python without pipes."""
    at = [*args].index("signal") if "signal" in args else 0  # the end of `parent_death.command`
    if not at or args[at + 1] != sys.executable or options["stdin"] != subprocess.DEVNULL:
        return started(args, **options)
    words, log = [word for word in args[at + 2 :] if word != "-P"], options["stdout"].name
    about = (int(args[at - 1]), str(options["cwd"] or Path.cwd()), [log, log], options["env"], words)
    lines.write(json.dumps(about) + "\n")
    lines.flush()
    return Forked(int(lines.readline()), status_of, Path(log), words)


if __name__ == "__main__":
    sys.argv[:] = forked(KINDS[sys.argv[1]])
    if parent_death.HAS_DEATH_SIGNAL and sys.argv[1:3] in (["archipelago", "up"], ["archipelago", "chaos"]):
        sys.argv[:] = launching(sys.argv[:])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
