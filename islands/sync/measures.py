"""What an island measures of itself: its speed, losses and totals, and what its link carries.

Rates and shares are moving averages. From those of the link follows what to send on a slow one: fewer bytes first, then
longer intervals.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipelago.broker.manifest import SMALL_BYTES
from archipelago.broker.messages import MEASURE_MAX

SMOOTHING = 0.9


def averaged(mean: float, sample: float, smoothing: float = SMOOTHING) -> float:
    """Return an exponential moving average after one more sample. A mean of 0 means that there was no sample yet."""
    return smoothing * mean + (1.0 - smoothing) * sample if mean else sample


# -- the loop -----------------------------------------------------------------------------------------------------

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
        self.step_seconds = averaged(self.step_seconds, seconds / steps)
        self.call_seconds = averaged(self.call_seconds, seconds)

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
            self.mean = mean if abs(mean) <= MEASURE_MAX else math.nan  # messages carry no larger numbers
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


# -- the link -----------------------------------------------------------------------------------------------------

LINK_SMOOTHING = 0.7
#: The full codec is used again once its payloads take less than this share of the available time.
RECOVERY_SHARE = 0.5
#: On a busy processor, any message may take a few round trips, or this long. So the time of a small payload that is
#: shorter says nothing, except that the link is no slower.
NOISE_ROUND_TRIPS, NOISE_SECONDS = 4.0, 0.05
#: A transfer that is this much slower than the average counts only if the next one is slow too. A process, a server
#: or a machine that was paused for some seconds says nothing about the link.
PAUSE_FACTOR = 8.0
#: Payloads are not compressed for a link that is known to take less time for a byte. zstd makes a body of int4 about a
#: sixth smaller in 2.5 ns a byte (two cores, 2026-11-28). A link of 60 MB/s sends a sixth of a byte in that time.
PACKED_SECONDS_A_BYTE = 16e-9


@dataclass
class Uplink:
    """Measures of one island's link to all shards. Averages are 0 before the first measurement.

    Attributes:
        seconds_a_byte: Upload time of a byte, without the round trip.
        round_trip_seconds: Time of a message of a few bytes.
        thin: Whether the codec for thin links is in use.
        ignored: How many announcements were ignored.
    """

    seconds_a_byte: float = 0.0
    round_trip_seconds: float = 0.0
    thin: bool = False
    contributions: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    ignored: int = 0
    _measured: Counter[str] = field(default_factory=Counter)
    _doubted: set[str] = field(default_factory=set)

    def sent(self, size: int, seconds: float) -> None:
        """Record the time until a payload of `size` bytes was acknowledged."""
        per_byte = max(0.0, seconds - self.round_trip_seconds) / max(1, size)
        if size < SMALL_BYTES and seconds < max(NOISE_SECONDS, NOISE_ROUND_TRIPS * self.round_trip_seconds):
            self.seconds_a_byte = min(self.seconds_a_byte, seconds / max(1, size))
        else:
            self.seconds_a_byte = self._steady("up", self.seconds_a_byte, per_byte)

    def answered(self, seconds: float) -> None:
        """Record the time until a heartbeat was acknowledged. No codec shortens that."""
        self.round_trip_seconds = self._steady("answer", self.round_trip_seconds, seconds)

    def _steady(self, what: str, mean: float, sample: float) -> float:
        """Return a moving average after one more sample. One that is far too slow, as after a pause, does not count."""
        self._measured[what] += 1
        if self._measured[what] == 2:
            mean = min(mean, sample)  # the first sample had nothing to be compared with
        if self._measured[what] > 1 and sample > PAUSE_FACTOR * mean and what not in self._doubted:
            self._doubted.add(what)
            return mean
        self._doubted.discard(what)
        return averaged(mean, sample, LINK_SMOOTHING)

    def fits(self, encoded_bytes: int, at_hand_seconds: float) -> bool:
        """Return whether to use the full codec, whose payload must be sent before the next one is due.

        Call this once for each contribution. A hysteresis keeps the answer from flapping.

        Args:
            encoded_bytes: The size of a payload of the full codec.
            at_hand_seconds: The time until the next contribution is due; 0 if unknown.
        """
        needed = encoded_bytes * self.seconds_a_byte
        if needed > at_hand_seconds > 0.0:
            self.thin = True
        elif needed < RECOVERY_SHARE * at_hand_seconds:
            self.thin = False
        return not self.thin

    @property
    def in_words(self) -> str:
        """What is done about a thin link, in words; empty on a good link."""
        is_known = self.thin and self.seconds_a_byte > 0.0
        return f"thin link at {8e-6 / self.seconds_a_byte:.1f} Mbit/s up: fewer bits" if is_known else ""
