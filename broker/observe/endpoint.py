"""The web server of a worker: its metrics, and the probes of an orchestrator.

Only a worker that serves metrics imports this module, because http.server takes a noticeable part of a worker's start.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from archipelago.broker.observe.health import Health

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ALIVE, READY = "/healthz", "/readyz"
TEXT = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))


def start(host: str, port: int, registry: CollectorRegistry, health: Health) -> int:
    """Serve on threads of their own until the process ends, and return the port. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = family

    server = Server((host, port), _SilentHandler)
    server.set_app(with_probes(health, make_wsgi_app(registry)))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


def with_probes(health: Health, metrics: WSGIApplication) -> WSGIApplication:
    """Return a web application that answers the probes with status 200 or 503, and hands everything else on."""
    probes = {ALIVE: health.alive, READY: health.ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        probe = probes.get(environ.get("PATH_INFO", ""))
        if probe is None:
            return metrics(environ, start_response)
        holds, text = probe()
        start_response("200 OK" if holds else "503 Service Unavailable", list(TEXT))  # which wsgiref changes
        return [f"{text}\n".encode()]

    return answer


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a probe comes every few seconds."""
