"""The host names under which the dashboard answers.

The page of another site can make its own name resolve to this machine (DNS rebinding), and could then read the
dashboard from its visitor's browser. The name in the Host header gives such requests away: it is the other site's. An
address in place of a name cannot be rebound, so addresses are always accepted.
"""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def own_names(host: str) -> frozenset[str]:
    """Return the names of this machine, and the name on which the dashboard listens."""
    node = platform.node().lower()
    return frozenset({"localhost", host.lower(), node, node.partition(".")[0]} - {""})


def is_allowed(header: str, names: Collection[str]) -> bool:
    """Return whether the value of a Host header is an address or one of these names, with or without a port."""
    name = header.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


class HostCheck:
    """Middleware that refuses requests to other host names."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 400."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if not is_allowed(headers.get(b"host", b"").decode("latin-1"), self._names):
                text = "The dashboard does not answer under this host name. Start it with --name NAME to allow it.\n"
                await PlainTextResponse(text, 400)(scope, receive, send)
                return
        await self._app(scope, receive, send)
