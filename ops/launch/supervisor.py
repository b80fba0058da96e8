"""Child processes that are restarted when they die. Each has a log file and ends with this process.

A standby is a child that has loaded and compiled an island's programs. It takes the place of an island that dies.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.machine import usable_cores
from archipelago.broker.observe.logs import message_of
from archipelago.broker.process import OUTAGE, REPLACED, USER_ERROR
from archipelago.ops.launch import parent_death

RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0)
#: A child that has lived for longer than this is treated as if it had never died.
LONG_SECONDS = 60.0
#: A child that fails this often in a row, each time within LONG_SECONDS of its start, is not restarted.
FAILURES_MAX = 5
#: Lines of a log that explain a failure.
LAST_LINES = 5
#: The signals of a program that crashed. Others come from outside.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})

#: Islands that compute on the processor give way to the merger and to Redis, which take little time and for which all
#: islands wait. With accelerators the merger gives way: its spectra must not delay the threads that feed a device.
NICENESS = 5
ISLAND = ("-m", "archipelago.islands")
STANDBYS_MAX = 64
STANDBYS_REMEDY = f"Choose 0 to {STANDBYS_MAX}; one is usually enough."
#: Pause before the next standby is loaded, so that the island that has just joined can use the core.
REPLACED_SECONDS = 1.0

#: The environment of a process that computes on one core only, in XLA and in numpy.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


def thread_environment(workers: int) -> dict[str, str]:
    """Return the environment that gives each of `workers` workers its share of this machine's cores.

    XLA obeys NPROC, which unlike XLA_FLAGS is no part of the key by which JAX finds a program that was compiled before.
    """
    threads = str(max(1, usable_cores() // max(1, workers)))
    return {"NPROC": threads, "OMP_NUM_THREADS": threads}


def island_name(number: int) -> str:
    """Return the name of an island on this machine."""
    return f"island-{number}"


@dataclass
class Child:
    """One process.

    Attributes:
        name: Its name in messages.
        environment: Variables that are added to this process's own.
        restarts: Restarts, the next one included, since it last lived for `LONG_SECONDS`.
        done: Whether it ended with status 0.
        failures: How often it has failed by itself since it last lived for `LONG_SECONDS`.
        failed: Why it cannot continue; empty if it can.
        is_fatal: Whether that is a mistake of the user or a failure at each start, and not the work of another process.
        process: The running process, or the last one.
        stand_in: Tries to give this child the process of a standby, and returns whether it did.
        stood_in: Whether the newest process was a standby.
        niceness: How much it gives way to others for a processor (`nice`).
        program: The program: our interpreter, which imports no packages from the working directory.
        folder: The working directory; None for that of this process.
        is_piped: Whether its standard input and output are connected to this process. Otherwise output goes to the log.
        again_at: When the next `tend` starts it again; 0 while it runs.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    restarts: int = 0
    done: bool = False
    failures: int = 0
    failed: str = ""
    is_fatal: bool = False
    process: subprocess.Popen[bytes] | None = None
    stand_in: Callable[[Child], bool] | None = None
    stood_in: bool = False
    niceness: int = 0
    program: Sequence[str] = (sys.executable, "-P")
    folder: Path | None = None
    is_piped: bool = False
    again_at: float = 0.0
    _began: float = field(default=math.inf, repr=False)

    def start(self) -> None:
        """Let a standby take its place, or start a new process. Call this from the main thread."""
        self._began = time.monotonic()
        self.stood_in = self.stand_in is not None and self.stand_in(self)
        if not self.stood_in:
            self.launch()

    def launch(self) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only the launcher."""
        self.close_pipes()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                parent_death.command([*self.program, *self.argv], niceness=self.niceness),
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE if self.is_piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.is_piped else log,
                stderr=log,
                start_new_session=True,
            )

    def close_pipes(self) -> None:
        """Close what connects the process to this one."""
        for pipe in (self.process.stdin, self.process.stdout) if self.process else ():
            if pipe is not None:
                with suppress(OSError):  # Closing flushes, which fails if the process is dead.
                    pipe.close()

    def tend(self, now: float) -> str:
        """Restart the process if it has died. Return a message about that, or an empty string."""
        if self.done or self.failed:
            return ""
        if self.again_at:
            if now >= self.again_at:
                self.again_at = 0.0
                self.start()
            return ""
        if (status := self._poll()) is None:
            return ""
        if status == 0:
            self.done = True
            return f"{self.name} is done"
        if status == REPLACED:
            self.failed = self.last_words()
            return f"{self.name} leaves its name to another process and is not restarted; its log: {self.log}"
        if is_old := now - self._began >= LONG_SECONDS:
            self.restarts = self.failures = 0
        if (status > 0 and status != OUTAGE) or -status in _CRASHES:  # by itself, and not for an outage of Redis
            self.failures += 1
            if (status == USER_ERROR and not is_old) or self.failures >= FAILURES_MAX:
                self.failed, self.is_fatal = self.last_words() or _cause(status), True
                return f"{self.name} cannot continue: {self.failed}"
        self.restarts += 1
        cause = ": ".join(filter(None, (_cause(status), self.last_words() if status > 0 else "")))
        if self.restarts == 1 and self.stand_in is not None and self.stand_in(self):
            self._began, self.stood_in = time.monotonic(), True
            return f"{self.name} died ({cause}), a standby takes its place; its log: {self.log}"
        pause = RESTART_SECONDS[min(self.restarts, len(RESTART_SECONDS)) - 1]
        self.again_at = now + pause
        return f"{self.name} died ({cause}) and restarts in {pause:.0f} s; its log: {self.log}"

    @property
    def pid(self) -> int:
        """The process ID of the newest process."""
        assert self.process is not None  # noqa: S101
        return self.process.pid

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self._poll() is None

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL once `seconds` have passed."""
        self.signal(signal.SIGTERM)
        self.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.alive():
            self.process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, and kill it after `seconds`. Kill all processes that it has left behind."""
        if self.process is None or self.process.returncode is not None:  # its number may be another's by now
            return
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._kill_group()
            self.process.wait()
        self._kill_group()  # a data loader's processes may outlive the process that started them

    def _poll(self) -> int | None:
        """Return the status of a process that has ended, else None. Kill at once what it has left behind."""
        if self.process is None:
            return None
        if self.process.returncode is None and self.process.poll() is not None:
            self._kill_group()
        return self.process.returncode

    def _kill_group(self) -> None:
        """Kill all processes of the session that the process leads."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):  # none is left; macOS says the latter of zombies
                os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the message in the last line of the log."""
        lines = self.last_lines(1)
        return message_of(lines[-1]) if lines else ""

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """Return the last lines of the log."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
        except OSError:
            return []


