"""Measures of an island's link, and what to send on a slow one: fewer bytes first, then longer intervals.

Pure: sizes and seconds in, decisions out. Rates are moving averages of what the link has carried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SMOOTHING = 0.7
#: The full codec is used again once its payloads take less than this share of the available time.
RECOVERY_SHARE = 0.5
#: Smaller payloads always use the full codec, because most of their time is the round trip.
SMALL_BYTES = 64 << 10
#: A transfer that is this much slower than the average counts only if the next one is slow too. A process, a server
#: or a machine that was paused for some seconds says nothing about the link.
PAUSE_FACTOR = 8.0
#: Contributions may have more steps than the interval for other reasons than the link, such as a merger that pauses.
#: The link is named as the reason if transfers at the measured speeds take more than this share of the interval.
BUSY_SHARE = 0.5
#: Compression is tried again after this many payloads, to measure whether it pays.
TRY_EVERY = 32


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
    _measured: Counter[str] = field(default_factory=Counter)
    _doubted: set[str] = field(default_factory=set)

    def sent(self, size: int, seconds: float) -> None:
        """Record the time until a payload of `size` bytes was acknowledged."""
        on_the_way = max(0.0, seconds - self.round_trip_seconds)
        self.seconds_a_byte = self._steady("up", self.seconds_a_byte, on_the_way / max(1, size))

    def answered(self, seconds: float) -> None:
        """Record the time until a heartbeat was acknowledged. No codec shortens that."""
        self.round_trip_seconds = self._steady("answer", self.round_trip_seconds, seconds)

    def received(self, size: int, seconds: float) -> None:
        """Record the time that the download of `size` bytes took."""
        self.down_seconds_a_byte = self._steady("down", self.down_seconds_a_byte, seconds / max(1, size))

    def _steady(self, what: str, mean: float, sample: float) -> float:
        """Return a moving average after one more sample. One that is far too slow, as after a pause, does not count."""
        self._measured[what] += 1
        if self._measured[what] == 2:
            mean = min(mean, sample)  # the first sample had nothing to be compared with
        if self._measured[what] > 1 and sample > PAUSE_FACTOR * mean and what not in self._doubted:
            self._doubted.add(what)
            return mean
        self._doubted.discard(what)
        return averaged(mean, sample)

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

    def busy_share(self, bytes_up: float, bytes_down: float, seconds: float) -> float:
        """Return the share of `seconds` that transfers of that size take at the measured speeds; 0 if it is unknown."""
        needed = max(bytes_up * self.packed_share * self.seconds_a_byte, bytes_down * self.down_seconds_a_byte)
        return needed / seconds if seconds > 0.0 else 0.0

    def in_words(self, stretch: float, busy_share: float) -> str:
        """Describe the measures against a thin link; empty on a good one.

        Args:
            stretch: The interval over the run's.
            busy_share: The share of the run's interval that the transfers take.
        """
        measures = ["fewer bits"] if self.thin else []
        if stretch > 1.5 and busy_share > BUSY_SHARE:
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
