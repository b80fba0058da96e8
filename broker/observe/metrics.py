"""What Prometheus is told: names, units and meaning of every metric, and the endpoint of a worker.

Each function below makes families of samples from plain values; nothing is counted twice or kept in a registry that
processes share. What is not known (NaN) is left out, so that an alert sees it as absent and no graph as zero. Names and
units follow https://prometheus.io/docs/practices/naming: base units, `_total` for what only grows.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Heartbeat, Snapshot, TapeEntry

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

HOST = "127.0.0.1"
PORT_MAX = 65535
STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""versions; upper ends of the histogram's buckets"""

ISLAND = {
    "archipelago_island_steps_total": "Inner steps made, over the island's returns.",
    "archipelago_island_tokens_total": "Tokens trained on, over the island's returns.",
    "archipelago_island_tokens_per_second": "Speed of training, moving average.",
    "archipelago_island_step_seconds": "Time of an inner step, moving average.",
    "archipelago_island_global_step": "Global step of the run, as the island knows it.",
    "archipelago_island_learning_rate": "Inner learning rate at that step.",
    "archipelago_island_loss": "Training loss in nats, mean since the last contribution.",
    "archipelago_island_staleness_versions": "Newest version announced minus version held, mean over the fragments.",
    "archipelago_island_backlog_contributions": "Contributions that wait to be sent.",
    "archipelago_island_sent_contributions_total": "Contributions that the broker has taken.",
    "archipelago_island_refused_contributions_total": "Contributions that the merger has refused.",
    "archipelago_island_sent_bytes_total": "Payload bytes sent.",
    "archipelago_island_received_bytes_total": "Payload bytes received.",
    "archipelago_island_link_up": "1 while the broker answers, else 0.",
    "archipelago_island_snapshot_age_seconds": "Since the last snapshot came.",
}
"""labels: run, island"""

MERGER = {
    "archipelago_merger_serving": "1 while this merger holds the lease, 0 as a standby.",
    "archipelago_merger_epoch": "Epoch of its lease, the fencing number; 0 without one.",
    "archipelago_merger_round": "The last round that has closed.",
    "archipelago_merger_rounds_total": "Rounds that this process has closed.",
    "archipelago_merger_live_islands": "Islands that are waited for.",
    "archipelago_merger_merged_contributions_total": "Contributions that this process has merged.",
    "archipelago_merger_refused_contributions_total": "Contributions that this process has refused.",
    "archipelago_merger_merged_tokens_total": "Tokens merged: each contribution's over the number of fragments.",
    "archipelago_merger_received_bytes_total": "Payload bytes of the merged contributions.",
    "archipelago_merger_published_bytes_total": "Payload bytes of snapshots and differences.",
    "archipelago_merger_quorum_seconds": "Last round: from the first contribution to the quorum.",
    "archipelago_merger_grace_seconds": "Last round: the grace window that was allowed.",
    "archipelago_merger_open_seconds": "Last round: from the first contribution to the close.",
    "archipelago_merger_merge_seconds": "Last round: arithmetic of the close.",
    "archipelago_merger_loss": "Last round: training loss in nats, mean of the members' by tokens.",
    "archipelago_merger_round_age_seconds": "Since this process closed its last round.",
}
"""labels: run"""

STALENESS = "archipelago_merger_staleness_versions"
STALENESS_MEANING = "Versions that merged contributions lagged behind."

RUN = {
    "archipelago_run_parameters": ("parameters", "Parameters of the model."),
    "archipelago_run_round": ("rounds", "The last round that has closed."),
    "archipelago_run_step": ("step", "Global step."),
    "archipelago_run_steps": ("steps", "Global step at which the run ends."),
    "archipelago_run_islands_known": ("known", "Islands that were heard of in the last day."),
    "archipelago_run_islands_live": ("live", "Islands that were heard of lately and have not left."),
    "archipelago_run_islands_participating": ("participating", "Live islands that recent rounds have merged."),
    "archipelago_run_contributions_per_round": ("contributions_per_round", "Mean over the recent rounds."),
    "archipelago_run_pending_contributions": ("pending", "Published and neither merged nor refused."),
    "archipelago_run_pending_tokens": ("pending_tokens", "Their tokens, summed over fragments."),
    "archipelago_run_books_balanced": ("balanced", "1 where published = merged + refused + pending, else 0."),
    "archipelago_run_memory_used_bytes": ("memory_bytes", "Memory that Redis holds."),
    "archipelago_run_memory_limit_bytes": ("memory_limit_bytes", "Its maxmemory; 0 where there is none."),
    "archipelago_run_grace_seconds": ("grace_seconds", "Grace window, mean over the recent rounds."),
    "archipelago_run_open_seconds": ("open_seconds", "Time that a round is open, mean over the recent rounds."),
    "archipelago_run_loss": ("loss", "Training loss in nats, mean of the last round of each fragment."),
    "archipelago_run_bits_per_byte": ("bits_per_byte_last", "Held-out bits per byte, newest evaluation."),
    "archipelago_run_merged_tokens_total": ("tokens_merged", "Tokens merged into every fragment."),
    "archipelago_run_trained_tokens_total": ("tokens_trained", "Tokens trained by all islands, merged or not."),
    "archipelago_run_lost_tokens": ("tokens_lost", "Trained by islands that are gone, and merged by nobody."),
    "archipelago_run_sent_bytes_total": ("bytes_up", "Payload bytes from the islands."),
    "archipelago_run_received_bytes_total": ("bytes_down", "Payload bytes to the islands."),
}
"""name: (field of `ops.view.RunView`, meaning); labels: run"""