def stop_all(children: Sequence[Child], seconds: float) -> None:
    """Send SIGTERM to all children at once, and SIGKILL to those that still run after `seconds`."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(deadline - time.monotonic())


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


# -- standbys ---------------------------------------------------------------------------------------------------------


class IslandStandbys:
    """The standbys of one run. Each that becomes an island loads another process after a pause.

    `devices` are the variables that show each island its accelerators. A standby holds its programs on those of one
    island, and can replace only an island with the same ones. The default is that all islands have all.
    """

    def __init__(
        self,
        count: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
        devices: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._devices = [devices[number % len(devices)] if devices else {} for number in range(count)]
        self.all = [
            Child(
                f"standby-{number}", argv, {**environment, **own}, logs / f"standby-{number}.log",
                niceness=0 if own else NICENESS, is_piped=True,
            )
            for number, own in enumerate(self._devices)
        ]  # fmt: skip

    def start(self) -> None:
        """Begin to load all standbys. Call this from the main thread."""
        for standby in self.all:
            standby.start()

    def tend(self, now: float) -> list[str]:
        """Restart the standbys that have died, from the main thread. Return messages about that."""
        return [event for standby in self.all if (event := standby.tend(now))]

    def are_ready(self) -> bool:
        """Return whether all standbys wait for an assignment. Raise ArchipelagoError if one cannot be loaded."""
        for standby in self.all:
            if standby.failed or standby.done:
                raise ArchipelagoError(
                    f"{standby.name} cannot be loaded: {standby.last_words().removeprefix('error: ')}",
                    f"Its log is {standby.log}.",
                    code="up.worker-failed",
                )
        return all(_waits(standby) for standby in self.all)

    def stand_in(self, island: Child) -> bool:
        """Give the island the process of a standby that is ready. Return False if none is."""
        from archipelago.islands.main import Assignment

        assignment = Assignment(tuple(island.argv[len(ISLAND) :]), island.environment, str(island.log.absolute()))
        for standby, devices in zip(self.all, self._devices, strict=True):
            has_devices = all(island.environment.get(name) == value for name, value in devices.items())
            process = standby.process
            if not has_devices or process is None or process.stdin is None or not _waits(standby):
                continue
            try:
                process.stdin.write(assignment.line())
                process.stdin.flush()
            except OSError:
                continue  # it has just died
            standby.close_pipes()
            island.process, standby.process = process, None
            standby.restarts = standby.failures = 0  # It could be loaded, so earlier failures do not count.
            standby.again_at = time.monotonic() + REPLACED_SECONDS
            return True
        return False

    def end(self) -> None:
        """Kill the standbys that have not become islands. They have no state that could be lost."""
        for standby in self.all:
            standby.stop(0.0)
            standby.close_pipes()


def _waits(standby: Child) -> bool:
    """Return whether a standby waits for an assignment. It writes nothing else to its output."""
    output = standby.process.stdout if standby.process is not None and standby.alive() else None
    return output is not None and bool(select.select([output], [], [], 0.0)[0])
