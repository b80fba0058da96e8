"""Tools to measure processes: a child behind a pipe, its memory, processor time and cores, and the time of functions.

Memory is the resident set as Linux counts it, which includes file pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

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

    def answer(self, seconds: float) -> Any:
        """Return the next object that the child sends. Raise BrokerError if none comes within that time."""
        answer = self.receive(seconds)
        if answer is None:
            raise BrokerError(
                f"a process of the measurement did not answer for {seconds:g} s",
                "See its output above. Check whether the machine is very busy.",
                code="bench.timeout",
            )
        return answer


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
    """Return the most memory that a process has had since it began, or since `forget_peak`. Only Linux tells it."""
    with _alive(pid):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has now."""
    with _alive(pid):
        return int(psutil.Process(pid).memory_info().rss)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the clock tick (10 ms on most machines)."""
    with _alive(pid):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def available_bytes() -> int:
    """Return how much memory the machine can still give without swapping."""
    return int(psutil.virtual_memory().available)


@contextlib.contextmanager
def _alive(pid: int) -> Iterator[None]:
    """Raise BrokerError if the block finds that the process has ended. A dead one has no memory."""
    try:
        yield
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError):
        raise BrokerError(f"process {pid} has ended", "See its output above.", code="bench.process-gone") from None


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


# -- where the time of a sync goes ------------------------------------------------------------------------------------

_ISLANDS, _MERGER, _REDIS = "archipelago.islands.sync", "archipelago.merger", "archipelago.broker.redis"

#: The functions of an island, each with the name of its piece, in the order of a sync.
OF_ISLAND = {
    f"{_ISLANDS}.replica:Replica.measure": "quantise",
    f"{_ISLANDS}.connection.outbox:body_of": "wait for the device and copy",
    f"{_ISLANDS}.connection.outbox:pack_body": "compress",
    f"{_ISLANDS}.connection.outbox:digest": "digest",
    f"{_REDIS}.islands:RedisIsland.publish": "upload",
    f"{_REDIS}.reader:RedisReader.difference": "download the difference",
    "archipelago.broker.wire:Unpacking.arrived": "decode and add",
    f"{_ISLANDS}.connection.snapshots:digest_of": "digest of the parameters",
    f"{_ISLANDS}.replica:Replica.adopt": "adopt",
}
#: The same for the merger.
OF_MERGER = {
    f"{_REDIS}.merger:RedisMerger.updates": "wait for contributions",
    f"{_REDIS}.chunks:ChunkStore.fetch": "download",
    f"{_MERGER}.round_merge:digest": "digest",
    f"{_MERGER}.round_merge:unpack_encoded": "decompress",
    f"{_MERGER}.merge_rules:accumulate": "decode and add",
    f"{_MERGER}.round_merge:judge": "compare contributions",
    f"{_MERGER}.merge_rules:finish": "merge",
    f"{_MERGER}.spectra:Spectra.change": "spectra",
    f"{_MERGER}.round_merge:outer_step": "outer step",
    f"{_MERGER}.round_merge:publish": "quantise the difference",
    f"{_MERGER}.service:build_commit": "encode the commit",
    f"{_REDIS}.chunks:ChunkStore.place": "upload",
    f"{_REDIS}.merger:RedisMerger.commit": "transaction",
}
WHOLE = "whole process"


class Spent(NamedTuple):
    """What calls have taken: their number, seconds, and seconds of processor time."""

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.calls - other.calls, self.seconds - other.seconds, self.cpu_seconds - other.cpu_seconds)


class Pieces:
    """Counts the time of functions by name of their piece. Replaces the functions in their modules for good.

    A function's time excludes that of named functions which it calls. Processor time is that of the calling thread; the
    threads of XLA and numpy count only in the row of the whole process.

    Args:
        places: The name of the piece of each function, which is written `module:attribute` or `module:Class.attribute`.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._spent = dict.fromkeys(places.values(), Spent())
        self._lock, self._local = threading.Lock(), threading.local()
        for place, name in places.items():
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def spent(self) -> dict[str, Spent]:
        """Return what each piece has taken since the beginning, and last the whole process."""
        with self._lock:
            return {**self._spent, WHOLE: Spent(1, time.perf_counter(), time.process_time())}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._local.inner = getattr(self._local, "inner", Spent()), Spent()
            began = Spent(0, time.perf_counter(), time.thread_time())
            try:
                return function(*arguments, **named)
            finally:
                taken = Spent(1, time.perf_counter(), time.thread_time()) - began
                with self._lock:
                    before, inner = self._spent[name], self._local.inner
                    self._spent[name] = before - (inner - taken)
                self._local.inner = Spent(0, outer.seconds + taken.seconds, outer.cpu_seconds + taken.cpu_seconds)

        return timed
