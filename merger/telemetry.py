"""A merger's metrics for Prometheus, and a point on each of its curves for every round."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from archipelago.broker.manifest import LossUnit, Manifest, loss_unit
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


def labels_of(manifest: Manifest) -> dict[str, str]:
    """Return the labels of a merger's metrics: the run and, if the run has several, the shard."""
    return {"run": manifest.run} | ({} if manifest.shard is None else {"shard": str(manifest.shard)})


class RoundMetrics:
    """Counts the rounds that this process has closed. The gauges are absent until the first of them.

    Args:
        manifests: The manifest of each shard, or that of a run with one shard.
        registry: Gets the metrics.
    """

    def __init__(self, manifests: Sequence[Manifest], registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels_of(manifests[0]))

        def counter(name: str, documentation: str) -> Counter:
            return Counter(f"archipelago_merger_{name}", documentation, names, registry=registry)

        self._rounds = counter("rounds_total", "Rounds that this process has closed.")
        self._merged = counter("merged_contributions_total", "Contributions that this process has merged.")
        self._tokens = counter(
            "merged_tokens_total", "Tokens merged: those of each contribution, divided by the number of fragments."
        )
        self._bytes_up = counter("received_bytes_total", "Payload bytes of the merged contributions.")
        self._bytes_down = counter("published_bytes_total", "Payload bytes of snapshots and differences.")
        self._staleness = Histogram(
            "archipelago_merger_staleness_versions",
            "Staleness of merged contributions.",
            names,
            buckets=STALENESS_BOUNDS,
            registry=registry,
        )
        self._unit = loss_unit(manifests[0].corpus)
        self._last = {
            name: Gauge(f"archipelago_merger_{name}", f"Last round: {documentation}", names, registry=registry)
            for name, documentation in {
                "quorum_seconds": "from the first contribution to the quorum.",
                "grace_seconds": "the grace window that was allowed.",
                "open_seconds": "from the first contribution to the close.",
                "merge_seconds": "arithmetic of the close.",
                "spectra_seconds": "changing spectra, a part of the arithmetic.",
                "busy_seconds": "since the previous round, without the time that the merger waited for contributions.",
                "loss": f"training loss in {self._unit.name}, mean of the members' by tokens.",
            }.items()
        }
        counters = (self._rounds, self._merged, self._tokens, self._bytes_up, self._bytes_down, self._staleness)
        for manifest in manifests:
            for metric in counters:  # they are 0 before the first round, and not absent
                metric.labels(**labels_of(manifest))

    def closed(self, manifest: Manifest, entry: TapeEntry, snapshot: Snapshot) -> None:
        """Count a round that was closed and committed, of the run or the shard with that manifest.

        A member's tokens count for each fragment of the run by equal parts.
        """
        labels, fragments = labels_of(manifest), len(manifest.fragments)
        self._rounds.labels(**labels).inc()
        self._merged.labels(**labels).inc(len(entry.members))
        self._tokens.labels(**labels).inc(sum(member.tokens for member in entry.members) / fragments)
        self._bytes_up.labels(**labels).inc(entry.bytes_up)
        self._bytes_down.labels(**labels).inc(snapshot.bytes + snapshot.difference_bytes)
        for member in entry.members:
            self._staleness.labels(**labels).observe(member.staleness)
        for name, gauge in self._last.items():
            value = self._unit.from_nats(entry.loss) if name == "loss" else getattr(entry, name)
            if math.isnan(value):
                gauge.remove(*labels.values())
            else:
                gauge.labels(**labels).set(value)


class RoundTelemetry:
    """Records each round that a merger commits, in metrics if there are any. Pass `closed` as `on_round`.

    Args:
        manifest: The manifest of the run, or of the shard that the merger serves.
        curves: Get a point for each round.
        metrics: Count the rounds.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self, manifest: Manifest, curves: CurveWriter, metrics: RoundMetrics | None, clock: Clock = time.monotonic
    ) -> None:
        self.clock = clock
        #: What recent rounds say about the merger's work; None until there are enough of them.
        self.load: MergeLoad | None = None
        #: When the last round was recorded, by `clock`; NaN before the first.
        self.closed_at = math.nan
        self._manifest, self._metrics = manifest, metrics
        self._recent: deque[TapeEntry] = deque(maxlen=ROUNDS_MAX)
        self._has_warned = False
        self._curves, self._unit = curves, loss_unit(manifest.corpus)

    def closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        """Record a round that was committed."""
        self.closed_at = self.clock()
        if self._metrics is not None:
            self._metrics.closed(self._manifest, entry, snapshot)
        self._curves.put(entry.round, values(entry, self._unit))
        self._recent.append(entry)
        self.load = merge_load(tuple(self._recent), self._manifest.config.sync.interval)
        if self.load is not None and self.load.is_slow and not self._has_warned:
            self._has_warned = True
            log.warning("%s %s", self.load.describe(), self.load.remedy, extra={"code": "merger.slow"})


class MergerCollector:
    """Reads what mergers know when Prometheus asks. Register it with a registry.

    Args:
        pairs: The merger of each shard, with its telemetry.
    """

    def __init__(self, pairs: Sequence[tuple[Merger, RoundTelemetry]]) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        """Yield what the mergers know now."""
        found = [(labels_of(merger.manifest), merger, self._values(merger, rounds)) for merger, rounds in self._pairs]
        for name, documentation in _OF_MERGER.items():
            samples = [(labels, values[name]) for labels, _, values in found]
            yield family(f"archipelago_merger_{name}", documentation, found[0][0], samples)
        counts = [
            ({**labels, "code": code}, count)
            for labels, merger, _ in found
            for code, count in sorted(merger.inbox.codes.items())
        ]
        yield family(
            "archipelago_merger_refusals_by_code_total",
            "Contributions that this process has refused, by reason.",
            {**found[0][0], "code": ""},
            counts,
        )

    def _values(self, merger: Merger, rounds: RoundTelemetry) -> dict[str, float]:
        """Return the value of each metric. A standby has not looked at the run, so its round and islands are NaN."""
        serves, load = merger.epoch > 0, rounds.load
        return {
            "serving": float(serves),
            "epoch": merger.epoch,
            "round": merger.state.closed if serves else math.nan,
            "live_islands": len(merger.live) if serves else math.nan,
            "idle_islands": len(merger.liveness.idle) if serves else math.nan,
            "refused_contributions_total": merger.inbox.codes.total(),
            "round_age_seconds": rounds.clock() - rounds.closed_at,
            "busy_ratio": load.busy if load else math.nan,
            "spectra_ratio": load.spectra if load else math.nan,
            "stretch_ratio": load.stretch if load else math.nan,
        }


_OF_MERGER = {
    "serving": "1 while this merger holds the lease, 0 as a standby.",
    "epoch": "Epoch of its lease, the fencing number; 0 without one.",
    "round": "The last round that has closed.",
    "live_islands": "Islands that rounds wait for.",
    "idle_islands": "Islands that send heartbeats and contribute nothing, so that rounds do not wait for them.",
    "refused_contributions_total": "Contributions that this process has refused.",
    "round_age_seconds": "Time since this process closed its last round.",
    "busy_ratio": "Recent rounds: share of the time in which the merger did not wait for contributions.",
    "spectra_ratio": "Recent rounds: share of the time in which it changed spectra of matrices.",
    "stretch_ratio": "Recent rounds: steps of a round's largest contribution as a share of the run's interval.",
}
