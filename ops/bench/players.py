"""Islands of a measurement: they claim names, lease text, send heartbeats and contribute, and train nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Heartbeat
from archipelago.broker.transport import IslandTransport
from archipelago.broker.wire import digest, pack

INCARNATION = "bench"
BEAT_SECONDS = 1.0
#: How much of a contribution is the same in all of them, so that islands agree as honest ones do.
SHARED = 0.7


class Player:
    """One island: its name, its lease, its heartbeat and a payload for each fragment, the same in every round."""

    def __init__(self, home: IslandTransport, manifest: Manifest, number: int) -> None:
        self._home, self._config = home, manifest.config
        self.name = f"island-{number:03}"
        self._who = f"{self.name}/{INCARNATION}"
        home.island.claim_name(self.name, INCARNATION)
        shards = manifest.config.data.shards
        order = [str((2 * number + each) % shards) for each in range(shards)]
        self._beat = heartbeat_of(self.name)
        self.beat_at = float("-inf")
        self.beat(0, time.monotonic())
        place = home.island.lease_shard(order, self._who)
        if place is None:
            raise BrokerError(f"{self.name} got no shard", "Check whether the machine is very busy.")
        self._shard = place.shard
        self._payloads = {size: _payload(size, number) for size in set(manifest.sizes)}

    def beat(self, step: int, now: float) -> None:
        """Send a heartbeat, and check the lease, as an island does every second."""
        self.beat_at = now
        self._home.island.heartbeat(replace(self._beat, steps=step, global_step=step, sent=step))
        if step:
            self._home.island.leased([self._shard], self._who)

    def contribute(self, transport: IslandTransport, size: int, fragment: int, number: int, base: int) -> None:
        """Publish the contribution to a round.

        Args:
            transport: The connection to the shard of that round.
            size: The elements of the fragment.
            fragment, number: The fragment and the round, as the shard counts.
            base: The version of the fragment that the contribution is measured from. The island makes one step for it.
        """
        payload, step = self._payloads[size], base + 1
        contribution = Contribution(
            island=self.name, incarnation=INCARNATION, sequence=number, round=number, fragment=fragment, base=base,
            tokens=self._config.tokens_per_step, steps=1, global_step=step, loss=2.0, step_seconds=0.1,
            farewell=False, codec="int4", bytes=len(payload), digest=digest(payload),
            data=f"{self._shard}:0:{step * self._config.data.batch_size}",
        )  # fmt: skip
        transport.island.publish(contribution, payload)


def beat_all(players: Sequence[Player], step: int) -> None:
    """Let each island send a heartbeat whose last one is BEAT_SECONDS ago."""
    now = time.monotonic()
    for player in players:
        if now - player.beat_at >= BEAT_SECONDS:
            player.beat(step, now)


def _payload(elements: int, number: int) -> bytes:
    shared, own = (np.random.default_rng(seed).standard_normal(elements, np.float32) for seed in (0, number + 1))
    return pack(SHARED * shared + (1.0 - SHARED) * own, "int4", 0)


def heartbeat_of(island: str) -> Heartbeat:
    """Return the heartbeat of an island that trains and has made no step yet."""
    return Heartbeat(
        island=island, incarnation=INCARNATION, state="training", host="bench", pid=os.getpid(), device="none",
        steps=0, global_step=0, tokens=0, tokens_per_second=1.0, step_seconds=0.1, loss=2.0, staleness=0.0, backlog=0,
        sent=0, refused=0, last_refusal="", bytes_up=0, bytes_down=0, link="ok",
    )  # fmt: skip
