"""What Prometheus is told: every name, value and label; a real scrape; and that the dashboard and the alerts that ship
ask for nothing else."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.errors import ConfigError
from archipelago.broker.memory import MemoryBroker
from archipelago.broker.messages import Member
from archipelago.broker.observe import metrics
from archipelago.broker.observe.options import WorkerOptions
from archipelago.ops.watch.run_view import observe
from tests import samples

DEPLOY = Path(__file__).parents[3] / "ops" / "deploy"
ROUND = samples.commit([])
Read = dict[tuple[str, str], float]


def read(text: bytes) -> Read:
    """Values by name and island (or bucket) of an exposition, through the parser that Prometheus' own client has."""
    found: Read = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels["run"] == "sample", sample
            key = (sample.name, sample.labels.get("island", sample.labels.get("le", "")))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def exposed(families: Iterable[Metric]) -> Read:
    registry: CollectorRegistry = metrics.registry_of(lambda: families)
    return read(generate_latest(registry))


def member(staleness: int) -> Member:
    return Member("a", "x", 0, 0, staleness, 0.5, 1.0, 100, 4, 2.0)


def test_an_island() -> None:
    beat = samples.heartbeat("oslo", backlog=3, sent=7, refused=2, bytes_up=11, bytes_down=13, staleness=0.5)
    families = list(metrics.of_island("sample", beat, link_up=False, learning_rate=0.25, snapshot_age_seconds=1.5))
    found = exposed(families)
    assert {name for name, _ in found} == set(metrics.ISLAND)
    assert {island for _, island in found} == {"oslo"}
    values = {name.removeprefix("archipelago_island_"): value for (name, _), value in found.items()}
    assert values == {
        "steps_total": 10, "tokens_total": 1000, "tokens_per_second": 100, "step_seconds": 0.1, "global_step": 10,
        "learning_rate": 0.25, "loss": 2, "staleness_versions": 0.5, "backlog_contributions": 3,
        "sent_contributions_total": 7, "refused_contributions_total": 2, "sent_bytes_total": 11,
        "received_bytes_total": 13, "link_up": 0, "snapshot_age_seconds": 1.5,
    }  # fmt: skip
    assert {family.type for family in families} == {"gauge", "counter"}
    for family in families:
        assert (family.type == "counter") == all(sample.name.endswith("_total") for sample in family.samples)
        assert family.documentation


def test_what_is_not_known_is_absent() -> None:
    found = exposed(metrics.of_island("sample", samples.heartbeat("a", loss=math.nan), link_up=True))
    missing = {"loss", "learning_rate", "snapshot_age_seconds"}
    assert {name.removeprefix("archipelago_island_") for name in set(metrics.ISLAND) - {n for n, _ in found}} == missing


