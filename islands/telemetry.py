"""An island's metrics for Prometheus and its curves.

Other threads read the values from the heartbeat and from plain attributes. This costs the training thread nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipelago.broker.manifest import loss_unit
from archipelago.broker.observe.metrics import family
from archipelago.islands.worker import Island

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def point(island: Island) -> tuple[int, Mapping[str, float]] | None:
    """Return the global step and the values that curves show, or None while the island does not train."""
    beat = island.link.heartbeat
    if beat is None or beat.state != "training":
        return None
    return beat.global_step, {
        "loss": loss_unit(island.manifest.corpus).from_nats(beat.loss),
        "learning_rate": island.learning_rate,
        "tokens_per_second": beat.tokens_per_second,
        "step_seconds": beat.step_seconds or math.nan,
        "staleness": beat.staleness,
    }


@dataclass(frozen=True)
class IslandCollector:
    """Reads an island's state at each scrape; yields nothing before its first heartbeat."""

    island: Island

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        island = self.island
        beat = island.link.heartbeat
        if beat is None:
            return
        unit = loss_unit(island.manifest.corpus)
        since = island.link.clock() - island.link.channels.arrived_at
        labels = {"run": island.manifest.run, "island": beat.island}
        for name, documentation, value in (
            ("steps_total", "Inner steps made, including those before the island rejoined.", beat.steps),
            ("tokens_total", "Tokens trained on, including those before the island rejoined.", beat.tokens),
            ("tokens_per_second", "Training speed, moving average.", beat.tokens_per_second),
            ("step_seconds", "Time of an inner step, moving average.", beat.step_seconds),
            ("global_step", "Global step of the run, as the island knows it.", beat.global_step),
            ("learning_rate", "Inner learning rate.", island.learning_rate),
            ("loss", f"Training loss in {unit.name}, mean since the last contribution.", unit.from_nats(beat.loss)),
            ("staleness_versions", "Newest version announced minus version held, mean over fragments.", beat.staleness),
            ("backlog_contributions", "Contributions that wait to be sent.", beat.backlog),
            ("sent_contributions_total", "Contributions that the broker has acknowledged.", beat.sent),
            ("refused_contributions_total", "Contributions that the merger has refused.", beat.refused),
            ("ignored_events_total", "Announcements that no merger of the run can have sent.", beat.ignored),
            ("sent_bytes_total", "Payload bytes sent.", beat.bytes_up),
            ("received_bytes_total", "Payload bytes received.", beat.bytes_down),
            ("link_up", "1 while the broker answers, else 0.", float(not island.link.trouble)),
            ("snapshot_age_seconds", "Time since the last snapshot arrived.", since if since < math.inf else math.nan),
        ):
            yield family(f"archipelago_island_{name}", documentation, labels, [(labels, value)])
