"""`archipelago bench wire`: the throughput of large payloads through Redis, against bare sockets.

Each figure is the median of several rounds. Both sides of a ratio take turns in the same run, so that other work on the
machine slows both. Payloads are random bytes, without codec and compression.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.machine import LOOPBACK
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import Refusal
from archipelago.broker.redis.transport import connect
from archipelago.ops.bench.harness import MeasuredProcess, child, manifest_of, own_run
from archipelago.ops.bench.output import OutputOptions, compared, finish, ratio_row, taking_turns
from archipelago.ops.bench.played import contribution_of
from archipelago.ops.settings import say

RUN = "bench-wire"
GOAL = 0.8


@dataclass(frozen=True)
class WireOptions(OutputOptions):
    """Measure payloads through Redis, in MB/s, against bare sockets."""

    quick: bool = False
    """Use smaller payloads and fewer rounds."""


def main(options: WireOptions) -> int:
    return finish("wire", wire(QUICK if options.quick else WireSize()), options)


class WireSize(NamedTuple):
    """The bytes of a payload, how many the producer sends in a round, and the rounds."""

    payload_bytes: int = 64 << 20
    payloads: int = 8
    rounds: int = 5


QUICK = WireSize(16 << 20, payloads=4, rounds=3)


def wire(size: WireSize) -> dict[str, Any]:
    """Measure a producer and a consumer against a bare relay. Return plain data with `rows`."""
    rows = []
    for append_only, where in ((False, "in memory"), (True, "append-only file")):
        # Its one fragment is large enough for valid payloads of that size.
        manifest = manifest_of(RUN, RunConfig(), [Tensor("all", (size.payload_bytes // 4,))], [["all"]])
        with own_run(manifest, [b"nothing"], append_only=append_only) as (server, _):
            say(f"{where}: {server.program.kind} {server.program.version}")
            rows.append(row(where, size.payloads * size.payload_bytes, *_against_relay(server.url, size)))
    return {"payload_bytes": size.payload_bytes, "rows": rows}


def _against_relay(url: str, size: WireSize) -> list[list[float]]:
    """Return the seconds of the relay and of the transport, round by round."""
    payload_bytes, count = size.payload_bytes, size.payloads
    with contextlib.ExitStack() as held:
        sending, receiving, relay, publishing, taking = (
            held.enter_context(child(work, *given))
            for work, *given in (
                (_send_bare, payload_bytes), (_receive_bare, payload_bytes), (_forward, payload_bytes),
                (_publish, url, payload_bytes), (_take, url),
            )
        )  # fmt: skip
        for end in (sending, receiving):
            end.pipe.send(relay.receive())
        sides = [lambda: _seconds(sending, receiving, count), lambda: _seconds(publishing, taking, count)]
        return taking_turns(sides, size.rounds)


def row(where: str, total_bytes: int, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Return a line of the table. Both sides moved `total_bytes` in these seconds, round by round."""
    found, size = compared(theirs, ours), total_bytes / 1e6
    what = f"a producer and a consumer, {where}, MB/s"
    return ratio_row(what, size / found.second, "store-and-forward relay", size / found.first, found.ratio, GOAL)


def _seconds(producer: MeasuredProcess, consumer: MeasuredProcess, count: int) -> float:
    """Let the producer send `count` payloads. Return the time from its start to the consumer's end."""
    consumer.pipe.send(count)
    producer.pipe.send(count)
    began = float(producer.receive())
    return float(consumer.receive()) - began


# -- through the transport ------------------------------------------------------------------------------------------


def _publish(pipe: Connection, url: str, size: int) -> None:
    transport, payload = connect(url, RUN), os.urandom(size)
    contribution = contribution_of("island-0", payload, "float32")
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


def _forward(pipe: Connection, size: int) -> None:
    """Say two ports, and receive each payload at the first whole before it is sent on from the second."""
    buffer = bytearray(size)
    with socket.create_server((LOOPBACK, 0)) as a, socket.create_server((LOOPBACK, 0)) as b:
        for listening in (a, b):
            pipe.send(listening.getsockname()[1])
        source, target = a.accept()[0], b.accept()[0]
        while source.recv_into(buffer, flags=socket.MSG_WAITALL):
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
    buffer = bytearray(size)
    with socket.create_connection((LOOPBACK, pipe.recv())) as source:
        while True:
            for _ in range(pipe.recv()):
                source.recv_into(buffer, flags=socket.MSG_WAITALL)
            pipe.send(time.monotonic())