def test_a_merger() -> None:
    tally = metrics.MergerTally("sample", fragments=2)
    entry = replace(ROUND.tape, merge_seconds=0.125, bytes_up=7)
    snapshot = replace(ROUND.snapshot, bytes=30, difference_bytes=4)
    tally.closed(replace(entry, members=(member(0), member(0), member(5))), snapshot, at=10.0)
    tally.closed(replace(entry, members=(member(99),), loss=1.5), snapshot, at=12.0)
    tally.refused = 6
    found = exposed(tally.families(epoch=3, closed=8, live=2, now=12.5))
    values = {name.removeprefix("archipelago_merger_"): value for (name, bucket), value in found.items() if not bucket}
    assert values == {
        "serving": 1, "epoch": 3, "round": 8, "rounds_total": 2, "live_islands": 2, "merged_contributions_total": 4,
        "refused_contributions_total": 6, "merged_tokens_total": 200, "received_bytes_total": 14,
        "published_bytes_total": 68, "quorum_seconds": 0.1, "grace_seconds": 0.2, "open_seconds": 0.3,
        "merge_seconds": 0.125, "loss": 1.5, "round_age_seconds": 0.5,
        "staleness_versions_count": 4, "staleness_versions_sum": 104,
    }  # fmt: skip
    buckets = [value for (_, bucket), value in found.items() if bucket]
    assert buckets == [2, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert {name for name, bucket in found if bucket} == {f"{metrics.STALENESS}_bucket"}


def test_a_merger_that_stands_by_says_what_it_knows() -> None:
    found = exposed(metrics.MergerTally("sample", 2).families(epoch=0, closed=0, live=0, now=5.0))
    assert found["archipelago_merger_serving", ""] == 0
    assert found["archipelago_merger_rounds_total", ""] == 0
    for unknown in ("round", "live_islands", "open_seconds", "round_age_seconds"):
        assert (f"archipelago_merger_{unknown}", "") not in found


def test_a_whole_run() -> None:
    manifest = samples.manifest()
    transport = MemoryBroker().connect(manifest.run)
    transport.create(manifest, samples.first_snapshots(manifest))
    for name in ("oslo", "quito"):
        transport.heartbeat(samples.heartbeat(name))
    transport.publish(*samples.packed(np.ones(manifest.sizes[0], np.float32)))
    view = observe(transport, manifest)
    found = read(metrics.render(asdict(view), 2.5))
    assert found["archipelago_run_islands_known", ""] == found["archipelago_run_islands_live", ""] == 2
    assert found["archipelago_run_islands_participating", ""] == 0
    assert found["archipelago_run_pending_contributions", ""] == 1
    assert found["archipelago_run_published_contributions_total", ""] == 1
    assert found["archipelago_run_pending_tokens", ""] == 100
    assert found["archipelago_run_books_balanced", ""] == 1
    assert found["archipelago_run_round_age_seconds", ""] == 2.5
    assert found["archipelago_run_memory_used_bytes", ""] == view.memory_bytes > 0
    assert found["archipelago_run_island_live", "quito"] == 1
    assert found["archipelago_run_island_tokens_total", "oslo"] == 1000
    assert ("archipelago_run_bits_per_byte", "") not in found  # nobody has evaluated
    named = {name for name, _ in found}
    everything = {*metrics.RUN, *metrics.BOOKS, metrics.ROUND_AGE, *metrics.RUN_ISLAND}
    assert everything - named == {"archipelago_run_bits_per_byte", "archipelago_run_loss"}
    assert named <= metrics.exported()


# -- the endpoint ---------------------------------------------------------------------------------------------------


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: bytes = answer.read()
    return text


def test_a_scrape_sees_what_is_so_now() -> None:
    beats = [samples.heartbeat("a", steps=1)]
    port = metrics.serve(0, "127.0.0.1", lambda: metrics.of_island("sample", beats[-1], link_up=True))
    assert read(scraped(port))["archipelago_island_steps_total", "a"] == 1
    beats.append(samples.heartbeat("a", steps=2))
    assert read(scraped(port))["archipelago_island_steps_total", "a"] == 2


def test_two_endpoints_of_one_process_share_nothing() -> None:
    ports = [
        metrics.serve(0, "127.0.0.1", lambda n=n: metrics.of_island("sample", samples.heartbeat(n), link_up=True))  # type: ignore[misc]
        for n in "ab"
    ]
    assert [{island for _, island in read(scraped(port))} for port in ports] == [{"a"}, {"b"}]


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} \(Address already in use\).*another --metrics-port"):
            WorkerOptions(metrics_port=port).endpoint()


@pytest.mark.parametrize("options", [{"metrics_port": -1}, {"metrics_port": 65536}])
def test_ports_that_are_none(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="Choose 0 to 65535"):
        WorkerOptions(**options).endpoint()  # type: ignore[arg-type]


def test_a_host_that_is_none_of_this_machine_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        WorkerOptions(metrics_port=0, metrics_host="192.0.2.1").endpoint()


def test_children_are_given_the_same_on_ports_of_their_own() -> None:
    host = ["--metrics-host", "0.0.0.0"]  # noqa: S104
    options = WorkerOptions(metrics_port=9310, metrics_host=host[1], tensorboard=False, wandb=True, log_json=True)
    flags = ["--no-tensorboard", "--wandb", "--log-json"]
    assert options.flags(2) == [*flags, "--metrics-port", "9312", *host]
    assert options.curve_flags() == flags
    assert WorkerOptions().flags(1) == []
    assert WorkerOptions(metrics_port=0).flags(3) == ["--metrics-port", "0", "--metrics-host", "127.0.0.1"]


# -- what ships for those who look ----------------------------------------------------------------------------------


def expressions(value: object) -> list[str]:
    """Every query in Grafana's JSON."""
    if isinstance(value, dict):
        own = [str(value[key]) for key in ("expr", "definition") if key in value]
        return own + [found for part in value.values() for found in expressions(part)]
    return [found for part in value for found in expressions(part)] if isinstance(value, list) else []


def test_grafana_asks_for_what_is_exported() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = {name for text in expressions(board) for name in re.findall(r"\barchipelago_\w+", text)}
    assert len(asked) > 30
    assert asked <= metrics.exported()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] and panel["title"] for panel in panels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("file", ["alerts.yml", "prometheus.yml"])
def test_alerts_ask_for_what_is_exported(file: str) -> None:
    text = "\n".join(
        line for line in (DEPLOY / file).read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    )
    asked = set(re.findall(r"\barchipelago_\w+", text))
    assert asked <= metrics.exported()
    assert (len(asked) >= 8) == (file == "alerts.yml")
