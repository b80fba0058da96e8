"""How an island fits its sending to its link: fewer bytes first, longer intervals after that, and back again.

Pure: sizes and seconds in, decisions out. What a link carries is what it has just shown, as a moving average.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.7
PAYS_AGAIN = 0.5
"""Of the time at hand: the codec that keeps more is taken up again once its payloads would be through within it."""
SMALL_BYTES = 64 << 10
"""Payloads below this are not worth fewer bits: what they take is mostly the way itself."""
TRY_EVERY = 32
"""payloads after which it is measured again whether compression pays"""


@dataclass
class Uplink:
    """One island's way up. Averages are 0 until something was measured."""

    seconds_a_byte: float = 0.0
    round_trip_seconds: float = 0.0
    """what a message takes that has hardly a byte"""
    down_seconds_a_byte: float = 0.0
    """of what comes; for who looks"""
    packed_share: float = 1.0
    """bytes after compression, as a share of those before"""
    packing_seconds_a_byte: float = 0.0
    """what compressing a byte takes"""
    thin: bool = False
    """whether the codec for thin links is in use"""
    _payloads: int = 0

    def sent(self, size: int, seconds: float) -> None:
        """A payload of so many bytes took so long to be acknowledged."""
        on_the_way = max(0.0, seconds - self.round_trip_seconds)
        self.seconds_a_byte = averaged(self.seconds_a_byte, on_the_way / max(1, size))

    def answered(self, seconds: float) -> None:
        """A heartbeat was acknowledged after so long: no codec makes that shorter."""
        self.round_trip_seconds = averaged(self.round_trip_seconds, seconds)

    def received(self, size: int, seconds: float) -> None:
        """A snapshot of so many bytes took so long to come."""
        self.down_seconds_a_byte = averaged(self.down_seconds_a_byte, seconds / max(1, size))

    def packed(self, before: int, after: int, seconds: float) -> None:
        """Compressing a body took so long, and made so much of it."""
        self.packed_share = averaged(self.packed_share, after / max(1, before))
        self.packing_seconds_a_byte = averaged(self.packing_seconds_a_byte, seconds / max(1, before))

    def should_pack(self) -> bool:
        """Whether compression pays: it saves more time on the link than it takes. Now and then it is tried anyway."""
        self._payloads += 1
        saved = (1.0 - self.packed_share) * self.seconds_a_byte
        return self._payloads % TRY_EVERY == 1 or saved >= self.packing_seconds_a_byte

    def fits(self, encoded_bytes: int, at_hand_seconds: float) -> bool:
        """Whether to send in full: a payload of that size would be through before the next one is due.

        Asked for each contribution; the answer stays until it is clear that it should change.
        """
        needed = encoded_bytes * self.packed_share * self.seconds_a_byte
        if encoded_bytes < SMALL_BYTES:
            self.thin = False
        elif needed > at_hand_seconds > 0.0:
            self.thin = True
        elif needed < PAYS_AGAIN * at_hand_seconds:
            self.thin = False
        return not self.thin

    def in_words(self, stretch: float) -> str:
        """What it does about a thin link, empty on a good one; `stretch` is the interval over the run's."""
        said = ["fewer bits"] if self.thin else []
        if stretch > 1.5:
            said.append(f"interval {stretch:.1f}x")
        rates = [
            f"{8e-6 / each:.1f} Mbit/s {way}"
            for way, each in (("up", self.seconds_a_byte), ("down", self.down_seconds_a_byte))
            if each
        ]
        return f"thin link{' at ' * bool(rates)}{', '.join(rates)}: {', '.join(said)}" if said else ""


def averaged(mean: float, sample: float, smoothing: float = SMOOTHING) -> float:
    """An exponential moving average with one more sample; a mean of 0 is that of nothing yet."""
    return smoothing * mean + (1.0 - smoothing) * sample if mean else sample
