"""`archipelago bench wire`: the throughput of large payloads through Redis, against bare sockets.

Each figure is the median of several rounds. Both sides of a ratio take turns in the same run, so that other work on the
machine slows both. Payloads are random bytes, without codec and compression.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.machine import LOOPBACK
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import Refusal
from archipelago.broker.redis.transport import connect
from archipelago.ops.bench.measured_run import contribution_of, first_version, manifest_of, own_redis
from archipelago.ops.bench.output import OutputOptions, finish, with_picture
from archipelago.ops.bench.process import Child, child
from archipelago.ops.settings import say

RUN = "bench-wire"
PRODUCERS = 8
GOAL = 0.8


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
        with own_redis(append_only=append_only) as server:
            _make_run(server.url, size)
            say(f"{where}: {server.program.kind} {server.program.version}")
            found = [
                _against_relay(server.url, size, count, rounds),
                _fan_in(server.url, size // 4, max(1, count // 4), rounds),
            ]
        rows += [{"server": where, **row} for row in found]
    return {"payload_bytes": size, "rows": rows}


def _make_run(url: str, size: int) -> None:
    """Create a run whose one fragment is large enough for valid payloads of `size` bytes."""
    transport = connect(url, RUN)
    manifest = manifest_of(RUN, RunConfig(), [Tensor("all", (size // 4,))], [["all"]])
    transport.create(manifest, [first_version(0, b"nothing")])
    transport.close()


def _against_relay(url: str, size: int, count: int, rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as held:
        bare = _Line([held.enter_context(child(_send_bare, size))], held.enter_context(child(_receive_bare, size)))
        held.enter_context(_relay(bare, size))
        ours = _Line(
            [held.enter_context(child(_publish, url, size, "island-0"))], held.enter_context(child(_take, url))
        )
        theirs, mine = _taking_turns([lambda: bare.seconds(count), lambda: ours.seconds(count)], rounds)
    return _row("one producer", "store-and-forward relay", count * size, mine, theirs)


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
    contribution = contribution_of(island, payload, "float32")
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
def _relay(line: _Line, size: int) -> Iterator[None]:
    """Put a process between the two that receives each payload whole before it sends it on."""
    with child(_forward, size) as relay:
        for end in (*line.producers, line.consumer):
            end.pipe.send(relay.receive())
        yield


def _forward(pipe: Connection, size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_server((LOOPBACK, 0)) as a, socket.create_server((LOOPBACK, 0)) as b:
        for listening in (a, b):
            pipe.send(listening.getsockname()[1])
        source, target = a.accept()[0], b.accept()[0]
        while _fill(source, buffer):
            target.sendall(buffer)


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
