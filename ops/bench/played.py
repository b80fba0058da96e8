"""Islands of a measurement that train nothing: they publish payloads that were encoded before, and send heartbeats."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import Contribution, Event, Refusal
from archipelago.broker.presence import Heartbeat
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest
from archipelago.ops.bench.harness import INCARNATION

BEAT_SECONDS, LISTEN_SECONDS, PATIENCE_SECONDS = 1.0, 0.1, 600.0
Heard = TypeVar("Heard", bound=Event)


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
        tokens_per_second=1.0, step_seconds=0.1, loss=2.0,
    )  # fmt: skip


class PlayedIslands:
    """Islands that claim their names, send heartbeats and publish payloads that were encoded before, and train nothing.

    Attributes:
        payloads: What each island sends, by name.
    """

    def __init__(self, transport: Transport, payloads: Mapping[str, bytes]) -> None:
        self._transport, self.payloads = transport, payloads
        self._after, self._step = transport.reader.last_event(), 0
        self._beats = dict.fromkeys(payloads, -math.inf)
        for name in payloads:
            transport.island.claim_name(name, INCARNATION)
        self._beat()

    def publish(self, names: Iterable[str], **header: Any) -> None:
        """Let these islands contribute, with headers that have these values."""
        self._step = header["global_step"]
        for name in names:
            self._beat()
            payload = self.payloads[name]
            self._transport.island.publish(replace(contribution_of(name, payload), **header), payload)

    def hear(self, kind: type[Heard]) -> Heard:
        """Send heartbeats until an event of this kind arrives, and return it.

        Raises:
            WireError: The merger refused a contribution.
            BrokerError: Nothing arrived for PATIENCE_SECONDS.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self._beat()
            for entry, event in self._transport.reader.events(self._after, LISTEN_SECONDS):
                self._after = entry
                if isinstance(event, Refusal):
                    raise WireError(f"the merger refused a contribution: {event.reason}", code="bench.wrong-result")
                if isinstance(event, kind):
                    return event
        raise BrokerError(
            f"the merger did not answer for {PATIENCE_SECONDS:g} s", "See its output above.", code="bench.timeout"
        )

    def _beat(self) -> None:
        """Send the heartbeat of each island whose last one is BEAT_SECONDS ago."""
        now, step = time.monotonic(), self._step
        for name in [name for name, at in self._beats.items() if now - at >= BEAT_SECONDS]:
            self._beats[name] = now
            self._transport.island.heartbeat(replace(heartbeat_of(name), steps=step, global_step=step, sent=step))
