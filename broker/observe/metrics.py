"""Export metrics to Prometheus: a registry for each worker, and its endpoint.

A worker counts its work with prometheus-client's own counters, gauges and histograms. Values that are kept elsewhere
(in a heartbeat, in Redis) are read at each scrape by a collector that yields the families below. A value that is not
known (NaN) is left out, so an alert sees it as absent and no graph shows it as zero. Names and units follow
https://prometheus.io/docs/practices/naming: base units, and `_total` for counters.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from archipelago.broker.errors import ConfigError

if TYPE_CHECKING:  # Importing prometheus_client takes a noticeable part of a worker's start.
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from archipelago.broker.observe.health import Health

HOST = "127.0.0.1"
PORT_MAX = 65535

Samples = Iterable[tuple[Mapping[str, str], float]]


def new_registry() -> CollectorRegistry:
    """Return an empty registry. Two workers in one process share nothing."""
    import prometheus_client

    # `_created` series would double the size of each scrape.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return prometheus_client.CollectorRegistry(auto_describe=False)


def family(name: str, documentation: str, labels: Iterable[str], samples: Samples) -> Metric:
    """Return a counter (if the name ends with `_total`) or a gauge with these samples, without those that are NaN."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    out = kind(name, documentation, labels=list(labels))
    for values, number in samples:
        if not math.isnan(number):
            out.add_metric(list(values.values()), float(number))
    return out


def serve(port: int, host: str, registry: CollectorRegistry, health: Health) -> int:
    """Answer GET /metrics, /healthz and /readyz on separate threads until the process ends.

    Args:
        port: The port to listen on; 0 takes a free one.
        host: The address to listen on.
        registry: The metrics.
        health: Answers the probes.

    Returns:
        The port.

    Raises:
        ConfigError: The port or the host cannot be used.
    """
    if not 0 <= port <= PORT_MAX:
        raise ConfigError(f"--metrics-port cannot be {port}", f"Choose 0 to {PORT_MAX}.", code="config.value")
    from archipelago.broker.observe import endpoint

    try:
        return endpoint.start(host, port, registry, health)
    except (OSError, UnicodeError) as error:
        raise _unusable(host, port, error) from None


def require_free(host: str, ports: Iterable[int]) -> None:
    """Raise ConfigError if metrics cannot be served on one of these ports. Another process may still take it later."""
    for port in ports:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                probe.bind(address)
                probe.listen()
        except (OSError, UnicodeError) as error:
            raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """Return the error of an address. A part of a host's name that is longer than 63 characters is a UnicodeError."""
    why = getattr(error, "strerror", None) or error
    return ConfigError(
        f"metrics cannot be served on {host:.200}:{port} ({why})",
        "Choose another --metrics-port or --metrics-host.",
        code="config.address",
    )
