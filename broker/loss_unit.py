"""The unit in which the losses of a run are shown: bits per byte of text, or those of a script or a task.

Islands and mergers count losses in nats per token, and evaluations are recorded in bits per byte. Everything that shows
a loss converts it here first, so that training and held-out losses can be compared with each other and between runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from archipelago.broker.manifest import Corpus

_NATS_PER_BIT = math.log(2.0)


@dataclass(frozen=True)
class LossUnit:
    """A unit of losses.

    Attributes:
        name: The unit in words, such as `bits per byte`.
        per_nat: One nat per token in this unit.
        per_recorded_bit: One bit of an `Evaluation` in this unit.
    """

    name: str
    per_nat: float
    per_recorded_bit: float

    @property
    def short(self) -> str:
        """The unit for narrow places, such as `bits/byte`."""
        return shortened(self.name)

    def from_nats(self, nats: float) -> float:
        """Convert a training loss from nats per token."""
        return nats * self.per_nat

    def from_evaluation(self, bits: float) -> float:
        """Convert a held-out loss from the bits of an `Evaluation`."""
        return bits * self.per_recorded_bit


def shortened(name: str) -> str:
    """Return the name of a unit for narrow places, such as `bits/byte`."""
    return name.replace(" per ", "/")


def loss_unit(corpus: Corpus) -> LossUnit:
    """Return the unit for the losses of runs on this corpus.

    With a tokenizer, the training loss is divided by the mean number of bytes per token of the whole corpus. An
    evaluation has been divided by that of the held-out text already.
    """
    if not corpus.name:  # scripts and tasks of the users give a loss of any kind
        return LossUnit("loss units", 1.0, _NATS_PER_BIT)
    bytes_per_token = corpus.bytes / corpus.tokens if corpus.tokens else 1.0
    return LossUnit("bits per byte", 1.0 / _NATS_PER_BIT / bytes_per_token, 1.0)