BOOKS = {
    "archipelago_run_published_contributions_total": ("published", "Contributions published."),
    "archipelago_run_merged_contributions_total": ("merged", "Contributions merged."),
    "archipelago_run_refused_contributions_total": ("refused", "Contributions refused."),
    "archipelago_run_kept_contributions": ("kept", "Merged ones in the stream until a checkpoint covers them."),
}
"""name: (field of `Books`, meaning); labels: run"""

ROUND_AGE = "archipelago_run_round_age_seconds"
ROUND_AGE_MEANING = "Since the last round closed."

RUN_ISLAND = {
    "archipelago_run_island_live": ("live", "1 for an island that was heard of lately and has not left, else 0."),
    "archipelago_run_island_last_seen_seconds": ("last_seen_seconds", "Since its last heartbeat."),
    "archipelago_run_island_participation_ratio": ("participation", "Share of the recent rounds that it is in."),
    "archipelago_run_island_steps_total": ("steps", "Inner steps made."),
    "archipelago_run_island_tokens_total": ("tokens", "Tokens trained on."),
    "archipelago_run_island_tokens_per_second": ("tokens_per_second", "Speed of training."),
    "archipelago_run_island_loss": ("loss", "Training loss in nats."),
    "archipelago_run_island_staleness_versions": ("staleness", "Versions that it lags behind, mean over fragments."),
    "archipelago_run_island_backlog_contributions": ("backlog", "Contributions that wait to be sent."),
    "archipelago_run_island_refused_contributions_total": ("refused", "Contributions that were refused."),
    "archipelago_run_island_sent_bytes_total": ("bytes_up", "Payload bytes sent."),
    "archipelago_run_island_received_bytes_total": ("bytes_down", "Payload bytes received."),
}
"""name: (field of `ops.view.IslandView`, meaning); labels: run, island"""


