"""The dashboard's web application. Anyone who can reach it can read; changing the run needs the token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from archipelago.broker.control import checked_changes
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.ops.dashboard import metrics
from archipelago.ops.dashboard.actions import sentence, stamped
from archipelago.ops.dashboard.assets import FILES, PAGE, chart_library
from archipelago.ops.dashboard.hosts import HostCheck
from archipelago.ops.dashboard.run_list import RunList
from archipelago.ops.dashboard.watcher import Board, Watcher, to_json

BODY_BYTES_MAX = 1 << 16
POLL_SECONDS = 0.2
#: A ping keeps the connection alive through proxies.
PING_SECONDS = 5.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FRESH = {**HEADERS, "Cache-Control": "no-store"}


def application(
    watch: Watcher,
    token: str,
    wall: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
    names: Collection[str] = ("localhost",),
    runs: RunList | None = None,
) -> Starlette:
    """Return the web application.

    Args:
        watch: The watcher that reads the run.
        token: The token that changes need.
        wall: Unix seconds.
        clock: Monotonic seconds.
        names: Host names that requests may carry, beside addresses. Other names are refused, so a page of another
            site whose name resolves to this machine cannot read the dashboard.
        runs: The runs that the page compares; None for this run alone.
    """
    service = _Service(watch, token, wall, clock, runs)
    library = chart_library()
    files = [Route(at, _file(PAGE / name, FRESH)) for at, name in FILES.items()]
    kept = {**HEADERS, "Cache-Control": "max-age=86400"}
    routes = [
        *files,
        Route("/plotly.min.js", _file(library, kept)),
        Route("/healthz", service.health),
        Route("/metrics", service.metrics),
        Route("/api/view", service.view),
        Route("/api/events", service.events),
        Route("/api/runs", service.runs),
        Route("/api/steer", service.steer, methods=["POST"]),
    ]
    named = Middleware(HostCheck, names=names)
    return Starlette(routes=routes, middleware=[named, Middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)])


def _file(path: Path, headers: dict[str, str]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return FileResponse(path, headers=headers)

    return answer


def _answer(status: int, text: str, **more: str) -> Response:
    return JSONResponse({"message": text}, status, headers={**FRESH, **more})


class _Service:
    def __init__(
        self, watch: Watcher, token: str, wall: Callable[[], float], clock: Callable[[], float], runs: RunList | None
    ) -> None:
        self.watch, self.wall, self.clock, self.run_list = watch, wall, clock, runs
        self._token = token.encode()

    @property
    def board(self) -> Board:
        return self.watch.board

    # -- reading ----------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Answer 200 while we serve, with the state of Redis in the text."""
        fault = self.board.fault(self.clock())
        return JSONResponse({"serving": True, "redis": fault.what if fault else "answers"}, headers=FRESH)

    async def metrics(self, request: Request) -> Response:
        """Answer with the run's metrics in Prometheus' text format, or with 503 if they are missing or out of date.

        While a shard cannot be reached, they are missing: counters without it would seem to go backwards.
        """
        fault, view = self.board.fault(self.clock()), self.board.view
        why = fault.what if fault else "not read yet" if view is None else next(iter(view.unreachable.values()), "")
        if view is None or why:
            return Response(f"{why}\n", 503, headers=FRESH)
        text = await run_in_threadpool(metrics.render, view, self.board.round_seconds)
        return Response(text, media_type=metrics.CONTENT_TYPE, headers=FRESH)

    async def view(self, request: Request) -> Response:
        """Answer with page, charts and fault as one JSON object; parts that are missing are null."""
        return Response(self._whole(), media_type="application/json", headers=FRESH)

    def _whole(self) -> str:
        parts = {"page": self.board.page, "charts": self.board.charts, "fault": self._fault()}
        return "{" + ",".join(f'"{name}":{text or "null"}' for name, text in parts.items()) + "}"

    def _fault(self) -> str:
        fault = self.board.fault(self.clock())
        return to_json({"since": fault.since_unix_seconds, "what": fault.what, "more": fault.more}) if fault else "null"

    async def runs(self, request: Request) -> Response:
        """Answer with the runs of this Redis and of the folder."""
        empty = {"own": self.watch.manifest.run, "folder": "", "runs": []}
        found = await run_in_threadpool(self.run_list.newest) if self.run_list else empty
        return Response(to_json(found), media_type="application/json", headers=FRESH)

    async def events(self, request: Request) -> Response:
        """Answer with server-sent events `page`, `charts` and `fault`, each when it changes."""
        headers = {**FRESH, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        sent: dict[str, object] = {"page": 0, "charts": 0, "fault": ""}
        silent_since = self.clock()
        while not self.board.closed:
            now: dict[str, tuple[object, str]] = {
                "page": (self.board.page_number, self.board.page),
                "charts": (self.board.charts_number, self.board.charts),
            }
            fault = self._fault()
            now["fault"] = (fault, fault)
            changed = [name for name, (number, _) in now.items() if number != sent[name]]
            for name in changed:
                sent[name], text = now[name]
                yield f"event: {name}\ndata: {text}\n\n"
            if changed:
                silent_since = self.clock()
            elif self.clock() - silent_since > PING_SECONDS:
                silent_since = self.clock()
                yield "event: ping\ndata: 0\n\n"
            await asyncio.sleep(POLL_SECONDS)

    # -- changing ---------------------------------------------------------------------------------------------------

    async def steer(self, request: Request) -> Response:
        """Change the run's controls, if the token is right. A request without changes only checks the token."""
        if not self._is_authorised(request):
            return _answer(401, "The token is missing or wrong; it was printed when the dashboard started.",
                         **{"WWW-Authenticate": "Bearer"})  # fmt: skip
        try:
            wanted = _changes(await _body(request))
            changes = checked_changes(self.watch.manifest.config, stamped(wanted, self.wall()))
            if not changes:
                return _answer(200, "The token is right.")
            await run_in_threadpool(self.watch.transport.reader.steer, changes)
        except ConfigError as error:
            return _answer(400, str(error))
        except ArchipelagoError as error:
            return _answer(503, str(error))
        except ClientDisconnect:  # The browser closed the connection.
            return _answer(400, "The request was cut off.")
        return _answer(200, sentence(changes))

    def _is_authorised(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token) and kind.lower() == "bearer"


async def _body(request: Request) -> bytes:
    """Return the request's body. Raise ConfigError if it is larger than any valid request."""
    out = b""
    async for part in request.stream():
        out += part
        if len(out) > BODY_BYTES_MAX:
            raise ConfigError(
                "the request is too large", f"Send at most {BODY_BYTES_MAX:,} bytes.", code="config.request"
            )
    return out


def _changes(body: bytes) -> dict[str, str]:
    """Parse `{"changes": {NAME: TEXT}}`. Raise ConfigError for anything else."""
    try:
        found = json.loads(body)["changes"]
        if all(isinstance(name, str) and isinstance(value, str) for name, value in found.items()):
            return dict(found)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise ConfigError(
        "the request cannot be read", 'Send {"changes": {"sync.quorum": "2"}} as JSON.', code="config.request"
    )
