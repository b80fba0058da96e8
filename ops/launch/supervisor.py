"""Child processes that are kept alive: each with a log file, tethered to this process, started again when it dies."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from archipelago.broker.observe.logs import message_of
from archipelago.ops.launch import parent_death

RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0)
LONG_SECONDS = 60.0
"""After a life as long as this, how often it died before does not matter."""
USER_ERROR = 2
USER_ERRORS_MAX = 3
"""A worker that ends with a user's error so often is not started again: fewer may be an outage of the Redis."""


ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NPROC": "1",
    "JAX_PLATFORMS": "cpu",
}
"""For a process that is to compute on one core and nothing else, XLA and numpy alike."""


def thread_environment(workers: int) -> dict[str, str]:
    """Threads of each of so many workers that share this machine's cores."""
    threads = max(1, (os.cpu_count() or 1) // max(1, workers))
    flags = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'} intra_op_parallelism_threads={threads}"
    return {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "OMP_NUM_THREADS": str(threads),
        # Several islands may share one accelerator: none takes its whole memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


@dataclass
class Child:
    """One process by name. `done` once it ended as it should; `failed` holds why it cannot go on."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    restarts: int = 0
    done: bool = False
    failed: str = ""
    process: subprocess.Popen[bytes] | None = None
    stand_in: Callable[[Child], bool] | None = None
    """gives it the process of a standby, if one is ready"""
    stood_in: bool = False
    """whether its newest process was a standby"""
    _again_at: float = field(default=0.0, repr=False)
    _began: float = field(default=math.inf, repr=False)

    def start(self) -> None:
        """Lets a standby become it, or starts it. Call from the main thread."""
        if not self._takes_stand_in():
            self.launch()

    def launch(self, *, piped: bool = False) -> None:
        """Starts it in a session of its own, so that Ctrl-C reaches the launcher alone.

        `piped`: its standard input and output are the launcher's; else nothing, and its log.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                parent_death.command([sys.executable, "-P", *self.argv]),
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                start_new_session=True,
            )

    def tend(self, now: float) -> str:
        """Looks after it; says what happened, if anything did."""
        if self.done or self.failed:
            return ""
        if self._again_at:
            if now >= self._again_at:
                self._start_again()
            return ""
        if self.process is None or (status := self.process.poll()) is None:
            return ""
        if status == 0:
            self.done = True
            return f"{self.name} is done"
        if now - self._began >= LONG_SECONDS:
            self.restarts = 0
        if status == USER_ERROR and self.restarts >= USER_ERRORS_MAX:
            self.failed = self.last_words()
            return f"{self.name} cannot go on: {self.failed}"
        if not self.restarts and self._takes_stand_in():
            self.restarts += 1
            return f"{self.name} died ({_cause(status)}), and a standby takes its place; its log: {self.log}"
        pause = RESTART_SECONDS[min(self.restarts, len(RESTART_SECONDS) - 1)]
        self.start_later(now + pause)
        return f"{self.name} died ({_cause(status)}) and starts again in {pause:.0f} s; its log: {self.log}"

    def start_later(self, at: float) -> None:
        """Starts it when it is tended at that time or later."""
        self._again_at = at

    def _start_again(self) -> None:
        self._again_at = 0.0
        self.restarts += 1
        self.start()

    def _takes_stand_in(self) -> bool:
        self._began = time.monotonic()
        self.stood_in = self.stand_in is not None and self.stand_in(self)
        return self.stood_in

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL once `seconds` have passed."""
        self.signal(signal.SIGTERM)
        self.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        """Passes a signal on, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Waits for its end, and brings it about once `seconds` have passed."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self) -> str:
        """What the last line of its log says."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return message_of(lines[-1]) if lines else ""


def stop_all(children: Sequence[Child], seconds: float) -> None:
    """SIGTERM to all at once, then waits for each until `seconds` have passed in all."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(deadline - time.monotonic())


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
