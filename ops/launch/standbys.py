"""Standbys: processes that have loaded and compiled an island's programs, and replace an island that dies."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.islands.main import Assignment
from archipelago.ops.launch.supervisor import ISLAND_NICENESS, Child

ISLAND = ("-m", "archipelago.islands")
STANDBYS_MAX = 64
#: Pause before the next standby is loaded, so that the island that has just joined can use the core.
REPLACED_SECONDS = 1.0


def require_standbys(count: int) -> None:
    """Raise ConfigError unless the number of standbys is in range."""
    if not 0 <= count <= STANDBYS_MAX:
        raise ConfigError(
            f"--standbys cannot be {count}",
            f"Choose 0 to {STANDBYS_MAX}; one is usually enough.",
            code="config.value",
        )


@dataclass
class Standby(Child):
    """One standby. When its process becomes an island, it loads another process after a pause.

    Attributes:
        devices: The variables that show it its accelerators.
    """

    devices: Mapping[str, str] = field(default_factory=dict)
    niceness: int = ISLAND_NICENESS

    def launch(self, *, piped: bool = True) -> None:
        """Begin to load a process, which is connected to this one. Call this from the main thread."""
        self._close_pipes()
        super().launch(piped=piped)

    def is_ready(self) -> bool:
        """Return whether the process waits for an assignment. It writes nothing else to its output."""
        output = self.process.stdout if self.process is not None and self.alive() else None
        return output is not None and bool(select.select([output], [], [], 0.0)[0])

    def become(self, assignment: Assignment) -> subprocess.Popen[bytes] | None:
        """Turn the process into that island's and return it; None if it has just died."""
        process = self.process
        if process is None or process.stdin is None:
            return None
        try:
            process.stdin.write(assignment.line())
            process.stdin.flush()
        except OSError:
            return None
        self._close_pipes()
        self.process = None
        self.restarts = self.failures = 0  # It could be loaded, so earlier failures do not count.
        self.start_later(time.monotonic() + REPLACED_SECONDS)
        return process

    def end(self) -> None:
        """Kill the process. It has no state that could be lost."""
        self.stop(0.0)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout) if self.process else ():
            if pipe is not None:
                with suppress(OSError):  # Closing flushes, which fails if the process is dead.
                    pipe.close()


class Standbys:
    """The standbys of one run. Call `tend` regularly, from the main thread."""

    def __init__(
        self,
        count: int,
        flags: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
        devices: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Note what to start.

        Args:
            count: The number of standbys.
            flags: Options of `archipelago island`, without a name or a folder.
            environment: Variables of all standbys.
            logs: The folder of their logs.
            devices: The variables that show each island its accelerators. A standby holds its programs on those of one
                island, and can replace only an island with the same ones. The default is that all islands have all.
        """
        self.all = []
        for number in range(count):
            name, own = f"standby-{number}", devices[number % len(devices)] if devices else {}
            argv = [*ISLAND, "--standby", *flags]
            self.all.append(Standby(name, argv, {**environment, **own}, logs / f"{name}.log", devices=own))

    def start(self) -> None:
        """Begin to load all standbys."""
        for standby in self.all:
            standby.start()

    def tend(self, now: float) -> list[str]:
        """Restart the standbys that have died. Return messages about that."""
        return [event for standby in self.all if (event := standby.tend(now))]

    def are_ready(self) -> bool:
        """Return whether all standbys wait for an assignment. Raise ArchipelagoError if one cannot be loaded."""
        for standby in self.all:
            if standby.failed or standby.done:
                raise ArchipelagoError(
                    f"{standby.name} cannot be loaded: {standby.last_words().removeprefix('error: ')}",
                    f"Its log is {standby.log}.",
                    code="up.standby-failed",
                )
        return all(standby.is_ready() for standby in self.all)

    def stand_in(self, island: Child) -> bool:
        """Give the island the process of a standby that is ready. Return False if none is."""
        arguments = island.argv[len(ISLAND) :]
        assignment = Assignment(tuple(arguments), island.environment, str(island.log.absolute()))
        for standby in self.all:
            has_devices = all(island.environment.get(name) == value for name, value in standby.devices.items())
            if has_devices and standby.is_ready() and (process := standby.become(assignment)) is not None:
                island.process = process
                return True
        return False

    def end(self) -> None:
        """End all standbys that have not become islands."""
        for standby in self.all:
            standby.end()