def exported() -> frozenset[str]:
    """Every name that a query may use."""
    histogram = {f"{STALENESS}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
    return frozenset([*ISLAND, *MERGER, *histogram, *RUN, *BOOKS, ROUND_AGE, *RUN_ISLAND])


def _family(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    """One metric with its samples; what is not known is left out."""
    from prometheus_client.core import Metric

    family = Metric(name.removesuffix("_total"), meaning, "counter" if name.endswith("_total") else "gauge")
    for labels, value in samples:
        if not math.isnan(value):
            family.add_sample(name, dict(labels), float(value))
    return family


def of_island(
    run: str, beat: Heartbeat, *, link_up: bool, learning_rate: float = math.nan, snapshot_age_seconds: float = math.nan
) -> Iterator[Metric]:
    """One island, from what it says of itself."""
    values = {
        "steps_total": beat.steps,
        "tokens_total": beat.tokens,
        "tokens_per_second": beat.tokens_per_second,
        "step_seconds": beat.step_seconds,
        "global_step": beat.global_step,
        "learning_rate": learning_rate,
        "loss": beat.loss,
        "staleness_versions": beat.staleness,
        "backlog_contributions": beat.backlog,
        "sent_contributions_total": beat.sent,
        "refused_contributions_total": beat.refused,
        "sent_bytes_total": beat.bytes_up,
        "received_bytes_total": beat.bytes_down,
        "link_up": link_up,
        "snapshot_age_seconds": snapshot_age_seconds,
    }
    labels = {"run": run, "island": beat.island}
    for name, meaning in ISLAND.items():
        yield _family(name, meaning, [(labels, values[name.removeprefix("archipelago_island_")])])


@dataclass
class MergerTally:
    """What one merger's process has done so far. Its thread writes; whoever scrapes reads."""

    run: str
    fragments: int
    rounds: int = 0
    merged: int = 0
    refused: int = 0
    tokens: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    last: TapeEntry | None = None
    closed_at: float = math.nan
    """of the merger's clock"""
    staleness_sum: int = 0
    staleness_buckets: list[int] = field(default_factory=lambda: [0] * (len(STALENESS_BOUNDS) + 1))

    def closed(self, entry: TapeEntry, snapshot: Snapshot, at: float) -> None:
        """A round was closed and committed."""
        self.rounds += 1
        self.merged += len(entry.members)
        self.tokens += sum(member.tokens for member in entry.members) / self.fragments
        self.bytes_up += entry.bytes_up
        self.bytes_down += snapshot.bytes + snapshot.difference_bytes
        self.last, self.closed_at = entry, at
        for member in entry.members:
            self.staleness_sum += member.staleness
            self.staleness_buckets[bisect.bisect_left(STALENESS_BOUNDS, member.staleness)] += 1

    def families(self, *, epoch: int, closed: int, live: int, now: float) -> Iterator[Metric]:
        """`closed` is the run's last round, `now` of the clock that `closed` was given."""
        last = self.last
        values: dict[str, float] = {
            "serving": epoch > 0,
            "epoch": epoch,
            "round": closed if epoch else math.nan,  # a standby has not looked
            "rounds_total": self.rounds,
            "live_islands": live if epoch else math.nan,
            "merged_contributions_total": self.merged,
            "refused_contributions_total": self.refused,
            "merged_tokens_total": self.tokens,
            "received_bytes_total": self.bytes_up,
            "published_bytes_total": self.bytes_down,
            "quorum_seconds": last.quorum_seconds if last else math.nan,
            "grace_seconds": last.grace_seconds if last else math.nan,
            "open_seconds": last.open_seconds if last else math.nan,
            "merge_seconds": last.merge_seconds if last else math.nan,
            "loss": last.loss if last else math.nan,
            "round_age_seconds": now - self.closed_at,
        }
        for name, meaning in MERGER.items():
            yield _family(name, meaning, [({"run": self.run}, values[name.removeprefix("archipelago_merger_")])])
        yield self._staleness()

    def _staleness(self) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(STALENESS, STALENESS_MEANING, labels=["run"])
        ends = [*(str(float(bound)) for bound in STALENESS_BOUNDS), "+Inf"]
        counts = itertools.accumulate(self.staleness_buckets)
        family.add_metric([self.run], list(zip(ends, counts, strict=True)), sum_value=self.staleness_sum)
        return family


def of_run(view: Mapping[str, Any], seconds_since_round: float = math.nan) -> Iterator[Metric]:
    """A whole run and its islands, from a reading of Redis (`ops.view.RunView` as a dictionary)."""
    labels = {"run": str(view["run"])}
    for table, values in ((RUN, view), (BOOKS, view["books"])):
        for name, (key, meaning) in table.items():
            yield _family(name, meaning, [(labels, values[key])])
    yield _family(ROUND_AGE, ROUND_AGE_MEANING, [(labels, seconds_since_round)])
    islands: Sequence[Mapping[str, Any]] = view["islands"]
    for name, (key, meaning) in RUN_ISLAND.items():
        yield _family(name, meaning, [({**labels, "island": island["name"]}, island[key]) for island in islands])


@dataclass(frozen=True)
class _Collector:
    """What a registry asks when somebody scrapes."""

    families: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.families()


def registry_of(families: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry of its own, which asks `families` anew for each scrape."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return registry


def render(view: Mapping[str, Any], seconds_since_round: float = math.nan) -> bytes:
    """`of_run` in Prometheus' text format: what a dashboard's /metrics answers (`CONTENT_TYPE`).

    `seconds_since_round`: the newest tape entry's age by the wall clock; NaN where it is not known.
    """
    from prometheus_client import generate_latest

    return generate_latest(registry_of(lambda: of_run(view, seconds_since_round)))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def serve(port: int, host: str, families: Callable[[], Iterable[Metric]]) -> int:
    """Answers GET /metrics on a thread of its own for as long as the process lives; the port, which 0 leaves open.

    Raises ConfigError where the port cannot be had.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, host, registry=registry_of(families))
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served on {host}:{port} ({error.strerror or error})",
            "Choose another --metrics-port (0 takes any that is free), or another --metrics-host.",
        ) from None
    return int(server.server_port)
