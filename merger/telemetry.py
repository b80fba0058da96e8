"""What a merger shows of itself: counts for Prometheus, and a point of each curve a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.observe.curves import Scalars
from archipelago.broker.observe.metrics import MergerTally
from archipelago.merger.service import Merger

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def values(entry: TapeEntry) -> Mapping[str, float]:
    """One round's."""
    return {
        "loss": entry.loss,
        "contributions": len(entry.members),
        "staleness": statistics.fmean([m.staleness for m in entry.members]) if entry.members else math.nan,
        "gain": entry.gain,
        "open_seconds": entry.open_seconds,
        "grace_seconds": entry.grace_seconds,
        "merge_seconds": entry.merge_seconds,
    }


class Telemetry:
    """Listens to one merger."""

    def __init__(self, merger: Merger, scalars: Scalars) -> None:
        self.merger, self.scalars = merger, scalars
        self.tally = MergerTally(merger.manifest.run, len(merger.manifest.fragments))
        merger.on_round = self.closed

    def closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        """A round was committed."""
        self.tally.closed(entry, snapshot, self.merger.clock())
        self.scalars.put(entry.round, values(entry))

    def families(self) -> Iterator[Metric]:
        """What Prometheus is told."""
        merger = self.merger
        self.tally.refused = merger.refused
        return self.tally.families(
            epoch=merger.epoch, closed=merger.rounds.closed, live=len(merger.live), now=merger.clock()
        )
