"""The run of a measurement: its Redis, its merger, its manifest, and the messages of islands that train nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Contribution, Snapshot
from archipelago.broker.presence import Heartbeat
from archipelago.broker.process import keep_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.wire import digest
from archipelago.ops.bench.process import OF_MERGER, Pieces, keep_to
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.supervisor import thread_environment

#: The incarnation of all islands of a measurement.
INCARNATION = "bench"
CORPUS_BYTES = 1 << 22


@contextlib.contextmanager
def own_redis(*, append_only: bool = True) -> Iterator[Server]:
    """Start a Redis as `archipelago up` does, in a temporary folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(Path(folder) / "redis", append_only=append_only) as server,
    ):
        yield server


def serve_merger(
    pipe: Connection,
    url: str,
    run: str,
    cores: Collection[int] = (),
    processes: int = 1,
    threads: int = 0,
    counts_pieces: bool = False,
) -> None:
    """The merger's process: say "ready", serve until it is killed, and answer any message with the time of its pieces.

    Args:
        pipe: The connection to the parent.
        url: The Redis.
        run: The name of the run, which exists.
        cores: The only cores to use; empty for all.
        processes: The processes that share these cores.
        threads: The threads that change spectra; 0 for the default.
        counts_pieces: Whether to count the time of the pieces of a merge.
    """
    if cores:
        keep_to(set(cores))
    os.environ |= {"JAX_PLATFORMS": "cpu", **thread_environment(processes)}  # before JAX looks at its devices
    keep_freed_memory()

    from archipelago.merger.beside import in_background
    from archipelago.merger.service import Merger
    from archipelago.merger.serving import serve
    from archipelago.merger.standby import has_ended_here, merger_name

    pieces = Pieces(OF_MERGER if counts_pieces else {})
    merger = Merger(
        connect(url, run), holder=merger_name(), threads=threads, is_gone=has_ended_here, beside=in_background
    )
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


def first_version(fragment: int, payload: bytes, codec: str = "float32") -> tuple[Snapshot, bytes]:
    """Return version 0 of a fragment, with its payload."""
    return Snapshot(0, fragment, 0, 0, codec, len(payload), digest(payload), merged=""), payload


def contribution_of(island: str, payload: bytes = b"", codec: str = "int4") -> Contribution:
    """Return the header of an island's contribution of one step to the first round."""
    return Contribution(
        island=island, incarnation=INCARNATION, sequence=0, round=1, fragment=0, base=0, tokens=1, steps=1,
        global_step=0, loss=1.0, step_seconds=1.0, farewell=False, codec=codec, bytes=len(payload),
        digest=digest(payload),
    )  # fmt: skip


def heartbeat_of(island: str) -> Heartbeat:
    """Return the heartbeat of an island that trains and has made no step yet."""
    return Heartbeat(
        island=island, incarnation=INCARNATION, state="training", host="bench", pid=os.getpid(), device="none",
        steps=0, global_step=0, tokens=0, tokens_per_second=1.0, step_seconds=0.1, loss=2.0, staleness=0.0, backlog=0,
        sent=0, refused=0, last_refusal="", bytes_up=0, bytes_down=0, link="ok",
    )  # fmt: skip
