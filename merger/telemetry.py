"""A merger's metrics for Prometheus, and a point on each of its curves for every round."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from archipelago.broker.manifest import LossUnit, Manifest, loss_unit
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.merge_load import ROUNDS_MAX, MergeLoad, merge_load
from archipelago.broker.observe.metrics import family
from archipelago.merger.service import Clock, Merger

if TYPE_CHECKING:
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


class RoundTelemetry:
    """Records each round that a merger commits. Pass `closed` as `on_round`.

    Args:
        curves: Get a point for each round.

    Attributes:
        totals: What the rounds of this process add up to, by the name of the metric.
        merged_tokens: The tokens that were merged.
        staleness: How many contributions had each staleness.
        last: The last round.
        load: What recent rounds say about the merger's work; None until there are enough of them.
        closed_at: When the last round was recorded, by `clock`; NaN before the first.
    """

    def __init__(self, manifest: Manifest, curves: CurveWriter, clock: Clock = time.monotonic) -> None:
        self.clock, self.unit = clock, loss_unit(manifest.corpus)
        self.totals: Counter[str] = Counter()
        self.merged_tokens = 0.0
        self.staleness: Counter[int] = Counter()
        self.last: TapeEntry | None = None
        self.load: MergeLoad | None = None
        self.closed_at = math.nan
        self._manifest, self._curves = manifest, curves
        self._recent: deque[TapeEntry] = deque(maxlen=ROUNDS_MAX)
        self._has_warned = False

    def closed(self, entry: TapeEntry, snapshot: Snapshot) -> None:
        """Record a round that was committed. A member's tokens count for each fragment of the run by equal parts."""
        self.closed_at, self.last = self.clock(), entry
        self.totals["rounds_total"] += 1
        self.totals["merged_contributions_total"] += len(entry.members)
        tokens = sum(member.tokens for member in entry.members) / len(self._manifest.fragments)
        self.merged_tokens += tokens
        self.totals["received_bytes_total"] += entry.bytes_up
        self.totals["published_bytes_total"] += snapshot.bytes + snapshot.difference_bytes
        self.staleness.update(member.staleness for member in entry.members)
        self._curves.put(entry.round, values(entry, self.unit))
        self._recent.append(entry)
        self.load = merge_load(tuple(self._recent), self._manifest.config.sync.interval)
        if self.load is not None and self.load.is_slow and not self._has_warned:
            self._has_warned = True
            log.warning("%s %s", self.load.describe(), self.load.remedy, extra={"code": "merger.slow"})


class MergerCollector:
    """Reads what mergers know when Prometheus asks. Register it with a registry."""

    def __init__(self, pairs: Sequence[tuple[Merger, RoundTelemetry]]) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        """Yield what the mergers know now."""
        from prometheus_client.core import HistogramMetricFamily

        found = [(labels_of(merger.manifest), merger, rounds) for merger, rounds in self._pairs]
        names, known = list(found[0][0]), [_values(merger, rounds) for _, merger, rounds in found]
        for name, documentation in METRICS.items():
            samples = [(labels, each[name]) for (labels, _, _), each in zip(found, known, strict=True)]
            yield family(f"archipelago_merger_{name}", documentation, names, samples)
        counts = [
            ({**labels, "code": code}, count)
            for labels, merger, _ in found
            for code, count in sorted(merger.inbox.codes.items())
        ]
        documentation = "Contributions that this process has refused, by reason."
        yield family("archipelago_merger_refusals_by_code_total", documentation, [*names, "code"], counts)
        histogram = HistogramMetricFamily(
            "archipelago_merger_staleness_versions", "Staleness of merged contributions.", labels=names
        )
        for labels, _, rounds in found:
            seen = rounds.staleness.copy()  # the merger counts in another thread
            below = [(str(float(bound)), sum(seen[n] for n in seen if n <= bound)) for bound in STALENESS_BOUNDS]
            total = sum(n * count for n, count in seen.items())
            histogram.add_metric(list(labels.values()), [*below, ("+Inf", seen.total())], total)
        yield histogram


def _values(merger: Merger, rounds: RoundTelemetry) -> dict[str, float]:
    """Return the value of each metric. NaN is not shown: what a standby, or a merger without a round, does not know."""
    serves, load, last = merger.epoch > 0, rounds.load, rounds.last
    shown = {name: getattr(last, name) if last else math.nan for name in OF_LAST}
    return {
        **{name: rounds.totals[name] for name in METRICS},
        **shown,
        "merged_tokens_total": rounds.merged_tokens,
        "loss": rounds.unit.from_nats(last.loss) if last else math.nan,
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


#: The metrics of the last round that its tape entry has.
OF_LAST = {
    "quorum_seconds": "Last round: from the first contribution to the quorum.",
    "grace_seconds": "Last round: the grace window that was allowed.",
    "open_seconds": "Last round: from the first contribution to the close.",
    "merge_seconds": "Last round: arithmetic of the close.",
    "spectra_seconds": "Last round: changing spectra, a part of the arithmetic.",
    "busy_seconds": "Last round: since the previous one, without the time that the merger waited for contributions.",
}
#: All metrics with one value for each merger, with their documentation.
METRICS = OF_LAST | {
    "loss": "Last round: training loss in the unit of the run's losses, mean of the members' by tokens.",
    "rounds_total": "Rounds that this process has closed.",
    "merged_contributions_total": "Contributions that this process has merged.",
    "merged_tokens_total": "Tokens merged: those of each contribution, divided by the number of fragments.",
    "received_bytes_total": "Payload bytes of the merged contributions.",
    "published_bytes_total": "Payload bytes of snapshots and differences.",
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
