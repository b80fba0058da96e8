"""The pages of a worker for the probes of an orchestrator: `/healthz` and `/readyz`."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from archipelago.broker.errors import ConfigError

HOST = "127.0.0.1"
ALIVE, READY = "/healthz", "/readyz"
#: A loop that has made no turn for this long hangs. One turn may hold a slow inner step, a compilation, or the merge of
#: a large fragment, so the bound is far above all of them.
HANG_SECONDS: Final = 900.0
#: A connection that says nothing for this long is closed, because each has a thread.
SILENT_SECONDS = 10.0


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


def serve(port: int, host: str, health: Health) -> int:
    """Answer GET /healthz and /readyz on separate threads until the process ends, and return the port.

    The port 0 takes a free one. Raises ConfigError for a port or a host that cannot be used.
    """
    # Only a worker with probes imports this, because it takes a noticeable part of a worker's start.
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    probes = {ALIVE: health.alive, READY: health.ready}

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_SECONDS

        def do_GET(self) -> None:
            """Answer a probe with status 200 or 503."""
            probe = probes.get(self.path, lambda: (False, "there are /healthz and /readyz"))
            holds, text = probe()
            self.send_response(200 if holds else 503 if self.path in probes else 404)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(f"{text}\n".encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a probe comes every few seconds."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    try:
        Server.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = Server((host, port), Handler)
    except (OSError, UnicodeError, OverflowError) as error:  # a part of a host's name may be too long, or a port
        raise ConfigError(
            f"probes cannot be answered on {host:.200}:{port} ({getattr(error, 'strerror', None) or error})",
            "Choose another --probe-port or --probe-host.",
            code="config.value",
        ) from None
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return server.server_port
