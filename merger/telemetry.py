"""A merger's metrics for Prometheus, and a point on each of its curves for every round."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from archipelago.broker.loss_unit import LossUnit, loss_unit
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.merge_load import ROUNDS_MAX, MergeLoad, merge_load
from archipelago.broker.observe.metrics import family
from archipelago.merger.service import Clock, Merger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

#: Upper bounds of the histogram's buckets, in versions.
STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def values(entry: TapeEntry, unit: LossUnit) -> Mapping[str, float]:
    """Return the values that curves show of one round, with the loss in that unit."""
    return {
        "loss": unit.from_nats(entry.loss),
        "contributions": len(entry.members),
        "staleness": statistics.fmean([m.staleness for m in entry.members]) if entry.members else math.nan,
        "gain": entry.gain,
        "open_seconds": entry.open_seconds,
        "grace_seconds": entry.grace_seconds,
        "merge_seconds": entry.merge_seconds,
        "spectra_seconds": entry.spectra_seconds,
        "busy_seconds": entry.busy_seconds,
    }


class RoundMetrics:
    """Counts the rounds that this process has closed. The gauges are absent until the first of them."""

    def __init__(self, run: str, fragments: int, unit: LossUnit, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._fragments = fragments

        def counter(name: str, documentation: str) -> Counter:
            return Counter(f"archipelago_merger_{name}", documentation, ["run"], registry=registry).labels(run)

        self.rounds = counter("rounds_total", "Rounds that this process has closed.")
        self.merged = counter("merged_contributions_total", "Contributions that this process has merged.")
        self.tokens = counter(
            "merged_tokens_total", "Tokens merged: those of each contribution, divided by the number of fragments."
        )
        self.bytes_up = counter("received_bytes_total", "Payload bytes of the merged contributions.")
        self.bytes_down = counter("published_bytes_total", "Payload bytes of snapshots and differences.")
        self.staleness = Histogram(
            "archipelago_merger_staleness_versions",
            "Staleness of merged contributions.",
            ["run"],
            buckets=STALENESS_BOUNDS,
            registry=registry,
        ).labels(run)
        self._run, self._unit = run, unit
        self._last = {
            name: Gauge(f"archipelago_merger_{name}", f"Last round: {documentation}", ["run"], registry=registry)
            for name, documentation in {
                "quorum_seconds": "from the first contribution to the quorum.",
                "grace_seconds": "the grace window that was allowed.",
                "open_seconds": "from the first contribution to the close.",
                "merge_seconds": "arithmetic of the close.",
                "spectra_seconds": "changing spectra, a part of the arithmetic.",
                "busy_seconds": "since the previous round, without the time that the merger waited for contributions.",
                "loss": f"training loss in {unit.name}, mean of the members' by tokens.",
            }.items()
        }

    def closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        """Count a round that was closed and committed."""
        self.rounds.inc()
        self.merged.inc(len(entry.members))
        self.tokens.inc(sum(member.tokens for member in entry.members) / self._fragments)
        self.bytes_up.inc(entry.bytes_up)
        self.bytes_down.inc(snapshot.bytes + snapshot.difference_bytes)
        for member in entry.members:
            self.staleness.observe(member.staleness)
        for name, gauge in self._last.items():
            value = self._unit.from_nats(entry.loss) if name == "loss" else getattr(entry, name)
            if math.isnan(value):
                gauge.clear()
            else:
                gauge.labels(self._run).set(value)


class RoundTelemetry:
    """Records each round that a merger commits, in metrics if there is a registry. Pass `closed` as `on_round`."""

    def __init__(
        self, manifest: Manifest, curves: CurveWriter, registry: CollectorRegistry | None, clock: Clock = time.monotonic
    ) -> None:
        self.clock = clock
        #: What recent rounds say about the merger's work; None until there are enough of them.
        self.load: MergeLoad | None = None
        #: When the last round was recorded, by `clock`; NaN before the first.
        self.closed_at = math.nan
        self._interval = manifest.config.sync.interval
        self._recent: deque[TapeEntry] = deque(maxlen=ROUNDS_MAX)
        self._has_warned = False
        self._curves, self._unit = curves, loss_unit(manifest.corpus)
        self._metrics = RoundMetrics(manifest.run, len(manifest.fragments), self._unit, registry) if registry else None

    def closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        """Record a round that was committed."""
        self.closed_at = self.clock()
        if self._metrics is not None:
            self._metrics.closed(entry, snapshot)
        self._curves.put(entry.round, values(entry, self._unit))
        self._recent.append(entry)
        self.load = merge_load(tuple(self._recent), self._interval)
        if self.load is not None and self.load.is_slow and not self._has_warned:
            self._has_warned = True
            log.warning("%s %s", self.load.describe(), self.load.remedy, extra={"code": "merger.slow"})


class MergerCollector:
    """Reads a merger's state when Prometheus asks. Register it with a registry."""

    def __init__(self, merger: Merger, rounds: RoundTelemetry) -> None:
        self.merger, self.rounds = merger, rounds

    def collect(self) -> Iterator[Metric]:
        """Yield what the merger knows now. A standby has not looked at the run, so it leaves out round and islands."""
        merger, rounds = self.merger, self.rounds
        serves = merger.epoch > 0
        labels = {"run": merger.manifest.run}
        for name, documentation, value in (
            ("serving", "1 while this merger holds the lease, 0 as a standby.", float(serves)),
            ("epoch", "Epoch of its lease, the fencing number; 0 without one.", merger.epoch),
            ("round", "The last round that has closed.", merger.state.closed if serves else math.nan),
            ("live_islands", "Islands that rounds wait for.", len(merger.live) if serves else math.nan),
            (
                "idle_islands",
                "Islands that send heartbeats and contribute nothing, so that rounds do not wait for them.",
                len(merger.liveness.idle) if serves else math.nan,
            ),
            ("refused_contributions_total", "Contributions that this process has refused.", merger.inbox.refused),
            ("round_age_seconds", "Time since this process closed its last round.", rounds.clock() - rounds.closed_at),
            (
                "busy_ratio",
                "Recent rounds: share of the time in which the merger did not wait for contributions.",
                rounds.load.busy if rounds.load else math.nan,
            ),
            (
                "spectra_ratio",
                "Recent rounds: share of the time in which it changed spectra of matrices.",
                rounds.load.spectra if rounds.load else math.nan,
            ),
            (
                "stretch_ratio",
                "Recent rounds: steps of a round's largest contribution as a share of the run's interval.",
                rounds.load.stretch if rounds.load else math.nan,
            ),
        ):
            yield family(f"archipelago_merger_{name}", documentation, labels, [(labels, value)])
        counts = [({**labels, "code": code}, count) for code, count in sorted(merger.inbox.codes.items())]
        yield family(
            "archipelago_merger_refusals_by_code_total",
            "Contributions that this process has refused, or whose claims it lowered (claims.…), by reason.",
            {**labels, "code": ""},
            counts,
        )
