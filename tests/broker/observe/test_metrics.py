"""Metrics: families without unknown values, and a real scrape of an endpoint."""

from __future__ import annotations

import math
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import metrics
from archipelago.broker.observe.health import Health
from archipelago.broker.observe.options import WorkerOptions
from tests.failing import failing

Values = dict[tuple[str, str], float]


def parsed(text: bytes) -> Values:
    """Return values by name and island (or histogram bucket), as Prometheus' own parser reads them."""
    found: Values = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("island", sample.labels.get("le", "")))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def values(registry: CollectorRegistry) -> Values:
    return parsed(generate_latest(registry))


def scraped(port: int) -> Values:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read())


def test_a_family_is_a_counter_or_a_gauge_by_its_name() -> None:
    labels = {"island": "oslo"}
    counter = metrics.family("steps_total", "Steps.", labels, [(labels, 3)])
    gauge = metrics.family("loss", "Loss.", labels, [(labels, 2.5)])
    assert (counter.type, gauge.type) == ("counter", "gauge")
    assert [(s.name, s.labels, s.value) for s in counter.samples] == [("steps_total", labels, 3.0)]
    assert [(s.name, s.labels, s.value) for s in gauge.samples] == [("loss", labels, 2.5)]


def test_a_value_that_is_not_known_is_absent() -> None:
    assert metrics.family("loss", "Loss.", ["island"], [({"island": "oslo"}, math.nan)]).samples == []


def test_a_scrape_sees_the_present_value() -> None:
    registry = metrics.new_registry()
    steps = Counter("steps_total", "Steps.", registry=registry)
    port = metrics.serve(0, "127.0.0.1", registry, Health())
    steps.inc()
    assert scraped(port) == {("steps_total", ""): 1.0}
    steps.inc(2)
    assert scraped(port) == {("steps_total", ""): 3.0}


def test_two_endpoints_of_one_process_share_nothing() -> None:
    registries = [metrics.new_registry(), metrics.new_registry()]
    ports = [metrics.serve(0, "127.0.0.1", registry, Health()) for registry in registries]
    Counter("steps_total", "Steps.", registry=registries[0])
    assert [len(scraped(port)) for port in ports] == [1, 0]


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with failing(ConfigError, "config.metrics-address"):
            WorkerOptions(metrics_port=taken.getsockname()[1]).registry(Health())


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_an_error(port: int) -> None:
    with failing(ConfigError, "config.metrics-port"):
        WorkerOptions(metrics_port=port).registry(Health())


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 64])
def test_a_host_of_another_machine_is_an_error(host: str) -> None:
    with failing(ConfigError, "config.metrics-address"):
        WorkerOptions(metrics_port=0, metrics_host=host).registry(Health())
    with failing(ConfigError, "config.metrics-address"):
        metrics.require_free(host, [0])


def test_children_get_the_same_options_and_separate_ports() -> None:
    host = ["--metrics-host", "0.0.0.0"]  # noqa: S104
    options = WorkerOptions(metrics_port=9310, metrics_host=host[1], tensorboard=False, wandb=True, log_json=True)
    flags = ["--no-tensorboard", "--wandb", "--log-json"]
    assert options.flags(2) == [*flags, "--metrics-port", "9312", *host]
    assert options.curve_flags() == flags
    assert WorkerOptions().flags(1) == []
    assert WorkerOptions(metrics_port=0).flags(3) == ["--metrics-port", "0", "--metrics-host", "127.0.0.1"]


def test_a_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with failing(ConfigError, "config.metrics-address"):
            metrics.require_free("127.0.0.1", [port])
    metrics.require_free("127.0.0.1", [port])
