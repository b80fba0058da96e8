"""The two ports of an island's leader: its own, and that of JAX's coordinator."""

from __future__ import annotations

import socket
import time

from archipelago.broker.errors import ConfigError

POLL_SECONDS = 0.1


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port, for IPv6 and IPv4. Raises ConfigError (`hosts.port`)."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        pass
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"the leader of this island cannot listen on port {port} ({error.strerror or error})",
            "Choose another port for --coordinator, or end the process that has this one.",
            code="hosts.port",
        ) from None


def await_free(port: int, seconds: float) -> None:
    """Wait until nothing listens on a port. Raises ConfigError (`hosts.port`) if something still does after `seconds`.

    JAX would share the port with the coordinator of an island that has just ended, and hosts would reach either.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            listening(port).close()
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
