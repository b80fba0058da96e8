"""What the page says of a run, and the metrics of a whole run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.observe.merge_load import BUSY_SHARE, STRETCH
from archipelago.broker.transport import MergerStatus
from archipelago.ops.dashboard import metrics
from archipelago.ops.dashboard.page_data import to_json
from tests import samples

MANIFEST = samples.manifest()


def test_every_value_becomes_valid_json() -> None:
    text = to_json({"a": [float("nan"), float("inf"), 1.0, 0.123456789, 1.7e9 + 0.25], "b": (True, None, "x", 7)})
    assert json.loads(text) == {"a": [None, None, 1, 0.12346, 1_700_000_000], "b": [True, None, "x", 7]}


# -- metrics ----------------------------------------------------------------------------------------------------------


DEPLOY = Path(__file__).parents[3] / "ops" / "deploy"


def parsed(text: bytes) -> dict[tuple[str, str], float]:
    """Return values by name and island, as Prometheus' own parser reads them."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("island", ""))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_a_family_is_a_counter_or_a_gauge_by_its_name() -> None:
    labels = {"island": "oslo"}
    counter = metrics.family("steps_total", "Steps.", labels, [(labels, 3)])
    gauge = metrics.family("loss", "Loss.", labels, [(labels, 2.5)])
    assert (counter.type, gauge.type) == ("counter", "gauge")
    assert [(s.name, s.labels, s.value) for s in counter.samples] == [("steps_total", labels, 3.0)]
    assert [(s.name, s.labels, s.value) for s in gauge.samples] == [("loss", labels, 2.5)]
    assert metrics.family("loss", "Loss.", ["island"], [(labels, math.nan)]).samples == [], "an unknown value is absent"


def test_a_whole_run_is_exported() -> None:
    manifest = samples.manifest()
    transport = MemoryBroker().connect(manifest.run)
    transport.create(manifest, samples.first_snapshots(manifest))
    for name in ("oslo", "quito"):
        transport.island.heartbeat(samples.heartbeat(name))
    transport.island.publish(*samples.packed(np.ones(manifest.sizes[0], np.float32)))
    view = samples.view_of(transport)
    view = replace(view, rounds=1, merger=MergerStatus("m", 1, 4.0, 2.5), refused_by_code={"codec": 3})
    found = parsed(metrics.render(view))
    assert found["archipelago_run_islands_known", ""] == found["archipelago_run_islands_live", ""] == 2
    assert found["archipelago_run_islands_participating", ""] == 0
    assert found["archipelago_run_pending_contributions", ""] == 1
    assert found["archipelago_run_published_contributions_total", ""] == 1
    assert found["archipelago_run_pending_tokens", ""] == 100 // len(manifest.fragments)
    assert found["archipelago_run_round_age_seconds", ""] == 2.5
    assert found["archipelago_run_memory_used_bytes", ""] == view.memory_bytes > 0
    assert found["archipelago_run_island_live", "quito"] == 1
    assert found["archipelago_run_island_tokens_total", "oslo"] == 1000
    assert found[metrics.REFUSALS, ""] == 3
    exported = {metrics.REFUSALS, *metrics.RUN, *metrics.COUNTERS, *metrics.LOAD, *metrics.RUN_ISLAND}
    not_known = set(metrics.LOAD)  # There are too few rounds.
    not_known |= {"archipelago_run_held_out_loss", "archipelago_run_loss"}  # No evaluation, and no round.
    not_known |= {"archipelago_run_island_score", "archipelago_run_island_weight_factor"}
    assert {name for name, _ in found} == exported - not_known


def expressions(value: object) -> list[str]:
    """Return all queries in Grafana's JSON."""
    if isinstance(value, dict):
        own = [str(value[key]) for key in ("expr", "definition") if key in value]
        return own + [found for part in value.values() for found in expressions(part)]
    return [found for part in value for found in expressions(part)] if isinstance(value, list) else []


def test_grafana_and_the_alerts_use_exported_metrics() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    used = {name for text in expressions(board) for name in re.findall(r"\barchipelago_\w+", text)}
    assert len(used) > 25
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] and panel["title"] for panel in panels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for file, least in (("alerts.yml", 8), ("prometheus.yml", 0)):
        lines = (DEPLOY / file).read_text(encoding="utf-8").splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        named = set(re.findall(r"\barchipelago_\w+", text))
        assert len(named) >= least, file
        used |= named
    assert used <= {*metrics.RUN, *metrics.COUNTERS, *metrics.LOAD, *metrics.RUN_ISLAND}


def test_the_alert_about_the_merger_is_that_of_its_warning() -> None:
    text = (DEPLOY / "alerts.yml").read_text(encoding="utf-8")
    rule = text.partition("alert: MergerTooSlow")[2].partition("- alert:")[0]
    assert f"archipelago_run_merger_busy_ratio >= {BUSY_SHARE}" in rule
    assert f"archipelago_run_merger_stretch_ratio >= {STRETCH}" in rule
