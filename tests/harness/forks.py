"""A process that has loaded JAX or PyTorch, and forks commands and scripts. Short ones spend most time on loading.

One goes on there as if it had loaded everything itself: it gets the signals, and ends as the interpreter does.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, reload
from pathlib import Path
from typing import Any

from archipelago.broker import failpoints

#: What each kind of these processes has loaded.
TRAINERS = ("archipelago.transformers", "archipelago.lightning", "archipelago.accelerate", "transformers.trainer")
COMMANDS = (
    "archipelago.ops.launch.up",
    "archipelago.islands.prepared",
    "archipelago.islands.models.registry",
    "archipelago.merger.main",
    "archipelago.merger.service",
    "archipelago.merger.shards",
    "archipelago.merger.xla_spectra",
    "orbax.checkpoint",
)
#: Sends a line to that process, and returns its answer (`forked`).
Forks = Callable[..., Any]


@contextmanager
def forking(*modules: str, **environment: str) -> Iterator[Forks]:
    """Start a process that loads these modules, with these variables. It ends once all that it forked is waited for."""
    root = str(Path(__file__).parents[2])
    given = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": root, **environment}
    command, pipe = [sys.executable, "-P", __file__, *modules], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=given) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(*about: object) -> Any:
            asked.write(json.dumps(about) + "\n")
            return json.loads(answers.readline())

        yield ask


class Forked:
    """A process that was forked, with what tests use of `subprocess.Popen`. What it writes to stderr goes to `log`."""

    stdout = None
    returncode: int | None = None

    def __init__(self, forks: Forks, log: Path, environment: dict[str, str], *args: str) -> None:
        self._forks, self._out, self.args = forks, log.with_suffix(".out"), args
        log.touch()
        self.pid = forks("start", [str(self._out), str(log)], environment, args)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks("wait", self.pid, options)
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait until it has ended, and return what it has printed. The limit is that of the test."""
        self.wait()
        return self._out.read_text(), None


def forked(modules: Sequence[str]) -> list[str]:
    """Load the modules, fork a process for each line `["start", LOGS, ENVIRONMENT, ARGS]`, and return ARGS there.

    The answer is its process id; that to `["wait", PROCESS, OPTIONS]` is its exit status, null while it runs.
    """
    gc.disable()  # until everything is loaded
    for module in modules:
        import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # processes collect their garbage more quickly, and leave these objects in the memory that they share
    for verb, *about in map(json.loads, sys.stdin):
        if verb == "wait":
            ended, status = os.waitpid(*about)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            logs, environment, args = about
            os.environ.clear()
            os.environ.update(environment)
            reload(failpoints)  # it reads the environment when it is loaded
            os.chdir(Path(logs[0]).parent)
            for descriptor, path in enumerate((os.devnull, *logs)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
            return args  # type: ignore[no-any-return]
        print(json.dumps(answer), flush=True)  # noqa: T201
    sys.exit()


if __name__ == "__main__":
    sys.argv[:] = forked(sys.argv[1:])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
