"""Metrics of a worker for Prometheus, and the probes of an orchestrator: `/metrics`, `/healthz` and `/readyz`.

A worker counts its work with prometheus-client's own counters, gauges and histograms. Values that are kept elsewhere
(in a heartbeat, in Redis) are read at each scrape by a collector that yields the families below. A value that is not
known (NaN) is left out, so an alert sees it as absent and no graph shows it as zero. Names and units follow
https://prometheus.io/docs/practices/naming: base units, and `_total` for counters.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from archipelago.broker.errors import ConfigError

if TYPE_CHECKING:  # Importing prometheus_client takes a noticeable part of a worker's start.
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

HOST = "127.0.0.1"
PORT_MAX = 65535
ALIVE, READY = "/healthz", "/readyz"
#: A loop that has made no turn for this long hangs. One turn may hold a slow inner step, a compilation, or the merge of
#: a large fragment, so the bound is far above all of them.
HANG_SECONDS: Final = 900.0

Samples = Iterable[tuple[Mapping[str, str], float]]


class Health:
    """The health of one worker, for the probes. Its threads may ask at any time.

    `/healthz` fails when the worker's loop has made no turn for a long time, so that it should be killed and started
    again. `/readyz` holds once the worker has joined the run. Neither depends on Redis: a worker survives any outage of
    it. The worker is starting, then its loop runs, then it leaves. Only the loop is watched: it makes a turn now and
    then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, hang_seconds: float = HANG_SECONDS) -> None:
        self._clock, self._hang_seconds = clock, hang_seconds
        self._phase: Callable[[], str] = lambda: "starting"
        #: When the loop made its last turn; infinity before its first turn and after its last one.
        self._turned_at = math.inf

    def watched(self, stopped: Callable[[], bool], phase: Callable[[], str]) -> Callable[[], bool]:
        """Return `stopped` for a loop that asks it once in each turn. The loop runs from its first question on.

        `phase` returns what the loop does, in a few words.
        """

        def ask() -> bool:
            if stopped():
                self.leave()
                return True
            self._phase, self._turned_at = phase, self._clock()
            return False

        return ask

    def leave(self) -> None:
        """Note that the loop has ended, and that the worker leaves."""
        self._phase, self._turned_at = lambda: "leaving", math.inf

    def alive(self) -> tuple[bool, str]:
        """Return whether the loop is alive, or not watched, and what to say about it."""
        silent = self._clock() - self._turned_at
        if silent > self._hang_seconds:
            return False, f"{self._phase()}, but the loop has made no turn for {silent:.0f} s"
        return True, self._phase()

    def ready(self) -> tuple[bool, str]:
        """Return whether the worker has joined the run and works, and what to say about it."""
        is_alive, text = self.alive()
        return is_alive and self._turned_at < math.inf, text


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
    """Answer GET /metrics, /healthz and /readyz on separate threads until the process ends, and return the port.

    The port 0 takes a free one. Raises ConfigError for a port or a host that cannot be used.
    """
    if not 0 <= port <= PORT_MAX:
        raise _unusable(host, port, OSError(0, f"a port is 0 to {PORT_MAX}"))
    # Only a worker that serves metrics imports these, because http.server takes a noticeable part of a worker's start.
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    from prometheus_client import make_wsgi_app

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a probe comes every few seconds."""

    try:
        Server.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = Server((host, port), Handler)
    except (OSError, UnicodeError) as error:
        raise _unusable(host, port, error) from None
    server.set_app(_with_probes(health, make_wsgi_app(registry)))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


def _with_probes(health: Health, metrics: WSGIApplication) -> WSGIApplication:
    """Return a web application that answers the probes with status 200 or 503, and hands everything else on."""
    probes = {ALIVE: health.alive, READY: health.ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        probe = probes.get(environ.get("PATH_INFO", ""))
        if probe is None:
            return metrics(environ, start_response)
        holds, text = probe()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
        start_response("200 OK" if holds else "503 Service Unavailable", headers)
        return [f"{text}\n".encode()]

    return answer


def require_free(host: str, ports: Iterable[int]) -> None:
    """Raise ConfigError if metrics cannot be served on one of these ports. Another process may still take it later."""
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((host, port), family=family).close()
        except (OSError, UnicodeError) as error:
            raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """Return the error of an address. A part of a host's name that is longer than 63 characters is a UnicodeError."""
    why = getattr(error, "strerror", None) or error
    return ConfigError(
        f"metrics cannot be served on {host:.200}:{port} ({why})",
        "Choose another --metrics-port or --metrics-host.",
        code="config.value",
    )
