"""Tools to measure processes: a child behind a pipe, its memory and processor time, and the cores it may use.

Memory is the resident set as Linux counts it, which includes file pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError

_SPAWN = multiprocessing.get_context("spawn")
POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Child:
    """A process that works until this one closes its pipe."""

    pipe: Connection
    pid: int

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next object that the child sends, or None after `seconds` of silence.

        Raises:
            BrokerError: The child has ended.
        """
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else None
        except (EOFError, ConnectionError):
            raise BrokerError(
                "a process of the measurement failed", "See its output above.", code="bench.process-failed"
            ) from None


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """Run `work(pipe, *arguments)` in a new process, and kill that process at the end of the block."""
    parent_end, child_end = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_work, args=(work, child_end, *arguments), daemon=True)
    process.start()
    child_end.close()
    try:
        yield Child(parent_end, process.pid or 0)
    finally:
        process.kill()
        process.join()


def _work(work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        work(pipe, *arguments)
    except ArchipelagoError as error:
        sys.stderr.write(f"error: {error}\n")


def wait_until(holds: Callable[[], bool], what: str, seconds: float, poll_seconds: float = POLL_SECONDS) -> None:
    """Poll until `holds()`. Raise BrokerError after `seconds`; its message names the awaited event, `what`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise BrokerError(
                f"no {what} within {seconds:g} s", "Check whether the machine is very busy.", code="bench.timeout"
            )
        time.sleep(poll_seconds)


def require_linux() -> None:
    """Raise ConfigError on systems without /proc."""
    if sys.platform != "linux":
        raise ConfigError("this measurement reads /proc, which only Linux has", "Run it there.", code="bench.linux")


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had since it began, or since `forget_peak`."""
    return _kibibytes(Path(f"/proc/{pid}/status"), "VmHWM") << 10


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has now."""
    return _kibibytes(Path(f"/proc/{pid}/status"), "VmRSS") << 10


@dataclass(frozen=True)
class Taken:
    """What a process took from the machine, since it began or between two moments.

    Attributes:
        own_seconds: Processor time of all threads in the program itself.
        kernel_seconds: Their processor time in the kernel, for sockets and new memory.
        new_bytes: Memory that the kernel gave it, also again after it was returned.
    """

    own_seconds: float = 0.0
    kernel_seconds: float = 0.0
    new_bytes: int = 0

    @property
    def seconds(self) -> float:
        """All processor time."""
        return self.own_seconds + self.kernel_seconds

    def __add__(self, other: Taken) -> Taken:
        return Taken(*(one + its for one, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Taken) -> Taken:
        return Taken(*(one - its for one, its in zip(astuple(self), astuple(other), strict=True)))


def taken_here() -> Taken:
    """Return what this process has taken."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return Taken(found.ru_utime, found.ru_stime, found.ru_minflt * resource.getpagesize())


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the clock tick (10 ms on most machines)."""
    return taken(pid).seconds


def taken(pid: int) -> Taken:
    """Return what a process has taken. Its time is exact to the clock tick (10 ms on most machines)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        raise BrokerError(f"process {pid} has ended", "See its output above.", code="bench.process-gone") from None
    fields = stat.rpartition(")")[2].split()  # They follow the name, which may hold any characters.
    faults, user, system = (int(fields[i]) for i in (7, 11, 12))
    tick = 1 / os.sysconf("SC_CLK_TCK")
    return Taken(user * tick, system * tick, faults * resource.getpagesize())


def available_bytes() -> int:
    """Return how much memory the machine can still give without swapping."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable") << 10


def _kibibytes(path: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        found = None
    if found is None:
        raise BrokerError(
            f"{path} does not have {name}", "Has the process ended? See its output above.", code="bench.process-gone"
        )
    return int(found[1])


def forget_peak() -> None:
    """Reset this process's peak of memory. Freed memory goes back to the system first.

    Otherwise the memory that a compiler leaves in the allocator would hide later allocations.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # The C library musl has no malloc_trim.
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def halves_of_the_cores() -> tuple[set[int], set[int]]:
    """Return two sets of cores: for the measured process, and for its peers. With one core, both hold it."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[half:]), set(cores[:half])) if half else (set(cores), set(cores))


def keep_to(cores: set[int], pid: int = 0) -> None:
    """Restrict a process (by default this one) and its future threads to these cores."""
    os.sched_setaffinity(pid, cores)
