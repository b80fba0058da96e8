"""Measures of an island's link, and what to send on a slow one: fewer bytes first, then longer intervals.

Pure: sizes and seconds in, decisions out. Rates are moving averages of what the link has carried.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.7
#: The full codec is used again once its payloads take less than this share of the available time.
RECOVERY_SHARE = 0.5
#: Smaller payloads always use the full codec, because most of their time is the round trip.
SMALL_BYTES = 64 << 10
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

    def sent(self, size: int, seconds: float) -> None:
        """Record the time until a payload of `size` bytes was acknowledged."""
        on_the_way = max(0.0, seconds - self.round_trip_seconds)
        self.seconds_a_byte = averaged(self.seconds_a_byte, on_the_way / max(1, size))

    def answered(self, seconds: float) -> None:
        """Record the time until a heartbeat was acknowledged. No codec shortens that."""
        self.round_trip_seconds = averaged(self.round_trip_seconds, seconds)

    def received(self, size: int, seconds: float) -> None:
        """Record the time that the download of `size` bytes took."""
        self.down_seconds_a_byte = averaged(self.down_seconds_a_byte, seconds / max(1, size))

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

    def in_words(self, stretch: float) -> str:
        """Describe the measures against a thin link; empty on a good one. `stretch` is the interval over the run's."""
        measures = ["fewer bits"] if self.thin else []
        if stretch > 1.5:
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
