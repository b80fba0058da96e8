"""A whole run's metrics for Prometheus, read from Redis: the dashboard's `/metrics`.

A value that is not known (NaN) is left out, so an alert sees it as absent and no graph shows it as zero. Names and
units follow https://prometheus.io/docs/practices/naming: base units, and `_total` for counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from archipelago.ops.watch.advice import merge_loads
from archipelago.ops.watch.run_view import RunView

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: The units of losses (`broker.manifest`).
_UNIT = "bits per byte (of a task or a script, in its own unit)"

#: Maps a metric's name to the attribute of `RunView` and its documentation. The label is `run`.
RUN = {
    "archipelago_run_parameters": ("parameters", "Parameters of the model."),
    "archipelago_run_round": ("rounds", "The last round that has closed."),
    "archipelago_run_step": ("step", "Global step."),
    "archipelago_run_steps": ("steps", "Global step at which the run ends."),
    "archipelago_run_islands_known": ("known", "Islands seen in the last day."),
    "archipelago_run_islands_live": ("live", "Islands that sent a heartbeat lately and have not left."),
    "archipelago_run_islands_participating": ("participating", "Live islands that recent rounds have merged."),
    "archipelago_run_contributions_per_round": ("contributions_per_round", "Mean over the recent rounds."),
    "archipelago_run_pending_contributions": ("pending", "Published and neither merged nor refused."),
    "archipelago_run_pending_tokens": ("tokens_pending", "Tokens of the pending ones, each counted once."),
    "archipelago_run_unreadable_records": ("unreadable", "Records that cannot be read and are skipped."),
    "archipelago_run_unfinished": ("unfinished", "1 while the run has steps to make, else 0."),
    "archipelago_run_memory_used_bytes": ("memory_bytes", "Memory that Redis uses."),
    "archipelago_run_memory_limit_bytes": ("memory_limit_bytes", "Redis's maxmemory; 0 if it has none."),
    "archipelago_run_grace_seconds": ("grace_seconds", "Grace window, mean over the recent rounds."),
    "archipelago_run_open_seconds": ("open_seconds", "Time that a round is open, mean over the recent rounds."),
    "archipelago_run_round_age_seconds": ("round_seconds", "Time since the last round closed."),
    "archipelago_run_lacks_merger": ("lacks_merger", "1 while no merger serves a run that needs one, else 0."),
    "archipelago_run_loss": ("loss", f"Training loss in {_UNIT}, mean of the last round of each fragment."),
    "archipelago_run_held_out_loss": ("held_out_last", f"Held-out loss in {_UNIT}, newest evaluation."),
    "archipelago_run_merged_tokens_total": ("tokens_merged", "Tokens merged into every fragment."),
    "archipelago_run_trained_tokens_total": ("tokens_trained", "Tokens trained by all islands, merged or not."),
    "archipelago_run_lost_tokens": ("tokens_lost", "Trained tokens that were never merged."),
}

#: Maps a metric's name to the attribute of `Counters` and its documentation. The label is `run`.
COUNTERS = {
    "archipelago_run_published_contributions_total": ("published", "Contributions published."),
    "archipelago_run_merged_contributions_total": ("merged", "Contributions merged."),
    "archipelago_run_refused_contributions_total": ("refused", "Contributions refused."),
    "archipelago_run_sent_bytes_total": ("bytes_up", "Payload bytes from the islands."),
}

#: Maps a metric's name to the attribute of `MergeLoad` and its documentation: that of the busiest shard.
LOAD = {
    "archipelago_run_merger_busy_ratio": ("busy", "Share of the time in which the merger did not wait for work."),
    "archipelago_run_merger_spectra_ratio": ("spectra", "Share of the time in which it changed spectra of matrices."),
    "archipelago_run_merger_stretch_ratio": ("stretch", "Steps of a round's largest contribution over the interval."),
}

#: The labels are `run` and `code`.
REFUSALS = "archipelago_run_refusals_by_code_total"

#: Maps a metric's name to the attribute of `IslandView` and its documentation. The labels are `run` and `island`.
RUN_ISLAND = {
    "archipelago_run_island_live": ("live", "1 if the island sent a heartbeat lately and has not left, else 0."),
    "archipelago_run_island_last_seen_seconds": ("last_seen_seconds", "Time since its last heartbeat."),
    "archipelago_run_island_participation_ratio": ("participation", "Share of the recent rounds that merged it."),
    "archipelago_run_island_score": ("score", "How well its work agrees with that of the others; 1 is usual."),
    "archipelago_run_island_weight_factor": ("factor", "Factor on its weight that follows from the score."),
    "archipelago_run_island_steps_total": ("steps", "Inner steps made."),
    "archipelago_run_island_tokens_total": ("tokens", "Tokens trained on."),
    "archipelago_run_island_tokens_per_second": ("tokens_per_second", "Training speed."),
    "archipelago_run_island_step_seconds": ("step_seconds", "Time of an inner step, moving average."),
    "archipelago_run_island_loss": ("loss", f"Training loss in {_UNIT}."),
    "archipelago_run_island_staleness_versions": ("staleness", "Versions it is behind, mean over fragments."),
    "archipelago_run_island_backlog_contributions": ("backlog", "Contributions that wait to be sent."),
    "archipelago_run_island_refused_contributions_total": ("refused", "Contributions that were refused."),
    "archipelago_run_island_ignored_events_total": ("ignored", "Announcements that no merger can have sent."),
    "archipelago_run_island_sent_bytes_total": ("bytes_up", "Payload bytes sent."),
    "archipelago_run_island_received_bytes_total": ("bytes_down", "Payload bytes received."),
}


class RunCollector(Collector):
    """A collector of a run's metrics from one reading of Redis."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        view, labels = self._view, {"run": self._view.run}
        load = max((load for _, load in merge_loads(view)), key=lambda each: each.busy, default=None)
        for table, source in ((RUN, view), (COUNTERS, view.counters), (LOAD, load)):
            for name, (attribute, documentation) in table.items():
                value = math.nan if source is None else getattr(source, attribute)
                value = len(value) if isinstance(value, tuple) else value
                yield family(name, documentation, labels, [(labels, value)])
        codes = [(labels | {"code": code}, count) for code, count in sorted(view.refused_by_code.items())]
        yield family(REFUSALS, "Contributions refused, by code.", [*labels, "code"], codes)
        for name, (attribute, documentation) in RUN_ISLAND.items():
            samples = [(labels | {"island": island.name}, getattr(island, attribute)) for island in view.islands]
            yield family(name, documentation, [*labels, "island"], samples)


def family(
    name: str, documentation: str, labels: Iterable[str], samples: Iterable[tuple[Mapping[str, str], float]]
) -> Metric:
    """Return a counter (if the name ends with `_total`) or a gauge with these samples, without those that are NaN."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    out = kind(name, documentation, labels=list(labels))
    for values, number in samples:
        if not math.isnan(number):
            out.add_metric(list(values.values()), float(number))
    return out


def render(view: RunView) -> bytes:
    """Return the run's metrics in Prometheus' text format (`CONTENT_TYPE`)."""
    disable_created_metrics()  # type: ignore[no-untyped-call] # these series would double the size of each scrape
    return generate_latest(RunCollector(view))
