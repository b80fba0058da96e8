"""What measurements of processes need: a process behind a pipe, its peak of memory, its cores.

Memory is as Linux counts it: what of a process lies in the machine's memory, its file pages among it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Child:
    """A process that works until this one closes its pipe."""

    pipe: Connection
    pid: int

    def says(self, seconds: float | None = None) -> Any:
        """What it says next; None where it says nothing for so long. Raises BrokerError when it ends instead."""
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else None
        except (EOFError, ConnectionError):
            raise BrokerError("a process of the measurement failed", "See what it wrote above.") from None


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """A process that runs `work(pipe, *arguments)` for as long as this lasts, and is killed then."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_work, args=(work, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(ours, process.pid or 0)
    finally:
        process.kill()
        process.join()


def _work(work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        work(pipe, *arguments)
    except ArchipelagoError as error:
        sys.stderr.write(f"error: {error}\n")


def require_linux() -> None:
    """Raises ConfigError where memory cannot be read."""
    if sys.platform != "linux":
        raise ConfigError("this measurement reads memory from /proc, which only Linux has", "Run it there.")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had since it began, or since `forget_peak`."""
    return _kibibytes(Path(f"/proc/{pid}/status"), "VmHWM") << 10


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all its threads since it began, to the clock tick (10 ms on most machines)."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        raise BrokerError(f"process {pid} is not there", "Has it ended? See what it wrote above.") from None
    user, system = told.rpartition(")")[2].split()[11:13]  # after its name, which may hold anything
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """What the machine could still give, without swapping."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable") << 10


def _kibibytes(path: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        found = None
    if found is None:
        raise BrokerError(f"{path} does not say {name}", "Has the process ended? See what it wrote above.")
    return int(found[1])


def forget_peak() -> None:
    """Lets this process's peak begin anew, from what it has now; hands freed memory back first.

    What a compiler leaves in the allocator would hide what comes after.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # musl has none
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def halves_of_the_cores() -> tuple[set[int], set[int]]:
    """Two sets of cores, one for what is measured and one for what it works with; both all of them if there is one."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[half:]), set(cores[:half])) if half else (set(cores), set(cores))


def keep_to(cores: set[int], pid: int = 0) -> None:
    """Lets a process (by default this one) run on these cores only. For its threads of later on, too."""
    os.sched_setaffinity(pid, cores)
