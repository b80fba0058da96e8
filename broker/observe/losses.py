"""The units in which runs show losses, and how numbers are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from archipelago.broker.manifest import Corpus

_NATS_PER_BIT = math.log(2.0)


@dataclass(frozen=True)
class LossUnit:
    """A unit of losses, and what a nat per token and a bit of an `Evaluation` are in it."""

    name: str
    per_nat: float
    per_recorded_bit: float

    def from_nats(self, nats: float) -> float:
        """Convert a training loss from nats per token."""
        return nats * self.per_nat

    def recorded(self, nats: float) -> float:
        """Convert a held-out loss in nats per token to the bits of an `Evaluation`."""
        return self.from_nats(nats) / self.per_recorded_bit

    def from_evaluation(self, bits: float) -> float:
        """Convert a held-out loss from the bits of an `Evaluation`."""
        return bits * self.per_recorded_bit


def shortened(name: str) -> str:
    """Return the name of a unit for narrow places, such as `bits/byte`."""
    return name.replace(" per ", "/")


def rounded(value: float, digits: int = 4) -> str:
    """Format a number with that many decimals. With 3 or more, a number below 0.1 has 3 significant digits instead."""
    return f"{value:#.3g}" if digits > 2 and 0 < abs(value) < 0.1 else f"{value:,.{digits}f}"


def loss_unit(corpus: Corpus) -> LossUnit:
    """Return the unit for the losses of runs on this corpus.

    With a tokenizer, the training loss is divided by the mean number of bytes per token of the whole corpus. An
    evaluation has been divided by that of the held-out text already.
    """
    if not corpus.name:  # scripts and tasks of the users give a loss of any kind
        return LossUnit("loss units", 1.0, _NATS_PER_BIT)
    bytes_per_token = corpus.bytes / corpus.tokens if corpus.tokens else 1.0
    return LossUnit("bits per byte", 1.0 / _NATS_PER_BIT / bytes_per_token, 1.0)
