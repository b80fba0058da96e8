"""What an island shows of itself while it trains. Everything is read beside the training thread, which does nothing
for it: from the heartbeat that it fills in anyway, and from plain attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from archipelago.broker.observe import metrics
from archipelago.islands.worker import Island

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def point(island: Island) -> tuple[int, Mapping[str, float]] | None:
    """Values at the global step, once it trains."""
    beat = island.link.heartbeat
    if beat is None or beat.state != "training":
        return None
    return beat.global_step, {
        "loss": beat.loss,
        "learning_rate": island.config.inner.rate_at(beat.global_step),
        "tokens_per_second": beat.tokens_per_second,
        "step_seconds": beat.step_seconds or math.nan,
        "staleness": beat.staleness,
    }


def families(island: Island) -> Iterator[Metric]:
    """What Prometheus is told."""
    beat = island.link.heartbeat
    if beat is None:
        return iter(())
    since = island.link.clock() - island.link.arrived_at
    return metrics.of_island(
        island.manifest.run,
        beat,
        link_up=not island.link.trouble,
        learning_rate=island.config.inner.rate_at(beat.global_step),
        snapshot_age_seconds=since if math.isfinite(since) else math.nan,
    )
