"""The heartbeat of an island: its state as it reports it about once a second."""

from __future__ import annotations

import math
import os
import platform
from typing import TYPE_CHECKING

from archipelago.broker import machine
from archipelago.broker.presence import Heartbeat

if TYPE_CHECKING:
    from archipelago.islands.sync.participant import Participant


def heartbeat(island: Participant, state: str) -> Heartbeat:
    """Return the heartbeat of an island in that state."""
    link, ledger, seconds = island.link, island.ledger, island.speed.step_seconds
    memory = island.host.memory.newest()
    return Heartbeat(
        island=island.name,
        incarnation=island.incarnation,
        state=state,
        host=platform.node()[:200],
        pid=os.getpid(),
        device=island.device,
        steps=island.totals.steps,
        global_step=ledger.global_step,
        tokens=island.totals.tokens,
        tokens_per_second=island.tokens_per_step / seconds if seconds else 0.0,
        step_seconds=seconds,
        loss=island.losses.mean,
        staleness=ledger.staleness,
        backlog=link.channels.backlog,
        sent=link.channels.sent,
        refused=ledger.refused,
        last_refusal=ledger.last_refusal,
        bytes_up=link.channels.bytes_up,
        bytes_down=link.channels.bytes_down,
        link=link.trouble or link.unserved or link.uplink.in_words(island.stretch, island.link_share) or "ok",
        data=" ".join(map(str, island.places())),
        moments=island.moments,
        uplink_bytes_per_second=_rate(link.uplink.seconds_a_byte),
        downlink_bytes_per_second=_rate(link.uplink.down_seconds_a_byte),
        ignored=link.channels.ignored,
        tokens_unsent=(ledger.unsent_tokens + link.channels.queued_tokens) // len(ledger.counts),
        machine=machine.describe(),
        memory_bytes=memory.process,
        host_memory_bytes=memory.host,
        host_memory_limit_bytes=memory.host_limit,
        device_memory_bytes=memory.device,
        device_memory_limit_bytes=memory.device_limit,
    )


def _rate(seconds_a_byte: float) -> float:
    """Return bytes per second; NaN before the first measurement."""
    return 1.0 / seconds_a_byte if seconds_a_byte > 0.0 else math.nan
