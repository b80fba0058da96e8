"""The dashboard's web application. Anyone who can reach it can read runs, and it changes none."""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from archipelago.broker.errors import ArchipelagoError, UnknownRunError
from archipelago.ops.dashboard import metrics
from archipelago.ops.dashboard.page_data import FILES, PAGE, Boards, chart_library, to_json
from archipelago.ops.watch.state_line import state_line

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FRESH = {**HEADERS, "Cache-Control": "no-store"}


def application(boards: Boards, names: Collection[str] = ("localhost",)) -> Starlette:
    """Return the web application.

    Args:
        names: Host names that requests may carry, beside addresses. Other names are refused, so a page of another
            site whose name resolves to this machine cannot read the dashboard.
    """
    library = chart_library()
    service, page = _Service(boards), _file(PAGE / "index.html", FRESH)
    files = [Route(at, _file(PAGE / name, FRESH)) for at, name in FILES.items()]
    kept = {**HEADERS, "Cache-Control": "max-age=86400"}
    routes = [
        *files,
        Route("/plotly.min.js", _file(library, kept)),
        Route("/healthz", service.health),
        Route("/metrics", service.metrics),
        *(Route(at, page) for at in ("/", "/runs/{run}", "/runs/{run}/{tab}", "/runs/{run}/islands/{island}")),
        Route("/api/runs", service.runs),
        Route("/api/runs/{run}/view", service.view),
    ]
    layers = [Middleware(HostCheck, names=names), Middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)]
    return Starlette(routes=routes, middleware=layers, exception_handlers={ArchipelagoError: _refusal})


def _file(path: Path, headers: dict[str, str]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return FileResponse(path, headers=headers)

    return answer


async def _refusal(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, UnknownRunError) else 503
    return JSONResponse({"message": str(error)}, status, headers=FRESH)


class _Service:
    def __init__(self, boards: Boards) -> None:
        self.boards = boards

    async def health(self, request: Request) -> Response:
        """Answer 200 while we serve, with the state of the named run's Redis in the text."""
        fault = self.boards.first.watch.outage() if self.boards.first else None
        return JSONResponse({"serving": True, "redis": fault.what if fault else "answers"}, headers=FRESH)

    async def metrics(self, request: Request) -> Response:
        """Answer with the named run's metrics in Prometheus' text format, or with 503 if they are missing or old.

        While a shard cannot be reached, they are missing: counters without it would seem to go backwards.
        """
        watch = self.boards.first.watch if self.boards.first else None
        fault, view = watch and watch.outage(), watch.latest.view if watch and watch.latest else None
        why = fault.what if fault else "not read yet" if view is None else next(iter(view.unreachable.values()), "")
        if view is None or why:
            return Response(f"{why}\n", 503, headers=FRESH)
        text = await run_in_threadpool(metrics.render, view)
        return Response(text, media_type=metrics.CONTENT_TYPE, headers=FRESH)

    async def runs(self, request: Request) -> Response:
        found = await run_in_threadpool(self.boards.listed)
        return Response(to_json(found), media_type="application/json", headers=FRESH)

    async def view(self, request: Request) -> Response:
        """Answer with state, page and charts as one JSON object; parts that are missing are null.

        The charts are left out if the request has their number (`?charts=N`), so that they are not sent every second.
        """
        board = await run_in_threadpool(self.boards.of, request.path_params["run"])
        number, watch = board.charts_number, board.watch
        parts = {
            "state": to_json(state_line(watch.latest, watch.outage())),
            "page": board.page,
            "charts": "" if request.query_params.get("charts") == str(number) else board.charts,
            "number": str(number),
        }
        text = "{" + ",".join(f'"{name}":{part or "null"}' for name, part in parts.items()) + "}"
        return Response(text, media_type="application/json", headers=FRESH)


# -- the host names under which the dashboard answers -----------------------------------------------------------------


def own_names(host: str) -> frozenset[str]:
    """Return the names of this machine, and the name on which the dashboard listens."""
    node = platform.node().lower()
    return frozenset({"localhost", host.lower(), node, node.partition(".")[0]} - {""})


def is_allowed(header: str, names: Collection[str]) -> bool:
    """Return whether the value of a Host header is an address or one of these names, with or without a port."""
    with suppress(ValueError):  # It is neither a host and a port, nor an address.
        name = (urlsplit(f"//{header.strip()}").hostname or "").removesuffix(".")
        return name in names or bool(ipaddress.ip_address(name))
    return False


class HostCheck:
    """Middleware that refuses requests to other host names.

    The page of another site can make its own name resolve to this machine (DNS rebinding), and could then read the
    dashboard from its visitor's browser. The name in the Host header gives such requests away: it is the other site's.
    An address in place of a name cannot be rebound, so addresses are always accepted.
    """

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
