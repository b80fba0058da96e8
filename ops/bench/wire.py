"""`archipelago bench wire`: the throughput of large payloads through Redis, against bare sockets.

Each figure is the median of several rounds. Both sides of a ratio take turns in the same run, so that other work on the
machine slows both. Payloads are random bytes, without codec and compression.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.machine import LOOPBACK
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import Refusal
from archipelago.broker.redis.transport import connect
from archipelago.ops.bench.harness import MeasuredProcess, child, contribution_of, first_version, manifest_of, own_redis
from archipelago.ops.bench.output import OutputOptions, compared, finish, taking_turns
from archipelago.ops.settings import say

RUN = "bench-wire"
GOAL = 0.8


@dataclass(frozen=True)
class WireOptions(OutputOptions):
    """Measure payloads through Redis, in MB/s, against bare sockets: one producer, and several at once."""

    quick: bool = False
    """Use smaller payloads and fewer rounds."""


def main(options: WireOptions) -> int:
    """Measure, and write the results."""
    return finish("wire", wire(QUICK if options.quick else WireSize()), options)


class WireSize(NamedTuple):
    """The bytes of a payload, how many one producer sends in a round, the rounds, and the producers at once."""

    payload_bytes: int = 64 << 20
    payloads: int = 8
    rounds: int = 5
    producers: int = 8


QUICK = WireSize(16 << 20, payloads=4, rounds=3)


def wire(size: WireSize) -> dict[str, Any]:
    """Measure one producer against a bare relay, and several at once against one. Return plain data with `rows`."""
    rows = []
    for append_only, where in ((False, "in memory"), (True, "append-only file")):
        with own_redis(append_only=append_only) as server:
            _make_run(server.url, size.payload_bytes)
            say(f"{where}: {server.program.kind} {server.program.version}")
            found = [_against_relay(server.url, size), _fan_in(server.url, size)]
        rows += [{"server": where, **row} for row in found]
    return {"payload_bytes": size.payload_bytes, "rows": rows}


def _make_run(url: str, size: int) -> None:
    """Create a run whose one fragment is large enough for valid payloads of `size` bytes."""
    transport = connect(url, RUN)
    manifest = manifest_of(RUN, RunConfig(), [Tensor("all", (size // 4,))], [["all"]])
    transport.create(manifest, [first_version(0, b"nothing")])
    transport.close()


def _against_relay(url: str, size: WireSize) -> dict[str, Any]:
    payload_bytes, count = size.payload_bytes, size.payloads
    with contextlib.ExitStack() as held:
        bare = _Line(
            [held.enter_context(child(_send_bare, payload_bytes))],
            held.enter_context(child(_receive_bare, payload_bytes)),
        )
        held.enter_context(_relay(bare, payload_bytes))
        ours = _Line(
            [held.enter_context(child(_publish, url, payload_bytes, "island-0"))], held.enter_context(child(_take, url))
        )
        found = taking_turns([lambda: bare.seconds(count), lambda: ours.seconds(count)], size.rounds)
    return row("one producer", "store-and-forward relay", count * payload_bytes, *found)


def _fan_in(url: str, size: WireSize) -> dict[str, Any]:
    each, count, producers = size.payload_bytes // 4, max(1, size.payloads // 4), size.producers
    with contextlib.ExitStack() as held:
        sending = [held.enter_context(child(_publish, url, each, f"i{n}")) for n in range(producers)]
        consumer = held.enter_context(child(_take, url))
        one, all_of_them = _Line(sending[:1], consumer), _Line(sending, consumer)
        sides = [lambda: one.seconds(producers * count), lambda: all_of_them.seconds(count)]
        found = taking_turns(sides, size.rounds)
    return row(f"{producers} producers at once", "one producer", producers * count * each, *found)


def row(what: str, against: str, total_bytes: int, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Return a line of the table. Both sides moved `total_bytes` in these seconds, round by round."""
    found = compared(theirs, ours)
    return {
        "what": what,
        "against": against,
        "MB_a_second": round(total_bytes / 1e6 / found.second),
        "theirs_MB_a_second": round(total_bytes / 1e6 / found.first),
        "ratio": found.ratio,
        "ratio_from": found.ratio_from,
        "ratio_to": found.ratio_to,
        "goal": GOAL,
    }


class _Line:
    """Producers and a consumer, each a process behind a pipe that receives a count and answers with a time."""

    def __init__(self, producers: Sequence[MeasuredProcess], consumer: MeasuredProcess) -> None:
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
                transport.merger.refuse(epoch, [(delivery.entry, done)], "", {})
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
