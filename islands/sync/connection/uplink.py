"""Measures of an island's link, and what to send on a slow one: fewer bytes first, then longer intervals.

Pure: sizes and seconds in, decisions out. Rates and shares are moving averages of what the link has carried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SMOOTHING = 0.7
#: The full codec is used again once its payloads take less than this share of the available time.
RECOVERY_SHARE = 0.5
#: Smaller payloads always use the full codec, because most of their time is the round trip.
SMALL_BYTES = 64 << 10
#: On a busy processor, any message may take a few round trips, or this long. So the time of a small payload that is
#: shorter says nothing, except that the link is no slower.
NOISE_ROUND_TRIPS, NOISE_SECONDS = 4.0, 0.05
#: A transfer that is this much slower than the average counts only if the next one is slow too. A process, a server
#: or a machine that was paused for some seconds says nothing about the link.
PAUSE_FACTOR = 8.0
#: Contributions may have more steps than the interval for other reasons than the link, such as a merger that pauses.
#: The link is named as the reason if it carries payloads for more than this share of the time.
BUSY_SHARE = 0.5
#: Compression is tried again after this many payloads, to measure whether it pays.
TRY_EVERY = 32


@dataclass
class BusyShare:
    """The share of the time in which the link carries payloads one way."""

    _busy: float = 0.0
    _elapsed: float = 0.0
    _ended: float | None = None

    def add(self, seconds: float, ended: float) -> None:
        """Add a transfer that took `seconds`. `ended` is when it ended, in monotonic seconds."""
        if self._ended is not None:
            self._busy = SMOOTHING * self._busy + (1.0 - SMOOTHING) * seconds
            self._elapsed = SMOOTHING * self._elapsed + (1.0 - SMOOTHING) * (ended - self._ended)
        self._ended = ended

    @property
    def share(self) -> float:
        """The share; 0 before the second transfer."""
        return self._busy / self._elapsed if self._elapsed > 0.0 else 0.0


@dataclass
class Uplink:
    """Measures of one island's link. Averages are 0 before the first measurement.

    Attributes:
        seconds_a_byte: Upload time of a byte, without the round trip.
        round_trip_seconds: Time of a message of a few bytes.
        down_seconds_a_byte: Download time of a byte, for display only.
        packed_share: Bytes after compression as a share of the bytes before.
        packing_seconds_a_byte: Time that compressing a byte takes.
        thin: Whether the codec for thin links is in use.
    """

    seconds_a_byte: float = 0.0
    round_trip_seconds: float = 0.0
    down_seconds_a_byte: float = 0.0
    packed_share: float = 1.0
    packing_seconds_a_byte: float = 0.0
    thin: bool = False
    _payloads: int = 0
    _up: BusyShare = field(default_factory=BusyShare)
    _down: BusyShare = field(default_factory=BusyShare)
    _measured: Counter[str] = field(default_factory=Counter)
    _doubted: set[str] = field(default_factory=set)

    def sent(self, size: int, began: float, ended: float) -> None:
        """Record the time until a payload of `size` bytes was acknowledged."""
        self.seconds_a_byte = self._carried("up", self._up, self.seconds_a_byte, size, began, ended)

    def received(self, size: int, began: float, ended: float) -> None:
        """Record the time that the download of `size` bytes took."""
        self.down_seconds_a_byte = self._carried("down", self._down, self.down_seconds_a_byte, size, began, ended)

    def answered(self, seconds: float) -> None:
        """Record the time until a heartbeat was acknowledged. No codec shortens that."""
        self.round_trip_seconds, _ = self._steady("answer", self.round_trip_seconds, seconds)

    def _carried(self, way: str, busy: BusyShare, mean: float, size: int, began: float, ended: float) -> float:
        """Return the mean time of a byte after one more transfer, without the round trip, and count its time."""
        whole = ended - began
        seconds, counts = max(0.0, whole - self.round_trip_seconds), False
        if size < SMALL_BYTES and whole < max(NOISE_SECONDS, NOISE_ROUND_TRIPS * self.round_trip_seconds):
            mean = min(mean, whole / max(1, size))
        else:
            mean, counts = self._steady(way, mean, seconds / max(1, size))
        busy.add(seconds if counts else 0.0, ended)
        return mean

    def _steady(self, what: str, mean: float, sample: float) -> tuple[float, bool]:
        """Return a moving average after one more sample, and whether the sample counts.

        One that is far too slow, as after a pause, does not.
        """
        self._measured[what] += 1
        if self._measured[what] == 2:
            mean = min(mean, sample)  # the first sample had nothing to be compared with
        if self._measured[what] > 1 and sample > PAUSE_FACTOR * mean and what not in self._doubted:
            self._doubted.add(what)
            return mean, False
        self._doubted.discard(what)
        return averaged(mean, sample), True

    def packed(self, before: int, after: int, seconds: float) -> None:
        """Record the bytes before and after compressing a body, and the time that it took."""
        self.packed_share = averaged(self.packed_share, after / max(1, before))
        self.packing_seconds_a_byte = averaged(self.packing_seconds_a_byte, seconds / max(1, before))

    def should_pack(self) -> bool:
        """Return whether compression saves more time on the link than it takes. Now and then, try it anyway."""
        self._payloads += 1
        saved = (1.0 - self.packed_share) * self.seconds_a_byte
        return self._payloads % TRY_EVERY == 1 or saved >= self.packing_seconds_a_byte

    def fits(self, encoded_bytes: int, at_hand_seconds: float) -> bool:
        """Return whether to use the full codec, whose payload must be sent before the next one is due.

        Call this once for each contribution. A hysteresis keeps the answer from flapping.

        Args:
            encoded_bytes: The size of a payload of the full codec.
            at_hand_seconds: The time until the next contribution is due; 0 if unknown.
        """
        needed = encoded_bytes * self.packed_share * self.seconds_a_byte
        if encoded_bytes < SMALL_BYTES:
            self.thin = False
        elif needed > at_hand_seconds > 0.0:
            self.thin = True
        elif needed < RECOVERY_SHARE * at_hand_seconds:
            self.thin = False
        return not self.thin

    @property
    def busy_share(self) -> float:
        """The share of the time in which the link carries payloads, one way or the other."""
        return max(self._up.share, self._down.share)

    def in_words(self, stretch: float) -> str:
        """Describe the measures against a thin link; empty on a good one.

        Args:
            stretch: The interval over the run's.
        """
        measures = ["fewer bits"] if self.thin else []
        if stretch > 1.5 and self.busy_share > BUSY_SHARE:
            measures.append(f"interval {stretch:.1f}x")
        rates = [
            f"{8e-6 / each:.1f} Mbit/s {way}"
            for way, each in (("up", self.seconds_a_byte), ("down", self.down_seconds_a_byte))
            if each
        ]
        return f"thin link{' at ' * bool(rates)}{', '.join(rates)}: {', '.join(measures)}" if measures else ""


def averaged(mean: float, sample: float, smoothing: float = SMOOTHING) -> float:
    """Return an exponential moving average after one more sample. A mean of 0 means that there was no sample yet."""
    return smoothing * mean + (1.0 - smoothing) * sample if mean else sample
