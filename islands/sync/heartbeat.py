"""What an island measures of itself and reports: its speed, losses, totals and memory, in a heartbeat each second."""

from __future__ import annotations

import math
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from archipelago.broker import machine
from archipelago.broker.messages import COUNT_MAX
from archipelago.broker.presence import Heartbeat
from archipelago.islands.sync.connection.uplink import averaged

if TYPE_CHECKING:
    from archipelago.islands.sync.participant import Participant


#: How many fragments that cannot be read a heartbeat names.
UNREADABLE_TOLD = 64


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
        device=island.host.device,
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
        link=link.pumps.trouble or link.serving.in_words or link.uplink.in_words(island.stretch) or "ok",
        data=island.positions,
        optimizer_origin=island.optimizer_origin,
        uplink_bytes_per_second=_rate(link.uplink.seconds_a_byte),
        downlink_bytes_per_second=_rate(link.uplink.down_seconds_a_byte),
        ignored=sum(channel.inbox.ignored for channel in link.channels),
        unreadable=_listed(link.channels.unreadable),
        tokens_unsent=(ledger.unsent_tokens + link.channels.queued_tokens) // len(ledger.counts),
        machine=machine.describe(),
        memory_bytes=memory.process,
        host_memory_bytes=memory.host,
        host_memory_limit_bytes=memory.host_limit,
        device_memory_bytes=memory.device,
        device_memory_limit_bytes=memory.device_limit,
    )


def first_heartbeat(who: str, before: Heartbeat | None, unreadable: Sequence[int]) -> Heartbeat:
    """Return the heartbeat of an island that waits for fragments while it joins.

    Args:
        who: The island and its incarnation.
        before: The last heartbeat of an earlier incarnation, whose totals stay.
        unreadable: The fragments that cannot be read.
    """
    island, _, incarnation = who.partition("/")
    return Heartbeat(
        island=island,
        incarnation=incarnation,
        state="joining",
        host=platform.node()[:200],
        pid=os.getpid(),
        device="",
        steps=before.steps if before else 0,
        global_step=0,
        tokens=before.tokens if before else 0,
        tokens_per_second=0.0,
        step_seconds=0.0,
        loss=math.nan,
        staleness=0.0,
        backlog=0,
        sent=0,
        refused=0,
        last_refusal="",
        bytes_up=0,
        bytes_down=0,
        link="waits for the parameters",
        unreadable=_listed(unreadable),
    )


def _listed(unreadable: Sequence[int]) -> str:
    return " ".join(map(str, unreadable[:UNREADABLE_TOLD]))


def _rate(seconds_a_byte: float) -> float:
    """Return bytes per second; NaN before the first measurement."""
    return 1.0 / seconds_a_byte if seconds_a_byte > 0.0 else math.nan


SMOOTHING = 0.9
#: The most losses that are kept. They are removed when a contribution is sent, and without rounds none is sent.
LOSSES_KEPT = 256


#: A loop that does not sync for this long is not waited for, unless its calls usually take so long.
STALL_SECONDS = 60.0
#: A loop whose calls are far apart has not stopped before this many of them.
STALL_CALLS = 20


@dataclass
class Speed:
    """Moving averages of the seconds that an inner step takes, and that are between two calls without pauses."""

    step_seconds: float = 0.0
    call_seconds: float = 0.0
    _long_call: tuple[int, float] = (1, 0.0)  # the steps and seconds of the last call, if it was a long one

    def called(self, steps: int, seconds: float) -> None:
        """Note the time of a call. A pause says nothing about the speed, but a loop whose calls are all long has one.

        A long call counts if the one before it was long as well, and then as the faster of both, because the first step
        of a loop compiles.
        """
        before, self._long_call = self._long_call, (steps, seconds if seconds > STALL_SECONDS else 0.0)
        if self._long_call[1]:
            if not before[1]:
                return
            steps, seconds = min(before, self._long_call, key=lambda call: call[1] / call[0])
        self.step_seconds = averaged(self.step_seconds, seconds / steps, SMOOTHING)
        self.call_seconds = averaged(self.call_seconds, seconds, SMOOTHING)

    @property
    def stall_seconds(self) -> float:
        """A loop that does not sync for so long has stopped."""
        return max(STALL_SECONDS, STALL_CALLS * self.call_seconds)


@dataclass
class Losses:
    """The losses of the inner steps since the last contribution.

    Attributes:
        mean: The mean loss that was taken last; NaN if it was not finite, or before the first one.
        diverged: How many of the newest losses in a row were not finite.
    """

    mean: float = math.nan
    diverged: int = 0
    _pending: deque[Any] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    _known: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))

    def add(self, losses_n: Any) -> None:
        """Add the losses of n steps: a number, or an array of any framework that numpy can read."""
        self._pending.append(losses_n)

    def read(self) -> None:
        """Read what was added. Losses that a device still computes wait, so that the training thread need not."""
        while self._pending and _is_ready(self._pending[0]):  # a device computes them in order
            losses_n = self._pending.popleft()
            loss = float(losses_n if isinstance(losses_n, int | float) else np.mean(np.asarray(losses_n)))
            self.diverged = 0 if math.isfinite(loss) else self.diverged + 1
            self._known.append(loss)

    def take_mean(self) -> float:
        """Return the mean loss of the steps since the last call, or the last mean if there were none."""
        self.read()
        if self._known:
            mean = float(np.mean(self._known))
            self.mean = mean if math.isfinite(mean) else math.nan  # messages carry no infinite numbers
            self._known.clear()
        return self.mean


def _is_ready(losses: Any) -> bool:
    """Return whether a value can be read without waiting for a device."""
    asked = getattr(losses, "is_ready", None)
    return asked is None or bool(asked())


@dataclass
class Totals:
    """Inner steps and tokens of an island over all its incarnations."""

    steps: int = 0
    tokens: int = 0


#: Seconds for which a measurement is reported again.
FRESH_SECONDS = 5.0


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use, and the limits; 0 where the machine does not report them.

    Attributes:
        process: Resident memory of this process.
        host: Memory in use on the host, by all processes.
        device: Memory in use on this process's devices, by this process.
    """

    process: int = 0
    host: int = 0
    host_limit: int = 0
    device: int = 0
    device_limit: int = 0


def measured(devices: Sequence[Any] = ()) -> MemoryUse:
    """Measure the memory in use now. A machine that does not report some of it gives 0.

    Args:
        devices: The accelerators of this process. Each has `memory_stats`, as JAX's devices do.
    """
    try:
        process, host = psutil.Process().memory_info().rss, psutil.virtual_memory()
        used, limit = host.total - host.available, host.total
    except (psutil.Error, OSError):
        process = used = limit = 0
    stats = [device.memory_stats() or {} for device in devices]
    device, device_limit = (sum(int(each.get(name, 0)) for each in stats) for name in ("bytes_in_use", "bytes_limit"))
    found = (process, used, limit, device, device_limit)
    return MemoryUse(*(min(COUNT_MAX, max(0, value)) for value in found))


class MemoryMeter:
    """Measures the memory now and then, because heartbeats are prepared after every inner step."""

    def __init__(self, clock: Callable[[], float], measure: Callable[[], MemoryUse] = measured) -> None:
        self._clock, self._measure = clock, measure
        self._due = -math.inf
        self._newest = MemoryUse()

    def newest(self) -> MemoryUse:
        """Return a measurement that is at most a few seconds old."""
        if self._clock() >= self._due:
            self._newest, self._due = self._measure(), self._clock() + FRESH_SECONDS
        return self._newest
