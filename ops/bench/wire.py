"""`archipelago bench wire`: the throughput of large payloads through Redis, against bare sockets.

Each figure is the median of several rounds. Both sides of a ratio take turns in the same run, so that other work on the
machine slows both. Payloads are random bytes, without codec and compression.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.machine import LOOPBACK
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Contribution, Refusal, Snapshot
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest
from archipelago.ops.bench.output import OutputOptions, finish, with_picture
from archipelago.ops.bench.process import Child, child
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.settings import say

RUN = "bench-wire"
PRODUCERS = 8
GOAL = 0.8
#: The relay starts a new log at this size, like the server, which rewrites its append-only file.
LOG_BYTES = 512 << 20


@dataclass(frozen=True)
class WireOptions(OutputOptions):
    """Measure payloads through Redis, in MB/s, against bare sockets: one producer, and several at once."""

    quick: bool = False
    """Use smaller payloads and fewer rounds."""


def main(options: WireOptions) -> int:
    """Measure, and write the results."""
    return finish("wire", with_picture("wire", wire(options.quick, say), options), options)


def wire(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure one producer against a bare relay, and PRODUCERS at once against one. Return plain data with `rows`."""
    size, count, rounds = (16 << 20, 4, 3) if quick else (64 << 20, 8, 5)
    rows = []
    for append_only, where in ((False, "in memory"), (True, "append-only file")):
        with tempfile.TemporaryDirectory() as folder, _server(Path(folder), append_only, size) as server:
            say(f"{where}: {server.program.kind} {server.program.version}")
            found = [
                _against_relay(server.url, size, count, rounds),
                _fan_in(server.url, size // 4, max(1, count // 4), rounds),
            ]
            if append_only:
                found.insert(1, _against_relay(server.url, size, count, rounds, Path(folder) / "relay.log"))
        rows += [{"server": where, **row} for row in found]
    return {"payload_bytes": size, "rows": rows}


@contextlib.contextmanager
def _server(folder: Path, append_only: bool, size: int) -> Iterator[Server]:
    with start_server(folder / "redis", append_only=append_only) as server:
        made = connect(server.url, RUN)
        _make_run(made, size)
        made.close()
        yield server


def _make_run(transport: Transport, size: int) -> None:
    """Create a run whose one fragment is large enough for valid payloads of `size` bytes."""
    tensors = (Tensor("all", (size // 4,)),)
    manifest = Manifest(RUN, RunConfig(), tensors, (("all",),), Corpus("none", "0" * 32, 1), {})
    nothing = b"nothing"
    transport.create(manifest, [(Snapshot(0, 0, 0, 0, "float32", len(nothing), digest(nothing), ""), nothing)])


def _against_relay(url: str, size: int, count: int, rounds: int, log: Path | None = None) -> dict[str, Any]:
    """Compare with a relay. With a `log`, the relay also writes an append-only file, to show the cost of the disk."""
    with contextlib.ExitStack() as held:
        bare = _Line([held.enter_context(child(_send_bare, size))], held.enter_context(child(_receive_bare, size)))
        held.enter_context(_relay(bare, size, log))
        ours = _Line(
            [held.enter_context(child(_publish, url, size, "island-0"))], held.enter_context(child(_take, url))
        )
        theirs, mine = _taking_turns([lambda: bare.seconds(count), lambda: ours.seconds(count)], rounds)
    relay = "relay with a log" if log else "store-and-forward relay"
    return _row("one producer", relay, count * size, mine, theirs)


def _fan_in(url: str, size: int, count: int, rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as held:
        producers = [held.enter_context(child(_publish, url, size, f"i{n}")) for n in range(PRODUCERS)]
        consumer = held.enter_context(child(_take, url))
        one, all_of_them = _Line(producers[:1], consumer), _Line(producers, consumer)
        alone, together = _taking_turns(
            [lambda: one.seconds(PRODUCERS * count), lambda: all_of_them.seconds(count)], rounds
        )
    return _row(f"{PRODUCERS} producers at once", "one producer", PRODUCERS * count * size, together, alone)


def _taking_turns(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Return the seconds of each side in each round. The first round only warms everything up."""
    return [list(side) for side in zip(*([side() for side in sides] for _ in range(rounds + 1)), strict=True)]


def _row(what: str, against: str, size: int, mine: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [their / my for my, their in zip(mine[1:], theirs[1:], strict=True)]
    return {
        "what": what,
        "against": against,
        "MB_a_second": round(size / 1e6 / statistics.median(mine[1:])),
        "theirs_MB_a_second": round(size / 1e6 / statistics.median(theirs[1:])),
        "ratio": statistics.median(ratios),
        "ratio_from": min(ratios),
        "ratio_to": max(ratios),
        "goal": GOAL,
    }


class _Line:
    """Producers and a consumer, each a process behind a pipe that receives a count and answers with a time."""

    def __init__(self, producers: Sequence[Child], consumer: Child) -> None:
        self.producers, self.consumer = producers, consumer

    def seconds(self, count: int) -> float:
        """Let each producer send `count` payloads. Return the time from the first start to the consumer's end."""
        self.consumer.pipe.send(count * len(self.producers))
        for producer in self.producers:
            producer.pipe.send(count)
        began = min(float(producer.receive()) for producer in self.producers)
        return float(self.consumer.receive()) - began


# -- through the transport ------------------------------------------------------------------------------------------


def _publish(pipe: Connection, url: str, size: int, island: str) -> None:
    transport, payload = connect(url, RUN), os.urandom(size)
    contribution = Contribution(
        island=island, incarnation="x", sequence=0, round=1, fragment=0, base=0, tokens=1, steps=1, global_step=0,
        loss=1.0, step_seconds=1.0, farewell=False, codec="float32", bytes=size, digest=digest(payload),
    )  # fmt: skip
    while True:
        count, began = pipe.recv(), time.monotonic()
        for sequence in range(count):
            transport.island.publish(replace(contribution, sequence=sequence), payload)
        pipe.send(began)


def _take(pipe: Connection, url: str) -> None:
    """Read each payload whole, then acknowledge and delete it."""
    transport = connect(url, RUN)
    epoch = transport.merger.acquire("bench", 3600.0)
    if epoch is None:
        raise BrokerError("another merger has the lease")
    while True:
        count = pipe.recv()
        while count > 0:
            for header in transport.merger.updates(1.0, count=1):
                delivery = header.with_payload()
                sent = delivery.contribution
                if sent is None or delivery.fault:
                    raise WireError(delivery.fault)
                done = Refusal(sent.island, sent.incarnation, sent.sequence, 1, 0, sent.tokens, "measured")
                transport.merger.refuse(epoch, [(delivery.entry, done)])
                count -= 1
        pipe.send(time.monotonic())


# -- over bare sockets ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _relay(line: _Line, size: int, log: Path | None) -> Iterator[None]:
    """Put a process between the two that receives each payload whole, and logs it, before it sends it on."""
    with child(_forward, size, log) as relay:
        for end in (*line.producers, line.consumer):
            end.pipe.send(relay.receive())
        yield


def _forward(pipe: Connection, size: int, log: Path | None) -> None:
    buffer = memoryview(bytearray(size))
    keep = _Log(log).append if log else lambda _: None
    with socket.create_server((LOOPBACK, 0)) as a, socket.create_server((LOOPBACK, 0)) as b:
        for listening in (a, b):
            pipe.send(listening.getsockname()[1])
        source, target = a.accept()[0], b.accept()[0]
        while _fill(source, buffer):
            keep(buffer)
            target.sendall(buffer)


class _Log:
    """A file that is synced to the disk every second, like the server's `appendfsync everysec`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        threading.Thread(target=self._sync, daemon=True).start()

    def append(self, data: memoryview) -> None:
        if self._file.tell() > LOG_BYTES:
            self._file.seek(0)
            self._file.truncate()
        self._file.write(data)

    def _sync(self) -> None:
        while True:
            time.sleep(1.0)
            os.fsync(self._file.fileno())


def _send_bare(pipe: Connection, size: int) -> None:
    payload = os.urandom(size)
    with socket.create_connection((LOOPBACK, pipe.recv())) as target:
        while True:
            count, began = pipe.recv(), time.monotonic()
            for _ in range(count):
                target.sendall(payload)
            pipe.send(began)


def _receive_bare(pipe: Connection, size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_connection((LOOPBACK, pipe.recv())) as source:
        while True:
            for _ in range(pipe.recv()):
                _fill(source, buffer)
            pipe.send(time.monotonic())


def _fill(source: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer. Return False if the other end has closed."""
    start = 0
    while start < len(buffer):
        read = source.recv_into(buffer[start:])
        if not read:
            return False
        start += read
    return True
