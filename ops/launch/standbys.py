"""Standbys: processes that have loaded all that an island runs, and take the place of whichever island dies."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.islands.standby import READY, Assignment
from archipelago.ops.launch.supervisor import Child

ISLAND = ("-m", "archipelago.islands")
STANDBYS_MAX = 64
REPLACED_SECONDS = 1.0
"""before another is loaded: whoever has just joined may need the core"""


def require_standbys(count: int) -> None:
    """Raises ConfigError for a number of them that cannot be."""
    if not 0 <= count <= STANDBYS_MAX:
        raise ConfigError(f"--standbys cannot be {count}", f"Choose 0 to {STANDBYS_MAX}; one is enough for most.")


@dataclass
class Standby(Child):
    """One of them. Once its process is an island's there is none, until the next is loaded."""

    _said: bytes = field(default=b"", repr=False)

    def start(self) -> None:
        """Begins to load another. Call from the main thread."""
        self._hang_up()
        self.launch(piped=True)
        self._said = b""

    def tend(self, now: float) -> str:
        """Looks after it; says what happened, if anything did."""
        if self.is_ready():
            self.restarts = 0  # it can be loaded: a later failure is another matter
        return super().tend(now)

    def is_ready(self) -> bool:
        """Whether it waits for an assignment."""
        process = self.process
        if process is None or process.poll() is not None or process.stdout is None:
            return False
        while READY not in self._said and select.select([process.stdout], [], [], 0.0)[0]:
            more = os.read(process.stdout.fileno(), 1 << 12)
            if not more:
                return False
            self._said = (self._said + more)[-(1 << 13) :]
        return READY in self._said

    def become(self, assigned: Assignment) -> subprocess.Popen[bytes] | None:
        """Its process, which is that island's from now on; None where it has died just now."""
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(assigned.line())
            process.stdin.flush()
        except OSError:
            return None
        self._hang_up()
        self.process = None
        self.start_later(time.monotonic() + REPLACED_SECONDS)
        return process

    def end(self) -> None:
        """At once: it has nothing to lose."""
        self.stop(0.0)
        self._hang_up()

    def _hang_up(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout) if self.process else ():
            if pipe is not None:
                with suppress(OSError):  # what a dead one was told cannot be flushed
                    pipe.close()


class Standbys:
    """So many of them for one run. `tend` again and again, from the main thread."""

    def __init__(self, count: int, flags: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        """`flags`: of an island without a name or a folder."""
        self.all = [
            Standby(name, [*ISLAND, "--standby", *flags], environment, logs / f"{name}.log")
            for name in (f"standby-{number}" for number in range(count))
        ]

    def start(self) -> None:
        """Begins to load all of them."""
        for standby in self.all:
            standby.start()

    def tend(self, now: float) -> list[str]:
        """Looks after them; says what happened, if anything did."""
        return [news for standby in self.all if (news := standby.tend(now))]

    def are_ready(self) -> bool:
        """Whether each of them waits for an assignment. Raises ArchipelagoError for one that cannot be had."""
        for standby in self.all:
            if standby.failed or standby.done:
                raise ArchipelagoError(
                    f"{standby.name} cannot be had: {standby.last_words().removeprefix('error: ')}",
                    f"Its log is {standby.log}.",
                )
        return all(standby.is_ready() for standby in self.all)

    def stand_in(self, island: Child) -> bool:
        """Gives the island the process of one that is ready; False where none is."""
        arguments = island.argv[len(ISLAND) :]
        assigned = Assignment(tuple(arguments), island.environment, str(island.log.absolute()))
        for standby in self.all:
            if standby.is_ready() and (process := standby.become(assigned)) is not None:
                island.process = process
                return True
        return False

    def end(self) -> None:
        """All of them that are no islands."""
        for standby in self.all:
            standby.end()
