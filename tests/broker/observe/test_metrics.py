"""Metrics and probes: families without unknown values, a real scrape, and what the probes say in each phase."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import metrics
from archipelago.broker.observe.metrics import HANG_SECONDS, Health
from archipelago.broker.observe.options import WorkerOptions
from archipelago.ops.experiments.virtual_time import VirtualClock
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
    assert metrics.family("loss", "Loss.", ["island"], [(labels, math.nan)]).samples == [], "an unknown value is absent"


def test_a_scrape_sees_the_present_value_of_its_own_endpoint() -> None:
    registries = [metrics.new_registry(), metrics.new_registry()]
    port, other = (metrics.serve(0, "127.0.0.1", registry, Health()) for registry in registries)
    steps = Counter("steps_total", "Steps.", registry=registries[0])
    for value in (1.0, 2.0):
        steps.inc()
        assert (scraped(port), scraped(other)) == ({("steps_total", ""): value}, {})


def test_an_address_that_cannot_be_served_is_an_error_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with failing(ConfigError, "config.value"):
            metrics.require_free("127.0.0.1", [port])
        for number, host, code in (
            (port, "127.0.0.1", "config.value"),
            (-1, "127.0.0.1", "config.value"),
            (65536, "127.0.0.1", "config.value"),
            (0, "192.0.2.1", "config.value"),
            (0, "a" * 64, "config.value"),
        ):
            with failing(ConfigError, code):
                WorkerOptions(metrics_port=number, metrics_host=host).registry(Health())
    metrics.require_free("127.0.0.1", [port])


def test_children_get_the_same_options_and_separate_ports() -> None:
    host = ["--metrics-host", "0.0.0.0"]  # noqa: S104
    options = WorkerOptions(metrics_port=9310, metrics_host=host[1], tensorboard=False, log_json=True)
    flags = ["--no-tensorboard", "--log-json"]
    assert options.flags(2) == [*flags, "--metrics-port", "9312", *host]
    assert options.curve_flags() == flags
    assert WorkerOptions().flags(1) == []
    assert WorkerOptions(metrics_port=0).flags(3) == ["--metrics-port", "0", "--metrics-host", "127.0.0.1"]


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_worker_is_alive_at_once_and_ready_once_its_loop_runs() -> None:
    health, stops = Health(VirtualClock(1000.0)), [False, True]
    assert (health.alive(), health.ready()) == ((True, "starting"), (False, "starting"))
    stopped = health.watched(lambda: stops.pop(0), lambda: "training")
    assert not health.ready()[0], "the loop has not begun"
    assert not stopped()
    assert (health.alive(), health.ready()) == ((True, "training"), (True, "training"))
    assert stopped()
    assert (health.alive(), health.ready()) == ((True, "leaving"), (False, "leaving"))


def test_only_a_loop_without_turns_is_dead_after_a_long_time() -> None:
    clock = VirtualClock(1000.0)
    health = Health(clock)
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0], "it may start for as long as it takes"
    stopped = health.watched(lambda: False, lambda: "training")
    stopped()
    clock.now += HANG_SECONDS
    assert health.alive()[0], "a slow turn is no reason to be killed"
    clock.now += 1.0
    assert not health.alive()[0] and not health.ready()[0]
    stopped()
    assert health.alive()[0] and health.ready()[0], "it comes back with a turn"
    health.leave()
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0], "it may leave for as long as it takes"


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_probes_are_served_beside_the_metrics() -> None:
    health, epoch = Health(), [0]
    port = metrics.serve(0, "127.0.0.1", metrics.new_registry(), health)
    assert answer(port, "/healthz") == (200, "starting\n")
    assert answer(port, "/readyz") == (503, "starting\n")
    health.watched(lambda: False, lambda: "serving" if epoch[0] else "standing by")()
    assert answer(port, "/healthz") == answer(port, "/readyz") == (200, "standing by\n"), "an answer of another length"
    epoch[0] = 3
    assert answer(port, "/readyz") == (200, "serving\n"), "the present phase"
    assert answer(port, "/metrics")[0] == 200
