"""The harness of measurements: processes behind pipes, what they take, and a run of their own.

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
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError
from archipelago.broker.machine import keep_freed_memory
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.wire import digest
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from archipelago.ops.launch.supervisor import thread_environment

#: How the processes of a measurement are started.
PROCESSES = multiprocessing.get_context("spawn")
POLL_SECONDS = 0.001


@dataclass(frozen=True)
class MeasuredProcess:
    """A process that works until this one closes its pipe."""

    pipe: Connection
    pid: int

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next object that the child sends. Raises BrokerError if it ends, or sends nothing in that time."""
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise BrokerError(
                "a process of the measurement failed", "See its output above.", code="bench.process-failed"
            ) from None
        raise BrokerError(
            f"a process of the measurement did not answer for {seconds:g} s",
            "See its output above. Check whether the machine is very busy.",
            code="bench.timeout",
        )


@contextlib.contextmanager
def child(
    work: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Iterator[MeasuredProcess]:
    """Run `work(pipe, *arguments)` in a new process, and kill that process at the end of the block.

    `environment` has variables that only the new process gets.
    """
    parent_end, child_end = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_work, args=(work, child_end, *arguments))
    before = dict(os.environ)
    os.environ.update(environment or {})  # A spawned process reads the environment when it starts.
    process.start()
    os.environ.clear()
    os.environ.update(before)
    child_end.close()
    try:
        yield MeasuredProcess(parent_end, process.pid or 0)
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


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the clock tick (10 ms on most machines)."""
    with _alive(pid):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def _alive(pid: int) -> Iterator[None]:
    """Raise BrokerError if the block finds that the process has ended. A dead one has no memory."""
    try:
        yield
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError):
        raise BrokerError(f"process {pid} has ended", "See its output above.", code="bench.process-failed") from None


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
    "archipelago.broker.wire:unpack": "decode and add",
    f"{_ISLANDS}.connection.inbox:digest_of": "digest of the parameters",
    f"{_ISLANDS}.replica:Replica.prepare": "copy to the device",
    f"{_ISLANDS}.replica:Replica.adopt": "adopt",
}
#: The same for the merger.
OF_MERGER = {
    f"{_REDIS}.merger:RedisMerger.look": "wait for contributions",
    f"{_REDIS}.chunks:ChunkStore.fetch": "download",
    f"{_MERGER}.round_merge:is_digest": "digest",
    f"{_MERGER}.round_merge:unpack_encoded": "decompress",
    f"{_MERGER}.merge_rules:norms": "check",
    f"{_MERGER}.merge_rules:accumulate": "decode and add",
    f"{_MERGER}.round_merge:judge": "compare contributions",
    f"{_MERGER}.merge_rules:finish": "merge",
    f"{_MERGER}.spectra:Spectra.change": "spectra",
    f"{_MERGER}.round_merge:outer_step": "outer step",
    f"{_MERGER}.round_merge:publish": "quantise the difference",
    f"{_MERGER}.service:build_commit": "encode the commit",
    f"{_REDIS}.chunks:ChunkStore.place": "upload",
    f"{_REDIS}.merger:RedisMerger.commit": "commit",
}


class Spent(NamedTuple):
    """What calls have taken: seconds, and seconds of processor time."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Pieces:
    """Counts the time of functions by name of their piece. Replaces the functions in their modules for good.

    A function's time excludes that of named functions which it calls. Processor time is that of the calling thread,
    without the threads of XLA and numpy.

    Args:
        places: The name of the piece of each function, which is written `module:attribute` or `module:Class.attribute`.
        seconds: The time, and that of the calling thread on a processor.
    """

    def __init__(self, places: Mapping[str, str], *seconds: Callable[[], float]) -> None:
        self._seconds = seconds or (time.perf_counter, time.thread_time)
        self._spent = dict.fromkeys(places.values(), Spent())
        self._lock, self._local = threading.Lock(), threading.local()
        for place, name in places.items():
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def spent(self) -> dict[str, Spent]:
        """Return what each piece has taken since the beginning."""
        with self._lock:
            return dict(self._spent)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._local.inner = getattr(self._local, "inner", Spent()), Spent()
            began = Spent(*(clock() for clock in self._seconds))
            try:
                return function(*arguments, **named)
            finally:
                taken = Spent(*(clock() for clock in self._seconds)) - began
                with self._lock:
                    before, inner = self._spent[name], self._local.inner
                    self._spent[name] = before - (inner - taken)
                self._local.inner = Spent(outer.seconds + taken.seconds, outer.cpu_seconds + taken.cpu_seconds)

        return timed


# -- a run -------------------------------------------------------------------------------------------------------------

#: The incarnation of all islands of a measurement.
INCARNATION = "bench"
CORPUS_BYTES = 1 << 22


@contextlib.contextmanager
def own_redis(*, append_only: bool = True) -> Iterator[RedisServer]:
    """Start a Redis as `archipelago up` does, in a temporary folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(Path(folder) / "redis", append_only=append_only) as server,
    ):
        yield server


@contextlib.contextmanager
def own_run(
    manifest: Manifest, payloads: Sequence[bytes], *, append_only: bool = True
) -> Iterator[tuple[RedisServer, RedisTransport]]:
    """Create a run in a Redis of its own. Yield that and a connection.

    `payloads` has version 0 of each fragment, as the run's config encodes full states.
    """
    codec = manifest.config.wire.full
    first = [Snapshot(0, p, 0, 0, codec, len(each), digest(each), merged="") for p, each in enumerate(payloads)]
    with own_redis(append_only=append_only) as server, contextlib.closing(connect(server.url, manifest.run)) as made:
        made.create(manifest, list(zip(first, payloads, strict=True)))
        yield server, made


def serve_merger(
    pipe: Connection,
    url: str,
    run: str,
    cores: Collection[int] = (),
    processes: int = 1,
    counts_pieces: bool = False,
    spectra: str = "cpu",
) -> None:
    """The merger's process: say "ready", serve until it is killed, and answer any message with the time of its pieces.

    Args:
        pipe, url, run: The parent, and a run that exists.
        cores: The only cores to use; empty for all.
        processes: The processes that share these cores.
        counts_pieces: Whether to count the time of the pieces of a merge.
        spectra: Where large spectra are changed, as for `archipelago merger`.
    """
    if cores:
        os.sched_setaffinity(0, set(cores))
    os.environ |= {"JAX_PLATFORMS": "cpu", **thread_environment(processes)}  # before JAX looks at its devices
    keep_freed_memory()

    from archipelago.merger.accelerator import Accelerator
    from archipelago.merger.executor import in_background
    from archipelago.merger.service import Merger
    from archipelago.merger.serving import has_ended_here, merger_name, serve
    from archipelago.merger.spectra import by_fastest

    pieces = Pieces(OF_MERGER if counts_pieces else {})
    merger = Merger(
        connect(url, run), holder=merger_name(), is_gone=has_ended_here, executor=in_background,
        faster=Accelerator() if spectra == "gpu" else by_fastest,
    )  # fmt: skip
    pipe.send("ready")

    def stopped() -> bool:
        if pipe.poll():
            pipe.recv()
            pipe.send(pieces.spent())
        return False

    serve(merger, stopped)


def manifest_of(run: str, config: RunConfig, tensors: Sequence[Tensor], fragments: Sequence[Sequence[str]]) -> Manifest:
    """Return the manifest of a run without a corpus."""
    corpus = Corpus("none", "0" * 32, CORPUS_BYTES)
    return Manifest(run, config, tuple(tensors), tuple(map(tuple, fragments)), corpus, {})
